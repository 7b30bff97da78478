"""What several tests of mechanisms ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def no_gradients() -> Iterator[None]:
    """The test runs without gradients."""
    with torch.no_grad():
        yield
