"""Which layers are quantised, and their replacement. Imports torch: loaded from inside functions only.

transformers decides by rules that are called here as they are: the output embeddings, tied weights and the last
parameter's module are left out unless the config names modules of its own, and so are the modules that the class keeps
in float32. bitsandbytes takes nn.Linear itself (no subclass) and Conv1D; GPTQ and AWQ take nn.Linear and Conv1D of the
blocks; the packed experts of a mixture (3-D parameters) are no linear layers and stay as they are.

Sources: transformers 5.24 quantizers/base.py get_modules_to_not_convert; quantizers/quantizers_utils.py
should_convert_module; integrations/bitsandbytes.py replace_with_bnb_linear; integrations/awq.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from metapeak.strategies.quantization.layer import QuantizedLayer


def modules_left_out(module: nn.Module, skip_modules: tuple[str, ...] | None, *, add_default: bool = False) -> list:
    """Patterns of modules that keep their dtype: the model's own, unless `skip_modules` says otherwise."""
    from transformers import PreTrainedModel
    from transformers.quantizers.base import HfQuantizer

    if isinstance(module, PreTrainedModel):
        skip = None if skip_modules is None else list(skip_modules)
        return HfQuantizer.get_modules_to_not_convert(module, skip, module._keep_in_fp32_modules, add_default)
    if skip_modules is not None:
        return list(skip_modules)
    last = [name for name, _ in module.named_parameters()][-1:]
    return [name.rpartition(".")[0] for name in last]


def quantizable(module: nn.Module, left_out: list) -> Iterator[tuple[str, nn.Module, int, int]]:
    """(name, layer, in_features, out_features) of every linear layer that is quantised."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    for name, part in module.named_modules():
        if not name or not should_convert_module(name, left_out):
            continue
        if isinstance(part, Conv1D):
            yield name, part, *part.weight.shape
        elif type(part) is nn.Linear:
            yield name, part, part.in_features, part.out_features


def replace_layers(
    module: nn.Module, left_out: list, make: Callable[[nn.Module, int, int], nn.Module]
) -> dict[str, nn.Module]:
    """Put what `make(layer, in_features, out_features)` returns in the place of each; {name: new layer}."""
    replaced = {}
    for name, part, in_features, out_features in list(quantizable(module, left_out)):
        replaced[name] = make(part, in_features, out_features).train(part.training)
        module.set_submodule(name, replaced[name])
    return replaced


def quantized_layers(module: nn.Module) -> dict[str, QuantizedLayer]:
    """The layers with packed weights by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, QuantizedLayer)}
