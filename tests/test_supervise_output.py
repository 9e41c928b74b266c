"""The supervisor and what its command writes: to its log, to a full disk, to a terminal that stops reading.

    python -m pytest tests/test_supervise_output.py
"""
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from supervise_kit import CASES, bearers, call, case, covered_cases, supervised, toy, until

MIB = 1 << 20

def python(code, *arguments):
    """-> a command that runs this Python without buffers: put(bytes) writes all of them"""
    head = """import os, random, sys, time
def put(data):
    while data:
        data = data[os.write(1, data):]
"""
    return [sys.executable, "-S", "-c", head + textwrap.dedent(code), *map(str, arguments)]

def parts(run, number=1):
    """-> the parts of an attempt's log, oldest first"""
    files = run.dir.glob(f"attempt_{number:03}.log*")
    return sorted(files, key=lambda f: int(f.suffix[1:]) if f.suffix != ".log" else 10**9)

def idles(run):
    """-> whether the supervisor sleeps more than it works, over two of its looks (--gpu-interval 0.1)"""
    def used():
        return sum(psutil.Process(run.pid).cpu_times()[:2])
    for _ in range(2):
        begin, cpu, saved = time.monotonic(), used(), (run.dir / "state.json").stat().st_mtime_ns
        until(lambda: (run.dir / "state.json").stat().st_mtime_ns != saved, what="a look")
    return used() - cpu < 0.5 * (time.monotonic() - begin)

# -------------------------------------------------------------------------------------------- bytes and parts

@case(36)
def test_bytes_are_kept_as_they_came(tmp_path):
    """Catches a log that was decoded on its way: bytes that are no UTF-8, NULs, carriage returns, a character
    that two writes share, bytes at the joint of two parts; and a step after them that is not found."""
    command = python(r"""
        r, kept = random.Random(1), open(sys.argv[1], "wb")
        odd = [b"\xff\xfe", bytes(9), b"\r", b"\r\n", "é中".encode(), "中".encode("utf-16"), b"\x1b[31"]
        for i in range(400):
            data = r.randbytes(r.randrange(9000)) + r.choice(odd)
            kept.write(data)
            cut = r.randrange(len(data))
            put(data[:cut])
            put(data[cut:])
        end = "\nÉtape 中 7 sur 9\n".encode()
        kept.write(end)
        kept.close()
        for cut in range(len(end)):
            put(end[cut:cut + 1])
            time.sleep(0.02)
        """, tmp_path / "kept")
    options = "--log-part-size 0.1 --log-parts 99 --step-regex '^Étape 中 (\\d+) sur (\\d+)$'"
    with supervised(tmp_path, options, command) as run:
        assert run.ended() == 0
        wrote, a = (tmp_path / "kept").read_bytes(), run.events("exit")[0]
        assert len(parts(run)) > 2 and b"".join(f.read_bytes() for f in parts(run)) == wrote
        assert (a["step"], a["total"], a["lines"][-2]) == (7, 9, "Étape 中 7 sur 9")
        assert wrote[-300:] in run.shown.read_bytes(), "the terminal got other bytes than the log"

@case(41)
def test_flood_keeps_the_first_part_and_the_newest(tmp_path):
    """Catches a log that grows without end, forgets how the run began or what came last, a hole between the
    parts that are kept, and a child that waits for the log."""
    size = 64 * MIB
    command = python("""
        for begin in range(0, int(sys.argv[1]), 1 << 16):
            put(b"".join(b"%015d\\n" % k for k in range(begin, begin + (1 << 16), 16)))
        put(b"step 5/5\\n")
        """, size)
    with open(os.devnull, "wb") as null, supervised(
            tmp_path, "--log-part-size 1 --log-parts 4", command, terminal=null) as run:
        assert run.ended() == 0
        kept = parts(run)
        first, late = kept[0].read_bytes(), b"".join(f.read_bytes() for f in kept[1:])
        assert len(kept) <= 4 and (kept[0].suffix, kept[-1].suffix) == (".1", ".log")
        assert len(first + late) <= 4 * 2 * MIB, "a part may be one read of 1 MiB longer than it should"
        assert first.startswith(b"%015d\n" % 0) and len(first) >= MIB, "how the run began is lost"
        begin = size - (len(late) - len(b"step 5/5\n"))
        assert len(late) > MIB, "what came last is lost"
        assert late == b"".join(b"%015d\n" % k for k in range(begin, size, 16)) + b"step 5/5\n", "a hole"
        assert run.events("exit")[0]["step"] == 5 and not run.events("log")

@case(37)
def test_giant_line(tmp_path):
    """Catches memory that grows with a line that never ends, work that grows with its square, and a step that
    is lost behind it."""
    command = python("""
        for i in range(60):
            put((b"step" + b" " * 60000 + b"=" * 5532) * 16)
        put(b"\\nstep 3/9\\n")
        for i in range(16):
            put(b"step" + b" " * 65500 + b"\\n")
        put(b"step 4/9\\n")
        time.sleep(600)
        """)
    with open(os.devnull, "wb") as null, supervised(
            tmp_path, "--log-part-size 4 --log-parts 3 --gpu-interval 0.1", command, terminal=null) as run:
        run.event("start")
        until(lambda: run.state()["p"]["step"] == 4, 60, "the step behind the line")
        peak = int(re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{run.pid}/status").read_text())[1])
        assert peak < 80 * 1024, f"{peak} KiB were held for a line of 60 MiB"
        assert sum(f.stat().st_size for f in parts(run)) <= 3 * 5 * MIB
        run.send(signal.SIGTERM)
        run.ended()

# -------------------------------------------------------------------------------- logs that cannot be written

@case(38)
def test_log_that_may_not_grow(tmp_path):
    """Catches a log that cannot be written (here: a limit on the size of files) and ends or blocks the run,
    is not told, is told again and again, or whose recovery is not noticed; a wrong count of the lost
    bytes."""
    go, width = tmp_path / "go", 500
    command = python("""
        n, go, width = 0, *sys.argv[1:]
        while not os.path.exists(go):
            n += 1
            put(b"step %6d/999999 %s\\n" % (n, b"x" * int(width)))
            time.sleep(0.001)
        put(b"step %6d/999999 %s\\n" % (n + 1, b"y" * int(width)))
        """, go, width)
    with open(os.devnull, "wb") as null, supervised(
            tmp_path, "--gpu-interval 0.1", command, terminal=null) as run:
        until(lambda: len(run.log()) > 50_000, what="a log")
        limit, process = 100_001, psutil.Process(run.pid)
        process.rlimit(psutil.RLIMIT_FSIZE, (limit, psutil.RLIM_INFINITY))
        assert "the log pauses: File too large" in run.event("log")["text"]
        step = run.state()["p"]["step"]
        until(lambda: run.state()["p"]["step"] > step + 500, what="training without a log")
        assert len(run.events("log")) == 1, "one trouble, more than one alert"
        assert idles(run)
        process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        told = run.event("log", 2)
        go.touch()
        assert run.ended() == 0
        wrote = run.events("exit")[0]["step"] * (len("step      1/999999 \n") + width)
        assert run.log().endswith(b"y\n") and len(run.events("log")) == 2
        assert told["text"] == "log: well again"
        assert told["lost_bytes"] == wrote - len(run.log()), "not as many bytes are missing as was said"

@case(38)
def test_full_disk(tmp_path):
    """Catches a run that ends, blocks or is not relaunched when nothing at all can be written, neither log
    nor event nor state; and records that stay broken when there is room again."""
    disk, fill, sign = tmp_path / "disk", tmp_path / "disk/fill", tmp_path / "sign"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small disk")
    command = python("""
        n, attempt = 0, int(os.environ["SUPERVISE_ATTEMPT"])
        while not os.path.exists(sys.argv[1] + ".go"):
            n += 1
            put(b"step %d/9999 %s\\n" % (n, b"x" * 90))
            open(sys.argv[1], "w").write(str(attempt * 1000 + n))
            time.sleep(0.002)
            if n > 250 and attempt == 1:
                sys.exit("boom")
        put(b"step 9999/9999\\n")
        """, sign)
    try:
        with open(os.devnull, "wb") as null, supervised(
                disk, "--min-free 0 --gpu-interval 0.1", command, terminal=null) as run:
            run.logged("step 5/")
            with open(fill, "wb", buffering=0) as f, pytest.raises(OSError, match="No space"):
                while True:
                    f.write(bytes(4096))
            until(lambda: int(sign.read_text() or 0) > 2250, what="a crash, and training on")
            assert len(run.log()) < 251 * 90, "the disk was not full"
            fill.unlink()
            until(lambda: len(run.log(2)) > 4096, what="a log that goes on")
            Path(f"{sign}.go").touch()
            assert run.ended() == 0
            assert run.log(2).endswith(b"step 9999/9999\n") and run.state()["ended"].endswith("finished")
            assert [e["kind"] for e in run.events()][-4:] == ["log", "exit", "decision", "end"]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)

@case(38)
def test_disk_that_is_nearly_full(tmp_path):
    """Catches logs that take the last of a disk from the checkpoints: below --min-free nothing is written, it
    is said once, and the output is still read, parsed and shown."""
    with supervised(tmp_path, "--min-free 900000000", toy("--steps 30")) as run:
        assert run.ended() == 0
        assert [e["text"] for e in run.events("log")] == ["the log pauses: less than 9e+08 MiB are free"]
        assert not run.log() and run.events("exit")[0]["step"] == 30 and "step   30/30" in run.terminal()

@case(38, 39)
def test_log_that_cannot_be_opened(tmp_path):
    """Catches a run that ends or spins because something else stands where its log was, a pause that is not
    told, or told twice, and a log that does not go on afterwards."""
    with supervised(tmp_path, "--gpu-interval 0.1", toy("--steps 9999")) as run:
        run.logged("step    3")
        log = run.dir / "attempt_001.log"
        log.rename(tmp_path / "old")
        log.mkdir()
        assert "the log pauses: Is a directory" in run.event("log")["text"]
        assert idles(run)
        log.rmdir()
        assert "well again" in run.event("log", 2)["text"]
        until(lambda: b"step" in run.log(), what="a log that goes on")
        run.send(signal.SIGTERM)
        assert run.ended() == 75 and b"saved at" in run.log() and len(run.events("log")) == 2

@pytest.mark.parametrize("how", ["removed", "moved", "truncated", "folder"])
@case(39)
def test_log_pulled_away(tmp_path, how):
    """Catches output that goes for ever to a file nobody can see, holes of NULs in a shortened log, a run
    that ends, spins or blocks because its folder is gone, and records that do not come back."""
    with supervised(tmp_path, "--gpu-interval 0.1", toy("--steps 9999 --save-every 999999")) as run:
        run.logged("step    9")
        log, old, begin = run.dir / "attempt_001.log", tmp_path / "old", run.log()[:20]
        {"removed": log.unlink, "moved": lambda: log.rename(old), "truncated": lambda: os.truncate(log, 0),
         "folder": lambda: shutil.rmtree(run.dir.rename(old))}[how]()
        until(lambda: b"step" in run.log() and not run.log().startswith(begin), what="a new log")
        until((run.dir / "state.json").exists, what="a new state")
        assert idles(run)
        run.send(signal.SIGTERM)
        assert run.ended() == 75 and b"saved at" in run.log() and b"\0" not in run.log()
        assert [e["kind"] for e in run.events()][-4:] == ["stop", "exit", "decision", "end"]
        if how == "moved":
            steps = [int(x) for x in re.findall(rb"step +(\d+)/", old.read_bytes() + run.log())]
            assert steps == list(range(1, steps[-1] + 1)), "steps are missing between the two"

@case(28, 39)
def test_folder_pulled_away_stays_taken(tmp_path):
    """Catches a second supervisor, and with it a second trainer, on a run whose folder somebody removed to
    begin anew while it still ran."""
    command = toy("--steps 9999 --save-every 999999")
    with supervised(tmp_path, "", command) as run:
        run.logged("step    3")
        shutil.rmtree(run.dir.rename(tmp_path / "old"))
        until(lambda: (run.dir / "supervise.lock").exists() and b"step" in run.log(), what="a new folder")
        code, _, err = call("--run-dir", run.dir, "--", *command)
        assert code == 96 and f"process {run.pid} " in err
        assert call("stop", run.dir)[0] == 0 and run.ended() == 75

# ----------------------------------------------------------------------- terminals, and what a child is given

@pytest.mark.parametrize("kind", ["pipe", "pty"])
@case(43)
def test_terminal_that_stops_reading(tmp_path, kind):
    """Catches a child that a terminal blocks which nobody reads (Ctrl-S, a stopped pager, a frozen ssh), a
    gap there that is not told, and a terminal that gets nothing more when it reads again."""
    mine, theirs = os.pipe() if kind == "pipe" else pty.openpty()
    os.set_blocking(mine, False)
    go, shown = tmp_path / "go", bytearray()
    command = python("""
        for i in range(4000):
            put(b"step %d/4000 %s\\n" % (i + 1, b"x" * 990))
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
        put(b"goes on\\n")
        """, go)

    def reads(word):
        with suppress(OSError):  # nothing now; or the other side of a pty is closed
            shown.extend(os.read(mine, MIB))
        return re.search(word, shown)
    with open(theirs, "wb") as terminal, supervised(tmp_path, "", command, terminal=terminal) as run:
        terminal.close()
        run.logged("step 4000/4000")
        until(lambda: reads(rb"output was not shown"), what="a word about the gap")
        assert len(shown) < len(run.log()) // 4, "nothing was left out, so nothing was tested"
        go.touch()
        until(lambda: reads(rb"goes on"), what="a terminal that goes on")
        until(lambda: reads(rb"exit 0: .*finished"), what="the last word")
        assert run.ended() == 0 and run.log().count(b"step") == 4000
    os.close(mine)

def test_last_word_reaches_a_slow_terminal(tmp_path):
    """Catches a supervisor whose last sentence, why it ended, is lost as its terminal was behind just
    then."""
    mine, theirs = os.pipe()
    with open(theirs, "wb") as terminal, supervised(
            tmp_path, "", python("put(b'x' * 200000)"), terminal=terminal) as run:
        terminal.close()
        run.event("end")
        shown = b"".join(iter(lambda: os.read(mine, MIB), b""))
        assert run.ended() == 0 and b"exit 0: " in shown[-300:] and shown.count(b"x") >= 200000
    os.close(mine)

@case(43)
def test_hangup_is_noted_once(tmp_path):
    """Catches a training run that an ssh drop ends: SIGHUP to the supervisor and its group, and a terminal
    that fails whoever writes to it; and a drop that is told more than once."""
    mine, theirs = pty.openpty()
    with open(theirs, "wb") as terminal, supervised(
            tmp_path, "", toy("--steps 9999"), terminal=terminal) as run:
        terminal.close()
        run.logged("step    3")
        leader = run.leader()
        assert os.getsid(leader) == leader, "the command shares the supervisor's session"
        os.close(mine)
        os.killpg(run.pid, signal.SIGHUP)
        assert "the terminal hung up" in run.event("hangup")["text"]
        os.killpg(run.pid, signal.SIGHUP)
        size = len(run.log())
        until(lambda: len(run.log()) > size + 3000, what="training after the drop")
        run.send(signal.SIGTERM)
        assert run.ended() == 75 and len(run.events("hangup")) == len(run.events("start")) == 1

@case(42)
def test_output_of_a_killed_child_is_not_lost(tmp_path, monkeypatch):
    """Catches last words that die in the child's own buffer, and a user's choice that is overridden."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    command = python("print('last words'); os.kill(os.getpid(), 9)")
    for name, env, kept in (("unset", None, True), ("set", {"PYTHONUNBUFFERED": ""}, False)):
        with supervised(tmp_path, "--max-same 0", command, env=env, name=name) as run:
            run.ended()
            root = run.events("exit")[0]["root"]
            assert (b"last words" in run.log()) is kept is (root == "last line: last words")

# ------------------------------------------------------------------------------------------ a tree that lives

BREEDER = """
import os, signal, subprocess, sys, time
def breed(*_):  # another one of this, in a session of its own, that does not bear the run's marks
    subprocess.Popen([sys.executable, "-S", "-c", *sys.argv[1:2], *sys.argv[1:]], start_new_session=True,
                     env={"BREEDER": sys.argv[2]}, stdin=-3)
signal.signal(signal.SIGTERM, lambda *_: [breed() for i in range(3)])
parent, end, children = os.getppid(), float(sys.argv[4]), int(sys.argv[3])  # one end for the whole line
while time.time() < end:
    time.sleep(0.002)
    if children:
        subprocess.Popen(["sleep", "9"], start_new_session=True, env={"BREEDER": sys.argv[2]}).pid
        time.sleep(0.05)
    if os.getppid() != parent:
        parent = breed() or os.getppid()
"""

@case(25)
def test_respawning_tree_is_swept(tmp_path):
    """Catches a sweep that looks once: processes that start three more on SIGTERM, one when their parent
    dies, or one every 50 ms, in sessions of their own and without the run's marks, go on beside the next
    attempt."""
    mark = f"BREEDER={tmp_path}\0".encode()

    def bred():
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                found += [int(pid)] * (mark in Path(f"/proc/{pid}/environ").read_bytes())
        return found
    end = str(time.time() + 20)
    start = "; ".join(
        f"subprocess.Popen([sys.executable, '-S', '-c', code, code, {str(tmp_path)!r}, {every!r}, {end!r}], "
        f"env={{'BREEDER': {str(tmp_path)!r}}}, start_new_session=True)" for every in "001")
    command = toy("--steps 99999 --save-every 99999 --at 2", f"code = {BREEDER!r}; {start}")
    with supervised(tmp_path, "--backoff 99 --backoff-cap 99", command) as run:
        run.logged("step    2")
        until(lambda: len(bred()) >= 6, what="breeders")
        for pid in bred():
            os.kill(pid, signal.SIGTERM)
        until(lambda: len(bred()) >= 12, what="their young")
        os.kill(run.leader(), signal.SIGKILL)
        run.event("decision")
        assert not bred() and not bearers(run.dir), "alive when the next attempt was decided"
        run.send(signal.SIGTERM)
        run.ended()
        assert not bred() and not run.events("exit")[0]["unkillable"] and run.events("exit")[0]["strays"] > 5

def test_every_case_of_the_table_has_a_test():
    """Catches a fault of the table that nobody tests."""
    assert not (missing := CASES - set(covered_cases())), f"no test carries {sorted(missing)}"
