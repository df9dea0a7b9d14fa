"""Recording a step without keeping what autograd saves alive.

With saved-tensor hooks a saved tensor is replaced by a note of what it was. So a storage dies when Python lets go of
it, which is when it would die inside a checkpointed region; and backward, which needs no values, reads a ghost of the
same shape. From the notes both steps can be put together: the plain one (a storage lives until its last save is
released) and that of any set of checkpointed regions.
"""

from __future__ import annotations

import weakref

import torch

from metapeak.tracer.phantom import PhantomTensor

_META = torch.device("meta")


class _Note:
    """Stands in for a saved tensor; its end is the release of the save."""

    __slots__ = ("dtype", "known", "log", "offset", "row", "save", "shape", "storage_bytes", "stride", "value")

    def __del__(self):
        self.log.release(self.save)


class SaveLog:
    """The hooks, and the rows that they write. `recorder` gives ticks, rows of storages, the number of operations."""

    def __init__(self, recorder):
        self._recorder = recorder
        self.columns = recorder.graph.saved
        self._open = True

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor):
        """A note for a phantom tensor that a recorded operator made or that was loaded; anything else is kept."""
        if type(tensor) is not PhantomTensor:
            return tensor
        recorder, columns = self._recorder, self.columns
        value = recorder.value_of(tensor)
        storage = tensor.untyped_storage()
        note = _Note()
        note.log, note.save, note.value, note.row = self, len(columns.value), value, storage.row
        note.shape, note.stride, note.offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        note.dtype, note.storage_bytes, note.known = tensor.dtype, storage.nbytes(), tensor.known
        columns.value.append(value)
        columns.packed.append(recorder.graph.num_ops)
        columns.packed_tick.append(recorder.tick())
        columns.unpacked.append(-1)
        columns.unpacked_tick.append(-1)
        columns.released.append(-1)
        columns.released_tick.append(-1)
        return note

    def unpack(self, note):
        """A ghost of the saved tensor: same shape, strides and known values, its own storage, which counts nothing."""
        if type(note) is not _Note:
            return note
        recorder, columns = self._recorder, self.columns
        if columns.unpacked[note.save] < 0:
            columns.unpacked[note.save] = recorder.graph.num_ops
            columns.unpacked_tick[note.save] = recorder.tick()
        with torch._C._DisableTorchDispatch():
            whole = torch.empty((note.storage_bytes // note.dtype.itemsize,), dtype=note.dtype, device=_META)
            ghost = PhantomTensor(whole.as_strided(note.shape, note.stride, note.offset), known=note.known)
        storage = ghost.untyped_storage()
        storage.row = note.row
        ghost.produced = note.value
        entry = [note.save, -1, -1]
        columns.ghosts.append(entry)
        weakref.finalize(storage, self._ghost_died, entry).atexit = False
        return ghost

    def release(self, save: int) -> None:
        if self._open:
            self.columns.released[save] = self._recorder.graph.num_ops
            self.columns.released_tick[save] = self._recorder.tick()

    def _ghost_died(self, entry: list[int]) -> None:
        if self._open:
            entry[1:] = self._recorder.graph.num_ops, self._recorder.tick()

    def close(self) -> None:
        """Saves and ghosts that are there now outlive the step."""
        self._open = False
        end = self._recorder.graph.num_ops + 1
        tick = self._recorder.tick()
        for column, ticks in ((self.columns.released, self.columns.released_tick),):
            for row, when in enumerate(column):
                if when < 0:
                    column[row], ticks[row] = end, tick
        for entry in self.columns.ghosts:
            if entry[1] < 0:
                entry[1:] = end, tick
