"""The supervisor and the GPUs, and what it costs itself: real processes, a scripted program nvidia-smi.

    python -m pytest tests/test_supervise_gpu.py -rP        -rP: the measured figures too
"""
import argparse
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from supervise_kit import HANG, SPIN, Smi, alive, case, gpu, supervised, toy, until

import supervise

QUICK = "--gpu-interval 0.1 --gpu-timeout 5 --gpu-wait 0.6"
ENDLESS, RESUMED = toy("--steps 99999"), toy("--steps 99999 --resume")
STAMPS = ("while True: print('step %d at %.3f' % (time.monotonic() * 100, time.monotonic()), flush=True); "
          "time.sleep(0.02)")  # its own log then tells how late it is
CHATTER = STAMPS.replace("step", "turn")  # no progress
STAMPED = toy("--on-term die --at 1", STAMPS)

@pytest.fixture
def smi(tmp_path):
    return Smi(tmp_path / "smi")

def asked_again(smi, times=2):
    """Wait until nvidia-smi was called so often from now on: what it says now is then known."""
    seen = len(smi.calls("gpu"))
    until(lambda: len(smi.calls("gpu")) >= seen + times, what="another look at the GPUs")

def killed_after(change, smi, run):
    """The run steps, the GPUs change and are looked at, its leader is killed with -9 -> that process."""
    run.logged("step    2")
    leader = run.leader()
    change(smi, run)
    asked_again(smi)
    os.kill(leader, signal.SIGKILL)
    return leader

def still_steps(run):
    """Wait for more steps of the first attempt than its log holds now."""
    seen = run.log().count(b"step")
    until(lambda: run.log().count(b"step") > seen + 4, what="another step")
    assert not run.events("exit") and len(run.events("start")) == 1

def lateness(run):
    """-> seconds since the newest stamp in the log"""
    stamps = re.findall(rb" at (\d+\.\d+)\n", run.log())  # not the toy's own "begins at 0"
    return time.monotonic() - float(stamps[-1]) if stamps else 0.0

def lines(path):
    return path.read_text().splitlines() if path.exists() else []

# ------------------------------------------------------------------------------------------------ a hang

@pytest.mark.parametrize("watts, stuck", [(90, True), (627.4, False)])
@case(20)
def test_livelock_is_named(tmp_path, smi, watts, stuck):
    """Catches a hang at full utilisation that counts as work, or is reported without what the GPU drew; a
    GPU at full power that is called stuck."""
    smi.gpus(gpu(utilization_gpu=100, power_draw=watts))
    with supervised(tmp_path, f"{QUICK} --hang 0.7 --hang-grace 0.2", toy("--at 3", SPIN), smi) as run:
        text = run.event("hang")["text"]
        assert f"util 100 %, 37 C, {watts:.0f} of 700 W" in text and "no progress" in text
        assert ("looks like a stuck collective" in text) == stuck
        assert run.event("exit")["ended"] == "hang"

@pytest.mark.parametrize("holds", ["CPU", "GPU", "nobody knows"])
@case(13, 15)
def test_rest_is_a_hang_sooner(tmp_path, smi, holds):
    """Catches a hang that could be known early, as neither CPU nor GPU works, and is waited for; a verdict
    while either works, or while the figures of the GPU are unknown. One look at a time changes."""
    go = tmp_path / "go"
    spin = f"while not os.path.exists({str(go)!r}): pass\ntime.sleep(600)" if holds == "CPU" else HANG
    if holds != "CPU":
        watts, share = ("627", "100") if holds == "GPU" else ("[N/A]", "[N/A]")
        smi.gpus(gpu(power_draw=watts, utilization_gpu=share))
    options = "--idle-hang 0.6 --gpu-interval 0.1 --hang-grace 0.2"
    with supervised(tmp_path, options, toy("--beat --at 5", spin), smi) as run:
        run.logged("step    5")
        asked_again(smi, 20)
        assert not run.events("hang") and len(run.events("start")) == 1
        go.touch()
        smi.gpus(gpu())
        assert "0.6 s while neither a CPU nor a GPU works" in run.event("hang")["text"]
        assert run.event("exit")["ended"] == "hang"

def test_holders_of_a_device_are_found(tmp_path):
    """Catches a process that has a GPU open and is not named, and a neighbour's other files taken for one."""
    for name in ("nvidia0", "nvidia-uvm"):
        (tmp_path / name).touch()
    processes = {name: subprocess.Popen(["sleep", "600"], stdin=open(tmp_path / name))  # noqa: SIM115
                 for name in ("nvidia0", "nvidia-uvm")}
    try:
        found = supervise.holders(rf"{re.escape(str(tmp_path))}/nvidia\d+")
        assert processes["nvidia0"].pid in {p.pid for p in found}
        assert processes["nvidia-uvm"].pid not in {p.pid for p in found}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()

@pytest.mark.parametrize("names, index", [("1", ["1"]), ("0,1", ["0", "1"]), ("GPU-1fb3", ["1"]),
                                          ("", ["0", "1"]), ("-1", ["0", "1"]), ("MIG-x", ["0", "1"])])
def test_gpus_of_the_run(monkeypatch, names, index):
    """Catches a run given up as a GPU that it may not use is not free, or as its own could not be told."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    run = argparse.Namespace(gpus=argparse.Namespace(rows=[gpu(0), gpu(1)]))
    assert [r["index"] for r in supervise.own_gpus(run)] == index

# ------------------------------------------------------------------------- GPU memory after a death

def full(smi, run):
    smi.gpus(gpu(memory_used=40000))

def foreign(smi, run):
    smi.gpus(gpu(memory_used=40000))
    smi.apps((0, 4194000, "/opt/my server, v2", 39900))

def listed(smi, run):
    smi.apps((0, run.leader(), "[Not Found]", 500))

def mute(smi, run):
    smi.answer("gpu", "", 255)

def hidden(smi, run):
    smi.gpus(gpu(memory_used="[Unknown Error]"))

def no_apps(smi, run):
    smi.answer("apps", "", 255)

@pytest.mark.parametrize("change, words", [
    (full, "40000 of 143771 MiB are not free again, held by nobody that nvidia-smi names"),
    (foreign, "held by 4194000 /opt/my server, v2"), (listed, "not free again, held by {leader} [Not Found]"),
    (mute, "unknown is not free"), (hidden, "unknown is not free"), (no_apps, "unknown is not free")])
@case(29)
def test_no_relaunch_onto_a_full_gpu(tmp_path, smi, change, words):
    """Catches a relaunch while dead or foreign processes hold GPU memory, or while nobody can tell; a foreign
    one that is not named."""
    with supervised(tmp_path, QUICK, ENDLESS, smi) as run:
        leader = killed_after(change, smi, run)
        assert run.ended() == 95
        why = run.events("decision")[0]["text"]
        assert words.format(leader=leader) in why and "needs a person" in why, why
        assert len(run.events("start")) == 1

@case(29)
def test_gpu_memory_that_comes_back_is_waited_for(tmp_path, smi):
    """Catches a run given up although its memory comes back in time, and one relaunched before that."""
    with supervised(tmp_path, f"{QUICK} --gpu-wait 60", RESUMED, smi) as run:
        killed_after(foreign, smi, run)
        run.event("exit")
        asked_again(smi, 4)
        assert len(run.events("start")) == 1 and run.state()["now"] == "waiting for the GPUs"
        smi.gpus(gpu(memory_used=300))
        smi.apps()
        run.event("start", 2)

@case(29, 44)
def test_stop_while_it_waits_for_the_gpus(tmp_path, smi):
    """Catches a Ctrl-C that has to wait for GPU memory, and a child that is started after it."""
    with supervised(tmp_path, f"{QUICK} --gpu-wait 600", ENDLESS, smi) as run:
        killed_after(full, smi, run)
        until(lambda: run.state()["now"] == "waiting for the GPUs")
        run.send(signal.SIGINT)
        assert run.ended(20) == 130 and len(run.events("start")) == 1

@case(29)
def test_what_was_there_before_is_not_waited_for(tmp_path, smi):
    """Catches a run that never relaunches beside a neighbour that held memory all along, or where nothing
    could be read from the start."""
    smi.gpus(gpu(memory_used=40000))
    smi.apps((0, 4194000, "neighbour", 39900))
    mostly = toy("--steps 9 --resume --attempts 1 --at 3", "os._exit(3)")
    with supervised(tmp_path, QUICK, mostly, smi) as run:
        assert run.ended() == 0 and len(run.events("start")) == 2
    smi.answer("gpu", "NVIDIA-SMI has failed\n", 255)
    with supervised(tmp_path, QUICK, mostly, smi, name="unread") as run:
        assert run.ended() == 0 and len(run.events("start")) == 2

# ------------------------------------------------------------------------------- nvidia-smi hangs, is slow

@case(30)
def test_hung_nvidia_smi(tmp_path, smi):
    """Catches a supervisor that waits for an nvidia-smi which never answers and whose child keeps its output
    open, that starts one more beside it, or shows its old figures as new."""
    smi.script("gpu", "sleep 600 & echo $! >> sleepers; sleep 600")
    with supervised(tmp_path, "--gpu-interval 0.05 --gpu-timeout 0.3", STAMPED, smi) as run:
        assert "did not answer within 0.3 s" in run.event("gpu")["text"]
        late, most = [], []

        def watched():
            late.append(lateness(run))
            most.append(sum(alive(int(pid)) for _, _, pid in smi.calls()))
            return len(smi.calls("gpu")) >= 4
        until(watched, what="another try")
        assert max(most) == 1, f"{max(most)} calls at a time"
        assert max(late) < 1, f"the output was {max(late):.2f} s late"
        until(lambda: "did not answer" in run.state()["gpu_error"] and run.state()["gpus"] == [])
        smi.gpus(gpu(memory_used=777))
        until(lambda: "777 of" in "".join(run.state()["gpus"]), what="the figures of a mended nvidia-smi")

@case(34)
def test_slow_nvidia_smi(tmp_path, smi):
    """Catches calls that pile up, and a loop that waits for them: its output and its stop come late; one
    that hangs and is left behind at the end."""
    for query, file in (("gpu", "$fields.csv"), ("apps", "apps.txt")):
        smi.script(query, f"echo + >> turns; sleep 0.4; cat {file}; echo - >> turns")
    with supervised(tmp_path, "--gpu-interval 0.01", STAMPED, smi) as run:
        late = []
        until(lambda: late.append(lateness(run)) or len(smi.calls()) >= 6)
        assert max(late) < 1, f"the output was {max(late):.2f} s late"
        assert not run.events("gpu"), "slow is not dead"
        turns = "".join(lines(smi.folder / "turns"))
        assert turns.startswith("+-+-+-") and "++" not in turns, turns
        smi.script("gpu", "sleep 600 & echo $! >> sleepers; sleep 600")
        until(lambda: lines(smi.folder / "sleepers"))
        run.send(signal.SIGTERM)
        assert run.ended() == 143
        left = [*lines(smi.folder / "sleepers"), *(pid for _, _, pid in smi.calls())]
        until(lambda: not any(alive(int(pid)) for pid in left), 5, "the end of every nvidia-smi")

# ----------------------------------------------------------------------------- GPU lost, driver changed

HANDLE = "Unable to determine the device handle for GPU 0000:09:00.0: "
NVML = "Failed to initialize NVML: "
EIGHT = [gpu(i) for i in range(8)]
LOSSES = [  # how nvidia-smi exits, what it prints, the rows beside that, the event, its words
    ("a handle", 15, HANDLE + "Unknown Error", 0, "lost", "Unable to determine"),
    ("a handle, others listed", 15, HANDLE + "GPU is lost.  Reboot the system", 7, "lost", "is lost"),
    ("exit 15 alone", 15, "", 0, "lost", "exit 15"),
    ("driver gone", 9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 0,
     "lost", "couldn't commun"),
    ("driver changed", 18, NVML + "Driver/library version mismatch", 0, "lost", "version mismatch"),
    ("container lost its devices", 255, NVML + "Unknown Error", 0, "gpu", "Unknown Error"),
    ("8 rows, then 7", 0, "", 7, "lost", "GPU 7 (GPU-7fb30000-0000-0000-0000-000000000000) is listed")]

@pytest.mark.parametrize("what, code, text, rows, kind, words", LOSSES, ids=[x[0] for x in LOSSES])
@case(33)
def test_lost_gpu(tmp_path, smi, what, code, text, rows, kind, words):
    """Catches a run that still steps and is ended for what nvidia-smi says; a loss that is not told; a
    relaunch onto a machine that needs a person."""
    smi.gpus(*EIGHT)
    with supervised(tmp_path, QUICK, ENDLESS, smi) as run:
        run.logged("step    2")
        smi.gpus(*EIGHT[:rows])
        smi.put("text", text)
        smi.script("gpu", f"{'cat $fields.csv; ' * bool(rows)}cat text; exit {code}")
        assert words in run.event(kind)["text"]
        still_steps(run)
        os.kill(run.leader(), signal.SIGKILL)
        assert run.ended() == 95
        assert words in run.events("decision")[0]["text"] and len(run.events("start")) == 1
        assert len(run.events(kind)) == 1, "said again and again"

@case(33)
def test_recovery_action_then_a_hang(tmp_path, smi):
    """Catches a relaunch after a hang on a GPU that asks for a reset, also where nvidia-smi failed before."""
    smi.answer("gpu", "", 255)
    with supervised(tmp_path, f"{QUICK} --hang 0.7", ENDLESS, smi) as run:
        run.event("gpu")
        smi.gpus(gpu())
        run.event("gpu", 2)
        asked_again(smi)
        smi.gpus(gpu(gpu_recovery_action="Reset"))
        assert "GPU 0 asks for Reset" in run.event("lost")["text"]
        still_steps(run)
        os.kill(run.leader(), signal.SIGSTOP)
        assert run.ended() == 95
        assert run.events("exit")[0]["ended"] == "hang" and "Reset" in run.events("decision")[0]["text"]

@case(33)
def test_other_order_and_a_loss_that_passes(tmp_path, smi):
    """Catches GPUs known by their index, which changes at a boot; a loss that was mended but still counts."""
    smi.gpus(gpu(0, memory_used=40000), gpu(1))
    with supervised(tmp_path, QUICK, RESUMED, smi) as run:
        run.logged("step    2")
        smi.gpus(gpu(1) | {"index": "0"}, gpu(0, memory_used=40000) | {"index": "1"})
        asked_again(smi)
        assert not run.events("lost") and not run.events("gpu")
        smi.gpus(gpu(0, memory_used=40000))
        assert "GPU 1 (GPU-1fb3" in run.event("lost")["text"]
        smi.gpus(gpu(1) | {"index": "0"}, gpu(0, memory_used=40000) | {"index": "1"})
        assert "well again" in run.event("lost", 2)["text"]
        os.kill(run.leader(), signal.SIGKILL)
        run.event("start", 2)

# --------------------------------------------------------------------------------------------- gpu.jsonl

def test_gpu_figures_are_kept(tmp_path, smi):
    """Catches figures that are not kept, a mean that is none, an unknown value that counts as 0, one that was
    never known written as a number."""
    smi.gpus(gpu(power_draw="WATTS", utilization_gpu="[N/A]", temperature_memory="N/A", temperature_gpu=52))
    smi.script("gpu", "n=$(grep -c gpu calls); w='[N/A]'; [ $n -gt 3 ] || w=$((n * n * 100))\n"
                      "sed s,WATTS,$w, $fields.csv")
    with supervised(tmp_path, "--gpu-interval 0.05", ENDLESS, smi) as run:
        run.logged("step    2")
        until(lambda: len(smi.calls("apps")) > 5)
        run.send(signal.SIGTERM)
        assert run.ended() == 75
        (line,) = map(json.loads, lines(run.dir / "gpu.jsonl"))
        (figures,) = line["gpus"]
        assert figures["power.draw"] == [100, 466.67, 900] and figures["temperature.gpu"] == [52, 52, 52]
        assert figures["utilization.gpu"] is None and figures["temperature.memory"] is None
        assert (figures["index"], figures["name"]) == ("0", "NVIDIA H200") and line["time"]

# -------------------------------------------------------------------------------- the supervisor itself

@pytest.mark.parametrize("who", ["supervisor", "machine", "machine, then a hang"])
@case(45)
def test_frozen_supervisor(tmp_path, who):
    """Catches a hang that is no hang: it was the supervisor, or the whole machine, that stood still; such
    time taken for a step's; a true hang that is not seen any more."""
    slow = toy("--steps 9999 --pace 0.3 --on-term die --at 2", CHATTER if "then" in who else "True")
    with supervised(tmp_path, "--hang 1.3 --hang-factor 1 --gpu-interval 0.2", slow) as run:
        run.logged("step    2")
        frozen = [run.pid, run.leader()][:1 if who == "supervisor" else 2]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        until(lambda: time.monotonic() > began + 2)
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        if "then" in who:
            run.event("hang")
            assert time.monotonic() > began + 2 + 1, "the time that it stood still was counted"
        else:
            still_steps(run)
            assert not run.events("hang") and run.state()["p"]["longest"] < 2

def zombies(pid):
    tasks = [Path(f"/proc/{x}/stat") for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return sum(b") Z " in (supervise.quietly(x.read_bytes) or b"") for x in tasks)

@case(46)
def test_many_restarts_leave_nothing(tmp_path, smi):
    """Catches a descriptor, thread, zombie or buffer kept at each restart; nvidia-smi taken for a stray."""
    many = int(os.environ.get("RESTARTS", "20"))
    limits = f"--max-no-gain 9999 --max-same 9999 --rate 9999 --lifetime {many} --backoff 0.01"
    command = ["sh", "-c", "echo step $$; exit 3"]
    with supervised(tmp_path, f"{limits} --gpu-interval 0.1", command, smi) as run:
        process, seen = psutil.Process(run.pid), []

        def watched():
            seen.append((len(list(run.dir.glob("attempt_*.log"))), process.num_fds(), process.num_threads(),
                         zombies(run.pid), process.memory_info().rss / 2**20))
            return seen[-1][0] >= many
        until(watched, 5 + many)
        assert run.ended() == 94
        assert len(run.events("exit")) == many + 1 and not any(e["strays"] for e in run.events("exit"))
        # What is kept lifts the fewest ever held; the most depends on which short call a look meets.
        picks = (min, min, min, max)
        early, late = (
            [pick(v) for pick, v in zip(picks, zip(*(x[1:] for x in seen if x[0] in window)))]
            for window in (range(3, many // 3 + 1), range(many - many // 3, many + 2)))
        print(f"{many} restarts: fewest descriptors, threads, zombies, most MiB: {early} early, {late} late")
        assert all(b <= a + 1 for a, b in zip(early[:3], late[:3])) and late[3] < early[3] + 2 + many / 100

def test_what_it_costs(tmp_path, smi):
    """Catches a supervisor that takes from the run what it watches: it spins, or keeps what it reads."""
    with supervised(tmp_path, "", toy("--steps 99999 --beat"), smi) as run:
        run.logged("step   50")
        process = psutil.Process(run.pid)
        began, used = time.monotonic(), sum(process.cpu_times()[:2])
        run.logged("step  300")
        share = (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - began)
        rss = process.memory_info().rss / 2**20
        print(f"100 lines a second: {share:.1%} of a core, {rss:.0f} MiB")
        assert share < 0.05 and rss < 60
