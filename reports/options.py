"""Options of the command line and of --config files: one table, each value with its origin."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metapeak.strategies.attention import ATTENTION
from metapeak.strategies.base import Strategy
from metapeak.strategies.gradient_checkpointing import parse_policy, strategy_for
from metapeak.strategies.lora import ADAPTER_DTYPES, BIASES, parse_targets
from metapeak.strategies.methods import METHODS, method_strategies
from metapeak.strategies.optimizer import IMPLEMENTATIONS, OPTIMIZERS
from metapeak.strategies.quantization.options import quantization_strategies
from metapeak.strategies.quantization.schemes import GPTQ_KERNELS, SCHEMES, STORAGE_DTYPES
from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.gpus import Gpu, find_gpu, gpu_of_memory
from metapeak.tracer.simulation import Option
from metapeak.tracer.spec import ModelSpec, OptimizerSpec, StepSpec

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """An option: its name in every place, its type, default and help. `choices` are the known names, if closed.

    `parse` makes the value of a text or a list of texts (a text alone on the command line).
    """

    name: str
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def names_of(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name for name in text.split(",") if name)


def numbers_of(text: str) -> tuple[int, ...]:
    """Numbers and ranges separated by commas, as 0-3,7. Raises InputError.

    >>> numbers_of("0-3,7")
    (0, 1, 2, 3, 7)
    """
    numbers: list[int] = []
    for part in names_of(text):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise InputError(f"'{text}' is no list of numbers such as 0-3,7.")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


SETTINGS = (
    Setting(name="task", kind=str, default=None, help="causal-lm, seq2seq-lm, ...; default: from the config"),
    Setting(name="batch_size", kind=int, default=1, help="micro-batch of one rank"),
    Setting(name="seq_len", kind=int, default=None, help="tokens a sample; default 2048 or the model's maximum"),
    Setting(name="target_len", kind=int, default=None, help="decoder tokens a sample, for seq2seq; default: seq_len"),
    Setting(name="image_size", kind=int, default=None, help="pixels a side; default: the config's"),
    Setting(name="num_images", kind=int, default=1, help="images a sample, for image-text models"),
    Setting(name="method", kind=str, default="full", help="what is trained; default full", choices=METHODS),
    Setting(name="lora_rank", kind=int, default=None, help="rank of the adapters; default 16"),
    Setting(name="lora_alpha", kind=float, default=None, help="their scale, alpha / rank; default 8, as PEFT's"),
    Setting(
        name="lora_targets", kind=str, default=None, parse=parse_targets,
        help="layers that get adapters: names, all-linear or a regular expression; default: PEFT's for the model",
    ),
    Setting(name="lora_exclude", kind=str, default=None, parse=parse_targets, help="layers that get none"),
    Setting(name="lora_layers", kind=str, default=None, parse=numbers_of, help="numbers of the blocks, as 0-3,7"),
    Setting(
        name="lora_target_parameters", kind=str, default=None, parse=names_of,
        help="parameters that are no layer's weight (fused experts)",
    ),
    Setting(name="lora_dropout", kind=float, default=None, help="dropout before the adapters; default 0"),
    Setting(name="lora_dora", kind=bool, default=None, help="weight-decomposed adapters"),
    Setting(name="lora_rslora", kind=bool, default=None, help="rank-stabilised scale, alpha / sqrt(rank)"),
    Setting(
        name="lora_modules_to_save", kind=str, default=None, parse=names_of,
        help="modules that are trained whole, beside the adapters",
    ),
    Setting(name="lora_bias", kind=str, default=None, help="biases that are trained; default none", choices=BIASES),
    Setting(
        name="adapter_dtype", kind=str, default=None, help="default fp32, as PEFT casts", choices=tuple(ADAPTER_DTYPES)
    ),
    Setting(
        name="trainable", kind=str, default=None, parse=names_of,
        help="modules or parameters that method frozen-base trains; patterns may have *",
    ),
    Setting(
        name="quantization", kind=str, default=None,
        help="of a frozen base; default none, with method qlora nf4 and double_quant", choices=("none", *SCHEMES),
    ),
    Setting(name="double_quant", kind=bool, default=None, help="quantise the statistics of nf4 and fp4 again"),
    Setting(
        name="compute_dtype", kind=str, default=None, help="of 4-bit layers; default: the weights dtype",
        choices=tuple(DTYPES),
    ),
    Setting(
        name="quant_storage", kind=str, default=None, help="what nf4 and fp4 are packed into; default uint8",
        choices=tuple(STORAGE_DTYPES),
    ),
    Setting(name="group_size", kind=int, default=None, help="inputs of one GPTQ or AWQ scale; default 128, -1: all"),
    Setting(
        name="gptq_kernel", kind=str, default=None, help="who dequantises GPTQ in training; default torch (GPTQModel)",
        choices=GPTQ_KERNELS,
    ),
    Setting(
        name="skip_modules", kind=str, default=None, parse=names_of,
        help="modules that are not quantised; default: the head, as transformers",
    ),
    Setting(
        name="kbit_prepare", kind=bool, default=None,
        help="run PEFT's prepare_model_for_kbit_training (norms, embeddings, head in fp32)",
    ),
    Setting(
        name="kbit_cast_back", kind=bool, default=None,
        help="after kbit_prepare: embeddings and head in bf16 again, as TRL before 1.0",
    ),
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
    Setting(name="gpu", kind=str, default=None, help="a name from `metapeak gpus`, for the verdict"),
    Setting(name="gpu_memory", kind=str, default=None, help="usable memory instead of a GPU's name, as 24GiB"),
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
        metavar = "NAME[,NAME]" if setting.parse else {int: "N", float: "X", str: "NAME"}[setting.kind]
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
            value = setting.parse(given) if setting.parse else given
            options[setting.name] = Option(value=value, origin="command line")
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
        line = f":{lines[key]}" if key in lines else ""
        for name, item in _flat(str(key).replace("-", "_"), value):
            if name not in _BY_NAME:
                raise UnknownName("option", name if isinstance(value, Mapping) else str(key), _BY_NAME, f"In {path}.")
            options[name] = Option(value=_typed(_BY_NAME[name], item, path), origin=f"{path}{line}")
    return options


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    """The options of one key: `lora: {rank: 8}` is lora_rank, for every name that has options below it; `type` is the
    option itself.
    """
    if not isinstance(value, Mapping):
        return [(name, value)]
    value = {name if key == "type" else key: item for key, item in value.items()}
    inner = [(str(key).replace("-", "_"), item) for key, item in value.items()]
    return [
        (f"{name}_{key}" if f"{name}_{key}" in _BY_NAME or key not in _BY_NAME else key, item) for key, item in inner
    ]


def _typed(setting: Setting, value: Any, path: str) -> Any:
    """The value of a file as the setting wants it. Raises InputError."""
    kind = setting.kind
    if value is None:
        return None
    if setting.parse is not None and isinstance(value, (list, int)) and not isinstance(value, bool):
        value = ",".join(str(item) for item in (value if isinstance(value, list) else [value]))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"{path}: {setting.name} is {value!r}, but has to be of type {kind.__name__}.")
    return setting.parse(value) if setting.parse is not None else value


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


def strategies_of(options: Mapping[str, Option]) -> list[Strategy]:
    """The strategies that the options ask for, in order. Raises InputError for a policy that does not exist."""
    strategy = strategy_for(parse_policy(options["checkpointing"].value))
    # Adapters first: a trainer switches checkpointing on for the model that it trains.
    return [*model_strategies(options), *([strategy] if strategy is not None else [])]


def model_strategies(options: Mapping[str, Option]) -> list[Strategy]:
    """The strategies that change what is traced, without the checkpointing policy. Raises InputError."""
    values = {name: option.value for name, option in options.items()}
    # The base is loaded quantised, then it gets adapters.
    return [*quantization_strategies(values), *method_strategies(values)]


def memory_of(text: str) -> int:
    """Bytes of a size as 24GiB, 80GB or 24564MiB. Raises InputError."""
    return gpu_of_memory(text).usable_bytes


def gpu_of(options: Mapping[str, Option]) -> Gpu | None:
    """The GPU that was named, or one of the given memory, or None. Raises UnknownName or InputError."""
    name, memory = options["gpu"].value, options["gpu_memory"].value
    if name is not None and memory is not None:
        raise InputError("Give either --gpu or --gpu-memory, not both.")
    if name is not None:
        return find_gpu(name)
    return gpu_of_memory(memory) if memory is not None else None
