"""What a sweep shows while it runs: a bar on a terminal, plain lines elsewhere. Always on standard error.

The bar and its ETA are weighted by predicted cost, since runs differ a hundredfold, and the prediction is
corrected by how long the runs of this sweep have taken so far.

>>> eta = Eta([10.0, 30.0])
>>> eta.finish(0, 20.0); round(eta.remaining())
60
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from thinpipe.harness.plan import Entry

REFRESH_S = 0.2


class Eta:
    """Seconds left of runs whose cost was predicted. Pure."""

    def __init__(self, predicted: Sequence[float]) -> None:
        self.predicted = list(predicted)
        self.taken: dict[int, float] = {}

    def finish(self, index: int, seconds: float) -> None:
        """Run `index` took `seconds`."""
        self.taken[index] = seconds

    def fraction(self, current: float = 0.0) -> float:
        """Share of the predicted cost that is done; current: share done of the run in progress."""
        return (self._done() + current * self._next()) / (sum(self.predicted) or 1.0)

    def remaining(self, current: float = 0.0) -> float:
        """Predicted seconds left, scaled by measured over predicted of what is done."""
        done = self._done()
        scale = sum(self.taken.values()) / done if done else 1.0
        return (sum(self.predicted) - done - current * self._next()) * scale

    def _done(self) -> float:
        return sum(self.predicted[index] for index in self.taken)

    def _next(self) -> float:
        index = len(self.taken)
        return self.predicted[index] if index < len(self.predicted) else 0.0


def duration(seconds: float) -> str:
    """
    >>> duration(75), duration(3700), duration(4.2)
    ('1 min 15 s', '1 h 01 min', '4 s')
    """
    seconds = max(0, round(seconds))
    if seconds >= 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 60} min {seconds % 60:02d} s" if seconds >= 60 else f"{seconds} s"


def outcome(entry: Entry, status: dict[str, Any]) -> str:
    """One line on how a run ended: `FAILED timing / FP32 / ... (id): why`."""
    state = status["state"]
    shown = state if state == "done" else state.upper()
    text = f"{shown} {entry.name} ({entry.run_id}, {status['wall_s']:.1f} s)"
    flags = status["fidelity"]["flags"]
    if flags:
        text += f" [{', '.join(flags)}: {'; '.join(status['fidelity']['reasons'])}]"
    return text if state == "done" else f"{text}: {_first_line(status)}"


def _first_line(status: dict[str, Any]) -> str:
    return (status.get("error") or "no reason given").partition("\n")[0]


class PlainProgress:
    """One line a run, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.eta = Eta([])
        self.started = 0.0

    def start(self, entries: Sequence[Entry]) -> None:
        self.eta = Eta([entry.predicted_s for entry in entries])
        self.say(f"{len(entries)} run(s) to do, predicted {duration(self.eta.remaining())}")

    def begin(self, entry: Entry) -> None:
        self.started = time.monotonic()

    def step(self, step: int, steps: int) -> None:
        pass

    def end(self, entry: Entry, status: dict[str, Any]) -> None:
        self.eta.finish(len(self.eta.taken), time.monotonic() - self.started)
        place = f"[{len(self.eta.taken)}/{len(self.eta.predicted)}]"
        self.say(f"{place} {outcome(entry, status)}; {duration(self.eta.remaining())} left")

    def say(self, message: str) -> None:
        print(message, file=self.stream, flush=True)

    def stop(self) -> None:
        pass


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold Ctrl-C back while rich draws: cut short, it can no longer put the terminal right."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class BarProgress(PlainProgress):
    """A bar that stays at the bottom; what is worth keeping (failures, flags, waits) scrolls above it."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.console = Console(stderr=True, highlight=False)
        # No refresh thread: the process that runs a sweep stays single-threaded.
        self.bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}% {task.fields[place]} {task.description}"),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )
        self.task = self.bar.add_task("", total=1.0, place="", left="")
        self.shown = 0.0

    def start(self, entries: Sequence[Entry]) -> None:
        super().start(entries)
        with _undisturbed():
            self.bar.start()

    def begin(self, entry: Entry) -> None:
        super().begin(entry)
        with _undisturbed():
            self.bar.update(self.task, description=entry.name)
        self._show(0.0)

    def step(self, step: int, steps: int) -> None:
        if time.monotonic() - self.shown >= REFRESH_S:
            self._show(step / max(1, steps))

    def end(self, entry: Entry, status: dict[str, Any]) -> None:
        self.eta.finish(len(self.eta.taken), time.monotonic() - self.started)
        if status["state"] != "done" or status["fidelity"]["flags"]:
            self.say(outcome(entry, status))
        self._show(0.0)

    def say(self, message: str) -> None:
        with _undisturbed():
            self.console.print(message, markup=False, soft_wrap=True)

    def stop(self) -> None:
        with _undisturbed():
            self.bar.stop()

    def _show(self, current: float) -> None:
        self.shown = time.monotonic()
        place = f"{min(len(self.eta.taken) + 1, len(self.eta.predicted))}/{len(self.eta.predicted)}"
        left = f"{duration(self.eta.remaining(current))} left"
        with _undisturbed():
            self.bar.update(self.task, completed=self.eta.fraction(current), place=place, left=left)
            self.bar.refresh()


def make() -> PlainProgress:
    """The progress that suits standard error."""
    return BarProgress() if sys.stderr.isatty() else PlainProgress()
