"""What a script does on real ranks after its steps: an evaluation, a save.

A CPU has no copies to the host: here they are made, and counted as the host's.

Shares no code with metapeak.
"""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor


def evaluate(model, batch):
    """A batch as transformers' Trainer.evaluation_loop has it: only losses are kept, those of all ranks gathered."""
    model.eval()
    inputs = {name: tensor.clone() for name, tensor in batch.items()}
    with torch.no_grad():
        loss = model(**inputs).loss.detach().mean()
    losses = loss.repeat(len(inputs["input_ids"]))
    gathered = torch.empty(dist.get_world_size() * len(losses))
    dist.all_gather_into_tensor(gathered, losses)


def save(model, how, copy_on_host):
    """`how` is full, full-on-device, sharded or adapter; `copy_on_host` makes a copy that is not the device's."""
    with torch.no_grad(), _copies_to_host(copy_on_host):
        if how == "adapter":
            state = _adapters(model)
        elif isinstance(model, fsdp.FullyShardedDataParallel):
            with _kind(model, how):
                state = model.state_dict()
        else:
            options = StateDictOptions(full_state_dict=how != "sharded", cpu_offload=how == "full")
            state = get_model_state_dict(model, options=options)
        for value in state.values():  # written one after another, as torch.save and safetensors do
            if how == "adapter" and isinstance(value, DTensor):
                value = value.full_tensor()
            if type(value) is torch.Tensor:
                value.cpu()


def _kind(model, how):
    """As accelerate's save_fsdp_model."""
    if how == "sharded":
        kind, config = fsdp.StateDictType.SHARDED_STATE_DICT, fsdp.ShardedStateDictConfig(offload_to_cpu=True)
    else:
        offload = how != "full-on-device"
        kind, config = (
            fsdp.StateDictType.FULL_STATE_DICT,
            fsdp.FullStateDictConfig(offload_to_cpu=offload, rank0_only=offload),
        )
    return fsdp.FullyShardedDataParallel.state_dict_type(model, kind, config)


def _adapters(model):
    import peft

    sharded = isinstance(model, fsdp.FullyShardedDataParallel)
    with _kind(model, "full") if sharded else contextlib.nullcontext():
        return peft.get_peft_model_state_dict(model)


@contextlib.contextmanager
def _copies_to_host(copy_on_host):
    """`tensor.to("cpu")` and `tensor.cpu()` make a copy, as those of a GPU's tensor do."""
    to, cpu = torch.Tensor.to, torch.Tensor.cpu

    def copy_to(tensor, *args, **kwargs):
        host = args and isinstance(args[0], torch.device) and args[0].type == "cpu"
        return copy_on_host(tensor) if host and _is_plain(tensor) else to(tensor, *args, **kwargs)

    def copy_cpu(tensor, *args, **kwargs):
        if isinstance(tensor, DTensor):
            local = copy_on_host(tensor.to_local())
            whole = {"shape": tensor.shape, "stride": tensor.stride()}
            return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, **whole)
        return copy_on_host(tensor) if _is_plain(tensor) else cpu(tensor, *args, **kwargs)

    torch.Tensor.to, torch.Tensor.cpu = copy_to, copy_cpu
    try:
        yield
    finally:
        torch.Tensor.to, torch.Tensor.cpu = to, cpu


def _is_plain(tensor):
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)
