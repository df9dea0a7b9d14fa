"""Batches: what they hold, and that real models on the CPU take them and return a loss."""

import pytest
import torch
import transformers as hf

from metapeak.tracer.batches import TASKS, make_batch, sum_of_features
from metapeak.tracer.capture import record_training_step
from metapeak.tracer.errors import ModelConfigError, UnknownName
from metapeak.tracer.prepare import prepare_config
from metapeak.tracer.sequences import most_positions
from metapeak.tracer.spec import BatchSpec

TEXT = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
BART = {
    "vocab_size": 99, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 40,
}  # fmt: skip
T5 = {"vocab_size": 99, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
AUDIO = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "conv_dim": (8,) * 7, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


def gpt2(**options):
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=99, n_embd=16, n_layer=1, n_head=2, n_positions=32, **options))


def llama(**options):
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, num_key_value_heads=1, max_position_embeddings=32, **options))


def bert(head="MaskedLM"):
    return getattr(hf, f"BertFor{head}")(hf.BertConfig(**TEXT, max_position_embeddings=32, num_labels=2))


def llava():
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(
            vision_config=hf.CLIPVisionConfig(**VISION, image_size=32, patch_size=8),
            text_config=hf.LlamaConfig(**TEXT, num_key_value_heads=1, pad_token_id=0),
            image_token_index=98,
        )
    )


def qwen2_vl():
    text = {**TEXT, "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    return hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(
            text_config=text,
            vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 1},
            image_token_id=95, video_token_id=96, vision_start_token_id=97, vision_end_token_id=98,
        )
    )  # fmt: skip


def idefics3():
    return hf.Idefics3ForConditionalGeneration(
        hf.Idefics3Config(
            vision_config={**VISION, "image_size": 64, "patch_size": 16},
            text_config=hf.LlamaConfig(**TEXT, num_key_value_heads=1, pad_token_id=0),
            image_token_id=98, scale_factor=2,
        )
    )  # fmt: skip


def gemma3():
    return hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(
            vision_config={**VISION, "image_size": 64, "patch_size": 16},
            text_config={**TEXT, "num_key_value_heads": 1, "head_dim": 8},
            mm_tokens_per_image=4, image_token_index=98, boi_token_index=97, eoi_token_index=96,
        )
    )  # fmt: skip


def llava_next():
    return hf.LlavaNextForConditionalGeneration(
        hf.LlavaNextConfig(
            vision_config=hf.CLIPVisionConfig(**VISION, image_size=32, patch_size=8),
            text_config=hf.LlamaConfig(**TEXT, num_key_value_heads=1, pad_token_id=0),
            image_token_index=98,
            image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
        )
    )


def mllama():
    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2,
        "intermediate_size": 16, "image_size": 32, "patch_size": 8, "vision_output_dim": 32,
        "intermediate_layers_indices": [0], "max_num_tiles": 4,
    }  # fmt: skip
    text = {**TEXT, "num_hidden_layers": 2, "num_key_value_heads": 1, "cross_attention_layers": [1], "pad_token_id": 0}
    return hf.MllamaForConditionalGeneration(
        hf.MllamaConfig(vision_config=vision, text_config=text, image_token_index=98)
    )


def whisper():
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            **BART, max_source_positions=50, max_target_positions=40, decoder_start_token_id=1, pad_token_id=0,
            bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


ROBERTA = {"max_position_embeddings": 34, "pad_token_id": 1}
LONG = {"max_position_embeddings": 70, "attention_window": [8], "pad_token_id": 1, "sep_token_id": 2}
REFORMER = {
    "vocab_size": 99, "hidden_size": 16, "attention_head_size": 8, "num_attention_heads": 2, "feed_forward_size": 16,
    "attn_layers": ["local"], "axial_pos_shape": (4, 8), "axial_pos_embds_dim": (8, 8), "local_attn_chunk_length": 8,
    "max_position_embeddings": 32, "is_decoder": True,
}  # fmt: skip

# name: (task, model, batch)
CASES = {
    "gpt2": ("causal-lm", gpt2, BatchSpec(batch_size=2, seq_len=16)),
    "llama": ("causal-lm", llama, BatchSpec(batch_size=2, seq_len=16)),
    "llama past its positions": ("causal-lm", llama, BatchSpec(seq_len=48)),
    "bert": ("masked-lm", bert, BatchSpec(batch_size=2, seq_len=32)),
    "roberta at its maximum": (
        "masked-lm",
        lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**TEXT, **ROBERTA)),
        BatchSpec(batch_size=2),
    ),
    "reformer": ("causal-lm", lambda: hf.ReformerModelWithLMHead(hf.ReformerConfig(**REFORMER)), BatchSpec()),
    "bart": (
        "seq2seq-lm",
        lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)),
        BatchSpec(batch_size=2, seq_len=16, target_len=8),
    ),
    "t5 without a start token": (
        "seq2seq-lm",
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
        BatchSpec(batch_size=2, seq_len=16, target_len=8),
    ),
    "gpt2 classifier": (
        "sequence-classification",
        lambda: hf.GPT2ForSequenceClassification(gpt2().config),
        BatchSpec(batch_size=3, seq_len=8),
    ),
    "bart classifier": (
        "sequence-classification",
        lambda: hf.BartForSequenceClassification(hf.BartConfig(**BART)),
        BatchSpec(batch_size=3, seq_len=8),
    ),
    "bert tokens": ("token-classification", lambda: bert("TokenClassification"), BatchSpec(batch_size=2, seq_len=8)),
    "bert answers": ("question-answering", lambda: bert("QuestionAnswering"), BatchSpec(batch_size=2, seq_len=8)),
    "longformer answers": (
        "question-answering",
        lambda: hf.LongformerForQuestionAnswering(hf.LongformerConfig(**TEXT, **LONG)),
        BatchSpec(batch_size=2, seq_len=16),
    ),
    "bert pretraining": ("pretraining", lambda: bert("PreTraining"), BatchSpec(batch_size=2, seq_len=8)),
    "vit": (
        "image-classification",
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**VISION, image_size=32, patch_size=8)),
        BatchSpec(batch_size=2),
    ),
    "segformer": (
        "semantic-segmentation",
        lambda: hf.SegformerForSemanticSegmentation(
            hf.SegformerConfig(hidden_sizes=[8, 8, 8, 8], depths=[1] * 4, num_attention_heads=[1] * 4, num_labels=3)
        ),
        BatchSpec(batch_size=2, image_size=64),
    ),
    "llava": ("image-text-to-text", llava, BatchSpec(batch_size=2, seq_len=40, num_images=2)),
    "qwen2-vl": ("image-text-to-text", qwen2_vl, BatchSpec(batch_size=2, seq_len=40, image_size=56)),
    "idefics3": ("image-text-to-text", idefics3, BatchSpec(batch_size=2, seq_len=40, num_images=2)),
    "gemma3": ("image-text-to-text", gemma3, BatchSpec(batch_size=2, seq_len=40)),
    "llava-next": ("image-text-to-text", llava_next, BatchSpec(batch_size=2, seq_len=64)),
    "llama 3.2 vision": ("image-text-to-text", mllama, BatchSpec(batch_size=2, seq_len=40, num_images=2)),
    "wav2vec2": ("ctc", lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**AUDIO)), BatchSpec(batch_size=2, target_len=20)),
    "whisper": ("speech-seq2seq", whisper, BatchSpec(batch_size=2, target_len=20)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_real_run_takes_the_batch(name):
    """The loss of a real forward on the CPU is a finite scalar, and every parameter's gradient can be taken from it."""
    task, make_model, spec = CASES[name]
    model = make_model().train()
    batch = make_batch(model, task, spec)
    loss = model(**batch.tensors).loss
    assert loss.shape == () and torch.isfinite(loss)
    loss.backward()
    assert all(tensor.size(0) % spec.batch_size == 0 for tensor in batch.tensors.values())
    integers = [tensor.dtype for tensor in batch.tensors.values() if not tensor.dtype.is_floating_point]
    assert set(integers) <= {torch.int64}


@pytest.mark.parametrize("name", ["llava", "qwen2-vl", "idefics3", "gemma3", "llava-next", "llama 3.2 vision"])
def test_a_model_on_meta_gets_the_same_batch_and_can_be_traced(name):
    """The vision tower is run on shapes alone there, and for real on the CPU."""
    task, make_model, spec = CASES[name]
    on_cpu = make_batch(make_model(), task, spec).tensors
    with torch.device("meta"):
        model = make_model().train()
    on_meta = make_batch(model, task, spec).tensors
    assert on_meta.keys() == on_cpu.keys()
    assert all(torch.equal(on_meta[key], on_cpu[key]) for key in on_cpu)
    graph, _ = record_training_step(model, on_meta, None, iterations=1)
    graph.lint()


def test_text_batch_is_full_and_labels_are_a_tensor_of_their_own():
    batch = make_batch(llama(), "causal-lm", BatchSpec(batch_size=2, seq_len=16)).tensors
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert all(tensor.shape == (2, 16) for tensor in batch.values())
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert batch["labels"].data_ptr() != batch["input_ids"].data_ptr()
    assert batch["attention_mask"].all()


def test_token_ids_are_valid_and_not_special():
    model = llama(pad_token_id=3, bos_token_id=5, eos_token_id=[7, 9])
    ids = make_batch(model, "causal-lm", BatchSpec(batch_size=4, seq_len=32)).tensors["input_ids"]
    assert ids.min() >= 0 and ids.max() < 99
    assert not set(ids.unique().tolist()) & {3, 5, 7, 9}


def test_encoder_decoder_brings_decoder_inputs_only_where_the_model_cannot_make_them():
    bart = make_batch(hf.BartForConditionalGeneration(hf.BartConfig(**BART)), *CASES["bart"][::2])
    assert set(bart.tensors) == {"input_ids", "attention_mask", "labels"}
    assert bart.tensors["input_ids"].shape == (2, 16) and bart.tensors["labels"].shape == (2, 8)
    t5 = make_batch(hf.T5ForConditionalGeneration(hf.T5Config(**T5)), "seq2seq-lm", BatchSpec(seq_len=4))
    assert "decoder_input_ids" in t5.tensors
    assert any("decoder_start_token_id" in note for note in t5.notes)


def test_every_sample_has_one_end_of_sequence():
    model = hf.BartForSequenceClassification(hf.BartConfig(**BART))
    ids = make_batch(model, "sequence-classification", BatchSpec(batch_size=3, seq_len=8)).tensors["input_ids"]
    assert (ids == model.config.eos_token_id).sum(1).tolist() == [1, 1, 1]


# -- the length of a sequence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_model", "task", "most"),
    [
        (gpt2, "causal-lm", 32),
        (bert, "masked-lm", 32),
        # RoBERTa's positions start behind the padding token's: 34 rows hold 32 positions.
        (lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**TEXT, **ROBERTA)), "masked-lm", 32),
        # OPT adds an offset of two rows to its table.
        (
            lambda: hf.OPTForCausalLM(
                hf.OPTConfig(
                    vocab_size=99,
                    hidden_size=16,
                    ffn_dim=16,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    max_position_embeddings=32,
                    word_embed_proj_dim=16,
                )
            ),
            "causal-lm",
            32,
        ),
    ],
)
def test_learned_positions_end_where_a_real_run_fails(make_model, task, most):
    model = make_model()
    assert most_positions(model) == most
    batch = make_batch(model, task, BatchSpec())
    assert batch.tensors["input_ids"].shape == (1, most)
    assert any(f"seq_len is {most}" in note for note in batch.notes)
    model(**batch.tensors)
    too_long = torch.ones(1, most + 1, dtype=torch.int64) * 4
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=too_long, attention_mask=torch.ones_like(too_long))
    with pytest.raises(ModelConfigError, match=rf"Asked for seq_len {most + 1}.*{most} positions.*Try seq_len {most}"):
        make_batch(model, task, BatchSpec(seq_len=most + 1))


def test_rotary_positions_have_no_end():
    batch = make_batch(llama(), "causal-lm", BatchSpec(seq_len=48))
    assert batch.tensors["input_ids"].shape == (1, 48)
    assert batch.notes == ("seq_len 48 is past the 32 positions of the config; positions are computed, so it runs",)


def test_default_length_is_2048_where_the_model_allows_it():
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, num_key_value_heads=1, max_position_embeddings=8192))
    batch = make_batch(model, "causal-lm", BatchSpec())
    assert batch.tensors["input_ids"].shape == (1, 2048)
    assert batch.notes == ()


def test_reformer_trains_on_one_length_only():
    model = hf.ReformerModelWithLMHead(hf.ReformerConfig(**REFORMER)).train()
    assert make_batch(model, "causal-lm", BatchSpec()).tensors["input_ids"].shape == (1, 32)
    with pytest.raises(ValueError, match="multiply to sequence length"):
        model(input_ids=torch.zeros(1, 16, dtype=torch.int64))
    with pytest.raises(ModelConfigError, match="trains on 32 tokens only"):
        make_batch(model, "causal-lm", BatchSpec(seq_len=16))


# -- images ------------------------------------------------------------------------------------------------------------


def test_images_have_the_models_size_and_dtype():
    model = hf.ViTForImageClassification(hf.ViTConfig(**VISION, image_size=32, patch_size=8)).bfloat16()
    batch = make_batch(model, "image-classification", BatchSpec(batch_size=2)).tensors
    assert batch["pixel_values"].shape == (2, 3, 32, 32)
    assert batch["pixel_values"].dtype == torch.bfloat16
    assert batch["labels"].shape == (2,)


def test_placeholders_of_images():
    """LLaVA keeps every patch: (32 / 8) ** 2 = 16 tokens an image."""
    batch = make_batch(llava(), "image-text-to-text", BatchSpec(batch_size=2, seq_len=40, num_images=2)).tensors
    assert (batch["input_ids"] == 98).sum(1).tolist() == [32, 32]
    assert batch["pixel_values"].shape == (4, 3, 32, 32)
    assert (batch["labels"] == -100).sum(1).tolist() == [32, 32]


def test_placeholders_of_patched_images():
    """Qwen2-VL: 56 / 14 = 4 patches a side, 2 x 2 of them are one token: 4 tokens an image."""
    batch = make_batch(qwen2_vl(), "image-text-to-text", BatchSpec(batch_size=2, seq_len=40, image_size=56)).tensors
    assert batch["image_grid_thw"].tolist() == [[1, 4, 4]] * 2
    assert batch["pixel_values"].shape == (2 * 16, 3 * 2 * 14 * 14)
    assert (batch["input_ids"] == 95).sum(1).tolist() == [4, 4]


def test_images_that_leave_no_room_for_text():
    with pytest.raises(ModelConfigError, match="32 tokens of each sample"):
        make_batch(llava(), "image-text-to-text", BatchSpec(seq_len=32, num_images=2))


# -- what cannot be trained --------------------------------------------------------------------------------------------


def test_model_without_a_loss():
    with pytest.raises(ModelConfigError, match=r"BertModel.*takes no `labels`"):
        make_batch(hf.BertModel(bert().config), "masked-lm", BatchSpec(seq_len=8))


def test_features_stand_for_a_loss():
    model = hf.BertModel(bert().config)
    batch = make_batch(model, "feature-extraction", BatchSpec(batch_size=2, seq_len=8))
    sum_of_features(model, batch.tensors).backward()
    assert model.embeddings.word_embeddings.weight.grad is not None
    assert any("no loss" in note for note in batch.notes)


def test_sizes_that_nothing_reads_are_said():
    batch = make_batch(llama(), "causal-lm", BatchSpec(seq_len=8, target_len=4, image_size=32, num_images=2))
    assert [note.split()[0] for note in batch.notes] == ["target_len", "image_size", "num_images"]


def test_unknown_task():
    with pytest.raises(UnknownName, match="causal-lm"):
        make_batch(gpt2(), "causal-ml", BatchSpec())
    assert len(TASKS) == 14


def test_prepare_config():
    config = hf.BartConfig(**BART, encoder_layerdrop=0.1, decoder_layerdrop=0.0, use_cache=True)
    assert prepare_config(config) == ("encoder_layerdrop was set to 0, so that no layer is skipped",)
    assert config.encoder_layerdrop == 0.0 and config.use_cache is False
    assert prepare_config(config) == ()


def test_prepare_config_reaches_inner_configs():
    config = hf.LlavaConfig(text_config=hf.LlamaConfig(**TEXT, use_cache=True))
    prepare_config(config)
    assert config.text_config.use_cache is False
