"""Device meshes, and where each logical axis of a tensor lives on them."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mas_jax.config import ConfigError

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

Rules = Mapping[str, str | tuple[str, ...] | None]

_TENSOR_PARALLEL = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
_WHOLE = {"layers": None, "experts": None, "head_dim": None, "length": None}

# The learner keeps master weights, gradients and optimizer moments: too much to hold whole on every device.
LEARNER_RULES: Rules = {**_WHOLE, **_TENSOR_PARALLEL, "embed": "fsdp", "batch": BATCH_AXES}
# Decoding reads every weight for every token: gathering them each step would cost more than the step.
ROLLOUT_RULES: Rules = {**_WHOLE, **_TENSOR_PARALLEL, "embed": None, "batch": BATCH_AXES}


@runtime_checkable
class ModelShape(Protocol):
    """The sizes of a model that a mesh has to divide."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def mlp(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def width(self) -> int: ...


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh of the first data*fsdp*tensor devices; one size may be -1, which takes all that remain.

    Raises ConfigError where a size is neither positive nor -1, where two are -1, and where there are too few devices.
    """
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    available = jax.device_count()
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise ConfigError(f"mesh.{name}", size, "use a positive number of devices, or -1 for all that remain")
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ConfigError(f"mesh.{free[1]}", -1, f"only one axis may take all that remain, and {free[0]} does already")
    fixed = 1
    for size in sizes.values():
        fixed *= max(size, 1)
    if fixed > available:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ConfigError(
            f"mesh.{largest}",
            sizes[largest],
            f"the mesh {sizes} needs {fixed} devices and there are {available}: make it smaller, or (on CPU) set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={fixed}",
        )
    if free:
        if available % fixed:
            raise ConfigError(f"mesh.{free[0]}", -1, f"{available} devices do not divide by {fixed}: give all sizes")
        sizes[free[0]] = available // fixed
    used = sizes["data"] * sizes["fsdp"] * sizes["tensor"]
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:used])


def partition(axes: tuple[str, ...], rules: Rules) -> PartitionSpec:
    """The partition of one array from the names of its logical axes; KeyError for a name without a rule."""
    return PartitionSpec(*(rules[axis] for axis in axes))


def shardings(axes_tree: object, mesh: Mesh, rules: Rules) -> object:
    """A tree of NamedSharding in the shape of `axes_tree`, whose leaves are tuples of logical axis names."""

    def place(axes: tuple[str, ...]) -> NamedSharding:
        return NamedSharding(mesh, partition(axes, rules))

    return jax.tree.map(place, axes_tree, is_leaf=lambda node: isinstance(node, tuple))


def fitted(rules: Rules, config: ModelShape, mesh: Mesh) -> Rules:
    """The rules with which a model lies on a mesh: key-value heads fewer than the tensor axis are whole on every device."""
    return {**rules, "kv_heads": None} if config.kv_heads % mesh.shape["tensor"] else rules


def batch_sharding(mesh: Mesh, ndim: int) -> NamedSharding:
    """Sharding of an array [B, ...] of `ndim` axes whose rows are spread over the data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, *(None,) * (ndim - 1)))


def constrain_batch(x: jax.Array) -> jax.Array:
    """Keep the rows of x [B, ...] over data and fsdp while tracing under `jax.set_mesh`; elsewhere x itself.

    Without it XLA may carry the weights' fsdp axis into the activations and shard their width instead of their rows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or tuple(mesh.axis_names) != AXES or x.shape[0] % (mesh.shape["data"] * mesh.shape["fsdp"]):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES, *(None,) * (x.ndim - 1)))


def check_divisible(config: ModelShape, mesh: Mesh) -> None:
    """Raise ConfigError naming the first size of the model that the mesh axis over it does not divide.

    Key-value heads may also divide the axis: then they are whole on every device (`fitted`).
    """
    sizes = {"heads": config.heads, "mlp": config.mlp, "vocab": config.vocab}
    if mesh.shape["tensor"] % config.kv_heads:
        sizes["kv_heads"] = config.kv_heads
    needs = [(name, size, "tensor") for name, size in sizes.items()] + [("width", config.width, "fsdp")]
    for name, size, axis in needs:
        over = mesh.shape[axis]
        if size % over:
            fitting = [n for n in range(1, over + 1) if size % n == 0]
            raise ConfigError(
                f"mesh.{axis}",
                over,
                f"the model's {name} = {size} does not divide by it: use one of {fitting} and put the other devices on "
                f"another axis",
            )
