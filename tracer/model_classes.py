"""Which class a config is for: the task asked for, the catalogue's class, or the class that the config names."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metapeak.tracer.errors import ModelConfigError, UnknownName
from metapeak.tracer.resolve import LocatedModel

TASKS: dict[str, str] = {
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "image-text-to-text": "AutoModelForImageTextToText",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
    "next-sentence-prediction": "AutoModelForNextSentencePrediction",
    "ctc": "AutoModelForCTC",
    "audio-classification": "AutoModelForAudioClassification",
    "image-classification": "AutoModelForImageClassification",
    "semantic-segmentation": "AutoModelForSemanticSegmentation",
    "universal-segmentation": "AutoModelForUniversalSegmentation",
    "object-detection": "AutoModelForObjectDetection",
    "depth-estimation": "AutoModelForDepthEstimation",
    "masked-image-modeling": "AutoModelForMaskedImageModeling",
    "video-classification": "AutoModelForVideoClassification",
    "mask-generation": "AutoModelForMaskGeneration",
    "visual-question-answering": "AutoModelForVisualQuestionAnswering",
    "time-series-prediction": "AutoModelForTimeSeriesPrediction",
    "multimodal-lm": "AutoModelForMultimodalLM",
    "pretraining": "AutoModelForPreTraining",
    "feature-extraction": "AutoModel",
    "zero-shot-image-classification": "AutoModelForZeroShotImageClassification",
}
"""Task -> auto class. A class that several auto classes hold gets the first task here (T5: seq2seq-lm, not pretraining)
and so does a config that names no class (BERT: masked-lm)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassChoice:
    """The class to build and the task that it is for (None where no auto class holds it)."""

    task: str | None
    architecture: str
    remote_code: bool = False
    notes: tuple[str, ...] = ()


def choose_class(located: LocatedModel, task: str | None, trust_remote_code: bool) -> ClassChoice:
    """The class to build: the asked task's, the catalogue's, the one that the config names, or the type's first."""
    config, row = located.config_dict, located.catalogue_row
    named = _named_architecture(config)
    if row is not None and task in (None, _task_of_auto_class(row["auto_class"])):
        differs = named is not None and named.lower() != row["model_class"].lower()
        note = f"The config names {named}; the catalogue builds {row['model_class']}, as its checkpoint is used."
        return ClassChoice(
            task=_task_of_auto_class(row["auto_class"]),
            architecture=row["model_class"],
            notes=(note,) if differs else (),
        )
    model_type = _native_type(located, trust_remote_code)
    if model_type is None:
        return _remote_choice(located, task, named)
    classes = _classes_by_task(model_type)
    if task is not None:
        if task not in classes:
            raise ModelConfigError(
                f"{located.id}: model_type '{model_type}' has no class for task '{task}'; "
                f"it has {', '.join(classes) or 'none'}."
            )
        return ClassChoice(task=task, architecture=classes[task][0])
    if named is None:
        return _first_class(located, model_type, classes, "The config names no architecture")
    for task, names in classes.items():
        for name in names:
            if name.lower() == named.lower():  # PhiMoEForCausalLM became PhimoeForCausalLM
                return ClassChoice(task=task, architecture=name)
    return _unlisted_class(located, model_type, classes, named)


def _unlisted_class(
    located: LocatedModel, model_type: str, classes: Mapping[str, tuple[str, ...]], named: str
) -> ClassChoice:
    """The choice when no auto class of this model type holds the class that the config names."""
    import transformers

    task = _task_of_class(named)
    if task is not None and task in classes:
        note = f"The config names {named}, a class of another model type; {classes[task][0]} is built."
        return ClassChoice(task=task, architecture=classes[task][0], notes=(note,))
    if task is not None:
        raise ModelConfigError(
            f"{located.id}: architectures names {named}, but model_type is '{model_type}', which has no class for "
            f"{task}; it has {', '.join(classes) or 'none'}."
        )
    if hasattr(transformers, named) and hasattr(getattr(transformers, named), "_from_config"):
        return ClassChoice(task=None, architecture=named)
    return _first_class(located, model_type, classes, f"The config names {named}, which transformers does not have")


def _first_class(
    located: LocatedModel, model_type: str, classes: Mapping[str, tuple[str, ...]], why: str
) -> ClassChoice:
    if not classes:
        raise ModelConfigError(f"{located.id}: {why}, and no task has a class for model_type '{model_type}'.")
    task, names = next(iter(classes.items()))
    return ClassChoice(task=task, architecture=names[0], notes=(f"{why}; {names[0]} ({task}) is built.",))


def _remote_choice(located: LocatedModel, task: str | None, named: str | None) -> ClassChoice:
    """The class that the repository's own code defines. It is imported when the model is built."""
    auto_map = located.config_dict["auto_map"]
    known = {_task_of_auto_class(auto): reference for auto, reference in auto_map.items() if auto.startswith("AutoMod")}
    known = {name: reference for name in TASKS if (reference := known.get(name))}
    if task is None:
        task = next((name for name, reference in known.items() if str(reference).endswith(f".{named}")), None)
        task = task or next(iter(known), None)
    if task not in known:
        raise ModelConfigError(
            f"{located.id}: its own code has no class for task '{task}'; auto_map has {', '.join(auto_map)}."
        )
    name = str(known[task]).rpartition(".")[2]
    note = f"{name} is code from {located.location}, run because remote code is trusted."
    return ClassChoice(task=task, architecture=name, remote_code=True, notes=(note,))


def _named_architecture(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _native_type(located: LocatedModel, trust_remote_code: bool) -> str | None:
    """The model type if transformers has it, None if the repository's own code is to be used.

    Raises ModelConfigError: no model_type, an unknown one, or one that needs remote code which is not trusted.
    """
    config = located.config_dict
    model_type = effective_type(config)
    known = config_mapping()
    if isinstance(model_type, str) and model_type in known:
        return model_type
    auto_map = config.get("auto_map")
    if isinstance(auto_map, Mapping) and "AutoConfig" in auto_map:
        if trust_remote_code:
            return None
        raise ModelConfigError(
            f"{located.id}: its class is not part of transformers but Python code in {located.location} "
            f"({auto_map['AutoConfig']}), and remote code is run only with --trust-remote-code. Read that code first."
        )
    if not isinstance(model_type, str) or not model_type:
        raise ModelConfigError(
            f"{located.id}: its config has no model_type, so nothing says which class it is for "
            f"(it has {', '.join(list(config)[:6]) or 'no fields'})."
        )
    raise ModelConfigError(f"{located.id}: {UnknownName('model_type', model_type, sorted(known.keys()))}")


def effective_type(config: Mapping[str, Any]) -> Any:
    """The model type as AutoConfig reads it: mistral with layer_types is ministral."""
    model_type = config.get("model_type")
    return "ministral" if model_type == "mistral" and "layer_types" in config else model_type


def config_mapping() -> Mapping[str, Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING


def _classes_by_task(model_type: str) -> dict[str, tuple[str, ...]]:
    """The class names of a model type, by task, in the order of TASKS."""
    by_task = ((task, _class_names(auto_class).get(model_type)) for task, auto_class in TASKS.items())
    return {task: (names,) if isinstance(names, str) else tuple(names) for task, names in by_task if names}


def task_of_class(model_type: str, class_name: str) -> str | None:
    """The first task whose auto class builds this class for a model type."""
    return next((task for task, names in _classes_by_task(model_type).items() if class_name in names), None)


def _class_names(auto_class: str) -> Mapping[str, str | tuple[str, ...]]:
    """model_type -> class name, as an auto class holds it."""
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, auto_class)._model_mapping._model_mapping


@functools.cache
def _task_of_class(class_name: str) -> str | None:
    """The first task of which some model type has this class."""
    for task, auto_class in TASKS.items():
        for names in _class_names(auto_class).values():
            if class_name in ((names,) if isinstance(names, str) else names):
                return task
    return None


def _task_of_auto_class(auto_class: str) -> str | None:
    return next((task for task, name in TASKS.items() if name == auto_class), None)
