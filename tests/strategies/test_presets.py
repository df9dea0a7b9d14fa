"""Presets fill in what nobody gave, and say where it is from."""

import pytest

from metapeak.strategies.presets import PRESETS
from metapeak.strategies.settings import BY_NAME, options_of, resolve
from metapeak.tracer.errors import InputError, UnknownName


def resolved(**values):
    return {name: option.value for name, option in resolve(options_of(values, "call")).items()}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_row_names_an_option_and_a_value_that_it_takes(preset):
    for fill in PRESETS[preset].fills:
        for name in (fill.option, *fill.when):
            assert name in BY_NAME
        choices = BY_NAME[fill.option].choices
        assert not choices or fill.value in choices
        assert fill.source


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_what_is_given_wins(preset, method):
    given = {"batch_size": 3, "checkpointing": "every:2", "optimizer": "sgd", "lora_rank": 5}
    if method == "full":
        del given["lora_rank"]
    options = resolve(options_of({"preset": preset, "method": method, **given}, "call"))
    for name, value in given.items():
        assert (options[name].value, options[name].origin) == (value, "call")


def test_frameworks_differ_as_their_defaults_do():
    trl = resolved(preset="trl", method="qlora")
    assert (trl["weights_dtype"], trl["autocast"], trl["checkpointing"]) == ("fp32", "bf16", "full")
    assert (trl["adapter_dtype"], trl["kbit_prepare"], trl["double_quant"]) == ("bf16", False, False)
    assert (trl["lora_rank"], trl["lora_alpha"], trl["lora_dropout"]) == (16, 32.0, 0.05)
    trainer = resolved(preset="hf-trainer")
    assert (trainer["implementation"], trainer["max_grad_norm"], trainer["checkpointing"]) == ("fused", 1.0, "none")
    assert trainer["autocast"] is None and trainer["weights_dtype"] is None
    tune = resolved(preset="torchtune", method="lora")
    assert (tune["weights_dtype"], tune["loss"], tune["adapter_dtype"]) == ("bf16", "chunked-output:8", "bf16")
    lit = resolved(preset="litgpt")
    assert (lit["autocast"], lit["loss"], lit["implementation"]) == ("bf16", "chunked-ce:128", "foreach")
    assert resolved(preset="litgpt", method="qlora", quantization="nf4")["autocast"] is None


def test_a_fused_kernel_is_not_asked_of_an_optimizer_that_has_none():
    assert resolved(preset="trl", optimizer="adamw8bit")["implementation"] is None


@pytest.mark.parametrize(
    "values, words",
    [
        ({"preset": "torchtune", "method": "qlora", "quantization": "int8"}, ["torchtune", "int8", "NF4"]),
        ({"preset": "torchtune", "autocast": "bf16"}, ["torchtune", "autocast bf16"]),
        ({"preset": "litgpt", "method": "qlora", "autocast": "bf16", "quantization": "nf4"}, ["mixed", "bf16-true"]),
        ({"preset": "litgpt", "method": "qlora", "quantization": "awq4"}, ["bitsandbytes only"]),
    ],
)
def test_what_the_framework_cannot_run_is_refused(values, words):
    with pytest.raises(InputError) as refused:
        resolve(options_of(values, "call"))
    for word in words:
        assert word in str(refused.value)


def test_an_unknown_preset_lists_the_known():
    with pytest.raises(UnknownName, match=r"keras.*hf-trainer"):
        resolve(options_of({"preset": "keras"}, "call"))
