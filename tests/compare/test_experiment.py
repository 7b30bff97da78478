"""Experiments are run once, kept whole, and found again; an interrupt loses the running one
only.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from regard.compare.experiment import Experiment, ExperimentStore, Session, format_duration
from regard.errors import ArgumentError, FileError


class Counted:
    """A measurement that counts how often it was made."""

    def __init__(self, value: Any = 1.5) -> None:
        self.value, self.times = value, 0

    def __call__(self) -> dict[str, Any]:
        self.times += 1
        return {"value": self.value}


def experiment(name: str, measure: Any, **settings: Any) -> Experiment:
    return Experiment(name, settings, measure)


def test_a_second_session_measures_nothing_again(tmp_path: Path) -> None:
    measures = [Counted(i) for i in range(3)]
    batch = [experiment(f"decode/{i}", m, n=i) for i, m in enumerate(measures)]
    first = Session(ExperimentStore(tmp_path / "kept"))
    found = first.run(batch[:2])
    second = Session(ExperimentStore(tmp_path / "kept"))
    assert second.run(batch) == {**found, "decode/2": {"value": 2}}
    assert [m.times for m in measures] == [1, 1, 1]
    assert (second.measured, second.reused) == (1, 2)
    assert len(list((tmp_path / "kept").iterdir())) == 3


def test_other_settings_are_another_measurement(tmp_path: Path) -> None:
    measure = Counted()
    for n in (1, 2, 1):
        Session(ExperimentStore(tmp_path)).run([experiment("sum", measure, n=n, sizes=(1, 2))])
    assert measure.times == 2
    assert experiment("sum", measure, n=1).key != experiment("sum", measure, n=2).key
    assert experiment("sum a/b", measure).key.startswith("sum-a-b.")


def test_an_interrupt_keeps_what_is_done(tmp_path: Path) -> None:
    def interrupted() -> dict[str, Any]:
        raise KeyboardInterrupt

    measure = Counted(7)
    session = Session(ExperimentStore(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        session.run([experiment("a", measure), experiment("b", interrupted)])
    assert session.results == {"a": {"value": 7}}
    again = Session(ExperimentStore(tmp_path))
    found = again.run([experiment("a", measure), experiment("b", Counted(8))])
    assert found == {"a": {"value": 7}, "b": {"value": 8}}
    assert measure.times == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"name": "a"}',
        '{"name": "b", "settings": {}, "numbers": {}}',
        '{"name": "a", "settings": {}, "numbers": 3}',
    ],
)
def test_a_damaged_file_counts_as_not_there(content: str, tmp_path: Path) -> None:
    measure = Counted(3)
    one = experiment("a", measure)
    (tmp_path / f"{one.key}.json").write_text(content)
    assert Session(ExperimentStore(tmp_path)).run([one]) == {"a": {"value": 3}}
    assert measure.times == 1
    kept = json.loads((tmp_path / f"{one.key}.json").read_text())
    assert (kept["numbers"], kept["settings"], kept["name"]) == ({"value": 3}, {}, "a")


def test_what_stands_beside_the_numbers(tmp_path: Path) -> None:
    Session(ExperimentStore(tmp_path, {"machine": {"cores": 2}})).run(
        [experiment("a", Counted(), n=4)]
    )
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_text())
    assert kept["machine"] == {"cores": 2}
    assert kept["schema"] == 1
    assert kept["seconds"] >= 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}])
def test_numbers_that_json_cannot_hold_are_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="a returned values that JSON cannot store"):
        Session(ExperimentStore(tmp_path)).run([experiment("a", Counted(value))])
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder_and_a_full_disk_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="is a file; give a folder in which measurements are saved"):
        ExperimentStore(tmp_path / "file")
    store, one = ExperimentStore(tmp_path / "gone"), experiment("a", Counted())
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / f"{one.key}.json").mkdir()  # what stands there cannot be replaced
    with pytest.raises(FileError, match="cannot be written"):
        store.write(one, {}, 0.0)
    assert [p for p in (tmp_path / "gone").iterdir() if str(os.getpid()) in p.name] == []


def test_names_tell_experiments_apart() -> None:
    with pytest.raises(ArgumentError, match="two experiments are named a; give each experiment a"):
        Session(ExperimentStore(None)).run(
            [experiment("a", Counted()), experiment("a", Counted(), n=1)]
        )


def test_time_left_follows_what_the_done_ones_took() -> None:
    now, told = [0.0], []

    def taking(seconds: float) -> Any:
        def measure() -> dict[str, Any]:
            now[0] += seconds
            return {}

        return measure

    session = Session(ExperimentStore(None), told.append, lambda: now[0])
    # expected 1, 1 and 2; the first takes 10, so that the others take 10 and 20
    session.run(
        [Experiment(n, {}, taking(s), e) for n, s, e in (("a", 10, 1), ("b", 30, 1), ("c", 1, 2))]
    )
    assert told == ["a (1/3)", "b (2/3, about 0:30 left)", "c (3/3, about 0:40 left)"]
    assert session.elapsed == 41


def test_clock() -> None:
    shown = [format_duration(s) for s in (0, 59.6, 3599, 3600, -1)]
    assert shown == ["0:00", "1:00", "59:59", "1:00:00", "0:00"]
