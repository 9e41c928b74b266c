"""Time the target's capture: python tests/bench_capture.py [--shape 8b tiny]

An 8B-like Qwen3 with random weights, made on the spot, taps 1 9 17 25 33. One JSON line each for
transformers' own `output_hidden_states=True` (the whole model, 4 x 3,072 tokens), for the trainer's
capture of these documents, and for its capture of the ragged documents of shape P (real tokens a second).
`error` is the mean relative difference of the features from transformers' own.
"""
import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from bench_pipeline import MODELS
from bench_step import SHAPES, batch_of

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_dflash as t


def timed(function, cuda, repeats):
    """Milliseconds of function(), called again and again as training calls it: without waiting for the GPU
    in between. Median of three rounds, after one that warms up."""
    times = []
    for _ in range(4):
        torch.cuda.synchronize() if cuda else None
        begin = time.perf_counter()
        for _ in range(repeats):
            function()
        torch.cuda.synchronize() if cuda else None
        times.append(1e3 * (time.perf_counter() - begin) / repeats)
    return statistics.median(times[1:])

def packed(lengths, S, V, draw):
    used, ends = sum(lengths), np.cumsum(lengths)
    begin = np.concatenate([np.repeat(ends - lengths, lengths), np.arange(used, S)])
    return {"lengths": np.array(lengths), "tokens_used": used, "positions": np.arange(S) - begin,
            "ids": draw.integers(0, V, S)}

def measure(name, repeats):
    cuda = torch.cuda.is_available()
    device, draw = "cuda" if cuda else "cpu", np.random.default_rng(0)
    config, longest = transformers.Qwen3Config(**MODELS[name]), 3072 if name == "8b" else 96
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=t.compute_dtype(device)).eval()
    n, V, D = config.num_hidden_layers, config.vocab_size, config.hidden_size
    taps = t.default_taps(n, 5 if name == "8b" else 2)
    four = packed([longest] * 4, 4 * longest, V, draw)
    ids = torch.from_numpy(four["ids"]).view(4, longest).to(device)

    def tell(what, ms, tokens, **more):
        print(json.dumps({
            "bench": "capture", "shape": name, "what": what, "ms": round(ms, 1),
            "tokens_per_s": round(tokens / ms * 1e3), "torch": str(torch.__version__),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "transformers": transformers.__version__,
            "peak_gib": round(t.gib(torch.cuda.max_memory_allocated()), 2) if cuda else None, **more}),
            flush=True)
        torch.cuda.reset_peak_memory_stats() if cuda else None

    with torch.no_grad():
        hidden = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        reference = torch.cat([hidden[k + 1].flatten(0, 1) for k in taps], -1).float()
        del hidden
        ms = timed(lambda: model(input_ids=ids, use_cache=False, output_hidden_states=True), cuda, repeats)
    tell("output_hidden_states=True, 4 documents", ms, 4 * longest)
    base = model.base_model
    base.layers = base.layers[: max(taps) + 1]
    base.config.num_hidden_layers = max(taps) + 1
    lengths = batch_of(SHAPES["P"], draw)[0]["positions"] if name == "8b" else None
    ragged = packed([90, 7, 41, 128, 60], 384, V, draw) if lengths is None else packed(
        np.diff([*np.flatnonzero(lengths == 0), len(lengths)])[:18].tolist(), len(lengths), V, draw)
    for what, batch in (("capture, 4 documents", four), ("capture, ragged documents", ragged)):
        S = len(batch["ids"])
        features, lines = torch.zeros(S, len(taps) * D, dtype=reference.dtype, device=device), []
        features = features.to(t.compute_dtype(device))
        job = SimpleNamespace(cfg=t.Config(tokens=S, max_length=longest), config={"vocab_size": V})
        begin = time.perf_counter()
        mask_of = t.fast_reading(base, base.layers, taps, job, features, lines.append) if cuda else None
        warm = time.perf_counter() - begin
        ms = timed(lambda: t.capture(base, base.layers, taps, batch, features, mask_of), cuda, repeats)
        error = (features - reference).norm(dim=-1) / reference.norm(dim=-1) if batch is four else None
        tell(what, ms, batch["tokens_used"], error=None if error is None else round(error.mean().item(), 5),
             compile_s=round(warm, 1), said=lines[-1] if lines else None)
        base.set_attn_implementation("sdpa")
        for layer in base.layers:
            layer.__dict__.pop("forward", None)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="8b", choices=["8b", "tiny"])
    parser.add_argument("--repeats", type=int, default=6)
    arguments = parser.parse_args()
    measure(arguments.shape, arguments.repeats)
