"""Time one drafter micro-batch, forward + backward: python tests/bench_step.py [--shape A A8 P S tiny cost]

One JSON line a shape. Shapes are those of common 8B and 27B targets; random weights and tokens, fp32 masters
and gradients, bf16 compute. The host runs ahead of the GPU as it does in training: ms is the median distance
between CUDA events. cold_s is the first call with an empty compile cache, warm_s the first after forgetting
all graphs but not the cache. `cost` varies context tokens, anchors, vocabulary and layers around shape P.
"""
import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_dflash as t

BIG = {"D": 4096, "H": 32, "G": 8, "h": 128, "ffn": 12288, "V": 151936, "N": 2048, "B": 16, "L": 5}
SHAPES = {
    "A": {**BIG, "lengths": [3072] * 4},
    "A8": {**BIG, "lengths": [8192]},
    "P": {**BIG, "lengths": "lognormal", "S": 16384},
    "S": {**BIG, "D": 5120, "ffn": 17408, "V": 248320, "lengths": [40064]},
    "tiny": {"D": 64, "H": 4, "G": 2, "h": 16, "ffn": 128, "V": 256, "N": 64, "B": 8, "L": 5,
             "lengths": [256, 200, 56]}}
COST = {f"{key} {value}": {**SHAPES["P"], key: value} for key, values in {
    "S": (4096, 8192, 32768), "N": (512, 1024, 4096), "V": (32768, 65536, 262144), "L": (1, 3, 8)}.items()
    for value in values}

def batch_of(shape, draw):
    """A micro-batch whose documents are unsupervised in their first quarter -> (arrays, context tokens)."""
    lengths = shape["lengths"]
    if lengths == "lognormal":
        lengths = np.exp(draw.normal(0, 0.8, shape["S"] * 18 // 16384))
        lengths = np.maximum(16, lengths / lengths.sum() * shape["S"] * 0.995).astype(int).tolist()
    S, at = shape.get("S") or sum(lengths), 0
    begin, end, supervised = np.arange(S), np.arange(S) + 1, np.zeros(S, bool)
    for n in lengths:
        begin[at: at + n], end[at: at + n], supervised[at + n // 4: at + n] = at, at + n, True
        at += n
    ids = draw.integers(0, shape["V"], S)
    blocks = t.blocks_of(ids, supervised, begin, end, shape["N"], shape["B"], draw)
    return {"positions": np.arange(S) - begin, **blocks}, S

def config_of(shape):
    return {"hidden_size": shape["D"], "intermediate_size": shape["ffn"], "num_hidden_layers": shape["L"],
            "num_attention_heads": shape["H"], "num_key_value_heads": shape["G"], "head_dim": shape["h"],
            "rms_norm_eps": 1e-6, "rope_theta": 1e6, "layer_types": ["full_attention"] * shape["L"],
            "block_size": shape["B"], "vocab_size": shape["V"],
            "dflash_config": {"target_layer_ids": [0, 1, 2, 3, 4]}}

def matmul_tflops():
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    for mark in marks:
        mark.record()
        a @ b
    torch.cuda.synchronize()
    return 2 * 8192**3 / statistics.median(x.elapsed_time(y) for x, y in itertools.pairwise(marks)) / 1e9

def forward_backward(step, drafter, ends, features, batch):
    """What the trainer does with one micro-batch once its features are there."""
    arrays = t.graph_inputs(batch, features.device.type).values()
    rows, gradient, _ = step(drafter, ends, features, *arrays, 7, "dflash", 7.0)
    edge = torch.autograd.graph.get_gradient_edge(rows)
    del rows
    torch.autograd.backward(edge, gradient)

def measure(name, shape, device, repeats):
    draw, cuda, config = np.random.default_rng(0), device == "cuda", config_of(shape)
    dtype = t.compute_dtype(device)
    first, S = batch_of(shape, draw)
    drafter = t.Drafter(config).to(device)
    with torch.device(device):
        torch.manual_seed(0)
        ends = {"embed": torch.randn(shape["V"], shape["D"], dtype=dtype), "embed_scale": 1.0, "softcap": 0.0,
                "rope": t.rotary(torch.arange(S + shape["B"]), 1e6, shape["h"]),
                "head": torch.randn(shape["V"], shape["D"], dtype=dtype) / 64}
        features = torch.randn(S, 5 * shape["D"], dtype=dtype)
    for p in drafter.parameters():
        p.grad = torch.zeros_like(p)
    step = torch.compile(t.drafter_step, **t.GRAPH) if cuda else t.drafter_step

    def first_call():
        torch._dynamo.reset()
        begin = time.perf_counter()
        if cuda:
            x = t.graph_inputs(first, device)
            drafter.options = t.fast_attention(drafter, x["start"], x["anchor"], S,
                                               partial(print, file=sys.stderr))
            torch._dynamo.utils.counters.clear()
        forward_backward(step, drafter, ends, features, first)
        torch.cuda.synchronize() if cuda else None
        return time.perf_counter() - begin

    cold = first_call()
    torch._dynamo.utils.counters.clear()
    warm = first_call()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    batches, marks = [batch_of(shape, draw)[0] for _ in range(repeats)], []
    for batch in batches:
        forward_backward(step, drafter, ends, features, batch)
        marks.append(torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter())
        marks[-1].record() if cuda else None
    torch.cuda.synchronize() if cuda else None
    times = [a.elapsed_time(b) if cuda else 1e3 * (b - a) for a, b in itertools.pairwise(marks)]
    seconds, rows = statistics.median(times) / 1e3, shape["N"] * shape["B"]
    visible = sum(int((b["anchor"] - b["start"]).sum()) * shape["B"] + b["blocks"] * shape["B"] ** 2
                  for b in batches) // repeats
    flops = t.step_flops(config, S, shape["N"], shape["N"] * (shape["B"] - 1), visible * shape["L"])
    matmul = matmul_tflops() if cuda else None
    print(json.dumps({
        "bench": "step", "shape": name, "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": str(torch.__version__), "attention": drafter.options["BACKEND"],
        "ms": round(seconds * 1e3, 1), "spread_ms": round(max(times) - min(times), 1),
        "context_tokens_per_s": round(S / seconds),
        "draft_rows_per_s": round(rows / seconds), "tflops": round(flops / seconds / 1e12, 1),
        "matmul_tflops": matmul and round(matmul, 1),
        "of_matmul": matmul and round(flops / seconds / 1e12 / matmul, 3),
        "peak_gib": round(t.gib(torch.cuda.max_memory_allocated()), 2) if cuda else None,
        "reserved_gib": round(t.gib(torch.cuda.max_memory_reserved()), 2) if cuda else None,
        "cold_s": round(cold, 1), "warm_s": round(warm, 1), "micro_batches": repeats,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}), flush=True)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", nargs="+", default=["A", "A8", "P", "S"], choices=[*SHAPES, "cost", *COST])
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": cache,
                       "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
                       "PYTORCH_CUDA_ALLOC_CONF": t.ALLOCATOR}  # as the trainer's processes have it
        names = [n for name in arguments.shape for n in (COST if name == "cost" else [name])]
        for shape_name in names:
            measure(shape_name, (SHAPES | COST)[shape_name], "cuda" if torch.cuda.is_available() else "cpu",
                    arguments.repeats)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
