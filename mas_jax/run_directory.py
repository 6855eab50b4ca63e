"""A run's directory: its resolved config, and how it was started."""

from __future__ import annotations

import json
from pathlib import Path

from mas_jax.config import ConfigError, differences


def claim(directory: Path, resolved: dict[str, object], *, force: bool) -> None:
    """Write the resolved config (a fingerprint) into the directory, or compare it with the one there.

    Raises ConfigError when the directory cannot be written, or holds a run of another config and `force` is not given.
    """
    path = directory / "config.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if path.exists() and not force:
            changed = differences(json.loads(path.read_text()), resolved)
            if changed:
                listed = "\n  ".join(changed)
                remedy = f"holds a run of another config:\n  {listed}\ngive another --run-dir, or --force to go on with the new one"
                raise ConfigError("run_dir", str(directory), remedy)
        path.write_text(json.dumps(resolved, indent=1) + "\n")
    except OSError as error:
        raise ConfigError("run_dir", str(directory), f"cannot be written ({error.strerror}); choose another") from error


def write_command(directory: Path, config: Path, arguments: list[str]) -> None:
    """Remember which config file and flags the run was started with."""
    text = json.dumps({"config": str(config.resolve()), "arguments": arguments}, indent=1)
    (directory / "command.json").write_text(text + "\n")


def read_command(directory: Path) -> tuple[Path, list[str]]:
    """The config file and flags of a run. Raises ConfigError for a directory that holds none."""
    path = directory / "command.json"
    if not path.is_file():
        raise ConfigError("run_dir", str(directory), "no run was started there (it has no command.json)")
    record = json.loads(path.read_text())
    return Path(record["config"]), record["arguments"]
