"""LoRA, DoRA and rsLoRA: the base is frozen, small matrices beside chosen layers are trained.

What it changes: `peft.get_peft_model` wraps the real module on meta; the PeftModel that a script gets is traced.
Where each byte comes from: PEFT's own layers run in the trace: adapters in the dtype to which PEFT casts them, the cast
of each layer's input to it, dropout's mask, DoRA's identity matrices, the copies of `modules_to_save`.
Not modelled: how adapters are initialised, beyond PEFT's default (PiSSA, LoftQ, ...: same bytes after loading, more
while loading); several adapters at once.
Sources: peft tuners/lora (model.py, layer.py, dora.py), tuners/tuners_utils.py (cast_adapter_dtype,
_maybe_include_all_linear_layers), utils/constants.py (targets by model type), utils/other.py (ModulesToSaveWrapper).
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from metapeak.strategies.base import NoOpStrategy
from metapeak.strategies.frozen_base import name_ends
from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.simulation import Option

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig

# Our tasks -> peft.TaskType; PEFT has a wrapper class of its own for these, the plain PeftModel serves the others.
PEFT_TASKS = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "question-answering": "QUESTION_ANS",
    "feature-extraction": "FEATURE_EXTRACTION",
}
ALL_LINEAR = "all-linear"
BIASES = ("none", "all", "lora_only")
# `fp32` is what PEFT's autocast_adapter_dtype makes of half-precision adapters; `weights` leaves them in the dtype of
# the layer that they adapt; bf16 and fp16 cast them afterwards, as TRL does under a 4-bit base.
ADAPTER_DTYPES = {"fp32": "float32", "weights": None, "bf16": "bfloat16", "fp16": "float16"}
# LoraConfig's default; it scales numbers and costs no byte.
PEFT_ALPHA = 8
# A text without any other character is a list of names; any other is a regular expression for whole paths.
_NAMES = re.compile(r"[\w.,-]+")


@dataclass(frozen=True, kw_only=True)
class LoRA(NoOpStrategy):
    """Low-rank adapters by PEFT on the layers that `targets` names; everything else is frozen.

    `targets`: None for PEFT's default of the model type, "all-linear", names of layers (the end of their path), or one
    regular expression that meets whole paths. `alpha` None is PEFT's 8. `modules_to_save` are trained whole, as a copy
    beside the frozen original. `target_parameters` names parameters that are no layer's weight (fused experts); with
    `targets` () they are all that is adapted.
    `layers` and `layers_pattern` narrow the targets to layers of these numbers. `adapter_dtype`: see ADAPTER_DTYPES.
    Raises InputError for values that PEFT cannot use.
    """

    name = "lora"
    imports = ("peft",)
    rank: int = 16
    alpha: float | None = None
    targets: tuple[str, ...] | str | None = None
    exclude: tuple[str, ...] | str | None = None
    dropout: float = 0.0
    dora: bool = False
    rslora: bool = False
    modules_to_save: tuple[str, ...] = ()
    bias: str = "none"
    adapter_dtype: str = "fp32"
    target_parameters: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    layers_pattern: str | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise InputError(f"lora rank is {self.rank!r}, but has to be a whole number from 1 on.")
        if not 0 <= self.dropout < 1:
            raise InputError(f"lora dropout is {self.dropout!r}, but has to be a probability from 0 to below 1.")
        if self.bias not in BIASES:
            raise UnknownName("lora bias", str(self.bias), BIASES)
        if self.adapter_dtype not in ADAPTER_DTYPES:
            raise UnknownName("adapter dtype", str(self.adapter_dtype), ADAPTER_DTYPES)
        if self.targets is not None and not self.targets and not self.target_parameters:
            raise InputError("lora targets is empty. Leave it out for PEFT's default, or name layers, or all-linear.")
        for pattern in (self.targets, self.exclude):
            if isinstance(pattern, str):
                _compile(pattern)

    @property
    def alpha_of_peft(self) -> float:
        return PEFT_ALPHA if self.alpha is None else self.alpha

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        """The PeftModel around the module, which PEFT changes in place."""
        import torch
        from peft import get_peft_model
        from peft.tuners.tuners_utils import cast_adapter_dtype

        _refuse_adapters(module)
        config = self.config(module)
        self._check_names(module, config)
        try:
            # Under meta PEFT neither allocates nor initialises anything.
            with torch.device("meta"), warnings.catch_warnings(), _quantised_bases(module):
                warnings.simplefilter("ignore")
                wrapped = get_peft_model(module, config, autocast_adapter_dtype=False)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise InputError(
                f"PEFT refuses LoRA on {type(module).__name__}: {' '.join(str(error).split())} Give lora targets: "
                f"all-linear, or names of layers. {_listed_linears(module)}"
            ) from error
        _cast_as_the_layers(wrapped)
        cast_adapter_dtype(wrapped, "default", autocast_adapter_dtype=self.adapter_dtype != "weights")
        if ADAPTER_DTYPES[self.adapter_dtype] not in (None, "float32"):
            _cast_adapters(wrapped, getattr(torch, ADAPTER_DTYPES[self.adapter_dtype]))
        return wrapped

    def config(self, module: torch.nn.Module) -> LoraConfig:
        """The LoraConfig for this module. Raises InputError when PEFT has no default targets for its type."""
        from peft import LoraConfig

        return LoraConfig(
            task_type=PEFT_TASKS.get(_task_of(module)),
            r=self.rank,
            lora_alpha=self.alpha_of_peft,
            target_modules=self._targets(module),
            exclude_modules=_listed(self.exclude),
            lora_dropout=float(self.dropout),
            use_dora=self.dora,
            use_rslora=self.rslora,
            modules_to_save=list(self.modules_to_save) or None,
            bias=self.bias,
            target_parameters=list(self.target_parameters) or None,
            layers_to_transform=list(self.layers) if self.layers is not None else None,
            layers_pattern=self.layers_pattern,
            rank_pattern=dict(self.rank_pattern),
        )

    def _targets(self, module: torch.nn.Module) -> list[str] | str | None:
        """None leaves PEFT to choose its default."""
        kind = _model_type(module)
        if self.targets is None and not self.target_parameters and default_targets(kind) is None:
            which = f"model type '{kind}'" if kind else f"{type(module).__name__}, which has no transformers config"
            raise InputError(
                f"PEFT has no default targets for {which}. Give lora targets: all-linear, or names among the linear "
                f"layers. {_listed_linears(module)}"
            )
        return _listed(self.targets)

    def _check_names(self, module: torch.nn.Module, config: LoraConfig) -> None:
        if self.targets is not None and not self.target_parameters and not _matched(module, config):
            raise InputError(f"lora targets {_shown(self.targets)} match no layer. {_listed_linears(module)}")
        paths = [path for path, _ in module.named_modules()]
        for name in self.modules_to_save:
            if not any(path.endswith(name) for path in paths):
                names = name_ends(path for path, _ in module.named_parameters())
                raise InputError(f"lora modules_to_save: no module is called '{name}'. Names that there are: {names}.")
        parameters = [path for path, _ in module.named_parameters()]
        for name in self.target_parameters:
            if not any(path == name or path.endswith("." + name) for path in parameters):
                raise InputError(f"lora target_parameters: no parameter's path ends with '{name}'.")

    # -- what the report says ------------------------------------------------------------------------------------------

    def resolved(self, module: torch.nn.Module) -> Mapping[str, Option]:
        values: dict[str, Any] = {
            "method": self.name,
            "lora_rank": self.rank,
            "lora_alpha": self.alpha_of_peft,
            "lora_dropout": float(self.dropout),
            "lora_dora": self.dora,
            "lora_rslora": self.rslora,
            "lora_bias": self.bias,
            "lora_modules_to_save": self.modules_to_save,
            "adapter_dtype": self.adapter_dtype,
        }
        options = {name: Option(value=value, origin="default") for name, value in values.items()}
        if self.targets is None:
            found = module.peft_config["default"].target_modules or ()
            names = (found,) if isinstance(found, str) else tuple(sorted(found))
            options["lora_targets"] = Option(value=names, origin=f"PEFT's default for {_model_type(module)}")
        else:
            options["lora_targets"] = Option(value=self.targets, origin="call")
        return options

    def notes(self, module: torch.nn.Module) -> tuple[str, ...]:
        layers = list(_lora_layers(module))
        adapters = _adapter_parameters(layers)
        return (
            *self._adapter_notes(module, layers, adapters),
            *self._unmatched_notes(module),
            *_rank_notes(layers),
            *_saved_notes(module, {id(parameter) for parameter in adapters}),
        )

    def _adapter_notes(self, module, layers, adapters) -> Iterator[str]:
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in adapters})
        count = sum(parameter.numel() for parameter in adapters)
        why = {
            "fp32": " (PEFT casts half-precision adapters to it)",
            "weights": " (as the layers that they adapt)",
        }.get(self.adapter_dtype, " (cast as asked)")
        kinds = [text for text, used in (("DoRA", self.dora), ("rsLoRA", self.rslora)) if used] or ["LoRA"]
        yield (
            f"{' and '.join(kinds)} by PEFT on {len(layers)} layers: {count:,} adapter parameters in "
            f"{' and '.join(dtypes)}{why}, alpha {self.alpha_of_peft:g}, dropout {self.dropout:g}; "
            "the base is frozen"
        )

    def _unmatched_notes(self, module) -> Iterator[str]:
        if isinstance(self.targets, tuple):
            paths = [path for path, _ in _lora_paths(module)]
            idle = [name for name in self.targets if not any(("." + path).endswith("." + name) for path in paths)]
            if idle and self.targets != (ALL_LINEAR,):
                yield f"lora targets {', '.join(idle)} match no layer of this model"


def _quantised_bases(module: torch.nn.Module) -> contextlib.AbstractContextManager:
    """PEFT's layers for quantised bases, where the base is one."""
    from metapeak.strategies.quantization.peft_door import quantised_bases

    return quantised_bases() if getattr(module, "is_quantized", False) else contextlib.nullcontext()


def parse_targets(text: str) -> tuple[str, ...] | str:
    """Targets as an option has them: names separated by commas, all-linear, or a regular expression.

    >>> parse_targets("q_proj,v_proj"), parse_targets("all-linear"), parse_targets(".*[qv]_proj")
    (('q_proj', 'v_proj'), 'all-linear', '.*[qv]_proj')
    """
    if text == ALL_LINEAR or not _NAMES.fullmatch(text):
        return text
    return tuple(name for name in text.split(",") if name)


def default_targets(model_type: str | None) -> list[str] | str | None:
    """PEFT's default targets for a model type, None where it has none."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as MAPPING

    targets = MAPPING.get(model_type)
    return targets if targets is None or isinstance(targets, str) else sorted(targets)


def _compile(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise InputError(f"lora targets '{pattern}' is no list of names and no regular expression: {error}.") from error


def _listed(names: tuple[str, ...] | str | None) -> list[str] | str | None:
    """What LoraConfig takes: a list of names, or a text that it reads as all-linear or a regular expression."""
    if names is None or isinstance(names, str):
        return names
    return ALL_LINEAR if tuple(names) == (ALL_LINEAR,) else list(names)


def _shown(names: tuple[str, ...] | str) -> str:
    return names if isinstance(names, str) else ", ".join(names)


def _model_type(module: torch.nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "model_type", None)


def _task_of(module: torch.nn.Module) -> str | None:
    from metapeak.tracer.model_classes import task_of_class

    kind = _model_type(module)
    return task_of_class(kind, type(module).__name__) if kind else None


def _refuse_adapters(module: torch.nn.Module) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    if any(isinstance(part, BaseTunerLayer) for part in module.modules()):
        raise InputError(
            "The model has adapters already, so method lora would add a second set. Give method full to train it as "
            "it is (frozen parameters stay frozen)."
        )


def _matched(module: torch.nn.Module, config: LoraConfig) -> bool:
    """Whether any module is a target; PEFT's own rule decides."""
    from peft.tuners.tuners_utils import check_target_module_exists

    if isinstance(config.target_modules, str) and config.target_modules.lower() == ALL_LINEAR:
        return True
    return any(check_target_module_exists(config, path) for path, _ in module.named_modules() if path)


def linear_names(module: torch.nn.Module) -> dict[str, int]:
    """The last names of linear layers (nn.Linear, transformers' Conv1D), each with how often it occurs."""
    import torch
    from transformers.pytorch_utils import Conv1D

    linears = (torch.nn.Linear, Conv1D)
    return dict(Counter(path.split(".")[-1] for path, part in module.named_modules() if isinstance(part, linears)))


def _listed_linears(module: torch.nn.Module) -> str:
    names = ", ".join(f"{name} ({count})" for name, count in linear_names(module).items())
    return f"Linear layers: {names}." if names else "It has no linear layer."


def _cast_as_the_layers(module: torch.nn.Module) -> None:
    """Adapters in the dtype of the layers that they adapt, in place: PEFT does so when it moves them to the layer's
    device (_move_adapter_to_device_of_base_layer), and leaves out adapters on meta.
    """
    for layer in _lora_layers(module):
        if hasattr(layer, "get_param"):  # an adapter of a parameter
            dtype = layer.get_param().dtype
        else:
            _, dtype = layer._get_base_layer_device_and_dtype(layer.get_base_layer())
        for path, parameter in layer.named_parameters():
            if dtype is not None and dtype.is_floating_point and not path.startswith("base_layer."):
                parameter.data = parameter.data.to(dtype)


def _cast_adapters(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast what is trained, in place; DoRA's magnitudes keep their dtype, as in TRL's SFTTrainer."""
    for path, parameter in module.named_parameters():
        if parameter.requires_grad and "lora_magnitude_vector" not in path:
            parameter.data = parameter.data.to(dtype)


def _lora_paths(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return ((path, part) for path, part in module.named_modules() if isinstance(part, LoraLayer))


def _lora_layers(module: torch.nn.Module) -> Iterator[Any]:
    return (part for _, part in _lora_paths(module))


def _adapter_parameters(layers) -> list[torch.nn.Parameter]:
    """Parameters of the adapters, each once: what a LoRA layer has beside its base layer."""
    found = {}
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if not name.startswith("base_layer.") and parameter.requires_grad:
                found[id(parameter)] = parameter
    return list(found.values())


def _rank_notes(layers) -> Iterator[str]:
    small = [
        (layer.in_features, layer.out_features, max(layer.r.values()))
        for layer in layers
        if layer.r and max(layer.r.values()) > min(layer.in_features, layer.out_features)
    ]
    if small:
        inputs, outputs, rank = min(small, key=lambda layer: min(layer[:2]))
        yield (
            f"lora rank {rank} is above the smaller side of {len(small)} layers (the smallest is {inputs} x "
            f"{outputs}): rank <= min(in, out) is all that an update of the layer can have"
        )


def _saved_notes(module: torch.nn.Module, adapters: set[int]) -> Iterator[str]:
    from peft.utils.other import ModulesToSaveWrapper

    for path, part in module.named_modules():
        if isinstance(part, ModulesToSaveWrapper):
            copies = [parameter for parameter in part.modules_to_save.parameters() if id(parameter) not in adapters]
            dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in copies})
            yield (
                f"{path} is trained whole: PEFT keeps a copy of {sum(p.numel() for p in copies):,} parameters in "
                f"{' and '.join(dtypes)} beside the frozen original"
            )
