"""The tests come in two halves: one that never loads jax and takes seconds, and the rest.

MAS_JAX_HALF=nojax or =jax picks one; unset, both run. A test file belongs to the jax half when it imports jax, flax and
the like, itself or through our modules and the tests' helpers, or when it says `pytest.mark.jax`: its text is read, since
to import it would load jax. If jax comes in all the same, the no-jax half fails and names the test.
"""

import ast
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOADS_JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "torch", "transformers"}


def imported(path: Path) -> set[str]:
    """Names of modules that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def found(name: str, folders: list[Path]) -> Path | None:
    stems = [folder.joinpath(*name.split(".")) for folder in folders]
    return next((p for stem in stems for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.exists()), None)


def needs_jax(path: Path) -> bool:
    """Follows the imports of a test file through our own modules and the tests' helpers."""
    if "pytest.mark.jax" in path.read_text(encoding="utf-8"):
        return True
    folders, seen = [path.parent, ROOT / "tests", ROOT], set()
    waiting = imported(path)
    while waiting:
        name = waiting.pop()
        if name.split(".")[0] in LOADS_JAX:
            return True
        seen.add(name)
        if file := found(name, folders):
            waiting |= imported(file) - seen
        if "." in name:
            waiting |= {name.rpartition(".")[0]} - seen  # importing a.b runs a/__init__.py
    return False


def half() -> str:
    chosen = os.environ.get("MAS_JAX_HALF", "")
    if chosen not in ("", "jax", "nojax"):
        raise pytest.UsageError(f"MAS_JAX_HALF is {chosen!r}: use jax, nojax, or leave it unset for both")
    return chosen


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not half() or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return True if needs_jax(collection_path) != (half() == "jax") else None


def pytest_itemcollected(item: pytest.Item) -> None:
    if half() == "nojax" and "jax" in sys.modules:
        raise pytest.UsageError(
            f"{item.nodeid}: its file loads jax in the no-jax half; add pytestmark = pytest.mark.jax"
        )


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if half() == "nojax" and "jax" in sys.modules:
        pytest.fail(f"{item.nodeid} loaded jax in the no-jax half; add pytestmark = pytest.mark.jax to its file")
