"""Snapshots of histories that our own allocator made, in the layout of torch.cuda.memory._snapshot()."""

from metapeak.tracer.device.blocks import ACTION_NAMES, ALLOCATED, FREE, OOM

STATES = {ALLOCATED: "active_allocated", FREE: "inactive"}


def snapshot_dict(*histories, settings=None, last=None):
    """A snapshot of (allocator, log) pairs, one a device; `last` keeps that many newest events, as a ring does."""
    traces, segments = [], []
    for device, (allocator, log) in enumerate(histories):
        kept = log if last is None else log[max(len(log) - last, 0) :]
        traces.append([_entry(*event) for event in kept])
        segments += [_segment(segment, device) for segment in allocator.segments()]
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": settings or {},
        "external_annotations": [],
    }


def _entry(action, address, size, stream):
    where = {"device_free": 0} if action == OOM else {"addr": address}
    return {"action": ACTION_NAMES[action], **where, "size": size, "stream": stream, "time_us": 0, "frames": []}


def _segment(segment, device):
    live = [block for block in segment.blocks if block.state != FREE]
    return {
        "device": device,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": sum(block.size for block in live if block.state == ALLOCATED),
        "active_size": sum(block.size for block in live),
        "requested_size": sum(block.requested for block in live),
        "stream": segment.stream,
        "segment_type": "small" if segment.small else "large",
        "segment_pool_id": (0, segment.owner),
        "is_expandable": segment.expandable,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": STATES.get(block.state, "active_pending_free"),
                "frames": [],
            }
            for block in segment.blocks
        ],
    }
