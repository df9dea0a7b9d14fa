"""The other side of the comparison: a real training step on the CPU, its storages watched by weak references.

Deliberately shares no code with metapeak: a plain dispatch mode that lets every operator run, looks at the storages of
the results, and counts what is alive.
"""

import gc
import weakref
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class CpuRun:
    """Live bytes after each operator as (phase, operator, bytes), and bytes at the end of each phase."""

    timeline: list = field(default_factory=list)
    ends: dict = field(default_factory=dict)

    def peak(self, phase):
        return max(live for name, _, live in self.timeline if name == phase)


class _Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.alive = {}
        self.run = CpuRun()
        self.phase = (0, "load")

    def add(self, tensor):
        storage = tensor.untyped_storage()
        key = id(storage)  # not used again while the storage is alive, and forgotten when it dies
        if key not in self.alive:
            self.alive[key] = (weakref.ref(storage, lambda _: self.alive.pop(key, None)), storage.nbytes())

    def stays_on_host(self, tensor):
        """AdamW's scalars (`step` and the 1 that is added to it) stay on the host also when the model is on a GPU."""
        return self.phase[1] == "optimizer" and tensor.dim() == 0

    def live(self):
        return sum(nbytes for _, nbytes in self.alive.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not self.stays_on_host(leaf):
                self.add(leaf)
        self.run.timeline.append((self.phase, str(func), self.live()))
        return result


def run_on_cpu(model, batch, make_optimizer, iterations=2, also=()):
    """A CpuRun of `iterations` steps of a real model on the CPU; `also` are tensors that were there before.

    Numbers that stay on the host when the model is on a GPU are not counted, see `stays_on_host`.
    """
    watch = _Watch()
    for tensor in [*model.parameters(), *model.buffers(), *batch.values(), *also]:
        watch.add(tensor)
    optimizer = make_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    for tensor in tree_leaves([list(state.values()) for state in optimizer.state.values()]):
        if isinstance(tensor, torch.Tensor) and tensor.dim():  # Adagrad's exist before the first step
            watch.add(tensor)
    collected = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with watch, torch.autograd.set_multithreading_enabled(False):
            for iteration in range(1, iterations + 1):
                watch.phase = (iteration, "forward")
                loss = model(**batch).loss
                watch.run.ends[watch.phase] = watch.live()
                watch.phase = (iteration, "backward")
                loss.backward()
                loss = loss.detach()  # as the Hugging Face Trainer
                watch.run.ends[watch.phase] = watch.live()
                watch.phase = (iteration, "optimizer")
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                watch.run.ends[watch.phase] = watch.live()
    finally:
        if collected:
            gc.enable()
    return watch.run


class _WatchWithoutNumbers(_Watch):
    def stays_on_host(self, tensor):
        return tensor.dim() == 0


def run_script_on_cpu(tensors, script):
    """(phase, its peak, bytes at its end) in order, of a real script on the CPU; single numbers are not counted.

    `script(begin)` says `begin("forward")` and so on where a phase begins. `tensors` are there before it.
    """
    watch, phases = _WatchWithoutNumbers(), []
    for tensor in tensors:
        watch.add(tensor)

    def end():
        if phases:
            since = [live for _, _, live in watch.run.timeline[phases[-1][1] :]]
            phases[-1] = (phases[-1][0], max(since, default=watch.live()), watch.live())

    def begin(name):
        end()
        phases.append((name, len(watch.run.timeline)))

    collected = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with watch, torch.autograd.set_multithreading_enabled(False):
            kept = script(begin)
            end()
            del kept
    finally:
        if collected:
            gc.enable()
    return phases
