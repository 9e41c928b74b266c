"""Time the plan of a big data set: python tests/bench_plan.py [--rows 1100000]

Packs documents of log-normal length into micro-batches of 16,384 tokens, as each start of a run does. One
JSON line: seconds, micro-batches, how full they are, memory.
"""
import argparse
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_dflash as t

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_100_000)
    arguments = parser.parse_args()
    lengths = np.exp(np.random.default_rng(0).normal(6.5, 0.8, arguments.rows))
    lengths = lengths.clip(16, 3072).astype(np.int64)
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    order, bounds = t.pack(lengths, np.arange(len(lengths)), 16384, 0)
    seconds = time.perf_counter() - begin
    assert len(np.unique(order)) == len(lengths)
    print(json.dumps({
        "bench": "plan", "rows": len(lengths), "seconds": round(seconds, 2), "micro_batches": len(bounds) - 1,
        "full": round(lengths.sum() / (16384 * (len(bounds) - 1)), 5),
        "gib": round(t.gib(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss), 2),
        "gib_before": round(t.gib(1024 * before), 2)}))
