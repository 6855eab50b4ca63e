"""The README's own team runs as printed."""

import re
from pathlib import Path

import pytest

from mas_jax import cli
from mas_jax.metrics import read

pytestmark = pytest.mark.jax

ROOT = Path(__file__).parents[1]


def test_the_teams_in_the_readme_train_as_they_stand(tmp_path, monkeypatch):
    """Every Python block of the README that defines an experiment takes a step, with its two sets of weights."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    teams = [block for block in blocks if "experiment = " in block]
    assert teams
    monkeypatch.chdir(ROOT)
    for number, block in enumerate(teams):
        config = tmp_path / f"team{number}.py"
        config.write_text(block)
        run = tmp_path / f"run{number}"
        flags = "--steps 1 --batch 2 --group-size 4 --evaluation.tasks 4 --mesh.fsdp 1 --run-dir"
        assert cli.run(["train", str(config), *flags.split(), str(run)]) == 0
        first, last = read(run / "metrics.jsonl")
        assert (first["step"], last["step"]) == (0, 1)
        assert {"eval/solved", "eval/solved/low"} <= last.keys()
        assert (run / "export" / "small" / "model.safetensors").exists()
        assert (run / "export" / "judge" / "model.safetensors").exists()
