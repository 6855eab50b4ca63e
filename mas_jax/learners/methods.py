"""The table of methods: each a row that fills the slots of `credit`. Add a row to add a method."""

from __future__ import annotations

import difflib

from mas_jax.config import ConfigError
from mas_jax.learners.credit import CENTRES, ID_NAMES, SCALES, WEIGHTS, Method

METHODS: dict[str, Method] = {
    "grpo": Method(
        paper="Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, eq. 3",
        formula="A = (R - mean) / std over the episodes of a task; mean over rows of each row's token mean",
    ),
    "dr_grpo": Method(
        paper="Liu et al. 2025, Understanding R1-Zero-like training, arXiv 2503.20783, §3.2",
        formula="A = R - mean over the episodes of a task; token sums divided by one constant length, mean over rows",
        scale="none",
        weight="constant_length",
    ),
    "rloo": Method(
        paper="Ahmadian et al. 2024, Back to basics, arXiv 2402.14740, eq. 8",
        formula="A = R - mean of the other episodes of the task; token sums, mean over rows",
        centre="leave_one_out",
        scale="none",
        weight="row_sum",
    ),
    "dr_mas": Method(
        paper="Feng et al. 2026, Dr. MAS, arXiv 2602.08847, §4",
        formula="A = (R - mean_k) / std_k over all calls of role k in the task's episodes; mean over the role's own rows",
        key=("task", "role"),
        unit="call",
        per_role=True,
    ),
}


def lookup(name: str, group_size: int) -> Method:
    """The method of this name, checked. Raises ConfigError: unknown, a slot value that does not exist, a group of one."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError("method", name, f"{hint}there are {', '.join(METHODS)}")
    method = METHODS[name]
    slots = {
        "unit": (method.unit, ("call", "episode")),
        "centre": (method.centre, CENTRES),
        "scale": (method.scale, SCALES),
        "temporal": (method.temporal, ("broadcast",)),
        "weight": (method.weight, WEIGHTS),
    }
    for slot, (value, known) in slots.items():
        if value not in known:
            raise ConfigError(f"methods[{name!r}].{slot}", value, f"use one of {', '.join(known)}")
    for part in method.key:
        if part not in ID_NAMES:
            raise ConfigError(f"methods[{name!r}].key", part, f"use some of {', '.join(ID_NAMES)}")
    if method.needs_group and group_size < 2:
        remedy = f"{name} compares the episodes of a task with one another: use 2 or more"
        raise ConfigError("group_size", group_size, remedy)
    return method
