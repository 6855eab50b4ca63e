"""Meshes and the two layouts."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from shapes import TINY

from mas_jax.config import ConfigError
from mas_jax.mesh import LEARNER_RULES, ROLLOUT_RULES, batch_sharding, check_divisible, make_mesh, shardings
from mas_jax.models.transformer import logical_axes, param_shardings


def test_minus_one_takes_all_devices_that_remain():
    assert dict(make_mesh(-1, 2, 2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert dict(make_mesh(2, 1, -1).shape) == {"data": 2, "fsdp": 1, "tensor": 4}


def test_a_smaller_mesh_uses_the_first_devices():
    assert list(make_mesh(2, 2, 1).devices.flat) == jax.devices()[:4]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((4, 4, 1), r"mesh.data = 4: .*needs 16 devices and there are 8.*host_platform_device_count=16"),
        ((0, 1, 1), r"mesh.data = 0: "),
        ((-1, -1, 1), r"mesh.fsdp = -1: only one axis"),
        ((-1, 3, 1), r"mesh.data = -1: 8 devices do not divide by 3"),
    ],
)
def test_an_impossible_mesh_names_field_value_and_remedy(sizes, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(*sizes)


def test_the_learner_spreads_every_matrix_over_fsdp_and_tensor_and_rollout_over_tensor_alone():
    mesh = make_mesh(2, 2, 2)
    learner = shardings(logical_axes(TINY), mesh, LEARNER_RULES)["layers"]
    rollout = shardings(logical_axes(TINY), mesh, ROLLOUT_RULES)["layers"]
    assert tuple(learner["attention"]["q"].spec) == (None, "fsdp", "tensor", None)
    assert tuple(rollout["attention"]["q"].spec) == (None, None, "tensor", None)
    assert tuple(learner["mlp"]["down"].spec) == (None, "tensor", "fsdp")
    assert tuple(rollout["mlp"]["down"].spec) == (None, "tensor", None)
    assert rollout["attention_norm"].is_fully_replicated


def test_few_key_value_heads_are_whole_on_every_device_of_a_wider_tensor_axis():
    few, mesh = replace(TINY, kv_heads=1), make_mesh(1, 2, 4)
    check_divisible(few, mesh)
    learner = param_shardings(few, mesh, LEARNER_RULES)["layers"]["attention"]
    assert tuple(learner["k"].spec) == (None, "fsdp", None, None)
    assert tuple(learner["q"].spec) == (None, "fsdp", "tensor", None)
    assert (
        tuple(param_shardings(TINY, make_mesh(1, 4, 2), LEARNER_RULES)["layers"]["attention"]["k"].spec)[2] == "tensor"
    )


def test_batch_rows_lie_over_data_and_fsdp():
    mesh = make_mesh(2, 2, 2)
    x = jax.device_put(np.arange(8).reshape(4, 2), batch_sharding(mesh, 2))
    assert sorted(int(s.data[0, 0]) for s in x.addressable_shards) == [0, 0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize(
    ("name", "change", "sizes"),
    [
        ("heads", {"heads": 6, "kv_heads": 2}, (1, 1, 4)),
        ("kv_heads", {"heads": 12, "kv_heads": 3}, (1, 1, 4)),
        ("mlp", {"mlp": 63}, (1, 1, 2)),
        ("vocab", {"vocab": 271}, (1, 1, 2)),
        ("width", {"width": 34}, (1, 4, 1)),
    ],
)
def test_a_size_that_does_not_divide_is_named_with_the_remedy(name, change, sizes):
    config = replace(TINY, **change)
    with pytest.raises(ConfigError, match=rf"model's {name} = \d+ does not divide by it: use one of \["):
        check_divisible(config, make_mesh(*sizes))
