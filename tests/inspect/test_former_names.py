"""Former public names of `regard.inspect` work for one release, with a warning."""

import importlib
from typing import Any

import pytest
import torch

import regard
from regard.inspect import Recording, explain, measure
from tests.inspect.small_model import TEXT, model


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("regard.inspect", "MOST_TOKENS", "MAX_PATTERN_TOKENS"),
        ("regard.inspect", "Selection", "RecordingOptions"),
        ("regard.inspect", "Step", "ComputationStep"),
        ("regard.inspect", "Top", "TopKeys"),
        ("regard.inspect", "Words", "PretokenizedInput"),
        ("regard.inspect.record", "Selection", "RecordingOptions"),
        ("regard.inspect.metrics", "SINKS", "NUM_SINKS"),
        ("regard.inspect.explain", "MOST_TOKENS", "MAX_PATTERN_TOKENS"),
        ("regard.inspect.explain", "Step", "ComputationStep"),
    ],
)
def test_former_names_of_modules(module: str, old: str, new: str) -> None:
    # the function explain hides the package of its name
    home: Any = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{old} is now .*{new}"):
        value = getattr(home, old)
    assert value is getattr(home, new)


def test_former_names_of_recordings() -> None:
    with regard.inspect.Recorder() as recorder:
        regard.attend(*[torch.eye(3)[None, None]] * 3)
    recording = recorder.recording(note="x")
    place = recording[0]
    for owner, old, new in (
        (recording, "about", "metadata"),
        (recorder, "met", "seen_places"),
        (place, "held", "key_kind"),
        (place, "plain", "has_one_key_per_column"),
    ):
        with pytest.warns(DeprecationWarning, match=f"{old} is now"):
            value = getattr(owner, old)
        assert value == getattr(owner, new)
    with pytest.warns(DeprecationWarning, match="Place.at is now Place.head_index"):
        assert place.at(0) == 0
    with pytest.warns(DeprecationWarning, match="Recorder.lacking is now"):
        assert recorder.lacking() == ""
    with pytest.warns(DeprecationWarning, match=r"\(about=\) is now .*\(metadata=\)"):
        again = Recording(recording.places, about={"note": "x"})  # type: ignore[call-arg]
    assert again.metadata == recording.metadata
    with pytest.warns(DeprecationWarning, match=r"measure\(near=\)"):
        former = measure(place, near=2)  # type: ignore[call-arg]
    assert former.values["local"].equal(measure(place, local_distance=2).values["local"])


def test_former_names_of_explanations() -> None:
    found = explain(model(), TEXT)
    with pytest.warns(DeprecationWarning, match="elsewhere is now"):
        assert found.elsewhere is found.counterfactuals
    with pytest.warns(DeprecationWarning, match="keys_are is now"):
        assert found.keys_are == found.key_kind
