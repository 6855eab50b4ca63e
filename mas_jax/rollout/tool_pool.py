"""Tools run in worker processes that can be killed: a call that passes its time limit ends as an error, and its worker with it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, TimeoutError, wait
from typing import Any

from mas_jax.rollout.workflow import Tool


class ToolPool:
    """`functions` by name; worker processes start with the first call."""

    def __init__(self, functions: dict[str, Callable], *, workers: int = 2, seconds: float = 10.0) -> None:
        self.functions, self.workers, self.seconds = functions, workers, seconds
        self._pool = None
        self._running: dict[Any, tuple[str, float]] = {}

    def submit(self, call_id: str, tool: Tool) -> None:
        """Start a tool call."""
        import cloudpickle

        seconds = self.seconds if tool.seconds is None else tool.seconds
        work = cloudpickle.dumps((self.functions[tool.name], tool.args))
        future = self._started().schedule(_run, args=(work,), timeout=seconds)
        self._running[future] = (call_id, seconds)

    def poll(self, *, wait: bool) -> list[tuple[str, tuple[object, str]]]:
        """What finished, as (call id, (value, error)); `wait` blocks until something does."""
        if not self._running:
            return []
        done = _finished(self._running, block=wait)
        return [self._outcome(future) for future in done]

    def cancel(self, ids: Collection[str]) -> None:
        """Kill calls that nobody waits for any more."""
        for future in [future for future, (call_id, _) in self._running.items() if call_id in ids]:
            del self._running[future]
            future.cancel()

    def close(self) -> None:
        """Kill the workers."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None
        self._running.clear()

    def _started(self) -> Any:
        if self._pool is None:
            import multiprocessing

            from pebble import ProcessPool

            self._pool = ProcessPool(max_workers=self.workers, context=multiprocessing.get_context("spawn"))
        return self._pool

    def _outcome(self, future: Any) -> tuple[str, tuple[object, str]]:
        call_id, seconds = self._running.pop(future)
        error = future.exception()
        if error is None:
            return call_id, (future.result(), "")
        if isinstance(error, TimeoutError):
            return call_id, (None, f"no answer within {seconds:g} s; killed")
        return call_id, (None, f"{type(error).__name__}: {error}")


def _finished(running: dict, *, block: bool) -> list:
    done, _ = wait(running, timeout=None if block else 0, return_when=FIRST_COMPLETED)
    return [future for future in running if future in done]


def _loads(work: bytes) -> tuple[Callable, tuple]:
    import cloudpickle

    return cloudpickle.loads(work)


def _run(work: bytes) -> object:
    fn, args = _loads(work)
    return fn(*args)
