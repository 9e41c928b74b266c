#!/usr/bin/env python3
"""Keep a run alive: start a command, watch it, relaunch it where that helps, stop where it does not, say why.

One loop drains the output, reads heartbeat and GPUs, decides, waits; the command has a session of its own.
    start ──> running ──> gone ──> tree swept ──> GPUs free ──> decide ──> back-off ──> start ...
                 └──> a stop, a hang, loss nan: TERM to its main process, grace, KILL to the tree ──> gone

    python supervise.py -- python train_dflash.py --target Qwen/Qwen3-8B --data chats.jsonl --out runs/q
    python supervise.py status runs/q        one screen, also when the run is dead
    python supervise.py stop runs/q          ask for a checkpoint and the end; again: kill

Progress: a heartbeat that moves ($SUPERVISE_HEARTBEAT), another step in the output or, of a command that
never shows either, any output. A cause read from the text is a label: exit codes and ledgers decide.
"""
import argparse
import ctypes
import fcntl
import hashlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

OPTIONS = (  # name, default, what it is; seconds where nothing else is said
    ("run-dir", "", "RUN; none: --out, else runs/<script>-<hash>"), ("plan", False, "say what would happen"),
    ("step-regex", "", "finds the step (group 1) and total (2)"), ("done", "", "a file of a finished run"),
    ("grace", 120.0, "a stop: from TERM to KILL"), ("hang-grace", 15.0, "a hang: from TERM to KILL"),
    ("hang", 900.0, "without progress, at least"), ("hang-factor", 5.0, "... and so many longest steps"),
    ("idle-hang", 300.0, "... while CPU and GPUs rest"), ("first-progress", 1800.0, "... to the first step"),
    ("phase-limit", 3600.0, "... in other phases"), ("waste", 7200.0, "spent since the last gain"),
    ("backoff", 5.0, "before a relaunch, doubled each time"), ("backoff-cap", 300.0, "... at most"),
    ("healthy", 600.0, "up, with a gain, that reset it"), ("max-no-gain", 3, "attempts in a row, no gain"),
    ("max-same", 3, "retries of one failure, no gain"), ("rate", 5, "restarts within half an hour"),
    ("lifetime", 50, "restarts in all"), ("gpu-interval", 10.0, "between two looks at the GPUs"),
    ("gpu-timeout", 10.0, "nvidia-smi may take"), ("gpu-wait", 60.0, "for GPU memory to come back"),
    ("log-part-size", 64.0, "MiB of a log's part"), ("log-parts", 16, "parts of a log, of all: twice"),
    ("min-free", 512.0, "MiB of disk that logs leave"))
FINISHED, USAGE, STOPPED, DIVERGED = 0, 2, 75, 76  # the command's exit codes, design.md 6
USELESS, SPENT, PERSON, TAKEN, BROKEN = 93, 94, 95, 96, 97  # ours; SPENT: its ledgers, BROKEN: we are
POLL, LOOK, DRAIN, SWEEP, RATE_WINDOW = 0.2, 0.5, 2.0, 10.0, 1800.0  # seconds
MIB, RING, WINDOW = 1 << 20, 1 << 20, 1 << 16  # bytes: the output kept in memory; what is parsed at once
CLOCK, SLACK = "%FT%T%z", 512  # MiB that a GPU may hold more than before the run, and be free

def refuse(code, text):  # what a person has to mend
    print(f"supervise.py: {text}", file=sys.stderr)
    raise SystemExit(code)
def parse(argv):  # -> (options, command)
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        usage="supervise.py [options] -- COMMAND ...  |  status RUN  |  stop RUN   (limits in seconds)",
        allow_abbrev=False, formatter_class=lambda prog: argparse.HelpFormatter(prog, 2, 22, 110))
    parser.error = lambda text: refuse(USAGE, text)
    for name, default, text in OPTIONS:
        kind = {"action": "store_true"} if default is False else {"type": type(default), "metavar": ""}
        parser.add_argument(f"--{name}", default=default, help=f"{text} ({default})", **kind)
    o, rest = parser.parse_known_args(argv[:cut])
    for wrong, text in (
            (rest, f"{' '.join(rest)}: no such option; the command begins after --"),
            (any(type(v) is not str and not 0 <= v < 1e9 for v in vars(o).values()), "a number out of range"),
            (o.backoff > o.backoff_cap, f"--backoff {o.backoff:g} is above --backoff-cap {o.backoff_cap:g}"),
            (not quietly(lambda: re.compile(o.step_regex or STEP).groups), "--step-regex: no group"),
            (not argv[cut + 1:], "no command: supervise.py [options] -- COMMAND ...")):
        refuse(USAGE, text) if wrong else None
    return o, argv[cut + 1:]
def run_folder(options, command):  # design.md 5: the same command finds its folder again
    out = re.findall(r"(?m)^--out[=\n](.+)$", "\n".join(command))[-1:]
    script = Path(next((w for w in command if w.endswith(".py")), command[0])).stem
    made = f"runs/{script}-{hashlib.sha1(repr(command).encode()).hexdigest()[:6]}"
    return Path(options.run_dir or "".join(out) or made)

STEP = re.compile(  # step   20/470, "step": 20, Step 20 of 470, tqdm's 20/470 [ ; not: 250 ms per step 250
    r"""(?i)(?<![/\w])(?<!per )step["']?\s*+[:=#\[]?\s*+(\d[\d,]*+)(?!\.\d)(?:\s*(?:/|of)\s*(\d[\d,]*+))?"""
    r"""(?!\s*(?:ms|s|sec|it)\b)|\b(\d++)/(\d++) \[""")
LOSS = re.compile(r"""(?i)\bloss\b["']?\W{0,4}?(?:([-+]?(?:nan|inf))\b|[-+]?\d)""")
ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*\x07?|\x1b.")
def lines_of(data):  # bytes -> lines of text, cut before they are decoded, so that no character is
    return [ANSI.sub("", x.decode("utf-8", "replace").replace("\0", "")) for x in re.split(rb"[\r\n]+", data)]
def step_of(line, pattern=STEP):  # -> (step, total or None), or None; 16 digits count something else
    found = [g for g in (pattern.search(line) or re.match("", "")).groups() if g and g[0].isdigit()]
    numbers = [int(re.sub(r"\D", "", g)) for g in found if len(g) < 16]
    return (*numbers, None)[:2] if numbers and len(numbers) == len(found) else None
def span(seconds):
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"

RANK = r"(?:\[(?:default\d+|rank ?\d+)\]:[ ]?)?"
FAILURE = re.compile(rf"""(?mx)^(?P<rank>{RANK})(?:  # an exception, or fatal words, with its message
    Traceback\ \(most\ recent\ call\ last\):.*\n(?:(?P=rank)(?:[ \t].*)?\n)*(?P=rank)
        (?!Traceback)(?=(?:\w+\.)*(?:[A-Z]\w*|\w+error)(?::|$))
    |(?=(?:\w+\.)*\w*(?:Error|Exception|Interrupt):)
    |(?![\w./-]+\.py:\ )(?=.*(?:Watchdog\ caught\ collective|terminate\ called|Fatal\ Python\ error
        |CUDA\ error:|out\ of\ memory|Segmentation\ fault|off\ the\ bus|No\ space\ left\ on\ device)))
    (?P<text>.+(?:\n(?P=rank)(?![ ]{{4}}|\s*File\ |\s*[\^~]+$|Traceback|\[|Process\ \S+:$|[\w./-]+\.py:[ ]
        |(?:\w+\.)*\w+(?:Error|Exception):|terminate\ called).+){{0,8}})""")
CHAIN = re.compile(r"(?m)^.{0,12}(During handling of the above|The above exception was the direct cause)")
OWN = re.compile(r"(?m)^(?:\S*/)?[\w-]+\.py: (?:(.{1,60}?) failed: )?(\D.+)$")  # x.py: drafter 1 failed: ...
CASCADE = re.compile(r"NCCL|ProcessGroup|Dist\w+Error|onnection (closed|reset|refused)|roken ?[Pp]ipe|^EOFErr"
                     r"|gloo|r: Aborted|KeyboardInterrupt|elastic|Process(Raised|Exited)|terminate called")
def root_line(text, pattern=STEP):  # -> (process or "", its failure). What five more steps followed is old
    found, end, steps = [], 0, {m[0]: m.start() for m in pattern.finditer(text)}  # (process, words, where)
    old = sorted(steps.values())[-5] if len(steps) > 4 else -1
    for m in FAILURE.finditer(text):
        between, end = text[end:m.start()], m.end()
        kept = [x for x in re.sub(rf"(?m)^{RANK}", "", m["text"]).split("\n") if not step_of(x, pattern)]
        words, spawned = " ".join(" ".join(kept).split()), re.findall(r"(?m)^Process (\S+):$", between)
        process = m["rank"].strip("[]: ") or (spawned or [""])[-1]
        if CHAIN.search(between) and found:
            process, words = found[-1][0], f"{found.pop()[1]}; then {words}"
        found.append((process, words, m.start("text")))
    found = [f for f in found if f[2] > old]
    first = next((f for f in found if not CASCADE.search(f[1])), (*found, ("", "", 0))[0])[:2]
    own = [(m[1] or "", m[2]) for m in OWN.finditer(text) if m.start() > old][-1:]
    for process, words in own:  # the script's own word names who failed first, a traceback says it all
        full = next((f[1] for f in found if words[:200] in f[1]), "")
        first = first if first[1] and CASCADE.search(words) and not full else (process, full or words)
    return first[0], first[1][:2000]

CAUSES = (  # label, what gives it away in the root line
    ("dense-attention", r"out of memory.*(math_attention|unfused|sdpa_dense)"),
    ("cuda-oom", r"CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED"),
    ("disk-full", r"No space left on device|Disk quota exceeded"),
    ("gpu-lost", r"GPU is lost|off the bus|no CUDA-capable|uncorrectable ECC|there at the last attempt"),
    ("bad-checkpoint", r"PytorchStream|Safetensor|Unpickl|state_dict for|heckpoint.*(broken|corrupt|damage)"),
    ("import", r"^(ModuleNotFoundError|ImportError|SyntaxError|IndentationError)\b"),
    ("nccl-timeout", r"Watchdog caught|NCCL.*(time-?out|timed out)"),
    ("nan", r"Diverged|(loss|gradient)\S* (is|are|was) (nan|not finite|non-finite)"))
RETRIES = {"cuda-oom": 1, "dense-attention": 1, "nan": 1, "bad-checkpoint": 1, "import": 1}  # else --max-same
WORDS = {"host-oom": ": the kernel's count of OOM kills moved", "SIGKILL": ": sender unknown", "fx-trace":
         ": another thread's tracing made compiled attention refuse, a dense OOM only follows"}
def cause_of(code, root, text="", ended="", oom_killed=False):  # ended: by us, hang, nan, stop or ""
    codes = {-s: s.name for s in signal.Signals} | {DIVERGED: "nan", USAGE: "usage", STOPPED: "stop"}
    known = next((label for label, pattern in CAUSES if re.search(pattern, root)), codes.get(code, "error"))
    known = "fx-trace" if "using FX to symbolically trace" in text else known
    return "host-oom" if oom_killed and "SIGKILL" in root + exit_words(code) else ended or known

SHOWN = "memory.total memory.used utilization.gpu temperature.gpu power.draw power.limit".split()
APPS, CORE = "gpu_uuid pid process_name used_gpu_memory".split(), "timestamp index uuid name".split() + SHOWN
EXTRA = ("driver_version clocks.current.sm utilization.memory temperature.memory clocks_event_reasons.active "
         "ecc.errors.uncorrected.volatile.total gpu_recovery_action").split()
NUMBERS = {*SHOWN, "clocks.current.sm", "utilization.memory", "temperature.memory", "used_gpu_memory"}
UNKNOWN = re.compile(r"(?i)|\[?(n/a|not supported|unknown error|insufficient permissions|requested .*)\]?")
NOT_PLAIN = re.compile(r"(?!\d{1,15}(\.\d{1,9})?$).*")  # such a number is unknown, and unknown is never zero
LOST = re.compile(r"(?i)is lost|fallen off|device handle|couldn't commun|mismatch|reboot|exit (9|15|16|18)\)")
def read_csv(text, fields):  # -> (rows as dicts by field, the first line that is no row, or "")
    rows, odd, header = [], "", False  # no rows without the header: an error must not look like data
    for line in text.splitlines():
        words = [w.strip() for w in line.split(",")]
        if fields is APPS and len(words) > 4:  # a process name may hold commas
            words = [*words[:2], ", ".join(words[2:-1]), words[-1]]
        if header and len(words) == len(fields) and words[0 if fields is APPS else 2][:4] in ("GPU-", "MIG-"):
            rows.append({f: None if (UNKNOWN, NOT_PLAIN)[f in NUMBERS].fullmatch(w) else
                         float(w) if f in NUMBERS else w for f, w in zip(fields, words)})
        elif [w.split(" [")[0] for w in words] == fields:
            header = True
        else:
            odd = odd or line.strip()[:200]
    return rows, odd or "no header" * (not header)
def gpu_words(rows):  # -> one line a GPU, - where a value is unknown
    return ["GPU {0}: {2} of {1} MiB, util {3} %, {4} C, {5} of {6} W".format(
        r["index"], *("-" if r[f] is None else f"{r[f]:.0f}" for f in SHOWN)) for r in rows]
def lost(first, rows, error):  # -> what is wrong with a GPU that was fine before the run, or ""
    here = {r["uuid"] for r in rows} or first
    gone = [f"GPU {r['index']} ({u}) is listed no more" for u, r in first.items() if u not in here]
    sick = [f"GPU {r['index']} asks for {r['gpu_recovery_action']}" for r in rows
            if r.get("gpu_recovery_action") not in (None, "None")]
    return "; ".join([error] * bool(LOST.search(error)) + gone + sick) if first else ""
def held(first, rows, apps, pids):  # -> who keeps GPU memory that the run found free, "" nobody
    unknown = not rows or apps is None
    for r in rows:
        before = first.get(r["uuid"], {}).get("memory.used")  # first: the rows by uuid before the run
        names = {a["pid"]: a["process_name"] for a in apps or [] if a["gpu_uuid"] == r["uuid"]}
        if (r["memory.used"] or 0) > (before or 0) + SLACK or names.keys() & {str(pid) for pid in pids}:
            who = ", ".join(f"{pid} {name}" for pid, name in names.items()) or "nobody that nvidia-smi names"
            return f"{gpu_words([r])[0].split(',')[0]} are not free again, held by {who}"
        unknown = unknown or (r["memory.used"] is None and before is not None)
    return "the GPUs cannot be read, and unknown is not free" * unknown
def power_share(row):  # of its limit, None unknown
    watts, limit = row["power.draw"], row["power.limit"]
    return watts / limit if limit and watts is not None else None
def idle(cores, rows):  # cores: that the run keeps busy -> does nobody work? No, where no GPU is known
    signs = [[value <= most for value, most in ((r["utilization.gpu"], 0.5), (power_share(r), 0.25))
              if value is not None] for r in rows]
    known = [any(of_one) for of_one in signs if of_one]
    return cores < 0.05 and bool(known) and all(known)  # threads that wait take a little

START = {"phase": "", "step": None, "total": None, "first": None, "top": None, "moved": 0.0, "gained": None,
         "longest": 0.0, "known": False, "wrapped": False, "nonfinite": 0, "pace": None, "idle": None}
def advance(p, now, step, phase, best):  # the attempt, at START once, moves. best: the top step of others
    seconds, steady = now - p["moved"], p["top"] is not None and p["phase"] == phase in ("", "training")
    p |= {"phase": phase, "moved": now, "known": True, "longest": max(p["longest"], seconds * steady)}
    if step is None or phase not in ("", "training", "evaluating", "saving"):
        return
    if steady and step > p["step"]:
        p["pace"] = 0.9 * (p["pace"] or 0) + seconds / (step - p["step"]) * (0.1 if p["pace"] else 1)
    p["wrapped"] |= step < (p["step"] or 0)  # an epoch's bar began again: such steps say nothing about a gain
    p["gained"] = now if step > max(best, -1 if p["top"] is None else p["top"]) else p["gained"]
    p |= {"step": step, "first": step if p["first"] is None else p["first"], "top": max(step, p["top"] or 0)}
def why_end(p, now, limits):  # -> (hang | nan, why) for an attempt that should not go on, or None
    silent, slow, phase = now - p["moved"], limits.hang_factor * p["longest"], p["phase"]
    rest = 0.0 if p["idle"] is None else now - max(p["idle"], p["moved"])
    limit, words = max(limits.hang, slow), f"{limits.hang:g} s, and {slow:.1f} s by its longest step"
    if phase in ("preparing", "loading", "evaluating", "saving"):
        limit, words = max(limits.phase_limit, limit), f"{limits.phase_limit:g} s for {phase}"
    elif p["top"] is None or phase == "compiling":
        limit, words = limits.first_progress, f"{limits.first_progress:g} s to the first step"
    elif rest > max(limits.idle_hang, slow):
        limit, words = 0.0, f"{limits.idle_hang:g} s while neither a CPU nor a GPU works"
    if p["nonfinite"] >= 3:
        return "nan", "printed three losses in a row that are not finite and was ended"
    return ("hang", f"made no progress for {silent:.1f} s, the limit is {words}") if silent > limit else None
def since(history, enough):  # the newest attempts, newest first, as far as the first that is enough
    return history[::-1][:1 + next((i for i, a in enumerate(history[::-1]) if enough(a)), len(history))]
def ledgers(history, limits, now):  # -> {ledger: (used, allowed)}
    a = history[-1] if history else {"cause": "", "signature": "", "restart": 0}
    fresh = since(history, lambda x: x["gain"])  # True, False, or None: unknown, which counts neither way
    same = [x for x in fresh if x["signature"] == a["signature"] and not x["gain"]
            and (x["gain"] is False or x["cause"] in RETRIES)]
    if a["cause"] == "nan":  # a retry may get a little further and diverge there: only a long gain excuses it
        healthy = since(history, lambda x: x["gain"] and x["up"] >= limits.healthy)
        same = [x for x in healthy if x["cause"] == "nan"]
    recent = [x for x in history if x["restart"] > 0 and now - RATE_WINDOW < x["start"] <= now]
    return {"no gain": (sum(x["gain"] is False for x in fresh), limits.max_no_gain),
            "same failure": (max(0, len(same) - 1), RETRIES.get(a["cause"], limits.max_same)),
            "rate": (len(recent), limits.rate), "lifetime": (a["restart"], limits.lifetime),
            "waste": (int(sum(x["wasted"] for x in fresh)), limits.waste)}
def exit_words(code, core=False):
    words = {128 + s: f", a shell's word for {s.name}" for s in signal.Signals} | {
        USAGE: ", bad usage or input", STOPPED: ", stopped on request", DIVERGED: ", diverged"}
    name = {-s: s.name for s in signal.Signals}.get(code, f"signal {-code}")
    return f"left with exit {code}{words.get(code, '')}" if code >= 0 else (
        f"was killed by {name} (exit {128 - code}{', core dumped' * core})")
def story(a):  # an attempt as a plain dict -> how it ended, in words
    text = f"attempt {a['number']}, {span(a['up'])}" + f", step {a['step']}" * (a["step"] is not None)
    text += ", no gain" * bool(a["gain"] is False and a["code"])
    text += f" ({a['strays']} processes outlived it)" * (a["strays"] > 0)
    text += f": it {a['words'] or exit_words(a['code'], a['core'])}" + f": {a['root']}" * bool(a["root"])
    return text + f" [{a['cause']}{WORDS.get(a['cause'], '')}]" * bool(a["code"])
def decide(history, limits, now, stop=0):
    """The newest attempt is over -> (relaunch, finished, stopped or give up; exit code; delay; a sentence).
    history: plain dicts, the oldest first; now: by the clock of their start; stop: a person's signal or 0."""
    a, used, code = history[-1], ledgers(history, limits, now), history[-1]["code"]
    short = code == FINISHED and (a["done_missing"] or (a["root"] and (a["step"] or 0) < (a["total"] or 0)))
    missing = f"; no finish, {'the --done file' if a['done_missing'] else 'steps'} missing" if short else ""
    spent = next((name for name, (count, allowed) in used.items() if count >= allowed), "")
    tight = min(used, key=lambda name: used[name][1] - used[name][0])
    (count, allowed), (some, most) = used.get(spent, (0, 0)), used[tight]
    bad_luck = len(since(history, lambda x: x["gain"] and x["up"] >= limits.healthy)) - 1
    delay = min(limits.backoff_cap, limits.backoff * 2.0 ** min(bad_luck, 30))
    for holds, action, result, why in (
            (a["unkillable"], "give up", PERSON, a["unkillable"]),
            (stop, "stopped", code if code >= 0 else 128 + stop, "stopped, as asked"),
            (not (code or a["ended"] or short), "finished", code, "finished" + " even so" * bool(a["root"])),
            (code in (USAGE, 126, 127) and not a["ended"], "give up", code, "a relaunch would meet the same"),
            (a["gpus"], "give up", PERSON, a["gpus"]),
            (spent == "no gain", "give up", USELESS, f"{count} attempts in a row without a higher step"),
            (spent == "same failure", "give up", USELESS, f"the same failure, {count} of {allowed} retries"),
            (spent == "rate", "give up", SPENT, f"{count} of {allowed} restarts in {span(RATE_WINDOW)}"),
            (spent == "lifetime", "give up", SPENT, f"{count} of {allowed} restarts in all"),
            (spent, "give up", SPENT, f"{span(count)} of {span(allowed)} since the last gain"),
            (True, "relaunch", None, f"relaunch in {delay:g} s, {tight}: {some} of {most} used")):
        if holds:
            so = {USELESS: ": relaunching is useless", PERSON: ": the machine needs a person"}.get(result, "")
            return action, result, delay * (action == "relaunch"), f"{story(a)}{missing}; {why}{so}"

# ============================================ above: pure; below: effects, read as a script =================
def quietly(act, *arguments, **more):  # None where a process or a file is gone or full, or makes no sense
    with suppress(OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError, re.error,
                  psutil.Error, subprocess.SubprocessError):
        return act(*arguments, **more)

class Output:  # the child's bytes: to attempt_NNN.log and its parts, to the terminal as it reads, a tail here
    def __init__(self, folder, options):
        self.folder, self.options, self.pending, self.lost, self.trouble = folder, options, b"", 0, ""
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY  # on a handle of our own, not on the shell's
        self.terminal = 1 if os.path.isfile("/proc/self/fd/1") else quietly(os.open, "/proc/self/fd/1", flags)
    def check(self):  # a log that was pulled away is made again, a full disk waited for
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not quietly(lambda: os.path.samestat(os.stat(self.path), os.fstat(self.file.fileno()))):
                self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115  closed when it is replaced
            full = shutil.disk_usage(self.folder).free < self.options.min_free * MIB
            self.shut = f"less than {self.options.min_free:g} MiB are free" * full
        except OSError as e:
            self.shut = e.strerror
    def feed(self, data):  # -> the whole lines in it
        self.ring += data
        del self.ring[:len(self.ring) > 2 * RING and -RING]
        self.show(data)
        *lines, self.partial = re.split(rb"[\r\n]", (self.partial + data)[-WINDOW:])
        try:
            while data and not self.shut:
                data, self.trouble = data[self.file.write(data):], ""
            limit = self.options.log_part_size if self.part else min(self.options.log_part_size, 4)
            self.rotate() if not self.shut and self.file.tell() >= limit * MIB else None
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
            own, most = sum(x.stem == f.stem == self.path.name for x in parts), self.options.log_parts
            if f.suffix != ".1" and (own >= most or len(parts) >= 2 * most):
                parts.remove(f)
                f.unlink()
    def show(self, data=b""):  # to the terminal, never waiting for it
        self.pending += data
        try:
            while self.pending and self.terminal and select.select([], [self.terminal], [], 0)[1]:
                self.pending = self.pending[os.write(self.terminal, self.pending[:WINDOW]):]
        except OSError as e:
            self.terminal = self.terminal if isinstance(e, BlockingIOError) else None  # hung up
        if len(self.pending) > 4 * WINDOW or not self.terminal:
            self.pending = b"\n[supervise: some output was not shown]\n"

def watch_gpus(gpus, interval):  # the thread that asks nvidia-smi for ever, which may hang, lie or die
    fields, silent = CORE + EXTRA, f"nvidia-smi did not answer within {gpus.timeout:g} s"
    while True:
        asked, answers = time.monotonic(), []
        for query, names in (("gpu", fields), ("compute-apps", APPS)):
            command = ["nvidia-smi", f"--query-{query}={','.join(names)}", "--format=csv,nounits"]
            call = quietly(subprocess.Popen, command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, process_group=0)
            if not call:
                return vars(gpus).update(rows=[], error="nvidia-smi cannot be started any more")
            late = threading.Timer(gpus.timeout, lambda pid=call.pid: (
                vars(gpus).update(rows=[], error=silent), quietly(os.killpg, pid, signal.SIGKILL)))
            late.start()
            with call.stdout:
                text = call.stdout.read(WINDOW).decode("utf-8", "replace")
            answers += [*read_csv(text, names), call.wait()]
            late.cancel()
        rows, odd, code, apps, odd_apps, code_apps = answers
        if code > 0 and not rows and fields != CORE:  # an unknown field rejects the whole query
            fields = CORE
            continue
        if answered := code != -signal.SIGKILL:
            gpus.error = f"nvidia-smi: {odd or 'no rows'} (exit {code})" * bool(code or odd or not rows)
        gpus.rows, gpus.apps = rows, None if odd_apps or code_apps else apps
        gpus.first, gpus.samples = gpus.first or {r["uuid"]: r for r in rows}, gpus.samples + rows
        fields = fields if rows else CORE + EXTRA
        gpus.asked = asked  # last: who waits for it finds the rest
        gpus.wake.wait(interval * (1 if answered else 6)) and gpus.wake.clear()
def write_minute(run):  # min, mean, max by GPU since the last line of gpu.jsonl; what was never known is null
    rows, run.gpus.samples, gpus, run.next_minute = run.gpus.samples, [], [], time.monotonic() + 60
    for r in {r["uuid"]: r for r in rows}.values():
        own = [x for x in rows if x["uuid"] == r["uuid"]]
        known = {f: [x[f] for x in own if x.get(f) is not None] for f in sorted(NUMBERS & r.keys())}
        gpus.append({"index": r["index"], "uuid": r["uuid"], "name": r["name"]} | {
            f: [min(v), round(sum(v) / len(v), 2), max(v)] if v else None for f, v in known.items()})
    append(run, "gpu.jsonl", gpus=gpus) if gpus else None
def append(run, name, **record):  # the whole line, or on a full disk nothing of it
    record = {"time": time.strftime(CLOCK), **record}
    line = f"{json.dumps(record, ensure_ascii=False)}\n".encode(errors="replace")
    with suppress(OSError), open(run.folder / name, "ab", buffering=0) as f:
        size = f.tell()
        f.truncate(size) if f.write(line) < len(line) else None
        os.replace(f.name, f"{f.name}.1") if f.tell() > run.options.log_part_size * MIB else None
def read_json(path):
    return quietly(lambda: dict(json.loads(Path(path).read_text()))) or {}
def save(run, **changed):  # state.json: for `status`, and for the next supervisor if this one is killed
    run.state |= changed
    with suppress(OSError), open(run.folder / "state.json.new", "w") as f:
        print(json.dumps(run.state, indent=1), file=f, flush=True)
        os.fsync(f.fileno())
        os.replace(f.name, run.folder / "state.json")
def note(run, kind, text, **values):
    append(run, "events.jsonl", kind=kind, text=text, **values)
    run.output.show(f"supervise {time.strftime('%T')}: {text}\n".encode(errors="surrogateescape"))
    save(run, last_event=f"{time.strftime('%F %T')} {text}")

def tree(run):  # -> its live processes: our descendants, and who bears its token, as a killed supervisor's do
    token, session = f"SUPERVISE_RUN_ID={run.token}".encode(), os.getsid(0)  # nvidia-smi alone shares ours
    ours = {p for p in psutil.process_iter()
            if token in (quietly(Path(f"/proc/{p.pid}/environ").read_bytes) or b"").split(b"\0")}
    roots = {psutil.Process(), *run.left}
    ours |= run.left | {child for p in roots for child in quietly(p.children, recursive=True) or ()}
    ours = {p for p in ours if quietly(os.getsid, p.pid) != session}
    for p in ours - {run.leader}:  # we are their subreaper
        quietly(os.waitpid, p.pid, os.WNOHANG) if quietly(p.status) == "zombie" else None
    return [p for p in ours if quietly(p.status) not in (None, "zombie")]
def main_process(p):  # whom to ask for an end: the command, or where that is a shell, its heaviest child
    while quietly(p.name) in ("sh", "bash", "dash", "zsh", "fish") and (children := quietly(p.children)):
        p = max(children, key=lambda child: getattr(quietly(child.memory_info), "rss", 0))
    return p
def end_in_order(run, roots, grace, alive):  # CONT and TERM to the main process under each root, then time
    told, began = set(), time.time()
    def over():
        for p in {main_process(root) for root in roots} - told:
            if not told or (quietly(p.create_time) or 0) > began:  # a script's next command; not its shell
                told.add(p)
                quietly(p.resume)
                quietly(p.terminate)
        return not alive() or len(run.asked) > 1
    wait_for(run, over, grace)
def sweep(run):  # freeze and kill all that is left until two looks find nothing -> (killed, who defies it)
    wait_for(run, lambda: not tree(run), POLL * (run.status is not None))  # who dies with its parent is none
    killed, left, clean, end = set(), [], 0, time.monotonic() + SWEEP
    while clean < 2 and time.monotonic() < end:
        left = tree(run)
        [quietly(act) for act in [p.suspend for p in left] + [p.kill for p in left]]
        killed, clean = killed | set(left), 0 if left or (run.leader and run.status is None) else clean + 1
        pump(run, 0.02)
    return killed, f"{left or run.leader} cannot be killed" * (clean < 2)
def holders(device=r"/dev/nvidia\d+"):  # -> who has a GPU's file open, as far as we may look
    return {p for p in psutil.process_iter() for fd in quietly(os.listdir, f"/proc/{p.pid}/fd") or ()
            if re.fullmatch(device, quietly(os.readlink, f"/proc/{p.pid}/fd/{fd}") or "")}
def stacks(run, ask):  # where the run stands -> (in short; by process). ask: for Python's stacks by SIGUSR1
    def read(path):
        return quietly(Path(path).read_text) or ""
    out, main = [], main_process(run.leader)
    for p in tree(run)[:64]:
        home = f"/proc/{p.pid}"
        waits = [*{read(f"{home}/task/{tid}/wchan") for tid in quietly(os.listdir, f"{home}/task") or ()}]
        calls = re.findall(r"] (.*)", read(f"{home}/stack"))
        out.append(f"{p.pid} {quietly(p.name)} {quietly(p.status)} {waits} {calls}")
        caught = re.findall(r"SigCgt:\s*(\w+)", read(f"{home}/status")) or ["0"]
        if ask and int(caught[0], 16) >> (signal.SIGUSR1 - 1) & 1:
            quietly(p.send_signal, signal.SIGUSR1)  # it would end a process that does not wait for it
    spy = quietly(subprocess.check_output, f"py-spy dump -p {main.pid}".split(), text=True, timeout=9) or ""
    wait_for(run, lambda: False, POLL)  # faulthandler's answer to USR1 comes through the output
    return f"main process {main.pid} is {quietly(main.status)}", "\n".join([*out, spy])[:20000]

def pump(run, seconds=POLL):  # one turn: what the child writes, whether it lives, a look. All waiting is here
    ready = select.select([run.pipe] if run.pipe else [], [], [], seconds)[0]
    gap, run.turn = time.monotonic() - run.turn, time.monotonic()
    run.p["moved"] += gap * (gap > seconds + 1)  # we stood still, and the child perhaps with us
    read_pipe(run) if ready else None
    if run.leader and run.status is None and (dead := os.waitpid(run.leader.pid, os.WNOHANG))[0]:
        run.status = dead[1]
    run.output.show()
    look(run) if time.monotonic() >= run.next_look else None
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
    time.sleep(0.05 * (0 < len(data) < WINDOW))  # many small writes are read together
def look(run):  # twice a second: heartbeat, log, news; every --gpu-interval: who is there, the state
    now, gpus, run.next_look = time.monotonic(), run.gpus, time.monotonic() + LOOK
    beat, *_ = (read_json(run.heart), run.output.check(), quietly(take, run)) if run.leader else ({},)
    if beat and beat not in (run.beat, run.old_beat):
        run.beat, step = beat, beat.get("step") if type(beat.get("step")) is int else None
        advance(run.p, now, step, str(beat.get("phase", "")), run.state["best"])
    said = {"log": run.leader and (bad := run.output.shut or run.output.trouble) and f"the log pauses: {bad}",
            "hangup": run.hangup and "the terminal hung up, the run goes on; its log tells the rest",
            "gpu": gpus.error, "lost": lost(gpus.first, gpus.rows, gpus.error)}
    for kind in [k for k, text in said.items() if bool(text) != (k in run.said)]:
        run.said ^= {kind}
        note(run, kind, said[kind] or f"{kind}: well again", lost_bytes=run.output.lost)
    if run.asked and not run.state["stop"]:
        save(run, stop=run.asked[0])  # it outlives us
    write_minute(run) if now >= run.next_minute else None
    if run.leader and now >= run.next_save:
        live, (then, before), run.next_save = tree(run), run.cpu, now + run.options.gpu_interval
        run.cpu = now, sum(sum((quietly(p.cpu_times) or ())[:4]) for p in live)
        rests = idle((run.cpu[1] - before) / (now - then), own_gpus(run))
        run.pids, run.p["idle"] = run.pids | {p.pid for p in live}, (run.p["idle"] or now) if rests else None
        save(run, gpus=gpu_words(gpus.rows), gpu_error=gpus.error,
             live={p.pid: quietly(p.create_time) for p in live})  # so the next supervisor knows them
    if run.quits and run.leader and run.status is None:
        run.quits.clear()  # to one without a heartbeat SIGUSR1 may mean something else
        where, stack = stacks(run, ask=bool(run.beat))
        note(run, "stacks", f"asked by SIGQUIT: {where}", stacks=stack)

def spawn(run):  # the command in a session of its own -> the attempt as it stands if nobody sees its end
    number = 1 + max((int(f.name[8:11]) for f in run.folder.glob("attempt_[0-9][0-9][0-9].log*")), default=0)
    history, home, now = run.state["history"], run.folder.resolve(), time.monotonic()
    last = history[-1] if history else {"restart": -1, "cause": ""}
    a = {"number": number, "restart": last["restart"] + 1, "start": now, "up": 0.0, "gain": None,
         "wasted": 0.0, "signature": "", "cause": "unseen"}
    own = {"RUN_DIR": home, "RUN_ID": run.token, "HEARTBEAT": home / "heartbeat.json", "ATTEMPT": number,
           "RESTART_COUNT": a["restart"], "LAST_FAILURE": last["cause"]}
    env = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **os.environ}
    env |= {f"SUPERVISE_{name}": str(value) for name, value in own.items()}
    run.p, run.beat, run.next_save = {**START, "moved": now, "known": run.state["known"]}, {}, 0.0
    run.heart, run.old_beat, log = own["HEARTBEAT"], read_json(own["HEARTBEAT"]), run.output
    log.path, log.part, log.ring, log.partial = home / f"attempt_{number:03}.log", 0, bytearray(), b""
    log.check()
    run.pipe, theirs = os.pipe()
    quietly(fcntl.fcntl, theirs, fcntl.F_SETPIPE_SZ, RING)
    shim = [sys.executable, os.path.abspath(__file__), "--_exec", str(os.getpid()), *run.command]
    child = subprocess.Popen(shim, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=env,
                             start_new_session=True)
    child.returncode = os.close(theirs) or 0  # the loop reaps it
    run.status, run.leader, run.oom, run.pids = None, psutil.Process(child.pid), oom_kills(), {child.pid}
    save(run, attempt=number, leader=child.pid, now="running", p=run.p, history=[*history, a][-100:])
    words = f"attempt {number} is process {child.pid}: tail -F {shlex.quote(str(log.path))}"
    note(run, "start", words, attempt=number)
    return a
def oom_kills():
    return int((re.findall(r"oom_kill (\d+)", quietly(Path("/proc/vmstat").read_text) or "") or [0])[0])

def one_attempt(run):  # start the command, be there until nothing of it is left, tell the history
    a, options, alive, stack = spawn(run), run.options, lambda: run.status is None, ""
    why = wait_for(run, lambda: not alive() or run.asked or why_end(run.p, run.turn, options))
    ended, words = why if isinstance(why, tuple) and alive() else ("", "")
    if ended:
        (state, stack), rows = stacks(run, ask=True), run.gpus.rows
        stuck = any((r["utilization.gpu"] or 0) > 90 and (power_share(r) or 1) < 0.25 for r in rows)
        words = "; ".join([words, state, *gpu_words(rows)]) + ": looks like a stuck collective" * bool(stuck)
    if alive():
        grace = options.hang_grace if ended == "hang" else 0 if ended else options.grace
        note(run, ended or "stop", words or f"to save and end in {grace:g} s; again kills it", stacks=stack)
        end_in_order(run, [run.leader], grace, alive)
    up, by_us = time.monotonic() - a["start"], alive()
    (killed, unkillable), words = sweep(run), words or "was killed, as asked" * by_us
    wait_for(run, lambda: run.pipe is None, DRAIN)
    run.pipe = run.pipe and os.close(run.pipe)
    look(run)
    p, best, lines = run.p, run.state["best"], lines_of(bytes(run.output.ring))
    code = -signal.SIGKILL if alive() else os.waitstatus_to_exitcode(run.status)
    process, root = root_line(text := "\n".join(lines), run.pattern)
    cause = cause_of(code, root, text, ended or "stop" * by_us, oom_kills() > run.oom)
    last = next((f"last line: {x[:500]}" for x in lines[::-1] if x.strip() and code), "")
    root = f"{process}: {root}" if process else root or last
    gain = True if (p["top"] or 0) > best else False if p["known"] and not p["wrapped"] else None
    a |= {"up": up, "code": code, "core": os.WCOREDUMP(run.status or 0), "ended": ended, "words": words,
          "root": root, "cause": cause, "unkillable": unkillable, "gain": gain, "gpus": "",
          "strays": len(killed) * (not by_us), "first": p["first"], "step": p["top"], "total": p["total"],
          "signature": f"{cause} {p['phase'] if ended else re.sub('0x[0-9a-f]+|[0-9]+', '#', root)[:200]}",
          "wasted": 0.0 if gain is None or not code else time.monotonic() - (p["gained"] or a["start"]),
          "done_missing": bool(options.done) and not (run.folder / options.done).exists()}
    run.pids, run.leader, t = run.pids | {p.pid for p in killed}, None, run.state["totals"]
    save(run, best=max(best, p["top"] or 0), known=p["known"], leader=0, totals={
        "attempts": t["attempts"] + 1, "useful": t["useful"] + up - a["wasted"] * bool(code),
        "gpu": t["gpu"] + up * len(run.gpus.rows)})
    note(run, "exit", story(a), **a, lines=[x[:500] for x in lines[-200:]], gpu_rows=run.gpus.rows)
def own_gpus(run):  # those that the run may use; all, where CUDA_VISIBLE_DEVICES names none of them
    names = tuple(re.findall(r"[^,\s]+", os.environ.get("CUDA_VISIBLE_DEVICES", "")))
    return [r for r in run.gpus.rows if r["index"] in names or r["uuid"].startswith(names)] or run.gpus.rows
def gpus_back(run):  # wait until the GPUs are well and hold no more than before the run -> "" or why not
    g, end, why = run.gpus, time.monotonic() + run.options.gpu_wait, "nvidia-smi is silent"
    while g.first and why and not run.asked and (asked := time.monotonic()) < end:
        g.wake.set()
        if wait_for(run, lambda: g.asked >= asked or run.asked, end - asked):
            why = lost(g.first, g.rows, g.error) or held(g.first, own_gpus(run), g.apps, run.pids)
            wait_for(run, lambda: run.asked or not why, min(2.0, run.options.gpu_interval))
    others = holders() - run.neighbours if why else ()  # also whom nvidia-smi cannot see or name
    why += f" ({g.error})" * (g.error not in why) + f"; GPU files are open in {others}" * bool(others)
    return why * bool(g.first and not run.asked)
def end_leftover(run):  # what a killed supervisor left alive is ended first, in order: there are never two
    if left := tree(run):
        note(run, "leftover", f"processes that lost their supervisor are ended: {[p.pid for p in left]}")
        told = run.state["leader"] in {p.pid for p in left}  # the death of its supervisor sent it a SIGTERM
        roots = [] if told else [p for p in left if quietly(p.parent) not in left]
        end_in_order(run, roots, run.options.grace, lambda: tree(run))
        refuse(PERSON, defiant) if (defiant := sweep(run)[1]) else None

def supervise(run):  # the life of a run -> (exit code, how it ended)
    end_leftover(run)
    run.neighbours = holders()
    if (free := shutil.disk_usage(run.folder).free / MIB) < 2 * run.options.min_free:
        note(run, "disk", f"{free:.0f} MiB are free in {run.folder}: a checkpoint may find no room there")
    if not run.gpus.error:
        threading.Thread(target=watch_gpus, args=(run.gpus, run.options.gpu_interval), daemon=True).start()
        wait_for(run, lambda: run.gpus.asked or run.asked, run.options.gpu_timeout)
    while not run.asked:
        one_attempt(run)
        history = run.state["history"]
        if decide(history, run.options, time.monotonic(), len(run.asked))[0] == "relaunch":
            save(run, now="waiting for the GPUs")
            history[-1]["gpus"] = gpus_back(run)
        action, code, delay, why = decide(history, run.options, time.monotonic(), (run.asked or [0])[0])
        note(run, "decision", why, action=action, code=code, delay=delay)
        if action != "relaunch":
            return code, why
        save(run, now=f"waiting {delay:g} s from {time.strftime('%T')}")
        wait_for(run, lambda: run.asked, delay)
    return 128 + run.asked[0], "stopped, as asked, while nothing ran"
def summary(state):  # -> (what is left in the ledgers, what the run took)
    used = ledgers(state["history"], argparse.Namespace(**state["options"]), time.monotonic())
    wall, t = (state.get("over") or time.time()) - state["began"], state["totals"]
    return ", ".join(f"{name} {max(0, n - count):g} of {n:g}" for name, (count, n) in used.items()), (
        f"attempts: {t['attempts']} in {span(wall)}, {span(t['useful'])} training, "
        f"{span(wall - t['useful'])} lost, {t['gpu'] / 3600:.1f} GPU hours")
def lock(folder, mode="r", kind=fcntl.LOCK_SH):  # -> (the lock, who holds it instead or "")
    held = open(folder / "supervise.lock", mode)  # noqa: SIM115  until the process ends
    free = quietly(lambda: fcntl.flock(held, kind | fcntl.LOCK_NB) or True)
    return held, "" if free else os.pread(held.fileno(), 200, 0).decode().strip() or "a starting supervisor"
def take(run):  # the lock, and again where its file was pulled away -> who has it
    run.folder.mkdir(parents=True, exist_ok=True)
    if quietly(lambda: os.path.samestat(os.stat(run.lock.name), os.fstat(run.lock.fileno()))):
        return run.owner
    run.lock, other = lock(run.folder, "a+", fcntl.LOCK_EX)
    [run.lock.truncate(0), print(run.owner, file=run.lock, flush=True)] if not other else None
    return other or run.owner

def status(folder):  # -> one screen for a tired person, also when the run is dead
    s, beat = (read_json(folder / name) for name in ("state.json", "heartbeat.json"))
    p, owner, (left, totals), end = s["p"], lock(folder)[1], summary(s), s["ended"] or "it was cut off"
    step = beat.get("step") if s["leader"] and beat.get("phase") == "training" else p["step"]
    now = f"attempt {s['attempt']}, {s['now']}: {owner}" if owner else f"not running: {end}"
    return f"""run       {folder}: {shlex.join(s['command'])[:150]}\nnow       {now}
progress  {'' if owner else 'last seen '}{p['phase'] or 'no phase'}, step {'-' if step is None else step} of \
{p['total'] or '-'}, {p['pace'] or 0:.3g} s a step, eta \
{quietly(lambda: span((p['total'] - step) * p['pace'])) or '-'}, heartbeat \
{quietly(lambda: span(time.time() - beat.get('time'))) or '-'} ago
restarts  left before it gives up: {left}\n{chr(10).join(s.get('gpus') or [])}{s.get('gpu_error') or ''}
totals    {totals}\nlast      {s['last_event']}
tail      tail -F {shlex.quote(str(folder))}/attempt_{s['attempt']:03}.log"""
def stop(folder):  # ask the supervisor for an end in order, or end what a dead one left -> how it ended
    if owner := lock(folder)[1]:
        os.kill(int(owner.split()[1]), signal.SIGTERM)
        print(f"{owner} was asked to stop the run; a second stop kills it", flush=True)
        while lock(folder)[1] == owner:
            time.sleep(0.1)
    elif not (old := read_json(folder / "state.json")).get("ended"):
        end_leftover(run := begin(folder, old.get("command", []), parse(["--", "-"])[0]))
        save(run, ended="stopped, as asked; its supervisor was dead", stop=0, leader=0)
    return f"nothing runs: {read_json(folder / 'state.json').get('ended')}"

def begin(folder, command, options):  # all that a run holds, nothing started. One that was cut off goes on
    old, p = read_json(folder / "state.json"), dict(START)
    sound = quietly(lambda: summary(old) and {**old["live"], "": old["best"] + old["stop"]})
    bad = "" if sound else (quietly((folder / "state.json").read_text, errors="replace") or "")
    state = {"history": [], "stop": 0, "best": 0, "known": False, "leader": 0, "attempt": 0, "live": {},
             "began": time.time(), "totals": {"attempts": 0, "useful": 0.0, "gpu": 0.0}}
    kept = () if bad else ("best", "known", "attempt") if old.get("ended") else state
    state |= {k: old[k] for k in kept if k in old}
    state |= {"command": command, "options": vars(options), "ended": "", "over": 0, "now": "starting", "p": p}
    left = {x for pid, born in state["live"].items() if (x := quietly(psutil.Process, int(pid)))
            and abs((quietly(x.create_time) or 0) - born) < 2}  # not another one of this number
    gpus = argparse.Namespace(
        timeout=options.gpu_timeout, rows=[], apps=None, first={}, samples=[], asked=0.0,
        error="no nvidia-smi, no GPU figures" * (not shutil.which("nvidia-smi")), wake=threading.Event())
    return argparse.Namespace(
        folder=folder, command=command, options=options, state=state, gpus=gpus, p=p, hangup=[],
        output=Output(folder, options), token=hashlib.sha1(bytes(folder.resolve())).hexdigest(), leader=None,
        pattern=re.compile(options.step_regex or STEP), status=None, pipe=None, said=set(), next_look=0.0,
        turn=time.monotonic(), next_save=0.0, next_minute=time.monotonic() + 60, quits=[], bad=bad,
        asked=[state["stop"]] * (state["stop"] > 0), cpu=(0.0, 0.0), left=left)

def main(argv):
    if argv[:1] == ["--_exec"]:  # become the command, with a SIGTERM for the death of the supervisor
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        quietly(os.execvp, argv[2], argv[2:]) if os.getppid() == int(argv[1]) else None
        refuse(127, f"{argv[2]}: cannot be executed")
    quietly(lambda: sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape"))  # any file's name
    if argv[:1] in (["status"], ["stop"]):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nobody has to wait for a stop
        text = len(argv) == 2 and quietly(status if argv[0] == "status" else stop, Path(argv[1]))
        return print(text or refuse(USAGE, f"{' '.join(argv)}: it needs a run folder, yours and whole"))
    options, command = parse(argv)
    folder, there = run_folder(options, command), os.path.exists(command[0])
    if not shutil.which(command[0]):
        refuse(126 if there else 127, f"{command[0]}: {'not executable' if there else 'command not found'}")
    run = begin(folder, command, options)
    if options.plan:
        print(f"would run {shlex.join(command)}\nin {folder}, where {len(tree(run))} of its processes live\n"
              f"left: {summary(run.state)[0]}\nlimits:", *(f"{k}={v}" for k, v in vars(options).items()))
        return FINISHED
    run.owner = f"process {os.getpid()} since {time.strftime(CLOCK)}"
    owner = quietly(take, run) or refuse(USAGE, f"{folder}: cannot be written")
    refuse(TAKEN, f"{folder} is supervised by {owner}") if owner != run.owner else None
    for name, marks in {"INT": run.asked, "TERM": run.asked, "HUP": run.hangup, "QUIT": run.quits}.items():
        signal.signal(signal.Signals[f"SIG{name}"], lambda number, _, marks=marks: marks.append(number))
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans of the run come to us
    try:
        if run.bad:
            note(run, "state", f"state.json made no sense, all counters begin anew; it was: {run.bad[:999]}")
        note(run, "supervisor", f"{owner} supervises; supervise.py stop {shlex.quote(str(folder))} ends it")
        code, how = supervise(run)
        write_minute(run)
        [quietly(p.kill) for p in psutil.Process().children(recursive=True)]  # an nvidia-smi that hangs
        save(run, ended=how, stop=0, now="ended", over=time.time())
        note(run, "end", f"{summary(run.state)[1]}; exit {code}: {how}", code=code)
        wait_for(run, lambda: not (run.output.pending and run.output.terminal), DRAIN)  # a slow terminal
        return code
    except Exception:
        sys.excepthook(*sys.exc_info())
        refuse(BROKEN, "an error in here; the run gets a SIGTERM and saves")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
