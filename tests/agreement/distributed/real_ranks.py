"""Real ranks: processes with gloo between them that train a case and say what was alive when.

Shares no code with metapeak.
"""

import contextlib
import gc
import os
import socket
import tempfile
import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.agreement.distributed.cases import CASES, SAVES
from tests.agreement.distributed.pipelines import PIPELINES
from tests.agreement.distributed.real_pipeline import train_pipeline
from tests.agreement.distributed.real_saves import evaluate, save
from tests.agreement.distributed.real_techniques import DISTRIBUTE, PART_OF, RUNNING


@dataclass
class RankRun:
    """(phase, operator, live bytes) after each operator, and live bytes at the end of each phase.

    A phase ends where the first operator of the next one begins: what is freed before that counts as freed. (FSDP1
    with `use_orig_params` keeps a unit's sharded gradient through `zero_grad(set_to_none=True)`, because
    `flat_param.grad` holds it, and lets go of it when the next forward begins.)
    """

    timeline: list = field(default_factory=list)
    ends: dict = field(default_factory=dict)

    def peak(self, phase):
        return max(live for name, _, live in self.timeline if name == phase)


def check_phases(phases, run: RankRun, rank: int) -> None:
    """Assert that predicted phases, by (iteration, name), have the ends and the peaks that a rank saw."""
    assert {key: phase.end_bytes for key, phase in phases.items()} == run.ends, f"rank {rank}"
    peaks = {key: run.peak(key) for key in phases}
    assert {key: phase.peak_bytes for key, phase in phases.items()} == peaks, f"rank {rank}"


class Ranks:
    """`world_size` processes that wait for cases; start them once, they cost seconds."""

    def __init__(self, world_size: int):
        self._world_size = world_size
        self._start()

    def _start(self) -> None:
        world_size = self._world_size
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        self._meeting = tempfile.mkdtemp()
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, os.path.join(self._meeting, "store"), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, name: str) -> list[RankRun]:
        """What each rank saw. Raises RuntimeError with the traceback of a rank that failed; the next case then gets new
        processes, because answers of this one may still come.
        """
        try:
            return self._answers(name)
        except BaseException:
            self.close()
            self._start()
            raise

    def _answers(self, name: str) -> list[RankRun]:
        for pipe in self._pipes:
            pipe.send(name)
        results = []
        for pipe in self._pipes:
            if not pipe.poll(120):
                raise RuntimeError(f"a rank has not answered for two minutes: {name}")
            results.append(pipe.recv())
        for result in results:
            if isinstance(result, str):
                raise RuntimeError(result)
        return results

    def close(self):
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        with contextlib.suppress(OSError):
            os.remove(os.path.join(self._meeting, "store"))
            os.rmdir(self._meeting)


def _serve(rank, world_size, meeting, pipe):
    import traceback

    torch.set_num_threads(1)
    distributed_c10d.ProcessGroupGloo = OneThread
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    while (name := pipe.recv()) is not None:
        try:
            if name in PIPELINES:
                pipe.send(train_pipeline(PIPELINES[name], _Watch(), _optimizer))
            else:
                pipe.send(train((CASES | SAVES)[name]))
        except Exception:
            pipe.send(traceback.format_exc())
    dist.destroy_process_group()
    os._exit(0)  # what a full interpreter tears down costs seconds


class OneThread(dist.ProcessGroupGloo):
    """Gloo over the loopback interface with a single thread.

    The thread lets go of a collective's tensors a little after the caller goes on; with NCCL no thread holds any. If
    there is but one thread, another collective that comes back tells that it has. (Not a barrier: it keeps weak
    pointers to the collectives before it, and with them, as c10's intrusive pointers are, their tensors.)
    """

    def __init__(self, store, rank, size, timeout):
        options = self._Options()
        options._timeout, options._threads = timeout, 1
        options._devices = [self.create_device(interface=_loopback())]
        super().__init__(store, rank, size, options)


def _loopback() -> str:
    """The name of the loopback interface: lo on Linux, lo0 on macOS."""
    return next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))


class _Watch(TorchDispatchMode):
    """Lets every operator run and counts the storages of plain tensors on the CPU that are alive."""

    def __init__(self):
        super().__init__()
        self.alive = {}
        self.run = RankRun()
        self.phase = (0, "load")
        self._ended = None
        self.on_host = set()  # storages that would lie on the host while a GPU trains
        self.groups = None  # those whose ranks do the same collectives; None: all

    def begin(self, phase):
        """`phase` None ends the run."""
        if self.phase[1] != "load" and self._ended is None:  # else no operator ran in this phase
            self._ended = self.phase
        self.phase = phase
        if phase is None:
            self._end()

    def _end(self):
        """The first operator after a phase is about to run."""
        if self._ended is not None:
            self.run.ends[self._ended] = self.live()
            self._ended = None

    def add(self, tensor):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
            return  # a wrapper (DTensor, AsyncCollectiveTensor) has no memory of its own
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self.alive and key not in self.on_host:
            self.alive[key] = [weakref.ref(storage, lambda _: self.alive.pop(key, None)), storage.nbytes()]

    def copy_on_host(self, tensor):
        """A copy whose bytes are the host's."""
        with _disable_current_modes():
            copy = tensor.detach().clone()
        self._put_on_host(copy)
        return copy

    def _put_on_host(self, tensor):
        storage = tensor.untyped_storage()
        self.on_host.add(id(storage))
        weakref.finalize(storage, self.on_host.discard, id(storage))

    def live(self):
        return sum(nbytes for _, nbytes in self.alive.values())

    def stays_on_host(self, tensor):
        """AdamW's scalars stay on the host also when the model is on a GPU."""
        return self.phase[1] == "optimizer" and tensor.dim() == 0

    def note(self, name):
        self.run.timeline.append((self.phase, name, self.live()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators come again, on the local tensors
        if func.namespace == "profiler" or any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        self._end()
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and not _is_between_two(func):
            for group in self.groups if self.groups is not None else distributed_c10d._world.pg_map:
                dist.all_reduce(torch.zeros(1), group=group)  # see OneThread
        # A view makes no storage. One of a storage that nobody saw made is gloo's own: it reduces a clone of what is
        # to be reduce-scattered and splits that when it is waited for; NCCL needs none.
        # (`to` and `contiguous` are marked as views, but copy where they have to.)
        storages = {id(storage) for storage in map(_storage, tree_leaves([args, kwargs])) if storage is not None}
        given = storages if func.is_view else set()
        if storages and storages <= self.on_host:  # what is made of tensors on the host is there, too
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and id(_storage(leaf)) not in storages:
                    self._put_on_host(leaf)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not self.stays_on_host(leaf) and id(_storage(leaf)) not in given:
                self.add(leaf)
        self.note(str(func))
        return result

    @contextlib.contextmanager
    def resizes(self):
        original = torch.UntypedStorage.resize_

        def resize(storage, size):
            if size:  # what frees is no operator: it counts as freed before the next one
                self._end()
            result = original(storage, size)
            entry = self.alive.get(id(storage))
            if entry is not None and entry[1] != storage.nbytes():
                entry[1] = storage.nbytes()
                if size:
                    self.note("storage.resize_")
            return result

        torch.UntypedStorage.resize_ = resize
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original


def _storage(value):
    return value.untyped_storage() if type(value) in (torch.Tensor, torch.nn.Parameter) else None


def _is_between_two(func):
    """A send or receive, which the other ranks know nothing of."""
    return func.name().startswith(("c10d::send", "c10d::recv"))


def train(case, iterations=2) -> RankRun:
    """Two steps of a case as this rank."""
    model = DISTRIBUTE[case.technique](case.build("cpu"), **case.options)
    data, part_of = case.batch(), PART_OF.get(case.technique, lambda data, **options: data)
    watch = _Watch()
    for tensor in [*model.parameters(), *model.buffers(), *data.values()]:
        watch.add(getattr(tensor, "_local_tensor", tensor))
    optimizer = _optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    gc.collect()
    gc.disable()
    try:
        running = RUNNING[case.technique](**case.options) if case.technique in RUNNING else contextlib.nullcontext()
        with running, watch, watch.resizes(), torch.autograd.set_multithreading_enabled(False):
            for iteration in range(1, iterations + 1):
                watch.begin((iteration, "forward"))
                loss = model(**part_of(data, **case.options)).loss
                watch.begin((iteration, "backward"))
                loss.backward()
                loss = loss.detach()
                watch.begin((iteration, "optimizer"))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if case.evaluate:
                watch.begin((iterations, "evaluation"))
                evaluate(model, data)
            if case.save is not None:
                watch.begin((iterations, "save"))
                save(model, case.save, watch.copy_on_host)
            watch.begin(None)
    finally:
        gc.enable()
    return watch.run


def _optimizer(parameters):
    """foreach AdamW; plain and DTensor parameters do not mix in one list."""
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    plain = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    return torch.optim.AdamW([{"params": group} for group in (sharded, plain) if group], foreach=True)
