"""What tests of compiled CPU kernels share."""

from __future__ import annotations

import pytest

from regard.ops.cpu.instruction_sets import why_none
from regard.ops.cpu.library import has_kernels


def require_kernels() -> None:
    """Skip the module or test that calls this where no compiled kernels run, with the reason."""
    if not has_kernels():
        pytest.skip(str(why_none()), allow_module_level=True)


def require_backend(name: str) -> None:
    """Skip a test of a backend that is compiled where no compiled kernels run."""
    if name in ("cpu", "gemm"):
        require_kernels()
