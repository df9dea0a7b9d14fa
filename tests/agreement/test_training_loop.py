"""The training loop against real scripts on the CPU: peak and end of every phase, to the byte."""

from dataclasses import replace

import numpy as np
import torch
from accelerate.utils.operations import convert_outputs_to_fp32

from metapeak.strategies.master_weights import with_master_weights
from metapeak.tracer.capture import record_training_step
from metapeak.tracer.training_loop import TrainingLoop
from tests.agreement.cpu_oracle import run_script_on_cpu
from tests.agreement.cuda_lists_on_cpu import cuda_lists_on_cpu
from tests.agreement.families import FAMILIES

LLAMA = next(family for family in FAMILIES if family.name == "llama")
CLIP = 0.5


def adamw(parameters):
    return torch.optim.AdamW(parameters, foreach=True)


def traced(model, loop, make=adamw, **arguments):
    """(phase, peak, end) in order; single numbers not counted, as in the oracle."""
    graph, assumptions = record_training_step(model, LLAMA.batch(), make, loop=loop, **arguments)
    assert not any("was answered with" in sentence for sentence in assumptions)
    liveness = graph.liveness()
    numbers = np.array([shape == () for shape in liveness.shapes])
    liveness = replace(liveness, nbytes=np.where(numbers, 0, liveness.nbytes))
    return [(phase.phase, phase.peak_bytes, phase.end_bytes) for phase in liveness.phases()]


def loaded(model, *batches):
    return [*model.parameters(), *model.buffers(), *(tensor for batch in batches for tensor in batch.values())]


def accelerated(model, dtype):
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype=dtype)(model.forward))


def test_fp16_with_loss_scaling_and_clipping():
    model, batch = LLAMA.build("cpu"), LLAMA.batch()
    tensors = loaded(model, batch)
    accelerated(model, torch.float16)

    def script(begin):
        optimizer, scaler = adamw(model.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0)
        for _ in range(2):
            begin("forward")
            loss = model(**batch).loss
            begin("backward")
            scaler.scale(loss).backward()
            begin("optimizer")
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        return loss, optimizer

    with cuda_lists_on_cpu():
        real = run_script_on_cpu(tensors, script)
    loop = TrainingLoop(autocast=torch.float16, grad_scaler=True, max_grad_norm=CLIP)
    _, *ours = traced(LLAMA.build("meta"), loop)
    # Softmax from fp16 to float32 is one kernel on CUDA and two on the CPU, in forward and backward.
    assert [(name, end) for name, _, end in ours] == [(name, end) for name, _, end in real]
    assert [row for row in ours if row[0] == "optimizer"] == [row for row in real if row[0] == "optimizer"]


def test_accumulation_traces_two_of_the_micro_batches():
    model, batches = LLAMA.build("cpu"), [LLAMA.batch() for _ in range(3)]
    tensors = loaded(model, *batches)
    accelerated(model, torch.bfloat16)

    def script(begin):
        optimizer = adamw(model.parameters())
        for _ in range(2):
            for batch in batches:
                begin("forward")
                loss = model(**batch).loss
                begin("backward")
                (loss / 3).backward()
            begin("optimizer")
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss, optimizer

    with cuda_lists_on_cpu():
        real = run_script_on_cpu(tensors, script)
    assert real[2:4] == real[4:6]  # what lets two stand for all
    loop = TrainingLoop(autocast=torch.bfloat16, grad_accum=3, max_grad_norm=CLIP)
    _, *ours = traced(LLAMA.build("meta"), loop)
    assert ours == [*real[:4], real[6], *real[7:11], real[13]]


def test_master_weights_with_gradients_accumulated_in_float32():
    model, batches = LLAMA.build("cpu").to(torch.bfloat16), [LLAMA.batch() for _ in range(2)]
    parameters = list(model.parameters())

    def script(begin):
        begin("load")
        masters = [parameter.detach().clone().float() for parameter in parameters]
        optimizer = adamw(masters)
        main_grads = [torch.zeros_like(master) for master in masters]

        def accumulate(parameter):
            main_grads[index[parameter]].add_(parameter.grad)
            parameter.grad = None

        index = {parameter: position for position, parameter in enumerate(parameters)}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(accumulate)
        for _ in range(2):
            for batch in batches:
                begin("forward")
                loss = model(**batch).loss
                begin("backward")
                (loss / 2).backward()
            begin("optimizer")
            for master, gradient in zip(masters, main_grads):
                master.grad = gradient
            torch.nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
            optimizer.step()
            torch._foreach_copy_([parameter.data for parameter in parameters], masters)
            for master, gradient in zip(masters, main_grads):
                master.grad = None
                gradient.zero_()
        return loss, optimizer

    real = run_script_on_cpu(loaded(model, *batches), script)
    loop = TrainingLoop(grad_accum=2, accumulate_in_float32=True, max_grad_norm=CLIP)
    assert traced(LLAMA.build("meta").to(torch.bfloat16), loop, with_master_weights(adamw)) == real


def test_master_weights_free_the_model_s_gradients_before_the_step():
    model, batch = LLAMA.build("cpu").to(torch.bfloat16), LLAMA.batch()
    parameters = list(model.parameters())

    def script(begin):
        begin("load")
        masters = [parameter.detach().clone().float() for parameter in parameters]
        optimizer = adamw(masters)
        for _ in range(2):
            begin("forward")
            loss = model(**batch).loss
            begin("backward")
            loss.backward()
            loss = loss.detach()
            begin("optimizer")
            for master, parameter in zip(masters, parameters):
                master.grad = parameter.grad.float()
                parameter.grad = None
            optimizer.step()
            torch._foreach_copy_([parameter.data for parameter in parameters], masters)
            optimizer.zero_grad()
        return loss, optimizer

    real = run_script_on_cpu(loaded(model, batch), script)
    assert traced(LLAMA.build("meta").to(torch.bfloat16), TrainingLoop(), with_master_weights(adamw)) == real


def test_optimizer_in_backward():
    model, batch = LLAMA.build("cpu"), LLAMA.batch()

    def script(begin):
        optimizers = {parameter: adamw([parameter]) for parameter in model.parameters()}

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            begin("forward")
            loss = model(**batch).loss
            begin("backward")
            loss.backward()
            loss = loss.detach()
        return loss, optimizers

    real = run_script_on_cpu(loaded(model, batch), script)
    _, *ours = traced(LLAMA.build("meta"), TrainingLoop(optimizer_in_backward=True))
    assert ours == real


def test_a_script_whose_region_ends_after_the_loss():
    model, batch = LLAMA.build("cpu"), LLAMA.batch()

    def loss_of(model, batch):
        return model(**batch).loss.square()

    def script(begin):
        optimizer = adamw(model.parameters())
        for _ in range(2):
            begin("forward")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, batch)
            begin("backward")
            loss.backward()
            loss = loss.detach()
            begin("optimizer")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss, optimizer

    with cuda_lists_on_cpu():
        real = run_script_on_cpu(loaded(model, batch), script)
    loop = TrainingLoop(autocast=torch.bfloat16, autocast_region="loss")
    _, *ours = traced(LLAMA.build("meta"), loop, compute_loss=lambda model, batch: model(**batch).loss.square())
    assert ours == real
