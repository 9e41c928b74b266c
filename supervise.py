#!/usr/bin/env python3
"""Keep a run alive: start a command, watch it, start it again where that helps, stop where it does not, say why.

    supervise ── one loop: drains the output, reads heartbeat and nvidia-smi, decides, waits
     ├─ the command    own session; its output goes to RUN/attempt_NNN.log and to the terminal
     └─ nvidia-smi     one call at a time, given up when it hangs

    start ──> running ──> gone ──> tree swept ──> decide ──> GPUs free ──> back-off ──> start ...
                 │ a stop, a hang, loss nan          └──> finished · stopped · given up
                 └──> TERM to its main process, grace, KILL to the tree

    python supervise.py -- python train_dflash.py --target Qwen/Qwen3-8B --data chats.jsonl --out runs/qwen3-8b
    python supervise.py status runs/qwen3-8b        one screen, also when the run is dead
    python supervise.py stop runs/qwen3-8b          ask for a checkpoint and the end; again: kill

RUN is the command's --out, else runs/<script>-<6 hex of the command>, and the command finds it in
$SUPERVISE_RUN_DIR. Progress is a heartbeat that moves ($SUPERVISE_HEARTBEAT) or a step in the output; only a
command that shows neither is judged by its silence. A cause read from the text is a label: what decides is the
exit code and five ledgers (attempts without a gain, the same failure again, restarts in half an hour, restarts
in all, time since the last gain), explained in one sentence each time.

Exit codes: 0 finished · the command's own code, or 130/143, after a stop · 2, 126, 127 as the command gave
them · 93 relaunching is useless · 94 restarts or time are spent · 95 the machine needs a person · 96 another
supervisor has this run · 97 an error in here.
"""
from __future__ import annotations

import argparse
import ctypes
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import psutil

# ------------------------------------------------------------------------------------------------ options

def flag(default, text):
    return dataclasses.field(default=default, metadata={"help": text})

@dataclasses.dataclass(frozen=True)
class Options:
    run_dir: str = flag("", "run folder; none: see above")
    step_regex: str = flag("", "finds the step (group 1) and the total (2) in a line")
    done: str = flag("", "a file that a finished run has left in RUN")
    grace: float = flag(120, "a stop: seconds from TERM to KILL")
    hang_grace: float = flag(15, "a hang: seconds from TERM to KILL")
    first_progress: float = flag(1800, "seconds to the first progress, and for compiling")
    hang: float = flag(900, "seconds without progress, at least")
    hang_factor: float = flag(5, "... and times the longest step seen")
    phase_limit: float = flag(3600, "... while preparing, loading, evaluating or saving")
    early: float = flag(300, "... while CPU and GPUs are idle too")
    backoff: float = flag(5, "seconds before a relaunch, doubled each time")
    backoff_cap: float = flag(300, "... at most")
    healthy: float = flag(600, "seconds up, with a gain, that reset the back-off")
    max_no_gain: int = flag(3, "attempts in a row without a higher step")
    max_same: int = flag(3, "retries of the same failure without a gain")
    rate: int = flag(5, "restarts in --rate-window")
    rate_window: float = flag(1800, "seconds")
    lifetime: int = flag(50, "restarts in all")
    waste: float = flag(7200, "seconds spent since the last gain")
    gpu_interval: float = flag(10, "seconds between two looks at the GPUs")
    gpu_timeout: float = flag(10, "seconds nvidia-smi may take")
    gpu_wait: float = flag(60, "seconds for GPU memory to come back")
    log_part_size: float = flag(64, "MiB of one part of a log; the first has at most 4")
    log_parts: int = flag(16, "parts kept of one log; of all: twice that much")
    min_free: float = flag(512, "MiB left on the disk, below it logs pause")
    plan: bool = flag(False, "print what would happen, exit")

class UsageError(Exception):
    """A mistake on the command line: one line and its exit code."""

FINISHED, FAILED, USAGE, STOPPED, DIVERGED = 0, 1, 2, 75, 76  # the command's codes, design.md 6
USELESS, SPENT, PERSON, TAKEN, BROKEN = 93, 94, 95, 96, 97  # ours
POLL = 0.5  # seconds of one turn of the loop at rest
DRAIN, SWEEP = 2, 10  # seconds for the end of the output, and for the tree to go
RING, WINDOW, TERMINAL = 1 << 20, 1 << 16, 1 << 18  # bytes kept in memory, read at once, waiting for the terminal
SLACK = 512  # MiB that a GPU may hold more than at the start and be free
SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "fish", "busybox"}
WORKING = ("", "training", "evaluating", "saving")  # phases whose step counts

def help_text():
    lines = ["usage: python supervise.py [options] -- COMMAND ...   |   status RUN   |   stop RUN",
             "RUN: the command's --out, else runs/<script>-<6 hex of the command>", ""]
    for f in dataclasses.fields(Options):
        lines.append(f"  --{f.name.replace('_', '-'):16} {f.metadata['help']:55} {f.default}".rstrip())
    return "\n".join(lines)

def parse(argv):
    """argv -> (Options, command). UsageError on what contradicts."""
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise UsageError(message)

    ours, command = (argv[:argv.index("--")], argv[argv.index("--") + 1:]) if "--" in argv else (argv, [])
    parser = Parser(add_help=False, allow_abbrev=False)
    for f in dataclasses.fields(Options):
        kind = {"action": "store_true"} if f.type == "bool" else {"type": {"int": int, "float": float, "str": str}[f.type]}
        parser.add_argument(f"--{f.name.replace('_', '-')}", default=f.default, **kind)
    known, rest = parser.parse_known_args(ours)
    if rest and not rest[0].startswith("--"):
        raise UsageError(f"{rest[0]}: put -- before the command")
    if rest:
        raise UsageError(f"unknown option {rest[0]}")
    options = Options(**vars(known))
    for f in dataclasses.fields(Options):
        value = getattr(options, f.name)
        if f.type in ("int", "float") and not 0 <= value < math.inf:
            raise UsageError(f"--{f.name.replace('_', '-')} {value}: a number from 0 on is needed")
    if options.backoff > options.backoff_cap:
        raise UsageError(f"--backoff {options.backoff:g} is above --backoff-cap {options.backoff_cap:g}")
    if not options.gpu_interval or not options.gpu_timeout or not options.log_part_size or options.log_parts < 2:
        raise UsageError("--gpu-interval, --gpu-timeout and --log-part-size are above 0, --log-parts above 1")
    try:
        if options.step_regex and not re.compile(options.step_regex).groups:
            raise UsageError(f"--step-regex {options.step_regex}: the step needs a group, as in 'iter (\\d+)'")
    except re.error as e:
        raise UsageError(f"--step-regex {options.step_regex}: {e}") from e
    if not command:
        raise UsageError("no command: supervise.py [options] -- COMMAND ...")
    return options, command

def run_folder(options, command):
    """design.md 5: the same command finds its folder again, another command gets another one."""
    for word, following in zip(command, [*command[1:], ""]):
        if options.run_dir or word.startswith("--out=") or (word == "--out" and following):
            return Path(options.run_dir or (following if word == "--out" else word[6:]))
    script = next((w for w in command if w.endswith(".py")), command[0])
    return Path("runs") / f"{Path(script).stem}-{hashlib.sha1(chr(0).join(command).encode()).hexdigest()[:6]}"

# ------------------------------------------------------------------------------------------- reading text

STEP = re.compile(r"""(?i)(?<![/\w])(?<!per\ )step["']?\s*[:=#\[]?\s*(\d[\d,]*+)(?!\.\d)(?:\s*(?:/|of)\s*(\d[\d,]*+))?"""
                  r"""(?!\s*(?:ms|s|sec|it)\b)|\b(\d++)/(\d++)\ \[""".replace("\\ ", " "))  # step 20/470, tqdm's 20/470 [
LOSS = re.compile(r"(?i)\bloss\b[\"']?\W{0,4}?(?:([-+]?(?:nan|inf))\b|[-+]?\d)")
ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*\x07?|\x1b.")

def clean(line):
    """bytes of one line -> text without colours and NULs; bad bytes are shown as such, never an error."""
    text = line.replace(b"\0", b"").decode("utf-8", "replace")
    return ANSI.sub("", text) if "\x1b" in text else text

def step_of(line, pattern=STEP):
    """-> (step, total or None), or None"""
    if not (m := pattern.search(line)):
        return None
    numbers = [int(g.replace(",", "")) for g in m.groups() if g and g.replace(",", "").isdigit()]
    return (numbers[0], numbers[1] if len(numbers) > 1 else None) if numbers else None

def span(seconds):
    seconds = int(max(seconds, 0))
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

def signal_name(number):
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

def exit_words(code, core=False):
    if code is None:
        return "ended unseen, its supervisor was killed"
    if code < 0:
        return f"was killed by {signal_name(-code)} (exit {128 - code}{', core dumped' if core else ''})"
    known = {FINISHED: "exit 0", USAGE: "exit 2, bad usage or input", STOPPED: "exit 75, stopped on request",
             DIVERGED: "exit 76, diverged", 126: "exit 126, cannot be executed", 127: "exit 127, not found"}
    shell = f", a shell's word for {signal_name(code - 128)}" if 128 < code < 160 else ""
    return known.get(code, f"exit {code}{shell}")

RANK = re.compile(r"^(?:\[(?:default\d+|rank ?\d+)\]:\s?)?")
HEADER = "Traceback (most recent call last)"
CHAINED = re.compile(r"^(During handling of the above exception|The above exception was the direct cause)")
EXCEPTION = re.compile(r"^(?:[\w.]+\.)?([A-Z]\w*|\w*(?:Error|Exception|error))(: .*|:)?$")
NAMED = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)(: .*|:)$")
FATAL = re.compile(r"Watchdog caught collective|terminate called|Fatal Python error|CUDA error:|Segmentation fault"
                   r"|has fallen off the bus|No space left on device|CUDA out of memory")
CASCADE = re.compile(r"NCCL|ProcessGroup|Dist(Backend|Network)Error|[Cc]onnection (closed|reset|refused)|[Bb]roken ?[Pp]ipe"
                     r"|^EOFError|KeyboardInterrupt|ChildFailed|ProcessRaised|ProcessExited|SystemExit|gloo|Watchdog"
                     r"|terminate called|Fatal Python error: Aborted")
NEW_RECORD = re.compile(rf"^$|^\s+File |^ {{4}}|^\s*[\^~]+$|{re.escape(HEADER)}|^\[?\d{{4}}-|^[\w./-]+\.py: |^Process \S+:$")
OWN = re.compile(r"^(?:\S*/)?([\w-]+\.py): (?!\d)(?:(.{1,60}?) failed: )?(.+)$")  # train_dflash.py: drafter 1 failed: ...

def root_line(text, pattern=STEP):
    """Output of perhaps many processes at once -> (process or "", the first failure: type and whole message, with
    what it led to where Python says so). ("", "") where nothing failed. What a run survived by five steps is old."""
    lines, found, steps, where, opened, chained, own = re.split(r"[\r\n]+", text), [], [], "", {}, set(), None
    for i, raw in enumerate(lines):
        rank = RANK.match(raw).group()
        line = raw[len(rank):].rstrip()
        if step := step_of(line, pattern):
            steps.append((i, step[0]))
        elif line.startswith(HEADER):
            opened[rank] = opened.get(rank, 0) + 1
        elif CHAINED.match(line):
            chained.add(rank)
        elif m := re.match(r"^Process (\S+):$", line):
            where = m.group(1)
        elif m := OWN.match(line):
            own = (i, m.group(2) or "", m.group(3))
        elif NAMED.match(line) or (opened.get(rank) and EXCEPTION.match(line)) or FATAL.search(line):
            message, j = [line], i + 1
            while j < len(lines) and j < i + 9 and not NEW_RECORD.search(more := lines[j][len(rank):].rstrip()) \
                    and lines[j].startswith(rank) and not NAMED.match(more) and not step_of(more, pattern):
                message.append(more.strip())
                j += 1
            opened[rank] = max(0, opened.get(rank, 0) - 1)
            earlier = next((f for f in reversed(found) if f["rank"] == rank), None) if rank in chained else None
            if earlier:
                earlier["text"] += "; then " + " ".join(message)
                earlier["line"] = i
            else:
                found.append({"line": i, "rank": rank, "text": " ".join(message),
                              "process": rank.strip("[]: ") or where})
            chained.discard(rank)
            where = ""
    found = [f for f in found if len({s for at, s in steps if at > f["line"]}) < 5]
    first = next((f for f in found if not CASCADE.search(f["text"])), found[0] if found else None)
    if own and len({s for at, s in steps if at > own[0]}) < 5:  # the script's own last word names the first failure
        full = next((f for f in found if own[2][:200] in f["text"]), None)
        if full or not first or not CASCADE.search(own[2]):
            first = {"process": own[1], "text": full["text"] if full else own[2]}
    return (first["process"], first["text"][:2000]) if first else ("", "")

TRACING = "using FX to symbolically trace"
CAUSES = (  # label, what gives it away in the root line, in words
    ("dense-attention", r"(?s)out of memory.*(math_attention|unfused|sdpa_dense)", "attention fell back to a dense path"),
    ("cuda-oom", r"CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED", "a GPU's memory is too small"),
    ("disk-full", r"No space left on device|Disk quota exceeded", "the disk is full"),
    ("gpu-lost", r"GPU is lost|fallen off the bus|no CUDA-capable device|uncorrectable ECC|was there at the last attempt"
     r"|CUDA_ERROR_DEVICE_UNAVAILABLE|device\(s\) is/are busy or unavailable", "a GPU is gone"),
    ("bad-checkpoint", r"PytorchStreamReader|SafetensorError|UnpicklingError|HeaderTooLarge|loading state_dict"
     r"|[Cc]heckpoint\b.*\b(broken|corrupt|damaged|truncated)", "a checkpoint cannot be read"),
    ("import", r"^(ModuleNotFoundError|ImportError|SyntaxError|IndentationError)\b", "the program cannot be loaded"),
    ("nccl-timeout", r"Watchdog caught collective|NCCL.*(time-?out|timed out)", "a collective waited in vain"),
    ("nan", r"Diverged|(loss|gradient)\S* (is|are|was) (nan|not finite|non-finite)", "the training diverged"),
)
RETRIES = {"cuda-oom": 1, "dense-attention": 1, "nan": 1, "bad-checkpoint": 1, "import": 1}  # others: --max-same

def cause_of(code, root, text="", ended="", oom_killed=False):
    """-> (label, words). ended: why the supervisor itself ended the attempt, "" or hang or nan."""
    if oom_killed:
        return "host-oom", "the host's OOM killer struck, its counter moved"
    if ended:
        return ended, {"nan": "the loss is not finite"}.get(ended, "no progress")
    if TRACING in text:
        return "fx-trace", ("compiled attention was refused while another thread of the process was tracing; a dense "
                            "path and its out of memory are only what follows")
    for label, pattern, words in CAUSES:
        if re.search(pattern, root):
            return label, words
    if code == DIVERGED:
        return "nan", "the training diverged"
    if code in (USAGE, 126, 127):
        return "usage", "the command itself is wrong"
    if code is not None and code < 0:
        return signal_name(-code), "the sender is unknown" if code == -signal.SIGKILL else "a native crash"
    return "error", ""

CORE = ("timestamp", "index", "uuid", "name", "memory.total", "memory.used", "utilization.gpu", "temperature.gpu",
        "power.draw", "power.limit")
EXTRA = ("pci.bus_id", "driver_version", "pstate", "clocks.current.sm", "utilization.memory", "temperature.memory",
         "clocks_event_reasons.active", "ecc.errors.uncorrected.volatile.total", "gpu_recovery_action",
         "mig.mode.current", "persistence_mode")
APPS = ("gpu_uuid", "pid", "process_name", "used_gpu_memory")
NUMBERS = {"memory.total", "memory.used", "utilization.gpu", "temperature.gpu", "power.draw", "power.limit",
           "clocks.current.sm", "utilization.memory", "temperature.memory", "used_gpu_memory"}
UNKNOWN = {"", "n/a", "[n/a]", "[not supported]", "[unknown error]", "[insufficient permissions]",
           "[requested functionality has been deprecated]"}
LOST = re.compile(r"GPU is lost|fallen off the bus|device handle|couldn't communicate|version mismatch|[Rr]eboot", re.I)

def number_of(word):
    """-> float, or None for whatever is not a plain number: unknown is never zero."""
    return float(word) if re.fullmatch(r"\d+(\.\d+)?", word) and len(word) < 20 else None

def read_csv(text, fields):
    """nvidia-smi's answer -> (rows as dicts by field, the first line that is neither header nor row, or "").
    Without the header that was asked for there are no rows: an error must not look like data."""
    rows, odd, header = [], "", False
    for line in text.split("\n"):
        words = [w.strip() for w in line.split(",")]
        if fields == APPS and len(words) > 4:  # a process name may hold commas
            words = [*words[:2], ", ".join(words[2:-1]), words[-1]]
        if [w.split(" [")[0] for w in words] == list(fields):
            header = True
        elif header and len(words) == len(fields) and words[fields.index(next(f for f in fields if "uuid" in f))][:4] in ("GPU-", "MIG-"):
            rows.append({f: number_of(w) if f in NUMBERS else None if w.lower() in UNKNOWN else w
                         for f, w in zip(fields, words)})
        elif line.strip() and not odd:
            odd = line.strip()[:200]
    return rows, odd

def gpu_words(rows):
    """-> one line a GPU, - where a value is unknown"""
    def show(value):
        return "-" if value is None else f"{value:.0f}"
    return [f"GPU {r['index']}: util {show(r['utilization.gpu'])} %, {show(r['power.draw'])} of {show(r['power.limit'])} W, "
            f"{show(r['memory.used'])} of {show(r['memory.total'])} MiB, {show(r['temperature.gpu'])} C" for r in rows]

# --------------------------------------------------------------------------------------- hang and progress

def patience(p, limits):
    """How long the run in the state p may go without progress -> (seconds, why that long)"""
    if not p["known"] or p["phase"] == "compiling" or (p["step"] is None and p["phase"] not in WORKING[1:] + ("preparing", "loading")):
        return limits.first_progress, "the limit to the first progress" if p["phase"] != "compiling" else "the limit for compiling"
    learned = max(limits.hang, limits.hang_factor * p["longest"])
    if p["phase"] in ("", "training"):
        return learned, f"at least {limits.hang:g} s and {limits.hang_factor:g} times the longest step, {p['longest']:.1f} s"
    return max(limits.phase_limit, learned), f"the limit for {p['phase']}"

def advance(p, now, step, phase, best):
    """The run has moved: a new heartbeat, or another step in its output. Changes p."""
    if p["phase"] == phase and p["phase"] in ("", "training") and p["top"] is not None and not p["gap"]:
        p["longest"] = max(p["longest"], now - p["moved"])
    p["phase"], p["moved"], p["known"], p["gap"] = phase, now, True, False
    if step is None or phase not in WORKING:
        return
    if p["step"] is not None and step < p["step"]:
        p["wrapped"] = True  # an epoch's bar began again: its steps say nothing about a gain
    p["first"] = step if p["first"] is None else p["first"]
    if p["step"] != step:
        p["pace"] = [*p["pace"], (now, step)][-20:]
    p["step"], top = step, p["top"]
    p["top"] = step if top is None else max(top, step)
    if p["top"] > max(best, -1 if top is None else top):
        p["gained"] = now

def pace(p):
    """-> seconds a step, or None"""
    if len(p["pace"]) < 2:
        return None
    (t0, s0), (t1, s1) = p["pace"][0], p["pace"][-1]
    return (t1 - t0) / (s1 - s0) if s1 > s0 else None

# ------------------------------------------------------------------------------------------------- decide

def since(history, enough):
    """The newest attempts, back to and with the first that is enough."""
    tail = []
    for a in reversed(history):
        tail.append(a)
        if enough(a):
            break
    return tail

def ledgers(history, limits, now):
    """-> {ledger: (used, allowed)}. An attempt's gain is True, False or None, unknown, which counts neither way."""
    if not history:
        return {"no gain": (0, limits.max_no_gain), "same failure": (0, limits.max_same), "rate": (0, limits.rate),
                "lifetime": (0, limits.lifetime), "waste": (0, limits.waste)}
    a, fresh = history[-1], since(history, lambda x: x["gain"])
    if a["cause"] == "nan":  # a retry may well get past the step where the last one diverged
        same = [x for x in since(history, lambda x: x["gain"] and x["up"] >= limits.healthy) if x["cause"] == "nan"]
    else:
        same = [x for x in fresh if x["signature"] == a["signature"] and not x["gain"]
                and (x["gain"] is False or x["cause"] in RETRIES)]
    restarts = [x for x in history if x["restart"] and now - limits.rate_window < x["start"] <= now]
    return {"no gain": (sum(x["gain"] is False for x in fresh), limits.max_no_gain),
            "same failure": (max(0, len(same) - 1), RETRIES.get(a["cause"], limits.max_same)),
            "rate": (len(restarts), limits.rate), "lifetime": (a["restart"], limits.lifetime),
            "waste": (int(sum(x["wasted"] for x in fresh)), limits.waste)}

def decide(history, limits, now, stop=0):
    """What to do after the newest attempt -> (relaunch | finished | stopped | give up, exit code, delay, sentence).

    history: the attempts since a person last started the run, oldest first, as plain dicts. now: the same clock as
    their start. stop: the signal by which a person asked for the end, or 0."""
    a = history[-1]
    code, used = a["code"], ledgers(history, limits, now)
    died = f"attempt {a['number']} {a['ended_words'] or exit_words(code, a['core'])} after {span(a['up'])}"
    died += f" at step {a['step']}" if a["step"] is not None else ""
    died += {True: "", False: ", no gain", None: ""}[a["gain"]]
    unfinished = code == FINISHED and (a["done_missing"] or (a["root"] and a["total"] and (a["step"] or 0) < a["total"]))
    evidence = a["root"] if code != FINISHED or unfinished or a["ended"] else ""
    if evidence:
        died += f": {a['process'] + ': ' if a['process'] else ''}{evidence}"
    if a["cause_words"] and (code or a["ended"]):
        died += f" [{a['cause']}: {a['cause_words']}]"
    action, result, delay = "give up", USELESS, 0.0
    if a["unkillable"]:
        result, why = PERSON, f"{a['unkillable']}: the machine needs a person"
    elif stop:
        action, result = "stopped", code if code is not None and code >= 0 else 128 + stop
        why = "stopped, as asked"
    elif code == FINISHED and not a["ended"] and not unfinished:
        action, result = "finished", FINISHED
        why = "finished" + (f", though its output holds a failure: {a['root']}" if a["root"] else "")
    elif code in (USAGE, 126, 127) and not a["ended"]:
        result, why = code, "a relaunch would meet the same, so there is none"
    elif a["gpus"]:
        result, why = PERSON, f"{a['gpus']}: the machine needs a person"
    elif spent := next((name for name, (count, allowed) in used.items() if count >= allowed), None):
        count, allowed = used[spent]
        result = USELESS if spent in ("no gain", "same failure") else SPENT
        why = {"no gain": f"{count} attempts in a row without a higher step, relaunching is useless",
               "same failure": f"the same failure again after {count} of {allowed} retries, relaunching is useless",
               "rate": f"{count} restarts in {span(limits.rate_window)}, the limit is {allowed}",
               "lifetime": f"{count} restarts in all, the limit is {allowed}",
               "waste": f"{span(count)} spent since the last gain, the limit is {span(allowed)}"}[spent]
    else:
        n = len(since(history, lambda x: x["gain"] and x["up"] >= limits.healthy))
        action, result = "relaunch", None
        delay = min(limits.backoff_cap, limits.backoff * 2.0 ** min(n - 1, 30))
        tight = min((name for name in used if name != "waste"), key=lambda k: used[k][1] - used[k][0])
        why = f"relaunch in {delay:g} s ({tight}: {used[tight][0]} of {used[tight][1]} used)"
        if unfinished:
            missing = "the file that --done names is missing" if a["done_missing"] else f"step {a['step']} of {a['total']}"
            why = f"exit 0 is not a finish here, {missing}; {why}"
    return action, result, delay, f"{died}; {why}"

# ===========================================================================================================
# Above: pure, tested without a process. Below: effects, read as a script.
# ===========================================================================================================

# ---------------------------------------------------------------------------------- what the child writes

class Output:
    """The child's bytes: to attempt_NNN.log and its parts, to the terminal while that reads, a copy in memory."""

    def __init__(self, folder, options):
        self.folder, self.options, self.fd, self.path = folder, options, None, None
        self.lost, self.trouble, self.ring, self.partial, self.pending, self.unseen = 0, "", bytearray(), b"", b"", 0
        try:  # our own handle, so that O_NONBLOCK does not reach the shell's
            kept = stat.S_ISREG(os.fstat(1).st_mode)
            self.terminal = 1 if kept else os.open("/proc/self/fd/1", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            self.terminal = 1

    def open(self, number):
        self.close()
        self.path, self.ring, self.partial = self.folder / f"attempt_{number:03}.log", bytearray(), b""
        self.check()

    def close(self):
        if self.fd is not None:
            os.close(self.fd)
        self.fd = None

    def check(self):
        """Once a turn: is the log still where it was, is there room for it? Resumes by itself."""
        try:
            usage = os.statvfs(self.folder)
            full = usage.f_bavail * usage.f_frsize < self.options.min_free * (1 << 20)
            here = self.path.stat().st_ino if self.path.exists() else None
            if self.fd is None or here != os.fstat(self.fd).st_ino:
                self.close()
                self.folder.mkdir(parents=True, exist_ok=True)
                self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self.trouble = f"less than {self.options.min_free:g} MiB free" if full else ""
        except OSError as e:
            self.trouble = f"{self.path.name}: {e.strerror}"

    def feed(self, data):
        """-> the whole lines in it, as text; a line feed or a carriage return ends one."""
        self.ring += data
        if len(self.ring) > 2 * RING:
            del self.ring[:-RING]
        self.show(data)
        self.keep(data)
        *lines, self.partial = re.split(rb"[\r\n]+", (self.partial + data)[-WINDOW:])
        return [clean(line) for line in lines if line]

    def keep(self, data):
        if self.fd is None or self.trouble:
            self.lost += len(data)
            return
        try:
            while data:
                data = data[os.write(self.fd, data):]
            limit = self.options.log_part_size * (1 << 20)
            parts = [int(f.suffix[1:]) for f in self.folder.glob(f"{self.path.name}.*") if f.suffix[1:].isdigit()]
            if os.fstat(self.fd).st_size >= (limit if parts else min(limit, 4 << 20)):
                self.path.rename(f"{self.path}.{max(parts, default=0) + 1}")
                self.check()
                self.prune(limit)
        except OSError as e:
            self.lost, self.trouble = self.lost + len(data), f"{self.path.name}: {e.strerror}"

    def prune(self, limit):
        """Delete the oldest parts, never the first of an attempt: it holds what the run was."""
        parts = sorted((f for f in self.folder.glob("attempt_*.log.*") if f.suffix[1:].isdigit()),
                       key=lambda f: (f.stem, int(f.suffix[1:])))
        own, size = [f for f in parts if f.stem == self.path.name], sum(f.stat().st_size for f in parts)
        for f in parts:
            if f.suffix == ".1" or (len(own) < self.options.log_parts and size < 2 * self.options.log_parts * limit):
                continue
            if f in own or size >= 2 * self.options.log_parts * limit:
                size -= f.stat().st_size
                own = [x for x in own if x != f]
                f.unlink()

    def show(self, data):
        """To the terminal, which may not read: then what it missed is counted and said."""
        if self.terminal is None:
            return
        self.pending += data
        if len(self.pending) > TERMINAL:
            self.unseen += len(self.pending) - 4096
            self.pending = b"\n[supervise: %d bytes not shown]\n" % self.unseen + self.pending[-4096:]
        self.flush()

    def flush(self):
        poll = selectors.select.poll()
        try:
            poll.register(self.terminal, selectors.select.POLLOUT)
            while self.pending and any(e & selectors.select.POLLOUT for _, e in poll.poll(0)):
                self.pending = self.pending[os.write(self.terminal, self.pending[:4096]):]
            self.unseen = 0 if not self.pending else self.unseen
        except BlockingIOError:
            pass
        except (OSError, TypeError):
            self.terminal, self.pending = None, b""  # hung up: the log goes on

# ------------------------------------------------------------------------------------------------ the GPUs

class Gpus:
    """What nvidia-smi says, asked one call at a time; the call may hang, lie or die, and then is given up."""

    def __init__(self, options, selector):
        self.options, self.selector, self.program = options, selector, shutil.which("nvidia-smi")
        self.call = None  # {"process", "query", "buffer", "since", "killed"}
        self.next, self.extra, self.rows, self.apps, self.asked = 0.0, True, [], None, 0
        self.answered = self.first = None  # when rows came last; the rows before the run, by uuid
        self.error, self.minute, self.alerts, self.said = "", {"since": time.monotonic(), "rows": []}, [], set()

    def alert(self, kind, text):
        if kind not in self.said:
            self.said.add(kind)
            self.alerts.append(text)

    def ask(self, query):
        """Start a call, unless one is under way or nvidia-smi is not there -> did it start?"""
        if self.call or not self.program:
            return False
        fields = APPS if query == "compute-apps" else CORE + EXTRA * self.extra
        self.asked += 1
        try:
            process = subprocess.Popen([self.program, f"--query-{query}={','.join(fields)}", "--format=csv,nounits"],
                                       stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                       start_new_session=True)
        except OSError as e:
            self.alert("start", f"nvidia-smi cannot be started: {e.strerror}")
            self.program = None
            return False
        process.returncode = 0  # the loop reaps all children
        os.set_blocking(process.stdout.fileno(), False)
        self.call = {"process": process, "query": query, "fields": fields, "buffer": b"", "since": time.monotonic(),
                     "killed": False}
        self.selector.register(process.stdout, selectors.EVENT_READ, self.read)
        return True

    def read(self):
        try:
            data = self.call["process"].stdout.read(WINDOW)
        except OSError:
            data = b""
        if data == b"":
            self.selector.unregister(self.call["process"].stdout)
        self.call["buffer"] = (self.call["buffer"] + (data or b""))[:RING]

    def check(self, now):
        """Once a turn: end a call that hangs, start the next one that is due."""
        if self.call and not self.call["killed"] and now - self.call["since"] > self.options.gpu_timeout:
            self.call["killed"], self.next = True, now + 6 * self.options.gpu_interval
            self.alert("hang", f"nvidia-smi does not answer within {self.options.gpu_timeout:g} s; its values are unknown")
            self.error, self.rows = "nvidia-smi does not answer", []
            kill_group(self.call["process"].pid)
        if not self.call and now >= self.next:
            self.next = now + self.options.gpu_interval
            self.ask("gpu")

    def ended(self, status):
        """The call was reaped: read it."""
        call, self.call = self.call, None
        pipe = call["process"].stdout
        if pipe in self.selector.get_map().values() or pipe.fileno() in self.selector.get_map():
            try:
                call["buffer"] += pipe.read(RING) or b""
            except OSError:
                pass
            self.selector.unregister(pipe)
        pipe.close()
        kill_group(call["process"].pid)
        code = os.waitstatus_to_exitcode(status)
        rows, odd = read_csv(call["buffer"][:RING].decode("utf-8", "replace"), call["fields"])
        if call["killed"]:
            return
        if call["query"] == "compute-apps":
            self.apps = (time.monotonic(), rows) if code == 0 else None
            return
        if not rows and self.extra and code:  # an unknown field rejects the whole query
            self.extra = False
            self.ask("gpu")
            return
        self.rows, self.error = rows, f"nvidia-smi: {odd or 'no rows'} (exit {code})" if code or not rows else ""
        if self.error:
            self.alert(f"error {code}", self.error)
        elif odd:
            self.alert("odd", f"nvidia-smi said something odd, kept as unknown: {odd}")
        if rows:
            self.answered = time.monotonic()
            self.first = self.first if self.first is not None else {r["uuid"]: r for r in rows}
            self.minute["rows"] += rows
        if found := self.lost():
            self.alert(f"lost {found}", found)

    def lost(self):
        """-> what is wrong with a GPU that was fine when the run began, or "" """
        if not self.first:
            return ""
        here = {r["uuid"] for r in self.rows}
        if self.error and LOST.search(self.error):
            return self.error
        if self.rows and (gone := [r for u, r in self.first.items() if u not in here]):
            return f"GPU {gone[0]['index']} ({gone[0]['uuid']}) is gone from nvidia-smi"
        sick = [r for r in self.rows if r.get("gpu_recovery_action") not in (None, "None")]
        return f"GPU {sick[0]['index']} asks for {sick[0]['gpu_recovery_action']}" if sick else ""

    def mine(self):
        """The rows of the GPUs that the run may use."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        words = visible.split(",") if visible is not None else None
        return [r for r in self.rows if words is None or r["index"] in words
                or any(w.startswith("GPU-") and (r["uuid"] or "").startswith(w) for w in words)]

    def held(self, pids):
        """-> who holds memory of the run's GPUs above what they held before; "" nobody; None unknown"""
        if not self.rows or self.apps is None:
            return None
        unknown = False
        for r in self.mine():
            before = (self.first.get(r["uuid"]) or {}).get("memory.used")
            apps = [a for a in self.apps[1] if a["gpu_uuid"] == r["uuid"]]
            ours = [a["pid"] for a in apps if a["pid"].isdigit() and int(a["pid"]) in pids]
            if ours:
                return f"GPU {r['index']} is still held by process {ours[0]} of this run"
            if r["memory.used"] is None:
                unknown = unknown or before is not None
            elif r["memory.used"] > (before or 0) + SLACK:
                who = ", ".join(f"{a['pid']} {a['process_name']}" for a in apps) or "nobody that nvidia-smi names"
                return f"GPU {r['index']} still has {r['memory.used']:.0f} MiB in use, by {who}"
        return None if unknown else ""

    def write_minute(self, folder):
        """min, mean and max of each GPU since the last line of gpu.jsonl."""
        begin, rows = self.minute["since"], self.minute["rows"]
        self.minute = {"since": time.monotonic(), "rows": []}
        out = []
        for uuid in dict.fromkeys(r["uuid"] for r in rows):
            own = [r for r in rows if r["uuid"] == uuid]
            line = {"index": own[-1]["index"], "uuid": uuid, "name": own[-1]["name"], "samples": len(own)}
            for f in ("utilization.gpu", "memory.used", "power.draw", "temperature.gpu", "clocks.current.sm"):
                known = [r[f] for r in own if r.get(f) is not None]
                line[f] = [min(known), round(sum(known) / len(known), 2), max(known)] if known else None
            out.append(line)
        if out:
            append_line(folder / "gpu.jsonl", {"time": clock(), "seconds": round(time.monotonic() - begin, 1), "gpus": out},
                        self.options.log_part_size)

# -------------------------------------------------------------------------------------- records and processes

def clock():
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")

def append_line(path, record, limit=math.inf):
    """One JSON line; a full disk costs the line, never the run."""
    try:
        with open(path, "a") as f:
            f.write(json.dumps(record, ensure_ascii=False) + "\n")
            size = f.tell()
        if size > limit * (1 << 20):
            os.replace(path, f"{path}.1")
    except OSError:
        pass

def read_json(path):
    try:
        found = json.loads(Path(path).read_text())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}

def save(run, **changed):
    """state.json as a whole: what a supervisor that follows goes on from, and what `status` shows."""
    run.state.update(changed)
    beside = run.folder / "state.json.new"
    try:
        with open(beside, "w") as f:
            json.dump(run.state, f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        os.replace(beside, run.folder / "state.json")
    except OSError:
        pass

def note(run, kind, text, **values):
    """One event: a line in events.jsonl, one on the terminal, the last of state.json."""
    append_line(run.folder / "events.jsonl", {"time": clock(), "kind": kind, "text": text, **values})
    run.output.show(f"supervise {time.strftime('%H:%M:%S')}: {text}\n".encode())
    save(run, last_event=f"{clock()} {text}")

def kill_group(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass

def send(process, number):
    try:
        process.send_signal(number)
    except (psutil.Error, OSError):
        pass

def tree(run):
    """Every live process of this run: our descendants, orphans too as we are their subreaper, and whoever bears the
    run's token in its environment, which also finds those of a supervisor that was killed."""
    found = {p.pid: p for p in psutil.Process().children(recursive=True)}
    token = f"SUPERVISE_RUN_ID={run.token}\0".encode()
    for pid in set(psutil.pids()) - set(found) - {os.getpid()}:
        try:
            if token in Path(f"/proc/{pid}/environ").read_bytes() + b"\0":
                found[pid] = psutil.Process(pid)
        except (OSError, psutil.Error):
            pass
    if run.gpus.call:
        found = {k: p for k, p in found.items() if session(k) != run.gpus.call["process"].pid}
    return [p for p in found.values() if state_of(p) not in ("", "Z")]

def session(pid):
    try:
        return os.getsid(pid)
    except OSError:
        return 0

def state_of(process):
    """-> R, S, D, T, Z ..., or "" when it is gone"""
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] if process.is_running() else ""
    except (OSError, psutil.Error):
        return ""

def main_process(leader):
    """Whom to ask for an end: the command itself, or the heaviest child where the command is a shell."""
    try:
        while leader.name() in SHELLS and (children := leader.children()):
            leader = max(children, key=lambda p: p.memory_info().rss)
    except psutil.Error:
        pass
    return leader

def oom_kills(pid):
    """-> {cgroup file: kills by the OOM killer that it counts} for the memory cgroup of a process"""
    found = {}
    try:
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            for file in ((f"/sys/fs/cgroup{path}/memory.events",) if not kinds
                         else (f"/sys/fs/cgroup/memory{path}/memory.oom_control",) if kinds == "memory" else ()):
                if os.path.exists(file) and (m := re.search(r"oom_kill (\d+)", Path(file).read_text())):
                    found[file] = int(m.group(1))
    except OSError:
        pass
    return found

def stacks(run):
    """Where the processes of the run stand: state, wchan, kernel stack; Python's where someone can tell."""
    out, main = [], main_process(run.leader)
    for p in tree(run)[:40]:
        for task in sorted(Path(f"/proc/{p.pid}/task").glob("*"))[:40]:
            try:
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                stack = (task / "stack").read_text().split("\n")[:6] if os.access(task / "stack", os.R_OK) else []
                out.append(f"{p.pid}/{task.name} {(task / 'comm').read_text().strip()} {state} "
                           f"{(task / 'wchan').read_text() or '-'} " + " ".join(x.split(" ")[-1] for x in stack))
            except OSError:
                pass
        try:  # only who waits for it: SIGUSR1 ends a process that does not
            if int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{p.pid}/status").read_text()).group(1), 16) >> 9 & 1:
                send(p, signal.SIGUSR1)
        except (OSError, AttributeError):
            pass
    if spy := shutil.which("py-spy"):
        try:
            done = subprocess.run([spy, "dump", "--pid", str(main.pid)], capture_output=True, text=True, timeout=10, check=False)
            out.append(done.stdout + done.stderr)
        except (OSError, subprocess.TimeoutExpired):
            pass
    wait_for(run, lambda: False, POLL)  # faulthandler's answer comes through the output
    return f"main process {main.pid} in state {state_of(main)}", "\n".join(out)[:20000]

def sweep(run):
    """End the whole tree: freeze, kill, look again, until two looks find nothing -> (how many, who is left)"""
    wait_for(run, lambda: not tree(run), POLL if run.status is not None else 0)
    killed, clean, deadline, left = set(), 0, time.monotonic() + SWEEP, []
    while clean < 2 and time.monotonic() < deadline:
        left = tree(run)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for p in left:
                send(p, number)
        killed |= {p.pid for p in left}
        clean = 0 if left else clean + 1
        pump(run, 0.02)
    if left or (run.leader and run.status is None):
        who = left[0] if left else run.leader
        return killed, f"process {who.pid} in state {state_of(who)} cannot be killed"
    return killed, ""

def end_in_order(run, roots, grace, alive):
    """CONT and TERM to the main process under each root, time for a checkpoint; a second signal cuts it short."""
    told, deadline = set(), time.monotonic() + grace
    while alive() and len(run.asked) < 2 and time.monotonic() < deadline:
        for p in map(main_process, roots):
            if p.pid not in told and not (told and p.is_running() and p.name() in SHELLS):
                told.add(p.pid)
                send(p, signal.SIGCONT)
                send(p, signal.SIGTERM)
        pump(run, min(POLL, max(0, deadline - time.monotonic())))

def shim(parent, command):
    """Become the command, which then gets a SIGTERM when its supervisor dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):
        return 128 + signal.SIGTERM
    for number in (signal.SIGPIPE, signal.SIGTSTP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as e:
        print(f"supervise.py: {command[0]}: {e.strerror}", file=sys.stderr)
        return 127 if isinstance(e, FileNotFoundError) else 126

# ------------------------------------------------------------------------------------------------ the loop

def pump(run, seconds=POLL):
    """One turn: what the child writes, what nvidia-smi answers, who died; then, at most every half second, a look."""
    begin = time.monotonic()
    for key, _ in run.selector.select(seconds):
        key.data()
    if time.monotonic() - begin > seconds + 2 * POLL and run.p:  # we stood still, perhaps the child did too
        run.p["moved"], run.p["gap"], run.quiet = time.monotonic(), True, None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if not pid:
            break
        if run.leader and pid == run.leader.pid:
            run.status = status
        elif run.gpus.call and pid == run.gpus.call["process"].pid:
            run.gpus.ended(status)
    run.output.flush()
    if time.monotonic() >= run.next_look:
        run.next_look = time.monotonic() + POLL
        look(run)

def wait_for(run, condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        if (left := deadline - time.monotonic()) <= 0:
            return False
        pump(run, min(POLL, left))
    return True

def read_pipe(run):
    """Drain what the child wrote. A step in it is progress, and where no step was ever seen, the output itself."""
    try:
        data = os.read(run.pipe, RING)
    except BlockingIOError:
        return
    if not data:
        close_pipe(run)
        return
    now, pattern = time.monotonic(), run.pattern
    for line in run.output.feed(data):
        found = step_of(line, pattern)
        if found and not run.beat:
            run.p["total"] = found[1] or run.p["total"]
            if found[0] != run.p["step"]:
                advance(run.p, now, found[0], "", run.state["best"])
        elif found:
            run.p["total"] = found[1] or run.p["total"]
        if (m := LOSS.search(line)) and "skip" not in line.lower():
            run.p["nonfinite"] = run.p["nonfinite"] + 1 if m.group(1) else 0
    if not run.p["known"]:
        run.p["moved"] = now
    if len(data) < WINDOW:
        time.sleep(0.02)  # many small writes are read together

def close_pipe(run):
    if run.pipe is not None:
        run.selector.unregister(run.pipe)
        os.close(run.pipe)
    run.pipe = None

def look(run):
    """Twice a second: heartbeat, log, GPUs, signals, state."""
    now, p = time.monotonic(), run.p
    run.gpus.check(now)
    for text in run.gpus.alerts:
        note(run, "gpu", text)
    run.gpus.alerts.clear()
    if now - run.gpus.minute["since"] >= 60:
        run.gpus.write_minute(run.folder)
    if run.asked and run.asked[0] != run.state["stop"]:
        save(run, stop=run.asked[0])  # the request outlives us
    if run.hup == 1:
        run.hup = 2
        run.output.terminal = None
        note(run, "hangup", "the terminal hung up; the run goes on, follow its log")
    if not run.leader:
        return
    run.output.check()
    if run.output.trouble != run.trouble:
        run.trouble = run.output.trouble
        note(run, "log", f"the log pauses: {run.trouble}" if run.trouble else f"the log goes on, {run.output.lost} bytes are missing")
    beat = read_json(run.folder / "heartbeat.json")
    if beat and beat != run.old_beat and beat != run.beat:
        run.beat = beat
        step = beat.get("step") if isinstance(beat.get("step"), int) else None
        advance(p, now, step, str(beat.get("phase", "")), run.state["best"])
    if run.dump and run.status is None:
        run.dump = False
        note(run, "stacks", *[stacks(run)[0]])
    for file, count in oom_kills(run.leader.pid).items():
        run.oom.setdefault(file, count)
    if now >= run.next_save:
        run.next_save = now + run.options.gpu_interval
        watch_load(run, now)
        save(run, phase=p["phase"], step=p["step"], total=p["total"], pace=pace(p), gpus=gpu_words(run.gpus.rows),
             gpu_error=run.gpus.error, seen=time.time())

def watch_load(run, now):
    """Since when the tree uses no CPU and its GPUs do nothing; None when they work or it is unknown."""
    total, rows = 0.0, run.gpus.mine()
    for p in [run.leader, *psutil.Process().children(recursive=True)]:
        try:
            total += sum(p.cpu_times()[:2])
            run.pids.add(p.pid)
        except psutil.Error:
            pass
    busy = total - run.cpu[1] > 0.02 * (now - run.cpu[0])
    idle = rows and all((r["utilization.gpu"] is not None and r["utilization.gpu"] <= 0.5) or
                        (r["power.draw"] is not None and r["power.limit"] and r["power.draw"] < r["power.limit"] / 4)
                        for r in rows)
    run.cpu, run.quiet = (now, total), (run.quiet or now) if idle and not busy else None

def why_end(run):
    """-> (hang | nan | "", why), for a run that should not go on"""
    now, p = time.monotonic(), run.p
    if p["nonfinite"] >= 3:
        return "nan", "printed three losses in a row that are not finite and was ended"
    limit, words = patience(p, run.options)
    if run.quiet and p["top"] is not None and p["phase"] in ("", "training") and run.options.early < limit \
            and now - max(run.quiet, p["moved"]) > run.options.early:
        limit, words = run.options.early, "CPU and GPUs idle as well"
    if now - p["moved"] > limit:
        return "hang", f"made no progress for {span(now - p['moved'])}{' while ' + p['phase'] if p['phase'] else ''} ({words})"
    return "", ""

def spawn(run):
    number = 1 + max((int(f.name[8:11]) for f in run.folder.glob("attempt_[0-9][0-9][0-9].log*")), default=0)
    history = run.state["history"]
    run.p = {"phase": "", "step": None, "total": None, "first": None, "top": None, "moved": time.monotonic(), "gained": None,
             "longest": 0.0, "known": run.state["known"], "wrapped": False, "gap": False, "nonfinite": 0, "pace": []}
    run.old_beat, run.beat, run.quiet, run.oom, run.pids = read_json(run.folder / "heartbeat.json"), {}, None, oom_kills(os.getpid()), set()
    run.output.open(number)
    environment = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **os.environ,
                   "SUPERVISE_RUN_DIR": str(run.folder.resolve()), "SUPERVISE_RUN_ID": run.token,
                   "SUPERVISE_ATTEMPT": str(number), "SUPERVISE_RESTART_COUNT": str(len(history) and history[-1]["restart"] + 1),
                   "SUPERVISE_LAST_FAILURE": history[-1]["cause"] if history else "",
                   "SUPERVISE_HEARTBEAT": str(run.folder.resolve() / "heartbeat.json")}
    run.pipe, theirs = os.pipe()
    os.set_blocking(run.pipe, False)
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, RING)
    child = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--_exec", str(os.getpid()), *run.command],
                             stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment, start_new_session=True)
    child.returncode = 0  # the loop reaps all children
    os.close(theirs)
    run.selector.register(run.pipe, selectors.EVENT_READ, lambda: read_pipe(run))
    run.status, run.leader = None, psutil.Process(child.pid)
    run.cpu = (time.monotonic(), 0.0)
    restart = history[-1]["restart"] + 1 if history else 0
    note(run, "start", f"attempt {number} started, process {child.pid}; tail -F {run.output.path}", attempt=number)
    save(run, attempt=number, leader=child.pid, now="running", step=None, phase="")
    return {"number": number, "restart": restart, "start": time.monotonic()}

def one_attempt(run):
    """Start the command and be there until nothing of it is left -> what there is to know about it."""
    a = spawn(run)
    ended = words = stack = ""
    while run.status is None and not run.asked and not ended:
        pump(run)
        ended, words = why_end(run)
    if run.status is not None:
        ended = words = ""
    if run.asked and run.status is None:
        note(run, "stop", f"{signal_name(run.asked[0])}: the run is asked to save and end, it has {run.options.grace:g} s; again: it is killed")
        save(run, now="stopping")
        end_in_order(run, [run.leader], run.options.grace, lambda: run.status is None)
    elif ended:
        state, stack = stacks(run)
        words += f"; {state}{', stopped by a signal' if state.endswith('T') else ''}"
        if gpus := gpu_words(run.gpus.mine()):
            stuck = any((r["utilization.gpu"] or 0) > 90 and (r["power.draw"] or math.inf) < (r["power.limit"] or 0) / 3 for r in run.gpus.mine())
            words += f"; {'; '.join(gpus)}{': looks like a stuck collective' if stuck else ''}"
        note(run, ended, f"attempt {a['number']} {words}", stacks=stack)
        end_in_order(run, [run.leader], run.options.hang_grace if ended == "hang" else 0, lambda: run.status is None)
    died, leader_alive = time.monotonic(), run.status is None
    strays, unkillable = sweep(run)
    run.pids |= strays | {run.leader.pid}
    wait_for(run, lambda: run.pipe is None, DRAIN)
    close_pipe(run)
    p, best = run.p, run.state["best"]
    text = "\n".join(clean(x) for x in re.split(rb"[\r\n]+", bytes(run.output.ring)))
    process, root = root_line(text, run.pattern)
    code = os.waitstatus_to_exitcode(run.status) if run.status is not None else -signal.SIGKILL
    if not root and code and not ended:
        root = next((x for x in reversed(text.split("\n")) if x.strip()), "it wrote nothing")[:500]
    moved = any(count > run.oom.get(f, count) for f in run.oom for count in [oom_count(f)])
    cause, cause_words = cause_of(code, root, text, ended, moved)
    gain = True if p["top"] is not None and p["top"] > best else False if p["known"] and not p["wrapped"] else None
    a |= {"up": died - a["start"], "code": code, "core": bool(run.status and os.WIFSIGNALED(run.status) and os.WCOREDUMP(run.status)),
          "ended": ended, "ended_words": words, "process": process, "root": root, "cause": cause, "cause_words": cause_words,
          "signature": f"{cause} {code if not root else ''} {re.sub(r'0x[0-9a-f]+|[0-9]+', '#', root.split('; then ')[0])[:200]}{p['phase'] if ended else ''}",
          "first": p["first"], "step": p["top"], "total": p["total"], "gain": gain, "strays": len(strays) - leader_alive,
          "wasted": died - (p["gained"] or a["start"]) if gain is not None else 0.0,
          "done_missing": bool(run.options.done and not (run.folder / run.options.done).exists()),
          "unkillable": unkillable, "gpus": ""}
    totals = run.state["totals"]
    totals["attempts"] += 1
    totals["up"] += a["up"]
    totals["useful"] += a["up"] - (a["wasted"] if code else 0)
    totals["gpu"] += a["up"] * len(run.gpus.mine())
    run.state["history"] = [*run.state["history"], a][-100:]
    save(run, best=max(best, p["top"] or 0), known=p["known"], leader=0)
    steps = f", steps {p['first']} to {p['top']}" if p["top"] is not None else ""
    swept = f", {a['strays']} processes outlived it and were killed" if a["strays"] else ""
    note(run, "exit", f"attempt {a['number']}: {words or exit_words(code, a['core'])} after {span(a['up'])}{steps}{swept}", **a,
         lines=[x[:500] for x in text.split("\n")[-200:]], gpu_rows=run.gpus.rows)
    run.leader = None
    return a

def oom_count(file):
    try:
        return int(re.search(r"oom_kill (\d+)", Path(file).read_text()).group(1))
    except (OSError, AttributeError):
        return 0

def gpus_back(run):
    """Wait until the GPUs hold no more than before the run -> "" or why a person is needed"""
    g = run.gpus
    if g.first is None:
        return ""  # never readable: nothing to go by
    deadline, held = time.monotonic() + run.options.gpu_wait, None
    while not run.asked:
        for query in ("gpu", "compute-apps"):
            wait_for(run, lambda: not g.call or run.asked, run.options.gpu_timeout)
            g.apps = None if query == "gpu" else g.apps
            if g.ask(query):
                wait_for(run, lambda: not g.call or run.asked, run.options.gpu_timeout + 2)
        if lost := g.lost():
            return lost
        held = g.held(run.pids)
        if held == "" or time.monotonic() > deadline:
            break
        wait_for(run, lambda: run.asked, 2)
    if held is None and not run.asked:
        return f"the GPUs cannot be read ({g.error or 'values are unknown'}), unknown is not free"
    return held or ""

def leftover(run):
    """A supervisor before us was killed: its run may be alive. Never two: it is ended in order first."""
    left = tree(run)
    if not left:
        return
    note(run, "leftover", f"{len(left)} processes of this run are alive without a supervisor, {left[0].pid} first; they are ended")
    roots = [p for p in left if p.ppid() not in {q.pid for q in left}]
    if run.state.get("leader") in {p.pid for p in left}:
        roots = []  # its supervisor's death sent it a SIGTERM already; a second one would cut its checkpoint
    end_in_order(run, roots, run.options.grace, lambda: tree(run))
    _, unkillable = sweep(run)
    if unkillable:
        raise UsageError(PERSON, unkillable)

def supervise(run):
    """The life of a run -> (exit code, how it ended)"""
    leftover(run)
    if run.state["stop"] and not run.asked:
        run.asked.append(run.state["stop"])
    if run.gpus.program:
        run.gpus.check(time.monotonic())
        wait_for(run, lambda: not run.gpus.call or run.asked, run.options.gpu_timeout)
    else:
        note(run, "gpu", "nvidia-smi is not here: no GPU figures")
    while not run.asked:
        one_attempt(run)
        stop = run.asked[0] if run.asked else 0
        action, code, delay, why = decide(run.state["history"], run.options, time.monotonic(), stop)
        if action == "relaunch":
            save(run, now="waiting for GPU memory")
            run.state["history"][-1]["gpus"] = gpus_back(run)
            stop = run.asked[0] if run.asked else 0
            action, code, delay, why = decide(run.state["history"], run.options, time.monotonic(), stop)
        note(run, "decision", why, action=action, code=code, delay=delay,
             ledgers=ledgers(run.state["history"], run.options, time.monotonic()))
        if action != "relaunch":
            return code, why
        save(run, now=f"waiting, next try at {time.strftime('%H:%M:%S', time.localtime(time.time() + delay))}")
        wait_for(run, lambda: run.asked, delay)
    return 128 + run.asked[0], "stopped, as asked, between two attempts"

# ------------------------------------------------------------------------------------------------ main

def take_lock(folder):
    """-> the lock, held; UsageError names the owner"""
    lock = open(folder / "supervise.lock", "a+")  # noqa: SIM115  held until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise UsageError(TAKEN, f"{folder} is supervised by {lock.read().strip()}") from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()} since {clock()}")
    lock.flush()
    return lock

def left_words(history, options):
    return ", ".join(f"{name} {span(allowed - used) if name == 'waste' else max(0, allowed - used)}"
                     for name, (used, allowed) in ledgers(history, options, time.monotonic()).items())

def status(folder):
    """One screen for a tired person, also when the run is dead."""
    state, beat = read_json(folder / "state.json"), read_json(folder / "heartbeat.json")
    if not state:
        raise UsageError(USAGE, f"{folder}: no supervised run is here")
    owner = owner_of(folder)
    history, step, total = state["history"], state.get("step"), state.get("total")
    if isinstance(beat.get("step"), int) and state.get("phase"):
        step = beat["step"]
    print(f"run       {folder}: {' '.join(state['command'])}"[:200])
    ended = state.get("ended") or "its supervisor was killed; start it again to go on"
    print(f"now       {state.get('now', '')}, attempt {state.get('attempt')}, supervised by {owner}" if owner else f"now       not running: {ended}")
    print(f"progress  {state.get('phase') or 'no phase'}, step {step if step is not None else '-'} of {total or '-'}"
          + (f", {state['pace']:.3g} s a step" if state.get("pace") else "")
          + (f", eta {span((total - step) * state['pace'])}" if state.get("pace") and total and step is not None else "")
          + (f", heartbeat {span(time.time() - beat['time'])} ago" if isinstance(beat.get("time"), float) else ""))
    print(f"left      {left_words(history, Options(**state['options']))}")
    for line in state.get("gpus") or [f"GPUs      {state.get('gpu_error') or 'no figures'}"]:
        print(line)
    print(f"totals    {totals_words(state)}")
    print(f"last      {state.get('last_event')}")
    print(f"tail      tail -F {folder}/attempt_{state.get('attempt') or 0:03}.log")
    return 0

def owner_of(folder):
    """-> who holds the lock of the run, or "" """
    try:
        with open(folder / "supervise.lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read().strip()
    except OSError:
        pass
    return ""

def totals_words(state):
    t = state["totals"]
    return (f"{t['attempts']} attempts in {span(time.time() - state['began'])}: {span(t['useful'])} training, "
            f"{span(time.time() - state['began'] - t['useful'])} lost, {t['gpu'] / 3600:.1f} GPU hours")

def stop(run):
    """Ask the supervisor, or where it is dead what is left of its run, for an end in order."""
    owner = owner_of(run.folder)
    if owner:
        os.kill(int(owner.split()[1]), signal.SIGTERM)
        print(f"asked {owner} to stop, waiting", flush=True)
        while owner_of(run.folder) == owner:
            time.sleep(0.1)
    else:
        leftover(run)
    print(read_json(run.folder / "state.json").get("ended") or "nothing of the run is alive", flush=True)
    return 0

def begin(folder, command, options):
    """Everything a run holds, nothing started yet."""
    token = f"{folder.name}-{hashlib.sha1(str(folder.resolve()).encode()).hexdigest()[:12]}"
    state, selector = read_json(folder / "state.json"), selectors.DefaultSelector()
    fresh = {"command": command, "options": dataclasses.asdict(options), "history": [], "stop": 0, "best": 0, "known": False,
             "began": time.time(), "totals": {"attempts": 0, "up": 0.0, "useful": 0.0, "gpu": 0.0}, "ended": None}
    if state.get("ended") is None and state.get("history") is not None:
        fresh |= {k: state[k] for k in ("history", "stop", "best", "known", "began", "totals") if k in state}
        fresh |= {"leader": state.get("leader", 0), "attempt": state.get("attempt", 0)}
    else:
        fresh |= {k: state[k] for k in ("best", "known") if k in state}
    return SimpleNamespace(folder=folder, command=command, options=options, token=token, state=fresh, selector=selector,
                           output=Output(folder, options), gpus=Gpus(options, selector), asked=[], hup=0, dump=False,
                           leader=None, status=None, pipe=None, p={}, beat={}, old_beat={}, pids=set(), oom={},
                           cpu=(0.0, 0.0), quiet=None, trouble="", next_look=0.0, next_save=0.0,
                           pattern=re.compile(options.step_regex) if options.step_regex else STEP)

def listen(run):
    """Signals only leave a mark; the loop is woken and obeys it."""
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    run.selector.register(woken, selectors.EVENT_READ, lambda: os.read(woken, 4096))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGHUP, lambda *_: setattr(run, "hup", run.hup or 1))
    signal.signal(signal.SIGQUIT, lambda *_: setattr(run, "dump", True))
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # Ctrl-Z would stop the drain, and so the run
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: run.asked.append(number))
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans of the run come to us

def main(argv):
    if argv[:1] == ["--_exec"]:
        return shim(argv[1], argv[2:])
    if not argv or {"-h", "--help"} & set(argv[:argv.index("--")] if "--" in argv else argv):
        print(help_text())
        return 0 if argv else USAGE
    run = None
    try:
        if argv[0] in ("status", "stop"):
            if len(argv) != 2 or not Path(argv[1]).is_dir():
                raise UsageError(USAGE, f"{argv[0]} needs one run folder")
            if argv[0] == "status":
                return status(Path(argv[1]))
            return stop(begin(Path(argv[1]), [], Options()))
        options, command = parse(argv)
        if not shutil.which(command[0]):
            there = os.path.exists(command[0])
            raise UsageError(126 if there else 127, f"{command[0]}: {'not executable' if there else 'command not found'}")
        folder = run_folder(options, command)
        run = begin(folder, command, options)
        if options.plan:
            print(f"would run {' '.join(command)}\nin {folder}, supervised by {owner_of(folder) or 'nobody yet'}; "
                  f"{len(tree(run))} processes of it are alive\nnvidia-smi: {run.gpus.program or 'not here'}\n"
                  f"left: {left_words(run.state['history'], options)}\n" + "\n".join(
                  f"  {f.name} = {getattr(options, f.name)}" for f in dataclasses.fields(Options)))
            return 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as f:
                f.write(b"x")
        except OSError as e:
            if e.errno != 28:
                raise UsageError(USAGE, f"{folder}: cannot be written ({e.strerror})") from e
        lock = take_lock(folder)
        listen(run)
        note(run, "supervisor", f"process {os.getpid()} supervises {folder}; stop it with Ctrl-C or supervise.py stop {folder}")
        code, how = supervise(run)
        run.gpus.write_minute(folder)
        save(run, ended=how, stop=0, now="ended")
        note(run, "end", f"{totals_words(run.state)}; exit {code}: {how}")
        for _ in range(20):
            run.output.flush()
        lock.close()
        return code
    except UsageError as e:
        code, text = e.args if len(e.args) == 2 else (USAGE, e.args[0])
        print(f"supervise.py: {text}", file=sys.stderr)
        return code
    except Exception:
        traceback.print_exc()
        print("supervise.py: an error in here; the run got a SIGTERM and saves", file=sys.stderr)
        return BROKEN

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
