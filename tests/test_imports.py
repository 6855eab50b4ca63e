"""Who loads what: the import rules that are about running, not about text (import-linter holds the others)."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
NO_JAX = next(c for c in CONTRACTS if c["name"] == "the half that loads no jax")
LAYERS = next(c for c in CONTRACTS if c["type"] == "layers")["layers"]
HEAVY = NO_JAX["forbidden_modules"]


def run(program: str, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh interpreter at the root of the checkout."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(
        [sys.executable, "-B", "-c", program, *argv], capture_output=True, text=True, cwd=ROOT, env=env, timeout=300
    )


def modules_under(names: list[str]) -> list[str]:
    """The modules, and those inside where one is a package."""
    found = []
    for name in names:
        path = ROOT.joinpath(*name.split("."))
        inside = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        found += [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in inside]
    return found


IMPORT_ONE_BY_ONE = """
import importlib, json, sys
heavy = json.loads(sys.argv[1])
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
    loaded = [h for h in heavy if h in sys.modules]
    if loaded:
        sys.exit(f"importing {name} loaded {loaded}")
"""


def test_the_package_and_its_no_jax_half_leave_jax_out_of_memory():
    done = run(IMPORT_ONE_BY_ONE, json.dumps(HEAVY), json.dumps(["mas_jax", *modules_under(NO_JAX["source_modules"])]))
    assert done.returncode == 0, done.stderr


def test_the_command_line_shows_its_help_without_loading_jax():
    program = """
import sys
from mas_jax.cli import main
sys.argv = ["mas-jax", *sys.argv[2:]]
try:
    code = main()
except SystemExit as stop:
    code = stop.code
assert code in (0, None), code
import json
loaded = [h for h in json.loads(sys.orig_argv[-2]) if h in sys.modules]
assert not loaded, loaded
"""
    done = run(program, json.dumps(HEAVY), "--help")
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def test_importing_every_module_touches_no_device_no_file_and_no_network():
    program = """
import importlib, json, sys
import jax
def watch(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "os.mkdir", "os.remove", "os.rename", "subprocess.Popen"):
        raise RuntimeError(f"{event} while importing: {args}")
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        raise RuntimeError(f"a file is opened for writing while importing: {args}")
sys.addaudithook(watch)
from jax._src import xla_bridge
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    assert not xla_bridge.backends_are_initialized(), f"importing {name} opened a device"
"""
    names = [n for n in modules_under(["mas_jax"]) if not n.endswith("__main__")]
    done = run(program, json.dumps(names))
    assert done.returncode == 0, done.stderr


def test_every_module_of_the_package_has_its_place_in_the_layers():
    placed = {name.strip("() \n") for layer in LAYERS for name in layer.replace("|", ":").split(":")}
    there = {
        f"mas_jax.{p.stem}" for p in (ROOT / "mas_jax").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert there - {"mas_jax.__init__", "mas_jax.__main__"} <= placed
