"""Speculative decoding: what is learnt is accepted, the output stays the target's, and exports read back.

The reference is transformers' own generate(), a forward over the whole text at once, or enumeration. Alone:

    OMP_NUM_THREADS=1 python -m pytest tests/test_decode.py        DFLASH_TEST_SEED=... repeats a failure
"""
import copy
import itertools
import json

import numpy as np
import pytest
import torch
import transformers as tf

import train_dflash as t

MASK, TAPS = 63, [2, 0]
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": 0.3}
FAMILIES = {
    "qwen3": lambda **more: tf.Qwen3Config(**TINY | more),
    "llama, tied head": lambda **more: tf.LlamaConfig(**TINY | more, tie_word_embeddings=True),
    "gemma3, windows and soft cap": lambda **more: tf.Gemma3TextConfig(
        **TINY | more, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2,
        final_logit_softcapping=3.0),
    "gpt2, learned positions": lambda **more: tf.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=256, initializer_range=0.3)}


pytestmark = pytest.mark.usefixtures("dice")

def make_target(family="qwen3", **more):
    return tf.AutoModelForCausalLM.from_config(FAMILIES[family](**more)).float().eval().requires_grad_(False)

def drafter_config(*kinds, block=4, **more):
    return {"hidden_size": 32, "rms_norm_eps": 1e-6, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "intermediate_size": 48, "rope_theta": 1e4, "block_size": block,
            "sliding_window": 6, "num_hidden_layers": len(kinds),
            "layer_types": [f"{kind}_attention" for kind in kinds],
            "dflash_config": {"target_layer_ids": TAPS, "mask_token_id": MASK}, **more}

def make_drafter(*kinds, **more):
    """Untaught, with weights large enough that features, window and positions all show."""
    drafter = t.Drafter(drafter_config(*kinds, **more))
    for p in drafter.parameters():
        torch.nn.init.normal_(p.data, 1 if p.dim() == 1 else 0, 0.3)
    return drafter

def generate(model, prompt, count, **more):
    """The plain target's greedy continuation, by transformers."""
    more = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False} | more
    return model.generate(torch.tensor([prompt]), max_new_tokens=count, **more)[0, len(prompt):].tolist()

def text(dice, count):
    return dice.integers(1, 60, count).tolist()

def noisy(dice, prompt, continuation, B, right):
    """Drafts of the continuation with errors -> draft, the accepted counts to expect, the features given."""
    expected, given = [], []

    def draft(tokens, features, temperature, draw):
        at = len(tokens) - len(prompt)
        assert tokens == prompt + continuation[:at]
        truth = (continuation + [0] * B)[at: at + B - 1]
        said = [x if dice.random() < right else (x + 1) % 64 for x in truth]
        first_wrong = [*(a == b for a, b in zip(said, truth)), False].index(False)
        expected.append(min(first_wrong + 1, len(continuation) - at))
        given.append(features)
        return torch.tensor(said), None
    return draft, expected, given

def test_overfit_is_accepted(dice):
    """Catches a place that differs between training and decoding: learnt by heart, all is accepted."""
    B, layers = 4, ("sliding", "full")
    model = make_target()
    prompt = text(dice, 6)
    continuation = generate(model, prompt, 1 + 6 * B)
    ids, n, S = np.array(prompt + continuation + [0]), 6 + 1 + 6 * B, 32
    supervised = (np.arange(S) >= len(prompt)) & (np.arange(S) < n)
    begin, end = np.zeros(S, np.int64), np.full(S, n)
    begin[n:], end[n:] = np.arange(n, S), np.arange(n, S) + 1
    batch = {"lengths": np.array([n]), "ids": ids, "tokens_used": n}
    blocks = t.blocks_of(ids, supervised, begin, end, 32, B, dice)
    tensors = {k: torch.from_numpy(blocks[k]) for k in ("start", "anchor", "tokens", "valid")}
    features, positions = torch.zeros(S, 32 * len(TAPS)), torch.from_numpy(np.arange(S) - begin)
    t.capture(model.base_model, t.decoder_layers(model.base_model), TAPS, batch, features)
    drafter, ends = make_drafter(*layers), t.frozen_ends(model)
    ends["rope"] = t.rotary(torch.arange(S + B), drafter.theta, drafter.h)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(600):
        rows, gradient, counters = t.drafter_step(
            drafter, ends, features, positions, **tensors, mask_id=MASK, loss="dflash", gamma=4.0)
        read = t.read_counters(counters.tolist())
        if read["position_accuracy"] == [1.0] * (B - 1) and read["loss"] < 0.05:
            break
        optimizer.zero_grad()
        rows.backward(gradient / counters[1])
        optimizer.step()
    else:
        pytest.fail(f"one sequence was not learnt: {read}")
    assert read["accept_len_whole"] == B
    draft = t.Draft(drafter, ends, MASK, 64)
    out, rounds, _ = t.decode(t.Reader(model, TAPS), prompt, len(continuation), (), draft)
    assert out == continuation and rounds == [B] * 6, rounds

@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_the_targets(family, dice):
    """Catches a draft that changes the output, a cache cropped wrongly, counts that do not add up."""
    model, B, count = make_target(family), 5, int(dice.integers(20, 28))
    prompt = text(dice, 7)
    want = generate(model, prompt, count)
    reader, ends = t.Reader(model, TAPS), t.frozen_ends(model)
    oracle, expected, given = noisy(dice, prompt, want, B, 0.7)
    drafts = {"none": None, "random": t.Draft(make_drafter("sliding", "full", block=B), ends, MASK, 64),
              "lookup": t.prompt_lookup(B), "noisy": oracle}
    whole = model(torch.tensor([prompt + want]), output_hidden_states=True)  # no cache, all at once
    features = torch.cat([whole.hidden_states[k + 1][0] for k in TAPS], 1)
    whole = whole.logits[0, len(prompt) - 1: -1]
    for name, draft in drafts.items():
        out, rounds, logits = t.decode(reader, prompt, count, (), draft)
        assert out == want, name
        assert sum(rounds) == (count - 1 if draft else 0) and all(1 <= r <= B for r in rounds)
        assert (torch.stack(logits) - whole).abs().max() < 1e-3, f"{name}: logits of other tokens"
        assert rounds == expected or name != "noisy"
    given = torch.cat(given)  # of the tokens kept, each once
    assert len(given) == len(prompt) + sum(expected[:-1])
    assert (given - features[: len(given)]).abs().max() < 1e-3 * features.abs().max()
    last = int(dice.integers(5, count))  # end where some token stands first
    at = want.index(want[last])
    assert generate(model, prompt, count, eos_token_id=want[last]) == want[: at + 1]
    perfect = noisy(dice, prompt, want, B, 1.0)[0]
    for draft in (None, perfect, t.prompt_lookup(B)):
        out, rounds, logits = t.decode(reader, prompt, count, {want[last], 99}, draft)
        assert out == want[: at + 1] and len(logits) == at + 1
        assert sum(rounds) == (at if draft else 0)

def test_lookup(dice):
    """Catches a prompt lookup that copies from the wrong place, or from an older occurrence."""
    copied = t.prompt_lookup(5, back=2)
    for tokens, want in (([7, 8, 1, 2, 7, 8, 3, 4, 5, 7, 8], [3, 4, 5, 7]), ([7, 8, 3, 7, 8], [3, 7, 8, 0]),
                         ([1, 2, 3], [0] * 4), ([5, 5, 5], [5, 0, 0, 0])):
        found, p = copied(tokens, torch.zeros(1), 0.0, None)
        assert found.tolist() == want and p is None

def test_lossless(dice):
    """Catches a check that cannot find a wrong token, or finds one where there is none."""
    model, prompt, count = make_target(), text(dice, 7), 16
    reader = t.Reader(model, ())
    plain, _, plain_logits = t.decode(reader, prompt, count, ())
    draft = noisy(dice, prompt, plain, 4, 0.7)[0]
    spec, _, logits = t.decode(t.Reader(model, TAPS), prompt, count, (), draft)
    differ, gap, noise = t.lossless(reader, prompt, spec, logits, plain, plain_logits)
    assert differ == 0 and gap == 0 and noise < 1e-4
    for at in (0, int(dice.integers(1, count - 1)), count - 1):
        false = [*spec[:at], (spec[at] + 1) % 64, *spec[at + 1:]]
        choice = model(torch.tensor([prompt + false])).logits[0, len(prompt) - 1: -1]
        gaps = choice.max(-1).values - choice[torch.arange(count), false]
        differ, gap, _ = t.lossless(reader, prompt, false, logits, plain, plain_logits)
        assert differ == int((gaps > 1e-5).sum()) > 0 and gap == pytest.approx(float(gaps.max()), abs=1e-3)
    shifted = [*logits[:-1], logits[-1] + 0.5]
    assert t.lossless(reader, prompt, spec, shifted, plain, plain_logits)[2] == pytest.approx(0.5, abs=1e-3)
    assert t.lossless(reader, prompt, false, shifted, plain, plain_logits)[2] < 1e-4  # false there

def chance(counts, expected):
    """How likely counts this far from what is expected are, by chi-square; rare cells make one together."""
    common = expected >= 5
    cells = torch.stack([torch.cat([x[common], x[~common].sum()[None]]) for x in (counts, expected)]).double()
    cells = cells[:, cells[1] >= 5]  # a rest that is itself rare is left out: one count looks absurd
    far = ((cells[0] - cells[1]) ** 2 / cells[1]).sum()
    return float(torch.special.gammaincc(torch.tensor((cells.shape[1] - 1) / 2).double(), far / 2))

@pytest.mark.parametrize("certain", [False, True])
def test_sampling_keeps_the_distribution(certain, dice):
    """Catches a rejection rule that bends the target's distribution, by the joint counts of 3 tokens."""
    V, T, n, prompt = 6, 0.6, 400, [1, 2, 3]
    model = make_target(num_hidden_layers=1, vocab_size=V, initializer_range=0.2)
    every = torch.tensor(list(itertools.product(range(V), repeat=3)))
    logits = model(torch.cat([torch.tensor([prompt]).expand(len(every), -1), every], 1)).logits[:, 2:5]
    p = (logits.double() / T).softmax(-1).gather(2, every[..., None]).prod(1)[:, 0]  # exact, of every outcome
    bad = {**t.frozen_ends(model), "head": 0.07 * torch.randn(V, 32)}  # of another mind than the target
    drafter = make_drafter("full", block=2, dflash_config={"target_layer_ids": [0]})
    reader, draw = t.Reader(model, [0]), torch.Generator().manual_seed(int(dice.integers(2**31)))
    counts, accepted = torch.zeros(V, V, V), [0, 0, 0]

    likely = logits[:: V * V, 1].argmax(-1)  # after each first token

    def always_same(tokens, *_):
        return likely[tokens[-1]][None], None

    for _ in range(n):
        draft = always_same if certain else t.Draft(drafter, bad, 0, 8)
        out, rounds, _ = t.decode(reader, prompt, 3, (), draft, T, draw)
        counts[tuple(out)] += 1
        accepted[rounds[0]] += 1
    assert min(accepted[1:]) > n / 100, f"both ends of the rule must be met: {accepted}"
    p = p.view(V, V, V)
    for got, exact in ((counts, p), (counts.sum(0), p.sum(0)), (counts.sum(2), p.sum(2))):  # and pairs
        assert chance(got.flatten(), n * exact.flatten()) > 1e-6

def test_verify(dice):
    """Catches a greedy check that skips or repeats a token, and a sampled one that rejects what is sure."""
    for _ in range(50):
        B = int(dice.integers(2, 9))
        logits = torch.randn(B, 20)
        best = logits.argmax(-1).tolist()
        draft = [x if dice.random() < 0.8 else (x + 1) % 20 for x in best[:-1]]
        n = 0
        while n < B - 1 and draft[n] == best[n]:
            n += 1
        assert t.verify(torch.tensor(draft), None, logits, 0.0, None) == (n, best[n])
        tokens, p = t.pick(logits[:-1], 0.7, None)  # the drafter's distribution is the target's
        assert t.verify(tokens, p, logits, 0.7, None)[0] == B - 1

@pytest.mark.parametrize("more", [{}, {"is_causal": False}, {"is_causal": True}])
@pytest.mark.parametrize("kinds", [("full", "full"), ("sliding", "sliding"), ("sliding", "full")])
def test_draft_cache(kinds, more, dice):
    """Catches a drafter's cache that differs from training: a place off, another window, another scale."""
    drafter = make_drafter(*kinds, **more)
    ends = {"embed": torch.randn(64, 32), "head": torch.randn(64, 32), "embed_scale": 1.5, "softcap": 4.0,
            "rope": t.rotary(torch.arange(44), drafter.theta, drafter.h)}
    draft, blind = t.Draft(drafter, ends, MASK, 64), t.Draft(drafter, ends, MASK, 64, zero=True)
    features = torch.randn(40, 32 * len(TAPS))
    read = 0
    for new in (9, 3, 1, 4, 2):
        tokens = text(dice, read + new + 1)
        p = draft(tokens, features[read: read + new], 1.0, None)[1]
        without = blind(tokens, features[read: read + new], 1.0, None)[1]
        read += new
        anchor, block = torch.tensor([read]), torch.tensor([[tokens[-1], 0, 0, 0]])
        for got, seen in ((p, features), (without, features * 0)):
            rows = t.drafter_step(
                drafter, ends, seen, torch.arange(40), anchor * 0, anchor, block, block > 0, MASK,
                "dflash", 4.0)[0][0]
            logits = 4 * torch.tanh(rows @ ends["head"].T / 4)
            assert (got - logits.softmax(-1)).abs().max() < 1e-4

def test_draft_compiled(dice):
    """Catches a drafting step that is not one graph, one that is compiled again for another round, prompt,
    anchor, or set of weights, and one that drafts otherwise than the step as it is written."""
    torch._dynamo.reset()
    step = torch.compile(t.draft_step, fullgraph=True, dynamic=False)
    ends = {"embed": torch.randn(64, 32), "head": torch.randn(64, 32), "embed_scale": 1.5, "softcap": 4.0}
    drafters = [make_drafter("sliding", "full") for _ in range(2)]
    t.Draft(drafters[0], ends, MASK, 64, step=step).logits(1, torch.randn(9, 32 * len(TAPS)))
    with torch.compiler.set_stance("fail_on_recompile"):
        for drafter, prompt in itertools.product(drafters, (dice.integers(5, 30), dice.integers(1, 5))):
            pair = [t.Draft(drafter, ends, MASK, 64, step=s) for s in (t.draft_step, step)]
            for new in (prompt, *dice.integers(1, 5, 6)):
                anchor, features = int(dice.integers(1, 60)), torch.randn(new, 32 * len(TAPS))
                plain, compiled = (draft.logits(anchor, features) for draft in pair)
                assert (plain - compiled).abs().max() < 1e-4

def test_read_drafter(tmp_path):
    """Catches an export that reads back otherwise, and a config that is guessed at where it is unclear."""
    drafter = make_drafter("sliding", "full")
    config = drafter_config("sliding", "full")
    keys = {"block_size": 4, "mask_token_id": MASK, "target_layer_ids": TAPS}
    bare = {k: v for k, v in config.items() if k not in (*keys, "dflash_config")}
    t.export(tmp_path, config, drafter.state_dict())

    def read(**written):
        (tmp_path / "config.json").write_text(json.dumps({**bare, **written}))
        return t.read_drafter(tmp_path)

    for written in (keys, {"dflash_config": keys}, {**keys, "dflash_config": keys}):
        found, state = read(**written)
        assert (found["block_size"], found["dflash_config"]) == (4, keys)
        again = t.Drafter(found)
        t.strict_load(again, state, "there")
        for name, x in drafter.state_dict().items():
            assert state[name].dtype == torch.bfloat16 and torch.equal(state[name], x.bfloat16())
            assert torch.equal(again.state_dict()[name], x.bfloat16().float())
        assert again.rules() == drafter.rules() and (again.theta, again.block) == (1e4, 4)
    for key, value in keys.items():
        other = [1, 3] if key == "target_layer_ids" else value + 1
        for written in ({**keys, key: None}, {**keys, "dflash_config": {key: other}}):
            with pytest.raises(t.UserError, match=key):
                read(**written)
    bare["rope_theta"] = None
    assert read(**keys, rope_parameters={"rope_theta": 5e5})[0]["rope_theta"] == 5e5
    with pytest.raises(t.UserError, match="rope_theta"):
        read(**keys)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(t.UserError):
        read(**keys, rope_theta=1e4)

def test_null_is_absent(tmp_path):
    """Catches a null in a published config taken for a value: is_causal, layer_types, dflash_config."""
    config = {**drafter_config("sliding", "full"), "mask_token_id": MASK, "target_layer_ids": TAPS}
    t.export(tmp_path, {}, make_drafter("sliding", "full").state_dict())
    for key, rules in (("is_causal", [(6, True), (0, False)]), ("dflash_config", [(6, True), (0, False)]),
                       ("layer_types", [(0, False)] * 2)):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: None}))
        assert t.Drafter(t.read_drafter(tmp_path)[0]).rules() == rules, key

def test_strict_load():
    """Catches a tensor dropped, left as it was or cut to size without a word."""
    drafter = make_drafter("full")
    before, state = copy.deepcopy(drafter.state_dict()), {k: x + 1 for k, x in drafter.state_dict().items()}
    state["extra.weight"] = state.pop("norm.weight")
    state["fc.weight"] = state["fc.weight"][:, 1:]
    with pytest.raises(t.UserError) as error:
        t.strict_load(drafter, state, "folder/here")
    for said in ("folder/here", "norm.weight missing", "extra.weight", "fc.weight (32, 63)", "(32, 64)"):
        assert said in str(error.value), said
    assert all(torch.equal(x, before[name]) for name, x in drafter.state_dict().items())
