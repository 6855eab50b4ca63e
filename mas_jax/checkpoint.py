"""Atomic, verified checkpoints: Orbax stores the arrays, a rename commits, a CRC of every leaf is checked at each read.

`<directory>/<step>/arrays` is an Orbax checkpoint of a flat dict from leaf name to array; `meta.json` beside it holds the
caller's meta and each leaf's dtype, shape and CRC. A step is a directory with a number for a name: it gets that name
only when all of it is on disk and has been read back, and loses it before any of it is deleted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mas_jax.config import ConfigError

__all__ = ["Checkpoints", "DamagedCheckpointError"]

log = logging.getLogger(__name__)

TEMPORARY = "tmp-"
READ_AHEAD = 8  # leaves in host memory at a time


class DamagedCheckpointError(RuntimeError):
    """A committed checkpoint whose bytes are not those that were saved."""


class Checkpoints:
    """The checkpoints of one run, written by one process; the newest `keep` stay.

    Opening removes what a killed save left behind. `read_only` touches nothing and refuses to save. Raises ConfigError
    for a directory that cannot be written.
    """

    def __init__(self, directory: str | os.PathLike, keep: int = 2, read_only: bool = False) -> None:
        if keep < 1:
            raise ConfigError("keep", keep, "keep at least 1 checkpoint")
        self.directory = Path(directory).absolute()
        self.keep = keep
        self.read_only = read_only
        self._position: int | None = None  # restored or saved last: steps after it are of an abandoned future
        if not read_only:
            _make_writable(self.directory)
            for leftover in self.directory.glob(f"{TEMPORARY}*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdecimal() and path.is_dir())

    def latest(self) -> int | None:
        """The newest committed step."""
        return max(self.steps(), default=None)

    def save(self, step: int, states: dict[str, Any], meta: dict) -> None:
        """Store pytrees of jax arrays and JSON-able `meta`; on disk, read back and committed when this returns.

        If it raises, the checkpoints there were before are untouched and a later save works. Raises ConfigError for a
        step that is not newer than what the directory holds, except the steps after the one this object restored, which
        it replaces; TypeError for a leaf that is not a jax array.
        """
        self._check_new(step)
        leaves = _named(states)
        _check_arrays(leaves)
        temporary = self.directory / f"{TEMPORARY}{step}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            record = {"meta": meta, "leaves": {name: _describe(leaf) for name, leaf in leaves.items()}}
            _write_record(temporary, record)
            _write_arrays(temporary / "arrays", leaves)
            _sync_tree(temporary)
            for _ in _read_verified(temporary, _read_record(temporary)["leaves"]):
                pass
            self._commit(temporary, step)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._position = step
        self._prune()

    def restore(self, step: int, abstract: dict[str, Any], partial: bool = False) -> tuple[dict[str, Any], dict]:
        """The states and meta of `step`, bit-equal, in the structure and on the shardings of `abstract`.

        `partial` allows `abstract` to leave out whole states, which are then not read. Raises FileNotFoundError for a
        step that is not there, ConfigError with the names where the trees differ, DamagedCheckpointError with the name
        of the leaf.
        """
        path = self.directory / str(step)
        if step not in self.steps():
            raise FileNotFoundError(f"no checkpoint of step {step} in {self.directory}; it has {self.steps()}")
        record = _read_record(path)
        stored = record["leaves"]
        if partial:
            stored = {name: leaf for name, leaf in stored.items() if _belongs(name, abstract)}
        wanted = _named(abstract)
        _check_fit(path, stored, wanted)
        found = {name: jax.device_put(array, wanted[name].sharding) for name, array in _read_verified(path, stored)}
        states = jax.tree.unflatten(jax.tree.structure(abstract), [found[name] for name in wanted])
        self._position = step
        return states, record["meta"]

    def restore_latest(
        self, abstract: dict[str, Any], partial: bool = False
    ) -> tuple[int, dict[str, Any], dict] | None:
        """The newest step that is whole, its states and its meta; None if there is none at all.

        A damaged checkpoint is passed over with a warning. Raises DamagedCheckpointError if every one is damaged,
        ConfigError as `restore` does.
        """
        damage = None
        for step in reversed(self.steps()):
            try:
                return step, *self.restore(step, abstract, partial)
            except DamagedCheckpointError as error:
                damage = damage or error
                log.warning("%s; trying the one before it", error)
        if damage:
            raise damage
        return None

    def _check_new(self, step: int) -> None:
        if self.read_only:
            raise ConfigError("read_only", True, "open the directory for writing to save")
        limit = self._position
        taken = [old for old in self.steps() if old >= step and (limit is None or old <= limit)]
        if taken:
            remedy = f"{self.directory} already holds {taken}; resume, or choose an empty directory"
            raise ConfigError("step", step, remedy)

    def _commit(self, temporary: Path, step: int) -> None:
        final = self.directory / str(step)
        if final.exists():  # of an abandoned future, so nothing is lost if the process dies between the two renames
            final.rename(self.directory / f"{TEMPORARY}{step}-old")
        temporary.rename(final)
        _sync(self.directory)

    def _prune(self) -> None:
        kept = [step for step in self.steps() if step <= self._position][-self.keep :]
        for step in set(self.steps()) - set(kept):
            try:  # renamed first: one that is half deleted must not look committed
                (self.directory / str(step)).rename(self.directory / f"{TEMPORARY}{step}-old")
            except OSError as error:  # the new one is safe: an old one too many is no reason to stop a run
                log.warning("cannot remove the old checkpoint of step %d: %s", step, error)
        for path in self.directory.glob(f"{TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)


def _named(tree: Any) -> dict[str, Any]:
    """Leaf by name, in the order of the tree: {"params": {"w": x}} -> {"params.w": x}."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        # Names are those of directories, side by side.
        name = jax.tree_util.keystr(path, simple=True, separator=".").replace("/", ".")
        if name in named:
            raise ValueError(f"two leaves are both named {name}")
        named[name] = leaf
    return named


def _belongs(name: str, states: dict[str, Any]) -> bool:
    return any(name == state or name.startswith(f"{state}.") for state in states)


def _check_arrays(leaves: dict[str, Any]) -> None:
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"{name} is a {type(leaf).__name__}, not a jax array; put plain values in meta")
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"{name} is of type {leaf.dtype}; save jax.random.key_data of it")
        if not leaf.is_fully_addressable:
            raise TypeError(f"{name} is spread over several processes; gather it first")


def _describe(leaf: jax.Array) -> dict:
    return {"dtype": leaf.dtype.name, "shape": list(leaf.shape), "crc": _crc(np.asarray(leaf))}


def _crc(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _check_fit(path: Path, stored: dict[str, dict], wanted: dict[str, Any]) -> None:
    def form(dtype: str, shape: Any) -> str:
        return f"{dtype}[{','.join(map(str, shape))}]"

    have = {name: form(leaf["dtype"], leaf["shape"]) for name, leaf in stored.items()}
    want = {name: form(np.dtype(leaf.dtype).name, leaf.shape) for name, leaf in wanted.items()}
    both = [name for name in want if name in have]
    differ = [f"{name}: {have[name]} stored, {want[name]} asked" for name in both if have[name] != want[name]]
    parts = {
        "only in the checkpoint": [name for name in have if name not in want],
        "not in the checkpoint": [name for name in want if name not in have],
        "different": differ,
    }
    problems = [f"{what}: {'; '.join(names)}" for what, names in parts.items() if names]
    if problems:
        remedy = f"does not fit this experiment ({'. '.join(problems)}); resume with its config"
        raise ConfigError("checkpoint", str(path), remedy)


def _write_record(path: Path, record: dict) -> None:
    text = json.dumps(record)
    checked = json.loads(text)  # as it will be read: tuples are lists and keys are strings by then
    (path / "meta.json").write_text(json.dumps({"crc": _text_crc(checked), **checked}))


def _read_record(path: Path) -> dict:
    try:
        record = json.loads((path / "meta.json").read_text())
        crc = record.pop("crc")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedCheckpointError(f"{path}/meta.json is damaged: {error!r}") from error
    if crc != _text_crc(record):
        raise DamagedCheckpointError(f"{path}/meta.json is damaged: its CRC differs")
    return record


def _text_crc(record: dict) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        yield
    finally:
        absl.setLevel(level)


def _write_arrays(path: Path, leaves: dict[str, jax.Array]) -> None:
    import orbax.checkpoint as ocp

    tree = {name: leaf for name, leaf in leaves.items() if leaf.size}  # Orbax refuses empty arrays
    # One zarr array for each leaf. Compression would save a twelfth of the space of float weights for 4 times the time.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, use_compression=False)
    if tree:
        with _quiet(), ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path, ocp.args.PyTreeSave(tree))


def _read_verified(path: Path, leaves: dict[str, dict]) -> Iterator[tuple[str, np.ndarray]]:
    """Each leaf in host memory, its CRC checked. Raises DamagedCheckpointError with the leaf's name.

    The zarr arrays are read directly: when one cannot be read, Orbax neither says which nor stops reading the others.
    """
    names = list(leaves)
    for start in range(0, len(names), READ_AHEAD):
        reads = {}
        for name in names[start : start + READ_AHEAD]:
            with _naming(path, name):
                reads[name] = _start_read(path / "arrays" / name, leaves[name])
        for name in list(reads):
            leaf = leaves[name]
            with _naming(path, name):
                array = reads.pop(name)()
                if (array.dtype.name, list(array.shape), _crc(array)) != (leaf["dtype"], leaf["shape"], leaf["crc"]):
                    raise ValueError("its CRC differs from when it was saved")
            yield name, array


def _start_read(path: Path, leaf: dict) -> Callable[[], np.ndarray]:
    """Begin to read a leaf; calling the result waits for it."""
    import tensorstore

    if 0 in leaf["shape"]:
        return lambda: np.zeros(leaf["shape"], np.dtype(leaf["dtype"]))
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}, "fill_missing_data_reads": False}
    reading = tensorstore.open(spec, open=True, read=True).result().read()
    return lambda: np.asarray(reading.result())


@contextlib.contextmanager
def _naming(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: leaf {name}: {error}") from error


def _make_writable(directory: Path) -> None:
    probe = directory / f"{TEMPORARY}probe"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.mkdir(exist_ok=True)
        probe.rmdir()
    except OSError as error:
        remedy = f"cannot be written ({error.strerror}); choose another"
        raise ConfigError("directory", str(directory), remedy) from error


def _sync_tree(path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:  # waiting for hundreds of small files one by one takes seconds
        list(pool.map(_sync, [path, *path.rglob("*")]))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
