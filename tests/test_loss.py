"""The objective and what is read off it: slot weights, chunked cross-entropy with its gradient, the counters.

The references are loops over slots, and float64 autograd through full logits. Alone, from the root:

    OMP_NUM_THREADS=1 python -m pytest tests/test_loss.py         DFLASH_TEST_SEED=... repeats a failure
"""
import itertools
import math
import os

import pytest
import torch

import train_dflash as t


@pytest.fixture(autouse=True)
def seed():
    value = int(os.environ.get("DFLASH_TEST_SEED") or int.from_bytes(os.urandom(4), "big"))
    print(f"DFLASH_TEST_SEED={value}")
    torch.manual_seed(value)
    return value

def close(got, want, rtol=1e-5, atol=1e-6):
    error = ((got - want).abs() - rtol * want.abs()).max()
    assert got.shape == want.shape and error <= atol, f"off by {error:.1e}: {got} {want}"

def prefixes(n, slots):
    """valid [n, slots] as blocks_of makes it, true up to a random slot; one row is whole and one empty."""
    lengths = torch.randint(0, slots + 1, (n, 1))
    lengths[0], lengths[1] = slots, 0
    return torch.arange(slots) < lengths

def weights_by_loop(ce, valid, loss, gamma):
    """The two definitions, slot by slot; slots are counted from 1."""
    out = torch.zeros(ce.shape, dtype=torch.float64)
    for n, (row, ok) in enumerate(zip(ce.double().tolist(), valid.tolist())):
        for j in range(1, len(row) + 1):
            if not ok[j - 1]:
                continue
            if loss == "dflash":
                out[n, j - 1] = math.exp(-(j - 1) / gamma)
                continue
            for m in range(j, len(row) + 1):
                if ok[m - 1]:  # acts as 0 in the sum otherwise
                    reached = 1.0
                    for i in range(1, m + 1):
                        reached *= 0.5 * math.exp(-row[i - 1]) + 0.5 if ok[i - 1] else 1.0
                    out[n, j - 1] += reached
    return out

def full_logits(rows, head, labels, valid, rule):
    """Cross-entropy, weights, hits and the weighted sum's gradient, in float64 through full logits."""
    loss, gamma, softcap = rule
    rows = rows.double().requires_grad_()
    logits = rows @ head.double().T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    ce = -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    weights = weights_by_loop(ce.detach(), valid, loss, gamma)
    (weights * ce).sum().backward()
    return ce.detach(), weights, logits.detach().argmax(-1) == labels, rows.grad

@pytest.mark.parametrize("loss", ["dflash", "dpace"])
def test_weights(loss):
    """Catches a wrong decay, a D-PACE prefix off by one, and labels that weigh but do not count."""
    ce = torch.rand(40, 7) * 4
    for valid in (prefixes(40, 7), torch.rand(40, 7) < 0.6):  # holes too: 1 in the product, 0 in the sum
        gamma = float(torch.rand(()) * 9 + 0.5)
        got = t.slot_weights(ce, valid, loss, gamma)
        assert got.dtype == torch.float32
        close(got, weights_by_loop(ce, valid, loss, gamma))

def test_dpace_is_expected_length():
    """Catches D-PACE weights that do not mean the number of drafts expected from that slot on."""
    ce = torch.rand(1, 5) * 3
    q = (0.5 * torch.exp(-ce[0].double()) + 0.5).tolist()
    expected = [0.0] * 5
    for outcome in itertools.product((0, 1), repeat=5):  # every way the five drafts can be taken or refused
        chance = math.prod(p if hit else 1 - p for p, hit in zip(q, outcome))
        accepted = (*outcome, 0).index(0)
        expected = [e + chance * max(accepted - j, 0) for j, e in enumerate(expected)]
    got = t.slot_weights(ce, torch.ones(1, 5, dtype=torch.bool), "dpace", 0.0)[0]
    close(got, torch.tensor(expected))

@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("loss", ["dflash", "dpace"])
def test_chunked_loss(loss, softcap):
    """Catches a wrong gradient (weights not detached, no slope of the soft cap) and a chunk lost."""
    n, slots, D, V = 11, 5, 12, 37
    rows, head = torch.randn(n, slots, D), torch.randn(V, D)
    labels, valid = torch.randint(0, V, (n, slots)), prefixes(n, slots)
    rule = (loss, 2.5, softcap)
    labels = torch.where(torch.rand(n, slots) < 0.5, (rows @ head.T).argmax(-1), labels)  # half of them hits
    want = full_logits(rows, head, labels, valid, rule)
    for chunk in (1, 17 * V, 3 * slots * V, 2 ** 29):  # of 11 blocks: 1, 3 or all at once
        got = t.head_and_loss(rows, head, labels, valid, *rule, chunk=chunk)
        assert torch.equal(got[2], want[2]) and got[2].any()
        assert all(got[i].dtype == torch.float32 for i in (0, 1, 3))
        close(got[0], (want[0] * want[1]).sum(), 1e-4, 2e-5)
        for i in (1, 3):  # weights, gradient
            close(got[i], want[i], 1e-4, 2e-5)
    for place in itertools.product(range(n), range(slots)):  # every cross-entropy by itself
        alone = torch.zeros(n, slots, dtype=torch.bool)
        alone[place] = True
        ce, weights, _, _ = full_logits(rows, head, labels, alone, rule)
        got = t.head_and_loss(rows, head, labels, alone, *rule, chunk=17 * V)[0]
        close(got, (ce * weights).sum(), 1e-4, 2e-5)

def test_bf16():
    """Catches a softmax left in bf16: loss and gradient stay within the rounding of what goes in."""
    rows, head = (torch.randn(shape).bfloat16() for shape in ((64, 15, 32), (300, 32)))
    head = head / 4
    labels = torch.randint(0, 300, (64, 15))
    valid, rule = prefixes(64, 15), ("dflash", 7.0, 0.0)
    want = full_logits(rows, head, labels, valid, rule)
    weighted, weights, _, gradient = t.head_and_loss(rows, head, labels, valid, *rule)
    assert (weighted.dtype, weights.dtype, gradient.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    total = float(weighted / (want[0] * want[1]).sum())
    assert abs(total - 1) < 1e-3, total
    error = float((gradient.double() - want[3]).norm() / want[3].norm())
    assert error < 5e-3, f"gradient off by {error:.1%}"

def test_constant_loss():
    """Catches a divisor that lets gamma move the loss, and slots that do not fall by exp(-1/gamma)."""
    n, slots, D, V = 6, 7, 8, 50
    for gamma in (0.7, 4.0, 7.0, float(torch.rand(()) * 20 + 1)):
        rule, rows = ("dflash", gamma, 0.0), torch.randn(n, slots, D)
        labels, valid = torch.randint(0, V, (n, slots)), prefixes(n, slots)
        weighted, weights, _, _ = t.head_and_loss(rows, torch.zeros(V, D), labels, valid, *rule)
        assert float(weighted / weights.sum()) == pytest.approx(math.log(V), rel=1e-5)
        row, head = torch.randn(D), torch.randn(V, D)  # the same row and label in every slot
        labels, valid = torch.full((1, slots), 3), torch.ones(1, slots, dtype=torch.bool)
        d = t.head_and_loss(row.expand(1, slots, D), head, labels, valid, *rule)[3][0]
        first = head.T @ (torch.softmax(head @ row, 0) - torch.eye(V)[3])  # slot 1 weighs 1
        for k in range(slots):
            close(d[k], first * math.exp(-k / gamma), 1e-4, 1e-5)

# What five blocks of four slots were given and predicted: hit (x), miss (.), not counted (-).
TABLE = ("xxx", "x.x", "xx-", ".--", "---")

def counters_of(table, loss):
    """The counters of drafter_step for a drafter whose layer adds nothing: one token everywhere."""
    D, V, mask, N, B = 8, 20, 19, len(table), 4
    drafter = t.Drafter({
        "hidden_size": D, "rms_norm_eps": 1e-6, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "rope_theta": 1e4, "layer_types": ["full_attention"], "block_size": B,
        "intermediate_size": 16,
        "dflash_config": {"target_layer_ids": [0]}})
    for matrix in (drafter.layers[0].self_attn.o_proj, drafter.layers[0].mlp.down_proj):
        torch.nn.init.zeros_(matrix.weight)
    embed, head = torch.randn(V, D), torch.randn(V, D)
    said = int((head @ embed[mask] / embed[mask].norm()).argmax())
    tokens = torch.full((N, B), said)  # a slot that does not count would be a hit
    for n, k in itertools.product(range(N), range(B - 1)):
        tokens[n, k + 1] = (said + 1) % V if table[n][k] == "." else said
    valid = torch.tensor([[False, *(mark != "-" for mark in marks)] for marks in table])
    S, anchor = 32, torch.arange(N) + 1
    features, positions, start = torch.randn(S, D), torch.arange(S), torch.zeros_like(anchor)
    ends = {"embed": embed, "head": head, "embed_scale": 1.0, "softcap": 0.0,
            "rope": t.rotary(torch.arange(S + B), 1e4, 16)}
    return t.drafter_step(
        drafter, ends, features, positions, start, anchor, tokens, valid, mask, loss, 7.0)[2].tolist()

@pytest.mark.parametrize("loss", ["dflash", "dpace"])
def test_counters(loss):
    """Catches a metric over the wrong denominator: padding blocks, uncounted slots, ratios before sums."""
    one = t.read_counters(counters_of(TABLE, loss))
    assert one["accept_len"] == 1 + (3 + 1 + 2 + 0) / 4  # hits in a row from slot 1, and the target's own
    assert one["accept_len_whole"] == 1 + (3 + 1) / 2
    assert one["position_accuracy"] == [0.75, 0.6667, 1.0]  # 3 of 4, 2 of 3, 2 of 2
    assert (one["blocks"], one["bad_positions"], one["bad_blocks"]) == (4, 0, 0)
    ranks = [counters_of(table, loss) for table in (("xxx", "---"), ("...", "xx."))]
    two = t.read_counters([sum(pair) for pair in zip(*ranks)])
    assert (two["accept_len"], two["accept_len_whole"], two["blocks"]) == (1 + 5 / 3, 1 + 5 / 3, 3)
    assert two["position_accuracy"] == [0.6667, 0.6667, 0.3333]
    divisors = [c[1] for c in ranks]
    assert two["loss"] == pytest.approx(sum(c[0] for c in ranks) / sum(divisors))
    decay = sum(math.exp(-k / 7) for k in range(3))
    assert divisors == pytest.approx([decay, 2 * decay] if loss == "dflash" else [1, 2])
    none = t.read_counters(counters_of(("---", "---"), loss))
    assert math.isnan(none["loss"]) and math.isnan(none["accept_len"]) and none["blocks"] == 0
    assert none["position_accuracy"] == [None] * 3

def test_default_gamma():
    """Catches a published decay changed, or a block size whose decay falls below a smaller block's."""
    assert [t.default_gamma(b) for b in (16, 10, 8)] == [7, 5, 4]
    values = [t.default_gamma(b) for b in range(2, 129)]
    assert all(a < b for a, b in itertools.pairwise(values)) and values[0] > 0
