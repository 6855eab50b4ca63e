"""Checkpoints: bit-equal, atomic, verified, and never fewer than before after a save that failed or was killed."""

import logging
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mas_jax.checkpoint import Checkpoints, DamagedCheckpointError
from mas_jax.config import ConfigError

ROOT = Path(__file__).parents[1]

CHILD = """
import sys, os, signal
import jax.numpy as jnp
from mas_jax import checkpoint
from mas_jax.checkpoint import Checkpoints
die_at = int(sys.argv[2])
calls = 0
def count(wrapped):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return wrapped(*args, **kwargs)
    return call
checkpoints = Checkpoints(sys.argv[1])
step = (checkpoints.latest() or 0)
if die_at:  # a first save warms up; then the process dies at one of the places where the disk changes
    checkpoints.save(step := step + 1, {"params": {"w": jnp.full((64, 64), step)}}, {"step": step})
    for name in ("_sync", "_write_arrays", "_write_record", "_read_record"):
        setattr(checkpoint, name, count(getattr(checkpoint, name)))
    checkpoint.Path.rename = count(checkpoint.Path.rename)
    checkpoint.shutil.rmtree = count(checkpoint.shutil.rmtree)
    print("start", flush=True)
while True:
    step += 1
    checkpoints.save(step, {"params": {"w": jnp.full((64, 64), step)}}, {"step": step})
    print(step, flush=True)
"""

STEP = {"params": {"w": jax.ShapeDtypeStruct((64, 64), jnp.int32)}}


class Adam(NamedTuple):
    count: jax.Array
    mu: dict


class Empty(NamedTuple):
    pass


def states(seed: int = 0) -> dict:
    keys = jax.random.split(jax.random.key(seed), 4)
    layers = {"w": jax.random.normal(keys[0], (8, 16), jnp.bfloat16), "b": jax.random.normal(keys[1], (16,))}
    odd = jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45], jnp.float32)
    return {
        "gen": {"layers": [layers, {"w": jnp.zeros((0, 4)), "flag": jnp.array([True, False])}], "odd": odd},
        "optimizer": (Adam(jnp.int32(7 + seed), {"w": jax.random.normal(keys[2], (8, 16))}), Empty(), None),
        "rng": jax.random.key_data(keys[3]),
    }


def abstract(tree, sharding=None):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def assert_bit_equal(have, want) -> None:
    assert jax.tree.structure(have) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def data_files(arrays: Path, leaf: str) -> list[Path]:
    files = [path for path in (arrays / leaf).rglob("*") if path.is_file() and path.name != "zarr.json"]
    assert files
    return files


def damage(directory: Path, leaf: str, how: str) -> None:
    if how == "no zarr.json":
        (directory / "arrays" / leaf / "zarr.json").unlink()
    for path in data_files(directory / "arrays", leaf):
        if how == "removed":
            path.unlink()
        elif how == "cut":
            path.write_bytes(path.read_bytes()[:-3])
        elif how == "other bytes":  # the valid bytes of another step: only a CRC can tell
            other = directory.parent / "1" / path.relative_to(directory)
            assert other.read_bytes() != path.read_bytes()
            path.write_bytes(other.read_bytes())


def test_states_and_meta_come_back_bit_equal_in_another_object(tmp_path):
    meta = {"step": 3, "data": {"position": 12}, "baseline": 0.1 + 0.2, "pair": [1, None]}
    Checkpoints(tmp_path).save(3, states(), meta)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 3
    restored, read = checkpoints.restore(3, abstract(states()))
    assert_bit_equal(restored, states())
    assert read == meta


@pytest.mark.parametrize("dtype", ["int8", "uint32", "float16", "float8_e4m3fn", "bool"])
def test_other_types_come_back_bit_equal(tmp_path, dtype):
    tree = {"x": jnp.arange(6).reshape(2, 3).astype(dtype), "scalar": jnp.ones((), dtype)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, tree, {})
    assert_bit_equal(checkpoints.restore(0, abstract(tree))[0], tree)


def test_states_come_back_on_another_sharding(tmp_path):
    devices = jax.devices()
    if len(devices) < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tree = {"params": {"w": jnp.arange(128.0).reshape(8, 16)}}
    rows = jax.sharding.NamedSharding(mesh, jax.P("data", None))
    columns = jax.sharding.NamedSharding(mesh, jax.P(None, ("tensor", "data")))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, jax.device_put(tree, rows), {})
    for sharding in (columns, rows, jax.sharding.SingleDeviceSharding(devices[3])):
        restored, _ = checkpoints.restore(1, abstract(tree, sharding))
        assert restored["params"]["w"].sharding == sharding
        assert_bit_equal(restored, tree)


def test_an_optax_state_comes_back_in_its_own_structure(tmp_path):
    optax = pytest.importorskip("optax")
    params = {"w": jnp.ones((4, 4), jnp.bfloat16), "b": jnp.zeros(4)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.masked(optax.adamw(1e-3), {"w": True, "b": False}))
    state = optimizer.update(params, optimizer.init(params), params)[1]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"optimizer": state}, {})
    asked = jax.eval_shape(lambda: {"optimizer": optimizer.init(params)})
    assert_bit_equal(checkpoints.restore(1, asked)[0], {"optimizer": state})


def test_many_leaves_are_read_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("mas_jax.checkpoint.READ_AHEAD", 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, states(), {})
    assert_bit_equal(checkpoints.restore(1, abstract(states()))[0], states())


def test_orbax_alone_can_read_the_arrays(tmp_path):
    import orbax.checkpoint as ocp

    Checkpoints(tmp_path).save(1, {"params": {"w": jnp.arange(6.0)}}, {})
    asked = {"params.w": jax.ShapeDtypeStruct((6,), jnp.float32)}
    with ocp.StandardCheckpointer() as checkpointer:
        assert_bit_equal(checkpointer.restore(tmp_path / "1" / "arrays", asked), {"params.w": jnp.arange(6.0)})


def test_the_newest_two_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    assert checkpoints.restore_latest(abstract(states())) is None
    for step in (1, 5, 9):
        checkpoints.save(step, states(step), {"step": step})
    assert checkpoints.steps() == [5, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "9"]
    for step in (5, 9):
        restored, meta = checkpoints.restore(step, abstract(states()))
        assert meta == {"step": step}
        assert_bit_equal(restored, states(step))
    with pytest.raises(FileNotFoundError, match=r"step 1 .*\[5, 9\]"):
        checkpoints.restore(1, abstract(states()))


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("where", ["_write_arrays", "_write_record", "_sync_tree", "_crc", "_sync"])
def test_a_failed_save_costs_no_checkpoint_and_the_next_save_works(tmp_path, monkeypatch, keep, where):
    checkpoints = Checkpoints(tmp_path, keep=keep)
    for step in (1, 2):
        checkpoints.save(step, states(step), {"step": step})
    before = checkpoints.steps()
    import mas_jax.checkpoint as module

    calls, real = [], getattr(module, where)

    def fail_late(*args):
        calls.append(args)
        if where != "_crc" or len(calls) > 3:
            raise OSError("disk full")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(f"mas_jax.checkpoint.{where}", fail_late)
        for _ in range(2):
            with pytest.raises(OSError, match="disk full"):
                checkpoints.save(3, states(3), {"step": 3})
    assert checkpoints.steps() == before
    assert [path.name for path in tmp_path.iterdir() if not path.name.isdecimal()] == []
    for step in before:
        assert_bit_equal(Checkpoints(tmp_path).restore(step, abstract(states()))[0], states(step))
    checkpoints.save(3, states(3), {"step": 3})
    assert_bit_equal(checkpoints.restore(3, abstract(states()))[0], states(3))


def test_a_save_orbax_leaves_half_written_fails_and_costs_nothing(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, states(1), {})
    real = ocp.Checkpointer.save

    def damaged_save(self, path, args):
        real(self, path, args)
        data_files(path, "gen.odd")[0].write_bytes(b"")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.Checkpointer, "save", damaged_save)
        with pytest.raises(DamagedCheckpointError, match=r"gen\.odd"):
            checkpoints.save(2, states(2), {})
    assert Checkpoints(tmp_path).steps() == [1]
    checkpoints.save(2, states(2), {})
    assert Checkpoints(tmp_path).steps() == [2]


def test_a_meta_that_is_not_json_is_an_error_and_costs_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, states(), {})
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.save(2, states(), {"x": object()})
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize("how", ["other bytes", "cut", "removed", "no zarr.json"])
def test_a_damaged_leaf_is_named_and_the_previous_checkpoint_is_restored(tmp_path, caplog, how):
    for step in (1, 2):
        Checkpoints(tmp_path).save(step, states(step), {"step": step})
    damage(tmp_path / "2", "optimizer.0.mu.w", how)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 2
    with pytest.raises(DamagedCheckpointError, match=r"optimizer\.0\.mu\.w"):
        checkpoints.restore(2, abstract(states()))
    with caplog.at_level(logging.WARNING):
        step, restored, meta = checkpoints.restore_latest(abstract(states()))
    assert (step, meta) == (1, {"step": 1})
    assert_bit_equal(restored, states(1))
    assert "optimizer.0.mu.w" in caplog.text


@pytest.mark.parametrize("text", [None, "", '{"crc": 1, "meta": {}, "leaves": {}}', "[]"])
def test_a_damaged_meta_is_passed_over(tmp_path, text):
    for step in (1, 2):
        Checkpoints(tmp_path).save(step, states(step), {"step": step})
    if text is None:
        (tmp_path / "2" / "meta.json").unlink()
    else:
        (tmp_path / "2" / "meta.json").write_text(text)
    assert Checkpoints(tmp_path).restore_latest(abstract(states()))[0] == 1


def test_a_changed_digit_in_meta_is_damage(tmp_path):
    Checkpoints(tmp_path).save(1, states(), {"position": 1234})
    path = tmp_path / "1" / "meta.json"
    path.write_text(path.read_text().replace("1234", "1235"))
    with pytest.raises(DamagedCheckpointError, match=r"meta\.json"):
        Checkpoints(tmp_path).restore_latest(abstract(states()))


def test_after_falling_back_the_damaged_step_is_saved_anew_and_does_not_crowd_out_whole_ones(tmp_path):
    for step in (10, 20):
        Checkpoints(tmp_path).save(step, states(step), {})
    (tmp_path / "20" / "meta.json").write_text("")
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.restore_latest(abstract(states()))[0] == 10
    checkpoints.save(15, states(15), {})
    assert checkpoints.steps() == [10, 15]
    checkpoints.save(20, states(21), {})
    assert_bit_equal(Checkpoints(tmp_path).restore_latest(abstract(states()))[1], states(21))
    (tmp_path / "20" / "meta.json").write_text("")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore_latest(abstract(states()))[0] == 15
    checkpoints.save(20, states(22), {})
    assert checkpoints.steps() == [15, 20]
    assert_bit_equal(Checkpoints(tmp_path).restore_latest(abstract(states()))[1], states(22))


def test_a_run_that_did_not_resume_does_not_write_over_what_is_there(tmp_path):
    Checkpoints(tmp_path).save(10, states(), {})
    for step in (1, 10):
        with pytest.raises(ConfigError, match=r"already holds \[10\]"):
            Checkpoints(tmp_path).save(step, states(), {})
    assert Checkpoints(tmp_path).steps() == [10]


def test_trees_that_do_not_fit_are_an_error_that_lists_the_names(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, states(), {})
    asked = abstract(states())
    asked["gen"]["layers"][0] = {"w": jax.ShapeDtypeStruct((8, 32), jnp.bfloat16), "new": asked["rng"]}
    asked["gen"]["odd"] = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    with pytest.raises(ConfigError) as caught:
        checkpoints.restore_latest(asked)
    for part in (
        "only in the checkpoint: gen.layers.0.b",
        "not in the checkpoint: gen.layers.0.new",
        "gen.layers.0.w: bfloat16[8,16] stored, bfloat16[8,32] asked",
        "gen.odd: float32[4] stored, bfloat16[4] asked",
    ):
        assert part in str(caught.value)


def test_some_states_are_restored_alone_only_when_asked_for(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, states(), {})
    asked = {"gen": abstract(states()["gen"])}
    with pytest.raises(ConfigError, match=r"only in the checkpoint: optimizer\.0\.count"):
        checkpoints.restore(1, asked)
    restored, _ = checkpoints.restore(1, asked, partial=True)
    assert_bit_equal(restored, {"gen": states()["gen"]})


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (lambda: 3, "params.x is a int"),
        (lambda: np.ones(3), "params.x is a ndarray"),
        (lambda: jax.random.key(0), "params.x is of type key<fry>; save jax.random.key_data"),
    ],
)
def test_a_leaf_that_cannot_be_saved_is_named(tmp_path, leaf, message):
    with pytest.raises(TypeError, match=message):
        Checkpoints(tmp_path).save(1, {"params": {"x": leaf()}}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/checkpoints")):
        with pytest.raises(ConfigError, match="cannot be written") as caught:
            Checkpoints(path)
        assert caught.value.field == "directory"
    with pytest.raises(ConfigError, match="keep"):
        Checkpoints(tmp_path, keep=0)


def test_a_reader_touches_nothing(tmp_path):
    Checkpoints(tmp_path / "run").save(1, states(), {})
    (tmp_path / "run" / "tmp-2").mkdir()
    reader = Checkpoints(tmp_path / "run", read_only=True)
    assert_bit_equal(reader.restore_latest(abstract(states()))[1], states())
    assert (tmp_path / "run" / "tmp-2").is_dir()
    with pytest.raises(ConfigError, match="open the directory for writing"):
        reader.save(2, states(), {})
    assert Checkpoints(tmp_path / "none", read_only=True).latest() is None
    assert not (tmp_path / "none").exists()


def test_nothing_is_printed_or_logged(tmp_path):
    code = (
        "import jax.numpy as jnp; from mas_jax.checkpoint import Checkpoints; import sys\n"
        "c = Checkpoints(sys.argv[1]); t = {'p': {'w': jnp.ones(3)}}\n"
        "c.save(1, t, {}); c.save(2, t, {}); c.restore_latest(t)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, env=child_env()
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def child_env() -> dict[str, str]:
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def killed(directory: Path, die_at: int, lines: int = 0, delay: float = 0.0) -> int:
    """Run the child until it is killed: the last step it had reported as saved."""
    command = [sys.executable, "-c", CHILD, str(directory), str(die_at)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=child_env()) as child:
        printed = [child.stdout.readline() for _ in range(lines)]
        if not die_at:
            threading.Event().wait(delay)  # synchronises nothing: any moment of the next save will do
            child.send_signal(signal.SIGKILL)
        printed += child.stdout.readlines()
    assert child.returncode == -signal.SIGKILL
    return max((int(line) for line in printed if line.strip().isdecimal()), default=0)


def check_whole(directory: Path, reported: int) -> None:
    """Every committed step restores, none that was reported is missing, and leftovers go."""
    checkpoints = Checkpoints(directory)
    steps = checkpoints.steps()
    assert reported <= steps[-1] <= reported + 1 or not reported
    assert all(path.name.isdecimal() for path in directory.iterdir())
    for step in steps:
        restored, meta = Checkpoints(directory).restore(step, STEP)
        assert meta == {"step": step}
        assert (np.asarray(restored["params"]["w"]) == step).all()


def test_a_process_killed_while_it_saves_leaves_whole_checkpoints_and_the_next_one_goes_on(tmp_path):
    rng = random.Random(0)
    before = 0
    for _ in range(3):
        reported = killed(tmp_path, 0, lines=rng.randint(1, 3), delay=rng.uniform(0, 0.03))
        assert reported > before
        check_whole(tmp_path, reported)
        before = Checkpoints(tmp_path).latest()


@pytest.mark.fault
@pytest.mark.parametrize("die_at", [*range(1, 28, 2), 30, 35, 41, 50, 64])
def test_a_process_that_dies_at_any_step_of_a_save_leaves_whole_checkpoints(tmp_path, die_at):
    for _ in range(2):
        reported = killed(tmp_path, die_at)
        check_whole(tmp_path, reported)
