"""What a person sees while it runs: bars on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

_LINE_EVERY = 10.0  # seconds between plain lines


def figures(values: Mapping[str, float]) -> str:
    """`loss 0.1234  accuracy 0.987`."""
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items())


@dataclass
class Bar:
    """One piece of work: `advance` after each step, with the figures to show."""

    title: str
    total: int
    done: int = 0
    bars: Bars | None = None
    console: Console | None = None
    _last_line: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.bars is not None:
            self._task = self.bars.add_task(self.title, total=self.total, completed=self.done, figures="")

    def advance(self, values: Mapping[str, float] | None = None) -> None:
        """One step further."""
        self.done += 1
        shown = figures(values) if values else None
        if self.bars is not None:
            self.bars.advance(self._task)
            if shown:
                self.bars.update(self._task, figures=shown)
        elif self.console is not None and shown and time.monotonic() - self._last_line > _LINE_EVERY:
            self._last_line = time.monotonic()
            self.console.print(f"{self.title}: step {self.done}/{self.total}  {shown}", highlight=False, markup=False)


@dataclass(frozen=True)
class Progress:
    """quiet: show nothing. Everything goes to standard error, so that standard output holds results alone."""

    quiet: bool = False
    console: Console = field(default_factory=lambda: Console(file=sys.stderr, soft_wrap=True))

    def say(self, text: str) -> None:
        """One line, unless quiet."""
        if not self.quiet:
            self.console.print(text, highlight=False, markup=False)

    def warn(self, text: str) -> None:
        """One line, even when quiet: something the user must know."""
        self.console.print(f"warning: {text}", highlight=False, markup=False)

    @contextmanager
    def bar(self, title: str, total: int, done: int = 0) -> Iterator[Bar]:
        """A bar of `total` steps, `done` of them done before."""
        if self.quiet:
            yield Bar(title, total, done)
        elif not self.console.is_terminal:
            yield Bar(title, total, done, console=self.console)
        else:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
            )
            with Bars(*columns, console=self.console, transient=True) as bars:
                yield Bar(title, total, done, bars=bars)
