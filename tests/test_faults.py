"""Faults of a long run, in real processes on the CPU: python -m pytest tests/test_faults.py"""
import contextlib
import json
import os
import random
import shutil
import signal
import threading
from pathlib import Path

import psutil
import pytest
import torch
from conftest import finish, lives, make_target, masters, metrics, run, start, until, workers_of

import train_dflash as t

CONFIG = {"hidden_size": 64, "rms_norm_eps": 1e-6, "num_attention_heads": 4, "num_key_value_heads": 2,
          "head_dim": 16, "intermediate_size": 4096, "rope_theta": 1e4, "block_size": 4,
          "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2,
          "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 7}}

def state(step):
    """fp32 weights that say which step wrote them."""
    return {k: torch.full_like(v, float(step)) for k, v in t.Drafter(CONFIG).state_dict().items()}

def write_and_die(out, step, phase, where):
    """In a fork: write a checkpoint and be killed with -9 in that phase."""
    def die(*args, **more):
        os.kill(os.getpid(), signal.SIGKILL)

    def dying(function, wanted=lambda *args: True):
        def wrapped(*args, **more):
            if not wanted(*args):
                return function(*args, **more)
            if where == "before":
                die()
            if where == "within":  # from another thread, somewhere in it
                threading.Timer(random.random() * 0.02, die).start()
            function(*args, **more)
            return die()
        return wrapped

    if phase == "tensors":
        t.export = dying(t.export)
    elif phase == "trainer state":
        torch.save = dying(torch.save)
    elif phase == "fsync":
        count = random.randrange(4)
        t.fsync = dying(t.fsync, lambda *args, calls=[]: calls.append(1) or len(calls) > count)
    elif phase == "rename":
        Path.rename = dying(Path.rename)
    else:
        t.atomic_write = dying(t.atomic_write)
    t.write_checkpoint(out, step, CONFIG, state(step), {"step": step}, 3)

@pytest.mark.parametrize("phase", ["tensors", "trainer state", "fsync", "rename", "latest"])
def test_killed_while_saving(phase, tmp_path, capsys):
    """Catches a checkpoint that is neither whole nor absent after kill -9 in each phase of a save, five times
    or more; one lost that was there before; and a next save that trips over what is left."""
    t.write_checkpoint(tmp_path, 1, CONFIG, state(1), {"step": 1}, 3)
    newest, step = 1, 1
    for where in ("before", "within", "within", "within", "after", "after"):
        step += 1
        child = os.fork()
        if not child:
            write_and_die(tmp_path, step, phase, where)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        found = t.find_checkpoint(tmp_path)
        made = int(found.name[5:])
        assert made == newest or (made == step and phase in ("rename", "latest")), (where, made, newest)
        newest = made
        saved = torch.load(found / "trainer.pt")
        assert saved["step"] == made and all((x == made).all() for x in saved["masters"].values())
        config, weights = t.read_drafter(found)
        t.strict_load(t.Drafter(config), weights, found)
        assert all((x == made).all() for x in weights.values())
    assert "broken" not in capsys.readouterr().out
    t.write_checkpoint(tmp_path, step + 1, CONFIG, state(step + 1), {"step": step + 1}, 3)
    assert t.find_checkpoint(tmp_path).name == f"step-{step + 1:08d}" == (
        tmp_path / "checkpoints" / "latest").read_text().strip()
    assert not list((tmp_path / "checkpoints").glob(".step-*"))

def test_keep_never_removes_the_last_good_one(tmp_path):
    """Catches a --keep that counts by name: newer ones that are broken must not push out the good ones."""
    for step in (1, 2, 6, 8):
        t.write_checkpoint(tmp_path, step, CONFIG, state(step), {"step": step}, 9)
    for step in (6, 8):
        (tmp_path / "checkpoints" / f"step-{step:08d}" / "trainer.pt").write_bytes(b"")
    assert t.find_checkpoint(tmp_path).name == "step-00000002"
    t.write_checkpoint(tmp_path, 3, CONFIG, state(3), {"step": 3}, 1)
    assert t.find_checkpoint(tmp_path).name == "step-00000003"
    left = sorted(f.name for f in (tmp_path / "checkpoints").glob("step-*"))
    assert left == ["step-00000003", "step-00000006", "step-00000008"]  # broken ones are left to a person

@pytest.mark.parametrize("who", ["target", "drafter 1"])
def test_stopped_process_is_named(tiny, tmp_path, who):
    """Catches a run that waits for ever for a process that hangs (SIGSTOP), one that blames whoever waited
    for it, and processes left behind."""
    out, topology = tmp_path / "run", ("--device", "cpu", "--target-gpus", "0", "--drafter-gpus", "1,2")
    process = start(tiny, out, *topology, "--max-steps", 500, "--stall-timeout", 8, "--save-every", 400,
                    "--eval-every", 400)
    until(lambda: metrics(out, "train"))
    tree = psutil.Process(process.pid).children(recursive=True)
    chosen = workers_of(process.pid)[0 if who == "target" else 2]
    chosen.suspend()
    code, _, stderr = finish(process)
    assert code == 1 and len(stderr.strip().splitlines()[-1]) < 400
    assert who in stderr.splitlines()[-1] and str(chosen.pid) in stderr.splitlines()[-1], stderr
    until(lambda: not any(lives(p) for p in tree), 10)

HANG = """
import ctypes, json, multiprocessing, os, threading, time

def hang():
    who, phase = os.environ["HANG"].split("|")
    while multiprocessing.current_process().name != who:
        time.sleep(0.01)
    while True:
        try:
            if json.loads(open("run/heartbeat.json").read())["phase"] == phase:
                break
        except (OSError, ValueError):
            pass
        time.sleep(0.001)
    ctypes.PyDLL(None).pause()  # with the interpreter's lock held: every thread of the process stands still

threading.Thread(target=hang, daemon=True).start()
"""

@pytest.mark.parametrize("who, phase", [
    ("target + drafter 1 (CPU process 1)", "compiling"), ("target + drafter 0 (CPU process 0)", "saving"),
    ("target + drafter 1 (CPU process 1)", "training"), ("target 0 (CPU process 0)", "training")])
def test_hanging_process_is_named(tiny, tmp_path, who, phase):
    """Catches a run that waits for ever for a process that hangs and is not stopped, in whatever phase, one
    that blames another process, and processes left behind."""
    (tmp_path / "sitecustomize.py").write_text(HANG)
    drafters = "0,1" if "+" in who else "1"
    process = start(tiny, tmp_path / "run", "--device", "cpu", "--target-gpus", "0,1" if "+" in who else "0",
                    "--drafter-gpus", drafters, "--max-steps", 500, "--stall-timeout", 8,
                    env={"HANG": f"{who}|{phase}", "PYTHONPATH": str(tmp_path)})
    until(lambda: len(psutil.Process(process.pid).children()) > 2)  # two workers and a resource tracker
    tree = psutil.Process(process.pid).children(recursive=True)
    code, _, stderr = finish(process)
    assert code == 1 and who in stderr.splitlines()[-1].split(";")[0], stderr
    until(lambda: not any(lives(p) for p in tree), 10)

def test_full_disk(tiny, tmp_path):
    """Catches a save that a full disk turns into an end of training, a failure that is not said, and a run
    that calls itself finished without its last checkpoint."""
    run(tiny, tmp_path / "warm", "--max-steps", 1)  # the data are cached now
    out = tmp_path / "run"

    process = start(tiny, out, "--max-steps", 5)
    # No file may grow beyond 100 KB: a write is then refused as on a full disk.
    psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (100_000, 100_000))
    code, stdout, stderr = finish(process)
    assert code == 1 and "last checkpoint is missing" in stderr.splitlines()[-1], stderr
    assert stdout.count("a save failed, training goes on") == 3, stdout
    assert "GiB are free" in stdout  # torch's own words for a full disk would help nobody
    assert [r["step"] for r in metrics(out, "train")] == [1, 2, 3, 4, 5]
    assert not list((out / "checkpoints").glob("step-*")) and not (out / "export").exists()
    run(tiny, out, "--max-steps", 5)
    run(tiny, tmp_path / "calm", "--max-steps", 5)
    for k, v in masters(tmp_path / "calm").items():
        assert torch.equal(masters(out)[k], v), k

@pytest.fixture(scope="module")
def poisoned(tiny, tmp_path_factory):
    """A target whose embedding of the byte ~ is not a number, and chats of which one holds it at its end."""
    home = tmp_path_factory.mktemp("poisoned")
    target = make_target(home / "target", head_dim=16)
    from safetensors.torch import load_file, save_file
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][ord("~")] = float("nan")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    rows = [json.loads(line) for line in tiny[1].read_text().splitlines()]
    rows[60]["messages"][1]["content"] += " ~."
    (home / "few.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for r in rows[::2]:
        r["messages"][1]["content"] = "~ " + r["messages"][1]["content"]
    (home / "many.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return target, home

def test_features_that_are_not_finite(poisoned, tmp_path):
    """Catches a NaN feature that reaches the weights, is not counted, or whose document is not named; and a
    run that goes on when they are many: 76, with nothing that is not finite saved."""
    target, home = poisoned
    out = tmp_path / "few"
    flags = ("--max-steps", 60, "--log-every", 60, "--eval-fraction", 0)
    stdout, _ = run((target, home / "few.jsonl"), out, *flags)
    assert "are not finite, in documents [60]" in stdout and "features blanked" in stdout
    assert sum(r["bad_positions"] for r in metrics(out, "train")) > 0
    assert all(r["skipped_steps"] == 0 for r in metrics(out, "train"))
    assert all(v.isfinite().all() for v in masters(out).values())
    _, stderr = run((target, home / "many.jsonl"), tmp_path / "many", "--max-steps", 60, code=76)
    assert "not finite, more than 1%" in stderr.splitlines()[-1]
    for folder in (tmp_path / "many" / "checkpoints").glob("step-*"):
        assert all(v.isfinite().all() for v in torch.load(folder / "trainer.pt")["masters"].values())

def test_anything_lost_in_the_run_folder(tiny, tmp_path):
    """Catches a resume that needs more than its newest complete checkpoint: the caches of data and compiler,
    heartbeat, `latest`, an unfinished write and the export may all be gone or stale."""
    out = tmp_path / "run"
    run(tiny, out, "--max-steps", 4)
    want = masters(out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    for name in ("heartbeat.json", "checkpoints/latest"):
        (out / name).unlink()
    shutil.rmtree(out / "export")
    (out / "checkpoints" / ".step-00000004").mkdir()
    (out / "checkpoints" / ".step-00000004" / "trainer.pt").write_bytes(b"half")
    with open(out / "metrics.jsonl", "a") as f:
        f.write('{"kind": "train", "st')  # a disk that was full
    stdout, _ = run(tiny, out, "--max-steps", 4, env={"HF_DATASETS_CACHE": str(tmp_path / "elsewhere")})
    assert "going on from step-00000002" in stdout
    assert all(torch.equal(v, want[k]) for k, v in masters(out).items()) and (out / "export").exists()
    assert [r["step"] for r in t.read_metrics(out) if r["kind"] == "train"] == [1, 2, 3, 4, 3, 4]
    (out / "metrics.jsonl").unlink()
    assert "finished at step 4" in run(tiny, out, "--max-steps", 4)[0]

def test_killed_in_every_phase(tiny, tmp_path):
    """Catches a moment at which kill -9 costs more than the steps since the last save: one run is killed in
    each phase of its heartbeat, workers and all, and ends with the bits of the run that nobody disturbed;
    at last it goes on as three processes, from the same micro-batch, and says what changed."""
    flags = ("--max-steps", 12, "--accumulation", 2, "--save-every", 3, "--eval-every", 3)
    out = tmp_path / "run"
    calm = run(tiny, tmp_path / "calm", *flags)[0]
    for phase in ("preparing", "loading", "compiling", "training", "evaluating", "saving"):
        process, beat = start(tiny, out, *flags), out / "heartbeat.json"

        def reached(phase=phase, beat=beat, pid=process.pid):
            found = json.loads(beat.read_text()) if beat.exists() else {}
            if found.get("phase") != phase or not psutil.pid_exists(found["pid"]):
                return False
            if phase == "saving" and not (out / "checkpoints" / "latest").exists():
                return False  # the second save, so that there is something to go on from
            return pid in (found["pid"], psutil.Process(found["pid"]).ppid())

        until(lambda p=process, r=reached: p.poll() is not None or r())
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for p in random.sample(tree, len(tree)):
            with contextlib.suppress(psutil.NoSuchProcess):  # a worker goes with its parent
                p.kill()
        finish(process)
    shutil.copytree(out, tmp_path / "wider")
    run(tiny, out, *flags)
    assert all(torch.equal(v, masters(tmp_path / "calm")[k]) for k, v in masters(out).items())
    lines = {r["step"]: r for r in metrics(out, "train")}  # the last word on each step
    for r in metrics(tmp_path / "calm", "train"):
        assert all(lines[r["step"]][k] == r[k] for k in ("micro_batches", "lr", "loss", "blocks")), r["step"]
    stdout, _ = run(tiny, tmp_path / "wider", *flags[:2], "--accumulation", 1, "--device", "cpu",
                    "--target-gpus", 0, "--drafter-gpus", "1,2", *flags[4:])
    assert "drafters 1 -> 2, accumulation 2 -> 1" in stdout and "going on from" not in calm
    for k, v in masters(tmp_path / "wider").items():
        assert torch.allclose(v, masters(out)[k], rtol=1e-4, atol=2e-5), k

def test_gradients_that_are_not_finite(tiny, tmp_path):
    """Catches an update by NaN on any drafter, one that the drafters disagree on, and a run that skips steps
    for ever: a learning rate at which the drafter overflows ends with 76 after ten skipped steps in a row,
    and all that was saved is finite."""
    out, topology = tmp_path / "run", ("--device", "cpu", "--target-gpus", "0", "--drafter-gpus", "1,2")
    _, stderr = run(tiny, out, "--max-steps", 60, "--lr", 1e30, "--warmup", 0, *topology, code=76)
    assert "lower --lr" in stderr.splitlines()[-1] and len(stderr.splitlines()) == 1, stderr
    skipped = [r["skipped_steps"] for r in metrics(out, "train")]  # the other drafter may tell the tenth
    assert skipped[-9:] == [1] * 9 and skipped[0] == 0, skipped
    saved = sorted((out / "checkpoints").glob("step-*"))
    states = [torch.load(folder / "trainer.pt")["masters"] for folder in saved]
    assert all(v.isfinite().all() for state in states for v in state.values())
    for k, v in states[-1].items():  # skipped steps left the weights as they were
        assert torch.equal(v, states[-2][k]), k
