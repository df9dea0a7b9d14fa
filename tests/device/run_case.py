"""One case of measure.py in a process of its own: build, train three steps, print what the GPU's counters say.

    python -m tests.device.run_case '{"model": ..., "options": ..., "device": "cuda", "snapshot": null}'

The step is the one that metapeak traces (tracer/training_loop.py): `loss = model(**batch).loss`, backward, optimizer
step, zero_grad. The first step makes gradients and states, the last is measured.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

STEPS = 3
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def build(model: str, options: dict[str, Any], device: str):
    """(the model on the device with random weights, its batch there, its task)."""
    import torch

    from metapeak.tracer.batches import make_batch
    from metapeak.tracer.models import build, resolve_model
    from metapeak.tracer.spec import ModelSpec, StepSpec

    resolved = resolve_model(ModelSpec(reference=model))
    dtype = DTYPES[options["weights_dtype"]]
    on_meta = build(resolved, dtype=dtype, attention=options["attention"]).module
    step = StepSpec(batch_size=options["batch_size"], seq_len=options.get("seq_len"))
    batch = {name: tensor.to(device) for name, tensor in make_batch(on_meta, resolved.task, step).tensors.items()}
    with torch.device("cpu" if options.get("quantization") else device):
        real = type(on_meta)._from_config(on_meta.config, dtype=getattr(torch, dtype))
    real.config.use_cache = False
    return real.train(), batch, resolved.task


def with_method(model, options: dict[str, Any], device: str):
    """The model as the method trains it: adapters by PEFT, a base quantised by bitsandbytes."""
    if options.get("quantization"):
        from transformers import BitsAndBytesConfig
        from transformers.integrations.bitsandbytes import replace_with_bnb_linear

        model = replaced_by_packed(model, options["quantization"], BitsAndBytesConfig, replace_with_bnb_linear)
    model = model.to(device)
    if options["checkpointing"] == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if options["method"] in ("lora", "qlora"):
        from peft import LoraConfig, get_peft_model

        lora = options["lora"]
        if options["checkpointing"] == "full":
            model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=lora["rank"], target_modules=lora["targets"], task_type="CAUSAL_LM"))
    return model


def replaced_by_packed(model, quantization: dict[str, Any], config_class, replace):
    """The model with bitsandbytes' linear layers that hold its weights; they are packed on their way to the GPU."""
    import bitsandbytes
    import torch

    dense = {name: part for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    config = config_class(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization["type"],
        bnb_4bit_use_double_quant=quantization["double_quant"],
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = replace(model, modules_to_not_convert=["lm_head"], quantization_config=config)
    for name, part in model.named_modules():
        if isinstance(part, bitsandbytes.nn.Linear4bit):
            part.weight = bitsandbytes.nn.Params4bit(
                dense[name].weight.data, requires_grad=False, quant_type=quantization["type"],
                compress_statistics=quantization["double_quant"],
            )  # fmt: skip
            part.bias = dense[name].bias
    return model


def make_optimizer(parameters, chosen: dict[str, Any]):
    import torch

    name, implementation = chosen["name"], chosen.get("implementation")
    if name == "adamw8bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters)
    how = {"foreach": {"foreach": True}, "fused": {"fused": True}, "for-loop": {"foreach": False}, None: {}}
    classes = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    return classes[name](parameters, **how[implementation], **({"lr": 1e-3} if name == "sgd" else {}))


def train(model, batch, optimizer, options: dict[str, Any], device: str, before_last) -> None:
    """STEPS steps; `before_last()` comes before the last."""
    import torch

    dtype = options["autocast"] and getattr(torch, DTYPES[options["autocast"]])
    scaler = torch.amp.GradScaler(device, enabled=options["autocast"] == "fp16")
    if dtype:
        from accelerate.utils.operations import convert_outputs_to_fp32

        model.forward = convert_outputs_to_fp32(torch.autocast(device, dtype=dtype)(model.forward))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    micro_batches = [{name: tensor.clone() for name, tensor in batch.items()} for _ in range(options["grad_accum"])]
    for step in range(STEPS):
        if step == STEPS - 1:
            before_last()
        for micro_batch in micro_batches:
            loss = model(**micro_batch).loss
            scaler.scale(loss / len(micro_batches) if len(micro_batches) > 1 else loss).backward()
            loss = loss.detach()
        if options.get("grad_clip"):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(trained, options["grad_clip"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


def measured_on_cuda(job: dict[str, Any]) -> dict[str, Any]:
    """The allocator's counters of the last step, and what the driver shows."""
    import torch

    total = torch.cuda.mem_get_info()[1]
    context = total - torch.cuda.mem_get_info()[0]
    if job["snapshot"]:
        torch.cuda.memory._record_memory_history(max_entries=400_000)
    task = run_steps(job, "cuda", torch.cuda.reset_peak_memory_stats)
    torch.cuda.synchronize()
    if job["snapshot"]:
        torch.cuda.memory._dump_snapshot(job["snapshot"])
    in_use = total - torch.cuda.mem_get_info()[0]
    return {
        "task": task,
        "gpu": torch.cuda.get_device_name(),
        "context_bytes": context,
        "bytes": {
            "max_allocated": torch.cuda.max_memory_allocated(),
            "max_reserved": torch.cuda.max_memory_reserved(),
            "steady_allocated": torch.cuda.memory_allocated(),
            "nvml": in_use,
        },
    }


def measured_on_cpu(job: dict[str, Any]) -> dict[str, Any]:
    """The process's largest resident set: no prediction of a GPU's memory, but the same path and record."""
    task = run_steps(job, "cpu", lambda: None)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"task": task, "gpu": None, "context_bytes": 0, "bytes": {"rss": peak}}


def run_steps(job: dict[str, Any], device: str, before_last) -> str:
    import torch

    torch.manual_seed(0)
    options = job["options"]
    model, batch, task = build(job["model"], options, device)
    model = with_method(model, options, device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    train(model, batch, make_optimizer(parameters, options["optimizer"]), options, device, before_last)
    return task


def versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "transformers", "accelerate", "peft", "bitsandbytes"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    job = json.loads(sys.argv[1])
    result = measured_on_cuda(job) if job["device"] == "cuda" else measured_on_cpu(job)
    print(json.dumps({**result, "versions": versions()}))


if __name__ == "__main__":
    main()
