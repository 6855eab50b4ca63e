"""What published config.json files mean, that a config.json we write means the same, and which variants are refused."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shapes import TINY

from mas_jax.config import ConfigError
from mas_jax.models import families, transformer
from mas_jax.models.rope import Rope, frequencies, rotary_angles
from mas_jax.models.transformer import LayerKind, ModelConfig

# The settings of published models, as their config.json gives them.
LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256, "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
QWEN_2_5_HALF_B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21, "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MISTRAL_7B_V1 = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
    "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
    "vocab_size": 256000,
}  # fmt: skip
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
}  # fmt: skip
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}  # fmt: skip
QWEN_3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
SMOLLM_3_3B = {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 11008, "max_position_embeddings": 65536, "num_attention_heads": 16, "num_hidden_layers": 36,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 5000000.0, "no_rope_layers": [1, 1, 1, 0] * 9,
    "layer_types": ["full_attention"] * 36, "use_sliding_window": False, "sliding_window": None, "vocab_size": 128256,
}  # fmt: skip
PUBLISHED = [
    QWEN_3_30B_A3B,
    SMOLLM_3_3B,
    LLAMA_3_2_1B,
    QWEN_2_5_HALF_B,
    MISTRAL_7B_V1,
    GEMMA_2_2B,
    GEMMA_3_1B,
    GEMMA_3_4B,
]


def test_a_llama_with_stretched_positions():
    rope = Rope(500000.0, "llama3", 32.0, 8192, 1.0, 4.0)
    assert families.read(LLAMA_3_2_1B) == ModelConfig(
        family="llama", vocab=128256, layers=16, width=2048, heads=32, kv_heads=8, head_dim=64, mlp=8192,
        norm_eps=1e-5, tied=True, max_positions=131072, kinds=(LayerKind(rope),),
    )  # fmt: skip


def test_a_qwen_with_biases_and_no_window_in_use():
    config = families.read(QWEN_2_5_HALF_B)
    assert (config.qkv_bias, config.o_bias, config.head_dim) == (True, False, 64)
    assert config.kinds == (LayerKind(Rope(1e6)),)
    windowed = families.read(QWEN_2_5_HALF_B | {"use_sliding_window": True})
    assert [windowed.kinds[k].window for k in windowed.kind_of_layer] == [0] * 21 + [32768] * 3


def test_null_key_value_heads_mean_as_many_as_there_are_heads():
    assert families.read(QWEN_2_5_HALF_B | {"num_key_value_heads": None}).kv_heads == 14


def test_a_mistral_with_and_without_its_window():
    assert families.read(MISTRAL_7B_V1).kinds == (LayerKind(Rope(1e4), 4096),)
    assert families.read(MISTRAL_7B_V1 | {"sliding_window": None}).kinds == (LayerKind(Rope(1e4), 0),)


def test_gemma_2_alternates_windows_caps_logits_and_scales_embeddings():
    config = families.read(GEMMA_2_2B)
    assert [config.kinds[k].window for k in config.kind_of_layer] == [4096, 0] * 13
    assert (config.attention_softcap, config.final_softcap, config.attention_scale) == (50.0, 30.0, 1 / 16)
    assert config.sandwich_norms and config.zero_centred_norms and config.scaled_embeddings and config.tied
    assert config.activation == "gelu_tanh"


def test_a_mixture_of_experts_has_the_parameters_of_its_name():
    config = families.read(QWEN_3_30B_A3B)
    assert (config.experts, config.experts_per_token, config.mlp, config.normed_gates) == (128, 8, 768, True)
    sizes = {
        "/".join(part.key for part in path): leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(transformer.abstract(config))
    }
    assert sum(sizes.values()) == 30_532_122_624
    idle = sum(size for key, size in sizes.items() if "experts/" in key and "router" not in key) * 120 / 128
    assert sum(sizes.values()) - idle == 3_353_032_704  # of 30.5 billion the published 3.3 work on a token
    assert families.read({**QWEN_3_30B_A3B, "num_local_experts": 128, "num_experts": None}) == config


def test_every_fourth_layer_of_smollm3_sees_no_positions():
    config = families.read(SMOLLM_3_3B)
    assert config.kinds == (LayerKind(Rope(5e6)), LayerKind(None))
    assert config.kind_of_layer == (0, 0, 0, 1) * 9
    assert families.read(SMOLLM_3_3B | {"no_rope_layers": None}) == config


@pytest.mark.parametrize(("raw", "window", "factor"), [(GEMMA_3_1B, 512, 1.0), (GEMMA_3_4B, 1024, 8.0)])
def test_gemma_3_gives_local_layers_a_window_and_a_base_of_their_own(raw, window, factor):
    config = families.read(raw)
    local, whole = config.kinds
    assert local == LayerKind(Rope(1e4), window)
    assert (whole.window, whole.rope.theta, whole.rope.factor) == (0, 1e6, factor)
    assert config.kind_of_layer[:12] == (0, 0, 0, 0, 0, 1) * 2
    assert config.qk_norm
    assert config.attention_softcap == config.final_softcap == 0


def test_the_text_tower_of_a_vision_model_is_described_as_a_text_model():
    raw = families.text_config(GEMMA_3_4B)
    assert raw["architectures"] == ["Gemma3ForCausalLM"]
    assert raw["eos_token_id"] == [1, 106]
    assert "vision_config" not in raw
    assert families.read(raw) == families.read(GEMMA_3_4B)


@pytest.mark.parametrize("raw", PUBLISHED, ids=lambda raw: raw["architectures"][0])
def test_what_we_write_means_what_was_read(raw):
    config = families.read(raw)
    assert families.read(families.write(config)) == config


@pytest.mark.parametrize(
    "change",
    [
        {"family": "gpt"}, {"qk_norm": False}, {"final_softcap": 30.0}, {"kinds": (LayerKind(None),)},
        {"qkv_bias": True}, {"attention_scale": 2.0}, {"kinds": (LayerKind(Rope(1e4)), LayerKind(Rope(1e5)))},
    ],
)  # fmt: skip
def test_a_model_that_no_file_of_its_family_describes_is_refused(change):
    config = replace(TINY, **change)
    if len(config.kinds) == 2:
        config = replace(config, pattern=(0, 1))
    with pytest.raises(ConfigError, match="^model"):
        families.write(config)


def test_transformers_5_keeps_rotary_settings_in_one_dict_or_in_one_for_each_kind_of_layer():
    old = families.read(LLAMA_3_2_1B)
    moved = LLAMA_3_2_1B["rope_scaling"] | {"rope_theta": 500000.0}
    new = {key: value for key, value in LLAMA_3_2_1B.items() if not key.startswith("rope")}
    assert families.read(new | {"rope_parameters": moved}) == old
    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    }
    local, whole = families.read(GEMMA_3_1B | {"rope_parameters": nested}).kinds
    assert (local.rope, whole.rope) == (Rope(5000.0), Rope(2e6, "linear", 8.0))


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [
        (LLAMA_3_2_1B, {"architectures": ["GPT2LMHeadModel"]}, "architectures = .*GPT2.*: use one of .*LlamaFor"),
        (LLAMA_3_2_1B, {"architectures": None}, "architectures = "),
        (
            LLAMA_3_2_1B,
            {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}},
            "rope_scaling = .*linear, llama3, yarn",
        ),
        (LLAMA_3_2_1B, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling = .*low_freq_factor"),
        (LLAMA_3_2_1B, {"rope_scaling": {"factor": 8.0}}, "rope_scaling = .*supported rope_type"),
        (LLAMA_3_2_1B, {"rope_scaling": "linear"}, "rope_scaling = 'linear': must be a mapping"),
        (LLAMA_3_2_1B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: only 1.0"),
        (QWEN_3_30B_A3B, {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]: only \[\]"),
        (QWEN_3_30B_A3B, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2: only 1"),
        (LLAMA_3_2_1B, {"hidden_act": "gelu"}, "hidden_act = 'gelu': only 'silu'"),
        (LLAMA_3_2_1B, {"attention_bias": 3}, "attention_bias = 3: must be true or false"),
        (LLAMA_3_2_1B, {"layer_types": ["sliding_attention"] * 16}, r"layer_types = .*\['full_attention'\]"),
        (
            QWEN_2_5_HALF_B,
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config = .*fp8.*give the checkpoint in bf",
        ),
        (QWEN_2_5_HALF_B, {"layer_types": ["full_attention"]}, "layer_types = .*each of 24 layers"),
        (QWEN_2_5_HALF_B, {"layer_types": ["linear_attention"] * 24}, "layer_types = "),
        (QWEN_2_5_HALF_B, {"hidden_size": None}, "hidden_size = None: must be a whole number"),
        (GEMMA_2_2B, {"sliding_window": None}, "sliding_window = None"),
        (GEMMA_2_2B, {"final_logit_softcapping": "30"}, "final_logit_softcapping = '30': must be a positive number"),
        (GEMMA_2_2B, {"attn_logit_softcapping": -30.0}, "attn_logit_softcapping = -30.0: must be a positive"),
        (GEMMA_2_2B, {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar = -4: must be a positive"),
        (GEMMA_2_2B, {"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: must be a positive"),
        (GEMMA_2_2B, {"sliding_window": True}, "sliding_window = True"),
        (GEMMA_3_1B, {"sliding_window_pattern": 0}, "sliding_window_pattern = 0: must be a whole number of at least 1"),
        (GEMMA_3_1B, {"rope_local_base_freq": "x"}, "rope_local_base_freq = 'x': must be a positive number"),
        (
            GEMMA_3_1B,
            {"rope_parameters": {"full_attention": 3}},
            "rope_parameters.full_attention = 3: must be a mapping",
        ),
        (GEMMA_3_4B, {"text_config": [1]}, r"text_config = \[1\]: must be a mapping"),
        (GEMMA_3_4B, {"quantization_config": {"bits": 4}}, "quantization_config = "),
        (SMOLLM_3_3B, {"no_rope_layers": [1]}, r"no_rope_layers = \[1\]: give 0 or 1 for each of 36"),
        (SMOLLM_3_3B, {"no_rope_layers": ["0"] * 36}, "no_rope_layers = "),
        (QWEN_2_5_HALF_B, {"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false': must be true or false"),
        (QWEN_2_5_HALF_B, {"use_sliding_window": "false"}, "use_sliding_window = 'false': must be true or false"),
        (QWEN_2_5_HALF_B, {"use_sliding_window": True, "max_window_layers": "20"}, "max_window_layers = '20'"),
        (QWEN_2_5_HALF_B, {"num_attention_heads": 0}, "num_attention_heads = 0: must be a whole number of at least 1"),
        (QWEN_2_5_HALF_B, {"layer_types": [["full_attention"]] * 24}, "layer_types = "),
        (QWEN_2_5_HALF_B, {"hidden_act": ["silu"]}, r"hidden_act = \['silu'\]"),
        (LLAMA_3_2_1B, {"architectures": 3}, "architectures = 3: use one of"),
        (LLAMA_3_2_1B, {"architectures": [["LlamaForCausalLM"]]}, "architectures = "),
        (LLAMA_3_2_1B, {"rope_theta": -1}, "rope_theta = -1: must be a positive number"),
        (LLAMA_3_2_1B, {"rope_theta": True}, "rope_theta = True: must be a positive number"),
        (LLAMA_3_2_1B, {"rope_scaling": {"rope_type": "linear", "factor": True}}, "rope_scaling.factor = True"),
        (GEMMA_3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0: only None"),
        (GEMMA_3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ],
)
def test_a_variant_we_do_not_compute_is_refused_by_its_key(raw, change, message):
    with pytest.raises(ConfigError, match=f"config.json {message}"):
        families.read(raw | change)


def wavelengths(rope, head_dim=64):
    return 2 * math.pi / np.asarray(frequencies(rope, head_dim, jnp.float32), np.float64)


def test_linear_scaling_stretches_every_wavelength():
    np.testing.assert_allclose(wavelengths(Rope(1e4, "linear", 4.0)), 4 * wavelengths(Rope(1e4)), rtol=1e-5)


def test_llama3_scaling_keeps_short_wavelengths_stretches_long_ones_and_blends_between():
    plain, scaled = wavelengths(Rope(5e5)), wavelengths(Rope(5e5, "llama3", 8.0, 8192, 1.0, 4.0))
    short, long = plain < 8192 / 4, plain > 8192
    np.testing.assert_allclose(scaled[short], plain[short], rtol=1e-5)
    np.testing.assert_allclose(scaled[long], 8 * plain[long], rtol=1e-5)
    between = ~short & ~long
    kept = (8192 / plain[between] - 1) / 3
    np.testing.assert_allclose(1 / scaled[between], (kept + (1 - kept) / 8) / plain[between], rtol=1e-4)
    assert short.sum() > 5 and long.sum() > 5 and between.sum() > 1


def test_yarn_ramps_between_the_pairs_that_turn_32_times_and_once():
    plain, scaled = wavelengths(Rope(1e6)), wavelengths(Rope(1e6, "yarn", 4.0, 32768, 1.0, 32.0))
    # A pair i turns 32768 / (2 pi 1e6^(i/32)) times: 32 times at i = 11.8, once at i = 19.8.
    np.testing.assert_allclose(scaled[:12], plain[:12], rtol=1e-5)
    np.testing.assert_allclose(scaled[20:], 4 * plain[20:], rtol=1e-5)
    at = np.arange(12, 20)
    stretched = (at - 11) / (20 - 11)
    np.testing.assert_allclose(1 / scaled[at], (stretched / 4 + 1 - stretched) / plain[at], rtol=1e-4)


def test_yarn_lengthens_queries_and_keys_by_the_log_of_the_factor():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    (kind,) = families.read(QWEN_2_5_HALF_B | {"rope_scaling": yarn}).kinds
    assert kind.rope.magnitude == pytest.approx(0.1 * math.log(4) + 1)
    cos, sin = rotary_angles(kind.rope, 64, jnp.array([[3]]), jnp.float32)
    np.testing.assert_allclose(cos**2 + sin**2, kind.rope.magnitude**2, rtol=1e-5)
    (given,) = families.read(QWEN_2_5_HALF_B | {"rope_scaling": yarn | {"attention_factor": 1.5}}).kinds
    assert given.rope.magnitude == 1.5


def test_no_rotary_positions_turn_nothing():
    cos, sin = rotary_angles(None, 8, jnp.array([[0, 5]]), jnp.float32)
    np.testing.assert_array_equal(cos, 1)
    np.testing.assert_array_equal(sin, 0)


@pytest.mark.parametrize("change", [{"scaling": "ntk"}, {"factor": 0.0}, {"scaling": "llama3", "factor": 8.0}])
def test_a_rope_that_makes_no_sense_is_refused(change):
    with pytest.raises(ConfigError, match=r"model\.rope"):
        replace(Rope(), **change)
