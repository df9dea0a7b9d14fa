"""A recording beside a prediction: the same step, a larger batch, more steps, frames of a real process."""

import copy
import lzma
import pickle
from pathlib import Path

import pytest

from metapeak.reports.memory_viz import snapshot_of_simulation
from metapeak.tracer.device.comparison import compare
from metapeak.tracer.device.recording import recording_of
from metapeak.tracer.device.snapshot_reader import snapshot_of
from metapeak.tracer.liveness import Category
from tests.reports.conftest import trace_llama


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    return trace_llama(tmp_path_factory.mktemp("model"), 4)


@pytest.fixture(scope="module")
def doubled(tmp_path_factory):
    return trace_llama(tmp_path_factory.mktemp("model"), 4, batch_size=4)


def recorded(raw):
    return recording_of(snapshot_of(raw))


def as_a_gpu_process_records(raw):
    """The frames of a CUDA process: absolute paths, native frames, none on autograd's thread, torch's optimizer."""
    raw = copy.deepcopy(raw)
    for entry in raw["device_traces"][0]:
        if entry["action"] != "alloc":
            continue
        phase = entry["frames"][-1]["name"]
        source = [f for f in entry["frames"] if f["filename"].endswith(".py")]
        native = {"name": "c10::cuda::malloc(unsigned long)", "filename": "??", "line": 0}
        frames = [native]
        if phase.startswith("optimizer"):
            frames.append(
                {"name": "_multi_tensor_adamw", "filename": "/e/site-packages/torch/optim/adamw.py", "line": 9}
            )
        elif not phase.startswith("backward"):
            frames += [{**f, "filename": "/e/site-packages/" + f["filename"]} for f in source]
        if not phase.startswith("backward"):
            frames.append({"name": "main", "filename": "/home/u/train.py", "line": 30})
        entry["frames"] = frames
    return raw


@pytest.mark.parametrize("change", [lambda raw: raw, as_a_gpu_process_records])
def test_the_same_step_matches_whole(step, change):
    rank = step.worst
    found = compare(recorded(change(snapshot_of_simulation(step))), rank.liveness)
    assert found.recorded.matched == found.recorded.count == found.predicted.count == found.predicted.matched
    assert found.recorded.matched_bytes == found.recorded.nbytes
    assert found.recorded_peak_bytes == found.predicted_peak_bytes == found.in_order_bytes == rank.requested_bytes
    assert found.missed == found.extra == () and found.by_size_bytes == 0
    assert found.recorded_peak_at == found.predicted_peak_at == rank.peak_at
    assert found.lines > 100 and found.same_line == found.lines
    assert sum(share.predicted_bytes for share in found.modules) == rank.requested_bytes


def test_equal_sizes_of_another_file_are_not_the_same(step):
    raw = as_a_gpu_process_records(snapshot_of_simulation(step))
    renamed = 0
    for entry in raw["device_traces"][0]:
        for frame in entry["frames"]:
            renamed += frame["filename"].endswith("modeling_llama.py")
            frame["filename"] = frame["filename"].replace("modeling_llama.py", "modeling_other.py")
    found = compare(recorded(raw), step.worst.liveness)
    assert found.recorded.count - found.recorded.matched > 0.8 * renamed > 100


def test_what_a_larger_batch_holds_more_is_found_by_module(step, doubled):
    found = compare(recorded(snapshot_of_simulation(doubled)), step.worst.liveness)
    assert found.recorded_peak_bytes == doubled.worst.requested_bytes
    assert found.missed_bytes - found.extra_bytes == found.recorded_peak_bytes - found.predicted_peak_bytes > 0
    assert found.in_order_bytes + found.by_size_bytes + found.extra_bytes == found.predicted_peak_bytes
    assert found.in_order_bytes + found.by_size_bytes + found.missed_bytes == found.recorded_peak_bytes
    # parameters do not depend on the batch: all of them are in both, in order
    parameters = doubled.worst.breakdown[Category.PARAMETER]
    assert found.in_order_bytes >= parameters
    assert all(group.category != "parameter" for group in found.extra)
    assert any("modeling_llama.py" in group.where for group in found.missed)
    shares = {share.module: share for share in found.modules}
    assert "model.layers.*.mlp.up_proj" in shares
    assert sum(share.only_predicted_bytes for share in found.modules) == found.extra_bytes


def test_one_tensor_that_was_not_predicted_is_missed_where_it_was_made(step):
    """A tensor of 5 MB that lives as long as the program, made in the first forward after a layer's mlp."""
    raw = snapshot_of_simulation(step)
    trace = raw["device_traces"][0]
    place = next(
        number for number, entry in enumerate(trace)
        if entry["action"] == "alloc" and {"model.layers.2.mlp", "forward 1"} <= {f["name"] for f in entry["frames"]}
    )  # fmt: skip
    frames = [{"name": "cache", "filename": "/home/u/cache.py", "line": 12}]
    trace.insert(place + 1, {**trace[place], "addr": 1 << 50, "size": 5_000_000, "frames": frames})
    found = compare(recorded(raw), step.worst.liveness)
    (missed,) = found.missed
    assert (missed.nbytes, missed.count, missed.where) == (5_000_000, 1, "/home/u/cache.py:12 cache")
    assert missed.module.startswith("model.layers.*.mlp")
    assert found.extra == () and found.recorded.matched == found.recorded.count - 1


def test_a_recording_of_more_steps_matches_the_steady_one_again(step):
    """Steps 3 to 5 repeat the second one."""
    raw = snapshot_of_simulation(step)
    trace = raw["device_traces"][0]
    liveness = step.worst.liveness
    second = [e for e in trace if liveness.op_iteration[min(e["time_us"], liveness.num_ops - 1)] == 2]
    # what the second iteration frees of the first has to be there again: repeat only what is made and freed within it
    made = {}
    whole = set()
    for number, entry in enumerate(second):
        if entry["action"] == "alloc":
            made[entry["addr"]] = number
        elif entry["action"] == "free_completed" and entry["addr"] in made:
            whole.update((made.pop(entry["addr"]), number))
    again = [entry for number, entry in enumerate(second) if number in whole]
    raw["device_traces"][0] = trace + again * 3
    found = compare(recorded(raw), liveness)
    assert found.repeats >= 2
    assert found.recorded.matched == found.recorded.count
    assert found.predicted.count == int((liveness.nbytes > 0).sum())


def test_a_recording_that_starts_late_is_matched_by_size_where_it_has_no_events(step):
    raw = snapshot_of_simulation(step)
    trace = raw["device_traces"][0]
    liveness = step.worst.liveness
    start = int((liveness.op_iteration < 2).sum())
    raw["device_traces"][0] = [entry for entry in trace if entry["time_us"] >= start]
    found = compare(recorded(raw), liveness)
    assert found.before_bytes > 0
    assert found.recorded.matched == found.recorded.count
    assert found.missed == found.extra == ()
    assert found.by_size_bytes > 0 and found.recorded_peak_bytes == found.predicted_peak_bytes


SNAPSHOT = Path(__file__).parent / "snapshots" / "snapshot-085.pickle.xz"


def test_another_program_s_recording_mostly_does_not_match(step):
    """Recorded on a real GPU, of a program that is not ours (see snapshots/README.md)."""
    found = compare(recorded(pickle.loads(lzma.decompress(SNAPSHOT.read_bytes()))), step.worst.liveness)
    assert not found.has_frames and found.lines == 0
    assert found.recorded.matched_bytes < 0.1 * found.recorded.nbytes
    assert found.missed_bytes > 0.9 * found.recorded_peak_bytes
