"""Token-level rollouts as growing arrays on disk (TensorStore, zarr3); a trace points into them by [start, stop)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

__all__ = ["FIELDS", "Archive"]

Values = np.ndarray | Sequence

FIELDS: dict[str, type] = {
    "tokens": np.int32,
    "sampler_logprobs": np.float32,
    "version": np.int32,
    "sampled": np.bool_,
    "advantage": np.float32,
}
"""Every array of the archive; entry t of each speaks of token t."""

CHUNK = 1 << 17  # an append rewrites the last chunk of each array, so a chunk is about what one training step adds


class Archive:
    """One writer's append-only rollouts at `path`, opened or created.

    The directory is a zarr3 group whose `length` attribute is the commit point: it is replaced atomically after the
    arrays are on disk, so what a killed append left beyond it is never read and is overwritten by the next append.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._arrays = {name: _open(self.path / name, dtype) for name, dtype in FIELDS.items()}
        committed = _read_length(self.path)
        self._length = min([committed or 0, *(array.shape[0] for array in self._arrays.values())])
        if committed is None:
            _write_length(self.path, 0)

    @property
    def length(self) -> int:
        """Tokens held; those another process has appended since this one opened the archive are not counted."""
        return self._length

    def append(
        self,
        *,
        tokens: Values,
        sampler_logprobs: Values,
        version: Values,
        sampled: Values,
        advantage: Values,
    ) -> tuple[int, int]:
        """Add tokens at the end, on disk when this returns: their [start, stop).

        Raises ValueError, with nothing written, for arrays that are not 1-D, of unequal length, or do not fit their
        type.
        """
        given = (tokens, sampler_logprobs, version, sampled, advantage)
        values = {name: _as(name, value, dtype) for (name, dtype), value in zip(FIELDS.items(), given, strict=True)}
        if len({len(value) for value in values.values()}) > 1:
            lengths = ", ".join(f"{name} {len(value)}" for name, value in values.items())
            raise ValueError(f"arrays of unequal length: {lengths}")
        start, stop = self._length, self._length + len(values["tokens"])
        if stop > start:
            self._resize(stop)
            writes = [self._arrays[name][start:stop].write(value) for name, value in values.items()]
            for write in writes:
                write.result()
            _write_length(self.path, stop)
            self._length = stop
        return start, stop

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Every array at [start, stop). Raises IndexError for a range outside the archive."""
        if not 0 <= start <= stop <= self._length:
            raise IndexError(f"[{start}, {stop}) is outside the {self._length} tokens of {self.path}")
        reads = {name: array[start:stop].read() for name, array in self._arrays.items()}
        return {name: np.asarray(read.result()) for name, read in reads.items()}

    def truncate(self, length: int) -> None:
        """Cut back to `length` tokens, as a resume does. Raises ValueError if the archive holds fewer."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot cut {self.path} to {length} tokens: it holds {self._length}")
        if length < self._length:
            _write_length(self.path, length)
            self._length = length
        self._resize(length)

    def _resize(self, length: int) -> None:
        futures = {
            name: array.resize(exclusive_max=[length])
            for name, array in self._arrays.items()
            if array.shape[0] != length
        }
        for name, future in futures.items():
            self._arrays[name] = future.result()


def _open(path: Path, dtype: type):
    import tensorstore

    endian = {} if dtype is np.bool_ else {"configuration": {"endian": "little"}}
    metadata = {
        "shape": [0],
        "data_type": np.dtype(dtype).name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [CHUNK]}},
        "codecs": [{"name": "bytes", **endian}, {"name": "zstd", "configuration": {"level": 1}}],
    }
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    if (path / "zarr.json").exists():  # an existing array keeps its own chunks and codecs
        return tensorstore.open(spec, open=True).result()
    return tensorstore.open({**spec, "metadata": metadata}, create=True).result()


def _as(name: str, value: Values, dtype: type) -> np.ndarray:
    array = np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"{name} must be 1-D, not of shape {array.shape}")
    if array.size and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(f"{name} must be {np.dtype(dtype).name}, not {array.dtype.name}")
    out = array.astype(dtype)
    if array.dtype.kind in "iu" and not np.array_equal(out, array):
        raise ValueError(f"{name} holds values that do not fit {np.dtype(dtype).name}")
    return out


def _read_length(path: Path) -> int | None:
    try:
        return json.loads((path / "zarr.json").read_text())["attributes"]["length"]
    except FileNotFoundError:
        return None


def _write_length(path: Path, length: int) -> None:
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"length": length}}
    with open(path / "zarr.json.tmp", "w") as file:
        file.write(json.dumps(group))
        file.flush()
        os.fsync(file.fileno())
    os.replace(path / "zarr.json.tmp", path / "zarr.json")
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
