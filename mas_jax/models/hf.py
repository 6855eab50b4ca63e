"""Hugging Face directories in and out: safetensors straight to sharded device arrays, and back."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mas_jax.config import ConfigError
from mas_jax.mesh import LEARNER_RULES, Rules, check_divisible, shardings
from mas_jax.models.transformer import ModelConfig, Params, abstract, logical_axes

ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class _Tensor:
    """How one of our arrays is named and shaped in a checkpoint; `inner` axes of ours are the columns of a matrix."""

    name: str
    inner: int = 0
    transposed: bool = True

    def theirs(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The checkpoint's shape for ours; a Linear is [out, in] there and [*in, *out] here."""
        if not self.inner:
            return shape
        matrix = (int(np.prod(shape[: self.inner])), int(np.prod(shape[self.inner :])))
        return matrix[::-1] if self.transposed else matrix

    def read(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Our array, of `shape`, from the checkpoint's."""
        return (array.T if self.inner and self.transposed else array).reshape(shape)

    def write(self, array: np.ndarray) -> np.ndarray:
        """The checkpoint's array from ours."""
        if not self.inner:
            return array
        matrix = array.reshape(int(np.prod(array.shape[: self.inner])), -1)
        return matrix.T if self.transposed else matrix


_ENDS = {
    "embed": _Tensor("model.embed_tokens.weight"),
    "final_norm": _Tensor("model.norm.weight"),
    "lm_head": _Tensor("lm_head.weight", inner=1),
}
_LAYER = {
    "attention_norm": _Tensor("input_layernorm.weight"),
    "mlp_norm": _Tensor("post_attention_layernorm.weight"),
    "attention/q": _Tensor("self_attn.q_proj.weight", inner=1),
    "attention/k": _Tensor("self_attn.k_proj.weight", inner=1),
    "attention/v": _Tensor("self_attn.v_proj.weight", inner=1),
    "attention/o": _Tensor("self_attn.o_proj.weight", inner=2),
    "attention/q_norm": _Tensor("self_attn.q_norm.weight"),
    "attention/k_norm": _Tensor("self_attn.k_norm.weight"),
    "mlp/gate": _Tensor("mlp.gate_proj.weight", inner=1),
    "mlp/up": _Tensor("mlp.up_proj.weight", inner=1),
    "mlp/down": _Tensor("mlp.down_proj.weight", inner=1),
}


def _layer_name(layer: int, tensor: _Tensor) -> str:
    return f"model.layers.{layer}.{tensor.name}"


def _key(path: tuple[jax.tree_util.DictKey, ...]) -> str:
    return "/".join(part.key for part in path)


def _tensor(key: str) -> tuple[_Tensor, bool]:
    """What one of our keys is called in a checkpoint, and whether there is one for each layer."""
    return (_LAYER[key.removeprefix("layers/")], True) if key.startswith("layers/") else (_ENDS[key], False)


def resolve(path_or_id: PathLike) -> Path:
    """The local directory of a model: the path itself, or a hub snapshot; ConfigError where neither can be had."""
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError("path", str(path_or_id), "no such directory, and huggingface_hub is not installed") from error
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
        return Path(snapshot_download(str(path_or_id), allow_patterns=patterns))
    except Exception as error:  # the hub client raises its own, requests', httpx's and OS errors alike
        raise ConfigError(
            "path",
            str(path_or_id),
            f"no such directory, and the hub did not give it ({type(error).__name__}): download the model and give its "
            f"directory",
        ) from error


def _json(path: Path) -> dict[str, object]:
    if not path.is_file():
        raise ConfigError("path", str(path.parent), f"has no {path.name}: give a Hugging Face model directory")
    return json.loads(path.read_text())


def _refuse_variants(raw: Mapping[str, object], rotary: Mapping[str, object]) -> None:
    """Raise ConfigError for the settings that change the arithmetic and that this decoder does not have."""
    unset = {
        "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "quantization_config": None,
        "hidden_act": "silu",
    }  # fmt: skip
    for name, plain in unset.items():
        value = raw.get(name)
        if value is not None and value != plain:
            raise ConfigError(f"config.json {name}", value, f"only {plain!r} is supported")
    scaling = raw.get("rope_scaling")
    kind = rotary.get("rope_type", "default")
    if scaling is not None and (not isinstance(scaling, dict) or scaling.get("rope_type", "scaled") != "default"):
        raise ConfigError("config.json rope_scaling", scaling, "use a model without scaled rotary positions")
    if kind != "default":
        raise ConfigError("config.json rope_parameters", dict(rotary), "use a model without scaled rotary positions")
    if rotary.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("config.json rope_parameters", dict(rotary), "only rotary positions over the whole head work")
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and set(kinds) - {"full_attention"}:
        raise ConfigError("config.json layer_types", sorted(set(kinds)), "only full_attention is supported")


def read_config(path: PathLike) -> ModelConfig:
    """The ModelConfig of a Hugging Face directory; ConfigError for an architecture or a variant we do not compute."""
    raw = _json(Path(path) / "config.json")
    architectures = raw.get("architectures") or [None]
    family = ARCHITECTURES.get(architectures[0])
    if family is None:
        raise ConfigError("config.json architectures", architectures, f"use one of {sorted(ARCHITECTURES)}")
    # transformers 5 moved rope_theta and rope_scaling into one dict.
    rotary = raw.get("rope_parameters") or {}
    _refuse_variants(raw, rotary)
    needed = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    for name in needed:
        if not isinstance(raw.get(name), int):
            raise ConfigError(f"config.json {name}", raw.get(name), "must be a number")
    vocab, layers, width, heads, mlp = (raw[name] for name in needed)
    # What each family's config class assumes where the file is silent.
    kv_heads = raw.get("num_key_value_heads") or (heads if family == "llama" else 32)
    head_dim = raw.get("head_dim") or (width // heads if family == "llama" else 128)
    return ModelConfig(
        family=family, vocab=vocab, layers=layers, width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        mlp=mlp, rope_theta=float(raw.get("rope_theta") or rotary.get("rope_theta") or 10000.0),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)), tied=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=family == "qwen3", max_positions=int(raw.get("max_position_embeddings", 4096)),
    )  # fmt: skip


class _Checkpoint:
    """The safetensors files of a directory as one mapping from name to tensor, read when asked for."""

    def __init__(self, path: Path) -> None:
        index = path / "model.safetensors.index.json"
        if index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif (path / "model.safetensors").is_file():
            files = ["model.safetensors"]
        else:
            raise ConfigError("path", str(path), "holds neither model.safetensors nor model.safetensors.index.json")
        absent = [name for name in files if not (path / name).is_file()]
        if absent:
            raise ConfigError("path", str(path), f"the index names files that are not there: {absent}")
        try:
            opened = [safe_open(path / name, framework="numpy") for name in files]
        except SafetensorError as error:
            raise ConfigError("path", str(path), f"unreadable ({error}): download the model again") from error
        self._of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 (no iterator on safe_open)

    def names(self) -> set[str]:
        return set(self._of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._of[name].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        return self._of[name].get_tensor(name)


def _expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this model must hold, with the shape it must have."""
    expected = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract(config)):
        tensor, layered = _tensor(_key(path))
        if layered:
            shape = tensor.theirs(leaf.shape[1:])
            expected |= {_layer_name(layer, tensor): shape for layer in range(config.layers)}
        else:
            expected[tensor.name] = tensor.theirs(leaf.shape)
    return expected


def _check_names(path: Path, config: ModelConfig, checkpoint: _Checkpoint) -> None:
    """Raise one ConfigError that lists the missing, left-over and mis-shaped tensors."""
    expected, found = _expected(config), checkpoint.names()
    # Tied models often carry a copy of the head, and old Llama exports a table of rotary frequencies: both are derived.
    derived = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    derived |= {"lm_head.weight"} if config.tied else set()
    problems = [f"missing {name}" for name in sorted(expected.keys() - found)]
    problems += [f"left over {name}" for name in sorted(found - expected.keys() - derived)]
    for name in sorted(expected.keys() & found):
        if (shape := checkpoint.shape(name)) != expected[name]:
            problems.append(f"{name} has shape {list(shape)}, config.json gives {list(expected[name])}")
    if problems:
        raise ConfigError("path", str(path), "the weights do not fit config.json: " + "; ".join(problems))


def _reader(checkpoint: _Checkpoint, key: str, shape: tuple[int, ...], dtype: np.dtype) -> Callable[..., np.ndarray]:
    """A function from the index of a device's part to that part of our array `key` of `shape`, read from the files."""
    tensor, layered = _tensor(key)
    parts: dict[str, np.ndarray] = {}

    def read(index: tuple[slice, ...]) -> np.ndarray:
        # Replicas ask for the same part one after the other.
        if (asked := str(index)) not in parts:
            parts.clear()
            if layered:
                layers = range(shape[0])[index[0]]
                each = (tensor.read(checkpoint.read(_layer_name(i, tensor)), shape[1:]) for i in layers)
                parts[asked] = np.stack([layer[index[1:]].astype(dtype) for layer in each])
            else:
                whole = tensor.read(checkpoint.read(tensor.name), shape)
                parts[asked] = np.ascontiguousarray(whole[index].astype(dtype))
        return parts[asked]

    return read


def load(
    path: PathLike, *, mesh: Mesh | None = None, rules: Rules | None = None, dtype: DTypeLike = jnp.float32
) -> tuple[ModelConfig, Params]:
    """The model of a Hugging Face directory, each array read straight to the devices that hold it, as `dtype`.

    Without a mesh everything is on the first device; `rules` default to the learner's. Raises ConfigError for a model
    we do not compute, weights that do not fit config.json (all of them listed), or a mesh that does not divide them.
    """
    path = Path(path)
    config, checkpoint = read_config(path), _Checkpoint(path)
    if not config.tied and "lm_head.weight" not in checkpoint.names():
        config = replace(config, tied=True)
    _check_names(path, config, checkpoint)
    tree = abstract(config, dtype)
    if mesh is None:
        one = SingleDeviceSharding(jax.local_devices()[0])
        places = jax.tree.map(lambda _: one, tree)
    else:
        check_divisible(config, mesh)
        places = shardings(logical_axes(config), mesh, LEARNER_RULES if rules is None else rules)

    def place(path: tuple[jax.tree_util.DictKey, ...], leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding):
        read = _reader(checkpoint, _key(path), leaf.shape, np.dtype(leaf.dtype))
        return jax.make_array_from_callback(leaf.shape, sharding, read)

    return config, jax.tree_util.tree_map_with_path(place, tree, places)


def _exported_config(config: ModelConfig, source: Path | None, dtype: str) -> dict[str, object]:
    """The config.json of an export: the source's where there is one, with what training may have changed."""
    if source is not None:
        raw = _json(source / "config.json")
        if replace(read_config(source), tied=config.tied) != config:
            raise ConfigError("source", str(source), f"is another model than the one to save: {config}")
        raw.pop("dtype", None)
    else:
        names = {family: name for name, family in ARCHITECTURES.items()}
        raw = {
            "architectures": [names[config.family]], "model_type": config.family, "vocab_size": config.vocab,
            "num_hidden_layers": config.layers, "hidden_size": config.width, "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "intermediate_size": config.mlp,
            "rope_theta": config.rope_theta, "rms_norm_eps": config.norm_eps, "hidden_act": "silu",
            "attention_bias": False, "max_position_embeddings": config.max_positions,
        }  # fmt: skip
    return raw | {"torch_dtype": dtype, "tie_word_embeddings": config.tied}


def _exported_tensors(config: ModelConfig, params: Params, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Every tensor of the export by its checkpoint name; ConfigError where params are not this model's."""
    shapes = jax.tree.map(lambda leaf: leaf.shape, abstract(config), is_leaf=lambda leaf: hasattr(leaf, "shape"))
    if jax.tree.map(np.shape, params) != shapes:
        raise ConfigError("params", jax.tree.map(np.shape, params), f"must have the stacked shapes {shapes}")
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        tensor, layered = _tensor(_key(path))
        array = np.asarray(leaf).astype(dtype)
        named = {_layer_name(i, tensor): part for i, part in enumerate(array)} if layered else {tensor.name: array}
        tensors |= {name: np.ascontiguousarray(tensor.write(part)) for name, part in named.items()}
    return tensors


def _write_side_files(target: Path, config: dict[str, object], source: Path | None) -> None:
    """config.json, generation_config.json, and the source's tokenizer and chat template."""
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if source is not None and (source / "generation_config.json").is_file():
        shutil.copy(source / "generation_config.json", target)
    else:
        special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
        settings = special | {"_from_model_config": True}
        (target / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if source is not None:
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copy(source / name, target)
        if (source / "additional_chat_templates").is_dir():
            shutil.copytree(source / "additional_chat_templates", target / "additional_chat_templates")


def save(
    path: PathLike, config: ModelConfig, params: Params, *, source: PathLike | None = None, dtype: str = "float32"
) -> None:
    """Write stacked params as a Hugging Face directory that transformers and vLLM read, in one rename.

    `source` is the directory the model came from: its config.json is kept but for what changed, its tokenizer copied.
    Raises ConfigError for a dtype other than float32, bfloat16 or float16, and for params or a source not of `config`.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError("dtype", dtype, "use float32, bfloat16 or float16")
    path, origin = Path(path), None if source is None else Path(source)
    settings = _exported_config(config, origin, dtype)
    tensors = _exported_tensors(config, params, np.dtype(jnp.dtype(dtype)))
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        # mkdtemp and safetensors make private files; an export is for others to read.
        work.chmod(0o755)
        target = work / "new"
        target.mkdir()
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        (target / "model.safetensors").chmod(0o644)
        _write_side_files(target, settings, origin)
        if path.exists():
            path.rename(work / "old")
        target.rename(path)
    finally:
        shutil.rmtree(work)
