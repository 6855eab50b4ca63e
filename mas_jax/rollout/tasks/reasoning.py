"""Tasks from the generators of reasoning-gym, with training and held-out questions that never meet."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from mas_jax.config import ConfigError, Task

# Item i of a generator depends on seed + i alone, so streams must lie further apart than any is long.
STREAM = 2_000_000
# This many draws in a row without a new question on the wanted side: the generator has no more of them.
PATIENCE = 1000


def reasoning(
    *names: str,
    train: int = 2000,
    heldout: int = 200,
    seed: int = 0,
    options: dict[str, dict] | None = None,
    short: bool = True,
) -> Reasoning:
    """Tasks of the named generators in equal shares; `short` strips the questions of some to their expression."""
    return Reasoning(names, train, heldout, seed, options or {}, short)


@dataclass(frozen=True)
class Reasoning:
    """Called: (training tasks, held-out tasks). ConfigError for what cannot be drawn."""

    names: tuple[str, ...]
    train: int = 2000
    heldout: int = 200
    seed: int = 0
    options: dict[str, dict] = field(default_factory=dict)
    short: bool = True

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) < len(self.names):
            raise ConfigError("names", self.names, "name at least one generator, each once")
        if min(self.train, self.heldout) < len(self.names):
            remedy = f"give at least one task for each of {len(self.names)} generators"
            raise ConfigError("train, heldout", (self.train, self.heldout), remedy)
        for name, settings in self.options.items():
            if name not in self.names:
                raise ConfigError("options", name, f"no such generator among {', '.join(self.names)}")
            if settings.keys() & {"seed", "size"}:
                raise ConfigError(f"options.{name}", settings, "use seed, train and heldout for seed and size")

    def __call__(self) -> tuple[list[Task], list[Task]]:
        return self._draw(self.train, False), self._draw(self.heldout, True)

    def _draw(self, count: int, wanted: bool) -> list[Task]:
        """`count` tasks on one side, the generators taking turns; fewer where their spaces are small."""
        share, more = divmod(count, len(self.names))
        seed = (2 * self.seed + wanted) * STREAM
        drawn = []
        for place, name in enumerate(self.names):
            stream = _stream(name, seed, self.options.get(name, {}))
            tasks = _distinct(name, stream, share + (place < more), wanted, self.short)
            if not tasks:
                side = "held-out" if wanted else "training"
                remedy = f"no {side} question is left: give it a wider range"
                raise ConfigError(f"options.{name}", self.options.get(name, {}), remedy)
            drawn.append(tasks)
        return [task for task in chain.from_iterable(zip_longest(*drawn)) if task is not None]


def exact(task: Task, text: str) -> bool:
    """Whether the text is the answer and nothing else; whole numbers are compared as numbers."""
    return _plain(text) == _plain(task.answer)


def _distinct(name: str, stream: Iterator[dict], count: int, wanted: bool, short: bool) -> list[Task]:
    tasks, seen, misses = [], set(), 0
    for item in stream:
        if item["answer"] is None:
            raise ConfigError("names", name, "its questions have many right answers and no text to compare with")
        question = str(item["question"]).strip()
        brief = SHORT[name](item["metadata"]) if name in SHORT else None
        key = question if brief is None else brief  # one key, hence one side, for all wordings of a question
        if key in seen or is_heldout(key) != wanted:
            misses += 1
            if misses == PATIENCE:
                break
            continue
        misses = 0
        seen.add(key)
        digest = hashlib.blake2b(key.encode(), digest_size=6).hexdigest()
        prompt = key if short else question
        tasks.append(Task(f"{name}-{digest}", prompt, str(item["answer"]), {"generator": name}))
        if len(tasks) == count:
            break
    return tasks


def is_heldout(question: str) -> bool:
    """The side of a question, whatever was drawn before it: two in ten are held out."""
    return int.from_bytes(hashlib.blake2b(question.encode(), digest_size=8).digest(), "big") % 10 < 2


def _stream(name: str, seed: int, settings: dict) -> Iterator[dict]:
    """Items of one generator, lazily; ConfigError for a missing package, an unknown name or option."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError("names", name, "needs reasoning-gym: pip install reasoning-gym") from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=4, cutoff=0.5) or sorted(DATASETS)
        raise ConfigError("names", name, f"no such generator in reasoning-gym; near names: {', '.join(near)}")
    dataset_class, config_class = DATASETS[name]
    known = {f.name for f in dataclasses.fields(config_class)} - {"seed", "size"}
    if settings.keys() - known:
        raise ConfigError(f"options.{name}", settings, f"its options are {', '.join(sorted(known))}")
    try:
        config = config_class(**settings, seed=seed, size=STREAM)
        config.validate()
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"options.{name}", settings, f"reasoning-gym refuses them: {error}") from error
    dataset = dataset_class(config=config)
    return (dataset[i] for i in range(STREAM))


_WHOLE = re.compile(r"([+-]?)0*([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)")


def _plain(text: str) -> str:
    """The text without outer blanks, a whole number in its one canonical form."""
    text = text.strip()
    match = _WHOLE.fullmatch(text)
    if match is None:
        return text
    digits = match[2].replace(",", "").lstrip("0") or "0"
    return "-" + digits if match[1] == "-" and digits != "0" else digits


def _expression(data: dict) -> str:
    return data["expression"].replace(" ", "") + "="


def _letter_counting(data: dict) -> str:
    return f"count {data['target_letter']} in {' '.join(data['span'])}"


def _simple_equations(data: dict) -> str:
    return f"{data['equation'].replace(' ', '')};{data['variable']}="


def _numbers(word: str) -> Callable[[dict], str]:
    return lambda data: f"{word} {' '.join(map(str, data['numbers']))}"


# A model of a million parameters spends its capacity on the wording: these say the same in a few characters.
SHORT: dict[str, Callable[[dict], str]] = {
    "products": _expression,
    "chain_sum": _expression,
    "decimal_chain_sum": _expression,
    "gcd": _numbers("gcd"),
    "lcm": _numbers("lcm"),
    "count_bits": lambda data: f"bits {data['number']}",
    "letter_counting": _letter_counting,
    "simple_equations": _simple_equations,
    "spell_backward": lambda data: f"reverse {data['word']}",
}
