"""Whole runs in real processes on the CPU: python -m pytest tests/test_train.py"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from conftest import SMALL, finish, lives, masters, metrics, run, start, until, workers_of
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import train_dflash as t


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory):
    """An uninterrupted run of 8 steps in one process."""
    out = tmp_path_factory.mktemp("straight") / "run"
    run(tiny, out, "--max-steps", 8, "--accumulation", 3)
    return out


def same(a, b, exact=True):
    assert a.keys() == b.keys()
    for k in a:
        torch.testing.assert_close(
            a[k], b[k], rtol=0 if exact else 1e-4, atol=0 if exact else 2e-5, msg=lambda m, k=k: k + m
        )


@pytest.mark.parametrize("topology,accumulation", [("0,1 2,3,4", 1), ("0 1", 3), ("0,1,2 0,1,2", 1)])
def test_topologies_agree(tiny, tmp_path, straight, topology, accumulation):
    """Catches weights that depend on who computes: 2 targets + 3 drafters, 1 + 1 and 3 colocated give the
    weights and the losses of one process, to float tolerance (a lost, doubled or misrouted micro-batch, a
    mean of means, a late step)."""
    targets, drafters = topology.split()
    run(
        tiny,
        tmp_path / "run",
        "--device",
        "cpu",
        "--target-gpus",
        targets,
        "--drafter-gpus",
        drafters,
        "--max-steps",
        8,
        "--accumulation",
        accumulation,
    )
    same(masters(tmp_path / "run"), masters(straight), exact=False)
    for kind in ("train", "eval"):
        a, b = metrics(tmp_path / "run", kind), metrics(straight, kind)
        assert [r["step"] for r in a] == [r["step"] for r in b] and len(a) == (8 if kind == "train" else 2)
        for x, y in zip(a, b):
            assert x["loss"] == pytest.approx(y["loss"], rel=1e-4) and x["blocks"] == y["blocks"]


def test_killed_and_resumed_is_bit_equal(tiny, tmp_path, straight):
    """Catches anything that resuming forgets (moments, step count, order, anchors, learning rate): a run
    killed with -9 at a random moment, all of it, twice, ends with the very bits of the uninterrupted
    one."""
    flags, out = ("--max-steps", 8, "--accumulation", 3), tmp_path / "run"
    for _ in range(2):
        process = start(tiny, out, *flags)
        wanted, seen = random.choice([1, 2, 3]), len(metrics(out, "train"))
        latest = out / "checkpoints" / "latest"
        until(lambda p=process, n=seen + wanted: (len(metrics(out, "train")) >= n and latest.exists())
              or p.poll() is not None)
        process.kill()
        finish(process)
    stdout, _ = run(tiny, out, *flags)
    assert "going on from step-" in stdout
    same(masters(out), masters(straight))
    by_step = {r["step"]: r for r in metrics(out, "train")}
    for r in metrics(straight, "train"):
        assert {k: by_step[r["step"]][k] for k in ("micro_batches", "loss", "lr", "accept_len")} == {
            k: r[k] for k in ("micro_batches", "loss", "lr", "accept_len")
        }
    assert len(metrics(out, "restart")) >= 1


def test_sigterm_saves_and_goes_on(tiny, tmp_path, straight):
    """Catches a stop that loses steps or is no agreement: SIGTERM to main ends 1 + 3 processes with 75 at
    one step, saved; the same command then reaches the straight run's weights."""
    flags, out = (
        ("--max-steps", 8, "--device", "cpu", "--target-gpus", "0", "--drafter-gpus", "1,2,3"),
        tmp_path / "run",
    )
    process = start(tiny, out, *flags)
    until(lambda: metrics(out, "train"))
    process.send_signal(signal.SIGTERM)
    code, _, stderr = finish(process)
    if code == 0:  # it was over before the signal: then there is nothing to see here
        pytest.fail("the run ended before the stop arrived: lengthen it")
    assert code == 75 and "stopped on request" in stderr and len(stderr.splitlines()) == 1, stderr
    step = metrics(out, "end")[-1]["step"]
    assert (out / "checkpoints" / "latest").read_text().strip() == f"step-{step:08d}" and step < 8
    run(tiny, out, *flags)
    same(masters(out), masters(straight), exact=False)


def test_nobody_reads_the_output(tiny, tmp_path):
    """Catches a run that loses its checkpoint because its output has no reader any more, as after the death
    of a supervisor: it goes on, obeys SIGTERM, saves and says 75."""
    out = tmp_path / "run"
    process = start(tiny, out, "--max-steps", 400, "--save-every", 300, "--eval-every", 300)
    until(lambda: metrics(out, "train"))
    process.stdout.close()
    seen = len(metrics(out, "train"))
    until(lambda: len(metrics(out, "train")) > seen + 5 or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75 and "stopped on request" in process.stderr.read()
    process.stderr.close()
    assert (out / "checkpoints" / "latest").exists()


@pytest.mark.parametrize("who", ["target", "drafter"])
def test_dead_worker_ends_the_run(tiny, tmp_path, who):
    """Catches a run that hangs or claims success when one of its processes is killed: exit 1, the dead one
    named in the last line, nobody left."""
    out = tmp_path / "run"
    process = start(
        tiny, out, "--epochs", 500, "--device", "cpu", "--target-gpus", "0,1", "--drafter-gpus", "2,3"
    )
    until(lambda: len(metrics(out, "train")) >= 2)
    family = psutil.Process(process.pid).children(recursive=True)
    workers_of(process.pid)[1 if who == "target" else 3].send_signal(signal.SIGKILL)
    code, _, stderr = finish(process, 60)
    assert code == 1
    name = "target 1 (CPU process 1)" if who == "target" else "drafter 1 (CPU process 3)"
    assert stderr.splitlines()[-1] == f"train_dflash.py: {name} was killed by SIGKILL"
    until(lambda: not any(lives(p) for p in family), 20)


def test_no_parent_no_children(tiny, tmp_path):
    """Catches orphans: when main is killed with -9 its workers die with it and keep no GPU."""
    out = tmp_path / "run"
    process = start(
        tiny, out, "--epochs", 500, "--device", "cpu", "--target-gpus", "0", "--drafter-gpus", "1,2"
    )
    until(lambda: len(metrics(out, "train")) >= 2)
    workers = workers_of(process.pid)
    assert len(workers) == 3
    process.kill()
    finish(process)
    until(lambda: not any(lives(p) for p in workers), 20)


def test_second_run_on_a_folder_is_refused(tiny, tmp_path):
    """Catches two trainers writing one folder: the second waits, is refused with 2 and names the first."""
    out = tmp_path / "run"
    first = start(tiny, out, "--epochs", 500)
    until(lambda: metrics(out, "train"))
    _, stderr = run(tiny, out, "--epochs", 500, code=2)
    assert f"in use by process {first.pid}" in stderr and first.poll() is None
    first.kill()
    finish(first)


def test_finished_run_says_so_and_more_steps_go_on(tiny, tmp_path, straight, capsys):
    """Catches a finished run trained again, a changed field taken silently, and a longer run that starts
    over."""
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    before = {
        p: p.stat().st_mtime_ns
        for p in out.rglob("*")
        if p.is_file() and p.name not in ("heartbeat.json", "trainer.lock")
    }
    stdout, _ = run(tiny, out, "--max-steps", 8, "--accumulation", 3)
    assert "finished at step 8" in stdout
    assert before == {p: p.stat().st_mtime_ns for p in before}
    for flags, word in (
        (("--seed", 1), "seed 0, now it is 1"),
        (("--loss", "dpace"), "loss dflash, now it is dpace"),
        (("--target-layer-ids", "0,1"), "target-layer-ids [0, 2], now it is [0, 1]"),
        (("--mask-token-id", 260), "mask-token-id 259, now it is 260"),
        (("--gamma", 3), "gamma"),
    ):
        same_but = ["--target", tiny[0], "--data", tiny[1], "--out", out, *SMALL, "--max-steps", 8, *flags]
        assert t.main([str(a) for a in same_but]) == 2
        assert word in capsys.readouterr().err
    stdout, _ = run(
        tiny, out, "--max-steps", 10, "--device", "cpu", "--target-gpus", "0", "--drafter-gpus", "1,2"
    )
    assert (
        "drafters 1 -> 2" in stdout
        and "accumulation 3 -> 1" in stdout
        and "going on from step-00000008" in stdout
    )
    assert [r["step"] for r in metrics(out, "train")] == list(range(1, 11))


def test_what_a_run_leaves_behind(straight):
    """Catches missing files and fields that a person, the supervisor or a serving engine reads."""
    assert {p.name for p in straight.iterdir()} == {
        "checkpoints",
        "config.json",
        "export",
        "heartbeat.json",
        "metrics.jsonl",
        "trainer.lock",
    }
    assert json.loads((straight / "heartbeat.json").read_text()).keys() == {
        "step",
        "micro_batches",
        "phase",
        "time",
        "pid",
    }
    for line in metrics(straight, "train"):
        assert (
            not {
                "step",
                "micro_batches",
                "loss",
                "lr",
                "grad_norm",
                "accept_len",
                "position_accuracy",
                "tokens_per_s",
                "rows_per_s",
                "mfu",
                "ms",
                "wait_ms",
                "data_ms",
                "mem_gib",
                "eta_s",
            }
            - line.keys()
        )
    assert [r["kind"] for r in metrics(straight) if r["kind"] not in ("train", "save", "eval")] == [
        "start",
        "end",
    ]
    kept = sorted(p.name for p in (straight / "checkpoints").iterdir())
    assert kept == ["latest", "step-00000004", "step-00000006", "step-00000008"]
    for folder in (straight / "export", straight / "checkpoints" / "step-00000004"):
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["DFlashDraftModel"] and (folder / "model.safetensors").exists()


def test_broken_checkpoint_is_named_and_passed_over(tiny, tmp_path, straight, capsys):
    """Catches a resume from a damaged newest checkpoint: whichever file is truncated, missing or
    zeroed, the one before it is used and the broken one named; a run then goes on to the straight weights."""
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    shutil.rmtree(out / "export")
    newest = out / "checkpoints" / "step-00000008"
    for file in list(newest.iterdir()):
        data = file.read_bytes()
        for damage in (data[: len(data) // 2], None, bytes(len(data))):
            file.unlink() if damage is None else file.write_bytes(damage)
            assert t.find_checkpoint(out).name == "step-00000006", file
            assert "step-00000008 is broken and skipped" in capsys.readouterr().out
        file.write_bytes(data)
    manifest = (newest / "manifest.json").read_text()
    for senseless in ("[]", '{"files": [1]}', '{"files": {"x": 5}}'):
        (newest / "manifest.json").write_text(senseless)
        assert t.find_checkpoint(out).name == "step-00000006", senseless
    (newest / "manifest.json").write_text(manifest)
    assert t.find_checkpoint(out) == newest
    config = (out / "config.json").read_text()
    for senseless in ("[]", "{}", '{"identity": []}'):
        (out / "config.json").write_text(senseless)
        assert "config.json is damaged" in run(tiny, out, "--max-steps", 8, code=2)[1], senseless
    (out / "config.json").write_text(config)
    capsys.readouterr()
    random.choice(list(newest.iterdir())).unlink()
    stdout, _ = run(tiny, out, "--max-steps", 8, "--accumulation", 3)
    assert "step-00000008 is broken and skipped" in stdout and "going on from step-00000006" in stdout
    same(masters(out), masters(straight))
    assert any(p.name.startswith("broken-") for p in (out / "checkpoints").iterdir())
    export = (out / "export" / "model.safetensors").read_bytes()
    for folder in (out / "checkpoints").glob("step-*"):
        (folder / "trainer.pt").write_bytes(b"")
    assert "checkpoints is whole: restore one" in run(tiny, out, "--max-steps", 12, code=2)[1]
    assert (out / "export" / "model.safetensors").read_bytes() == export


@pytest.mark.parametrize("when", ["main imports", "workers import"])
def test_interrupted_while_importing(tiny, tmp_path, when):
    """Catches a Ctrl-C, which a terminal sends to every process, that meets one before it has its handlers:
    main then ends at once, workers leave it to main. Never a traceback."""
    process = start(tiny, tmp_path / "run", "--max-steps", 500, "--device", "cpu")
    if when == "main imports":
        until(lambda: b"libtorch" in Path(f"/proc/{process.pid}/maps").read_bytes())
        process.send_signal(signal.SIGINT)
    else:
        for one in (*until(lambda: workers_of(process.pid)), process):
            one.send_signal(signal.SIGINT)
    code, _, stderr = finish(process)
    assert code == (-signal.SIGINT if when == "main imports" else 75), stderr
    assert "Traceback" not in stderr and "Interrupt" not in stderr


@pytest.mark.parametrize("given", ["nothing", "torch's default", "a place"])
def test_where_the_compile_cache_lies(given, tiny, tmp_path, monkeypatch):
    """Catches a cache in /tmp, the default that torch writes into the environment once torch._dynamo is
    imported, in main or in what started it; and a place the user named that is not obeyed."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    places = {"nothing": None, "torch's default": default_cache_dir(), "a place": str(tmp_path / "mine")}
    place = places[given]
    process = start(tiny, tmp_path / "run", "--max-steps", 500, "--device", "cpu",
                    env={"TORCHINDUCTOR_CACHE_DIR": place} if place else None)
    found = {one.environ()["TORCHINDUCTOR_CACHE_DIR"] for one in until(lambda: workers_of(process.pid))}
    process.send_signal(signal.SIGINT)
    code, stdout, stderr = finish(process)
    assert code == 75, stdout + stderr
    assert found == {place if given == "a place" else str(tmp_path / ".compile_cache")}


def test_a_compile_cache_that_cannot_be_written(tiny, tmp_path):
    """Catches a traceback for a place that is a file; and a run lost for the one beside it being so."""
    (tmp_path / ".compile_cache").write_text("")
    _, stderr = run(tiny, tmp_path / "a", "--max-steps", 2, "--device", "cpu", code=2,
                    env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / ".compile_cache")})
    assert str(tmp_path / ".compile_cache") in stderr.splitlines()[-1] and "Traceback" not in stderr
    run(tiny, tmp_path / "b", "--max-steps", 2, "--device", "cpu", env={"TORCHINDUCTOR_CACHE_DIR": ""})
    assert (tmp_path / "b" / ".compile_cache").is_dir()


def test_demo_stopped_while_it_teaches(tmp_path):
    """Catches a wish to stop that is told as a mistake of the user's, or answered after the teaching."""
    out = tmp_path / "demo"
    process = subprocess.Popen([sys.executable, t.__file__, "--out", str(out), "--device", "cpu"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until((out / "chats.jsonl").exists)  # the workers are being started
    until(lambda: '"step": 20,' in (out / "heartbeat.json").read_text())
    process.send_signal(signal.SIGINT)
    code, stdout, stderr = finish(process)
    assert code == 75 and "run it again to go on" in stderr.splitlines()[-1], stderr
    assert "nan" not in stdout and not (out / "target").exists()


def test_tracker_that_fails_stops_nothing(tiny, tmp_path):
    """Catches a tracker that can end the training; offline it logs without a key, and its run id survives
    a restart."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    env |= {
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
        "HOME": str(tmp_path),
        "WANDB_MODE": "offline",
    }
    run(tiny, tmp_path / "good", "--max-steps", 2, "--wandb", "test", env=env)
    first = (tmp_path / "good" / "wandb_id").read_text()
    run(tiny, tmp_path / "good", "--max-steps", 3, "--wandb", "test", env=env)
    assert (tmp_path / "good" / "wandb_id").read_text() == first
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "wandb_id").mkdir()  # a folder where the id file should be: the tracker cannot start
    stdout, _ = run(tiny, tmp_path / "bad", "--max-steps", 2, "--wandb", "test", env=env)
    assert "wandb is off" in stdout and "finished at step 2" in stdout
