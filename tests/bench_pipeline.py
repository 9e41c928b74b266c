"""Time the whole trainer: python tests/bench_pipeline.py [--shape 8b] [--target-gpus 0 --drafter-gpus 1]

Makes a Qwen3-like target with random weights and chats of log-normal length (mean 900 tokens, a quarter of
each unsupervised), runs the real train_dflash.py on them for --steps optimizer steps and prints one JSON
line: context tokens a second after warm-up, and milliseconds a step by what they went to. --alone prints what
the parts take by themselves on one GPU: capture of a micro-batch, the drafter's graph, the optimizer.
--starts prints the seconds from spawning the processes to the end of step 1, with nothing compiled yet and
again; each run is killed there.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from bench_step import forward_backward

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_dflash as t

ROOT = Path(__file__).parent.parent

WIDE = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
MODELS = {
    "8b": {**WIDE, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
           "num_attention_heads": 32, "vocab_size": 151936},
    "27b": {**WIDE, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
            "num_attention_heads": 40, "vocab_size": 248320},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 264}}
FLAGS = {"8b": [], "27b": ["--heads", "32"],
         "tiny": "--tokens 512 --anchors 32 --block 8 --layers 2 --max-length 256".split()}

def make_target(folder, shape):
    """A random model of the shape with the byte tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM._from_config(Qwen3Config(**MODELS[shape]), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    t.byte_tokenizer().save_pretrained(folder)

def make_chats(path, count, mean):
    draw = np.random.default_rng(0)
    lengths = np.exp(draw.normal(0, 0.8, count))
    lengths = np.maximum(16, lengths / lengths.mean() * mean).astype(int)
    with open(path, "w") as f:
        for n in lengths:
            text = "".join(map(chr, draw.integers(97, 123, n)))
            f.write(json.dumps({"messages": [{"role": "user", "content": text[: n // 4]},
                                             {"role": "assistant", "content": text[n // 4:]}]}) + "\n")

def alone(folder, chats, cfg, accumulation):
    """Milliseconds of capture, graph and optimizer, each alone, on the run's own micro-batches."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cuda, tokenizer = device == "cuda", t.load_tokenizer(folder)
    text, _ = t.load_config(folder)
    taps = t.taps_of(cfg, text.num_hidden_layers)
    config, documents = t.drafter_config(cfg, text, taps, 259), t.prepare(cfg, tokenizer, text.vocab_size)
    batches = [t.micro_batch(documents, cfg, m) for m in range(8)]
    model = t.load_target(folder, t.compute_dtype(device), max(taps) + 1).to(device)
    base, layers, ends = model.base_model, t.decoder_layers(model.base_model), t.frozen_ends(model)
    job = SimpleNamespace(cfg=cfg, config=config)
    features = t.feature_buffer(job, device)
    mask_of = t.fast_reading(base, layers, taps, job, features, print) if cuda else None
    drafter = t.Drafter(config)
    drafter.initialise(0)
    parameters = list(drafter.to(device).parameters())
    for p in parameters:
        p.grad = torch.zeros_like(p)
    ends["rope"] = t.rotary(torch.arange(cfg.max_length + cfg.block, device=device), drafter.theta, drafter.h)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    graph = t.drafter_step
    if cuda:
        x = t.graph_inputs(batches[0], device)
        drafter.options = t.fast_attention(drafter, x["start"], x["anchor"], cfg.tokens, print)
        graph = torch.compile(graph, **t.GRAPH)

    ms = {}
    for name, function in (("capture", lambda b: t.capture(base, layers, taps, b, features, mask_of)),
                           ("graph", lambda b: forward_backward(graph, drafter, ends, features, b)),
                           ("optimizer", lambda b: optimizer.step())):
        for batch in batches[:2]:
            function(batch)
        torch.cuda.synchronize() if cuda else None
        begin = time.perf_counter()
        for batch in batches * 2:
            function(batch)
        torch.cuda.synchronize() if cuda else None
        ms[name] = 1e3 * (time.perf_counter() - begin) / (2 * len(batches))
    tokens = statistics.mean(b["tokens_used"] for b in batches)
    whole = ms["capture"] + ms["graph"] + ms["optimizer"] / accumulation
    return {**{f"{k}_ms": round(v, 1) for k, v in ms.items()}, "tokens_a_micro_batch": round(tokens),
            "colocated_tokens_per_s": round(tokens / whole * 1e3),
            "target_tokens_per_s": round(tokens / ms["capture"] * 1e3),
            "drafter_tokens_per_s": round(tokens / (whole - ms["capture"]) * 1e3)}

def command_of(arguments, target, chats, out):
    return [sys.executable, str(ROOT / "train_dflash.py"), "--target", str(target), "--data", str(chats),
            "--out", str(out), "--eval-fraction", "0", "--max-steps", str(arguments.steps),
            "--accumulation", str(arguments.accumulation), "--log-every", "4", *FLAGS[arguments.shape],
            "--target-gpus", arguments.target_gpus, "--drafter-gpus", arguments.drafter_gpus,
            *([] if torch.cuda.is_available() else ["--device", "cpu"])]

def seconds_to_step_1(rows):
    """From "start", which is written before the processes are spawned, to the line of step 1, or None."""
    times = {r["kind"]: r["time"] for r in reversed(rows)}  # the first of each kind
    return round(times["train"] - times["start"], 1) if "train" in times else None

def start(arguments, target, chats, out):
    """The seconds of a run that is killed once step 1 is told."""
    with open(out.with_suffix(".log"), "w") as log:
        command = command_of(arguments, target, chats, out)
        run = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while (seconds := seconds_to_step_1(t.read_metrics(out))) is None:
            if run.poll() is not None:
                sys.exit(f"left with {run.returncode}\n{Path(log.name).read_text()[-3000:]}")
            time.sleep(0.1)
        run.kill()
        run.wait()
    return seconds

def pipeline(arguments, target, chats, out):
    command = command_of(arguments, target, chats, out)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{' '.join(command)}\nleft with {result.returncode}\n{result.stdout}\n"
                 f"{result.stderr[-3000:]}")
    rows = t.read_metrics(out)
    lines = [r for r in rows if r["kind"] == "train"]
    late = lines[2:]  # the first step and the rest of the first stretch are warm-up
    mean = {k: round(statistics.mean(r[k] for r in late), 1) for k in late[0]
            if k.endswith("_ms") or k in ("ms", "mem_gib")}
    said = [line for line in result.stdout.splitlines() if re.search("read|graph|attention", line)]
    return {"target_gpus": arguments.target_gpus, "drafter_gpus": arguments.drafter_gpus,
            "accumulation": arguments.accumulation, "steps": arguments.steps,
            "tokens_per_s": round(statistics.mean(r["tokens_per_s"] for r in late)), **mean,
            "spawn_to_step_1_s": seconds_to_step_1(rows), "said": said}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="8b", choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--target-gpus", default="0")
    parser.add_argument("--drafter-gpus", default="0")
    parser.add_argument("--alone", action="store_true", help="the parts by themselves")
    parser.add_argument("--starts", action="store_true", help="seconds to the end of step 1, cold and again")
    parser.add_argument("--work", default="", help="folder of the target and the runs; none: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(arguments.work or temporary)
        work.mkdir(exist_ok=True, parents=True)
        target, chats = work / f"target-{arguments.shape}", work / "chats.jsonl"
        if not target.exists():
            make_target(target, arguments.shape)
            make_chats(chats, 4500, 900 if arguments.shape != "tiny" else 120)
        if arguments.alone:
            given = ["--target", str(target), "--data", str(chats), "--eval-fraction", "0"]
            values = alone(target, chats, t.parse(given + FLAGS[arguments.shape])[0], arguments.accumulation)
        elif arguments.starts:
            # what was killed may still be writing
            with tempfile.TemporaryDirectory(dir=work, ignore_cleanup_errors=True) as folder:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # FlashAttention's follows
                cold, again = (start(arguments, target, chats, Path(folder) / name)
                               for name in ("cold", "again"))
            values = {"spawn_to_step_1_cold_s": cold, "spawn_to_step_1_again_s": again,
                      "again_of_cold": round(again / cold, 3)}
        else:
            name = f"run-{arguments.target_gpus}-{arguments.drafter_gpus}-{time.time_ns()}"
            values = pipeline(arguments, target, chats, work / name)
        print(json.dumps({"bench": "pipeline", "shape": arguments.shape, "alone": arguments.alone, **values,
                          "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                          "torch": str(torch.__version__)}), flush=True)
