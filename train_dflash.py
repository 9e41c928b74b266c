#!/usr/bin/env python3
"""Train a DFlash drafter for a frozen language model: one script, one process per GPU.

A drafter is a small transformer that drafts a whole block of tokens for a big language model (the target) in one
pass; the target checks the block in one pass, so that it decodes several times faster and its output does not
change. DFlash (arXiv 2602.06036): a block is [anchor token, MASK x (B-1)], slot k drafts token anchor+k, and every
draft layer attends to features tapped from a few layers of the target, strictly before the anchor.

    main ── checks, prepares the data, spawns, waits, names the first failure
     ├─ target 0..T-1   GPUs 0,1,2,3,4   frozen target: tokens -> tapped features of micro-batch m (m mod T)
     │       │  the wire: point to point, one group per pair
     └─ drafter 0..D-1  GPUs 5,6,7       one compiled graph: loss and gradient of micro-batch m (m mod D)
             └─ gradients summed once per optimizer step, AdamW on fp32 masters, save, evaluate

    python train_dflash.py                                         a demo that needs nothing, about 5 minutes
    python train_dflash.py --target Qwen/Qwen3-8B --data chats.jsonl --out runs/qwen3-8b
    python train_dflash.py --evaluate runs/qwen3-8b                real decoding, with and without the drafter

Run the second line again and it goes on from its newest complete checkpoint.

Letters: S context tokens of a micro-batch, N anchors, B block (slots), Q = N*B draft rows, D hidden width, L draft
layers, K taps, V vocabulary, H/G query/kv heads, h head size. A comment after a reshape gives the shape.
"""
from __future__ import annotations

import argparse
import ctypes
import dataclasses
import difflib
import fcntl
import faulthandler
import hashlib
import inspect
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections import Counter
from datetime import timedelta
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

# ------------------------------------------------------------------------------------------------- Config


def flag(default, text):
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class Config:
    target: str = flag("", "target model, hub id or folder; none: the demo")
    data: tuple[str, ...] = flag((), "JSONL/Parquet files or hub datasets")
    out: str = flag("", "run folder; none: runs/<target's name>")
    device: str = flag("auto", "auto, cuda or cpu")
    target_gpus: str = flag("", "GPUs that run the target, as 0,1,2")
    drafter_gpus: str = flag("", "GPUs that train; equal lists: both in turn")
    block: int = flag(16, "slots of a block B, the anchor included")
    layers: int = flag(5, "draft layers")
    heads: int = flag(0, "query heads; 0: the target's")
    kv_heads: int = flag(0, "key/value heads; 0: the target's")
    head_dim: int = flag(0, "head size; 0: the target's")
    ffn: int = flag(0, "FFN width; 0: the target's")
    target_layer_ids: str = flag("", "taps, 0-based layers as 1,9,17")
    mask_token_id: int = flag(-1, "mask token; -1: chosen and said")
    sliding_window: int = flag(0, "window of the sliding layers; 0: none slide")
    full_layers: int = flag(1, "with a window: how many last layers stay full")
    sliding_bidirectional: bool = flag(False, "sliding layers see their whole block")
    loss: str = flag("dflash", "dflash or dpace")
    gamma: float = flag(0.0, "decay of the dflash weights; 0: by block")
    tokens: int = flag(16384, "context tokens of a micro-batch S")
    anchors: int = flag(2048, "anchors of a micro-batch N")
    max_length: int = flag(3072, "longest row kept, the rest is cut")
    epochs: float = flag(6.0, "passes over the data")
    max_steps: int = flag(0, "optimizer steps; 0: by epochs")
    accumulation: int = flag(1, "micro-batches a drafter adds up per step")
    lr: float = flag(6e-4, "peak learning rate")
    warmup: float = flag(0.04, "share of the run that warms up")
    clip: float = flag(1.0, "gradient norm limit")
    seed: int = flag(0, "seed of order, anchors and weights")
    eval_fraction: float = flag(0.02, "held-out share of the data")
    eval_every: int = flag(500, "steps between evaluations")
    save_every: int = flag(500, "steps between checkpoints")
    keep: int = flag(3, "checkpoints kept")
    log_every: int = flag(10, "steps between log lines")
    resume: str = flag("auto", "auto: newest checkpoint in --out; never")
    stall_timeout: int = flag(1800, "seconds after which a silent peer is dead")
    wandb: str = flag("", "Weights & Biases project")
    workers: int = flag(0, "tokenising processes; 0: one a core")
    plan: bool = flag(False, "print who does what and the memory, exit")
    evaluate: str = flag("", "run or export to decode with, no training")
    prompts: str = flag("", "JSONL of prompts; none: the held-out chats")
    num_prompts: int = flag(64, "prompts to decode")
    new_tokens: int = flag(256, "tokens to decode per prompt")
    temperature: float = flag(0.0, "0: greedy; above: lossless sampling")


# What a resumed run must share with its checkpoint: these decide what is learnt or what micro-batch m holds.
IDENTITY = ("target", "data", "block", "layers", "heads", "kv_heads", "head_dim", "ffn", "target_layer_ids",
            "mask_token_id", "sliding_window", "full_layers", "sliding_bidirectional", "loss", "gamma", "tokens",
            "anchors", "max_length", "lr", "warmup", "clip", "seed", "eval_fraction")
DONE, USAGE, STOPPED, DIVERGED, FAILED = 0, 2, 75, 76, 1  # exit codes, design.md 6
TILE = 128  # flex_attention's block: the Triton backward on sm_90 takes no smaller one (pytorch.md 6)
CPU_DENSE_LIMIT = 6 << 30  # bytes that dense attention may take on a CPU
EVAL_BATCHES = 32  # held-out micro-batches of one evaluation, at most


class UserError(Exception):
    """A mistake in flags or input: one line, exit 2."""


class Diverged(Exception):
    """Non-finite beyond the allowance: exit 76."""


def help_text():
    lines = [__doc__.split("\n")[0], "", "usage: python train_dflash.py [--flag value ...]", ""]
    for f in dataclasses.fields(Config):
        default = " ".join(f.default) if isinstance(f.default, tuple) else f.default
        lines.append(f"  --{f.name.replace('_', '-'):22} {f.metadata['help']:44} {default if default != '' else '-'}")
    return "\n".join(lines)


def parse(argv):
    """argv (list of str) -> (Config, set of the names given). UserError on unknown flags and wrong types."""
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise UserError(message)

    parser = Parser(add_help=False, allow_abbrev=False)
    kinds = {"int": int, "float": float, "str": str}
    for f in dataclasses.fields(Config):
        option = {"action": "store_true"} if f.type == "bool" else (
            {"nargs": "+"} if f.type.startswith("tuple") else {"type": kinds[f.type]})
        parser.add_argument("--" + f.name.replace("_", "-"), default=argparse.SUPPRESS, **option)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        names = ["--" + f.name.replace("_", "-") for f in dataclasses.fields(Config)]
        near = difflib.get_close_matches(unknown[0].split("=")[0], names, 1, 0.5)
        raise UserError(f"unknown argument {unknown[0]}" + (f", did you mean {near[0]}?" if near else ", see --help"))
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(given).items()}
    return Config(**given), set(given)


def int_list(text, name):
    try:
        return [int(x) for x in text.split(",") if x.strip()]
    except ValueError:
        raise UserError(f"{name} {text}: give whole numbers with commas, as 0,1,2") from None


def check(cfg):
    """Every rule on Config that needs no file and no GPU. Raises UserError."""
    def need(ok, message):
        if not ok:
            raise UserError(message)

    positive = ("block layers tokens anchors max_length accumulation clip eval_every save_every keep log_every "
                "stall_timeout num_prompts new_tokens lr")
    for name in positive.split():
        need(getattr(cfg, name) > 0, f"--{name.replace('_', '-')} {getattr(cfg, name)}: must be above 0")
    for name in "heads kv_heads head_dim ffn sliding_window full_layers max_steps workers gamma temperature".split():
        need(getattr(cfg, name) >= 0, f"--{name.replace('_', '-')} {getattr(cfg, name)}: must not be negative")
    need(cfg.device in ("auto", "cuda", "cpu"), f"--device {cfg.device}: auto, cuda or cpu")
    need(cfg.loss in ("dflash", "dpace"), f"--loss {cfg.loss}: dflash or dpace")
    need(cfg.resume in ("auto", "never"), f"--resume {cfg.resume}: auto or never")
    need(cfg.block >= 2, f"--block {cfg.block}: a block has an anchor and at least one draft, so 2 or more")
    need(cfg.tokens % TILE == 0, f"--tokens {cfg.tokens}: must be a multiple of {TILE}, "
         f"{math.ceil(cfg.tokens / TILE) * TILE} is")
    step = TILE // math.gcd(cfg.block, TILE)
    need(cfg.anchors * cfg.block % TILE == 0, f"--anchors {cfg.anchors} x --block {cfg.block} must be a multiple "
         f"of {TILE}: take {math.ceil(cfg.anchors / step) * step} anchors")
    need(cfg.max_length <= cfg.tokens, f"--max-length {cfg.max_length} is more than --tokens {cfg.tokens}: "
         "a row must fit its micro-batch")
    need(not cfg.sliding_window or cfg.sliding_window >= cfg.block,
         f"--sliding-window {cfg.sliding_window} is smaller than --block {cfg.block}")
    need(cfg.full_layers <= cfg.layers, f"--full-layers {cfg.full_layers}: there are {cfg.layers} layers")
    need(0 <= cfg.eval_fraction < 1, f"--eval-fraction {cfg.eval_fraction}: from 0 to below 1")
    need(0 <= cfg.warmup < 1, f"--warmup {cfg.warmup}: from 0 to below 1")
    need(cfg.epochs > 0 or cfg.max_steps, f"--epochs {cfg.epochs}: must be above 0")
    disabled = [f"{k}={v}" for k in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
                if (v := os.environ.get(k, "0")) not in ("", "0")]
    stance = torch._dynamo.eval_frame._stance.stance
    disabled += [f"torch.compiler.set_stance({stance!r})"] if stance not in ("default", "fail_on_recompile") else []
    need(not disabled, f"{', '.join(disabled)} turns compilation off, and attention would be dense: unset it")


def default_gamma(block):
    """The published decays, 7, 5 and 4 for B 16, 10 and 8 (dflash.md 1.2); straight lines between and beyond."""
    return float(np.interp(block, [8, 10, 16], [4, 5, 7])) if 8 <= block <= 16 else block * (7 / 16 if block > 16
                                                                                             else 1 / 2)


# -------------------------------------------------------------------------------------------- small tools


def say(text):
    print(text, flush=True)


def atomic_write(path, text):
    """Replace the file as a whole: a reader meets the old text or the new one, also after a power cut."""
    beside = Path(f"{path}.{os.getpid()}.new")
    with open(beside, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(beside, path)


def fsync_folder(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_metric(out, kind, **values):
    """One JSON object a line. A number that is not finite is null: JSON has no NaN."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    with open(Path(out) / "metrics.jsonl", "a") as f:
        f.write(json.dumps({"kind": kind, "time": round(time.time(), 3), **clean}) + "\n")


def heartbeat(out, phase, step=0, micro_batches=0):
    """Called where the main thread of the process at work advances; never from a ticker, which would hide a hang."""
    path = os.environ.get("SUPERVISE_HEARTBEAT") or Path(out) / "heartbeat.json"
    beside = f"{path}.{os.getpid()}.new"
    with open(beside, "w") as f:  # no fsync: a torn heartbeat after a power cut costs nothing
        json.dump({"step": step, "micro_batches": micro_batches, "phase": phase, "time": time.time(),
                   "pid": os.getpid()}, f)
    os.replace(beside, path)


def span(seconds):
    seconds = int(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def gib(count):
    return count / 2**30


def rng(*key):
    """A host generator that depends on the key alone (seed, purpose, ...)."""
    return np.random.default_rng(key)


PACK, ORDER, ANCHORS, EVAL_ANCHORS = range(4)  # purposes


# --------------------------------------------------------------------------------------------------- data

EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\s*")
ROLES = ("system", "user", "assistant", "tool", "developer")


def clean_messages(messages):
    """The turns of one row as chat templates want them. Raises ValueError with the reason.

    Drops the None fields that Parquet adds, joins content given as text parts, reads tool calls' JSON arguments.
    """
    if not isinstance(messages, (list, np.ndarray)) or not len(messages):
        raise ValueError("no messages")
    turns = []
    for turn in messages:
        if not isinstance(turn, dict):
            raise ValueError("a turn is not an object")
        turn = {k: v for k, v in turn.items() if v is not None}
        if turn.get("role") not in ROLES:
            raise ValueError(f"role {str(turn.get('role'))[:20]!r}")
        content = turn.get("content", "")
        if not isinstance(content, str):
            if not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
                raise ValueError("content that is not text")
            content = "".join(p["text"] for p in content)
        turn["content"] = content
        for call in turn.get("tool_calls") or ():
            function = call.get("function", call)
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"])
        turns.append(turn)
    return turns


def reply_spans(turns, tools, render, end_tokens, finished):
    """Where the replies stand in the rendered chat: [(text, [(begin, end), ...]), ...] in characters.

    The span of a reply runs from the end of its generation prompt to the end of its end token. What the template
    itself puts first (an empty thinking block) is no reply. A template that rewrites history (drops thinking from
    earlier turns, say) gives an earlier reply a text of its own, rendered as the model met it.
    """
    replies = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    rows = []
    for i in reversed(replies):
        text = render(turns[: i + 1], tools, False)
        prompt, bare = (render(turns[:i], tools, True), render(turns[:i], tools, False)) if i else ("", "")
        begin = len(os.path.commonprefix([prompt, text]))
        if begin < len(os.path.commonprefix([prompt, bare])):
            raise ValueError("the template rewrites the prompt once it has a reply")
        given = turns[i].get("reasoning_content", "") + turns[i]["content"]
        added = EMPTY_THINK.match(text, begin)
        if added and not EMPTY_THINK.match(given):
            begin = added.end()
        end = len(text.rstrip())
        closing = next((e for e in end_tokens if text.endswith(e, 0, end)), "")
        if i == len(turns) - 1 and not finished:
            end -= len(closing)
        if rows and rows[-1][0].startswith(text[:end]):
            rows[-1][1].append((begin, end))
        else:
            rows.append((text, [(begin, end)]))
    return rows


def tokenise(text, spans, tokenizer):
    """Rendered text and reply spans (characters) -> ids, supervised (lists). A token counts as reply when it lies
    wholly inside a span: one that straddles the border was never the model's to choose."""
    if tokenizer.is_fast:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = found["input_ids"], found["offset_mapping"]
        supervised = [any(b <= x and y <= e and x < y for b, e in spans) for x, y in offsets]
        return ids, supervised
    ids, supervised, at = [], [], 0  # no offsets: tokenise piece by piece, and insist that the whole agrees
    for b, e in sorted(spans) + [(len(text), len(text))]:
        for piece, inside in ((text[at:b], False), (text[b:e], True)):
            new = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"] if piece else []
            ids, supervised = ids + new, supervised + [inside] * len(new)
        at = e
    if ids != tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]:
        raise ValueError("tokens straddle the border of a reply")
    return ids, supervised


def read_row(row, render, tokenizer, vocab, end_tokens):
    """One raw row -> (key, [(ids, supervised), ...]); key names first prompt and reply for the held-out split.

    Raises ValueError (or what the template raises) with the reason why the row is no use.
    """
    if row.get("input_ids") is not None:
        ids, supervised = list(row["input_ids"]), [bool(x) for x in row.get("loss_mask") or ()]
        if len(ids) != len(supervised):
            raise ValueError("input_ids and loss_mask differ in length")
        if not all(isinstance(x, (int, np.integer)) and 0 <= x < vocab for x in ids):
            raise ValueError("a token beyond the vocabulary")
        return str(ids), [(ids, supervised)]
    turns = clean_messages(row.get("messages"))
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools else tools or None
    finished = row.get("finished")
    first = [next((t["content"] for t in turns if t["role"] == r), "") for r in ("user", "assistant")]
    rows = reply_spans(turns, tools, render, end_tokens, finished is None or bool(finished))
    return " ".join("\n".join(first).lower().split()), [tokenise(*r, tokenizer) for r in rows]


def tokenise_rows(batch, tokenizer, vocab, max_length, eval_fraction):
    """A batch of raw rows, as datasets.map hands it over -> columns. A row that is no use keeps its place, with the
    reason in `note` and no tokens."""
    def render(turns, tools, prompt):
        return tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=prompt)

    end_tokens = sorted({t for t in tokenizer.all_special_tokens} | set(tokenizer.get_added_vocab()), key=len)[::-1]
    columns = {k: [] for k in ("input_ids", "loss_mask", "length", "supervised", "cut", "held_out", "note")}
    size = len(next(iter(batch.values())))
    for i in range(size):
        key, made, note = "", [], ""
        try:
            row = {k: v[i] for k, v in batch.items()}
            if "jsonl" in row:
                if not row["jsonl"].strip():
                    continue
                row = json.loads(row["jsonl"])
                if not isinstance(row, dict):
                    raise ValueError("not an object")
            key, made = read_row(row, render, tokenizer, vocab, end_tokens)
        except json.JSONDecodeError:
            note = "not JSON"
        except Exception as e:  # templates raise what they like; one bad row is counted, named and skipped
            note = str(e).split("\n")[0][:60] or type(e).__name__
        held_out = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < eval_fraction * 2**64
        for ids, supervised in made or [([], [])]:
            cut = len(ids) > max_length
            ids, supervised = ids[:max_length], supervised[:max_length]
            learnable = any(a and b for a, b in zip(supervised, supervised[1:]))  # an anchor and a label
            if not note and not learnable:
                note = "nothing to learn after the cut" if cut else "nothing to learn"
            bad = bool(note)
            for k, v in (("input_ids", [] if bad else ids), ("loss_mask", [] if bad else supervised),
                         ("length", 0 if bad else len(ids)), ("supervised", 0 if bad else sum(supervised)),
                         ("cut", cut and not bad), ("held_out", held_out), ("note", note)):
                columns[k].append(v)
            note = ""
    return columns


def load_rows(sources):
    """Files or hub ids -> one datasets.Dataset of raw rows. JSONL is read as text lines, so that one bad line (half a
    row, other types, bytes that are not UTF-8) costs one row and not the file."""
    import datasets

    parts = []
    for source in sources:
        kind = re.sub(r"\.gz$", "", source).rsplit(".", 1)[-1]
        path = Path(source)
        try:
            if kind in ("jsonl", "json", "parquet"):
                if not path.is_file():
                    raise UserError(f"--data {source}: no such file")
                with open(path, "rb") as f:
                    if not f.read(1):
                        raise UserError(f"--data {source}: the file is empty")
                if kind == "parquet":
                    part = datasets.load_dataset("parquet", data_files=source, split="train")
                else:  # a byte that is not UTF-8 becomes \xNN, which is no JSON: that line alone is refused
                    part = datasets.load_dataset("text", data_files=source, split="train",
                                                 encoding_errors="backslashreplace").rename_column("text", "jsonl")
            elif path.exists():
                raise UserError(f"--data {source}: neither .jsonl, .json nor .parquet (.gz may follow)")
            else:
                part = datasets.load_dataset(source, split="train")
        except UserError:
            raise
        except Exception as e:  # datasets raises a dozen types for what is, to the user, one thing
            raise UserError(f"--data {source}: cannot be read ({type(e).__name__}: {str(e).splitlines()[0][:200]})") from e
        wanted = [c for c in ("jsonl", "messages", "tools", "finished", "input_ids", "loss_mask") if c in part.column_names]
        if not {"jsonl", "messages", "input_ids"} & set(wanted):
            raise UserError(f"--data {source}: no column messages or input_ids, but {', '.join(part.column_names)}")
        parts.append(part.select_columns(wanted))
    return parts


@dataclasses.dataclass
class Documents:
    """Tokenised rows and where each micro-batch finds its own. rows: datasets.Dataset; train/held_out: CSR plans."""
    rows: object
    train: tuple
    held_out: tuple
    fingerprint: str
    report: str


def prepare(cfg, tokenizer, vocab):
    """Load, tokenise, cache, count, split and pack. Returns Documents; UserError when nothing is left."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    parts, total = [], 0
    rules = "".join(inspect.getsource(f) for f in (clean_messages, reply_spans, tokenise, read_row, tokenise_rows))
    for raw in load_rows(cfg.data):
        total += len(raw)
        # All that decides a row's tokens is in the key, so that a stale cache cannot be met (field-reports E6).
        key = json.dumps([raw._fingerprint, rules, tokenizer.chat_template, tokenizer.get_vocab(), vocab,
                          cfg.max_length, cfg.eval_fraction], sort_keys=True)
        kinds = datasets.Features({
            "input_ids": datasets.List(datasets.Value("int32")), "loss_mask": datasets.List(datasets.Value("bool")),
            "length": datasets.Value("int32"), "supervised": datasets.Value("int32"), "cut": datasets.Value("bool"),
            "held_out": datasets.Value("bool"), "note": datasets.Value("string")})
        processes = min(cfg.workers or len(os.sched_getaffinity(0)), max(1, len(raw) // 1000))
        parts.append(raw.map(
            tokenise_rows, batched=True, batch_size=200, num_proc=processes if processes > 1 else None,
            remove_columns=raw.column_names, features=kinds, desc="tokenising",
            new_fingerprint=hashlib.sha256(key.encode()).hexdigest()[:32],
            fn_kwargs={"tokenizer": tokenizer, "vocab": vocab, "max_length": cfg.max_length,
                       "eval_fraction": cfg.eval_fraction}))
    rows = datasets.concatenate_datasets(parts)
    column = {k: rows.data.column(k).to_numpy() for k in ("length", "supervised", "cut", "held_out", "note")}
    good, held = column["length"] > 0, column["held_out"]
    notes = Counter(column["note"][~good]) if len(rows) else Counter()
    tokens, learnt = int(column["length"].sum()), int(column["supervised"].sum())
    report = (f"data: {total} rows read, {int(good.sum())} documents kept ({int((good & held).sum())} held out), "
              f"{int(column['cut'].sum())} cut at {cfg.max_length}, {sum(notes.values())} dropped"
              + "".join(f"; {n} x {note}" for note, n in notes.most_common(8))
              + f"; {tokens} tokens, {learnt / max(tokens, 1):.1%} supervised")
    if not (good & ~held).any():
        raise UserError(f"nothing left to train on. {report}")
    plans = [pack(column["length"], np.flatnonzero(good & (held == side)), cfg.tokens, cfg.seed) for side in (0, 1)]
    fingerprint = hashlib.sha256(" ".join(p._fingerprint for p in parts).encode()).hexdigest()[:16]
    return Documents(rows, *plans, fingerprint, report)


# ------------------------------------------------------------------------------------------ micro-batches


def pack(lengths, documents, capacity, seed):
    """Best-fit decreasing over windows of shuffled documents -> (order, bounds): micro-batch j holds the documents
    order[bounds[j]:bounds[j + 1]], longest first, at most `capacity` tokens. Every document stands exactly once."""
    shuffled = rng(seed, PACK).permutation(documents)
    bins = []
    for at in range(0, len(shuffled), 16384):  # a window keeps the search short and the memory flat
        window = shuffled[at: at + 16384]
        window = window[np.argsort(-lengths[window], kind="stable")]
        by_room, room = {}, np.zeros(capacity + 1, dtype=bool)  # open bins by free tokens
        for document, length in zip(window.tolist(), lengths[window].tolist()):
            step = int(room[length:].argmax())  # the tightest bin that takes it
            free = length + step
            if room[free]:
                chosen = by_room[free].pop()
                room[free] = bool(by_room[free])
            else:
                chosen, free = [], capacity
                bins.append(chosen)
            chosen.append(document)
            by_room.setdefault(free - length, []).append(chosen)
            room[free - length] = True
    bounds = np.concatenate([[0], np.cumsum([len(b) for b in bins], dtype=np.int64)]).astype(np.int64)
    return np.array([d for b in bins for d in b], dtype=np.int64), bounds


def micro_batch(documents, cfg, m, held_out=False):
    """What micro-batch m holds: a pure function of (data, config, seed, m), computed on the host by whoever needs it.

    Returns numpy arrays: lengths [rows], ids [S], positions [S] (within the document), and for the N blocks
    start [N], anchor [N] (indices into the row of S), tokens [N, B] (slot 0 the anchor, then the labels),
    valid [N, B] (the label counts); blocks = how many are real, tokens_used = real context tokens.
    """
    order, bounds = documents.held_out if held_out else documents.train
    if held_out:
        j, draw = m, rng(cfg.seed, EVAL_ANCHORS, m)
    else:
        epoch, j = divmod(m, len(bounds) - 1)
        j, draw = rng(cfg.seed, ORDER, epoch).permutation(len(bounds) - 1)[j], rng(cfg.seed, ANCHORS, m)
    chosen = documents.rows.with_format("numpy")[order[bounds[j]: bounds[j + 1]].tolist()]
    S = cfg.tokens
    lengths = np.array([len(x) for x in chosen["input_ids"]], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    used = int(lengths.sum())
    assert used <= S, f"micro-batch {m} holds {used} tokens, more than {S}"
    ids, supervised = np.zeros(S, np.int64), np.zeros(S, bool)
    ids[:used], supervised[:used] = np.concatenate(list(chosen["input_ids"])), np.concatenate(list(chosen["loss_mask"]))
    begin = np.concatenate([np.repeat(starts, lengths), np.arange(used, S)])  # padding: documents of one token
    end = np.concatenate([np.repeat(starts + lengths, lengths), np.arange(used, S) + 1])
    batch = blocks_of(ids, supervised, begin, end, cfg.anchors, cfg.block, draw)
    return {"m": m, "held_out": held_out, "lengths": lengths, "ids": ids, "positions": np.arange(S) - begin,
            "tokens_used": used, "documents": order[bounds[j]: bounds[j + 1]], **batch}


def blocks_of(ids, supervised, begin, end, N, B, draw):
    """Draw the anchors and cut their blocks. ids, supervised, begin, end: [S]; begin/end bound each token's document.

    Token t is eligible when t and t+1 lie in one document and both are supervised: t is then an anchor that decoding
    reaches, and slot 1 has a label. Drawn without replacement, uniformly over the micro-batch, sorted (dense tiles).
    A label counts until the first slot that is beyond the document or unsupervised: decoding has ended there.
    """
    eligible = np.flatnonzero(supervised[:-1] & supervised[1:] & (end[:-1] == end[1:]))
    anchor = np.sort(draw.choice(eligible, min(N, len(eligible)), replace=False)) if len(eligible) else eligible
    real = len(anchor)
    anchor = np.concatenate([anchor, np.zeros(N - real, np.int64)])  # a padding block sees itself, weighs nothing
    at = anchor[:, None] + np.arange(B)  # [N, B]
    inside = at < end[anchor][:, None]
    at = np.minimum(at, len(ids) - 1)
    valid = np.logical_and.accumulate(supervised[at] & inside, axis=1)
    valid[:, 0] = False  # slot 0 is the anchor itself and carries no loss
    valid[real:] = False
    start = begin[anchor]
    anchor[real:] = start[real:] = 0
    return {"start": start, "anchor": anchor, "tokens": np.where(valid | (np.arange(B) == 0), ids[at], 0),
            "valid": valid, "blocks": real}


def schedule(step, m, total, group, eval_every, n_eval):
    """The run as one list that every process walks by itself: ("train", m) for the micro-batches of each optimizer
    step, then ("eval", j) where an evaluation is due. `total` micro-batches in all; the last step may be short."""
    while m < total:
        yield from (("train", i) for i in range(m, min(m + group, total)))
        m, step = m + group, step + 1
        if step % eval_every == 0 or m >= total:
            yield from (("eval", j) for j in range(n_eval))


def learning_rate(cfg, m, total):
    """Warm-up over the first share of the run, then cosine to 0. A function of micro-batches done, so that it does not
    depend on how many GPUs there are now."""
    done, warm = m / total, cfg.warmup
    return cfg.lr * ((done + 1 / total) / (warm + 1 / total) if done < warm
                     else 0.5 * (1 + math.cos(math.pi * (done - warm) / (1 - warm))))


# ------------------------------------------------------------------------------------------------- target


def load_config(target):
    """The target's text config, and the whole one. UserError when there is no such model."""
    from transformers import AutoConfig

    try:
        whole = AutoConfig.from_pretrained(target)
    except Exception as e:  # OSError, ValueError, hub errors: to the user all say that this is no model
        raise UserError(f"--target {target}: no model there ({str(e).splitlines()[0][:200]})") from e
    return whole.get_text_config(), whole


def load_tokenizer(target):
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(target)
    except Exception as e:  # as above
        raise UserError(f"--target {target}: its tokenizer does not load ({str(e).splitlines()[0][:200]})") from e
    return tokenizer


def load_target(target, dtype, layers=None, head=True):
    """The frozen causal LM on the CPU, with its first `layers` decoder layers only (None: all).

    transformers does the reading, with every renaming and tying it knows; layers that the shortened config does not
    name are never read from disk, which is also how a drafter gets embedding and head alone (layers=0).
    """
    from transformers import AutoModelForCausalLM
    from transformers import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    text, whole = load_config(target)
    if layers is not None:
        for config in {id(c): c for c in (text, whole)}.values():
            if hasattr(config, "num_hidden_layers"):
                config.num_hidden_layers = layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:layers]
    try:
        model, info = AutoModelForCausalLM.from_pretrained(target, config=whole, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError) as e:
        raise UserError(f"--target {target}: does not load ({str(e).splitlines()[0][:300]})") from e
    missing = [k for k in info["missing_keys"]]
    if missing:
        raise UserError(f"--target {target}: the checkpoint lacks {len(missing)} tensors, {sorted(missing)[0]} first")
    model.eval().requires_grad_(False)
    if not head:
        model.set_output_embeddings(None)
    return model


def decoder_layers(model):
    """The decoder's own list of layers, wherever the family keeps it."""
    n = model.config.get_text_config().num_hidden_layers
    lists = [m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == n
             and name.rsplit(".", 1)[-1] in ("layers", "h", "blocks") and "vis" not in name]
    if not lists:
        raise UserError(f"--target {model.config._name_or_path}: found no list of {n} decoder layers to tap")
    return lists[0]


def frozen_ends(model):
    """What a drafter takes from its target: embedding and head weights [V, D], and the scalars around them."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    scale = getattr(embedding, "embed_scale", None)
    text = model.config.get_text_config()
    return {"embed": embedding.weight.detach(), "head": head.weight.detach(),
            "embed_scale": float(scale) if scale is not None else 1.0,
            "softcap": float(getattr(text, "final_logit_softcapping", None) or 0.0)}


def default_taps(n_layers, count):
    """The published rule (dflash.md 1.1): from the 2nd to the third-to-last layer, evenly. On a target too shallow
    for distinct layers that way: all its layers but the last, evenly, and at most one tap a layer."""
    taps = [n_layers // 2] if count == 1 else [round(1 + i * (n_layers - 4) / (count - 1)) for i in range(count)]
    if len(set(taps)) == len(taps) and min(taps) >= 0 and n_layers >= 4:
        return taps
    return sorted({round(i * max(n_layers - 2, 0) / max(count - 1, 1)) for i in range(count)})


def choose_mask_token(cfg, tokenizer, vocab, documents):
    """The mask token's id and why: the flag; the tokenizer's own; the first embedding row past the tokenizer; else a
    reserved special token that is not pad/eos/bos and does not occur in the data."""
    taken = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    if cfg.mask_token_id != -1:
        if not 0 <= cfg.mask_token_id < vocab:
            raise UserError(f"--mask-token-id {cfg.mask_token_id}: the embedding has rows 0 to {vocab - 1}")
        if cfg.mask_token_id in taken:
            raise UserError(f"--mask-token-id {cfg.mask_token_id} is the tokenizer's pad, eos or bos token")
        return cfg.mask_token_id, "as told"
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id not in taken:
        return tokenizer.mask_token_id, "the tokenizer's mask token"
    last = max(tokenizer.get_vocab().values())
    if last + 1 < vocab:
        return last + 1, "the first embedding row past the tokenizer"
    free = sorted({i for i, t in tokenizer.added_tokens_decoder.items() if t.special} - taken)
    if documents is not None:
        for chunk in documents.rows.data.column("input_ids").chunks:
            free = [i for i in free if i not in set(np.intersect1d(chunk.flatten().to_numpy(), free).tolist())]
    if not free:
        raise UserError("--mask-token-id: the tokenizer has no mask token, no spare row and no unused special token; "
                        "name an embedding row that the data never uses")
    return free[0], f"the reserved token {tokenizer.convert_ids_to_tokens(free[0])}, which the data never uses"


def taps_of(cfg, n_layers):
    if not cfg.target_layer_ids:
        return default_taps(n_layers, cfg.layers)
    taps = int_list(cfg.target_layer_ids, "--target-layer-ids")
    for t in taps:
        if not 0 <= t < n_layers:
            raise UserError(f"--target-layer-ids {cfg.target_layer_ids}: {t} is not a layer, they run 0 to {n_layers - 1}")
    if len(set(taps)) != len(taps) or not taps:
        raise UserError(f"--target-layer-ids {cfg.target_layer_ids}: give each layer once")
    return taps


def drafter_config(cfg, text, taps, mask_token_id):
    """The drafter's config.json: all that a serving engine reads (dflash.md 2), and all that Drafter is built from.

    The geometry follows the target; mixture-of-experts and head-256 targets get the published 32/8 heads of 128 and
    an FFN of 3 D. The drafter itself always rotates plainly over the whole head.
    """
    D, H = text.hidden_size, getattr(text, "num_attention_heads", 32)
    experts = any(getattr(text, k, None) for k in ("num_experts", "num_local_experts", "n_routed_experts"))
    h = getattr(text, "head_dim", None) or D // H
    odd = experts or h > 128
    H = cfg.heads or (32 if odd else H)
    G = cfg.kv_heads or (8 if odd else getattr(text, "num_key_value_heads", None) or H)
    h = cfg.head_dim or (128 if odd else h)
    ffn = cfg.ffn or (3 * D if odd else getattr(text, "intermediate_size", None) or 4 * D)
    if H % G:
        raise UserError(f"--heads {H} is not a multiple of --kv-heads {G}")
    if h % 2 or h < 16:
        raise UserError(f"--head-dim {h}: even, and 16 or more")
    theta = find_rope_theta(text)
    window = cfg.sliding_window
    full = cfg.full_layers if window else cfg.layers
    kinds = ["sliding_attention"] * (cfg.layers - full) + ["full_attention"] * full
    out = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": D, "intermediate_size": ffn,
        "num_hidden_layers": cfg.layers, "num_attention_heads": H, "num_key_value_heads": G, "head_dim": h,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0,
        "vocab_size": text.vocab_size, "max_position_embeddings": text.max_position_embeddings,
        "rope_theta": theta, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "layer_types": kinds, "sliding_window": window or None, "use_sliding_window": bool(window),
        "max_window_layers": cfg.layers, "block_size": cfg.block, "num_target_layers": text.num_hidden_layers,
        "dflash_config": {"target_layer_ids": taps, "mask_token_id": mask_token_id, "block_size": cfg.block},
        "tie_word_embeddings": False, "initializer_range": 0.02, "use_cache": True,
        "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    if cfg.sliding_bidirectional or not window:
        out["is_causal"] = False  # absent, engines read sliding layers as causal in their block (dflash.md 2.4)
    return out


def find_rope_theta(text):
    """rope_theta from either spelling of a config, full-attention layers' own where they are nested; a config that
    rotates but names no theta is an error, one that does not rotate gets 1e6."""
    parameters = getattr(text, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    theta = parameters.get("rope_theta") or getattr(text, "rope_theta", None)
    if theta is None and parameters:
        raise UserError("the target's config has rope_parameters without rope_theta")
    return float(theta or 1e6)


def rectangles(lengths, limit):
    """Rows (longest first) -> [(first, last, width)]: rectangles of at most `limit` tokens and about 10% padding."""
    out, i = [], 0
    while i < len(lengths):
        width, j, real = -(-int(lengths[i]) // 64) * 64, i, 0
        while j < len(lengths) and (j == i or ((j - i + 1) * width <= limit and
                                               real + lengths[j] >= 0.9 * (j - i + 1) * width - 64)):
            real, j = real + int(lengths[j]), j + 1
        out.append((i, j, width))
        i = j
    return out


@torch.no_grad()
def capture(model, layers, taps, batch, features):
    """Run the target over a micro-batch and write its taps into features [S, K*D], row of document after document.

    Tap t is the residual stream after decoder layer t, with no final norm. Each document is a row of its own, padded on
    the right, so that causal attention needs no mask and recurrent layers leak nothing between documents.
    """
    device, at = features.device, 0
    D = features.shape[1] // len(taps)
    lengths = batch["lengths"]
    order = np.argsort(-lengths, kind="stable")
    starts = np.cumsum(lengths) - lengths
    caught = {}
    hooks = [layers[t].register_forward_hook(
        lambda module, inputs, output, t=t: caught.__setitem__(t, output[0] if isinstance(output, tuple) else output))
        for t in set(taps)]
    try:
        for first, last, width in rectangles(lengths[order], batch["ids"].shape[0]):
            rows = order[first:last]
            ids = np.zeros((len(rows), width), np.int64)
            for r, document in enumerate(rows):
                ids[r, : lengths[document]] = batch["ids"][starts[document]: starts[document] + lengths[document]]
            source = np.concatenate([r * width + np.arange(lengths[d]) for r, d in enumerate(rows)])
            place = np.concatenate([starts[d] + np.arange(lengths[d]) for d in rows])
            source, place = torch.from_numpy(source).to(device), torch.from_numpy(place).to(device)
            caught.clear()
            model(input_ids=torch.from_numpy(ids).to(device), use_cache=False)
            for k, t in enumerate(taps):
                features[:, k * D: (k + 1) * D].index_copy_(0, place, caught[t].flatten(0, 1)[source].to(features.dtype))
            at += len(rows)
    finally:
        for hook in hooks:
            hook.remove()
    features[batch["tokens_used"]:].zero_()


# ------------------------------------------------------------------------------------------------ drafter


class Linear(nn.Linear):
    """No bias; an fp32 master weight, cast to the dtype of its input inside the graph (no autocast: pytorch.md 4)."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


def rotary(positions, theta, h):
    """cos and sin [T, 1, h] in float32, whatever the model computes in: bf16 angles are radians off at 32k."""
    frequency = theta ** (-torch.arange(0, h, 2, device=positions.device, dtype=torch.float32) / h)
    angle = positions.float()[:, None] * frequency  # [T, h/2]
    angle = torch.cat([angle, angle], -1)[:, None]  # [T, 1, h]
    return angle.cos(), angle.sin()


def rotate(x, rope):
    cos, sin = rope
    a, b = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, D, H, G, h, eps):
        super().__init__()
        self.h = h
        self.q_proj, self.k_proj, self.v_proj = Linear(D, H * h), Linear(D, G * h), Linear(D, G * h)
        self.o_proj = Linear(H * h, D)
        self.q_norm, self.k_norm = RMSNorm(h, eps), RMSNorm(h, eps)

    def keys_values(self, x, rope):
        """[T, D] -> keys and values [T, G, h]; context rows and block rows go through the same matrices."""
        k = self.k_proj(x).unflatten(-1, (-1, self.h))  # [T, G, h]
        v = self.v_proj(x).unflatten(-1, (-1, self.h))  # [T, G, h]
        return rotate(self.k_norm(k), rope), v

    def forward(self, x, rope, context, attend):
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.h))), rope)  # [Q, H, h]
        k, v = (torch.cat(pair) for pair in zip(context, self.keys_values(x, rope)))  # [S+Q, G, h]
        return self.o_proj(attend(q, k, v).flatten(1))  # [Q, H*h] -> [Q, D]


class MLP(nn.Module):
    def __init__(self, D, ffn):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = Linear(D, ffn), Linear(D, ffn), Linear(ffn, D)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, D, H, G, h, ffn, eps):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(D, eps), RMSNorm(D, eps)
        self.self_attn, self.mlp = Attention(D, H, G, h, eps), MLP(D, ffn)

    def forward(self, x, rope, context, attend):
        x = x + self.self_attn(self.input_layernorm(x), rope, context, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The DFlash drafter; its state_dict has the published names (dflash.md 2.1). Built from its config.json.

    Context rows are never run through q, o or the FFN: the fused features become keys and values of each layer.
    """

    def __init__(self, config):
        super().__init__()
        D, eps = config["hidden_size"], config["rms_norm_eps"]
        H, G, h = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        self.theta, self.h, self.kinds = config["rope_theta"], h, config["layer_types"]
        self.block, self.window = config["block_size"], config.get("sliding_window") or 0
        self.causal = [config.get("is_causal", kind == "sliding_attention") for kind in self.kinds]
        self.fc = Linear(len(config["dflash_config"]["target_layer_ids"]) * D, D)
        self.hidden_norm, self.norm = RMSNorm(D, eps), RMSNorm(D, eps)
        self.layers = nn.ModuleList(Layer(D, H, G, h, config["intermediate_size"], eps) for _ in self.kinds)

    def initialise(self, seed):
        """Normal(0, 0.02) as Qwen3's, the two matrices that write to the residual stream smaller with depth."""
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.dim() == 2:
                    scale = 0.02 / math.sqrt(2 * len(self.layers)) if ("o_proj" in name or "down_proj" in name) else 0.02
                    p.copy_(torch.randn(p.shape, generator=draw) * scale)

    def rules(self):
        """(window, causal) of every layer: what its mask depends on."""
        return [(self.window if kind == "sliding_attention" else 0, c) for kind, c in zip(self.kinds, self.causal)]

    def context(self, features, positions):
        """features [T, K*D], positions [T] -> keys and values of every layer [(k, v)], each [T, G, h]."""
        fused = self.hidden_norm(self.fc(features))  # [T, D]
        rope = rotary(positions, self.theta, self.h)
        return [layer.self_attn.keys_values(fused, rope) for layer in self.layers]

    def forward(self, x, positions, context, attends):
        """x [Q, D] block embeddings, positions [Q], context as above, attends: one function a layer -> [Q, D]."""
        rope = rotary(positions, self.theta, self.h)
        for layer, pair, attend in zip(self.layers, context, attends):
            x = layer(x, rope, pair, attend)
        return self.norm(x)


# --------------------------------------------------------------------------------------- anchors and mask
# Experiments with what a block may see belong here: one predicate, and tile bounds that must contain it.


def visible(q, kv, start, anchor, S, B, window, causal):
    """May draft row q see key kv? Elementwise over broadcast integer tensors -> bool.

    Keys 0..S-1 are context, S..S+Q-1 the draft rows. A block sees its document's context strictly before its anchor
    (at the anchor the feature does not exist yet when serving), in a sliding layer only what is less than `window`
    behind the row's own position, and its own block: all of it, or in a causal layer up to itself.
    """
    n, k = q // B, q % B
    a = anchor[n]
    context = (kv >= start[n]) & (kv < a)
    if window:
        context = context & (kv > a + k - window)
    own = (kv - S) // B == n
    if causal:
        own = own & ((kv - S) % B <= k)
    return torch.where(kv < S, context, own)


def mask_tiles(start, anchor, S, B, window):
    """Which 128 x 128 tiles of the mask hold anything, and which are full, by arithmetic on the sorted anchors.

    start, anchor: [N] -> partial, full: bool [Q/128, (S+Q)/128], disjoint. Partial may be too generous (the predicate
    is evaluated there), full never is. No dense mask is made: [Q/128, blocks of a tile, S/128] is the largest tensor.
    """
    N, device = anchor.shape[0], anchor.device
    tiles = N * B // TILE
    row = torch.arange(tiles, device=device) * TILE
    first, last = row // B, (row + TILE - 1) // B  # blocks that have rows in the tile
    span_ = max((i * TILE + TILE - 1) // B - i * TILE // B for i in range(tiles)) + 1
    block = torch.minimum(first[:, None] + torch.arange(span_, device=device), last[:, None])  # [tiles, span]
    a = anchor[block][..., None]  # [tiles, span, 1]
    loose = tight = start[block][..., None]
    if window:
        loose, tight = torch.maximum(loose, a - window + 1), torch.maximum(tight, a + B - window)
    c = torch.arange(0, S, TILE, device=device)  # [S/128]
    some = ((loose < c + TILE) & (a > c) & (loose < a)).any(1)  # [tiles, S/128]
    full = ((tight <= c) & (a >= c + TILE)).all(1)
    own = (first[:, None] <= last) & (last[:, None] >= first)  # [tiles, tiles]
    return torch.cat([some & ~full, own], 1), torch.cat([full, torch.zeros_like(own)], 1)


def block_mask(start, anchor, S, B, window, causal):
    """The BlockMask of the predicate, built inside the compiled graph: every input that varies is a tensor."""
    def listed(tiles):
        count = tiles.sum(1, dtype=torch.int32)
        order = torch.argsort(tiles.to(torch.int32), dim=1, descending=True, stable=True).to(torch.int32)
        return count[None, None], order[None, None].contiguous()

    partial, full = mask_tiles(start, anchor, S, B, window)
    Q = anchor.shape[0] * B
    return BlockMask.from_kv_blocks(
        *listed(partial), *listed(full), BLOCK_SIZE=TILE, seq_lengths=(Q, S + Q),
        mask_mod=lambda b, head, q, kv: visible(q, kv, start, anchor, S, B, window, causal))


def flex_attend(mask):
    """Attention over [T, heads, h] by flex_attention, the only path on CUDA."""
    def attend(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, T, h]
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options={"BACKEND": "TRITON"})
        return out[0].transpose(0, 1)  # [Q, H, h]
    return attend


def dense_attend(mask):
    """Attention with a dense bool mask [Q, T] (None: all visible): small shapes on a CPU, one block when decoding."""
    def attend(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)
    return attend


def attentions(drafter, start, anchor, S):
    """One attention function a layer, layers of the same rule sharing theirs."""
    B, made = drafter.block, {}
    for window, causal in set(drafter.rules()):
        if start.is_cuda:
            made[window, causal] = flex_attend(block_mask(start, anchor, S, B, window, causal))
        else:
            Q = anchor.shape[0] * B
            q, kv = torch.arange(Q)[:, None], torch.arange(S + Q)[None]
            made[window, causal] = dense_attend(visible(q, kv, start, anchor, S, B, window, causal))
    return [made[rule] for rule in drafter.rules()]


# --------------------------------------------------------------------------------------------------- loss
# Experiments with the objective belong here.


def slot_weights(ce, valid, loss, gamma):
    """Weights [n, B-1] of the slots' cross-entropies ce [n, B-1] (float32), valid [n, B-1] bool, a prefix of each row.

    dflash: exp(-(k-1)/gamma) for slot k (paper, 1.2). dpace (arXiv 2605.18810): with q the draft's probability of the
    label, smoothed to (q+1)/2, the weight of slot j is sum over m >= j of prod over i <= m of q_i.
    """
    if loss == "dflash":
        return valid * torch.exp(-torch.arange(ce.shape[1], device=ce.device) / gamma)
    prefix = torch.where(valid, 0.5 * torch.exp(-ce) + 0.5, 1.0).cumprod(1) * valid
    return prefix.flip(1).cumsum(1).flip(1) * valid


def head_and_loss(rows, head, labels, valid, loss, gamma, softcap, chunk=4096):
    """Cross-entropy through the frozen head, in chunks, with its gradient: full logits never exist.

    rows [n, B-1, D], head [V, D], labels and valid [n, B-1] -> ce [n, B-1] float32, weights, hit [n, B-1] bool, and
    d(sum of weights * ce)/d(rows) [n, B-1, D]. The head is frozen, so that the gradient of the rows is all there is
    to keep: it is made while the logits are at hand and nothing is recomputed in backward.
    """
    size = max(1, chunk // rows.shape[1])
    parts = []
    for x, y, ok in zip(rows.split(size), labels.split(size), valid.split(size)):
        flat, y1 = x.flatten(0, 1), y.flatten()  # [n*(B-1), D]
        logits = (flat @ head.T).float()  # [n*(B-1), V]
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        lse = torch.logsumexp(logits, -1)
        ce = (lse - logits.gather(1, y1[:, None])[:, 0]).view_as(ok)
        hit = (logits.argmax(-1) == y1).view_as(ok)
        weights = slot_weights(ce, ok, loss, gamma)
        d = torch.exp(logits - lse[:, None]) - (torch.arange(head.shape[0], device=head.device) == y1[:, None]).float()
        d = d * weights.flatten()[:, None]
        if softcap:
            d = d * (1 - (logits / softcap).square())
        parts.append((ce, weights, hit, (d.to(head.dtype) @ head).view_as(x)))
    return tuple(torch.cat(p) for p in zip(*parts))


def drafter_step(drafter, ends, features, positions, start, anchor, tokens, valid, mask_token_id, loss, gamma):
    """One micro-batch, the compiled graph: features to draft rows, their gradient, and the counters.

    features [S, K*D], positions [S], start/anchor [N], tokens/valid [N, B] -> rows [N, B-1, D] (requires grad),
    their gradient (of the weighted sum, divided by nothing), counters [COUNTERS + 2 (B-1)] float32.
    A feature that is not finite becomes zeros, and the blocks that would see it weigh nothing.
    """
    S, (N, B) = features.shape[0], tokens.shape
    bad = ~torch.isfinite(features).all(-1)  # [S]
    features = torch.where(bad[:, None], 0, features)
    before = F.pad(bad.to(torch.int32).cumsum(0), (1, 0))  # [S+1], bad positions before each
    labelled = valid.any(1)
    valid = valid & (before[anchor] == before[start])[:, None]

    slots = torch.arange(B, device=tokens.device)
    ids = torch.where(slots == 0, tokens, mask_token_id)  # [N, B]
    x = F.embedding(ids.flatten(), ends["embed"]).to(features.dtype) * ends["embed_scale"]  # [Q, D]
    at = ((anchor - start)[:, None] + slots).flatten()  # [Q]
    hidden = drafter(x, at, drafter.context(features, positions), attentions(drafter, start, anchor, S))
    rows = hidden.view(N, B, -1)[:, 1:]  # [N, B-1, D], slot 0 never meets the head

    with torch.no_grad():
        labels, valid = tokens[:, 1:], valid[:, 1:]
        ce, weights, hit, gradient = head_and_loss(
            rows.detach(), ends["head"], labels, valid, loss, gamma, ends["softcap"])
        block = valid.any(1)
        divisor = weights.sum() if loss == "dflash" else block.sum()
        hit = hit & valid
        accepted = hit.to(torch.int32).cumprod(1).sum(1)  # [N]
        whole = valid.all(1)
        counters = torch.stack([x.float() for x in (
            (ce * weights).sum(), divisor, (block * accepted).sum(), block.sum(), (whole * accepted).sum(), whole.sum(),
            bad.sum(), (labelled & ~block).sum())])
        counters = torch.cat([counters, hit.sum(0).float(), valid.sum(0).float()])
    return rows, gradient, counters


COUNTERS = 8  # loss, divisor, accepted, blocks, accepted and blocks that are whole, bad positions, blocks they cost


def read_counters(c):
    """Counters (list of floats, summed over micro-batches and drafters) -> what a person reads."""
    B1 = (len(c) - COUNTERS) // 2
    ratio = lambda a, b: a / b if b else float("nan")  # noqa: E731
    return {"loss": ratio(c[0], c[1]), "accept_len": 1 + ratio(c[2], c[3]), "accept_len_whole": 1 + ratio(c[4], c[5]),
            "position_accuracy": [round(h / n, 4) if n else None for h, n in
                                  zip(c[COUNTERS: COUNTERS + B1], c[COUNTERS + B1:])],
            "blocks": int(c[3]), "bad_positions": int(c[6]), "bad_blocks": int(c[7])}


def step_flops(d, S, N, head_rows, pairs):
    """Useful floating-point operations of a micro-batch, forward and backward (the count that the benchmarks state).
    d: the drafter's config; pairs: query-key pairs that are visible, summed over its layers."""
    D, H, G, h = d["hidden_size"], d["num_attention_heads"], d["num_key_value_heads"], d["head_dim"]
    L, K, Q = d["num_hidden_layers"], len(d["dflash_config"]["target_layer_ids"]), N * d["block_size"]
    return (6 * Q * L * (2 * D * H * h + 2 * D * G * h + 3 * D * d["intermediate_size"]) + 12 * S * L * D * G * h
            + 4 * S * K * D * D + 4 * head_rows * d["vocab_size"] * D + 14 * pairs * H * h)


# ---------------------------------------------------------------------- speculative decoding and evaluation


def pick(logits, temperature, draw):
    """Logits [n, V] -> (tokens [n], probabilities [n, V] or None when greedy)."""
    if not temperature:
        return logits.argmax(-1), None
    p = torch.softmax(logits.float() / temperature, -1)
    return torch.multinomial(p, 1, generator=draw)[:, 0], p


def verify(draft, draft_p, logits, temperature, draw):
    """Lossless verification of one block. draft [B-1], its probabilities [B-1, V] (None: certain), the target's
    logits [B, V] after anchor, draft 1, ... -> (accepted count, next token).

    Greedy: the leading drafts that are the target's argmax. Sampling: draft i is kept with probability min(1, p/q), the
    first rejection is redrawn from max(p - q, 0), so that the output has the target's distribution (arXiv 2211.17192).
    """
    if not temperature:
        best = logits.argmax(-1)
        n = int((draft == best[:-1]).cumprod(0).sum())
        return n, int(best[n])
    p = torch.softmax(logits.float() / temperature, -1)
    for i, token in enumerate(draft.tolist()):
        q = F.one_hot(draft[i], p.shape[1]).float() if draft_p is None else draft_p[i]
        if torch.rand((), generator=draw, device=p.device) * q[token] >= p[i, token]:
            rest = (p[i] - q).clamp(min=0)
            return i, int(torch.multinomial(rest, 1, generator=draw))
    return len(draft), int(torch.multinomial(p[-1], 1, generator=draw))


class Reader:
    """The target with its key/value cache and, after each call, the features of the tokens just read."""

    def __init__(self, model, taps):
        self.model, self.taps, self.caught = model, taps, {}
        self.device = model.device
        known = inspect.signature(model.forward).parameters
        self.argument = "cache" if "cache" in known else "past_key_values"  # transformers 5.24 renames it
        for t in set(taps):
            decoder_layers(model)[t].register_forward_hook(
                lambda module, inputs, output, t=t: self.caught.__setitem__(
                    t, output[0] if isinstance(output, tuple) else output))

    def start(self):
        from transformers import DynamicCache
        self.cache, self.length = DynamicCache(), 0

    @torch.inference_mode()
    def read(self, tokens, last=0):
        """Append tokens (list) -> logits [n, V] of the last `last` (0: all); features in self.features [n, K*D]."""
        ids = torch.tensor([tokens], device=self.device)
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=last, **{self.argument: self.cache})
        self.length += len(tokens)
        if self.taps:
            self.features = torch.cat([self.caught[t][0] for t in self.taps], -1)
        return out.logits[0]

    def crop(self, length):
        if length < self.length:
            self.cache.crop(length - self.length)  # negative: that many from the end
            self.length = length


class Draft:
    """The drafter with its own cache of context keys and values. zero: with the features blanked (a control)."""

    def __init__(self, drafter, ends, mask_token_id, length, zero=False):
        self.drafter, self.ends, self.mask, self.zero = drafter, ends, mask_token_id, zero
        weight = drafter.fc.weight
        shape = (length, drafter.layers[0].self_attn.k_proj.out_features // drafter.h, drafter.h)
        self.pairs = [[torch.empty(shape, dtype=weight.dtype, device=weight.device) for _ in range(2)]
                      for _ in drafter.layers]
        self.length = 0

    @torch.inference_mode()
    def __call__(self, tokens, features, temperature, draw):
        """tokens: all so far, the anchor last; features: of the tokens read since the last call -> draft and its p."""
        d, B, n = self.drafter, self.drafter.block, len(features)
        at = torch.arange(self.length, self.length + n, device=features.device)
        features = features.to(d.fc.weight.dtype)
        for pair, new in zip(self.pairs, d.context(features * 0 if self.zero else features, at)):
            pair[0][self.length: self.length + n], pair[1][self.length: self.length + n] = new
        self.length += n
        S, device = self.length, features.device
        ids = torch.full((B,), self.mask, device=device)
        ids[0] = tokens[-1]
        x = F.embedding(ids, self.ends["embed"]).to(features.dtype) * self.ends["embed_scale"]
        one = torch.tensor([S], device=device)
        q, kv = torch.arange(B, device=device)[:, None], torch.arange(S + B, device=device)[None]
        attends = [dense_attend(visible(q, kv, one * 0, one, S, B, window, causal) if window or causal else None)
                   for window, causal in d.rules()]
        hidden = d(x, S + torch.arange(B, device=device), [(k[:S], v[:S]) for k, v in self.pairs], attends)
        logits = (hidden[1:] @ self.ends["head"].T.to(hidden.dtype)).float()
        if self.ends["softcap"]:
            logits = self.ends["softcap"] * torch.tanh(logits / self.ends["softcap"])
        return pick(logits, temperature, draw)


def prompt_lookup(B, back=3):
    """A drafter that copies what followed the last occurrence of the last `back` tokens; the yardstick to beat."""
    def draft(tokens, features, temperature, draw):
        key = tokens[-back:]
        for i in range(len(tokens) - back - 1, -1, -1):
            if tokens[i: i + back] == key:
                found = (tokens[i + back:] + [0] * B)[: B - 1]
                break
        else:
            found = [0] * (B - 1)
        return torch.tensor(found, device=features.device), None
    return draft


def decode(reader, prompt, new_tokens, end_ids, draft=None, temperature=0.0, draw=None, forced=None):
    """Decode up to new_tokens after prompt (list of ids), alone or with draft -> (tokens, accepted per round, logits).

    logits: one [V] row a token, those it was chosen by. forced: read these tokens instead of the chosen ones. An
    accepted length counts the drafts kept plus the target's own token, up to the end token and the limit.
    """
    reader.start()
    logits = reader.read(prompt, last=1)
    token = int(pick(logits, temperature, draw)[0]) if forced is None else forced[0]
    out, rounds, kept = [token], [], [logits[0]]
    features = reader.features if draft else None
    while out[-1] not in end_ids and len(out) < new_tokens:
        if draft is None:
            logits = reader.read([out[-1]], last=1)
            out.append(int(pick(logits, temperature, draw)[0]) if forced is None else forced[len(out)])
            kept.append(logits[0])
            continue
        block, p = draft(prompt + out, features, temperature, draw)
        logits = reader.read([out[-1]] + block.tolist())
        n, own = verify(block, p, logits, temperature, draw)
        features = reader.features[: n + 1]
        new = (block[:n].tolist() + [own])[: new_tokens - len(out)]
        ends = [i for i, t in enumerate(new) if t in end_ids]
        new = new[: ends[0] + 1] if ends else new
        out, kept = out + new, kept + list(logits[: len(new)])
        rounds.append(len(new))
        reader.crop(len(prompt) + len(out) - 1)  # all but the newest token, which the next round reads
    return out, rounds, kept


def lossless(reader, prompt, spec, spec_logits, plain, plain_logits):
    """Was every token the plain target's own choice? -> (tokens that differ, the largest logit gap among them, noise).

    The reference is one-token decoding of the very prefix that was decoded: the plain run where it is the same, a run
    forced along the same tokens otherwise. noise: the largest difference, over the tokens in question, between logits
    read in a block and logits read one by one.
    """
    if spec != plain[: len(spec)]:
        plain_logits = decode(reader, prompt, len(spec), (), forced=spec)[2]
    one, block = torch.stack(plain_logits[: len(spec)]).float(), torch.stack(spec_logits).float()
    top, chosen = one.max(-1).values, one.gather(1, torch.tensor(spec, device=one.device)[:, None])[:, 0]
    gaps = top - chosen
    return int((gaps > 0).sum()), float(gaps.max()), float((one - block).abs().max())


def read_drafter(folder):
    """An exported folder -> (config, state dict). Both styles of published config are understood. UserError."""
    from safetensors.torch import load_file

    try:
        config = json.loads((Path(folder) / "config.json").read_text())
        state = load_file(Path(folder) / "model.safetensors")
    except (OSError, ValueError) as e:
        raise UserError(f"{folder}: no drafter there ({e})") from e
    inner = config.setdefault("dflash_config", {})
    for key in ("block_size", "mask_token_id", "target_layer_ids"):
        a, b = config.get(key), inner.get(key)
        if a is None and b is None:
            raise UserError(f"{folder}/config.json names no {key}")
        if a is not None and b is not None and a != b:
            raise UserError(f"{folder}/config.json names two values of {key}, {a} and {b}")
        inner[key] = a if b is None else b
    config["block_size"] = inner["block_size"]
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    if theta is None:
        raise UserError(f"{folder}/config.json names no rope_theta")
    config["rope_theta"] = float(theta)
    config.setdefault("layer_types", ["full_attention"] * config["num_hidden_layers"])
    return config, state


def strict_load(drafter, state, where):
    want = {k: tuple(v.shape) for k, v in drafter.state_dict().items()}
    have = {k: tuple(v.shape) for k, v in state.items()}
    wrong = [f"{k} {have.get(k, 'missing')} (expected {want.get(k, 'nothing')})"
             for k in sorted(want.keys() | have.keys()) if want.get(k) != have.get(k)]
    if wrong:
        raise UserError(f"{where}: {len(wrong)} tensors do not fit: " + "; ".join(wrong[:8]))
    drafter.load_state_dict(state)


def read_prompts(path, tokenizer, limit):
    """JSONL of {"prompt": text} or {"messages": [...]} (a last assistant turn is left out) -> lists of ids."""
    prompts = []
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--prompts {path}: cannot be read ({e})") from e
    for number, line in enumerate(lines, 1):
        if not line.strip() or len(prompts) == limit:
            continue
        try:
            row = json.loads(line)
            turns = ([{"role": "user", "content": row["prompt"]}] if "prompt" in row else
                     clean_messages(row.get("messages")))
        except (ValueError, TypeError, AttributeError) as e:
            raise UserError(f"--prompts {path}, line {number}: neither a prompt nor messages ({e})") from e
        turns = turns[:-1] if turns[-1]["role"] == "assistant" else turns
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not prompts:
        raise UserError(f"--prompts {path}: no prompt in it")
    return prompts


def held_out_prompts(documents, limit):
    """The held-out chats up to their first reply -> lists of ids."""
    order = documents.held_out[0]
    chosen = rng(0, len(order)).permutation(order)[:limit]
    rows = documents.rows.with_format("numpy")[chosen.tolist()] if len(chosen) else {"input_ids": [], "loss_mask": []}
    return [i[: int(m.argmax())].tolist() for i, m in zip(rows["input_ids"], rows["loss_mask"]) if m.argmax()]


def compare_decoding(model, taps, drafts, prompts, cfg, end_ids, tell=say):
    """Decode every prompt plainly and with each of `drafts` (name -> function of the length that makes a draft).

    Returns {name: results}; results hold per prompt (tokens, rounds, seconds), the tokens that differ from the plain
    target's choice, the gap and the noise. "plain" stands first. All in this process, batch 1.
    """
    device = model.device
    results = {name: {"runs": [], "differ": 0, "gap": 0.0, "noise": 0.0} for name in ("plain", *drafts)}
    reader_plain, reader = Reader(model, ()), Reader(model, taps)
    for name, make in drafts.items():  # first calls load kernels; they are nobody's time
        decode(reader, prompts[0], 2 * cfg.block, (), make(len(prompts[0]) + 4 * cfg.block), cfg.temperature,
               torch.Generator(device=device).manual_seed(0))
    for i, prompt in enumerate(prompts):
        for turn, name in enumerate(("plain", *drafts)):
            draw = torch.Generator(device=device).manual_seed(cfg.seed + i)
            draft = drafts[name](len(prompt) + cfg.new_tokens + cfg.block + 1) if turn else None
            if device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            out, rounds, logits = decode(reader if turn else reader_plain, prompt, cfg.new_tokens, end_ids, draft,
                                         cfg.temperature, draw)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
            if not turn:
                plain, plain_logits = out, logits
            elif not cfg.temperature:
                r = results[name]
                differ, gap, noise = lossless(reader_plain, prompt, out, logits, plain, plain_logits)
                r["differ"], r["gap"], r["noise"] = r["differ"] + differ, max(r["gap"], gap), max(r["noise"], noise)
            results[name]["runs"].append((out, rounds, seconds))
    return results


def mean_accepted(runs):
    """Tokens after the first, over rounds: what real decoding accepts a round, the target's own token included."""
    rounds = [n for _, r, _ in runs for n in r]
    return sum(rounds) / len(rounds) if rounds else float("nan")


def decoding_table(results, block, end_ids):
    """The results of compare_decoding as text, and as one dict for metrics.jsonl."""
    lines, values = [], {}
    plain_rate = sum(len(o) for o, _, _ in results["plain"]["runs"]) / sum(s for *_, s in results["plain"]["runs"])
    lines.append(f"{'':16}{'accepted':>9}{'finished':>9}{'unfinished':>11}{'tokens/s':>10}{'speed-up':>9}{'differ':>8}")
    lines.append(f"{'plain target':16}{1.0:9.2f}{'':9}{'':11}{plain_rate:10.1f}{1.0:9.2f}")
    for name, r in list(results.items())[1:]:
        runs = r["runs"]
        rate = sum(len(o) for o, _, _ in runs) / sum(s for *_, s in runs)
        done = [x for x in runs if x[0][-1] in end_ids]
        rest = [x for x in runs if x[0][-1] not in end_ids]
        values[name] = {"accepted": mean_accepted(runs), "finished": mean_accepted(done), "unfinished": mean_accepted(rest),
                        "tokens_per_s": rate, "speedup": rate / plain_rate, "differ": r["differ"], "gap": r["gap"],
                        "noise": r["noise"], "replies": len(runs), "replies_finished": len(done)}
        v = values[name]
        lines.append(f"{name:16}{v['accepted']:9.2f}{v['finished']:9.2f}{v['unfinished']:11.2f}{rate:10.1f}"
                     f"{v['speedup']:9.2f}{r['differ']:8}")
    name = list(results)[1]
    rounds = Counter(n for _, r, _ in results[name]["runs"] for n in r)
    total = max(sum(rounds.values()), 1)
    lines.append(f"accepted per round, {name}: " + " ".join(f"{n}:{rounds[n] / total:.0%}" for n in range(1, block + 1)))
    return lines, {**values, "histogram": [rounds[n] for n in range(1, block + 1)], "plain_tokens_per_s": plain_rate}


def judge_lossless(results, exact):
    """One line on whether drafting changed the output, and whether that is within what was allowed."""
    worst = max(results.values(), key=lambda r: r["gap"])
    differ, tokens = sum(r["differ"] for r in results.values()), sum(len(o) for r in results.values()
                                                                     for o, *_ in r["runs"])
    noise = max(r["noise"] for r in results.values())
    ok = differ == 0 if exact else worst["gap"] <= 2 * noise
    rule = ("none is allowed in float32" if exact else
            f"allowed up to a logit gap of {2 * noise:.3f}, twice the noise between block and single decoding here; "
            f"largest gap {worst['gap']:.3f}")
    return ok, (f"{'lossless' if ok else 'NOT LOSSLESS'}: {differ} of {tokens} tokens differ from the plain target's "
                f"one-token choice ({rule})")


# ------------------------------------------------------------------------------ checkpoint, resume, export


def export(folder, config, state):
    """Write what a serving engine loads: config.json and the bf16 cast of the state dict, published names."""
    from safetensors.torch import save_file

    tensors = {k: v.to(torch.bfloat16).contiguous() for k, v in state.items()}
    save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    (Path(folder) / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def checksum(path):
    crc = 0
    with open(path, "rb") as f:
        while chunk := f.read(1 << 24):
            crc = zlib.crc32(chunk, crc)
    return crc


def write_checkpoint(out, step, config, masters, trainer, keep):
    """checkpoints/step-N as a whole or not at all: write beside, fsync, rename, move `latest`, drop the oldest.

    masters: fp32 state dict on the CPU; trainer: everything else that resuming needs. OSError when the disk refuses.
    """
    root = Path(out) / "checkpoints"
    root.mkdir(exist_ok=True)
    for stale in root.glob(".step-*"):  # our own unfinished writes: the lock is ours, nobody else is writing
        shutil.rmtree(stale)
    beside, final = root / f".step-{step:08d}", root / f"step-{step:08d}"
    beside.mkdir()
    export(beside, config, masters)
    torch.save({"masters": masters, **trainer}, beside / "trainer.pt")
    files = {f.name: [f.stat().st_size, checksum(f)] for f in sorted(beside.iterdir())}
    (beside / "manifest.json").write_text(json.dumps({"step": step, "files": files}))
    for f in beside.iterdir():
        fsync_folder(f)
    fsync_folder(beside)
    if final.exists():  # only a broken one can stand here: a run goes on from the newest good one
        final.rename(root / f"broken-{step:08d}-{time.time_ns()}")
    beside.rename(final)
    fsync_folder(root)
    atomic_write(root / "latest", final.name + "\n")
    for old in sorted(root.glob("step-*"))[:-keep]:
        shutil.rmtree(old)


def find_checkpoint(out, tell=say):
    """The newest complete checkpoint, or None; broken ones are named and left where they are."""
    for folder in sorted((Path(out) / "checkpoints").glob("step-*"), reverse=True):
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
            for name, (size, crc) in manifest["files"].items():
                if (folder / name).stat().st_size != size:
                    raise ValueError(f"{name} has {(folder / name).stat().st_size} bytes, not {size}")
                if checksum(folder / name) != crc:
                    raise ValueError(f"{name} is not what was written")
            return folder
        except (OSError, ValueError, KeyError) as e:
            tell(f"checkpoint {folder} is broken and skipped: {e}")
    return None


def identity(cfg, config, fingerprint):
    """What a checkpoint and the run that goes on from it must share, as {name: value}."""
    values = {k: getattr(cfg, k) for k in IDENTITY if k not in ("data", "target_layer_ids", "mask_token_id", "gamma",
                                                                "heads", "kv_heads", "head_dim", "ffn")}
    return {**values, "target_layer_ids": config["dflash_config"]["target_layer_ids"],
            "mask_token_id": config["dflash_config"]["mask_token_id"], "gamma": cfg.gamma or default_gamma(cfg.block),
            "heads": config["num_attention_heads"], "kv_heads": config["num_key_value_heads"],
            "head_dim": config["head_dim"], "ffn": config["intermediate_size"], "data": fingerprint}


def check_identity(saved, now, where):
    for k in now:
        if saved.get(k) != now[k]:
            raise UserError(f"{where} was trained with {k.replace('_', '-')} {saved.get(k)}, now it is {now[k]}: give the "
                            "same value, or another --out")


def versions():
    import datasets
    import transformers

    try:
        import triton
        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    commit = subprocess.run(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True)
    return {"torch": str(torch.__version__), "transformers": transformers.__version__, "datasets": datasets.__version__,
            "triton": triton_version, "python": sys.version.split()[0], "commit": commit.stdout.strip() or None}


# =========================================================================================================
# Above this line: pure functions and modules, importable, testable on a CPU. Below it: processes, files, signals,
# clocks. Read it as a script.
# =========================================================================================================

# ----------------------------------------------------------------------------------------------- the wire


@dataclasses.dataclass
class Seat:
    """Who a process is. role: target, drafter or both (colocated); index within the role; T and D of the run."""
    role: str
    index: int
    T: int
    D: int
    gpu: int
    device: str

    @property
    def name(self):
        where = f"GPU {self.gpu}" if self.device == "cuda" else "CPU process"
        return f"{'target + drafter' if self.role == 'both' else self.role} {self.index} ({where})"

    @property
    def world(self):
        return self.D if self.role == "both" else self.T + self.D

    @property
    def rank(self):
        return self.index if self.role != "drafter" else self.T + self.index


def connect(seat, meeting, timeout):
    """Join the run's process group and make every group, all processes in one order. Returns
    (drafters' gloo group, drafters' gradient group, {(t, d): (header group, feature group)})."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: nothing listens beyond it
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    wait = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=seat.rank, world_size=seat.world, timeout=wait)
    fast = "nccl" if seat.device == "cuda" else "gloo"
    first = 0 if seat.role == "both" else seat.T
    drafters = list(range(first, first + seat.D))
    control, gradients = dist.new_group(drafters, wait, "gloo"), dist.new_group(drafters, wait, fast)
    pairs = {}
    if seat.role != "both":
        for t, d in sorted({(m % seat.T, m % seat.D) for m in range(math.lcm(seat.T, seat.D))}):
            members = [t, seat.T + d]
            pairs[t, d] = (dist.new_group(members, wait, "gloo"), dist.new_group(members, wait, fast))
    probe = torch.zeros(1, device=seat.device)
    if seat.role != "target":
        dist.all_reduce(probe, group=gradients)
    for (t, d), (header, features) in pairs.items():  # the first message makes a communicator: now, not in mid-run
        if seat.rank == t:
            dist.send(probe, seat.T + d, features)
        elif seat.rank == seat.T + d:
            dist.recv(probe, t, features)
    if seat.device == "cuda":
        torch.cuda.synchronize()
    return control, gradients, pairs


def header_of(batch, features):
    """What a hand-over must agree on before a byte of it moves: int64 [6]."""
    return torch.tensor([batch["m"], batch["held_out"], len(batch["lengths"]), batch["tokens_used"],
                         zlib.crc32(batch["ids"].tobytes()), features.numel() * features.element_size()])


def check_header(mine, theirs):
    if not torch.equal(mine, theirs):
        raise RuntimeError("the wire: target and drafter disagree on (m, held out, rows, tokens, checksum, bytes): "
                           f"{theirs.tolist()} came, {mine.tolist()} expected")


# ------------------------------------------------------------------------------------------ target worker


def compute_dtype(device):
    return torch.bfloat16 if device == "cuda" else torch.float32


def feature_buffer(job, device):
    K, D = len(job.config["dflash_config"]["target_layer_ids"]), job.config["hidden_size"]
    return torch.zeros(job.cfg.tokens, K * D, dtype=compute_dtype(device), device=device)


def target_worker(seat, job, stop):
    """Run the target over the micro-batches m = index mod T and hand the features to drafter m mod D."""
    cfg, taps, device = job.cfg, job.config["dflash_config"]["target_layer_ids"], seat.device
    _, _, pairs = connect(seat, job.meeting, cfg.stall_timeout)
    base = load_target(cfg.target, compute_dtype(device), max(taps) + 1).base_model.to(device)  # the head goes
    layers = decoder_layers(base)
    buffers, sent = [feature_buffer(job, device) for _ in range(2)], [None, None]
    wire = torch.cuda.Stream() if device == "cuda" else None
    dist.barrier()  # everyone is loaded and compiled
    turn = 0
    for kind, i in schedule(job.step, job.m, job.total, seat.D * cfg.accumulation, cfg.eval_every, job.n_eval):
        if i % seat.T != seat.index:
            continue
        batch = micro_batch(job.documents, cfg, i, kind == "eval")
        if not batch["blocks"]:
            continue
        features, peer = buffers[turn], seat.T + i % seat.D
        if sent[turn] is not None:
            sent[turn].synchronize() if wire else sent[turn].wait()
        capture(base, layers, taps, batch, features)
        header, group = pairs[seat.index, i % seat.D]
        if wire:
            torch.cuda.current_stream().synchronize()  # the header says "ready", so that no receive ever spins
        dist.send(header_of(batch, features), peer, header)
        with torch.cuda.stream(wire):  # a None stream is no stream: on a CPU this does nothing
            work = dist.isend(features, peer, group)
            if wire:
                work.wait()
                work = torch.cuda.Event()
                work.record(wire)
        sent[turn], turn = work, 1 - turn
    for work in sent:
        if work is not None:
            work.synchronize() if wire else work.wait()
    return {}


# ----------------------------------------------------------------------------------------- drafter worker


@dataclasses.dataclass
class Job:
    """All that main has resolved and every worker needs."""
    cfg: Config
    config: dict  # the drafter's config.json
    documents: Documents
    mask_token_id: int
    out: str
    meeting: str  # rendezvous file
    checkpoint: str  # folder to resume from, or ""
    identity: dict
    step: int  # where this attempt begins
    m: int
    total: int  # micro-batches of the whole run
    n_eval: int


def to_device(batch, device):
    """The arrays that the graph reads, as tensors on the device."""
    out = {}
    for k, kind in (("positions", np.int32), ("start", np.int32), ("anchor", np.int32), ("tokens", np.int64),
                    ("valid", np.bool_)):
        x = torch.from_numpy(np.ascontiguousarray(batch[k], dtype=kind))
        out[k] = x.pin_memory().to(device, non_blocking=True) if device == "cuda" else x
    return out


class Tracker:
    """Weights & Biases, which may fail as it likes: the first failure is said, then it is left alone."""

    def __init__(self, cfg, job):
        self.run = None
        if not cfg.wandb:
            return
        try:
            import wandb
            file = Path(job.out) / "wandb_id"
            if not file.exists():
                atomic_write(file, wandb.util.generate_id())
            mode = "online" if os.environ.get("WANDB_API_KEY") or wandb.api.api_key else "offline"
            self.run = wandb.init(project=cfg.wandb, id=file.read_text().strip(), resume="allow", dir=job.out,
                                  mode=os.environ.get("WANDB_MODE", mode), config=dataclasses.asdict(cfg))
        except Exception as e:  # whatever the tracker does, training goes on; it is said here
            say(f"wandb is off: {type(e).__name__}: {e}")

    def log(self, kind, values):
        if self.run is None:
            return
        try:
            flat = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, (int, float))}
            for k, v in enumerate(values.get("position_accuracy") or (), 1):
                flat[f"{kind}/accuracy_{k}"] = v
            self.run.log({**flat, "train_step": values["step"]})
        except Exception as e:  # as above
            say(f"wandb is off from here: {type(e).__name__}: {e}")
            self.run = None

    def close(self):
        if self.run is not None:
            self.run.finish(quiet=True)


PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "B200": 2250, "B300": 2250, "L40S": 362}  # bf16, vendors' sheets


def drafter_worker(seat, job, stop):
    """The training loop, open. Every drafter walks the same steps; drafter 0 also tells, saves and exports."""
    cfg, config, device = job.cfg, job.config, seat.device
    lead, both, D, A = seat.index == 0, seat.role == "both", seat.D, cfg.accumulation
    taps, n_eval = config["dflash_config"]["target_layer_ids"], job.n_eval
    out, dtype, cuda = Path(job.out), compute_dtype(device), device == "cuda"

    def beat(phase):
        if lead:
            heartbeat(out, phase, step, m)

    # --- who is here, what is frozen, what learns
    step, m, total = job.step, job.m, job.total
    beat("loading")
    control, gradients, pairs = connect(seat, job.meeting, cfg.stall_timeout)
    model = load_target(cfg.target, dtype, max(taps) + 1 if both else 0).to(device)
    ends = frozen_ends(model)
    base = model.base_model if both else None
    target_layers = decoder_layers(base) if both else None
    del model

    drafter = Drafter(config)
    drafter.initialise(cfg.seed)
    saved = torch.load(Path(job.checkpoint) / "trainer.pt", mmap=True) if job.checkpoint else None
    if saved:
        drafter.load_state_dict(saved["masters"])
    drafter.to(device)
    parameters = list(drafter.parameters())
    size = sum(p.numel() for p in parameters)
    # One flat buffer holds every gradient and, behind them, the counters with the loss divisor: one reduction a step.
    flat = torch.zeros(size + COUNTERS + 2 * (cfg.block - 1), device=device)
    counters = flat[size:]
    for p, view in zip(parameters, flat[:size].split([p.numel() for p in parameters])):
        p.grad = view.view_as(p)
    optimizer = torch.optim.AdamW(parameters, lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
    del saved

    # --- one graph, compiled once: drafter 0 first, the others find its cache
    step_fn = torch.compile(drafter_step, fullgraph=True, dynamic=False) if cuda else drafter_step
    features = feature_buffer(job, device)

    def run_graph(batch):
        x = batch["tensors"]
        return step_fn(drafter, ends, features, x["positions"], x["start"], x["anchor"], x["tokens"], x["valid"],
                       job.mask_token_id, cfg.loss, cfg.gamma or default_gamma(cfg.block))

    beat("compiling")
    compile_begin = time.perf_counter()
    for turn in (True, False):
        if lead == turn:
            ids = np.zeros(cfg.tokens, np.int64)
            whole = np.zeros(cfg.tokens, np.int64), np.full(cfg.tokens, cfg.tokens)
            rows, gradient, _ = run_graph({"tensors": to_device({
                "positions": ids, **blocks_of(ids, ids == 0, *whole, cfg.anchors, cfg.block, rng(0))}, device)})
            rows.backward(gradient)
            del rows, gradient
            flat.zero_()
            if cuda:
                torch.cuda.synchronize()
        dist.barrier(control)
    if both:
        warm = micro_batch(job.documents, cfg, m)
        capture(base, target_layers, taps, warm, features)
    if cuda:
        torch.compiler.set_stance("fail_on_recompile")  # from here on a compilation is an error
    if lead:
        say(f"compiled and warm after {time.perf_counter() - compile_begin:.1f} s" if cuda else "ready (no graph on a CPU)")

    # --- the hand-over: the next micro-batch is fetched when this one's work is launched
    wire = torch.cuda.Stream() if cuda else None
    mine = ((kind, i) for kind, i in schedule(step, m, total, D * A, cfg.eval_every, n_eval) if i % D == seat.index)
    times = {"data": 0.0, "host_wait": 0.0}
    waits = []  # pairs of CUDA events around the GPU's wait for features

    def fetch():
        kind, i = next(mine, (None, None))
        if kind is None:
            return None
        begin = time.perf_counter()
        batch = micro_batch(job.documents, cfg, i, kind == "eval")
        batch["tensors"] = to_device(batch, device)
        times["data"] += time.perf_counter() - begin
        if not batch["blocks"]:
            return batch
        if both:
            capture(base, target_layers, taps, batch, features)
            return batch
        t = i % seat.T
        header, group = pairs[t, seat.index]
        mine_says, says = header_of(batch, features), torch.zeros(6, dtype=torch.int64)
        begin = time.perf_counter()
        dist.recv(says, t, header)
        check_header(mine_says, says)
        if cuda:
            wire.wait_stream(torch.cuda.current_stream())  # the buffer is free once the last graph is through
            with torch.cuda.stream(wire):
                dist.irecv(features, t, group).wait()
        else:
            dist.recv(features, t, group)
        times["host_wait"] += time.perf_counter() - begin
        return batch

    def arrive():
        if cuda and not both:
            around = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            around[0].record()
            torch.cuda.current_stream().wait_stream(wire)
            around[1].record()
            waits.append(around)

    # --- what is told and kept
    tracker = Tracker(cfg, job) if lead else None
    log_path = {"out": out}

    def tell(kind, **values):
        write_metric(log_path["out"], kind, step=step, micro_batches=m, **values)
        tracker.log(kind, {"step": step, **values})

    steps_total = step + -(-(total - m) // (D * A))
    width = len(str(steps_total))
    d_flops = step_flops(config, cfg.tokens, cfg.anchors, cfg.anchors * (cfg.block - 1), 0)
    peak = next((v for k, v in PEAK_TFLOPS.items() if cuda and k in torch.cuda.get_device_name()), None)
    writer = {"thread": None, "error": None}

    def finish_save():
        if writer["thread"]:
            writer["thread"].join()
            if writer["error"]:
                say(f"saving failed, training goes on, the next save tries again: {writer['error']}")
            writer["thread"] = None
        return writer["error"] is None

    def save(final):
        """Copy to the host now, write behind: the GPU goes on while the disk writes."""
        beat("saving")
        mark = torch.stack([p.detach().view(torch.int32).sum(dtype=torch.int64) for p in parameters]).sum().cpu()
        marks = [torch.zeros_like(mark) for _ in range(D)]
        dist.all_gather(marks, mark, group=control)
        if any(not torch.equal(x, mark) for x in marks):
            raise RuntimeError(f"the drafters' weights differ at step {step}: checksums {[int(x) for x in marks]}")
        if not lead:
            return True
        finish_save()
        writer["error"] = None

        def on_host(x):
            return x.detach().to("cpu", copy=True) if isinstance(x, torch.Tensor) else x

        masters = {k: on_host(v) for k, v in drafter.state_dict().items()}
        moments = optimizer.state_dict()
        moments["state"] = {i: {k: on_host(v) for k, v in s.items()} for i, s in moments["state"].items()}
        trainer = {"optimizer": moments, "step": step, "micro_batches": m, "total": total, "identity": job.identity,
                   "accumulation": A, "drafters": D, "versions": versions()}
        at = step

        def write():
            try:
                write_checkpoint(out, at, config, masters, trainer, cfg.keep)
            except OSError as e:
                writer["error"] = f"step {at}: {e}"

        writer["thread"] = threading.Thread(target=write)
        writer["thread"].start()
        tell("save", checkpoint=f"step-{step:08d}", final=final)
        return finish_save() if final else True

    dist.barrier()  # targets may send from here on
    begin_run = mark_time = time.perf_counter()
    paused = 0.0
    summed = torch.zeros_like(counters)  # counters since the last log line, all drafters
    health = torch.zeros(3, device=device)  # steps skipped since the last log line, skipped in a row, last gradient norm
    context_tokens, at_log = 0, step
    stop_flag, stop_work, stopping = torch.zeros(1, dtype=torch.int32), None, False
    bar = None
    if lead and sys.stderr.isatty():
        from tqdm import tqdm
        bar = tqdm(total=steps_total, initial=step, desc="training", unit="step", file=sys.stderr)
    batch = fetch()
    last_eval = {}
    # ------------------------------------------------------------------------------- the training loop
    while m < total and not stopping:
        beat("training")
        rate = learning_rate(cfg, m, total)
        flat.zero_()
        for i in range(m, min(m + D * A, total)):
            if i % D != seat.index:
                continue
            assert batch["m"] == i and not batch["held_out"], f"drafter {seat.index} holds {batch['m']}, not {i}"
            if batch["blocks"]:
                arrive()
                rows, gradient, found = run_graph(batch)
                rows.backward(gradient)  # adds to the views of `flat`
                counters += found
                del rows, gradient
                context_tokens += batch["tokens_used"]
            batch = fetch()
        dist.all_reduce(flat, group=gradients)
        # Sums over everyone; divided once, then clipped, both inside the optimizer's own kernel, as is the skip.
        divisor = counters[1]
        norm = torch.linalg.vector_norm(flat[:size]) / divisor
        ok = torch.isfinite(norm) & (divisor > 0)
        optimizer.grad_scale = torch.where(ok, divisor * (norm / cfg.clip).clamp(min=1), 1.0)
        optimizer.found_inf = (~ok).float()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        step, m = step + 1, min(m + D * A, total)
        summed += torch.where(torch.isfinite(counters), counters, 0)
        skipped = (~ok & (divisor != 0)).float()
        health = torch.stack([health[0] + skipped, (health[1] + skipped) * skipped, norm])

        # --- do all agree to stop? one integer, read one step late, so that nobody waits for it
        if stop_work is not None:
            stop_work.wait()
            stopping = bool(stop_flag.item())
        stop_flag = torch.tensor([stop.value], dtype=torch.int32)
        stop_work = dist.all_reduce(stop_flag, dist.ReduceOp.MAX, group=control, async_op=True)

        if step % cfg.log_every == 0 or m >= total or stopping or step == job.step + 1:
            c, (skips, in_a_row, norm_now) = summed.tolist(), health.tolist()  # the host waits for the GPU here only
            if lead:
                now = time.perf_counter()
                steps = step - at_log
                seconds = max(now - mark_time - paused, 1e-9)
                values = read_counters(c)
                gpu_wait = sum(a.elapsed_time(b) for a, b in waits) if cuda else times["host_wait"] * 1e3
                per = seconds / steps
                memory = gib(torch.cuda.max_memory_reserved()) if cuda else gib(__import__("resource").getrusage(0).ru_maxrss * 1024)
                everyone = context_tokens * D / seconds
                values.update(lr=rate, grad_norm=norm_now, tokens_per_s=everyone, rows_per_s=values["blocks"] * cfg.block / seconds,
                              mfu=d_flops * A * steps / seconds / peak / 1e12 if peak else None, ms=per * 1e3,
                              wait_ms=gpu_wait / steps, data_ms=times["data"] * 1e3 / steps, mem_gib=memory,
                              eta_s=per * (steps_total - step), skipped_steps=int(skips), restarts_in_a_row=int(in_a_row))
                tell("train", **values)
                line = (f"step {step:{width}}/{steps_total}  loss {values['loss']:.4f}  accept {values['accept_len']:.3f}  "
                        f"lr {rate:.2e}  norm {norm_now:.2f}  {everyone:,.0f} tok/s  {per * 1e3:.0f} ms "
                        f"(wait {gpu_wait / steps:.0f})  {memory:.1f} GiB  eta {span(values['eta_s'])}")
                if skips or values["bad_positions"]:
                    line += f"  SKIPPED {int(skips)} steps, {values['bad_positions']} features not finite"
                bar.write(line, file=sys.stdout) if bar else say(line)
            if in_a_row >= 10:
                raise Diverged(f"10 optimizer steps in a row were not finite, the last at step {step}: lower --lr, or "
                               "look at the data of these micro-batches")
            if c[6] > 0.01 * context_tokens and c[6] > 0:
                raise Diverged(f"{int(c[6])} of {context_tokens} features since the last line are not finite: the target "
                               "overflows in this dtype, or its checkpoint is damaged")
            summed.zero_()
            health[0] = 0
            waits.clear()
            times.update(data=0.0, host_wait=0.0)
            mark_time, paused, context_tokens, at_log = time.perf_counter(), 0.0, 0, step
        if bar:
            bar.update(1)

        # --- once in a while: evaluate (the same graph, no backward), save
        pause_begin = time.perf_counter()
        if step % cfg.eval_every == 0 or m >= total:
            beat("evaluating")
            found_all = torch.zeros_like(counters)
            for j in range(seat.index, n_eval, D):
                assert batch["m"] == j and batch["held_out"]
                if batch["blocks"]:
                    arrive()
                    found_all += run_graph(batch)[2]
                batch = fetch()
            dist.all_reduce(found_all, group=gradients)
            if lead and n_eval:
                last_eval = read_counters(found_all.tolist())
                tell("eval", **last_eval)
                accuracy = " ".join(f"{a:.2f}" if a is not None else "-" for a in last_eval["position_accuracy"])
                text = (f"eval at {step}: loss {last_eval['loss']:.4f}  accept {last_eval['accept_len']:.3f} "
                        f"(whole blocks {last_eval['accept_len_whole']:.3f})  by slot {accuracy}")
                bar.write(text, file=sys.stdout) if bar else say(text)
        saved_well = True
        if step % cfg.save_every == 0 or m >= total or stopping:
            saved_well = save(final=m >= total or stopping)
        paused += time.perf_counter() - pause_begin
    # -------------------------------------------------------------------------- end of the training loop
    if bar:
        bar.close()
    if stop_work is not None:
        stop_work.wait()  # a peer may still be in it
    if lead:
        tell("end", status="stopped" if m < total else "finished", seconds=time.perf_counter() - begin_run,
             **{f"eval_{k}": v for k, v in last_eval.items()})
        tracker.close()
        if not saved_well:
            raise OSError(f"the last checkpoint could not be written: {writer['error']}")
        if m >= total:
            made = out / f".export.{os.getpid()}"
            made.mkdir()
            export(made, config, drafter.state_dict())
            if (out / "export").exists():
                shutil.rmtree(out / "export")
            made.rename(out / "export")
        beat("saving")
    dist.barrier(control)
    return {"stopped": m < total, "step": step}


# ------------------------------------------------------------------------------------- decoding worker


def decoding_worker(seat, cfg, folder, documents, end_line, stop):
    """--evaluate: decode with the drafter in `folder` and without, and say what came of it. Returns the numbers."""
    config, state = read_drafter(folder)
    device, dtype = seat.device, compute_dtype(seat.device)
    tokenizer = load_tokenizer(cfg.target)
    taps, mask = config["dflash_config"]["target_layer_ids"], config["dflash_config"]["mask_token_id"]
    text, _ = load_config(cfg.target)
    recurrent = [k for k in getattr(text, "layer_types", None) or () if "attention" not in k or k == "linear_attention"]
    if recurrent:
        raise UserError(f"--evaluate: {cfg.target} has {recurrent[0]} layers, whose state cannot be rolled back after a "
                        "rejected draft")
    if text.hidden_size != config["hidden_size"] or text.num_hidden_layers <= max(taps):
        raise UserError(f"{folder} is no drafter for {cfg.target}: width {config['hidden_size']} and taps {taps}, the target "
                        f"has width {text.hidden_size} and {text.num_hidden_layers} layers")
    cfg = dataclasses.replace(cfg, block=config["block_size"])
    prompts = (read_prompts(cfg.prompts, tokenizer, cfg.num_prompts) if cfg.prompts else
               held_out_prompts(documents, cfg.num_prompts))
    if not prompts:
        raise UserError("no held-out chats to decode: give --prompts")
    model = load_target(cfg.target, dtype).to(device)
    end_ids = model.generation_config.eos_token_id
    end_ids = set(end_ids if isinstance(end_ids, list) else [end_ids]) | {tokenizer.eos_token_id}
    ends = frozen_ends(model)

    def drafter_of(state, zero=False):
        drafter = Drafter(config)
        drafter.initialise(cfg.seed + 1)
        if state is not None:
            strict_load(drafter, state, folder)
        drafter.to(device, dtype).eval()
        return lambda length: Draft(drafter, ends, mask, length, zero)

    drafts = {"drafter": drafter_of(state), "prompt lookup": lambda length: prompt_lookup(cfg.block)}
    if end_line:  # the demo shows its controls
        drafts["features zeroed"], drafts["untrained"] = drafter_of(state, zero=True), drafter_of(None)
    say(f"decoding {len(prompts)} prompts, up to {cfg.new_tokens} tokens each, "
        + (f"temperature {cfg.temperature}" if cfg.temperature else "greedy") + f", batch 1, {str(dtype)[6:]}, {seat.name}")
    results = compare_decoding(model, taps, drafts, prompts, cfg, end_ids)
    lines, values = decoding_table(results, cfg.block, end_ids)
    if cfg.temperature:
        ok, verdict = True, "lossless by construction at this temperature (speculative sampling)"
    else:
        ok, verdict = judge_lossless(results, dtype == torch.float32)
    say("\n".join([*lines, verdict]))
    if not ok:
        raise RuntimeError(verdict)
    return {"values": {**values, "verdict": verdict, "prompts": len(prompts)}}


# --------------------------------------------------------------------------------------------- the demo

#DEMO#

# ------------------------------------------------------------------------------------- main and topology


def worker(work, seat, args, stop, link):
    """The first lines of every child. It leaves by a message on `link`: ("done", dict) or ("failed", code, text)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only main acts on signals
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no parent, no child
    if os.getppid() == 1:
        os._exit(FAILED)  # the parent died before the line above
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    from tqdm import tqdm
    tqdm.set_lock(threading.RLock())  # its default is a semaphore that a killed process would leave behind
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // seat.world))
    try:
        link.send(("done", work(seat, *args, stop)))
    except UserError as e:
        link.send(("failed", USAGE, str(e)))
    except Diverged as e:
        link.send(("failed", DIVERGED, str(e)))
    except BaseException as e:  # the report comes first; what follows ends the process all the same
        text = str(e).strip().split("\n")
        link.send(("failed", FAILED, f"{type(e).__name__}: {text[0]}"))
        traceback.print_exc()
    link.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no interpreter shutdown: communicators with dead peers would wait in their destructors


def visible_gpu(index):
    """The child's CUDA_VISIBLE_DEVICES for GPU `index`, an index into ours where that is set."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ours.split(",")[index].strip() if ours else str(index)


def run_workers(works, stop):
    """Spawn [(function, seat, args)], wait, and end all of them. Returns (exit code, reason, [payload of each])."""
    context = torch.multiprocessing.get_context("spawn")
    children, payloads = [], [None] * len(works)
    environment = dict(os.environ)
    for work, seat, args in works:
        ours, theirs = context.Pipe(duplex=False)
        if seat.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpu(seat.gpu)
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, len(os.sched_getaffinity(0)) // len(works))))
        child = context.Process(target=worker, args=(work, seat, args, stop, theirs), name=seat.name)
        child.start()
        theirs.close()
        children.append((child, ours, seat))
    os.environ.clear()
    os.environ.update(environment)
    needed = {i for i, (_, _, seat) in enumerate(children) if seat.role != "target"}
    code, reason, open_links = DONE, "", dict(enumerate(children))
    try:
        while code == DONE and any(payloads[i] is None for i in needed):
            if stop.value >= 2:
                return 128 + stop.value, "stopped at once on a second signal", payloads
            ready = wait_for_any([x for c, link, _ in open_links.values() for x in (link, c.sentinel)], timeout=1)
            for i, (child, link, seat) in list(open_links.items()):
                if link not in ready and child.sentinel not in ready:
                    continue
                try:
                    message = link.recv() if link.poll() else None
                except EOFError:
                    message = None
                if message is None and child.sentinel not in ready:
                    continue
                del open_links[i]
                if message and message[0] == "done":
                    payloads[i] = message[1]
                    continue
                if message:
                    code, reason = message[1], f"{seat.name} failed: {message[2]}" if message[1] == FAILED else message[2]
                else:
                    child.join()
                    died = signal.Signals(-child.exitcode).name if child.exitcode < 0 else f"exit code {child.exitcode}"
                    code, reason = FAILED, f"{seat.name} died: {died}"
                break  # the first failure decides
        return code, reason, payloads
    finally:
        for child, link, _ in children:
            if code != DONE or stop.value >= 2 or payloads[[c for c, *_ in children].index(child)] is None:
                child.kill()
        for child, link, _ in children:
            child.join()
            link.close()


def choose_device(cfg, named):
    """cuda or cpu. GPU flags without usable CUDA are refused with torch's own reason, never bent to the CPU."""
    if cfg.device == "cpu" or (cfg.device == "auto" and not named and not torch.cuda.device_count()):
        return "cpu"
    if not cfg.plan and not torch.cuda.device_count():
        probe = subprocess.run([sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"],
                               capture_output=True, text=True)
        why = (probe.stderr.strip().splitlines() or ["no CUDA device"])[-1]
        raise UserError(f"a GPU is asked for and torch {torch.__version__} has none: {why} (--device cpu runs on the CPU)")
    return "cuda"


def take_seats(cfg, out):
    """-> [Seat], from --target-gpus and --drafter-gpus or the defaults of design.md 3."""
    targets = int_list(cfg.target_gpus, "--target-gpus")
    drafters = int_list(cfg.drafter_gpus, "--drafter-gpus")
    device = choose_device(cfg, targets or drafters)
    count = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cuda" and cfg.plan:  # a plan assumes the GPUs that are named
        count = max([count, *(g + 1 for g in targets + drafters)]) or 8
    for name, gpus in (("--target-gpus", targets), ("--drafter-gpus", drafters)):
        if len(set(gpus)) != len(gpus) or any(g < 0 for g in gpus):
            raise UserError(f"{name} {','.join(map(str, gpus))}: give each GPU once")
        missing = [g for g in gpus if device == "cuda" and g >= count]
        if missing:
            before = json.loads((out / "config.json").read_text()) if (out / "config.json").exists() else {}
            if set(missing) <= set(before.get("gpus", ())):
                raise RuntimeError(f"GPU {missing[0]} was there at the last attempt and is gone: {count} are left")
            raise UserError(f"{name} {','.join(map(str, gpus))}: there is no GPU {missing[0]}, this machine has {count}")
    if set(targets) & set(drafters) and set(targets) != set(drafters):
        raise UserError(f"--target-gpus {cfg.target_gpus} and --drafter-gpus {cfg.drafter_gpus} overlap in part: keep them "
                        "apart, or make them equal (each GPU then does both in turn)")
    if bool(targets) != bool(drafters):
        rest = [g for g in range(count) if g not in targets + drafters]
        if not rest:
            raise UserError("give --target-gpus and --drafter-gpus both: no GPU is left for the other side")
        targets, drafters = targets or rest, drafters or rest
    if not targets:
        train = max(1, round(3 * count / 8))
        gpus = list(range(max(count, 1)))
        targets, drafters = (gpus[:-train], gpus[-train:]) if count > 1 else (gpus, gpus)
    if set(targets) == set(drafters):
        n = len(drafters)
        return [Seat("both", i, n, n, g, device) for i, g in enumerate(drafters)]
    T, D = len(targets), len(drafters)
    return ([Seat("target", i, T, D, g, device) for i, g in enumerate(targets)]
            + [Seat("drafter", i, T, D, g, device) for i, g in enumerate(drafters)])


def parameters_of(target, taps):
    """(parameters of the whole target, of what a target GPU holds, of embedding and head), counted without weights."""
    from transformers import AutoModelForCausalLM

    text, _ = load_config(target)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    whole = sum(p.numel() for p in model.parameters())
    dropped = sum(p.numel() for layer in decoder_layers(model)[max(taps) + 1:] for p in layer.parameters())
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return whole, whole - dropped - (head.numel() if head is not embed else 0), embed.numel() + (
        head.numel() if head is not embed else 0)


def predict_memory(cfg, config, counts, size, seat, width):
    """Bytes by part of one process; width: bytes of a compute element (2 in bf16). An estimate: activations by the
    tensors that the graph keeps for backward, the head's chunk by its logits."""
    _, held, ends = counts
    S, N, B, D = cfg.tokens, cfg.anchors, cfg.block, config["hidden_size"]
    Q, V, L, K = N * B, config["vocab_size"], config["num_hidden_layers"], len(config["dflash_config"]["target_layer_ids"])
    H, G, h, ffn = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"))
    parts = {}
    if seat.role != "drafter":
        parts["target weights"] = held * width
        parts["target activations"] = S * (6 * D + 3 * ffn) * width
        parts["features"] = S * K * D * width * (2 if seat.role == "target" else 1)
    if seat.role != "target":
        parts["embedding and head"] = ends * width
        parts["masters, gradients, moments"] = 16 * size
        parts["features"] = S * K * D * width
        parts["activations"] = (Q * L * (4 * D + 3 * H * h + 3 * ffn) + S * (K * D + L * 2 * G * h) + Q * L * 2 * G * h) * width
        parts["head chunk and row gradients"] = 4096 * V * (4 + 2 * width) + 2 * Q * D * width
    if seat.device == "cuda":
        links = 0 if seat.role == "both" else math.lcm(seat.T, seat.D) // (seat.T if seat.role == "target" else seat.D)
        parts["communicators"] = (links + (seat.role != "target" and seat.D > 1)) * 300 * 2**20
        parts["CUDA context and kernels"] = 700 * 2**20
    return parts


def print_plan(cfg, config, seats, documents, total, out):
    taps = config["dflash_config"]["target_layer_ids"]
    counts = parameters_of(cfg.target, taps)
    with torch.device("meta"):
        size = sum(p.numel() for p in Drafter(config).parameters())
    bins = len(documents.train[1]) - 1
    D = seats[-1].D
    say(f"target {cfg.target}: {counts[0] / 1e6:,.1f} M parameters, {counts[1] / 1e6:,.1f} M on a target GPU, taps {taps}\n"
        f"drafter: {size / 1e6:,.1f} M parameters, {config['num_hidden_layers']} layers, block {cfg.block}, "
        f"heads {config['num_attention_heads']}/{config['num_key_value_heads']} of {config['head_dim']}, "
        f"FFN {config['intermediate_size']}\n"
        f"micro-batch: {cfg.tokens} context tokens, {cfg.anchors} anchors = {cfg.anchors * cfg.block} draft rows\n"
        f"{bins} micro-batches an epoch = {-(-bins // (D * cfg.accumulation))} steps of {D} drafters x {cfg.accumulation}; "
        f"{total} micro-batches = {-(-total // (D * cfg.accumulation))} steps in all\n"
        f"{documents.report}\nwho sits where, and the memory it is predicted to take:")
    for seat in seats:
        parts = predict_memory(cfg, config, counts, size, seat, 2 if seat.device == "cuda" else 4)
        say(f"  {seat.name}: {gib(sum(parts.values())):.1f} GiB = "
            + " + ".join(f"{k} {gib(v):.2f}" for k, v in parts.items()))
    say("config:\n" + "\n".join(f"  {k} = {v}" for k, v in dataclasses.asdict(dataclasses.replace(cfg, out=str(out))).items()))


def take_lock(out, seconds=15):
    """The trainer's lock on its folder. A dying owner gets 15 s; a living one is named and the run refused."""
    lock = open(out / "trainer.lock", "a+")
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                lock.seek(0)
                raise UserError(f"--out {out} is in use by process {lock.read().strip()}: wait for it, or give another "
                                "--out") from None
            time.sleep(0.1)
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def open_folder(out):
    """Make the run folder and see that it can be written. UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as f:
            f.write(b"x")
    except OSError as e:
        raise UserError(f"--out {out}: cannot be written ({e.strerror})") from e


def resolve_dense(cfg, config, seats):
    """On a CPU attention is dense: say no before the memory does."""
    Q, T = cfg.anchors * cfg.block, cfg.tokens + cfg.anchors * cfg.block
    need = Q * T * (1 + 4 * config["num_attention_heads"])
    if seats[0].device == "cpu" and need > CPU_DENSE_LIMIT:
        raise UserError(f"on a CPU attention is dense, and --tokens {cfg.tokens} with --anchors {cfg.anchors} x --block "
                        f"{cfg.block} would take {gib(need):.1f} GiB, more than {gib(CPU_DENSE_LIMIT):.0f}: lower them, or "
                        "use a GPU")


def locate_run(cfg, given):
    """--evaluate's argument -> (Config with the run's target and data, folder of the drafter)."""
    path = Path(cfg.evaluate)
    if not path.exists():
        raise UserError(f"--evaluate {cfg.evaluate}: no such folder")
    homes = [p for p in (path, path.resolve().parent, path.resolve().parent.parent)
             if (p / "config.json").exists() and "argv" in json.loads((p / "config.json").read_text())]
    folder = path
    if homes and homes[0] == path:
        folder = path / "export" if (path / "export" / "config.json").exists() else find_checkpoint(path)
        if folder is None:
            raise UserError(f"--evaluate {cfg.evaluate}: the run has no export and no complete checkpoint yet")
    if homes:
        run = json.loads((homes[0] / "config.json").read_text())["config"]
        run = {k: tuple(v) if isinstance(v, list) else v for k, v in run.items()}
        keep = {k: v for k, v in run.items() if k in ("target", "data", "seed", "tokens", "max_length", "eval_fraction")}
        cfg = dataclasses.replace(cfg, **{k: v for k, v in keep.items() if k not in given})
    if not cfg.target:
        raise UserError(f"--evaluate {cfg.evaluate}: give --target, the folder does not say whose drafter it is")
    return cfg, str(folder)


def one_seat(cfg):
    gpus = int_list(cfg.drafter_gpus or cfg.target_gpus or "0", "--drafter-gpus")
    return Seat("both", 0, 1, 1, gpus[0], choose_device(cfg, cfg.drafter_gpus or cfg.target_gpus))


def evaluate(cfg, given, stop, end_line=""):
    cfg, folder = locate_run(cfg, given)
    text, _ = load_config(cfg.target)
    documents = None
    if not cfg.prompts:
        if not cfg.data:
            raise UserError("--evaluate: give --prompts, the folder does not name the data of its run")
        documents = prepare(cfg, load_tokenizer(cfg.target), text.vocab_size)
    code, reason, payloads = run_workers(
        [(decoding_worker, one_seat(cfg), (cfg, folder, documents, end_line))], stop)
    return code, reason, payloads[0]


def train(cfg, given, argv, stop):
    """Check, prepare, spawn, wait. Returns (exit code, reason)."""
    begin = time.monotonic()
    demo = not cfg.target
    if not cfg.data and not demo:
        raise UserError("--data: name the chats to train on (JSONL, Parquet or a hub dataset)")
    if demo and cfg.data:
        raise UserError("--target: name the model that the data is for")
    out = Path(cfg.out or os.environ.get("SUPERVISE_RUN_DIR") or
               ("runs/demo" if demo else f"runs/{Path(cfg.target).name or 'run'}"))
    seats = take_seats(cfg, out)
    if demo:
        cfg = dataclasses.replace(cfg, **{k: v for k, v in DEMO.items() if k not in given})
        check(cfg)
    lock = None
    if not cfg.plan:
        open_folder(out)
        lock = take_lock(out)
        heartbeat(out, "preparing")
    if demo:
        cfg = make_demo(cfg, out, seats[0], stop)

    # --- every check that needs files but no weights
    text, _ = load_config(cfg.target)
    limit = getattr(text, "max_position_embeddings", None)
    if limit and cfg.max_length > limit:
        raise UserError(f"--max-length {cfg.max_length}: the target reaches {limit} positions")
    taps = taps_of(cfg, text.num_hidden_layers)
    tokenizer = load_tokenizer(cfg.target)
    if not tokenizer.chat_template and any(not s.endswith("parquet") for s in cfg.data):
        say("the tokenizer has no chat template: only rows with input_ids can be read")
    vocab = text.vocab_size
    drafter_config(cfg, text, taps, 0)  # its own checks, before the data is read
    resolve_dense(cfg, drafter_config(cfg, text, taps, 0), seats)
    if cfg.mask_token_id != -1:
        choose_mask_token(cfg, tokenizer, vocab, None)
    documents = prepare(cfg, tokenizer, vocab)
    mask_token_id, why = choose_mask_token(cfg, tokenizer, vocab, documents)
    config = drafter_config(cfg, text, taps, mask_token_id)
    group = seats[-1].D * cfg.accumulation
    bins = len(documents.train[1]) - 1
    if cfg.plan:
        print_plan(cfg, config, seats, documents, cfg.max_steps * group or round(cfg.epochs * bins) or 1, out)
        return DONE, ""

    # --- where this attempt begins
    identity_now = json.loads(json.dumps(identity(cfg, config, documents.fingerprint)))
    checkpoint = find_checkpoint(out) if cfg.resume == "auto" else None
    step = m = 0
    before = json.loads((out / "config.json").read_text()) if (out / "config.json").exists() else None
    if before and cfg.resume == "auto":
        check_identity(before["identity"], identity_now, f"--out {out}")
    if cfg.resume == "never" and any((out / "checkpoints").glob("step-*")):
        raise UserError(f"--resume never: {out} holds checkpoints, give another --out")
    if checkpoint:
        saved = torch.load(checkpoint / "trainer.pt", mmap=True, map_location="cpu")
        check_identity(saved["identity"], identity_now, str(checkpoint))
        step, m = saved["step"], saved["micro_batches"]
        changed = [f"{k} {saved[k]} -> {v}" for k, v in (("drafters", seats[-1].D), ("accumulation", cfg.accumulation))
                   if saved[k] != v]
        changed += [f"{k} {saved['versions'].get(k)} -> {v}" for k, v in versions().items() if saved["versions"].get(k) != v]
        say(f"going on from {checkpoint.name}, micro-batch {m}" + (f"; changed: {', '.join(changed)}" if changed else ""))
    total = m + max(cfg.max_steps - step, 0) * group if cfg.max_steps else max(1, round(cfg.epochs * bins))
    if checkpoint and saved["total"] != total and m < total:
        say(f"the run is {total} micro-batches now, it was {saved['total']}: the learning rate follows the new length")
    if checkpoint and m >= total and (out / "export").exists():
        ends = [r for line in open(out / "metrics.jsonl") if (r := json.loads(line))["kind"] in ("end", "eval")]
        say(f"{out} is finished: step {step}, " + ", ".join(f"{k} {v}" for k, v in ends[-1].items() if k.endswith("loss")
            or k.endswith("accept_len")) + f"; the drafter is {out / 'export'}")
        return DONE, ""
    with torch.device("meta"):
        size = sum(p.numel() for p in Drafter(config).parameters())
    need, free = 14 * size * 2, shutil.disk_usage(out).free
    if free < need:
        raise UserError(f"--out {out}: {gib(free):.1f} GiB free, two checkpoints of this drafter take {gib(need):.1f}")
    atomic_write(out / "config.json", json.dumps(
        {"config": dataclasses.asdict(cfg), "argv": argv, "identity": identity_now, "drafter": config,
         "versions": versions(), "gpus": sorted({s.gpu for s in seats if s.device == "cuda"})}, indent=2) + "\n")
    n_eval = min(len(documents.held_out[1]) - 1, EVAL_BATCHES)
    write_metric(out, "restart" if before else "start", step=step, micro_batches=m, total=total, argv=argv)
    say(f"{documents.report}\n{len(seats)} processes: " + ", ".join(s.name for s in seats)
        + f"\ndrafter of {size / 1e6:.1f} M parameters, taps {taps}, mask token {mask_token_id} ({why})"
        + (f", gamma {cfg.gamma or default_gamma(cfg.block):g}" if cfg.loss == "dflash" else "")
        + f"\n{bins} micro-batches an epoch, {total} in all = {step + -(-(total - m) // group)} steps; writing to {out}")

    # --- one process per GPU
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str((out.parent / ".compile_cache").resolve()))
    with tempfile.TemporaryDirectory() as folder:
        job = Job(cfg, config, documents, mask_token_id, str(out), f"{folder}/meeting", str(checkpoint or ""), identity_now,
                  step, m, total, n_eval)
        code, reason, payloads = run_workers(
            [(target_worker if s.role == "target" else drafter_worker, s, (job,)) for s in seats], stop)
    if code == DONE and payloads[-1]["stopped"]:
        return STOPPED, f"stopped on request at step {payloads[-1]['step']}, saved; the same command goes on from there"
    if code == DONE:
        say(f"finished: the drafter is {out / 'export'}")
    if code == DONE and demo:
        shown = dataclasses.replace(cfg, evaluate=str(out), prompts="", num_prompts=24, new_tokens=128)
        code, reason, payload = evaluate(shown, {"data", "target", "tokens", "max_length"}, stop, "demo")
        if code == DONE:
            write_metric(out, "decoding", **payload["values"])
            say(f"the demo took {span(time.monotonic() - begin)}. A real run:\n  python train_dflash.py --target Qwen/Qwen3-8B "
                "--data chats.jsonl --out runs/qwen3-8b")
    lock.close()
    return code, reason


def main(argv):
    if {"-h", "--help"} & set(argv):
        say(help_text())
        return DONE
    stop = torch.multiprocessing.get_context("spawn").RawValue("i", 0)

    def on_signal(number, frame):
        stop.value = 1 if stop.value == 0 else number  # the first asks, the second insists

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the tokenising processes are the parallelism
    try:
        cfg, given = parse(argv)
        check(cfg)
        code, reason = (evaluate(cfg, given, stop)[:2] if cfg.evaluate else train(cfg, given, argv, stop))
    except UserError as e:
        code, reason = USAGE, str(e)
    except RuntimeError as e:
        code, reason = FAILED, str(e)
    if code:
        print(f"train_dflash.py: {reason}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
