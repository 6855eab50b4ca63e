"""The rollout archive: growing arrays, cut back exactly, whole after the process was killed."""

import json
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from mas_jax.archive import CHUNK, FIELDS, Archive

ROOT = Path(__file__).parents[1]
STEPS = 40

CHILD = """
import json, os, sys
import numpy as np
from mas_jax.archive import Archive
root, steps = sys.argv[1], int(sys.argv[2])
archive = Archive(root + "/rollouts.zarr")
state = {"step": 0, "length": 0}
if os.path.exists(root + "/state.json"):
    state = json.load(open(root + "/state.json"))
archive.truncate(state["length"])
print("ready", flush=True)
for step in range(state["step"], steps):
    rng = np.random.default_rng(step)
    n = int(rng.integers(1, 30000))
    archive.append(tokens=rng.integers(0, 1000, n), sampler_logprobs=rng.normal(size=n), version=np.full(n, step),
                   sampled=rng.random(n) < 0.5, advantage=rng.normal(size=n))
    if step % 3 == 2:
        with open(root + "/state.new", "w") as file:
            json.dump({"step": step + 1, "length": archive.length}, file)
        os.replace(root + "/state.new", root + "/state.json")
    print(step, flush=True)
print("done", flush=True)
"""


def rows(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, 1000, n).astype(np.int32),
        "sampler_logprobs": rng.normal(size=n).astype(np.float32),
        "version": np.full(n, seed, np.int32),
        "sampled": rng.random(n) < 0.5,
        "advantage": rng.normal(size=n).astype(np.float32),
    }


def assert_same(have: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert list(have) == list(FIELDS)
    for name in FIELDS:
        assert have[name].dtype == FIELDS[name]
        np.testing.assert_array_equal(have[name], want[name], err_msg=name)


def test_what_was_appended_is_read_back_across_chunks_and_after_reopening(tmp_path):
    archive = Archive(tmp_path / "a.zarr")
    first, second = rows(CHUNK - 10, 1), rows(CHUNK + 25, 2)
    assert archive.append(**first) == (0, CHUNK - 10)
    assert archive.append(**second) == (CHUNK - 10, 2 * CHUNK + 15)
    for opened in (archive, Archive(tmp_path / "a.zarr")):
        assert opened.length == 2 * CHUNK + 15
        assert_same(opened.read(0, CHUNK - 10), first)
        assert_same(opened.read(CHUNK - 10, opened.length), second)


def test_plain_lists_are_taken_and_an_empty_append_changes_nothing(tmp_path):
    archive = Archive(tmp_path / "a.zarr")
    empty = {name: [] for name in FIELDS}
    assert archive.append(**empty) == (0, 0)
    one = {"tokens": [7], "sampler_logprobs": [-0.5], "version": [3], "sampled": [True], "advantage": [2.0]}
    assert archive.append(**one) == (0, 1)
    assert archive.append(**empty) == (1, 1)
    assert {name: value.tolist() for name, value in archive.read(0, 1).items()} == one


def test_arrays_of_unequal_length_are_an_error_that_names_each_length(tmp_path):
    archive = Archive(tmp_path / "a.zarr")
    with pytest.raises(ValueError, match="tokens 5, sampler_logprobs 5, version 5, sampled 4, advantage 5"):
        archive.append(**rows(5) | {"sampled": np.ones(4, bool)})
    assert archive.length == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", np.ones(5), "tokens must be int32, not float64"),
        ("tokens", np.full(5, 2**40), "tokens holds values that do not fit int32"),
        ("sampled", np.ones(5, np.int32), "sampled must be bool, not int32"),
        ("advantage", np.ones((5, 1)), r"advantage must be 1-D, not of shape \(5, 1\)"),
    ],
)
def test_a_value_that_would_change_silently_is_an_error(tmp_path, name, value, message):
    archive = Archive(tmp_path / "a.zarr")
    with pytest.raises(ValueError, match=message):
        archive.append(**rows(5) | {name: value})
    assert Archive(tmp_path / "a.zarr").length == 0


def test_a_range_outside_the_archive_is_an_error(tmp_path):
    archive = Archive(tmp_path / "a.zarr")
    archive.append(**rows(5))
    for start, stop in ((0, 6), (-1, 3), (4, 3)):
        with pytest.raises(IndexError, match="outside the 5 tokens"):
            archive.read(start, stop)


def test_truncate_then_append_gives_the_content_of_an_uninterrupted_run(tmp_path):
    archive = Archive(tmp_path / "a.zarr")
    archive.append(**rows(CHUNK - 5, 1))
    archive.append(**rows(CHUNK, 2))
    archive.truncate(CHUNK - 5)
    archive.append(**rows(30, 3))
    archive = Archive(tmp_path / "a.zarr")
    assert archive.length == CHUNK + 25
    assert_same(archive.read(0, CHUNK - 5), rows(CHUNK - 5, 1))
    assert_same(archive.read(CHUNK - 5, archive.length), rows(30, 3))
    with pytest.raises(ValueError, match=f"it holds {CHUNK + 25}"):
        archive.truncate(CHUNK + 26)


def test_an_append_that_fails_midway_is_not_seen_and_the_next_one_works(tmp_path, monkeypatch):
    archive = Archive(tmp_path / "a.zarr")
    archive.append(**rows(10, 1))

    def fail(path, length):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("mas_jax.archive._write_length", fail)
        with pytest.raises(OSError, match="disk full"):
            archive.append(**rows(500, 2))
    assert archive.length == Archive(tmp_path / "a.zarr").length == 10
    assert archive.append(**rows(20, 3)) == (10, 30)
    assert_same(Archive(tmp_path / "a.zarr").read(10, 30), rows(20, 3))


def test_arrays_left_at_unequal_length_by_a_killed_append_do_not_count(tmp_path):
    archive = Archive(tmp_path / "a.zarr")
    archive.append(**rows(10, 1))
    archive._arrays["tokens"].resize(exclusive_max=[3 * CHUNK]).result()
    archive = Archive(tmp_path / "a.zarr")
    assert archive.length == 10
    archive.truncate(10)
    archive.append(**rows(20, 2))
    assert_same(Archive(tmp_path / "a.zarr").read(10, 30), rows(20, 2))
    assert {array.shape for array in Archive(tmp_path / "a.zarr")._arrays.values()} == {(30,)}


def start(root: Path) -> subprocess.Popen:
    root.mkdir(exist_ok=True)
    command = [sys.executable, "-c", CHILD, str(root), str(STEPS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def finish(root: Path) -> dict[str, np.ndarray]:
    with start(root) as child:
        assert child.stdout.read().split()[-1] == "done"
    archive = Archive(root / "rollouts.zarr")
    return archive.read(0, archive.length)


def kill_once(root: Path, lines: int, delay: float) -> None:
    with start(root) as child:
        for _ in range(lines):
            child.stdout.readline()
        threading.Event().wait(delay)  # synchronises nothing: any moment of the next append will do
        child.send_signal(signal.SIGKILL)
        child.stdout.read()
    assert child.returncode == -signal.SIGKILL


def check_killed(tmp_path: Path, kills: int) -> None:
    rng = random.Random(0)
    whole = finish(tmp_path / "whole")
    for _ in range(kills):
        kill_once(tmp_path / "killed", rng.randint(1, 6), rng.uniform(0, 0.01))
        left = Archive(tmp_path / "killed/rollouts.zarr")
        assert_same(left.read(0, left.length), {name: value[: left.length] for name, value in whole.items()})
    assert json.loads((tmp_path / "killed/state.json").read_text())["step"] < STEPS
    assert_same(finish(tmp_path / "killed"), whole)


def test_after_three_kills_the_content_is_that_of_an_uninterrupted_run(tmp_path):
    check_killed(tmp_path, 3)


@pytest.mark.fault
def test_after_many_kills_the_content_is_that_of_an_uninterrupted_run(tmp_path):
    check_killed(tmp_path, 12)


def test_no_jax_is_loaded():
    code = "import sys, mas_jax.archive, mas_jax.metrics; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
