"""Hugging Face directories: what is read, what is refused, and that nothing changes on the way out and back."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from shapes import GEMMA, TINY

from mas_jax.config import ConfigError
from mas_jax.mesh import ROLLOUT_RULES, make_mesh
from mas_jax.models import hf, transformer

GOLDENS = Path(__file__).parents[1] / "goldens"
NAMES = ("qwen3_tied", "qwen3_untied", "llama_tied", "llama_untied")


def copy(tmp_path, name="qwen3_tied", change=lambda tensors: tensors, **settings):
    """A copy of a golden model with its tensors and its config.json changed."""
    path = tmp_path / name
    shutil.copytree(GOLDENS / name, path)
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text()) | settings
    (path / "config.json").write_text(json.dumps(raw))
    return path


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("name", NAMES)
def test_load_save_load_is_the_identity_in_float32(name, tmp_path):
    config, params = hf.load(GOLDENS / name)
    hf.save(tmp_path / "out", config, params, source=GOLDENS / name)
    again, reloaded = hf.load(tmp_path / "out")
    assert again == config
    same(reloaded, params)
    ours, theirs = load_file(tmp_path / "out/model.safetensors"), load_file(GOLDENS / name / "model.safetensors")
    assert ours.keys() == theirs.keys()
    same(ours, theirs)


@pytest.mark.parametrize("tied", [True, False])
def test_a_fresh_model_saved_without_a_source_comes_back_as_itself(tied, tmp_path):
    config = replace(TINY, tied=tied)
    params = transformer.init(config, jax.random.key(0))
    hf.save(tmp_path / "out", config, params, source=None)
    again, reloaded = hf.load(tmp_path / "out")
    assert again == config
    same(reloaded, params)


def test_each_half_precision_loads_and_saves(tmp_path):
    config, params = hf.load(GOLDENS / "llama_untied")
    for dtype in ("bfloat16", "float16"):
        hf.save(tmp_path / dtype, config, params, source=GOLDENS / "llama_untied", dtype=dtype)
        _, half = hf.load(tmp_path / dtype)
        assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype("float32")}
        same(half, jax.tree.map(lambda x, dtype=dtype: x.astype(dtype).astype(jnp.float32), params))
        assert json.loads((tmp_path / dtype / "config.json").read_text())["torch_dtype"] == dtype
    _, narrow = hf.load(tmp_path / "bfloat16", dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(narrow)} == {jnp.dtype(jnp.bfloat16)}


def test_a_sharded_index_loads_as_one_file_does(tmp_path):
    path = copy(tmp_path)
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, path / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "model.safetensors").unlink()
    same(hf.load(path)[1], hf.load(GOLDENS / "qwen3_tied")[1])
    (path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"not there: \['b.safetensors'\]"):
        hf.load(path)


@pytest.mark.parametrize("rules", [None, ROLLOUT_RULES])
def test_weights_loaded_onto_a_mesh_are_the_same_weights_in_their_places(rules):
    mesh = make_mesh(2, 2, 2)
    _, alone = hf.load(GOLDENS / "qwen3_untied")
    _, spread = hf.load(GOLDENS / "qwen3_untied", mesh=mesh, rules=rules)
    same(spread, alone)
    width = TINY.width if rules else TINY.width // 2
    assert spread["layers"]["attention"]["q"].addressable_shards[0].data.shape == (2, width, 2, 8)
    with pytest.raises(ConfigError, match="heads = 4 does not divide"):
        hf.load(GOLDENS / "qwen3_untied", mesh=make_mesh(1, 1, 8))


def test_missing_left_over_and_misshaped_tensors_are_all_named_in_one_error(tmp_path):
    def spoil(tensors):
        del tensors["model.layers.1.self_attn.k_norm.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T.copy()
        return tensors

    with pytest.raises(ConfigError) as error:
        hf.load(copy(tmp_path, change=spoil))
    for part in (
        "missing model.layers.1.self_attn.k_norm.weight", "left over model.layers.2.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight has shape [32, 64], config.json gives [64, 32]",
    ):  # fmt: skip
        assert part in str(error.value)


def test_a_vocabulary_that_differs_from_config_json_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"embed_tokens.weight has shape \[272, 32\], config.json gives \[280, 32\]"):
        hf.load(copy(tmp_path, vocab_size=280))


def test_a_head_beside_tied_embeddings_is_ignored(tmp_path):
    path = copy(tmp_path, change=lambda t: t | {"lm_head.weight": np.full((272, 32), 7, np.float32)})
    config, params = hf.load(path)
    assert config.tied
    same(params, hf.load(GOLDENS / "qwen3_tied")[1])


def test_an_absent_head_is_refused_where_config_json_does_not_tie_it(tmp_path):
    with pytest.raises(
        ConfigError, match=r"missing lm_head.weight \(if the embedding is the head, tie_word_embeddings"
    ):
        hf.load(copy(tmp_path, tie_word_embeddings=False))


def test_the_one_file_goes_before_an_index_that_was_left_over(tmp_path):
    path = copy(tmp_path)
    save_file({"model.norm.weight": np.zeros(1, np.float32)}, path / "old.safetensors")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "old.safetensors"}}')
    same(hf.load(path)[1], hf.load(GOLDENS / "qwen3_tied")[1])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"weight_map": [1]}'])
def test_files_that_are_not_what_they_should_be_are_refused_in_words(name, content, tmp_path):
    path = copy(tmp_path)
    if name != "config.json":
        (path / "model.safetensors").unlink()
    (path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"is not JSON|no JSON object|no weight_map|architectures = None"):
        hf.load(path)


def test_a_model_we_do_not_compute_is_refused_in_words(tmp_path):
    with pytest.raises(ConfigError, match="architectures = .*GPT2.*: use one of .*LlamaFor"):
        hf.load(copy(tmp_path, "llama_tied", architectures=["GPT2LMHeadModel"]))


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
def test_quantized_weights_are_refused_by_name_and_kind(kind, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    narrow = {"float8_e4m3fn": "F8_E4M3", "int8": "I8"}[kind]
    path = copy(tmp_path, change=lambda t: t | {name: t[name].astype(jnp.dtype(kind))})
    with pytest.raises(
        ConfigError, match=rf"1 tensors are quantized \({name} is {narrow}\): give a checkpoint in F32, BF16"
    ):
        hf.load(path)


def test_a_checkpoint_in_float64_loads_as_float32(tmp_path):
    path = copy(tmp_path, change=lambda tensors: {name: x.astype(np.float64) for name, x in tensors.items()})
    same(hf.load(path)[1], hf.load(GOLDENS / "qwen3_tied")[1])


def test_the_language_model_inside_a_vision_model_loads_and_exports_as_a_text_model(tmp_path):
    alone = tmp_path / "alone"
    hf.save(alone, GEMMA, transformer.init(GEMMA, jax.random.key(0)))
    raw = json.loads((alone / "config.json").read_text())
    for prefix in ("language_model.model.", "model.language_model."):
        path = tmp_path / prefix
        shutil.copytree(alone, path)
        tensors = load_file(alone / "model.safetensors")
        held = {name.replace("model.", prefix, 1): x for name, x in tensors.items()}
        held["vision_tower.patch.weight"] = held["multi_modal_projector.weight"] = np.zeros((2, 2), np.float32)
        save_file(held, path / "model.safetensors")
        outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": raw, "eos_token_id": [1, 106]}
        (path / "config.json").write_text(json.dumps(outer))
        config, params = hf.load(path)
        same(params, hf.load(alone)[1])
        hf.save(path / "out", config, params, source=path)
        exported = json.loads((path / "out/config.json").read_text())
        assert exported["architectures"] == ["Gemma3ForCausalLM"]
        assert exported["eos_token_id"] == [1, 106]
        same(hf.load(path / "out")[1], params)


def test_a_large_export_is_several_files_that_load_as_one(tmp_path):
    config, params = hf.load(GOLDENS / "llama_untied")
    hf.save(tmp_path / "out", config, params, source=GOLDENS / "llama_untied", shard_bytes=40_000)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 2
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
    same(hf.load(tmp_path / "out")[1], params)
    # A tensor larger than the limit has a file to itself; no other file exceeds it.
    for file in files:
        held = load_file(tmp_path / "out" / file)
        assert len(held) == 1 or sum(x.nbytes for x in held.values()) <= 40_000


@pytest.mark.parametrize("sizes", [None, (1, 1, 1), (1, 2, 2), (1, 1, 2)])
def test_loading_reads_each_part_of_each_tensor_once_and_never_more_than_one_tensor(sizes, monkeypatch):
    """What the host must hold at once is the largest thing that is read."""
    asked = []
    read = hf._Checkpoint.read

    def spy(self, name, part):
        found = read(self, name, part)
        asked.append((name, part, found.size))
        return found

    monkeypatch.setattr(hf._Checkpoint, "read", spy)
    config, params = hf.load(GOLDENS / "qwen3_untied", mesh=sizes and make_mesh(*sizes))
    whole = sum(x.size for x in jax.tree.leaves(params))
    assert sum(size for *_, size in asked) == whole
    assert len({(name, str(part)) for name, part, _ in asked}) == len(asked)
    assert max(size for *_, size in asked) <= config.vocab * config.width
    if sizes == (1, 2, 2):
        assert max(size for *_, size in asked) == config.vocab * config.width // 4


def test_an_export_keeps_the_tokenizer_and_the_sources_settings_and_replaces_what_was_there(tmp_path):
    source = copy(tmp_path, eos_token_id=[257, 258])
    for name in ("tokenizer.json", "chat_template.jinja"):
        (source / name).write_text(name)
    (source / "generation_config.json").write_text('{"top_k": 20}')
    (source / "optimizer.pt").write_text("not ours to copy")
    config, params = hf.load(source)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/stale").write_text("")
    hf.save(tmp_path / "out", config, params, source=source)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == [257, 258]
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {"top_k": 20}
    assert {file.name for file in tmp_path.iterdir()} == {"qwen3_tied", "out"}


def test_a_failed_export_leaves_what_was_there(tmp_path):
    config, params = hf.load(GOLDENS / "qwen3_tied")
    hf.save(tmp_path / "out", config, params, source=GOLDENS / "qwen3_tied")
    with pytest.raises(ConfigError, match="dtype = 'int8': use float32"):
        hf.save(tmp_path / "out", config, params, source=None, dtype="int8")
    with pytest.raises(ConfigError, match="has no config.json"):
        hf.save(tmp_path / "out", config, params, source=tmp_path)
    with pytest.raises(ConfigError, match="source = .*another model"):
        hf.save(tmp_path / "out", config, params, source=GOLDENS / "llama_tied")
    with pytest.raises(ConfigError, match="params = .*stacked shapes"):
        hf.save(tmp_path / "out", config, transformer.unstack(params), source=None)
    same(hf.load(tmp_path / "out")[1], params)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="is a file: give a directory"):
        hf.save(tmp_path / "file", config, params)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_path_that_is_nowhere_names_field_value_and_remedy(tmp_path):
    assert hf.resolve(GOLDENS / "qwen3_tied") == GOLDENS / "qwen3_tied"
    with pytest.raises(ConfigError, match="path = 'no-one/no-model': .*give its directory"):
        hf.resolve("no-one/no-model")
    with pytest.raises(ConfigError, match="has no config.json"):
        hf.load(tmp_path)
