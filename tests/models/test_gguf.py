"""GGUF files, written here as llama.cpp writes them, become the models they were made from; others are refused in words."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file
from shapes import GEMMA, TINY

from mas_jax.config import ConfigError
from mas_jax.models import gguf as converter
from mas_jax.models import hf, tokenizer, transformer
from mas_jax.models.rope import Rope
from mas_jax.models.transformer import LayerKind

gguf = pytest.importorskip("gguf")

OFFICIAL = Path(__file__).parents[2] / "assets" / "tokenizers"
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
TEXTS = [
    "", "then an answer", "  two  blanks\n\n\nand lines\t", "12345 a1b22", "gr\u00fc\u00df \U0001f642 \u4f60",
    "<|eot_id|>\n<end_of_turn> ",
]  # fmt: skip

ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
PAIRS = [("t", "h"), ("th", "e"), ("\u0120", "a"), ("a", "n"), ("1", "2"), ("12", "3"), ("\u010a", "\u010a")]
LLAMA3_SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
# "answer" is a token that no merges give.
BYTES = [*ALPHABET, *("".join(pair) for pair in PAIRS), "answer", *LLAMA3_SPECIALS]
GEMMA_SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
BLANKS = ["\n", "\n\n", "\n\n\n", "  ", "   ", "    ", "\t"]
LETTERS = ["\u2581", *"abdehinorstwu123,.?", "\u4f60"]
PIECES = {"an": -1.0, "th": -2.0, "the": -3.0, "\u2581an": -4.0, "er": -5.0, "\u2581the": -6.0, "he": -7.0}


def bytes_header(pre, specials=LLAMA3_SPECIALS):
    kinds = [NORMAL] * (len(BYTES) - len(specials)) + [CONTROL] * len(specials)
    ids = {name: BYTES.index(token) for name, token in zip(("bos", "eos"), (specials[0], specials[-1]), strict=True)}
    return {
        "model": "gpt2", "pre": pre, "tokens": BYTES, "token_type": kinds, "merges": [" ".join(pair) for pair in PAIRS],
        **{f"{name}_token_id": number for name, number in ids.items()},
    }  # fmt: skip


def pieces_header():
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*GEMMA_SPECIALS, *BLANKS, *raw, *PIECES, *LETTERS]
    kinds = [CONTROL] * len(GEMMA_SPECIALS) + [USER] * len(BLANKS) + [BYTE] * 256
    scores = [-1000.0] * len(kinds) + [*PIECES.values(), *(-100.0 - i for i in range(len(LETTERS)))]
    kinds += [NORMAL] * (len(PIECES) + len(LETTERS))
    names = {"padding": "<pad>", "eos": "<eos>", "bos": "<bos>", "unknown": "<unk>"}
    return {
        "model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds, "scores": scores, "add_bos_token": True,
        **{f"{name}_token_id": tokens.index(token) for name, token in names.items()},
    }  # fmt: skip


LLAMA = replace(
    TINY, family="llama", qk_norm=False, vocab=len(BYTES), norm_eps=1e-5, tied=False, kinds=(LayerKind(Rope(500000.0)),)
)
GEMMA3 = replace(
    GEMMA, vocab=len(pieces_header()["tokens"]), layers=6, head_dim=16, attention_scale=0.25, final_softcap=0.0,
    kinds=(LayerKind(Rope(1e4), 19), LayerKind(Rope(1e6))), pattern=(0, 0, 0, 0, 0, 1),
)  # fmt: skip
MODELS = {"llama": (LLAMA, bytes_header("llama-bpe")), "gemma3": (GEMMA3, pieces_header())}


def header(name):
    """The keys that llama.cpp writes for a model of MODELS."""
    config, vocabulary = MODELS[name]
    sizes = {
        "block_count": config.layers, "context_length": config.max_positions, "embedding_length": config.width,
        "feed_forward_length": config.mlp, "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads, "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.kinds[-1].rope.theta,
    }  # fmt: skip
    sizes |= {
        "llama": {"rope.dimension_count": 8},
        "gemma3": {"attention.key_length": 16, "attention.sliding_window": 19},
    }[name]
    return {f"{name}.{key}": value for key, value in sizes.items()} | {
        f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()
    }


def interleave(weight, heads):
    """llama.cpp's order of the rows of a head: of n pairs the first row is followed by row n, the second by row n + 1, ..."""
    size = len(weight) // heads
    order = [head * size + i + part * (size // 2) for head in range(heads) for i in range(size // 2) for part in (0, 1)]
    return weight[order]


def stored(name, params):
    """The tensors of a GGUF file of these parameters, under the names of llama.cpp's own table."""
    config, _ = MODELS[name]
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, name.upper()), config.layers)
    tensors = {}
    for key, array in params.items():
        if name == "gemma3" and key.endswith("norm.weight"):
            array = array + 1
        if name == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
            array = interleave(array, config.heads if "q_proj" in key else config.kv_heads)
        tensors[names.get_name(key, try_suffixes=(".weight",))] = array
    return tensors


def write(file, architecture, keys, tensors, types=None):
    writer = gguf.GGUFWriter(str(file), architecture)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        (writer.add_array if isinstance(value, list) else adders[type(value)])(key, value)
    for key, array in tensors.items():
        if kind := (types or {}).get(key):
            writer.add_tensor(key, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """For each model its parameters, and its tensors under their Hugging Face names."""
    models = {}
    for name, (config, _) in MODELS.items():
        params = jax.jit(transformer.init, static_argnums=0)(config, jax.random.key(3))
        path = tmp_path_factory.mktemp(name) / "hf"
        hf.save(path, config, params)
        models[name] = params, load_file(path / "model.safetensors")
    return models


@pytest.fixture
def file(made, tmp_path):
    """Writes a GGUF file of a model: some keys of its header changed (None: left out), tensors changed, added or left out."""

    def make(name, keys=None, tensors=None, types=None, architecture=None):
        wanted = {key: value for key, value in (header(name) | (keys or {})).items() if value is not None}
        arrays = {k: v for k, v in (stored(name, made[name][1]) | (tensors or {})).items() if v is not None}
        return write(tmp_path / f"{name}.gguf", architecture or name, wanted, arrays, types)

    return make


def read(path, name):
    return json.loads((path / name).read_text(encoding="utf-8"))


def refused(source, out, *words):
    with pytest.raises(ConfigError) as caught:
        converter.convert(source, out)
    for word in words:
        assert word in str(caught.value)
    assert not (out / "config.json").exists()


# ---- weights


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_as_it_was(file, made, name, tmp_path):
    out = converter.convert(file(name), tmp_path / "out", "float32")
    config, params = hf.load(out)
    assert config == MODELS[name][0]
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=0, atol=2**-24), params, made[name][0]
    )


def test_rows_of_queries_and_keys_go_from_interleaved_to_half_split_within_each_head(file, tmp_path):
    def rows(count):
        return np.tile(np.arange(count, dtype=np.float32)[:, None], (1, 32))

    tensors = {"blk.0.attn_q.weight": rows(32), "blk.0.attn_k.weight": rows(16), "blk.0.attn_v.weight": rows(16)}
    weights = load_file(
        converter.convert(file("llama", tensors=tensors), tmp_path / "out", "float32") / "model.safetensors"
    )
    found = {kind: weights[f"model.layers.0.self_attn.{kind}_proj.weight"][:, 0].tolist() for kind in "qkv"}
    one = [0, 2, 4, 6, 1, 3, 5, 7]  # a head of 8 rows
    assert found["q"] == [head + row for head in (0, 8, 16, 24) for row in one]
    assert found["k"] == [head + row for head in (0, 8) for row in one]
    assert found["v"] == list(range(16))


def test_norms_of_gemma_lose_the_one_that_the_file_adds_and_those_of_llama_keep_it(file, tmp_path):
    for name, expected in (("gemma3", 0.25), ("llama", 1.25)):
        norm = np.full(32, 1.25, np.float32)
        out = converter.convert(file(name, tensors={"output_norm.weight": norm}), tmp_path / name, "float32")
        np.testing.assert_array_equal(load_file(out / "model.safetensors")["model.norm.weight"], np.full(32, expected))


def test_without_a_head_in_the_file_the_embeddings_are_the_head(file, tmp_path):
    out = converter.convert(file("llama", tensors={"output.weight": None}), tmp_path / "out")
    assert hf.read_config(out).tied
    assert not hf.read_config(converter.convert(file("llama"), tmp_path / "untied")).tied


def test_quantized_tensors_are_dequantized_by_blocks_of_rows_as_at_once(file, made, tmp_path, monkeypatch):
    kinds = {
        "token_embd.weight": "Q8_0",
        "blk.0.attn_q.weight": "Q5_0",
        "blk.1.ffn_up.weight": "F16",
        "output.weight": "BF16",
    }
    kinds = {key: gguf.GGMLQuantizationType[kind] for key, kind in kinds.items()}
    monkeypatch.setattr(converter, "AT_ONCE", 100)
    weights = load_file(
        converter.convert(file("llama", types=kinds), tmp_path / "out", "float32") / "model.safetensors"
    )
    names = {
        "embed_tokens": "token_embd",
        "0.self_attn.q_proj": "blk.0.attn_q",
        "1.mlp.up_proj": "blk.1.ffn_up",
        "lm_head": "output",
    }
    for key, array in made["llama"][1].items():
        name = next((theirs for ours, theirs in names.items() if ours in key), None)
        if name:
            array = gguf.quants.dequantize(
                gguf.quants.quantize(array, kinds[f"{name}.weight"]), kinds[f"{name}.weight"]
            )
        np.testing.assert_array_equal(weights[key], array)


@pytest.mark.parametrize("dtype", converter.DTYPES)
def test_weights_and_config_have_the_dtype_asked_for(file, dtype, tmp_path):
    out = converter.convert(file("llama"), tmp_path / "out", dtype)
    assert {array.dtype for array in load_file(out / "model.safetensors").values()} == {converter.DTYPES[dtype]}
    assert read(out, "config.json")["torch_dtype"] == dtype


# ---- config.json


def llama3_factors(theta, head_dim, factor):
    """What llama.cpp stores, pair by pair, from the wavelength of each."""
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_the_rotary_frequencies_become_the_scaling_of_llama_3(file, factor, tmp_path):
    factors = llama3_factors(500000.0, 8, factor)
    out = converter.convert(file("llama", tensors={"rope_freqs.weight": factors}), tmp_path / "out")
    assert read(out, "config.json")["rope_scaling"] == {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert hf.read_config(out).kinds == (LayerKind(Rope(500000.0, "llama3", factor, 8192, 1.0, 4.0)),)
    assert len(set(factors.tolist())) > 2  # one pair is between kept and stretched


@pytest.mark.parametrize("factors", [[1.0, 1.0, 2.0, 8.0], [8.0] * 4, [1.0, 1.0, 8.0]])
def test_other_factors_of_the_rotary_frequencies_are_refused(file, factors, tmp_path):
    source = file("llama", tensors={"rope_freqs.weight": np.array(factors, np.float32)})
    refused(source, tmp_path / "out", "rope_freqs.weight", "Llama 3.1")


@pytest.mark.parametrize("name", MODELS)
def test_linear_scaling_stretches_all_positions_but_those_of_local_layers(file, name, tmp_path):
    keys = {f"{name}.rope.scaling.type": "linear", f"{name}.rope.scaling.factor": 8.0}
    kinds = hf.read_config(converter.convert(file(name, keys), tmp_path / "out")).kinds
    assert [(kind.rope.scaling, kind.rope.factor, kind.window > 0) for kind in kinds] == (
        [("linear", 8.0, False)] if name == "llama" else [("default", 1.0, True), ("linear", 8.0, False)]
    )


def test_the_queries_of_the_27b_gemma_are_scaled_by_width_over_heads():
    sizes = {"block_count": 62, "embedding_length": 5376, "attention.head_count": 32, "attention.key_length": 128}
    keys = {key.removeprefix("gemma3."): value for key, value in (header("gemma3")).items()} | sizes
    config = converter.FAMILIES["gemma3"].config(converter.Header(Path("27b.gguf"), keys), None)
    assert config["query_pre_attn_scalar"] == 168
    assert config["layer_types"].count("full_attention") == 10
    keys |= {"block_count": 48}
    assert (
        converter.FAMILIES["gemma3"].config(converter.Header(Path("12b.gguf"), keys), None)["query_pre_attn_scalar"]
        == 128
    )


def test_a_pattern_and_a_local_base_that_the_file_names_are_taken(file, tmp_path):
    keys = {"gemma3.attention.sliding_window_pattern": 2, "gemma3.rope.freq_base_swa": 5000.0}
    config = hf.read_config(converter.convert(file("gemma3", keys), tmp_path / "out"))
    assert config.pattern == (0, 1) * 3
    assert config.kinds[0].rope.theta == 5000.0


# ---- tokenizers


def backend(path):
    return tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))


@pytest.mark.parametrize("name", MODELS)
def test_texts_come_back_as_they_were_encoded(file, name, tmp_path):
    out = tokenizer.load(converter.convert(file(name), tmp_path / "out"))
    assert out.vocab == MODELS[name][0].vocab
    for text in TEXTS:
        assert out.decode(out.encode(text), skip_special=False) == text


def test_llama_3_keeps_three_digits_together_and_takes_whole_words_before_merges(file, tmp_path):
    out = backend(converter.convert(file("llama"), tmp_path / "out"))
    assert out.encode("the answer", add_special_tokens=False).tokens == ["the", "\u0120a", *"nswer"]
    assert out.encode("answer1234", add_special_tokens=False).tokens == ["answer", "123", "4"]
    assert out.encode("a\n\nb", add_special_tokens=False).tokens == ["a", "\u010a\u010a", "b"]
    assert out.encode("the").tokens == ["<|begin_of_text|>", "the"]
    assert out.encode("<|eot_id|>", add_special_tokens=False).tokens == ["<|eot_id|>"]


def test_smollm_cuts_digits_one_by_one_and_begins_with_nothing(file, tmp_path):
    keys = {"tokenizer.ggml.pre": "smollm", "tokenizer.ggml.add_bos_token": False}
    out = backend(converter.convert(file("llama", keys), tmp_path / "out"))
    assert out.encode("the 1234").tokens == ["the", "\u0120", "1", "2", "3", "4"]
    assert out.encode("answer").tokens == ["an", *"swer"]


def test_whether_a_text_begins_with_bos_is_the_files_word(file, tmp_path):
    for number, begins in enumerate((True, False)):
        out = backend(
            converter.convert(file("llama", {"tokenizer.ggml.add_bos_token": begins}), tmp_path / str(number))
        )
        assert (out.encode("the").tokens[0] == "<|begin_of_text|>") is begins


def test_gemma_joins_pieces_by_score_runs_of_blanks_first_and_spells_the_unknown_in_bytes(file, tmp_path):
    out = backend(converter.convert(file("gemma3"), tmp_path / "out"))
    assert out.encode("another the").tokens == ["<bos>", "an", "o", "the", "r", "\u2581the"]
    assert out.encode("a\n\n\nb", add_special_tokens=False).tokens == ["a", "\n\n\n", "b"]
    assert out.encode("a     b", add_special_tokens=False).tokens == ["a", "\u2581" * 4, "\u2581", "b"]
    assert out.encode("her", add_special_tokens=False).tokens == ["h", "er"]
    assert out.encode("\u00fc\u4f60", add_special_tokens=False).tokens == ["<0xC3>", "<0xBC>", "\u4f60"]
    assert out.encode("<end_of_turn>", add_special_tokens=False).tokens == ["<end_of_turn>"]


def test_a_reply_ends_with_any_token_that_ends_turns_or_texts(file, tmp_path):
    for name, stops in (("llama", LLAMA3_SPECIALS[1:]), ("gemma3", ["<eos>", "<end_of_turn>"])):
        out = converter.convert(file(name), tmp_path / name)
        ids = [MODELS[name][1]["tokens"].index(stop) for stop in stops]
        assert read(out, "generation_config.json")["eos_token_id"] == ids
        assert read(out, "config.json")["eos_token_id"] == ids
        assert tokenizer.load(out).stop_ids == tuple(ids)


def test_special_tokens_that_a_file_does_not_name_are_left_out(file, tmp_path):
    out = converter.convert(file("llama"), tmp_path / "out")
    named = {key: value for key, value in read(out, "tokenizer_config.json").items() if key.endswith("_token")}
    assert named == {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    assert read(out, "config.json")["pad_token_id"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
def test_an_official_llama_tokenizer_gives_the_same_ids_after_its_way_through_gguf(name, file, tmp_path):
    path = OFFICIAL / name
    if not (path / "tokenizer.json").is_file():
        pytest.skip(f"needs assets/tokenizers/{name}: make tokenizers")
    raw = read(path, "tokenizer.json")
    vocab = raw["model"]["vocab"] | {token["content"]: token["id"] for token in raw["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]]
    special = {token["content"] for token in raw["added_tokens"]}
    keys = {
        "tokens": tokens,
        "token_type": [CONTROL if token in special else NORMAL for token in tokens],
        "merges": merges,
    }
    keys |= {"bos_token_id": vocab["<|begin_of_text|>"], "eos_token_id": vocab["<|eot_id|>"]}
    keys = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    embeddings = np.zeros((len(tokens), 32), np.float32)
    source = file("llama", keys, {"token_embd.weight": embeddings, "output.weight": None})
    ours, theirs = backend(converter.convert(source, tmp_path / "out")), backend(path)
    signs = "don't WE'LL it's\r\n\r\n  x\u00a0y \u0661\u0662\u0663\u0664 \u00bd e\u0301"
    texts = [*TEXTS, signs, Path(__file__).read_text(encoding="utf-8")]
    for text in texts:
        for specials in (True, False):
            assert (
                ours.encode(text, add_special_tokens=specials).ids
                == theirs.encode(text, add_special_tokens=specials).ids
            )


# ---- chat templates


def message(role, content):
    return {"role": role, "content": content}


def test_a_gemma_without_a_template_gets_the_turns_of_its_family(file, tmp_path):
    out = tokenizer.load(converter.convert(file("gemma3"), tmp_path / "out"))
    talk = [message("user", " hi "), message("assistant", "ho"), message("user", "the")]
    turns = "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nho<end_of_turn>\n<start_of_turn>user\nthe<end_of_turn>\n"
    assert out.render(talk, generation_prompt=False) == "<bos>" + turns
    assert out.render(talk) == "<bos>" + turns + "<start_of_turn>model\n"
    brief = out.render([message("system", "Be brief."), *talk], generation_prompt=False)
    assert brief == "<bos>" + turns.replace("user\nhi", "user\nBe brief.\n\nhi")


ODD = ["assistant", "user user", "user tool", "system", "system assistant", "user system"]


@pytest.mark.parametrize("roles", ODD)
def test_turns_that_do_not_alternate_are_refused(file, roles, tmp_path):
    out = tokenizer.load(converter.convert(file("gemma3"), tmp_path / "out"))
    with pytest.raises(ConfigError, match="take turns|before a user message"):
        out.render([message(role, "the") for role in roles.split()])


@pytest.mark.parametrize("name", MODELS)
def test_the_files_own_template_is_kept(file, name, tmp_path):
    out = converter.convert(file(name, {"tokenizer.chat_template": "{{ messages[0].content }}!"}), tmp_path / "out")
    assert tokenizer.load(out).render([message("user", "the")]) == "the!"


def test_a_llama_without_a_template_stays_without(file, tmp_path):
    out = converter.convert(file("llama"), tmp_path / "out")
    assert "chat_template" not in read(out, "tokenizer_config.json")


# ---- what is refused


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("qwen3", {}),
        ("llama", {"tokenizer.ggml.pre": "qwen2"}),
        ("llama", {"tokenizer.ggml.model": "llama"}),
        ("gemma3", {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"}),
    ],
)
def test_other_kinds_are_refused_with_those_that_are_not(file, architecture, keys, tmp_path):
    source = file("llama", keys, architecture=architecture)
    refused(source, tmp_path / "out", architecture, "llama with smollm or llama-bpe; gemma3 with llama")


REQUIRED = {
    "llama": [
        "llama.block_count", "llama.rope.freq_base", "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.merges",
        "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.eos_token_id",
    ],
    "gemma3": ["gemma3.attention.sliding_window", "tokenizer.ggml.scores", "tokenizer.ggml.unknown_token_id"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in REQUIRED.items() for key in keys])
def test_a_header_without_a_key_that_is_needed_is_refused_by_its_name(file, name, key, tmp_path):
    refused(file(name, {key: None}), tmp_path / "out", f"lacks {key}")


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"llama.rope.scaling.type": "yarn"}),
        ("llama", {"llama.rope.dimension_count": 4}),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": [True, False]}),
    ],
)
def test_settings_that_would_change_the_arithmetic_are_refused(file, name, keys, tmp_path):
    refused(file(name, keys), tmp_path / "out", next(iter(keys)).removeprefix("llama."))


def test_missing_and_left_over_tensors_are_listed(file, tmp_path):
    tensors = {"blk.1.ffn_up.weight": None, "blk.0.attn_q.bias": np.zeros(32, np.float32), "output_norm.weight": None}
    words = ("missing blk.1.ffn_up.weight", "missing output_norm.weight", "left over blk.0.attn_q.bias")
    refused(file("llama", tensors=tensors), tmp_path / "out", *words)


def test_a_tensor_of_integers_is_refused_and_what_was_there_before_is_complete_no_more(file, tmp_path):
    out = converter.convert(file("llama"), tmp_path / "out")
    integers = {"blk.1.attn_k.weight": np.zeros((16, 32), np.int32)}
    refused(file("llama", tensors=integers), out, "blk.1.attn_k.weight", "I32")


@pytest.mark.parametrize("name", MODELS)
def test_files_cut_anywhere_are_refused_in_words(file, name, tmp_path):
    whole = file(name).read_bytes()
    for size in [0, 3, 10, 30, *(int(len(whole) * share) for share in (0.01, 0.1, 0.3, 0.6, 0.99))]:
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        refused(tmp_path / "cut.gguf", tmp_path / "out", "cut.gguf", "cut short")


def test_a_file_that_is_no_gguf_and_an_unknown_name_are_refused(tmp_path):
    (tmp_path / "model.gguf").write_text("weights " * 100)
    refused(tmp_path / "model.gguf", tmp_path / "out", "no GGUF file")
    refused("gemma3-270b", tmp_path / "out", "gemma3-270m", "smollm2-135m")
    with pytest.raises(ConfigError, match="bfloat16 or float32"):
        converter.convert(tmp_path / "model.gguf", tmp_path / "out", "int8")


def test_an_out_that_is_a_file_is_refused(file, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="cannot be made a directory"):
        converter.convert(file("llama"), tmp_path / "out")


# ---- packaged models


@pytest.fixture
def packaged(file, tmp_path, monkeypatch):
    """A model in two packages, as "tiny"."""
    whole = file("llama").read_bytes()
    for number, part in enumerate((whole[:5000], whole[5000:])):
        folder = tmp_path / "site" / f"tiny_part{number}" / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text("raise RuntimeError('only its files are wanted')")
        (folder / "model.part").write_bytes(part)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    parts = tuple(f"tiny_part{number}/data/model.part" for number in range(2))
    entry = converter.Packaged("tiny-model", parts, sha256(whole).hexdigest(), "Tiny, under its own terms")
    monkeypatch.setattr(converter, "PACKAGED", {"tiny": entry})
    return entry


def test_the_parts_of_a_packaged_model_are_put_together_and_none_of_its_code_runs(packaged, file, tmp_path):
    ours = load_file(converter.convert("tiny", tmp_path / "out") / "model.safetensors")
    whole = load_file(converter.convert(file("llama"), tmp_path / "whole") / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, ours, whole)


def test_a_packaged_model_that_is_absent_incomplete_or_damaged_says_what_to_install(packaged, tmp_path, monkeypatch):
    part = tmp_path / "site/tiny_part1/data/model.part"
    *most, last = part.read_bytes()
    part.write_bytes(bytes([*most, last ^ 1]))
    refused("tiny", tmp_path / "out", "damaged", "pip install --force-reinstall tiny-model")
    part.unlink()
    refused("tiny", tmp_path / "out", "pip install tiny-model")
    monkeypatch.setattr(converter, "PACKAGED", {"tiny": replace(packaged, parts=("no_such_package_here/model",))})
    refused("tiny", tmp_path / "out", "pip install tiny-model")


def test_the_command_names_the_terms_of_a_packaged_model_once_and_exits_with_2_when_refused(
    packaged, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["gguf", "tiny", str(tmp_path / "out")])
    assert converter.main() == 0
    assert capsys.readouterr().out == f"Tiny, under its own terms\n{tmp_path / 'out'}\n"
    monkeypatch.setattr(sys, "argv", ["gguf", str(tmp_path / "absent.gguf"), str(tmp_path / "out")])
    assert converter.main() == 2
    assert "no such file" in capsys.readouterr().err


def test_help_says_that_the_packaged_gemma_is_a_base_model_under_the_gemma_terms():
    said = subprocess.run(
        [sys.executable, "-m", "mas_jax.models.gguf", "--help"], capture_output=True, text=True, check=True
    )
    assert "base model" in said.stdout and "Gemma Terms of Use" in " ".join(said.stdout.split())
