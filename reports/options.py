"""Options of the command line and of --config files: one table, each value with its origin."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metapeak.strategies.attention import ATTENTION
from metapeak.strategies.gradient_checkpointing import parse_policy, strategy_for
from metapeak.strategies.optimizer import IMPLEMENTATIONS, OPTIMIZERS
from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.gpus import Gpu, gpu_of_memory
from metapeak.tracer.mig import find_gpu_or_slice
from metapeak.tracer.simulation import Option
from metapeak.tracer.spec import ModelSpec, OptimizerSpec, StepSpec

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """An option: its name in every place, its type, default and help. `choices` are the known names, if closed."""

    name: str
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


SETTINGS = (
    Setting(name="task", kind=str, default=None, help="causal-lm, seq2seq-lm, ...; default: from the config"),
    Setting(name="batch_size", kind=int, default=1, help="micro-batch of one rank"),
    Setting(name="seq_len", kind=int, default=None, help="tokens a sample; default 2048 or the model's maximum"),
    Setting(name="target_len", kind=int, default=None, help="decoder tokens a sample, for seq2seq; default: seq_len"),
    Setting(name="image_size", kind=int, default=None, help="pixels a side; default: the config's"),
    Setting(name="num_images", kind=int, default=1, help="images a sample, for image-text models"),
    Setting(name="weights_dtype", kind=str, default=None, help="default: the config's", choices=tuple(DTYPES)),
    Setting(name="optimizer", kind=str, default="adamw", help="default adamw", choices=tuple(OPTIMIZERS)),
    Setting(
        name="implementation", kind=str, default="foreach", help="of the optimizer; CUDA's default is foreach",
        choices=IMPLEMENTATIONS,
    ),
    Setting(
        name="checkpointing", kind=str, default="none",
        help="none, full, every:N, layers:0-15,20, modules:PATTERN[,PATTERN], nested:PATTERN[,PATTERN], offload, "
        "budget:GIB, selective:attention, selective:torchtitan, selective:matmul-every-2, selective:ops=NAME[,NAME] "
        "or reentrant:POLICY; default none",
    ),
    Setting(
        name="attention", kind=str, default=None, help="default: as CUDA would choose for the GPU",
        choices=tuple(ATTENTION),
    ),
    Setting(name="gpu", kind=str, default=None, help="a name from `metapeak gpus`, CARD:PROFILE for a MIG slice"),
    Setting(
        name="gpu_memory", kind=str, default=None,
        help="instead of a GPU's name: all memory that torch sees of it (total_memory), as 24GiB",
    ),
    Setting(name="trust_remote_code", kind=bool, default=False, help="run the model code of the repository"),
)  # fmt: skip
_BY_NAME = {setting.name: setting for setting in SETTINGS}


def add_to_parser(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every setting, and --config."""
    group = parser.add_argument_group("step, strategies and device")
    for setting in SETTINGS:
        if setting.kind is bool:
            group.add_argument(setting.flag, action="store_true", default=None, help=setting.help)
            continue
        text = setting.help + (f" ({', '.join(setting.choices)})" if setting.choices else "")
        metavar = {int: "N", str: "NAME"}[setting.kind]
        group.add_argument(setting.flag, type=setting.kind, default=None, metavar=metavar, help=text)
    group.add_argument("--precision", default=None, metavar="NAME", help="fp32, bf16 or fp16: sets weights_dtype")
    group.add_argument("--config", default=None, metavar="FILE", help="a YAML or JSON file of the same names")


def resolve_options(arguments: argparse.Namespace) -> dict[str, Option]:
    """Every setting with its value and origin: the command line wins over --config, --config over the default.

    Raises InputError or UnknownName for a file or value that cannot be used.
    """
    options = {setting.name: Option(value=setting.default, origin="default") for setting in SETTINGS}
    if arguments.config:
        options.update(_from_file(arguments.config))
    if arguments.precision is not None:
        if arguments.precision not in DTYPES:
            raise UnknownName("precision", arguments.precision, DTYPES)
        options["weights_dtype"] = Option(value=arguments.precision, origin="command line (--precision)")
    for setting in SETTINGS:
        given = getattr(arguments, setting.name)
        if given is not None:
            options[setting.name] = Option(value=given, origin="command line")
    for name, option in options.items():
        _check(_BY_NAME[name], option)
    return options


def _check(setting: Setting, option: Option) -> None:
    if option.value is None or not setting.choices:
        return
    if option.value not in setting.choices:
        raise UnknownName(setting.name.replace("_", " "), str(option.value), setting.choices)


def _from_file(path: str) -> dict[str, Option]:
    values, lines = _read_mapping(path)
    options = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in _BY_NAME:
            raise UnknownName("option", str(key), _BY_NAME, f"In {path}.")
        kind = _BY_NAME[name].kind
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise InputError(f"{path}: {key} is {value!r}, but has to be of type {kind.__name__}.")
        line = f":{lines[key]}" if key in lines else ""
        options[name] = Option(value=value, origin=f"{path}{line}")
    return options


def _read_mapping(path: str) -> tuple[Mapping[str, Any], dict[str, int]]:
    """(the mapping in a YAML or JSON file, line of each of its keys)."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"Cannot read --config {path}: {error}.") from error
    try:
        values = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"--config {path} is neither YAML nor JSON: {error}.") from error
    if not isinstance(values, dict):
        raise InputError(f"--config {path} has to hold a mapping from option names to values.")
    lines = {key.value: key.start_mark.line + 1 for key, _ in node.value} if node is not None else {}
    return values, lines


def model_spec(reference: str, options: Mapping[str, Option]) -> ModelSpec:
    dtype = options["weights_dtype"].value
    return ModelSpec(
        reference=reference,
        task=options["task"].value,
        trust_remote_code=options["trust_remote_code"].value,
        dtype=DTYPES[dtype] if dtype else None,
    )


def step_spec(options: Mapping[str, Option]) -> StepSpec:
    names = ("batch_size", "seq_len", "target_len", "image_size", "num_images", "attention")
    return StepSpec(
        **{name: options[name].value for name in names},
        optimizer=OptimizerSpec(name=options["optimizer"].value, implementation=options["implementation"].value),
    )


def strategies_of(options: Mapping[str, Option]) -> list:
    """The strategies that the options ask for. Raises InputError for a policy that does not exist."""
    strategy = strategy_for(parse_policy(options["checkpointing"].value))
    return [strategy] if strategy is not None else []


def memory_of(text: str) -> int:
    """Bytes of a size as 24GiB, 80GB or 24564MiB. Raises InputError."""
    return gpu_of_memory(text).usable_bytes


def gpu_of(options: Mapping[str, Option]) -> Gpu | None:
    """The GPU that was named, or one of the given memory, or None. Raises UnknownName or InputError."""
    name, memory = options["gpu"].value, options["gpu_memory"].value
    if name is not None and memory is not None:
        raise InputError("Give either --gpu or --gpu-memory, not both.")
    if name is not None:
        return find_gpu_or_slice(name)
    return gpu_of_memory(memory) if memory is not None else None
