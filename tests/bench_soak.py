"""A long run under a killer: python tests/bench_soak.py [--steps 2000 --save-every 125]

The demo on the CPU, lengthened and supervised, with the ledgers of rate and lifetime lifted. After each new
checkpoint its trainer (main or a worker) is killed with -9 at a random moment; it must come to its end by
itself, with the bits of the run that nobody disturbed. One JSON line.
"""
import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from conftest import masters, metrics, workers_of
from supervise_kit import SUPERVISE

TRAINER = str(SUPERVISE.with_name("train_dflash.py"))

def newest(out):
    latest = out / "checkpoints" / "latest"
    return int(latest.read_text()[5:]) if latest.exists() else 0

def soak(home, steps, save_every, draw):
    demo = [sys.executable, TRAINER, "--device", "cpu", "--max-steps", str(steps), "--save-every",
            str(save_every), "--eval-every", str(5 * save_every)]
    calm, out = home / "calm", home / "run"
    begin = time.monotonic()
    subprocess.run([*demo, "--out", str(calm)], check=True, capture_output=True)
    undisturbed, begin, kills, seen = time.monotonic() - begin, time.monotonic(), 0, 0
    process = subprocess.Popen(
        [sys.executable, str(SUPERVISE), "--run-dir", str(out), "--backoff", "0.2", "--backoff-cap", "0.2",
         "--rate", "1000000", "--lifetime", "1000000", "--", *demo],
        stdout=subprocess.DEVNULL)
    while process.poll() is None:
        time.sleep(0.02)
        if newest(out) <= seen or newest(out) >= steps:
            continue
        seen = newest(out)
        time.sleep(draw.random())
        leader = json.loads((out / "state.json").read_text()).get("leader")
        if leader and psutil.pid_exists(leader):
            main = psutil.Process(leader)
            draw.choice([main, *workers_of(leader)]).send_signal(signal.SIGKILL)
            kills += 1
    host = [row["host_gib"] for row in metrics(calm, "train")]
    same = all(torch.equal(v, masters(calm)[k]) for k, v in masters(out).items())
    return {"steps": steps, "exit": process.returncode, "kills": kills, "same_bits": same,
            "host_gib": [host[len(host) // 4], host[-1]],  # undisturbed, a quarter in and at the end
            "seconds": round(time.monotonic() - begin), "undisturbed_seconds": round(undisturbed)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=125)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        values = soak(Path(folder), arguments.steps, arguments.save_every, random.Random(arguments.seed))
    print(json.dumps({"bench": "soak", **values, "torch": str(torch.__version__)}), flush=True)
