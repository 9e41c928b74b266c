"""What a draft row may see: the predicate, its 128 x 128 tiles, and compiled flex_attention over them.

The reference is a dense mask filled cell by cell from the rule in words. Alone, from the repository's root:

    OMP_NUM_THREADS=1 python -m pytest tests/test_mask.py         DFLASH_TEST_SEED=... repeats a failure
"""
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

import train_dflash as t

S = 384

@pytest.fixture
def rng():
    seed = int(os.environ.get("DFLASH_TEST_SEED") or int.from_bytes(os.urandom(4), "big"))
    print(f"DFLASH_TEST_SEED={seed}")
    return np.random.default_rng(seed)

def short_documents(rng, N, shortest):
    """Documents over part of S and sorted anchors in them, N or fewer -> spans [(begin, end)], anchors."""
    edges = [0]
    while edges[-1] < S - 150:
        edges.append(edges[-1] + int(rng.integers(shortest, shortest + 90)))
    real = min(int(rng.integers(N // 2, N + 1)), edges[-1])
    return list(pairwise(edges)), sorted(rng.choice(edges[-1], real, replace=False).tolist())

def tensors(spans, anchors, N):
    """start, anchor [N] int32 as the trainer has them: padding blocks stand at 0."""
    begin = [next(b for b, e in spans if b <= a < e) for a in anchors]
    pad = [0] * (N - len(anchors))
    return torch.tensor(begin + pad, dtype=torch.int32), torch.tensor(anchors + pad, dtype=torch.int32)

def by_rule(spans, anchors, N, B, rule):
    """The rule, cell by cell -> bool [N*B, S + N*B]."""
    window, causal = rule
    document = [-1] * S
    for i, (b, e) in enumerate(spans):
        document[b:e] = [i] * (e - b)
    dense = [bytearray(S + N * B) for _ in range(N * B)]
    for n in range(N):
        for k in range(B):
            row = dense[n * B + k]
            if n < len(anchors):  # padding blocks see no context
                a = anchors[n]
                for kv in range(a):  # strictly before the anchor
                    row[kv] = document[kv] == document[a] and (not window or kv >= a + k - (window - 1))
            for j in range(B):
                row[S + n * B + j] = not causal or j <= k
    return torch.frombuffer(bytearray().join(dense), dtype=torch.bool).view(N * B, S + N * B)

def long_document(rng, N, first):
    """One document and N anchors, the first of them at `first`: some tiles are full."""
    end = int(rng.integers(340, S + 1))
    rest = rng.choice(np.arange(first + 1, end), N - 1, replace=False)
    return [(0, end)], [first, *sorted(rest.tolist())]

def cases(rng, B):
    """Masks of one block size -> (N, spans, anchors, (window, causal)); some bounds fall on tile edges."""
    step = 128 // np.gcd(B, 128)
    N = int(step * -(-256 // (step * B)))  # about 256 rows, or as many as make whole tiles
    documents = short_documents(rng, N, 2)
    layouts = [(documents, window) for window in (0, B + int(rng.integers(0, 9)))]
    for first in (255, 256):  # the last and the first anchor that hides and shows the whole of tile 1
        documents = long_document(rng, N, first)
        last = documents[1][max(128 // B, 1) - 1]  # of the blocks in the first row of tiles
        layouts += [(documents, 0), (documents, max(B, 129)), (documents, last + B + first - 256)]
    for (spans, anchors), window in layouts:
        yield N, spans, anchors, (window, bool(rng.integers(2)))

@pytest.mark.parametrize("B", [4, 8, 10, 16, 96, 128, 192])
def test_visible(B, rng):
    """Catches a leak at the anchor, across documents or blocks, and a window or causality off by one."""
    for N, spans, anchors, rule in cases(rng, B):
        q, kv = torch.arange(N * B)[:, None], torch.arange(S + N * B)[None]
        got = t.visible(q, kv, *tensors(spans, anchors, N), S, B, *rule)
        wrong = (got != by_rule(spans, anchors, N, B, rule)).nonzero().tolist()
        assert not wrong, f"rule {rule}, anchors {anchors}: {len(wrong)} cells, first {wrong[:3]}"

@pytest.mark.parametrize("B", [4, 8, 10, 16, 96, 128, 192])
def test_tiles(B, rng):
    """Catches a tile left out (attention lost), a full tile that is not, and tiles computed for nothing."""
    for N, spans, anchors, (window, causal) in cases(rng, B):
        start, anchor = tensors(spans, anchors, N)
        dense = by_rule(spans, anchors, N, B, (window, causal))
        cells = dense.view(N * B // 128, 128, -1, 128).transpose(1, 2)
        some, every = cells.flatten(2).any(2), cells.flatten(2).all(2)
        partial, full = t.mask_tiles(start, anchor, S, B, window)
        where = f"window {window} causal {causal} N {N} anchors {anchors} documents {spans}"
        assert not (partial & full).any(), where
        assert not (some & ~(partial | full)).any(), f"a visible pair lies in no tile: {where}"
        assert not (full & ~every).any(), f"a full tile holds a hidden pair: {where}"
        context, own = slice(0, S // 128), slice(S // 128, None)
        if not window or 128 % B == 0:  # a block's rows see alike, or lie in one tile: nothing is generous
            assert torch.equal((partial | full)[:, context], some[:, context]), where
            assert torch.equal(full[:, context], every[:, context]), where
        if not causal:
            assert torch.equal(partial[:, own], some[:, own]), where
        assert ((partial | full) & ~some).sum(1).max() <= 2, f"more than two empty tiles in a row: {where}"
        assert window or len(spans) > 1 or full.any(), "a long document must give full tiles"
        mask = t.block_mask(start, anchor, S, B, window, causal)
        assert mask.shape == (1, 1, N * B, S + N * B) and mask.BLOCK_SIZE == (128, 128)
        assert mask.kv_indices.shape[:2] == mask.full_kv_indices.shape[:2] == (1, 1), "one for all heads"
        assert torch.equal(mask.to_dense()[0, 0].bool(), partial | full)

def test_compiled_flex(rng):
    """Catches a BlockMask that is not the predicate's mask, and one that recompiles with its content."""
    B, N, rules = 10, 64, ((0, False), (150, True))
    Q = N * B

    @torch.compile(fullgraph=True, dynamic=False)
    def attend(q, k, v, start, anchor):
        q = q * 1.0  # the CPU kernel of torch 2.13 refuses a q that is a view
        masks = [t.block_mask(start, anchor, S, B, *rule) for rule in rules]
        return [flex_attention(q, k, v, block_mask=mask, enable_gqa=True) for mask in masks]

    graphs = counters["stats"]["unique_graphs"]
    for documents in (short_documents(rng, N, 2), short_documents(rng, N, 60), long_document(rng, N, 256)):
        spans, anchors = documents
        q, k, v = (torch.from_numpy(rng.standard_normal((1, heads, rows, 16))).float()
                   for heads, rows in ((4, Q), (2, S + Q), (2, S + Q)))
        with torch.no_grad():
            outputs = attend(q, k, v, *tensors(spans, anchors, N))
        for rule, output in zip(rules, outputs):
            mask = by_rule(spans, anchors, N, B, rule)
            keys, values = (x.double().repeat_interleave(2, 1) for x in (k, v))  # 4 query heads over 2
            scores = (q.double() @ keys.transpose(2, 3) / 4).masked_fill(~mask, -torch.inf)
            error = (output - scores.softmax(-1) @ values).abs().max()
            assert error < 1e-5, f"rule {rule}: off by {error:.1e}, anchors {anchors}, documents {spans}"
    assert counters["stats"]["unique_graphs"] == graphs + 1, "one compilation for every content"
