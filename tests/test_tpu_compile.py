"""A training step and a decode step compile for eight TPU chips that are not there (tpu_scripts/compile_check.py)."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from shapes import BLOCK, CHUNK, CONTEXT, SLOTS, TINY

from mas_jax.config import ConfigError
from mas_jax.learners.update import Compute
from mas_jax.models import transformer
from mas_jax.rollout.scheduler import Shapes

SCRIPT = Path(__file__).parents[1] / "tpu_scripts" / "compile_check.py"
# What is compiled for chips that are not there can be written to the cache of compiled programs, but not read back.
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")

ROWS, LENGTH = 8, 512
GIB = 2**30


def script():
    spec = importlib.util.spec_from_file_location("compile_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compile_check = script()
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: make tpu-check")


@pytest.fixture(scope="module")
def mesh():
    return compile_check.tpu_mesh("v5e:2x4", (1, 4, 2))


def learning(config, mesh, kernel="xla"):
    compute = Compute(jnp.dtype(jnp.bfloat16), remat=True, kernel=kernel)
    return compile_check.learner_programs(config, mesh, rows=ROWS, length=LENGTH, compute=compute)


@pytest.mark.tpu_compile
@needs_libtpu
def test_a_training_step_compiles_for_eight_chips_and_spreads_the_weights(mesh):
    programs, kept = learning(TINY, mesh)
    matrix = kept["weights"]["layers"]["mlp"]["up"]
    assert matrix.sharding.shard_shape(matrix.shape) == (2, TINY.width // 4, TINY.mlp // 2)
    said = []
    assert compile_check.check("accumulate", programs["accumulate"], 0, 16 * GIB, said.append)
    assert "all-gather" in said[-1]
    assert compile_check.check("apply", programs["apply"], 0, 16 * GIB, said.append)


@pytest.mark.tpu_compile
@needs_libtpu
def test_a_decode_step_compiles_for_eight_chips(mesh):
    shapes = Shapes(SLOTS, CONTEXT, 4, CHUNK, BLOCK, pages=SLOTS * CONTEXT // CHUNK + 1)
    programs, _ = compile_check.engine_programs(TINY, mesh, shapes, jnp.dtype(jnp.bfloat16))
    for name, lowered in programs.items():
        assert compile_check.check(name, lowered, 0, 16 * GIB)


@pytest.mark.tpu_compile
@needs_libtpu
@pytest.mark.parametrize(
    "config", [TINY, replace(TINY, family="gemma2", attention_softcap=50.0)], ids=["plain", "softcap"]
)
def test_with_the_splash_kernel_the_training_step_holds_pallas_calls(mesh, config):
    call = 'custom_call_target="tpu_custom_call"'
    with_kernel, without = (learning(config, mesh, kernel)[0]["accumulate"].compile() for kernel in ("splash", "xla"))
    assert with_kernel.as_text().count(call) >= 2  # forwards and backwards
    assert call not in without.as_text()


@pytest.mark.tpu_compile
@needs_libtpu
def test_a_program_that_does_not_fit_the_chip_is_told_so(mesh):
    programs, _ = learning(TINY, mesh)
    said = []
    assert not compile_check.check("apply", programs["apply"], 16 * GIB, 16 * GIB, said.append)
    assert "DOES NOT FIT" in said[2]


@pytest.mark.tpu_compile
@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "sizes", "message"),
    [
        ("v5e:2x4", (1, 4, 4), r"--mesh = '1,4,4': .*8 chips of v5e:2x4"),
        ("v5e:9x9", (1, 1, 1), r"--topology = 'v5e:9x9': libtpu knows no such slice"),
    ],
)
def test_a_slice_or_mesh_that_cannot_be_is_refused_in_words(topology, sizes, message):
    with pytest.raises(ConfigError, match=message):
        compile_check.tpu_mesh(topology, sizes)


def test_without_libtpu_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"libtpu = None: is not installed: pip install"):
        compile_check.tpu_mesh("v5e:2x4", (1, 4, 2))


def test_the_parts_of_an_asynchronous_collective_count_once():
    text = """
      %a = (f32[2], f32[8]) all-gather-start(%x), channel_id=1, dimensions={0}
      %b = f32[8] all-gather-done(%a)
      %c = f32[8] all-gather(%x), channel_id=2, dimensions={0}
      %d = f32[8] all-gather(%x), channel_id=2, dimensions={0}
      %e = f32[] all-reduce(%y), channel_id=3, to_apply=%add
    """
    assert compile_check.collectives(text) == {"all-gather": 2, "all-reduce": 1}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-4b", 4_022_468_096),
        ("llama3.2-1b", 1_235_814_400),
        ("gemma3-1b", 999_885_952),
    ],
)
def test_a_named_model_has_as_many_parameters_as_the_published_one(name, parameters):
    shapes = transformer.abstract(compile_check.read_model(name))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == parameters
