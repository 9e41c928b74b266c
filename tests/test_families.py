"""Targets of every family, tiny and random, from disk: features, ends, plan, one step, export, decoding.

The reference is the family's own code: hidden_states of a document alone, its logits, its generate(). Alone:

    OMP_NUM_THREADS=1 python -m pytest tests/test_families.py      DFLASH_TEST_SEED=... repeats a failure
"""
import itertools
import json
import os
import re
from types import SimpleNamespace as Bare

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from conftest import SMALL

import train_dflash as t

SPECIAL = {"pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258}  # byte_tokenizer()'s
TINY = {"vocab_size": 264, "hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": 0.25, **SPECIAL}
HEADS = {**TINY, "head_dim": 16}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
          "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25,
                              "mrope_section": [1, 1, 0], "mrope_interleaved": True}}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
SIGHT = {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 40, "depth": 2, "num_heads": 2}
FAMILIES = {
    "qwen3": lambda: tf.Qwen3Config(**HEADS),
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(**HEADS, **EXPERTS, num_experts=4, moe_intermediate_size=24),
    "qwen3.5 text": lambda: tf.Qwen3_5TextConfig(**HEADS, **LINEAR),
    "qwen3.5 wrapper": lambda: tf.Qwen3_5Config(text_config={**HEADS, **LINEAR}, vision_config=SIGHT),
    "llama 3": lambda: tf.LlamaConfig(**HEADS, rope_parameters=LLAMA3),
    "llama, tied": lambda: tf.LlamaConfig(**{**TINY, "num_attention_heads": 2}, tie_word_embeddings=True),
    "gemma 2": lambda: tf.Gemma2Config(**HEADS, **SLIDING, query_pre_attn_scalar=16,
                                       final_logit_softcapping=3.0, attn_logit_softcapping=2.0),
    "gemma 3 wrapper": lambda: tf.Gemma3Config(
        text_config={**HEADS, **SLIDING}, vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
            "image_size": 28}),
    "gemma 4": lambda: tf.Gemma4TextConfig(
        **HEADS, **SLIDING, global_head_dim=32, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
        final_logit_softcapping=3.0),
    "gpt-oss": lambda: tf.GptOssConfig(**HEADS, **EXPERTS, **SLIDING, num_local_experts=4),
    "mistral": lambda: tf.MistralConfig(**HEADS, sliding_window=8)}
BY_HAND = ("qwen3", "qwen3.5 text", "gemma 4")  # no run: test_train.py has qwen3, their kin are in this list
THETAS = {"llama 3": 5e5, "qwen3.5 text": 1e5, "qwen3.5 wrapper": 1e5, "gemma 3 wrapper": 1e6, "gemma 4": 1e6,
          "gpt-oss": 1.5e5}  # the others': 1e4


pytestmark = pytest.mark.usefixtures("dice")

@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A family's name, its folder as a user has it, and the whole model as its own code reads it back."""
    config, folder = FAMILIES[request.param](), tmp_path_factory.mktemp("family") / "target"
    wrapper = "wrapper" in request.param
    auto = tf.AutoModelForImageTextToText if wrapper else tf.AutoModelForCausalLM
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"weights of {request.param}: torch.manual_seed({seed})")
    torch.manual_seed(seed)
    model = auto.from_config(config).float()
    for name, p in model.named_parameters():  # what a family begins with at 0 or 1 must matter too
        if p.dim() < 2 and "A_log" not in name:
            torch.nn.init.normal_(p.data, float(p.data.mean()), 0.1)
    model.save_pretrained(folder)
    t.byte_tokenizer().save_pretrained(folder)
    model = auto.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    return Bare(name=request.param, folder=folder, model=model, text=model.config.get_text_config())

def own_layers(model):
    return next(m for name, m in model.named_modules() if name.endswith("layers") and "vision" not in name)

def alone(model, ids):
    """One document through the family's own code -> (output, embeddings and the stream after each layer)."""
    last, n = [], model.config.get_text_config().num_hidden_layers
    hook = own_layers(model)[n - 1].register_forward_hook(
        lambda m, x, y: last.append(y[0] if isinstance(y, tuple) else y))
    with torch.no_grad():
        out = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    hook.remove()
    assert len(out.hidden_states) == n + 1  # the last of them is normed, all else is hidden_states[id + 1]
    return out, [x[0] for x in (*out.hidden_states[:n], last[0])]

def captured(model, taps, documents, S=384):
    lengths, used = np.array([len(d) for d in documents]), sum(map(len, documents))
    ids = np.array([*itertools.chain(*documents), *[0] * (S - used)])
    features = torch.full((S, 40 * len(taps)), torch.nan)
    t.capture(model.base_model, t.decoder_layers(model.base_model), taps,
              {"lengths": lengths, "ids": ids, "tokens_used": used}, features)
    assert features[used:].abs().max() == 0
    return features[:used].split(lengths.tolist())

def test_features_are_the_rule_in_any_company(family, dice):
    """Catches a tap a layer off or normed, a neighbour, padding or a state in a feature, a window or a scale
    lost: each document alone, in a batch, and beside others of other lengths, against itself alone."""
    documents = [dice.integers(0, 256, n).tolist() for n in (70, 33, 64, 1, 20)]
    want = [alone(family.model, document)[1] for document in documents]
    others = [dice.integers(0, 256, n).tolist() for n in (130, 3, 63)]
    for taps in ([1, 3], [2, 0]):
        model = t.load_target(str(family.folder), torch.float32, max(taps) + 1)
        assert len(t.decoder_layers(model.base_model)) == max(taps) + 1
        mixed = [documents[0], others[0], documents[3], others[1], documents[4], others[2]]
        found = [(i, captured(model, taps, [documents[i]])[0]) for i in range(5)]
        found += [*enumerate(captured(model, taps, documents))]
        found += [*zip((0, None, 3, None, 4, None), captured(model, taps, mixed))]
        for i, features in found:
            for k, layer in enumerate(taps if i is not None else ()):
                expected = want[i][layer + 1]
                error = (features[:, 40 * k: 40 * k + 40] - expected).abs().max() / expected.abs().max()
                assert error < 1e-4, f"layer {layer}, document of {len(documents[i])}: off by {error:.1e}"

def test_a_document_too_many_does_not_move_the_others(family, dice):
    """Catches the padding of a longer neighbour in the state of a recurrent or sliding layer, bit by bit."""
    model = t.load_target(str(family.folder), torch.float32, 4)
    model.set_experts_implementation("batched_mm")  # grouped, a neighbour's tokens move roundings: 6 of 400
    document, longer, other = (dice.integers(0, 256, n).tolist() for n in (40, 60, 60))
    one, two = (captured(model, [0, 1, 2, 3], [document, x])[0] for x in (longer, other))
    assert torch.equal(one, two)

def test_the_ends_are_the_targets(family, dice):
    """Catches a head, an embedding, a scale or a soft cap that is not the target's own, in both dtypes that
    training computes in."""
    ids = dice.integers(0, 264, 50).tolist()
    out, _ = alone(family.model, ids)
    ends = t.frozen_ends(t.load_target(str(family.folder), torch.float32, 0))
    logits = out.hidden_states[4][0] @ ends["head"].T
    capped = ends["softcap"] * torch.tanh(logits / ends["softcap"]) if ends["softcap"] else logits
    assert (capped - out.logits[0]).abs().max() < 1e-4 * out.logits.abs().max()
    assert bool(ends["softcap"]) == (family.name in ("gemma 2", "gemma 4"))
    assert (ends["embed_scale"] != 1) == ("gemma" in family.name)
    labels = torch.tensor([*ids[1:], 0])[:, None]  # and what training makes of it: the cross-entropies
    rows = out.hidden_states[4][0][:, None]
    ce = torch.stack([t.head_and_loss(row[None], ends["head"], label[None], label[None] > -1, "dflash", 1.0,
                                      ends["softcap"])[0] for row, label in zip(rows, labels)])
    assert (ce - F.cross_entropy(out.logits[0], labels[:, 0], reduction="none")).abs().max() < 1e-4 * ce.max()
    for dtype in (torch.float32, torch.bfloat16):
        model = t.load_target(str(family.folder), dtype, 1)
        ends, first = t.frozen_ends(model), []
        t.decoder_layers(model)[0].register_forward_pre_hook(
            lambda m, x, kw: first.append(x[0] if x else kw["hidden_states"]), with_kwargs=True)
        model(input_ids=torch.tensor([ids]), use_cache=False)
        embedded = F.embedding(torch.tensor(ids), ends["embed"]) * ends["embed_scale"]
        assert torch.equal(embedded, first[0][0]), f"{dtype}: not the scale the target computes with"

def test_plan_counts_its_parameters(family, tmp_path, capsys):
    """Catches a plan that fails on a family's config, or counts what a GPU does not hold."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in t.demo_chats(3, 20)))
    command = ["--target", str(family.folder), "--data", str(chats), "--out", str(tmp_path / "run"), *SMALL]
    assert t.main([*command, "--device", "cpu", "--plan"]) == 0
    said = capsys.readouterr().out
    taps = [int(x) for x in re.search(r"taps \[([\d, ]+)\]", said)[1].split(",")]
    assert taps == [0, 2] and not (tmp_path / "run").exists()
    held = t.load_target(str(family.folder), torch.float32, max(taps) + 1)  # as a target's process does
    whole = t.load_target(str(family.folder), torch.float32)
    sizes = [sum(p.numel() for p in m.parameters()) for m in (whole, held.base_model)]
    ends = t.frozen_ends(held)
    tied = ends["head"].data_ptr() == ends["embed"].data_ptr()
    sizes.append(ends["embed"].numel() * (1 if tied else 2))
    assert list(t.parameters_of(str(family.folder), taps)) == sizes
    experts = family.name in ("qwen3-moe", "gpt-oss")
    heads = "32/8 of 128" if experts else "2/2 of 20" if "tied" in family.name else "4/2 of 16"
    assert f"heads {heads}," in said
    assert f"{sizes[0] / 1e6:,.1f} M parameters, {sizes[1] / 1e6:,.1f} M on its GPU" in said

def trained(family, out, capfd, seed):
    """The drafter's folder after one step by the command line, and what the run and its export say."""
    chats = out.with_suffix(".jsonl")
    chats.write_text("".join(json.dumps(row) + "\n" for row in t.demo_chats(seed, 40)))
    shape = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
    code = t.main(["--target", str(family.folder), "--data", str(chats), "--out", str(out), *SMALL, *shape,
                   "--device", "cpu", "--max-steps", "1"])
    told = capfd.readouterr()
    assert code == 0, told.err
    first = next(r for r in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
                 if r["kind"] == "train")
    assert np.isfinite(first["loss"]) and first["grad_norm"] > 0 and first["bad_positions"] == 0
    config, state = t.read_drafter(out / "export")
    before = t.Drafter(config)
    before.initialise(0)
    moved = {name for name, x in before.state_dict().items() if not torch.equal(x.bfloat16(), state[name])}
    assert moved >= {name for name, x in before.state_dict().items() if x.dim() > 1}
    return out / "export"

def by_hand(family, out):
    """A folder as a run would leave it, with random weights."""
    text = t.load_config(str(family.folder))[0]
    cfg = t.Config(block=4, layers=2, heads=4, kv_heads=2, head_dim=16)
    config = t.drafter_config(cfg, text, t.taps_of(cfg, text.num_hidden_layers), 259)
    drafter = t.Drafter(config)
    drafter.initialise(1)
    out.mkdir()
    t.export(out, config, drafter.state_dict())
    return out

def decoded(family, folder, prompt, end_ids):
    """Greedy decoding with the drafter in folder -> (tokens, accepted a round), in float32."""
    config, state = t.read_drafter(folder)
    drafter = t.Drafter(config)
    t.strict_load(drafter, state, folder)
    model = t.load_target(str(family.folder), torch.float32)
    draft = t.Draft(drafter, t.frozen_ends(model), config["dflash_config"]["mask_token_id"], 200)
    reader = t.Reader(model, config["dflash_config"]["target_layer_ids"])
    return t.decode(reader, prompt, 60, end_ids, draft)[:2]

def test_a_step_an_export_and_the_targets_own_output(family, tmp_path, capfd, dice):
    """Catches a family that the command line cannot train or decode: one step, export, and with its drafter
    token for token what generate() says, over windows, stops and rejections."""
    folder = tmp_path / "run"
    folder = by_hand(family, folder) if family.name in BY_HAND else trained(
        family, folder, capfd, int(dice.integers(99)))
    c = json.loads((folder / "config.json").read_text())
    assert c["rope_parameters"] == {"rope_type": "default", "rope_theta": c["rope_theta"]}  # plain
    assert c["rope_theta"] == THETAS.get(family.name, 1e4) and c["rope_scaling"] is None
    assert (c["hidden_size"], c["num_target_layers"], c["vocab_size"]) == (40, 4, 264)
    assert "partial_rotary_factor" not in c and c["dflash_config"] == {
        "target_layer_ids": [0, 2], "mask_token_id": 259, "block_size": 4}
    for length in (9, 40):
        prompt = dice.integers(0, 256, length).tolist()
        want = family.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, length).long(), max_new_tokens=60,
            do_sample=False, eos_token_id=258, pad_token_id=256)[0, length:].tolist()
        tokens, rounds = decoded(family, folder, prompt, {258})
        assert tokens == want and sum(rounds) == len(want) - 1
        at = want.index(want[len(want) // 2])  # and ends where this token stands first
        assert decoded(family, folder, prompt, {want[at]})[0] == want[: at + 1]

# ------------------------------------------------------------- decoding with states, which cannot be cropped

GATED = {k: x for k, x in LINEAR.items() if k != "rope_parameters"}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 10, "mamba_n_groups": 1, "mamba_d_state": 8,
         "mamba_chunk_size": 16}
STATES = {
    "qwen3.5": FAMILIES["qwen3.5 text"],
    "qwen3-next": lambda: tf.Qwen3NextConfig(
        **HEADS, **GATED, **EXPERTS, num_experts=4, moe_intermediate_size=24,
        shared_expert_intermediate_size=24),
    "lfm2: a convolution alone": lambda: tf.Lfm2Config(**TINY, layer_types=["conv", "full_attention"] * 2),
    "falcon-h1: both in one layer": lambda: tf.FalconH1Config(**HEADS, **MAMBA, mamba_d_ssm=80),
    "bamba: no positions of its own": lambda: tf.BambaConfig(**TINY, **MAMBA, attn_layer_indices=[1, 3])}

def uncached(model, ids, count):
    """Greedy output without any cache: everything is read anew for each token."""
    for _ in range(count):
        ids = [*ids, int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())]
    return ids[-count:]

def copying(dice, prompt, want, share):
    """A draft that knows what comes, `share` of its tokens aside, and how sure it is: wholly."""
    def draft(tokens, features, temperature, draw):
        at, known = len(tokens) - len(prompt), [*want, *[0] * 8]
        drafts = [x if dice.random() < share else int(dice.integers(256)) for x in known[at: at + 5]]
        drafts = torch.tensor(drafts)
        return drafts, F.one_hot(drafts, 264).float() if temperature else None
    return draft

@pytest.mark.parametrize("name", STATES)
def test_a_state_goes_back(name, dice):
    """Catches a rejected draft left in a state, a kept one lost from it or read twice, wherever in a block
    the rejection falls: tokens, logits and features are those of reading all at once without a cache."""
    model = tf.AutoModelForCausalLM.from_config(STATES[name]()).float().eval().requires_grad_(False)
    count, taps, gap = 60, [0, 2], 0
    while gap < 3e-4:  # no near tie, which rounding decides
        prompt = dice.integers(0, 256, int(dice.integers(1, 40))).tolist()
        want = uncached(model, prompt, count)
        whole, stream = alone(model, prompt + want)
        best = whole.logits[0, len(prompt) - 1: -1].topk(2).values
        gap = (best[:, 0] - best[:, 1]).min() / whole.logits.abs().max()
    stream = torch.cat([stream[k + 1] for k in taps], 1)
    t.check_states(model)
    reader, ids = t.Reader(model, taps), prompt + want
    reader.start()
    reader.read(ids, last=1)  # as the walk reads a row: what training captures
    for features in (reader.features, captured(model, taps, [ids])[0]):
        assert (features - stream).abs().max() < 1e-3 * stream.abs().max()
    for share in (0.0, 0.6, 0.8, 0.95, 1.0):
        for temperature in (0.0, 1e-6):  # so cold that sampling is greedy
            given, copy = [], copying(dice, prompt, want, share)
            draw = torch.Generator().manual_seed(int(dice.integers(99)))
            out, rounds, logits = t.decode(
                reader, prompt, count, (), lambda x, f, *rest: given.append(f) or copy(x, f, *rest),
                temperature, draw)
            assert out == want and sum(rounds) == count - 1, (share, temperature)
            error = (torch.stack(logits) - whole.logits[0, len(prompt) - 1: -1]).abs().max()
            assert error < 1e-2 * whole.logits.abs().max(), f"logits off by {error:.1e}"
            given = torch.cat(given)  # each kept token's, once
            assert (given - stream[: len(given)]).abs().max() < 1e-2 * stream.abs().max()
            assert max(rounds) == 6 or share < 0.95

def test_a_state_that_blocks_do_not_read_is_refused():
    """Catches wrong numbers from a family whose code starts a block from nothing."""
    jamba = tf.JambaConfig(**TINY, attn_layer_offset=1, attn_layer_period=2, num_experts=2, mamba_d_state=8,
                           mamba_dt_rank=4)
    with pytest.raises(t.UserError, match="from a state"):
        t.check_states(tf.AutoModelForCausalLM.from_config(jamba).eval())

def test_evaluate_with_states(tmp_path, capfd):
    """Catches a hybrid target that the command line cannot decode with, and a tree that it is asked for."""
    model = tf.AutoModelForCausalLM.from_config(FAMILIES["qwen3.5 text"]())
    model.save_pretrained(tmp_path / "target")
    t.byte_tokenizer().save_pretrained(tmp_path / "target")
    folder = by_hand(Bare(folder=tmp_path / "target"), tmp_path / "export")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "3Eb"}\n{"prompt": "4Fc 5Gd"}\n')
    command = ["--evaluate", str(folder), "--target", str(tmp_path / "target"), "--prompts", str(prompts),
               "--new-tokens", "24", "--device", "cpu"]
    assert t.main(command) == 0
    said = capfd.readouterr().out
    assert "lossless: 0 of" in said and "along the decoded replies" in said, said
    assert t.main([*command, "--tree", "8"]) == 2
    told = capfd.readouterr()
    refusal = [line for line in told.err.splitlines() if "--tree" in line]
    assert len(refusal) == 1 and "linear_attention" in refusal[0], told.err

# ----------------------------------------------------------------- families with something of their own

OTHERS = {
    "granite: logits_scaling, embedding_multiplier": lambda: tf.GraniteConfig(
        **TINY, logits_scaling=8.0, embedding_multiplier=12.0),
    "cohere: logit_scale": lambda: tf.CohereConfig(**TINY, logit_scale=0.25),
    "gemma 4: an input per layer, shared keys": lambda: tf.Gemma4TextConfig(
        **{**HEADS, **SLIDING, "num_hidden_layers": 8, "layer_types": SLIDING["layer_types"] * 2},
        global_head_dim=32, num_kv_shared_layers=2, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=264),
    "phi: a head with a bias": lambda: tf.PhiConfig(**TINY, partial_rotary_factor=0.8)}

@pytest.mark.parametrize("name", OTHERS)
def test_done_right_or_refused(name, tmp_path, dice):
    """Catches a family whose head, embedding or first layers are not what training takes them for, trained
    on without a word: either all is the target's own, or it is refused as a person's mistake is."""
    model = tf.AutoModelForCausalLM.from_config(OTHERS[name]()).float().eval().requires_grad_(False)
    for p in model.parameters():
        if p.dim() == 1:
            torch.nn.init.normal_(p, float(p.mean()), 0.1)
    model.save_pretrained(tmp_path)
    ids = dice.integers(0, 256, 50).tolist()
    out, stream = alone(model, ids)
    try:
        taps = [0, len(own_layers(model)) // 2]
        part = t.load_target(str(tmp_path), torch.float32, taps[1] + 1)
        features, = captured(part, taps, [ids])
        ends = t.frozen_ends(t.load_target(str(tmp_path), torch.float32, 0))
    except t.UserError as refusal:
        assert str(tmp_path) in str(refusal)
        return
    expected = torch.cat([stream[1], stream[taps[1] + 1]], 1)
    assert (features - expected).abs().max() < 1e-4 * expected.abs().max(), "not the target's features"
    embedded, logits = ends["embed"][ids] * ends["embed_scale"], out.hidden_states[-1][0] @ ends["head"].T
    assert (embedded - stream[0]).abs().max() < 1e-5 * stream[0].abs().max(), "not the target's embedding"
    assert (logits - out.logits[0]).abs().max() < 1e-4 * out.logits.abs().max(), "not the target's logits"
