"""A real small model, from prompts to decoding:

    python tests/bench_smollm2.py MODEL OUT [--block 8 --steps 6000 --replies 3 --prompts 16]

MODEL: the folder that make_smollm2.py wrote. The target answers the training prompts of
smollm2-chats.jsonl.gz `--replies` times more, sampled; a drafter is trained on the stored greedy replies and
these; held-out prompts are decoded with it, chain and trees. Each part goes on where an earlier call left it
(--limit ends one in order). One JSON line a part. `--shape tiny`: a few prompts, steps, tokens, for a CPU.
"""
import argparse
import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_dflash as t

CHATS = Path(__file__).parent / "smollm2-chats.jsonl.gz"
TRAINER = [sys.executable, str(Path(t.__file__).resolve())]

def show(part, **values):
    print(json.dumps({"bench": "smollm2", "part": part, **values, "torch": str(torch.__version__),
                      "transformers": transformers.__version__}), flush=True)

def call(flags, deadline):
    """The trainer with these flags, stopped in order at the deadline -> its exit code, seconds."""
    begin = time.monotonic()
    process = subprocess.Popen([*TRAINER, *map(str, flags)])
    try:
        process.wait(max(1, deadline - begin))
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
    return process.returncode, round(time.monotonic() - begin)

def write_prompts(path, copies, limit):
    """The prompts that are not held out, each `copies` times: held-out chats keep one greedy reply."""
    with gzip.open(CHATS, "rt") as f:
        prompts = [json.loads(line)["messages"][0]["content"] for line in f][:limit]
    kept = [p for p in prompts if not t.is_held_out(t.prompt_key(p), t.Config().eval_fraction)]
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in kept * copies))

def main(arguments):
    tiny, out, model = arguments.shape == "tiny", arguments.out, arguments.model
    deadline = time.monotonic() + arguments.limit
    out.mkdir(parents=True, exist_ok=True)
    prompts, replies, run = out / "prompts.jsonl", out / "replies.jsonl", out / f"block-{arguments.block}"
    if not prompts.exists():
        write_prompts(prompts, arguments.replies, 40 if tiny else None)
    if arguments.replies:
        code, seconds = call([
            "--regenerate", prompts, "--target", model, "--replies", replies, "--temperature", 0.7,
            "--max-length", 1024, "--new-tokens", 16 if tiny else 256], deadline)
        show("replies", exit=code, seconds=seconds, lines=replies.read_bytes().count(b"\n"))
        if code:
            return
    small = ["--tokens", 256, "--anchors", 16, "--layers", 1, "--max-length", 256] if tiny else [
        "--tokens", 16384, "--anchors", 2048, "--max-length", 2048]
    third = arguments.steps // 3
    code, seconds = call([
        "--target", model, "--data", CHATS, *[replies] * bool(arguments.replies), "--out", run,
        "--block", arguments.block, "--loss", "dpace", "--max-steps", arguments.steps, "--eval-every", third,
        "--save-every", third, "--log-every", max(1, third // 20), "--keep", 1, *small], deadline)
    lines = t.read_metrics(run)
    for row in (row for row in lines if row["kind"] == "eval"):
        show("training", block=arguments.block, step=row["step"], **{k: row[k] for k in (
            "loss", "accept_len", "accept_len_whole", "everywhere", "walk", "tree_16", "tree_32", "tree_64")})
    trained = [row for row in lines if row["kind"] == "train"]
    early, late = trained[len(trained) // 4], trained[-1]
    show("rate", exit=code, seconds=seconds, step=late["step"],
         growth={k: [early[k], late[k]] for k in ("step", "mem_gib", "host_gib")}, **{k: late[k] for k in (
             "ms", "data_ms", "wait_ms", "capture_ms", "graph_ms", "optimizer_ms", "tokens_per_s")})
    if code:
        return
    cfg = t.Config(evaluate=str(run), tree=32, num_prompts=2 if tiny else arguments.prompts,
                   new_tokens=16 if tiny else 256)
    stop = torch.multiprocessing.get_context("spawn").RawValue("i", 0)
    begin = time.monotonic()
    code, reason, values = t.evaluate(cfg, {"evaluate", "tree"}, stop)
    show("decoding", block=arguments.block, exit=code, reason=reason, values=values,
         seconds=round(time.monotonic() - begin))

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--replies", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--limit", type=float, default=1e6, help="seconds after which a part ends in order")
    parser.add_argument("--shape", choices=("full", "tiny"), default="full")
    main(parser.parse_args())
