"""pack(), micro_batch(), blocks_of(), schedule(), learning_rate() against slow loops, each process walked.

    python -m pytest tests/test_batches.py                       DFLASH_TEST_SEED=... repeats a failure
"""
import dataclasses
import gzip
import hashlib
import itertools
import math
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest

import train_dflash as t

HERE = Path(__file__).parent

@pytest.fixture
def dice():
    seed = int(os.environ.get("DFLASH_TEST_SEED") or int.from_bytes(os.urandom(4), "big"))
    print(f"DFLASH_TEST_SEED={seed}")
    return np.random.default_rng(seed)

def config(dice, **flags):
    seed = int(dice.integers(10**6))
    return t.Config(**{"tokens": 128, "max_length": 60, "anchors": 16, "block": 8, "seed": seed} | flags)

def make_documents(dice, cfg, count=40):
    """Random documents whose token ids run on from one to the next: every token is known by its id."""
    lengths = dice.integers(2, cfg.max_length + 1, count)
    ends = np.cumsum(lengths) + 1000
    rows = datasets.Dataset.from_dict({
        "input_ids": [list(range(end - length, end)) for end, length in zip(ends, lengths)],
        "loss_mask": [(dice.random(n) < dice.choice([0.0, 0.5, 0.9, 1.0])).tolist() for n in lengths]})
    held = dice.random(count) < 0.3
    held[:2] = False, True  # neither side is empty
    plans = [t.pack(lengths, np.flatnonzero(held == side), cfg.tokens, cfg.seed) for side in (False, True)]
    return t.Documents(rows, *plans, "", "")

def tokens_of(documents, order):
    return sorted(itertools.chain.from_iterable(documents.rows[order.tolist()]["input_ids"]))

def digest(batch):
    parts = (k.encode() + np.ascontiguousarray(v).tobytes() for k, v in sorted(batch.items()))
    return hashlib.sha256(b"".join(parts)).hexdigest()

# ------------------------------------------------------------------------------------- order and schedule

def written_out(start, total, group, rhythm):
    """The whole run from (step, m) on, in order: [(kind, index), ...]."""
    (step, m), (eval_every, n_eval), events = start, rhythm, []
    while m < total:
        for _ in range(group):
            events += [("train", m)] if m < total else []
            m += 1
        step += 1
        if step % eval_every == 0 or m >= total:
            events += [("eval", j) for j in range(n_eval)]
    return events

def walk(start, total, group, rhythm, count):
    """What each of `count` processes meets, as the workers pick it: process k the index mod count = k."""
    return [[e for e in t.schedule(*start, total, group, *rhythm) if e[1] % count == k] for k in range(count)]

def test_every_process_of_every_topology_walks_the_same_run(dice):
    """A micro-batch lost or done twice, also over a resume; an evaluation that not everyone comes to."""
    for _ in range(80):
        total, *rhythm = (int(dice.integers(1, high)) for high in (90, 9, 7))
        start, done = (0, 0), {"targets": Counter(), "drafters": Counter()}
        while start[1] < total:  # attempts of one run, each with GPUs and accumulation of its own
            T, D, A = (int(x) for x in dice.integers(1, 6, 3))
            steps = min(int(dice.integers(1, 12)), math.ceil((total - start[1]) / (D * A)))
            until = start[1] + steps * D * A
            events = written_out(start, total, D * A, rhythm)
            for side, count in (("targets", T), ("drafters", D)):
                met = walk(start, total, D * A, rhythm, count)
                assert met == [[e for e in events if e[1] % count == k] for k in range(count)]
                done[side].update(i for kind, i in itertools.chain(*met) if kind == "train" and i < until)
            start = start[0] + steps, min(until, total)
        assert done["targets"] == done["drafters"] == Counter(range(total))
        assert list(t.schedule(*start, total, 3, *rhythm)) == []  # a finished run does nothing

def test_an_epoch_shows_every_token_once_and_evaluation_the_held_out_ones(dice):
    """Documents lost or repeated between packing and micro-batches, held-out tokens trained on."""
    for _ in range(4):
        cfg = config(dice)
        documents, epochs = make_documents(dice, cfg), 3
        bins, n_eval = (len(bounds) - 1 for _, bounds in (documents.train, documents.held_out))
        T, D, A = (int(x) for x in dice.integers(1, 5, 3))
        for count in (T, D):
            tokens = {"train": [[] for _ in range(epochs)], "eval": [[]]}
            for kind, i in itertools.chain(*walk((0, 0), epochs * bins, D * A, (10**6, n_eval), count)):
                batch = t.micro_batch(documents, cfg, i, kind == "eval")
                seen = tokens[kind][i // bins if kind == "train" else 0]
                seen.extend(batch["ids"][:batch["tokens_used"]].tolist())
            want = tokens_of(documents, documents.train[0])
            assert [sorted(seen) for seen in tokens["train"]] == [want] * epochs
            assert sorted(tokens["eval"][0]) == tokens_of(documents, documents.held_out[0])

# ------------------------------------------------------------------------------------------------ packing

def chats(dice):
    """About the tokens of the chats that the figures are made with: a line's bytes / 4."""
    with gzip.open(HERE / "smollm2-chats.jsonl.gz", "rb") as f:
        return np.clip([int(len(line) / 4 * dice.uniform(0.8, 1.2)) for line in f], 2, 3072)

def log_normal(dice):
    return np.clip(dice.lognormal(math.log(4500) - 0.7**2 / 2, 0.7, 20_000), 2, 8192).astype(np.int64)

@pytest.mark.parametrize("draw, capacity", [(chats, 16_384), (log_normal, 40_064)])
def test_packing_loses_nothing_and_pads_at_most_three_percent(draw, capacity, dice):
    """A bin over its capacity, a document lost or doubled, room wasted, an order that ignores the seed."""
    lengths = draw(dice)
    documents = np.flatnonzero(dice.random(len(lengths)) < 0.95)  # the training side
    order, bounds = t.pack(lengths, documents, capacity, 1)
    assert sorted(order.tolist()) == documents.tolist()
    assert (bounds[0], bounds[-1]) == (0, len(order))
    for a, b in itertools.pairwise(bounds.tolist()):
        inside = lengths[order[a:b]]
        assert 0 < inside.sum() <= capacity
        assert (np.diff(inside) <= 0).all()  # longest first
    assert 1 - lengths[documents].sum() / capacity / (len(bounds) - 1) <= 0.03
    again, other = (t.pack(lengths, documents, capacity, seed)[0] for seed in (1, 2))
    assert (again == order).all()
    assert (other != order).any()

def test_packing_takes_the_tightest_bin(dice):
    """Another fit than best-fit decreasing: more micro-batches, more padding."""
    for _ in range(40):
        capacity = int(dice.integers(20, 200))
        lengths, free = dice.integers(1, capacity + 1, dice.integers(1, 90)), []
        for length in sorted(lengths.tolist(), reverse=True):
            fitting = [i for i, room in enumerate(free) if room >= length]
            if not fitting:
                free.append(capacity)
            free[min(fitting, key=free.__getitem__, default=-1)] -= length
        order, bounds = t.pack(lengths, np.arange(len(lengths)), capacity, int(dice.integers(99)))
        rooms = [capacity - lengths[order[a:b]].sum() for a, b in itertools.pairwise(bounds)]
        assert sorted(rooms) == sorted(free)

def test_a_document_longer_than_a_micro_batch_is_refused(dice):
    """Tokens silently cut off, or written over the next document's."""
    cfg = config(dice)
    documents = make_documents(dice, cfg)
    for length in (129, 130, 1000):
        with pytest.raises((AssertionError, ValueError)):
            t.pack(np.array([5, length, 7]), np.arange(3), 128, 0)
    bounds = t.pack(np.array([5, 128, 7]), np.arange(3), 128, 0)[1]
    assert sorted(np.diff(bounds)) == [1, 2]  # a document of 128 has one to itself
    order = documents.train[0]
    full = t.Documents(documents.rows, (order, np.array([0, len(order)])), documents.held_out, "", "")
    with pytest.raises(AssertionError, match=f"{len(tokens_of(documents, order))} tokens, more than 128"):
        t.micro_batch(full, cfg, 0)

# ------------------------------------------------------------------------------------------- micro-batches

def test_a_micro_batch_depends_on_its_number_and_the_seed_alone(dice, tmp_path):
    """Two processes that see different anchors for one m; anchors or an order that never change."""
    cfg = config(dice, anchors=8)
    documents = make_documents(dice, cfg, 60)
    bins = len(documents.train[1]) - 1
    asked = [(int(m), False) for m in dice.permutation(3 * bins)] + [(0, True)]
    here, again = ([digest(t.micro_batch(documents, cfg, *a)) for a in way] for way in (asked, asked[::-1]))
    assert here == again[::-1]  # whatever came before

    documents.rows.save_to_disk(tmp_path / "rows")
    (tmp_path / "rest").write_bytes(pickle.dumps((documents.train, documents.held_out, cfg, asked)))
    program = ("import pickle, sys, datasets, test_batches as b\n"
               "*plans, cfg, asked = pickle.load(open(sys.argv[1] + '/rest', 'rb'))\n"
               "found = b.t.Documents(datasets.load_from_disk(sys.argv[1] + '/rows'), *plans, '', '')\n"
               "print(*(b.digest(b.t.micro_batch(found, cfg, *a)) for a in asked))")
    path = {"PYTHONPATH": os.pathsep.join([str(Path(t.__file__).parent), str(HERE)])}
    there = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=os.environ | path, check=True,
                           capture_output=True, text=True).stdout.split()
    assert there == here

    other = dataclasses.replace(cfg, seed=cfg.seed + 1)
    epochs = [[tuple(t.micro_batch(documents, c, m)["documents"]) for m in range(first, first + bins)]
              for first, c in ((0, cfg), (bins, cfg), (0, other))]
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1
    assert len({tuple(epoch) for epoch in epochs}) == 3

    row = datasets.Dataset.from_dict({"input_ids": [list(range(100))], "loss_mask": [[True] * 100]})
    alone = t.Documents(row, *[(np.array([0]), np.array([0, 1]))] * 2, "", "")  # the same document in every m
    drawn = [t.micro_batch(alone, c, m)["anchor"].tolist() for c in (cfg, other) for m in range(5)]
    drawn.append(t.micro_batch(alone, cfg, 0, True)["anchor"].tolist())
    assert len({tuple(anchors) for anchors in drawn}) == 11

def test_the_arrays_of_a_micro_batch(dice):
    """Positions that run through documents, padding that is supervised, a mask one off from its ids."""
    for _ in range(20):
        cfg = config(dice, anchors=16 * int(dice.integers(1, 12)))
        documents = make_documents(dice, cfg)
        m = int(dice.integers(len(documents.held_out[1]) - 1))
        batch = t.micro_batch(documents, cfg, m, bool(dice.random() < 0.5))
        rows = [documents.rows[d] for d in batch["documents"].tolist()]
        lengths = [len(row["input_ids"]) for row in rows]
        padding = cfg.tokens - sum(lengths)
        assert (batch["lengths"].tolist(), batch["tokens_used"]) == (lengths, sum(lengths))
        assert batch["ids"].tolist() == [x for row in rows for x in row["input_ids"]] + [0] * padding
        assert batch["positions"].tolist() == [i for n in lengths for i in range(n)] + [0] * padding
        bounds = bounded([row["loss_mask"] for row in rows], padding)
        compare(batch, batch["ids"], bounds, (cfg.anchors, cfg.block))

# ------------------------------------------------------------------------------------------------- blocks

def bounded(masks, padding):
    """Masks of documents side by side, then padding (documents of one token) -> lists mask, begin, end."""
    mask, begin, end = [], [], []
    for document in [*masks, *[[0]] * padding]:
        begin, end = begin + [len(mask)] * len(document), end + [len(mask) + len(document)] * len(document)
        mask = mask + [bool(x) for x in document]
    return mask, begin, end

def compare(found, ids, bounds, shape):
    """Every array of blocks_of() against a slow loop from the rule; the draw itself is taken as found."""
    (mask, begin, end), (N, B), anchors, real = bounds, shape, found["anchor"].tolist(), found["blocks"]
    eligible = [i for i in range(len(mask) - 1) if mask[i] and mask[i + 1] and i + 1 < end[i]]
    assert real == min(N, len(eligible))
    assert anchors[:real] == sorted(set(anchors[:real]) & set(eligible))
    assert anchors[real:] == [0] * (N - real)
    start, tokens, valid = [0] * N, np.zeros((N, B), int), np.zeros((N, B), bool)
    tokens[:, 0] = ids[found["anchor"]]
    for n, a in enumerate(anchors[:real]):
        start[n] = begin[a]
        for k in range(1, B):
            if a + k == end[a] or not mask[a + k]:
                break
            tokens[n, k], valid[n, k] = ids[a + k], True
    assert found["start"].tolist() == start
    assert (found["valid"] == valid).all()
    assert (found["tokens"] == tokens).all()

def draw_blocks(masks, padding, shape, seed):
    """blocks_of() for these masks, compared with the slow loop."""
    bounds = bounded(masks, padding)
    ids = 1000 + np.random.default_rng(seed).permutation(len(bounds[0]))
    found = t.blocks_of(ids, *map(np.array, bounds), *shape, np.random.default_rng(seed))
    compare(found, ids, bounds, shape)
    return found["anchor"][:found["blocks"]].tolist()

def test_blocks_against_a_slow_loop(dice):
    """A label beyond the document or after the reply, slot 0 in the loss, an anchor that may not be one."""
    for _ in range(300):
        masks = [dice.random(dice.integers(1, 30)) < dice.choice([0.0, 0.5, 0.9, 1.0])
                 for _ in range(dice.integers(1, 6))]
        shape = int(dice.integers(1, 60)), int(dice.integers(2, 17))
        draw_blocks(masks, int(dice.integers(0, 20)), shape, int(dice.integers(10**6)))

MASKS = {"two adjacent": ([0, 0, 0, 1, 1, 0, 0], [3]), "one alone": ([0, 0, 1, 0, 0], []),
         "none": ([0] * 6, []), "the last B-1": ([0] * 6 + [1] * 3, [6, 7]), "length two": ([1, 1], [0])}

@pytest.mark.parametrize("name", MASKS)
def test_eligible_places_do_not_depend_on_the_company(name, dice):
    """The last anchor dropped, short replies unusable, padding or a rich neighbour that changes them (A6)."""
    mask, want = MASKS[name]
    for padding, (before, after) in itertools.product((0, 50), ((0, 0), (0, 40), (40, 0))):
        masks = [[1] * before, mask, [1] * after]  # the rich one has 39 places
        anchors = draw_blocks(masks, padding, (64, 4), int(dice.integers(10**6)))
        assert [a - before for a in anchors if before <= a < before + len(mask)] == want
        assert len(anchors) == len(want) + (39 if before or after else 0)

def test_anchors_are_drawn_evenly(dice):
    """Places at the ends drawn less often or never, neighbours that come together too often."""
    places, N, rounds, seed = 60, 12, 3000, int(dice.integers(10**6))
    draws = [draw_blocks([[1] * 31] * 2, 7, (N, 2), seed + i) for i in range(rounds)]
    pairs = ((a, b) for anchors in draws for a, b in itertools.pairwise(anchors) if b - a == 1)
    for counted, cells, share in ((Counter(itertools.chain(*draws)), places, N / places),
                                  (Counter(pairs), places - 2, N * (N - 1) / places / (places - 1))):
        assert len(counted) == cells
        chi = sum((n - rounds * share) ** 2 / (rounds * share) for n in counted.values())
        assert chi < cells + 8 * math.sqrt(2 * cells), chi

# ------------------------------------------------------------------------------------------ learning rate

def test_learning_rate_against_a_table():
    """A warm-up that starts at 0 or overshoots, a missed peak, an end above 0, a rate that counts GPUs."""
    shares = {0: 1 / 11, 1: 2 / 11, 5: 6 / 11, 9: 10 / 11, 10: 1, 40: 0.75, 55: 0.5, 70: 0.25, 100: 0}
    for flags in ({}, {"accumulation": 7}, {"drafter_gpus": "1,2,3", "target_gpus": "0"}, {"max_steps": 3}):
        cfg = t.Config(lr=2e-3, warmup=0.1, **flags)
        rates = [t.learning_rate(cfg, m, 100) for m in shares]
        assert rates == pytest.approx([2e-3 * x for x in shares.values()])
    flat = [t.learning_rate(t.Config(lr=1.0, warmup=0.0), m, 4) for m in range(5)]
    assert flat == pytest.approx([1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0])
