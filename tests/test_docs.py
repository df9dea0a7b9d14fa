"""The README is true: its commands exist, its code runs, every docstring example gives what it says."""

import argparse
import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import metapeak.reports
import metapeak.strategies
import metapeak.tracer
from metapeak.reports.cli import COMMANDS, build_parser

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def modules():
    for package in (metapeak.tracer, metapeak.strategies, metapeak.reports):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            yield found.name


@pytest.mark.parametrize("name", sorted(modules()))
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_readme_names_every_command():
    for command in COMMANDS:
        assert f"metapeak {command.name}" in README


def test_readme_names_only_flags_that_exist():
    parser = build_parser()
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)).choices
    flags = {flag for command in commands.values() for action in command._actions for flag in action.option_strings}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", README))
    assert named <= flags


def test_readme_has_the_two_commands_that_set_all_up():
    assert "pip install . && metapeak estimate Qwen/Qwen3-8B --gpu rtx-4090" in README
    assert "pip install '.[test]' && pytest" in README


def test_readme_python_runs(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 4
    job, api, by_name, apply = blocks
    path = tmp_path / "mine.py"
    path.write_text(job)
    from metapeak.strategies import simulate

    assert simulate(f"{path}:job").model.parameters == 1024 * 4096 + 4096 + 4096 * 10 + 10
    exec(compile(api.replace("Qwen/Qwen3-8B", "openai-community/gpt2").replace("4096", "64"), "README", "exec"), {})
    exec(compile(by_name.replace("256", "16"), "README", "exec"), {})
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    before = model[0].forward
    (tmp_path / "plan.json").write_text('{"checkpointed": ["0"]}')
    monkeypatch.chdir(tmp_path)
    exec(compile(apply, "README", "exec"), {"model": model})
    assert model[0].forward != before and "forward" not in vars(model[1])
    printed = capsys.readouterr().out
    assert "peak" not in printed and "torch.ops.aten.embedding.default" in printed
