"""What a person sees while a run works: the phase with an estimate in a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

WIDTH = 120  # of tables in a pipe, which has no width of its own


class Reporter:
    """Phases and lines on one console. Use as a context manager. In a pipe or in CI a phase is one line when it begins."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        if not self.console.is_terminal:
            self.console.width = max(self.console.width, WIDTH)
        self._bar: Progress | None = None
        self._task = None
        self._phase = ""
        self.started = time.monotonic()

    def __enter__(self) -> Reporter:
        if self.console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bar = Progress(
                *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console, transient=True
            )
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False)

    def phase(self, name: str, total: int | None = None, *, quiet: bool = False) -> Callable[[int, str], None]:
        """Begin a phase of `total` parts; the function given back reports (parts done, a note). `quiet`: no line in a pipe."""
        if self._bar is None:
            if not quiet and name != self._phase:
                self.console.print(f"[{time.monotonic() - self.started:6.1f}s] {name}", markup=False)
            self._phase = name
            return lambda done, note="": None
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = task = self._bar.add_task(name, total=total, note="")
        return lambda done, note="": self._bar.update(task, completed=done, note=note)
