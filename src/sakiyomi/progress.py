"""What the command line says on standard error: how far it is, and warnings."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LINE_SECONDS = 60.0  # between lines about one stage, where there is no terminal


@contextmanager
def show_progress(*, lines: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function that takes how much is done, of how much, and what: a bar with the time that is left.

    Another total begins another stage. Where standard error is no terminal nothing is shown; with ``lines``, for what
    takes long, a line when a stage begins, and how far it is each minute.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _show_lines() if lines else lambda done, total, what: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")
        stage = 0

        def show(done: int, total: int, what: str) -> None:
            nonlocal stage
            if total != stage:  # what comes next has a pace of its own
                stage = total
                bar.reset(task)
            bar.update(task, completed=done, total=total, description=what)

        yield show


def _show_lines() -> Callable[[int, int, str], None]:
    stage, said = 0, 0.0

    def show(done: int, total: int, what: str) -> None:
        nonlocal stage, said
        now = time.monotonic()
        if total != stage or now - said >= LINE_SECONDS:
            stage, said = total, now
            print(f"{what} ({done / max(1, total):.0%})", file=sys.stderr, flush=True)

    return show


@contextmanager
def warnings_in_one_line(*, later: bool = False) -> Iterator[None]:
    """Show a RuntimeWarning as a line on standard error, without the file and line that raised it.

    ``later``: in the end, not amid a text that is being written.
    """
    lines: list[str] = []
    with warnings.catch_warnings():
        show_otherwise = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, RuntimeWarning):
                show_otherwise(message, category, *where, **more)
                return
            lines.append(f"sakiyomi: {' '.join(str(message).split())}")
            if not later:
                print(lines.pop(), file=sys.stderr)

        warnings.showwarning = show
        try:
            yield
        finally:
            for line in lines:
                print(line, file=sys.stderr)


@contextmanager
def byte_progress(label: str, total: int, *, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of bytes done so far; nothing is printed unless ``show``."""
    if not show:
        yield lambda done: None
        return

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        print(label, file=sys.stderr, flush=True)
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=min(done, total))
