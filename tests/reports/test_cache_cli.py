"""Repeated estimates come from the cache: the same text and record, without torch."""

import json
import os
import pickle
import subprocess
import sys

import pytest

from metapeak.reports.commands import base
from metapeak.strategies import cached
from tests.reports.command_line import VARIABLES, in_a_process, metapeak
from tests.reports.conftest import LLAMA

STEP = ("estimate", "openai-community/gpt2", "--seq-len", "32", "--gpu", "t4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache")
    done = metapeak(*STEP, "--json", "-", METAPEAK_CACHE=str(path))
    assert done.returncode == 0 and json.loads(done.stdout)["how"]["cached"] is False
    return path


def without_torch(*arguments, **environment):
    """The command in a process in which torch cannot be imported."""
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
        "from metapeak.reports.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **VARIABLES, **environment},
        check=False,
    )


def comparable(text):
    record = json.loads(text)
    del record["how"]["cached"], record["how"]["seconds"]
    return record


def test_the_same_answer_without_torch(folder):
    again = without_torch(*STEP, "--json", "-", METAPEAK_CACHE=str(folder))
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["how"]["cached"] is True
    anew = metapeak(*STEP, "--json", "-", "--no-cache", METAPEAK_CACHE=str(folder))
    assert comparable(again.stdout) == comparable(anew.stdout)


def test_every_report_is_the_same(folder, tmp_path):
    more = ("--no-suggestions", "--chart", "--perfetto", "trace.json", "--snapshot", "s.pickle", "--force")
    told = {}
    for name, flags in {"from the cache": (), "anew": ("--no-cache",)}.items():
        done = metapeak(*STEP, *more, *flags, cwd=tmp_path, METAPEAK_CACHE=str(folder), COLUMNS="220")
        assert done.returncode == 0, done.stderr
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        told[name] = (done.stdout.partition("\n")[2], events, pickle.loads((tmp_path / "s.pickle").read_bytes()))
    assert told["from the cache"] == told["anew"]


def test_suggestions_are_added_to_an_answer_that_is_known(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    step = ("estimate", str(path), "--batch-size", "64", "--seq-len", "4096", "--gpu-memory", "2GiB", "--json", "-")
    here = {"METAPEAK_CACHE": str(tmp_path / "cache")}
    assert json.loads(metapeak(*step, **here).stdout)["suggestions"] is None
    asked = json.loads(metapeak(*step, "--suggestions", **here).stdout)
    assert asked["suggestions"] and asked["how"]["cached"] is True
    again = without_torch(*step, "--suggestions", **here)
    assert again.returncode == 0 and json.loads(again.stdout) == asked
    assert json.loads(without_torch(*step, **here).stdout)["suggestions"] is None
    shown = without_torch(*step[:-2], **here).stdout
    assert "It would fit with: " in shown and shown.index("By module") < shown.index("It would fit with: ")
    assert "It would fit with" not in metapeak(*step[:-2], "--no-suggestions", **here).stdout


def test_another_question_is_another_answer(folder):
    for change in (("--seq-len", "33"), ("--gpu", "a100"), ("--optimizer", "sgd"), ("--config", "some.yaml")):
        with_change = [*STEP, *change]
        if change[0] == "--config":
            (folder / "some.yaml").write_text("batch_size: 1\n")
            with_change[-1] = str(folder / "some.yaml")
        refused = without_torch(*with_change, "--json", "-", METAPEAK_CACHE=str(folder))
        assert refused.returncode != 0, change  # torch is needed, so the cache did not answer


def key_of(monkeypatch, tmp_path, **changes):
    from metapeak.strategies.settings import options_of, resolve

    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2", "n_layer": changes.pop("n_layer", 2)}))
    for name, value in changes.pop("patches", {}).items():
        monkeypatch.setattr(cached, name, value)
    return cached.answer_key(str(config), resolve(options_of(changes, "call")))


def test_the_key_covers_config_options_packages_and_code(monkeypatch, tmp_path):
    keys = [
        key_of(monkeypatch, tmp_path),
        key_of(monkeypatch, tmp_path, n_layer=3),
        key_of(monkeypatch, tmp_path, batch_size=2),
        key_of(monkeypatch, tmp_path, patches={"installed_packages": lambda: ("torch-0.0.dist-info",)}),
        key_of(monkeypatch, tmp_path, patches={"own_code": lambda: "other code"}),
    ]
    assert len({*keys}) == len(keys)
    monkeypatch.undo()
    assert key_of(monkeypatch, tmp_path) == keys[0]


def test_every_installed_package_counts():
    import importlib.metadata

    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}
    assert {f"{name}-{version}.dist-info" for name, version in versions.items()} <= {*cached.installed_packages()}


def test_code_of_the_users_own_is_never_kept(monkeypatch, tmp_path):
    from metapeak.strategies.settings import options_of, resolve

    def key(reference, **values):
        return cached.answer_key(reference, resolve(options_of(values, "call")))

    assert key("openai-community/gpt2") is not None
    assert key("mine.py:model") is None
    assert key("openai-community/gpt2", optimizer="torch.optim.SGD") is None
    assert key("openai-community/gpt2", optimizer="mine.py:Sgd") is None
    assert key("openai-community/gpt2", trust_remote_code=True) is None


@pytest.mark.parametrize("damage", ["truncated", "empty", "another make"])
def test_a_broken_answer_is_computed_anew(tmp_path, damage):
    step = ("estimate", "openai-community/gpt2", "--seq-len", "16", "--json", "-")
    good = metapeak(*step, METAPEAK_CACHE=str(tmp_path))
    (path,) = tmp_path.glob("*.answer")
    if damage == "another make":
        from metapeak.tracer.disk_cache import DiskCache

        DiskCache(tmp_path).write(path.stem, b"{}\nnothing that is known", "whole, but not ours")
    else:
        os.truncate(path, 0 if damage == "empty" else 1000)
    again = metapeak(*step, METAPEAK_CACHE=str(tmp_path))
    assert again.returncode == 0 and again.stderr == ""
    assert comparable(again.stdout) == comparable(good.stdout)
    assert json.loads(metapeak(*step, METAPEAK_CACHE=str(tmp_path)).stdout)["how"]["cached"] is True


def test_an_answer_that_cannot_be_kept_is_given_and_said(tmp_path):
    (tmp_path / "file").write_text("")
    done = metapeak(*STEP, "--json", "-", METAPEAK_CACHE=str(tmp_path / "file"))
    assert done.returncode == 0 and json.loads(done.stdout)["fit"]["verdict"] == "fits"
    assert "could not be kept" in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_cache_is_shown_bounded_and_cleared(folder, tmp_path):
    for path in folder.glob("*.answer"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    here = {"METAPEAK_CACHE": str(tmp_path)}
    shown = metapeak("cache", **here)
    assert shown.returncode == 0 and "openai-community/gpt2 seq_len=32 gpu=t4" in shown.stdout
    record = json.loads(metapeak("cache", "--json", "-", **here).stdout)
    assert record["answers"] == len(record["entries"]) > 0 and record["folder"] == str(tmp_path)
    assert metapeak("cache", "--max-size", "1MiB", **here).returncode == 0
    assert json.loads(metapeak("cache", "--json", "-", **here).stdout)["max_bytes"] == 1 << 20
    assert metapeak("cache", "--clear", **here).returncode == 0
    assert json.loads(metapeak("cache", "--json", "-", **here).stdout)["answers"] == 0
    assert metapeak("cache", METAPEAK_CACHE="off").returncode == base.BAD_INPUT


def test_looking_at_the_cache_needs_no_torch(folder):
    assert without_torch("cache", METAPEAK_CACHE=str(folder)).returncode == 0
    assert in_a_process("cache", METAPEAK_CACHE=str(folder)).returncode == 0
