"""Append-only JSON lines: metrics.jsonl and traces.jsonl of a run."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

__all__ = ["JsonLines", "read"]

log = logging.getLogger(__name__)


class JsonLines:
    """A file of one JSON object a line, on disk when a call returns; opening cuts away a half-written last line.

    A float that is not finite is written as null, and the record's "nonfinite" says where and which: {"loss": "nan"}.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            size = file.seek(0, os.SEEK_END)
            whole = _end_of_last_line(file, size)
            if whole < size:
                log.warning("%s: cut a half-written last line of %d bytes", self.path, size - whole)
                file.truncate(whole)
            os.fsync(file.fileno())
        _sync_directory(self.path.parent)

    @property
    def size(self) -> int:
        """Bytes in the file; a checkpoint records it for `truncate`."""
        return self.path.stat().st_size

    def append(self, record: Mapping) -> None:
        """Add one record. Raises TypeError, with nothing written, for a value JSON has no form for, naming it."""
        self.extend([record])

    def extend(self, records: Iterable[Mapping]) -> None:
        """Add records with one sync; all of them or, if writing fails, none."""
        data = "".join(_line(record) for record in records).encode()
        if not data:
            return
        with open(self.path, "ab") as file:
            before = os.fstat(file.fileno()).st_size
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(file.fileno(), before)
                raise

    def truncate(self, size: int) -> None:
        """Cut back to `size` bytes, as a resume does. Raises ValueError if that is past the end or inside a record."""
        with open(self.path, "r+b") as file:
            have = file.seek(0, os.SEEK_END)
            if not 0 <= size <= have:
                raise ValueError(f"cannot cut {self.path} to {size} bytes: it has {have}")
            if _end_of_last_line(file, size) != size:
                raise ValueError(f"cannot cut {self.path} to {size} bytes: that is inside a record")
            file.truncate(size)
            os.fsync(file.fileno())


def read(path: str | os.PathLike) -> list[dict]:
    """All whole records; a last line without its newline is left out. Raises ValueError for any other broken line."""
    lines = Path(path).read_bytes().split(b"\n")[:-1]
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return records


def _line(record: Mapping) -> str:
    nonfinite: dict[str, str] = {}
    plain = _plain(record, "", nonfinite)
    if nonfinite:
        plain["nonfinite"] = {**plain.get("nonfinite", {}), **nonfinite}
    return json.dumps(plain, allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"


def _plain(value: object, name: str, nonfinite: dict[str, str]) -> object:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    elif isinstance(value, np.generic):  # bfloat16 and its like have no item() of a Python type
        value = value.item() if isinstance(value.item(), bool | int | float | str) else float(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        nonfinite[name] = str(value)
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}" if name else str(key), nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}[{index}]", nonfinite) for index, item in enumerate(value)]
    raise TypeError(f"{name or 'a record'}: {type(value).__name__} cannot be written as JSON")


def _end_of_last_line(file, size: int) -> int:
    """The greatest position up to `size` that is 0 or follows a newline."""
    block = 1 << 16
    stop = size
    while stop > 0:
        start = max(0, stop - block)
        file.seek(start)
        newline = file.read(stop - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        stop = start
    return 0


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
