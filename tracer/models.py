"""From a model reference to a real nn.Module on the meta device.

    ModelSpec -> locate_model (resolve.py: the config) -> resolve_model (which class) -> build (the module on meta)

torch and transformers are imported inside the functions that need them: resolving an id of the built-in catalogue
needs neither.

Note [Separate output heads]
    transformers 5 ignores `tie_word_embeddings: false` in the T5 family and ties lm_head to the embedding. A checkpoint
    whose config says false (flan-T5, mT5, T5 1.1) holds an lm_head of its own, and `from_pretrained` then leaves the
    two apart (`tie_weights`: "both are present in the checkpoints with different values, so we will NOT tie them").
    A training run has the checkpoint's head, so `build` gives lm_head a parameter of its own in that case.

Note [Kept in float32]
    `from_pretrained(dtype=...)` keeps the parameters that a class lists in `_keep_in_fp32_modules_strict` (and for
    float16 `_keep_in_fp32_modules`) in float32; building from a config does not. `build` does what loading does.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metapeak.tracer.errors import MetapeakError, ModelConfigError, UnknownName
from metapeak.tracer.model_checks import check_heads_and_experts, check_sizes, explain_refusal
from metapeak.tracer.model_classes import TASKS, choose_class, config_mapping, effective_type
from metapeak.tracer.packages.registry import load_package
from metapeak.tracer.resolve import (
    FORCED_TIES,
    CatalogueModel,
    LocatedModel,
    list_models,
    locate_model,
    named_dtype,
    nearest_ids,
)
from metapeak.tracer.spec import ModelSpec
from metapeak.tracer.user_function import cause_in_one_line, import_function

if TYPE_CHECKING:
    import torch
    from torch import nn

    from metapeak.tracer.packages.base import Package

__all__ = [
    "TASKS",
    "WEIGHT_DTYPES",
    "BuiltModel",
    "CatalogueModel",
    "LocatedModel",
    "ResolvedModel",
    "build",
    "build_model",
    "list_models",
    "locate_model",
    "nearest_ids",
    "resolve_model",
]

WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedModel:
    """What a reference leads to: the config (or the function) and the class that will be built.

    `source` is "catalogue", "hub cache", "hub", "folder /x", "file /x/config.json" or "function file.py:f".
    `architecture` is the class name; `auto_class` and `task` are None where no auto class holds it. `factory` is the
    user's function, called without arguments. `package` builds the model that it calls `architecture`. `remote_code`
    says that the class comes from code at `location`.
    """

    id: str
    source: str
    revision: str | None = None
    config_dict: dict[str, Any] | None = None
    task: str | None = None
    auto_class: str | None = None
    architecture: str | None = None
    factory: Callable[[], Any] | None = None
    remote_code: bool = False
    location: str | None = None
    package: Package | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltModel:
    """A module on meta in training mode, and what was decided on the way.

    `dtype` is the dtype of the weights as a name, `dtype_source` says where it came from ("asked for", "config dtype",
    "config text_config.dtype", "default", "function"). `batch` and `compute_loss(module, batch)` are the user's
    function's, else None; `package` gives both for a model of another package.
    """

    module: nn.Module
    dtype: str
    dtype_source: str
    batch: Any = None
    compute_loss: Callable[..., Any] | None = None
    package: Package | None = None
    notes: tuple[str, ...] = ()


# -- which class -------------------------------------------------------------------------------------------------------


def resolve_model(spec: ModelSpec) -> ResolvedModel:
    """The config, class and task of `spec.reference`; the user's function where it names one.

    Raises ModelNotFound (nothing there), ModelConfigError (no model can be built from it, or it needs remote code
    without `trust_remote_code`) and UnknownName (no such task).
    """
    if spec.task is not None and spec.task not in TASKS:
        raise UnknownName("task", spec.task, TASKS)
    located = locate_model(spec)
    if located.package is not None:
        return _resolve_package(located, spec)
    if located.function is not None:
        return ResolvedModel(
            id=located.id,
            source=located.source,
            task=spec.task,
            factory=import_function(*located.function),
            notes=located.notes,
        )
    check_sizes(located.config_dict, located.id)
    chosen = choose_class(located, spec.task, spec.trust_remote_code)
    return ResolvedModel(
        id=located.id,
        source=located.source,
        revision=located.revision,
        config_dict=located.config_dict,
        task=chosen.task,
        auto_class=TASKS.get(chosen.task) if chosen.task else None,
        architecture=chosen.architecture,
        remote_code=chosen.remote_code,
        location=located.location,
        notes=located.notes + chosen.notes,
    )


def _resolve_package(located: LocatedModel, spec: ModelSpec) -> ResolvedModel:
    prefix, name = located.package
    package = load_package(prefix)
    if spec.task not in (None, package.task):
        raise ModelConfigError(f"{located.id} is trained as {package.task} by {prefix}, not as {spec.task}.")
    return ResolvedModel(
        id=located.id, source=located.source, task=package.task, architecture=package.find(name), package=package
    )


# -- the module on meta ------------------------------------------------------------------------------------------------


def build_model(resolved: ResolvedModel, *, dtype: str | None = None, attention: str | None = None) -> nn.Module:
    """The module of `build`."""
    return build(resolved, dtype=dtype, attention=attention).module


def build(resolved: ResolvedModel, *, dtype: str | None = None, attention: str | None = None) -> BuiltModel:
    """The real module on meta, in training mode, with use_cache off; no memory is used for weights.

    `dtype` is the weights dtype (None: the config's), `attention` an `attn_implementation` of transformers (None: the
    class's default). Raises ModelConfigError when the class refuses the config, UnknownName for an unknown dtype.
    """
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise UnknownName("weights dtype", dtype, WEIGHT_DTYPES)
    if resolved.factory is not None:
        return _build_with_function(resolved, dtype)
    if resolved.package is not None:
        return _build_with_package(resolved, resolved.package, dtype)
    import torch

    from metapeak.tracer.prepare import prepare_config

    dtype, dtype_source = (dtype, "asked for") if dtype else _config_dtype(resolved)
    config = _make_config(resolved)
    check_heads_and_experts(config.to_dict(), resolved.id)
    prepared = prepare_config(config)
    module = _construct(resolved, config, getattr(torch, dtype), attention)
    notes = [*prepared, _untie_output_head(resolved, module)]
    _keep_in_float32(module, getattr(torch, dtype))
    _move_to_meta(module)
    return BuiltModel(
        module=module.train(), dtype=dtype, dtype_source=dtype_source, notes=tuple(note for note in notes if note)
    )


def _make_config(resolved: ResolvedModel) -> Any:
    """The config object, made as AutoConfig makes it; quantization and code of the repository's own left aside."""
    if resolved.remote_code:
        return _remote_config(resolved)
    values = copy.deepcopy(resolved.config_dict)
    model_type = values["model_type"] = effective_type(values)
    for part in [values, *(value for value in values.values() if isinstance(value, dict))]:
        part.pop("quantization_config", None)
    values.pop("auto_map", None)
    mapping = config_mapping()
    if model_type not in mapping:
        raise ModelConfigError(f"{resolved.id}: {UnknownName('model_type', str(model_type), sorted(mapping.keys()))}")
    config_class = mapping[model_type]
    try:
        return config_class.from_dict(values)
    except Exception as error:
        raise explain_refusal(error, resolved.config_dict, config_class.__name__, resolved.id) from error


def _remote_config(resolved: ResolvedModel) -> Any:
    from transformers import AutoConfig

    from metapeak.tracer.hub import hub_cache_folder

    local = os.path.isdir(resolved.location)
    options = {} if local else {"revision": resolved.revision, "code_revision": resolved.revision}
    try:
        return AutoConfig.from_pretrained(
            resolved.location, trust_remote_code=True, cache_dir=hub_cache_folder(), **options
        )
    except Exception as error:
        name = resolved.config_dict["auto_map"]["AutoConfig"]
        raise explain_refusal(error, resolved.config_dict, name, resolved.id) from error


def _config_dtype(resolved: ResolvedModel) -> tuple[str, str]:
    """The weights dtype that the config names and the field that does, else float32."""
    name, field = named_dtype(resolved.config_dict)
    if field is None:
        return "float32", "default"
    if name not in WEIGHT_DTYPES:
        raise ModelConfigError(
            f"{resolved.id}: {field} is {name!r}; weights can be {', '.join(WEIGHT_DTYPES)}. Give the weights dtype."
        )
    return name, f"config {field}"


def _construct(resolved: ResolvedModel, config: Any, dtype: torch.dtype, attention: str | None) -> nn.Module:
    import torch

    options = {"dtype": dtype} | ({"attn_implementation": attention} if attention else {})
    try:
        with torch.device("meta"):
            if resolved.remote_code:
                return _construct_remote(resolved, config, options)
            model_class = _model_class(resolved)
            return model_class._from_config(_config_for(model_class, config), **options)
    except ModelConfigError:
        raise
    except Exception as error:
        raise explain_refusal(error, resolved.config_dict, resolved.architecture, resolved.id) from error


def _construct_remote(resolved: ResolvedModel, config: Any, options: dict[str, Any]) -> nn.Module:
    import transformers

    if not os.path.isdir(resolved.location):
        options = options | {"code_revision": resolved.revision}
    return getattr(transformers, resolved.auto_class).from_config(config, trust_remote_code=True, **options)


def _model_class(resolved: ResolvedModel) -> Any:
    import transformers

    model_class = getattr(transformers, resolved.architecture, None)
    if model_class is None:
        raise ModelConfigError(
            f"{resolved.id}: transformers {transformers.__version__} has no class {resolved.architecture}."
        )
    return model_class


def _config_for(model_class: Any, config: Any) -> Any:
    """The config, or its text part for a class of the text model alone (as AutoModel.from_config does)."""
    text_class = config.sub_configs.get("text_config")
    wants_text = text_class is not None and getattr(model_class, "config_class", None) is text_class
    return config.get_text_config() if wants_text else config


def _untie_output_head(resolved: ResolvedModel, module: nn.Module) -> str | None:
    """See Note [Separate output heads]. Returns what to tell the user, None where nothing was done."""
    import torch

    config = resolved.config_dict
    if config.get("model_type") not in FORCED_TIES or config.get("tie_word_embeddings") is not False:
        return None
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    if head is None or head.weight is not module.get_input_embeddings().weight:
        return None
    head.weight = torch.nn.Parameter(torch.empty_like(head.weight, device="meta"))
    module.all_tied_weights_keys.pop("lm_head.weight", None)
    return (
        f"lm_head is a parameter of its own ({head.weight.numel():,} more than a tied one): the config says "
        "tie_word_embeddings false, and from_pretrained keeps the checkpoint's head."
    )


def _keep_in_float32(module: nn.Module, dtype: torch.dtype) -> None:
    """See Note [Kept in float32]: change those parameters and saved buffers of a module on meta, in place."""
    import torch

    plan = module._get_dtype_plan(dtype) if hasattr(module, "_get_dtype_plan") else {}
    if not plan:
        return
    from transformers.core_model_loading import build_glob_alternation

    pattern = build_glob_alternation(list(plan))[0]

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.dtype == dtype and pattern.search(name)
        return torch.empty_like(tensor, dtype=torch.float32) if kept else tensor

    saved = module.state_dict(keep_vars=True).keys()
    _replace_tensors(module, lambda name, tensor: change(name, tensor) if name in saved else tensor)


def _move_to_meta(module: nn.Module) -> None:
    """Put parameters that a class made elsewhere on meta, in place. Buffers may keep their values."""
    import torch

    def move(name: str, tensor: torch.Tensor) -> torch.Tensor:
        stays = tensor.device.type == "meta" or not isinstance(tensor, torch.nn.Parameter)
        return tensor if stays else torch.empty_like(tensor, device="meta")

    _replace_tensors(module, move)


def _replace_tensors(module: nn.Module, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Replace each parameter and buffer by what `change(name, tensor)` returns; tied ones stay tied."""
    import torch

    changed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # holds the old tensor too, so that its id stays its own
    for path, part in module.named_modules():
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in changed:
                    new = change(f"{path}.{key}" if path else key, tensor)
                    if new is not tensor and isinstance(tensor, torch.nn.Parameter):
                        new = torch.nn.Parameter(new.detach(), requires_grad=tensor.requires_grad)
                    changed[id(tensor)] = (tensor, new)
                tensors[key] = changed[id(tensor)][1]


def _build_with_function(resolved: ResolvedModel, dtype: str | None) -> BuiltModel:
    """What the user's function returns under torch.device("meta"): a module, (module, batch) or (module, batch, loss).

    The module keeps its dtypes unless one is asked for, and keeps what the function froze or put in evaluation mode.
    """
    import torch

    from metapeak.tracer.prepare import prepare_config

    try:
        with torch.device("meta"):
            result = resolved.factory()
    except Exception as error:
        raise ModelConfigError(
            f"{resolved.id} failed when called without arguments on the meta device: {cause_in_one_line(error)}."
        ) from error
    parts = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], torch.nn.Module):
        raise ModelConfigError(
            f"{resolved.id} returned {_described(result)}; it must return an nn.Module, (module, batch) or "
            "(module, batch, loss function)."
        )
    module, batch, compute_loss = (*parts, None, None)[:3]
    if compute_loss is not None and not callable(compute_loss):
        raise ModelConfigError(
            f"{resolved.id}: its third value is {_described(compute_loss)}; it must be a function of module and batch."
        )
    notes = ()
    if getattr(getattr(module, "config", None), "use_cache", False):
        prepared = prepare_config(module.config)
        notes = (f"use_cache was on in the config of {resolved.id}'s module; it is off in training", *prepared)
    _move_to_meta(module)
    if dtype is not None:
        module = module.to(getattr(torch, dtype))
    return BuiltModel(
        module=module,
        dtype=dtype or _most_common_dtype(module),
        dtype_source="asked for" if dtype else "function",
        batch=batch,
        compute_loss=compute_loss,
        notes=notes,
    )


def _build_with_package(resolved: ResolvedModel, package: Package, dtype: str | None) -> BuiltModel:
    """The package's own class, in the dtype asked for or that of its scripts."""
    import torch

    name = dtype or package.default_dtype
    try:
        with torch.device("meta"):
            module = package.build(resolved.architecture, getattr(torch, name))
    except MetapeakError:
        raise
    except Exception as error:
        raise ModelConfigError(f"{resolved.id} cannot be built: {cause_in_one_line(error)}.") from error
    _move_to_meta(module)
    return BuiltModel(
        module=module.train(),
        dtype=name,
        dtype_source="asked for" if dtype else f"default of {package.prefix}",
        compute_loss=package.loss(package.losses[0]),
        package=package,
    )


def _described(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of ({', '.join(type(item).__name__ for item in value)})"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _most_common_dtype(module: nn.Module) -> str:
    """The dtype that most parameters have, as a name; float32 for a module without parameters."""
    counts: dict[str, int] = {}
    for parameter in module.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + parameter.numel()
    return max(counts, key=counts.get) if counts else "float32"
