"""The phantom GPU: a device that runs a real PyTorch program and has no memory.

A `PhantomTensor` owns a storage on the meta device and says that it lives on the device `phantom:0`, which is torch's
PrivateUse1 backend under a name of ours. So the real dispatcher picks the kernels that an accelerator would get, the
real autograd engine builds and walks the real graph, and nothing is computed.

`PhantomMode` is the dispatch mode below autograd that answers every operator: it finds the shapes of the results with
torch's own meta kernels, keeps the answers (a model repeats itself layer after layer), and tells an observer what
happened. What is not a matter of shapes is answered in `phantom_ops.py`.

Note [Known values]
    Token ids, masks, positions and everything computed from them alone are small, and programs branch on them
    (`mask.all()`, `position_ids.max()`). A PhantomTensor therefore may carry the real values of such a tensor in
    `known`, a CPU tensor, as long as it stays below KNOWN_VALUES_LIMIT elements (KNOWN_INTEGERS_LIMIT where it holds
    no floating point numbers). Every operator whose tensor inputs
    are all known is computed for real as well. Known tensors of one storage share one CPU storage, so in-place
    operators and views stay right; an in-place write of unknown values makes the whole CPU storage unknown.

Only this module, dispatch.py, phantom_ops.py, attention.py, autocast.py, composites.py and recorder.py touch global
PyTorch state.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from metapeak.tracer.errors import TraceError

DEVICE_NAME = "phantom"
KNOWN_VALUES_LIMIT = 1 << 23
# Integers and booleans decide sizes: one_hot of 8,192 tokens x 8 choices x 128 experts has 2**23 elements.
KNOWN_INTEGERS_LIMIT = 1 << 24
_META = torch.device("meta")
_prim_device = torch.ops.prim.device.default


class Stream:
    """A stream of the phantom GPU: work is in order anyway, so waiting is nothing.

    What is allocated on it is noted, because the caching allocator keeps memory of its own for each.
    """

    def __init__(self, device: object = None, priority: int = 0):
        self.priority = priority

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Event:
    """An event of the phantom GPU, always completed."""

    def __init__(self, *arguments: object, **options: object):
        pass

    def record(self, stream: Stream | None = None) -> Event:
        return self

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def other_stream() -> Stream | None:
    """The stream that is allocated on now, None for the default one."""
    stream = _device_module.current_stream()
    return None if stream is _device_module.default_stream() else stream


class _DeviceModule:
    """`torch.phantom`: what generic code asks of an accelerator's module."""

    Stream, Event = Stream, Event

    def __init__(self):
        self._streams = [Stream()]

    def current_stream(self, device: object = None) -> Stream:
        return self._streams[-1]

    def default_stream(self, device: object = None) -> Stream:
        return self._streams[0]

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        self._streams.append(stream or self._streams[-1])
        try:
            yield
        finally:
            self._streams.pop()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: object) -> None:
        pass

    def synchronize(self, device: object = None) -> None:
        pass

    def is_bf16_supported(self) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass


_device_module = _DeviceModule()


class _DeviceGuard(torch._C._acc.DeviceGuard):
    """The device guard of a backend written in Python, see Note [Errors in backward]."""

    def type_(self):
        try:
            _raise_pending()
        except BaseException as error:
            _pending_errors.append(error)
        return torch._C._autograd.DeviceType.PrivateUse1


# Note [Errors in backward]
#     When Python raises inside backward (an operator that is refused, Ctrl-C), the engine unwinds with the error still
#     pending in the interpreter, and its stream guard asks the device guard for its type. A Python method cannot be
#     called successfully with an error pending, and the guard's destructor must not throw: the process would abort. So
#     `type_` first takes the pending error (any call through ctypes.pythonapi raises it) and keeps it. What backward
#     raises then is an empty SystemError; `take_pending_error` has the real one.
_raise_pending = ctypes.pythonapi.PyErr_Occurred
_raise_pending.restype = None
_raise_pending.argtypes = []
_pending_errors: list[BaseException] = []


def take_pending_error() -> BaseException | None:
    """The error that the last failed backward really died of, once; None when there is none."""
    error = _pending_errors[0] if _pending_errors else None
    _pending_errors.clear()
    return error


def _register_device() -> torch.device:
    if torch._C._get_privateuse1_backend_name() != DEVICE_NAME:
        _setup_privateuseone_for_python_backend(DEVICE_NAME, _device_module, device_guard=_DeviceGuard())
    return torch.device(DEVICE_NAME, 0)


DEVICE = _register_device()


# Operators that CUDA runs as one kernel although they have a composite definition: without a kernel of the backend's
# own, the dispatcher would decompose them above us and their temporaries would be counted. `PhantomMode` answers before
# these are reached. Source: native_functions.yaml, dispatch entries with CompositeImplicitAutograd beside CUDA; a test
# compares this list with the file that torch ships.
WHOLE_ON_CUDA = ("silu_backward", "mish_backward", "_fused_rms_norm")
# Operators that autograd sees whole and that CUDA makes of several others, each of which allocates: they are run as
# their composite kernel, so that the parts are recorded with their own lifetimes. Source: native_functions.yaml,
# CompositeExplicitAutograd; others of that kind allocate nothing but their result.
COMPOSITE_ON_CUDA = ("_safe_softmax", "binary_cross_entropy_with_logits")
_library = torch.library.Library("aten", "IMPL")


def _never_reached(*args, **kwargs):
    raise TraceError("a tensor of the phantom GPU was used outside the traced step")


for _name in WHOLE_ON_CUDA:
    _library.impl(_name, _never_reached, "PrivateUse1")


class _Kernel:
    """Whether a meta kernel is running: then phantom tensors say that they are on meta."""

    running = False


def kernel_is_running() -> bool:
    """Whether a meta kernel is running: phantom tensors are then meta tensors to everybody."""
    return _Kernel.running


def address_of(storage: torch.UntypedStorage) -> int:
    """A number that stands for where the memory of a storage on the phantom GPU begins: its own, 0 for no memory.

    Programs compare addresses to learn whether tensors share memory (FSDP1 whether a flat parameter is sharded).
    """
    return storage._cdata << _ADDRESS_SHIFT if storage.nbytes() else 0


_ADDRESS_SHIFT = 48  # more than any storage's bytes, so that no address lies inside another storage


class PhantomTensor(torch.Tensor):
    """A tensor on the phantom GPU. `known` holds its real values when they are small and derived from known ones."""

    known: torch.Tensor | None = None
    # The row of the recorder's value columns that this tensor is; None until an operator touches it.
    produced: int | None = None
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elem: torch.Tensor, requires_grad: bool = False, known: torch.Tensor | None = None):
        self = torch.Tensor._make_subclass(
            cls, elem, requires_grad, dispatch_device=True, device_for_backend_keys=DEVICE
        )
        if known is not None:
            self.known = known
        return self

    @property
    def device(self) -> torch.device:
        return _META if _Kernel.running else DEVICE

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is _prim_device:
            return _META if _Kernel.running else DEVICE
        others = [kind.__name__ for kind in types if kind.__name__ == "DTensor"]
        if others:  # torch's own words for it
            reason = "got mixed torch.Tensor and DTensor: it makes plain tensors beside sharded ones"
            raise TraceError(reason, op=str(func))
        raise TraceError("a tensor of the phantom GPU was used outside the traced step", op=str(func))

    def record_stream(self, stream: Stream) -> None:
        pass

    def data_ptr(self) -> int:
        address = address_of(self.untyped_storage())
        return address + self.storage_offset() * self.element_size() if address else 0

    def tolist(self) -> list:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False):
        return self.cpu().numpy(force=force)

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"PhantomTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


class HostCopy(torch.Tensor):
    """A copy on the host of values that nobody knows: it may go back to the device; reading it calls `refuse`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, tensor: PhantomTensor, refuse: Callable[[], None]):
        # One element stands for all, so that it takes no memory here either.
        self = torch.Tensor._make_subclass(cls, torch.zeros((), dtype=tensor.dtype).expand(tensor.shape))
        with torch._C._DisableTorchDispatch():
            like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
            self.device_stride = torch.empty_like(like).stride()  # dense tensors keep their order of dimensions
        self.refuse = refuse
        return self

    def back(self) -> PhantomTensor:
        """A new phantom tensor of the same shape and order of dimensions."""
        return PhantomTensor(torch.empty_strided(self.shape, self.device_stride, dtype=self.dtype, device=_META))

    def _refuse(self, *args, **kwargs):
        self.refuse()

    numpy = tolist = item = __bool__ = __int__ = __float__ = _refuse


def phantom_from_meta(tensor: torch.Tensor, known: torch.Tensor | None = None) -> PhantomTensor:
    """A phantom tensor on the same storage as `tensor` (a meta tensor), so tied tensors stay tied."""
    with torch._C._DisableTorchDispatch():
        return PhantomTensor(tensor.detach(), known=known)


def local_tensor(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part of a DTensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def small_enough_to_know(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (KNOWN_VALUES_LIMIT if tensor.dtype.is_floating_point else KNOWN_INTEGERS_LIMIT)


def phantom_from_cpu(tensor: torch.Tensor) -> PhantomTensor:
    """A phantom tensor with the shape, dtype and (if small enough) the values of a CPU tensor."""
    known = tensor.detach() if small_enough_to_know(tensor) else None
    return PhantomTensor(torch.empty_like(tensor, device=_META), known=known)


def run_meta_kernel(func, args, kwargs):
    """Results of `func` as plain meta tensors; views and in-place results alias the arguments' storages."""
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(True)
        _Kernel.running = True
        try:
            return func(*args, **kwargs)
        finally:
            _Kernel.running = False


def wrap_meta(tensor):
    """A phantom tensor on a plain meta tensor's storage; anything else as it is."""
    return PhantomTensor(tensor) if type(tensor) is torch.Tensor and tensor.device.type == "meta" else tensor
