"""An experiment as data and a function, the folder that keeps what it found, and the session that
runs many.
"""

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
from regard.files.strict import read_json
from regard.files.write import written

MAX_FILE_BYTES = 64 << 20
"""Bytes of a kept measurement, at most."""
SCHEMA = 1
"""Version of the files of measurements; it rises when a name in them changes its meaning."""

Numbers: TypeAlias = dict[str, Any]
"""What was found, as plain values: what JSON can hold, finite numbers only."""

ReportProgress: TypeAlias = Callable[[str], None]
"""Told what is being done, for a person who waits."""


def ignore_progress(_: str) -> None:
    """Tell nobody.

    >>> ignore_progress("decode/512")
    """


@dataclass(frozen=True)
class Experiment:
    """A measurement that can be run, kept, and found again.

    Attributes:
        name: what it is called in a run, such as "decode/8192" or "text/gqa/lr 0.003/seed 0".
        settings: plain values, all that the numbers depend on: a kept result counts when they are
            the same.
        measure: gives the numbers.
        seconds: how long it may take, as far as is known: only the relations between experiments
            matter.

    >>> one = Experiment("sum", {"n": 4}, lambda: {"sum": sum(range(4))})
    >>> one.measure(), one.key == Experiment("sum", {"n": 4}, dict).key
    ({'sum': 6}, True)
    """

    name: str
    settings: Mapping[str, Any]
    measure: Callable[[], Numbers] = field(repr=False, compare=False)
    seconds: float = 1.0

    @property
    def key(self) -> str:
        """A file name: the name in safe letters, and a hash of name and settings."""
        text = json.dumps([SCHEMA, self.name, self.settings], sort_keys=True, allow_nan=False)
        safe = re.sub(r"[^A-Za-z0-9.]+", "-", self.name).strip("-.")[:80]
        return f"{safe}.{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class ExperimentStore:
    """Finished measurements: each a JSON file of its own, written whole or not at all; without a
    folder, in memory only.

    Args:
        folder: where the files are; it is made when the first one is written.
        about: what is written beside each measurement, such as the machine.

    Raises:
        FileError: the folder is a file, or cannot be written.

    >>> store, one = ExperimentStore(None), Experiment("sum", {"n": 4}, lambda: {"sum": 6})
    >>> store.read(one)
    >>> store.write(one, one.measure(), 0.1)
    >>> store.read(one)
    {'sum': 6}
    """

    def __init__(self, folder: Path | None, about: Mapping[str, Any] | None = None) -> None:
        if folder is not None and folder.exists() and not folder.is_dir():
            raise FileError(f"{folder} is a file; give a folder for the measurements")
        self.folder, self.about = folder, dict(about or {})
        self._held: dict[str, Numbers] = {}

    def read(self, experiment: Experiment) -> Numbers | None:
        """The numbers of an experiment with these settings, or None: what is damaged counts as not
        there.
        """
        key = experiment.key
        if key in self._held or self.folder is None:
            return self._held.get(key)
        try:
            kept = read_json(self.folder / f"{key}.json", limit=MAX_FILE_BYTES)
            same = kept["name"] == experiment.name and kept["settings"] == _plain(
                experiment.settings
            )
            numbers = kept["numbers"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not same or not isinstance(numbers, dict):
            return None
        self._held[key] = numbers
        return numbers

    def write(self, experiment: Experiment, numbers: Numbers, seconds: float) -> None:
        """Keep the numbers of an experiment.

        Raises:
            ArgumentError: a number is NaN or infinite, or is no plain value.
            FileError: the disk refuses.
        """
        try:
            numbers = _plain(numbers)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"{experiment.name} gave numbers that JSON cannot hold: {error}; give finite "
                "plain values"
            ) from error
        self._held[experiment.key] = numbers
        if self.folder is None:
            return
        told = {
            "schema": SCHEMA,
            "name": experiment.name,
            "settings": experiment.settings,
            "numbers": numbers,
            "seconds": round(seconds, 3),
            **self.about,
        }
        path = self.folder / f"{experiment.key}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with written(path) as whole:
                whole.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n", "utf-8")
        except OSError as error:
            raise FileError(f"{path} cannot be written: {error.strerror or error}") from error


class Session:
    """Runs experiments one after another, and knows what came of all that are done.

    Args:
        store: what is there is not measured again.
        tell: told what begins, and how long the rest of its batch may take.
        clock: seconds, for tests.

    An interrupt leaves through `run`; `done` then holds whatever was finished, and `kept` the names
    of those that an earlier session had measured.

    >>> session = Session(ExperimentStore(None))
    >>> session.run([Experiment("sum", {"n": 4}, lambda: {"sum": 6})])
    {'sum': {'sum': 6}}
    >>> session.measured, session.reused
    (1, 0)
    """

    def __init__(
        self,
        store: ExperimentStore,
        tell: ReportProgress = ignore_progress,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.store, self.tell, self._clock = store, tell, format_duration
        self._start = format_duration()
        self.done: dict[str, Numbers] = {}
        self.kept: set[str] = set()
        self.measured, self.reused = 0, 0

    @property
    def elapsed(self) -> float:
        """Seconds since the session began."""
        return self._clock() - self._start

    def run(self, experiments: Sequence[Experiment]) -> dict[str, Numbers]:
        """The numbers of each, by name: kept ones at once, the others measured in their order.

        Raises:
            ArgumentError: two experiments have one name.
        """
        names = [one.name for one in experiments]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ArgumentError(
                f"two experiments are named {', '.join(twice)}; names tell them apart"
            )
        kept = {one.name: self.store.read(one) for one in experiments}
        self.kept |= {n for n, found in kept.items() if found is not None and n not in self.done}
        self.done.update({name: found for name, found in kept.items() if found is not None})
        self.reused += sum(found is not None for found in kept.values())
        todo = [one for one in experiments if kept[one.name] is None]
        expected, taken = 0.0, 0.0
        for i, one in enumerate(todo):
            rest = sum(other.seconds for other in todo[i:])
            left = (
                "" if not expected else f", about {format_duration(taken / expected * rest)} left"
            )
            self.tell(
                f"{one.name} ({len(experiments) - len(todo) + i + 1}/{len(experiments)}{left})"
            )
            start = self._clock()
            numbers = one.measure()
            seconds = self._clock() - start
            self.done[one.name] = numbers
            self.store.write(one, numbers, seconds)
            self.measured += 1
            expected, taken = expected + one.seconds, taken + seconds
        return {name: self.done[name] for name in names}


def format_duration(seconds: float) -> str:
    """Minutes and seconds, or hours too.

    >>> format_duration(75), format_duration(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _plain(values: Any) -> Any:
    """Return the values as they come back from a JSON file."""
    return json.loads(json.dumps(values, allow_nan=False))
