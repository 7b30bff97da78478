"""The scope in which attention modules run on a sequence that lies on several ranks: where
`regard.parallel.sequence` opened one, `attend` and `Mixer` pass their call to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from regard.caches import Cache
    from regard.nn.mixer import Mixer
    from regard.ops.softmax.call import Call
    from regard.ops.softmax.kernel import KernelResult
    from regard.span import Positions


class SequenceScope(Protocol):
    """What runs the calls of a thread while its scope is open."""

    def own_positions(self) -> Tensor:
        """Return the positions of this rank's tokens, int64 [1, T], in the order of its tensors."""

    def run_attention(self, call: Call, backend: str) -> KernelResult:
        """Run one attention call of this rank."""

    def run_mixer(
        self,
        mixer: Mixer,
        x: Tensor,
        positions: Positions | None,
        cache: Cache | None,
        backend: str,
    ) -> Tensor:
        """Run an attention mechanism on this rank's tokens."""

    def append_tokens(
        self,
        decoder: Callable[..., Tensor],
        caches: Sequence[Cache],
        ids: Tensor,
        positions: Positions | None,
        progress: object,
    ) -> tuple[Tensor, object]:
        """Read tokens of a generation that continue those before."""


class _ThreadScope(threading.local):
    """The open scope of one thread."""

    def __init__(self) -> None:
        # set for each thread, because the compiler does not guard class attributes
        self.scope: SequenceScope | None = None


_state = _ThreadScope()


def current_scope() -> SequenceScope | None:
    """Return the scope that is open in this thread, or None."""
    return _state.scope


@contextmanager
def use_scope(scope: SequenceScope | None) -> Iterator[None]:
    """Open a scope in this thread; None closes the open one while the block runs."""
    before = _state.scope
    _state.scope = scope
    try:
        yield
    finally:
        _state.scope = before
