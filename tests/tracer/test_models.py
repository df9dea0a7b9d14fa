"""From a reference to a module on meta: where configs are found, which class is built, what is refused and how."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import pytest
import torch
import transformers

from metapeak.tracer.errors import InputError, MetapeakError, ModelConfigError, ModelNotFound, UnknownName
from metapeak.tracer.models import TASKS, build, build_model, list_models, nearest_ids, resolve_model
from metapeak.tracer.resolve import locate_model
from metapeak.tracer.spec import ModelSpec
from tests.tracer.hub_server import HubServer, Repository

TINY_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 77,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "torch_dtype": "bfloat16",
}
# embedding and head 2*V*H; a layer: q and o 2*H*H, k and v 2*H*H/2, mlp 3*H*F, two norms; the last norm
TINY_LLAMA_PARAMS = 2 * 128 * 64 + 2 * (3 * 64 * 64 + 3 * 64 * 77 + 2 * 64) + 64
CATALOGUE = json.loads(resources.files("metapeak.tracer.catalogue").joinpath("models.json").read_text("utf-8"))


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def resolve(reference: object, **options):
    return resolve_model(ModelSpec(reference=str(reference), **options))


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Every test starts without a Hub, without a token and with an empty Hub cache of its own."""
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))


@pytest.fixture
def online(monkeypatch):
    """A function that puts a Hub on loopback behind HF_ENDPOINT."""

    def go(hub: HubServer) -> None:
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)

    return go


@pytest.fixture
def folder(tmp_path):
    """A function that writes a folder with a config.json and returns it."""

    def write(config: object, name: str = "model") -> Path:
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return path

    return write


# -- the catalogue -----------------------------------------------------------------------------------------------------


def test_catalogue_id_needs_no_network_and_no_torch():
    program = (
        "import sys, json; from metapeak.tracer.models import resolve_model;"
        "from metapeak.tracer.spec import ModelSpec;"
        "r = resolve_model(ModelSpec(reference='Qwen/Qwen3-8B'));"
        "print(json.dumps([r.source, r.task, r.auto_class, r.architecture, r.config_dict['hidden_size'],"
        "'torch' in sys.modules, 'transformers' in sys.modules, 'huggingface_hub' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [
        "catalogue",
        "causal-lm",
        "AutoModelForCausalLM",
        "Qwen3ForCausalLM",
        4096,
        False,
        False,
        False,
    ]


def test_alias_of_the_catalogue():
    resolved = resolve("gpt2")
    assert (resolved.id, resolved.source, resolved.architecture) == ("gpt2", "catalogue", "GPT2LMHeadModel")
    assert "openai-community/gpt2" in resolved.notes[0]
    assert resolve("qwen/qwen3-8b").id == "Qwen/Qwen3-8B"


def test_list_models_is_the_index():
    rows = list_models()
    assert len(rows) == len(CATALOGUE) == 251
    by_id = {row.id: row for row in rows}
    assert by_id["meta-llama/Llama-3.1-8B"].params == 8_030_261_248
    assert by_id["meta-llama/Llama-3.1-8B"].gated and not by_id["openai-community/gpt2"].gated
    assert (by_id["meta-llama/Llama-3.1-8B"].dtype, by_id["openai-community/gpt2"].dtype) == ("bfloat16", "float32")
    assert by_id["openai-community/gpt2"].architecture == "GPT2LMHeadModel"
    assert "gpt2" in by_id["openai-community/gpt2"].aliases
    assert [row.id.lower() for row in rows] == sorted(row.id.lower() for row in rows)


def spread() -> list[dict]:
    """The smallest model of every class, and those with something of their own."""
    smallest: dict[str, dict] = {}
    for row in sorted(CATALOGUE, key=lambda row: row["params"]):
        smallest.setdefault(row["model_class"], row)
    special = ("google/flan-t5-xxl", "Qwen/Qwen3-Embedding-8B", "facebook/bart-base", "microsoft/Phi-3.5-MoE-instruct")
    special += ("meta-llama/Llama-3.1-405B-Instruct-FP8", "deepseek-ai/DeepSeek-V3", "facebook/wav2vec2-base-960h")
    return [*smallest.values(), *(row for row in CATALOGUE if row["id"] in special and row not in smallest.values())]


IN_DEFAULT_RUN = {row["id"] for row in spread()}
SHOWN = {row.id: row for row in list_models()}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row["id"], marks=() if row["id"] in IN_DEFAULT_RUN else pytest.mark.slow)
        for row in CATALOGUE
    ],
)
def test_catalogue_model_builds_with_the_counted_parameters(row):
    resolved = resolve(row["id"])
    built = build(resolved)
    module = built.module
    assert type(module).__name__ == resolved.architecture == row["model_class"]
    assert resolved.auto_class == row["auto_class"]
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert module.training
    assert built.dtype == SHOWN[row["id"]].dtype
    assert row["dtype"] in (built.dtype, None)
    separate_heads = row["params_published"] if row["id"].startswith(("google/flan-t5", "google/mt5")) else None
    assert count(module) == (separate_heads or row["params"]) == SHOWN[row["id"]].params


# -- the Hub and its cache ---------------------------------------------------------------------------------------------


def test_hub_then_cache_when_the_hub_is_gone(online, tmp_path):
    repository = Repository("someone/tiny", TINY_LLAMA)
    with HubServer([repository]) as hub:
        online(hub)
        resolved = resolve("someone/tiny")
        assert (resolved.source, resolved.revision) == ("hub", repository.commit("main"))
        assert {path for _, path, _ in hub.requests} == {"/someone/tiny/resolve/main/config.json"}
        asked = len(hub.requests)
        assert resolve("someone/tiny").source == "hub cache"
        assert len(hub.requests) == asked  # a config in the cache is used without asking
    again = resolve("someone/tiny")
    assert (again.source, again.revision, again.config_dict) == ("hub cache", repository.commit("main"), TINY_LLAMA)
    assert count(build_model(again)) == TINY_LLAMA_PARAMS
    cached = [path.name for path in (tmp_path / "hf-home/hub/models--someone--tiny").rglob("*") if path.is_file()]
    assert "config.json" in cached and not [name for name in cached if "incomplete" in name]


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_uses_the_cache_and_asks_nobody(online, monkeypatch, variable):
    with HubServer([Repository("someone/tiny", TINY_LLAMA), Repository("someone/other", TINY_LLAMA)]) as hub:
        online(hub)
        resolve("someone/tiny")
        asked = len(hub.requests)
        monkeypatch.setenv(variable, "1")
        assert resolve("someone/tiny").source == "hub cache"
        with pytest.raises(ModelNotFound, match=variable):
            resolve("someone/other")
        assert len(hub.requests) == asked


def test_variables_as_set_when_the_command_starts(tmp_path):
    """The same in a process of its own, where huggingface_hub reads them at its import."""
    program = (
        "from metapeak.tracer.models import resolve_model; from metapeak.tracer.spec import ModelSpec;"
        "print(resolve_model(ModelSpec(reference='someone/gated')).source)"
    )
    with HubServer([Repository("someone/gated", TINY_LLAMA, gated=True, tokens=("hf_good",))]) as hub:
        environment = os.environ | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "own"),
            "HF_HUB_OFFLINE": "0",
        }

        def run(**variables: str) -> subprocess.CompletedProcess:
            command = [sys.executable, "-c", program]
            return subprocess.run(
                command, env=environment | variables, capture_output=True, text=True, timeout=60, check=False
            )

        refused, given, cached = run(), run(HF_TOKEN="hf_good"), run(HF_HUB_OFFLINE="1")
    assert "gated" in refused.stderr
    assert given.stdout.strip() == "hub", given.stderr
    assert cached.stdout.strip() == "hub cache", cached.stderr


def test_gated_needs_a_token_with_access(online, monkeypatch):
    repository = Repository("meta/secret", TINY_LLAMA, gated=True, tokens=("hf_good",))
    with HubServer([repository]) as hub:
        online(hub)
        with pytest.raises(ModelNotFound, match=r"'meta/secret'.*gated.*no token was sent.*HF_TOKEN"):
            resolve("meta/secret")
        monkeypatch.setenv("HF_TOKEN", "hf_bad")
        with pytest.raises(ModelNotFound, match=r"gated.*token that was sent has no access"):
            resolve("meta/secret")
        monkeypatch.setenv("HF_TOKEN", "hf_good")
        assert resolve("meta/secret").source == "hub"
        assert [status for *_, status in hub.requests[:2]] == [401, 403]


def test_private_and_missing_repositories_look_alike(online, monkeypatch):
    with HubServer([Repository("someone/private", TINY_LLAMA, private=True, tokens=("hf_good",))]) as hub:
        online(hub)
        for name in ("someone/private", "someone/Qwen3-8"):
            with pytest.raises(ModelNotFound, match=rf"'{name}'.*no such repository, or it is private.*no token"):
                resolve(name)
        with pytest.raises(ModelNotFound, match=r"Nearest in the catalogue: .*Qwen/Qwen3-8B"):
            resolve("someone/Qwen3-8")
        monkeypatch.setenv("HF_TOKEN", "hf_good")
        assert resolve("someone/private").source == "hub"


def test_revision_skips_the_catalogue(online):
    old = TINY_LLAMA | {"num_hidden_layers": 1}
    repository = Repository("openai-community/gpt2", TINY_LLAMA, revisions={"v1": old})
    with HubServer([repository]) as hub:
        online(hub)
        resolved = resolve("openai-community/gpt2@v1")
        assert (resolved.source, resolved.revision) == ("hub", repository.commit("v1"))
        assert resolved.config_dict == old
        assert "skipped" in resolved.notes[0] and "'v1'" in resolved.notes[0]
        assert resolve(f"openai-community/gpt2@{repository.commit('main')}").config_dict == TINY_LLAMA
        with pytest.raises(ModelNotFound, match=r"no revision 'v2'.*Without @v2 the built-in catalogue answers"):
            resolve("openai-community/gpt2@v2")
    assert resolve("openai-community/gpt2@v1").source == "hub cache"
    assert resolve("openai-community/gpt2").source == "catalogue"


def test_repository_without_config(online):
    with HubServer([Repository("someone/adapter", None, files={"adapter_config.json": "{}"})]) as hub:
        online(hub)
        with pytest.raises(ModelNotFound, match=r"repository exists.*no config\.json at revision 'main'"):
            resolve("someone/adapter")


def test_hub_config_that_is_no_json(online):
    with HubServer([Repository("someone/broken", "{")]) as hub:
        online(hub)
        with pytest.raises(ModelConfigError, match="is not JSON"):
            resolve("someone/broken")


def test_nobody_answers(online, tmp_path):
    with HubServer([]) as hub:
        online(hub)
    started = time.monotonic()
    with pytest.raises(ModelNotFound, match=r"could not be reached \(ConnectError: .*HF_HUB_OFFLINE=1"):
        resolve("someone/tiny")
    assert time.monotonic() - started < 5
    assert not (tmp_path / "hf-home").exists()


def test_nobody_answers_in_time(online, monkeypatch):
    with HubServer([Repository("someone/tiny", TINY_LLAMA)], delay_seconds=1.5) as hub:
        online(hub)
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
        started = time.monotonic()
        with pytest.raises(ModelNotFound, match=r"could not be reached \(ReadTimeout"):
            resolve("someone/tiny")
        assert time.monotonic() - started < 1.4


def test_endpoint_that_is_no_hub(online):
    with HubServer([], status=200) as hub:
        online(hub)
        with pytest.raises(ModelNotFound, match=r"does not answer as a Hub does.*X-Repo-Commit"):
            resolve("someone/tiny")


def test_cache_that_cannot_be_written(online, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    with HubServer([Repository("someone/tiny", TINY_LLAMA)]) as hub:
        online(hub)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
        with pytest.raises(ModelNotFound, match=r"cannot be stored \(NotADirectoryError"):
            resolve("someone/tiny")


def test_hub_is_down(online):
    with HubServer([], status=503) as hub:
        online(hub)
        with pytest.raises(ModelNotFound, match="HTTP status 503"):
            resolve("someone/tiny")


def test_unknown_id_offline(tmp_path):
    with pytest.raises(ModelNotFound) as caught:
        resolve("Qwen/Qwen3-8")
    text = str(caught.value)
    for words in ("'Qwen/Qwen3-8'", "built-in catalogue", "Hub cache", "HF_HUB_OFFLINE", "Qwen/Qwen3-8B"):
        assert words in text
    assert "\n" not in text
    assert not (tmp_path / "hf-home").exists()


def test_nearest_ids_know_the_name_without_its_organisation():
    assert nearest_ids("Qwen3-8B")[0] == "Qwen/Qwen3-8B"
    assert nearest_ids("qqqqqqqqqqqq") == []


# -- local files -------------------------------------------------------------------------------------------------------


def test_local_folder_and_file(folder, monkeypatch):
    path = folder(TINY_LLAMA)
    by_folder, by_file = resolve(path), resolve(path / "config.json")
    assert (by_folder.source, by_file.source) == (f"folder {path}", f"file {path / 'config.json'}")
    assert by_folder.config_dict == by_file.config_dict == TINY_LLAMA
    assert count(build_model(by_folder)) == TINY_LLAMA_PARAMS
    monkeypatch.chdir(path.parent)
    assert resolve("./model").source == resolve("model").source == f"folder {path}"


def test_folder_without_config_does_not_hide_an_id(tmp_path, monkeypatch):
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("gpt2").source == "catalogue"
    with pytest.raises(ModelConfigError, match=r"'\./gpt2'|'gpt2' has no config\.json"):
        resolve("./gpt2")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", "JSON array"),
        ("3", "JSON number"),
        ('{"hidden_size": 4}', "no model_type"),
        ('{"model_type": ["llama"]}', "no model_type"),
    ],
)
def test_not_a_config(folder, content, words):
    with pytest.raises(ModelConfigError, match=words):
        resolve(folder(content))


def test_not_a_text_file(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ModelConfigError, match="UTF-8"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("", "No model was named"),
        ("two words", "no model reference"),
        ("gpt2@", "no model reference"),
        ("./nowhere", "no file or folder"),
        ("nowhere.json", "no file or folder"),
        ("model.py", "name the function"),
    ],
)
def test_no_reference(reference, words):
    with pytest.raises(ModelNotFound, match=words):
        resolve(reference)


def test_adapter_folder_names_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(ModelConfigError, match=r"PEFT adapter: name its base model \(org/base\)"):
        resolve(tmp_path)


# -- configs that describe no model ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            TINY_LLAMA | {"num_attention_heads": 5, "num_key_value_heads": 5},
            ["hidden_size 64", "num_attention_heads 5"],
        ),
        (
            TINY_LLAMA | {"num_key_value_heads": 3},
            ["num_attention_heads (4)", "num_key_value_heads (3)", "4 = 1 * 3 + 1"],
        ),
        (TINY_LLAMA | {"num_key_value_heads": 8}, ["num_attention_heads (4)", "num_key_value_heads (8)"]),
        (TINY_LLAMA | {"hidden_size": -64}, ["hidden_size is -64", "at least 1"]),
        (TINY_LLAMA | {"num_hidden_layers": 0}, ["num_hidden_layers is 0"]),
        (TINY_LLAMA | {"intermediate_size": -1}, ["intermediate_size is -1"]),
        (TINY_LLAMA | {"hidden_size": "64"}, ["hidden_size", "expected int, got str"]),
        (TINY_LLAMA | {"hidden_act": "sillu"}, ["'sillu'", "hidden_act"]),
        (TINY_LLAMA | {"pad_token_id": 500}, ["pad_token_id 500", "vocab_size 128"]),
        (TINY_LLAMA | {"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "float8_e4m3fn", "bfloat16"]),
        (TINY_LLAMA | {"model_type": "lama"}, ["'lama'", "llama"]),
        (
            TINY_LLAMA | {"architectures": ["ViTForImageClassification"]},
            ["ViTForImageClassification", "'llama'", "causal-lm"],
        ),
        ({"model_type": "gpt2", "n_embd": 65, "n_head": 4}, ["n_embd 65", "n_head 4"]),
        (TINY_LLAMA | {"model_type": "qwen3", "layer_types": ["full_attention"]}, ["num_hidden_layers", "layer_types"]),
        (
            TINY_LLAMA | {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4},
            ["num_experts_per_tok (4)"],
        ),
    ],
)
def test_config_that_contradicts_itself(folder, config, words):
    path = folder(config)
    with pytest.raises(ModelConfigError) as caught:
        build(resolve(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_sizes_inside_text_config_are_named(folder):
    with pytest.raises(ModelConfigError, match=r"text_config\.hidden_size is 0"):
        resolve(folder({"model_type": "gemma3", "text_config": {"hidden_size": 0}}))


@pytest.mark.parametrize("intermediate_size", [1, 77, 1000])
def test_any_feed_forward_width_is_fine(folder, intermediate_size):
    module = build_model(resolve(folder(TINY_LLAMA | {"intermediate_size": intermediate_size})))
    assert module.model.layers[0].mlp.down_proj.weight.shape == (64, intermediate_size)


def test_explicit_head_dim_frees_the_hidden_size(folder):
    change = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 6, "head_dim": 24}
    module = build_model(resolve(folder(TINY_LLAMA | change)))
    assert module.model.layers[0].self_attn.q_proj.weight.shape == (6 * 24, 64)
    assert module.model.layers[0].self_attn.k_proj.weight.shape == (2 * 24, 64)


# -- which class -------------------------------------------------------------------------------------------------------


def test_task_overrides_the_config():
    resolved = resolve("openai-community/gpt2", task="sequence-classification")
    assert (resolved.auto_class, resolved.architecture) == (
        "AutoModelForSequenceClassification",
        "GPT2ForSequenceClassification",
    )
    module = build_model(resolved)
    assert module.score.weight.shape == (2, 768)


def test_task_that_the_model_has_not():
    with pytest.raises(ModelConfigError, match=r"'gpt2' has no class for task 'ctc'; it has causal-lm"):
        resolve("openai-community/gpt2", task="ctc")


def test_unknown_task():
    with pytest.raises(UnknownName, match=r"Unknown task 'causal'.*causal-lm"):
        resolve("openai-community/gpt2", task="causal")


@pytest.mark.parametrize("task", TASKS)
def test_every_task_names_an_auto_class(task):
    assert hasattr(transformers, TASKS[task])


@pytest.mark.parametrize(
    ("model_type", "task", "architecture"),
    [
        ("llama", "causal-lm", "LlamaForCausalLM"),
        ("bert", "masked-lm", "BertForMaskedLM"),
        ("t5", "seq2seq-lm", "T5ForConditionalGeneration"),
        ("whisper", "speech-seq2seq", "WhisperForConditionalGeneration"),
        ("gemma3", "image-text-to-text", "Gemma3ForConditionalGeneration"),
        ("vit", "image-classification", "ViTForImageClassification"),
    ],
)
def test_config_without_architectures(folder, model_type, task, architecture):
    resolved = resolve(folder({"model_type": model_type}))
    assert (resolved.task, resolved.architecture) == (task, architecture)
    assert "names no architecture" in resolved.notes[0] and architecture in resolved.notes[0]


def test_class_of_another_model_type_means_its_task(folder):
    resolved = resolve(folder(TINY_LLAMA | {"architectures": ["GPT2LMHeadModel"]}))
    assert (resolved.task, resolved.architecture) == ("causal-lm", "LlamaForCausalLM")
    assert "GPT2LMHeadModel" in resolved.notes[0]


def test_spelling_of_an_older_class_name(folder):
    resolved = resolve(folder({"model_type": "phimoe", "architectures": ["PhiMoEForCausalLM"]}))
    assert (resolved.architecture, resolved.notes) == ("PhimoeForCausalLM", ())


def test_a_catalogue_class_that_differs_from_the_config_is_said():
    assert "BartModel" in resolve("facebook/bart-base").notes[-1]
    assert "Qwen3ForCausalLM" in resolve("Qwen/Qwen3-Embedding-8B").notes[-1]


# -- code of the repository's own --------------------------------------------------------------------------------------

REMOTE_CONFIG = {
    "model_type": "metapeak_test_remote",
    "architectures": ["RemoteForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_remote.RemoteConfig",
        "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
    },
    "width": 12,
}
CONFIGURATION_REMOTE = """
from transformers import PreTrainedConfig

class RemoteConfig(PreTrainedConfig):
    model_type = "metapeak_test_remote"

    def __init__(self, width=8, **kwargs):
        self.width = width
        super().__init__(**kwargs)
"""
MODELING_REMOTE = """
import torch
from transformers import PreTrainedModel
from .configuration_remote import RemoteConfig

class RemoteForCausalLM(PreTrainedModel):
    config_class = RemoteConfig

    def __init__(self, config):
        super().__init__(config)
        self.only = torch.nn.Linear(config.width, 5)
        self.post_init()
"""


def test_remote_code_runs_only_when_trusted(folder, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = folder(REMOTE_CONFIG)
    (path / "configuration_remote.py").write_text(CONFIGURATION_REMOTE)
    (path / "modeling_remote.py").write_text(MODELING_REMOTE)
    with pytest.raises(ModelConfigError, match=r"configuration_remote\.RemoteConfig.*--trust-remote-code"):
        resolve(path)
    resolved = resolve(path, trust_remote_code=True)
    assert (resolved.task, resolved.architecture, resolved.remote_code) == ("causal-lm", "RemoteForCausalLM", True)
    module = build_model(resolved)
    assert (type(module).__name__, count(module), module.only.weight.device.type) == ("RemoteForCausalLM", 65, "meta")


def test_remote_code_from_the_hub(tmp_path):
    """In a process of its own: transformers takes the endpoint and the module folder from variables at its import."""
    program = (
        "from metapeak.tracer.models import build_model, resolve_model; from metapeak.tracer.spec import ModelSpec;"
        "resolved = resolve_model(ModelSpec(reference='someone/remote', trust_remote_code=True));"
        "module = build_model(resolved); print(resolved.source, type(module).__name__, module.only.weight.device)"
    )
    files = {"configuration_remote.py": CONFIGURATION_REMOTE, "modeling_remote.py": MODELING_REMOTE}
    with HubServer([Repository("someone/remote", REMOTE_CONFIG, files=files)]) as hub:
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "own"), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.stdout.split() == ["hub", "RemoteForCausalLM", "meta"], done.stderr
    assert not [path for _, path, _ in hub.requests if "safetensors" in path or path.endswith(".bin")]


def test_remote_code_of_a_native_model_is_ignored(folder):
    auto_map = {"AutoConfig": "nowhere.Config", "AutoModelForCausalLM": "nowhere.Model"}
    resolved = resolve(folder(TINY_LLAMA | {"auto_map": auto_map}))
    assert not resolved.remote_code
    assert type(build_model(resolved)) is transformers.LlamaForCausalLM


# -- functions of the user ---------------------------------------------------------------------------------------------

USER_FILE = """
import torch
import user_sibling_of_test_models

def module():
    return torch.nn.Linear(user_sibling_of_test_models.WIDTH, 4)

def with_batch():
    return torch.nn.Linear(3, 4, dtype=torch.bfloat16), {"input": torch.zeros(2, 3)}

def with_loss():
    model, batch = with_batch()
    return model.eval(), batch, lambda model, batch: model(**batch).sum()

def on_cpu():
    linear = torch.nn.Linear(3, 4, device="cpu")
    linear.bias.requires_grad_(False)
    return linear

def cached():
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11))

def number():
    return 3

def fails():
    raise ValueError("no such shape")

def with_argument(width):
    return torch.nn.Linear(width, 4)

VALUE = 3
"""


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "user_sibling_of_test_models.py").write_text("WIDTH = 3\n")
    (tmp_path / "train.py").write_text(USER_FILE)
    return tmp_path / "train.py"


def test_function_of_a_file(user_file):
    resolved = resolve(f"{user_file}:module")
    assert (resolved.source, resolved.config_dict) == (f"function {user_file}:module", None)
    built = build(resolved)
    assert (count(built.module), built.module.weight.device.type, built.batch) == (16, "meta", None)
    assert (built.dtype, built.dtype_source) == ("float32", "function")
    assert build_model(resolved, dtype="bfloat16").weight.dtype == torch.bfloat16


def test_function_with_batch_and_loss(user_file):
    built = build(resolve(f"{user_file}:with_batch"))
    assert (built.dtype, built.batch["input"].shape, built.compute_loss) == ("bfloat16", (2, 3), None)
    built = build(resolve(f"{user_file}:with_loss"))
    assert not built.module.training  # as the function left it
    loss = built.compute_loss(built.module.to(torch.float32), built.batch)
    assert loss.shape == () and loss.device.type == "meta"


def test_what_a_function_made_on_the_cpu_moves_to_meta(user_file):
    module = build_model(resolve(f"{user_file}:on_cpu"))
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert [parameter.requires_grad for parameter in module.parameters()] == [True, False]


def test_use_cache_of_a_function_is_turned_off(user_file):
    built = build(resolve(f"{user_file}:cached"))
    assert built.module.config.use_cache is False
    assert "use_cache" in built.notes[0]


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("modul", ModelNotFound, r"Unknown function 'modul'.*module"),
        ("VALUE", ModelNotFound, r"VALUE is no function \(int\)"),
        ("number", ModelConfigError, r"value of type int; it must return an nn\.Module"),
        ("fails", ModelConfigError, r"ValueError: no such shape \(train\.py:\d+\)"),
        ("with_argument", ModelConfigError, r"missing 1 required positional argument"),
    ],
)
def test_function_that_cannot_be_used(user_file, name, error, words):
    with pytest.raises(error, match=words):
        build(resolve(f"{user_file}:{name}"))


def test_file_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ModelNotFound, match=r"no file '.*nowhere\.py'"):
        resolve(tmp_path / "nowhere.py:f")
    (tmp_path / "wrong.py").write_text("def f(:\n")
    with pytest.raises(ModelConfigError, match=r"cannot be imported: SyntaxError.*line 1"):
        resolve(tmp_path / "wrong.py:f")
    (tmp_path / "needs.py").write_text("import a_package_that_is_not_here\n")
    with pytest.raises(ModelConfigError, match=r"No module named 'a_package_that_is_not_here' \(needs\.py:1\)"):
        resolve(tmp_path / "needs.py:f")


def test_function_of_a_module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    package = tmp_path / "user_package_of_test_models"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "make.py").write_text("import torch\ndef model(): return torch.nn.Linear(3, 4)\n")
    monkeypatch.chdir(tmp_path)
    assert count(build_model(resolve("user_package_of_test_models.make:model"))) == 16
    with pytest.raises(ModelNotFound, match=r"no Python module 'user_package_of_test_models\.nothing'"):
        resolve("user_package_of_test_models.nothing:model")
    assert locate_model(ModelSpec(reference="torch.nn:Identity")).function == ("torch.nn", "Identity")


# -- the module --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "dtype", "source"),
    [
        (TINY_LLAMA, "bfloat16", "config torch_dtype"),
        (TINY_LLAMA | {"dtype": "float16"}, "float16", "config dtype"),
        (TINY_LLAMA | {"torch_dtype": None}, "float32", "default"),
    ],
)
def test_dtype_of_the_config(folder, config, dtype, source):
    built = build(resolve(folder(config)))
    assert (built.dtype, built.dtype_source) == (dtype, source)
    assert {str(parameter.dtype) for parameter in built.module.parameters()} == {f"torch.{dtype}"}


def test_dtype_of_a_text_config_and_one_that_is_asked_for():
    resolved = resolve("google/gemma-3-4b-it")
    config = dict(resolved.config_dict)
    config["text_config"] = config["text_config"] | {"dtype": "float16"}
    config.pop("torch_dtype")
    built = build(type(resolved)(id="x", source="x", architecture=resolved.architecture, config_dict=config))
    assert (built.dtype, built.dtype_source) == ("float16", "config text_config.dtype")
    asked = build(resolved, dtype="float32")
    assert (asked.dtype, asked.dtype_source) == ("float32", "asked for")
    assert {parameter.dtype for parameter in asked.module.parameters()} == {torch.float32}


def test_unknown_dtype():
    with pytest.raises(UnknownName, match=r"Unknown weights dtype 'bf17'"):
        build(resolve("gpt2"), dtype="bf17")


def test_use_cache_is_off_everywhere():
    module = build_model(resolve("google/gemma-3-4b-it"))
    assert module.config.use_cache is False
    assert module.config.text_config.use_cache is False
    assert build_model(resolve("openai/whisper-tiny")).config.use_cache is False


def test_attention_is_passed_on(folder):
    resolved = resolve(folder(TINY_LLAMA))
    assert build_model(resolved, attention="eager").config._attn_implementation == "eager"
    assert build_model(resolved).config._attn_implementation == "sdpa"
    with pytest.raises(ModelConfigError, match="flashy"):
        build(resolved, attention="flashy")


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("openai-community/gpt2", [["lm_head.weight", "transformer.wte.weight"]]),
        ("Qwen/Qwen3-0.6B", [["lm_head.weight", "model.embed_tokens.weight"]]),
        ("meta-llama/Llama-3.1-8B", []),
        (
            "google-t5/t5-small",
            [["decoder.embed_tokens.weight", "encoder.embed_tokens.weight", "lm_head.weight", "shared.weight"]],
        ),
        ("google/flan-t5-small", [["decoder.embed_tokens.weight", "encoder.embed_tokens.weight", "shared.weight"]]),
    ],
)
def test_tied_weights_are_one_parameter(name, tied):
    """accelerate, which does not know our code, sees the same parameters tied."""
    from accelerate.utils import find_tied_parameters

    module = build_model(resolve(name))
    assert [sorted(group) for group in find_tied_parameters(module)] == tied
    for first, *others in tied:
        assert all(module.get_parameter(other) is module.get_parameter(first) for other in others)


def dtypes_of(module: torch.nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in module.state_dict(keep_vars=True).items()}


TINY_T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 50,
    "tie_word_embeddings": False,
}
TINY_DEEPSEEK = TINY_LLAMA | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("config", [TINY_T5, TINY_DEEPSEEK], ids=["t5", "deepseek_v3"])
def test_same_dtypes_and_ties_as_from_pretrained(folder, config, dtype):
    """The real loader, given a checkpoint with an lm_head of its own, keeps the same in float32 and apart."""
    from safetensors.torch import save_file

    path = folder(config)
    resolved = resolve(path)
    model_class = getattr(transformers, resolved.architecture)
    real = model_class(transformers.AutoConfig.from_pretrained(path))
    weights = {name: tensor.clone().contiguous() for name, tensor in real.state_dict().items()}
    weights["lm_head.weight"] = torch.rand_like(weights["lm_head.weight"])
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    loaded = model_class.from_pretrained(path, dtype=getattr(torch, dtype))
    built = build(resolved, dtype=dtype)
    assert dtypes_of(built.module) == dtypes_of(loaded)
    assert torch.float32 in dtypes_of(loaded).values() or (config is TINY_T5 and dtype == "bfloat16")
    assert count(built.module) == count(loaded)
    assert loaded.lm_head.weight is not loaded.get_input_embeddings().weight


def test_quantised_checkpoint_is_built_plain(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # importing it would raise
    built = build(resolve("TheBloke/Mistral-7B-v0.1-GPTQ"))
    assert {parameter.dtype for parameter in built.module.parameters()} == {torch.float16}
    assert type(built.module.model.layers[0].mlp.up_proj) is torch.nn.Linear
    build(resolve("unsloth/Qwen2.5-0.5B-Instruct-unsloth-bnb-4bit"))


def test_405b_needs_seconds_and_no_memory():
    def resident_bytes() -> int:
        kib = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]
        return int(kib) * 1024

    build(resolve("gpt2"))
    before, started = resident_bytes(), time.monotonic()
    module = build_model(resolve("meta-llama/Llama-3.1-405B-Instruct-FP8"))
    assert time.monotonic() - started < 10
    assert resident_bytes() - before < 100 * 2**20
    assert count(module) == 405_853_388_800


def test_resolving_does_not_change_the_config():
    before = json.dumps(resolve("openai/gpt-oss-20b").config_dict)
    resolved = resolve("openai/gpt-oss-20b")
    build(resolved)
    assert json.dumps(resolved.config_dict) == before
    assert "quantization_config" in resolved.config_dict


def test_every_error_is_an_input_error():
    for kind in (ModelNotFound, ModelConfigError, UnknownName):
        assert issubclass(kind, InputError) and issubclass(kind, MetapeakError)
