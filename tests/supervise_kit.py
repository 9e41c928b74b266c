"""What the tests of supervise.py share: a toy trainer that misbehaves, a scripted nvidia-smi, a starter.

    @case(13)                                               the numbers of the fault table that a test covers
    def test_silent_hang(tmp_path):
        with supervised(tmp_path, "--hang 0.6 --max-no-gain 1", toy("--at 5", HANG)) as run:
            assert run.ended() == 93
            assert "no progress" in run.event("hang")["text"]

The toy counts steps (`python tests/supervise_kit.py --steps 20 --at 5 'os._exit(3)'`); --at N CODE runs
Python of the test's choice at a step, so that no new fault needs a new flag.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUPERVISE = ROOT / "supervise.py"
CASES = {*range(1, 9), 11, 12, 13, 15, 16, 17, 20, 21, 23, 24, 25, 28, 29, 30, *range(32, 40), *range(41, 47)}


def case(*numbers):
    """Marks a test with the numbers of the fault table that it covers."""

    def mark(function):
        function.cases = numbers
        return function

    return mark


def covered_cases():
    """-> {case number: [tests]} over all tests/test_supervise*.py, read without importing them"""
    found = {}
    for file in sorted((ROOT / "tests").glob("test_supervise*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            for d in getattr(node, "decorator_list", []):
                if isinstance(d, ast.Call) and getattr(d.func, "id", "") == "case":
                    for number in d.args:
                        found.setdefault(number.value, []).append(f"{file.name}::{node.name}")
    return found


# ------------------------------------------------------------------------------------------ the toy trainer

RAISE = "raise RuntimeError('boom at ' + str(step))"
HANG = "time.sleep(600)"
SPIN = "while True: pass"
OOM = (
    "raise type('OutOfMemoryError', (RuntimeError,), {'__module__': 'torch'})('CUDA out of memory. Tried to "
    "allocate 298.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 95.31 GiB is free.')"
)


def toy(*arguments):
    """-> the command of a toy trainer. Options come as words ("--at 5"), CODE as it is."""
    words = [w for a in arguments for w in (a.split() if a.startswith("--") else [a])]
    return [sys.executable, "-S", "-u", __file__, *words]


def toy_main(argv):
    """Steps 1 to --steps, a line each, a heartbeat if asked; what goes wrong, and when, is said by flags."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pace", type=float, default=0.01, help="seconds a step")
    parser.add_argument(
        "--at",
        nargs=2,
        action="append",
        default=[],
        metavar=("STEP", "CODE"),
        help="run CODE there (0: before the first step); names: step, beat, os, sys, time, signal, "
        "subprocess",
    )
    parser.add_argument(
        "--attempts", type=int, default=10**9, help="misbehave in that many attempts, then be good"
    )
    parser.add_argument("--beat", action="store_true", help="write heartbeats")
    parser.add_argument("--mute", action="store_true", help="print no steps")
    parser.add_argument("--resume", action="store_true", help="go on from the step saved in the run folder")
    parser.add_argument("--save-every", type=int, default=1)
    parser.add_argument(
        "--on-term", choices=("save", "ignore", "die"), default="save", help="save: checkpoint, exit 75"
    )
    parser.add_argument("--save-seconds", type=float, default=0.0, help="what that checkpoint takes")
    cfg = parser.parse_args(argv)
    home = Path(os.environ.get("SUPERVISE_RUN_DIR", "."))
    saved, attempt = home / "toy.saved", int(os.environ.get("SUPERVISE_ATTEMPT", "1"))
    asked = []
    if cfg.on_term != "die":
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    actions = [(int(at), code) for at, code in cfg.at] if attempt <= cfg.attempts else []

    def beat(phase, step):
        path = Path(os.environ["SUPERVISE_HEARTBEAT"])
        beside = path.with_suffix(".new")
        beside.write_text(
            json.dumps(
                {"step": step, "micro_batches": step, "phase": phase, "time": time.time(), "pid": os.getpid()}
            )
        )
        beside.replace(path)

    begin = int(saved.read_text()) if cfg.resume and saved.exists() else 0
    print(f"toy {os.getpid()} begins at {begin}", flush=True)
    for step in range(begin, cfg.steps + 1):
        if step > begin:
            time.sleep(cfg.pace)
            if not cfg.mute:
                print(f"step {step:4}/{cfg.steps}  loss {2 / (step + 1):.4f}", flush=True)
            if step % cfg.save_every == 0:
                saved.write_text(str(step))
        if cfg.beat:
            beat("training" if step > begin else "loading", step)
        for at, code in actions:
            if at == step and (step > begin or not step):
                exec(code, {**globals(), "step": step, "beat": beat})
        if asked and cfg.on_term == "save":
            time.sleep(cfg.save_seconds)
            saved.write_text(str(step))
            print(f"saved at {step}", flush=True)
            return 75
    return 0


# ----------------------------------------------------------------------------------- the scripted nvidia-smi

CORE = (
    "timestamp,index,uuid,name,memory.total [MiB],memory.used [MiB],utilization.gpu [%],temperature.gpu,"
    "power.draw [W],power.limit [W]"
).split(",")
EXTRA = (
    "driver_version,clocks.current.sm [MHz],utilization.memory [%],temperature.memory,"
    "clocks_event_reasons.active,ecc.errors.uncorrected.volatile.total,gpu_recovery_action"
).split(",")
ROW = dict(
    zip(
        CORE + EXTRA,
        (
            "2026/11/29 18:07:13.412, 0, GPU-7fb30000-0000-0000-0000-000000000000, NVIDIA H200, "
            "143771, 0, 0, 37, 77.41, 700.00, 580.159.04, 345, 0, 39, 0x0000000000000001, 0, None"
        ).split(", "),
    )
)


def gpu(index=0, **changed):
    """One row as an H200 answers it; gpu(1, memory_used=40000, power_draw=90) by first words of fields."""
    row = {**ROW, "index": str(index), "uuid": f"GPU-{index}fb30000-0000-0000-0000-000000000000"}
    for name, value in changed.items():
        row[next(f for f in row if f.split(" ")[0].replace(".", "_") == name)] = str(value)
    return row


class Smi:
    """A program nvidia-smi in a folder of its own. What it does next is a shell script in a file, by query:
    `gpu` and `apps`. It starts as one idle H200 without processes."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir()
        program = self.folder / "nvidia-smi"
        program.write_text(f"""#!/bin/sh
cd {shlex.quote(str(self.folder))}
query=gpu; case "$*" in *compute-apps*) query=apps;; esac
fields=core; case "$*" in *gpu_recovery_action*) fields=full;; esac
echo "$query $fields $$" >> calls
. ./$query.sh
""")
        program.chmod(0o755)
        self.gpus(gpu())
        self.apps()

    def put(self, name, text):
        beside = self.folder / f"{name}.new"
        beside.write_bytes(text if isinstance(text, bytes) else text.encode())
        beside.replace(self.folder / name)

    def script(self, query, text):
        """From now on a call does this (shell)."""
        self.put(f"{query}.sh", text)

    def answer(self, query, text, code=0):
        """From now on a call prints this text or bytes and exits so."""
        self.put(f"{query}.txt", text)
        self.script(query, f"cat {query}.txt; exit {code}")

    def gpus(self, *rows):
        for name, fields in (("full", CORE + EXTRA), ("core", CORE)):
            self.put(
                f"{name}.csv",
                "\n".join([", ".join(fields), *(", ".join(r[f] for f in fields) for r in rows)]) + "\n",
            )
        self.script("gpu", "cat $fields.csv")

    def apps(self, *rows):
        """rows: (GPU index, pid, name, MiB)"""
        lines = [f"{gpu(i)['uuid']}, {pid}, {name}, {mib}" for i, pid, name, mib in rows]
        self.answer("apps", "\n".join(["gpu_uuid, pid, process_name, used_gpu_memory [MiB]", *lines]) + "\n")

    def calls(self, query=""):
        """-> the calls so far, as [query, core or full, pid]"""
        path = self.folder / "calls"
        return (
            [line.split() for line in path.read_text().splitlines() if line.startswith(query)]
            if path.exists()
            else []
        )


# ---------------------------------------------------------------------------------------------- the starter


def until(condition, seconds=30, what="it"):
    """Poll until the condition holds -> what it returned"""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, (
            f"{what() if callable(what) else what} did not happen in {seconds} s"
        )
        time.sleep(0.01)
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def bearers(folder):
    """-> the live processes that were started for the run in this folder"""
    mark, found = os.fsencode(f"SUPERVISE_RUN_DIR={Path(folder).resolve()}\0"), []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes() and alive(pid):
                found.append(pid)
        except OSError:
            pass
    return found


class Supervised:
    """A supervisor that runs: its process, its folder, what it wrote."""

    def __init__(self, folder, options, command, smi, env, terminal):
        self.dir, self.shown = Path(folder), Path(f"{folder}.terminal")
        path = os.pathsep.join([*([str(smi.folder)] if smi else []), os.environ["PATH"]])
        out = terminal if terminal is not None else open(self.shown, "ab")  # noqa: SIM115  closed below
        self.process = subprocess.Popen(
            [sys.executable, str(SUPERVISE), "--run-dir", str(folder), *options, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out if terminal is None else subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PATH": path, **(env or {})},
        )
        if terminal is None:
            out.close()

    @property
    def pid(self):
        return self.process.pid

    def terminal(self):
        return self.shown.read_text(errors="replace") if self.shown.exists() else ""

    def log(self, number=1):
        path = self.dir / f"attempt_{number:03}.log"
        return path.read_bytes() if path.exists() else b""

    def events(self, kind=""):
        path = self.dir / "events.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [e for e in map(json.loads, lines) if not kind or e["kind"] == kind]

    def state(self):
        return json.loads((self.dir / "state.json").read_text())

    def event(self, kind, count=1, seconds=30):
        """Wait for the count-th event of a kind -> it"""
        return until(
            lambda: self.events(kind)[count - 1 : count],
            seconds,
            lambda: f"event {kind} ({count}):\n{self.terminal()[-3000:]}\n",
        )[0]

    def logged(self, text, number=1, seconds=30):
        """Wait for a text in the log of an attempt."""
        text = text.encode() if isinstance(text, str) else text
        until(lambda: text in self.log(number), seconds, lambda: f"{text} in {self.log(number)[-2000:]}")

    def leader(self):
        """-> the process id of the newest attempt, once it has started"""
        return until(lambda: self.state().get("leader"), what="a started attempt")

    def send(self, number):
        self.process.send_signal(number)

    def ended(self, seconds=60):
        """Wait for the supervisor's end -> its exit code; nothing of the run may be alive then."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {seconds} s:\n{self.terminal()[-3000:]}") from None
        assert not bearers(self.dir), f"left alive after exit {code}: {bearers(self.dir)}"
        return code

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        for _ in range(50):  # only what bears this run's own folder in its environment
            for pid in (left := bearers(self.dir)):
                os.kill(pid, signal.SIGKILL)
            if not left:
                break


FAST = "--backoff 0.05 --backoff-cap 0.05 --grace 20 --hang-grace 5"


def supervised(tmp_path, options, command, smi=None, env=None, terminal=None, name="run"):
    """Start `supervise.py FAST options -- command` on the folder tmp_path/name. Use as a context. smi: a Smi.
    terminal: a file for its stdout; without one, .terminal() tells what it showed."""
    return Supervised(Path(tmp_path) / name, shlex.split(f"{FAST} {options}"), command, smi, env, terminal)


def call(*arguments, **more):
    """supervise.py with these arguments, to its end -> (exit code, stdout, stderr)"""
    done = subprocess.run(
        [sys.executable, str(SUPERVISE), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
        **more,
    )
    return done.returncode, done.stdout, done.stderr


if __name__ == "__main__":
    sys.exit(toy_main(sys.argv[1:]))
