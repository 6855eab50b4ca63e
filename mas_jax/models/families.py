"""The model families: what each one's config.json says, and which features of the decoder it means.

A family is a row of FAMILIES. `read` turns a config.json into a ModelConfig and `write` does the reverse; both ask only
the row. The decoder itself (transformer.py) and the files (hf.py) never ask which family they are serving.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mas_jax.config import ConfigError
from mas_jax.models.rope import Rope
from mas_jax.models.transformer import LayerKind, ModelConfig

Json = Mapping[str, object]

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATION_NAMES = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
SIZES = {
    "vocab_size": "vocab", "num_hidden_layers": "layers", "hidden_size": "width", "num_attention_heads": "heads",
    "intermediate_size": "mlp", "num_key_value_heads": "kv_heads", "head_dim": "head_dim",
    "max_position_embeddings": "max_positions",
}  # fmt: skip
# Settings that change the arithmetic, with the value that leaves it alone; a family's own settings are no longer refused.
PLAIN = {
    "attention_bias": False, "mlp_bias": False, "quantization_config": None, "use_bidirectional_attention": False,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "partial_rotary_factor": 1.0,
    "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
# Names that transformers 5 gives to older settings.
RENAMED = {"num_local_experts": "num_experts"}
# A null there says "none", and elsewhere that the family's default holds.
NULLABLE = {"num_key_value_heads", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
# Vision-language models whose text tower is one of our families: it is read alone, and exported as a text model.
TEXT_TOWERS = {"Gemma3ForConditionalGeneration": "gemma3"}


@dataclass(frozen=True)
class Family:
    """One family: its names, what its config.json means where it is silent, and what every model of it has."""

    architecture: str
    model_type: str
    defaults: Json
    features: Mapping[str, object] = field(default_factory=dict)
    """Fields of ModelConfig that are the same in every model of the family."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json, beyond SIZES or in their place, and the fields that they size."""
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys of config.json, beyond the common ones, and the fields of ModelConfig that hold their value (null: 0)."""
    activation_key: str = "hidden_act"
    is_sliding: Callable[[Json, int], bool] = lambda raw, layer: False
    """Whether a layer has the window, where config.json lists no layer_types."""
    has_rope: Callable[[Json, int], bool] = lambda raw, layer: True
    """Whether a layer sees positions at all."""
    lists_layer_types: bool = True
    local_theta: float | None = None
    """Base of the rotary positions of sliding layers, where they have their own."""


def _after_max_window_layers(raw: Json, layer: int) -> bool:
    return bool(raw["use_sliding_window"]) and layer >= raw["max_window_layers"]


def _in_no_rope_layers(raw: Json, layer: int) -> bool:
    """The list holds 1 for layers with rotary positions; without it every fourth layer has none."""
    listed = raw.get("no_rope_layers")
    return bool(listed[layer]) if listed else (layer + 1) % raw["no_rope_layer_interval"] != 0


_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}
_QWEN = _COMMON | {
    "num_key_value_heads": 32, "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip
_GEMMA = _COMMON | {
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_GEMMA_FEATURES = {"sandwich_norms": True, "zero_centred_norms": True, "scaled_embeddings": True}
_BIAS = {"attention_bias": ("qkv_bias", "o_bias")}
_FINAL_SOFTCAP = {"final_logit_softcapping": ("final_softcap",)}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", "llama", lists_layer_types=False,
        defaults=_COMMON | {"max_position_embeddings": 2048},
        settings=_BIAS | {"mlp_bias": ("mlp_bias",)},
    ),
    "mistral": Family(
        "MistralForCausalLM", "mistral", lists_layer_types=False,
        defaults=_COMMON | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        is_sliding=lambda raw, layer: raw["sliding_window"] is not None,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", "qwen2", defaults=_QWEN, features={"qkv_bias": True}, is_sliding=_after_max_window_layers
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", "qwen3", defaults=_QWEN | {"head_dim": 128}, features={"qk_norm": True}, settings=_BIAS,
        is_sliding=_after_max_window_layers,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", "qwen3_moe", lists_layer_types=False,
        defaults=_QWEN | {
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        },
        features={"qk_norm": True},
        sizes={
            "num_experts": "experts", "num_experts_per_tok": "experts_per_token", "moe_intermediate_size": "mlp",
        },
        settings=_BIAS | {"norm_topk_prob": ("normed_gates",)},
        is_sliding=lambda raw, layer: bool(raw["use_sliding_window"]),
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM", "smollm3",
        defaults=_COMMON | {
            "tie_word_embeddings": True, "num_key_value_heads": 4, "max_position_embeddings": 32768,
            "rope_theta": 2000000.0, "no_rope_layer_interval": 4, "use_sliding_window": False, "sliding_window": None,
        },
        settings=_BIAS | {"mlp_bias": ("mlp_bias",)},
        has_rope=_in_no_rope_layers,
        is_sliding=lambda raw, layer: bool(raw["use_sliding_window"]) and not _in_no_rope_layers(raw, layer),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", "gemma2", activation_key="hidden_activation",
        defaults=_GEMMA | {
            "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0
        },
        features=_GEMMA_FEATURES,
        settings=_BIAS | _FINAL_SOFTCAP | {"attn_logit_softcapping": ("attention_softcap",)},
        is_sliding=lambda raw, layer: layer % 2 == 0,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM", "gemma3_text", activation_key="hidden_activation", local_theta=10000.0,
        defaults=_GEMMA | {
            "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
            "sliding_window_pattern": 6,
        },
        features=_GEMMA_FEATURES | {"qk_norm": True},
        settings=_BIAS | _FINAL_SOFTCAP,
        is_sliding=lambda raw, layer: (layer + 1) % raw["sliding_window_pattern"] != 0,
    ),
}  # fmt: skip

_BY_ARCHITECTURE = {family.architecture: name for name, family in FAMILIES.items()} | TEXT_TOWERS


def architecture(raw: Json) -> str | None:
    """The first of a config.json's architectures."""
    listed = raw.get("architectures")
    return listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], str) else None


def text_config(raw: Json) -> dict[str, object]:
    """The config.json of the text tower of a vision-language model; that of any other model as it is."""
    if architecture(raw) not in TEXT_TOWERS:
        return dict(raw)
    family, inner = FAMILIES[TEXT_TOWERS[architecture(raw)]], raw.get("text_config") or {}
    if not isinstance(inner, dict):
        raise ConfigError("config.json text_config", inner, "must be a mapping")
    kept = ("tie_word_embeddings", "quantization_config", "use_bidirectional_attention")
    outer = {key: value for key, value in raw.items() if key.endswith("_token_id") or key in kept}
    inner = {key: value for key, value in inner.items() if value is not None or key not in outer}
    return outer | inner | {"architectures": [family.architecture], "model_type": family.model_type}


def read(raw: Json) -> ModelConfig:
    """The ModelConfig that a config.json means; ConfigError for a family or a variant that we do not compute."""
    raw = text_config(raw)
    name = _BY_ARCHITECTURE.get(architecture(raw))
    if name is None:
        remedy = f"use one of {sorted(_BY_ARCHITECTURE)}"
        raise ConfigError("config.json architectures", raw.get("architectures"), remedy)
    family = FAMILIES[name]
    raw = {RENAMED.get(key, key): value for key, value in raw.items()}
    raw = {**family.defaults, **{key: value for key, value in raw.items() if value is not None or key in NULLABLE}}
    _refuse_variants(family, raw)
    if raw.get("num_key_value_heads") is None:
        raw["num_key_value_heads"] = raw.get("num_attention_heads")
    keys = {ours: theirs for theirs, ours in (SIZES | family.sizes).items()}
    sizes = {ours: _whole(raw, theirs) for ours, theirs in keys.items() if ours != "head_dim"}
    sizes["head_dim"] = _whole(raw, "head_dim") if "head_dim" in raw else sizes["width"] // sizes["heads"]
    settings = {ours: _setting(raw, theirs) for theirs, fields in family.settings.items() for ours in fields}
    if "query_pre_attn_scalar" in family.defaults:
        settings["attention_scale"] = _number("query_pre_attn_scalar", raw.get("query_pre_attn_scalar")) ** -0.5
    kinds, pattern = _layer_kinds(family, raw, sizes["layers"])
    return ModelConfig(
        family=name, kinds=kinds, pattern=pattern, norm_eps=_number("rms_norm_eps", raw.get("rms_norm_eps")),
        tied=_flag(raw, "tie_word_embeddings"), activation=ACTIVATION_NAMES[raw[family.activation_key]],
        **sizes, **settings, **family.features,
    )  # fmt: skip


def write(config: ModelConfig) -> dict[str, object]:
    """The config.json of a model; ConfigError for one that its family's files cannot describe."""
    if config.family not in FAMILIES:
        raise ConfigError("model.family", config.family, f"use one of {sorted(FAMILIES)}")
    family = FAMILIES[config.family]
    raw = {theirs: getattr(config, ours) for theirs, ours in (SIZES | family.sizes).items()}
    raw |= {theirs: getattr(config, fields[0]) or PLAIN[theirs] for theirs, fields in family.settings.items()}
    raw |= {"architectures": [family.architecture], "model_type": family.model_type, "rms_norm_eps": config.norm_eps}
    raw["tie_word_embeddings"] = config.tied
    # The tokenizer's affair; left out, transformers would take a family's own ids, perhaps beyond the vocabulary.
    raw |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    raw[family.activation_key] = next(key for key, name in ACTIVATION_NAMES.items() if name == config.activation)
    if "query_pre_attn_scalar" in family.defaults and config.attention_scale:
        raw["query_pre_attn_scalar"] = round(config.attention_scale**-2)
    raw |= _write_layer_kinds(family, config)
    if read(raw) != config:
        raise ConfigError("model", config, f"a {config.family} model cannot be that; its config.json means {read(raw)}")
    return raw


def _number(key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"config.json {key}", value, "must be a positive number")
    return float(value)


def _whole(raw: Json, key: str, least: int = 1) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"config.json {key}", value, f"must be a whole number of at least {least}")
    return value


def _flag(raw: Json, key: str) -> bool:
    if not isinstance(raw.get(key), bool):
        raise ConfigError(f"config.json {key}", raw.get(key), "must be true or false")
    return raw[key]


def _setting(raw: Json, key: str) -> bool | float:
    """A flag or a soft cap; null and absent mean that there is none."""
    flag = PLAIN[key] is False
    if raw.get(key) is None:
        return False if flag else 0.0
    return _flag(raw, key) if flag else _number(key, raw[key])


def _refuse_variants(family: Family, raw: Json) -> None:
    """Raise ConfigError for the settings that change the arithmetic and that this family does not have here."""
    for key, plain in PLAIN.items():
        value = raw.get(key)
        if key not in family.settings and value is not None and value != plain:
            remedy = f"only {plain!r} is supported"
            if key == "quantization_config":
                remedy = "training needs the weights themselves: give the checkpoint in bfloat16 or float32"
            raise ConfigError(f"config.json {key}", value, remedy)
    activation = raw.get(family.activation_key)
    if not isinstance(activation, str) or activation not in ACTIVATION_NAMES:
        remedy = f"only {' and '.join(map(repr, ACTIVATION_NAMES))} are supported"
        raise ConfigError(f"config.json {family.activation_key}", activation, remedy)


def _layer_kinds(family: Family, raw: Json, layers: int) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """The kinds of layer, in order of appearance, and which each layer is."""
    _check_layer_settings(family, raw, layers)
    types = raw.get("layer_types")
    known = {FULL, SLIDING} if family.lists_layer_types else {FULL}
    if types is not None and not (
        isinstance(types, list)
        and len(types) == layers
        and all(isinstance(kind, str) and kind in known for kind in types)
    ):
        raise ConfigError("config.json layer_types", types, f"name one of {sorted(known)} for each of {layers} layers")
    if types is None or not family.lists_layer_types:
        types = [SLIDING if family.is_sliding(raw, layer) else FULL for layer in range(layers)]
    window = raw.get("sliding_window")
    if SLIDING in types and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ConfigError("config.json sliding_window", window, "give the number of keys that sliding layers attend")
    ropes = {kind: _read_rope(family, raw, kind) for kind in set(types)}
    seen = [
        LayerKind(ropes[kind] if family.has_rope(raw, layer) else None, window if kind == SLIDING else 0)
        for layer, kind in enumerate(types)
    ]
    distinct = tuple(dict.fromkeys(seen))
    return distinct, () if len(distinct) == 1 else tuple(distinct.index(kind) for kind in seen)


def _check_layer_settings(family: Family, raw: Json, layers: int) -> None:
    """Raise ConfigError for what `is_sliding` and `has_rope` cannot read."""
    for key, least in (("max_window_layers", 0), ("sliding_window_pattern", 1), ("no_rope_layer_interval", 1)):
        if key in family.defaults:
            _whole(raw, key, least)
    if "use_sliding_window" in family.defaults:
        _flag(raw, "use_sliding_window")
    listed = raw.get("no_rope_layers")
    if listed is not None and not (
        isinstance(listed, list) and len(listed) >= layers and all(isinstance(x, int) and x in (0, 1) for x in listed)
    ):
        raise ConfigError("config.json no_rope_layers", listed, f"give 0 or 1 for each of {layers} layers")


def _read_rope(family: Family, raw: Json, kind: str) -> Rope:
    """The rotary positions of one kind of layer, where transformers 4 (rope_theta, rope_scaling) or 5 says it."""
    # transformers 5: one dict, or one for each kind of layer.
    given = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    for key, value in (("rope_parameters", given), ("rope_scaling", scaling)):
        if not isinstance(value, dict):
            raise ConfigError(f"config.json {key}", value, "must be a mapping")
    local = kind == SLIDING and family.local_theta is not None
    if given.keys() & {FULL, SLIDING}:
        found = given.get(kind) or {}
        if not isinstance(found, dict):
            raise ConfigError(f"config.json rope_parameters.{kind}", found, "must be a mapping")
    else:
        found = {} if local else given | scaling
    key = "rope_local_base_freq" if local else "rope_theta"
    theta = found.get("rope_theta") or raw.get(key, family.local_theta)
    return _rope(found, _number(key, theta), raw)


def _rope(found: Json, theta: float, raw: Json) -> Rope:
    scaling = found.get("rope_type", found.get("type", "default" if found.keys() <= {"rope_theta"} else None))
    shown = "config.json rope_scaling"
    try:
        if found.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(shown, dict(found), "only rotary positions over the whole head work")
        if scaling == "default":
            return Rope(theta)
        factor = _number("rope_scaling.factor", found["factor"])
        if scaling == "linear":
            return Rope(theta, "linear", factor)
        if scaling == "llama3":
            original = int(found.get("original_max_position_embeddings") or raw["max_position_embeddings"])
            return Rope(theta, "llama3", factor, original, found["low_freq_factor"], found["high_freq_factor"])
        if scaling == "yarn":
            original = int(found.get("original_max_position_embeddings") or raw["max_position_embeddings"])
            ramp = float(found.get("beta_slow") or 1), float(found.get("beta_fast") or 32)
            return Rope(theta, "yarn", factor, original, *ramp, _magnitude(found), bool(found.get("truncate", True)))
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(shown, dict(found), f"missing or no number: {error}") from error
    raise ConfigError(shown, dict(found), "supported rope_type: default, linear, llama3, yarn")


def _magnitude(found: Json) -> float:
    """YaRN's factor of sines and cosines: as given, else 0.1 ln(factor) + 1 (weighed by mscale / mscale_all_dim)."""
    if found.get("attention_factor") is not None:
        return float(found["attention_factor"])

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(found["factor"]) + 1 if found["factor"] > 1 else 1.0

    both = found.get("mscale") and found.get("mscale_all_dim")
    return grown(found["mscale"]) / grown(found["mscale_all_dim"]) if both else grown(1.0)


def _write_layer_kinds(family: Family, config: ModelConfig) -> dict[str, object]:
    kinds = [config.kinds[number] for number in config.kind_of_layer]
    window = next((kind.window for kind in kinds if kind.window), None)
    raw: dict[str, object] = {}
    if "sliding_window" in family.defaults:
        raw["sliding_window"] = window
    if "use_sliding_window" in family.defaults:
        raw["use_sliding_window"] = window is not None
    if family.lists_layer_types:
        raw["layer_types"] = [SLIDING if kind.window else FULL for kind in kinds]
    if "no_rope_layer_interval" in family.defaults:
        raw["no_rope_layers"] = [int(kind.rope is not None) for kind in kinds]
    ropes = {SLIDING if kind.window else FULL: kind.rope for kind in kinds if kind.rope}
    rope = ropes.get(FULL) or ropes.get(SLIDING) or Rope()
    if family.local_theta is not None and SLIDING in ropes:
        raw["rope_local_base_freq"] = ropes[SLIDING].theta
    return raw | {"rope_theta": rope.theta, "rope_scaling": _write_scaling(rope)}


def _write_scaling(rope: Rope) -> dict[str, object] | None:
    if rope.scaling == "default":
        return None
    raw = {"rope_type": rope.scaling, "factor": rope.factor}
    original = {"original_max_position_embeddings": rope.original_positions}
    if rope.scaling == "llama3":
        return raw | original | {"low_freq_factor": rope.low, "high_freq_factor": rope.high}
    if rope.scaling == "yarn":
        ramp = {"beta_slow": rope.low, "beta_fast": rope.high, "attention_factor": rope.magnitude}
        return raw | original | ramp | {"truncate": rope.truncate}
    return raw
