"""Snapshots that are damaged, malicious or no snapshots get one clear message, and nothing in them runs."""

import gzip
import lzma
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metapeak.tracer.device.plain_pickle import read_plain_pickle
from metapeak.tracer.device.snapshot_reader import read_snapshot, snapshot_of
from metapeak.tracer.errors import InputError, UnknownName

FOLDER = Path(__file__).parent / "snapshots"
EMPTY = {"segments": [], "device_traces": [[]]}


class Evil:
    """Writes a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def refused(path):
    with pytest.raises(InputError) as caught:
        read_snapshot(path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and str(path) in message
    return message


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_runs_nothing(tmp_path, protocol):
    target = tmp_path / "owned"
    for number, evil in enumerate([Evil(target), {**EMPTY, "segments": [Evil(target)]}, [[[[Evil(target)]]]]]):
        path = tmp_path / f"{number}.pickle"
        path.write_bytes(pickle.dumps(evil, protocol=protocol))
        assert "refused" in refused(path)
    assert not target.exists()


def test_the_same_file_would_run_with_a_bare_pickle(tmp_path):
    """So the test above can fail."""
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    subprocess.run([sys.executable, "-c", f"import pickle; pickle.load(open({str(path)!r}, 'rb'))"], check=True)
    assert (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "data, word",
    [
        (b"\x80\x04cposix\nsystem\n.", "GLOBAL"),
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", "STACK_GLOBAL"),
        (b"\x80\x04)\x81.", "NEWOBJ"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x04Q.", "BINPERSID"),
        (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", "BYTEARRAY8"),
        (b"\x80\x05\x97.", "NEXT_BUFFER"),
        (b"\x80\x04}r" + struct.pack("<I", 1 << 31) + b".", "LONG_BINPUT"),  # would reserve a table of 2^32 entries
        (b"\x80\x04\x8b" + struct.pack("<i", 1 << 30) + b".", "LONG4"),
        (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b".", "BINUNICODE8"),
    ],
)
def test_opcodes_beyond_plain_data_are_named(tmp_path, data, word):
    path = tmp_path / "x.pickle"
    path.write_bytes(data)
    assert word in refused(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a pickle at all",
        b"PK\x03\x04zip",
        b"\x80\x04}",
        b"\x80\x04.",
        b"\x80\x04]]s.",
        b"\x80\x04X\xff\xff\xff\x7fshort",
        b"\x80\x04h\x07.",
        b"\x80\x04\x8c\x02\xff\xfe.",
        b"\x80\xff}.",
        b"\xfd7zXZ\x00garbage",
        b"\x1f\x8bgarbage",
    ],
)
def test_damaged_files(tmp_path, data):
    path = tmp_path / "x.pickle"
    path.write_bytes(data)
    refused(path)


def test_cut_off_files(tmp_path):
    data = lzma.decompress((FOLDER / "snapshot-085.pickle.xz").read_bytes())
    for name, pack in (("x.pickle", bytes), ("x.xz", lzma.compress), ("x.gz", gzip.compress)):
        whole = pack(data)
        path = tmp_path / name
        path.write_bytes(whole)
        assert len(read_snapshot(path).recorded[0].entries) == 97
        for part in (0.1, 0.5, 0.99):
            path.write_bytes(whole[: int(part * len(whole))])
            refused(path)
    refused(tmp_path / "missing.pickle")
    refused(tmp_path)


def test_a_bomb_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("metapeak.tracer.device.plain_pickle.MAX_BYTES", 1 << 20)
    for name, pack in (("x.xz", lzma.compress), ("x.gz", gzip.compress)):
        path = tmp_path / name
        path.write_bytes(pack(bytes(20 << 20)))
        assert "unpacked" in refused(path)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(data=st.data())
def test_flipped_bytes_never_escape(data, tmp_path_factory):
    """Whatever one or two wrong bytes make of a snapshot: it is read, or refused with an InputError."""
    whole = bytearray(lzma.decompress((FOLDER / "snapshot-085.pickle.xz").read_bytes()))
    for _ in range(data.draw(st.integers(1, 2))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.pickle"
    path.write_bytes(bytes(whole))
    try:
        read_snapshot(path)
    except InputError as error:
        assert len(str(error).splitlines()) == 1


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4) | st.tuples(inner, inner)
    ),
    max_leaves=30,
)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(value=plain, protocol=st.integers(2, 5))
def test_plain_data_is_read_as_it_is(value, protocol, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "plain.pickle"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    assert read_plain_pickle(path) == value


SEGMENT = {
    "device": 0,
    "address": 1 << 30,
    "total_size": 2 << 20,
    "stream": 0,
    "segment_type": "small",
    "blocks": [{"address": 1 << 30, "size": 2 << 20, "requested_size": 0, "state": "inactive"}],
}
ENTRY = {"action": "alloc", "addr": 1 << 30, "size": 100, "stream": 0}


@pytest.mark.parametrize(
    "raw, words",
    [
        ([1, 2], ["list", "_dump_snapshot"]),
        ({}, ["nothing"]),
        ({"state_dict": 1, "epoch": 2}, ["state_dict", "segments"]),
        ({**EMPTY, "segments": 3}, ["segments", "3", "list"]),
        ({**EMPTY, "segments": [4]}, ["segments[0]", "dict"]),
        ({**EMPTY, "device_traces": [4]}, ["device_traces[0]", "list"]),
        ({**EMPTY, "device_traces": [[4]]}, ["device_traces[0][0]", "dict"]),
        ({**EMPTY, "segments": [{**SEGMENT, "device": 3}]}, ["device 3", "1 devices"]),
        ({**EMPTY, "segments": [{**SEGMENT, "address": -5}]}, ["segments[0].address", "-5"]),
        ({**EMPTY, "segments": [{**SEGMENT, "address": True}]}, ["segments[0].address", "True"]),
        ({**EMPTY, "segments": [{**SEGMENT, "address": 1 << 63}]}, ["segments[0].address"]),
        ({**EMPTY, "segments": [{**SEGMENT, "total_size": 4 << 20}]}, ["total_size", "2097152"]),
        ({**EMPTY, "segments": [{**SEGMENT, "segment_type": "medium"}]}, ["medium", "large or small"]),
        ({**EMPTY, "segments": [SEGMENT, SEGMENT]}, ["outside the segment before"]),
        ({**EMPTY, "segments": [{**SEGMENT, "blocks": []}]}, ["total_size"]),
        ({**EMPTY, "segments": [{**SEGMENT, "blocks": [{"state": "busy", "size": 2 << 20}]}]}, ["busy", "inactive"]),
        ({**EMPTY, "device_traces": [[{**ENTRY, "action": "explode"}]]}, ["action", "explode", "alloc"]),
        ({**EMPTY, "device_traces": [[{**ENTRY, "action": ["alloc"]}]]}, ["action", "list"]),
        ({**EMPTY, "device_traces": [[{**ENTRY, "size": "big"}]]}, ["size", "big"]),
        ({**EMPTY, "allocator_settings": 3}, ["allocator_settings", "int"]),
    ],
)
def test_what_is_no_snapshot_is_told_where(raw, words):
    with pytest.raises(InputError) as caught:
        snapshot_of(raw, "x.pickle")
    for word in ["x.pickle", *words]:
        assert word in str(caught.value)


def test_unknown_settings_are_refused():
    with pytest.raises(UnknownName, match="expandable_segments"):
        snapshot_of({**EMPTY, "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segment:True"}})


def test_older_files_lack_what_came_later():
    """No settings, no pool ids, no addresses of blocks, no streams; entries that move no memory are passed over."""
    segment = {key: value for key, value in SEGMENT.items() if key != "stream"}
    segment["blocks"] = [{"size": 512, "state": "active_allocated"}, {"size": (2 << 20) - 512, "state": "inactive"}]
    trace = [
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0},
        ENTRY,
        {"action": "oom", "size": 5, "stream": 0},
    ]
    snapshot = snapshot_of({"segments": [segment], "device_traces": [trace, []]})
    assert not snapshot.settings_recorded
    (history,) = snapshot.recorded
    assert [entry.action for entry in history.entries] == [0, 7]
    assert [block.address - (1 << 30) for block in history.segments[0].blocks] == [0, 512]


def test_a_list_that_repeats_itself_does_not_take_forever():
    blocks = [{"size": 512, "state": "inactive"}] * 4096
    segments = [{**SEGMENT, "blocks": blocks, "address": number << 21} for number in range(10000)]
    with pytest.raises(InputError, match="more than"):
        snapshot_of({"segments": segments, "device_traces": [[]]})
