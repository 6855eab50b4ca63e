"""A killed run that is resumed in a fresh process is, bit for bit, the run that was never killed."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from team import save_model

from mas_jax import metrics
from mas_jax.archive import Archive

pytestmark = pytest.mark.jax
ROOT = Path(__file__).resolve().parents[1]
STEPS = 12

# 5 tasks in batches of 3: epochs end inside steps 2, 4, 7 and 9, and at the ends of steps 5 and 10.
CONFIG = """
import sys
sys.path.insert(0, {tests!r})
from mas_jax import AdamW
from team import talking_team

experiment = talking_team(
    {model!r}, steps={steps}, checkpoint_every=2, optimizers={{"team": AdamW(lr=3e-3, warmup=3, schedule="cosine", decay_steps=30)}}
)
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    path = folder / "team_config.py"
    model = str(save_model(folder / "tiny"))
    path.write_text(CONFIG.format(tests=str(ROOT / "tests"), model=model, steps=STEPS))
    return path


def start(config: Path, directory: Path, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "mas_jax", "train", str(config), "--run-dir", str(directory), *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=os.environ
    )


def finish(config: Path, directory: Path, *flags: str) -> str:
    with start(config, directory, *flags) as child:
        said = child.stdout.read()
    assert child.returncode == 0, said
    return said


def stop_after(config: Path, directory: Path, line: str, how: int, wait: float = 0.0) -> tuple[int, str]:
    """Run until `line` is printed and `wait` seconds more, then send the signal: return code, and what was said."""
    said = ""
    with start(config, directory) as child:
        for printed in child.stdout:
            said += printed
            if line in printed:
                break
        try:
            child.wait(wait)  # not for something to happen: any moment will do
        except subprocess.TimeoutExpired:
            child.send_signal(how)
        said += child.stdout.read()
    return child.returncode, said


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The run that nothing interrupts."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    finish(config, directory)
    return directory


def untimed(record: dict) -> dict:
    return {name: value for name, value in record.items() if not name.startswith("time/")}


def traces_of(path: Path) -> list[dict]:
    found = metrics.read(path)
    for trace in found:
        del trace["costs"]["wall_clock_s"]
    return found


def assert_same_run(directory: Path, whole: Path) -> None:
    ours, theirs = (metrics.read(path / "metrics.jsonl") for path in (directory, whole))
    assert [untimed(record) for record in ours] == [untimed(record) for record in theirs]
    assert [record["step"] for record in ours] == list(range(STEPS + 1))
    assert traces_of(directory / "traces.jsonl") == traces_of(whole / "traces.jsonl")
    for name in ("eval_0.jsonl", f"eval_{STEPS}.jsonl"):
        assert traces_of(directory / name) == traces_of(whole / name)
    held, kept = (Archive(path / "rollouts.zarr") for path in (directory, whole))
    assert held.length == kept.length > 0
    for name, values in held.read(0, held.length).items():
        np.testing.assert_array_equal(values, kept.read(0, kept.length)[name], err_msg=name)
    weights = [path / "export" / "team" / "model.safetensors" for path in (directory, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    newest = [path / "checkpoints" / str(STEPS) / "meta.json" for path in (directory, whole)]
    leaves = [json.loads(path.read_text())["leaves"] for path in newest]
    assert leaves[0] == leaves[1]  # CRCs of weights, moments and counts


def test_a_run_killed_in_the_step_after_an_epochs_end_goes_on_as_if_nothing_had_happened(config, whole, tmp_path):
    """Step 5 ends the third epoch and no checkpoint follows it: what it wrote is cut away and played again."""
    code, said = stop_after(config, tmp_path / "run", f"step  5/{STEPS}", signal.SIGKILL)
    assert code == -signal.SIGKILL, said
    assert metrics.read(tmp_path / "run" / "metrics.jsonl")[-1]["step"] >= 5
    assert f"resuming {tmp_path / 'run'} after step" in finish(config, tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


def test_sigterm_saves_exits_with_0_and_the_same_command_goes_on(config, whole, tmp_path):
    code, said = stop_after(config, tmp_path / "run", f"step  3/{STEPS}", signal.SIGTERM)
    assert code == 0, said
    assert "stopped by SIGTERM; saved" in said
    (done,) = {record["step"] for record in metrics.read(tmp_path / "run" / "metrics.jsonl")[-1:]}
    assert max(int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()) == done < STEPS
    assert f"after step {done}" in finish(config, tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.fault
@pytest.mark.parametrize("wait", [0.0, 1.0, 2.0, 4.0])
def test_sigterm_at_any_moment_of_the_start_costs_nothing(config, whole, tmp_path, wait):
    code, said = stop_after(config, tmp_path / "run", "loading models", signal.SIGTERM, wait)
    assert code in (0, -signal.SIGTERM), said
    finish(config, tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.fault
@pytest.mark.parametrize("seed", range(6))
def test_a_run_killed_three_times_at_random_moments_is_the_run_that_was_not(config, whole, tmp_path, seed):
    """Anywhere: while loading, in a rollout, an update, a save, after the end of an epoch."""
    rng = random.Random(seed)
    for line in sorted(rng.sample(range(STEPS), 3)):
        after = f"step {line:>2}/{STEPS}" if line else "loading models"
        code, said = stop_after(config, tmp_path / "run", after, signal.SIGKILL, wait=rng.uniform(0, 0.5))
        assert code in (0, -signal.SIGKILL), said
    finish(config, tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.fault
def test_a_run_killed_during_saves_goes_on_from_the_checkpoint_before(config, whole, tmp_path):
    """SIGKILL as soon as a half-written checkpoint can be seen."""
    for _ in range(3):
        with start(config, tmp_path / "run") as child:
            folder = tmp_path / "run" / "checkpoints"
            while child.poll() is None:
                if folder.is_dir() and any(
                    path.name.startswith("tmp-") and path.name != "tmp-probe" for path in folder.iterdir()
                ):
                    child.kill()
                    break
            child.stdout.read()
        assert child.returncode in (0, -signal.SIGKILL)
    finish(config, tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)
