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
from shapes import TINY

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
    with pytest.raises(ConfigError, match="kv_heads = 2 does not divide"):
        hf.load(GOLDENS / "qwen3_untied", mesh=make_mesh(1, 1, 4))


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


def test_an_absent_head_means_tied_and_the_export_says_so(tmp_path):
    path = copy(tmp_path, tie_word_embeddings=False)
    config, params = hf.load(path)
    assert config.tied
    hf.save(tmp_path / "out", config, params, source=path)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama_tied", {"architectures": ["GPT2LMHeadModel"]}, "architectures = .*GPT2.*: use one of .*LlamaFor"),
        ("llama_tied", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling = "),
        ("llama_tied", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters = "),
        ("llama_tied", {"attention_bias": True}, "attention_bias = True: only False"),
        ("llama_tied", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama_tied", {"hidden_act": "gelu"}, "hidden_act = 'gelu': only 'silu'"),
        ("qwen3_tied", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen3_tied", {"quantization_config": {"bits": 4}}, "quantization_config = "),
        ("qwen3_tied", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = "),
        ("qwen3_tied", {"hidden_size": None}, "hidden_size = None: must be a number"),
    ],
)
def test_a_model_we_do_not_compute_is_refused_in_words(name, settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        hf.read_config(copy(tmp_path, name, **settings))


def test_the_rotary_base_is_read_where_either_version_of_transformers_writes_it(tmp_path):
    new = copy(tmp_path / "new", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    old = copy(tmp_path / "old", rope_parameters=None, rope_theta=5e5)
    assert hf.read_config(new).rope_theta == hf.read_config(old).rope_theta == 5e5


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


def test_a_path_that_is_nowhere_names_field_value_and_remedy(tmp_path):
    assert hf.resolve(GOLDENS / "qwen3_tied") == GOLDENS / "qwen3_tied"
    with pytest.raises(ConfigError, match="path = 'no-one/no-model': .*give its directory"):
        hf.resolve("no-one/no-model")
    with pytest.raises(ConfigError, match="has no config.json"):
        hf.load(tmp_path)
