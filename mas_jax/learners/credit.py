"""From rewards to one advantage per call and one weight per token: slots of one pipeline, pure functions on id vectors.

Vectors have one entry per call (turn): `reward` [N], and integer ids `task`, `episode`, `role`, `agent`, `turn` [N]. Entries of weight
0 are outside every statistic and get 0. A group of one, or whose rewards are exactly equal, gets 0: there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

ID_NAMES = ("task", "episode", "role", "agent", "turn")
EPSILON = 1e-6
NOISE = 1e-12  # relative rounding error of a mean of a few hundred rewards, generously


@dataclass(frozen=True)
class Method:
    """One way to assign credit: a value for each slot, and where it was published.

    `key` says which calls are compared; `unit` whether a call or an episode is one sample of the statistics; `centre` and `scale` what
    is taken off and divided by; `temporal` how a call's advantage reaches its tokens; `weight` how tokens add up, per role
    (`per_role`) or over all roles of a policy.
    """

    paper: str
    formula: str
    key: tuple[str, ...] = ("task",)
    unit: str = "episode"
    centre: str = "mean"
    scale: str = "std"
    temporal: str = "broadcast"
    weight: str = "row_mean"
    per_role: bool = False

    @property
    def needs_group(self) -> bool:
        """Whether an advantage is a comparison within a group, so that a group of one teaches nothing."""
        return self.centre != "none"


def group_ids(ids: Mapping[str, np.ndarray], key: Sequence[str]) -> np.ndarray:
    """[N] group numbers: equal where every id named in `key` is equal."""
    columns = np.stack([np.asarray(ids[name]) for name in key])
    return np.unique(columns, axis=1, return_inverse=True)[1].reshape(-1)


def advantages(
    reward: np.ndarray, ids: Mapping[str, np.ndarray], method: Method, weight: np.ndarray | None = None
) -> np.ndarray:
    """The first four slots: (r - centre) / scale within each group. float64 [N].

    With unit "episode" the samples of a group are its episodes' mean rewards; each call still has its own reward compared with them.
    """
    reward = np.asarray(reward, np.float64)
    live = np.ones(len(reward), bool) if weight is None else np.asarray(weight) > 0
    out = np.zeros(len(reward))
    groups = group_ids(ids, method.key) if len(reward) else np.zeros(0, int)
    for group in np.unique(groups[live]):
        members = np.flatnonzero((groups == group) & live)
        own = reward[members]
        units = members if method.unit == "call" else np.asarray(ids["episode"])[members]
        _, place = np.unique(units, return_inverse=True)
        samples = np.bincount(place, own) / np.bincount(place)
        out[members] = _normalise(own, samples, place, method)
    return out


def _normalise(own: np.ndarray, samples: np.ndarray, place: np.ndarray, method: Method) -> np.ndarray:
    """One group: `own` rewards [M], unit `samples` [U], and which unit each reward belongs to [M]."""
    if method.centre == "none":
        return own
    # Exact equality of the rewards: the mean of three times 0.1 is not 0.1.
    if len(samples) < 2 or (own == own[0]).all():
        return np.zeros(len(own))
    # Episodes of one mean have no spread to divide by what differs within them.
    if method.scale != "none" and np.ptp(samples) <= NOISE * np.abs(own).max():
        return np.zeros(len(own))
    return (own - CENTRES[method.centre](samples)[place]) / SCALES[method.scale](samples)


def _leave_one_out(samples: np.ndarray) -> np.ndarray:
    return (samples.sum() - samples) / (len(samples) - 1)


CENTRES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": np.zeros_like,
    "mean": lambda samples: np.full_like(samples, samples.mean()),
    "leave_one_out": _leave_one_out,
}

SCALES: dict[str, Callable[[np.ndarray], float]] = {
    "none": lambda samples: 1.0,
    "std": lambda samples: samples.std(ddof=1) + EPSILON,
    "population_std": lambda samples: samples.std() + EPSILON,
}


def inflation(reward: np.ndarray, role: np.ndarray, group: np.ndarray) -> dict[int, float]:
    """(σ_k² + (μ_k - μ)²) / σ² of each role, averaged over groups with spread (Dr. MAS, arXiv 2602.08847, §4).

    By how much one baseline for all roles inflates a role's gradient; 1 is none.
    """
    reward, found = np.asarray(reward, np.float64), {}
    for g in np.unique(group):
        here = group == g
        mean, var = reward[here].mean(), reward[here].var()
        if var == 0:
            continue
        for k in np.unique(role[here]):
            own = reward[here & (role == k)]
            found.setdefault(int(k), []).append((own.var() + (own.mean() - mean) ** 2) / var)
    return {k: float(np.mean(values)) for k, values in found.items()}


def token_weights(lengths: np.ndarray, role: np.ndarray, method: Method, constant_length: np.ndarray) -> np.ndarray:
    """The last slot: weight [N] of each sampled token of a call, so that loss = sum of weight x token loss.

    `lengths` [N] counts the trainable tokens of each call (0: none), `constant_length` [N] is what `constant_length` divides by.
    Denominators run over all calls given, or over those of the same role when `per_role`: call it once for a whole minibatch.
    """
    lengths = np.asarray(lengths, np.float64)
    share = np.zeros(len(lengths))
    scope = np.asarray(role) if method.per_role else np.zeros(len(lengths), int)
    for value in np.unique(scope):
        members = np.flatnonzero((scope == value) & (lengths > 0))
        if len(members):
            share[members] = WEIGHTS[method.weight](lengths[members], np.asarray(constant_length)[members])
    return share


WEIGHTS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "token_mean": lambda lengths, constant: np.full(len(lengths), 1 / lengths.sum()),
    "row_mean": lambda lengths, constant: 1 / lengths / len(lengths),
    "row_sum": lambda lengths, constant: np.full(len(lengths), 1 / len(lengths)),
    "constant_length": lambda lengths, constant: 1 / constant / len(lengths),
}
