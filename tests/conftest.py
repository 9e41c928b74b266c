"""What the tests share: a tiny real target on disk with chats for it, and the trainer run as a user runs
it."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read as torch loads: spinning starves a busy host
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may look for a hub
import numpy as np
import torch

torch.set_num_threads(1)  # the models here are so small that a second thread only waits
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def make_target(folder, layers=4, hidden=32, vocab=264, seed=0, **more):
    """A random Qwen3-style causal LM with the byte tokenizer, saved as a user's folder would be."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import train_dflash as t

    tokenizer = t.byte_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        **{
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": hidden // 4,
            "max_position_embeddings": 512,
            "eos_token_id": tokenizer.eos_token_id,
            "tie_word_embeddings": False,
            "initializer_range": 0.2,
            **more,
        }
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def dice():
    """A numpy generator of a fresh seed, which torch gets as well; a module may have another of that name."""
    seed = int(os.environ.get("DFLASH_TEST_SEED") or int.from_bytes(os.urandom(4), "big"))
    print(f"DFLASH_TEST_SEED={seed}")
    torch.manual_seed(seed)
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """(target folder, chats file) for runs of seconds."""
    import train_dflash as t

    home = tmp_path_factory.mktemp("tiny")
    chats = home / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in t.demo_chats(1, 120)))
    return make_target(home / "target", head_dim=16), chats


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """datasets' cache of the test session, so that the home folder is left alone."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    os.environ["HF_DATASETS_CACHE"] = str(datasets.config.HF_DATASETS_CACHE)


SMALL = (
    "--tokens 256 --anchors 32 --block 4 --layers 2 --max-length 128 --eval-fraction 0.1 --eval-every 4 "
    "--save-every 2 --log-every 1 --lr 2e-3"
).split()


def start(tiny, out, *flags, env=None, script=ROOT / "train_dflash.py"):
    """The trainer as a process of its own."""
    target, chats = tiny
    return subprocess.Popen(
        [
            sys.executable,
            str(script),
            "--target",
            str(target),
            "--data",
            str(chats),
            "--out",
            str(out),
            *SMALL,
            *map(str, flags),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=out.parent,
        env={**os.environ, **(env or {})},
    )


def finish(process, seconds=240):
    """-> (exit code, stdout, stderr)"""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)  # the stacks say where it hangs
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"no end after {seconds} s\n{out[-2000:]}\n{err[-4000:]}") from None
    return process.returncode, out, err


def run(tiny, out, *flags, code=0, **more):
    """Run to the end and insist on the exit code -> (stdout, stderr)."""
    found, stdout, stderr = finish(start(tiny, out, *flags, **more))
    assert found == code, f"exit {found}, not {code}\n{stdout[-3000:]}\n{stderr[-3000:]}"
    return stdout, stderr


def until(condition, seconds=120):
    """Poll until condition() is true; its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


def workers_of(main):
    """The workers of the trainer with that process id, in the order of its seats. A child that ends meanwhile
    is none."""
    found = []
    for child in psutil.Process(main).children():
        with suppress(psutil.NoSuchProcess):  # a zombie is one, too
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
    return sorted(found, key=lambda p: (p.create_time(), p.pid))


def lives(process):
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def metrics(out, kind=None):
    """The lines of metrics.jsonl, of one kind."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [r for line in lines if (r := json.loads(line)) and kind in (None, r["kind"])]


def masters(out, step=None):
    """fp32 weights of the newest (or that) checkpoint."""
    name = f"step-{step:08d}" if step else (out / "checkpoints" / "latest").read_text().strip()
    return torch.load(out / "checkpoints" / name / "trainer.pt")["masters"]
