"""Time one drafter micro-batch, forward + backward: python tests/bench_step.py [--shape A A8 P S tiny]

One JSON line a shape. Shapes are those of common 8B and 27B targets; random weights and tokens, fp32 masters
and gradients, bf16 compute. `cold` is the first call in this process; run it again with the same
TORCHINDUCTOR_CACHE_DIR for `warm`.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_dflash as t

BIG = {"D": 4096, "H": 32, "G": 8, "h": 128, "ffn": 12288, "V": 151936, "N": 2048, "B": 16}
SHAPES = {
    "A": {**BIG, "lengths": [3072] * 4},
    "A8": {**BIG, "lengths": [8192]},
    "P": {**BIG, "lengths": "lognormal", "S": 16384},
    "S": {**BIG, "D": 5120, "ffn": 17408, "V": 248320, "lengths": [40064]},
    "tiny": {
        "D": 64,
        "H": 4,
        "G": 2,
        "h": 16,
        "ffn": 128,
        "V": 256,
        "N": 64,
        "B": 8,
        "lengths": [256, 200, 56],
    },
}


def documents(shape, draw):
    """Lengths of the documents of a micro-batch and its context tokens S."""
    if shape["lengths"] != "lognormal":
        return shape["lengths"], sum(shape["lengths"])
    lengths = np.exp(draw.normal(0, 0.8, 18))
    lengths = np.maximum(16, lengths / lengths.sum() * shape["S"] * 0.995).astype(int)
    return lengths.tolist(), shape["S"]


def batch_of(shape, draw):
    """A micro-batch whose documents are unsupervised in their first quarter."""
    lengths, S = documents(shape, draw)
    begin, end, supervised, at = np.arange(S), np.arange(S) + 1, np.zeros(S, bool), 0
    for n in lengths:
        begin[at : at + n], end[at : at + n], supervised[at + n // 4 : at + n] = at, at + n, True
        at += n
    ids = draw.integers(0, shape["V"], S)
    return {
        "positions": np.arange(S) - begin,
        **t.blocks_of(ids, supervised, begin, end, shape["N"], shape["B"], draw),
    }, S


def config_of(shape):
    return {
        "hidden_size": shape["D"],
        "intermediate_size": shape["ffn"],
        "num_hidden_layers": 5,
        "num_attention_heads": shape["H"],
        "num_key_value_heads": shape["G"],
        "head_dim": shape["h"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "layer_types": ["full_attention"] * 5,
        "block_size": shape["B"],
        "vocab_size": shape["V"],
        "dflash_config": {"target_layer_ids": [0, 1, 2, 3, 4]},
    }


def matmul_tflops():
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        a @ b
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * 8192**3 / statistics.median(times) / 1e9


def measure(name, device, repeats):
    shape, draw = SHAPES[name], np.random.default_rng(0)
    dtype = t.compute_dtype(device)
    config = config_of(shape)
    drafter = t.Drafter(config)
    with torch.device(device):
        torch.manual_seed(0)
        drafter.to(device)
        ends = {
            "embed": torch.randn(shape["V"], shape["D"], dtype=dtype),
            "embed_scale": 1.0,
            "softcap": 0.0,
            "head": torch.randn(shape["V"], shape["D"], dtype=dtype) / 64,
        }
        first, S = batch_of(shape, draw)
        features = torch.randn(S, 5 * shape["D"], dtype=dtype)
    for p in drafter.parameters():
        p.grad = torch.zeros_like(p)
    step = (
        torch.compile(t.drafter_step, fullgraph=True, dynamic=False) if device == "cuda" else t.drafter_step
    )
    cuda = device == "cuda"

    def once(batch):
        x = t.to_device(batch, device)
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        rows, gradient, _ = step(
            drafter,
            ends,
            features,
            x["positions"],
            x["start"],
            x["anchor"],
            x["tokens"],
            x["valid"],
            7,
            "dflash",
            7.0,
        )
        rows.backward(gradient)
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    cold = once(first)
    once(first)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    batches = [batch_of(shape, draw)[0] for _ in range(repeats)]
    times = [once(b) for b in batches]
    seconds = statistics.median(times)
    visible = (
        sum(
            int((b["anchor"] - b["start"]).sum()) * shape["B"] + b["blocks"] * shape["B"] ** 2
            for b in batches
        )
        // repeats
    )
    rows = shape["N"] * shape["B"]
    flops = t.step_flops(config, S, shape["N"], shape["N"] * (shape["B"] - 1), visible * 5)
    matmul = matmul_tflops() if cuda else None
    print(
        json.dumps(
            {
                "bench": "step",
                "shape": name,
                "device": torch.cuda.get_device_name() if cuda else "cpu",
                "torch": str(torch.__version__),
                "ms": round(seconds * 1e3, 1),
                "spread_ms": round((max(times) - min(times)) * 1e3, 1),
                "context_tokens_per_s": round(S / seconds),
                "draft_rows_per_s": round(rows / seconds),
                "tflops": round(flops / seconds / 1e12, 1),
                "matmul_tflops": matmul and round(matmul, 1),
                "of_matmul": matmul and round(flops / seconds / 1e12 / matmul, 3),
                "peak_gib": round(t.gib(torch.cuda.max_memory_allocated()), 2) if cuda else None,
                "reserved_gib": round(t.gib(torch.cuda.max_memory_reserved()), 2) if cuda else None,
                "first_call_s": round(cold, 1),
                "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", nargs="+", default=["A", "A8", "P", "S"], choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=12)
    arguments = parser.parse_args()
    for shape_name in arguments.shape:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        measure(shape_name, "cuda" if torch.cuda.is_available() else "cpu", arguments.repeats)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
