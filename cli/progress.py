"""Shows stages of long work as rich progress bars, or as plain lines where nobody watches a terminal. Knows nothing of the work."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Stages:
    """`update` is a Progress of cluster.local and engine.checkpoint: (stage, done, total)."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started: dict[str, float] = {}
        self._finished: set[str] = set()
        self._tasks: dict[str, TaskID] = {}
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, refresh_per_second=5) if console.is_terminal else None

    def __enter__(self) -> "Stages":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()

    def update(self, stage: str, done: int, total: int) -> None:
        self._started.setdefault(stage, time.monotonic())
        if self._bars is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage, total=total or None, amount="")
            self._bars.update(self._tasks[stage], completed=done, total=total or None, amount=_amount(done, total))
        elif total and done >= total and stage not in self._finished:
            self._finished.add(stage)
            self._console.print(f"{stage}: {time.monotonic() - self._started[stage]:.1f} s")


def _amount(done: int, total: int) -> str:
    if total >= 1_000_000:
        return f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
    return f"{done} of {total}" if total else ""
