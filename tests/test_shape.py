"""What keeps the files readable and the README true: python -m pytest tests/test_shape.py"""

import ast
import dataclasses
import json
import re
import shlex

from conftest import ROOT

import train_dflash as t

SOURCE = (ROOT / "train_dflash.py").read_text()
README = (ROOT / "README.md").read_text()


def test_limits():
    """Catches growth by small additions: functions stay short, indentation shallow, one place steps the
    drafter."""
    tree = ast.parse(SOURCE)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name not in ("drafter_worker", "train"):
            assert node.end_lineno - node.lineno < 80, node.name
    classes = {n.name for n in tree.body if isinstance(n, ast.ClassDef)}
    assert classes == {
        "Config",
        "UserError",
        "Diverged",
        "Documents",
        "Linear",
        "RMSNorm",
        "Attention",
        "MLP",
        "Layer",
        "Drafter",
        "Reader",
        "Draft",
        "Seat",
        "Job",
    }
    assert SOURCE.count("optimizer.step()") == 2, "one for the drafter, one that teaches the demo's target"
    for word in ("is_available() else", "except:", "type: ignore"):
        assert word not in SOURCE


def test_every_flag_is_used_and_in_the_readme_with_its_default():
    """Catches a knob that does nothing, and a README that tells another default."""
    for f in dataclasses.fields(t.Config):
        name = f.name
        assert len(re.findall(rf"\b{name}\b", SOURCE)) >= 2, name
        default = " ".join(f.default) if isinstance(f.default, tuple) else f.default
        assert f"| `--{name.replace('_', '-')}` | {default} | {f.metadata['help']} |" in README, name


def test_readme_commands_parse():
    """Catches a README command with a flag that does not exist or a value that is refused."""
    commands = re.findall(r"python train_dflash\.py[^\n#|]*", README + t.__doc__)
    assert len(commands) >= 5
    for command in commands:
        cfg, _ = t.parse(shlex.split(re.split(r"2>&1|\s{3,}|`", command)[0])[2:])
        t.check(cfg)


def test_figures_are_those_of_the_file():
    """Catches a figure in the README that nobody measured, or an old one."""
    figures = json.loads((ROOT / "tests" / "figures.json").read_text())
    rows = [f"| {f['name']} | {f['value']} {f['unit']} | {f['commit']} | {f['hardware']} |" for f in figures]
    table = README.split("| figure | value | commit | hardware |\n|---|---|---|---|\n")[1].split("\n\n")[0]
    assert table.splitlines() == rows
    for f in figures:
        assert {
            "name",
            "value",
            "unit",
            "command",
            "commit",
            "hardware",
            "date",
            "torch",
            "transformers",
        } == f.keys()


def test_ci_runs_the_readmes_line():
    """Catches a CI that tests something else than what the README tells people to run."""
    line = "pip install -r requirements.txt && python -m pytest"
    assert line in README and line in (ROOT / ".ci" / "run").read_text()
