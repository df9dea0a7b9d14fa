"""Options: one table of what can be asked, with the same names on the command line, in files, receipts and Python.

`resolve` fills in what nobody gave (presets, defaults) and remembers who decided each value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metapeak.strategies.attention import ATTENTION
from metapeak.strategies.kernels import KERNELS
from metapeak.strategies.lifecycle import SAVES
from metapeak.strategies.loading import WAYS
from metapeak.strategies.lora import ADAPTER_DTYPES, BIASES, parse_targets
from metapeak.strategies.loss import LOSSES
from metapeak.strategies.methods import METHODS
from metapeak.strategies.optimizers import IMPLEMENTATIONS
from metapeak.strategies.parallel.context_parallel import ROTATIONS
from metapeak.strategies.parallel.options import ENGINES, parse_reshard, with_engine, with_parallel_precision
from metapeak.strategies.parallel.schedules import SCHEDULES
from metapeak.strategies.parallel.tensor_parallel import tp_plan_of
from metapeak.strategies.parallel.units import UPCASTS
from metapeak.strategies.parallel.zero.options import OFFLOAD_DEVICES, TRUTHS, elements_of
from metapeak.strategies.precision import AUTOCAST_REGIONS, PRECISIONS
from metapeak.strategies.presets import PRESETS, filled_in
from metapeak.strategies.quantization.schemes import GPTQ_KERNELS, SCHEMES, STORAGE_DTYPES
from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.simulation import Option

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SHORT = {long: short for short, long in DTYPES.items()}


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
        if last and int(last) < int(first):
            raise InputError(f"'{text}': the range {part} runs backwards.")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def reshard_text(text: str) -> str:
    """The text as it is, once it can be read. Raises InputError."""
    parse_reshard(text)
    return text


SETTINGS = (
    Setting(
        name="preset", kind=str, default=None, choices=tuple(PRESETS),
        help="fills in what the framework does where nothing else is given",
    ),
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
        name="quant_storage", kind=str, default=None,
        help="what nf4 and fp4 are packed into; default uint8; of GPTQ, what its integers are seen as",
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
    Setting(
        name="precision", kind=str, default=None, help="sets weights_dtype and autocast as usual",
        choices=tuple(PRECISIONS),
    ),
    Setting(
        name="autocast", kind=str, default=None, help="dtype of an autocast region; fp16 brings a GradScaler",
        choices=("bf16", "fp16"),
    ),
    Setting(
        name="autocast_region", kind=str, default=None, choices=AUTOCAST_REGIONS,
        help="around the model's forward as accelerate, or the loss too as plain scripts",
    ),
    Setting(name="grad_accum", kind=int, default=1, help="micro-batches a step"),
    Setting(
        name="grad_accum_dtype", kind=str, default=None, choices=("fp32",),
        help="accumulate 16-bit gradients in buffers of this dtype; needs master_weights",
    ),
    Setting(name="full_trace", kind=bool, default=False, help="record every block, also where a few tell the rest"),
    Setting(name="max_grad_norm", kind=float, default=None, help="clip the norm of all gradients"),
    Setting(name="master_weights", kind=bool, default=False, help="the optimizer works on fp32 copies of the weights"),
    Setting(
        name="optimizer", kind=str, default="adamw",
        help="adamw, sgd, adafactor, lion, muon, adamw8bit, paged-adamw8bit, adamw4bit, ... (a wrong name lists them), "
        "the Hugging Face Trainer's names, package.Class, file.py:Class or none; default adamw",
    ),
    Setting(
        name="implementation", kind=str, default=None, help="of the optimizer; default: as CUDA picks for its class",
        choices=IMPLEMENTATIONS,
    ),
    Setting(
        name="state_dtype", kind=str, default=None, help="of the moments of adam and adamw; default: the parameter's",
        choices=tuple(DTYPES),
    ),
    Setting(name="optimizer_args", kind=str, default=None, help="NAME=VALUE[,NAME=VALUE] for the optimizer's class"),
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
    Setting(
        name="loss", kind=str, default=None,
        help="default: the model's own; chunked:N, fused-linear, " + ", ".join(
            name if family.argument is None else f"{name}:{family.argument.upper()}"
            for name, family in LOSSES.items() if name not in ("chunked", "fused-linear")
        ),
    ),
    Setting(name="loss_chunk_tokens", kind=int, default=None, help="with loss chunked: tokens a chunk (litgpt: 128)"),
    Setting(
        name="kernels", kind=str, default=None, parse=names_of,
        help="fused kernels in place of the model's own modules: " + ", ".join(KERNELS),
    ),
    Setting(
        name="keep_outputs", kind=bool, default=False,
        help="the training loop holds the model's outputs (logits) until the next iteration's",
    ),
    Setting(name="evaluate", kind=bool, default=None, help="evaluation between steps, as the Hugging Face Trainer's"),
    Setting(name="eval_batch_size", kind=int, default=None, help="samples of an evaluation or generation; default 8"),
    Setting(name="eval_batches", kind=int, default=None, help="batches of an evaluation; default 2"),
    Setting(name="eval_logits", kind=bool, default=None, help="an evaluation keeps logits (compute_metrics)"),
    Setting(
        name="eval_accumulation_steps", kind=int, default=None, help="kept logits go to the host after so many batches"
    ),
    Setting(name="generate", kind=int, default=None, help="new tokens generated between steps, with the model's cache"),
    Setting(name="prompt_len", kind=int, default=None, help="tokens before the generated ones; default: seq_len"),
    Setting(name="save", kind=str, default=None, help="checkpoint after the steps", choices=SAVES),
    Setting(name="load", kind=str, default=None, help="how weights come; default device", choices=WAYS),
    Setting(
        name="engine", kind=str, default=None, choices=ENGINES,
        help="what spreads the job over GPUs; default: fsdp2 with dp_shard, ddp with dp_replicate, deepspeed with "
        "zero_stage, else none",
    ),
    Setting(name="zero_stage", kind=int, default=None, help="0 to 3, of engine deepspeed"),
    Setting(name="gpus", kind=int, default=None, help="GPUs in all; has to be the product of the degrees"),
    Setting(name="dp_replicate", kind=int, default=None, help="replicas of the model, or of its shards; default 1"),
    Setting(name="dp_shard", kind=int, default=None, help="ranks that parameters are sharded over; default 1"),
    Setting(name="tp", kind=int, default=None, help="degree of tensor parallelism, by the model's own plan; default 1"),
    Setting(
        name="tp_plan", kind=str, default=None, parse=tp_plan_of,
        help="file (JSON or YAML) that maps paths of modules, * for layer numbers, to styles of transformers; "
        "goes before the model's own rules",
    ),
    Setting(
        name="sequence_parallel", kind=bool, default=None,
        help="with tp: norms and residuals on a part of the sequence, as torchtitan",
    ),
    Setting(
        name="loss_parallel", kind=bool, default=None, help="with tp: logits stay sharded over the vocabulary",
    ),
    Setting(name="pp", kind=int, default=None, help="degree of pipeline parallelism; default 1"),
    Setting(
        name="schedule", kind=str, default=None, help="of a pipeline: " + ", ".join(SCHEDULES) + "; V stages a rank, "
        "default 2; default 1f1b",
    ),
    Setting(
        name="microbatches", kind=int, default=None, help="of batch_size each, in one step of a pipeline; default: one "
        "a stage",
    ),
    Setting(
        name="pp_split", kind=str, default=None, parse=names_of,
        help="first blocks of the later stages, as 10,20,30 or module paths; default: equal stages",
    ),
    Setting(name="cp", kind=int, default=None, help="degree of context parallelism (ring attention); default 1"),
    Setting(
        name="cp_rotation", kind=str, default=None, choices=ROTATIONS,
        help="how keys and values travel with cp; default allgather, as torch and accelerate",
    ),
    Setting(
        name="ep", kind=int, default=None,
        help="degree of expert parallelism, over ranks of dp_shard x cp x tp; default 1",
    ),
    Setting(
        name="expert_load_skew", kind=float, default=None,
        help="with ep: tokens of the traced rank's experts over the mean; default 1",
    ),
    Setting(name="bucket_cap_mb", kind=int, default=None, help="of DDP: MiB of a bucket of gradients; default 25"),
    Setting(
        name="gradient_as_bucket_view", kind=bool, default=None,
        help="of DDP: gradients are views of the reducer's buckets, no second copy",
    ),
    Setting(name="cpu_offload", kind=bool, default=None, help="shards and optimizer on the host"),
    Setting(
        name="reshard_after_forward", kind=str, default=None, parse=reshard_text,
        help="of FSDP: default (all units but the root), always, never or a number of ranks",
    ),
    Setting(
        name="param_dtype", kind=str, default=None, choices=tuple(DTYPES),
        help="of FSDP's mixed precision; default: that of autocast, else the parameters'",
    ),
    Setting(
        name="reduce_dtype", kind=str, default=None, choices=tuple(DTYPES),
        help="of FSDP's gradients in the reduce-scatter; default as param_dtype",
    ),
    Setting(
        name="output_dtype", kind=str, default=None, choices=tuple(DTYPES),
        help="FSDP2 casts what the model returns; default: that of autocast",
    ),
    Setting(
        name="fsdp_upcast", kind=str, default=None, choices=UPCASTS,
        help="parameters that are float32 in the shards; default with autocast trainable, as accelerate",
    ),
    Setting(
        name="wrap", kind=str, default=None, parse=names_of,
        help="units of FSDP: blocks (default), accelerate, none (the root alone) or patterns of paths and classes",
    ),
    Setting(
        name="checkpoint_around_units", kind=bool, default=None,
        help="of FSDP1: checkpoints around the units, as transformers before 4.52 placed them; default: inside",
    ),
    Setting(
        name="sync_each_batch", kind=bool, default=None,
        help="reduce gradients after every micro-batch; default: after the last, as the Hugging Face Trainer",
    ),
    Setting(
        name="reduce_bucket_size", kind=str, default=None, parse=elements_of,
        help="of DeepSpeed: elements of a bucket of gradients; default 5e8, auto: hidden_size^2",
    ),
    Setting(
        name="allgather_bucket_size", kind=str, default=None, parse=elements_of,
        help="of ZeRO 1 and 2: elements gathered at a time after a step; default 5e8",
    ),
    Setting(
        name="overlap_comm", kind=str, default=None, choices=TRUTHS,
        help="of DeepSpeed: reduce while backward runs; default true in stage 3",
    ),
    Setting(
        name="contiguous_gradients", kind=str, default=None, choices=TRUTHS,
        help="of DeepSpeed: gradients are copied into buckets; default true",
    ),
    Setting(
        name="sub_group_size", kind=str, default=None, parse=elements_of,
        help="of ZeRO 3: elements that are stepped at a time; default 1e9",
    ),
    Setting(
        name="stage3_prefetch_bucket_size", kind=str, default=None, parse=elements_of,
        help="of ZeRO 3: elements gathered ahead of use; default 5e7, auto: 0.9 hidden_size^2",
    ),
    Setting(
        name="stage3_max_live_parameters", kind=str, default=None, parse=elements_of,
        help="of ZeRO 3: gathered elements beyond which nothing is gathered ahead; default 1e9",
    ),
    Setting(
        name="stage3_max_reuse_distance", kind=str, default=None, parse=elements_of,
        help="of ZeRO 3: a parameter used again within as many elements stays gathered; default 1e9",
    ),
    Setting(
        name="stage3_param_persistence_threshold", kind=str, default=None, parse=elements_of,
        help="of ZeRO 3: parameters with fewer elements stay whole; default 1e5, auto: 10 hidden_size",
    ),
    Setting(
        name="offload_optimizer", kind=str, default=None, choices=OFFLOAD_DEVICES,
        help="of DeepSpeed: where float32 partitions and optimizer states are; default none",
    ),
    Setting(
        name="offload_param", kind=str, default=None, choices=OFFLOAD_DEVICES,
        help="of ZeRO 3: where partitions of the parameters are; default none",
    ),
    Setting(
        name="allocator_config", kind=str, default=None,
        help="settings of the caching allocator as in PYTORCH_CUDA_ALLOC_CONF, say expandable_segments:True",
    ),
    Setting(name="gpu", kind=str, default=None, help="a name from `metapeak gpus`, CARD:PROFILE for a MIG slice"),
    Setting(
        name="gpu_memory", kind=str, default=None,
        help="instead of a GPU's name: all memory that torch sees of it (total_memory), as 24GiB",
    ),
    Setting(name="trust_remote_code", kind=bool, default=False, help="run the model code of the repository"),
)  # fmt: skip
BY_NAME = {setting.name: setting for setting in SETTINGS}


def resolve(*given: Mapping[str, Option], settings: Sequence[Setting] = SETTINGS) -> dict[str, Option]:
    """Every setting with its value and origin: later mappings win over earlier ones, all of them over the preset, and
    the preset over the defaults. Raises InputError or UnknownName for a value that cannot be used.

    >>> options = resolve({"preset": Option(value="trl", origin="call")})
    >>> options["seq_len"].value, options["seq_len"].origin
    (1024, 'preset trl: trl 1.16 trainer/sft_config.py:SFTConfig.max_length')
    """
    by_name = {setting.name: setting for setting in settings}
    options = {name: Option(value=setting.default, origin="default") for name, setting in by_name.items()}
    for mapping in given:
        _override(options, mapping)
    for name, option in options.items():
        _check(by_name[name], option)
    if settings is not SETTINGS:  # a command with a table of its own, as serve: no presets, no engines
        return options
    options, preset = with_engine(options), options["preset"].value
    return with_parallel_precision(filled_in(options, preset) if preset is not None else options)


def options_of(values: Mapping[str, Any], origin: str, *, settings: Sequence[Setting] = SETTINGS) -> dict[str, Option]:
    """Options of plain values by name, checked and converted as those of a file. Raises InputError or UnknownName."""
    options = {}
    by_name = {setting.name: setting for setting in settings}
    for key, value in values.items():
        for name, item in _flat(str(key).replace("-", "_"), value):
            if name not in by_name:
                raise UnknownName("option", name if isinstance(value, Mapping) else str(key), by_name, f"In {origin}.")
            options[name] = Option(value=_typed(by_name[name], item, origin), origin=origin)
    return options


def _override(options: dict[str, Option], given: Mapping[str, Option]) -> None:
    """Put options of a stronger origin over weaker ones; a precision first, so that what it stands for can be given."""
    precision = given.get("precision")
    if precision is not None and precision.value is not None:
        _check(BY_NAME["precision"], precision)
        weights, autocast = PRECISIONS[precision.value]
        origin = f"{precision.origin} (--precision)"
        options["weights_dtype"] = Option(value=_SHORT[weights], origin=origin)
        options["autocast"] = Option(value=_SHORT[autocast] if autocast else None, origin=origin)
    options.update(given)


def _check(setting: Setting, option: Option) -> None:
    if option.value is None or not setting.choices:
        return
    if option.value not in setting.choices:
        raise UnknownName(setting.name.replace("_", " "), str(option.value), setting.choices)


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    """The options of one key: `lora: {rank: 8}` is lora_rank, for every name that has options below it; `type` is the
    option itself.
    """
    if not isinstance(value, Mapping):
        return [(name, value)]
    value = {name if key == "type" else key: item for key, item in value.items()}
    inner = [(str(key).replace("-", "_"), item) for key, item in value.items()]
    return [(f"{name}_{key}" if f"{name}_{key}" in BY_NAME or key not in BY_NAME else key, item) for key, item in inner]


def _typed(setting: Setting, value: Any, path: str) -> Any:
    """The value of a file as the setting wants it. Raises InputError."""
    kind = setting.kind
    if value is None:
        return None
    if setting.parse is not None and isinstance(value, (list, int, float)) and not isinstance(value, bool):
        value = ",".join(str(item) for item in (value if isinstance(value, list) else [value]))
    if isinstance(value, bool) and setting.choices == TRUTHS:
        value = str(value).lower()
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    elif isinstance(value, str) and kind is not str:
        value = _of_text(kind, value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"{path}: {setting.name} is {value!r}, but has to be of type {kind.__name__}.")
    return setting.parse(value) if setting.parse is not None else value


def _of_text(kind: type, text: str) -> Any:
    """A number or a truth value that was written as text; the text itself where it is none."""
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return kind(text)
    except ValueError:
        return text
