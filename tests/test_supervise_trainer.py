"""Supervisor and real trainer together, on the CPU: python -m pytest tests/test_supervise_trainer.py"""
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
import torch
from conftest import SMALL, make_target, masters, metrics, run, workers_of
from supervise_kit import ROOT, SUPERVISE, alive, call, supervised, toy, until


def trainer(tiny, *flags):
    target, chats = tiny
    return [sys.executable, str(ROOT / "train_dflash.py"), "--target", str(target), "--data", str(chats),
            *SMALL, *map(str, flags)]

def test_killed_three_times_and_there_in_the_morning(tiny, tmp_path):
    """Catches a run that does not come back by itself, or comes back to other weights: the trainer is killed
    with -9 three times at random moments, main or a worker, and ends with the bits of an undisturbed run.
    What it used as --out is the supervisor's folder, told by the environment alone."""
    flags = ("--max-steps", 16, "--accumulation", 2, "--save-every", 2)
    with supervised(tmp_path, "--gpu-wait 1", trainer(tiny, *flags)) as s:
        for kills in range(3):
            begin, wanted = len(metrics(s.dir, "train")), random.randint(1, 3)
            until(lambda n=begin + wanted: len(metrics(s.dir, "train")) >= n or s.events("end"), 120)
            leader = psutil.Process(s.leader())
            victims = [leader, *workers_of(leader.pid)] if kills else [leader]
            random.choice(victims).send_signal(signal.SIGKILL)
            assert s.event("exit", kills + 1, 60)["step"] is not None
        assert s.ended(180) == 0
        assert metrics(s.dir, "end")[-1]["status"] == "finished" and len(metrics(s.dir, "restart")) >= 1
        assert s.state()["totals"]["attempts"] == 4 and s.events("end")[0]["code"] == 0
        assert "step 16 of 16" in call("status", s.dir)[1]
    run(tiny, tmp_path / "calm", *flags)
    for name, weights in masters(tmp_path / "calm").items():
        assert torch.equal(masters(s.dir)[name], weights), name

def test_the_same_failure_again_is_given_up_with_its_reason(tiny, tmp_path):
    """Catches a supervisor that relaunches for ever what fails at the same step each time: a target whose
    checkpoint is damaged makes the trainer diverge (76); one plain retry, then 93 and the trainer's reason.
    """
    from safetensors.torch import load_file, save_file

    target = make_target(tmp_path / "target", head_dim=16)
    weights = load_file(target / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][:] = float("inf")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    with supervised(tmp_path, "--gpu-wait 1", trainer((target, tiny[1]), "--max-steps", 50)) as s:
        assert s.ended(120) == 93
        assert [e["code"] for e in s.events("exit")] == [76, 76]
        reason = s.events("decision")[-1]["text"]
        assert "not finite, more than 1%" in reason and "relaunching is useless" in reason, reason
        assert "not finite" in call("status", s.dir)[1]

def test_a_wrong_flag_is_passed_on(tiny, tmp_path):
    """Catches a supervisor that tries a user's mistake again, or hides the trainer's one line."""
    with supervised(tmp_path, "", trainer(tiny, "--anchers", 3)) as s:
        assert s.ended() == 2 and len(s.events("exit")) == 1
        assert "did you mean --anchors" in s.events("decision")[0]["text"] and b"--anchors" in s.log()

def test_stop_saves_and_the_next_start_goes_on(tiny, tmp_path):
    """Catches a stop that loses steps: `supervise.py stop` waits for the trainer's checkpoint (75), nothing
    is started after it, and the same command later goes on from there."""
    flags = ("--max-steps", 400, "--save-every", 300, "--eval-every", 300)
    with supervised(tmp_path, "", trainer(tiny, *flags)) as s:
        until(lambda: metrics(s.dir, "train"), 60)
        code, stdout, _ = call("stop", s.dir)
        assert code == 0 and "nothing runs" in stdout and s.ended() == 75
    step = metrics(s.dir, "end")[-1]["step"]
    assert (s.dir / "checkpoints" / "latest").read_text() == f"step-{step:08d}\n"
    assert len(s.events("start")) == 1
    with supervised(tmp_path, "", trainer(tiny, *flags)) as s:
        s.logged(f"going on from step-{step:08d}", 2, 60)
        s.send(signal.SIGTERM)
        assert s.ended() == 75

@pytest.mark.skipif(not Path("/usr/bin/tmux").exists(), reason="tmux is not installed")
def test_tmux_detached_hung_up_and_attached_again(tmp_path):
    """Catches a run that dies with its terminal: started in a real tmux, its client hung up without a word,
    the run goes on, and a later client sees it again."""
    name, folder = f"dflash-{uuid.uuid4().hex[:8]}", tmp_path / "run"
    command = shlex.join([sys.executable, str(SUPERVISE), "--run-dir", str(folder), "--",
                          *toy("--steps 100000 --pace 0.02 --beat")])

    def tmux(*words, **more):
        return subprocess.run(["tmux", "-L", name, *words], check=True, capture_output=True, text=True,
                              **more)

    def attach():
        """A client on a terminal of its own, as ssh gives one."""
        master, slave = os.openpty()
        client = subprocess.Popen(["tmux", "-L", name, "attach"], stdin=slave, stdout=slave, stderr=slave,
                                  start_new_session=True, env={**os.environ, "TERM": "xterm"})
        os.close(slave)
        until(lambda: tmux("list-clients").stdout, what="a client")
        return client, master

    def step():
        beat = folder / "heartbeat.json"
        return json.loads(beat.read_text())["step"] if beat.exists() else 0

    tmux("new-session", "-d", "-x", "100", "-y", "30", command)
    try:
        client, master = attach()
        until(lambda: step() > 3)
        supervisor = int((folder / "supervise.lock").read_text().split()[1])
        os.close(master)  # the ssh connection is gone: the client gets a SIGHUP
        client.wait(20)
        until(lambda: not tmux("list-clients").stdout)
        seen = step()
        until(lambda: step() > seen + 10, what="a step after the hang-up")
        assert alive(supervisor)
        client, master = attach()
        until(lambda: f"{step()}/100000"[:3] in tmux("capture-pane", "-p").stdout)
        client.kill()
        os.close(master)
        client.wait(20)
        assert call("stop", folder)[0] == 0
        assert json.loads((folder / "state.json").read_text())["history"][-1]["code"] == 75
    finally:
        subprocess.run(["tmux", "-L", name, "kill-server"], check=False, capture_output=True)
