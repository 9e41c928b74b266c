"""Draft trees and the walk: the best trees, decoding with them, and what the walk says decoding would accept.

The references enumerate every prefix, loop over every position with a fresh Draft, decode for real, or are
transformers' own generate() and one forward over the whole text. Alone:

    OMP_NUM_THREADS=1 python -m pytest tests/test_walk.py          DFLASH_TEST_SEED=... repeats a failure
"""
import functools
import itertools
import json

import numpy as np
import pytest
import torch
import transformers as tf
from conftest import metrics, run
from test_decode import FAMILIES, MASK, TAPS, TINY, drafter_config, generate, text

import train_dflash as t

FAMILIES = FAMILIES | {
    "mistral, all sliding": lambda **more: tf.MistralConfig(**TINY | more, sliding_window=9),
    "gpt-oss, sinks and experts": lambda **more: tf.GptOssConfig(
        **TINY | more, sliding_window=8, num_local_experts=4, num_experts_per_tok=2),
    "gpt2, learned positions": lambda **more: tf.GPT2Config(**{
        "vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256,
        "initializer_range": 0.3} | more)}

pytestmark = pytest.mark.usefixtures("dice")

def model_of(family, **more):
    model = tf.AutoModelForCausalLM.from_config(FAMILIES[family](**more)).float().eval().requires_grad_(False)
    for name, p in model.named_parameters():  # gpt-oss leaves some of its own as they lie in memory
        if "sinks" in name or "experts" in name or "router" in name:
            torch.nn.init.normal_(p, 0, 0.3)
    return model

def untaught(*kinds, taps=TAPS, mask=MASK, **more):
    drafter = t.Drafter(drafter_config(*kinds, **more, dflash_config={"target_layer_ids": taps,
                                                                      "mask_token_id": mask}))
    for p in drafter.parameters():
        torch.nn.init.normal_(p.data, 1 if p.dim() == 1 else 0, 0.3)
    return drafter

def features_of(model, ids, taps=TAPS):
    """Taps [n, K*D] and logits [n, V] of one forward over all of the text, by transformers alone."""
    out = model(torch.tensor([ids]), output_hidden_states=True)
    return torch.cat([out.hidden_states[k + 1][0] for k in taps], 1), out.logits[0]

def prefixes(logp, budget):
    """The `budget` most probable of all prefixes, {ids: log-probability}. logp: {id: float} of each slot."""
    every = {p: sum(slot[x] for slot, x in zip(logp, p))
             for n in range(1, len(logp) + 1) for p in itertools.product(*logp[:n])}
    return dict(sorted(every.items(), key=lambda x: -x[1])[:budget])

def unfold(nodes):
    """[(token, parent)] -> the prefix of every node."""
    made = [()]
    for token, parent in nodes:
        assert parent < len(made), "a child before its parent"
        made.append((*made[parent], token))
    return made[1:]

def test_best_tree(dice):
    """Catches a tree that misses a likelier prefix, holds one twice, or is not nested in a larger one."""
    for _ in range(60):
        k, depth = int(dice.integers(1, 5)), int(dice.integers(1, 5))
        raw = np.log(dice.dirichlet([dice.choice([0.1, 1, 10])] * 9, depth) + 1e-12)
        ids = np.argsort(-raw, 1)[:, :k]
        logp = np.take_along_axis(raw, ids, 1)
        slots = [dict(zip(*x)) for x in zip(ids.tolist(), logp.tolist())]
        size = sum(k**n for n in range(1, depth + 1))
        whole = unfold(t.best_tree(logp.tolist(), ids.tolist(), size + 3))
        assert len(whole) == size
        for budget in {1, min(2, size), int(dice.integers(1, size + 1)), size}:
            nodes = t.best_tree(logp.tolist(), ids.tolist(), budget)
            found, want = unfold(nodes), prefixes(slots, budget)
            assert found == whole[:budget] and len(set(found)) == budget
            value = [sum(slot[x] for slot, x in zip(slots, p)) for p in found]
            assert value == pytest.approx(list(want.values()), abs=1e-9)  # the best first, ties either way
            worst = min(want.values())
            assert {p for p, v in want.items() if v > worst + 1e-9} <= set(found)

def test_draft_tree(dice):
    """Catches too few drafts a slot, other probabilities than the softmax's, tokens of another slot."""
    for _ in range(20):
        V, depth = int(dice.integers(2, 7)), int(dice.integers(1, 4))
        logits = 3 * torch.randn(depth, V)
        slots = [dict(enumerate(x)) for x in logits.double().log_softmax(-1).tolist()]
        for budget in (1, V - 1, V, 3 * V):
            tokens, parents = t.draft_tree(logits, budget)
            found, want = unfold(zip(tokens, parents)), prefixes(slots, budget)
            value = [sum(slot[x] for slot, x in zip(slots, p)) for p in found]
            assert value == pytest.approx(list(want.values()), abs=1e-4) and len(set(found)) == len(want)

class Oracle:
    """A draft that knows the continuation and puts each true token first, second ... or nowhere near."""

    def __init__(self, prompt, truth, B, dice, V=64):
        self.at, self.truth, self.given, self.states = -len(prompt), truth, [], []
        self.B, self.dice, self.V = B, dice, V

    def logits(self, anchor, features):
        self.given.append(features.clone())
        self.at += len(features)  # the anchor is the token after them
        assert anchor == self.truth[self.at]
        out = torch.randn(self.B - 1, self.V)
        for row, token in zip(out, self.truth[self.at + 1: self.at + self.B]):
            rank = self.dice.choice([0, 1, 2, 40], p=[0.5, 0.25, 0.15, 0.1])
            row[token] = row.sort(descending=True).values[rank] + 1e-3
        self.states.append((self.at, out))
        return out

    def __call__(self, tokens, features, temperature, draw):
        return t.pick(self.logits(tokens[-1], features), temperature, draw)

@pytest.mark.parametrize("family", FAMILIES)
def test_trees_are_lossless(family, dice):
    """Catches a tree that changes the output: a mask that shows a cousin, a place off, a cache or features
    compacted wrongly, rounds that are not what the tree held."""
    model, B, count = model_of(family), 5, 60
    prompt, ends = text(dice, 8), t.frozen_ends(model)
    want = generate(model, prompt, count)
    features, logits = features_of(model, prompt + want)
    logits, reader = logits[len(prompt) - 1: -1], t.Reader(model, TAPS)
    scale, branches = logits.abs().max(), 0
    for N in (3, int(dice.integers(5, 40)), 90):
        oracle = Oracle(prompt, want, B, dice)
        out, rounds, kept = t.decode(reader, prompt, count, (), oracle, tree=N)
        assert out == want and sum(rounds) == count - 1
        assert (torch.stack(kept) - logits).abs().max() < 1e-4 * scale, "logits of another text"
        given = torch.cat(oracle.given)
        assert (given - features[: len(given)]).abs().max() < 1e-4 * features.abs().max()
        for (at, drafted), r in zip(oracle.states, rounds, strict=True):
            room = count - 1 - at
            tokens, parents = t.draft_tree(drafted, N)
            found = set(unfold(zip(tokens, parents)))
            n = 0
            while n < B - 1 and tuple(want[at + 1: at + n + 2]) in found and n < room:
                n += 1
            assert r == min(n + 1, room), "not the longest path of the tree"
            best = drafted.argmax(-1).tolist()
            chain = [*(a == b for a, b in zip(best, want[at + 1:])), False].index(False)
            branches += r > min(chain + 1, room)
            if tuple(best) in found:
                assert r >= min(chain + 1, room), "fewer than the chain, which the tree holds whole"
    assert branches > 3, "no branch was ever followed"
    for kinds in (("sliding", "full"), ("full", "sliding"), ("sliding",)):
        draft = t.Draft(untaught(*kinds, block=B), ends, MASK, len(prompt) + count + B + 1)
        out, rounds, kept = t.decode(reader, prompt, count, (), draft, tree=16)
        assert out == want and (torch.stack(kept) - logits).abs().max() < 1e-4 * scale
    last = want[int(dice.integers(2, count))]
    at = want.index(last)
    out, rounds, _ = t.decode(reader, prompt, count, {last}, Oracle(prompt, want, B, dice), tree=20)
    assert out == want[: at + 1] and sum(rounds) == at

# ------------------------------------------------------------------------------------------------ the walk

def runs_of(supervised):
    """[(first, last + 1)] of every reply."""
    edge = np.diff(np.concatenate([[0], supervised.astype(int), [0]]))
    return list(zip(np.flatnonzero(edge == 1).tolist(), np.flatnonzero(edge == -1).tolist()))

def slow_walk(drafter, ends, mask, features, ids, supervised, tree_of):
    """What walk() finds, by a fresh Draft at every place. tree_of: (logits, budget) -> prefixes it holds."""
    found = np.zeros((2 + len(t.TREES), drafter.block + 1), np.int64)

    @functools.cache
    def drafted(at):
        return t.Draft(drafter, ends, mask, len(ids)).logits(int(ids[at]), features[:at])

    def kept(at, end, budget):
        logits = drafted(at)
        if budget:
            held = tree_of(logits, budget)
        else:
            best = tuple(logits.argmax(-1).tolist())
            held = {best[:n] for n in range(1, len(best) + 1)}
        n = 0
        while at + n + 1 < end and tuple(ids[at + 1: at + n + 2].tolist()) in held:
            n += 1
        return min(n + 1, end - 1 - at)  # its own token comes on top, where the reply has one more

    for begin, end in runs_of(supervised):
        for at in range(begin, end - 1):
            found[0, kept(at, end, 0)] += 1
        for row, budget in enumerate((0, *t.TREES), 1):
            at = begin
            while at < end - 1:
                found[row, n := kept(at, end, budget)] += 1
                at += n
    return found

def enumerated(logits, budget):
    """As prefixes(), of every prefix at once: n tokens are one of V^n sums."""
    logp, sums, every = logits.double().log_softmax(-1), torch.zeros(1).double(), []
    V = logp.shape[1]
    for row in logp:
        sums = (sums[:, None] + row).flatten()
        every.append(sums)
    best = torch.cat(every).topk(min(budget, sum(map(len, every)))).indices.tolist()
    held = set()
    for i in best:
        n = next(n for n in itertools.count(1) if i < sum(V**k for k in range(1, n + 1)))
        held.add(tuple(int(x) for x in np.unravel_index(i - sum(V**k for k in range(1, n)), (V,) * n)))
    return held

def few_words(family, B, *kinds, V=8):
    """Target and drafter of so small a vocabulary that an untaught drafter is right now and then."""
    model = model_of(family, vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    drafter = untaught(*kinds, block=B, mask=V - 1)
    ends = t.frozen_ends(model)
    return model, drafter, ends | {"rope": t.rotary(torch.arange(200), drafter.theta, drafter.h)}

@pytest.mark.parametrize("family", ["qwen3", "gemma3, windows and soft cap", "mistral, all sliding",
                                    "gpt2, learned positions"])
def test_walk_is_decoding(family, dice):
    """Catches a walk that jumps, counts or drafts otherwise than decoding does, at any budget; a mean over
    all places that leaves some out."""
    B, V, met = int(dice.integers(3, 6)), 8, np.zeros(8)
    model, drafter, ends = few_words(family, B, *[("sliding", "full"), ("full", "sliding")][B % 2], V=V)
    reader = t.Reader(model, TAPS)
    for i in range(4):
        prompt, count = dice.integers(0, V, int(dice.integers(1, 12))).tolist(), int(dice.integers(36, 60))
        plain, _, _ = t.decode(reader, prompt, count, ())
        stop = {plain[int(dice.integers(len(plain) // 2, len(plain)))]} if i == 3 else ()
        reply, _, _ = t.decode(reader, prompt, count, stop)
        ids = np.array(prompt + reply)
        supervised = np.arange(len(ids)) >= len(prompt)
        features = features_of(model, ids.tolist())[0]
        found = t.walk(drafter, ends, features, ids, supervised, V - 1)
        for row, tree in enumerate((0, *t.TREES), 1):
            draft = t.Draft(drafter, ends, V - 1, len(ids) + B + 1)
            out, rounds, _ = t.decode(reader, prompt, count, stop, draft, tree=tree)
            assert out == reply
            assert found[row].tolist() == np.bincount(rounds, minlength=B + 1).tolist(), (row, rounds)
            met[: B + 1] += np.bincount(rounds, minlength=B + 1)
        want = slow_walk(drafter, ends, V - 1, features, ids, supervised, enumerated)
        assert found.tolist() == want.tolist()
        assert found[0].sum() == len(reply) - 1 and (found * np.arange(B + 1)).sum(1)[1:].tolist() == [
            len(reply) - 1] * 4
    assert (met > 0).sum() >= 2, f"rounds of one length alone show little: {met}"

def test_walk_of_many_replies(dice):
    """Catches replies of one document joined to one chain, a label across a border, a lonely token walked."""
    for B in (2, 4, 5):
        model, drafter, ends = few_words("qwen3", B, "sliding", "full", "sliding", V=6)
        n = int(dice.integers(70, 120))
        ids, supervised = dice.integers(0, 6, n), np.zeros(n, bool)
        at = int(dice.integers(0, 3))  # from 0: a document that begins with its reply
        while at < n:
            end = at + int(dice.choice([1, 2, 3, 9, 40]))
            supervised[at: end] = True
            at = end + int(dice.integers(1, 6))
        features = features_of(model, ids.tolist())[0]
        found = t.walk(drafter, ends, features, ids, supervised, 5)
        want = slow_walk(drafter, ends, 5, features, ids, supervised, enumerated)
        assert found.tolist() == want.tolist()
        assert found[0].sum() == sum(end - begin - 1 for begin, end in runs_of(supervised))
        read, every = t.read_walk(found), [np.repeat(np.arange(B + 1), row) for row in found]
        names = ("everywhere", "walk", *(f"tree_{n}" for n in t.TREES))
        assert [read[k] for k in names] == pytest.approx([float(x.mean()) for x in every])
        assert read["histogram"] == [int((every[1] == k).sum()) for k in range(1, B + 1)]
        assert read["acceptance"] == pytest.approx([(every[1] > k).mean() for k in range(1, B)], abs=1e-4)
        lonely = np.zeros(n, bool)  # a reply of two tokens has one place to draft at
        lonely[(at := int(dice.integers(1, n - 2))): at + 2] = True
        assert t.walk(drafter, ends, features, ids, lonely, 5).tolist() == [[0, 1] + [0] * (B - 1)] * 5
    nothing = t.walk(drafter, ends, features, ids, np.zeros(n, bool), 5)
    assert not nothing.any() and t.read_walk(nothing)["walk"] == 0

def test_a_run_tells_its_walk(tiny, tmp_path):
    """Catches an evaluation whose walk depends on how many processes share it, skips or repeats a document,
    or is of other weights than the run's: a folder's drafter, held still by a rate that moves nothing."""
    run(tiny, tmp_path / "made", "--max-steps", 40, "--eval-every", 40, "--save-every", 40)
    folder, still = tmp_path / "made" / "export", []
    for name, gpus in (("one", ()), ("three", ("--target-gpus", 0, "--drafter-gpus", "1,2"))):
        out, _ = run(tiny, tmp_path / name, "--init-from", folder, "--lr", 1e-30, "--max-steps", 1,
                     "--eval-every", 1, "--device", "cpu", *gpus)
        still.append(metrics(tmp_path / name, "eval")[-1])
        line = out[out.index("eval at 1"):].splitlines()[1]
        w = still[-1]
        assert line.strip() == (
            f"walk {w['walk']:.3f}, everywhere {w['everywhere']:.3f}, trees of 16 {w['tree_16']:.3f}, 32 "
            f"{w['tree_32']:.3f}, 64 {w['tree_64']:.3f}; share of rounds with 1, 2 ... drafts right "
            + " ".join(f"{x:.2f}" for x in w["acceptance"]))
        assert metrics(tmp_path / name, "end")[-1]["eval_walk"] == w["walk"]
    keys = ("walk", "everywhere", "tree_16", "tree_32", "tree_64", "histogram", "acceptance", "blocks",
            "accept_len", "position_accuracy")
    assert {k: still[0][k] for k in keys} == {k: still[1][k] for k in keys}

    written = json.loads((tmp_path / "one" / "config.json").read_text())
    cfg = t.Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in written["config"].items()})
    model = tf.AutoModelForCausalLM.from_pretrained(tiny[0], dtype=torch.float32).eval().requires_grad_(False)
    config, state = t.read_drafter(folder)
    drafter, ends = t.Drafter(config), t.frozen_ends(model)
    drafter.load_state_dict(state)
    documents = t.prepare(cfg, t.load_tokenizer(tiny[0]), model.config.vocab_size)
    inner, (order, bounds), found = config["dflash_config"], documents.held_out, 0

    def of_tree(logits, budget):
        return set(unfold(zip(*t.draft_tree(logits, budget))))

    assert len(bounds) - 1 > 1, "one micro-batch is not shared by two drafters"
    for d in order[: bounds[min(len(bounds) - 1, t.WALK_BATCHES)]]:
        row = documents.rows.with_format("numpy")[int(d)]
        features = features_of(model, row["input_ids"].tolist(), inner["target_layer_ids"])[0]
        found += slow_walk(drafter, ends, inner["mask_token_id"], features, row["input_ids"],
                           row["loss_mask"].astype(bool), of_tree)
    want = t.read_walk(found)
    for k, x in want.items():
        assert still[0][k] == pytest.approx(x), k
    assert still[0]["walk"] > 1.02, "nothing was learnt, and nothing is seen"
