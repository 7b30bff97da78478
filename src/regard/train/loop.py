"""The training loop: accumulate, clip, step, log, validate, save, and stop cleanly on a signal."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from regard.errors import ArgumentError, FileError, RegardError
from regard.files.folder_lock import folder_locked
from regard.train import checkpoints
from regard.train.batches import Feed, Rows
from regard.train.losses import Loss, evaluate, next_token_loss
from regard.train.progress import CsvLog, Progress, Row
from regard.train.settings import Settings, optimiser
from regard.untrusted_text import error_text


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """A list that is empty until SIGINT or SIGTERM comes, and then holds its number.

    A second signal exits with 128 + its number. Outside the main thread, where Python takes no
    signals, the list stays empty. The former handlers come back at the end.

    >>> with interrupts() as caught:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     print([signal.Signals(number).name for number in caught])
    ['SIGTERM']
    """
    caught: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if caught:
            raise SystemExit(128 + number)
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class NonFiniteLoss(RegardError, FloatingPointError):
    """The loss or its gradient is NaN or infinite; the weights were not changed by it."""


@dataclass(frozen=True)
class Result:
    """Where a run ended: the last step's loss in nats, and the signal that stopped it, if any.

    >>> Result(step=5, loss=1.0, validation=None, stopped_by=None).step
    5
    """

    step: int
    loss: float
    validation: float | None
    stopped_by: int | None


def fit(
    model: nn.Module,
    batches: Feed,
    settings: Settings,
    *,
    validation: Rows | None = None,
    loss: Loss = next_token_loss,
    folder: str | Path | None = None,
    log: str | Path | None = None,
    progress: Progress | None = None,
    keep: int = 2,
    about: Mapping[str, Any] | None = None,
) -> Result:
    """Train `model` in place, from the newest whole checkpoint in `folder` if there is one.

    `loss(model, rows)` is the mean loss of one batch. On CPU a run that was stopped and resumed at
    any step gives the same bits as one that was not: weights, optimiser, torch's random state, data
    order and log. Ctrl-C and SIGTERM finish the step, save, and return; a second one leaves at
    once. `about` says what the model is, as plain values: a checkpoint of another one is refused.

    Raises:
        NonFiniteLoss: before the optimiser's step; the last checkpoint stays, the log shows the
            step.
        ArgumentError: the checkpoint in `folder` belongs to a run with other settings, weights,
            data or `about`.
        FileError: a checkpoint or the log cannot be written; another run writes in `folder`; or the
            checkpoint there is not what a run saves.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    >>> from regard.train.batches import Batches
    >>> batches = Batches(torch.arange(90) % 9, batch=4, context=8)
    >>> fit(model, batches, Settings(steps=3)).step
    3
    """
    run = _Run(model, batches, settings, loss, folder, keep, about)
    with ExitStack() as held:
        if folder is not None:
            checkpoints.prepare(folder, 0)
            held.enter_context(folder_locked(Path(folder)))
        run.restore()
        csv_log = CsvLog(log, after_step=run.step) if log else None
        for part in (progress, csv_log):
            if part is not None:
                held.callback(part.close)
        with interrupts() as caught:
            return run.train(validation, caught, csv_log, progress)


class _Run:
    """One run's state: what a checkpoint holds, and the clock, which it does not."""

    def __init__(
        self,
        model: nn.Module,
        batches: Feed,
        settings: Settings,
        loss: Loss,
        folder: str | Path | None,
        keep: int,
        about: Mapping[str, Any] | None,
    ) -> None:
        self.model, self.batches, self.settings, self.loss = model, batches, settings, loss
        self.folder, self.keep, self.about = folder, keep, about
        self.optimiser = optimiser(model, settings)
        self.parameters = [p for group in self.optimiser.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        self.step, self.saved = 0, -1
        self.pending: list[float] = []  # losses since the last row of the log
        self.last, self.norm = math.nan, math.nan
        self.validation: float | None = None
        self.clock, self.clock_step = time.perf_counter(), 0

    def train(
        self,
        validation: Rows | None,
        caught: list[int],
        log: CsvLog | None,
        progress: Progress | None,
    ) -> Result:
        settings = self.settings
        self.model.train()
        self.clock, self.clock_step = time.perf_counter(), self.step
        rows = None if validation is None else validation.to(self.device)
        while self.step < settings.steps and not caught:
            try:
                self.one_step()
            except NonFiniteLoss:
                if log:
                    log.write(self.row(self.last, None))
                raise
            if progress:
                progress.step(self.row(self.last, self.validation))
            measured = rows is not None and self.due(settings.validate_every)
            if rows is not None and measured:
                self.validate(rows)
            if measured or self.due(settings.log_every):
                self.report(log, progress, self.validation if measured else None)
            if self.due(settings.save_every):
                self.save()
        if caught and self.saved != self.step:
            self.save()
        return Result(self.step, self.last, self.validation, caught[0] if caught else None)

    def due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.settings.steps

    def one_step(self) -> None:
        settings, step, total = self.settings, self.step + 1, 0.0
        for group in self.optimiser.param_groups:
            group["lr"] = settings.lr_at(step)
        self.optimiser.zero_grad(set_to_none=True)
        for _ in range(settings.accumulate):
            rows = next(self.batches).to(self.device)
            with self.autocast():
                loss = self.loss(self.model, rows) / settings.accumulate
            total += loss.item()
            self.check("loss", total, step, total)
            torch.autograd.backward(loss)
        self.norm = nn.utils.clip_grad_norm_(self.parameters, settings.clip).item()
        self.check("gradient norm", self.norm, step, total)
        self.optimiser.step()
        self.step, self.last = step, total
        self.pending.append(total)

    def check(self, what: str, value: float, step: int, loss: float) -> None:
        if math.isfinite(value):
            return
        self.step, self.last = step, loss  # for the log's last row; nothing is saved after this
        kept = (
            f"the checkpoint of step {self.saved} is kept"
            if self.saved >= 0
            else "no checkpoint was saved yet"
        )
        raise NonFiniteLoss(
            f"{what} is {value} at step {step}; the weights were not updated and {kept}: "
            "lower lr, lengthen warmup or look at the data"
        )

    def autocast(self) -> AbstractContextManager[Any]:
        return (
            torch.autocast(self.device.type, torch.bfloat16)
            if self.settings.bf16
            else nullcontext()
        )

    def validate(self, rows: Rows) -> None:
        with self.off_the_clock(), self.autocast():
            self.validation = evaluate(self.model, rows, batch=self.batches.batch, loss=self.loss)

    def report(
        self, log: CsvLog | None, progress: Progress | None, validation: float | None
    ) -> None:
        row = self.row(math.fsum(self.pending) / len(self.pending), validation)
        if log:
            log.write(row)
        if progress:
            progress.row(row)
        self.pending = []
        self.clock, self.clock_step = time.perf_counter(), self.step

    def row(self, loss: float, validation: float | None) -> Row:
        per_step = self.batches.batch * self.batches.context * self.settings.accumulate
        seconds = max(1e-9, time.perf_counter() - self.clock)
        speed = (self.step - self.clock_step) * per_step / seconds
        lr = self.settings.lr_at(self.step)
        return Row(self.step, loss, validation, lr, self.norm, self.step * per_step, speed)

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Work that tokens per second leaves out."""
        start = time.perf_counter()
        yield
        self.clock += time.perf_counter() - start

    def save(self) -> None:
        if self.folder is None:
            return
        run = {name: _plain(getattr(self, name)) for name in _SAVED}
        with self.off_the_clock():
            packed = checkpoints.pack(self.model, self.optimiser, self.batches, self.settings, run)
            packed.state["about"] = self.about
            checkpoints.save(self.folder, packed, keep=self.keep)
        self.saved = self.step

    def restore(self) -> None:
        if self.folder is None:
            return
        # weights and two moments each, beside the checkpoint that is there until it is verified
        size = checkpoints.MARGIN + 2 * 3 * sum(p.nbytes for p in self.parameters)
        checkpoints.prepare(self.folder, size)
        checkpoints.sweep(self.folder)
        found = checkpoints.latest(self.folder)
        if found is None:
            return
        try:
            checkpoints.check_about(found, self.about)
            run = checkpoints.unpack(found, self.model, self.optimiser, self.batches, self.settings)
            self.step, self.pending = found.step, [float(x) for x in run["pending"]]
            self.last, self.norm = (
                math.nan if x is None else float(x) for x in (run["last"], run["norm"])
            )
            self.validation = None if run["validation"] is None else float(run["validation"])
        except ArgumentError:
            raise
        except _UNFIT as error:
            raise FileError(
                f"{self.folder}: the checkpoint of step {found.step} is not what a run saves: "
                f"{error_text(repr(error))}; "
                "remove its folder to go on from an older one"
            ) from error
        self.saved = self.step


_SAVED = ("step", "pending", "last", "norm", "validation")
_UNFIT = (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError)


def _plain(value: Any) -> Any:
    """None for what no number is yet: JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
