"""The drafter and what feeds it: a whole step against a reference, causality, names, rotary tables,
bad features, capture of features from real (tiny) targets, and what is read off a target.

The reference forward is written from the format's description: one query at a time, float64, no masks. Alone:

    OMP_NUM_THREADS=1 python -m pytest tests/test_drafter.py      DFLASH_TEST_SEED=... repeats a failure
"""
import math
import os
from types import SimpleNamespace as Bare

import numpy as np
import pytest
import torch
import transformers as tf

import train_dflash as t

D, H, G, h, FFN, V, B, K, MASK = 24, 4, 2, 16, 40, 61, 4, 2, 60
SPANS = ((0, 14), (14, 23), (23, 45))  # documents of a micro-batch of S tokens, the rest is padding
S, W, THETA = 48, 6, 1e4
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": 0.3}

@pytest.fixture(autouse=True)
def seed():
    value = int(os.environ.get("DFLASH_TEST_SEED") or int.from_bytes(os.urandom(4), "big"))
    print(f"DFLASH_TEST_SEED={value}")
    torch.manual_seed(value)
    return value

def make(*kinds, **more):
    """A drafter of these layers, with weights large enough that every part matters, norms included."""
    drafter = t.Drafter({
        "hidden_size": D, "rms_norm_eps": 1e-6, "num_attention_heads": H, "num_key_value_heads": G,
        "head_dim": h, "intermediate_size": FFN, "rope_theta": THETA, "block_size": B, "sliding_window": W,
        "layer_types": [f"{kind}_attention" for kind in kinds], "dflash_config": {"target_layer_ids": [0, 2]},
        **more})
    for p in drafter.parameters():
        torch.nn.init.normal_(p, 1 if p.dim() == 1 else 0, 0.3)
    return drafter

def make_batch():
    """Ten or so blocks over three documents, some at a document's first token, and two padding blocks."""
    anchors = sorted({0, 14, *torch.randperm(44)[:8].tolist()})
    span = [next(s for s in SPANS if s[0] <= a < s[1]) for a in anchors]
    valid = torch.tensor([[0 < k < end - a for k in range(B)] for a, (_, end) in zip(anchors, span)])
    valid[torch.rand(len(anchors)) < 0.3, 2:] = False  # some replies end early
    edges = [*SPANS, *((i, i + 1) for i in range(SPANS[-1][1], S))]
    batch = {
        "features": torch.randn(S, K * D), "positions": torch.cat([torch.arange(e - b) for b, e in edges]),
        "start": torch.tensor([b for b, _ in span] + [0, 0]), "anchor": torch.tensor([*anchors, 0, 0]),
        "tokens": torch.randint(0, 60, (len(anchors) + 2, B)),
        "valid": torch.cat([valid, torch.zeros(2, B, dtype=torch.bool)])}
    batch |= {k: batch[k].int() for k in ("positions", "start", "anchor")}  # as the trainer sends them
    return batch, {"embed": torch.randn(V, D), "head": torch.randn(V, D), "embed_scale": 1.7, "softcap": 5.0}

def step(drafter, ends, batch, loss="dflash", gamma=3.0):
    ends = {**ends, "rope": t.rotary(torch.arange(S + B), drafter.theta, h)}
    return t.drafter_step(drafter, ends, **batch, mask_id=MASK, loss=loss, gamma=gamma)

def norm(x, weight):
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

def turn(x, position):
    """Rotary embedding of [heads, h]: the pairs (i, i + h/2) turn by position * theta^(-2i/h)."""
    angle = torch.tensor([position * THETA ** (-2 * i / h) for i in range(h // 2)], dtype=torch.float64)
    a, b = x[:, : h // 2], x[:, h // 2:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 1)

def reference(w, rules, ends, batch, n):
    """Rows [B, D] of block n. w: float64 weights by published name, rules: (window, causal) a layer."""
    a, start = int(batch["anchor"][n]), int(batch["start"][n])
    fused = [norm(w["fc.weight"] @ f, w["hidden_norm.weight"]) for f in batch["features"].double()]
    ids = [int(batch["tokens"][n, 0])] + [MASK] * (B - 1)
    x = [ends["embed"][i].double() * ends["embed_scale"] for i in ids]
    for i, (window, causal) in enumerate(rules):
        own = {name.split(".")[-2]: p for name, p in w.items() if name.startswith(f"layers.{i}.")}

        def key_value(y, position):
            key = norm((own["k_proj"] @ y).view(G, h), own["k_norm"])
            return turn(key, position), (own["v_proj"] @ y).view(G, h)

        y = [norm(r, own["input_layernorm"]) for r in x]
        for k in range(B):
            seen = [key_value(fused[j], j - start) for j in range(start, a)
                    if not window or j >= a + k - (window - 1)]
            seen += [key_value(y[j], a - start + j) for j in range(B) if not causal or j <= k]
            query = turn(norm((own["q_proj"] @ y[k]).view(H, h), own["q_norm"]), a - start + k)
            heads = []
            for head in range(H):
                scores = torch.stack([query[head] @ key[head * G // H] for key, _ in seen]) / math.sqrt(h)
                heads.append(scores.softmax(0) @ torch.stack([value[head * G // H] for _, value in seen]))
            r = x[k] + own["o_proj"] @ torch.cat(heads)
            z = norm(r, own["post_attention_layernorm"])
            gate = own["gate_proj"] @ z
            x[k] = r + own["down_proj"] @ (gate * gate.sigmoid() * (own["up_proj"] @ z))
    return torch.stack([norm(r, w["norm.weight"]) for r in x])

@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("loss", ["dflash", "dpace"])
def test_step_against_reference(loss, bidirectional):
    """Catches anything in the step that is not DFlash: rows, loss, divisor, counters and every gradient."""
    kinds = ("sliding", "full", "sliding")
    drafter, (batch, ends) = make(*kinds, **({"is_causal": False} if bidirectional else {})), make_batch()
    rules = [(W if kind == "sliding" else 0, kind == "sliding" and not bidirectional) for kind in kinds]
    w = {name: p.detach().double().requires_grad_() for name, p in drafter.named_parameters()}
    rows, total, divisor, hit = [], 0.0, 0.0, []
    valid = batch["valid"][:, 1:].tolist()
    for n, ok in enumerate(valid):
        rows.append(reference(w, rules, ends, batch, n)[1:])
        logits = 5 * torch.tanh(rows[-1] @ ends["head"].double().T / 5)
        if n % 3 == 0:  # a random drafter rarely hits: make labels of what it says
            said = torch.rand(B - 1) < torch.tensor([1.0, 0.8, 0.8])
            batch["tokens"][n, 1:] = torch.where(said, logits.argmax(-1), 0)
        labels = batch["tokens"][n, 1:].tolist()
        ce = [-logits[k].log_softmax(0)[labels[k]] for k in range(B - 1)]
        q = [0.5 + 0.5 * math.exp(-float(c.detach())) for c in ce]
        for k in range(B - 1):
            if ok[k]:
                weight = math.exp(-k / 3) if loss == "dflash" else sum(
                    math.prod(q[: m + 1]) for m in range(k, B - 1) if ok[m])
                total, divisor = total + weight * ce[k], divisor + (weight if loss == "dflash" else k == 0)
        hit.append([ok[k] and int(logits[k].argmax()) == labels[k] for k in range(B - 1)])
    total.backward()
    run, whole = [[*x, False].index(False) for x in hit], [all(x) for x in valid]
    want = [total.item(), divisor, sum(run), sum(x[0] for x in valid), sum(r * x for r, x in zip(run, whole)),
            sum(whole), 0, 0, *map(sum, zip(*hit)), *map(sum, zip(*valid))]
    got, gradient, counters = step(drafter, ends, batch, loss)
    got.backward(gradient)
    assert (got - torch.stack(rows)).abs().max() < 2e-4
    assert counters.tolist() == pytest.approx(want, rel=1e-4)
    for name, p in drafter.named_parameters():
        error = float((p.grad - w[name].grad).abs().max() / w[name].grad.abs().max())
        assert error < 1e-3, f"gradient of {name} off by {error:.1e}"

def moved(drafter, ends, batch, positions=(), **more):
    """How far the rows of every block move [N, B-1] when these features (or inputs) change."""
    other = {**batch, **more, "features": batch["features"].clone()}
    other["features"][list(positions)] += 3 * torch.randn(len(positions), K * D)
    return (step(drafter, ends, other)[0] - step(drafter, ends, batch)[0]).detach().abs().amax(-1)

def test_blind_to_what_serving_lacks():
    """Catches a leak of the anchor's feature, later ones, other documents, labels or other blocks."""
    drafter, (batch, ends) = make("sliding", "full"), make_batch()
    for n, a in enumerate(batch["anchor"][:-2].tolist()):
        begin, end = next(s for s in SPANS if s[0] <= a < s[1])
        assert moved(drafter, ends, batch, [a])[n].max() == 0, "feature at the anchor"
        assert moved(drafter, ends, batch, range(a, S))[n].max() == 0, "features after the anchor"
        assert moved(drafter, ends, batch, [*range(begin), *range(end, S)])[n].max() == 0, "another document"
        if a > begin:
            assert moved(drafter, ends, batch, [a - 1])[n].min() > 1e-4, "not the feature before the anchor"
            assert moved(drafter, ends, batch, [begin])[n].min() > 1e-6, "not the document's first"
    tokens = torch.cat([batch["tokens"][:, :1], (batch["tokens"][:, 1:] + 1) % 60], 1)
    assert moved(drafter, ends, batch, tokens=tokens).max() == 0, "labels"
    tokens = batch["tokens"].clone()
    tokens[2, 0] = (tokens[2, 0] + 1) % 60
    distance = moved(drafter, ends, batch, tokens=tokens).amax(-1)
    assert distance.nonzero().flatten().tolist() == [2], "another block's anchor"
    order = torch.randperm(len(distance))
    mixed = {k: v[order] if k in ("start", "anchor", "tokens", "valid") else v for k, v in batch.items()}
    counts, mixed_counts = (step(drafter, ends, x)[2].tolist() for x in (batch, mixed))
    assert counts == pytest.approx(mixed_counts, rel=1e-5), "the order of blocks"

def test_window_reach():
    """Catches a window not applied, a place off, not moving with the row, or growing with depth."""
    batch, ends = make_batch()
    n, a, begin = -3, 40, 23  # far into the last document
    batch["anchor"][n], batch["start"][n] = a, begin
    one = make("sliding", is_causal=True)
    for k in range(1, B):
        first = a + k - (W - 1)
        assert moved(one, ends, batch, range(begin, first))[n, k - 1] == 0, f"row {k} sees behind its window"
        assert moved(one, ends, batch, [first])[n, k - 1] > 1e-6, f"row {k} must see its window's first place"
    far = range(begin, a - (W - 1))
    assert moved(make(*["sliding"] * 3), ends, batch, far)[n].max() == 0, "all sliding: depth adds no reach"
    assert moved(make("sliding", "full"), ends, batch, far)[n].min() > 1e-6, "a full layer sees all"

def test_bad_features():
    """Catches a NaN or infinite feature that reaches a weight, costs other blocks, or is not counted."""
    drafter, (batch, ends) = make("sliding", "full"), make_batch()
    for n, a in ((-3, 40), (-4, 30)):  # one that sees the bad places, one whose anchor is the first of them
        batch["anchor"][n], batch["start"][n], batch["valid"][n, 1] = a, 23, True
    spoilt = {**batch, "features": batch["features"].clone()}
    for place, channel, value in ((30, 5, math.nan), (31, K * D - 1, -math.inf), (2, 0, math.inf)):
        spoilt["features"][place, channel] = value
    sees = (batch["start"] == 23) & (batch["anchor"] > 30) | (batch["start"] == 0) & (batch["anchor"] > 2)
    results = []
    for case in (spoilt, {**batch, "valid": batch["valid"] & ~sees[:, None]}):  # those blocks left out
        drafter.zero_grad()
        rows, gradient, counters = step(drafter, ends, case)
        rows.backward(gradient)
        results.append((rows, torch.cat([p.grad.flatten() for p in drafter.parameters()]), counters))
    (rows, found, counters), (clean_rows, clean, clean_counters) = results
    assert found.isfinite().all() and (found - clean).abs().max() < 1e-5 * clean.abs().max()
    assert torch.equal(rows[~sees], clean_rows[~sees])
    assert counters[6:8].tolist() == [3, (sees & batch["valid"].any(1)).sum()] and counters[7] > 0
    counters[6:8] = 0
    assert counters.tolist() == pytest.approx(clean_counters.tolist(), rel=1e-5)

def test_names():
    """Catches a tensor that serving engines would not find, or one (embedding, head, rotary) too many."""
    layer = {"input_layernorm": [D], "post_attention_layernorm": [D], "self_attn.q_proj": [H * h, D],
             "self_attn.k_proj": [G * h, D], "self_attn.v_proj": [G * h, D], "self_attn.o_proj": [D, H * h],
             "self_attn.q_norm": [h], "self_attn.k_norm": [h], "mlp.gate_proj": [FFN, D],
             "mlp.up_proj": [FFN, D], "mlp.down_proj": [D, FFN]}
    want = {"fc.weight": [D, K * D], "hidden_norm.weight": [D], "norm.weight": [D]}
    want |= {f"layers.{i}.{name}.weight": shape for i in range(5) for name, shape in layer.items()}
    drafter = make(*["full"] * 5)
    assert {name: list(x.shape) for name, x in drafter.state_dict().items()} == want and len(want) == 58
    assert not list(drafter.buffers())

def test_rotary_far_out():
    """Catches angles rounded to bf16 (radians off at 32k) where the drafter computes in bf16."""
    place, theta = 32768, 1e6
    table = t.rotary(torch.tensor([place], dtype=torch.int32), theta, 128)
    want = torch.tensor([f(place * theta ** (-2 * i / 128)) for f in (math.cos, math.sin) for i in range(64)])
    assert table.dtype == torch.float32 and (table.flatten() - want).abs().max() < 5e-3
    drafter = make("full", rope_theta=theta).bfloat16()
    features = torch.randn(1, K * D).bfloat16().expand(2, -1)
    rope = t.rotary(torch.tensor([0, place]), theta, h)
    still, far = drafter.context(features, rope)[0][0].double().detach()
    i = torch.arange(h // 2).double()
    angle = place * theta ** (-2 * i / h)
    want = torch.view_as_real(torch.polar(torch.ones_like(angle), angle) * torch.complex(*still.chunk(2, 1)))
    assert (far - torch.cat([want[..., 0], want[..., 1]], 1)).abs().max() < 0.02 * still.abs().max()

# ------------------------------------------------------------------------------------------- targets

GEMMA = {**TINY, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES = {
    "qwen3": lambda: tf.Qwen3Config(**TINY),
    "llama, tied head": lambda: tf.LlamaConfig(**TINY, tie_word_embeddings=True),
    "gemma3, nested": lambda: tf.Gemma3Config(
        text_config=tf.Gemma3TextConfig(**GEMMA), vision_config=tf.SiglipVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2, image_size=28)),
    "gemma3, soft cap": lambda: tf.Gemma3TextConfig(**GEMMA, final_logit_softcapping=2.0),
    "qwen3.5, hybrid": lambda: tf.Qwen3_5TextConfig(
        **TINY, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8)}

@pytest.mark.parametrize("family", FAMILIES)
def test_capture(family, tmp_path):
    """Catches a tap a layer off, padding or a neighbour in a feature, rows mixed up, layers badly loaded."""
    config = FAMILIES[family]()
    auto = tf.AutoModelForImageTextToText if "nested" in family else tf.AutoModelForCausalLM
    whole = auto.from_config(config).float().eval()
    whole.save_pretrained(tmp_path, max_shard_size="1GB" if "tied" in family else "20KB")
    assert (tmp_path / "model.safetensors.index.json").exists() == ("tied" not in family)
    last = next(m for name, m in whole.named_modules() if name.endswith("layers.3") and "vis" not in name)
    inside = []
    last.register_forward_hook(lambda _, x, y: inside.append((y[0] if isinstance(y, tuple) else y)[0]))
    lengths = np.array([70, 33, 64, 1, 20])
    ids = torch.randint(1, 64, (256,))
    batch = {"lengths": lengths, "ids": ids.numpy(), "tokens_used": int(lengths.sum())}
    want, head = [], whole.get_output_embeddings().weight
    for document in ids[: lengths.sum()].split(lengths.tolist()):  # each alone
        with torch.no_grad():
            out = whole(input_ids=document[None], output_hidden_states=True)
        assert not torch.allclose(out.hidden_states[4][0], inside[-1])  # here the last one is normed
        want.append([*(x[0] for x in out.hidden_states[1:4]), inside[-1]])
    for taps in ([3, 0, 2], [2, 1]):
        model = t.load_target(tmp_path, torch.float32, max(taps) + 1)
        layers = t.decoder_layers(model.base_model)
        assert len(layers) == max(taps) + 1
        assert not any(p.requires_grad for p in model.parameters()) and not model.training
        theirs = whole.state_dict()
        assert all(torch.equal(x, theirs[name]) for name, x in model.state_dict().items())
        features = torch.full((256, 32 * len(taps)), torch.nan)
        t.capture(model.base_model, layers, taps, batch, features)
        expected = torch.cat([torch.cat([document[k] for k in taps], 1) for document in want])
        assert (features[: len(expected)] - expected).abs().max() < 1e-4 * expected.abs().max()
        assert features[len(expected):].abs().max() == 0 and not any(m._forward_hooks for m in layers)
    none = t.load_target(tmp_path, torch.float32, 0)
    ends = t.frozen_ends(none)
    assert "layers." not in "".join(k for k in none.state_dict() if "vis" not in k)
    assert torch.equal(ends["embed"][ids] * ends["embed_scale"], whole.get_input_embeddings()(ids))
    logits = out.hidden_states[4][0] @ ends["head"].T
    logits = ends["softcap"] * torch.tanh(logits / ends["softcap"]) if ends["softcap"] else logits
    assert torch.equal(ends["head"], head) and (logits - out.logits[0]).abs().max() < 1e-4

@pytest.mark.parametrize("family", ["qwen3", "gemma3, soft cap"])
def test_packed_reading(family):
    """Catches a document that sees another, a window or a scale lost, a tile called full that is not, a mask
    of the micro-batch before, and a compilation for each: packed rows against each document alone."""
    model = tf.AutoModelForCausalLM.from_config(FAMILIES[family]()).float().eval()
    base, layers, taps, S = model.base_model, t.decoder_layers(model.base_model), [0, 3], 384
    draws = [torch.randint(1, 150, (9,)) for _ in range(3)]
    batches, wanted = [], []
    for lengths in ([int(n) for n in draw[draw.cumsum(0) < S]] for draw in draws):
        begin = np.concatenate([np.repeat(np.cumsum(lengths) - lengths, lengths), np.arange(sum(lengths), S)])
        batch = {"lengths": np.array(lengths), "tokens_used": sum(lengths), "positions": np.arange(S) - begin,
                 "ids": torch.randint(1, 64, (S,)).numpy()}
        want = torch.zeros(S, 64)
        t.capture(base, layers, taps, batch, want)  # plain reading, which test_capture holds to the target
        batches.append(batch)
        wanted.append(want)
    torch._dynamo.reset()
    cfg = t.Config(tokens=S, max_length=150)
    mask_of = t.packed_reading(base, layers, cfg, model.config.get_text_config(), t.TRITON)
    features = torch.full((S, 64), torch.nan)
    t.capture(base, layers, taps, batches[0], features, mask_of)
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch, want in zip(batches, wanted):
            t.capture(base, layers, taps, batch, features, mask_of)
            assert (features - want).abs().max() < 1e-4 * want.abs().max()

def test_default_taps():
    """Catches a departure from the published layers, and taps that repeat or miss a shallow target."""
    assert t.default_taps(36, 5) == [1, 9, 17, 25, 33] and t.default_taps(64, 5) == [1, 16, 31, 46, 61]
    assert t.default_taps(36, 1) == [18] and t.default_taps(40, 8) == [1, 6, 11, 16, 22, 27, 32, 37]
    for layers in range(1, 9):
        for count in range(1, 9):
            taps = t.default_taps(layers, count)
            assert taps == sorted(set(taps)) and taps[0] >= 0 and taps[-1] <= max(layers - 2, 0), taps
            assert len(taps) == min(count, max(layers - 1, 1)), (layers, count, taps)

def test_rope_theta():
    """Catches a theta lost between the two spellings of a config, or guessed where none is named."""
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 5e5},
              "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    flat = nested["full_attention"]
    for text in (Bare(**TINY, rope_theta=5e5), tf.Qwen3Config(**TINY, rope_parameters=flat),
                 tf.Gemma3TextConfig(**TINY, rope_parameters=nested)):
        config = t.drafter_config(t.Config(layers=2), text, [0, 2], MASK)
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5
        assert t.Drafter(config).theta == 5e5 and config["rope_scaling"] is None
    with pytest.raises(t.UserError, match="rope_theta"):
        t.drafter_config(t.Config(), Bare(**TINY, rope_parameters={"rope_type": "default"}), [0, 2], MASK)

def words(count, special=(), **named):
    """A tokenizer of `count` words w0, w1, ..."""
    from tokenizers import Tokenizer, models
    model = models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0")
    named |= {"pad_token": "w1", "eos_token": "w2"}
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **named)
    tokenizer.add_special_tokens({"extra_special_tokens": [f"w{i}" for i in special]})
    return tokenizer

def test_mask_token():
    """Catches a mask token without an embedding row, one that is pad or eos, and one that the data uses."""
    import datasets
    documents = Bare(rows=datasets.Dataset.from_dict({"input_ids": [[5, 61], [7]]}))

    def choose(tokenizer, told=-1):
        return t.choose_mask_token(t.Config(mask_token_id=told), tokenizer, 64, documents)[0]

    assert choose(words(58), 60) == 60  # an unused padded row
    for wrong in (64, -2, 1, 2):  # no row, no row, pad, eos
        with pytest.raises(t.UserError, match=f"mask-token-id {wrong}"):
            choose(words(58), wrong)
    assert choose(words(58, mask_token="w9")) == 9
    assert choose(words(58)) == 58  # the first row past the tokenizer
    assert choose(words(64, special=(1, 61, 62, 63))) == 62  # 1 is pad, 61 occurs
    with pytest.raises(t.UserError, match="mask-token-id"):
        choose(words(64, special=(1, 61)))

def test_mask_token_has_a_row():
    """Catches a token of the tokenizer that lies past the embedding: the look-up would read outside of it."""
    for tokenizer in (words(64, mask_token="<beyond>"), words(70, special=(66, 67))):
        with pytest.raises(t.UserError, match="mask-token-id"):
            t.choose_mask_token(t.Config(), tokenizer, 64, None)
