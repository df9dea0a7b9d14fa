"""litgpt: `litgpt:NAME` with a name of litgpt.config; finetune/full.py and finetune/lora.py are the training steps.

Where each byte comes from: litgpt's classes and its chunked_cross_entropy run in the trace, and Lightning's precision
plugin around the forward: its outputs are converted to float32 (also with bf16-true), and the script's variable
`logits` holds them until those of the next micro-batch take its name.

Note [Tables of positions]
    `fit` sets `model.max_seq_length`, which computes cos and sin anew: in float32, outside the plugin's default dtype.
Note [StableEmbedding]
    With a quantised base finetune/lora.py puts a StableEmbedding in the place of `wte`, after the rest was frozen
    and the optimizer made. So its weight gets a gradient that no zero_grad reaches: it stays for good. litgpt before
    0.5 (October 2024, pull request 1770) did not: `litgpt-0.4:NAME` is the installed litgpt without it.

Not modelled: the validation of two batches before training (no gradients; below the training step's peak); loading.
Sources: litgpt 0.5.13 model.py, lora.py, utils.py, finetune/{full,lora}.py; lightning 2.6 fabric/wrappers.py
_FabricModule.forward, plugins/precision/{half,bitsandbytes}.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from metapeak.tracer.errors import InputError
from metapeak.tracer.packages.base import Adapters, Inputs, Package, tokens

if TYPE_CHECKING:
    import torch
    from torch import nn

    from metapeak.tracer.spec import BatchSpec

# What litgpt's switches adapt, by the names of litgpt and of transformers.
SWITCHES = {
    "lora_query": ("query", "q_proj"),
    "lora_key": ("key", "k_proj"),
    "lora_value": ("value", "v_proj"),
    "lora_projection": ("projection", "o_proj", "out_proj"),
    "lora_mlp": ("mlp", "gate_proj", "up_proj", "down_proj", "fc1", "fc2"),
    "lora_head": ("head", "lm_head"),
}
DEFAULT_TARGETS = ("query", "value")
CHUNK_TOKENS = 128


class LitGPT(Package):
    prefix = "litgpt"
    stable_embedding = True
    modules = ("litgpt.config", "litgpt.model", "litgpt.lora", "litgpt.utils")
    losses = ("chunked", f"chunked-ce:{CHUNK_TOKENS}", f"chunked-tokens:{CHUNK_TOKENS}")
    autocast_region = "forward"
    bitsandbytes_0_42 = True  # utils.py and finetune/lora.py warn about any other

    def names(self) -> list[str]:
        from litgpt.config import name_to_config

        return list(name_to_config)

    def build(self, name: str, dtype: torch.dtype) -> nn.Module:
        from litgpt.model import GPT

        return GPT.from_name(name).to(dtype)

    def batch(self, module: nn.Module, spec: BatchSpec) -> Inputs:
        config = module.config
        ids, notes = tokens(spec, config.vocab_size, config.block_size, f"{config.name} of litgpt")
        return Inputs(tensors={"input_ids": ids, "labels": ids.clone()}, notes=notes)

    def prepare_for(self, module: nn.Module, batch: BatchSpec) -> None:
        import torch

        with torch.device("meta"):
            module.max_seq_length = batch.seq_len or min(batch.default_seq_len, module.config.block_size)
            module.cos, module.sin = module.rope_cache(device=torch.device("meta"))  # also where the length is the same

    def loss(self, name: str) -> TrainingStep:
        return TrainingStep()

    def notes(self, module: nn.Module) -> tuple[str, ...]:
        sentences = (
            "litgpt's finetuning loop: logits are converted to float32 by Lightning Fabric and held until the next "
            f"micro-batch's take their name; cross entropy in chunks of {CHUNK_TOKENS} tokens",
        )
        if not list(self.not_optimised(module)):
            return sentences
        return (
            *sentences,
            "litgpt puts a StableEmbedding in the place of wte after everything was frozen: its weight gets a "
            "gradient, which the optimizer does not have and zero_grad does not free",
        )

    def with_adapters(self, module: nn.Module, adapters: Adapters) -> nn.Module:
        import torch
        from litgpt.lora import GPT, mark_only_lora_as_trainable

        switches = _switches(adapters.targets)
        dtype = module.transformer.wte.weight.dtype
        with torch.device("meta"):
            adapted = GPT.from_name(
                module.config.name,
                lora_r=adapters.rank,
                lora_alpha=adapters.scale,
                lora_dropout=adapters.dropout,
                **dict.fromkeys(switches, True),
            ).to(dtype)
        _take_over(module, adapted)
        mark_only_lora_as_trainable(adapted)
        for parameter in self.not_optimised(adapted):
            parameter.requires_grad = True
        return adapted

    def adapter_notes(self, module: nn.Module, adapters: Adapters) -> tuple[str, ...]:
        dtype = str(module.transformer.wte.weight.dtype).removeprefix("torch.")
        count = sum(parameter.numel() for name, parameter in module.named_parameters() if "lora_" in name)
        switches = ", ".join(_switches(adapters.targets))
        note = (
            f"LoRA by litgpt ({switches}): {count:,} adapter parameters in {dtype} as the weights, the base is frozen"
        )
        return (note, *_mlp_note(adapters.targets))

    def not_quantised(self, module: nn.Module) -> tuple[str, ...]:
        return ()  # the plugin replaces torch.nn.Linear itself while the model is made: lm_head too

    def after_quantisation(self, module: nn.Module) -> nn.Module:
        import torch

        if not self.stable_embedding:
            return module
        from bitsandbytes.nn import StableEmbedding

        old = module.transformer.wte
        with torch.device("meta"):
            new = StableEmbedding(old.num_embeddings, old.embedding_dim)
        module.transformer.wte = new.to(old.weight.dtype)
        return module

    def not_optimised(self, module: nn.Module) -> Iterable[nn.Parameter]:
        embedding = module.transformer.wte
        return list(embedding.parameters()) if type(embedding).__name__ == "StableEmbedding" else ()


class TrainingStep:
    """The body of `fit`: the variable `logits` outlives the micro-batch."""

    def __init__(self):
        self.logits: Any = None

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        from litgpt.lora import GPT as AdaptedGPT
        from litgpt.utils import chunked_cross_entropy

        ids, labels = batch["input_ids"], batch["labels"]
        if not isinstance(model, AdaptedGPT):
            self.logits = _fabric_forward(model, ids)
            return chunked_cross_entropy(self.logits[..., :-1, :], labels[..., 1:], chunk_size=CHUNK_TOKENS)
        self.logits = _fabric_forward(model, ids, lm_head_chunk_size=CHUNK_TOKENS)
        self.logits[-1] = self.logits[-1][..., :-1, :]
        return chunked_cross_entropy(self.logits, labels[..., 1:], chunk_size=CHUNK_TOKENS)


def _fabric_forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """_FabricModule.forward with the plugin for weights of this dtype."""
    import torch
    from lightning.fabric.plugins.precision import HalfPrecision, Precision

    names = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}
    dtype = model.transformer.wte.weight.dtype
    precision = HalfPrecision(names[dtype]) if dtype in names else Precision()
    with precision.forward_context():
        output = model(*args, **kwargs)
    return precision.convert_output(output)


def _switches(targets: tuple[str, ...] | None) -> list[str]:
    """litgpt's switches for names of layers. Raises InputError for a name that none of them adapts."""
    targets = DEFAULT_TARGETS if targets is None else targets
    if targets == ("all-linear",):
        return [name for name in SWITCHES if name != "lora_head"]
    by_name = {known: switch for switch, names in SWITCHES.items() for known in (switch, *names)}
    unknown = [name for name in targets if name not in by_name]
    if unknown:
        raise InputError(
            f"lora targets {', '.join(unknown)}: litgpt adapts by switches for "
            f"{', '.join(name for names in SWITCHES.values() for name in names)}, or all-linear."
        )
    return list(dict.fromkeys(by_name[name] for name in targets))


def _mlp_note(targets: tuple[str, ...] | None) -> tuple[str, ...]:
    named = [name for name in targets or () if name in SWITCHES["lora_mlp"] and name != "mlp"]
    return (f"lora_mlp adapts every linear layer of the MLP ({', '.join(named)} asked for)",) if named else ()


def _take_over(module: nn.Module, adapted: nn.Module) -> None:
    """Put layers of the plain model that were replaced (quantised linears, the embedding) into the adapted one."""
    from torch import nn

    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and type(part) is not nn.Linear:
            adapted.set_submodule(f"{name}.linear", part)
    adapted.transformer.wte = module.transformer.wte
    adapted.max_seq_length = module.max_seq_length
    adapted.cos, adapted.sin = module.cos, module.sin


class LitGPT04(LitGPT):
    prefix = "litgpt-0.4"
    stable_embedding = False


PACKAGE = LitGPT()
LITGPT_0_4 = LitGPT04()
