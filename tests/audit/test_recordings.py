"""The audit of recordings: sound numbers pass, and planted faults are found at their place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import regard
from regard.errors import ArgumentError
from regard.inspect import Recorder, Recording, audit


def recorded() -> Recording:
    """Two places of causal attention."""
    make = torch.Generator().manual_seed(3)
    recorder = Recorder()
    for name in ("first", "second"):
        q, k, v = (torch.randn(1, 2, 9, 4, generator=make) for _ in range(3))
        with recorder, regard.tracing.named_scope(name):
            regard.attend(q, k, v, mask=regard.masks.Causal())
    return recorder.recording()


def planted(**change: Any) -> Recording:
    """The recording with another step at the second place."""
    recording = recorded()
    (step,) = recording["second"].steps
    values = {name: x(getattr(step, name)) for name, x in change.items()}
    place = replace(recording["second"], steps=(replace(step, **values),))
    return replace(recording, places={**recording.places, "second": place})


def test_a_sound_recording_passes() -> None:
    report = audit(recorded())
    assert report.clean
    assert report.exit_code == 0
    assert [check.name for check in report.passed] == ["first", "second"]
    assert "rows sum to 1 and outputs" in report.passed[0].description
    assert "9 of 9 rows" in report.passed[0].description


@pytest.mark.parametrize(
    "change, fault, words",
    [
        ({"scale": lambda x: 2 * x}, "weights-sum", "the scale was"),
        ({"mask": lambda _: regard.masks.Full()}, "weights-sum", ""),
        ({"lse": lambda x: x + 0.5}, "weights-sum", "by the constant 0.5"),
        ({"out": torch.zeros_like}, "definition-differs", "was not written"),
        ({"out": lambda x: x.flip(1)}, "definition-differs", "not the weighted sum"),
        ({"lse": lambda x: torch.full_like(x, torch.nan)}, "weights-sum", "lse is NaN"),
    ],
)
def test_planted_faults_are_found_at_their_place(
    change: dict[str, Any], fault: str, words: str
) -> None:
    report = audit(planted(**change))
    assert report.names == (fault,)
    (found,) = report.findings
    assert found.example["place"] == "second"
    assert words in found.example["found"]
    assert [check.name for check in report.passed] == ["first"]
    accepted = audit(planted(**change), accept=[fault])
    assert accepted.clean
    assert [x.name for x in accepted.accepted] == [fault]


def test_what_was_not_kept_is_not_passed() -> None:
    report = audit(planted(out=lambda _: None))
    assert report.clean
    assert [check.name for check in report.not_tried] == ["output", "call arguments"]
    assert str(report.not_tried[0].why).startswith("1 places kept no output")
    assert report.complete
    assert report.passed[1].description.startswith("rows sum to 1:")


def test_claims_about_calls_are_refused() -> None:
    for name, claim in (("heads", {"heads": 2}), ("dtype", {"dtype": torch.float16})):
        with pytest.raises(ArgumentError, match=f"{name} is .* which is about a call"):
            audit(recorded(), **claim)
