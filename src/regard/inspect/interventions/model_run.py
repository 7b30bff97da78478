"""One text, ready to be run again and again on one model, with tensors captured or replaced.

Models of this package, models of transformers and any other module are run in the same way, so
that ablation, patching and attribution need not know which one they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, ArgumentTypeError
from regard.integrations.pytorch.watch import watch
from regard.models.generation.decode_session import pad_left
from regard.models.model import Model
from regard.models.prompts import encode_rows
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import TextEncoder
from regard.models.text_model import TextModel
from regard.span import Positions
from regard.tracing import Trace, list_taps

Edit: TypeAlias = Callable[[Tensor], Tensor]
"""A function from a tensor at a tap to its replacement."""

AnyModel: TypeAlias = Model | TextEncoder | Seq2Seq | nn.Module
"""A model of this package, or any module."""

Input: TypeAlias = Any
"""A text, ids, messages, several of them, or a mapping of a module's arguments."""


class RunResult(NamedTuple):
    """The logits `[B, T, V]` or hidden states `[B, T, M]` of one run, and its trace."""

    output: Tensor
    trace: Trace


@dataclass(frozen=True, eq=False)
class ModelRun:
    """A model with one prepared input.

    Args:
        call: runs the model without arguments and returns its output.
        ids: the token ids `[B, T]`, or None if the input has none; of an encoder-decoder, those of
            the target.
        pieces: the text of each token of the first row; () if unknown.
        source_ids, source_pieces: the same of the source of an encoder-decoder.

    >>> import regard
    >>> run = prepare(regard.load("tiny"), "to be or")
    >>> result = run.run(capture=["layers.*.z"])
    >>> tuple(result.output.shape)[::2], list(result.trace)[:2]
    ((1, 1920), ['layers.0.z', 'layers.1.z'])
    """

    model: AnyModel
    call: Callable[[], Any]
    ids: Tensor | None = None
    pieces: tuple[str, ...] = field(default=())
    source_ids: Tensor | None = None
    source_pieces: tuple[str, ...] = field(default=())

    def run(
        self,
        edit: Mapping[str, Edit] | None = None,
        capture: Iterable[str] = (),
        *,
        gradients: bool = False,
    ) -> RunResult:
        """Run the model once, with edits, and capture values."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad() if gradients else torch.no_grad())
            if isinstance(self.model, nn.Module):
                stack.enter_context(watch(self.model))
            trace = stack.enter_context(
                Trace(*capture, edit=edit, missing="ignore", gradients=gradients)
            )
            output = self.call()
        return RunResult(main_tensor(output), trace)

    def labels(self, length: int) -> tuple[str, ...]:
        """Return a text for each of so many positions: its index and the token, if it is known."""
        return _labels(self.pieces, length)

    def key_labels(self) -> tuple[str, ...]:
        """Return the text of each key that the last token can read; the source comes first."""
        if self.ids is None:
            raise ArgumentError("the input has no token ids, so that keys cannot be named")
        own = self.labels(self.ids.shape[1])
        if self.source_ids is None:
            return own
        source = _labels(self.source_pieces, self.source_ids.shape[1])
        return (*(f"source {x}" for x in source), *(f"target {x}" for x in own))

    def key_ids(self) -> Tensor:
        """Return the ids of these keys in the first row of the batch, `[S]`."""
        if self.ids is None:
            raise ArgumentError("the input has no token ids, so that keys cannot be named")
        if self.source_ids is None:
            return self.ids[0]
        return torch.cat([self.source_ids[0], self.ids[0]])

    def taps(self, *, patterns: bool = True) -> tuple[str, ...]:
        """Return the names of the taps that one run passes, in their order."""
        with ExitStack() as stack:
            if isinstance(self.model, nn.Module):
                stack.enter_context(watch(self.model))
            return list_taps(self.call, patterns=patterns)


def prepare(model: AnyModel, text: Input) -> ModelRun:
    """Prepare a model to run one input several times."""
    if isinstance(model, Model):
        return _prepare_decoder(model, text)
    if isinstance(model, TextEncoder):
        encoded = model.encode(text) if not isinstance(text, Tensor) else None
        ids = text if encoded is None else encoded.ids
        arguments = (ids,) if encoded is None else tuple(encoded)
        return ModelRun(model, lambda: model.hidden(*arguments), ids, _pieces(model, ids))
    if isinstance(model, Seq2Seq):
        return _prepare_seq2seq(model, text)
    if isinstance(model, nn.Module):
        return _prepare_module(model, text)
    raise ArgumentTypeError(
        f"model is {type(model).__name__}; it must be a Model, a TextEncoder, a Seq2Seq or an "
        "nn.Module",
        argument="model",
    )


def _prepare_decoder(model: Model, text: Input) -> ModelRun:
    positions: Positions | None = None
    if isinstance(text, Tensor):
        ids = text
    else:
        rows = encode_rows(model, text)
        ids, positions = pad_left(rows) if len(rows) > 1 else (torch.tensor(rows), None)
        ids = ids.to(model.device)
    run = model.forward if model.has_head else model.hidden
    return ModelRun(model, lambda: run(ids, positions), ids, _pieces(model, ids))


def _prepare_seq2seq(model: Seq2Seq, text: Input) -> ModelRun:
    if not isinstance(text, (tuple, list)) or len(text) != 2:
        raise ArgumentTypeError(
            "text must be a pair (source, target) for a Seq2Seq", argument="text"
        )
    source, target = text
    positions: Positions | None = None
    if isinstance(source, Tensor):
        source_ids = source
    else:
        source_ids, positions = model.encode(source)
    ids = target
    if not isinstance(target, Tensor):
        ids = torch.tensor([[model.start, *model.tokenizer.encode(target)]], device=model.device)
    return ModelRun(
        model,
        lambda: model.forward(source_ids, ids, positions),
        ids,
        _pieces(model, ids),
        source_ids,
        _pieces(model, source_ids),
    )


def _prepare_module(model: nn.Module, text: Input) -> ModelRun:
    named: dict[str, Any] = {}
    if isinstance(text, Mapping):
        named, ids = dict(text), text.get("input_ids")
    elif isinstance(text, Tensor):
        ids = None if text.is_floating_point() else text
        config = getattr(model, "config", None)
        if getattr(config, "_attn_implementation", None) is not None:
            named = {getattr(model, "main_input_name", "input_ids"): text}
    else:
        raise ArgumentTypeError(
            f"text is {type(text).__name__}; a {type(model).__name__} has no tokenizer of this "
            "package: give token ids, a tensor, or a mapping of its keyword arguments",
            argument="text",
        )
    inputs = () if named else (text,)
    if getattr(getattr(model, "config", None), "use_cache", None):
        named.setdefault("use_cache", False)
    return ModelRun(model, lambda: model(*inputs, **named), ids)


def check_passed(names: Sized, tap: str) -> None:
    """Refuse a run that passed no tap of a name.

    >>> check_passed(["layers.0.z"], "z")
    """
    if len(names):
        return
    reason = "its mechanism has no softmax weights, or " if tap == "pattern" else ""
    raise ArgumentError(
        f"the run passed no tap {tap!r}: {reason}its attention is written out, or is no attention "
        "at all; see regard.inspect.record, which says why"
    )


def _labels(pieces: tuple[str, ...], length: int) -> tuple[str, ...]:
    if len(pieces) == length:
        return tuple(f"{i} {piece}" for i, piece in enumerate(pieces))
    return tuple(map(str, range(length)))


def main_tensor(output: Any) -> Tensor:
    """Return the tensor of a model's output that a metric reads: itself, its logits, its last
    hidden states, or its first tensor.

    >>> main_tensor((torch.zeros(2), 1)).shape
    torch.Size([2])
    """
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            tensor: Tensor = getattr(output, name)
            return tensor
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    raise ArgumentError(
        f"the model returned {type(output).__name__}, which has no logits, no last_hidden_state "
        "and no first tensor; wrap the model in a module that returns the tensor to measure"
    )


def _pieces(model: TextModel, ids: Tensor) -> tuple[str, ...]:
    if not model.has_tokenizer:
        return ()
    return tuple(model.tokenizer.pieces(ids[0].tolist()))


def taps(model: AnyModel, text: Input | None = None, *, patterns: bool = True) -> tuple[str, ...]:
    """List the taps of a model: the names that `regard.Trace` captures and edits.

    The model runs once. Open `watch(model)` as well to trace a module that is not of this package.

    Args:
        model: a model of this package, or any module.
        text: the input of the run; None is two token ids.
        patterns: whether `scores` and `pattern` are listed, which only the reference kernel passes.

    Returns:
        The full names, in the order of the computation.

    Raises:
        ArgumentTypeError: the model has an unsupported type.

    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> taps(layer, torch.zeros(1, 3, 8), patterns=False)
    ('self_attn.q', 'self_attn.k', 'self_attn.v', 'self_attn.z', 'norm1.norm', 'norm2.norm')
    """
    if text is None and isinstance(model, TextModel):
        return model.taps(patterns=patterns)
    ids = torch.zeros(1, 2, dtype=torch.int64) if text is None else text
    return prepare(model, ids).taps(patterns=patterns)
