"""Settings that must stand before anything imports jax; this file imports none, so the jax-free half stays fast."""

import os
from pathlib import Path

import hypothesis
import jaxtyping
from halves import half, pytest_ignore_collect, pytest_itemcollected, pytest_runtest_teardown  # noqa: F401 (hooks)

CACHE = Path(__file__).parents[1] / ".cache" / "jax"

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX_PLATFORMS=cuda pytest -m accelerator
os.environ.update(
    JAX_NUM_CPU_DEVICES="8",
    JAX_NUMPY_RANK_PROMOTION="raise",
    JAX_COMPILATION_CACHE_DIR=str(CACHE),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    HF_HUB_OFFLINE="1",
)

# A busy machine is no failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Shapes and dtypes of annotated functions are checked at each call, here and nowhere else. The hook imports jax as soon
# as it decorates a module, so the half that must not load jax goes without: its modules annotate no jax arrays.
if half() != "nojax":
    jaxtyping.install_import_hook("mas_jax", "typecheck.check")
