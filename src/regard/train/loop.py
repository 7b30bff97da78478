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

import torch
from torch import nn

from regard.errors import ArgumentError, FileError, RegardError
from regard.files.atomic_write import folder_locked
from regard.train import checkpoints
from regard.train.batches import BatchSource, ExampleBatch
from regard.train.context_parallel import ContextParallel
from regard.train.losses import Loss, evaluate, next_token_loss
from regard.train.progress import CsvLog, LogRow, Progress
from regard.train.settings import Settings, make_optimizer
from regard.untrusted_text import error_text


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Catch SIGINT and SIGTERM in a block of the main thread, which alone gets signals.

    A second signal exits with 128 + its number.
    """
    caught: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if caught:
            raise SystemExit(128 + number)
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    former_handlers = {
        number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield caught
    finally:
        for number, handler in former_handlers.items():
            signal.signal(number, handler)


class NonFiniteLoss(RegardError, FloatingPointError):
    """The loss or its gradient is NaN or infinite. The weights were not changed by that step."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run.

    Args:
        loss: the loss of the last step, in nats.
        validation: the last validation loss; None without validation.
        stopped_by: the signal that stopped the run, or None.

    >>> TrainResult(step=5, loss=1.0, validation=None, stopped_by=None).step
    5
    """

    step: int
    loss: float
    validation: float | None
    stopped_by: int | None


def fit(
    model: nn.Module,
    batches: BatchSource,
    settings: Settings,
    *,
    validation: ExampleBatch | None = None,
    loss: Loss | None = None,
    folder: str | Path | None = None,
    log: str | Path | None = None,
    progress: Progress | None = None,
    keep: int = 2,
    metadata: Mapping[str, object] | None = None,
    parallel: ContextParallel | None = None,
) -> TrainResult:
    """Train a model in place, from the newest valid checkpoint in `folder` if there is one.

    On a CPU, a run that was stopped and resumed is bitwise identical to an uninterrupted one:
    weights, optimizer, torch's random state, data order and log. After Ctrl-C or SIGTERM the
    current step is finished and saved, and the function returns; a second signal exits at once.

    Args:
        model: the model to train; its loss is `loss(model, rows)`.
        validation: examples on which the loss is measured every `settings.validate_every` steps.
        loss: a function that returns the mean loss of one batch; None is `next_token_loss`.
        folder: the folder for checkpoints; None saves none.
        log: the CSV file of the log; None writes none.
        keep: how many of the newest checkpoints are kept in the folder.
        metadata: plain values that describe the model. A checkpoint with other metadata is refused.
        parallel: the ranks over which the tokens of each row are divided; None is one process.
            Every rank makes the same call, and the first one writes the files.

    Returns:
        The last step, its losses, and the signal that stopped the run, if any.

    Raises:
        NonFiniteLoss: the loss or its gradient is not finite. It is raised before the optimizer's
            step. The last checkpoint is not changed, and the log has a row for the step.
        ArgumentError: the checkpoint in `folder` belongs to a run with other settings, weights,
            data or metadata.
        FileError: a checkpoint or the log cannot be written, another run writes in `folder`, or its
            checkpoint has content that no run saves.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    >>> from regard.train.batches import Batches
    >>> batches = Batches(torch.arange(90) % 9, batch=4, context=8)
    >>> fit(model, batches, Settings(steps=3)).step
    3
    """
    if loss is None:
        loss = next_token_loss if parallel is None else parallel.next_token_loss
    run = _TrainingLoop(model, batches, settings, loss, folder, keep, metadata, parallel)
    with ExitStack() as stack:
        if folder is not None and run.writes:
            checkpoints.check_free_space(folder, 0)
            stack.enter_context(folder_locked(Path(folder)))
        run.restore()
        csv_log = CsvLog(log, after_step=run.step) if log and run.writes else None
        for part in (progress, csv_log):
            if part is not None:
                stack.callback(part.close)
        with catch_signals() as caught:
            return run.train(validation, caught, csv_log, progress)


class _TrainingLoop:
    """One run: its state, of which a checkpoint stores `_SAVED_ATTRIBUTES`, and its clock."""

    def __init__(
        self,
        model: nn.Module,
        batches: BatchSource,
        settings: Settings,
        loss: Loss,
        folder: str | Path | None,
        keep: int,
        metadata: Mapping[str, object] | None,
        parallel: ContextParallel | None,
    ) -> None:
        self.model, self.batches, self.settings, self.loss = model, batches, settings, loss
        self.folder, self.keep, self.metadata = folder, keep, metadata
        self.parallel, self.writes = parallel, parallel is None or parallel.is_first
        self.optimizer = make_optimizer(model, settings)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        self.step, self.saved_step = 0, -1
        self.pending: list[float] = []
        self.last, self.norm = math.nan, math.nan
        self.validation: float | None = None
        self.clock, self.clock_step = time.perf_counter(), 0

    def train(
        self,
        validation: ExampleBatch | None,
        caught: list[int],
        log: CsvLog | None,
        progress: Progress | None,
    ) -> TrainResult:
        """Train until the last step or a signal."""
        settings = self.settings
        self.model.train()
        self.clock, self.clock_step = time.perf_counter(), self.step
        rows = None if validation is None else validation.to(self.device)
        while self.step < settings.steps and not self.stop_signal(caught):
            try:
                self.run_step()
            except NonFiniteLoss:
                if log:
                    log.write(self.row(self.last, None))
                raise
            if progress:
                progress.step(self.row(self.last, self.validation))
            measured = rows is not None and self.is_due(settings.validate_every)
            if rows is not None and measured:
                self.validate(rows)
            if measured or self.is_due(settings.log_every):
                self.report(log, progress, self.validation if measured else None)
            if self.is_due(settings.save_every):
                self.save()
        stopped_by = self.stop_signal(caught)
        if stopped_by and self.saved_step != self.step:
            self.save()
        return TrainResult(self.step, self.last, self.validation, stopped_by or None)

    def stop_signal(self, caught: list[int]) -> int:
        """Return the signal that this or another rank has caught, or 0."""
        number = caught[0] if caught else 0
        return number if self.parallel is None else self.parallel.largest(number)

    def is_due(self, every: int) -> bool:
        """Return whether the current step is a multiple of `every`, or the last step."""
        return self.step % every == 0 or self.step == self.settings.steps

    def run_step(self) -> None:
        """Run one optimizer step: accumulate gradients, clip them, and update the weights."""
        settings, step, total = self.settings, self.step + 1, 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr_at(step)
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(settings.accumulate):
            rows = next(self.batches).to(self.device)
            with self.autocast():
                loss = self.loss(self.model, rows) / settings.accumulate
            total += loss.item()
            self.check_finite("loss", total, step, total)
            torch.autograd.backward(loss)
        if self.parallel is not None:
            self.parallel.sum_gradients(self.parameters)
        self.norm = nn.utils.clip_grad_norm_(self.parameters, settings.clip).item()
        self.check_finite("gradient norm", self.norm, step, total)
        self.optimizer.step()
        self.step, self.last = step, total
        self.pending.append(total)

    def check_finite(self, quantity: str, value: float, step: int, loss: float) -> None:
        """Raise `NonFiniteLoss` if a value is NaN or infinite."""
        if math.isfinite(value):
            return
        self.step, self.last = step, loss  # for the last row of the log; nothing is saved after it
        checkpoint = (
            f"the checkpoint of step {self.saved_step} is kept"
            if self.saved_step >= 0
            else "no checkpoint was saved yet"
        )
        raise NonFiniteLoss(
            f"{quantity} is {value} at step {step}; the weights were not updated and {checkpoint}: "
            "lower lr, lengthen warmup or check the data"
        )

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of the settings."""
        return (
            torch.autocast(self.device.type, torch.bfloat16)
            if self.settings.bf16
            else nullcontext()
        )

    def validate(self, rows: ExampleBatch) -> None:
        """Measure the loss on the validation rows."""
        with self.pause_clock(), self.autocast():
            self.validation = evaluate(self.model, rows, batch=self.batches.batch, loss=self.loss)

    def report(
        self, log: CsvLog | None, progress: Progress | None, validation: float | None
    ) -> None:
        """Write a row of the log with the mean loss since the last row, and start a new mean."""
        row = self.row(math.fsum(self.pending) / len(self.pending), validation)
        if log:
            log.write(row)
        if progress:
            progress.row(row)
        self.pending = []
        self.clock, self.clock_step = time.perf_counter(), self.step

    def row(self, loss: float, validation: float | None) -> LogRow:
        """Return a row of the log for the current step."""
        per_step = self.batches.batch * self.batches.context * self.settings.accumulate
        seconds = max(1e-9, time.perf_counter() - self.clock)
        speed = (self.step - self.clock_step) * per_step / seconds
        lr = self.settings.lr_at(self.step)
        return LogRow(self.step, loss, validation, lr, self.norm, self.step * per_step, speed)

    @contextmanager
    def pause_clock(self) -> Iterator[None]:
        """Exclude the time of a block from the tokens per second."""
        start = time.perf_counter()
        yield
        self.clock += time.perf_counter() - start

    def save(self) -> None:
        """Save a checkpoint of the current step, if there is a folder."""
        if self.folder is None:
            return
        run = {name: _none_if_not_finite(getattr(self, name)) for name in _SAVED_ATTRIBUTES}
        with self.pause_clock():
            if self.writes:
                packed = checkpoints.pack(
                    self.model, self.optimizer, self.batches, self.settings, run
                )
                packed.state["metadata"] = self.metadata
                checkpoints.save(self.folder, packed, keep=self.keep)
            if self.parallel is not None:
                self.parallel.wait()  # until the checkpoint is complete
        self.saved_step = self.step

    def restore(self) -> None:
        """Restore the state of the newest valid checkpoint, if there is one."""
        if self.folder is not None:
            if self.writes:
                self.check_space(self.folder)
            if self.parallel is not None:
                self.parallel.wait()
            checkpoint = checkpoints.latest(self.folder)
            if checkpoint is not None:
                self.restore_from(checkpoint)
        if self.parallel is not None:
            self.parallel.agree(
                {
                    "the step": self.step,
                    "the settings": self.settings,
                    "the data": self.batches.state_dict(),
                    "the metadata": self.metadata,
                }
            )

    def check_space(self, folder: str | Path) -> None:
        """Check the space for checkpoints; locking has removed what a killed run left."""
        # AdamW has two moments per weight. The old checkpoint is deleted only after the new one is
        # verified, so that there must be space for two.
        size = checkpoints.EXTRA_BYTES + 2 * 3 * sum(p.nbytes for p in self.parameters)
        checkpoints.check_free_space(folder, size)

    def restore_from(self, checkpoint: checkpoints.TrainingCheckpoint) -> None:
        """Restore the state of a checkpoint."""
        try:
            checkpoints.check_metadata(checkpoint, self.metadata)
            run = checkpoints.unpack(
                checkpoint, self.model, self.optimizer, self.batches, self.settings
            )
            self.step, self.pending = checkpoint.step, [float(x) for x in run["pending"]]
            self.last, self.norm = (
                math.nan if x is None else float(x) for x in (run["last"], run["norm"])
            )
            self.validation = None if run["validation"] is None else float(run["validation"])
        except ArgumentError:
            raise
        except _INVALID_STATE_ERRORS as error:
            raise FileError(
                f"{self.folder}: the checkpoint of step {checkpoint.step} has content that no run "
                f"saves: {error_text(repr(error))}; remove its folder to resume from an older one"
            ) from error
        self.saved_step = self.step


_SAVED_ATTRIBUTES = ("step", "pending", "last", "norm", "validation")
_INVALID_STATE_ERRORS = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    RuntimeError,
    OverflowError,
)


def _none_if_not_finite(value: object) -> object:
    """Return a value, or None for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
