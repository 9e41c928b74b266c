"""What faults cost: python tests/bench_faults.py [ends|checkpoints|rows] [--kills 20] [--rows 50]

JSON lines. ends: for each phase of a save, how many kills -9 left a complete checkpoint behind; for each kind
of dead, stopped or told process of a run of two targets and two drafters on the CPU, the seconds from the
signal to the end of the run, its exit code and last line, and how many of its processes were left.
checkpoints: each file of the newest one is damaged in turn; how many runs went on from the one before it,
passed the step of the damaged one, ended with the undisturbed run's bits, and deleted nothing.
rows: for each kind of odd row, how many were dropped with the right reason, or kept where that is right,
among as many good rows; none counts when a good one was lost. DFLASH_TEST_SEED=... repeats it.
"""
import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import datasets
import psutil
import torch
from conftest import finish, make_target, masters, metrics, run, start, until, workers_of
from test_data import CHATML, byte_level, disguise, exchange, expected, learnable, lines, random_chat
from test_faults import CONFIG, state, write_and_die

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
    chosen = psutil.Process(process.pid) if who is None else workers_of(process.pid)[who]
    begin = time.monotonic()
    chosen.send_signal(number)
    code, _, stderr = finish(process)
    seconds = time.monotonic() - begin
    left = psutil.wait_procs(tree, 5)[1]
    return {"seconds": round(seconds, 1), "exit": code, "left": len(left),
            "said": (stderr.strip().splitlines() or [""])[-1][:200]}

DAMAGES = {
    "truncated": lambda path: os.truncate(path, random.randrange(path.stat().st_size)),
    "missing": lambda path: path.unlink(),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size))}

def contents(folder):
    return {f.name: f.read_bytes() for f in folder.iterdir()}

def recovered(tiny, calm, out, name, damage):
    """Damage that file of the newest checkpoint, step 6, of a run on its way to 8 -> did it recover."""
    shutil.copytree(calm, out)
    at = out / "checkpoints"
    shutil.rmtree(at / "step-00000008")
    shutil.rmtree(out / "export")
    (at / "latest").write_text("step-00000006\n")
    damage(at / "step-00000006" / name)
    left = {step: contents(at / f"step-0000000{step}") for step in (2, 4, 6)}
    stdout, _ = run(tiny, out, "--max-steps", 8, "--keep", 9)
    aside = list(at.glob("broken-00000006-*"))
    return ("step-00000006 is broken and skipped" in stdout and "going on from step-00000004" in stdout
            and len(aside) == 1 and contents(aside[0]) == left[6]
            and all(contents(at / f"step-0000000{step}") == left[step] for step in (2, 4))
            and all(torch.equal(v, masters(out, step)[k])
                    for step in (6, 8) for k, v in masters(calm, step).items()))

def odd_rows(dice, tokenizer):
    """Kinds of rows: name -> (a maker of one, what its note says). A maker gives a row or a line; where the
    note is None the row is to be kept, and comes with the ids and mask it should have."""
    vocab, million = len(tokenizer), 1_000_000
    call = {"function": {"name": "f", "arguments": '{"city": '}}

    def word():
        return "".join(dice.choices("abcdefgh", k=dice.randint(1, 9)))

    def chat():
        return exchange(f"Question {dice.random()}?", f"Answer {dice.random()}.")

    def changed(i, **turn):
        row = chat()
        row["messages"][i] |= turn
        return row

    def line():
        return lines([chat()])[:-1]

    def spoilt(at):
        return (whole := line())[:at] + bytes([dice.randrange(0x80, 0x100)]) + whole[at:]

    def ids(length, begin, odd=()):
        return {"input_ids": [*dice.choices(range(vocab), k=length - len(odd)), *odd],
                "loss_mask": [int(i >= begin) for i in range(length)]}

    def long_row():
        row = ids(million, dice.randrange(4000))
        return row, (row["input_ids"][:4096], list(map(bool, row["loss_mask"][:4096])))

    def kept(row, written=None):
        return written or row, expected(tokenizer, row)

    def spelt():
        row = chat() | {"tools": [{"name": word()}], "finished": dice.choice([None, True, False])}
        return kept(row, disguise(dice, row))

    return {
        "not JSON": (lambda: dice.choice([b"{" + word().encode(), b"{}{}", line()[1:]]), "not JSON"),
        "half a last line": (lambda: (whole := line())[: dice.randrange(1, len(whole))], "not JSON"),
        "bytes that are not UTF-8": (lambda: spoilt(dice.randrange(60)), "not JSON"),
        "an empty line": (lambda: b" " * dice.randrange(9), "empty line"),
        "not an object": (lambda: json.dumps(dice.choice([[1], word(), dice.random(), None])).encode(),
                          "not an object"),
        "no messages": (lambda: dice.choice([{}, {"messages": []}, {"messages": None}, {"messages": word()}]),
                        "no messages"),
        "an odd role": (lambda: changed(dice.randrange(2), role=word()), "role"),
        "two users running": (lambda: {"messages": chat()["messages"][:1] + chat()["messages"]}, "two users"),
        "a template that raises": (lambda: changed(dice.randrange(2), content=word() + "!"), "not so loud"),
        "an empty reply": (lambda: changed(1, content=dice.choice(["", None])), "nothing to learn"),
        "no reply": (lambda: {"messages": chat()["messages"][:1]}, "nothing to learn"),
        "content that is not text": (lambda: changed(dice.randrange(2), content=dice.choice(
            [[{"type": "image"}], [{"text": 1}], {"a": 1}, 17])), "content that is not text"),
        "tool calls that are not JSON": (lambda: changed(1, tool_calls=[call]), "not JSON"),
        "a token beyond the vocabulary": (lambda: ids(9, 5, [dice.choice(
            [-1, -dice.randrange(1, 9**9), vocab, vocab + dice.randrange(9**9)])]), "beyond the vocabulary"),
        "ids and mask that differ in length": (
            lambda: ids(9, 5) | {"loss_mask": [1] * dice.choice([0, 5, 8, 10])}, "differ in length"),
        "a million tokens, the reply beyond the cut": (
            lambda: ids(million, dice.randrange(4096, million - 9)), "nothing to learn after the cut"),
        "a million tokens, the reply before it": (long_row, None),
        "an empty prompt": (lambda: kept(changed(0, content="")), None),
        "other spellings of a chat": (spelt, None)}

def treated(dice, tokenizer, path, make, note, odd, last):
    """So many odd rows among good ones, or at the very end of the file -> how many were treated right."""
    good = [row for row in (random_chat(dice) for _ in range(4 * odd + 9))
            if learnable(expected(tokenizer, row)[1])]
    drawn = [(row, expected(tokenizer, row), None) for row in good]
    for made in (make() for _ in range(odd)):
        drawn.append((*made, None) if note is None else (made, ([], []), note))
    counts = [False] * len(good) + [True] * odd
    order = list(range(len(drawn))) if last else dice.sample(range(len(drawn)), len(drawn))
    path.write_bytes(b"\n".join(lines([row])[:-1] if isinstance(row, dict) else row
                                for row in (drawn[i][0] for i in order)) + b"\n" * (not last))
    cfg = t.Config(data=(str(path),), tokens=4096, max_length=4096, eval_fraction=0.1, workers=1)
    found = t.prepare(cfg, tokenizer, len(tokenizer)).rows
    right = [0, 0]
    for i, row in zip(order, found, strict=True):
        _, (ids, mask), said = drawn[i]
        right[counts[i]] += (row["input_ids"], row["loss_mask"]) == (ids, mask) and (
            said in row["note"] if said else not row["note"])
    return right[1] if right[0] == len(good) else 0

def figure(name, good, tried, unit):
    print(json.dumps({"name": name, "value": f"{good} of {tried}", "unit": unit}), flush=True)

def checkpoints(home, tiny):
    calm = home / "calm"
    run(tiny, calm, "--max-steps", 8, "--keep", 9)
    names = sorted(f.name for f in (calm / "checkpoints" / "step-00000006").iterdir())
    for how, damage in DAMAGES.items():
        good = sum(recovered(tiny, calm, home / f"{how}-{name}", name, damage) for name in names)
        figure(f"newest checkpoint, {', '.join(names)} {how} in turn: went on from the one before, passed "
               "that step, the undisturbed run's bits, nothing deleted", good, len(names), "runs")

def rows(home, count):
    seed = int(os.environ.get("DFLASH_TEST_SEED") or random.randrange(2**32))
    print(f"DFLASH_TEST_SEED={seed}", file=sys.stderr)
    dice, tokenizer = random.Random(seed), byte_level(CHATML.replace("{{ m.content }}", (
        "{% if loop.index0 and m.role == 'user' == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('two users running') }}{% endif %}{% if '!' in m.content %}"
        "{{ raise_exception('not so loud') }}{% endif %}{{ m.content }}")))
    for name, (make, note) in odd_rows(dice, tokenizer).items():
        n = min(count, 5) if "million" in name else count
        last = name == "half a last line"
        files, each = (n, 1) if last else (1, n)
        good = sum(treated(dice, tokenizer, home / "rows.jsonl", make, note, each, last)
                   for _ in range(files))
        done = f"dropped as '{note}'" if note else "kept"
        figure(f"rows, {name}: {done}, all good rows kept", good, n, "rows")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", default="ends", choices=("ends", "checkpoints", "rows"))
    parser.add_argument("--kills", type=int, default=20, help="in each phase of a save")
    parser.add_argument("--rows", type=int, default=50, help="of each kind")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["HF_DATASETS_CACHE"] = str(home / "datasets")
        datasets.config.HF_DATASETS_CACHE = home / "datasets"  # it was read when datasets was imported
        (home / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in t.demo_chats(1, 120)))
        tiny = make_target(home / "target", head_dim=16), home / "chats.jsonl"
        if arguments.what == "rows":
            rows(home, arguments.rows)
            sys.exit()
        if arguments.what == "checkpoints":
            checkpoints(home, tiny)
            sys.exit()
        for phase in ("tensors", "trainer state", "fsync", "rename", "latest"):
            (home / phase).mkdir()
            good = saves(phase, arguments.kills, home / phase)
            print(json.dumps({"bench": "faults", "what": f"kill -9 in a save: {phase}", "survived": good,
                              "kills": arguments.kills}), flush=True)
        for i, (what, who, number) in enumerate((
                ("target killed", 1, signal.SIGKILL), ("drafter killed", 3, signal.SIGKILL),
                ("first drafter killed", 2, signal.SIGKILL), ("main killed", None, signal.SIGKILL),
                (f"target stopped, --stall-timeout {STALL}", 1, signal.SIGSTOP),
                (f"drafter stopped, --stall-timeout {STALL}", 3, signal.SIGSTOP),
                ("asked to stop (SIGTERM)", None, signal.SIGTERM))):
            came = notice(tiny, home / f"run{i}", who, number)
            print(json.dumps({"bench": "faults", "what": what, **came}), flush=True)
