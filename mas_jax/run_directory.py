"""A run's directory: its resolved config, and how it was started."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mas_jax.config import ConfigError, differences


@dataclass(frozen=True)
class Command:
    """How a run was started: a config file, and flags over it."""

    config: Path
    flags: tuple[str, ...] = ()


def claim(directory: Path, resolved: dict[str, object], *, force: bool, command: Command | None = None) -> None:
    """Write the resolved config (a fingerprint) and the command into the directory, or compare it with the one there.

    Raises ConfigError when the directory cannot be written, or holds a run of another config and `force` is not given. A run that
    ended before its first metrics may be started anew with any config.
    """
    path, metrics = directory / "config.json", directory / "metrics.jsonl"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        measured = metrics.exists() and metrics.stat().st_size > 0
        started = path.exists() and (measured or any((directory / "checkpoints").glob("[0-9]*")))
        if started and not force:
            changed = differences(json.loads(path.read_text()), resolved)
            if changed:
                listed = "\n  ".join(changed)
                remedy = f"holds a run of another config:\n  {listed}\ngive another --run-dir, or --force to go on with the new one"
                raise ConfigError("run_dir", str(directory), remedy)
        path.write_text(json.dumps(resolved, indent=1) + "\n")
        if command is not None:
            text = json.dumps({"config": str(command.config.resolve()), "flags": command.flags}, indent=1)
            (directory / "command.json").write_text(text + "\n")
    except OSError as error:
        raise ConfigError("run_dir", str(directory), f"cannot be written ({error.strerror}); choose another") from error


def read_command(directory: Path) -> Command:
    """How the run of a directory was started. Raises ConfigError for a directory that holds none."""
    path = directory / "command.json"
    if not path.is_file():
        raise ConfigError(
            "run_dir", str(directory), "no run was started there by `mas-jax train` (it has no command.json)"
        )
    record = json.loads(path.read_text())
    return Command(Path(record["config"]), tuple(record["flags"]))
