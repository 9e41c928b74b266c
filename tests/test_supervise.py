"""The supervisor: what it decides and reads, by tables, and what it does, with real processes.

python -m pytest tests/test_supervise.py
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from supervise_kit import (
    CORE,
    EXTRA,
    HANG,
    OOM,
    RAISE,
    alive,
    bearers,
    call,
    case,
    gpu,
    supervised,
    toy,
    until,
)

import supervise as s

LIMITS = s.parse(["--", "x"])[0]

# ------------------------------------------------------------------------------------------------ decisions


def attempts(*changes, **common):
    """A history: every attempt failed with exit 1 after an hour, without a gain, unless changed."""
    plain = {
        "start": 0.0,
        "up": 3600.0,
        "code": 1,
        "core": False,
        "ended": "",
        "words": "",
        "root": "RuntimeError: boom",
        "cause": "error",
        "signature": "error boom",
        "first": 100,
        "step": 120,
        "total": 1000,
        "strays": 0,
        "gain": False,
        "wasted": 0.0,
        "done_missing": False,
        "unkillable": "",
        "gpus": "",
    }
    return [
        {**plain, "number": i + 1, "restart": i, "start": 3600.0 * i, **common, **change}
        for i, change in enumerate(changes)
    ]


GAIN, SHORT = {"gain": True}, {"up": 60.0}
NAN = {"code": 76, "cause": "nan", "signature": "nan"}
TABLE = [  # what happened, what is decided, the word that must be in the sentence
    ("finished", [{"code": 0, "root": ""}], ("finished", 0), "finished"),
    ("finished, with a failure in its text", [{"code": 0, "step": 1000}], ("finished", 0), "even so"),
    ("exit 0, a failure in its text and steps missing", [{"code": 0}], ("relaunch", None), "steps missing"),
    ("exit 0, steps missing, no failure in its text", [{"code": 0, "root": ""}], ("finished", 0), "finished"),
    (
        "exit 0 without its done file",
        [{"code": 0, "root": "", "done_missing": True}],
        ("relaunch", None),
        "--done",
    ),
    (
        "exit 0 without its done file for ever",
        [{"code": 0, "done_missing": True}] * 3,
        ("give up", 93),
        "higher step",
    ),
    ("crash", [{}], ("relaunch", None), "RuntimeError: boom"),
    ("crash, crash", [{}] * 2, ("relaunch", None), "no gain"),
    ("three without a gain", [{}] * 3, ("give up", 93), "3 attempts in a row"),
    (
        "three causes without a gain",
        [{"signature": x} for x in "abc"],
        ("give up", 93),
        "3 attempts in a row",
    ),
    ("a gain between", [{}, {}, GAIN, {}, {}], ("relaunch", None), "relaunch"),
    ("a short gain between", [{}, {}, GAIN | SHORT, {}, {}], ("relaunch", None), "relaunch"),
    ("progress unknown counts neither way", [{"gain": None}] * 9, ("relaunch", None), "relaunch"),
    (
        "same failure, gain unknown, a named cause",
        [{"gain": None, "cause": "import"}] * 2,
        ("give up", 93),
        "same failure",
    ),
    ("usage", [{"code": 2}], ("give up", 2), "no"),
    ("not found", [{"code": 127}], ("give up", 127), "no"),
    ("not executable", [{"code": 126}], ("give up", 126), "no"),
    ("75 that nobody asked of us", [{"code": 75, **GAIN}], ("relaunch", None), "exit 75"),
    ("76 once", [NAN], ("relaunch", None), "exit 76"),
    ("76 twice", [NAN, NAN], ("give up", 93), "same failure"),
    ("76 twice, a small gain between", [NAN, NAN | GAIN | SHORT], ("give up", 93), "same failure"),
    ("76 again after hours of gain", [NAN, NAN | GAIN], ("relaunch", None), "relaunch"),
    ("out of memory twice", [{"cause": "cuda-oom", "signature": "oom"}] * 2, ("give up", 93), "same failure"),
    (
        "out of memory after progress",
        [{"cause": "cuda-oom"}, {"cause": "cuda-oom", **GAIN}],
        ("relaunch", None),
        "relaunch",
    ),
    ("bad checkpoint twice", [{"cause": "bad-checkpoint"}] * 2, ("give up", 93), "same failure"),
    ("import error twice", [{"cause": "import"}] * 2, ("give up", 93), "same failure"),
    ("GPU lost by its text alone", [{"cause": "gpu-lost"}], ("relaunch", None), "relaunch"),
    ("GPU lost", [{"gpus": "GPU 3 is listed no more"}], ("give up", 95), "GPU 3 is listed no more"),
    ("unkillable", [{"unkillable": "process 7 in state D cannot be killed"}], ("give up", 95), "state D"),
    (
        "a hang that answered TERM with 75",
        [{"code": 75, "ended": "hang", "words": "made no progress for 0:15:00"}],
        ("relaunch", None),
        "no progress",
    ),
    (
        "a hang that answered TERM with 0",
        [{"code": 0, "ended": "hang", "words": "made no progress"}],
        ("relaunch", None),
        "no progress",
    ),
    (
        "five restarts at once",
        [{"start": 100.0 * i, "up": 90.0, **GAIN} for i in range(6)],
        ("give up", 94),
        "5 of 5 restarts in 0:30:00",
    ),
    ("fifty restarts", [{"restart": 50, **GAIN}], ("give up", 94), "50 of 50 restarts"),
    (
        "time wasted",
        [{"gain": True, "wasted": 4000.0}, {"wasted": 3300.0}],
        ("give up", 94),
        "2:01:40 of 2:00:00",
    ),
    (
        "twelve gains",
        [{"start": 1900.0 * i, "step": 500 * i, **GAIN} for i in range(12)],
        ("relaunch", None),
        "relaunch",
    ),
]


@pytest.mark.parametrize("what, changes, expected, word", TABLE, ids=[row[0] for row in TABLE])
@case(2, 5, 6, 11, 12)
def test_decide(what, changes, expected, word):
    """Catches a verdict that changed: a useless relaunch, a run given up too early, no reason given."""
    history = attempts(*changes)
    action, code, delay, why = s.decide(history, LIMITS, history[-1]["start"] + history[-1]["up"])
    assert (action, code) == expected, why
    assert word in why and "\n" not in why
    assert action == "relaunch" or delay == 0


@pytest.mark.parametrize(
    "code, signal_number, expected",
    [
        (75, signal.SIGTERM, 75),
        (0, signal.SIGINT, 0),
        (-15, signal.SIGTERM, 143),
        (-9, signal.SIGINT, 130),
        (2, 15, 2),
    ],
)
def test_a_stop_is_never_a_relaunch(code, signal_number, expected):
    """Catches a child started after a stop was asked, and an exit code that hides the child's."""
    action, found, _, why = s.decide(attempts({"code": code}), LIMITS, 0.0, signal_number)
    assert (action, found) == ("stopped", expected), why


def test_backoff_doubles_to_its_cap_and_resets():
    """Catches a relaunch storm, and a back-off that a healthy attempt does not reset."""
    limits = s.parse("--max-no-gain 99 --max-same 99 --rate 99 -- x".split())[0]
    delays = [s.decide(attempts(*[{}] * n), limits, 0.0)[2] for n in range(1, 10)]
    assert delays == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert s.decide(attempts({}, {}, GAIN), limits, 0.0)[2] == 5
    assert s.decide(attempts({}, {}, GAIN | SHORT), limits, 0.0)[2] == 20, "a minute up is not healthy"


def test_ledgers_outlive_a_reboot():
    """Catches starts of an earlier boot, later than now on the clock, in the rate."""
    history = attempts(*[{"start": 1e6 + i} for i in range(9)])
    assert s.ledgers(history, LIMITS, 50.0)["rate"][0] == 0


# -------------------------------------------------------------------------------------- hang and progress


def progress(**changed):
    return {**s.START, "known": True, **changed}


@pytest.mark.parametrize(
    "p, seconds",
    [
        ({"known": False}, 1800),
        ({}, 1800),
        ({"phase": "compiling", "step": 3, "top": 3}, 1800),
        ({"phase": "training", "step": 3, "top": 3}, 900),
        ({"step": 3, "top": 3, "longest": 10.0}, 900),
        ({"step": 3, "top": 3, "longest": 400.0}, 2000),
        ({"phase": "saving", "step": 3, "top": 3}, 3600),
        ({"phase": "evaluating", "step": 3, "top": 3}, 3600),
        ({"phase": "preparing"}, 3600),
        ({"phase": "loading"}, 3600),
    ],
)
@case(15)
def test_patience(p, seconds):
    """Catches a legal silence (compiling, saving, a slow step) taken for a hang, and a hang never seen."""
    assert s.why_end(progress(**p), seconds, LIMITS) is None
    ended, why = s.why_end(progress(**p), seconds + 0.1, LIMITS)
    assert ended == "hang" and "no progress" in why


@pytest.mark.parametrize(
    "p, seconds",
    [
        ({}, 300),
        ({"phase": "training"}, 300),
        ({"idle": 40.0}, 340),
        ({"longest": 100.0}, 500),
        ({"longest": 400.0}, 2000),
        ({"idle": None}, 900),
        *(({"phase": x}, 3600) for x in ("preparing", "loading", "evaluating", "saving")),
        ({"phase": "compiling"}, 1800),
        ({"top": None}, 1800),
    ],
)
@case(15)
def test_patience_with_a_run_that_rests(p, seconds):
    """Catches an early verdict where a phase, the first step or slow steps have their own time, or where
    nobody knows whether the run rests; and none where it does."""
    p = progress(**{"step": 3, "top": 3, "idle": 0.0, **p})
    assert s.why_end(p, seconds, LIMITS) is None
    assert s.why_end(p, seconds + 0.1, LIMITS)[0] == "hang"


@pytest.mark.parametrize(
    "cores, rows, rests",
    [
        (0.0, [(0, 77, 700)], True),
        (0.04, [(0, 77, 700)], True),
        (0.5, [(0, 77, 700)], False),
        (0.0, [(100, 90, 700)], True),
        (0.0, [(100, 627, 700)], False),
        (0.0, [(0, 77, 700), (100, 627, 700)], False),
        (0.0, [(0, 77, 700), (None, None, None)], True),
        (0.0, [(None, None, None)], False),
        (0.0, [(None, None, 700)], False),
        (0.0, [(None, 77, 700)], True),
        (0.0, [(None, 300, 700)], False),
        (0.0, [(0.4, None, None)], True),
        (0.0, [(3, 77, None)], False),
        (0.0, [], False),
    ],
)
def test_rest_is_never_guessed(cores, rows, rests):
    """Catches an unknown figure of a GPU taken for zero, one GPU that works left out, a busy CPU ignored."""
    names = ("utilization.gpu", "power.draw", "power.limit")
    assert s.idle(cores, [dict(zip(names, row)) for row in rows]) is rests


@case(7)
def test_three_losses_that_are_not_finite_end_it():
    """Catches a diverged run that trains on for days."""
    assert s.why_end(progress(nonfinite=2), 1.0, LIMITS) is None
    assert s.why_end(progress(nonfinite=3), 1.0, LIMITS)[0] == "nan"


def test_longest_step_leaves_out_evaluation():
    """Catches a learned limit that an evaluation stretched for good."""
    p = progress()
    for now, step, phase in (
        (1, 1, "training"),
        (3, 2, "training"),
        (90, 2, "evaluating"),
        (99, 2, "training"),
        (100, 3, "training"),
    ):
        s.advance(p, now, step, phase, 0)
    assert p["longest"] == 2 and p["top"] == 3 and p["gained"] == 100


def test_a_bar_per_epoch_is_no_lack_of_gain():
    """Catches attempts called useless because each epoch's bar begins at 1 again."""
    p = progress()
    for now, step in enumerate((1, 2, 3, 1, 2)):
        s.advance(p, now, step, "", 3)
    assert p["wrapped"] and p["moved"] == 4 and p["gained"] is None


# -------------------------------------------------------------------------------------------- reading text


@pytest.mark.parametrize(
    "line, found",
    [
        ("step   20/470  loss 2.3  accept 1.9", (20, 470)),
        ("Step 7 of 90", (7, 90)),
        ('{"step": 31, "loss": 2.0}', (31, None)),
        ("[12:00:01] step=1,200/4,700 loss=1", (1200, 4700)),
        (" 4%|▍   | 20/470 [00:01<00:30, 15.2it/s]", (20, 470)),
        ("250 ms per step 250", None),
        ("2.1 s/step 40", None),
        ("step 250 ms", None),
        ("steps: 40", None),
        ("steps 5", None),
        ("step took 3 s", None),
        ("footstep 3", None),
        ("epoch 3, lr 1e-4", None),
        ("step 3.5", None),
        ("step " + "9" * 5000, None),
        ("9" * 5000 + "/90 [", None),
        ("step 1/" + "9" * 40, None),
        ("", None),
    ],
)
def test_steps(line, found):
    """Catches steps that are not seen, and times and other numbers taken for steps."""
    assert s.step_of(line) == found


@pytest.mark.parametrize(
    "line, text",
    [
        (b"\x1b[32mstep 3\x1b[0m", "step 3"),
        ("ä€".encode(), "ä€"),
        (b"a\xffb", "a\ufffdb"),
        ("step 5".encode("utf-16-le"), "step 5"),
        (b"\x1b]0;title\x07x", "x"),
        (b"", ""),
    ],
)
@case(35, 36)
def test_clean(line, text):
    """Catches colours, NULs and bad bytes that hide a step or raise."""
    assert s.lines_of(line) == [text]


@pytest.mark.parametrize(
    "code, words",
    [
        (-11, "SIGSEGV (exit 139"),
        (-9, "SIGKILL (exit 137"),
        (1, "exit 1"),
        (137, "SIGKILL"),
        (75, "on request"),
        (76, "diverged"),
        (-64, "SIGRTMAX"),
        (-70, "signal 70"),
        (200, "exit 200"),
    ],
)
@case(3)
def test_exit_words(code, words):
    """Catches a signal that is not named, and a number that has no name raising."""
    assert words in s.exit_words(code)


TRACE = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    main()\n'
FX = (
    "RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function. "
    "This is not supported at the moment."
)
DENSE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 298.00 GiB. GPU 0 has 139 GiB."
CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2211"
WATCHDOG = (
    "[rank0]:[E1129 18:07:13 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE) ran for 600000 ms before timing out."
)
NAMED = (
    "train_dflash.py: drafter 1 (GPU 6) failed: OutOfMemoryError: CUDA out of "
    "memory. Tried to allocate 298.00 GiB."
)
ROOTS = [  # output, process, root, label of the cause
    ("one traceback", f"step 1/9\n{TRACE}ValueError: bad value 3\n", "", "ValueError: bad value 3", "error"),
    (
        "whole message",
        f"{TRACE}RuntimeError: Error(s) in loading state_dict for Drafter:\n"
        "\tsize mismatch for a\n\tsize mismatch for b\n",
        "",
        "RuntimeError: Error(s) in loading state_dict for Drafter: size mismatch for a size mismatch for b",
        "bad-checkpoint",
    ),
    (
        "named by the script",
        f"{TRACE}{CLOSED}\n{TRACE}{DENSE}\n{TRACE}{CLOSED}\n{NAMED}\n",
        "drafter 1 (GPU 6)",
        DENSE,
        "cuda-oom",
    ),
    (
        "named, its traceback is not there",
        f"x\n{NAMED}\n",
        "drafter 1 (GPU 6)",
        NAMED.split("failed: ")[1],
        "cuda-oom",
    ),
    (
        "cascade first in the text",
        f"{TRACE}{CLOSED}\n{TRACE}KeyError: 'custom'\n",
        "",
        "KeyError: 'custom'",
        "error",
    ),
    (
        "tracing refused, then dense",
        f"{TRACE}{FX}\n\nDuring handling of the above exception, another exception occurred:\n\n"
        f"{TRACE}{DENSE}\n",
        "",
        f"{FX}; then {DENSE}",
        "fx-trace",
    ),
    (
        "interleaved",
        "Traceback (most recent call last):\nTraceback (most recent call last):\n"
        '  File "a.py", line 1\n  File "a.py", line 1\n'
        f"    f()\n{FX}\n    f()\n{CLOSED}\n",
        "",
        FX,
        "fx-trace",
    ),
    (
        "by rank",
        "[rank3]: Traceback (most recent call last):\n[rank1]: Traceback (most recent call last):\n"
        '[rank3]:   File "a"\n'
        f"[rank3]: {DENSE}\n[rank1]: torch.distributed.DistBackendError: NCCL error\n",
        "rank3",
        DENSE,
        "cuda-oom",
    ),
    (
        "spawned",
        f"Process SpawnProcess-2:\n{TRACE}IndexError: 7\n",
        "SpawnProcess-2",
        "IndexError: 7",
        "error",
    ),
    ("a class of its own", f"{TRACE}queue.Empty\n", "", "queue.Empty", "error"),
    (
        "watchdog after a traceback",
        f"{TRACE}AssertionError: shapes\n{WATCHDOG}\nterminate called after throwing\n",
        "",
        "AssertionError: shapes",
        "error",
    ),
    (
        "watchdog alone",
        f"step 3/9\n{WATCHDOG}\nterminate called after throwing an instance of 'c10::DistBackendError'\n",
        "rank0",
        WATCHDOG.split("[rank0]:")[1],
        "nccl-timeout",
    ),
    (
        "survived",
        f"{TRACE}ValueError: wandb is down\n"
        + "".join(f"step {i}/90\n" for i in range(9))
        + "KeyError: 'x'\n",
        "",
        "KeyError: 'x'",
        "error",
    ),
    (
        "no traceback",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n",
        "",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "cuda-oom",
    ),
    (
        "advice is no failure",
        "hint: this may be caused by an Error in the driver\nstep 1/2\n",
        "",
        "",
        "error",
    ),
    (
        "import",
        f"{TRACE}ModuleNotFoundError: No module named 'nosuch'\n",
        "",
        "ModuleNotFoundError: No module named 'nosuch'",
        "import",
    ),
    (
        "syntax",
        '  File "a.py", line 1\n    x x\n      ^\nSyntaxError: invalid syntax\n',
        "",
        "SyntaxError: invalid syntax",
        "import",
    ),
    (
        "disk",
        f"{TRACE}OSError: [Errno 28] No space left on device\n",
        "",
        "OSError: [Errno 28] No space left on device",
        "disk-full",
    ),
    (
        "a user's mistake",
        "train_dflash.py: --out x: cannot be written (Permission denied)\n",
        "",
        "--out x: cannot be written (Permission denied)",
        "error",
    ),
    (
        "bad checkpoint",
        f"{TRACE}RuntimeError: PytorchStreamReader failed reading zip archive: "
        "failed finding central directory\n",
        "",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "bad-checkpoint",
    ),
]


@pytest.mark.parametrize("what, text, process, root, label", ROOTS, ids=[row[0] for row in ROOTS])
@case(6, 8, 12)
def test_root_line(what, text, process, root, label):
    """Catches the misreading of this project's first trouble: the tail of many traces taken for the cause."""
    assert s.root_line(text) == (process, root)
    assert s.cause_of(1, root, text) == label


@pytest.mark.parametrize(
    "code, ended, oom, label",
    [
        (-9, "", False, "SIGKILL"),
        (-9, "", True, "host-oom"),
        (-11, "", False, "SIGSEGV"),
        (76, "", False, "nan"),
        (2, "", False, "usage"),
        (-9, "hang", False, "hang"),
        (0, "nan", False, "nan"),
        (1, "", False, "error"),
    ],
)
@case(4)
def test_causes_by_exit_code(code, ended, oom, label):
    """Catches a plain kill -9 that is called out of memory without a proof."""
    assert s.cause_of(code, "", "", ended, oom) == label


def csv(*rows):
    rows = [", ".join(r[f] for f in CORE + EXTRA) if isinstance(r, dict) else r for r in rows]
    return "\n".join([", ".join(CORE + EXTRA), *rows]) + "\n"


@pytest.mark.parametrize(
    "word, value",
    [
        ("0", 0.0),
        ("77.41", 77.41),
        *(
            (w, None)
            for w in (
                "[N/A]",
                "N/A",
                "[Not Supported]",
                "[Unknown Error]",
                "[Insufficient Permissions]",
                "[GPU requires reset]",
                "ERR!",
                "",
                "nan",
                "inf",
                "-1",
                "1e999",
                "9" * 400,
                "12 W",
            )
        ),
    ],
)
@case(32)
def test_unknown_is_never_zero(word, value):
    """Catches a word of nvidia-smi's that becomes 0, or raises; a health word that is swallowed."""
    (row,), _ = s.read_csv(csv(gpu(power_draw=word, gpu_recovery_action=word)), s.CORE + s.EXTRA)
    assert row["power.draw"] == value and row["memory.used"] == 0.0
    assert (row["gpu_recovery_action"] is None) == (
        word in ("[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[Insufficient Permissions]", "")
    )


@pytest.mark.parametrize(
    "text, count, odd",
    [
        (csv(gpu()), 1, ""),
        (csv(gpu(0), gpu(1)), 2, ""),
        (csv(), 0, ""),
        ("", 0, "no header"),
        ("No devices were found\n", 0, "No devices"),
        (csv(gpu(), "2026/11/29, 1, GPU-"), 1, "2026/11/29, 1"),
        (csv(gpu(), gpu(1, power_draw="77,41")), 1, "2026/11/29"),
        (
            csv("Unable to determine the device handle for GPU 0000:09:00.0: Unknown Error", gpu()),
            1,
            "Unable",
        ),
        (", ".join(gpu().values()), 0, "2026"),
        ("\ufffd" * 50, 0, "\ufffd"),
        ("x, " * 1000, 0, "x"),
    ],
)
@case(32)
def test_read_csv(text, count, odd):
    """Catches an error line taken for data, and a good row lost beside a bad one."""
    rows, found = s.read_csv(text, s.CORE + s.EXTRA)
    assert len(rows) == count and found.startswith(odd) and bool(found) == bool(odd)
    for row in rows:
        assert (
            row["memory.used"] == 0.0
            and row["power.draw"] in (77.41, None)
            and row["gpu_recovery_action"] == "None"
        )


def test_process_names_with_commas():
    """Catches a process list that a name with a comma shifts."""
    rows, _ = s.read_csv(
        'gpu_uuid, pid, process_name, used_gpu_memory [MiB]\nGPU-1, 7, a, b "c", 512\nGPU-1, 8, x, [N/A]\n',
        s.APPS,
    )
    assert [(r["pid"], r["process_name"], r["used_gpu_memory"]) for r in rows] == [
        ("7", 'a, b "c"', 512.0),
        ("8", "x", None),
    ]


# --------------------------------------------------------------------------------------------- command line


@case(2)
def test_bad_command_lines(tmp_path):
    """Catches a traceback, or a run that starts, for a mistake on the command line."""
    plain, file = tmp_path / "plain", tmp_path / "file"
    plain.write_text("x")
    file.write_text("x")
    toys = ["--", *toy("--steps 1")]
    for arguments, code, word in (
        (["--run-dir", tmp_path], 2, "no command"),
        (["python", "x.py"], 2, "begins after --"),
        (["--nosuch", *toys], 2, "--nosuch"),
        (["--backoff", "9", "--backoff-cap", "1", *toys], 2, "above --backoff-cap"),
        (["--grace", "-1", *toys], 2, "out of range"),
        (["--grace", "x", *toys], 2, "--grace"),
        (["--step-regex", "(", *toys], 2, "--step-regex"),
        (["--run-dir", file / "sub", *toys], 2, "cannot be written"),
        (["--", "nosuch-command"], 127, "nosuch-command: command not found"),
        (["--", plain], 126, "not executable"),
        (["status", tmp_path / "none"], 2, "needs a run folder"),
        (["stop"], 2, "needs a run folder"),
    ):
        found, out, err = call(*arguments, cwd=tmp_path)
        assert found == code and err.startswith("supervise.py: ") and err.count("\n") == 1 and word in err, (
            arguments,
            found,
            err,
        )
        assert "Traceback" not in err + out
    assert sorted(os.listdir(tmp_path)) == ["file", "plain"], "a refusal left something behind"


def test_help_fits_a_terminal():
    """Catches options that multiply until nobody reads them."""
    text = call("--help")[1]
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 110
    assert len(Path(s.__file__).read_text().splitlines()) <= 700


@pytest.mark.parametrize(
    "command, folder",
    [
        (["python", "train.py", "--out", "runs/a"], "runs/a"),
        (["python", "train.py", "--out=runs/b"], "runs/b"),
        (["python", "my/train.py", "--lr", "1"], "runs/train-"),
        (["sleep", "1"], "runs/sleep-"),
    ],
)
def test_run_folder(command, folder):
    """Catches a run that does not find its folder again, or shares it with another command."""
    found = str(s.run_folder(LIMITS, command))
    assert found.startswith(folder) and found == str(s.run_folder(LIMITS, command))
    assert "--out" in " ".join(command) or found != str(s.run_folder(LIMITS, [*command, "x"]))


def test_plan_starts_nothing(tmp_path):
    """Catches a --plan with effects."""
    code, out, _ = call("--run-dir", tmp_path / "run", "--plan", "--", *toy("--steps 1"))
    assert code == 0 and "no gain 3" in out and not (tmp_path / "run").exists()


# ----------------------------------------------------------------------------------------- real processes


@case(1)
def test_crash_is_relaunched_and_goes_on(tmp_path):
    """Catches a crash that ends the run, and evidence (root line, last lines, steps) that is not kept."""
    with supervised(tmp_path, "", toy("--steps 12 --resume --attempts 1 --at 5", RAISE)) as run:
        assert run.ended() == 0
        first, second = run.events("exit")
        assert (first["number"], first["code"], first["root"], first["step"]) == (
            1,
            1,
            "RuntimeError: boom at 5",
            5,
        )
        assert first["signature"] and "step    3/12  loss 0.5000" in first["lines"]
        assert (second["number"], second["code"], second["first"], second["step"]) == (2, 0, 6, 12)
        assert [e["action"] for e in run.events("decision")] == ["relaunch", "finished"]
        assert b"boom at 5" in run.log(1) and b"toy" in run.log(2) and "boom at 5" in run.terminal()


@case(2)
def test_import_error_gets_one_retry_and_usage_none(tmp_path):
    """Catches a command that cannot work and is started again and again."""
    for name, code, starts, command in (
        ("import", 93, 2, [sys.executable, "-c", "import nosuch"]),
        ("usage", 2, 1, toy("--nosuch")),
        ("gone", 127, 1, ["sh", "-c", "nosuch-command"]),
    ):
        with supervised(tmp_path, "", command, name=name) as run:
            assert run.ended() == code and len(run.events("start")) == starts, name
            assert run.events("end")[-1]["text"].count("\n") == 0


@pytest.mark.parametrize("name", ["SEGV", "ABRT", "KILL"])
@case(3, 4)
def test_death_by_signal_is_named(tmp_path, name):
    """Catches a signal death without its name and 128+n, and a plain SIGKILL that is called out of memory."""
    with supervised(
        tmp_path,
        "--max-no-gain 1",
        toy("--at 3", f"os.kill(os.getpid(), signal.SIG{name})"),
        env={"PYTHONFAULTHANDLER": ""},
    ) as run:
        number = signal.Signals[f"SIG{name}"].value
        run.event("exit")
        assert run.ended() in (93, 0)
        a = run.events("exit")[0]
        assert (
            a["code"] == -number
            and f"SIG{name} (exit {128 + number}" in a["text"]
            and a["cause"] == f"SIG{name}"
        )


@case(5)
def test_exit_0_that_is_no_success(tmp_path):
    """Catches a crash behind a pipe taken for the end, a run without its done file relaunched for ever."""
    crash = f"{shlex.join(toy('--steps 99 --at 4', RAISE))} 2>&1 | cat"
    with supervised(tmp_path, "", ["sh", "-c", crash], name="pipe") as run:
        assert run.ended() == 93
        assert run.events("exit")[0]["code"] == 0 and "steps missing" in run.events("decision")[0]["text"]
    with supervised(tmp_path, "--done export", toy("--steps 3"), name="done") as run:
        assert run.ended() == 93 and "--done" in run.events("decision")[0]["text"]
    with supervised(tmp_path, "", [sys.executable, "-c", "print('ValueError: odd')"], name="text") as run:
        assert run.ended() == 0 and "ValueError: odd" in run.events("end")[0]["text"]


@case(11)
def test_progress_is_never_useless(tmp_path):
    """Catches a run given up although every attempt gets further, and a back-off that grows all the same."""
    crash = "os._exit(3) if step % 5 == 0 else None"
    every = [word for at in range(1, 60) for word in ("--at " + str(at), crash)]
    with supervised(
        tmp_path, "--rate 99 --healthy 0 --backoff 0.02", toy("--steps 60 --pace 0 --resume", *every)
    ) as run:
        assert run.ended() == 0
        assert len(run.events("exit")) == 12 and all(e["gain"] for e in run.events("exit"))
        assert {e["delay"] for e in run.events("decision")[:-1]} == {0.02}


@case(13)
def test_silent_hang(tmp_path):
    """Catches a hang that is never seen, is ended without evidence, or is not counted as a hang."""
    code = "import faulthandler; faulthandler.register(signal.SIGUSR1)"
    with supervised(
        tmp_path,
        "--hang 0.7 --hang-grace 0.2",
        toy("--steps 9 --resume --attempts 1 --at 0", code, "--at 5", HANG),
    ) as run:
        assert run.ended() == 0
        hang, first = run.events("hang")[0], run.events("exit")[0]
        assert "no progress" in hang["text"] and "main process" in hang["text"] and str(first["step"]) == "5"
        assert re.search(r"^\d+ \S+ sleeping \S+", hang["stacks"], re.M), hang["stacks"]
        assert b"most recent call first" in run.log(1), "faulthandler was not asked"
        assert (
            first["ended"] == first["cause"] == "hang" and run.events("decision")[0]["action"] == "relaunch"
        )


@case(13, 15)
def test_heartbeat_phase_is_given_its_time(tmp_path):
    """Catches a save that is taken for a hang because it is longer than a step may be."""
    save = "beat('saving', step); time.sleep(1.5)"
    with supervised(tmp_path, "--hang 0.7", toy("--steps 6 --beat --mute --at 3", save)) as run:
        assert run.ended() == 0 and not run.events("hang")
        assert run.events("exit")[0]["step"] == 6, "the heartbeat's step was not read"


@case(16)
def test_stopped_child_is_continued_before_term(tmp_path):
    """Catches a SIGTERM that a stopped process never gets, and a report that does not say it was stopped."""
    with supervised(
        tmp_path,
        "--hang 0.7",
        toy("--steps 9 --resume --attempts 1 --at 4", "os.kill(os.getpid(), signal.SIGSTOP)"),
    ) as run:
        assert run.ended() == 0
        assert "is stopped" in run.events("hang")[0]["text"]
        assert run.events("exit")[0]["code"] == 75, "it saved, so it was continued and asked, not killed"


@case(17)
def test_term_ignored_is_killed_after_grace(tmp_path):
    """Catches a stop that waits for ever on a process that ignores SIGTERM."""
    with supervised(tmp_path, "--grace 0.5", toy("--steps 9999 --on-term ignore")) as run:
        run.logged("step    2")
        run.send(signal.SIGTERM)
        assert run.ended() == 143
        assert run.events("exit")[0]["code"] == -signal.SIGKILL and len(run.events("start")) == 1


@case(21)
def test_workers_that_outlive_the_leader(tmp_path):
    """Catches workers (in sessions of their own, without our environment) that go on beside a new attempt."""
    spawn = (
        "[subprocess.Popen(['sleep', '600'], start_new_session=new, env=env) for new in (0, 1) "
        "for env in ({'PATH': os.environ['PATH']}, None)]; os.kill(os.getpid(), signal.SIGKILL)"
    )
    with supervised(tmp_path, "", toy("--steps 5 --resume --attempts 1 --at 2", spawn)) as run:
        run.event("exit")
        assert run.ended() == 0
        assert (
            run.events("exit")[0]["strays"] == 4 and "4 processes outlived" in run.events("exit")[0]["text"]
        )


@case(23)
def test_pipe_that_never_ends(tmp_path):
    """Catches a supervisor that waits for the end of the output instead of the end of the process."""
    hold = "subprocess.Popen(['sleep', '600'], start_new_session=True); os._exit(3)"
    with supervised(tmp_path, "", toy("--steps 99 --pace 0.03 --at 40", hold)) as run:
        run.logged("step    2")
        held = os.open(f"/proc/{run.leader()}/fd/1", os.O_WRONLY)  # by someone whom no sweep can find
        try:
            assert run.event("exit")["code"] == 3
            run.logged("step    2", 2)
            run.send(signal.SIGTERM)
            assert run.ended() == 75
        finally:
            os.close(held)


@case(6)
def test_out_of_memory(tmp_path):
    """Catches a run whose memory never suffices started again and again, and one given up for it although
    each attempt gets further."""
    with supervised(tmp_path, "", toy("--at 3", OOM), name="early") as run:
        assert run.ended() == 93
        gains = [(e["cause"], e["gain"]) for e in run.events("exit")]
        assert gains == [("cuda-oom", True), ("cuda-oom", False), ("cuda-oom", False)]
        assert "298.00 GiB" in run.events("end")[0]["text"]
    every = [word for at in range(5, 20, 5) for word in (f"--at {at}", OOM)]
    with supervised(tmp_path, "", toy("--steps 20 --resume", *every), name="late") as run:
        assert run.ended() == 0 and len(run.events("start")) == 4


LOSSES = "[print(f'step {step}/99 loss %s', flush=True) for step in range(step + 1, step + 5)]; "


@case(7)
def test_loss_that_is_not_finite(tmp_path):
    """Catches a diverged run that trains on, is started more than once again, or is not told why it was;
    skipped steps, as mixed precision has them, that are taken for it."""
    told = "print('after', os.environ['SUPERVISE_LAST_FAILURE'], flush=True)"
    nan = ["--at 0", told, "--at 4", f"{LOSSES % 'nan'}{HANG}"]
    with supervised(tmp_path, "", toy("--steps 99 --on-term die", *nan), name="nan") as run:
        assert run.ended() == 93
        assert [e["ended"] for e in run.events("exit")] == ["nan"] * 2
        assert "not finite" in run.events("end")[0]["text"] and b"after nan" in run.log(2)
    skip = LOSSES % "inf, skipping step"
    with supervised(tmp_path, "", toy("--steps 20", "--at 4", skip), name="skip") as run:
        assert run.ended() == 0 and len(run.events("start")) == 1


@case(8)
def test_collective_timeout(tmp_path):
    """Catches a stuck collective that is ended before its own watchdog has spoken, and an abort that is
    named instead of what led to it."""
    go = tmp_path / "go"
    wait = f"print({WATCHDOG!r}, flush=True)\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    cascade = f"print({TRACE + CLOSED!r}, flush=True)\nos.abort()"
    with supervised(tmp_path, "--max-no-gain 0", toy("--at 3", wait + cascade)) as run:
        run.logged("Watchdog caught")
        assert not run.events("hang")
        go.touch()
        assert run.ended() == 93
        a = run.events("exit")[0]
        assert (a["code"], a["cause"], a["ended"]) == (-signal.SIGABRT, "nccl-timeout", "")
        assert a["root"].startswith("rank0: ") and "Watchdog caught" in a["root"]


@case(12)
def test_bad_checkpoint(tmp_path):
    """Catches a checkpoint that nobody can load loaded for ever, not named, or deleted."""
    bad = tmp_path / "step-00000004.pt"
    code = (
        f"""open({str(bad)!r}, "w").close()\n"""
        f"""raise RuntimeError("PytorchStreamReader failed reading zip archive: " {str(bad)!r})"""
    )
    with supervised(tmp_path, "", toy("--at 0", code)) as run:
        assert run.ended() == 93 and len(run.events("start")) == 2
        assert {e["cause"] for e in run.events("exit")} == {"bad-checkpoint"}
        assert str(bad) in run.events("end")[0]["text"] and bad.exists()


@case(24)
def test_shell_in_between(tmp_path):
    """Catches a stop that ends the shell and leaves the trainer without its checkpoint."""
    for script in ("{}; true", "{} 2>&1 | cat"):
        name = f"run{len(script)}"
        with supervised(
            tmp_path,
            "",
            ["bash", "-c", script.format(shlex.join(toy("--steps 9999 --save-seconds 0.3")))],
            name=name,
        ) as run:
            run.logged("step    2")
            run.send(signal.SIGTERM)
            run.ended()
            assert b"saved at" in run.log(1), script
            assert run.events("exit")[0]["code"] == 0 and len(run.events("start")) == 1


@case(28)
def test_second_supervisor_is_refused(tmp_path):
    """Catches two supervisors on one run, and a lock that a child keeps after its owner was killed."""
    command = toy("--steps 9999")
    with supervised(tmp_path, "", command) as run:
        run.logged("step    2")
        code, _, err = call("--run-dir", run.dir, "--", *command)
        assert code == 96 and f"process {run.pid} " in err and err.count("\n") == 1
        lock = os.stat(run.dir / "supervise.lock").st_ino
        for pid in bearers(run.dir):
            assert all(
                os.stat(f"/proc/{pid}/fd/{fd}").st_ino != lock for fd in os.listdir(f"/proc/{pid}/fd")
            ), "inherited"
        run.send(signal.SIGTERM)
        assert run.ended() == 75


@case(28)
def test_killed_supervisor_goes_on_and_never_runs_two(tmp_path):
    """Catches a second trainer beside one that a killed supervisor left, and counters that begin again."""
    command = toy("--steps 30 --resume --save-seconds 1 --pace 0.03 --attempts 1 --at 4", "os._exit(1)")
    with supervised(tmp_path, "--max-no-gain 9", command) as run:
        run.event("start", 2)
        run.logged("step    8", 2)
        leader = run.leader()
        run.process.kill()
        run.process.wait()
        with supervised(tmp_path, "--max-no-gain 9", command) as again:
            again.event("start", 3)
            assert not alive(leader), "two at a time"
            assert again.ended() == 0
            starts = again.events("start")
            assert [e["attempt"] for e in starts] == [1, 2, 3]
            assert f"toy {leader} " not in again.log(3).decode() and b"begins at 4" not in again.log(3)
            assert again.state()["history"][-1]["restart"] == 2, "the restarts were counted from new"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@case(44)
def test_first_signal_asks_and_waits(tmp_path, number):
    """Catches a stop that does not wait for the checkpoint, or a child that is started after it."""
    with supervised(tmp_path, "", toy("--steps 9999 --save-seconds 0.3")) as run:
        run.logged("step    2")
        run.send(number)
        assert run.ended() == 75
        assert b"saved at" in run.log(1) and len(run.events("start")) == 1
        assert run.state()["ended"] and not run.state()["stop"], "the next start would stop at once"


@case(44)
def test_second_signal_kills(tmp_path):
    """Catches a second Ctrl-C that has to wait for the grace."""
    with supervised(tmp_path, "--grace 600", toy("--steps 9999 --on-term ignore")) as run:
        run.logged("step    2")
        run.send(signal.SIGINT)
        run.event("stop")
        run.send(signal.SIGINT)
        assert run.ended() == 130


@case(44)
def test_stop_between_attempts(tmp_path):
    """Catches a child that is started after a stop which came during the back-off."""
    with supervised(tmp_path, "--backoff 60 --backoff-cap 60", toy("--steps 9 --at 3", RAISE)) as run:
        run.event("decision")
        run.send(signal.SIGINT)
        assert run.ended() == 130 and len(run.events("start")) == 1


@case(44)
def test_stop_request_outlives_the_supervisor(tmp_path):
    """Catches a stop forgotten when its supervisor is killed before the end, and a run that stays stopped."""
    command = toy("--steps 40 --resume --on-term ignore --pace 0.05")
    with supervised(tmp_path, "", command) as run:
        run.logged("step    2")
        run.send(signal.SIGTERM)
        until(lambda: run.state()["stop"])
        run.process.kill()
        run.process.wait()
        with supervised(tmp_path, "--grace 0.3", command) as again:
            assert again.ended() == 143 and len(again.events("start")) == 1
        with supervised(tmp_path, "", command) as third:
            third.event("start", 2)


def test_status_and_stop(tmp_path):
    """Catches a status that is long, wrong, or fails when the run is dead; a stop that does not wait."""
    with supervised(tmp_path, "--gpu-interval 0.3", toy("--steps 9999 --save-seconds 0.3 --beat")) as run:
        run.logged("step   20")
        out = until(lambda: "of 9999" in (text := call("status", run.dir)[1]) and text)
        assert len(out.splitlines()) <= 24
        for word in ("attempt 1", "training", "of 9999", "no gain 3 of 3", "tail -F", "eta", str(run.pid)):
            assert word in out, out
        code, out, _ = call("stop", run.dir)
        assert code == 0 and b"saved at" in run.log(1) and run.ended() == 75
        code, out, _ = call("status", run.dir)
        assert code == 0 and "not running" in out and "stopped, as asked" in out


# ------------------------------------------------------------------------------ what a person may ask or do


@pytest.mark.parametrize("beat, caught", [("--beat", True), ("", True), ("--beat", False)])
def test_quit_shows_where_the_run_stands(tmp_path, beat, caught):
    """Catches a SIGQUIT that ends the supervisor or the run, that tells nothing, or that sends SIGUSR1 to a
    process which does not wait for it or may mean something else by it."""
    code = "import faulthandler; faulthandler.register(signal.SIGUSR1)" if caught else "True"
    with supervised(tmp_path, "", toy(f"--steps 9999 {beat}", "--at 0", code)) as run:
        run.logged("step    9")
        run.send(signal.SIGQUIT)
        told = run.event("stacks")
        assert f"main process {run.leader()} is" in told["text"]
        assert f"{run.leader()} python" in told["stacks"]
        size = len(run.log())
        until(lambda: len(run.log()) > size + 500, what="more steps")
        assert (b"most recent call first" in run.log()) == bool(beat and caught)
        run.send(signal.SIGQUIT)
        run.event("stacks", 2)
        run.send(signal.SIGTERM)
        assert run.ended() == 75 and len(run.events("start")) == 1


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"history": [{}], "totals": 3}', '{"best": "7"}'])
def test_state_that_makes_no_sense(tmp_path, text):
    """Catches a state.json, cut short or of another version, that nobody can start, ask or stop any more, or
    that is given up without a word."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "supervise.lock").touch()
    (folder / "state.json").write_text(text)
    code, out, err = call("status", folder)
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in out + err
    with supervised(tmp_path, "", toy("--steps 2")) as run:
        assert run.ended() == 0
        assert text in run.events("state")[0]["text"]
    assert call("status", folder)[0] == 0


def test_names_that_are_no_utf8(tmp_path):
    """Catches a name with bytes of another encoding, or a space, that ends the supervisor."""
    name = os.fsdecode(b"caf\xe9 1")
    with supervised(tmp_path, "", ["sh", "-c", "true", name], name=name) as run:
        assert run.ended() == 0 and run.events("end")[0]["code"] == 0
        assert b"tail -F '" + os.fsencode(run.dir) in run.shown.read_bytes(), "not to be pasted"
    assert call("status", run.dir, errors="surrogateescape")[0] == 0


def test_output_and_heartbeats_without_sense(tmp_path):
    """Catches a command that can end its supervisor by what it writes."""
    beats = ["[]", "{", "null", '{"step": 1e400}', '{"step": true, "phase": [1]}', "[" * 99999, "9" * 5000]
    code = (
        f"print('step ' + '9' * 5000, flush=True)\n"
        f"for text in {beats}:\n"
        "    open(os.environ['SUPERVISE_HEARTBEAT'], 'w').write(text)\n"
        "    time.sleep(0.6)"
    )
    with supervised(tmp_path, "", toy("--steps 4", "--at 2", code)) as run:
        assert run.ended() == 0 and len(run.events("start")) == 1


@case(28)
def test_leftover_without_our_marks(tmp_path):
    """Catches a second trainer beside one that a killed supervisor left and that had thrown its environment
    away, ignores SIGTERM, or wrote no step since."""
    code = "signal.signal(15, signal.SIG_IGN); print('step 1/2', flush=True); time.sleep(600)"
    code = f"import signal, time; {code}"
    command = ["env", "-i", sys.executable, "-S", "-c", code]
    with supervised(tmp_path, "--gpu-interval 0.1", command) as run:
        run.logged("step 1/2")
        leader = run.leader()
        until(lambda: str(leader) in run.state()["live"])
        run.process.kill()
        run.process.wait()
        assert alive(leader)
        with supervised(tmp_path, "--grace 0.3", command) as again:
            again.event("start", 2)
            assert not alive(leader), "two at a time"
            again.send(signal.SIGTERM)
            assert again.ended() == 143


@case(38)
def test_little_room_is_said_at_the_start(tmp_path):
    """Catches a week's run begun on a disk with no room for its first checkpoint, without a word."""
    for least, told in ((1, 0), (900000000, 1)):
        with supervised(tmp_path, f"--min-free {least}", toy("--steps 2"), name=f"run{told}") as run:
            assert run.ended() == 0 and len(run.events("disk")) == told


def test_own_error(tmp_path):
    """Catches an error of the supervisor's own that leaves its trainer running, or another code than 97."""
    broken = "import sys, supervise; supervise.decide = None; sys.exit(supervise.main(sys.argv[1:]))"
    folder = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", broken, "--run-dir", str(folder), "--", *toy("--steps 2")],
        env={**os.environ, "PYTHONPATH": str(Path(s.__file__).parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 97 and "an error in here" in done.stderr and not bearers(folder)
