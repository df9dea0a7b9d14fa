"""Trace a training step of every default config of transformers' auto maps.

    python tests/zoo.py [--map causal-lm,masked-lm] [--only llama,gpt2] [--jobs 2] [--timeout 120]
                        [--json FILE] [--markdown FILE]

Each class is built from its default config at full size on meta in bf16; one iteration (forward, backward, AdamW) of
1 x 128 tokens (2 images) is recorded. One forked child a class. Outcomes:

passed              the step was recorded and its graph is consistent
refused             metapeak says why the step cannot be traced
cannot run anywhere the same class with the same config and batch fails on plain meta or CPU tensors, without metapeak,
                    with the reason given; or it has no loss
failed              an unexpected exception: ours to mend
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path

import torch
import transformers
from transformers.models.auto import modeling_auto

from metapeak.tracer.batches import make_batch, sum_of_features
from metapeak.tracer.capture import default_loss, record_training_step
from metapeak.tracer.errors import InputError, TraceError
from metapeak.tracer.models import build_model, list_models, resolve_model
from metapeak.tracer.prepare import nested_configs, prepare_config
from metapeak.tracer.sequences import exact_length
from metapeak.tracer.spec import BatchSpec, ModelSpec

MAPS = {
    "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked-lm": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq-lm": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image-classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
MORE_MAPS = {
    "sequence-classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token-classification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "question-answering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "image-text-to-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "speech-seq2seq": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "ctc": modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "semantic-segmentation": modeling_auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
    "mask-generation": modeling_auto.MODEL_FOR_MASK_GENERATION_MAPPING_NAMES,
    "pretraining": modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
}
CATALOGUE = "catalogue"  # the real configs that metapeak brings, through its own resolving and building
MEMORY_LIMIT_BYTES = 12 << 30
TEXT, IMAGES = BatchSpec(batch_size=1, seq_len=128), BatchSpec(batch_size=2)
TWO_TEXTS = BatchSpec(batch_size=2, seq_len=128)


@dataclass(kw_only=True)
class Outcome:
    """What became of one class."""

    task: str
    model_type: str
    class_name: str
    outcome: str
    reason: str = ""
    stage: str = ""
    place: str = ""
    proof: str = ""
    note: str = ""
    detail: str = ""
    seconds: float = 0.0
    operations: int = 0
    assumptions: tuple[str, ...] = ()


# -- in the child ------------------------------------------------------------------------------------------------------


def build(model_type: str, class_name: str, *, dtype=torch.bfloat16, device: str = "meta", layers: int | None = None):
    """The model from its default config; `layers` cuts every stack to at most that many."""
    config = transformers.CONFIG_MAPPING[model_type]()
    model_class = getattr(transformers, class_name)
    if model_class.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()  # as AutoModel does
    prepare_config(config)
    if layers is not None:
        cut_layers(config, layers)
    with torch.device(device):
        model = model_class._from_config(config, dtype=dtype)
    return model.train()


LAYER_FIELDS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
    "num_encoder_layers", "num_sparse_encoder_layers", "num_sparse_decoder_layers", "num_blocks", "num_experts",
)  # fmt: skip


def cut_layers(config, layers: int) -> None:
    for part in nested_configs(config):
        for name in LAYER_FIELDS:
            if isinstance(vars(part).get(name), int):
                setattr(part, name, min(layers, getattr(part, name)))
        for name in ("layer_types", "mlp_layer_types"):
            if isinstance(vars(part).get(name), list):
                setattr(part, name, getattr(part, name)[:layers])


def batch_of(model, task: str, text: BatchSpec = TEXT):
    spec = IMAGES if "image" in task or task == "semantic-segmentation" else text
    if spec is text and exact_length(model) is not None:
        spec = BatchSpec(batch_size=1)
    return make_batch(model, task, spec)


def trace(task: str, model_type: str, class_name: str) -> Outcome:
    """Build and record in bf16, in float32 where the class takes no bf16; exceptions are told apart by their origin."""
    outcome = record(task, model_type, class_name, torch.bfloat16)
    if outcome.outcome == "failed" and "BFloat16" in outcome.reason + outcome.reason.replace(
        "torch.bfloat16", "BFloat16"
    ):
        in_bf16 = outcome.reason
        outcome = record(task, model_type, class_name, torch.float32)
        outcome.note = f"float32, for in bf16: {in_bf16}"
    return outcome


def record(task: str, model_type: str, class_name: str, dtype: torch.dtype) -> Outcome:
    outcome = Outcome(task=task, model_type=model_type, class_name=class_name, outcome="passed")
    stage = "construction"
    try:
        if task == CATALOGUE:
            resolved = resolve_model(ModelSpec(reference=model_type))
            model, task = build_model(resolved), resolved.task
            outcome.class_name = type(model).__name__
        else:
            model = build(model_type, class_name, dtype=dtype)
        stage = "batch"
        batch = batch_of(model, task, TWO_TEXTS if outcome.task == CATALOGUE else TEXT)
        stage = "step"
        graph, assumptions = record_training_step(
            model,
            batch.tensors,
            lambda parameters: torch.optim.AdamW(parameters, foreach=True),
            compute_loss=sum_of_features if task == "feature-extraction" else default_loss,
            iterations=1,
        )
        graph.lint()
        graph.liveness()
        outcome.operations = graph.num_ops
        outcome.assumptions = (*batch.notes, *assumptions)
    except Exception as error:
        expected = isinstance(error, InputError) or (isinstance(error, TraceError) and error.__cause__ is None)
        outcome.outcome = "refused" if expected else "failed"
        outcome.stage, outcome.reason, outcome.place = stage, message_of(error), place_of(error)
        outcome.detail = "".join(traceback.format_exception(error))[-6000:]
        if stage == "batch" and "no loss" in outcome.reason:
            outcome.outcome, outcome.proof = "cannot run anywhere", "its forward takes no labels"
    return outcome


def place_of(error: BaseException) -> str:
    """Type of an exception and the innermost line of transformers that raised it."""
    error = error.__cause__ if isinstance(error, TraceError) and error.__cause__ is not None else error
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/transformers/" in frame.filename]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__} at {where}"


def message_of(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, TraceError) and error.__cause__ is not None else error
    name = "" if isinstance(cause, (TraceError, InputError)) else f"{type(cause).__name__}: "
    return name + " ".join(str(cause).split())[:500]


def plain_run(task: str, model_type: str, class_name: str, stage: str) -> list[tuple[str, str, str]]:
    """(how, place, message) of each way in which the class fails without metapeak: plain meta, CPU with 2 layers."""
    failures = []
    ways = [("plain meta", {"device": "meta"}), ("plain CPU, 2 layers", {"device": "cpu", "layers": 2})]
    for how, options in ways:
        try:
            model = build(model_type, class_name, **options)
            if stage != "construction":
                batch = batch_of(model, task).tensors
                model.to(options["device"])
                model(**{name: tensor.to(options["device"]) for name, tensor in batch.items()}).loss.backward()
        except Exception as error:
            failures.append((how, place_of(error), message_of(error)))
    return failures


def child(job, stage: str | None, connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    started = time.perf_counter()
    answer = trace(*job) if stage is None else plain_run(*job, stage)
    if isinstance(answer, Outcome):
        answer.seconds = round(time.perf_counter() - started, 2)
    connection.send(answer)
    connection.close()
    os._exit(0)


def warm_up() -> None:
    """Import once, before any fork, what a trace imports. No backward: autograd's threads do not survive a fork."""

    def forward_only(model, batch):
        model(**batch)
        raise TraceError("enough")

    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    batch = make_batch(model, "causal-lm", BatchSpec(batch_size=1, seq_len=16))
    with contextlib.suppress(TraceError):
        record_training_step(model, batch.tensors, torch.optim.AdamW, compute_loss=forward_only)


# -- in the parent -----------------------------------------------------------------------------------------------------


def run_jobs(jobs, parallel: int, timeout: float):
    """Yields (job, answer or None when the child died, seconds) in the order in which children end."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(jobs), {}
    while waiting or running:
        while waiting and len(running) < parallel:
            job, stage = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=child, args=(job, stage, sender))
            process.start()
            sender.close()
            running[receiver] = (job, process, time.perf_counter())
        ready = wait(list(running), timeout=1.0)
        now = time.perf_counter()
        for receiver in list(running):
            job, process, started = running[receiver]
            if receiver in ready:
                try:
                    answer = receiver.recv()
                except EOFError:
                    process.join(5)
                    answer = f"the process died ({process.exitcode})"
            elif now - started > timeout:
                process.kill()
                answer = f"took over {timeout:.0f} s"
            else:
                continue
            process.join()
            receiver.close()
            del running[receiver]
            yield job, answer


def jobs_of(maps: list[str], only: set[str]):
    for task in maps:
        if task == CATALOGUE:
            yield from ((task, entry.id, "") for entry in list_models() if not only or entry.id in only)
            continue
        for model_type, names in (MAPS | MORE_MAPS)[task].items():
            for class_name in [names] if isinstance(names, str) else names:
                if not only or model_type in only or class_name in only:
                    yield task, model_type, class_name


def settle(outcome: Outcome, failures: list[tuple[str, str, str]]) -> None:
    """A class that fails by itself in the same place cannot run anywhere. Meta's own limits prove nothing."""
    for how, place, message in failures:
        outcome.detail = f"{how}: {place}: {message}\n{outcome.detail}"
        limits = "meta" in message or "NotImplementedError" in place or place.startswith(("TraceError", "InputError"))
        if place == outcome.place and (how != "plain meta" or not limits) and outcome.stage != "batch":
            outcome.outcome, outcome.proof = "cannot run anywhere", how


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--map", default=",".join(MAPS))
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warm_up()
    jobs = list(jobs_of(options.map.split(","), set(filter(None, options.only.split(",")))))
    outcomes = {}
    for job, answer in run_jobs([(job, None) for job in jobs], options.jobs, options.timeout):
        if not isinstance(answer, Outcome):
            answer = Outcome(
                task=job[0], model_type=job[1], class_name=job[2], outcome="failed", stage="step", reason=answer
            )
        outcomes[job] = answer
        print(f"{answer.outcome:8} {answer.seconds:6.1f} s {job[0]} {job[1]} {answer.reason[:150]}", flush=True)
    doubtful = [(job, outcomes[job].stage) for job in jobs if outcomes[job].outcome == "failed" and job[0] != CATALOGUE]
    for job, failures in run_jobs(doubtful, options.jobs, options.timeout):
        settle(outcomes[job], [] if isinstance(failures, str) else failures)
    results = [outcomes[job] for job in jobs]
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in results], indent=1))
    text = markdown(results)
    if options.markdown:
        options.markdown.write_text(text)
    print(text)
    sys.exit(any(outcome.outcome == "failed" for outcome in results))


def markdown(results: list[Outcome]) -> str:
    """Counts a map, then everything that did not pass, with the reason."""
    lines = [
        f"Written by `python tests/zoo.py --markdown FILE` with torch {torch.__version__.split('+')[0]}, transformers "
        f"{transformers.__version__}. Default configs at full size, bf16, {TEXT.batch_size} x {TEXT.seq_len} tokens or "
        f"{IMAGES.batch_size} images, one iteration with AdamW. `cannot run anywhere`: the same class with the same "
        "config and batch raises the same exception in the same line without metapeak, on plain meta tensors at full "
        "size or on CPU tensors with two layers; or its forward has no loss.",
        "",
    ]
    lines += ["| map | classes | passed | refused | failed | cannot run anywhere | passed of those that run |"]
    lines.append("|---|---|---|---|---|---|---|")
    for task in dict.fromkeys(outcome.task for outcome in results):
        kinds = [outcome.outcome for outcome in results if outcome.task == task]
        count = {kind: kinds.count(kind) for kind in ("passed", "refused", "failed", "cannot run anywhere")}
        runnable = len(kinds) - count["cannot run anywhere"]
        share = f"{100 * count['passed'] / runnable:.1f} %" if runnable else "-"
        lines.append(f"| {task} | {len(kinds)} | {' | '.join(map(str, count.values()))} | {share} |")
    lines += ["", "| map | model | outcome | stage | reason |", "|---|---|---|---|---|"]
    for outcome in results:
        if outcome.outcome != "passed":
            proof = f" (proof: {outcome.proof})" if outcome.proof else ""
            reason = outcome.reason.replace("|", "\\|")[:260] + proof
            lines.append(
                f"| {outcome.task} | {outcome.model_type} {outcome.class_name} | {outcome.outcome} | {outcome.stage} "
                f"| {reason} |"
            )
    in_float32 = [outcome for outcome in results if outcome.outcome == "passed" and outcome.note]
    if in_float32:
        lines += ["", "Passed in float32; in bf16 the step raised:", ""]
        lines += [f"- {outcome.class_name}: {outcome.note.split('in bf16: ')[-1][:160]}" for outcome in in_float32]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
