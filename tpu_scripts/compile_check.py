"""Compiles a training step and a decode step for a TPU slice, without a TPU, and says what they need of its memory.

    python tpu_scripts/compile_check.py                                    # Qwen3-0.6B on eight v5e chips
    python tpu_scripts/compile_check.py --model assets/smollm2-135m --mesh 8,1,1
    python tpu_scripts/compile_check.py --model llama3.2-1b --topology v6e:4x4 --mesh 2,4,2 --length 4096

The programs are those that a run compiles, with its shardings; no weights are read or made. `accumulate` adds the gradient of a
micro-batch, `apply` is the optimizer's step, `prefill` and `generate` are the rollout engine's. For each:

compiled in   seconds that XLA took on this machine
needs         bytes on each device: arguments, results that reuse no argument, temporaries, and the program itself
beside        what a run that trains this one model keeps there meanwhile: optimizer moments, the sampler's weights, its cache
collectives   how often each kind stands in the program; one inside a loop counts once

Needs libtpu (pip install -e '.[tpu]', about 0.7 GB), but no TPU. Exit status: 0 all compile and fit, 1 some do not, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh
from jax.stages import Lowered

from mas_jax.config import AdamW, ConfigError, Loss
from mas_jax.learners.update import Batch, Compute, Learner, State, make_optimizer, policy_loss
from mas_jax.mesh import AXES, batch_sharding, check_divisible
from mas_jax.models import attention, families, hf, transformer
from mas_jax.models.transformer import ModelConfig
from mas_jax.rollout.engine import DeviceState, Insertions, NativeEngine, Slots
from mas_jax.rollout.scheduler import Shapes

# Memory of a chip, in GiB.
HBM = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32}

# config.json of published models.
MODELS = {
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "num_hidden_layers": 30, "hidden_size": 576,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "max_position_embeddings": 8192,
        "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "num_hidden_layers": 28, "hidden_size": 1536,
        "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "num_hidden_layers": 28, "hidden_size": 1024,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "num_hidden_layers": 36, "hidden_size": 2560,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    },
    "llama3.2-1b": {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_hidden_layers": 16, "hidden_size": 2048,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
    "gemma3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262144, "num_hidden_layers": 26, "hidden_size": 1152,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "sliding_window": 512,
    },
}  # fmt: skip

COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(.*channel_id=(\d+)"
)


def read_model(name: str) -> ModelConfig:
    """The shape of a model by its name in MODELS, or of a directory with a config.json."""
    if name in MODELS:
        return families.read(MODELS[name])
    if not Path(name).is_dir():
        raise ConfigError("--model", name, f"use one of {sorted(MODELS)}, or a directory that holds a config.json")
    return hf.read_config(name)


def tpu_mesh(topology: str, sizes: Sequence[int]) -> Mesh:
    """A mesh (data, fsdp, tensor) over the chips of a slice that need not exist; ConfigError without libtpu."""
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("libtpu", None, "is not installed: pip install -e '.[tpu]', or run make tpu-check")
    # Nothing here touches a chip: libtpu need neither ask a metadata server what this machine is, nor keep others out.
    quiet = {
        "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost", "TPU_LOG_DIR": "disabled", "TPU_MIN_LOG_LEVEL": "3",
    }  # fmt: skip
    for variable, value in quiet.items():
        os.environ.setdefault(variable, value)
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        remedy = f"libtpu knows no such slice ({reason}): write it as v5e:2x4, v6e:4x4 or v5p:2x2x2"
        raise ConfigError("--topology", topology, remedy) from error
    if len(sizes) != len(AXES) or math.prod(sizes) != len(devices):
        remedy = f"give three sizes (data, fsdp, tensor) whose product is the {len(devices)} chips of {topology}"
        raise ConfigError("--mesh", ",".join(map(str, sizes)), remedy)
    return Mesh(np.array(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def placed(tree: object, shardings: object) -> object:
    """A tree of shapes, each with its sharding."""
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, shardings)


def learner_programs(
    config: ModelConfig, mesh: Mesh, *, rows: int, length: int, compute: Compute
) -> tuple[dict[str, Lowered], dict[str, object]]:
    """The learner's programs by name, and the shapes of what a run keeps on the devices for it."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % ways:
        raise ConfigError("--rows", rows, f"must be a multiple of mesh data x fsdp = {ways}")
    optimizer = make_optimizer(AdamW())
    learner = Learner(config, mesh, optimizer, partial(policy_loss, Loss()), compute)
    params = placed(transformer.abstract(config), learner.param_shardings)
    counter = jax.ShapeDtypeStruct((), jnp.int32)
    state = placed(State(params, jax.eval_shape(optimizer.init, params), counter), learner.state_shardings)

    def tokens(dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, length), dtype, sharding=batch_sharding(mesh, 2))

    kinds = {"tokens": jnp.int32, "positions": jnp.int32, "segments": jnp.int32, "sampled": jnp.bool_}
    batch = Batch(**{name: tokens(kinds.get(name, jnp.float32)) for name in Batch._fields})
    with jax.set_mesh(mesh):
        programs = {
            "accumulate": learner._accumulate.lower(params, params, batch),
            "apply": learner._apply.lower(state, params),
        }
    return programs, {"weights": params, "moments": state.optimizer, "gradient": params}


def engine_programs(
    config: ModelConfig, mesh: Mesh, shapes: Shapes, dtype: jnp.dtype
) -> tuple[dict[str, Lowered], dict[str, object]]:
    """The rollout engine's programs by name, and the shapes of what a run keeps on the devices for it."""
    engine = NativeEngine(config, shapes, dtype=dtype, mesh=mesh)
    params = jax.eval_shape(lambda params: engine._load(params), transformer.abstract(config))
    params = placed(params, engine._unstacked(engine._param_shardings))
    state: DeviceState = placed(jax.eval_shape(lambda: engine._init()), engine._state_shardings())
    whole = lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype)
    fresh = Slots(*(whole(*leaf.shape, dtype=leaf.dtype) for leaf in state.slots))
    slots, lines = shapes.slots, shapes.prefill_rows
    hidden = whole(slots, config.width, dtype=dtype)
    new = Insertions(whole(), whole(slots), whole(slots, shapes.chunks), hidden, fresh)
    chunks = (whole(lines, shapes.chunk), whole(lines), whole(lines), whole(lines, shapes.chunks), whole(lines))
    programs = {
        "prefill": engine.prefill_program.lower(params, state, *chunks),
        "generate": engine.generate_program.lower(params, state, new, whole(slots, dtype=jnp.bool_)),
    }
    return programs, {"sampler": params, "cache": state}


def collectives(text: str) -> dict[str, int]:
    """How many collectives of each kind a compiled program's text holds; the parts of an asynchronous one share a channel."""
    kinds = [kind for kind, _ in {match.groups() for match in COLLECTIVE.finditer(text)}]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def on_each_device(tree: object) -> int:
    """Bytes of a tree of placed shapes on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def check(name: str, lowered: Lowered, beside: int, capacity: int, say: Callable[[str], None] = print) -> bool:
    """Compile one program, say what it needs, and return whether that and what stands beside it fit the chip."""
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        say(f"{name}: DOES NOT FIT. {str(error).splitlines()[0]}")
        return False
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
    }
    total = sum(parts.values())
    fits = total + beside <= capacity
    found = ", ".join(f"{count} {kind}" for kind, count in collectives(compiled.as_text()).items())
    say(f"{name}: compiled in {seconds:.1f} s")
    say(f"  needs {gib(total)} = " + " + ".join(f"{gib(size)} {part}" for part, size in parts.items()))
    verdict = "fits" if fits else "DOES NOT FIT"
    say(f"  beside {gib(beside)}; together {gib(total + beside)} of {gib(capacity)}: {verdict}")
    say(f"  collectives: {found or 'none'}")
    return fits


# What each program takes as arguments, of all that a run keeps on the devices.
TAKES = {
    "accumulate": {"weights", "gradient"},
    "apply": {"weights", "moments", "gradient"},
    "prefill": {"sampler", "cache"},
    "generate": {"sampler", "cache"},
}
# While rollouts are made there is no gradient.
ABSENT = {"prefill": {"gradient"}, "generate": {"gradient"}}


def run(args: argparse.Namespace) -> bool:
    """Check every program that was asked for; returns whether all compile and fit."""
    generation = args.topology.partition(":")[0]
    if generation not in HBM:
        raise ConfigError("--topology", args.topology, f"begin with one of {sorted(HBM)}, as in v5e:2x4")
    config = read_model(args.model)
    mesh = tpu_mesh(args.topology, args.mesh)
    check_divisible(config, mesh)
    if args.context % args.chunk:
        raise ConfigError("--context", args.context, f"must be a multiple of --chunk = {args.chunk}")
    dtype = jnp.dtype(args.dtype)
    kernel, reason = attention.choose(args.attention, config, "tpu", (args.length,), dtype)
    compute = Compute(dtype, args.remat, kernel)
    row_pages = args.context // args.chunk
    pages = max(args.slots, args.prefill_rows) * row_pages + 1
    shapes = Shapes(args.slots, args.context, args.prefill_rows, args.chunk, args.block, pages)
    print(f"{args.model} for {args.topology}, mesh {dict(mesh.shape)}, {dtype}, attention {kernel} ({reason})")
    learning, kept = learner_programs(config, mesh, rows=args.rows, length=args.length, compute=compute)
    sampling, kept_too = engine_programs(config, mesh, shapes, dtype)
    sizes = {name: on_each_device(tree) for name, tree in (kept | kept_too).items()}
    print("kept on each device: " + ", ".join(f"{name} {gib(size)}" for name, size in sizes.items()))
    fits = True
    for name, lowered in (learning | sampling).items():
        if name in args.programs:
            counted = TAKES[name] | ABSENT.get(name, set())
            beside = sum(size for piece, size in sizes.items() if piece not in counted)
            fits &= check(name, lowered, beside, HBM[generation] * 2**30)
    return fits


def sizes_of(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = found.add_argument
    add("--model", default="qwen3-0.6b", help=f"{', '.join(MODELS)}, or a directory with a config.json")
    add("--topology", default="v5e:2x4", help="generation and chips of the slice (default v5e:2x4)")
    add("--mesh", type=sizes_of, default=[1, 4, 2], help="data,fsdp,tensor (default 1,4,2)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of compute and cache (default bfloat16)")
    add("--rows", type=int, default=8, help="rows of a micro-batch (default 8)")
    add("--length", type=int, default=2048, help="tokens of a row (default 2048)")
    add("--attention", default="auto", help="auto, splash, chunked or xla: the learner's kernel (default auto)")
    add("--no-remat", dest="remat", action="store_false", help="keep activations instead of recomputing them")
    add("--slots", type=int, default=32, help="requests decoded at once (default 32)")
    add("--context", type=int, default=2048, help="longest prompt plus reply (default 2048)")
    add("--prefill-rows", type=int, default=8, help="prompts prefilled at once (default 8)")
    add("--chunk", type=int, default=64, help="tokens that are prefilled at once (default 64)")
    add("--block", type=int, default=8, help="tokens decoded in one call (default 8)")
    add("--programs", nargs="+", choices=TAKES, default=list(TAKES), help="which to compile (default all)")
    return found


def main() -> int:
    args = parser().parse_args()
    # What is compiled for chips that are not there can be written to that cache, but not read back.
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        return 0 if run(args) else 1
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
