"""Names of optimizers: what each stands for, in which implementations it exists, which are refused and why.

No torch here: a wrong name is refused before anything is imported.

Sources of names and rules: transformers/training_args.py, OptimizerNames, with trainer_optimizer.py, which says what
each of them makes; torch/optim (classes that have a foreach or a fused kernel); bitsandbytes/optim; torchao/optim.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.spec import OptimizerSpec

FOREACH, FUSED, LOOP, BITSANDBYTES, TORCHAO = "foreach", "fused", "for-loop", "bitsandbytes", "torchao"
# When steps are made, not how: the class is the one that CUDA picks (tracer/training_loop.py).
IN_BACKWARD = "in-backward"
IMPLEMENTATIONS = (FOREACH, FUSED, LOOP, BITSANDBYTES, TORCHAO, IN_BACKWARD)
STATE_DTYPES = ("float32", "bfloat16", "float16")
NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """How an optimizer is made.

    `library` names the module of this room that makes it, `class_name` the class of that library. `implementations`
    are those that exist, the one that CUDA gets by default first; empty: only the imported class can tell.
    `arguments` are those that the name stands for.
    """

    library: str
    class_name: str
    implementations: tuple[str, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)


# Classes of torch.optim: with foreach kernels, with fused ones too, and without either. CUDA gets foreach where there
# is one (torch/optim/optimizer.py, _default_to_fused_or_foreach), except for Adafactor, whose foreach is asked for by
# name.
TORCH_CLASSES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"), (FOREACH, LOOP)),
    **dict.fromkeys(("AdamW", "Adam", "SGD", "Adagrad"), (FOREACH, FUSED, LOOP)),
    "Adafactor": (LOOP, FOREACH),
}
# Classes that cannot make a step of dense gradients without a closure.
_REFUSED_CLASSES = {
    "LBFGS": "its step() needs a closure that runs the model again, which the traced step does not have",
    "SparseAdam": "it takes sparse gradients only, and the gradients of this step are dense",
}


def _torch(class_name: str, **arguments: Any) -> Entry:
    return Entry(
        library="torch_optim",
        class_name=class_name,
        implementations=TORCH_CLASSES[class_name],
        arguments=arguments,
    )


def _bitsandbytes(algorithm: str, bits: int, *, paged: bool = False, **arguments: Any) -> Entry:
    return Entry(
        library="bitsandbytes",
        class_name=algorithm,
        implementations=(BITSANDBYTES,),
        arguments={"bits": bits, "paged": paged, **arguments},
    )


def _torchao(class_name: str) -> Entry:
    return Entry(library="torchao", class_name=class_name, implementations=(TORCHAO,))


def _bitsandbytes_names() -> dict[str, Entry]:
    names = {}
    for algorithm in ("adam", "adamw", "lion", "ademamix"):
        for bits in (8, 32):
            for prefix in ("", "paged-"):
                names[f"{prefix}{algorithm}{bits}bit"] = _bitsandbytes(algorithm, bits, paged=bool(prefix))
        names[f"paged-{algorithm}"] = names[f"paged-{algorithm}32bit"]
    names["ademamix"] = names["ademamix32bit"]
    for algorithm in ("sgd", "rmsprop", "adagrad"):
        for bits in (8, 32):
            names[f"{algorithm}{bits}bit"] = _bitsandbytes(algorithm, bits)
    return {**names, "lamb": _bitsandbytes("lamb", 32), "lars": _bitsandbytes("lars", 32)}


# Names of the option `optimizer`.
OPTIMIZERS: dict[str, Entry] = {
    "adamw": _torch("AdamW"),
    "adam": _torch("Adam"),
    "sgd": _torch("SGD"),
    "sgd-momentum": _torch("SGD", momentum=0.9),
    "adagrad": _torch("Adagrad"),
    "rmsprop": _torch("RMSprop"),
    "adadelta": _torch("Adadelta"),
    "adamax": _torch("Adamax"),
    "nadam": _torch("NAdam"),
    "radam": _torch("RAdam"),
    "asgd": _torch("ASGD"),
    "rprop": _torch("Rprop"),
    "adafactor": Entry(library="adafactor", class_name="Adafactor", implementations=(LOOP,)),
    "lion": Entry(library="lion", class_name="Lion", implementations=(LOOP, FUSED)),
    "muon": Entry(library="muon", class_name="Muon", implementations=(LOOP,)),
    **_bitsandbytes_names(),
    "adamw4bit": _torchao("AdamW4bit"),
    "adam4bit": _torchao("Adam4bit"),
    "adamw-fp8": _torchao("AdamWFp8"),
    "adam-fp8": _torchao("AdamFp8"),
    NONE: Entry(library=NONE, class_name=NONE, implementations=()),
}
# 8-bit Adam exists in two libraries: `implementation: torchao` picks the other one.
_IN_TORCHAO = {"adamw8bit": "AdamW8bit", "adam8bit": "Adam8bit"}

# Names of the Hugging Face Trainer -> (name here, implementation, arguments). It keeps the states of embeddings in 32
# bits where it makes an 8-bit bitsandbytes optimizer (transformers/trainer.py, create_optimizer), and gives torchao's
# 4-bit one blocks of 256 (trainer_optimizer.py, _get_torchao_optimizer).
_HF_8BIT = {"embeddings_32bit": True}
ALIASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "adamw-torch": ("adamw", FOREACH, {}),
    "adamw-torch-fused": ("adamw", FUSED, {}),
    "adamw-bnb-8bit": ("adamw8bit", BITSANDBYTES, _HF_8BIT),
    "adamw-8bit": ("adamw8bit", BITSANDBYTES, _HF_8BIT),
    "paged-adamw-32bit": ("paged-adamw32bit", None, {}),
    "paged-adamw-8bit": ("paged-adamw8bit", None, _HF_8BIT),
    "adamw-torch-8bit": ("adamw8bit", TORCHAO, {"block_size": 256}),
    "adamw-torch-4bit": ("adamw4bit", None, {"block_size": 256}),
    "ademamix-8bit": ("ademamix8bit", None, _HF_8BIT),
    "paged-ademamix-32bit": ("paged-ademamix32bit", None, {}),
    "paged-ademamix-8bit": ("paged-ademamix8bit", None, _HF_8BIT),
    "lion-32bit": ("lion32bit", None, {}),
    "lion-8bit": ("lion8bit", None, _HF_8BIT),
    "paged-lion-32bit": ("paged-lion32bit", None, {}),
    "paged-lion-8bit": ("paged-lion8bit", None, _HF_8BIT),
    "rmsprop-bnb": ("rmsprop32bit", None, {}),
    "rmsprop-bnb-8bit": ("rmsprop8bit", None, _HF_8BIT),
    "rmsprop-bnb-32bit": ("rmsprop32bit", None, {}),
}

_OTHER_PACKAGES = {
    "schedule-free-radam": "schedulefree.RAdamScheduleFree",
    "schedule-free-adamw": "schedulefree.AdamWScheduleFree",
    "schedule-free-sgd": "schedulefree.SGDScheduleFree",
    "stable-adamw": "optimi.StableAdamW",
    "grokadamw": "grokadamw.GrokAdamW",
    "adamw-anyprecision": "torchdistx.optimizers.AnyPrecisionAdamW",
}
_NOT_HERE = {
    "galore": "GaLore projects each gradient with an SVD of its values",
    "apollo": "APOLLO projects gradients, for modules that a list of targets names",
    "lomo": "LOMO updates the weights inside backward with a loop of its own",
    "adalomo": "LOMO updates the weights inside backward with a loop of its own",
}


def find(spec: OptimizerSpec) -> tuple[Entry, str | None]:
    """(the entry with all arguments, the implementation that is asked for or CUDA's; None if only the class can tell).

    Raises UnknownName for a name that nobody knows, InputError for what exists and cannot be done.

        >>> entry, implementation = find(OptimizerSpec(name="paged_adamw_8bit"))
        >>> entry.class_name, dict(entry.arguments), implementation
        ('adamw', {'bits': 8, 'paged': True, 'embeddings_32bit': True}, 'bitsandbytes')
    """
    if spec.implementation is not None and spec.implementation not in IMPLEMENTATIONS:
        raise UnknownName("optimizer implementation", spec.implementation, IMPLEMENTATIONS)
    name, implied, implied_arguments = _resolve_alias(spec.name)
    asked = (None if spec.implementation == IN_BACKWARD else spec.implementation) or implied
    if implied and asked != implied:
        raise InputError(f"Optimizer {spec.name} is the {implied} implementation; {asked} was asked for as well.")
    if name == NONE:
        _refuse_what_belongs_to_an_optimizer(spec)
    entry = _by_import_path(spec.name) if name is None else OPTIMIZERS[name]
    if asked == TORCHAO and name in _IN_TORCHAO:
        entry = _torchao(_IN_TORCHAO[name])
    if asked and entry.implementations and asked not in entry.implementations:
        raise InputError(
            f"Optimizer {spec.name} has no {asked} implementation. It has: {', '.join(entry.implementations)}."
        )
    _check_state_dtype(spec, entry, asked)
    arguments = {**entry.arguments, **implied_arguments, **dict(spec.arguments)}
    for word in (FOREACH, FUSED):
        if word in dict(spec.arguments):
            raise InputError(f"{word} is not given as an argument of the optimizer: use --implementation {word}.")
    implementation = asked or (entry.implementations[0] if entry.implementations else None)
    if spec.state_dtype and not asked:
        implementation = LOOP
    return replace(entry, arguments=arguments), implementation


def _refuse_what_belongs_to_an_optimizer(spec: OptimizerSpec) -> None:
    words = {
        "implementation": spec.implementation,
        "state_dtype": spec.state_dtype,
        "optimizer_args": dict(spec.arguments),
        "master_weights": spec.master_weights,
    }
    given = [word for word, value in words.items() if value]
    if given:
        raise InputError(f"{', '.join(given)} belongs to an optimizer, and optimizer none makes no step.")


def _resolve_alias(given: str) -> tuple[str | None, str | None, dict[str, Any]]:
    """(name in OPTIMIZERS or None for an import path, implementation that it implies, arguments that it implies)."""
    if not isinstance(given, str) or not given:
        raise UnknownName("optimizer", str(given), OPTIMIZERS)
    plain = given.lower().replace("_", "-")
    if plain in OPTIMIZERS:
        return plain, None, {}
    if plain in ALIASES:
        return ALIASES[plain]
    if plain in _OTHER_PACKAGES:
        raise InputError(
            f"Optimizer {given} is a class of another package. Install that package and give "
            f"--optimizer {_OTHER_PACKAGES[plain]}: the class itself is then traced."
        )
    for start, reason in _NOT_HERE.items():
        if plain.split("-")[0] == start:
            raise InputError(f"Optimizer {given} is not modelled: {reason}.")
    if "." not in given and ":" not in given:
        hint = "A class is named by its import path: package.Class or file.py:Class."
        raise UnknownName("optimizer", given, [*OPTIMIZERS, *ALIASES], hint)
    return None, None, {}


def _by_import_path(path: str) -> Entry:
    """The entry of `package.Class`; classes that are modelled here are found without their package."""
    package, _, class_name = path.rpartition(".")
    if package == "torch.optim" and class_name in _REFUSED_CLASSES:
        raise InputError(f"torch.optim.{class_name} cannot be traced: {_REFUSED_CLASSES[class_name]}.")
    if package == "torch.optim" and class_name in TORCH_CLASSES:
        return _torch(class_name)
    if package.startswith("bitsandbytes"):
        if class_name in ("LAMB8bit", "LARS8bit"):
            raise InputError(f"{path} cannot be run: bitsandbytes has no blockwise 8-bit kernel for it on CUDA.")
        name = _bitsandbytes_name(class_name)
        if name in OPTIMIZERS:
            return OPTIMIZERS[name]
    if package.startswith("torchao") and class_name in ("AdamW8bit", "Adam8bit", *_torchao_names()):
        return _torchao(class_name)
    if path in (
        "torch.optim.Muon",
        "lion_pytorch.Lion",
        "transformers.Adafactor",
        "transformers.optimization.Adafactor",
    ):
        return OPTIMIZERS[class_name.lower()]
    return Entry(library="import_path", class_name=path, implementations=())


def _bitsandbytes_name(class_name: str) -> str:
    """PagedAdamW8bit -> paged-adamw8bit; a class without bits in its name has 32 of them."""
    name = class_name.lower()
    name = f"paged-{name.removeprefix('paged')}" if name.startswith("paged") else name
    if name.removesuffix("32bit") in ("lamb", "lars"):
        return name.removesuffix("32bit")
    return name if name.endswith("bit") else f"{name}32bit"


def _torchao_names() -> list[str]:
    return [entry.class_name for entry in OPTIMIZERS.values() if entry.library == "torchao"]


def _check_state_dtype(spec: OptimizerSpec, entry: Entry, asked: str | None) -> None:
    if spec.state_dtype is None:
        return
    if spec.state_dtype not in STATE_DTYPES:
        raise UnknownName("state dtype", spec.state_dtype, STATE_DTYPES)
    if entry.library != "torch_optim" or entry.class_name not in ("AdamW", "Adam"):
        raise InputError(
            f"state_dtype is an option of adam and adamw; {spec.name} decides the dtype of its states itself."
        )
    if asked == FOREACH:
        raise InputError(
            "torch's foreach kernels keep states in the parameter's dtype. With state_dtype, use fused or for-loop."
        )


def parse_arguments(text: str | None) -> dict[str, Any]:
    """Arguments of an optimizer from text. Raises InputError.

    >>> parse_arguments("betas=(0.9, 0.95),weight_decay=0.1,amsgrad=true")
    {'betas': (0.9, 0.95), 'weight_decay': 0.1, 'amsgrad': True}
    """
    try:
        call = ast.parse(f"f({text or ''})", mode="eval").body
    except SyntaxError:
        call = None
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise InputError(f"optimizer_args is {text!r}, but has to be NAME=VALUE[,NAME=VALUE].")
    return {keyword.arg: _value(keyword.value) for keyword in call.keywords}


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        words = {"true": True, "false": False, "none": None}
        text = ast.unparse(node)
        return words.get(text.lower(), text)
