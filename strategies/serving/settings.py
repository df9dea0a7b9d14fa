"""Options of `serve`: the same table as an estimate's, for what serving asks; and from options to its spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from metapeak.strategies.quantization.schemes import SCHEMES
from metapeak.strategies.request import gpu_of, model_spec
from metapeak.strategies.serving.engines import ENGINES
from metapeak.strategies.serving.formats import FORMATS, KV_DTYPES
from metapeak.strategies.serving.serve import Serving, ServingSpec, serve
from metapeak.strategies.settings import BY_NAME, Setting
from metapeak.tracer.errors import InputError
from metapeak.tracer.simulation import Option

SERVING_SETTINGS = (
    Setting(name="engine", kind=str, default="transformers", help="who serves; default transformers", choices=ENGINES),
    Setting(name="engine_version", kind=str, default=None, help="as 0.10.2; decides vLLM's rules and defaults"),
    Setting(name="gpu", kind=str, default=None, help="a name from `metapeak gpus`; several compared: NAME,NAME"),
    BY_NAME["gpu_memory"],
    BY_NAME["task"],
    BY_NAME["weights_dtype"],
    Setting(name="tp", kind=int, default=1, help="tensor parallel ranks"),
    Setting(name="pp", kind=int, default=1, help="pipeline parallel stages"),
    Setting(
        name="quantization", kind=str, default=None, choices=("none", *SCHEMES, *FORMATS),
        help="of the weights; default: the checkpoint's own",
    ),
    BY_NAME["double_quant"],
    BY_NAME["group_size"],
    Setting(
        name="kv_dtype", kind=str, default=None, help="of keys and values; default: as computed",
        choices=tuple(KV_DTYPES),
    ),
    Setting(name="max_model_len", kind=int, default=None, help="longest sequence; default: the model's"),
    Setting(name="context", kind=int, default=None, help="length that sequences are counted at; default max_model_len"),
    Setting(name="concurrency", kind=int, default=1, help="sequences at once that have to fit"),
    Setting(name="encoder_tokens", kind=int, default=None, help="positions of an encoder's output"),
    Setting(name="max_num_seqs", kind=int, default=None, help="most sequences in a batch; default: the engine's"),
    Setting(
        name="max_num_batched_tokens", kind=int, default=None,
        help="tokens of one prefill (chunk); default: the engine's",
    ),
    Setting(name="block_size", kind=int, default=None, help="tokens a block of the cache; default: the engine's"),
    Setting(
        name="gpu_memory_utilization", kind=float, default=None,
        help="fraction of the GPU (SGLang's mem_fraction_static); default: the engine's",
    ),
    Setting(name="enforce_eager", kind=bool, default=False, help="no CUDA graphs"),
    Setting(name="egress_price", kind=float, default=None, help="USD a GB of text that leaves the cloud"),
    BY_NAME["trust_remote_code"],
)  # fmt: skip


def serving_spec(options: Mapping[str, Option]) -> ServingSpec:
    """The spec that resolved options mean."""
    value = {name: option.value for name, option in options.items()}
    same = ("engine", "engine_version", "tp", "pp", "kv_dtype", "max_model_len", "context", "concurrency")
    same += ("encoder_tokens", "max_num_seqs", "max_num_batched_tokens", "block_size")
    return ServingSpec(
        **{name: value[name] for name in same},
        quantization=None if value["quantization"] == "none" else value["quantization"],
        double_quant=bool(value["double_quant"]),
        group_size=value["group_size"],
        memory_fraction=value["gpu_memory_utilization"],
        cuda_graphs=not value["enforce_eager"],
    )


def serve_resolved(
    reference: str, options: Mapping[str, Option], *, progress: Callable[[str], None] = lambda what: None
) -> Serving:
    """`serve` with resolved options. Raises InputError without a GPU, and as `serve`."""
    gpu = gpu_of(options)
    price = options["egress_price"].value
    if price is not None and price < 0:
        raise InputError(f"egress_price is {price:g}, but a price is not negative.")
    if gpu is None:
        raise InputError("serve needs --gpu NAME or --gpu-memory 24GiB: the cache gets what the rest leaves of it.")
    return serve(model_spec(reference, options), serving_spec(options), gpu=gpu, progress=progress)
