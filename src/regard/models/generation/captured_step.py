"""`CapturedSession`: the decoding step of a model, captured once as a CUDA graph and run again for
every token, so that Python starts one launch and not one for each operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.caches import Cache
from regard.caches.base import StaticSize
from regard.caches.joined import Joined
from regard.caches.static import to_static
from regard.errors import ArgumentError
from regard.models.decoder import Decoder
from regard.models.generation.decode_session import DecodeSession
from regard.sequence_scope import current_scope
from regard.tracing import is_tracing
from regard.units import plural

WARM_UP_STEPS = 3
"""How many steps run without capture first, so that kernels are compiled and libraries have their
workspaces; `torch.cuda.make_graphed_callables` runs as many. They are steps of the text.
"""

Step: TypeAlias = Callable[[], Tensor]
"""A decoding step on memory that stays where it is, which returns the logits."""


class StepRecorder(Protocol):
    """How a step is captured: `CudaGraphRecorder`, or what stands for a device in tests."""

    def warm_up(self, step: Step) -> Tensor:
        """Run a step without capture, and return its logits."""
        ...

    def record(self, step: Step) -> tuple[Callable[[], None], Tensor]:
        """Capture a step without running it."""
        ...


class CudaGraphRecorder:
    """Captures a step as a `torch.cuda.CUDAGraph`, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def warm_up(self, step: Step) -> Tensor:
        """Run a step on the stream that captures later, and let the present stream wait for it."""
        with torch.cuda.device(self._device):
            present = torch.cuda.current_stream()
            self._stream.wait_stream(present)
            with torch.cuda.stream(self._stream):
                logits = step()
            present.wait_stream(self._stream)
            logits.record_stream(present)
        return logits

    def record(self, step: Step) -> tuple[Callable[[], None], Tensor]:
        """Capture a step, which torch refuses if the step waits for the device."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self._device), torch.cuda.graph(graph, stream=self._stream):
                logits = step()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ArgumentError(
                f"cuda_graph cannot capture the step of this model: {reason}; leave cuda_graph out",
                argument="cuda_graph",
            ) from error
        return graph.replay, logits


class CapturedSession:
    """A `DecodeSession` that has read its prompts, as one captured step with static caches.

    The first steps run without capture, the next one is captured, and later ones run from the
    graph, in the same memory. Finished rows stay in it, and what they compute is not returned.

    Args:
        session: a session that has read the prompts; its caches are copied.
        steps: the largest number of steps.
        recorder: how a step is captured; None is a CUDA graph.

    Raises:
        ArgumentError: as in `check_captured`; more steps are asked for; a trace is open in a step.

    Source: CUDA graphs and their capture are described at
    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    @torch.inference_mode()
    def __init__(
        self, session: DecodeSession, steps: int, recorder: StepRecorder | None = None
    ) -> None:
        check_captured(session, has_recorder=recorder is not None)
        decoder, caches, device = session.decoder, session.caches, session.device
        rows = max((cache.batch or 1 for cache in caches), default=1)
        length = max(map(_token_count, caches))
        self.device = device
        self._decoder, self._steps = decoder, steps
        self._size = StaticSize(length + steps, rows, device)
        self._caches = to_static(caches, self._size)
        self._ids = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._active: Tensor | None = None  # rows that are not finished; None is all
        self._recorder = CudaGraphRecorder(device) if recorder is None else recorder
        self._replay: Callable[[], None] | None = None
        self._logits = self._ids
        self._done = 0

    @property
    def caches(self) -> Sequence[Cache]:
        """The static caches, one per layer."""
        return self._caches

    @property
    def bytes(self) -> int:
        """The number of bytes in the caches of all layers."""
        return sum(cache.bytes for cache in self._caches)

    @property
    def is_captured(self) -> bool:
        """Whether the step has been captured."""
        return self._replay is not None

    @torch.inference_mode()
    def append(self, ids: Int[Tensor, "B 1"]) -> Float[Tensor, "B V"]:
        """Read one token per row that is not finished, and return the logits after it.

        Args:
            ids: token ids [B, 1], of the rows that are left.

        Returns:
            Logits [B, V], valid until the next step.
        """
        if is_tracing():
            raise ArgumentError(
                "a trace is open, and a captured step runs without the code that reports to it; "
                "leave cuda_graph out, or close the trace",
                argument="cuda_graph",
            )
        rows = len(self._ids) if self._active is None else len(self._active)
        if tuple(ids.shape) != (rows, 1):
            raise ArgumentError(
                f"ids are {tuple(ids.shape)}; they must be ({rows}, 1), one token for each row "
                "that is left"
            )
        if self._done == self._steps:
            raise ArgumentError(
                f"this captured step has run {plural(self._steps, 'step')}, for which its caches "
                "have room; ask for more steps at the beginning"
            )
        if self._active is None:
            self._ids.copy_(ids)
        else:
            self._ids.index_copy_(0, self._active, ids)
        if self._done < WARM_UP_STEPS:
            logits = self._recorder.warm_up(self._step)
        else:
            if self._replay is None:
                self._replay, self._logits = self._recorder.record(self._step)
            self._replay()
            logits = self._logits
        self._done += 1
        return logits if self._active is None else logits.index_select(0, self._active)

    @torch.inference_mode()
    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Leave out the rows that are finished.

        Args:
            rows: indices of the rows that stay, in ascending order.
        """
        active = (
            torch.arange(len(self._ids), device="cpu")
            if self._active is None
            else self._active.cpu()
        )
        self._active = active[rows.cpu()].to(self.device)

    @torch.inference_mode()
    def refill(self, session: DecodeSession) -> None:
        """Start again from another session that has read its prompts, in the memory of the captured
        step.

        Args:
            session: a session of the same decoder, with as many rows, and no more tokens.
        """
        length, most = max(map(_token_count, session.caches)), self._size.slots - self._steps
        if length > most:
            raise ArgumentError(
                f"the other session has read {plural(length, 'token')}, and this captured step has "
                f"room for {most} before its {plural(self._steps, 'step')}; make a new one"
            )
        others = to_static(session.caches, self._size)
        for own, other in zip(self._caches, others, strict=True):
            own.fill(other.contents())
        self._active, self._done = None, WARM_UP_STEPS if self.is_captured else 0

    def _step(self) -> Tensor:
        logits: Tensor = self._decoder(self._ids, None, self._caches, last=1)
        return logits[:, -1]


def check_captured(session: DecodeSession, *, has_recorder: bool = False) -> None:
    """Check that the step of a session can be captured."""
    if session.device.type != "cuda" and not has_recorder:
        raise ArgumentError(
            f"cuda_graph captures the decoding step on a CUDA device, and this model is on "
            f'{session.device}; move it with model.to("cuda") (--device cuda), or leave '
            "cuda_graph out",
            argument="cuda_graph",
        )
    if current_scope() is not None:
        raise ArgumentError(
            "cuda_graph captures the step of one process, and several ranks run this model; "
            "leave cuda_graph out inside regard.parallel.generation",
            argument="cuda_graph",
        )
    if reasons := why_not_captured(session.decoder, session.caches):
        raise ArgumentError(
            f"cuda_graph cannot capture the step of this model: {'; '.join(reasons)}; leave "
            "cuda_graph out",
            argument="cuda_graph",
        )


def why_not_captured(decoder: Decoder, caches: Sequence[Cache]) -> list[str]:
    """Return why the step of a decoder with these caches cannot be captured; empty if it can."""
    reasons: dict[str, str] = {}
    for name, module in decoder.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            kind = type(module).__name__
            text = f"{name or 'the decoder'} is {kind} with a hook, which would be called once"
            reasons.setdefault("hook", text)
        refusal = getattr(module, "static_step_refusal", None)
        if refusal is not None:
            kind = type(module).__name__
            reasons.setdefault(f"{kind} {refusal}", f"{name} is {kind}, which {refusal}")
    for i, cache in enumerate(caches):
        for part in cache.parts if isinstance(cache, Joined) else (cache,):
            refusal, kind = part.static_step_refusal, type(part).__name__
            if refusal is not None:
                text = f"the cache of layer {i}, a {kind}, cannot: {refusal}"
                reasons.setdefault(f"{kind} {refusal}", text)
    return list(reasons.values())


def _token_count(cache: Cache) -> int:
    """Return how many positions a cache has seen, which is one after its last position."""
    following = cache.next(1)
    return int(following.max()) if isinstance(following, Tensor) else following.start
