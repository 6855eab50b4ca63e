"""Log-probabilities over a large vocabulary: what their programs hold, compiled for shapes and never run."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from shapes import TINY

from mas_jax.mesh import LEARNER_RULES, batch_sharding, make_mesh, partition
from mas_jax.models import transformer

GEMMA = replace(TINY, vocab=262144, width=640)
SHAPES = [(4, 2048), (1, 8192)]


def loss(embed, hidden, targets, temperature):
    params = {"embed": embed, "final_norm": jnp.ones(GEMMA.width)}
    scores = transformer.token_logprobs(GEMMA, params, hidden, targets, temperature, dtype=jnp.float32)
    return sum(jnp.sum(score) for score in scores)


def arguments(shape, mesh=None):
    """What `loss` takes, as shapes: on one device, or spread as the learner has it."""
    one = SingleDeviceSharding(jax.devices()[0])
    table = one if mesh is None else NamedSharding(mesh, partition(("vocab", "embed"), LEARNER_RULES))
    rows, wide_rows = (one, one) if mesh is None else (batch_sharding(mesh, 2), batch_sharding(mesh, 3))
    return (
        jax.ShapeDtypeStruct((GEMMA.vocab, GEMMA.width), jnp.float32, sharding=table),
        jax.ShapeDtypeStruct((*shape, GEMMA.width), jnp.float32, sharding=wide_rows),
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows),
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows),
    )


def temporaries(function, *args):
    """Bytes that a program needs on each device beyond its arguments and results."""
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


def pieces(shape):
    """How many pieces the tokens are scored in."""
    scans = [eqn for eqn in jax.make_jaxpr(loss)(*arguments(shape)).eqns if eqn.primitive.name == "scan"]
    return sum(scan.params["length"] for scan in scans)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_of_8192_tokens_over_262144_ids_need_less_than_2_gib(shape):
    args = arguments(shape)
    assert temporaries(loss, *args) < 2**31
    assert temporaries(jax.grad(loss, argnums=(0, 1)), *args) < 2**31


def test_eight_devices_need_less_than_2_gib_each():
    mesh = make_mesh(1, 4, 2)
    with jax.set_mesh(mesh):
        assert temporaries(jax.grad(loss, argnums=(0, 1)), *arguments((4, 2048), mesh)) < 2**31


def test_eight_devices_score_eight_times_the_tokens_in_a_piece():
    # Each piece gathers the head and reduces its gradient over the devices: small pieces would pay for it too often.
    alone = pieces((8, 8192))
    with jax.set_mesh(make_mesh(1, 4, 2)):
        assert pieces((8, 8192)) * 8 == alone
