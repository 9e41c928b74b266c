"""What faults cost: python tests/bench_faults.py [--kills 20]

JSON lines. For each phase of a save, how many kills -9 left a complete checkpoint behind; for each kind of
dead, stopped or told process of a run of two targets and two drafters on the CPU, the seconds from the signal
to the end of the run, its exit code and last line, and how many of its processes were left.
"""
import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path

import psutil
import torch
from conftest import finish, make_target, metrics, start, until
from test_faults import CONFIG, index_of, state, write_and_die

import train_dflash as t

WHERE = ("before", "within", "within", "after")
STALL = 8

def saves(phase, kills, out):
    """-> of so many kills in this phase, how many left the newest complete checkpoint to be found."""
    t.write_checkpoint(out, 1, CONFIG, state(1), {"step": 1}, 3)
    newest = good = 0
    for i in range(kills):
        child = os.fork()
        if not child:
            write_and_die(out, i + 2, phase, WHERE[i % len(WHERE)])
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        found = t.find_checkpoint(out)
        step = found and int(found.name[5:])
        whole = found and all((x == step).all() for x in torch.load(found / "trainer.pt")["masters"].values())
        good += bool(killed and whole and step >= newest)
        newest = step or newest
    return good

def notice(tiny, out, who, number):
    """Signal one process of a run -> how its end came."""
    process = start(tiny, out, "--device", "cpu", "--target-gpus", "0,1", "--drafter-gpus", "2,3", "--epochs",
                    500, "--stall-timeout", STALL, "--save-every", 400, "--eval-every", 400)
    until(lambda: len(metrics(out, "train")) > 1)
    tree = psutil.Process(process.pid).children(recursive=True)
    chosen = psutil.Process(process.pid) if who is None else next(
        p for p in tree if "spawn_main" in " ".join(p.cmdline()) and index_of(p) == who)
    begin = time.monotonic()
    chosen.send_signal(number)
    code, _, stderr = finish(process)
    seconds = time.monotonic() - begin
    left = psutil.wait_procs(tree, 5)[1]
    return {"seconds": round(seconds, 1), "exit": code, "left": len(left),
            "said": (stderr.strip().splitlines() or [""])[-1][:200]}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20, help="in each phase of a save")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["HF_DATASETS_CACHE"] = str(home / "datasets")
        for phase in ("tensors", "trainer state", "fsync", "rename", "latest"):
            (home / phase).mkdir()
            good = saves(phase, arguments.kills, home / phase)
            print(json.dumps({"bench": "faults", "what": f"kill -9 in a save: {phase}", "survived": good,
                              "kills": arguments.kills}), flush=True)
        (home / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in t.demo_chats(1, 120)))
        tiny = make_target(home / "target", head_dim=16), home / "chats.jsonl"
        for i, (what, who, number) in enumerate((
                ("target killed", 1, signal.SIGKILL), ("drafter killed", 3, signal.SIGKILL),
                ("first drafter killed", 2, signal.SIGKILL), ("main killed", None, signal.SIGKILL),
                (f"target stopped, --stall-timeout {STALL}", 1, signal.SIGSTOP),
                (f"drafter stopped, --stall-timeout {STALL}", 3, signal.SIGSTOP),
                ("asked to stop (SIGTERM)", None, signal.SIGTERM))):
            came = notice(tiny, home / f"run{i}", who, number)
            print(json.dumps({"bench": "faults", "what": what, **came}), flush=True)
