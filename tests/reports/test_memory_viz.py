"""The snapshot file: torch's own functions take it, our reader reads it, and its history replays to the byte."""

import dataclasses
import pickle
import pickletools

import pytest
import torch.cuda._memory_viz as viz

from metapeak.reports.memory_viz import PHASE, render_snapshot, snapshot_of_simulation
from metapeak.tracer.device.allocator_config import config_of_snapshot, parse_allocator_config
from metapeak.tracer.device.recording import recording_of
from metapeak.tracer.device.replay import replay
from metapeak.tracer.device.snapshot_reader import read_snapshot
from tests.reports.conftest import trace_llama

TORCH_FUNCTIONS = {
    "segsum": viz.segsum,
    "trace": viz.trace,
    "trace_plot": viz.trace_plot,
    "trace_plot of segments": lambda snapshot: viz.trace_plot(snapshot, plot_segments=True),
    "trace_plot filtered": lambda snapshot: viz.trace_plot(snapshot, filter_freed=True),
    "segment_plot": viz.segment_plot,
    "segments": lambda snapshot: viz.segments(snapshot, format_flamegraph=str),
    "memory": lambda snapshot: viz.memory(snapshot, format_flamegraph=str),
    "compare": lambda snapshot: viz.compare(snapshot["segments"], snapshot["segments"], format_flamegraph=str) or "-",
}


@pytest.fixture(scope="module")
def written(two_ranks, tmp_path_factory):
    path = tmp_path_factory.mktemp("snapshot") / "step.pickle"
    path.write_bytes(render_snapshot(two_ranks))
    return path


@pytest.mark.parametrize("name", TORCH_FUNCTIONS)
def test_torch_s_own_functions_take_it(written, name):
    with open(written, "rb") as stream:
        snapshot = pickle.load(stream)
    assert TORCH_FUNCTIONS[name](snapshot)


def test_torch_counts_what_we_count(traced):
    rank = traced.worst
    text = viz.segsum(snapshot_of_simulation(traced))
    assert f"total_reserved: {viz.Bytes(rank.reservation.reserved_end)}" in text


def test_the_file_is_plain_data_that_the_viewer_reads(written):
    data = written.read_bytes()
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert not opcodes & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ", "BINBYTES", "SHORT_BINBYTES"}
    assert data[:2] == b"\x80\x04"
    kinds = set()

    def walk(value):
        kinds.add(type(value))
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
            walk(item)

    walk(pickle.loads(data))
    assert kinds <= {dict, list, tuple, str, int, float, bool}


def test_our_reader_reads_it_and_every_rank_replays_exactly(written, two_ranks):
    snapshot = read_snapshot(written)
    assert [history.device for history in snapshot.recorded] == [0, 1]
    for history, rank in zip(snapshot.recorded, two_ranks.ranks):
        result = replay(history, snapshot.config)
        assert result.exact and result.starts_empty
        assert result.requests == int((rank.liveness.nbytes > 0).sum())
        assert result.peak_reserved_recorded == rank.reserved_bytes
        assert result.peak_allocated_replayed == rank.allocated_bytes
        recording = recording_of(snapshot, history.device)
        assert recording.num_before == 0
        assert recording.live_bytes().max() == rank.requested_bytes


@pytest.mark.parametrize("text", ["", "expandable_segments:True", "max_split_size_mb:32,roundup_power2_divisions:4"])
def test_settings_are_written_as_torch_writes_them(tmp_path, text):
    simulation = trace_llama(tmp_path, 1)
    (rank,) = simulation.ranks
    rank = dataclasses.replace(rank, allocator=parse_allocator_config(text))
    raw = snapshot_of_simulation(dataclasses.replace(simulation, ranks=(rank,)))
    assert config_of_snapshot(raw["allocator_settings"]) == rank.allocator
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(raw, protocol=4))
    snapshot = read_snapshot(path)
    assert replay(snapshot.recorded[0], snapshot.config).exact
    assert any(segment["is_expandable"] for segment in raw["segments"]) is ("expandable" in text)


@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
def test_the_viewer_can_walk_back_from_the_final_table(traced, text):
    """MemoryViz.js undoes the events from the last to the first: whatever it takes away has to be there."""
    rank = dataclasses.replace(traced.worst, allocator=parse_allocator_config(text))
    raw = snapshot_of_simulation(dataclasses.replace(traced, ranks=(rank,)))
    mapped = {(segment["address"], segment["address"] + segment["total_size"]) for segment in raw["segments"]}
    blocks = {
        block["address"]: block["requested_size"]
        for segment in raw["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    for entry in reversed(raw["device_traces"][0]):
        address, size = entry["addr"], entry["size"]
        if entry["action"] == "alloc":
            assert blocks.pop(address) == size
        elif entry["action"] == "free_completed":
            assert address not in blocks
            assert any(start <= address and address + size <= end for start, end in mapped)
            blocks[address] = size
        elif entry["action"] == "free_requested":
            assert blocks[address] == size
        elif entry["action"] in ("segment_alloc", "segment_map"):
            (holder,) = [run for run in mapped if run[0] <= address and address + size <= run[1]]
            assert text or holder == (address, address + size)
            mapped.remove(holder)
            mapped |= {run for run in ((holder[0], address), (address + size, holder[1])) if run[0] < run[1]}
        else:
            mapped.add((address, address + size))
    assert not blocks and not mapped


def test_blocks_at_the_end_and_allocations_have_module_frames(traced):
    raw = snapshot_of_simulation(traced)
    allocations = [entry for entry in raw["device_traces"][0] if entry["action"] == "alloc"]
    mlp = [entry for entry in allocations if any(f["name"] == "model.layers.3.mlp" for f in entry["frames"])]
    assert mlp
    for entry in allocations:
        assert all(set(frame) == {"name", "filename", "line"} for frame in entry["frames"])
        assert entry["frames"][-1]["filename"] == PHASE
    names = [frame["name"] for frame in mlp[0]["frames"]]
    assert names[-4:] == ["model.layers.3", "model.layers", "model", "load"]
    assert any(frame["filename"].endswith("modeling_llama.py") for entry in mlp for frame in entry["frames"])
    blocks = [block for segment in raw["segments"] for block in segment["blocks"]]
    active = sum(block["requested_size"] for block in blocks if block["state"] == "active_allocated")
    liveness = traced.worst.liveness
    assert active == int(liveness.nbytes[liveness.death > liveness.num_ops].sum())
    assert all(bool(block["frames"]) == (block["state"] == "active_allocated") for block in blocks)
