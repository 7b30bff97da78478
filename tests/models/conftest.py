"""What tests of models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.models.step_models import counted_steps


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of threads of every compiled step that runs."""
    with counted_steps(monkeypatch) as counted:
        yield counted
