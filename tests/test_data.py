"""prepare(): chats to tokens and masks, sources, bad rows, the cut, the held-out split, the cache, processes.

    python -m pytest tests/test_data.py                       DFLASH_TEST_SEED=... repeats a failure
"""
import copy
import gzip
import hashlib
import io
import itertools
import json
import os
import random
import re
from collections import Counter

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import train_dflash as t

HEAD, END, OPEN, EMPTY = "<|im_start|>assistant\n", "<|im_end|>", "<think>\n", "<think>\n\n</think>\n\n"
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
NOW = "{% if m.role == 'assistant' and loop.last %}"
CLOSE = END + "\n{% endfor %}{% if add_generation_prompt %}" + HEAD + "{% endif %}"
CALLS = "{% for c in m.tool_calls or () %}<call>{{ c.function | tojson }}</call>{% endfor %}"
CHATML = "{% if tools %}{{ tools | tojson }}\n\n{% endif %}" + TURN + "{{ m.content }}" + CALLS + CLOSE
PIECES = ["hello", " world", "The answer is 42.", "\n", "    ", "é", "中文", "\u2028", "😀", "👩‍🚀", END,
          HEAD, EMPTY, "<|im_start|>", "def f(x):\n    return  x", "{{ x }}", "\\n", '"', "Hi"]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"city": "string", "é": "😀"}}}]

@pytest.fixture
def dice():
    seed = int(os.environ.get("DFLASH_TEST_SEED") or int.from_bytes(os.urandom(4), "big"))
    print(f"DFLASH_TEST_SEED={seed}")
    return random.Random(seed)

@pytest.fixture
def read(tmp_path, monkeypatch):
    """read(tokenizer, *sources, cache=folder, **flags) -> Documents. A source: path, JSONL bytes or rows."""
    names = itertools.count()

    def call(tokenizer, *sources, cache="cache", **flags):
        for key in ("HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
            monkeypatch.setattr(datasets.config, key, tmp_path / cache / key.lower())
        paths = []
        for source in sources:
            paths.append(source if isinstance(source, os.PathLike) else tmp_path / f"{next(names)}.jsonl")
            if source is not paths[-1]:
                paths[-1].write_bytes(source if isinstance(source, bytes) else lines(source))
        flags = {"tokens": 4096, "max_length": 4096, "eval_fraction": 0.0, "workers": 1} | flags
        return t.prepare(t.Config(data=tuple(map(str, paths)), **flags), tokenizer, len(tokenizer))
    return call

def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()

def byte_level(template=CHATML):
    tokenizer = t.byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer

def merging():
    """Byte-level BPE with long tokens and trimmed offsets, the arrangement of GPT-2 and its many heirs."""
    core, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.train_from_iterator([" ".join(PIECES)] * 9, trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<|im_start|>", END], initial_alphabet=alphabet))
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=CHATML, eos_token=END)

def without_offsets():
    """A tokenizer in Python: it cannot say where its tokens stand in the text."""
    tokenizer = ByT5Tokenizer(extra_ids=0, additional_special_tokens=["<|im_start|>", END])
    tokenizer.chat_template = CHATML
    return tokenizer

def text(dice, low=0, high=6):
    return "".join(dice.choices(PIECES, k=dice.randint(low, high)))

def exchange(prompt, reply, **more):
    turns = {"role": "user", "content": prompt}, {"role": "assistant", "content": reply}
    return {"messages": list(turns), **more}

def random_chat(dice):
    turns = [{"role": "system", "content": text(dice)}] if dice.random() < 0.4 else []
    for _ in range(dice.randint(1, 3)):
        turns.append({"role": "user", "content": text(dice)})
        if dice.random() < 0.3:
            turns.append({"role": "assistant", "content": text(dice, 0, 1), "tool_calls": [
                {"function": {"name": "f", "arguments": {dice.choice(["city", "hour"]): text(dice)}}}]})
            turns.append({"role": "tool", "content": text(dice)})
        turns.append({"role": "assistant", "content": dice.choice([text(dice), turns[-1]["content"]])})
    turns += exchange(text(dice), "")["messages"][: dice.random() < 0.2]  # unanswered: not trained on
    finished = dice.choice([None, True, False])
    return {"messages": turns, "tools": dice.choice([None, TOOLS]), "finished": finished}

def disguise(dice, row):
    """The same chat in the other spellings that data comes in."""
    row = {k: v for k, v in copy.deepcopy(row).items() if v is not None or dice.random() < 0.5}
    if row.get("tools") and dice.random() < 0.5:
        row["tools"] = json.dumps(row["tools"])
    for turn in row["messages"]:
        content = turn["content"]
        parts = [{"type": "text", "text": content[:3]}, {"type": "text", "text": content[3:]}]
        turn["content"] = dice.choice([content, content or None, parts])
        for call in turn.get("tool_calls", ()):
            given = call["function"]["arguments"]
            call["function"]["arguments"] = dice.choice([given, json.dumps(given)])
    return row

def asked(row):
    """The turns up to the last reply."""
    return row["messages"][: -1 if row["messages"][-1]["role"] == "user" else None]

def by_hand(row):
    """ChatML joined from pieces: [(text, is it the model's to write), ...]."""
    pieces = [(json.dumps(row["tools"], ensure_ascii=False) + "\n\n", False)] if row.get("tools") else []
    for i, turn in enumerate(asked(row)):
        body, reply = turn["content"], turn["role"] == "assistant"
        for call in turn.get("tool_calls", ()):
            body += f"<call>{json.dumps(call['function'], ensure_ascii=False)}</call>"
        ended = reply and not (i == len(row["messages"]) - 1 and row.get("finished") is False)
        pieces += [(f"<|im_start|>{turn['role']}\n", False), (body, reply), (END, ended), ("\n", False)]
    return pieces

def expected(tokenizer, row):
    """(ids, mask) of the chat: a token is supervised when all its bytes are the model's to write."""
    ids = tokenizer("".join(text for text, _ in by_hand(row)), add_special_tokens=False)["input_ids"]
    owned = b"".join(bytes([own]) * len(text.encode()) for text, own in by_hand(row))
    mask, at = [], 0
    for token in tokenizer.convert_ids_to_tokens(ids):  # an ordinary token shows each byte as one character
        width = len(token.encode() if token in tokenizer.all_special_tokens else token)
        mask.append(all(owned[at: at + width]))
        at += width
    assert at == len(owned)
    return ids, mask

def learnable(mask):
    return any(a and b for a, b in itertools.pairwise(mask))

def useful(tokenizer, rows):
    return [pair for row in rows if learnable((pair := expected(tokenizer, row))[1])]

def kept(found):
    return [(row["input_ids"], row["loss_mask"]) for row in found.rows if row["input_ids"]]

def runs(tokenizer, found):
    """Every stretch of supervised tokens with what stands before it, decoded: [(before, stretch), ...]."""
    pairs = []
    for ids, mask in kept(found):
        for own, group in itertools.groupby(range(len(ids)), key=mask.__getitem__):
            places = list(group)
            if own:
                pairs.append((tokenizer.decode(ids[:places[0]]), tokenizer.decode([ids[i] for i in places])))
    return pairs

# ------------------------------------------------------------------------------------------- ids and masks

@pytest.mark.parametrize("make", [byte_level, merging, without_offsets])
def test_ids_and_mask_are_those_of_the_chat_joined_by_hand(make, dice, read):
    """A user, system, tool or header token supervised, a reply or end token missed, wrong ids."""
    tokenizer, rows = make(), [random_chat(dice) for _ in range(120)]
    found, compared = read(tokenizer, [disguise(dice, row) for row in rows]), 0
    for row, got in zip(rows, found.rows, strict=True):
        ids, mask = expected(tokenizer, row)
        assert ids == tokenizer.apply_chat_template(asked(row), tools=row["tools"], return_dict=False)
        if learnable(mask):
            assert (got["input_ids"], got["loss_mask"]) == (ids, mask), row
            own = tokenizer.decode([i for i, own in zip(got["input_ids"], got["loss_mask"]) if own])
            assert make is merging or own == "".join(text for text, own in by_hand(row) if own)
            compared += 1
        else:
            assert (got["input_ids"], got["note"]) == ([], "nothing to learn"), row
    assert compared > 50

def test_a_chat_that_begins_with_a_reply(read):
    """The header, or a system prompt that the template puts in, trained on as if the model had written it."""
    tokenizer = byte_level("<|im_start|>system\nBe kind.<|im_end|>\n" + CHATML)
    first = {"role": "assistant", "content": "Welcome!"}
    found = read(tokenizer, [{"messages": [first, *exchange("Hi", "Yes?")["messages"]]}, exchange("a", "bc")])
    stretches = {stretch for _, stretch in runs(tokenizer, found)}
    assert stretches <= {"Welcome!" + END, "Yes?" + END, "bc" + END}
    assert "Yes?" + END in stretches or found.rows[0]["note"]

TEMPLATES = {  # template; after the header: (the template's words, the model's); the reply in later contexts
    "an empty block before the last reply": (
        TURN + NOW + EMPTY + "{% endif %}{{ m.content }}" + CLOSE, lambda said, thought: (EMPTY, said), str),
    "earlier thinking is dropped": (
        TURN + "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
        "{% else %}{{ m.content }}{% endif %}" + CLOSE,
        lambda said, thought: ("", said), lambda said: said.split("</think>")[-1]),
    "the prompt opens the thinking": (
        TURN + NOW + OPEN + "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}"
        + CLOSE.replace(HEAD, HEAD + OPEN),
        lambda said, thought: (OPEN, f"{thought}\n</think>\n\n{said}") if thought else (EMPTY, said), str),
    "the prompt alone opens the thinking": (
        TURN + "{{ m.content }}" + CLOSE.replace(HEAD, HEAD + OPEN),
        lambda said, thought: (OPEN, said[len(OPEN):]) if said.startswith(OPEN) else ("", said), str)}

@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_with_thinking(name, dice, read):
    """A reply learnt in a context that the model never met, twice or never; the template's words learnt."""
    template, split, later = TEMPLATES[name]
    tokenizer, rows, want, documents = byte_level(template), [], [], 0
    starts = ["yes ", "<table>", "<thing>", "no, "] + [OPEN + "h</think>"] * 3 * ("empty" not in name)
    for finished in [True, False] * 30:
        turns, before, count = [], "", dice.randint(1, 4)
        for left in reversed(range(count)):
            turns += exchange(text(dice), dice.choice(starts) + text(dice) + ".")["messages"]
            content, thought = turns[-1]["content"], "hm" + text(dice) if dice.random() < 0.5 else ""
            if name == "the prompt opens the thinking" and thought:
                turns[-1]["reasoning_content"] = thought
            before += f"<|im_start|>user\n{turns[-2]['content']}{END}\n{HEAD}"
            supplied, own = split(content, thought)
            want.append((before + supplied, own + END * (finished or left > 0)))
            documents += not left or supplied + own != later(content)  # rewritten: its own document
            before += later(content) + END + "\n"
        rows.append({"messages": turns, "finished": finished})
    found = read(tokenizer, rows)
    assert sorted(runs(tokenizer, found)) == sorted(want)
    assert len(kept(found)) == documents

# ------------------------------------------------------------------------------------- sources and bad rows

def test_every_source_gives_the_same_documents(dice, read, tmp_path):
    """A reader that loses, reorders or alters rows; the None that Parquet puts into structs kept."""
    tokenizer, rows = byte_level(), [random_chat(dice) | {"kind": "x"} for _ in range(60)]
    for key in ("city", "hour"):  # every struct gets both fields, so that each call has one of them empty
        rows.append(exchange("?", "", finished=None, tools=TOOLS, kind="y"))
        rows[-1]["messages"][1]["tool_calls"] = [{"function": {"name": "f", "arguments": {key: "1"}}}]
    want, half = useful(tokenizer, rows), useful(tokenizer, rows[20:])
    tokenised = [{"input_ids": ids, "loss_mask": [int(x) for x in mask]} for ids, mask in want]

    def write(name, chosen):
        if name.endswith("parquet"):
            pa.parquet.write_table(pa.Table.from_pylist(chosen), tmp_path / name)
        else:
            (tmp_path / name).write_bytes((gzip.compress if name.endswith("gz") else bytes)(lines(chosen)))
        return tmp_path / name

    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.json"):
        assert kept(read(tokenizer, write(name, rows))) == want, name
    for name in ("e.jsonl", "f.parquet"):
        assert kept(read(tokenizer, write(name, tokenised))) == want, name
    mixed = [write("g.parquet", rows[20:]), write("h.jsonl.gz", rows), write("i.jsonl", tokenised)]
    assert kept(read(tokenizer, *mixed)) == half + want + want

def test_bad_rows_are_counted_with_their_reason_and_the_good_survive(dice, read):
    """One bad line that ends the job, takes a good one with it, or vanishes uncounted."""
    tokenizer = byte_level(CHATML.replace("{{ m.content }}", "{% if loop.index0 and m.role == messages["
        "loop.index0 - 1].role %}{{ raise_exception('two users running') }}{% endif %}{{ m.content }}"))
    stranger, whole = {"role": "gpt", "content": "x"}, exchange("a", "bc")["messages"]
    bad = {  # reason: lines, or rows
        "not JSON": [b"{no", lines([{"messages": whole}]).replace(b"bc", b"\xe9")[:-1], b"\0\xff", b"{}{}"],
        "not an object": [b"[1, 2]", b'"text"', b"17", b"null"],
        "no messages": [{}, {"messages": []}, {"messages": None}, {"messages": "hi"}],
        "gpt": [{"messages": [stranger]}, {"messages": [*whole, stranger]}],
        "nothing to learn": [
            exchange("a", None), {"messages": whole[:1]}, {"input_ids": [1, 2], "loss_mask": [1, 0]}],
        "not text": [exchange([{"type": "image"}], "bc"), exchange("a", [{"type": "text", "text": 1}])],
        "two users running": [{"messages": [whole[0], *whole]}],
        "beyond the vocabulary": [
            {"input_ids": [1, x], "loss_mask": [1, 1]} for x in (-1, len(tokenizer), 10**12, True)],
        "differ in length": [{"input_ids": [1, 2, 3], "loss_mask": [1, 1]}, {"input_ids": [1, 2]}]}
    reasons = dice.sample(sorted(bad), len(bad))
    for chosen in (reasons[:4], reasons[4:]):  # the report names the 8 most frequent
        good = [exchange(text(dice), text(dice) + ".", tools=dice.choice([None, TOOLS])) for _ in range(30)]
        drawn, counted = [(disguise(dice, row), row) for row in good], Counter()
        for reason in chosen:
            again = [(line, None) for line in bad[reason] for _ in range(dice.randint(1, 3))]
            drawn, counted[reason] = drawn + again, len(again)
        dice.shuffle(drawn)
        written = b"".join(lines([line]) if isinstance(line, dict) else line + b"\n" for line, _ in drawn)
        half = lines([exchange("a", "bc")])[: dice.randint(1, 60)]  # the writer was killed in the last line
        found = read(tokenizer, written + b"\n  \n" + half)
        counted["not JSON"] += 1
        counted["empty line"] += 2
        assert kept(found) == [expected(tokenizer, row) for _, row in drawn if row]
        assert f"{len(good)} documents kept" in found.report
        assert f" {counted.total()} dropped;" in found.report
        for reason, n in counted.items():
            assert re.search(rf"; {n} x [^;]*{reason}[^;]*;", found.report), (reason, n, found.report)

def latin():
    """A Parquet file with a string that is not UTF-8."""
    rows, whole = pa.Table.from_pylist([exchange("a", "caffee")]), io.BytesIO()
    pa.parquet.write_table(rows, whole, compression="none")
    return whole.getvalue().replace(b"caffee", b"caff\xe9e")

BROKEN = {  # file: (content, what the error says)
    "bad.jsonl": (b'{}\n[]\nx\n{"messages": []}\n', "4 dropped"), "blank.jsonl": (b"\n\n", "nothing left"),
    "none.jsonl": (b"", "none.jsonl: the file is empty"), "gone.jsonl": (None, "gone.jsonl"),
    "gone.parquet": (None, "gone.parquet"), "void.jsonl.gz": (gzip.compress(b""), "void.jsonl.gz"),
    "torn.jsonl.gz": (gzip.compress(lines([exchange("a", "bc")] * 99))[:-30], "torn.jsonl.gz"),
    "latin.parquet": (latin(), "latin.parquet: holds a string that is not UTF-8"),
    "torn.parquet": (b"PAR1 and no more", "torn.parquet"), "chats.txt": (b"hello", "chats.txt")}

@pytest.mark.parametrize("name", BROKEN)
def test_input_that_leaves_nothing_is_the_users_error(name, tmp_path, read):
    """A traceback, or a run on nothing, where a person needs to hear which file is wrong."""
    content, says = BROKEN[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(t.UserError, match=re.escape(says)):
        read(byte_level(), tmp_path / name)

def test_half_a_character(read, tmp_path):
    """Catches a lone surrogate, which JSON can hold and UTF-8 cannot, that costs more than its own row."""
    half = {"role": "user", "content": "caf\ud800"}
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "messages": [half]},
            {"messages": [half, {"role": "assistant", "content": "yes"}]}]
    found = read(byte_level(), "\n".join(map(json.dumps, rows)).encode())
    assert kept(found) == [([1, 2, 3], [False, True, True])] and " 1 dropped;" in found.report
    path = tmp_path / "prompts.jsonl"
    for line in (json.dumps({"messages": [half]}), "[" * 200_000):
        path.write_text(f'{{"prompt": "a"}}\n{line}\n')
        with pytest.raises(t.UserError, match=r"prompts.jsonl, line 2: "):
            t.read_prompts(str(path), byte_level(), 9)

# -------------------------------------------------------------------------- the cut, the split, the cache

def test_the_cut_counts_what_it_keeps_and_drops(dice, read):
    """A row whose reply was cut away trained on, or dropped without a word (field-reports E1)."""
    tokenizer, frame = byte_level(), 19  # an empty prompt: 1 + len("user\n") + 2 + 1 + len("assistant\n")

    def chats(*prompts):
        return [exchange("u" * (size - frame), "r" * dice.randint(2, 40)) for size in prompts]
    rows = chats(40, 40, 40, 40, 30, *dice.choices(range(frame, 31), k=5))  # 30: two of the reply are left
    dice.shuffle(rows)
    whole = [expected(tokenizer, row) for row in rows]
    want = [(ids[:32], mask[:32]) for ids, mask in whole if learnable(mask[:32])]
    cut = sum(len(ids) > 32 for ids, _ in whole) - 4
    found = read(tokenizer, rows, max_length=32)
    assert len(want) == 6
    assert kept(found) == want
    says = f"10 rows read, 6 documents kept (0 held out), {cut} cut at 32, 4 dropped; 4 x nothing to learn"
    assert says in found.report
    with pytest.raises(t.UserError, match="10 x nothing to learn after the cut"):
        read(tokenizer, chats(*[31] * 10), max_length=32)  # room for one token: an anchor without a label

def test_a_row_of_a_million_tokens(dice, read):
    """A row that nobody would write by hand costing more than itself: time, memory, or its neighbours."""
    n, chat = 1_000_000, exchange("a question", "its answer")
    mask = [False] * (n - 9) + [True] * 9
    rows = [exchange("q" * n, "r"), exchange("q", "r" * n), {"input_ids": [7] * n, "loss_mask": mask},
            {"input_ids": [7] * n, "loss_mask": mask[::-1]}, chat]
    dice.shuffle(rows)
    found = read(byte_level(), rows, max_length=96)
    cut, whole = expected(byte_level(), exchange("q", "r" * 99)), expected(byte_level(), chat)
    want = [(cut[0][:96], cut[1][:96]), ([7] * 96, mask[::-1][:96]), whole]
    assert sorted(kept(found)) == sorted(want)
    assert "5 rows read, 3 documents kept (0 held out), 2 cut at 96, 2 dropped" in found.report

def test_the_held_out_split_leaks_nothing(dice, read):
    """A held-out prompt in training under another reply, a row in both or neither, a rule that drifts."""
    fraction = dice.choice([0.1, 0.3, 0.7])
    rows = [exchange(f"What is  {dice.random()}?\nÉ", "It is\n this.") for _ in range(800)]
    for row in dice.sample(rows, 200):
        first = [f" {turn['content'].upper()}\t".replace(" ", "  ") for turn in row["messages"]]
        turns = exchange(first[0], text(dice))["messages"] + exchange("and", "then")["messages"]
        made = {"input_ids": [1, 2, 3], "loss_mask": [False, True, True]} if dice.random() < 0.5 else {}
        rows.append({"messages": [{"role": "system", "content": "s"}, *turns], **made})
    dice.shuffle(rows)
    found, sides = read(byte_level(), rows, eval_fraction=fraction), {}
    for side, (order, _) in enumerate((found.train, found.held_out)):
        for i in order.tolist():
            asked = next(turn["content"] for turn in rows[i]["messages"] if turn["role"] == "user")
            words = " ".join(asked.lower().split())
            sides.setdefault(words, set()).add(side)  # the stated rule:
            assert side == (int(hashlib.sha256(words.encode()).hexdigest()[:16], 16) / 2**64 < fraction)
    assert sorted([*found.train[0].tolist(), *found.held_out[0].tolist()]) == list(range(1000))
    assert Counter(map(len, sides.values())) == {1: 800}
    held = sum(side == {1} for side in sides.values())
    assert abs(held - 800 * fraction) < 5 * (800 * fraction * (1 - fraction)) ** 0.5

def test_every_change_of_the_input_is_seen_and_the_same_is_not_read_twice(dice, read, tmp_path):
    """A stale cache: other content, template, tokenizer, length or split without effect (E6)."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(exchange(text(dice, 1), f"Reply {text(dice)} {i:04}") for i in range(60)))

    def state(tokenizer=None, **flags):
        found = read(tokenizer or byte_level(), path, **flags)
        return found.fingerprint, kept(found), sorted(found.held_out[0].tolist())

    def files():
        return {(str(p), p.stat().st_mtime_ns) for p in (tmp_path / "cache").rglob("*.arrow")}

    base, made, lower = state(), files(), byte_level()
    assert (state(), files()) == (base, made)
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()  # another tokenizer, the same vocabulary
    other = byte_level(CHATML.replace("{{ m.role }}", "{{ m.role[0] }}"))
    for flags in ({"tokenizer": lower}, {"tokenizer": other}, {"max_length": 50}, {"eval_fraction": 0.5}, {}):
        if not flags:  # the last: other content under the same name, of the same length
            path.write_bytes(path.read_bytes().replace(b"Reply", b"Other"))
        here, fresh = state(**flags), state(cache=f"fresh {flags}"[:30], **flags)
        assert here[1:] == fresh[1:], f"{flags}: stale"
        assert here[1:] != base[1:], f"{flags}: no effect, so this shows nothing"
        assert here[0] != base[0], f"{flags}: the same fingerprint"

def test_the_content_decides_and_not_the_date(dice, read, tmp_path):
    """Other content with an old date (cp -p, rsync) not seen; a file only touched refused as other data."""
    path, tokenizer = tmp_path / "a.jsonl", byte_level()
    rows = [exchange(text(dice), f"reply {i}") for i in range(20)]
    path.write_bytes(lines(rows))
    base, date = read(tokenizer, path).fingerprint, path.stat().st_mtime_ns
    os.utime(path, ns=(date + 10**9, date + 10**9))
    assert read(tokenizer, path).fingerprint == base
    path.write_bytes(lines(rows[::-1] + rows))
    os.utime(path, ns=(date, date))
    assert kept(read(tokenizer, path)) == useful(tokenizer, rows[::-1] + rows)

def test_many_processes_tokenise_as_one_does(dice, read, tmp_path):
    """Shards put together in another order, rows lost at their borders."""
    rows = [exchange(f"{i} {text(dice)}", text(dice, 1)) for i in range(2001 + dice.randrange(9))]
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    many, one = (read(byte_level(), tmp_path / "a.jsonl", cache=str(n), workers=n, eval_fraction=0.1)
                 for n in (2, 1))
    assert [len(found.rows.cache_files) for found in (many, one)] == [2, 1]  # there really were two
    assert many.rows.to_list() == one.rows.to_list()
    assert kept(many) == useful(byte_level(), rows)
    assert (many.report, many.fingerprint) == (one.report, one.fingerprint)
    assert all((a == b).all() for a, b in zip(many.train + many.held_out, one.train + one.held_out))
