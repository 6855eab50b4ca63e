"""JSON lines: always valid, on disk when a call returns, cut back exactly, whole after the process was killed."""

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from mas_jax.metrics import JsonLines, read

ROOT = Path(__file__).parents[1]

CHILD = """
import sys
from mas_jax.metrics import JsonLines
lines = JsonLines(sys.argv[1])
for i in range(10**9):
    lines.append({"i": i, "text": "\\u00e9" * 5000})
    print(i, flush=True)
"""


def test_records_come_back_as_they_were(tmp_path):
    lines = JsonLines(tmp_path / "run" / "metrics.jsonl")
    records = [
        {"step": 1, "loss": 0.1, "none": None},
        {"text": "two\nlines é \u2028", "nested": {"a": [1, True, {"b": 2.5}]}},
    ]
    lines.append(records[0])
    lines.extend(records[1:])
    assert read(lines.path) == records
    assert lines.size == os.path.getsize(lines.path)
    assert lines.path.read_bytes().count(b"\n") == 2


def test_numpy_values_are_written_as_numbers(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.append(
        {"f": np.float32(0.5), "i": np.int64(3), "b": np.bool_(True), "a": np.arange(3), "z": np.array(2.0)}
        | {"h": ml_dtypes.bfloat16(1.5), "t": (1, np.float64(2)), 7: "key"}
    )
    assert read(lines.path) == [
        {"f": 0.5, "i": 3, "b": True, "a": [0, 1, 2], "z": 2.0, "h": 1.5, "t": [1, 2.0], "7": "key"}
    ]


def test_numbers_that_are_not_finite_give_valid_json_that_names_them(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.append({"loss": float("nan"), "norms": {"gen": np.float32("inf")}, "list": [1.0, -np.inf], "fine": 1.0})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    record = json.loads(lines.path.read_text(), parse_constant=refuse)
    assert record == {
        "loss": None, "norms": {"gen": None}, "list": [1.0, None], "fine": 1.0,
        "nonfinite": {"loss": "nan", "norms.gen": "inf", "list[1]": "-inf"},
    }  # fmt: skip
    lines.append(record)
    assert read(lines.path) == [record, record]


def test_a_value_without_a_json_form_is_an_error_that_names_it_and_nothing_is_written(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl")
    with pytest.raises(TypeError, match=r"a\.b\[1\]: object cannot be written as JSON"):
        lines.extend([{"fine": 1}, {"a": {"b": [1, object()]}}])
    assert lines.size == 0


def test_truncate_cuts_back_to_a_recorded_size(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.append({"step": 1})
    size = lines.size
    lines.extend([{"step": 2}, {"step": 3}])
    with pytest.raises(ValueError, match="inside a record"):
        lines.truncate(size + 1)
    with pytest.raises(ValueError, match="it has"):
        lines.truncate(lines.size + 1)
    lines.truncate(size)
    lines.append({"step": "2 again"})
    assert read(lines.path) == [{"step": 1}, {"step": "2 again"}]
    lines.truncate(0)
    assert read(lines.path) == []


@pytest.mark.parametrize("tail", [b'{"step": 2', b'{"step": 2}', b'{"text": "\xc3', b"x" * 200_000])
def test_a_half_written_last_line_is_left_out_and_cut_when_opened(tmp_path, tail, caplog):
    path = tmp_path / "m.jsonl"
    JsonLines(path).append({"step": 1})
    with open(path, "ab") as file:
        file.write(tail)
    assert read(path) == [{"step": 1}]
    with caplog.at_level(logging.WARNING):
        lines = JsonLines(path)
    assert f"half-written last line of {len(tail)} bytes" in caplog.text
    lines.append({"step": 2})
    assert read(path) == [{"step": 1}, {"step": 2}]


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2"):
        read(path)


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.append({"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            lines.append({"step": 2})
    assert read(lines.path) == [{"step": 1}]


def check_killed(path, kills: int) -> None:
    rng = random.Random(1)
    lines = JsonLines(path)
    for _ in range(kills):
        lines.truncate(0)
        printed = []
        command = [sys.executable, "-c", CHILD, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
            for _ in range(rng.randint(1, 20)):
                printed.append(child.stdout.readline())
            threading.Event().wait(rng.uniform(0, 0.005))  # synchronises nothing: any moment of the next append will do
            child.send_signal(signal.SIGKILL)
            printed += child.stdout.read().split()
        assert child.returncode == -signal.SIGKILL
        have = [record["i"] for record in read(path)]
        assert have == list(range(len(have)))
        assert len(have) >= len(printed)
        lines = JsonLines(path)
        assert len(read(path)) == len(have)


def test_what_was_appended_before_a_kill_is_there(tmp_path):
    check_killed(tmp_path / "m.jsonl", 3)


@pytest.mark.fault
def test_what_was_appended_before_any_of_many_kills_is_there(tmp_path):
    check_killed(tmp_path / "m.jsonl", 20)
