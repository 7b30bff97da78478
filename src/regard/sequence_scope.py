"""The scope in which attention modules run on a sequence that lies on several ranks.

`regard.parallel.sequence` opens such a scope in this thread. `attend` and `Mixer` ask for it and,
if one is open, pass their call to it instead of computing on this rank's tokens alone.
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
    from regard.ops.softmax.call import Call, KernelResult
    from regard.span import Positions


class SequenceScope(Protocol):
    """What runs the calls of a thread while its scope is open."""

    def own_positions(self) -> Tensor:
        """Return the positions of this rank's tokens, int64 [1, T], in the order of its tensors."""

    def run_attention(self, call: Call, backend: str) -> KernelResult:
        """Run an attention call.

        Args:
            call: a checked `regard.ops.softmax.Call` with this rank's queries, keys and values.
            backend: the name of the kernel, or "auto".

        Returns:
            The `regard.ops.softmax.KernelResult` of this rank's queries over the keys of all ranks.
        """

    def run_mixer(
        self,
        mixer: Mixer,
        x: Tensor,
        positions: Positions | None,
        cache: Cache | None,
        backend: str,
    ) -> Tensor:
        """Run an attention mechanism on this rank's tokens.

        Args:
            mixer: the mechanism, a `regard.nn.mixer.Mixer`.
            x: hidden states [B, T, M].
            positions: the positions of the tokens, or None.
            cache: the cache of the layer, or None.
            backend: the name of a kernel or form, or "auto".

        Returns:
            The mixed states [B, T, M2].
        """

    def append_tokens(
        self,
        decoder: Callable[..., Tensor],
        caches: Sequence[Cache],
        ids: Tensor,
        positions: Positions | None,
        progress: object,
    ) -> tuple[Tensor, object]:
        """Read tokens of a generation that continue those before.

        Args:
            decoder: the network, called as decoder(ids, positions, caches, last=1).
            caches: this rank's caches, one per layer.
            ids: ids [B, T], the same on every rank.
            positions: their positions; None continues the tokens before.
            progress: what the last call returned, or None at the beginning.

        Returns:
            The logits [B, V] after the last token, the same on every rank, and the progress.
        """


class _ThreadScope(threading.local):
    """The open scope of one thread."""

    def __init__(self) -> None:
        # set for each thread, because the compiler does not guard class attributes
        self.scope: SequenceScope | None = None


_state = _ThreadScope()


def current_scope() -> SequenceScope | None:
    """Return the scope that is open in this thread, or None.

    >>> current_scope() is None
    True
    """
    return _state.scope


@contextmanager
def use_scope(scope: SequenceScope | None) -> Iterator[None]:
    """Open a scope in this thread; None closes the open one while the block runs.

    Args:
        scope: the scope that runs the calls of the block, or None to compute them on this rank.
    """
    before = _state.scope
    _state.scope = scope
    try:
        yield
    finally:
        _state.scope = before
