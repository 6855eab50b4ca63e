"""Task streams: every task once an epoch, repeatable, resumed exactly."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mas_jax.config import ConfigError, Task
from mas_jax.data import TaskStream

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.jax  # Grain imports it

CHILD = """
import json, sys
from mas_jax.config import Task
from mas_jax.data import TaskStream
n, batch, seed, count = map(int, sys.argv[1:5])
stream = TaskStream([Task(id=f"t{i}", prompt="p") for i in range(n)], batch, seed)
stream.restore(json.loads(sys.argv[5]))
print(json.dumps([[task.id for task in stream.next()] for _ in range(count)]))
"""


def tasks(n: int, prefix: str = "t") -> list[Task]:
    return [Task(id=f"{prefix}{i}", prompt="p") for i in range(n)]


def ids(batch: list[Task]) -> list[str]:
    return [task.id for task in batch]


def test_every_epoch_visits_each_task_once_in_a_fresh_order_and_no_tail_is_dropped():
    stream = TaskStream(tasks(10), batch=4, seed=0)
    seen = [task for _ in range(10) for task in ids(stream.next())]
    epochs = [seen[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == sorted(ids(tasks(10))) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_batch_may_be_larger_than_the_task_set():
    stream = TaskStream(tasks(2), batch=5, seed=0)
    seen = ids(stream.next()) + ids(stream.next())
    assert all(sorted(seen[i : i + 2]) == ["t0", "t1"] for i in range(0, 10, 2))


def test_the_seed_decides_the_order():
    def first(seed):
        return ids(TaskStream(tasks(20), batch=20, seed=seed).next())

    assert first(3) == first(3)
    assert first(3) != first(4)


def test_epoch_tells_the_progress():
    stream = TaskStream(tasks(8), batch=6, seed=0)
    assert stream.epoch == 0
    stream.next()
    assert stream.epoch == 0.75
    stream.next()
    assert stream.epoch == 1.5


@pytest.mark.parametrize("steps", [0, 1, 3, 7])
def test_the_next_batch_resumed_is_the_next_batch_uninterrupted(steps):
    whole = TaskStream(tasks(10), batch=3, seed=5)
    for _ in range(steps):
        whole.next()
    state = json.loads(json.dumps(whole.state()))
    resumed = TaskStream(tasks(10), batch=3, seed=5)
    resumed.restore(state)
    assert resumed.epoch == whole.epoch
    assert [ids(resumed.next()) for _ in range(10)] == [ids(whole.next()) for _ in range(10)]


def test_a_fresh_process_resumes_with_the_same_batches():
    stream = TaskStream(tasks(10), batch=4, seed=9)
    for _ in range(3):
        stream.next()
    command = [sys.executable, "-c", CHILD, "10", "4", "9", "5", json.dumps(stream.state())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout) == [ids(stream.next()) for _ in range(5)]


def test_a_state_taken_is_not_changed_by_going_on():
    stream = TaskStream(tasks(10), batch=4, seed=9)
    state = stream.state()
    first = ids(stream.next())
    stream.restore(state)
    assert ids(stream.next()) == first


@pytest.mark.parametrize("other", [tasks(9), tasks(11), tasks(10, "u"), tasks(10)[::-1]])
def test_a_state_of_another_task_set_is_an_error(other):
    state = TaskStream(tasks(10), batch=4, seed=0).state()
    with pytest.raises(ConfigError, match="resume with the same task set") as caught:
        TaskStream(other, batch=4, seed=0).restore(state)
    assert caught.value.field == "tasks"


def test_a_state_of_another_seed_is_an_error():
    state = TaskStream(tasks(10), batch=4, seed=0).state()
    with pytest.raises(ConfigError, match="seed = 1: the checkpoint was made with 0"):
        TaskStream(tasks(10), batch=4, seed=1).restore(state)


@pytest.mark.parametrize(("n", "batch", "seed", "field"), [(0, 4, 0, "tasks"), (3, 0, 0, "batch"), (3, 1, -1, "seed")])
def test_settings_that_cannot_work_are_named(n, batch, seed, field):
    with pytest.raises(ConfigError) as caught:
        TaskStream(tasks(n), batch, seed)
    assert caught.value.field == field
