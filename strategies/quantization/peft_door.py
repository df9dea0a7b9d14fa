"""How PEFT's own layers for quantised bases get to be used although the quantisation libraries are not installed.

PEFT picks the adapter layer by the class of the base layer: `lora.bnb.Linear4bit` for `bitsandbytes.nn.Linear4bit`, and
so on. While it builds adapters (`quantised_bases`), it sees the layers of this package under those names:

- bitsandbytes: `peft.tuners.lora.bnb` reads its library through the module global `bnb`. A stand-in with our classes is
  put there. Where the library is not installed, the stand-in is also what `import bitsandbytes` finds, so that PEFT
  defines its layers at all.
- GPTQ and AWQ: PEFT's dispatchers ask for gptqmodel; they are replaced by ones that ask for our classes and return the
  same `GPTQLoraLinear` and `AwqLoraLinear`.

Everything is put back afterwards; what runs in the step is PEFT's code.
Source: PEFT 0.21 tuners/lora/model.py LoraModel._create_new_module; tuners/lora/bnb.py, gptq.py, awq.py.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator

from metapeak.tracer.errors import InputError


def peft() -> types.ModuleType:
    """The module peft. Raises InputError where it is not installed."""
    try:
        import peft as module
    except ImportError as error:
        raise InputError("Adapters and k-bit preparation are PEFT's own code: pip install peft.") from error
    return module


@contextlib.contextmanager
def quantised_bases() -> Iterator[None]:
    """Inside, PEFT takes the layers of this package for those of bitsandbytes and gptqmodel."""
    peft()  # its other tuners look for bitsandbytes while they are imported: they have to find what is there
    with _bitsandbytes_for_peft(), _gptq_and_awq_for_peft():
        yield


@contextlib.contextmanager
def _bitsandbytes_for_peft() -> Iterator[None]:
    stand_in = _stand_in()
    if importlib.util.find_spec("bitsandbytes") is not None:
        with _seen_by_peft(stand_in):
            yield
        return
    absent = object()
    before = sys.modules.get("bitsandbytes", absent)
    sys.modules["bitsandbytes"] = stand_in
    _ask_again()
    try:
        with _seen_by_peft(stand_in):
            yield
    finally:
        del sys.modules["bitsandbytes"]
        if before is not absent:  # None, by which Python is told that there is no such module
            sys.modules["bitsandbytes"] = before
        _ask_again()


@contextlib.contextmanager
def _seen_by_peft(stand_in: types.ModuleType) -> Iterator[None]:
    import peft.tuners.lora.bnb as lora_bnb

    library, lora_bnb.bnb = lora_bnb.bnb, stand_in
    try:
        yield
    finally:
        lora_bnb.bnb = library


def _ask_again() -> None:
    """Let PEFT look anew for bitsandbytes: it remembers the answer."""
    import peft.import_utils

    peft.import_utils.is_bnb_available.cache_clear()
    peft.import_utils.is_bnb_4bit_available.cache_clear()


def _stand_in() -> types.ModuleType:
    """A module `bitsandbytes` with the classes that PEFT tells layers by."""
    from metapeak.strategies.quantization.linear4bit import Linear4bit, Params4bit
    from metapeak.strategies.quantization.linear8bit import Int8Params, Linear8bitLt

    module = types.ModuleType("bitsandbytes")
    module.__spec__ = importlib.machinery.ModuleSpec("bitsandbytes", None)
    module.nn = types.SimpleNamespace(
        Linear4bit=Linear4bit, Params4bit=Params4bit, Linear8bitLt=Linear8bitLt, Int8Params=Int8Params
    )
    return module


@contextlib.contextmanager
def _gptq_and_awq_for_peft() -> Iterator[None]:
    import peft.tuners.lora.model as lora_model
    from peft.tuners.lora.awq import AwqLoraLinear
    from peft.tuners.lora.gptq import GPTQLoraLinear

    from metapeak.strategies.quantization.awq import AwqLinear
    from metapeak.strategies.quantization.gptq import GptqLinear

    def dispatcher(base_class, lora_class):
        def dispatch(target, adapter_name, config, **kwargs):
            if not isinstance(target, base_class):
                return None
            return lora_class(target, adapter_name, config=config, **kwargs)

        return dispatch

    theirs = lora_model.dispatch_gptq, lora_model.dispatch_awq
    lora_model.dispatch_gptq = dispatcher(GptqLinear, GPTQLoraLinear)
    lora_model.dispatch_awq = dispatcher(AwqLinear, AwqLoraLinear)
    try:
        yield
    finally:
        lora_model.dispatch_gptq, lora_model.dispatch_awq = theirs
