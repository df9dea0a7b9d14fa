"""Evaluation, generation and saving as recorded, against the real ones on the CPU: live bytes, to the byte."""

import copy
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
import transformers as hf
from transformers import trainer_pt_utils

from metapeak.strategies import LoRA
from metapeak.tracer.capture import default_loss, record_training_step
from metapeak.tracer.joined import followed_by
from metapeak.tracer.life import Evaluation, Life, record_life
from metapeak.tracer.training_loop import TrainingLoop
from tests.agreement.cpu_oracle import run_script_on_cpu
from tests.agreement.families import FAMILIES

BY_NAME = {family.name: family for family in FAMILIES}
NAMES = ("llama", "gpt2", "mixtral, all experts")
ALL_DECODERS = tuple(
    family.name for family in FAMILIES if family.name not in ("bert", "modernbert, local attention of 8", "t5", "vit")
)


def adamw(parameters):
    return torch.optim.AdamW(parameters, foreach=True)


def lived(build, batch, life):
    """(phases by name of a step and what follows it, the bytes between them)."""
    step, _ = record_training_step(build("meta"), batch, adamw)
    later, _ = record_life(
        build("meta"),
        life,
        batch=batch,
        prompt={name: batch[name] for name in ("input_ids", "attention_mask")},
        compute_loss=default_loss,
        distribute=None,
        loop=TrainingLoop(),
        iteration=2,
    )
    whole = followed_by(step.liveness(), without_numbers(later.liveness()))
    whole.lint()
    assert whole.steady_bytes() == step.liveness().steady_bytes()
    assert whole.phases()[: len(step.liveness().phases())] == step.liveness().phases()
    return {phase.phase: phase for phase in whole.phases()}, whole.steady_bytes()


def without_numbers(liveness):
    """Single numbers take nothing: a Trainer counts its tokens in some, and the other side leaves them out."""
    number = np.array([shape == () for shape in liveness.shapes])
    return replace(liveness, nbytes=np.where(number, 0, liveness.nbytes))


def on_cpu(model, batch, script):
    """(phase, peak, end) of a script on a real model whose batch lies beside it, without what lies there before."""
    tensors = [*model.parameters(), *model.buffers()]
    before = sum({id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())
    return {name: (peak - before, end - before) for name, peak, end in run_script_on_cpu(tensors, script)}


def beside(phase, steady):
    return phase.peak_bytes - steady, phase.end_bytes - steady


# -- evaluation: the real Trainer.evaluate -----------------------------------------------------------------------------


class Loader:
    """A data loader whose batches are made when they are asked for, as a batch is moved to the GPU."""

    def __init__(self, batch, times):
        self.batch, self.times, self.dataset = batch, times, range(2 * times)

    def __len__(self):
        return self.times

    def __iter__(self):
        for _ in range(self.times):
            yield {name: tensor.clone() for name, tensor in self.batch.items()}


def trainer(model, batch, batches, tmp_path, **given):
    logits = given.pop("logits")
    arguments = hf.TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, **given,
    )  # fmt: skip
    real = hf.Trainer(model=model, args=arguments, compute_metrics=(lambda prediction: {}) if logits else None)
    real.get_eval_dataloader = lambda dataset: Loader(batch, batches)
    return real


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("batches", "logits", "steps"), [(2, False, None), (3, True, None), (4, True, 2)], ids=["loss", "logits", "to host"]
)
def test_evaluation_equals_a_real_trainers(name, batches, logits, steps, tmp_path, monkeypatch):
    numpify = trainer_pt_utils.nested_numpify
    # On a GPU an array is a copy on the host.
    monkeypatch.setattr(trainer_pt_utils, "nested_numpify", lambda kept: copy.deepcopy(numpify(kept)))
    family = BY_NAME[name]
    batch = family.batch()
    model = family.build("cpu")
    real = trainer(model, batch, batches, tmp_path, logits=logits, eval_accumulation_steps=steps)

    def script(begin):
        begin("evaluation")
        real.evaluate()

    cpu = on_cpu(model, batch, script)["evaluation"]
    life = Life(evaluation=Evaluation(batches=batches, keep_logits=logits, accumulation_steps=steps))
    phases, steady = lived(family.build, batch, life)
    assert beside(phases["evaluation"], steady)[0] == cpu[0]


# -- generation: the real generate -------------------------------------------------------------------------------------


def generate(model, batch, tokens):
    model.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0, use_cache=True,
    )  # fmt: skip


def generation_agrees(name, tokens):
    family = BY_NAME[name]
    model = family.build("cpu").eval()

    def script(begin):
        begin("generation")
        batch = {key: tensor.clone() for key, tensor in family.batch().items() if key != "labels"}
        with torch.no_grad():
            generate(model, batch, tokens)

    cpu = on_cpu(model, family.batch(), script)["generation"]
    phases, steady = lived(family.build, family.batch(), Life(new_tokens=tokens))
    assert beside(phases["generation"], steady)[0] == cpu[0]


@pytest.mark.parametrize("name", NAMES)
def test_generation_equals_a_real_one(name):
    generation_agrees(name, 4)


@pytest.mark.parametrize("name", NAMES)
def test_a_long_generation_equals_a_real_one_though_its_middle_is_skipped(name):
    generation_agrees(name, 30)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_DECODERS)
@pytest.mark.parametrize("tokens", [4, 30])
def test_generation_of_every_decoder_equals_a_real_one(name, tokens):
    generation_agrees(name, tokens)


# -- saving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_merge_of_adapters_equals_peft_s(name):
    family = BY_NAME[name]
    targets = ["c_attn"] if name == "gpt2" else ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out=name == "gpt2")
    model = peft.get_peft_model(family.build("cpu"), config)

    def script(begin):
        begin("save")
        with torch.no_grad():
            model.merge_and_unload()

    def build(device):
        return LoRA(rank=4, targets=tuple(targets)).prepare(family.build(device))

    cpu = on_cpu(model, family.batch(), script)["save"]
    phases, steady = lived(build, family.batch(), Life(save="merged"))
    assert beside(phases["save"], steady)[0] == cpu[0]


@pytest.mark.parametrize("save", ["full", "adapter"])
def test_what_is_written_from_one_gpu_takes_nothing_of_it(save):
    def build(device):
        return LoRA(rank=4).prepare(BY_NAME["llama"].build(device))

    phases, steady = lived(build, BY_NAME["llama"].batch(), Life(save=save))
    assert beside(phases["save"], steady) == (0, 0)
