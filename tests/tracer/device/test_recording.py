"""Allocations of a recording, by hand."""

import pytest

from metapeak.tracer.device.recording import Frame, innermost_frame, recording_of
from metapeak.tracer.device.snapshot_reader import snapshot_of
from metapeak.tracer.errors import InputError

MB2 = 2 << 20


def frame(filename, line=1, name="f"):
    return {"name": name, "filename": filename, "line": line}


def event(action, addr, size, **more):
    return {"action": action, "addr": addr, "size": size, "stream": 0, **more}


def block(address, size, requested, state="active_allocated"):
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": []}


def segment(blocks, device=0):
    return {"device": device, "address": blocks[0]["address"], "total_size": MB2, "stream": 0,
            "segment_type": "small", "blocks": blocks}  # fmt: skip


#  at 0: 512 B from before, freed by event 2; at 512: 512 B from before, never freed; at 1024: 600 B, event 0 to 4
#  at 0 again: 100 B from event 3 on
BY_HAND = {
    "segments": [segment([block(0, 512, 100), block(512, 512, 300), block(1024, MB2 - 1024, 600, "inactive")])],
    "device_traces": [
        [
            event(
                "alloc", 1024, 600, frames=[frame("??"), frame("/a/site-packages/torch/nn/x.py"), frame("/u/t.py", 7)]
            ),
            event("free_requested", 0, 400),
            event("free_completed", 0, 400),
            event("alloc", 0, 100),
            event("free_requested", 1024, 600),
            event("free_completed", 1024, 600),
        ],
        [],
    ],
}


def test_lifetimes_and_what_was_there_before():
    recording = recording_of(snapshot_of(BY_HAND))
    rows = list(zip(recording.nbytes.tolist(), recording.birth.tolist(), recording.death.tolist()))
    assert rows == [(400, 0, 1), (300, 0, 6), (600, 0, 4), (100, 3, 6)]
    assert recording.num_before == 2
    assert recording.live_bytes().tolist() == [1300, 900, 900, 1000, 400, 400]
    assert recording.peak_event() == 0
    assert recording.frames[2] == Frame("f", "/u/t.py", 7) and recording.in_program.tolist() == [
        False,
        False,
        True,
        False,
    ]


def test_a_device_has_to_be_chosen_among_several_and_exist():
    two = {"segments": [], "device_traces": [[event("alloc", 0, 5)], [], [event("alloc", 0, 6)]]}
    snapshot = snapshot_of(two, "two.pickle")
    with pytest.raises(InputError, match=r"devices 0, 2\. Choose one with --device"):
        recording_of(snapshot)
    with pytest.raises(InputError, match="no events of device 1, but of 0, 2"):
        recording_of(snapshot, 1)
    assert recording_of(snapshot, 2).nbytes.tolist() == [6]
    with pytest.raises(InputError, match="holds no events"):
        recording_of(snapshot_of({"segments": [], "device_traces": [[]]}))


@pytest.mark.parametrize("frames", [5, [5], [{"name": "f"}], [frame(3)], [frame("a.py", line="1")]])
def test_frames_that_are_none_are_refused(frames):
    with pytest.raises(InputError, match="no sound memory snapshot"):
        innermost_frame(frames, "x.pickle")


def test_the_program_s_own_line_is_found():
    native, torch_line, own = frame("??"), frame("/e/site-packages/torch/optim/adam.py", 3), frame("C:\\w\\train.py", 9)
    assert innermost_frame([native, torch_line, own], "x") == (Frame("f", "C:\\w\\train.py", 9), True)
    assert innermost_frame([native, torch_line], "x") == (Frame("f", torch_line["filename"], 3), False)
    assert innermost_frame([native], "x") == innermost_frame([], "x") == innermost_frame(None, "x") == (None, False)
