"""The exported folder alone: an independent reader computes from it what the trainer computes.

The reader is written from the format's description, as a serving engine would read it: config.json and
model.safetensors, one block at a time, nothing of the trainer's. Alone:

    OMP_NUM_THREADS=1 python -m pytest tests/test_export.py        DFLASH_TEST_SEED=... repeats a failure
"""
import json
import math
import os
from collections import Counter

import numpy as np
import pytest
import torch
import transformers as tf
from conftest import make_target
from safetensors.torch import load_file, save_file

import train_dflash as t

MASK, THETA = 259, 3e4
W = 5  # a sliding layer's window is its block and so many more
KINDS = {"full": {}, "sliding causal": {"full_layers": 0},
         "sliding bidirectional": {"full_layers": 0, "sliding_bidirectional": True}, "mixed": {},
         "mixed bidirectional": {"sliding_bidirectional": True}}
HEADS = {8: (4, 2), 10: (3, 1), 16: (2, 2)}  # query and key/value heads, by block


pytestmark = pytest.mark.usefixtures("dice")

# --------------------------------------------------------------------------------------------- the reader

class Served:
    """A drafter's folder as a serving engine reads it. rope: the spelling this engine looks for first."""

    def __init__(self, folder, rope="rope_parameters"):
        c = json.loads((folder / "config.json").read_text())
        c = {k: v for k, v in c.items() if v is not None}
        inner, n = c.get("dflash_config", {}), c["num_hidden_layers"]
        self.block, self.mask, self.taps = (inner[k] if k in inner else c[k] for k in (
            "block_size", "mask_token_id", "target_layer_ids"))
        self.H, self.G, self.h = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        nested = c.get("rope_parameters", {})
        thetas = {"rope_theta": c.get("rope_theta"), "rope_parameters": nested.get("rope_theta")}
        self.theta = thetas[rope] or thetas["rope_theta"] or thetas["rope_parameters"]
        self.eps = c["rms_norm_eps"]
        assert nested.get("rope_type", "default") == "default" and "rope_scaling" not in c
        assert c.get("hidden_act") == "silu" and not c.get("attention_bias")
        kinds, window = c.get("layer_types", ["full_attention"] * n), c.get("sliding_window")
        if inner.get("use_swa"):
            kinds, window, inner = ["sliding_attention"] * n, inner["swa_window_size"], {"causal": False}
        self.rules = [(window if kind == "sliding_attention" else math.inf, c.get("is_causal", inner.get(
            "causal", kind == "sliding_attention"))) for kind in kinds]
        dtype = getattr(torch, c.get("dtype") or c["torch_dtype"])
        self.w = {name: x.to(dtype).float() for name, x in load_file(folder / "model.safetensors").items()}

    def norm(self, x, name):
        return self.w[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def linear(self, x, name):
        return x @ self.w[f"{name}.weight"].T

    def turn(self, x, first):
        """Rotary embedding of x [T, heads, h] that stands at first, first + 1, ..."""
        half = self.h // 2
        angle = torch.tensor([[p * self.theta ** (-i / half) for i in range(half)]
                              for p in range(first, first + len(x))], dtype=torch.float64)[:, None]
        a, b, cos, sin = x[..., :half], x[..., half:], angle.cos().float(), angle.sin().float()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def rows(self, features, anchor):
        """features [a, K*D] of the tokens before the anchor, its embedding and the mask's -> rows [B, D]."""
        B, a = self.block, len(features)
        x, fused = torch.stack([anchor[0], *[anchor[1]] * (B - 1)]), self.norm(
            self.linear(features, "fc"), "hidden_norm")
        for i, (window, causal) in enumerate(self.rules):
            at = f"layers.{i}.self_attn."
            y = self.norm(x, f"layers.{i}.input_layernorm")

            def heads(z, name, count, at=at):
                return self.linear(z, at + name).view(len(z), count, self.h)

            q = self.turn(self.norm(heads(y, "q_proj", self.H), at + "q_norm"), a)
            both = torch.cat([fused, y])
            k = self.turn(self.norm(heads(both, "k_proj", self.G), at + "k_norm"), 0)
            v = heads(both, "v_proj", self.G)
            out = torch.zeros(B, self.H * self.h)
            for row in range(B):
                seen = [j for j in range(a + (row + 1 if causal else B)) if a + row - j < window]
                for head in range(self.H):
                    g = head * self.G // self.H
                    p = (k[seen, g] @ q[row, head] / math.sqrt(self.h)).softmax(0)
                    out[row, head * self.h: (head + 1) * self.h] = p @ v[seen, g]
            x = x + self.linear(out, at + "o_proj")
            y, at = self.norm(x, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp."
            gate = self.linear(y, at + "gate_proj")
            x = x + self.linear(gate * gate.sigmoid() * self.linear(y, at + "up_proj"), at + "down_proj")
        return self.norm(x, "norm")

    def logits(self, model, tokens, hidden):
        """Drafts after tokens (a list, the anchor last) -> [B-1, V]. hidden: the target's hidden_states over
        a text that begins with them. Embedding, head and what is around them are the target's own code."""
        a, ends = len(tokens) - 1, model.get_input_embeddings()(torch.tensor([tokens[-1], self.mask]))
        rows = self.rows(torch.cat([hidden[i + 1][0, :a] for i in self.taps], 1), ends)
        logits, cap = model.lm_head(rows[1:]), getattr(model.config, "final_logit_softcapping", None)
        return cap * torch.tanh(logits / cap) if cap else logits

# ------------------------------------------------------------------------------------------------ targets

@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """{name: (folder, the whole model)}: a plain one, and one with embedding scale, soft cap and window."""
    home = tmp_path_factory.mktemp("targets")
    make_target(home / "qwen3", head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": THETA})
    torch.manual_seed(1)
    tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2, initializer_range=0.2,
        final_logit_softcapping=3.0)).save_pretrained(home / "gemma3")
    t.byte_tokenizer().save_pretrained(home / "gemma3")
    return {name: (home / name, tf.AutoModelForCausalLM.from_pretrained(
        home / name, dtype=torch.float32).eval().requires_grad_(False)) for name in ("qwen3", "gemma3")}

def make_folder(folder, target, kind, B, taps="2,0", layers=3):
    """What training a drafter of this kind would export, weights so large that every part of it matters ->
    (config, drafter with the weights rounded to bf16)."""
    H, G = HEADS[B]
    cfg = t.Config(block=B, layers=layers, heads=H, kv_heads=G, head_dim=16, ffn=40, target_layer_ids=taps,
                   sliding_window=0 if kind == "full" else B + W, **KINDS[kind])
    text = t.load_config(str(target))[0]
    config = t.drafter_config(cfg, text, t.taps_of(cfg, text.num_hidden_layers), MASK)
    drafter = t.Drafter(config)
    for p in drafter.parameters():
        torch.nn.init.normal_(p, 1 if p.dim() == 1 else 0, 0.3)
    folder.mkdir(exist_ok=True)
    t.export(folder, config, drafter.state_dict())
    for p in drafter.parameters():
        p.data = p.data.bfloat16().float()
    return config, drafter

def load(folder):
    """The folder as --evaluate reads it."""
    config, state = t.read_drafter(folder)
    drafter = t.Drafter(config)
    t.strict_load(drafter, state, folder)
    return config, drafter

def hidden_states(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), output_hidden_states=True).hidden_states

def near(got, want):
    error, size = float((got - want).abs().max()), max(1.0, float(want.abs().max()))
    assert error < 1e-5 * size, f"off by {error:.1e}, at most {size:.1f} large"

# --------------------------------------------------------------------------------------------- the parity

@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("B", [8, 10, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_alone_computes_what_training_did(kind, B, family, targets, tmp_path, dice):
    """Catches a drafter that serves otherwise than it was trained: any field or tensor of the folder that
    does not say what the training step does, at every anchor of a micro-batch of three documents."""
    where, model = targets[family]
    config, drafter = make_folder(tmp_path, where, kind, B)
    served = Served(tmp_path)
    slides = (B + W, "bidirectional" not in kind)  # what the flags asked for: window, causal in its block
    assert served.rules == {"full": [(math.inf, False)] * 3, "slid": [slides] * 3,
                            "mixe": [slides] * 2 + [(math.inf, False)]}[kind[:4]]
    assert (served.taps, served.block, served.mask) == ([2, 0], B, MASK)
    lengths, S, taps = np.array([30, 1, 14]), 48, config["dflash_config"]["target_layer_ids"]
    begin = np.concatenate([np.repeat(np.cumsum(lengths) - lengths, lengths), np.arange(45, S)])
    end = np.concatenate([np.repeat(np.cumsum(lengths), lengths), np.arange(45, S) + 1])
    ids = dice.integers(0, 256, S)
    blocks = t.blocks_of(ids, np.arange(S) < 45, begin, end, 44, B, dice)
    tensors = {k: torch.from_numpy(blocks[k]) for k in ("start", "anchor", "tokens", "valid")}

    part = t.load_target(str(where), torch.float32, max(taps) + 1)
    features = torch.zeros(S, 32 * len(taps))
    t.capture(part.base_model, t.decoder_layers(part.base_model), taps,
              {"lengths": lengths, "ids": ids, "tokens_used": 45}, features)
    ends = {**t.frozen_ends(part), "rope": t.rotary(torch.arange(S + B), drafter.theta, drafter.h)}
    rows, _, counters = t.drafter_step(
        drafter, ends, features, torch.from_numpy(np.arange(S) - begin), **tensors,
        mask_id=config["dflash_config"]["mask_token_id"], loss="dflash", gamma=4.0)
    logits = (rows @ ends["head"].T).detach()
    logits = ends["softcap"] * torch.tanh(logits / ends["softcap"]) if ends["softcap"] else logits

    documents = {int(b): ids[b:e].tolist() for b, e in zip(begin[:45], end[:45])}
    hidden = {b: hidden_states(model, document) for b, document in documents.items()}
    assert blocks["blocks"] == 42  # every place but the last of each document
    loss = 0.0
    for n in range(42):
        b, a = int(blocks["start"][n]), int(blocks["anchor"][n])
        assert blocks["tokens"][n, 0] == documents[b][a - b]
        want = served.logits(model, documents[b][: a - b + 1], hidden[b])
        near(logits[n], want)
        for k, label in enumerate(documents[b][a - b + 1: a - b + B]):  # what decoding would have to draft
            loss -= float(want[k].log_softmax(0)[label]) * math.exp(-k / 4)
    assert float(counters[0]) == pytest.approx(loss, rel=1e-5)

@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("B", [8, 10, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_drafts_what_the_folder_says(kind, B, family, targets, tmp_path, dice):
    """Catches the same in the decoding path: the folder read back, its cache filled by several calls."""
    where, model = targets[family]
    make_folder(tmp_path, where, kind, B)
    config, drafter = load(tmp_path)
    taps, mask = (config["dflash_config"][k] for k in ("target_layer_ids", "mask_token_id"))
    draft = t.Draft(drafter, t.frozen_ends(model), mask, 48)
    ids, reader = dice.integers(0, 256, 40).tolist(), t.Reader(model, taps)
    served, hidden, read = Served(tmp_path), hidden_states(model, ids), 0
    reader.start()
    for new in (int(dice.integers(1, 12)), 1, int(dice.integers(2, B)), int(dice.integers(5, 12))):
        reader.read(ids[read: read + new])
        read += new
        tokens, p = draft(ids[: read + 1], reader.features, 1.0, None)
        near(p.log(), served.logits(model, ids[: read + 1], hidden).log_softmax(-1))
        assert tokens.shape == (B - 1,)

def test_what_stands_in_the_folder(targets, tmp_path):
    """Catches a field that one engine reads and another does not, said in one of its two places only."""
    for family, (where, model) in targets.items():
        for kind in KINDS:
            make_folder(tmp_path, where, kind, 10, taps="", layers=2)
            c = json.loads((tmp_path / "config.json").read_text())
            tensors = load_file(tmp_path / "model.safetensors")
            assert c["architectures"] == ["DFlashDraftModel"] and c["model_type"] == "qwen3"
            assert c["block_size"] == c["dflash_config"]["block_size"] == 10
            assert c["dflash_config"]["mask_token_id"] == MASK and c["num_target_layers"] == 4
            assert c["rope_theta"] == c["rope_parameters"]["rope_theta"] and c["rope_scaling"] is None
            assert Served(tmp_path).theta == Served(tmp_path, "rope_theta").theta == (
                THETA if family == "qwen3" else 1e6)  # Gemma's full layers, not its sliding ones
            assert c["dtype"] == c["torch_dtype"] == "bfloat16" and not c["tie_word_embeddings"]
            assert c["vocab_size"] == len(model.get_input_embeddings().weight)
            assert len(c["layer_types"]) == c["num_hidden_layers"] == 2
            assert {x.dtype for x in tensors.values()} == {torch.bfloat16} and len(tensors) == 2 * 11 + 3
            assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]

# ------------------------------------------------------------------------------------- folders of others

def published(own, style):
    """The config of a folder as others write it, their extra keys left in."""
    top = {"block_size": own["block_size"]}
    inner = {k: own["dflash_config"][k] for k in ("target_layer_ids", "mask_token_id")}
    c = {k: own[k] for k in (
        "architectures model_type hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim hidden_act rms_norm_eps num_target_layers attention_bias vocab_size"
    ).split()}
    c |= {"tie_word_embeddings": False, "attention_dropout": 0.0, "max_position_embeddings": 40960,
          "transformers_version": "4.57.1", "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    flat, nested = {"rope_theta": THETA, "rope_scaling": None}, {
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"}}
    full = {"layer_types": ["full_attention"] * 3, "sliding_window": None, "use_sliding_window": False}
    mixed = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 12}
    return c | {
        "2025, full": {**flat, **full, **top, "dflash_config": inner, "dtype": "bfloat16",
                       "max_window_layers": 3},
        "2025, sliding": {**flat, **mixed, **top, "dflash_config": inner, "dtype": "bfloat16"},
        "2026, inside": {**nested, **mixed, "dflash_config": {**inner, **top}, "dtype": "bfloat16"},
        "2026, is_causal false": {**nested, **mixed, "is_causal": False, "dflash_config": {**inner, **top},
                                  "dtype": "bfloat16"},
        "all at the top": {**flat, **mixed, **top, **inner, "torch_dtype": "bfloat16"},
        "no layer_types": {**flat, **top, "dflash_config": inner, "torch_dtype": "bfloat16"},
        "causal inside": {**flat, **full, **top, "dflash_config": {**inner, "causal": True},
                          "dtype": "bfloat16"},
        "is_causal first": {**flat, **full, **top, "is_causal": False, "dtype": "bfloat16",
                            "dflash_config": {**inner, "causal": True}},
        "use_swa": {**flat, **full, **top, "torch_dtype": "bfloat16", "dflash_config": {
            **inner, "use_swa": True, "swa_window_size": 12, "causal": False}},
    }[style]

STYLES = ["2025, full", "2025, sliding", "2026, inside", "2026, is_causal false", "all at the top",
          "no layer_types", "causal inside", "is_causal first", "use_swa"]

def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))

@pytest.mark.parametrize("style", STYLES)
def test_published_styles_read_as_engines_read_them(style, targets, tmp_path, dice):
    """Catches a published drafter that is evaluated otherwise than it is served: a field overlooked."""
    where, model = targets["qwen3"]
    own, _ = make_folder(tmp_path, where, "full", 8)
    write(tmp_path, published(own, style))
    config, drafter = load(tmp_path)
    ids, served = dice.integers(0, 256, 31).tolist(), Served(tmp_path, str(dice.choice([
        "rope_theta", "rope_parameters"])))
    hidden = hidden_states(model, ids)
    draft = t.Draft(drafter, t.frozen_ends(model), config["dflash_config"]["mask_token_id"], 40)
    features = torch.cat([hidden[i + 1][0] for i in config["dflash_config"]["target_layer_ids"]], 1)
    near(draft(ids, features[:30], 1.0, None)[1].log(), served.logits(model, ids, hidden).log_softmax(-1))

CONTRADICTIONS = {
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e4},
    "block_size": {"block_size": 16}, "mask_token_id": {"mask_token_id": 3},
    "target_layer_ids": {"target_layer_ids": [0, 2]}, "layer_types": {"layer_types": ["full_attention"] * 2},
    "sliding_window": {"layer_types": ["sliding_attention"] * 3, "sliding_window": None},
    "num_key_value_heads": {"num_key_value_heads": 3}}
UNKNOWN = {  # what the drafter would compute without: another function than the one that was trained
    "rope_scaling": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "rope_type": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": THETA}},
    "hidden_act": {"hidden_act": "gelu"}, "layer_types": {"layer_types": ["chunked_attention"] * 3}}

@pytest.mark.parametrize("key, change", [*CONTRADICTIONS.items(), *UNKNOWN.items()])
def test_a_config_that_cannot_be_followed_is_refused(key, change, targets, tmp_path):
    """Catches a guess: two values for one thing, or something that the drafter does not do, not said."""
    own, _ = make_folder(tmp_path, targets["qwen3"][0], "full", 8)
    load(tmp_path)  # as it is, it is good
    write(tmp_path, own | change)
    with pytest.raises(t.UserError, match=key) as error:
        load(tmp_path)
    assert str(tmp_path) in str(error.value)

@pytest.mark.parametrize("key", "hidden_size intermediate_size num_hidden_layers num_attention_heads "
                         "num_key_value_heads head_dim rms_norm_eps".split())
def test_a_config_without_a_size_is_refused(key, targets, tmp_path):
    """Catches a traceback where the folder is at fault, or a size that is made up."""
    own, _ = make_folder(tmp_path, targets["qwen3"][0], "full", 8)
    write(tmp_path, {k: v for k, v in own.items() if k != key})
    with pytest.raises(t.UserError, match=key):
        load(tmp_path)

@pytest.mark.parametrize("key, value", [
    ("block_size", "8"), ("block_size", 1), ("mask_token_id", -4), ("rms_norm_eps", "y"), ("rope_theta", [1]),
    ("sliding_window", 2.5), ("rope_parameters", 5), ("layer_types", 3), ("dflash_config", [])])
def test_a_value_of_no_kind_is_refused(key, value, targets, tmp_path):
    """Catches a traceback, or one after minutes of loading, where the folder is at fault."""
    own, _ = make_folder(tmp_path, targets["qwen3"][0], "full", 8)
    inner = own["dflash_config"]
    write(tmp_path, {**own, "dflash_config": inner | ({key: value} if key in inner else {}), key: value})
    with pytest.raises(t.UserError, match=f"{tmp_path}/config.json: .*"):
        load(tmp_path)

def test_tensors_that_do_not_fit_are_named(targets, tmp_path, dice):
    """Catches a tensor left at its first values, dropped or cut to size without a word; a second generation's
    drafter (its convolutions and selector are extra tensors) and one with biases or the head inside."""
    make_folder(tmp_path, targets["qwen3"][0], "mixed", 8)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = ["layers.0.attention_conv.base_kernel", "candidate_selector.hidden_projection.weight",
             "lm_head.weight", "embed_tokens.weight", "layers.1.self_attn.q_proj.bias"]
    for name in tensors:
        other = dict(tensors)
        lost, bent = name, str(dice.choice([k for k in tensors if k != name]))
        more = str(dice.choice(extra))
        del other[lost]
        other[bent] = other[bent][:-1].contiguous()
        other[more] = torch.zeros(3)
        save_file(other, tmp_path / "model.safetensors")
        with pytest.raises(t.UserError) as error:
            load(tmp_path)
        said = str(error.value)
        assert str(tmp_path) in said and f"{lost} missing" in said and f"{more} (3,)" in said
        assert f"{bent} {tuple(other[bent].shape)} (expected {tuple(tensors[bent].shape)})" in said

# ---------------------------------------------------------------------------------------------- --evaluate

def test_evaluate_counts_what_the_folder_would_have_drafted(tmp_path, dice):
    """Catches an --evaluate that decodes with something else than the folder's drafter: its block, window,
    causality and tensors. The reader's drafts along the target's own reply give every accepted length."""
    where = make_target(tmp_path / "target", head_dim=16, seed=int(dice.integers(1000)))
    model = tf.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval().requires_grad_(False)
    rows = model.lm_head.weight  # only four tokens are ever chosen, so that an untaught drafter hits some
    rows *= torch.zeros(264, 1).index_fill(0, torch.tensor([65, 66, 67, 68]), 1)
    rows[66], rows[68] = -rows[65], -rows[67]  # one of each pair is above 0
    model.save_pretrained(where)
    own, _ = make_folder(tmp_path / "drafter", where, "mixed", 10)
    write(tmp_path / "drafter", published(own, "2026, inside") | {"block_size": 10})
    prompts, tokenizer = tmp_path / "prompts.jsonl", t.byte_tokenizer()
    texts = ["".join(map(chr, dice.integers(97, 122, dice.integers(1, 30)))) for _ in range(4)]
    prompts.write_text("".join(json.dumps({"prompt": x}) + "\n" for x in texts))

    served, counts, count = Served(tmp_path / "drafter"), Counter(), 50
    for text in texts:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)
        reply = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0,
                               eos_token_id=None)[0, len(prompt):].tolist()
        hidden, done = hidden_states(model, prompt + reply), 1
        while done < count:
            said = served.logits(model, prompt + reply[:done], hidden).argmax(-1).tolist()
            kept = [*(a == b for a, b in zip(said, reply[done:])), False].index(False)
            counts[min(kept + 1, count - done)] += 1
            done += kept + 1
    assert len(counts) > 1, "only one accepted length: this shows nothing"

    cfg, given = t.parse(["--evaluate", str(tmp_path / "drafter"), "--target", str(where), "--prompts",
                          str(prompts), "--new-tokens", str(count), "--block", "16", "--device", "cpu"])
    stop = torch.multiprocessing.get_context("spawn").RawValue("i", 0)
    code, reason, values = t.evaluate(cfg, given, stop)
    assert code == 0, reason
    assert values["histogram"] == [counts[n] for n in range(1, 11)]
    assert values["drafter"]["differ"] == 0 and values["verdict"].startswith("lossless: 0 of 400 tokens")
