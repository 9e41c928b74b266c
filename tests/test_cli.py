"""What a user's mistakes get: one line, exit 2, nothing written. python -m pytest tests/test_cli.py"""

import gzip
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SMALL, make_target, run

import train_dflash as t


def refuse(capsys, *argv):
    """main() in this process -> the one line it prints; insists on exit 2 and on a single line."""
    assert t.main([str(a) for a in argv]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("train_dflash.py: "), lines
    return lines[0]


def test_flags_are_refused_with_value_and_remedy(capsys, tiny, tmp_path):
    """Catches a mistake that is taken silently, or answered without the value or without what to do."""
    target, chats = tiny
    base = ["--target", target, "--data", chats, "--out", tmp_path / "run", *SMALL]
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": 1}\nnot json\n')
    (tmp_path / "empty.jsonl").touch()
    cases = [
        (["--tokns", 5], "unknown argument --tokns, did you mean --tokens?"),
        (["--tokens", "many"], "invalid int value"),
        (["--tokens", 1000], "--tokens 1000: must be a multiple of 128, as 1024 is"),
        (["--anchors", 33], "--anchors 33 x --block 4: must be a multiple of 128, as 64 anchors are"),
        (["--block", 1], "--block 1"),
        (["--epochs", 0], "--epochs 0.0"),
        (["--lr", -1], "--lr -1.0"),
        (["--max-length", 300], "--max-length 300 is more than --tokens 256"),
        (["--tokens", 1024, "--max-length", 600], "--max-length 600: the target reaches 512 positions"),
        (["--sliding-window", 3], "--sliding-window 3 is smaller than --block 4"),
        (["--full-layers", 3, "--sliding-window", 8], "--full-layers 3"),
        (["--target-layer-ids", "0,4"], "--target-layer-ids 0,4: give layers 0-3, each once"),
        (["--target-layer-ids", "1,1"], "each once"),
        (["--target-layer-ids=-1,2"], "-1,2"),
        (["--mask-token-id", 264], "--mask-token-id 264: the embedding has rows 0 to 263"),
        (["--mask-token-id", -2], "--mask-token-id -2"),
        (["--mask-token-id", 258], "pad, eos or bos"),
        (["--heads", 3], "--heads 3 is not a multiple of --kv-heads 2"),
        (["--head-dim", 8], "--head-dim 8"),
        (["--loss", "mse"], "--loss mse: dflash or dpace"),
        (["--resume", "no"], "auto or never"),
        (["--target", tmp_path / "nothing"], "nothing: no model there"),
        (["--target", tmp_path], "no model there"),
        (["--data", tmp_path / "nothing.jsonl"], "no such file"),
        (["--data", tmp_path / "empty.jsonl"], "the file is empty"),
        (["--data", bad], "nothing left to train on"),
        (["--data", ROOT / ".gitignore"], "neither .jsonl"),
        (["--device", "cpu", "--target-gpus", "0,1", "--drafter-gpus", "1,2"], "overlap in part"),
        (["--device", "cpu", "--target-gpus", "0,0", "--drafter-gpus", "1"], "give each once"),
        (["--device", "cpu", "--target-gpus", "0"], "give both"),
        (["--device", "cpu", "--target-gpus", "x"], "x: give whole"),
        (["--tokens", 65536, "--anchors", 4096], "on a CPU attention is dense"),
        (["--eval-fraction", 1], "--eval-fraction"),
    ]
    for flags, words in cases:
        line = refuse(capsys, *base, *flags)
        assert words in line, (flags, line)
    assert not list(tmp_path.glob("run/c*")) and not list(tmp_path.glob("run/m*")), "something was written"
    assert "name the chats" in refuse(capsys, "--target", target) and "name the model" in refuse(
        capsys, "--data", chats
    )
    assert "no such folder" in refuse(capsys, "--evaluate", tmp_path / "nowhere")
    assert "--tree 99999" in refuse(capsys, "--evaluate", tmp_path, "--tree", 99999)


def test_modes_and_their_files(capsys, tiny, tmp_path):
    """Catches two modes of which one is silently done, a flag without its mode that starts the demo, and
    files of a mode that end it with a traceback or are overwritten."""
    target, _ = tiny
    prompts, cut, run_ = tmp_path / "p.jsonl", tmp_path / "cut.jsonl.gz", tmp_path / "r"
    prompts.write_text('{"row": 1, "prompt": "hi"}')
    cut.write_bytes(gzip.compress(b'{"prompt": "hi"}' * 99)[:-9])
    run_.mkdir()
    (run_ / "metrics.jsonl").write_text("5")
    (run_ / "config.json").write_text('{"argv": [], ')
    answer = ["--target", target, "--replies", tmp_path / "out.jsonl", "--regenerate"]
    for flags, words in (
        (["--evaluate", run_, "--curves", run_], "--evaluate and --curves: one at a time"),
        ([*answer, prompts, "--plan"], "--plan is of training"),
        (["--evaluate", run_, "--init-from", run_, "--tree", -1], "--init-from is of training"),
        (["--init-from", run_], "name the model"),
        (["--prompts", prompts], "--prompts goes with --evaluate"),
        (["--each-turn"], "--each-turn goes with --regenerate"),
        (["--epochs", "inf"], "--epochs inf: give a finite number"),
        ([*answer, prompts, "--replies", prompts], "is the file of the prompts"),
        ([*answer, prompts, "--replies", tmp_path / "out.gz"], "without .gz"),
        ([*answer, cut], "cut.jsonl.gz: cannot be read"),
        ([*answer, prompts, "--device", "cpu", "--target-gpus", "0,0"], "--target-gpus 0,0: give each once"),
        (["--regenerate", prompts, "--replies", tmp_path / "out.jsonl"], "name the model"),
        (["--curves", run_], "no metrics.jsonl of a run there"),
    ):
        assert words in refuse(capsys, *flags), flags
    for content in ('{"argv": [], ', "[]", "5", '{"argv": 1, "config": []}'):
        (run_ / "config.json").write_text(content)
        assert "config.json is damaged" in refuse(capsys, "--evaluate", run_), content
    assert prompts.read_text() == '{"row": 1, "prompt": "hi"}' and not (tmp_path / "out.jsonl").exists()


def test_gpu_flags_without_a_gpu(capsys, tiny, tmp_path):
    """Catches a fall from GPU to CPU: GPU flags without usable CUDA are refused with torch's reason."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: nothing falls here")
    target, chats = tiny
    for flags in (["--device", "cuda"], ["--target-gpus", "0", "--drafter-gpus", "1"]):
        line = refuse(capsys, "--target", target, "--data", chats, "--out", tmp_path / "run", *SMALL, *flags)
        assert "GPUs are asked for" in line and ("CUDA" in line or "NVIDIA" in line), line


@pytest.mark.parametrize("variable", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_disabled_compilation_is_refused(tiny, tmp_path, variable):
    """Catches a run whose attention would be dense because compilation is off in the environment."""
    _, stderr = run(tiny, tmp_path / "run", code=2, env={variable: "1"})
    assert f"{variable}=1 turns compilation off" in stderr and len(stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_compiler_stance_is_refused(capsys, tiny):
    """Catches the same through torch.compiler.set_stance."""
    with torch.compiler.set_stance("force_eager"):
        assert "set_stance('force_eager')" in refuse(capsys, "--target", tiny[0], "--data", tiny[1])


def test_folder_that_cannot_be_written(capsys, tiny, tmp_path):
    """Catches a start whose first save would fail hours later: no permission and no space are said at
    once."""
    (tmp_path / "file").write_text("x")
    assert "cannot be written" in refuse(
        capsys, "--target", tiny[0], "--data", tiny[1], "--out", tmp_path / "file", *SMALL
    )
    if (
        os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], check=False, capture_output=True
        ).returncode
        == 0
    ):
        try:
            line = refuse(capsys, "--target", tiny[0], "--data", tiny[1], "--out", tmp_path / "run", *SMALL)
            assert "two checkpoints take" in line
        finally:
            subprocess.run(["umount", tmp_path], check=True)
    else:
        print("no small file system could be mounted here: the check for free space was not run")


def test_plan_touches_nothing(tiny, tmp_path):
    """Catches a plan that needs the GPUs it plans for, or leaves something out that a user decides by."""
    stdout, _ = run(tiny, tmp_path / "run", "--plan", "--target-gpus", "0,1,2,3,4", "--drafter-gpus", "5,6,7")
    for words in (
        "target 4 (GPU 4)",
        "drafter 2 (GPU 7)",
        "communicators",
        "masters, gradients, moments",
        "steps",
        "micro-batch: 256 context tokens, 32 anchors x block 4 = 128 draft rows",
        "  accumulation = 1",
    ):
        assert words in stdout, words
    assert not (tmp_path / "run").exists()
    with torch.device("meta"):
        target = t.parameters_of(str(tiny[0]), [0, 2])
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny[0])
    assert target[0] == sum(p.numel() for p in model.parameters())
    del model.model.layers[3:], model.lm_head
    assert target[1] == sum(p.numel() for p in model.parameters())


def test_help_fits_a_terminal(capsys):
    """Catches a help page wider than 80 columns, or a field without its line."""
    assert t.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 88 and len(t.dataclasses.fields(t.Config)) <= 50
    assert sum(line.startswith("  --") for line in lines) == len(t.dataclasses.fields(t.Config))


def test_import_starts_nothing():
    """Catches effects of an import: threads, children, a CUDA context, a changed environment."""
    code = (
        "import os, threading; e = dict(os.environ); import train_dflash, torch, psutil; "
        "assert not torch.cuda.is_initialized() and threading.active_count() == 1; "
        "assert not psutil.Process().children() and dict(os.environ) == e"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_evaluate_decodes_an_export_elsewhere(tiny, tmp_path):
    """Catches an export that is only good inside its run: another folder, --target and --prompts given,
    block read back; and a drafter for another target, refused."""
    run(tiny, tmp_path / "run", "--max-steps", 2)
    moved = tmp_path / "elsewhere"
    (tmp_path / "run" / "export").rename(moved)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        json.dumps({"prompt": "3Eb"}) + "\n" + json.dumps({"messages": [{"role": "user", "content": "x"}]})
    )
    command = [
        sys.executable,
        ROOT / "train_dflash.py",
        "--evaluate",
        moved,
        "--prompts",
        prompts,
        "--new-tokens",
        "8",
    ]
    done = subprocess.run([*command, "--target", tiny[0]], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "lossless: 0 of" in done.stdout and "decoding 2 prompts" in done.stdout, (
        done.stderr
    )
    other = make_target(tmp_path / "other", hidden=64)
    done = subprocess.run([*command, "--target", other], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "is no drafter for" in done.stderr
