"""The cache on disk under everything that happens to files: many writers, killed ones, cut files, full disks."""

import json
import multiprocessing
import os
import resource
import signal
import time

import pytest

from metapeak.tracer.disk_cache import DEFAULT_MAX_BYTES, CacheProblem, DiskCache, cache_folder

PROCESSES = 64
FORK = multiprocessing.get_context("fork")


def body_of(key):
    """What the tests keep under a key: every reader can tell whether it got it whole."""
    return (key * 997).encode() * 20


def files(cache):
    return sorted(path.name for path in cache.folder.iterdir())


def test_what_is_written_is_read(tmp_path):
    cache = DiskCache(tmp_path / "new" / "folder")
    assert cache.read("a") is None and cache.entries() == []
    cache.write("a", body_of("a"), "first")
    cache.write("a", body_of("a") + b"!", "second")
    assert cache.read("a") == body_of("a") + b"!"
    (entry,) = cache.entries()
    assert (entry.key, entry.title) == ("a", "second") and entry.nbytes > len(body_of("a"))
    assert cache.clear()[0] == 1 and cache.read("a") is None


def hammer(folder, seed, failures):
    cache = DiskCache(folder)
    for turn in range(12):
        key = f"key-{(seed * 7 + turn * 5) % 9}"
        found = cache.read(key)
        if found is not None and found != body_of(key):
            failures.put(f"{key}: {len(found)} bytes that nobody wrote")
        cache.write(key, body_of(key), key)
        if turn == 6 and seed % 16 == 0:
            cache.clear()


def test_64_processes_read_write_and_clear_at_once(tmp_path):
    failures = FORK.SimpleQueue()
    workers = [FORK.Process(target=hammer, args=(tmp_path, seed, failures)) for seed in range(PROCESSES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * PROCESSES
    assert failures.empty(), failures.get()
    cache = DiskCache(tmp_path)
    kept = cache.entries()
    assert kept, "the last writers' answers are there"
    assert all(cache.read(entry.key) == body_of(entry.key) for entry in kept)
    assert not [name for name in files(cache) if name.startswith(".partial")]


def write_and_die(folder):
    os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
    DiskCache(folder).write("a", body_of("b"), "never finished")


def test_a_killed_writer_changes_nothing_and_is_swept(tmp_path):
    cache = DiskCache(tmp_path)
    cache.write("a", body_of("a"), "whole")
    worker = FORK.Process(target=write_and_die, args=(tmp_path,))
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    assert cache.read("a") == body_of("a")
    (left,) = [path for path in tmp_path.iterdir() if path.name.startswith(".partial")]
    cache.write("b", body_of("b"), "another")
    assert left.exists(), "a young one may belong to a writer that is at work"
    long_ago = time.time() - 7200
    os.utime(left, (long_ago, long_ago))
    cache.write("b", body_of("b"), "another")
    assert not left.exists() and len(cache.entries()) == 2


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
def test_a_truncated_file_is_absent_and_can_be_written_again(tmp_path, share):
    cache = DiskCache(tmp_path)
    cache.write("a", body_of("a"), "whole")
    (path,) = tmp_path.iterdir()
    os.truncate(path, int(path.stat().st_size * share))
    assert cache.read("a") is None
    assert len(cache.entries()) == 1  # it is shown, and clear takes it
    cache.write("a", body_of("a"), "again")
    assert cache.read("a") == body_of("a")


@pytest.mark.parametrize("position", [3, 60, 400, -1])
def test_a_changed_byte_is_noticed(tmp_path, position):
    cache = DiskCache(tmp_path)
    cache.write("a", body_of("a"), "whole")
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    assert cache.read("a") is None


def test_a_file_under_another_name_is_not_an_answer_to_it(tmp_path):
    cache = DiskCache(tmp_path)
    cache.write("a", body_of("a"), "whole")
    (path,) = tmp_path.iterdir()
    path.rename(path.with_name(path.name.replace("a.", "b.", 1)))
    assert cache.read("b") is None


def fill(folder, outcome):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        DiskCache(folder).write("big", b"x" * 100_000, "too big for the disk")
        outcome.put("no error")
    except CacheProblem as problem:
        outcome.put(str(problem))


def test_a_full_disk_is_said_and_loses_nothing(tmp_path):
    cache = DiskCache(tmp_path)
    cache.write("a", body_of("a"), "whole")
    outcome = FORK.SimpleQueue()
    worker = FORK.Process(target=fill, args=(tmp_path, outcome))
    worker.start()
    worker.join()
    message = outcome.get()
    assert "could not be kept" in message and "METAPEAK_CACHE" in message
    assert cache.read("a") == body_of("a") and cache.read("big") is None
    assert len(files(cache)) == 1


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("no folder")
    cache = DiskCache(tmp_path / "file")
    assert cache.read("a") is None and cache.entries() == []
    with pytest.raises(CacheProblem, match="could not be kept"):
        cache.write("a", b"", "")


def test_the_bound_removes_what_was_not_used_for_longest(tmp_path):
    cache = DiskCache(tmp_path)
    assert cache.max_bytes == DEFAULT_MAX_BYTES
    for position, key in enumerate("abcd"):
        cache.write(key, b"x" * 1000, key)
        os.utime(tmp_path / f"{key}.answer", (position, position))
    assert cache.read("a") is not None  # used now
    assert cache.bound(2500) == 2
    assert {entry.key for entry in cache.entries()} == {"a", "d"}
    cache.write("e", b"x" * 5000, "larger than the bound")
    assert [entry.key for entry in cache.entries()] == ["e"]
    (tmp_path / "settings.json").write_text(json.dumps({"max_bytes": "many"}))
    assert cache.max_bytes == DEFAULT_MAX_BYTES


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("METAPEAK_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("METAPEAK_CACHE", "off")
    assert cache_folder() is None
    monkeypatch.delenv("METAPEAK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == tmp_path / "user" / "metapeak"
