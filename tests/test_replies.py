"""Replies by the target, the warm start and the curves, all by the command line's own main and on real files.

The reference for replies is transformers' generate() of each prompt alone. Alone:

    OMP_NUM_THREADS=1 python -m pytest tests/test_replies.py       DFLASH_TEST_SEED=... repeats a failure
"""
import fcntl
import json
import math
import random
import resource
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import transformers as tf
from conftest import ROOT, SMALL, finish, make_target, masters, metrics, until
from safetensors.torch import load_file, save_file

import train_dflash as t

REACH = 200  # the target's positions
# Refuses a system turn, and shows of an earlier reply its first two letters alone, with a mark.
STRICT = ("{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turn here') }}"
          "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] if m['role'] == 'user' or loop.last else "
          "m['content'][:2] + '\u00b7' }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


pytestmark = pytest.mark.usefixtures("dice")

class Speaker:
    """A random target that speaks in printable ASCII, so that text and tokens are one, and ends now and
    then: the end token's row of its head is `ends` times as long."""

    def __init__(self, folder, ends, template=None):
        self.folder = make_target(folder, head_dim=16, max_position_embeddings=REACH)
        self.model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = t.byte_tokenizer()
        self.tokenizer.chat_template = template or self.tokenizer.chat_template
        self.end, head = self.tokenizer.eos_token_id, self.model.lm_head.weight.data
        spoken = torch.zeros(len(head), dtype=torch.bool)
        spoken[32:127] = spoken[self.end] = True
        head[~spoken] = 0
        head[self.end] *= ends
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def prompt(self, turns):
        return self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)

    @torch.inference_mode()
    def alone(self, prompt, new_tokens):
        """transformers' own greedy reply to this prompt, in a batch of its own."""
        return self.model.generate(
            torch.tensor([prompt]), max_new_tokens=min(new_tokens, REACH - len(prompt)), do_sample=False,
            eos_token_id=self.end, pad_token_id=self.tokenizer.pad_token_id)[0, len(prompt):].tolist()

    @torch.inference_mode()
    def short_of(self, prompt, reply):
        """How far each token's logit is from the best, in one forward over all of it [n]."""
        logits = self.model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1: -1]
        return logits.max(-1).values - logits[torch.arange(len(reply)), reply]

def words(dice, low, high):
    return "".join(map(chr, dice.integers(97, 123, int(dice.integers(low, high + 1)))))

def chat(dice, turns, low=1, high=12):
    """So many questions with stored answers, the last without one."""
    return [{"role": ("user", "assistant")[i % 2], "content": words(dice, low, high)}
            for i in range(2 * turns - 1)]

def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path

def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

def command(speaker, prompts, replies, *flags):
    return ["--regenerate", str(prompts), "--target", str(speaker.folder), "--replies", str(replies),
            "--device", "cpu", *map(str, flags)]

def start(args):
    return subprocess.Popen([sys.executable, str(ROOT / "train_dflash.py"), *args], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)

def runs_of(mask):
    edge = np.diff([0, *map(int, mask), 0])
    return list(zip(np.flatnonzero(edge == 1).tolist(), np.flatnonzero(edge == -1).tolist()))

def check_line(line, speaker, new_tokens, exact=True):
    """One written line against the target: what each reply was asked, what it is, what its text says. -> its
    replies."""
    ids, mask, turns = line["input_ids"], line["loss_mask"], line["messages"]
    assert len(ids) == len(mask) and turns[-1]["role"] == "assistant"
    spans = runs_of(mask)
    own = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"][-len(spans):]
    for n, ((begin, end), i) in enumerate(zip(spans, own, strict=True)):
        prompt, reply = ids[:begin], ids[begin:end]
        assert prompt == speaker.prompt(turns[:i]), "asked otherwise than the template asks"
        if exact:
            want = speaker.alone(prompt, new_tokens)
            if reply != want:  # two tokens as good as each other: one in a million
                assert speaker.short_of(prompt, reply).max() < 1e-5, (reply, want)
        else:
            assert speaker.short_of(prompt, reply).max() < 1e-5, reply
        ended = reply[-1] == speaker.end
        assert speaker.end not in reply[:-1] and (ended or n == len(spans) - 1)
        assert ended or len(reply) == min(new_tokens, REACH - len(prompt)), "cut short"
        assert turns[i]["content"] == bytes(reply[:-1] if ended else reply).decode()
    assert ids[: spans[-1][1]] == ids and line["finished"] == (ids[-1] == speaker.end)
    return len(spans)

def trains(path, speaker):
    """What the trainer makes of a file of replies, by row: just its tokens, just its mask."""
    cfg = t.Config(data=(str(path),), tokens=2048, max_length=512, eval_fraction=0.0, workers=1)
    rows = t.prepare(cfg, speaker.tokenizer, 264).rows.with_format("numpy")
    lines = lines_of(path)
    assert len(rows) == len(lines)
    for row, line in zip(rows, lines):
        taught = any(a and b for a, b in zip(line["loss_mask"], line["loss_mask"][1:]))
        assert row["input_ids"].tolist() == (line["input_ids"] if taught else [])
        assert row["loss_mask"].tolist() == (line["loss_mask"] if taught else [])

def test_cache_length():
    """Catches a cache too short for its replies, one that wastes a tenth, a new length for every batch."""
    lengths = {}
    for _ in range(2000):
        prompt, new = random.randint(1, 3000), random.randint(1, 1024)
        found = t.cache_length([[0] * prompt, [0]], new)
        assert prompt + new <= found < 1.0625 * (prompt + new) + 16
        lengths.setdefault(int(math.log2(found - 1)), set()).add(found)
    assert max(map(len, lengths.values())) <= 16

def test_each_turn(tmp_path, dice, capfd):
    """Catches a chat that is answered with its stored replies in its history, whose own replies are lost to
    training, or that goes on after a reply without an end."""
    speaker = Speaker(tmp_path / "target", 1.6)
    rows = [{"messages": chat(dice, 3) + [{"role": "assistant", "content": "stored"}] * (i % 2)}
            for i in range(12)] + [{"prompt": words(dice, 1, 9)}]
    prompts, replies = write(tmp_path / "chats.jsonl", rows), tmp_path / "replies.jsonl"
    assert t.main(command(speaker, prompts, replies, "--each-turn", "--new-tokens", 20)) == 0
    found = {line["row"]: line for line in lines_of(replies)}
    assert sorted(found) == list(range(len(rows))) and len(lines_of(replies)) == len(rows)
    for number, line in found.items():
        n = check_line(line, speaker, 20)
        turns = rows[number].get("messages") or [{"content": rows[number]["prompt"]}]
        asked = [turn["content"] for turn in turns[::2]]
        assert [x["content"] for x in line["messages"] if x["role"] == "user"] == asked[:n]
        assert n == len(asked) or not line["finished"]
    assert any(len(runs_of(line["loss_mask"])) == 3 for line in found.values()), "none came to turn 3"
    trains(replies, speaker)
    assert f"{len(rows)} chats answered" in capfd.readouterr().out

def test_rows_of_all_kinds(tmp_path, dice, capfd):
    """Catches a reply that depends on which prompts share its batch, a history rewritten by the template that
    is taught as if it had not been, and a bad row that ends the run or is not told by its reason."""
    speaker = Speaker(tmp_path / "target", 1.6, STRICT)
    system = {"role": "system", "content": "be brief"}
    rows = [{"messages": chat(dice, 3)} for _ in range(6)]
    rows += [{"prompt": words(dice, 1, 30)} for _ in range(6)]
    rows += [{"prompt": words(dice, 120, 120)}]  # it leaves little room for a reply, to itself alone
    good = len(rows)
    rows += [{"messages": [*chat(dice, 1), {"role": "assistant", "content": "x"}, {
        "role": "user", "content": words(dice, REACH, REACH)}]}]  # its second question has no room at all
    rows += [{"prompt": words(dice, REACH, REACH)}, {"messages": [system, *chat(dice, 1)]}, "no JSON", "[1]",
             {"messages": []}, {"prompt": None}, {"messages": [{"role": "assistant", "content": "a"}]}, "",
             '{"prompt": "\\ud800"}']
    prompts, replies = write(tmp_path / "chats.jsonl", rows), tmp_path / "replies.jsonl"
    args = command(speaker, prompts, replies, "--each-turn", "--new-tokens", 70)
    capfd.readouterr()
    assert t.main(args) == 0, capfd.readouterr().err
    out, by_row = capfd.readouterr().out, {}
    for line in lines_of(replies):
        if line["input_ids"]:  # an empty line is the record of a chat that could not be answered
            by_row.setdefault(line["row"], []).append(line)
        else:
            assert line["row"] > good and line["messages"] == [] == line["loss_mask"]
    assert sorted(by_row) == list(range(good + 1)), "rows lost, or answered that cannot be"
    for number, found in by_row.items():
        turns = rows[number].get("messages") or [{"role": "user", "content": rows[number]["prompt"]}]
        asked = [x["content"] for x in turns if x["role"] == "user"]
        for n, line in enumerate(found, 1):  # of a rewritten history each reply is a line of its own
            assert check_line(line, speaker, 70) == 1
            assert [x["content"] for x in line["messages"] if x["role"] == "user"] == asked[:n]
            assert line["finished"] or n == len(found)
        assert len(found) == (len(asked) if number < good else 1) or not found[-1]["finished"]
    assert any(len(found) == 3 for found in by_row.values()), "no chat came to its third turn"
    trains(replies, speaker)
    for said in ("1 rows skipped: not JSON", "1 rows skipped: no user's turn", "2 rows skipped: no messages",
                 "1 rows skipped: 'utf-8' codec can't encode character '\\ud800'",
                 "--max-length", "no system turn here"):
        assert said in out, said
    assert "end before their last turn" in out
    before = replies.read_bytes()
    assert t.main(args) == 0 and replies.read_bytes() == before

    # a full disk: one line, and the next start goes on
    replies.unlink()
    full = len(before) // 2, len(before) // 2
    process = subprocess.run(
        [sys.executable, str(ROOT / "train_dflash.py"), *args], capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, full))
    assert process.returncode == 2 and len(process.stderr.splitlines()) == 1, process.stderr
    assert f"--replies {replies}: cannot be written" in process.stderr
    assert t.main(args) == 0 and sorted(lines_of(replies), key=str) == sorted(
        map(json.loads, before.splitlines()), key=str)

    # a power cut: it ends within a chat of several lines, which are made again
    lines = before.splitlines(keepends=True)
    ends = [i for i, line in enumerate(lines) if json.loads(line).get("more")]
    row = json.loads(lines[dice.choice(ends)])["row"]
    last = [line for line in lines if json.loads(line)["row"] == row]
    others = b"".join(line for line in lines if line not in last)
    for cut in (len(last[0]), len(last[0]) + int(dice.integers(1, len(last[1])))):
        replies.write_bytes(others + b"".join(last)[:cut])
        assert t.main(args) == 0 and sorted(replies.read_bytes().splitlines(keepends=True)) == sorted(lines)

def test_killed_stopped_and_shared(tmp_path, dice, capfd):
    """Catches a row lost or written twice, whatever ends a run: -9 in the middle of a line, then SIGTERM to
    two processes; a second run on a file that is being written."""
    speaker, count = Speaker(tmp_path / "target", 1.0), 700  # a batch is 128: two are left to each process
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": words(dice, 1, 40)} for _ in range(count)])
    replies = tmp_path / "replies.jsonl"
    args = command(speaker, prompts, replies, "--new-tokens", 60)
    process = start(args)
    until(lambda: (replies.exists() and b"\n" in replies.read_bytes()) or process.poll() is not None)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL, "over before the kill: ask for more"
    free = open(replies, "rb+")  # noqa: SIM115
    until(lambda: not_locked(free))  # its worker, which dies with it, may write until then
    whole = replies.read_bytes()
    kept, torn = whole[: whole.rfind(b"\n", 0, -1) + 1], whole.splitlines()[-1]
    free.truncate(len(kept) + int(dice.integers(1, len(torn))))  # as a kill within a write leaves it
    free.close()

    process = start([*args, "--drafter-gpus", "0,1"])
    until(lambda: replies.stat().st_size > len(whole) or process.poll() is not None)
    capfd.readouterr()
    assert t.main(args) == 2
    error = capfd.readouterr().err
    assert str(replies) in error and len(error.splitlines()) == 1, error
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 75 and "stopped on request" in err and len(err.splitlines()) == 1, (code, out, err)
    answered = kept.count(b"\n")
    assert f"{count} chats to answer, {answered} are answered already" in out
    stopped = replies.read_bytes()
    assert stopped.startswith(kept) and stopped.endswith(b"\n") and stopped.count(b"\n") < count

    assert t.main(args) == 0
    assert replies.read_bytes().startswith(stopped)
    lines = lines_of(replies)
    assert sorted(line["row"] for line in lines) == list(range(count)), "rows lost or twice"
    asked = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    exact = set(dice.choice(count, 6, replace=False).tolist())
    for line in lines:
        assert line["messages"][0]["content"] == asked[line["row"]]
        check_line(line, speaker, 60, exact=line["row"] in exact)
    assert 0 < sum(line["finished"] for line in lines) < count, "both kinds must be met"
    trains(replies, speaker)

def not_locked(file):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True

def test_another_file_is_left_alone(tiny, tmp_path, capfd):
    """Catches a file that is no replies' cut or written to: text, JSON of other kinds, with and without an
    end of line."""
    prompts, file = write(tmp_path / "prompts.jsonl", [{"prompt": "a"}]), tmp_path / "notes"
    reply = b'{"row": 0, "messages": [], "input_ids": [], "loss_mask": [], "finished": true}\n'
    for content in (b"some notes\n", b"some notes", b'{"a": 1}\n', b'{"a": 1}', b"[1]\n", b"7\n", b"\n",
                    b"\x00\xff\n", reply + b"a note", reply + b"a note\n" + reply):
        file.write_bytes(content)
        assert t.main(["--regenerate", str(prompts), "--target", str(tiny[0]), "--replies", str(file)]) == 2
        error = capfd.readouterr().err
        assert str(file) in error and len(error.splitlines()) == 1, error
        assert file.read_bytes() == content

# ------------------------------------------------------------------------------------------ the warm start

@pytest.fixture
def folder(tmp_path):
    """A drafter from elsewhere: layers in another order than flags could say, its own theta and epsilon."""
    config = {"hidden_size": 32, "rms_norm_eps": 3e-5, "num_attention_heads": 2, "num_key_value_heads": 1,
              "head_dim": 32, "intermediate_size": 40, "rope_theta": 12345.0, "sliding_window": 9,
              "num_hidden_layers": 3, "vocab_size": 264, "is_causal": None,
              "layer_types": ["full_attention", "sliding_attention", "full_attention"],
              "block_size": 4, "dflash_config": {"target_layer_ids": [2, 0], "mask_token_id": 260}}
    drafter = t.Drafter({k: v for k, v in config.items() if v is not None})
    for p in drafter.parameters():
        torch.nn.init.normal_(p.data, 1 if p.dim() == 1 else 0, 0.2)
    (tmp_path / "drafter").mkdir()
    t.export(tmp_path / "drafter", config, drafter.state_dict())
    return tmp_path / "drafter"

def train(tiny, out, folder, *flags):
    """Train from the folder, in this process but for its worker; --block and --layers are the folder's."""
    small = [x for i, x in enumerate(SMALL) if not {"--block", "--layers"} & {x, SMALL[i - 1]}]
    args = ("--target", tiny[0], "--data", tiny[1], "--out", out, "--init-from", folder, "--device", "cpu")
    return t.main([str(x) for x in (*args, *small, *flags)])

def test_init_from(tiny, tmp_path, folder, capfd):
    """Catches a warm start that is none: another first loss than the folder's bf16 weights have, a config
    changed on the way, a resume that begins again from the folder."""
    out, flags = tmp_path / "run", ("--max-steps", 3, "--save-every", 1)
    assert train(tiny, out, folder, *flags) == 0, capfd.readouterr().err
    theirs = json.loads((folder / "config.json").read_text())
    ours = json.loads((out / "export" / "config.json").read_text())
    inner = theirs.pop("dflash_config")
    theirs = {k: v for k, v in theirs.items() if v is not None}
    assert {k: ours[k] for k in theirs} == theirs
    assert {k: ours["dflash_config"][k] for k in inner} == inner
    assert ours["rope_parameters"]["rope_theta"] == 12345
    assert t.Drafter(t.read_drafter(out / "export")[0]).rules() == [(0, False), (9, True), (0, False)]

    written = json.loads((out / "config.json").read_text())
    cfg = t.Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in written["config"].items()})
    model = tf.AutoModelForCausalLM.from_pretrained(tiny[0], dtype=torch.float32).eval().requires_grad_(False)
    batch = t.micro_batch(t.prepare(cfg, t.load_tokenizer(tiny[0]), 264), cfg, 0)
    features, at = torch.zeros(cfg.tokens, 64), 0
    for n in batch["lengths"]:
        ids = torch.from_numpy(batch["ids"][None, at: at + n])
        hidden = model(ids, output_hidden_states=True).hidden_states
        features[at: at + n] = torch.cat([hidden[3][0], hidden[1][0]], 1)
        at += n
    drafter = t.Drafter(theirs | {"dflash_config": inner})
    ends = t.frozen_ends(model) | {"rope": t.rotary(torch.arange(140), 12345.0, 32)}
    drafter.load_state_dict({k: x.float() for k, x in load_file(folder / "model.safetensors").items()})
    arrays = t.graph_inputs(batch, "cpu").values()
    _, _, counters = t.drafter_step(drafter, ends, features, *arrays, 260, "dflash", t.default_gamma(4))
    first, *_, last = metrics(out, "train")
    assert first["loss"] == pytest.approx(float(counters[0] / counters[1]), rel=1e-5)
    assert first["loss"] != pytest.approx(last["loss"], rel=1e-5)

    straight = masters(out)
    shutil.rmtree(out / "export")
    shutil.rmtree(out / "checkpoints" / "step-00000003")
    capfd.readouterr()
    assert train(tiny, out, folder, *flags) == 0
    assert "going on from step-00000002" in capfd.readouterr().out
    again = masters(out)
    off = {k: float((x - again[k]).abs().max()) for k, x in straight.items() if not torch.equal(x, again[k])}
    assert not off, off

def test_init_from_refuses(tiny, tmp_path, folder, capfd):
    """Catches a flag that silently loses to the folder or wins over it, a tensor left out or made to fit."""
    for flag, value, other in (
            ("--block", 8, 4), ("--layers", 5, 3), ("--heads", 4, 2), ("--kv-heads", 2, 1), ("--ffn", 48, 40),
            ("--head-dim", 16, 32), ("--target-layer-ids", "0,2", "2,0"), ("--mask-token-id", 261, 260),
            ("--sliding-window", 20, 9)):
        assert train(tiny, tmp_path / "run", folder, flag, value) == 2
        error = capfd.readouterr().err
        assert len(error.splitlines()) == 1 and f"{flag} {value}" in error and f" {other}" in error, error
        assert not (tmp_path / "run").exists()
    path = folder / "model.safetensors"
    state = load_file(path)
    whole = dict(state)
    state["extra.weight"] = state.pop("layers.1.mlp.up_proj.weight")
    state["norm.weight"] = state["norm.weight"][1:].contiguous()
    save_file(state, path)
    assert train(tiny, tmp_path / "run", folder, "--max-steps", 1) == 2
    error = capfd.readouterr().err
    for said in (folder, "layers.1.mlp.up_proj.weight missing", "extra.weight", "norm.weight (31,)", "(32,)"):
        assert str(said) in error, error
    save_file(whole, path)
    config = json.loads((folder / "config.json").read_text())
    for key, value, said in (("hidden_size", 64, "64"), ("rope_theta", None, "rope_theta"),
                             ("block_size", None, "block_size")):
        (folder / "config.json").write_text(json.dumps({**config, key: value} | (
            {"dflash_config": {k: v for k, v in config["dflash_config"].items() if k != key}})))
        assert train(tiny, tmp_path / "other", folder, "--max-steps", 1) == 2, key
        assert said in capfd.readouterr().err

# --------------------------------------------------------------------------------------------------- curves

def test_curves(tmp_path, capfd):
    """Catches a picture that is none or leaves a panel empty, and a refusal that is no line of words."""
    for content in (None, "no JSON\n"):
        if content:
            (tmp_path / "metrics.jsonl").write_text(content)
        assert t.main(["--curves", str(tmp_path)]) == 2
        error = capfd.readouterr().err
        assert str(tmp_path) in error and len(error.splitlines()) == 1 and "metrics.jsonl" in error
        assert not (tmp_path / "curves.png").exists()
    (tmp_path / "metrics.jsonl").unlink()
    for step in range(1, 30):
        t.write_metric(tmp_path, "train", step=step, loss=5 / step, accept_len=step / 9,
                       tokens_per_s=9e4 + 50 * step * step)
        if step % 9 == 0:
            t.write_metric(tmp_path, "eval", step=step, loss=float("nan"), walk=2.0 + step, tree_32=3.0)
    if not find_spec("matplotlib"):
        assert t.main(["--curves", str(tmp_path)]) == 2
        error = capfd.readouterr().err
        assert "pip install matplotlib" in error and len(error.splitlines()) == 1
        return
    assert t.main(["--curves", str(tmp_path)]) == 0
    from matplotlib import colors, image
    picture = image.imread(tmp_path / "curves.png")[..., :3]
    blue = np.abs(picture - np.array(colors.to_rgb("C0"))).max(-1) < 0.2  # each panel's first line
    assert all(part.sum() > 50 for part in np.array_split(blue, 3, axis=1)), "a panel is empty"
    assert str(tmp_path / "curves.png") in capfd.readouterr().out
