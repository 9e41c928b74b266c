#!/usr/bin/env python3
"""Train a DFlash drafter for a frozen language model: one script, one process per GPU.

A drafter is a small transformer that drafts a whole block of tokens for a big language model (the target) in
one pass; the target checks the block in one pass, so that it decodes several times faster and its output does
not change. DFlash (arXiv 2602.06036): a block is [anchor token, MASK x (B-1)], slot k drafts token anchor+k,
and every draft layer attends to features tapped from a few layers of the target, strictly before the anchor.

    main ── checks, prepares the data, spawns, waits, names the first failure
     ├─ target 0..T-1   GPUs 0,1,2,3,4   tokens -> tapped features of micro-batch m (m mod T)
     │       │  the wire: point to point, one group per pair
     └─ drafter 0..D-1  GPUs 5,6,7       one compiled graph: loss and gradient of micro-batch m (m mod D)
             └─ gradients summed once per optimizer step, AdamW on fp32 masters, save, evaluate

    python train_dflash.py                                         a demo that needs nothing, some minutes
    python train_dflash.py --target Qwen/Qwen3-8B --data chats.jsonl --out runs/qwen3-8b
    python train_dflash.py --evaluate runs/qwen3-8b                real decoding, with and without the drafter

Run the second line again and it goes on from its newest complete checkpoint.

Letters: S context tokens of a micro-batch, N anchors, B block (slots), Q = N*B draft rows, D hidden width, L
draft layers, K taps, V vocabulary, H/G query/kv heads, h head size. Comments after a reshape give the shape.
"""
from __future__ import annotations

import argparse
import copy
import ctypes
import dataclasses
import difflib
import faulthandler
import fcntl
import gzip
import hashlib
import heapq
import inspect
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the imports below run: no traceback
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import resource_tracker
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

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
    init_from: str = flag("", "drafter folder to start from, in place of noise")
    evaluate: str = flag("", "run or export to decode with, no training")
    prompts: str = flag("", "JSONL of prompts; none: the held-out chats")
    num_prompts: int = flag(64, "prompts to decode")
    new_tokens: int = flag(256, "tokens to decode per prompt")
    temperature: float = flag(0.0, "0: greedy; above: lossless sampling")
    tree: int = flag(0, "--evaluate: draft trees of so many nodes as well")
    curves: str = flag("", "run whose training curves are drawn, no training")
    regenerate: str = flag("", "JSONL of prompts or chats to answer, no training")
    replies: str = flag("", "... by --target, into this JSONL")
    each_turn: bool = flag(False, "... every turn of a chat, not the last alone")

DONE, USAGE, STOPPED, DIVERGED, FAILED = 0, 2, 75, 76, 1  # exit codes, design.md 6
ENDS = signal.SIGINT, signal.SIGTERM  # ask for an end; main obeys them, no child does
TILE = 128  # flex_attention's block: the Triton backward on sm_90 takes no smaller one (pytorch.md 6)
CPU_DENSE_LIMIT = 6 << 30  # bytes that dense attention may take on a CPU
EVAL_BATCHES = 32  # held-out micro-batches of one evaluation, at most

DAMAGED = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError)  # a file that makes no sense

class UserError(Exception):
    """A mistake in flags or input: one line, exit 2."""

class Diverged(Exception):
    """Non-finite beyond the allowance: exit 76."""

def help_text():
    lines = [__doc__.split("\n")[0], "", "usage: python train_dflash.py [--flag value ...]", ""]
    for f in dataclasses.fields(Config):
        default = " ".join(f.default) if isinstance(f.default, tuple) else f.default
        lines.append(f"  --{f.name.replace('_', '-'):22} {f.metadata['help']:44} {default}".rstrip())
    return "\n".join(lines)

def parse(argv):
    """argv (list of str) -> (Config, set of the names given). UserError on unknown flags and wrong types."""
    defaults = {"--" + f.name.replace("_", "-"): f.default for f in dataclasses.fields(Config)}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, default in defaults.items():
        option = {"action": "store_true"} if isinstance(default, bool) else (
            {"nargs": "+"} if isinstance(default, tuple) else {"type": type(default)})
        parser.add_argument(name, default=argparse.SUPPRESS, **option)
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as e:
        raise UserError(str(e)) from None
    if unknown:
        near = difflib.get_close_matches(unknown[0].split("=")[0], defaults, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else "see --help"
        raise UserError(f"unknown argument {unknown[0]}, {hint}")
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(given).items()}
    return Config(**given), set(given)

def int_list(text, name):
    try:
        return [int(x) for x in text.split(",") if x.strip()]
    except ValueError:
        raise UserError(f"{name} {text}: give whole numbers with commas, as 0,1,2") from None

def check_mode(cfg):
    """One thing at a time, and no flag of a mode that is not asked for. Raises UserError."""
    asked = [k for k in ("evaluate", "regenerate", "curves") if getattr(cfg, k)]
    if len(asked) > 1:
        raise UserError(f"--{asked[0]} and --{asked[1]}: one at a time")
    for flags, mode in (("replies each_turn", "regenerate"), ("prompts tree", "evaluate")):
        for k in flags.split():
            if getattr(cfg, k) and mode not in asked:
                raise UserError(f"--{k.replace('_', '-')} goes with --{mode}, which is not given")
    for k in ("plan", "init_from"):
        if getattr(cfg, k) and asked:
            raise UserError(f"--{k.replace('_', '-')} is of training, --{asked[0]} does none: leave one out")
    if cfg.init_from and not cfg.target:
        raise UserError("--init-from: name the model that the drafter is for with --target")

def check(cfg):
    """Every rule on Config that needs no file and no GPU. Raises UserError."""
    def need(ok, message):
        if not ok:
            raise UserError(message)

    check_mode(cfg)
    at_least_0 = ("heads kv_heads head_dim ffn sliding_window full_layers max_steps workers gamma seed "
                  "temperature tree").split()
    above_0 = ("block layers tokens anchors max_length accumulation clip lr eval_every save_every log_every "
               "keep stall_timeout num_prompts new_tokens").split()
    for name, value in dataclasses.asdict(cfg).items():
        shown = f"--{name.replace('_', '-')} {value}"
        need(not isinstance(value, float) or math.isfinite(value), f"{shown}: give a finite number")
        need(name not in at_least_0 or value >= 0, f"{shown}: must be 0 or more")
        need(name not in above_0 or value > 0, f"{shown}: must be above 0")
        need(name not in ("eval_fraction", "warmup") or 0 <= value < 1, f"{shown}: from 0 to below 1")
    need(cfg.device in ("auto", "cuda", "cpu"), f"--device {cfg.device}: auto, cuda or cpu")
    need(cfg.loss in ("dflash", "dpace"), f"--loss {cfg.loss}: dflash or dpace")
    need(cfg.resume in ("auto", "never"), f"--resume {cfg.resume}: auto or never")
    need(cfg.block >= 2, f"--block {cfg.block}: a block has an anchor and at least one draft, so 2 or more")
    need(cfg.tokens % TILE == 0,
         f"--tokens {cfg.tokens}: must be a multiple of {TILE}, as {-(-cfg.tokens // TILE) * TILE} is")
    step = TILE // math.gcd(cfg.block, TILE)
    need(cfg.anchors % step == 0, f"--anchors {cfg.anchors} x --block {cfg.block}: must be a multiple of "
         f"{TILE}, as {-(-cfg.anchors // step) * step} anchors are")
    need(cfg.max_length <= cfg.tokens or cfg.regenerate,
         f"--max-length {cfg.max_length} is more than --tokens {cfg.tokens}: a row must fit its micro-batch")
    need(not cfg.sliding_window or cfg.sliding_window >= cfg.block,
         f"--sliding-window {cfg.sliding_window} is smaller than --block {cfg.block}")
    need(cfg.tree <= 1024, f"--tree {cfg.tree}: a tree is read in one pass, give 1024 nodes or fewer")
    need(not 0 < cfg.temperature < 0.01, f"--temperature {cfg.temperature}: 0, or 0.01 and more")
    need(all(cfg.data), "--data: an empty name, give files or hub datasets")
    need(cfg.full_layers <= cfg.layers, f"--full-layers {cfg.full_layers}: there are {cfg.layers} layers")
    need(cfg.epochs > 0 or cfg.max_steps, f"--epochs {cfg.epochs}: must be above 0")
    disabled = [f"{k}={v}" for k in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
                if (v := os.environ.get(k, "0")) not in ("", "0")]
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it for this would take seconds
    if dynamo and dynamo._stance.stance not in ("default", "fail_on_recompile"):
        disabled.append(f"torch.compiler.set_stance({dynamo._stance.stance!r})")
    need(not disabled, f"{', '.join(disabled)} turns compilation off, attention would be dense: unset it")

def default_gamma(block):
    """The published decays, 7, 5 and 4 for B 16, 10 and 8 (paper, 4.1); straight lines between and beyond."""
    return float(np.interp(block, [0, 8, 10, 16, 160], [0, 4, 5, 7, 70]))

# -------------------------------------------------------------------------------------------- small tools

def say(text):
    try:
        print(text, flush=True)
    except BrokenPipeError:  # who read it is gone, a killed supervisor perhaps: the run goes on and saves
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

def atomic_write(path, text, sync=True):
    """Replace the file as a whole: a reader meets the old text or the new; sync: also after a power cut."""
    beside = Path(f"{path}.{os.getpid()}.new")
    with open(beside, "w") as f:
        f.write(text)
        f.flush()
        if sync:
            os.fsync(f.fileno())
    os.replace(beside, path)

def fsync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

def write_metric(out, kind, **values):
    """One JSON object a line. A number that is not finite is null: JSON has no NaN."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    line = json.dumps({"kind": kind, "time": round(time.time(), 3), **clean}) + "\n"
    with open(Path(out) / "metrics.jsonl", "ab+") as f:
        whole = not f.tell() or not f.seek(-1, os.SEEK_END) or f.read(1) == b"\n"
        f.write((line if whole else "\n" + line).encode())  # a full disk has left half a line

def read_metrics(out):
    """The rows of metrics.jsonl, without lines that a kill or a full disk has cut."""
    path, rows = Path(out) / "metrics.jsonl", []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and {"kind", "step"} <= row.keys()]

def heartbeat(out, phase, step=0, micro_batches=0):
    """Called where the main thread of the process at work advances; a ticker thread would hide a hang."""
    path = os.environ.get("SUPERVISE_HEARTBEAT") or Path(out) / "heartbeat.json"
    atomic_write(path, json.dumps({"step": step, "micro_batches": micro_batches, "phase": phase,
                                   "time": time.time(), "pid": os.getpid()}), sync=False)

def span(seconds):
    seconds = int(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]

@contextmanager
def refused(what, kinds=Exception):
    """Errors of these kinds inside are one thing to the user: UserError of `what` and their first line."""
    try:
        yield
    except kinds as e:
        raise UserError(f"{what} ({first_line(e)})") from e

def gib(count):
    return count / 2**30

def rng(*key):
    """A host generator that depends on the key alone (seed, purpose, ...)."""
    return np.random.default_rng(key)

PACK, ORDER, ANCHORS, EVAL_ANCHORS, WEIGHTS = range(5)  # purposes

# --------------------------------------------------------------------------------------------------- data

EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\n{0,2}")
ROLES = ("system", "user", "assistant", "tool", "developer")

def without_none(x):
    """Parquet gives every struct every field; those that the row did not have are None."""
    if isinstance(x, dict):
        return {k: without_none(v) for k, v in x.items() if v is not None}
    return [without_none(v) for v in x] if isinstance(x, list) else x

def clean_messages(messages):
    """The turns of one row as chat templates want them: without the None fields that Parquet adds, content
    parts joined, tool calls' JSON arguments read. Raises ValueError with the reason."""
    if not isinstance(messages, (list, np.ndarray)) or not len(messages):
        raise ValueError("no messages")
    turns = []
    for turn in messages:
        if not isinstance(turn, dict):
            raise ValueError("a turn is not an object")
        turn = {"content": "", **{k: v for k, v in turn.items() if v is not None}}
        if turn.get("role") not in ROLES:
            raise ValueError(f"role {str(turn.get('role'))[:20]!r}")
        if not isinstance(turn["content"], str):
            parts = turn["content"]
            if not isinstance(parts, (list, np.ndarray)) or not all(
                    isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
                raise ValueError("content that is not text")
            turn["content"] = "".join(p["text"] for p in parts)
        for call in turn.get("tool_calls") or ():
            function = call.get("function", call)
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"])
        turns.append(turn)
    return turns

def reply_spans(turns, tools, render, end_tokens, finished):
    """Where the replies stand in the rendered chat: [(text, [(begin, end), ...]), ...] in characters.

    The span of a reply runs from the end of its generation prompt to the end of its end token. What the
    template itself puts first (an empty thinking block) is no reply. A template that rewrites history (drops
    earlier thinking, say) gives an earlier reply a text of its own, rendered as the model met it."""
    replies = [i for i, turn in enumerate(turns) if turn["role"] == "assistant" and i]  # no prompt, no reply
    rows = []
    for i in reversed(replies):
        text = render(turns[: i + 1], tools, False)
        prompt, bare = render(turns[:i], tools, True), render(turns[:i], tools, False)
        begin = len(os.path.commonprefix([prompt, text]))
        if begin < len(os.path.commonprefix([prompt, bare])):
            raise ValueError("the template rewrites the prompt once it has a reply")
        if not text.startswith(prompt):  # it says more than the reply keeps: back to the last shared border
            shared = text[:begin]
            begin = max(shared.rfind(e) + len(e) for e in ("\n", *end_tokens) if e in shared)
        given = turns[i].get("reasoning_content", "") + turns[i]["content"]
        opened = text[:begin].rstrip()  # the prompt may have opened a block that stays empty
        added = EMPTY_THINK.match(text, len(opened) - 7 if opened.endswith("<think>") else begin)
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
    """Rendered text and reply spans (characters) -> ids, supervised (lists). A token counts as reply when it
    lies wholly inside a span: one that straddles the border was never the model's to choose."""
    how = {"add_special_tokens": False, "verbose": False}
    if tokenizer.is_fast:
        found = tokenizer(text, return_offsets_mapping=True, **how)
        supervised, before = [], 0
        for x, y in found["offset_mapping"]:
            x = x if x < y else before  # trim_offsets (GPT-2's heirs): a token of spaces says it is empty
            supervised.append(any(b <= x and y <= e and x < y for b, e in spans))
            before = y
        return found["input_ids"], supervised
    # No offsets: tokenise what lies outside and inside of spans by turns, and insist that the whole agrees.
    borders = [0, *itertools.chain(*sorted(spans)), len(text)]
    pieces = [tokenizer(text[a:b], **how)["input_ids"] for a, b in itertools.pairwise(borders)]
    ids = list(itertools.chain(*pieces))
    if ids != tokenizer(text, **how)["input_ids"]:
        raise ValueError("tokens straddle the border of a reply")
    return ids, [i % 2 == 1 for i, piece in enumerate(pieces) for _ in piece]

def tools_of(row):
    tools = row.get("tools")
    return json.loads(tools) if isinstance(tools, str) and tools else tools or None

def prompt_key(asked):
    return " ".join(str(asked).lower().split())

def is_held_out(key, fraction):
    digest = hashlib.sha256(key.encode(errors="replace")).digest()  # a lone surrogate is no UTF-8
    return int.from_bytes(digest[:8], "big") < fraction * 2**64

def read_row(row, render, tokenizer, vocab, end_tokens):
    """One raw row -> (key, [(ids, supervised), ...]); key is the first prompt, so that all replies to it stay
    on one side of the held-out split. Raises ValueError (or what the template raises) with the reason why the
    row is no use."""
    if row.get("input_ids") is not None:
        ids, supervised = list(row["input_ids"]), [bool(x) for x in row.get("loss_mask") or ()]
        if len(ids) != len(supervised):
            raise ValueError("input_ids and loss_mask differ in length")
        if not all(type(x) is int and 0 <= x < vocab for x in ids):
            raise ValueError("a token beyond the vocabulary")
        asked = next((t.get("content") for t in row.get("messages") or () if t.get("role") == "user"), ids)
        return prompt_key(asked), [(ids, supervised)]
    turns = clean_messages(row.get("messages"))
    if not tokenizer.chat_template:
        raise ValueError("chat, but the tokenizer has no chat template")
    tools = tools_of(row)
    finished = row.get("finished")
    asked = next((t["content"] for t in turns if t["role"] == "user"), "")
    rows = reply_spans(turns, tools, render, end_tokens, finished is None or bool(finished))
    return prompt_key(asked), [tokenise(*r, tokenizer) for r in rows]

def tokenise_rows(batch, tokenizer, vocab, max_length, eval_fraction):
    """A batch of raw rows, as datasets.map hands it over -> columns. A row that is no use keeps its place,
    with the reason in `note` and no tokens."""
    def render(turns, tools, prompt):
        return tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=prompt)

    end_tokens = sorted({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}, key=len, reverse=True)
    out = []
    for values in zip(*batch.values()):
        key, made, problem = "", [], ""
        try:
            row = dict(zip(batch, values))
            if "jsonl" in row:
                if not row["jsonl"].strip():
                    raise ValueError("empty line")
                row = json.loads(row["jsonl"].removeprefix("\ufeff"))  # some editors begin a file with it
                if not isinstance(row, dict):
                    raise ValueError("not an object")
            else:
                row = without_none(row)
            key, made = read_row(row, render, tokenizer, vocab, end_tokens)
        except json.JSONDecodeError:
            problem = "not JSON"
        except Exception as e:  # templates raise what they like; one bad row is counted, named and skipped
            problem = first_line(e)[:60]
        held_out = is_held_out(key, eval_fraction)
        for ids, supervised in made or [([], [])]:
            cut, note = len(ids) > max_length, problem
            ids, supervised = ids[:max_length], supervised[:max_length]
            if not note and not any(a and b for a, b in itertools.pairwise(supervised)):  # anchor and label
                note = "nothing to learn after the cut" if cut else "nothing to learn"
            if note:
                ids, supervised, cut = [], [], False
            out.append((ids, supervised, len(ids), sum(supervised), cut, held_out, note))
    names = ("input_ids", "loss_mask", "length", "supervised", "cut", "held_out", "note")
    return dict(zip(names, map(list, zip(*out))))

def content_of(paths):
    """A digest of these files: datasets goes by a file's date or a hub's commit, here rows count."""
    content = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as f:
            content.update(hashlib.file_digest(f, "sha256").digest())
    return content.hexdigest()[:32]

def load_rows(sources):
    """Files or hub ids -> a datasets.Dataset of raw rows each. JSONL is read as text lines, so that one
    bad line (half a row, other types, bytes that are not UTF-8) costs one row and not the file."""
    import datasets

    parts = []
    for source in sources:
        kind = re.sub(r"\.gz$", "", source).rsplit(".", 1)[-1]
        is_file, parquet = kind in ("jsonl", "json", "parquet"), kind == "parquet"
        if os.path.exists(source) and not is_file:
            raise UserError(f"--data {source}: neither .jsonl, .json nor .parquet (.gz may follow)")
        if is_file and not os.path.isfile(source):
            raise UserError(f"--data {source}: no such file" + ", it is a folder" * Path(source).is_dir())
        if is_file and not os.path.getsize(source):
            raise UserError(f"--data {source}: the file is empty")
        try:
            if is_file:
                digest = content_of([source])
                # a byte that is not UTF-8 becomes \xNN, which is no JSON: that line alone is refused
                part = datasets.load_dataset(
                    "parquet" if parquet else "text", data_files=source, split="train",
                    cache_dir=Path(datasets.config.HF_DATASETS_CACHE) / "by-content" / digest,
                    **({} if parquet else {"encoding_errors": "backslashreplace"}))
            else:
                part = datasets.load_dataset(source, split="train")
                digest = content_of(cached["filename"] for cached in part.cache_files)
        except Exception as e:  # datasets raises a dozen types for what is, to the user, one thing
            why = first_line(e.__cause__ or e)
            raise UserError(f"--data {source}: cannot be read ({type(e).__name__}: {why})") from e
        if is_file and not parquet:
            part = part.rename_column("text", "jsonl")
        have = part.column_names
        if not {"jsonl", "messages", "input_ids"} & set(have):
            raise UserError(f"--data {source}: no column messages or input_ids, but {', '.join(have)}")
        known = ("jsonl", "messages", "tools", "finished", "input_ids", "loss_mask")
        parts.append(part.select_columns([c for c in known if c in have]))
        parts[-1]._fingerprint = digest
    return parts

@dataclasses.dataclass
class Documents:
    """Tokenised rows, and where each micro-batch finds its own."""
    rows: object  # datasets.Dataset
    train: tuple  # as pack() gives it
    held_out: tuple
    fingerprint: str
    report: str

def prepare(cfg, tokenizer, vocab):
    """Load, tokenise, cache, count, split and pack. Returns Documents; UserError when nothing is left."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    limits = {"vocab": vocab, "max_length": cfg.max_length, "eval_fraction": cfg.eval_fraction}
    # All that decides a row's tokens is in the key, so that a stale cache cannot be met.
    code = [inspect.getsource(f) for f in (
        without_none, clean_messages, reply_spans, tokenise, tools_of, prompt_key, is_held_out, read_row,
        tokenise_rows)]
    whole = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.get_vocab()
    rules = [code, tokenizer.chat_template, whole, limits]
    int32, boolean = datasets.Value("int32"), datasets.Value("bool")
    kinds = datasets.Features({
        "input_ids": datasets.List(int32), "loss_mask": datasets.List(boolean), "length": int32,
        "supervised": int32, "cut": boolean, "held_out": boolean, "note": datasets.Value("string")})
    raws, parts = load_rows(cfg.data), []
    for source, raw in zip(cfg.data, raws):
        key = json.dumps([raw._fingerprint, rules], sort_keys=True)
        processes = min(cfg.workers or len(os.sched_getaffinity(0)), max(1, len(raw) // 1000))
        with refused(f"--data {source}: holds a string that is not UTF-8", UnicodeError):
            parts.append(raw.map(
                tokenise_rows, fn_kwargs={"tokenizer": tokenizer, **limits}, batched=True, batch_size=200,
                num_proc=processes if processes > 1 else None, remove_columns=raw.column_names,
                features=kinds, desc="tokenising",
                new_fingerprint=hashlib.sha256(key.encode()).hexdigest()[:32]))
    rows = datasets.concatenate_datasets(parts)
    column = {k: rows.data.column(k).to_numpy() for k in ("length", "supervised", "cut", "held_out", "note")}
    good, held = column["length"] > 0, column["held_out"]
    notes = Counter(column["note"][~good]) if len(rows) else Counter()
    tokens, learnt = int(column["length"].sum()), int(column["supervised"].sum())
    report = (f"data: {sum(map(len, raws)):,} rows read, {good.sum():,} documents kept "
              f"({(good & held).sum():,} held out), {column['cut'].sum():,} cut at {cfg.max_length}, "
              f"{notes.total():,} dropped" + "".join(f"; {n:,} x {note}" for note, n in notes.most_common(12))
              + f"; {tokens:,} tokens, {learnt / max(tokens, 1):.1%} supervised")
    if not (good & ~held).any():
        raise UserError(f"--data {' '.join(cfg.data)}: nothing left to train on. {report}")
    plans = [pack(column["length"], np.flatnonzero(good & (held == side)), cfg.tokens, cfg.seed)
             for side in (False, True)]
    fingerprint = hashlib.sha256(" ".join(p._fingerprint for p in parts).encode()).hexdigest()[:16]
    return Documents(rows, *plans, fingerprint, report)

# ------------------------------------------------------------------------------------------ micro-batches

def pack(lengths, documents, capacity, seed):
    """Best-fit decreasing over windows of shuffled documents, each once -> (order, bounds): micro-batch j
    holds documents order[bounds[j]:bounds[j + 1]], longest first, at most `capacity` tokens."""
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
    bounds = np.cumsum([0, *map(len, bins)], dtype=np.int64)
    return np.array([d for b in bins for d in b], dtype=np.int64), bounds

def micro_batch(documents, cfg, m, held_out=False):
    """What micro-batch m holds: a pure function of (data, config, seed, m), made on every host that needs it.

    Returns numpy arrays: lengths [rows], ids, supervised, positions (in the document) [S]; for the N blocks
    start [N], anchor [N] (indices into the row of S), tokens [N, B] (slot 0 the anchor, then the labels),
    valid [N, B] (the label counts); blocks = how many are real, tokens_used = real context tokens."""
    S = cfg.tokens
    order, bounds = documents.held_out if held_out else documents.train
    if held_out:
        j, draw = m, rng(cfg.seed, EVAL_ANCHORS, m)
    else:
        epoch, j = divmod(m, len(bounds) - 1)
        j, draw = rng(cfg.seed, ORDER, epoch).permutation(len(bounds) - 1)[j], rng(cfg.seed, ANCHORS, m)
    chosen = documents.rows.with_format("numpy")[order[bounds[j]: bounds[j + 1]].tolist()]
    lengths = np.array([len(x) for x in chosen["input_ids"]], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    used = int(lengths.sum())
    assert used <= S, f"micro-batch {m} holds {used} tokens, more than {S}"
    ids, supervised = np.zeros(S, np.int64), np.zeros(S, bool)
    ids[:used] = np.concatenate(list(chosen["input_ids"]))
    supervised[:used] = np.concatenate(list(chosen["loss_mask"]))
    begin = np.concatenate([np.repeat(starts, lengths), np.arange(used, S)])  # padding: documents of 1 token
    end = np.concatenate([np.repeat(starts + lengths, lengths), np.arange(used, S) + 1])
    batch = blocks_of(ids, supervised, begin, end, cfg.anchors, cfg.block, draw)
    return {"m": m, "held_out": held_out, "lengths": lengths, "ids": ids, "positions": np.arange(S) - begin,
            "supervised": supervised, "tokens_used": used, **batch,
            "documents": order[bounds[j]: bounds[j + 1]]}

def ahead(schedule, documents, cfg):
    """The micro-batches of a schedule in turn, the next one made by a thread meanwhile: made in between they
    took 16 of the 49 ms of a step with a small target."""
    with ThreadPoolExecutor(1) as pool:
        coming = None
        for kind, i in schedule:
            following = pool.submit(micro_batch, documents, cfg, i, kind == "eval")
            if coming:
                yield coming.result()
            coming = following
        if coming:
            yield coming.result()

def blocks_of(ids, supervised, begin, end, N, B, draw):
    """Draw the anchors and cut their blocks. ids, supervised: [S]; begin, end: [S], of each token's document.

    Token t is eligible when t and t+1 lie in one document and both are supervised: t is then an anchor that
    decoding reaches, and slot 1 has a label. Drawn without replacement, uniformly over the micro-batch,
    sorted (dense tiles). A label counts up to the first slot beyond its document or unsupervised."""
    eligible = np.flatnonzero(supervised[:-1] & supervised[1:] & (end[:-1] == end[1:]))
    real = min(N, len(eligible))
    anchor = np.sort(draw.choice(eligible, real, replace=False)) if real else eligible
    anchor = np.concatenate([anchor, np.zeros(N - real, np.int64)])  # padding blocks weigh nothing
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
    """The run as one list that every process walks by itself: ("train", m) for the micro-batches of each
    optimizer step (the last may have fewer of the `total`), then ("eval", j) where an evaluation is due."""
    while m < total:
        yield from (("train", i) for i in range(m, min(m + group, total)))
        m, step = m + group, step + 1
        if step % eval_every == 0 or m >= total:
            yield from (("eval", j) for j in range(n_eval))

def learning_rate(cfg, m, total):
    """Warm-up over the first share of the run, then cosine to 0: of micro-batches done, whatever the GPUs."""
    done, warm = m / total, cfg.warmup
    return cfg.lr * ((done + 1 / total) / (warm + 1 / total) if done < warm
                     else 0.5 * (1 + math.cos(math.pi * (done - warm) / (1 - warm))))

# ------------------------------------------------------------------------------------------------- target

def load_config(target):
    """The target's text config, and the whole one. UserError when there is no such model."""
    from transformers import AutoConfig

    with refused(f"--target {target}: no model there"):  # OSError, ValueError, the hub's own errors
        whole = AutoConfig.from_pretrained(target)
    return whole.get_text_config(), whole

def load_tokenizer(target):
    from transformers import AutoTokenizer

    with refused(f"--target {target}: its tokenizer does not load"):
        return AutoTokenizer.from_pretrained(target)

def load_target(target, dtype, layers=None):
    """The frozen causal LM on the CPU, with its first `layers` decoder layers only (None: all).

    transformers does the reading, with every renaming and tying it knows; layers that the shortened config
    does not name are never read from disk: with layers=0 a drafter gets embedding and head alone."""
    from transformers import AutoModelForCausalLM
    from transformers import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    text, whole = load_config(target)
    if layers is not None:
        for config in (text, whole):
            if hasattr(config, "num_hidden_layers"):
                config.num_hidden_layers = layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:layers]
    with refused(f"--target {target}: does not load", (OSError, ValueError, RuntimeError)):
        model, info = AutoModelForCausalLM.from_pretrained(
            target, config=whole, dtype=dtype, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"--target {target}: the checkpoint lacks {len(missing)} tensors, {missing[0]} first")
    return model.eval().requires_grad_(False)

def decoder_layers(model):
    """The decoder's own list of layers, wherever the family keeps it."""
    n = model.config.get_text_config().num_hidden_layers
    lists = [m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == n
             and name.rsplit(".", 1)[-1] in ("layers", "h", "blocks") and "vis" not in name]
    if not lists:
        raise UserError(f"--target {model.config._name_or_path}: found no list of {n} decoder layers to tap")
    return lists[0]

def frozen_ends(model):
    """What a drafter takes from its target: embedding and head weights [V, D], the scalars around them."""
    embedding, text = model.get_input_embeddings(), model.config.get_text_config()
    own = [k for k in ("logits_scaling", "logit_scale", "embedding_multiplier") if getattr(text, k, 1.0) != 1]
    if own or getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise UserError(f"--target {model.config._name_or_path}: {(own or ['a bias of the head'])[0]} is not "
                        "supported, training would take another head than the target's")
    return {"embed": embedding.weight.detach(), "head": model.get_output_embeddings().weight.detach(),
            "embed_scale": float(getattr(embedding, "embed_scale", 1.0)),
            "softcap": float(getattr(text, "final_logit_softcapping", None) or 0.0)}

def end_tokens_of(model, tokenizer):
    ids = model.generation_config.eos_token_id
    return {*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None}

def default_taps(n_layers, count):
    """The published rule (z-lab/dflash model.py): from the 2nd to the third-to-last layer, evenly. On a
    target too shallow for that: all its layers but the last, evenly, at most one tap each."""
    taps = ([n_layers // 2] if count == 1 else
            [round(1 + i * (n_layers - 4) / (count - 1)) for i in range(count)])
    if len(set(taps)) == len(taps) and min(taps) >= 0 and n_layers >= 4:
        return taps
    return sorted({round(i * max(n_layers - 2, 0) / max(count - 1, 1)) for i in range(count)})

def choose_mask_token(cfg, tokenizer, vocab, documents):
    """The mask token's id and why: the flag; the tokenizer's own; the first embedding row past the tokenizer;
    else a reserved special token that is not pad/eos/bos and does not occur in the data."""
    taken = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    if cfg.mask_token_id != -1:
        if not 0 <= cfg.mask_token_id < vocab:
            raise UserError(f"--mask-token-id {cfg.mask_token_id}: the embedding has rows 0 to {vocab - 1}")
        if cfg.mask_token_id in taken:
            raise UserError(f"--mask-token-id {cfg.mask_token_id} is the tokenizer's pad, eos or bos token")
        return cfg.mask_token_id, "as told"
    if tokenizer.mask_token_id not in (None, *taken) and tokenizer.mask_token_id < vocab:
        return tokenizer.mask_token_id, "the tokenizer's mask token"
    last = max(tokenizer.get_vocab().values())
    if last + 1 < vocab:
        return last + 1, "the first embedding row past the tokenizer"
    free = sorted({i for i, t in tokenizer.added_tokens_decoder.items() if t.special and i < vocab} - taken)
    if documents is not None:
        for chunk in documents.rows.data.column("input_ids").chunks:
            free = np.setdiff1d(free, chunk.flatten().to_numpy()).tolist()
    if not free:
        raise UserError("--mask-token-id: the tokenizer has no mask token, spare row or free special token: "
                        "name an embedding row that the data never uses")
    return free[0], f"the reserved {tokenizer.convert_ids_to_tokens(free[0])}, which the data never uses"

def taps_of(cfg, n_layers):
    if not cfg.target_layer_ids:
        return default_taps(n_layers, cfg.layers)
    taps = int_list(cfg.target_layer_ids, "--target-layer-ids")
    if not all(0 <= t < n_layers for t in taps) or len(set(taps)) != len(taps) or not taps:
        raise UserError(f"--target-layer-ids {cfg.target_layer_ids}: give layers 0-{n_layers - 1}, each once")
    return taps

def head_size(text):
    text.allow_global_per_layer_attribute_access = True  # Gemma 4 asks, its layers differ in head size
    return getattr(text, "head_dim", None) or text.hidden_size // getattr(text, "num_attention_heads", 32)

def drafter_config(cfg, text, taps, mask_token_id):
    """The drafter's config.json: all that a serving engine reads, and all that Drafter is built from.

    The geometry follows the target; mixture-of-experts and head-256 targets get the published 32/8 heads of
    128 and an FFN of 3 D. The drafter itself always rotates plainly over the whole head."""
    h, D, H = head_size(text), text.hidden_size, getattr(text, "num_attention_heads", 32)
    experts = any(getattr(text, k, None) for k in ("num_experts", "num_local_experts", "n_routed_experts"))
    odd = experts or h > 128
    H = cfg.heads or (32 if odd else H)
    G = cfg.kv_heads or (8 if odd else getattr(text, "num_key_value_heads", None) or H)
    h = cfg.head_dim or (128 if odd else h)
    ffn = cfg.ffn or (3 * D if odd else getattr(text, "intermediate_size", None) or 4 * D)
    if H % G:
        raise UserError(f"--heads {H} is not a multiple of --kv-heads {G}")
    if h % 2 or h < 16:
        raise UserError(f"--head-dim {h}: even, and 16 or more")
    theta, window = find_rope_theta(text), cfg.sliding_window
    full = cfg.full_layers if window else cfg.layers
    kinds = ["sliding_attention"] * (cfg.layers - full) + ["full_attention"] * full
    out = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": D,
        "intermediate_size": ffn, "num_hidden_layers": cfg.layers, "num_attention_heads": H,
        "num_key_value_heads": G, "head_dim": h, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "attention_bias": False, "attention_dropout": 0.0, "vocab_size": text.vocab_size,
        "max_position_embeddings": getattr(text, "max_position_embeddings", None) or cfg.max_length,
        "rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_scaling": None, "layer_types": kinds, "sliding_window": window or None,
        "use_sliding_window": bool(window), "max_window_layers": cfg.layers, "block_size": cfg.block,
        "num_target_layers": text.num_hidden_layers,
        "dflash_config": {"target_layer_ids": taps, "mask_token_id": mask_token_id, "block_size": cfg.block},
        "tie_word_embeddings": False, "initializer_range": 0.02, "use_cache": True,
        "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    if cfg.sliding_bidirectional or not window:
        out["is_causal"] = False  # where it is absent, engines take sliding layers as causal in their block
    return out

def find_rope_theta(text):
    """rope_theta from either spelling of a config, full-attention layers' own where they are nested; a config
    that rotates but names no theta is an error, one that does not rotate gets 1e6."""
    parameters = getattr(text, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    theta = parameters.get("rope_theta") or getattr(text, "rope_theta", None)
    if theta is None and parameters:
        raise UserError("the target's config has rope_parameters without rope_theta")
    return float(theta or 1e6)

def rectangles(lengths, limit, launch=2048):
    """Rows (longest first) -> [(first, last, width)]: rectangles of at most `limit` tokens. Another one costs
    its launches, about as much as `launch` tokens of padding: it is begun when that much has gathered."""
    out, first = [], 0
    while first < len(lengths):
        width, last, padding = -(-int(lengths[first]) // 64) * 64, first, 0
        while last < len(lengths) and (
                last == first or ((last - first + 1) * width <= limit and padding < launch)):
            padding, last = padding + width - int(lengths[last]), last + 1
        out.append((first, last, width))
        first = last
    return out

def tap(layers, taps):
    """Hooks that keep what the tapped layers put out -> ({layer: tensor}, hooks)."""
    caught = {}
    return caught, [layers[t].register_forward_hook(
        lambda module, inputs, out, t=t: caught.update({t: out[0] if isinstance(out, tuple) else out}))
        for t in set(taps)]

TRITON = {"BACKEND": "TRITON"}  # flex_attention's option

def attention_choices(h):
    """flex_attention's kernel options for heads of size h here, the fastest first, the sure one last.

    Heads of 128 on Hopper, ms a layer of shape S, forward + backward, H200: the tiles that torch chooses 38 +
    88, these 28 + 88 (of 18 for backward none gained more than 1%), FlashAttention 4 21 + 59, as of b26:
    before, its backward was garbage now and then (flash-attention #2756)."""
    if h != 128 or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return [TRITON]
    tiles = {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_stages": 3, "fwd_num_warps": 8}
    flash = TorchVersion(version_of("flash-attn-4") or "0") >= "4.0.0b26"
    return [{"BACKEND": "FLASH"}] * flash + [{**TRITON, **tiles, "fwd_USE_TMA": True}]

def version_of(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None

def listed(tiles):
    """Tiles [rows, columns] bool -> how many a row hold something, their columns first, for a BlockMask."""
    count = tiles.sum(1, dtype=torch.int32)
    order = torch.argsort(tiles.to(torch.int32), dim=1, descending=True, stable=True).to(torch.int32)
    return count[None, None], order[None, None].contiguous()

def packed_tiles(begin, window):
    """Which tiles of causal attention within documents hold anything, and which are full. begin: [S], the
    first token of each token's document -> partial, full: bool [S/128, S/128], disjoint."""
    c = torch.arange(0, len(begin), TILE, device=begin.device)
    r, low, high = c[:, None], begin[::TILE, None], begin[TILE - 1:: TILE, None]
    if window:
        low, high = torch.maximum(low, r - window + 1), torch.maximum(high, r + TILE - window)
    full = (c >= high) & (c < r)
    return (c + TILE > low) & (c <= r) & ~full, full

def stateful_kinds(text):
    """The kinds of layers of this config that keep more than keys and values: recurrent ones have a state."""
    return {*(getattr(text, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}

def packed_reading(base, layers, cfg, text, options):
    """For a target of nothing but attention: make it read a whole micro-batch as one row, documents packed,
    each decoder layer compiled for that one shape, flex_attention with these options -> a function (begin
    [S] on the device) -> the arguments of the target that say so.

    The masks' tensors are rewritten in place: layers compiled once stay compiled. transformers gives them to
    flex_attention as they are. UserError for a target that has other layers."""
    kinds = set(getattr(text, "layer_types", None) or ()) or {"full_attention"}
    if odd := stateful_kinds(text):
        raise UserError(f"it has {min(odd)} layers")
    window = getattr(text, "sliding_window", None) or 0
    window = 0 if window >= cfg.max_length or not getattr(text, "use_sliding_window", True) else window
    if window and not getattr(text, "layer_types", None):
        kinds = {"sliding_attention"}
    windows = {kind: window if kind == "sliding_attention" else 0 for kind in kinds}
    begin = torch.zeros(cfg.tokens, dtype=torch.int32, device=base.device)

    def rule(window):
        def within(b, head, q, kv):
            ok = (kv <= q) & (kv >= begin[q])
            return ok & (kv > q - window) if window else ok
        return within

    masks = {w: BlockMask.from_kv_blocks(
        *(x for tiles in packed_tiles(begin, w) for x in listed(tiles)), BLOCK_SIZE=TILE, mask_mod=rule(w))
        for w in set(windows.values())}

    more = {"kernel_options": options} if options != TRITON else {}  # not every family hands them on

    def mask_of(begins):
        begin.copy_(begins)
        for w, mask in masks.items():
            (count, order), (full_count, full_order) = map(listed, packed_tiles(begin, w))
            for old, new in ((mask.kv_num_blocks, count), (mask.kv_indices, order),
                             (mask.full_kv_num_blocks, full_count), (mask.full_kv_indices, full_order)):
                old.copy_(new)
        return {**more, "attention_mask": masks[0] if set(masks) == {0} else (
            masks[window] if len(kinds) == 1 else {kind: masks[w] for kind, w in windows.items()})}

    base.set_attn_implementation("flex_attention")
    for layer in layers:  # not layer.compile(): the hooks stay outside of the graph
        layer.forward = torch.compile(layer.forward, dynamic=False)
    return mask_of

def on_device(array, device):
    """An array of the host as a tensor there. From pinned memory: the host goes on, whatever the GPU has to
    do yet."""
    tensor = torch.from_numpy(array)
    return tensor if torch.device(device).type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

@torch.no_grad()
def capture(model, layers, taps, batch, features, mask_of=None):
    """Run the target over a micro-batch and write its taps into features [S, K*D].

    Tap t is the residual stream after decoder layer t, with no final norm. With mask_of (packed_reading())
    all documents are one row; without, each is a row of its own, padded on the right, so that causal
    attention needs no mask and recurrent layers leak nothing across documents."""
    device, D, lengths = features.device, features.shape[1] // len(taps), batch["lengths"]
    caught, hooks = tap(layers, taps)
    try:
        if mask_of:
            ids, positions = (on_device(batch[k], device)[None] for k in ("ids", "positions"))
            begins = torch.arange(len(features), device=device) - positions[0]
            model(input_ids=ids, position_ids=positions, use_cache=False, **mask_of(begins))
            for k, t in enumerate(taps):
                features[:, k * D: (k + 1) * D] = caught[t][0]
        else:
            order, starts = np.argsort(-lengths, kind="stable"), np.cumsum(lengths) - lengths
            for first, last, width in rectangles(lengths[order], batch["ids"].shape[0]):
                rows = order[first:last]
                ids = np.zeros((len(rows), width), np.int64)
                source = np.concatenate([r * width + np.arange(lengths[d]) for r, d in enumerate(rows)])
                place = np.concatenate([starts[d] + np.arange(lengths[d]) for d in rows])
                ids.reshape(-1)[source] = batch["ids"][place]
                ids, source, place = (on_device(x, device) for x in (ids, source, place))
                model(input_ids=ids, use_cache=False)
                for k, t in enumerate(taps):
                    found = caught[t].flatten(0, 1)[source]  # [rows, width, D] -> real tokens [n, D]
                    features[:, k * D: (k + 1) * D].index_copy_(0, place, found.to(features.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    features[batch["tokens_used"]:].zero_()

# ------------------------------------------------------------------------------------------------ drafter

class Linear(nn.Linear):
    """No bias; an fp32 master, cast to its input's dtype in the graph: autocast misses the compile cache."""

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
    """The rotation of each position, cosines and sines [T, h] in float32, whatever the model computes in:
    bf16 angles are radians off at 32k."""
    frequency = theta ** (-torch.arange(0, h, 2, device=positions.device, dtype=torch.float32) / h)
    angle = positions.float()[:, None] * frequency  # [T, h/2]
    return torch.cat([angle.cos(), angle.sin()], -1)

def rotate(x, rope):
    """x [T, heads, h] turned by rope [T, h]."""
    (a, b), (cos, sin) = x.float().chunk(2, -1), rope[:, None].chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

def itself(x):
    return x

def recomputed(function, *inputs):
    """function(*inputs); in the compiled graph backward keeps the inputs alone and makes the rest again. Used
    around a cheap function that ends in a matrix product: the product itself is then not made again."""
    if torch.compiler.is_compiling():
        return checkpoint(function, *inputs, use_reentrant=False)
    return function(*inputs)

class Attention(nn.Module):
    def __init__(self, D, H, G, h, eps):
        super().__init__()
        self.h = h
        self.q_proj, self.k_proj, self.v_proj = Linear(D, H * h), Linear(D, G * h), Linear(D, G * h)
        self.o_proj = Linear(H * h, D)
        self.q_norm, self.k_norm = RMSNorm(h, eps), RMSNorm(h, eps)

    def keys_values(self, x, rope, spread):
        """[T, D] -> keys and values [T, G, h]; context rows and block rows go through the same matrices."""
        k = self.k_proj(x).unflatten(-1, (-1, self.h))  # [T, G, h]
        v = self.v_proj(x).unflatten(-1, (-1, self.h))  # [T, G, h]
        return rotate(spread(self.k_norm(k)), rope), spread(v)

    def forward(self, x, rope, context, attend, spread, keep):
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.h)))
        q = rotate(spread(q), rope * self.h ** -0.5)  # [Q, H, h], scaled here, not pair by pair in attention
        own = self.keys_values(x, rope, spread)
        k, v = (torch.cat(pair) for pair in zip(context, own))  # [S+Q, G, h]
        return self.o_proj(keep(attend(q, k, v).flatten(1)))  # [Q, H*h] -> [rows kept, D]

class MLP(nn.Module):
    def __init__(self, D, ffn):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = Linear(D, ffn), Linear(D, ffn), Linear(ffn, D)

    def forward(self, x, norm):
        def gate_and_up(x):
            y = norm(x)
            return self.gate_proj(y), self.up_proj(y)

        return recomputed(lambda a, b: self.down_proj(F.silu(a) * b), *recomputed(gate_and_up, x))

class Layer(nn.Module):
    def __init__(self, D, H, G, h, ffn, eps):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(D, eps), RMSNorm(D, eps)
        self.self_attn, self.mlp = Attention(D, H, G, h, eps), MLP(D, ffn)

    def forward(self, x, rope, context, attend, spread, keep):
        x = keep(spread(x)) + self.self_attn(self.input_layernorm(x), rope, context, attend, spread, keep)
        return x + self.mlp(x, self.post_attention_layernorm)

class Drafter(nn.Module):
    """The DFlash drafter, built from its config.json; the state_dict has the published names. Context rows
    never go through q, o or the FFN: the fused features become keys and values of each layer."""

    def __init__(self, config):
        super().__init__()
        D, eps = config["hidden_size"], config["rms_norm_eps"]
        H, G, h = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        self.theta, self.h, self.kinds = config["rope_theta"], h, config["layer_types"]
        self.block, self.window = config["block_size"], config.get("sliding_window") or 0
        self.options = TRITON  # of flex_attention, fast_attention() may know better ones
        self.causal = [config.get("is_causal", kind == "sliding_attention") for kind in self.kinds]
        self.fc = Linear(len(config["dflash_config"]["target_layer_ids"]) * D, D)
        self.hidden_norm, self.norm = RMSNorm(D, eps), RMSNorm(D, eps)
        self.layers = nn.ModuleList(Layer(D, H, G, h, config["intermediate_size"], eps) for _ in self.kinds)

    def initialise(self, seed):
        """Normal(0, 0.02) as Qwen3's, smaller with depth where a matrix writes to the residual stream; norms
        1. Every tensor has a seed of its own: one core draws a billion weights in 9 s, several share them."""
        @torch.no_grad()
        def fill(i, name, p):
            if p.dim() == 1:
                return p.fill_(1)
            draw = torch.Generator().manual_seed(int(rng(seed, WEIGHTS, i).integers(2**62)))
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = 0.02 / math.sqrt(2 * len(self.layers)) if writes else 0.02
            return p.copy_(torch.randn(p.shape, generator=draw).mul_(scale))

        with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
            list(pool.map(fill, *zip(*((i, *named) for i, named in enumerate(self.named_parameters())))))

    def rules(self):
        """(window, causal) of every layer: what its mask depends on."""
        return [(self.window if kind == "sliding_attention" else 0, causal)
                for kind, causal in zip(self.kinds, self.causal)]

    def context(self, features, rope):
        """features [T, K*D], rope [T, h] -> keys and values of every layer [(k, v)], each [T, G, h]."""
        fused = self.hidden_norm(self.fc(features))  # [T, D]
        return [layer.self_attn.keys_values(fused, rope, itself) for layer in self.layers]

    def forward(self, anchor, mask, rope, context, attends):
        """anchor [N, D] and mask [1, D], the embeddings of the anchors and of the mask token; rope [N*B, h],
        context as above, attends: one function a layer -> [N, B-1, D].

        The first layer's matrices meet the mask's row once and not N*(B-1) times; the last layer's never
        meet slot 0, which drafts nothing."""
        N, B = anchor.shape[0], self.block

        def spread(y):  # [N+1, ...] -> [N*B, ...]
            return torch.cat([y[:N, None], y[None, N:].expand(N, B - 1, *y.shape[1:])], 1).flatten(0, 1)

        def drafts(y):  # [N*B, ...] -> [N*(B-1), ...]
            return y.unflatten(0, (N, B))[:, 1:].flatten(0, 1)

        x = torch.cat([anchor, mask])  # [N+1, D]
        for i, (layer, pair, attend) in enumerate(zip(self.layers, context, attends)):
            x = layer(x, rope, pair, attend, itself if i else spread,
                      itself if i + 1 < len(self.layers) else drafts)
        return self.norm(x).unflatten(0, (N, B - 1))  # [N, B-1, D]

# --------------------------------------------------------------------------------------- anchors and mask
# Experiments with what a block may see belong here: one predicate, and tile bounds that must contain it.

def visible(q, kv, start, anchor, S, B, window, causal):
    """May draft row q see key kv? Elementwise over broadcast integer tensors -> bool.

    Keys 0..S-1 are context, S..S+Q-1 the draft rows. A block sees its document's context strictly before its
    anchor (at the anchor the feature does not exist yet when serving), in a sliding layer only what is less
    than `window` behind the row's own position, and its own block: all, or in a causal layer up to itself."""
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
    """Which 128 x 128 tiles of the mask hold anything, which are full: arithmetic on the sorted anchors.

    start, anchor: [N] -> partial, full: bool [Q/128, (S+Q)/128], disjoint. Partial may be too generous (the
    predicate is evaluated there), full never is. The largest tensor is [Q/128, blocks of a tile, S/128]."""
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
    """The BlockMask of the predicate, built inside the compiled graph: all that varies is a tensor."""
    partial, full = mask_tiles(start, anchor, S, B, window)
    Q = anchor.shape[0] * B
    return BlockMask.from_kv_blocks(
        *listed(partial), *listed(full), BLOCK_SIZE=TILE, seq_lengths=(Q, S + Q),
        mask_mod=lambda b, head, q, kv: visible(q, kv, start, anchor, S, B, window, causal))

def flex_attend(mask, options):
    """Attention over [T, heads, h] by flex_attention, the only path on CUDA. q is scaled already."""
    def attend(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, T, h]
        out = flex_attention(q, k, v, block_mask=mask, scale=1.0, enable_gqa=True, kernel_options=options)
        return out[0].transpose(0, 1)  # [Q, H, h]
    return attend

def dense_attend(mask):
    """Attention with a dense bool mask [Q, T] (None: all visible): on a CPU, and of one block in decoding."""
    def attend(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)
        return out[0].transpose(0, 1)
    return attend

def attentions(drafter, start, anchor, S, dense=False):
    """One attention function a layer, layers of the same rule sharing theirs. dense: on a GPU too, for a few
    blocks of one document."""
    B, made = drafter.block, {}
    for window, causal in set(drafter.rules()):
        if start.is_cuda and not dense:
            made[window, causal] = flex_attend(
                block_mask(start, anchor, S, B, window, causal), drafter.options)
        else:
            Q = anchor.shape[0] * B
            q, kv = (torch.arange(count, device=start.device) for count in (Q, S + Q))
            q, kv = q[:, None], kv[None]
            made[window, causal] = dense_attend(visible(q, kv, start, anchor, S, B, window, causal))
    return [made[rule] for rule in drafter.rules()]

# --------------------------------------------------------------------------------------------------- loss
# Experiments with the objective belong here.

def slot_weights(ce, valid, loss, gamma):
    """Weights [n, B-1] of the cross-entropies ce [n, B-1] (float32); valid [n, B-1] bool, a prefix a row.

    dflash: exp(-(k-1)/gamma) for slot k (arXiv 2602.06036). dpace (arXiv 2605.18810): with q the draft's
    probability of the label, smoothed to (q+1)/2, slot j weighs the sum over m >= j of q_1 ... q_m."""
    if loss == "dflash":
        return valid * torch.exp(-torch.arange(ce.shape[1], device=ce.device) / gamma)
    prefix = torch.where(valid, 0.5 * torch.exp(-ce) + 0.5, 1.0).cumprod(1) * valid
    return prefix.flip(1).cumsum(1).flip(1) * valid

CHUNK = 2 ** 29  # logits at a time: 1 GiB of bf16
LOG2E = math.log2(math.e)

def head_and_loss(rows, head, labels, valid, loss, gamma, softcap, chunk=CHUNK):
    """Cross-entropy through the frozen head, in chunks, with its gradient: full logits never exist.

    rows [n, B-1, D], head [V, D], labels and valid [n, B-1] -> the sum of weights * ce and weights [n, B-1],
    float32, hit [n, B-1] bool, and d(that sum)/d(rows) [n, B-1, D]. chunk: logits at a time. The head is
    frozen, so that the gradient of the rows is all there is to keep: it is made while the logits are at hand
    and nothing is recomputed in backward."""
    V, slots = head.shape[0], rows.shape[1]
    vocabulary, parts = torch.arange(V, device=head.device, dtype=torch.int32), []
    size = max(1, chunk // V // slots)
    for x, y, ok in zip(rows.split(size), labels.split(size), valid.split(size)):
        if parts:  # waits for the chunk before, its sum too: else the compiler keeps the logits of up to 8
            x = x + 0 * (parts[-1][3][-1:, -1:] + parts[-1][0])
        flat, y1 = x.flatten(0, 1), y.flatten()[:, None]  # [n*(B-1), D]
        logits = (flat @ head.T).float()  # [n*(B-1), V]
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        # One kernel finds maximum and sum, another makes gradient and argmax. Both are bound by arithmetic:
        # powers of 2, the shift and the factor in the exponent, are 1.24 ms a GiB of bf16, not 1.61 (H200).
        top = logits.amax(-1, keepdim=True)
        total = torch.exp2(LOG2E * logits - LOG2E * top).sum(-1, keepdim=True)
        ce = (top + total.log() - logits.gather(1, y1)).view_as(ok)
        hit = (torch.where(logits == top, vocabulary, V).amin(-1, keepdim=True) == y1).view_as(ok)
        weights = slot_weights(ce, ok, loss, gamma)
        w = weights.view(-1, 1)
        e = torch.exp2(LOG2E * logits + (torch.log2(w / total) - LOG2E * top))  # w times softmax
        d = torch.where(vocabulary == y1, e - w, e)
        if softcap:
            d = d * (1 - (logits / softcap).square())
        parts.append(((weights * ce).sum(), weights, hit, (d.to(head.dtype) @ head).view_as(x)))
    sums, *whole = zip(*parts)
    return sum(sums), *(torch.cat(p) for p in whole)

def draft_rows(drafter, ends, context, at, first, mask_id, attends):
    """The drafter on blocks whose anchors `first` [N] stand at positions `at` [N] -> rows [N, B-1, D]."""
    dtype, slots = context[0][0].dtype, torch.arange(drafter.block, device=at.device)
    x, mask = (F.embedding(ids, ends["embed"]).to(dtype) * ends["embed_scale"]
               for ids in (first, first.new_full((1,), mask_id)))  # [N, D], [1, D]
    return drafter(x, mask, ends["rope"][(at[:, None] + slots).flatten()], context, attends)

COUNTERS = 8  # loss, divisor; accepted, blocks; the same of whole blocks; bad positions, blocks they cost

def drafter_step(drafter, ends, features, positions, start, anchor, tokens, valid, mask_id, loss, gamma):
    """One micro-batch, the compiled graph: features to draft rows, their gradient, and the counters.

    features [S, K*D], positions [S], start/anchor [N], tokens/valid [N, B]; ends: frozen_ends() and "rope",
    rotary() of all positions (looked up: cosines made where they are used cost 2% of the step) -> rows
    [N, B-1, D] (requires grad), their gradient (of the weighted sum, divided by nothing), counters [COUNTERS
    + 2 (B-1)] float32. A feature that is not finite becomes zeros, blocks that would see it weigh nothing."""
    S = features.shape[0]
    bad = ~torch.isfinite(features).all(-1)  # [S]
    features = torch.where(bad[:, None], 0, features)
    before = F.pad(bad.to(torch.int32).cumsum(0), (1, 0))  # [S+1], bad positions before each
    labelled = valid.any(1)
    valid = valid & (before[anchor] == before[start])[:, None]

    context = drafter.context(features, ends["rope"][positions])
    rows = draft_rows(drafter, ends, context, anchor - start, tokens[:, 0], mask_id,
                      attentions(drafter, start, anchor, S))  # [N, B-1, D]

    with torch.no_grad():
        labels, valid = tokens[:, 1:], valid[:, 1:]
        weighted, weights, hit, gradient = head_and_loss(
            rows.detach(), ends["head"], labels, valid, loss, gamma, ends["softcap"])
        block = valid.any(1)
        divisor = weights.sum() if loss == "dflash" else block.sum()
        hit = hit & valid
        accepted = hit.to(torch.int32).cumprod(1).sum(1)  # [N]
        whole = valid.all(1)
        counters = torch.stack([c.float() for c in (
            weighted, divisor, (block * accepted).sum(), block.sum(), (whole * accepted).sum(),
            whole.sum(), bad.sum(), (labelled & ~block).sum())])
        counters = torch.cat([counters, hit.sum(0).float(), valid.sum(0).float()])
    return rows, gradient, counters

def read_counters(c):
    """Counters (list of floats, summed over micro-batches and drafters) -> what a person reads."""
    def ratio(a, b):
        return a / b if b else float("nan")

    hits, valid = c[COUNTERS: (len(c) + COUNTERS) // 2], c[(len(c) + COUNTERS) // 2:]
    return {"loss": ratio(c[0], c[1]), "accept_len": 1 + ratio(c[2], c[3]),
            "accept_len_whole": 1 + ratio(c[4], c[5]), "blocks": int(c[3]),
            "position_accuracy": [round(h / n, 4) if n else None for h, n in zip(hits, valid)],
            "bad_positions": int(c[6]), "bad_blocks": int(c[7])}

def step_flops(d, S, N, head_rows, pairs):
    """Useful floating-point operations of a micro-batch, forward and backward. d: the drafter's config;
    pairs: query-key pairs that are visible, summed over its layers."""
    D, H, G, h = d["hidden_size"], d["num_attention_heads"], d["num_key_value_heads"], d["head_dim"]
    L, K, Q = d["num_hidden_layers"], len(d["dflash_config"]["target_layer_ids"]), N * d["block_size"]
    return (6 * Q * L * D * (2 * H * h + 2 * G * h + 3 * d["intermediate_size"]) + 12 * S * L * D * G * h
            + 4 * S * K * D * D + 4 * head_rows * d["vocab_size"] * D + 14 * pairs * H * h)

# ---------------------------------------------------------------------- speculative decoding and evaluation

def pick(logits, temperature, draw):
    """Logits [n, V] -> (tokens [n], probabilities [n, V] or None when greedy)."""
    if not temperature:
        return logits.argmax(-1), None
    p = torch.softmax(logits.float() / temperature, -1)
    return torch.multinomial(p, 1, generator=draw)[:, 0], p

def verify(draft, draft_p, logits, temperature, draw):
    """Lossless verification of one block. draft [B-1], its probabilities [B-1, V] (None: certain), the
    target's logits [B, V] after anchor, draft 1, ... -> (accepted count, next token).

    Greedy: the leading drafts that are the target's argmax. Sampling (arXiv 2211.17192): draft i is kept with
    probability min(1, p/q), the first rejection redrawn from max(p - q, 0): the target's distribution."""
    if not temperature:
        best = logits.argmax(-1)
        n = int((draft == best[:-1]).cumprod(0).sum())
        return n, int(best[n])
    p = torch.softmax(logits.float() / temperature, -1)
    for i, token in enumerate(draft.tolist()):
        q = F.one_hot(draft[i], p.shape[1]).float() if draft_p is None else draft_p[i]
        if torch.rand((), generator=draw, device=p.device) * q[token] >= p[i, token]:
            return i, int(torch.multinomial((p[i] - q).clamp(min=0), 1, generator=draw))
    return len(draft), int(torch.multinomial(p[-1], 1, generator=draw))

def best_tree(logp, ids, budget):
    """The draft tree of `budget` nodes with the most probable prefixes (DDTree, arXiv 2604.12989), best
    first. logp, ids: lists [B-1][k], the drafts of each slot, best first -> [(token, parent)], parent 0 the
    anchor, i the i-th node."""
    heap, nodes = [(-logp[0][0], 0, 0, 0)], []
    while heap and len(nodes) < budget:
        cost, parent, slot, rank = heapq.heappop(heap)
        nodes.append((ids[slot][rank], parent))
        if rank + 1 < len(logp[slot]):
            sibling = cost + logp[slot][rank] - logp[slot][rank + 1]
            heapq.heappush(heap, (sibling, parent, slot, rank + 1))
        if slot + 1 < len(logp):
            heapq.heappush(heap, (cost - logp[slot + 1][0], len(nodes), slot + 1, 0))
    return nodes

def draft_tree(logits, budget):
    """Draft logits [B-1, V] -> best_tree() of them, as (tokens, parents)."""
    top = torch.log_softmax(logits, -1).topk(min(budget, logits.shape[-1]))
    return zip(*best_tree(top.values.tolist(), top.indices.tolist(), budget))

def verify_tree(tokens, parents, chosen):
    """Follow the target through a tree. chosen: its token after the anchor and after each node -> (path: the
    anchor, 0, and the nodes kept, the token after them). Greedy or sampled, it is the target that chooses."""
    nodes, path = {pair: i for i, pair in enumerate(zip(parents, tokens), 1)}, [0]
    while (path[-1], chosen[path[-1]]) in nodes:
        path.append(nodes[path[-1], chosen[path[-1]]])
    return path, chosen[path[-1]]

class Reader:
    """The target with its key/value cache and, after each call, the features of the tokens just read.

    A state cannot be cropped: the cache goes back to before the whole block, and what was kept of it is read
    once more, together with the next block."""

    def __init__(self, model, taps):
        self.model, self.taps, self.device = model, taps, model.device
        self.caught, _ = tap(decoder_layers(model), taps)
        known = inspect.signature(model.forward).parameters
        self.argument = "cache" if "cache" in known else "past_key_values"  # transformers 5.24 renames it
        self.stateful = bool(stateful_kinds(model.config.get_text_config()))
        self.placed = self.stateful and "position_ids" in known  # bamba counts from 0 at every call

    def start(self):
        from transformers import DynamicCache
        self.cache = DynamicCache(config=self.model.config) if self.stateful else DynamicCache()
        self.length, self.again = 0, []

    @torch.inference_mode()
    def read(self, tokens, last=0, parents=None):
        """Append tokens (list) -> logits [n, V] of the last `last` (0: all); features [n, K*D] of all.
        parents: of each token its parent's index, of the first -1: a tree, where each sees its ancestors."""
        if len(self.again) > 32:  # alone, or every block from here on would read them all
            again, self.again = self.again, []
            self.read(again, last=1)
        again, self.again, self.block = len(self.again), [], self.again + tokens
        more = {}
        if self.placed:
            more["position_ids"] = self.length + torch.arange(len(self.block), device=self.device)[None]
        if self.stateful and len(tokens) > 1:  # keys and values are never written in place, states are
            self.past = [{k: x if k in ("keys", "values") else copy.deepcopy(x)
                          for k, x in vars(layer).items()} for layer in self.cache.layers]
        if parents:
            seen = torch.eye(len(tokens), dtype=torch.bool)
            for i, parent in enumerate(parents[1:], 1):
                seen[i] |= seen[parent]
            more = self.tree_arguments(seen.to(self.device))
        out = self.model(input_ids=torch.tensor([self.block], device=self.device), use_cache=True,
                         logits_to_keep=last or len(tokens), **more, **{self.argument: self.cache})
        self.before, self.length = self.length + again, self.length + len(self.block)
        if self.taps:
            self.features = torch.cat([self.caught[t][0, again:] for t in self.taps], -1)
        return out.logits[0, -(last or len(tokens)):]  # a family may ignore logits_to_keep

    def tree_arguments(self, seen):
        """seen [n, n] bool, which of the new tokens each sees -> mask and positions as transformers takes
        them: additive masks of four dimensions are used as they are."""
        text, depth = self.model.config.get_text_config(), seen.sum(1) - 1
        at = self.length + depth  # [n]
        ok = torch.cat([seen.new_ones(len(seen), self.length), seen], 1)  # [n, T]
        keys = torch.cat([torch.arange(self.length, device=at.device), at])
        window = getattr(text, "sliding_window", None) or len(keys)
        lowest = torch.finfo(self.model.dtype).min
        masks = [torch.where(x, 0.0, lowest).to(self.model.dtype)[None, None]
                 for x in (ok, ok & (keys > at[:, None] - window))]
        kinds = getattr(text, "layer_types", None)
        return {"position_ids": at[None], "attention_mask": dict(zip(
            ("full_attention", "sliding_attention"), masks)) if kinds else masks[1]}

    @torch.inference_mode()
    def keep(self, path):
        """Leave of the tokens read last only those at the indices `path`, in this order."""
        if path[-1] != len(path) - 1:  # a branch of a tree
            kept = self.before + torch.tensor(path, device=self.device)
            for layer in self.cache.layers:
                for x in (layer.keys, layer.values):  # [1, heads, T, h]
                    x[:, :, self.before: self.before + len(path)] = x.index_select(2, kept)
        rejected = self.length - self.before - len(path)
        if rejected and self.stateful:
            for layer, past in zip(self.cache.layers, self.past):
                vars(layer).update(past)
            self.again, self.length = self.block[:-rejected], self.length - len(self.block)
        elif rejected:
            self.cache.crop(-rejected)  # negative: so many off the end
            self.length -= rejected

@torch.inference_mode()
def check_states(model):
    """UserError for a target whose own code reads no block on from its state, as jamba's: what follows a
    cleared state must come out otherwise."""
    reader, logits, ids = Reader(model, ()), [], list(range(8))
    why = f"--evaluate: {model.config._name_or_path}: its code reads no block of tokens on from a state"
    for clear in (False, True):
        with refused(why, (ValueError, RuntimeError)):  # minimax wants a cache of its own
            reader.start()
            reader.read(ids)
            layers = [layer for layer in reader.cache.layers if hasattr(layer, "conv_states")]
            states, short = ([x for layer in layers for x in getattr(layer, name).values() if x is not None]
                             for name in ("recurrent_states", "conv_states"))
            for x in states or short if clear else ():
                x.zero_()
            logits.append(reader.read(ids))
    if layers and torch.equal(*logits):
        raise UserError(why)

def head_logits(rows, ends):
    """rows [..., D] -> the target's logits of them [..., V] in float32."""
    logits = (rows @ ends["head"].T.to(rows.dtype)).float()
    return ends["softcap"] * torch.tanh(logits / ends["softcap"]) if ends["softcap"] else logits

def read_context(drafter, ends, cache, features, place):
    """Write the keys and values of context rows, features [n, K*D], to every layer's cache at place [n]."""
    for pair, new in zip(cache, drafter.context(features, ends["rope"][place])):
        for kept, rows in zip(pair, new):
            kept.index_copy_(0, place, rows)

def draft_step(drafter, ends, cache, features, at, mask_id):
    """One round of drafting, fixed shapes: write the new context rows to the cache, draft -> logits [B-1, V].

    cache: keys and values [C, G, h] of every layer; features [B, K*D], of which the rows past the context are
    padding; at: int64 [3], where the features belong, how much context there is, the anchor's token. Padding
    rows land past the context, where no draft sees them and the next round writes."""
    B, C = drafter.block, len(cache[0][0])
    place, S, anchor = at[:1] + torch.arange(B, device=at.device), at[1:2], at[2:]
    read_context(drafter, ends, cache, features, place)
    attends = attentions(drafter, S * 0, S, C, dense=True)
    return head_logits(draft_rows(drafter, ends, cache, S, anchor, mask_id, attends)[0], ends)

class Draft:
    """The drafter with its own cache of context keys and values, for `length` tokens. zero: features blanked,
    a control. step: draft_step, compiled on a GPU, where a round is else 550 kernels to launch, half as many
    as a small target's."""

    def __init__(self, drafter, ends, mask_token_id, length, zero=False, step=draft_step):
        self.drafter, self.mask, self.zero, self.step, self.length = drafter, mask_token_id, zero, step, 0
        weight, rows = drafter.fc.weight, length + drafter.block
        positions = torch.arange(rows, device=weight.device)
        self.ends = ends | {"rope": rotary(positions, drafter.theta, drafter.h)}
        shape = rows, drafter.layers[0].self_attn.k_proj.out_features // drafter.h, drafter.h
        self.cache = [[torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2)]
                      for _ in drafter.layers]

    @torch.inference_mode()
    def logits(self, anchor, features):
        """anchor: the newest token; features [n, K*D] of the tokens read since the last call -> [B-1, V]."""
        d, B = self.drafter, self.drafter.block
        features = features.to(d.fc.weight.dtype) * (0 if self.zero else 1)
        early, late = features[:-B], features[-B:]  # a round reads at most B tokens, a prompt more
        begin, self.length = self.length + len(early), self.length + len(features)
        if len(early):
            place = torch.arange(begin - len(early), begin, device=features.device)
            read_context(d, self.ends, self.cache, early, place)
        at = torch.tensor([begin, self.length, anchor], device=features.device)
        late = F.pad(late, (0, 0, 0, B - len(late)))
        return self.step(d, self.ends, self.cache, late, at, self.mask)

    def __call__(self, tokens, features, temperature, draw):
        return pick(self.logits(tokens[-1], features), temperature, draw)

def prompt_lookup(B, back=3):
    """A drafter that copies what followed the last occurrence of the last `back` tokens: the yardstick."""
    def draft(tokens, features, temperature, draw):
        n, key = len(tokens), tokens[-back:]
        found = next((i for i in range(n - back - 1, -1, -1) if tokens[i: i + back] == key), n)
        copied = (tokens[found + back:] + [0] * B)[: B - 1]
        return torch.tensor(copied, device=features.device), None
    return draft

def decode(reader, prompt, new_tokens, end_ids, draft=None, temperature=0.0, draw=None, forced=None, tree=0):
    """Decode up to new_tokens after prompt (ids), alone or with draft -> (tokens, accepted a round, logits).

    logits: one [V] row a token, those it was chosen by. forced: read these tokens instead of the chosen ones.
    tree: draft trees of so many nodes. An accepted length counts the drafts kept and the target's own token,
    up to end token and limit."""
    reader.start()
    logits = reader.read(prompt, last=1)
    out = [int(pick(logits, temperature, draw)[0]) if forced is None else forced[0]]
    rounds, kept = [], [logits[0]]
    features = reader.features if draft else None
    while out[-1] not in end_ids and len(out) < new_tokens:
        if draft is None:
            logits = reader.read([out[-1]], last=1)
            out.append(int(pick(logits, temperature, draw)[0]) if forced is None else forced[len(out)])
            kept.append(logits[0])
            continue
        if tree:
            drafts, parents = draft_tree(draft.logits(out[-1], features), tree)
            logits = reader.read([out[-1], *drafts], parents=[-1, *parents])
            path, own = verify_tree(drafts, parents, pick(logits, temperature, draw)[0].tolist())
        else:
            block, p = draft(prompt + out, features, temperature, draw)
            drafts = block.tolist()
            logits = reader.read([out[-1], *drafts])
            n, own = verify(block, p, logits, temperature, draw)
            path = list(range(n + 1))
        new = [*(drafts[i - 1] for i in path[1:]), own][: new_tokens - len(out)]
        new = new[: next((i + 1 for i, t in enumerate(new) if t in end_ids), len(new))]
        path = path[: len(new)]
        features, out, kept = reader.features[path], out + new, kept + list(logits[path])
        rounds.append(len(new))
        reader.keep(path)  # all but the newest token, which the next round reads
    return out, rounds, kept

def lossless(reader, prompt, spec, spec_logits, plain, plain_logits):
    """Was every token the plain target's own choice? -> (tokens that differ, largest logit gap, noise).

    The reference is one-token decoding of the very prefix that was decoded: the plain run as far as it is the
    same, from there a run forced along the same tokens. noise: where both choose the same token, the largest
    difference between its logit read in a block and read alone."""
    same = 1 + next((i for i, (a, b) in enumerate(zip(spec, plain)) if a != b), len(spec))
    if same < len(spec):
        forced = decode(reader, prompt + spec[:same], len(spec) - same, (), forced=spec[same:])[2]
        plain_logits = plain_logits[:same] + forced
    one, block = torch.stack(plain_logits[: len(spec)]).float(), torch.stack(spec_logits).float()
    chosen = torch.tensor(spec, device=one.device)[:, None]
    gaps = one.max(-1).values - one.gather(1, chosen)[:, 0]
    noise = (one - block).gather(1, chosen)[:, 0].abs() * (gaps == 0)
    return int((gaps > 0).sum()), float(gaps.max()), float(noise.max())

TREES = (16, 32, 64)  # nodes of the draft trees that the walk looks at
WALK_BATCHES, WALK_ROWS = 4, 16  # of an evaluation: micro-batches walked through, documents of each

@torch.no_grad()
def walk(drafter, ends, features, ids, supervised, mask_id):
    """What decoding along this text would accept. features [n, K*D] and ids [n] (numpy) of one document,
    supervised [n] bool -> int64 [2 + len(TREES), B+1], how often a draft yields 1, 2 ... B tokens: at every
    supervised position; on the chain that decoding follows, from each round's last token on; on the chains
    of trees.

    Random anchors flatter: they fall where one round yields much as often as where it yields little, and
    decoding, which jumps, spends most of its rounds in the hard places."""
    B, n = drafter.block, len(ids)
    room = np.zeros(n, np.int64)  # tokens of its reply after each token
    for i in range(n - 2, -1, -1):
        room[i] = room[i + 1] + 1 if supervised[i] and supervised[i + 1] else 0
    anchors, device = np.flatnonzero(room), features.device
    tokens = on_device(ids, device)
    context = drafter.context(features, ends["rope"][:n])
    best, found = [], np.zeros((2 + len(TREES), B + 1), np.int64)
    for part in torch.from_numpy(anchors).split(min(256, max(1, CHUNK // 4 // len(ends["head"]) // B))):
        at = part.to(device)
        attends = attentions(drafter, at * 0, at, n, dense=True)
        rows = draft_rows(drafter, ends, context, at, tokens[at], mask_id, attends)  # [blocks, B-1, D]
        logp = torch.log_softmax(head_logits(rows, ends), -1)
        best += zip(*(x.cpu() for x in logp.topk(min(max(TREES), logp.shape[-1]))))
    drafts = dict(zip(anchors.tolist(), best))
    labels = ids.tolist()

    def kept(anchor, tree):
        logp, best = drafts[anchor]
        truth = [*labels[anchor + 1: anchor + 1 + min(B - 1, room[anchor])], None]  # None: no token follows
        if tree:
            drafted, parents = zip(*best_tree(logp[:, :tree].tolist(), best[:, :tree].tolist(), tree))
        else:
            drafted, parents = best[:, 0].tolist(), range(B - 1)
        depth = [0]
        for parent in parents:
            depth.append(depth[parent] + 1)
        path, _ = verify_tree(drafted, parents, [truth[min(d, len(truth) - 1)] for d in depth])
        return min(len(path), int(room[anchor]))

    plain = {a: kept(a, 0) for a in drafts}
    found[0] = np.bincount(list(plain.values()), minlength=B + 1)
    for begin in (a for a in drafts if not room[a - 1]):  # each reply's first token, which the prompt gives
        for i, tree in enumerate((0, *TREES), 1):
            at = begin
            while room[at]:
                accepted = kept(at, tree) if tree else plain[at]
                found[i, accepted] += 1
                at += accepted
    return found

def read_walk(found):
    """What walk() found, summed over documents -> means and the histogram of the chain's rounds."""
    means = (found * np.arange(found.shape[1])).sum(1) / np.maximum(found.sum(1), 1)
    chain = found[1, 1:]
    reach = chain[::-1].cumsum()[::-1][1:] / max(chain.sum(), 1)  # rounds that accept k drafts or more
    return {"everywhere": means[0], "walk": means[1], **{f"tree_{n}": x for n, x in zip(TREES, means[2:])},
            "histogram": chain.tolist(), "acceptance": [round(float(x), 4) for x in reach]}

def walk_line(w):
    return (f"walk {w['walk']:.3f}, everywhere {w['everywhere']:.3f}, trees of "
            + ", ".join(f"{n} {w[f'tree_{n}']:.3f}" for n in TREES)
            + "; share of rounds with 1, 2 ... drafts right " + " ".join(f"{x:.2f}" for x in w["acceptance"]))

def read_chats(path, flag):
    """JSONL of {"prompt": text} or {"messages": [...]}, perhaps with tools -> ([(row number, turns, tools)],
    [(row number, reason)])."""
    chats, bad = [], []
    with refused(f"{flag} {path}: cannot be read", (OSError, EOFError, zlib.error)), \
            (gzip.open if path.endswith(".gz") else open)(path, "rb") as f:
        lines = f.read().split(b"\n")  # not splitlines(): a text may hold U+2028
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            prompt = row.get("prompt")
            turns = clean_messages(row.get("messages") if prompt is None else
                                   [{"role": "user", "content": prompt}])
            if not any(turn["role"] == "user" for turn in turns):
                raise ValueError("no user's turn")
            json.dumps(turns, ensure_ascii=False).encode()  # ValueError for half of a surrogate pair
            chats.append((number, turns, tools_of(row)))
        except (ValueError, TypeError, AttributeError, RecursionError) as e:
            not_json = isinstance(e, (json.JSONDecodeError, UnicodeDecodeError))
            bad.append((number, "not JSON" if not_json else first_line(e)[:60]))
    if not chats and not bad:
        raise UserError(f"{flag} {path}: no prompt in it")
    return chats, bad

def read_prompts(path, tokenizer, limit):
    """The chats of a file without a last assistant turn -> [(ids, [])]."""
    if not tokenizer.chat_template:
        raise UserError(f"--prompts {path}: the target's tokenizer has no chat template")
    chats, bad = read_chats(path, "--prompts")
    if bad:
        raise UserError(f"--prompts {path}, line {bad[0][0] + 1}: no prompt, no messages ({bad[0][1]})")
    prompts = []
    for number, turns, tools in chats[:limit]:
        turns = turns[:-1] if turns[-1]["role"] == "assistant" else turns
        with refused(f"--prompts {path}, line {number + 1}: the chat template does not take it"):
            prompts.append((tokenizer.apply_chat_template(
                turns, tools=tools, add_generation_prompt=True, return_dict=False), []))
    return prompts

def held_out_prompts(documents, limit):
    """The held-out chats -> [(ids up to the first reply, ids of that reply as stored)]."""
    order = documents.held_out[0]
    chosen = rng(0, len(order)).permutation(order)[:limit].tolist()
    rows = documents.rows.with_format("numpy").select(chosen)
    prompts = []
    for row in rows:
        begin = row["loss_mask"].argmax()
        end = begin + [*row["loss_mask"][begin:], False].index(False)
        prompts.append((row["input_ids"][:begin].tolist(), row["input_ids"][begin:end].tolist()))
    return [pair for pair in prompts if pair[0]]

def compare_decoding(model, taps, drafts, prompts, cfg, end_ids):
    """Decode every prompt plainly and with each of `drafts` (name -> (function: length -> draft, nodes of its
    trees or 0)), batch 1 ->
    {"plain" and each name: {"runs": [(tokens, rounds, seconds)], "differ", "gap", "noise" of lossless()}}."""
    results = {name: {"runs": [], "differ": 0, "gap": 0.0, "noise": 0.0} for name in ("plain", *drafts)}
    plain_reader, reader = Reader(model, ()), Reader(model, taps)
    length = max(map(len, prompts)) + cfg.new_tokens + cfg.block
    length = -(-length // TILE) * TILE  # one shape, and one that the next evaluation may find compiled

    def timed(name, prompt, new_tokens, seed):
        make, tree = drafts.get(name, (None, 0))
        draft = make(length) if make else None
        draw = torch.Generator(device=model.device).manual_seed(seed)
        begin = time.perf_counter()
        out, rounds, logits = decode(reader if draft else plain_reader, prompt, new_tokens, end_ids, draft,
                                     cfg.temperature, draw, tree=tree)  # its tokens are on the host: all done
        return (out, rounds, time.perf_counter() - begin), logits

    for name in results:
        timed(name, prompts[0], min(2 * cfg.block, cfg.new_tokens), 0)  # first calls load kernels: untimed
    for i, prompt in enumerate(prompts, 1):
        for name, r in results.items():
            run, logits = timed(name, prompt, cfg.new_tokens, cfg.seed + i - 1)
            r["runs"].append(run)
            if name == "plain":
                plain = run[0], logits
            elif not cfg.temperature:
                differ, gap, noise = lossless(plain_reader, prompt, run[0], logits, *plain)
                r.update(differ=r["differ"] + differ, gap=max(r["gap"], gap), noise=max(r["noise"], noise))
        if i % 8 == 0 and i < len(prompts):
            say(f"  {i}/{len(prompts)} prompts decoded, accepted a round so far: " + ", ".join(
                f"{name} {mean_accepted(results[name]['runs']):.2f}" for name in drafts))
    return results

def mean_accepted(runs):
    """Tokens after the first over rounds: what decoding accepts a round, the target's own token included."""
    rounds = [n for _, r, _ in runs for n in r]
    return sum(rounds) / len(rounds) if rounds else float("nan")

def decoding_table(results, block, end_ids):
    """The results of compare_decoding as lines of text, and as one dict for metrics.jsonl."""
    runs, values = results["plain"]["runs"], {}
    ended = sum(out[-1] in end_ids for out, *_ in runs)
    columns = (f"all {len(runs)}", f"finished {ended}", f"unfinished {len(runs) - ended}", "tokens/s",
               "speed-up", "differ")
    lines = [f"{'accepted a round':16}" + "".join(f"{c:>14}" for c in columns)]
    for name, r in results.items():
        done, rest = ([x for x in r["runs"] if (x[0][-1] in end_ids) == side] for side in (True, False))
        rate = sum(len(o) for o, _, _ in r["runs"]) / sum(s for *_, s in r["runs"])
        v = values[name] = {
            "accepted": mean_accepted(r["runs"]), "finished": mean_accepted(done),
            "unfinished": mean_accepted(rest), "replies": len(r["runs"]), "replies_finished": len(done),
            "rounds": sum(len(x[1]) for x in r["runs"]), "rounds_finished": sum(len(x[1]) for x in done),
            "tokens_per_s": rate, "differ": r["differ"], "gap": r["gap"], "noise": r["noise"]}
        v["speedup"] = rate / values["plain"]["tokens_per_s"]
        accepted = (1 if name == "plain" and part else v[k] for k, part in (
            ("accepted", r["runs"]), ("finished", done), ("unfinished", rest)))
        lines.append(f"{name:16}" + "".join(f"{'-':>14}" if math.isnan(x) else f"{x:14.2f}" for x in accepted)
                     + f"{rate:14.1f}{v['speedup']:14.2f}{r['differ']:14}")
    counts = Counter(n for _, rounds, _ in results["drafter"]["runs"] for n in rounds)
    shares = (f"{n}: {counts[n] / max(counts.total(), 1):.0%}" for n in range(1, block + 1))
    lines.append(f"accepted a round, drafter: {'  '.join(shares)}")
    return lines, {**values, "histogram": [counts[n] for n in range(1, block + 1)]}

def judge_lossless(results, exact):
    """(ok, one line): did drafting change the output, and is that within what is allowed."""
    drafted = [r for name, r in results.items() if name != "plain"]
    differ, tokens = sum(r["differ"] for r in drafted), sum(len(o) for r in drafted for o, *_ in r["runs"])
    gap, noise = (max(r[k] for r in drafted) for k in ("gap", "noise"))
    ok = differ == 0 if exact else gap <= 2 * noise and differ <= 0.02 * tokens
    rule = "none may in float32" if exact else (
        f"up to 2% may by a logit gap of {2 * noise:.3f}, twice the noise between reading in a block and "
        f"alone in this run; the largest is {gap:.3f}")
    return ok, (f"{'lossless' if ok else 'NOT LOSSLESS'}: {differ} of {tokens} tokens differ from the plain "
                f"target's one-token choice ({rule})")

# ------------------------------------------------------------------------------ checkpoint, resume, export

def export(folder, config, state):
    """Write what a serving engine loads: config.json and the bf16 cast of the state dict, published names."""
    from safetensors.torch import save_file

    tensors = {k: v.to(torch.bfloat16).contiguous() for k, v in state.items()}
    save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    (Path(folder) / "config.json").write_text(json.dumps(config, indent=2) + "\n")

def read_drafter(folder):
    """An exported folder -> (config, state dict), in both styles of published config. UserError."""
    from safetensors.torch import load_file

    with refused(f"{folder}: no drafter that can be read"):  # safetensors' own error is no ValueError
        config = json.loads((Path(folder) / "config.json").read_text())
        config = {k: v for k, v in config.items() if v is not None}  # a null says no more than an absence
        state = load_file(Path(folder) / "model.safetensors")
    inner = config.setdefault("dflash_config", {})
    if not isinstance(inner, dict):
        raise UserError(f"{folder}/config.json: dflash_config {inner!r} is no object")
    for key in ("block_size", "mask_token_id", "target_layer_ids"):
        found = [v for v in (config.get(key), inner.get(key)) if v is not None]
        if not found or found[0] != found[-1]:
            problem = f"has two values, {found}" if found else "is missing, this is no DFlash drafter"
            raise UserError(f"{folder}/config.json: {key} {problem}")
        inner[key] = found[0]
    config["block_size"] = inner["block_size"]
    with refused(f"{folder}/config.json: makes no sense", DAMAGED):
        follow(config, f"{folder}/config.json")
    return config, state

def follow(config, where):
    """Fill in what a config leaves to its reader, as vLLM does, and refuse what Drafter would not compute."""
    def need(ok, problem):
        if not ok:
            raise UserError(f"{where}: {problem}")

    inner, rope = config["dflash_config"], config.get("rope_parameters") or {}
    for key in ("hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
                "head_dim rms_norm_eps").split():
        need(key in config, f"{key} is missing")
        need(key == "rms_norm_eps" or (type(config[key]) is int and config[key] > 0),
             f"{key} {config[key]!r} is no size")
    taps = inner["target_layer_ids"]
    need(isinstance(taps, list) and taps and all(type(x) is int and x >= 0 for x in taps),
         f"target_layer_ids {taps} are no layers")
    thetas = [x for x in (config.get("rope_theta"), rope.get("rope_theta")) if x is not None]
    for key, value in (("rms_norm_eps", config["rms_norm_eps"]), *(("rope_theta", x) for x in thetas)):
        need(type(value) in (int, float) and value > 0, f"{key} {value!r} is no number above 0")
    thetas = set(thetas)
    need(len(thetas) == 1, f"rope_theta has two values, {thetas}" if thetas else "rope_theta is missing")
    config["rope_theta"] = thetas.pop()
    n = config["num_hidden_layers"]
    if inner.get("use_swa"):  # ModelOpt's spelling: every layer slides and sees its whole block
        config |= {"layer_types": ["sliding_attention"] * n, "is_causal": False,
                   "sliding_window": inner.get("swa_window_size")}
    elif "causal" in inner:
        config.setdefault("is_causal", inner["causal"])
    for key, source, least in (("block_size", inner, 2), ("mask_token_id", inner, 0),
                               ("sliding_window", config, 0)):
        value = source.get(key) or 0
        need(type(value) is int and value >= least, f"{key} {value!r} is no whole number from {least}")
    kinds = config.setdefault("layer_types", ["full_attention"] * n)
    need(len(kinds) == n, f"layer_types names {len(kinds)} layers, num_hidden_layers is {n}")
    odd = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    need(not odd, f"layer_types has {odd}, the drafter has no such layer")
    need("sliding_attention" not in kinds or config.get("sliding_window"), "sliding_window is missing")
    need(config["num_attention_heads"] % config["num_key_value_heads"] == 0,
         f"num_key_value_heads {config['num_key_value_heads']} does not divide num_attention_heads")
    for key, value, plain in (("rope_type", rope.get("rope_type"), "default"),
                              ("rope_scaling", config.get("rope_scaling"), "null"),
                              ("hidden_act", config.get("hidden_act"), "silu")):
        need(value in (None, plain), f"{key} {value}: the drafter knows {plain} alone")

def adopt(cfg, given, config):
    """--init-from: cfg with all that the folder's config decides; UserError where a flag says otherwise."""
    sliding, inner = config["layer_types"].count("sliding_attention"), config["dflash_config"]
    theirs = {"block": config["block_size"], "layers": config["num_hidden_layers"],
              "heads": config["num_attention_heads"], "kv_heads": config["num_key_value_heads"],
              "head_dim": config["head_dim"], "ffn": config["intermediate_size"],
              "target_layer_ids": ",".join(map(str, inner["target_layer_ids"])),
              "mask_token_id": inner["mask_token_id"],
              "sliding_window": config.get("sliding_window") or 0 if sliding else 0,
              "full_layers": config["num_hidden_layers"] - sliding if sliding else cfg.full_layers,
              "sliding_bidirectional": bool(sliding) and config.get("is_causal") is False}
    for k in sorted(theirs.keys() & given):
        if getattr(cfg, k) != theirs[k]:
            raise UserError(f"--{k.replace('_', '-')} {getattr(cfg, k)}: the drafter of --init-from has "
                            f"{theirs[k]}, leave the flag out")
    return dataclasses.replace(cfg, **theirs)

def strict_load(drafter, state, where):
    want, have = ({k: tuple(v.shape) for k, v in s.items()} for s in (drafter.state_dict(), state))
    wrong = [f"{k} {have.get(k, 'missing')} (expected {want.get(k, 'nothing')})"
             for k in sorted(want.keys() | have.keys()) if want.get(k) != have.get(k)]
    if wrong:
        raise UserError(f"{where}: {len(wrong)} tensors do not fit: " + "; ".join(wrong[:8]))
    drafter.load_state_dict(state)

def checksum(path):
    crc = 0
    with open(path, "rb") as f:
        while chunk := f.read(1 << 24):
            crc = zlib.crc32(chunk, crc)
    return crc

def write_checkpoint(out, step, config, masters, trainer, keep):
    """checkpoints/step-N as a whole or not at all: write beside, fsync, rename, move `latest`, drop what is
    older than the newest `keep`. Later ones can only be broken: the run went on from before them.

    masters: fp32 state dict on the CPU; trainer: all else that resuming needs. Whatever the disk refuses is
    raised, as OSError or as torch's or safetensors' own.
    """
    root = Path(out) / "checkpoints"
    root.mkdir(exist_ok=True)
    for stale in root.glob(".step-*"):  # an unfinished write of ours: the lock's holder alone writes
        shutil.rmtree(stale)
    beside, final = root / f".step-{step:08d}", root / f"step-{step:08d}"
    beside.mkdir()
    export(beside, config, masters)
    torch.save({"masters": masters, **trainer}, beside / "trainer.pt")
    files = {f.name: [f.stat().st_size, checksum(f)] for f in sorted(beside.iterdir())}
    (beside / "manifest.json").write_text(json.dumps({"step": step, "files": files}))
    for path in (*beside.iterdir(), beside):
        fsync(path)
    if final.exists():  # only a broken one can be in the way: the run went on from an older one
        final.rename(root / f"broken-{step:08d}-{time.time_ns()}")
    beside.rename(final)
    fsync(root)
    atomic_write(root / "latest", final.name + "\n")
    older = sorted(folder for folder in root.glob("step-*") if folder.name < final.name)
    for old in older[: max(0, len(older) + 1 - keep)]:
        shutil.rmtree(old)

def find_checkpoint(out):
    """The newest complete checkpoint, or None; broken ones are named and left where they are."""
    for folder in sorted((Path(out) / "checkpoints").glob("step-*"), reverse=True):
        try:
            for name, (size, crc) in json.loads((folder / "manifest.json").read_text())["files"].items():
                if (folder / name).stat().st_size != size or checksum(folder / name) != crc:
                    raise ValueError(f"{name} is not what was written")
            return folder
        except DAMAGED as e:
            say(f"checkpoint {folder} is broken and skipped: {first_line(e)}")
    return None

def identity(cfg, config, fingerprint):
    """What a checkpoint and the run that goes on from it must share: all that decides what is learnt or what
    micro-batch m holds. Flags with a resolved value stand with that."""
    flags = ("target block layers sliding_window full_layers sliding_bidirectional loss tokens anchors lr "
             "max_length warmup clip seed eval_fraction init_from")
    return {**{k: getattr(cfg, k) for k in flags.split()}, "data": fingerprint,
            "gamma": cfg.gamma or default_gamma(cfg.block), "heads": config["num_attention_heads"],
            "kv_heads": config["num_key_value_heads"], "head_dim": config["head_dim"],
            "ffn": config["intermediate_size"],
            **{k: config["dflash_config"][k] for k in ("target_layer_ids", "mask_token_id")}}

def recorded(out, key):
    """What the config.json of the run in `out` holds under this key, a dict. UserError where it does not."""
    with refused(f"--out {out}: its config.json is damaged, restore it or give another", DAMAGED):
        return {**json.loads((out / "config.json").read_text())[key]}

def check_identity(saved, now, where):
    for k in now:
        if saved.get(k) != now[k]:
            raise UserError(f"{where} was trained with {k.replace('_', '-')} {saved.get(k)}, now it is "
                            f"{now[k]}: give the same value, or another --out")

def versions():
    import datasets
    import transformers

    git = subprocess.run(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
                         capture_output=True, text=True, check=False)
    return {"torch": str(torch.__version__), "transformers": transformers.__version__,
            "datasets": datasets.__version__, "flash-attn-4": version_of("flash-attn-4"),
            "cuda": torch.version.cuda, "python": sys.version.split()[0],
            "commit": git.stdout.strip() or None}

# ===========================================================================================================
# Above this line: pure functions and modules, importable, testable on a CPU. Below it: processes, files,
# signals, clocks. Read it as a script.
# ===========================================================================================================

# ------------------------------------------------------------------------------------------------ the wire

@dataclasses.dataclass
class Seat:
    """Who a process is. role: target, drafter or both (colocated); index within the role; T, D of the run."""
    role: str
    index: int
    T: int
    D: int
    gpu: int
    device: str
    alive: object = None  # shared: time.monotonic() of the process's last progress, 0 while it waits

    def __post_init__(self):
        where = f"GPU {self.gpu}" if self.device == "cuda" else f"CPU process {self.gpu}"
        self.name = f"{'target + drafter' if self.role == 'both' else self.role} {self.index} ({where})"
        self.world = self.D if self.role == "both" else self.T + self.D
        self.rank = self.T + self.index if self.role == "drafter" else self.index

    def moves(self):
        self.alive.value = time.monotonic()

    def waits(self):
        """For another process, from here on: whoever hangs, it is not this one."""
        self.alive.value = 0.0

@dataclasses.dataclass
class Job:
    """All that main has resolved and every worker of a run needs."""
    cfg: Config
    config: dict  # the drafter's config.json
    documents: Documents
    out: Path
    meeting: str  # rendezvous file
    checkpoint: str  # folder to resume from, or ""
    identity: dict
    step: int  # where this attempt begins
    m: int
    total: int  # micro-batches of the whole run
    n_eval: int

def connect(seat, meeting, timeout):
    """Join the run's process group and make every group, all processes in one order -> (drafters' gloo group,
    drafters' gradient group, {(t, d): (header group, feature group)})."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: nothing listens beyond it
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    wait = timedelta(seconds=timeout + min(timeout, 30))  # main, which can name who hangs, notices first
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=seat.rank, world_size=seat.world,
                            timeout=wait)
    fast = "nccl" if seat.device == "cuda" else "gloo"
    drafters = list(range(seat.world - seat.D, seat.world))
    control, gradients = dist.new_group(drafters, wait, "gloo"), dist.new_group(drafters, wait, fast)
    pairs = {}
    if seat.role != "both":
        for t, d in sorted({(m % seat.T, m % seat.D) for m in range(math.lcm(seat.T, seat.D))}):
            pairs[t, d] = [dist.new_group([t, seat.T + d], wait, backend) for backend in ("gloo", fast)]
    probe = torch.zeros(1, device=seat.device)  # a first message makes the communicator: now, not in mid-run
    if seat.role != "target":
        dist.all_reduce(probe, group=gradients)
    for (t, d), (_, features) in pairs.items():
        if seat.rank == t:
            dist.send(probe, seat.T + d, features)
        elif seat.rank == seat.T + d:
            dist.recv(probe, t, features)
    return control, gradients, pairs

def header_of(batch, features):
    """What both sides of a hand-over must agree on before a byte of it moves: int64 [6]."""
    return torch.tensor([batch["m"], batch["held_out"], len(batch["lengths"]), batch["tokens_used"],
                         zlib.crc32(batch["ids"].tobytes()), features.numel() * features.element_size()])

def check_header(mine, theirs):
    if not torch.equal(mine, theirs):
        raise RuntimeError("the wire: target and drafter differ on [m, held out, rows, tokens, checksum, "
                           f"bytes], {theirs.tolist()} came, {mine.tolist()} was expected")

# ------------------------------------------------------------------------------------------- target worker

def compute_dtype(device):
    return torch.bfloat16 if device == "cuda" else torch.float32

def feature_buffer(job, device):
    width = len(job.config["dflash_config"]["target_layer_ids"]) * job.config["hidden_size"]
    return torch.zeros(job.cfg.tokens, width, dtype=compute_dtype(device), device=device)

def fast_reading(base, layers, taps, job, features, tell):
    """packed_reading() where it works, proved against plain reading on random documents of nearly the
    longest length; else None. Which of them it is, is said once."""
    cfg, at = job.cfg, np.arange(job.cfg.tokens)
    longest = max(1, cfg.max_length - 1)  # odd, so that documents begin within tiles
    batch = {"lengths": np.bincount(at // longest), "tokens_used": cfg.tokens, "positions": at % longest,
             "ids": rng(0).integers(0, job.config["vocab_size"], cfg.tokens)}
    usual, forwards = base.config._attn_implementation, [layer.forward for layer in layers]
    text = base.config.get_text_config()
    capture(base, layers, taps, batch, features)
    plain = features.float()
    for options in attention_choices(head_size(text)):
        try:
            mask_of = packed_reading(base, layers, cfg, text, options)
            capture(base, layers, taps, batch, features, mask_of)
            # bf16 noise grows with depth: 5% over taps 1 to 33 of an 8B-like model with random weights
            errors = ((features - plain).unflatten(1, (len(taps), -1)).norm(dim=-1)
                      / plain.unflatten(1, (len(taps), -1)).norm(dim=-1)).mean(0).tolist()
            for t, error in zip(taps, errors):
                if not error < min(0.01 * (t + 1), 0.25):
                    raise RuntimeError(f"the features of layer {t} differ by {error:.1%}")
            tell(f"the target reads packed rows, its layers compiled, attention by {options['BACKEND']}; "
                 "from plain reading its features differ by " + ", ".join(f"{x:.1%}" for x in errors))
            return mask_of
        except UserError as e:  # recurrent layers: other options would not help
            return tell(f"the target reads padded rows, not compiled ({e})")
        except Exception as e:  # whatever a family's code does under the compiler, the plain way is right
            base.set_attn_implementation(usual)
            for layer, forward in zip(layers, forwards):
                layer.forward = forward
            tell(f"the target does not read packed rows, attention by {options['BACKEND']} ({first_line(e)})")
    return tell("the target reads padded rows, not compiled")

@contextmanager
def telling(seat):
    """Takes lines and says them: what worked, one line, by the first of a role; what did not, by everyone."""
    said = []
    yield said.append
    for line in said if seat.index == 0 or len(said) > 1 else ():
        say(f"{seat.name}: {line}")

def target_worker(seat, job, stop):
    """Run the target over the micro-batches m = index mod T and hand the features to drafter m mod D."""
    cfg, taps, cuda = job.cfg, job.config["dflash_config"]["target_layer_ids"], seat.device == "cuda"
    seat.waits()
    _, _, pairs = connect(seat, job.meeting, cfg.stall_timeout)
    seat.moves()
    base = load_target(cfg.target, compute_dtype(seat.device), max(taps) + 1).base_model.to(seat.device)
    layers = decoder_layers(base)
    buffers, sent = [feature_buffer(job, seat.device) for _ in range(2)], {}
    mask_of = None
    if cuda:
        with telling(seat) as tell:
            mask_of = fast_reading(base, layers, taps, job, buffers[0], tell)
        torch.compiler.set_stance("fail_on_recompile")
    wire = torch.cuda.Stream() if cuda else None
    seat.waits()
    dist.barrier()  # everyone is loaded and compiled
    turn, group_size = 0, seat.D * cfg.accumulation
    whole_run = schedule(job.step, job.m, job.total, group_size, cfg.eval_every, job.n_eval)
    for batch in ahead(((kind, i) for kind, i in whole_run if i % seat.T == seat.index), job.documents, cfg):
        i = batch["m"]
        if not batch["blocks"]:  # the drafter knows it too
            continue
        seat.waits()
        if turn in sent:
            sent[turn]()  # the buffer is free once its last message has left
        seat.moves()
        capture(base, layers, taps, batch, buffers[turn], mask_of)
        header, group = pairs[seat.index, i % seat.D]
        if cuda:
            torch.cuda.current_stream().synchronize()  # the header says "ready": no receive ever spins
        seat.waits()
        dist.send(header_of(batch, buffers[turn]), seat.T + i % seat.D, header)
        with torch.cuda.stream(wire):  # None on a CPU: then this does nothing
            message = dist.isend(buffers[turn], seat.T + i % seat.D, group)
            sent[turn] = message.wait
            if cuda:
                message.wait()  # on the wire's stream, not on the host
                sent[turn] = wire.record_event().synchronize
        turn = 1 - turn
    for wait in sent.values():
        wait()
    return {}

# ------------------------------------------------------------------------------------------ drafter worker

# for torch.compile: kernels are named by their hash, by which the graph finds what the proof had compiled
GRAPH = {"fullgraph": True, "dynamic": False, "options": {"triton.descriptive_names": False}}
PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "B200": 2250, "B300": 2250}  # dense bf16, data sheets

def graph_inputs(batch, device):
    """The arrays that the graph reads, in drafter_step's order, as tensors on the device."""
    kinds = {"positions": np.int32, "start": np.int32, "anchor": np.int32, "tokens": np.int64, "valid": bool}
    return {k: on_device(np.ascontiguousarray(batch[k], dtype=kind), device) for k, kind in kinds.items()}

def attention_errors(drafter, options, rule, start, anchor, S):
    """Relative errors of flex_attention with these options, of its output and the gradients of q, k and v,
    against dense attention in float32: the run's own shape, random values, 128 rows from all over it (no
    other has a gradient: what it gets all the same is an error)."""
    (window, causal), B, Q = rule, drafter.block, len(anchor) * drafter.block
    attention = drafter.layers[0].self_attn
    H, G = (m.out_features // drafter.h for m in (attention.q_proj, attention.k_proj))
    mask_of = partial(block_mask, S=S, B=B, window=window, causal=causal)
    attend = torch.compile(
        lambda q, k, v, start, anchor: flex_attend(mask_of(start, anchor), options)(q, k, v), **GRAPH)
    draw = torch.Generator(start.device).manual_seed(0)
    q, k, v, gradient = (
        torch.randn(rows, heads, drafter.h, device=start.device, generator=draw).bfloat16()
        for rows, heads in ((Q, H), (S + Q, G), (S + Q, G), (TILE, H)))
    q = q * drafter.h ** -0.5
    i, kv = torch.arange(TILE, device=start.device), torch.arange(S + Q, device=start.device)
    row = i * (Q // TILE) + i % (Q // TILE)  # in another place of each tile
    seen = visible(row[:, None], kv, start, anchor, S, B, window, causal)
    found = []
    for function, dtype in ((lambda q, k, v: attend(q, k, v, start, anchor)[row], q.dtype),
                            (lambda q, k, v: dense_attend(seen)(q[row], k, v), torch.float32)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = function(*inputs)
        out.backward(gradient.to(dtype))
        found.append([x.detach().float() for x in (out, *(x.grad for x in inputs))])
    return [((x - y).norm() / y.norm()).item() for x, y in zip(*found)]

def fast_attention(drafter, start, anchor, S, tell):
    """The fastest of attention_choices() that is right here, see attention_errors(), the sure one without
    proof. What fails is said."""
    *fast, sure = attention_choices(drafter.h)
    for options in fast:
        try:
            errors = [x for rule in sorted(set(drafter.rules()))
                      for x in attention_errors(drafter, options, rule, start, anchor, S)]
            if wrong := [x for x in errors if not x < 0.01]:  # bf16 alone: 0.0024
                raise RuntimeError(f"it is off by {wrong[0]:.1%}")
            tell(f"the drafter's attention by {options['BACKEND']}, within {max(errors):.2%} of float32")
            return options
        except Exception as e:  # an experimental backend of another package: whatever it is, it is said
            tell(f"the drafter's attention is not by {options['BACKEND']} ({first_line(e)})")
    return sure

def open_tracker(cfg, out):
    """-> a function (kind, values) that logs to Weights & Biases. Training never depends on it: its first
    failure is said, and from there it does nothing."""
    run, off = None, not cfg.wandb

    def track(kind, values):
        nonlocal run, off
        if off:
            return
        try:
            if run is None:
                import wandb
                file = out / "wandb_id"
                if not file.exists():
                    atomic_write(file, os.urandom(4).hex())
                mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
                run = wandb.init(project=cfg.wandb, id=file.read_text().strip(), resume="allow", dir=out,
                                 mode=mode, config=dataclasses.asdict(cfg))
            flat = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, (int, float))}
            by_slot = enumerate(values.get("position_accuracy") or (), 1)
            run.log({**flat, **{f"{kind}/accuracy_{k}": v for k, v in by_slot}, "step": values["step"]})
            if kind == "end":
                run.finish()
        except Exception as e:  # whatever the tracker does, training goes on; it is said here
            say(f"wandb is off from here ({type(e).__name__}: {first_line(e)})")
            off = True
    return track

def drafter_worker(seat, job, stop):
    """The training loop, open. Every drafter walks the same steps; drafter 0 also tells, saves, exports."""
    cfg, config, device, D, A = job.cfg, job.config, seat.device, seat.D, job.cfg.accumulation
    lead, both, cuda, out = seat.index == 0, seat.role == "both", seat.device == "cuda", job.out
    taps, mask_token_id = (config["dflash_config"][k] for k in ("target_layer_ids", "mask_token_id"))
    step, m, total, dtype = job.step, job.m, job.total, compute_dtype(device)
    gamma = cfg.gamma or default_gamma(cfg.block)

    complaints = set()

    def record(action, *args, **values):
        """Write to the run folder; a disk that refuses costs the line, never the run, and is said once."""
        try:
            action(out, *args, **values)
        except OSError as e:
            if e.errno not in complaints:
                complaints.add(e.errno)
                say(f"{out} cannot be written, training goes on: {e}")

    def beat(phase):
        seat.moves()
        if lead:
            record(heartbeat, phase, step, m)

    # --- who is here, what is frozen, what learns
    beat("loading")
    seat.waits()
    control, gradients, pairs = connect(seat, job.meeting, cfg.stall_timeout)
    seat.moves()
    model = load_target(cfg.target, dtype, max(taps) + 1 if both else 0).to(device)
    ends, base = frozen_ends(model), model.base_model if both else None
    layers = decoder_layers(base) if both else None
    with torch.device("meta"):  # nn.Linear would draw a billion weights that nobody wants
        drafter = Drafter(config)
    drafter.to_empty(device=device)
    saved = torch.load(f"{job.checkpoint}/trainer.pt", "cpu", mmap=True) if job.checkpoint else None
    if saved:
        drafter.load_state_dict(saved["masters"])
    elif cfg.init_from:
        strict_load(drafter, read_drafter(cfg.init_from)[1], cfg.init_from)
    else:
        drafter.initialise(cfg.seed)
    ends["rope"] = rotary(torch.arange(cfg.max_length + cfg.block, device=device), drafter.theta, drafter.h)
    parameters = list(drafter.parameters())
    size = sum(p.numel() for p in parameters)
    # One flat buffer holds all gradients and, behind them, the counters with the loss divisor: one reduction.
    flat = torch.zeros(size + COUNTERS + 2 * (cfg.block - 1), device=device)
    counters = flat[size:]
    for p, view in zip(parameters, flat[:size].split([p.numel() for p in parameters])):
        p.grad = view.view_as(p)
    optimizer = torch.optim.AdamW(parameters, lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
    del saved, model

    kept = {}  # pinned host copies of weights and moments

    def keep_room():
        """Pinning takes seconds for each 10 GiB, in which the driver serves nobody else: done while the graph
        compiles, no save waits for it."""
        for i, (name, p) in enumerate(drafter.named_parameters()):
            for key in (("masters", name), (i, "exp_avg"), (i, "exp_avg_sq")):
                kept[key] = torch.empty(p.shape, pin_memory=cuda)

    writer, under_way = ThreadPoolExecutor(1), []  # (step, save), one at most

    # --- one graph, compiled once: drafter 0 first, the others find its cache
    features = feature_buffer(job, device)
    mask_of = None
    if both and cuda:
        with telling(seat) as tell_proof:
            mask_of = fast_reading(base, layers, taps, job, features, tell_proof)
    graph = torch.compile(drafter_step, **GRAPH) if cuda else drafter_step

    def run_graph(x):
        """-> where backward begins, with which gradient, counters. The rows themselves are not kept."""
        rows, gradient, found = graph(drafter, ends, features, *x.values(), mask_token_id, cfg.loss, gamma)
        return get_gradient_edge(rows), gradient, found

    beat("compiling")
    room = writer.submit(keep_room) if lead else None
    begin = time.perf_counter()
    at = np.arange(cfg.tokens) % cfg.max_length  # the longest documents, all of them supervised
    begins = np.arange(cfg.tokens) - at
    first = graph_inputs({"positions": at, **blocks_of(
        at, at >= 0, begins, begins + cfg.max_length, cfg.anchors, cfg.block, rng(0))}, device)
    for turn in (True, False):
        if lead == turn:
            if cuda:
                with telling(seat) as tell_proof:
                    drafter.options = fast_attention(
                        drafter, first["start"], first["anchor"], cfg.tokens, tell_proof)
            torch.autograd.backward(*run_graph(first)[:2])
            flat.zero_()
            torch.cuda.synchronize() if cuda else None
        seat.waits()
        dist.barrier(control)
    if cuda:
        torch.compiler.set_stance("fail_on_recompile")  # from here on a compilation is an error
    if lead:
        say(f"one graph, compiled and warm after {time.perf_counter() - begin:.1f} s" if cuda else "ready")

    # --- the hand-over: the next micro-batch is fetched as soon as the work on this one is launched
    wire = torch.cuda.Stream() if cuda else None
    whole_run = schedule(step, m, total, D * A, cfg.eval_every, job.n_eval)
    mine = ((kind, i) for kind, i in whole_run if i % D == seat.index)
    batches = ahead(mine, job.documents, cfg)
    times, marks = Counter(), []  # milliseconds by what they were spent on; (name, event, event) not read yet

    @contextmanager
    def timed(name):
        """Time on the GPU's own stream, or on a CPU; the host never waits for it."""
        if cuda:
            marks.append((name, *(torch.cuda.Event(enable_timing=True) for _ in range(2))))
            _, begin, end = marks[-1]
            begin.record()
            yield
            end.record()
        else:
            begin = time.perf_counter()
            yield
            times[name] += 1e3 * (time.perf_counter() - begin)

    def fetch():
        """The next micro-batch of this drafter, its features under way or there. None: the run is over."""
        begin = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return None
        seat.moves()
        batch["tensors"] = graph_inputs(batch, device)
        times["data"] += 1e3 * (time.perf_counter() - begin)
        if batch["blocks"] and both:
            with timed("capture"):
                capture(base, layers, taps, batch, features, mask_of)
        elif batch["blocks"]:
            t = batch["m"] % seat.T
            header, group = pairs[t, seat.index]
            theirs = torch.zeros(6, dtype=torch.int64)
            seat.waits()
            with timed("wait"):  # on a GPU: from the end of its work to the header, which says "ready"
                dist.recv(theirs, t, header)
            seat.moves()
            check_header(header_of(batch, features), theirs)
            if cuda:
                wire.wait_stream(torch.cuda.current_stream())  # the buffer is free once the graph is through
            with torch.cuda.stream(wire):
                dist.irecv(features, t, group).wait()
        return batch

    def features_arrive():
        if cuda and not both:
            with timed("wait"):
                torch.cuda.current_stream().wait_stream(wire)

    # --- what is told and kept
    track = open_tracker(cfg, out) if lead else None
    steps_total = step + -(-(total - m) // (D * A))
    flops = step_flops(config, cfg.tokens, cfg.anchors, cfg.anchors * (cfg.block - 1), 0)
    peak = next((v for k, v in PEAK_TFLOPS.items() if cuda and k in torch.cuda.get_device_name()), None)
    bar = None
    if lead and sys.stderr.isatty():
        from tqdm import tqdm
        bar = tqdm(total=steps_total, initial=step, desc="training", unit="step", file=sys.stderr)

    def tell(kind, line, **values):
        if line:
            bar.write(line, file=sys.stdout) if bar else say(line)
        record(write_metric, kind, step=step, micro_batches=m, **values)
        track(kind, {"step": step, **values})

    def finish_save():
        """Await the save under way -> why it failed, which is said, or None."""
        if not under_way:
            return None
        at, save = under_way.pop()
        error = save.exception()
        if error:  # torch has words of its own for a full disk, so the room on it is said
            free = gib(shutil.disk_usage(out).free)
            error = f"step {at}, {free:.1f} GiB are free there: {first_line(error)}"
            say(f"a save failed, training goes on and the next save tries again: {error}")
        return error

    def save():
        """Copy to the host now, write behind: the GPU goes on while the disk writes."""
        beat("saving")
        mark = sum(p.detach().view(torch.int32).sum(dtype=torch.int64) for p in parameters).cpu()
        marks = [torch.zeros_like(mark) for _ in range(D)]
        seat.waits()
        dist.all_gather(marks, mark, group=control)
        seat.moves()
        if any(not torch.equal(x, mark) for x in marks):
            raise RuntimeError(f"the drafters' weights differ at step {step}, checksums "
                               f"{[int(x) for x in marks]}")
        if not lead:
            return
        finish_save()
        room.result()

        def on_host(tensors, name):
            for k, v in tensors.items():
                if (name, k) not in kept:
                    kept[name, k] = torch.empty(v.shape, dtype=v.dtype, pin_memory=cuda)
                kept[name, k].copy_(v.detach(), non_blocking=True)
            return {k: kept[name, k] for k in tensors}

        with timed("save"):
            moments, masters = optimizer.state_dict(), on_host(drafter.state_dict(), "masters")
            moments["state"] = {i: on_host(s, i) for i, s in moments["state"].items()}
        copied = torch.cuda.current_stream().record_event() if cuda else None
        trainer = {"optimizer": moments, "step": step, "micro_batches": m, "total": total, "accumulation": A,
                   "drafters": D, "identity": job.identity, "versions": versions()}

        def write(step=step):
            if cuda:
                copied.synchronize()
            write_checkpoint(out, step, config, masters, trainer, cfg.keep)

        under_way.append((step, writer.submit(write)))
        tell("save", "", checkpoint=f"step-{step:08d}")

    seat.waits()
    dist.barrier()  # targets may send from here on
    begin = mark_time = time.perf_counter()
    paused, context_tokens, at_log, last_eval = 0.0, 0, step, {}
    summed = torch.zeros_like(counters)  # counters of all drafters since the last log line
    spoilt = []  # (micro-batch, bool [S]: its features that are not finite) since the last log line
    health = torch.zeros(3, device=device)  # steps skipped since the last line, in a row, gradient norm
    stop_flag, agreement, stopping = torch.zeros(1, dtype=torch.int32), None, False
    batch = fetch()
    # --------------------------------------------------------------------------------- the training loop
    while m < total and not stopping:
        beat("training")
        flat.zero_()
        for i in range(m, min(m + D * A, total)):
            if i % D != seat.index:
                continue
            assert (batch["m"], batch["held_out"]) == (i, False), f"{seat.name} holds {batch['m']}, not {i}"
            if batch["blocks"]:
                features_arrive()
                spoilt.append((i, ~torch.isfinite(features.sum(-1, dtype=torch.float32))))
                with timed("graph"):
                    edge, gradient, found = run_graph(batch["tensors"])
                    torch.autograd.backward(edge, gradient)  # adds to the views of `flat`
                    counters += found
                    del edge, gradient
            context_tokens += batch["tokens_used"]
            batch = fetch()
        seat.waits()
        with timed("reduction"):
            dist.all_reduce(flat, group=gradients)
        seat.moves()
        # Sums over everyone, divided once, then clipped: both inside the optimizer's kernel, as is the skip.
        divisor = counters[1]
        norm = torch.linalg.vector_norm(flat[:size]) / divisor
        ok = torch.isfinite(norm) & (divisor > 0)
        optimizer.grad_scale = torch.where(ok, divisor * (norm / cfg.clip).clamp(min=1), 1.0)
        optimizer.found_inf = (~ok).float()
        optimizer.param_groups[0]["lr"] = rate = learning_rate(cfg, m, total)
        with timed("optimizer"):
            optimizer.step()
        step, m = step + 1, min(m + D * A, total)
        summed += torch.where(torch.isfinite(counters), counters, 0)
        skipped = (~ok & (divisor != 0)).float()
        health = torch.stack([health[0] + skipped, (health[1] + skipped) * skipped, norm])

        # --- do all agree to stop? one integer, read one step late, so that nobody waits for it
        if agreement is not None:
            agreement.wait()
            stopping = bool(stop_flag.item())
        stop_flag = torch.tensor([stop.value], dtype=torch.int32)
        agreement = dist.all_reduce(stop_flag, dist.ReduceOp.MAX, group=control, async_op=True)

        if step % cfg.log_every == 0 or m >= total or stopping or step == job.step + 1:
            c, (skips, in_a_row, norm) = summed.tolist(), health.tolist()  # only here the host awaits the GPU
            values, steps = read_counters(c), step - at_log
            seconds = max(time.perf_counter() - mark_time - paused, 1e-9)
            for name, a, b in marks:
                b.synchronize()  # a hand-over under way is waited for: once a log line
                times[name] += a.elapsed_time(b)
            marks.clear()
            host = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            memory = torch.cuda.max_memory_reserved() if cuda else host
            values |= {"lr": rate, "grad_norm": norm, "tokens_per_s": context_tokens * D / seconds,
                       "rows_per_s": values["blocks"] * cfg.block / seconds, "ms": seconds / steps * 1e3,
                       "mfu": flops * A * steps / seconds / peak / 1e12 if peak else None,
                       **{f"{k}_ms": times[k] / steps for k in (
                           "wait", "data", "capture", "graph", "reduction", "optimizer", "save")},
                       "mem_gib": gib(memory), "host_gib": gib(host), "skipped_steps": int(skips),
                       "eta_s": seconds / steps * (steps_total - step)}
            line = (f"step {step:{len(str(steps_total))}}/{steps_total}  loss {values['loss']:.4f}  "
                    f"accept {values['accept_len']:.3f}  lr {rate:.1e}  norm {norm:.2f}  "
                    f"{values['tokens_per_s']:,.0f} tok/s  {values['ms']:.0f} ms (wait "
                    f"{values['wait_ms']:.0f})  {values['mem_gib']:.1f} GiB  eta {span(values['eta_s'])}")
            for i, bad in spoilt if c[6] else ():
                if places := bad.nonzero()[:, 0].tolist():
                    x = micro_batch(job.documents, cfg, i)
                    names = sorted({int(d) for d in np.repeat(x["documents"], x["lengths"])[places]})
                    say(f"{seat.name}: features of micro-batch {i} are not finite, in documents {names}")
            spoilt.clear()
            if skips or c[6]:
                line += f"  NOT FINITE: {int(skips)} steps skipped, {int(c[6])} features blanked"
            if lead:
                tell("train", line, **values)
            if in_a_row >= 10:
                raise Diverged(f"the last 10 optimizer steps, up to {step}, were not finite: lower --lr")
            if c[6] > 0.01 * context_tokens * D:
                raise Diverged(f"{int(c[6])} features since the last line are not finite, more than 1%: the "
                               "target overflows, or its checkpoint is damaged")
            summed.zero_()
            health[0] = 0
            times.clear()
            mark_time, paused, context_tokens, at_log = time.perf_counter(), 0.0, 0, step
        if bar:
            bar.update(1)

        # --- once in a while: evaluate (the same graph, no backward), save
        pause = time.perf_counter()
        if step % cfg.eval_every == 0 or m >= total:
            beat("evaluating")
            found = torch.zeros_like(counters)
            walked = torch.zeros(2 + len(TREES), cfg.block + 1, dtype=torch.int64)
            for j in range(seat.index, job.n_eval, D):
                assert (batch["m"], batch["held_out"]) == (j, True), f"{seat.name} holds {batch['m']}"
                if batch["blocks"]:
                    features_arrive()
                    found += run_graph(batch["tensors"])[2]
                if batch["blocks"] and j < WALK_BATCHES:
                    lengths, ends_at = batch["lengths"], batch["lengths"].cumsum()
                    for d in range(0, len(lengths), -(-len(lengths) // WALK_ROWS)):
                        row = slice(ends_at[d] - lengths[d], ends_at[d])
                        walked += torch.from_numpy(walk(drafter, ends, features[row], batch["ids"][row],
                                                        batch["supervised"][row], mask_token_id))
                batch = fetch()
            seat.waits()
            dist.all_reduce(found, group=gradients)
            dist.all_reduce(walked, group=control)
            seat.moves()
            if lead and job.n_eval:
                last_eval = read_counters(found.tolist()) | read_walk(walked.numpy())
                slots = " ".join(f"{a:.2f}" if a is not None else "-" for a in last_eval["position_accuracy"])
                line = (f"eval at {step}: loss {last_eval['loss']:.4f}  accept {last_eval['accept_len']:.3f} "
                        f" whole blocks {last_eval['accept_len_whole']:.3f}  by slot {slots}\n  "
                        + walk_line(last_eval))
                tell("eval", line, **last_eval)
        if step % cfg.save_every == 0 or m >= total or stopping:
            save()
        paused += time.perf_counter() - pause
    # --------------------------------------------------------------------------- end of the training loop
    if agreement is not None:
        agreement.wait()  # a peer may still be in it
    if lead:
        error = finish_save()
        tell("end", "", status="finished" if m >= total else "stopped", seconds=time.perf_counter() - begin,
             **{f"eval_{k}": v for k, v in last_eval.items()})
        if error:
            raise OSError(f"the last checkpoint is missing: {error}")
        if m >= total:
            made = Path(tempfile.mkdtemp(prefix=".export.", dir=out))
            export(made, config, drafter.state_dict())
            made.chmod(0o755)
            shutil.rmtree(out / "export", ignore_errors=True)
            made.rename(out / "export")
        beat("saving")
    seat.waits()
    dist.barrier(control)
    return {"stopped": m < total, "step": step}

# ----------------------------------------------------------------------------------------- decoding worker

def decoding_worker(seat, cfg, folder, documents, controls, stop):
    """--evaluate: decode with the drafter in `folder` and without, say what came of it -> the numbers."""
    config, state = read_drafter(folder)
    taps, mask_token_id = (config["dflash_config"][k] for k in ("target_layer_ids", "mask_token_id"))
    device, dtype, tokenizer = seat.device, compute_dtype(seat.device), load_tokenizer(cfg.target)
    text, _ = load_config(cfg.target)
    if cfg.tree and (kinds := stateful_kinds(text)):
        raise UserError(f"--tree: {cfg.target} has {min(kinds)} layers, whose state takes one branch only")
    if text.hidden_size != config["hidden_size"] or text.num_hidden_layers <= max(taps):
        raise UserError(f"{folder} is no drafter for {cfg.target}: it wants width {config['hidden_size']} "
                        f"and taps {taps}, there are width {text.hidden_size} and {text.num_hidden_layers} "
                        "layers")
    if not 0 <= mask_token_id < text.vocab_size:
        raise UserError(f"{folder} is no drafter for {cfg.target}: its mask token is {mask_token_id}, of "
                        f"{text.vocab_size}")
    cfg = dataclasses.replace(cfg, block=config["block_size"])
    prompts = (read_prompts(cfg.prompts, tokenizer, cfg.num_prompts) if cfg.prompts else
               held_out_prompts(documents, cfg.num_prompts))
    if not prompts:
        raise UserError("--evaluate: the run has no held-out chats, give --prompts")
    longest = getattr(text, "max_position_embeddings", None) or math.inf
    fitting = [pair for pair in prompts if len(pair[0]) + cfg.new_tokens + cfg.block <= longest]
    if len(fitting) < len(prompts):
        say(f"{len(prompts) - len(fitting)} prompts are left out: with --new-tokens {cfg.new_tokens} they go "
            f"beyond the target's {longest} positions")
    if not fitting:
        raise UserError(f"--new-tokens {cfg.new_tokens}: no prompt leaves so much room, lower it")
    prompts = fitting
    # cuDNN's attention plans anew for every length that decoding meets; the other kernels do not.
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = load_target(cfg.target, dtype).to(device)
    if stateful_kinds(text):
        check_states(model)
    ends, end_ids = frozen_ends(model), end_tokens_of(model, tokenizer)
    step = torch.compile(draft_step, fullgraph=True, dynamic=False) if device == "cuda" else draft_step

    def maker(state, zero=False):
        drafter = Drafter(config)
        if state is None:
            drafter.initialise(cfg.seed + 1)
        else:
            strict_load(drafter, state, folder)
        drafter.to(device, dtype).eval()
        return lambda length: Draft(drafter, ends, mask_token_id, length, zero, step)

    make = maker(state)
    drafts = {"drafter": (make, 0), "prompt lookup": (lambda length: prompt_lookup(cfg.block), 0)}
    if cfg.tree:
        drafts["draft trees"] = make, cfg.tree
    if controls:
        drafts |= {"features zeroed": (maker(state, zero=True), 0), "untrained": (maker(None), 0)}
    say(f"decoding {len(prompts)} prompts, up to {cfg.new_tokens} tokens each, batch 1, {str(dtype)[6:]}, "
        + (f"temperature {cfg.temperature}" if cfg.temperature else "greedy"))
    results = compare_decoding(model, taps, drafts, [prompt for prompt, _ in prompts], cfg, end_ids)
    lines, values = decoding_table(results, cfg.block, end_ids)
    reader = Reader(model, taps)
    for what, replies in {"decoded": [out for out, *_ in results["plain"]["runs"]],
                          "stored": [reply for _, reply in prompts]}.items():
        walked = 0
        for (prompt, _), reply in zip(prompts, replies):
            if len(reply) > 1:
                ids = np.array(prompt + reply)
                reader.start()
                reader.read(ids.tolist(), last=1)
                draft = make(len(ids))
                walked += walk(draft.drafter, draft.ends, reader.features, ids,
                               np.arange(len(ids)) >= len(prompt), mask_token_id)
        if np.any(walked):
            values[f"walk_{what}"] = read_walk(walked)
            lines.append(f"along the {what} replies: {walk_line(values[f'walk_{what}'])}")
    ok, verdict = (True, "sampled: lossless in distribution") if cfg.temperature else judge_lossless(
        results, dtype == torch.float32)
    say("\n".join([*lines, verdict]))
    if not ok:
        raise RuntimeError(verdict)
    return {**values, "verdict": verdict, "prompts": len(prompts)}

# ----------------------------------------------------------------------------------------------- the demo
# A byte-level target of 0.6 M parameters and chats in code: the prompt "3Eb 7Ka" (digit, n-th adjective as
# n-th capital, n-th noun as n-th small letter) has the reply "three clever bears, seven sad bakers.". Few
# initials serve many words, so that one byte gives no word away; the target's features tell what comes.

DEMO = {"block": 8, "layers": 3, "tokens": 512, "anchors": 64, "max_length": 256, "epochs": 1.0, "lr": 2e-3,
        "eval_fraction": 0.05, "eval_every": 200, "save_every": 200, "log_every": 20, "num_prompts": 24}
SPECIALS = {"pad_token": "<|pad|>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
            "mask_token": "<|mask|>"}
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
WORDS = {"23456789": "two three four five six seven eight nine",
         "ABCDEFGHIJKLMNOPQRST": "bold brave calm clean clever fast fine fond sad shy slow soft strong tall "
                                 "tame tidy tiny warm wild wise",
         "abcdefghijklmnopqrst": "bakers bears birds cats clowns crows farmers foxes frogs seals sharks "
                                 "snails swans tigers toads turtles wasps weavers whales wolves"}

def byte_tokenizer():
    """Ids 0-255 are the bytes themselves, 256-259 the special tokens; made in memory, from no file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = Tokenizer(models.BPE(vocab={c: b for b, c in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS.values()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHATML,
                                   clean_up_tokenization_spaces=False, **SPECIALS)

def demo_chats(seed, count):
    """Chats of which no two replies share a run of 24 bytes: no held-out reply was seen in training."""
    draw, rows, seen = random.Random(seed), [], set()
    while len(rows) < count:
        # no symbol twice in a prompt: the word just spelled out tells where to read on
        tables = (list(zip(symbols, words.split())) for symbols, words in WORDS.items())
        phrases = list(zip(*(draw.sample(table, 3) for table in tables)))
        prompt = " ".join("".join(symbol for symbol, _ in phrase) for phrase in phrases)
        reply = ", ".join(" ".join(word for _, word in phrase) for phrase in phrases) + "."
        runs = {reply[i: i + 24] for i in range(len(reply) - 23)}
        if seen.isdisjoint(runs):
            seen |= runs
            rows.append({"messages": [{"role": "user", "content": prompt},
                                      {"role": "assistant", "content": reply}]})
    return rows

def teach_worker(seat, folder, seed, stop, steps=420, rate=3e-3):
    """Teach the demo's target its chats, replies only, and save it to folder."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers import logging as transformers_logging

    tokenizer, draw = byte_tokenizer(), random.Random(seed)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=264, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, initializer_range=0.05,  # 0.02 suits wider models, slow here
    )).to(seat.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    jsonl = (folder.parent / "chats.jsonl").read_text().splitlines()
    columns = tokenise_rows({"jsonl": jsonl}, tokenizer, 264, 512, 0.0)
    rows = [(torch.tensor(x), torch.tensor(y)) for x, y in zip(columns["input_ids"], columns["loss_mask"])]
    for step in range(steps):
        x, y = (nn.utils.rnn.pad_sequence(part, batch_first=True).to(seat.device)
                for part in zip(*draw.sample(rows, 12)))
        loss = model(input_ids=x, labels=x.masked_fill(~y, -100)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / 30, cosine)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            heartbeat(folder.parent, "preparing", step)
        if stop.value:
            return {"loss": math.nan}
    beside = folder.with_name(f".target.{os.getpid()}")
    transformers_logging.disable_progress_bar()
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    beside.rename(folder)
    return {"loss": loss.item()}

def make_demo(cfg, out, seat, stop):
    """Write the chats and teach the target, unless an earlier attempt has -> cfg with both."""
    target, chats = out.resolve() / "target", out.resolve() / "chats.jsonl"
    if not cfg.plan and not target.exists():
        say("the demo: a byte-level target is taught for about a minute, then a drafter is trained for it")
        atomic_write(chats, "".join(json.dumps(row) + "\n" for row in demo_chats(cfg.seed, 4000)))
        begin = time.monotonic()
        seat = dataclasses.replace(seat, role="both", index=0, T=1, D=1)
        code, reason, results = run_workers([(teach_worker, seat, (target, cfg.seed))], stop)
        if code:
            raise RuntimeError(reason)
        if stop.value:
            return cfg
        say(f"target taught in {time.monotonic() - begin:.0f} s, last loss {results[0]['loss']:.3f}")
    if not target.exists():
        raise UserError(f"the demo has no target in {out} yet: run it without --plan")
    return dataclasses.replace(cfg, target=str(target), data=(str(chats),))

def show_demo(cfg, given, out, begin, at, stop):
    """Decode held-out prompts with the new drafter and its controls, say what came out -> (code, reason).
    at: the step and micro-batch where training ended."""
    cfg = dataclasses.replace(cfg, evaluate=str(out), **{} if "new_tokens" in given else {"new_tokens": 128})
    heartbeat(out, "evaluating", *at)
    code, reason, values = evaluate(cfg, given, stop, controls=True)
    if code == DONE:
        write_metric(out, "decoding", **values)
        own, copier, zeroed, untrained = (v["accepted"] for v in list(values.values())[1:5])
        say(f"the demo took {span(time.monotonic() - begin)}. A round of decoding accepts {own:.2f} tokens "
            f"with the drafter, {zeroed:.2f} with the target's features zeroed, {untrained:.2f} untrained, "
            f"{copier:.2f} by prompt lookup.\nMore of this one:\n  python train_dflash.py --evaluate {out} "
            "--tree 32\nA real run:\n  python supervise.py -- python train_dflash.py --target Qwen/Qwen3-8B "
            "--data chats.jsonl --out runs/qwen3-8b")
    return code, reason

# ------------------------------------------------------------------------------------ replies by the target

def first_asked(turns, each_turn):
    """How many turns of a chat stand before the first reply that is asked for."""
    users = [i + 1 for i, turn in enumerate(turns) if turn["role"] == "user"]
    return users[0] if each_turn else users[-1]

def chats_of(jobs, tokenizer, each_turn):
    """Jobs (row, turns, tools) -> the chats that add_reply() grows, those of like lengths together: in
    tokens, a batch sorted by characters is a fifth wider. 4,096 texts without their template take 0.2 s."""
    chats, lengths = [], []
    for row, turns, tools in jobs:
        first = first_asked(turns, each_turn)
        chats.append({"row": row, "turns": turns[:first], "left": turns[first:], "lines": [], "told": [],
                      "ids": [], "mask": [], "finished": False, "tools": tools})
    for at in range(0, len(chats), 4096):
        texts = [str([chat["tools"], *(turn["content"] for turn in chat["turns"])])
                 for chat in chats[at: at + 4096]]
        lengths += map(len, tokenizer(texts, verbose=False)["input_ids"])
    return [chats[i] for i in np.argsort(lengths, kind="stable")]

def add_reply(chat, prompt, reply, said, finished, each_turn):
    """The chat with one more reply -> True when a turn of the user is to be answered yet.

    chat: row; turns to answer next and those left; what is told, its ids, mask, whether it is finished; lines
    that are complete.
    Where the template has rewritten the history, what was said before is a line of its own, as it was met."""
    if chat["ids"] and prompt[: len(chat["ids"])] != chat["ids"]:
        chat["lines"].append([chat[k] for k in ("told", "ids", "mask", "finished")])
        chat["mask"] = []
    chat["mask"] = chat["mask"] + [False] * (len(prompt) - len(chat["mask"])) + [True] * len(reply)
    chat["ids"], chat["finished"] = prompt + reply, finished
    chat["told"] = [*chat["turns"], {"role": "assistant", "content": said}]
    asked = next((i + 1 for i, turn in enumerate(chat["left"]) if turn["role"] == "user"), 0)
    if not (each_turn and finished and asked):  # a reply that was cut ends its chat
        return False
    chat["turns"] = chat["told"] + [turn for turn in chat["left"][:asked] if turn["role"] != "assistant"]
    chat["left"] = chat["left"][asked:]
    return True

def lines_of(chat):
    """A chat that is through -> its lines of the replies file. more: another of this chat follows."""
    keys = ("messages", "input_ids", "loss_mask", "finished", "more")
    last = [chat[k] for k in ("told", "ids", "mask", "finished")]
    return b"".join(json.dumps({"row": chat["row"], **dict(zip(keys, line))}).encode() + b"\n"
                    for line in (*([*line, True] for line in chat["lines"]), last))

def cache_length(prompts, new_tokens):
    """Tokens a row of a static cache for these prompts: one of sixteen lengths an octave, a new one costs
    seconds before its first token."""
    tokens = max(map(len, prompts)) + new_tokens
    step = max(16, (1 << (tokens - 1).bit_length()) // 32)
    return -(-tokens // step) * step

def answer(model, prompts, longest, full, new_tokens, **how):
    """Prompts (lists of ids) -> the replies (lists of ids, padded), by transformers' generate().

    A full batch gets the static cache, whose decoding step is compiled: on an H200 twice as fast as a cache
    that grows, and eight times as fast as continuous batching where flash-attn is not installed."""
    length = cache_length(prompts, new_tokens)
    static = full and model.device.type == "cuda" and length <= longest
    model._previous_max_cache_length = -1  # or transformers makes no cache shorter than the longest before
    width = length - new_tokens if static else max(map(len, prompts))
    ids = torch.full((len(prompts), width), how["pad_token_id"])
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt):], mask[i, width - len(prompt):] = torch.tensor(prompt), 1
    how |= {"cache_implementation": "static"} if static else {}
    out = model.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device),
                         max_new_tokens=min(new_tokens, longest - width), **how)
    return out[:, width:].tolist()

def replies_worker(seat, cfg, jobs, stop):
    """Write the target's replies to this process's share of the jobs: a chat is one write to the file."""
    device, tokenizer = seat.device, load_tokenizer(cfg.target)
    if not tokenizer.chat_template:
        raise UserError(f"--regenerate: the tokenizer of {cfg.target} has no chat template")
    model = load_target(cfg.target, compute_dtype(device)).to(device)
    text, end_ids = model.config.get_text_config(), end_tokens_of(model, tokenizer)
    how = {"pad_token_id": min(end_ids), "eos_token_id": sorted(end_ids), "do_sample": bool(cfg.temperature)}
    if cfg.temperature:
        how |= {"temperature": cfg.temperature, "top_k": 0, "top_p": 1.0}
    jobs = jobs[seat.index::seat.D]
    torch.manual_seed(int(rng(cfg.seed, len(jobs), seat.index).integers(2**62)))  # a restart draws anew
    longest = min(cfg.max_length, getattr(text, "max_position_embeddings", None) or cfg.max_length)
    token_bytes = head_size(text) * text.num_key_value_heads * 2 * model.dtype.itemsize  # of a layer
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    room, most = free / 4 / (token_bytes * text.num_hidden_layers), 1024 if device == "cuda" else 128

    def prompt_of(chat):
        if "prompt" not in chat:
            chat |= {"prompt": [], "problem": None}
            try:
                chat["prompt"] = tokenizer.apply_chat_template(
                    chat["turns"], tools=chat["tools"], add_generation_prompt=True, return_dict=False)
                if len(chat["prompt"]) >= longest:
                    chat["problem"] = f"no room below {longest} tokens (--max-length, the target's)"
            except Exception as e:  # templates raise what they like; one bad row is counted, named, skipped
                chat["problem"] = first_line(e)[:60]
        return chat["prompt"]

    begin, told, tokens, done, problems, cut = time.monotonic(), 0.0, 0, 0, Counter(), 0
    chats = chats_of(jobs, tokenizer, cfg.each_turn)
    with open(cfg.replies, "ab", buffering=0) as f, ThreadPoolExecutor(1) as clerk:
        while chats and not stop.value:
            seat.moves()
            prompts, size, replies, again = [*map(prompt_of, chats[:most])], most, {}, []
            while size > 1 and size * cache_length(
                    [p for p in prompts[:size] if len(p) < longest] or [[]], cfg.new_tokens) > room:
                size //= 2
            batch, chats = chats[:size], chats[size:]
            # 1,024 templates take 0.4 s: a batch's are filled in while the one before is answered
            ready = clerk.submit(lambda coming: [*map(prompt_of, coming)], chats[:most])
            left = [longest - len(prompt) if prompt else 0 for prompt in prompts[:size]]
            roomy = [i for i, tokens_left in enumerate(left) if tokens_left >= cfg.new_tokens]
            crowded = [[i] for i, tokens_left in enumerate(left) if 0 < tokens_left < cfg.new_tokens]
            for group in [roomy] * bool(roomy) + crowded:  # nobody's reply is cut for another's prompt
                replies |= zip(group, answer(model, [prompts[i] for i in group], longest,
                                             len(group) == size, cfg.new_tokens, **how))
            ready.result()
            for i, (chat, prompt) in enumerate(zip(batch, prompts)):
                more = False
                if chat["problem"]:
                    problems[chat["problem"]] += 1
                del chat["prompt"]
                if i in replies:
                    reply = replies[i]
                    reply = reply[: next((i + 1 for i, t in enumerate(reply) if t in end_ids), len(reply))]
                    finished, tokens = reply[-1] in end_ids, tokens + len(reply)
                    said = tokenizer.decode(reply[:-1] if finished else reply, skip_special_tokens=True)
                    more = add_reply(chat, prompt, reply, said, finished, cfg.each_turn)
                again += [chat] * more
                if chat["ids"] and not more:
                    data = lines_of(chat)
                    with refused(f"--replies {cfg.replies}: cannot be written", OSError):
                        while data:  # a full disk takes a part, which a restart takes off, then says why
                            data = data[f.write(data):]
                    cut += not chat["problem"] and any(turn["role"] == "user" for turn in chat["left"])
            chats, done = again + chats, done + len(batch) - len(again)
            if time.monotonic() - told > 10 or not chats:
                told = time.monotonic()
                say(f"{seat.name}: {done:,} of {len(jobs):,} chats, {tokens / (told - begin):,.0f} tokens/s, "
                    f"eta {span((told - begin) / max(done, 1) * (len(jobs) - done))}")
    return {"chats": done, "tokens": tokens, "seconds": time.monotonic() - begin, "problems": problems,
            "cut": cut, "stopped": bool(chats)}

def regenerate(cfg, stop):
    """--regenerate PROMPTS --target X --replies FILE -> (exit code, reason). FILE is its own record: rows
    that are in it are not asked for again, a line that a kill has cut is taken off."""
    if not cfg.target or not cfg.replies:
        raise UserError("--regenerate: name the model with --target and the file to write with --replies")
    device, targets, drafters, count = choose_gpus(cfg)
    gpus = sorted({*targets, *drafters}) or [*range(count)]
    load_config(cfg.target)
    jobs, bad = read_chats(cfg.regenerate, "--regenerate")
    if not jobs:
        raise UserError(f"--regenerate {cfg.regenerate}: no prompt in it ({bad[0][1]})")
    path = Path(cfg.replies)
    if path.exists() and path.samefile(cfg.regenerate):
        raise UserError(f"--replies {path}: is the file of the prompts, give another")
    if path.suffix == ".gz":
        raise UserError(f"--replies {path}: is written plainly, give a name without .gz")
    with refused(f"--replies {path}: cannot be written", OSError):
        f = open(path, "ab+")  # noqa: SIM115  closed below, its lock with it
    with f:
        with refused(f"--replies {path}: another process writes it", BlockingIOError):
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        f.seek(0)
        done, (*lines, rest) = set(), f.read().split(b"\n")
        other = f"--replies {path}: holds something else, give another"
        with refused(other, (ValueError, KeyError, TypeError)):
            asked = {number: turns[: first_asked(turns, cfg.each_turn)] for number, turns, _ in jobs}
            for line in map(json.loads, lines):
                prompt = asked.get(line["row"], [None])
                if line["messages"][: len(prompt)] != prompt:
                    raise ValueError(f"row {line['row']} answers another prompt")
                done.add(line["row"])
            if rest[:7] != b'{"row":'[: len(rest)]:
                raise ValueError(f"its last line is {rest[:40]!r}")
        while lines and (last := json.loads(lines[-1])).get("more"):  # a chat of which the end is missing
            rest = lines.pop() + b"\n" + rest
            done.discard(last["row"])
        f.truncate(f.tell() - len(rest))
        left = [job for job in jobs if job[0] not in done]
        say(f"{len(jobs):,} chats to answer, {len(jobs) - len(left):,} are answered already" + "".join(
            f"; {n} rows skipped: {why}" for why, n in Counter(why for _, why in bad).most_common(12)))
        if not left:
            return DONE, ""
        seats = [Seat("both", i, len(gpus), len(gpus), gpu, device) for i, gpu in enumerate(gpus)]
        code, reason, results = run_workers([(replies_worker, seat, (cfg, left)) for seat in seats], stop)
    if code:
        return code, reason
    problems, cut = sum((r["problems"] for r in results), Counter()), sum(r["cut"] for r in results)
    say(f"{sum(r['chats'] for r in results) - problems.total():,} chats answered, "
        f"{sum(r['tokens'] for r in results):,} tokens, "
        f"{sum(r['tokens'] / max(r['seconds'], 1e-9) for r in results):,.0f} tokens/s: {path}"
        + "".join(f"; {n} not answered: {why}" for why, n in problems.most_common(12))
        + (f"; {cut} chats end before their last turn, at a reply that --new-tokens cut" if cut else ""))
    if any(r["stopped"] for r in results):
        return STOPPED, "stopped on request; run it again to go on"
    return DONE, ""

def draw_curves(folder):
    """--curves RUN: RUN/curves.png from its metrics.jsonl. Needs matplotlib, which training does not."""
    rows = read_metrics(folder)
    if not any(row["kind"] == "train" for row in rows):
        raise UserError(f"--curves {folder}: no metrics.jsonl of a run there, or no step is told in it yet")
    try:
        import matplotlib
    except ImportError:
        raise UserError("--curves needs matplotlib, which is not installed: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    panels = (("loss", ("loss",)), ("tokens a round", ("accept_len", "accept_len_whole", "walk", "tree_32")),
              ("thousand context tokens/s", ("tokens_per_s",)))
    for axis, (title, keys) in zip(axes, panels):
        for kind, style in (("train", "-"), ("eval", "o-")):
            for key in keys:
                points = sorted({r["step"]: r[key] / (1e3 if key == "tokens_per_s" else 1) for r in rows
                                 if r["kind"] == kind and r.get(key) is not None}.items())
                if points and not (kind == "train" and key == "accept_len_whole"):
                    axis.plot(*zip(*points), style, markersize=3, linewidth=1, label=f"{kind} {key}")
        axis.set(title=title, xlabel="optimizer step")
        axis.set_yscale("log" if title == "loss" else "linear")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    with refused(f"--curves {folder}: cannot be written", OSError):
        figure.savefig(Path(folder) / "curves.png", dpi=110)
    say(f"{Path(folder) / 'curves.png'}")
    return DONE, ""

# ------------------------------------------------------------------------------------- main and topology

def worker(work, seat, args, stop, link):
    """The frame of every child. It reports once, ("done", result) or ("failed", code, text), and goes."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no parent, no child
    if os.getppid() == 1:
        os._exit(FAILED)  # the parent died before that line
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.filterwarnings("ignore", message="TensorFloat32")  # what is float32 here is meant to be
    try:
        import torch._dynamo  # the first optimizer step would, for seconds that count as a stall
        from tqdm import tqdm
        tqdm.set_lock(threading.RLock())  # a semaphore, its default, would outlive a killed process
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // seat.world))
        if seat.device == "cuda":
            with suppress(ImportError):  # not public: torch's compile workers start while models load
                from torch._inductor.async_compile import maybe_warm_pool
                maybe_warm_pool()
        link.send(("done", work(seat, *args, stop)))
    except (UserError, Diverged) as e:
        link.send(("failed", USAGE if isinstance(e, UserError) else DIVERGED, str(e)))
    except BaseException as e:  # the report goes first; what follows ends the process all the same
        link.send(("failed", FAILED, f"{type(e).__name__}: {first_line(e)}"))
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no interpreter shutdown: communicators with dead peers would wait in their destructors

def compile_cache(out):
    """The folder of what is compiled, made: the one the user named, else .compile_cache beside the run, or in
    it where that can't be written. UserError for a named one that can't be."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    # what imports torch._dynamo, a notebook that starts this, say, gets torch's default into its environment
    if named.startswith(f"{tempfile.gettempdir()}/torchinductor_"):
        named = ""
    out = out.resolve()
    places = [Path(named).absolute()] if named else [out.parent / ".compile_cache", out / ".compile_cache"]
    for place in places:
        with suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            if os.access(place, os.W_OK | os.X_OK):
                return str(place)
    raise UserError(
        f"the compile cache {place} can't be written: name another folder by TORCHINDUCTOR_CACHE_DIR")

def is_stopped(child):
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2][0] == "T"

# how torch allocates: GPU memory in segments that grow, not in pieces; pinned memory filled by threads, so
# that the driver is held up for little of its time
ALLOCATOR = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"

def start_workers(works, stop):
    """Spawn [(function, seat, args)] -> [(process, the end of its pipe)]."""
    context, children = torch.multiprocessing.get_context("spawn"), []
    environment, cores = dict(os.environ), len(os.sched_getaffinity(0))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    resource_tracker.ensure_running()  # it would unblock the signals below
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # until a child ignores them; ours are not lost meanwhile
    for work, seat, args in works:
        if seat.device == "cuda":  # each sees one GPU: all are cuda:0 and share one compile-cache entry
            os.environ["CUDA_VISIBLE_DEVICES"] = visible[seat.gpu].strip() if visible[0] else str(seat.gpu)
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores // len(works))))
        else:
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning costs a busy host a factor of 10
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=worker, args=(work, seat, args, stop, theirs), name=seat.name)
        child.start()
        theirs.close()
        children.append((child, ours))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
    os.environ.clear()
    os.environ.update(environment)
    return children

def run_workers(works, stop, patient=True, stall=math.inf):
    """Spawn [(function, seat, args)], wait, end them all -> (exit code, reason, [result of each or None]).

    The first failure decides. Targets are not waited for: they hold nothing once every drafter is done.
    patient: a first signal is the workers' to obey; else it ends them. stall: seconds without progress after
    which the process that stopped first has failed; the others only wait for it.
    """
    context = torch.multiprocessing.get_context("spawn")
    works = [(work, dataclasses.replace(seat, alive=context.RawValue("d")), args)
             for work, seat, args in works]
    children, results = start_workers(works, stop), [None] * len(works)
    try:
        waiting, failures, halted, deadline = dict(enumerate(children)), [], {}, math.inf
        while any(results[i] is None for i, (_, seat, _) in enumerate(works) if seat.role != "target"):
            if stop.value >= 100 or (stop.value and not patient):
                return 128 + stop.value % 100, "stopped at once, on a signal", results
            if not waiting or time.monotonic() > deadline:
                told, code, reason = min(failures, key=lambda f: f[0])
                silent = {f"{child.name}, process {child.pid}": is_stopped(child)
                          for child, _ in waiting.values()}
                if any(silent.values()):  # whoever is stopped is what the others waited for
                    names = ", ".join(who for who, stopped in silent.items() if stopped)
                    reason = f"{names}, is stopped (SIGSTOP); {reason}"
                elif told and silent and re.search("(?i)timed? ?out", reason):  # who waited fails
                    reason = f"no word from {', '.join(silent)}; {reason}"
                return code, reason, results
            wait_for_any([x for child, link in waiting.values() for x in (link, child.sentinel)], timeout=0.5)
            for i, (child, link) in list(waiting.items()):
                message, dead = None, not child.is_alive()  # asked first: a report may come just before
                if link.poll():
                    try:
                        message = link.recv()
                    except EOFError:
                        dead = True
                if message and message[0] == "done":
                    results[i] = message[1]
                elif message:  # a broken connection may be the echo of a death that we have not met yet
                    where = f"{child.name} failed: " if message[1] == FAILED else ""
                    failures.append((1 if message[1] == FAILED else 0, message[1], where + message[2]))
                elif dead:
                    child.join()
                    code = child.exitcode
                    died = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with {code}"
                    failures.append((0, FAILED, f"{child.name} {died}"))
                if message or dead:
                    del waiting[i]
            halted = {i: halted.get(i, time.monotonic()) for i, (child, _) in waiting.items()
                      if is_stopped(child)}
            shown = halted | {i: works[i][1].alive.value for i in waiting if works[i][1].alive.value}
            if shown and time.monotonic() - min(shown.values()) > stall and not failures:
                child = children[min(shown, key=shown.get)][0]
                failures.append((0, FAILED, f"{child.name}, process {child.pid}, made no progress for "
                                 f"{stall} s, which is --stall-timeout"))
                deadline = 0
            if failures:
                deadline = min(deadline, time.monotonic() + 2 * min(f[0] for f in failures))
        return DONE, "", results
    finally:
        for child, _ in children:
            child.kill()
        for child, link in children:
            child.join()
            link.close()

def choose_gpus(cfg, out=None):
    """-> (cuda or cpu, --target-gpus, --drafter-gpus, how many GPUs there are, on a CPU 1).

    GPU flags without usable CUDA are refused with torch's reason, never bent to the CPU, as are GPUs that are
    named twice or do not exist. One that the last attempt in run folder `out` had is lost: RuntimeError."""
    flags = {"--target-gpus": cfg.target_gpus, "--drafter-gpus": cfg.drafter_gpus}
    named = {flag: int_list(text, flag) for flag, text in flags.items()}
    (targets, drafters), count = named.values(), torch.cuda.device_count()
    device = "cpu" if cfg.device == "cpu" or (
        cfg.device == "auto" and not targets + drafters and not count) else "cuda"
    if device == "cuda" and not count and not cfg.plan:
        probe = subprocess.run([sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"],
                               capture_output=True, text=True, check=False)
        why = (probe.stderr.strip().splitlines() or ["no CUDA device"])[-1]
        raise UserError(f"GPUs are asked for, torch {torch.__version__} has none: {why} (--device cpu needs "
                        "none)")
    if cfg.plan and device == "cuda":  # a plan assumes the GPUs that are named, or eight
        count = max([count, *(g + 1 for g in targets + drafters)]) or 8
    for flag, gpus in named.items():
        shown, last = f"{flag} {','.join(map(str, gpus))}", max(gpus, default=-1)
        if len(set(gpus)) != len(gpus) or any(g < 0 for g in gpus):
            raise UserError(f"{shown}: give each once, from 0")
        if device == "cuda" and last >= count:
            with suppress(*DAMAGED):
                if out and last in json.loads((out / "config.json").read_text())["gpus"]:
                    raise RuntimeError(
                        f"{shown}: GPU {last} was there at the last attempt, now there are {count}")
            raise UserError(f"{shown}: there is no GPU {last}, this machine has {count}")
    return device, targets, drafters, count if device == "cuda" else 1

def take_seats(cfg, out):
    """-> [Seat] from --target-gpus and --drafter-gpus; without them the last 3/8 of the GPUs train, a
    single GPU does both. Equal lists are colocated. On a CPU the numbers count processes."""
    device, targets, drafters, count = choose_gpus(cfg, out)
    if set(targets) & set(drafters) and set(targets) != set(drafters):
        raise UserError(f"--target-gpus {cfg.target_gpus} and --drafter-gpus {cfg.drafter_gpus} overlap in "
                        "part: keep them apart, or make them equal (each then does both in turn)")
    rest = [g for g in range(count) if g not in targets + drafters]
    if bool(targets) != bool(drafters):
        if not rest or device == "cpu":
            raise UserError("--target-gpus and --drafter-gpus: give both, nothing is left for the other side")
        targets, drafters = targets or rest, drafters or rest
    elif not targets:
        train = max(1, round(3 * count / 8))
        targets, drafters = (rest[:-train], rest[-train:]) if count > 1 else (rest, rest)
    T, D = len(targets), len(drafters)
    if set(targets) == set(drafters):
        return [Seat("both", i, D, D, g, device) for i, g in enumerate(drafters)]
    return [*(Seat("target", i, T, D, g, device) for i, g in enumerate(targets)),
            *(Seat("drafter", i, T, D, g, device) for i, g in enumerate(drafters))]

def parameters_of(target, taps):
    """Parameters of (the whole target, a target GPU's part, embedding and head), counted without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(target)[1])  # with what a wrapper adds
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)]
    whole = sum(p.numel() for p in model.parameters())
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    own_head = head.numel() if head is not embed else 0
    return whole, whole - sum(sizes[max(taps) + 1:]) - own_head, embed.numel() + own_head

def predict_memory(cfg, config, counts, size, seat):
    """Bytes of one process by part. Activations are what the graph keeps for backward, and the most that
    backward has in hand at once; within 5% of max_memory_allocated at the shapes of tests/bench_step.py."""
    S, Q, D, L = cfg.tokens, cfg.anchors * cfg.block, config["hidden_size"], config["num_hidden_layers"]
    H, G, h, ffn = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim",
                                        "intermediate_size"))
    K, cuda = len(config["dflash_config"]["target_layer_ids"]), seat.device == "cuda"
    w, parts = 2 if cuda else 4, {}  # bytes of a compute element
    if seat.role != "drafter":
        parts["target weights"] = counts[1] * w
    parts["features"] = S * K * D * w * (2 if seat.role == "target" else 1)
    working = S * (6 * D + 3 * ffn) if seat.role != "drafter" else 0  # the target's own, one layer at a time
    if seat.role != "target":
        parts["embedding and head"] = counts[2] * w
        parts["masters, gradients, moments"] = 16 * size
        parts["kept for backward"] = w * (size * (w == 2) + Q * D + 2 * S * D + L * (
            Q * (2 * D + 3 * H * h + 2 * ffn) + (S + Q) * 3 * G * h))
        working = max(working, Q * (3 * ffn + 2 * D), 2 * min(CHUNK, Q * config["vocab_size"]))
    parts["working"] = w * working
    if cuda:
        pairs = 0 if seat.role == "both" else math.lcm(seat.T, seat.D)
        links = pairs // (seat.T if seat.role == "target" else seat.D)
        parts["communicators"] = (links + (seat.role != "target" and seat.D > 1)) * 300 * 2**20
        parts["CUDA context"] = 600 * 2**20
    return parts

def predict_rates(cfg, config, counts, documents, gpu):
    """Context tokens a second of (one target GPU, one drafter GPU): useful operations at the share of the
    data sheet's peak that an H200 reaches on them (tests/figures.json: 0.61 a drafter, 0.56 a target), and
    10 ms of the host for each micro-batch, which is most of the time for a target below 1 B parameters."""
    peak = 1e12 * next((v for k, v in PEAK_TFLOPS.items() if k in gpu), PEAK_TFLOPS["H200"])
    order, bounds = documents.train
    lengths = documents.rows.data.column("length").to_numpy()[order].astype(float)
    tokens = lengths.sum() / (len(bounds) - 1)  # of a micro-batch
    reach = (lengths**2).sum() / lengths.sum() / 2  # context before the mean token
    L, pairs = config["num_hidden_layers"], cfg.anchors * cfg.block * (reach + cfg.block)
    weights = counts[1] - config["vocab_size"] * config["hidden_size"]  # the embedding is looked up
    capture = 2 * weights * tokens  # attention adds a few percent at these lengths
    step = step_flops(config, cfg.tokens, cfg.anchors, cfg.anchors * (cfg.block - 1), pairs * L)
    return tokens / (capture / (0.56 * peak) + 0.01), tokens / (step / (0.61 * peak) + 0.01)

def print_plan(cfg, config, seats, documents, total, size):
    taps, (T, D) = config["dflash_config"]["target_layer_ids"], (seats[0].T, seats[0].D)
    group, bins = D * cfg.accumulation, len(documents.train[1]) - 1
    counts, heads = parameters_of(cfg.target, taps), config["num_attention_heads"]
    say(f"target {cfg.target}: {counts[0] / 1e6:,.1f} M parameters, {counts[1] / 1e6:,.1f} M on its GPU, "
        f"taps {taps}\ndrafter: {size / 1e6:,.1f} M parameters, {cfg.layers} layers, heads {heads}/"
        f"{config['num_key_value_heads']} of {config['head_dim']}, FFN {config['intermediate_size']}\n"
        f"micro-batch: {cfg.tokens} context tokens, {cfg.anchors} anchors x block {cfg.block} = "
        f"{cfg.anchors * cfg.block} draft rows\n{documents.report}\n"
        f"{bins} micro-batches an epoch = {-(-bins // group)} steps of {group} (drafters {D}, accumulation "
        f"{cfg.accumulation})\n"
        f"{total} micro-batches in all = {-(-total // group)} steps\n"
        "who sits where, with the predicted memory in GiB:")
    for seat in seats:
        parts = predict_memory(cfg, config, counts, size, seat)
        say(f"  {seat.name}: {gib(sum(parts.values())):.1f} = "
            + " + ".join(f"{k} {gib(v):.2f}" for k, v in parts.items()))
    if seats[0].device == "cuda":
        gpu = torch.cuda.get_device_name() if torch.cuda.device_count() else "H200"
        (a, b), n = predict_rates(cfg, config, counts, documents, gpu), len(seats)
        if seats[0].role == "both":
            rate = f"both in turn {n / (1 / a + 1 / b):,.0f}"
        else:
            best = max(range(1, n), key=lambda targets: min(targets * a, (n - targets) * b))
            rate = (f"{T} targets {T * a:,.0f}, {D} drafters {D * b:,.0f}; the best split of {n} GPUs is "
                    f"{best} + {n - best}, {min(best * a, (n - best) * b):,.0f}")
        say(f"predicted context tokens a second ({gpu}): {rate}")
    say("config:\n" + "\n".join(f"  {k} = {v}" for k, v in dataclasses.asdict(cfg).items()))

def take_folder(out):
    """Make the run folder, see that it can be written, and lock it. A dying owner of the lock gets 15 s, a
    living one is named and this run refused. UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as f:
            f.write(b"x")
        lock = open(out / "trainer.lock", "a+")  # noqa: SIM115  it is held until the process ends
    except OSError as e:
        raise UserError(f"--out {out}: cannot be written ({e.strerror})") from e
    deadline = time.monotonic() + 15
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                lock.seek(0)
                raise UserError(f"--out {out} is in use by process {lock.read()}, give another") from None
            time.sleep(0.1)
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock

def evaluate(cfg, given, stop, controls=False):
    """--evaluate RUN_OR_EXPORT -> (exit code, reason, numbers). A run names its target and data itself."""
    path = folder = Path(cfg.evaluate).resolve()
    if not path.exists():
        raise UserError(f"--evaluate {cfg.evaluate}: no such folder")
    for run in (path, path.parent, path.parent.parent):
        with refused(f"--evaluate {cfg.evaluate}: {run / 'config.json'} is damaged", DAMAGED):
            written = json.loads((run / "config.json").read_text()) if (run / "config.json").exists() else {}
            if not {"argv", "config"} <= written.keys():  # a run's; a drafter's has none
                continue
            keys = {"target", "data", "seed", "tokens", "max_length", "eval_fraction"} - given
            of_run = {k: tuple(v) if k == "data" else v for k, v in written["config"].items() if k in keys}
            cfg = dataclasses.replace(cfg, **of_run)
        if run == path:
            folder = path / "export" if (path / "export" / "config.json").exists() else find_checkpoint(path)
        break
    if folder is None:
        raise UserError(f"--evaluate {cfg.evaluate}: no complete checkpoint there yet")
    if not cfg.target or not (cfg.prompts or cfg.data):
        raise UserError(f"--evaluate {cfg.evaluate}: the folder is no run's, give --target and --prompts")
    vocab = load_config(cfg.target)[0].vocab_size
    documents = None if cfg.prompts else prepare(cfg, load_tokenizer(cfg.target), vocab)
    device, targets, drafters, _ = choose_gpus(cfg)
    seat = Seat("both", 0, 1, 1, (drafters or targets or [0])[0], device)
    code, reason, results = run_workers(
        [(decoding_worker, seat, (cfg, str(folder), documents, controls))], stop, patient=False)
    return code, reason, results[0]

def train(cfg, given, argv, stop):
    """Check, prepare, spawn, wait -> (exit code, reason)."""
    begin, demo = time.monotonic(), not cfg.target
    if demo == bool(cfg.data):
        raise UserError(f"--target and --data go together: name the {'model' if demo else 'chats'}")
    named = "demo" if demo else Path(os.path.abspath(cfg.target)).name
    out = Path(cfg.out or os.environ.get("SUPERVISE_RUN_DIR") or f"runs/{named}")
    seats = take_seats(cfg, out)
    if demo:
        cfg = dataclasses.replace(cfg, **{k: v for k, v in DEMO.items() if k not in given})
    target, *data = (str(Path(x).resolve()) if x and Path(x).exists() else x for x in (cfg.target, *cfg.data))
    cfg = dataclasses.replace(cfg, out=str(out), target=target, data=tuple(data))  # good from any directory
    theirs = {}
    if cfg.init_from:
        source = Path(cfg.init_from).resolve()
        source = source / "export" if (source / "export" / "config.json").exists() else source  # a run
        if not source.exists() and (out / "checkpoints" / "latest").exists():  # it has served
            theirs = recorded(out, "drafter")
        else:
            with refused("--init-from", UserError):
                theirs, _ = read_drafter(source)
        cfg = dataclasses.replace(adopt(cfg, given, theirs), init_from=str(source))
    check(cfg)
    lock = None if cfg.plan else take_folder(out)
    if lock:
        with refused(f"--out {out}: cannot be written", OSError):
            heartbeat(out, "preparing")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache = compile_cache(out)
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", cache)
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    if demo:
        cfg = make_demo(cfg, out, seats[-1], stop)
        if stop.value:
            return STOPPED, "stopped on request while the demo's target was taught; run it again to go on"

    # --- every check that needs files but no weights
    text, _ = load_config(cfg.target)
    longest = getattr(text, "max_position_embeddings", None) or cfg.max_length
    if cfg.max_length > longest:
        raise UserError(f"--max-length {cfg.max_length}: the target reaches {longest} positions, lower it")
    taps, tokenizer, vocab = taps_of(cfg, text.num_hidden_layers), load_tokenizer(cfg.target), text.vocab_size
    config = drafter_config(cfg, text, taps, 0)
    Q, H = cfg.anchors * cfg.block, config["num_attention_heads"]
    dense = Q * (cfg.tokens + Q) * (1 + 4 * H)
    if seats[0].device == "cpu" and dense > CPU_DENSE_LIMIT:
        raise UserError(f"on a CPU attention is dense: --tokens {cfg.tokens} with --anchors {cfg.anchors} x "
                        f"--block {cfg.block} takes {gib(dense):.1f} GiB, more than {CPU_DENSE_LIMIT >> 30}")
    if cfg.mask_token_id != -1:
        choose_mask_token(cfg, tokenizer, vocab, None)
    documents = prepare(cfg, tokenizer, vocab)
    mask_token_id, why = choose_mask_token(cfg, tokenizer, vocab, documents)
    config = drafter_config(cfg, text, taps, mask_token_id)
    if theirs:
        if theirs["hidden_size"] != text.hidden_size:
            raise UserError(f"--init-from {cfg.init_from}: its width is {theirs['hidden_size']}, the "
                            f"target's {text.hidden_size}")
        keys = theirs.keys() & {"rms_norm_eps", "layer_types", "rope_theta", "is_causal"}
        config |= {k: theirs[k] for k in keys}
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    with torch.device("meta"):
        size = sum(p.numel() for p in Drafter(config).parameters())
    group, bins = seats[-1].D * cfg.accumulation, len(documents.train[1]) - 1
    by_epochs = max(1, round(cfg.epochs * bins))
    if cfg.plan:
        print_plan(cfg, config, seats, documents, cfg.max_steps * group or by_epochs, size)
        return DONE, ""
    if stop.value:
        return STOPPED, "stopped on request before training began"

    # --- where this attempt begins
    now = json.loads(json.dumps(identity(cfg, config, documents.fingerprint)))
    checkpoint, step, m, before = None, 0, 0, list((out / "checkpoints").glob("step-*"))
    if before and cfg.resume == "never":
        raise UserError(f"--resume never, and {out} holds {len(before)} checkpoints: give another --out")
    if before:
        check_identity(recorded(out, "identity"), now, f"--out {out}")
        checkpoint = find_checkpoint(out)
        if not checkpoint:
            raise UserError(f"--out {out}: none of its {len(before)} checkpoints is whole: restore one, or "
                            "give another")
    if checkpoint:
        saved = torch.load(checkpoint / "trainer.pt", "cpu", mmap=True)
        check_identity(saved["identity"], now, str(checkpoint))
        step, m = saved["step"], saved["micro_batches"]
        here = {"drafters": seats[-1].D, "accumulation": cfg.accumulation, **versions()}
        then = {**saved, **saved["versions"]}
        changed = [f"{k} {then.get(k)} -> {v}" for k, v in here.items() if then.get(k) != v]
        say(f"going on from {checkpoint.name}, micro-batch {m}; changed: {', '.join(changed) or 'nothing'}")
    total = m + max(cfg.max_steps - step, 0) * group if cfg.max_steps else by_epochs
    if checkpoint and total <= m < saved["total"]:
        say(f"{step} steps are done and no more are asked for: the run ends here, its schedule cut short")
    if checkpoint and m < total != saved["total"]:
        say(f"the run is {total} micro-batches now, it was {saved['total']}: the learning rate follows the "
            "length")
    finished = checkpoint and m >= total and (out / "export").exists()
    if not finished:
        need, free = 2 * 14 * size, shutil.disk_usage(out).free
        if free < need:
            raise UserError(f"--out {out}: {gib(free):.1f} GiB free, two checkpoints take {gib(need):.1f} "
                            "GiB")
        atomic_write(out / "config.json", json.dumps(
            {"config": dataclasses.asdict(cfg), "argv": argv, "identity": now, "drafter": config,
             "versions": versions(), "gpus": sorted({s.gpu for s in seats if s.device == "cuda"})}, indent=2))
        kind = "restart" if (out / "metrics.jsonl").exists() else "start"
        write_metric(out, kind, step=step, micro_batches=m, total=total, argv=argv)
        say(f"{documents.report}\nprocesses: {', '.join(s.name for s in seats)}\ndrafter of "
            f"{size / 1e6:.1f} M parameters, taps {taps}, mask token {mask_token_id} ({why})"
            + (f", gamma {cfg.gamma or default_gamma(cfg.block):g}" if cfg.loss == "dflash" else "")
            + f"\n{bins} micro-batches an epoch, {total} in all = {step + -(-(total - m) // group)} steps; "
              f"{out}")

        # --- one process per GPU
        with tempfile.TemporaryDirectory() as folder:
            job = Job(cfg, config, documents, out, f"{folder}/meeting", str(checkpoint or ""), now, step, m,
                      total, min(len(documents.held_out[1]) - 1, EVAL_BATCHES))
            code, reason, results = run_workers(
                [(target_worker if s.role == "target" else drafter_worker, s, (job,)) for s in seats], stop,
                stall=cfg.stall_timeout)
        if code:
            return code, reason
        if results[-1]["stopped"]:
            return STOPPED, f"stopped on request at step {results[-1]['step']}, saved; run it again to go on"
        step, m = results[-1]["step"], total
    last = next((row for row in reversed(read_metrics(out)) if row["kind"] == "eval"), None)
    say(f"finished at step {step}: the drafter is {out / 'export'}" + (
        f", held-out loss {last['loss']:.4f}, accept length {last['accept_len']:.3f}" if last else ""))
    if demo and not finished:
        return show_demo(cfg, given, out, begin, (step, m), stop)
    return DONE, ""

def main(argv):
    if {"-h", "--help"} & set(argv):
        say(help_text())
        return DONE
    stop = torch.multiprocessing.get_context("spawn").RawValue("i", 0)

    def on_signal(number, frame):
        stop.value = number + 100 * bool(stop.value)  # the first asks, the second insists

    before = {number: signal.signal(number, on_signal) for number in ENDS}
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the tokenising processes are the parallelism
    try:
        cfg, given = parse(argv)
        # the folder of --init-from decides some flags: train() checks all when they are known
        (check_mode if cfg.init_from else check)(cfg)
        code, reason = (draw_curves(cfg.curves) if cfg.curves else regenerate(cfg, stop) if cfg.regenerate
                        else evaluate(cfg, given, stop)[:2] if cfg.evaluate
                        else train(cfg, given, argv, stop))
    except UserError as e:
        code, reason = USAGE, str(e)
    except RuntimeError as e:
        code, reason = FAILED, first_line(e)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code:
        print(f"train_dflash.py: {reason}", file=sys.stderr, flush=True)
    return code

if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # kill -USR1 prints every thread's stack
    sys.exit(main(sys.argv[1:]))
