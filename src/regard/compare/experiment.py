"""Experiments as data with a function, their stored results, and their session."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from regard.errors import ArgumentError, FileError
from regard.files.atomic_write import write_atomically
from regard.files.reading import read_json
from regard.language import translate

MAX_FILE_BYTES = 64 << 20
"""The maximum size in bytes of a saved measurement."""
SCHEMA = 1
"""Version of the files of measurements; it is increased when a name in them changes its meaning."""

Numbers: TypeAlias = dict[str, Any]
"""The result of an experiment as plain values that JSON can store; numbers are finite."""

ReportProgress: TypeAlias = Callable[[str], None]
"""A function that is called with a line of text about the current work, for a user who waits."""


def ignore_progress(_: str) -> None:
    """Ignore a line about the progress of the work.

    >>> ignore_progress("decode/512")
    """


@dataclass(frozen=True)
class Experiment:
    """A measurement that can be run, saved, and found again.

    Args:
        name: its name in a run, such as "decode/8192" or "text/gqa/lr 0.003/seed 0".
        settings: plain values that determine the numbers; a saved result is used only if they are
            equal.
        measure: a function that returns the numbers.
        seconds: an estimate of how long it takes; only the ratios between experiments matter.

    >>> one = Experiment("sum", {"n": 4}, lambda: {"sum": sum(range(4))})
    >>> one.measure(), one.key == Experiment("sum", {"n": 4}, dict).key
    ({'sum': 6}, True)
    """

    name: str
    settings: Mapping[str, object]
    measure: Callable[[], Numbers] = field(repr=False, compare=False)
    seconds: float = 1.0

    @property
    def key(self) -> str:
        """The name of the file without ".json": the experiment's name in safe letters, and a hash
        of name and settings.
        """
        text = json.dumps([SCHEMA, self.name, self.settings], sort_keys=True, allow_nan=False)
        safe = re.sub(r"[^A-Za-z0-9.]+", "-", self.name).strip("-.")[:80]
        return f"{safe}.{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class ExperimentStore:
    """Finished measurements, each in a JSON file of its own; without a folder, they are in memory
    only.

    A file is written completely or not at all.

    Args:
        folder: the folder of the files; it is created when the first file is written.
        metadata: plain values that are written beside each measurement, such as the machine.

    Raises:
        FileError: the folder is a file, or cannot be written.

    >>> store, one = ExperimentStore(None), Experiment("sum", {"n": 4}, lambda: {"sum": 6})
    >>> store.read(one)
    >>> store.write(one, one.measure(), 0.1)
    >>> store.read(one)
    {'sum': 6}
    """

    def __init__(self, folder: Path | None, metadata: Mapping[str, object] | None = None) -> None:
        if folder is not None and folder.exists() and not folder.is_dir():
            raise FileError(f"{folder} is a file; give a folder in which measurements are saved")
        self.folder, self.metadata = folder, dict(metadata or {})
        self._by_key: dict[str, Numbers] = {}

    def read(self, experiment: Experiment) -> Numbers | None:
        """Return the numbers of an experiment with these settings, or None if there are none.

        A damaged file counts as missing.

        Args:
            experiment: the experiment whose name and settings are looked up.

        Returns:
            The numbers that were saved, or None.
        """
        key = experiment.key
        if key in self._by_key or self.folder is None:
            return self._by_key.get(key)
        try:
            saved = read_json(self.folder / f"{key}.json", limit=MAX_FILE_BYTES)
            is_same = saved["name"] == experiment.name and saved["settings"] == _through_json(
                experiment.settings
            )
            numbers = saved["numbers"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not is_same or not isinstance(numbers, dict):
            return None
        self._by_key[key] = numbers
        return numbers

    def write(self, experiment: Experiment, numbers: Numbers, seconds: float) -> None:
        """Save the numbers of an experiment.

        Args:
            seconds: how long it took.

        Raises:
            ArgumentError: a number is NaN or infinite, or a value is not a plain value.
            FileError: the file cannot be written.
        """
        try:
            numbers = _through_json(numbers)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"{experiment.name} returned values that JSON cannot store: {error}; return finite "
                "numbers, strings, lists and dictionaries"
            ) from error
        self._by_key[experiment.key] = numbers
        if self.folder is None:
            return
        contents = {
            "schema": SCHEMA,
            "name": experiment.name,
            "settings": experiment.settings,
            "numbers": numbers,
            "seconds": round(seconds, 3),
            **self.metadata,
        }
        path = self.folder / f"{experiment.key}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with write_atomically(path) as temporary:
                temporary.write_text(
                    json.dumps(contents, indent=1, allow_nan=False) + "\n", "utf-8"
                )
        except OSError as error:
            raise FileError(f"{path} cannot be written: {error.strerror or error}") from error


class Session:
    """Runs experiments one after another, and holds the results of all that are finished.

    `results` maps the name of each finished experiment to its result, also after an interrupt.
    `reused_names` has the names of those experiments whose results were read from the store.

    Args:
        store: the saved results; an experiment that is in it is not run again.
        report: a function that is called with a line when an experiment starts: its name, and an
            estimate of the remaining time.
        clock: a function that returns the time in seconds; tests replace it.

    >>> session = Session(ExperimentStore(None))
    >>> session.run([Experiment("sum", {"n": 4}, lambda: {"sum": 6})])
    {'sum': {'sum': 6}}
    >>> session.measured, session.reused
    (1, 0)
    """

    def __init__(
        self,
        store: ExperimentStore,
        report: ReportProgress = ignore_progress,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.store, self.report, self._clock = store, report, clock
        self._start = clock()
        self.results: dict[str, Numbers] = {}
        self.reused_names: set[str] = set()
        self.measured, self.reused = 0, 0

    @property
    def elapsed(self) -> float:
        """Seconds since the session was created."""
        return self._clock() - self._start

    def run(self, experiments: Sequence[Experiment]) -> dict[str, Numbers]:
        """Return the numbers of each experiment by name; saved ones are read, the others are
        measured in their order.

        Args:
            experiments: experiments with different names.

        Returns:
            The numbers of each experiment, by its name.

        Raises:
            ArgumentError: two experiments have the same name.
        """
        names = [experiment.name for experiment in experiments]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ArgumentError(
                f"two experiments are named {', '.join(duplicates)}; give each experiment a name "
                "of its own"
            )
        looked_up = {experiment.name: self.store.read(experiment) for experiment in experiments}
        saved = {name: numbers for name, numbers in looked_up.items() if numbers is not None}
        self.reused_names |= saved.keys() - self.results.keys()
        self.results |= saved
        self.reused += len(saved)
        missing = [experiment for experiment in experiments if experiment.name not in saved]
        finished_estimate, measured_seconds = 0.0, 0.0
        for i, experiment in enumerate(missing):
            remaining = sum(other.seconds for other in missing[i:])
            estimate = ""
            if finished_estimate:
                left = format_duration(measured_seconds / finished_estimate * remaining)
                estimate = translate(", about {left} left", left=left)
            place = f"{len(saved) + i + 1}/{len(experiments)}"
            self.report(f"{experiment.name} ({place}{estimate})")
            start = self._clock()
            numbers = experiment.measure()
            seconds = self._clock() - start
            self.results[experiment.name] = numbers
            self.store.write(experiment, numbers, seconds)
            self.measured += 1
            finished_estimate += experiment.seconds
            measured_seconds += seconds
        return {name: self.results[name] for name in names}


def format_duration(seconds: float) -> str:
    """Return a duration as minutes and seconds, or as hours, minutes and seconds."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _through_json(values: object) -> Any:
    """Return the values as they are after writing them to JSON and reading them again."""
    return json.loads(json.dumps(values, allow_nan=False))
