"""Hugging Face directories in and out: safetensors straight to sharded device arrays, and back."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mas_jax.config import ConfigError
from mas_jax.mesh import LEARNER_RULES, Rules, check_divisible
from mas_jax.models import families
from mas_jax.models.transformer import ModelConfig, Params, abstract, param_shardings

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
FLOATS = ("F32", "BF16", "F16", "F64")  # as safetensors calls them
PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class _Tensor:
    """How one of our arrays is named and shaped in a checkpoint.

    A "{}" in the name is an axis here: the number of the layer, then that of the expert. Beyond those a matrix is
    [*in, *out] here, with `inner` axes in, and [out, in] there; a `flat` array has one axis there.
    """

    name: str
    inner: int = 0
    flat: bool = False

    @property
    def stacked(self) -> int:
        """How many leading axes of ours number the tensors of the checkpoint."""
        return self.name.count("{}")

    def theirs(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The checkpoint's shape for ours."""
        if self.flat:
            return (math.prod(shape),)
        return (math.prod(shape[self.inner :]), math.prod(shape[: self.inner])) if self.inner else shape

    def span(self, index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The part of the checkpoint's array that holds ours[index]."""
        if self.flat:
            return (_span(index, shape),)
        if not self.inner:
            return index
        cut = self.inner
        return _span(index[cut:], shape[cut:]), _span(index[:cut], shape[:cut])

    def read(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Our array (or part of one), of `shape`, from the checkpoint's."""
        return (array.T if self.inner else array).reshape(shape)

    def write(self, array: np.ndarray) -> np.ndarray:
        """The checkpoint's array from ours."""
        theirs = self.theirs(array.shape)
        return array.reshape(theirs[::-1]).T if self.inner else array.reshape(theirs)


def _span(index: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
    """Where ours[index] lies in the flattened axes; only the first of several axes can be cut."""
    for cut, size in zip(index[1:], shape[1:], strict=True):
        if cut.indices(size)[:2] != (0, size):
            raise ConfigError("rules", index, "shard heads, not head_dim: its part of a checkpoint is not in one piece")
    start, stop, _ = index[0].indices(shape[0])
    rest = math.prod(shape[1:])
    return slice(start * rest, stop * rest)


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
    "attention/q_bias": _Tensor("self_attn.q_proj.bias", flat=True),
    "attention/k_bias": _Tensor("self_attn.k_proj.bias", flat=True),
    "attention/v_bias": _Tensor("self_attn.v_proj.bias", flat=True),
    "attention/o_bias": _Tensor("self_attn.o_proj.bias"),
    "attention/q_norm": _Tensor("self_attn.q_norm.weight"),
    "attention/k_norm": _Tensor("self_attn.k_norm.weight"),
    "mlp/gate": _Tensor("mlp.gate_proj.weight", inner=1),
    "mlp/up": _Tensor("mlp.up_proj.weight", inner=1),
    "mlp/down": _Tensor("mlp.down_proj.weight", inner=1),
    "mlp/gate_bias": _Tensor("mlp.gate_proj.bias"),
    "mlp/up_bias": _Tensor("mlp.up_proj.bias"),
    "mlp/down_bias": _Tensor("mlp.down_proj.bias"),
    "experts/router": _Tensor("mlp.gate.weight", inner=1),
    "experts/gate": _Tensor("mlp.experts.{}.gate_proj.weight", inner=1),
    "experts/up": _Tensor("mlp.experts.{}.up_proj.weight", inner=1),
    "experts/down": _Tensor("mlp.experts.{}.down_proj.weight", inner=1),
}
# With norms on both sides of a block, the name of its input norm goes to the norm of what attention adds.
_SANDWICH_LAYER = _LAYER | {
    "attention_post_norm": _Tensor("post_attention_layernorm.weight"),
    "mlp_norm": _Tensor("pre_feedforward_layernorm.weight"),
    "mlp_post_norm": _Tensor("post_feedforward_layernorm.weight"),
}


def _key(path: tuple[jax.tree_util.DictKey, ...]) -> str:
    return "/".join(part.key for part in path)


def _tensors(config: ModelConfig) -> dict[str, _Tensor]:
    """What each of our keys is called in a checkpoint."""
    layer = _SANDWICH_LAYER if config.sandwich_norms else _LAYER
    return _ENDS | {
        f"layers/{key}": replace(tensor, name=f"model.layers.{{}}.{tensor.name}") for key, tensor in layer.items()
    }


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
        # Folders hold copies for other runtimes, and consolidated files the same weights once more.
        others = ["consolidated*", "onnx/*", "original/*"]
        return Path(snapshot_download(str(path_or_id), allow_patterns=patterns, ignore_patterns=others))
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
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("path", str(path), f"is not JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise ConfigError("path", str(path), "is no JSON object: download it again")
    return content


def read_config(path: PathLike) -> ModelConfig:
    """The ModelConfig of a Hugging Face directory; ConfigError for an architecture or a variant we do not compute."""
    return families.read(_json(Path(path) / "config.json"))


class _Checkpoint:
    """The safetensors files of a directory as one mapping from name to tensor, read when asked for.

    Of a vision-language model only the language model is seen, under the names it would have alone.
    """

    def __init__(self, path: Path, architecture: str) -> None:
        index = path / "model.safetensors.index.json"
        # As transformers does: an index beside the one file is left over from something else.
        if (path / "model.safetensors").is_file():
            files = ["model.safetensors"]
        elif index.is_file():
            where = _json(index).get("weight_map")
            if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
                raise ConfigError("path", str(index), "has no weight_map of file names: download it again")
            files = sorted(set(where.values()))
        else:
            raise ConfigError("path", str(path), "holds neither model.safetensors nor model.safetensors.index.json")
        absent = [name for name in files if not (path / name).is_file()]
        if absent:
            raise ConfigError("path", str(path), f"the index names files that are not there: {absent}")
        try:
            opened = [safe_open(path / name, framework="numpy") for name in files]
        except SafetensorError as error:
            raise ConfigError("path", str(path), f"unreadable ({error}): download the model again") from error
        stored = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 (no iterator on safe_open)
        self._of = {name: (file, name) for name, file in stored.items()}
        if architecture in families.TEXT_TOWERS:
            self._of = {
                alone: (file, name) for name, file in stored.items() if (alone := _in_text_tower(name)) is not None
            }

    def names(self) -> set[str]:
        return set(self._of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def kind(self, name: str) -> str:
        return self._slice(name).get_dtype()

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        return self._slice(name)[part]

    def _slice(self, name: str) -> object:
        file, stored = self._of[name]
        return file.get_slice(stored)


def _in_text_tower(name: str) -> str | None:
    """What a tensor of a vision-language model is called in its language model; None for the rest."""
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name if name.startswith("lm_head.") else None


def _expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this model must hold, with the shape it must have."""
    expected, tensors = {}, _tensors(config)
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract(config)):
        tensor = tensors[_key(path)]
        shape = tensor.theirs(leaf.shape[tensor.stacked :])
        expected |= {tensor.name.format(*index): shape for index in np.ndindex(leaf.shape[: tensor.stacked])}
    return expected


def _check_tensors(path: Path, config: ModelConfig, checkpoint: _Checkpoint) -> None:
    """Raise one ConfigError that lists the missing, left-over, mis-shaped and quantized tensors."""
    expected, found = _expected(config), checkpoint.names()
    # Tied models often carry a copy of the head, and old Llama exports a table of rotary frequencies: both are derived.
    derived = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    derived |= {"lm_head.weight"} if config.tied else set()
    problems = [f"missing {name}" for name in sorted(expected.keys() - found)]
    if problems == ["missing lm_head.weight"]:
        problems = ["missing lm_head.weight (if the embedding is the head, tie_word_embeddings should be true)"]
    problems += [f"left over {name}" for name in sorted(found - expected.keys() - derived)]
    for name in sorted(expected.keys() & found):
        if (shape := checkpoint.shape(name)) != expected[name]:
            problems.append(f"{name} has shape {list(shape)}, config.json gives {list(expected[name])}")
    if problems:
        raise ConfigError("path", str(path), "the weights do not fit config.json: " + "; ".join(problems))
    narrow = {name: kind for name in sorted(expected) if (kind := checkpoint.kind(name)) not in FLOATS}
    if narrow:
        name, kind = next(iter(narrow.items()))
        remedy = (
            f"{len(narrow)} tensors are quantized ({name} is {kind}): give a checkpoint in {', '.join(FLOATS)}, since "
            f"training needs the weights themselves"
        )
        raise ConfigError("path", str(path), remedy)


def _reader(
    checkpoint: _Checkpoint, name: str, tensor: _Tensor, shape: tuple[int, ...], dtype: np.dtype
) -> Callable[[tuple[slice, ...]], np.ndarray]:
    """A function from the index of a device's part to that part of our array of `shape`, read from the files."""
    parts: dict[str, np.ndarray] = {}

    def read(index: tuple[slice, ...]) -> np.ndarray:
        # Replicas ask for the same part one after the other.
        if (asked := str(index)) not in parts:
            parts.clear()
            found = checkpoint.read(name, tensor.span(index, shape))
            own = tuple(len(range(size)[cut]) for cut, size in zip(index, shape, strict=True))
            parts[asked] = np.ascontiguousarray(tensor.read(found, own).astype(dtype))
        return parts[asked]

    return read


@partial(jax.jit, donate_argnums=0)
def _put(stack: jax.Array, piece: jax.Array, index: tuple[int | jax.Array, ...]) -> jax.Array:
    return stack.at[index].set(piece)


def load(
    path: PathLike, *, mesh: Mesh | None = None, rules: Rules | None = None, dtype: DTypeLike = jnp.float32
) -> tuple[ModelConfig, Params]:
    """The model of a Hugging Face directory, each tensor read straight to the devices that hold it, as `dtype`.

    Besides what stands on the devices, the host holds at most one tensor of the checkpoint at a time. Without a mesh
    everything is on the first device; `rules` default to the learner's. Raises ConfigError for a model we do not
    compute, weights that do not fit config.json (all of them listed), quantized ones, or a mesh that does not divide them.
    """
    path = Path(path)
    config, checkpoint = read_config(path), _Checkpoint(path, families.architecture(_json(path / "config.json")))
    _check_tensors(path, config, checkpoint)
    tree, tensors = abstract(config, dtype), _tensors(config)
    if mesh is None:
        one = SingleDeviceSharding(jax.local_devices()[0])
        places = jax.tree.map(lambda _: one, tree)
    else:
        check_divisible(config, mesh)
        places = param_shardings(config, mesh, LEARNER_RULES if rules is None else rules)

    def place(path: tuple[jax.tree_util.DictKey, ...], leaf: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
        tensor = tensors[_key(path)]
        read = partial(_reader, checkpoint, tensor=tensor, dtype=np.dtype(leaf.dtype))
        if not tensor.stacked:
            return jax.make_array_from_callback(leaf.shape, sharding, read(tensor.name, shape=leaf.shape))
        shape = leaf.shape[tensor.stacked :]
        own = sharding if mesh is None else NamedSharding(mesh, PartitionSpec(*sharding.spec[tensor.stacked :]))
        stack = jnp.zeros(leaf.shape, leaf.dtype, device=sharding)
        for index in np.ndindex(leaf.shape[: tensor.stacked]):
            piece = jax.make_array_from_callback(shape, own, read(tensor.name.format(*index), shape=shape))
            stack = _put(stack, piece, index)
        return stack

    return config, jax.tree_util.tree_map_with_path(place, tree, places)


def _exported_config(config: ModelConfig, source: Path | None, dtype: str) -> dict[str, object]:
    """The config.json of an export: the source's where there is one, with what training may have changed."""
    if source is not None:
        raw = families.text_config(_json(source / "config.json"))
        if replace(read_config(source), tied=config.tied) != config:
            raise ConfigError("source", str(source), f"is another model than the one to save: {config}")
        raw.pop("dtype", None)
    else:
        raw = families.write(config)
    return raw | {"torch_dtype": dtype, "tie_word_embeddings": config.tied}


def _exported_tensors(config: ModelConfig, params: Params) -> dict[str, Callable[[np.dtype], np.ndarray]]:
    """For every tensor of the export, by its checkpoint name, what fetches it; ConfigError where params are not this model's."""
    shapes = jax.tree.map(lambda leaf: leaf.shape, abstract(config), is_leaf=lambda leaf: hasattr(leaf, "shape"))
    if jax.tree.map(np.shape, params) != shapes:
        raise ConfigError("params", jax.tree.map(np.shape, params), f"must have the stacked shapes {shapes}")
    tensors, fetch = _tensors(config), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        tensor = tensors[_key(path)]
        for index in np.ndindex(leaf.shape[: tensor.stacked]):
            fetch[tensor.name.format(*index)] = partial(_fetch, tensor, leaf, index)
    return fetch


def _fetch(tensor: _Tensor, leaf: jax.Array, index: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    array = np.asarray(leaf[index]).astype(dtype)
    return np.ascontiguousarray(tensor.write(array))


def _write_weights(
    target: Path, config: ModelConfig, fetch: dict[str, Callable[[np.dtype], np.ndarray]], dtype: np.dtype, limit: int
) -> None:
    """model.safetensors, or numbered files of at most `limit` bytes (or one tensor) with their index."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in _expected(config).items()}
    files: list[list[str]] = [[]]
    for name in sizes:
        if files[-1] and sum(sizes[held] for held in files[-1]) + sizes[name] > limit:
            files.append([])
        files[-1].append(name)
    count, weight_map = len(files), {}
    for number, names in enumerate(files, 1):
        file = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        save_file({name: fetch[name](dtype) for name in names}, target / file, metadata={"format": "pt"})
        (target / file).chmod(0o644)  # safetensors makes private files, and an export is for others to read
        weight_map |= dict.fromkeys(names, file)
    if count > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_side_files(target: Path, config: dict[str, object], source: Path | None) -> None:
    """config.json, generation_config.json, and the source's tokenizer and chat template."""
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if source is not None and (source / "generation_config.json").is_file():
        shutil.copy(source / "generation_config.json", target)
    else:
        special = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        special = {name: value for name, value in special.items() if value is not None}
        settings = special | {"_from_model_config": True}
        (target / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if source is not None:
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copy(source / name, target)
        if (source / "additional_chat_templates").is_dir():
            shutil.copytree(source / "additional_chat_templates", target / "additional_chat_templates")


def save(
    path: PathLike,
    config: ModelConfig,
    params: Params,
    *,
    source: PathLike | None = None,
    dtype: str = "float32",
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write stacked params as a Hugging Face directory that transformers and vLLM read, in one rename.

    `source` is the directory the model came from: its config.json is kept but for what changed, its tokenizer copied.
    Weights beyond `shard_bytes` go to several files with an index; the host holds one of them at a time. Raises
    ConfigError for a dtype other than float32, bfloat16 or float16, and for params or a source not of `config`.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError("dtype", dtype, "use float32, bfloat16 or float16")
    path, origin = Path(path).absolute(), None if source is None else Path(source)
    if path.exists() and not path.is_dir():
        raise ConfigError("path", str(path), "is a file: give a directory to write")
    settings = _exported_config(config, origin, dtype)
    fetch = _exported_tensors(config, params)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        work.chmod(0o755)  # mkdtemp makes private directories
        target = work / "new"
        target.mkdir()
        _write_weights(target, config, fetch, np.dtype(jnp.dtype(dtype)), shard_bytes)
        _write_side_files(target, settings, origin)
        if path.exists():
            path.rename(work / "old")
        target.rename(path)
    finally:
        shutil.rmtree(work)
