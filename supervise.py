#!/usr/bin/env python3
"""Keep a run alive: start a command, watch it, relaunch it where that helps, stop where it does not, say why.

    supervise ── one loop: drains the output, reads heartbeat and GPUs, decides, waits
     ├─ the command    own session; its output goes to RUN/attempt_NNN.log and to the terminal
     └─ nvidia-smi     one call at a time, from a thread that nobody waits for

    start ──> running ──> gone ──> tree swept ──> GPUs free ──> decide ──> back-off ──> start ...
                 │ a stop, a hang, loss nan                       └──> finished · stopped · given up
                 └──> TERM to its main process, grace, KILL to the tree

    python supervise.py -- python train_dflash.py --target Qwen/Qwen3-8B --data chats.jsonl --out runs/q
    python supervise.py status runs/q        one screen, also when the run is dead
    python supervise.py stop runs/q          ask for a checkpoint and the end; again: kill

Progress is a heartbeat that moves ($SUPERVISE_HEARTBEAT) or another step in the output; only a command that never
shows either is judged by its silence. A cause read from the text is a label: exit codes and five ledgers decide.
Whoever starts an ended run again has the ledgers anew. Exit codes: 0 finished · the command's own, or 130/143,
after a stop · 2, 126, 127 as the command gave them · 93 relaunching is useless · 94 restarts or time are spent ·
95 the machine needs a person · 96 another supervisor has this run · 97 an error in here.
"""
import argparse
import ctypes
import fcntl
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil

OPTIONS = (  # name, default, what it is; seconds where nothing else is said
    ("run-dir", "", "RUN; none: the command's --out, else runs/<script>-<6 hex of the command>"),
    ("step-regex", "", "finds the step (group 1) and the total (group 2) in a line of output"),
    ("done", "", "a file in RUN that a finished run has left"),
    ("grace", 120.0, "a stop: from TERM to KILL"), ("hang-grace", 15.0, "a hang: from TERM to KILL"),
    ("first-progress", 1800.0, "to the first step, and for compiling"),
    ("hang", 900.0, "without progress, at least"), ("hang-factor", 5.0, "... and so many longest steps"),
    ("phase-limit", 3600.0, "... while preparing, loading, evaluating or saving"),
    ("backoff", 5.0, "before a relaunch, doubled each time"), ("backoff-cap", 300.0, "... at most"),
    ("healthy", 600.0, "up, with a gain, that reset the back-off"),
    ("max-no-gain", 3, "attempts in a row without a higher step"),
    ("max-same", 3, "retries of the same failure without a gain"),
    ("rate", 5, "restarts within half an hour"), ("lifetime", 50, "restarts in all"),
    ("waste", 7200.0, "spent since the last gain"), ("gpu-interval", 10.0, "between two looks at the GPUs"),
    ("gpu-timeout", 10.0, "that nvidia-smi may take"), ("gpu-wait", 60.0, "for GPU memory to come back"),
    ("log-part-size", 64.0, "MiB of one part of a log; the first has at most 4"),
    ("log-parts", 16, "parts kept of one log; of all logs together twice that"),
    ("min-free", 512.0, "MiB free on the disk; below it the logs pause"), ("plan", False, "say what would happen"))
FINISHED, USAGE, STOPPED, DIVERGED = 0, 2, 75, 76  # the command's exit codes, design.md 6
USELESS, SPENT, PERSON, TAKEN, BROKEN = 93, 94, 95, 96, 97  # ours
POLL, DRAIN, SWEEP, RATE_WINDOW = 0.5, 2.0, 10.0, 1800.0  # seconds
MIB, RING, WINDOW = 1 << 20, 1 << 20, 1 << 16  # bytes: the output kept in memory; what is read as lines at once
SLACK = 512  # a GPU that holds so many MiB more than before the run is free
SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "fish"}

class UsageError(Exception):
    """(exit code, one line): what a person has to mend before anything can run."""

def parse(argv):  # -> (options, command). UsageError on what contradicts
    def error(text):
        raise UsageError(USAGE, text)

    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        usage="supervise.py [options] -- COMMAND ...  |  status RUN  |  stop RUN", allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=22, width=110))
    parser.error = error
    for name, default, text in OPTIONS:
        kind = {"action": "store_true"} if default is False else {"type": type(default), "metavar": ""}
        parser.add_argument(f"--{name}", default=default, help=f"{text} ({default})", **kind)
    o, rest = parser.parse_known_args(argv[:cut])
    below = [f"--{k} {v}" for k, v in vars(o).items() if not isinstance(v, str) and not 0 <= v < 1e9]
    groups = quietly(lambda: re.compile(o.step_regex or STEP).groups)
    wrong = {f"{' '.join(rest)}: no such option; the command begins after --": rest,
             f"out of range: {' '.join(below).replace('_', '-')}": below,
             f"--backoff {o.backoff:g} is above --backoff-cap {o.backoff_cap:g}": o.backoff > o.backoff_cap,
             "--log-part-size must be above 0, --log-parts above 1": not o.log_part_size or o.log_parts < 2,
             f"--step-regex {o.step_regex}: a pattern with a group for the step is needed": not groups,
             "no command: supervise.py [options] -- COMMAND ...": not argv[cut + 1:]}
    return (o, argv[cut + 1:]) if not any(wrong.values()) else error(next(k for k, v in wrong.items() if v))

def run_folder(options, command):  # design.md 5: the same command finds its folder again
    out = [b if a == "--out" else a[6:] for a, b in zip(command, [*command[1:], ""]) if re.match("--out(=|$)", a)]
    script = Path(next((w for w in command if w.endswith(".py")), command[0])).stem
    made = f"runs/{script}-{hashlib.sha1(repr(command).encode()).hexdigest()[:6]}"
    return Path(options.run_dir or (out or [""])[-1] or made)

STEP = re.compile(  # step   20/470, "step": 20, Step 20 of 470, tqdm's 20/470 [ ; not: 250 ms per step 250
    r"""(?i)(?<![/\w])(?<!per )step["']?\s*[:=#\[]?\s*(\d[\d,]*+)(?!\.\d)(?:\s*(?:/|of)\s*(\d[\d,]*+))?"""
    r"""(?!\s*(?:ms|s|sec|it)\b)|\b(\d++)/(\d++) \[""")
LOSS = re.compile(r"""(?i)\bloss\b["']?\W{0,4}?(?:([-+]?(?:nan|inf))\b|[-+]?\d)""")
ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*\x07?|\x1b.")

def lines_of(data):  # bytes -> lines of text, cut before they are decoded, so that no character is
    return [ANSI.sub("", x.replace(b"\0", b"").decode("utf-8", "replace")) for x in re.split(rb"[\r\n]+", data)]

def step_of(line, pattern=STEP):  # -> (step, total or None), or None
    found = pattern.search(line)
    numbers = [int(re.sub(r"\D", "", g)) for g in (found.groups() if found else ()) if re.match(r"\d", g or "")]
    return (*numbers, None)[:2] if numbers else None

def span(seconds):
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"

def signal_name(number):
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"

def exit_words(code, core=False):
    words = {128 + s: f", a shell's word for {s.name}" for s in signal.Signals} | {
        USAGE: ", bad usage or input", STOPPED: ", stopped on request", DIVERGED: ", diverged"}
    return f"left with exit {code}{words.get(code, '')}" if code >= 0 else (
        f"was killed by {signal_name(-code)} (exit {128 - code}{', core dumped' if core else ''})")

RANK = r"(?:\[(?:default\d+|rank ?\d+)\]:[ ]?)?"
FAILURE = re.compile(rf"""(?mx)^(?P<rank>{RANK})(?:  # an exception, or fatal words, and the lines of its message
    Traceback\ \(most\ recent\ call\ last\):.*\n(?:(?P=rank)(?:[ \t].*)?\n)*(?P=rank)
        (?!Traceback)(?=(?:\w+\.)*(?:[A-Z]\w*|\w+error)(?::|$))
    |(?=(?:\w+\.)*\w*(?:Error|Exception|Interrupt):)
    |(?![\w./-]+\.py:\ )(?=.*(?:Watchdog\ caught\ collective|terminate\ called|Fatal\ Python\ error|CUDA\ error:
        |out\ of\ memory|Segmentation\ fault|off\ the\ bus|No\ space\ left\ on\ device)))
    (?P<text>.+(?:\n(?P=rank)(?![ ]{{4}}|\s*File\ |\s*[\^~]+$|Traceback|\[|Process\ \S+:$|[\w./-]+\.py:[ ]
        |(?:\w+\.)*\w+(?:Error|Exception):|terminate\ called).+){{0,8}})""")
CHAIN = re.compile(r"(?m)^.{0,12}(During handling of the above|The above exception was the direct cause)")
OWN = re.compile(r"(?m)^(?:\S*/)?[\w-]+\.py: (?:(.{1,60}?) failed: )?(\D.+)$")  # x.py: drafter 1 failed: ...
CASCADE = re.compile(
    r"NCCL|ProcessGroup|Dist\w+Error|onnection (closed|reset|refused)|roken ?[Pp]ipe|^EOFError|gloo|r: Aborted"
    r"|KeyboardInterrupt|ChildFailed|Process(Raised|Exited)|SystemExit|terminate called")

def root_line(text, pattern=STEP):
    """The output of perhaps many processes at once -> (process or "", the first failure: its type and whole
    message, then what it led to where Python says so). What five more steps followed is old."""
    def old(end):
        return len({m[0] for m in pattern.finditer(text, end)}) > 4

    found, end = [], 0  # (process, words, where)
    for m in FAILURE.finditer(text):
        between, end = text[end:m.start()], m.end()
        kept = [x for x in re.sub(rf"(?m)^{RANK}", "", m["text"]).split("\n") if not step_of(x, pattern)]
        words, spawned = " ".join(" ".join(kept).split()), re.findall(r"(?m)^Process (\S+):$", between)
        process = m["rank"].strip("[]: ") or (spawned or [""])[-1]
        if CHAIN.search(between) and found:
            process, words = found[-1][0], f"{found.pop()[1]}; then {words}"
        found.append((process, words, m.start("text")))
    found = [f for f in found if not old(f[2])]
    first = next((f for f in found if not CASCADE.search(f[1])), (*found, ("", "", 0))[0])[:2]
    if (own := [*OWN.finditer(text)][-1:]) and not old(own[0].end()):  # the script's own word: who failed first
        full = next((f[1] for f in found if own[0][2][:200] in f[1]), "")  # the traceback: its whole message
        if full or not first[1] or not CASCADE.search(own[0][2]):
            first = own[0][1] or "", full or own[0][2]
    return first[0], first[1][:2000]

CAUSES = (  # label, what gives it away in the root line, in words
    ("dense-attention", r"out of memory.*(math_attention|unfused|sdpa_dense)", "attention fell to a dense path"),
    ("cuda-oom", r"CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED", "a GPU is too small"),
    ("disk-full", r"No space left on device|Disk quota exceeded", "the disk is full"),
    ("gpu-lost", r"GPU is lost|off the bus|no CUDA-capable device|uncorrectable ECC|was there at the last attempt"
     r"|CUDA_ERROR_DEVICE_UNAVAILABLE|busy or unavailable", "a GPU is gone"),
    ("bad-checkpoint", r"PytorchStreamReader|SafetensorError|UnpicklingError|HeaderTooLarge|loading state_dict"
     r"|[Cc]heckpoint\b.*\b(broken|corrupt|damaged|truncated)", "a checkpoint cannot be read"),
    ("import", r"^(ModuleNotFoundError|ImportError|SyntaxError|IndentationError)\b", "it cannot be loaded"),
    ("nccl-timeout", r"Watchdog caught|NCCL.*(time-?out|timed out)", "a collective waited in vain"),
    ("nan", r"Diverged|(loss|gradient)\S* (is|are|was) (nan|not finite|non-finite)", "the training diverged"))
RETRIES = {"cuda-oom": 1, "dense-attention": 1, "nan": 1, "bad-checkpoint": 1, "import": 1}  # else --max-same

def cause_of(code, root, text="", ended="", oom_killed=False):
    """-> (label, words). ended: why the supervisor itself ended the attempt: hang, nan or ""."""
    if oom_killed or ended:
        return ("host-oom", "the kernel's counter of OOM kills moved") if oom_killed else (ended, "")
    if "using FX to symbolically trace" in text:
        return "fx-trace", ("compiled attention was refused because another thread of the process was tracing; a "
                            "dense path and its out of memory are only what follows")
    by_code = {DIVERGED: ("nan", "the training diverged"), -signal.SIGKILL: ("SIGKILL", "who sent it is unknown"),
               **dict.fromkeys((USAGE, 126, 127), ("usage", ""))}
    return next(((label, words) for label, pattern, words in CAUSES if re.search(pattern, root)),
                by_code.get(code, (signal_name(-code), "a native crash") if code < 0 else ("error", "")))

CORE = ("timestamp index uuid name memory.total memory.used utilization.gpu temperature.gpu power.draw "
        "power.limit").split()
EXTRA = ("pci.bus_id driver_version pstate clocks.current.sm utilization.memory temperature.memory "
         "clocks_event_reasons.active ecc.errors.uncorrected.volatile.total gpu_recovery_action mig.mode.current "
         "persistence_mode").split()
APPS = "gpu_uuid pid process_name used_gpu_memory".split()
SHOWN = "utilization.gpu power.draw power.limit memory.used memory.total temperature.gpu".split()
NUMBERS = {*SHOWN, "clocks.current.sm", "utilization.memory", "temperature.memory", "used_gpu_memory"}
UNKNOWN = re.compile(r"|\[?(n/a|not supported|unknown error|insufficient permissions|requested .*)\]?", re.I)
LOST = re.compile(r"(?i)is lost|fallen off|device handle|couldn't commun|mismatch|reboot|exit (9|15|16|18)\)")

def number_of(word):  # -> float, or None for whatever is no plain number: unknown is never zero
    return float(word) if re.fullmatch(r"\d{1,15}(\.\d{1,9})?", word) else None

def read_csv(text, fields):
    """-> (rows as dicts by field, the first line that is no row, or ""). Without the header that was asked for
    there are no rows: an error must not look like data."""
    rows, odd, header = [], "", False
    for line in text.splitlines():
        words = [w.strip() for w in line.split(",")]
        if fields is APPS and len(words) > 4:  # a process name may hold commas
            words = [*words[:2], ", ".join(words[2:-1]), words[-1]]
        if header and len(words) == len(fields) and words[0 if fields is APPS else 2][:4] in ("GPU-", "MIG-"):
            rows.append({f: number_of(w) if f in NUMBERS else None if UNKNOWN.fullmatch(w) else w
                         for f, w in zip(fields, words)})
        elif [w.split(" [")[0] for w in words] != fields:
            odd = odd or line.strip()[:200]
        else:
            header = True
    return rows, odd or ("" if header else "no header")

def gpu_words(rows):  # -> one line a GPU, - where a value is unknown
    return ["GPU {}: util {} %, {} of {} W, {} of {} MiB, {} C".format(
        r["index"], *("-" if r[f] is None else f"{r[f]:.0f}" for f in SHOWN)) for r in rows]

def lost(first, rows, error):  # -> what is wrong with a GPU that was fine before the run, or ""
    here = {r["uuid"] for r in rows}
    gone = [f"GPU {r['index']} ({u}) is gone from nvidia-smi" for u, r in first.items() if here and u not in here]
    sick = [f"GPU {r['index']} asks for {r['gpu_recovery_action']}" for r in rows
            if r.get("gpu_recovery_action") not in (None, "None")]
    return "; ".join([error] * bool(LOST.search(error)) + gone + sick) if first else ""

def held(first, rows, apps, pids):
    """-> who keeps GPU memory that was free before the run (first: its rows by uuid then), "" nobody, None
    unknown, which is not free"""
    unknown = not rows or apps is None
    for r in rows:
        before = first.get(r["uuid"], {}).get("memory.used")
        names = {a["pid"]: a["process_name"] for a in apps or [] if a["gpu_uuid"] == r["uuid"]}
        if (r["memory.used"] or 0) > (before or 0) + SLACK or names.keys() & {str(pid) for pid in pids}:
            who = ", ".join(f"{pid} {name}" for pid, name in names.items()) or "nobody that nvidia-smi names"
            return f"GPU {r['index']} is not free again, {gpu_words([r])[0].split(', ')[2]} are held by {who}"
        unknown = unknown or (r["memory.used"] is None and before is not None)
    return None if unknown else ""

def at_start(now, known):  # an attempt's progress. known: the run has shown steps or heartbeats, now or earlier
    return {"phase": "", "step": None, "total": None, "first": None, "top": None, "moved": now, "gained": None,
            "longest": 0.0, "known": known, "wrapped": False, "gap": False, "nonfinite": 0, "pace": []}

def advance(p, now, step, phase, best):
    """The run moved: a new heartbeat, or another step in its output. best: the top step of earlier attempts."""
    if p["phase"] == phase and phase in ("", "training") and p["top"] is not None and not p["gap"]:
        p["longest"] = max(p["longest"], now - p["moved"])
    p |= {"phase": phase, "moved": now, "known": True, "gap": False}
    if step is None or phase not in ("", "training", "evaluating", "saving"):
        return
    p["wrapped"] |= step < (p["step"] or 0)  # an epoch's bar began again: such steps say nothing about a gain
    p["gained"] = now if step > max(best, -1 if p["top"] is None else p["top"]) else p["gained"]
    p["pace"] = [*p["pace"][-19:], (now, step)] if step != p["step"] else p["pace"]
    p |= {"step": step, "first": step if p["first"] is None else p["first"], "top": max(step, p["top"] or 0)}

def patience(p, limits):  # how long an attempt may go without progress -> (seconds, why that long)
    learned = max(limits.hang, limits.hang_factor * p["longest"])
    if p["phase"] in ("preparing", "loading", "evaluating", "saving"):
        return max(limits.phase_limit, learned), f"the limit for {p['phase']} is {limits.phase_limit:g} s"
    if p["top"] is None or p["phase"] == "compiling":
        return limits.first_progress, f"the limit to the first step is {limits.first_progress:g} s"
    return learned, f"limits {limits.hang:g} s and {limits.hang_factor:g} times the longest, {p['longest']:.1f} s"

# ------------------------------------------------------------------------------------------------- decide

def since(history, enough):  # the newest attempts, newest first, as far as the first that is enough
    newest = history[::-1]
    return newest[:1 + next((i for i, a in enumerate(newest) if enough(a)), len(newest))]

def ledgers(history, limits, now):
    """-> {ledger: (used, allowed)}. An attempt's gain is True, False, or None: unknown, it counts neither way."""
    a = history[-1] if history else {"cause": "", "signature": "", "restart": 0}
    fresh = since(history, lambda x: x["gain"])
    same = [x for x in fresh if x["signature"] == a["signature"] and not x["gain"]
            and (x["gain"] is False or x["cause"] in RETRIES)]
    if a["cause"] == "nan":  # a retry may get a little further and diverge there: only a long gain excuses it
        same = [x for x in since(history, lambda x: is_healthy(x, limits)) if x["cause"] == "nan"]
    return {"no gain": (sum(x["gain"] is False for x in fresh), limits.max_no_gain),
            "same failure": (max(0, len(same) - 1), RETRIES.get(a["cause"], limits.max_same)),
            "rate": (sum(x["restart"] > 0 and now - RATE_WINDOW < x["start"] <= now for x in history), limits.rate),
            "lifetime": (a["restart"], limits.lifetime),
            "waste": (int(sum(x["wasted"] for x in fresh)), limits.waste)}

def is_healthy(a, limits):
    return a["gain"] and a["up"] >= limits.healthy

def story(a):  # an attempt as a plain dict -> how it ended, in words
    steps = f", steps {a['first']} to {a['step']}" if a["step"] is not None else ""
    root = f": {a['process']}{': ' * bool(a['process'])}{a['root']}" if a["root"] else ""
    return (f"attempt {a['number']} {a['words'] or exit_words(a['code'], a['core'])} after {span(a['up'])}{steps}"
            + ", no gain" * (a["gain"] is False) + f", {a['strays']} processes outlived it" * (a["strays"] > 0)
            + root + f" [{a['cause']}: {a['cause_words']}]" * bool(a["cause_words"] and a["code"]))

def decide(history, limits, now, stop=0):
    """What to do after the newest attempt -> (relaunch | finished | stopped | give up, exit code, delay, sentence).

    history: the attempts since a person started the run, oldest first, as plain dicts. now: the clock of their
    start. stop: the signal by which a person asked for the end, or 0."""
    a, used, action, delay = history[-1], ledgers(history, limits, now), "give up", 0.0
    code, useless, root = a["code"], "relaunching is useless", bool(a["root"])
    short = code == FINISHED and (a["done_missing"] or (root and (a["step"] or 0) < (a["total"] or 0)))
    missing = f"no finish, {'the --done file is' if a['done_missing'] else 'steps are'} missing; " * bool(short)
    spent = next((name for name, (count, allowed) in used.items() if count >= allowed), None)
    if a["unkillable"] or (a["gpus"] and not stop):
        result, why = PERSON, f"{a['unkillable'] or a['gpus']}: the machine needs a person"
    elif stop:
        action, result, why = "stopped", code if code >= 0 else 128 + stop, "stopped, as asked"
    elif code == FINISHED and not a["ended"] and not short:
        action, result, why = "finished", FINISHED, "finished" + ", though its output holds a failure" * root
    elif code in (USAGE, 126, 127) and not a["ended"]:
        result, why = code, "a relaunch would meet the same, so there is none"
    elif spent:
        count, allowed = used[spent]
        result, why = {
            "no gain": (USELESS, f"{count} attempts in a row without a higher step, {useless}"),
            "same failure": (USELESS, f"the same failure after {count} of {allowed} retries, {useless}"),
            "rate": (SPENT, f"{count} restarts in {span(RATE_WINDOW)}, {allowed} are allowed"),
            "lifetime": (SPENT, f"{count} restarts in all, {allowed} are allowed"),
            "waste": (SPENT, f"{span(count)} spent since the last gain, {span(allowed)} are allowed")}[spent]
    else:
        n = len(since(history, lambda x: is_healthy(x, limits)))
        action, result, delay = "relaunch", None, min(limits.backoff_cap, limits.backoff * 2.0 ** min(n - 1, 30))
        tight = min(used, key=lambda k: used[k][1] - used[k][0])
        why = f"relaunch in {delay:g} s, {tight}: {used[tight][0]} of {used[tight][1]} used"
    return action, result, delay, f"{story(a)}; {missing}{why}"

# =============================================== above: pure; below: effects, read as a script ===============

def quietly(act, *arguments, **more):  # None where a process or file is gone or unreadable, or the disk is full
    with suppress(OSError, ValueError, re.error, psutil.Error, subprocess.TimeoutExpired):
        return act(*arguments, **more)

class Output:
    """The child's bytes: to attempt_NNN.log and its parts, to the terminal as far as it reads, the newest kept."""

    def __init__(self, folder, options):
        self.folder, self.options, self.pending, self.unseen, self.lost = folder, options, b"", 0, 0
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY  # on a handle of our own, not on the shell's
        self.terminal = 1 if os.path.isfile("/proc/self/fd/1") else quietly(os.open, "/proc/self/fd/1", flags)

    def open(self, number):
        self.path, self.file, self.part = self.folder / f"attempt_{number:03}.log", None, 0
        self.ring, self.partial = bytearray(), b""
        self.check()

    def check(self):  # a log that was pulled away is made again, a full disk waited for
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.file and quietly(os.path.samestat, os.stat(self.path), os.fstat(self.file.fileno()))):
                self.file = open(self.path, "ab", buffering=0)
            full = shutil.disk_usage(self.folder).free < self.options.min_free * MIB
            self.trouble = f"less than {self.options.min_free:g} MiB are free" * full
        except OSError as e:
            self.trouble = e.strerror

    def feed(self, data):  # -> the whole lines in it
        self.ring += data
        del self.ring[:len(self.ring) > 2 * RING and -RING]
        self.show(data)
        *lines, self.partial = re.split(rb"[\r\n]", (self.partial + data)[-WINDOW:])
        try:
            while data and not self.trouble:
                data = data[self.file.write(data):]
            if not self.trouble and self.file.tell() >= min(self.options.log_part_size, 1e9 if self.part else 4) * MIB:
                self.rotate()
        except OSError as e:
            self.trouble = e.strerror
        self.lost += len(data)
        return lines_of(b"\n".join(lines))

    def rotate(self):  # the oldest parts go, never an attempt's first: it says what the run was
        self.part += 1
        self.path.rename(f"{self.path}.{self.part}")
        self.check()
        parts = [f for f in self.folder.glob("attempt_*.log.*") if f.suffix[1:].isdigit()]
        for f in sorted(parts, key=lambda f: (f.stem, int(f.suffix[1:]))):
            own = sum(x.stem == f.stem == self.path.name for x in parts)
            if f.suffix != ".1" and (own >= self.options.log_parts or len(parts) >= 2 * self.options.log_parts):
                parts.remove(f)
                f.unlink()

    def show(self, data=b""):  # to the terminal, never waiting for it; what it misses is counted and said
        self.pending += data
        try:
            while self.pending and self.terminal and select.select([], [self.terminal], [], 0)[1]:
                self.pending = self.pending[os.write(self.terminal, self.pending[:WINDOW]):]
        except OSError as e:
            self.terminal = self.terminal if isinstance(e, BlockingIOError) else None  # hung up
        if len(self.pending) > 4 * WINDOW or not self.terminal:
            self.unseen += len(self.pending)
            self.pending = b"\n[supervise: %d bytes were not shown]\n" % self.unseen

def ask_gpus(gpus, query, fields):  # one call in a session of its own, killed when late -> (rows, odd, exit code)
    call = subprocess.Popen(["nvidia-smi", f"--query-{query}={','.join(fields)}", "--format=csv,nounits"], stdin=-3,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    gpus.session, late = call.pid, threading.Timer(gpus.timeout, quietly, (os.killpg, call.pid, signal.SIGKILL))
    late.start()
    with call.stdout:
        text = call.stdout.read(WINDOW).decode("utf-8", "replace")
    code = call.wait()
    gpus.session = late.cancel() or 0
    return (*read_csv(text, fields), code)

def watch_gpus(gpus, interval):
    """The thread that asks for ever. nvidia-smi may hang, lie or die: the values are unknown then, nobody waits."""
    fields = CORE + EXTRA
    while True:
        asked, apps = time.monotonic(), ([], "", 0)
        rows, odd, code = ask_gpus(gpus, "gpu", fields)
        if code > 0 and not rows and fields is not CORE:  # an unknown field rejects the whole query
            rows, odd, code = ask_gpus(gpus, "gpu", CORE)
            fields = CORE if rows else fields
        if rows:
            apps = ask_gpus(gpus, "compute-apps", APPS)
        late = f"nvidia-smi did not answer within {gpus.timeout:g} s" * (code == -signal.SIGKILL)
        gpus.error = late or f"nvidia-smi: {odd or 'no rows'} (exit {code})" * bool(code or not rows)
        gpus.rows, gpus.odd, gpus.apps = rows, odd, None if apps[1] or apps[2] else apps[0]
        gpus.first, gpus.samples = gpus.first or {r["uuid"]: r for r in rows}, gpus.samples + rows
        gpus.asked = asked  # last: who waits for it finds the rest
        gpus.wake.wait(interval * (6 if late else 1))
        gpus.wake.clear()

def write_minute(run):  # min, mean and max by GPU since the last line of gpu.jsonl; what was never known is null
    rows, run.gpus.samples, gpus, run.next_minute = run.gpus.samples, [], [], time.monotonic() + 60
    for r in {r["uuid"]: r for r in rows}.values():
        known = {f: [x[f] for x in rows if x["uuid"] == r["uuid"] and x.get(f) is not None] for f in NUMBERS & r.keys()}
        gpus.append({"index": r["index"], "uuid": r["uuid"], "name": r["name"]} | {
            f: [min(v), round(sum(v) / len(v), 2), max(v)] if v else None for f, v in sorted(known.items())})
    if gpus:
        append(run.folder / "gpu.jsonl", {"time": clock(), "gpus": gpus}, run.options.log_part_size * MIB)

def clock():
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")

def append(path, record, limit=1e18):
    with suppress(OSError), open(path, "a") as f:
        f.write(json.dumps(record, ensure_ascii=False) + "\n")
        os.replace(path, f"{path}.1") if f.tell() > limit else None

def read_json(path):
    found = quietly(lambda: json.loads(Path(path).read_text()))
    return found if isinstance(found, dict) else {}

def save(run, **changed):  # state.json: what the next supervisor goes on from if this one is killed; for `status`
    run.state |= changed
    with suppress(OSError), open(run.folder / "state.json.new", "w") as f:
        json.dump(run.state, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
        os.replace(f.name, run.folder / "state.json")

def note(run, kind, text, **values):
    append(run.folder / "events.jsonl", {"time": clock(), "kind": kind, "text": text, **values})
    run.output.show(f"supervise {clock()[11:19]}: {text}\n".encode())
    save(run, last_event=f"{clock()[:19]} {text}")

# ------------------------------------------------------------------------------------------- processes

def tree(run):
    """-> the live processes of this run: our descendants, orphans too as we are their subreaper, and whoever bears
    the run's token in its environment, which finds those that a killed supervisor left."""
    token, smi = f"SUPERVISE_RUN_ID={run.token}".encode(), run.gpus.session
    ours = {p for p in psutil.process_iter()
            if token in (quietly(Path(f"/proc/{p.pid}/environ").read_bytes) or b"").split(b"\0")}
    ours = {*ours, *psutil.Process().children(recursive=True)} - {psutil.Process()}
    for p in ours - {run.leader}:
        if quietly(p.status) == "zombie" and p.pid != smi:
            quietly(os.waitpid, p.pid, os.WNOHANG)
    return [p for p in ours if quietly(p.status) not in (None, "zombie") and quietly(os.getsid, p.pid) != smi]

def main_process(p):  # whom to ask for an end: the command itself, or where that is a shell, its heaviest child
    while quietly(p.name) in SHELLS and (children := quietly(p.children)):
        p = max(children, key=lambda child: getattr(quietly(child.memory_info), "rss", 0))
    return p

def end_in_order(run, roots, grace, alive):
    """CONT and TERM to the main process under each root, then time for a checkpoint; a second signal ends that."""
    told, began, end = set(), time.time(), time.monotonic() + grace
    while alive() and len(run.asked) < 2 and time.monotonic() < end:
        for p in {main_process(root) for root in roots} - told:
            if not told or (quietly(p.create_time) or 0) > began:  # the next command of a script; not its shell
                told.add(p)
                quietly(p.resume)
                quietly(p.terminate)
        pump(run, min(POLL, max(0.0, end - time.monotonic())))

def sweep(run):  # freeze the whole tree, kill it, until two looks find nothing -> (killed, who is left or "")
    wait_for(run, lambda: not tree(run), POLL * (run.status is not None))  # who dies with its parent is no stray
    killed, left, clean, end = set(), [], 0, time.monotonic() + SWEEP
    while clean < 2 and time.monotonic() < end:
        left = tree(run)
        for act in [p.suspend for p in left] + [p.kill for p in left]:
            quietly(act)
        killed, clean = killed | set(left), 0 if left or (run.leader and run.status is None) else clean + 1
        pump(run, 0.02)
    return killed, "" if clean == 2 else f"process {(*left, run.leader)[0]} cannot be killed"

def stacks(run):  # where the run stands -> (in short, all threads, and Python's stacks where one can tell them)
    out, main = [], main_process(run.leader)
    for task in [t for p in tree(run)[:64] for t in [*Path(f"/proc/{p.pid}/task").glob("*")][:64]]:
        stat, wchan, stack, caught = (quietly((task / x).read_text) or "" for x in ("stat", "wchan", "stack", "status"))
        out.append(" ".join([f"{task.parts[2]}/{task.name}", *re.findall(r"(\(.*\)) (\w)", stat + "(?) ?")[0],
                             wchan or "-", *re.findall(r"\] (\w+)", stack)[:6]]))
        if int((re.findall(r"SigCgt:\s*(\w+)", caught) or "0")[0], 16) >> 9 & 1 and task.name == task.parts[2]:
            quietly(os.kill, int(task.name), signal.SIGUSR1)  # it would end a process that does not wait for it
    spy = quietly(subprocess.run, ["py-spy", "dump", "--pid", str(main.pid)], capture_output=True, text=True, timeout=9)
    wait_for(run, lambda: False, POLL)  # faulthandler's answer to USR1 comes through the output
    return f"main process {main.pid} is {quietly(main.status)}", "\n".join([*out, spy.stdout if spy else ""])[:20000]

def shim(parent, command):  # become the command, with a SIGTERM for the death of the supervisor
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        return os.execvp(command[0], command) if os.getppid() == int(parent) else 128 + signal.SIGTERM
    except OSError as e:
        print(f"supervise.py: {command[0]}: {e.strerror}", file=sys.stderr)
        return 127 if isinstance(e, FileNotFoundError) else 126

# -------------------------------------------------------------------------------------------- the loop

def pump(run, seconds=POLL):
    """One turn: what the child writes, whether it lives; twice a second a look at the rest. All waiting is here."""
    begin = time.monotonic()
    ready = select.select([fd for fd in (run.wake, run.pipe) if fd], [], [], seconds)[0]
    if time.monotonic() - begin > seconds + 2 * POLL:  # we stood still, and the child perhaps with us
        run.p |= {"moved": time.monotonic(), "gap": True}
    if run.wake in ready:
        os.read(run.wake, WINDOW)
    if run.pipe in ready:
        read_pipe(run)
    if run.leader and run.status is None and (dead := os.waitpid(run.leader.pid, os.WNOHANG))[0]:
        run.status = dead[1]
    run.output.show()
    if time.monotonic() >= run.next_look:
        run.next_look = time.monotonic() + POLL
        look(run)

def wait_for(run, condition, seconds=1e9):
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        pump(run, min(POLL, max(0.0, end - time.monotonic())))
    return met

def read_pipe(run):  # a step is progress; so is any output of a command that never showed a step
    p, data = run.p, os.read(run.pipe, RING)
    for line in run.output.feed(data):
        step, total = step_of(line, run.pattern) or (p["step"], None)
        p["total"] = total or p["total"]
        if not run.beat and step != p["step"]:
            advance(p, time.monotonic(), step, "", run.state["best"])
        if (m := LOSS.search(line)) and "skip" not in line.lower():
            p["nonfinite"] = p["nonfinite"] + 1 if m[1] else 0
    p["moved"] = p["moved"] if p["known"] else time.monotonic()
    run.pipe = run.pipe if data else os.close(run.pipe)
    time.sleep(0.01 * (len(data) < WINDOW))  # many small writes are read together

def read_beat(run):
    beat = read_json(run.folder / "heartbeat.json")
    if beat and beat not in (run.beat, run.old_beat):
        run.beat, step = beat, beat.get("step") if type(beat.get("step")) is int else None
        advance(run.p, time.monotonic(), step, str(beat.get("phase", "")), run.state["best"])

def look(run):  # twice a second: heartbeat, log, what is to be said; every --gpu-interval: who is there, the state
    now, gpus = time.monotonic(), run.gpus
    if run.leader:
        read_beat(run)
        run.output.check()
    said = {"log": run.leader and run.output.trouble and f"the log pauses: {run.output.trouble}",
            "hangup": run.hangup and "the terminal hung up, the run goes on; its log tells the rest",
            "gpu": gpus.error or gpus.odd, "lost": lost(gpus.first, gpus.rows, gpus.error)}
    for kind, text in said.items():
        if bool(text) != (kind in run.said):
            run.said ^= {kind}
            note(run, kind, text or f"{kind}: well again" + f", {run.output.lost} bytes are missing" * (kind == "log"))
    if run.asked and run.state["stop"] != run.asked[0]:
        save(run, stop=run.asked[0])  # it outlives us
    if now >= run.next_minute:
        write_minute(run)
    if run.leader and now >= run.next_save:
        run.next_save, run.pids = now + run.options.gpu_interval, run.pids | {x.pid for x in tree(run)}
        save(run, gpus=gpu_words(gpus.rows), gpu_error=gpus.error)

def why_end(run):  # -> (hang | nan, why) for an attempt that should not go on, else None
    silent, (limit, words) = time.monotonic() - run.p["moved"], patience(run.p, run.options)
    if run.p["nonfinite"] >= 3:
        return "nan", "printed three losses in a row that are not finite and was ended"
    where = f" in phase {run.p['phase']}" * bool(run.p["phase"])
    return ("hang", f"made no progress for {silent:.1f} s{where} ({words})") if silent > limit else None

def spawn(run):  # start the command in a session of its own -> the attempt as it stands if nobody sees its end
    number = 1 + max((int(f.name[8:11]) for f in run.folder.glob("attempt_[0-9][0-9][0-9].log*")), default=0)
    history, home, now = run.state["history"], run.folder.resolve(), time.monotonic()
    last = history[-1] if history else {"restart": -1, "cause": ""}
    a = {"number": number, "restart": last["restart"] + 1, "start": now, "up": 0.0, "gain": None, "wasted": 0.0,
         "signature": "", "cause": "unseen"}
    run.p, run.beat, run.old_beat = at_start(now, run.state["known"]), {}, read_json(run.folder / "heartbeat.json")
    run.output.open(number)
    own = {"RUN_DIR": home, "RUN_ID": run.token, "HEARTBEAT": home / "heartbeat.json", "ATTEMPT": number,
           "RESTART_COUNT": a["restart"], "LAST_FAILURE": last["cause"]}
    env = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **os.environ,
           **{f"SUPERVISE_{k}": str(v) for k, v in own.items()}}
    run.pipe, theirs = os.pipe()
    quietly(fcntl.fcntl, theirs, fcntl.F_SETPIPE_SZ, RING)
    child = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--_exec", str(os.getpid()), *run.command],
                             stdin=-3, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    child.returncode = os.close(theirs) or 0  # the loop reaps it
    run.status, run.leader, run.oom, run.pids = None, psutil.Process(child.pid), oom_kills(), {child.pid}
    save(run, attempt=number, leader=child.pid, now="running", p=run.p, history=[*history, a][-100:])
    note(run, "start", f"attempt {number} is process {child.pid}: tail -F {run.output.path}", attempt=number)
    return a

def oom_kills():
    return int((re.findall(r"oom_kill (\d+)", quietly(Path("/proc/vmstat").read_text) or "") or [0])[0])

def one_attempt(run):  # start the command and be there until nothing of it is left; the history learns what is known
    a, options, alive, stack = spawn(run), run.options, lambda: run.status is None, ""
    why = wait_for(run, lambda: not alive() or run.asked or why_end(run))
    ended, words = why if isinstance(why, tuple) and alive() else ("", "")
    if ended:
        (state, stack), rows = stacks(run), run.gpus.rows
        stuck = any((r["utilization.gpu"] or 0) > 90 and (r["power.draw"] or 1e9) * 3 < (r["power.limit"] or 0) for r in rows)
        words = "; ".join([words, state, *gpu_words(rows)]) + ": looks like a stuck collective" * stuck
    if alive():
        grace = options.hang_grace if ended == "hang" else 0 if ended else options.grace
        save(run, now="stopping")
        note(run, ended or "stop", words or f"asked to save and end within {grace:g} s; again: killed", stacks=stack)
        end_in_order(run, [run.leader], grace, alive)
    up, by_us = time.monotonic() - a["start"], alive()
    killed, unkillable = sweep(run)
    wait_for(run, lambda: run.pipe is None, DRAIN)
    run.pipe = run.pipe and os.close(run.pipe)
    read_beat(run)
    p, best, lines = run.p, run.state["best"], lines_of(bytes(run.output.ring))
    code = -signal.SIGKILL if alive() else os.waitstatus_to_exitcode(run.status)
    process, root = root_line("\n".join(lines), run.pattern)
    root = root or next((x[:500] for x in reversed(lines) if x.strip() and code), "")
    cause, cause_words = cause_of(code, root, "\n".join(lines), ended, code and oom_kills() > run.oom)
    gain = True if (p["top"] or 0) > best else False if p["known"] and not p["wrapped"] else None
    a |= {"up": up, "code": code, "core": os.WCOREDUMP(run.status or 0), "ended": ended, "words": words, "gain": gain,
          "process": process, "root": root, "cause": cause, "cause_words": cause_words, "first": p["first"],
          "step": p["top"], "total": p["total"], "strays": len(killed) - by_us, "unkillable": unkillable, "gpus": "",
          "signature": f"{cause} {p['phase'] if ended else re.sub('0x[0-9a-f]+|[0-9]+', '#', root)[:200]}",
          "wasted": 0.0 if gain is None else time.monotonic() - (p["gained"] or a["start"]),
          "done_missing": bool(options.done) and not (run.folder / options.done).exists()}
    run.pids, run.leader, t = run.pids | {x.pid for x in killed}, None, run.state["totals"]
    t |= {"attempts": t["attempts"] + 1, "useful": t["useful"] + up - (a["wasted"] if code else 0),
          "gpu": t["gpu"] + up * len(run.gpus.rows)}
    save(run, best=max(best, p["top"] or 0), known=p["known"], leader=0)
    note(run, "exit", story(a), **a, lines=[x[:500] for x in lines[-200:]], gpu_rows=run.gpus.rows)

def gpus_back(run):  # wait until the GPUs hold no more than before the run -> "" or why not
    gpus, end, trouble = run.gpus, time.monotonic() + run.options.gpu_wait, None
    while gpus.first and not run.asked and trouble != "" and (asked := time.monotonic()) < end:
        gpus.wake.set()
        if wait_for(run, lambda: gpus.asked >= asked or run.asked, end - asked):
            trouble = held(gpus.first, gpus.rows, gpus.apps, run.pids)
            if gone := lost(gpus.first, gpus.rows, gpus.error):
                return gone
            wait_for(run, lambda: run.asked or trouble == "", min(2.0, run.options.gpu_interval))
    unknown = f"the GPUs cannot be read ({gpus.error or 'no values'}), and unknown is not free"
    return "" if not gpus.first or run.asked else unknown if trouble is None else trouble

def end_leftover(run):  # a killed supervisor may have left its run alive. Never two: that is ended first, in order
    if left := tree(run):
        note(run, "leftover", f"{len(left)} processes of this run have no supervisor, they are ended: {left[0]}")
        told = run.state["leader"] in {p.pid for p in left}  # the death of its supervisor sent it a SIGTERM
        roots = [] if told else [p for p in left if quietly(p.parent) not in left]
        end_in_order(run, roots, run.options.grace, lambda: tree(run))
        if unkillable := sweep(run)[1]:
            raise UsageError(PERSON, unkillable)

def supervise(run):  # the life of a run -> (exit code, how it ended)
    end_leftover(run)
    run.asked += [run.state["stop"]] * (run.state["stop"] > 0 and not run.asked)
    if shutil.which("nvidia-smi"):
        threading.Thread(target=watch_gpus, args=(run.gpus, run.options.gpu_interval), daemon=True).start()
        wait_for(run, lambda: run.gpus.asked or run.asked, run.options.gpu_timeout)
    else:
        note(run, "gpu", "no nvidia-smi here, so no GPU figures")
    while not run.asked:
        one_attempt(run)
        for gpus_seen in (False, True):
            history, stop = run.state["history"], (run.asked or [0])[0]
            action, code, delay, why = decide(history, run.options, time.monotonic(), stop)
            if action == "relaunch" and not gpus_seen:
                save(run, now="waiting for the GPUs")
                history[-1]["gpus"] = gpus_back(run)
        note(run, "decision", why, action=action, code=code, delay=delay)
        if action != "relaunch":
            return code, why
        save(run, now=f"waiting {delay:g} s from {clock()[11:19]}")
        wait_for(run, lambda: run.asked, delay)
    return 128 + run.asked[0], "stopped, as asked, while nothing ran"

# ---------------------------------------------------------------------------------- status, stop and main

def left_words(state):
    used = ledgers(state["history"], SimpleNamespace(**state["options"]), time.monotonic())
    return ", ".join(f"{name} {max(0, n - count):g} of {n:g}" for name, (count, n) in used.items())

def total_words(state):
    t, wall = state["totals"], time.time() - state["began"]
    return (f"{t['attempts']} attempts in {span(wall)}: {span(t['useful'])} training, {span(wall - t['useful'])} lost, "
            f"{t['gpu'] / 3600:.1f} GPU hours")

def lock(folder, mode="r"):  # -> (the lock, who holds it instead or ""); a+ takes it, until it is closed
    held, kind = open(folder / "supervise.lock", mode), fcntl.LOCK_SH if mode == "r" else fcntl.LOCK_EX
    free = quietly(lambda: fcntl.flock(held, kind | fcntl.LOCK_NB) or held.seek(0) + 1)
    return held, "" if free else os.pread(held.fileno(), 200, 0).decode().strip() or "a supervisor that starts"

def status(folder):  # one screen for a tired person, also when the run is dead
    s, beat, owner = read_json(folder / "state.json"), read_json(folder / "heartbeat.json"), quietly(lock, folder)
    if not s:
        raise UsageError(USAGE, f"{folder}: no supervised run")
    p, step = s["p"], beat.get("step") if s["leader"] and beat.get("phase") == "training" else s["p"]["step"]
    (t0, s0), (t1, s1) = (*p["pace"], (0, 0))[0], (*p["pace"], (0, 0))[max(0, len(p["pace"]) - 1)]
    second, age = (t1 - t0) / (s1 - s0) if s1 > s0 else None, quietly(lambda: span(time.time() - float(beat.get("time", ""))))
    eta = span((p["total"] - step) * second) if second and p["total"] and step is not None else "-"
    now = f"{s['now']}, supervised by {owner[1]}" if owner and owner[1] else (
        f"not running: {s['ended'] or 'its supervisor was killed; start it again and it goes on'}")
    print(f"run       {folder}: {' '.join(s['command'])[:150]}\nnow       attempt {s['attempt']}, {now}\n"
          f"progress  {p['phase'] or 'no phase'}, step {'-' if step is None else step} of {p['total'] or '-'}, "
          f"{f'{second:.3g}' if second else '-'} s a step, eta {eta}, heartbeat {age or '-'} ago\n"
          f"left      {left_words(s)}\n" + "\n".join(s["gpus"] or [f"GPUs      {s['gpu_error'] or 'no figures'}"])
          + f"\ntotals    {total_words(s)}\nlast      {s['last_event']}\n"
          f"tail      tail -F {folder}/attempt_{s['attempt']:03}.log")

def stop(run):  # ask the supervisor for an end in order, or end what a dead one left
    if owner := (quietly(lock, run.folder) or ("", ""))[1]:
        os.kill(int(owner.split()[1]), signal.SIGTERM)
        print(f"{owner} was asked to stop the run; a second stop kills it", flush=True)
        while lock(run.folder)[1] == owner:
            time.sleep(0.1)
    else:
        end_leftover(run)
    print(f"nothing runs: {read_json(run.folder / 'state.json').get('ended') or 'its supervisor was dead'}")

def begin(folder, command, options):  # all that a run holds, nothing started. One that was cut off goes on
    old, p = read_json(folder / "state.json"), at_start(time.monotonic(), False)
    state = {"history": [], "stop": 0, "best": 0, "known": False, "leader": 0, "attempt": 0, "began": time.time(),
             "totals": {"attempts": 0, "useful": 0.0, "gpu": 0.0}}
    kept = ("best", "known", "attempt") if old.get("ended") else state
    state |= {k: old[k] for k in kept if k in old} | {"command": command, "options": vars(options), "ended": "",
                                                     "now": "starting", "p": p, "gpus": [], "gpu_error": ""}
    gpus = SimpleNamespace(timeout=options.gpu_timeout, session=0, rows=[], apps=None, first={}, error="", odd="",
                           samples=[], asked=0.0, wake=threading.Event())
    return SimpleNamespace(
        folder=folder, command=command, options=options, state=state, gpus=gpus, output=Output(folder, options), p=p,
        token=hashlib.sha1(str(folder.resolve()).encode()).hexdigest(), pattern=re.compile(options.step_regex or STEP),
        asked=[], hangup=False, leader=None, status=None, pipe=None, wake=None, beat={}, old_beat={}, pids=set(),
        oom=0, said=set(), next_look=0.0, next_save=0.0, next_minute=time.monotonic() + 60)

def listen(run):  # signals only leave a mark, and wake the loop
    def mark(number, frame):
        run.hangup = run.hangup or number == signal.SIGHUP
        run.asked += [number] * (number in (signal.SIGINT, signal.SIGTERM))

    run.wake, theirs = os.pipe()
    os.set_blocking(theirs, False)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, mark)
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans of the run come to us

def run_command(argv):  # check, lock, supervise -> exit code
    options, command = parse(argv)
    folder, there = run_folder(options, command), os.path.exists(command[0])
    if not shutil.which(command[0]):
        raise UsageError(126 if there else 127, f"{command[0]}: {'not executable' if there else 'command not found'}")
    run = begin(folder, command, options)
    if options.plan:
        print(f"would run {' '.join(command)}\nin {folder}, where {len(tree(run))} of its processes are alive\n"
              f"left: {left_words(run.state)}", *(f"  {k} = {v}" for k, v in vars(options).items()), sep="\n")
        return FINISHED
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held, owner = lock(folder, "a+")
    except OSError as e:
        raise UsageError(USAGE, f"{folder}: cannot be written ({e.strerror})") from e
    if owner:
        raise UsageError(TAKEN, f"{folder} is supervised by {owner}")
    held.truncate(0)
    print(f"process {os.getpid()} on {os.uname().nodename} since {clock()}", file=held, flush=True)
    listen(run)
    note(run, "supervisor", f"{folder} is supervised by process {os.getpid()}; supervise.py stop {folder} ends it")
    code, how = supervise(run)
    write_minute(run)
    save(run, ended=how, stop=0, now="ended")
    note(run, "end", f"{total_words(run.state)}; exit {code}: {how}", code=code)
    return code

def main(argv):
    try:
        if argv[:1] == ["--_exec"]:
            return shim(argv[1], argv[2:])
        if argv[:1] not in (["status"], ["stop"]):
            return run_command(argv)
        if len(argv) != 2 or not Path(argv[1]).is_dir():
            raise UsageError(USAGE, f"{argv[0]} needs one run folder")
        return status(Path(argv[1])) if argv[0] == "status" else stop(begin(Path(argv[1]), [], parse(["--", "-"])[0]))
    except UsageError as e:
        print(f"supervise.py: {e.args[1]}", file=sys.stderr)
        return e.args[0]
    except Exception:
        sys.excepthook(*sys.exc_info())
        print("supervise.py: an error in here; the run gets a SIGTERM and saves", file=sys.stderr)
        return BROKEN

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
