"""Record a run of a model, whatever kind of model it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, Unpack

import torch
from torch import Tensor, nn

from regard.arguments import check_names
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.record.recorder import Recorder, Selection
from regard.inspect.record.recording import Recording
from regard.models.generation.decode_session import pad_left
from regard.models.model import Model
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import TextEncoder
from regard.span import Positions, part

Text: TypeAlias = str | Sequence[str] | Tensor | Mapping[str, Any]
"""A text, several, ids [B,T], or what a transformers model is called with."""


_NO_KIND = (
    "model is {}; it must be a Model, a TextEncoder, a Seq2Seq or a transformers model: "
    "for any other code use `with regard.inspect.Recorder() as recorder`"
)

Run: TypeAlias = Callable[..., dict[str, Any]]
"""Runs a model, and says what it read: ids, pieces, ..."""


def record(
    model: Model | TextEncoder | Seq2Seq | nn.Module,
    text: Text,
    target: str | None = None,
    *,
    positions: Positions | None = None,
    tokens: int = 0,
    chunk: int | None = None,
    cache: str | None = None,
    max_context: int | None = None,
    **select: Unpack[Selection],
) -> Recording:
    """Run a model on its own kernels, and record its attention: q, k, lse, positions and rules, out
    of which any block of any pattern is computed again. Edits of open traces are part of the run
    (see `Recorder`).

    Args:
        model: a `Model`, `TextEncoder`, `Seq2Seq`, or a transformers model under
            attn_implementation="regard". For any other code there is `Recorder`.
        text: a text, or several (padded on the left, at position -1), or ids [B,T]; for a
            transformers model its ids, or a mapping of its arguments.
        target: what a `Seq2Seq` is made to say; None: what it says by itself, at most `tokens` (64)
            tokens of it.
        positions: of ids, -1 = padding; by default 0..T-1.
        tokens: go on by so many tokens, each with the caches: every one is a step of each place.
        chunk: the prompt in pieces of so many tokens, with the caches.
        cache, max_context: the kind of cache for `tokens` ("quantised", "ring", ...), and the most
            that it holds, as in `Model.generate`.
        **select: what is kept: see `Selection`.

    Raises:
        ArgumentError: the run called no softmax attention that was selected, a selected place or
            head does not exist, an argument does not go with the model, or a transformers model
            does not compute its attention here.
        ArgumentTypeError: the model or the text is of no such kind, or there is no argument of a
            name.

    >>> import regard
    >>> found = record(regard.load("tiny"), "to be or not to be", tokens=3, heads=[0, 2], keep=())
    >>> found[0].T == found[0].N == len(found.ids[0]) - 1, [step.T for step in found[0].steps][1:]
    (True, [1, 1])
    """
    how = {
        "target": target,
        "positions": positions,
        "tokens": tokens,
        "chunk": chunk,
        "cache": cache,
        "max_context": max_context,
    }
    check_names("record", select, (*how, *Selection.__annotations__))
    run, allowed = _run_of(model)
    for name, value in how.items():
        given = value != 0 if isinstance(value, int) else value is not None
        if given and name not in allowed:
            raise ArgumentError(f"{name} does not go with a {type(model).__name__}; leave it out")
    recorder = Recorder(**select)
    recorder.missing = "ignore"  # a recording of nothing is an error below
    with torch.inference_mode(), recorder:
        said = run(model, text, **{name: how[name] for name in allowed})
    found = replace(recorder.recording(), about=_about(model), **said)
    if not found.places:
        raise ArgumentError(
            f"no attention was recorded: the run of {type(model).__name__} called no softmax "
            "attention "
            f"that was selected ({', '.join(f'{k}={v}' for k, v in select.items()) or 'all'})"
            f"; {recorder.lacking() if recorder.met else 'no module of it calls that of regard'}"
        )
    if lacking := recorder.lacking():
        raise ArgumentError(lacking)
    return found


def _run_of(model: object) -> tuple[Run, tuple[str, ...]]:
    """How such a model is run, and what goes with it."""
    for kind, found in _RUNS.items():
        if isinstance(model, kind):
            return found
    raise ArgumentTypeError(_NO_KIND.format(type(model).__name__))


def _about(model: Any) -> dict[str, str]:
    """What the model is, in words."""
    inner = getattr(model, "decoder", getattr(model, "network", model))
    parameter = next(inner.parameters(), None) if isinstance(inner, nn.Module) else None
    config = getattr(model, "config", None)
    types = getattr(type(config), "model_types", (getattr(config, "model_type", None),))
    about = {"model": types[0] or type(config).__module__.rpartition(".")[2]}
    if parameter is not None:
        about |= {
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": parameter.device.type,
        }
    return about | {"training": str(inner.training)} if isinstance(inner, nn.Module) else about


def _model(
    model: Model, text: Text, positions: Positions | None, chunk: int | None, **going_on: Any
) -> dict[str, Any]:
    if going_on["tokens"]:
        return _generated(model, text, positions, chunk, **going_on)
    for name in ("cache", "max_context"):
        if going_on[name] is not None:
            raise ArgumentError(
                f"{name} is {going_on[name]!r}, and no tokens are to follow; give tokens=..."
            )
    if isinstance(text, Tensor):
        ids = text
    else:
        rows = [text] if isinstance(text, str) else list(text)
        if not rows or not all(isinstance(row, str) for row in rows):
            raise ArgumentTypeError("text must be a str, several of them, or ids [B,T]")
        if positions is not None:
            raise ArgumentError("positions go with ids; a text has its own")
        ids, positions = pad_left([model.encode(row)[0].tolist() for row in rows])
    # a base model that was saved alone has attention, and no logits
    run = model.forward if model.has_head else model.hidden
    if chunk is None:
        run(ids, positions)
        return _read(model, ids)
    if chunk < 1:
        raise ArgumentError(f"chunk is {chunk}; it must be at least 1")
    caches = model.new_caches()
    for i in range(0, ids.shape[1], chunk):
        at = slice(i, min(i + chunk, ids.shape[1]))
        run(ids[:, at], None if positions is None else part(positions, at), caches)
    return _read(model, ids)


def _generated(
    model: Model,
    text: Text,
    positions: Positions | None,
    chunk: int | None,
    *,
    tokens: int,
    cache: str | None,
    max_context: int | None,
) -> dict[str, Any]:
    if not isinstance(text, str) or positions is not None:
        raise ArgumentError(
            "tokens are to follow: give one text; for several, use `with Recorder()` around "
            "model.generate"
        )
    begun = model.encode(text)[0].tolist()
    if cache in ("fixed", "paged") and max_context is None:
        max_context = len(begun) + tokens
    generation = model.generate(
        text, max_tokens=tokens, chunk=chunk, cache=cache, max_context=max_context
    )
    for _ in generation:
        pass
    return _read(model, torch.tensor([begun + generation.ids]))


def _text_encoder(model: TextEncoder, text: Text, positions: Positions | None) -> dict[str, Any]:
    if isinstance(text, Tensor):
        model.hidden(text, positions)
        return _read(model, text)
    assert not isinstance(text, Mapping), "checked where models are told apart"
    given = model.encode(text)
    model.hidden(*given)
    return _read(model, given.ids)


def _seq2seq(model: Seq2Seq, text: Text, target: str | None, tokens: int) -> dict[str, Any]:
    if isinstance(text, (Tensor, Mapping)):
        raise ArgumentTypeError("text must be a str, or several, for a Seq2Seq")
    source, at = model.encode(text)
    if target is None:
        with_ends = model.beam_search(source, at, max_tokens=tokens or 64)
        said = [list(row[0].ids) for row in with_ends]
    else:
        said = [model.tokenizer.encode(target)] * len(source)
        ids = torch.tensor([[model.start, *row] for row in said], device=source.device)
        model.forward(source, ids, at)
    found = _read(model, torch.tensor([[model.start, *said[0]]]))
    names = tuple(model.tokenizer.pieces(source[0].tolist()))
    return found | {"source_ids": source.cpu(), "source_pieces": names}


def _transformers(model: nn.Module, text: Text, tokens: int) -> dict[str, Any]:
    _check_runs_through_us(model)
    config: Any = getattr(model, "config", None)
    if isinstance(text, str) or not isinstance(text, (Tensor, Mapping)):
        raise ArgumentTypeError(
            "text must be ids [B,T], or a mapping of the model's arguments, for a transformers "
            "model"
        )
    layered = any(getattr(m, "layer_idx", None) is not None for m in model.modules())
    if getattr(config, "is_encoder_decoder", False) or not layered:
        from regard.integrations.transformers import name_places

        name_places(model)  # its layers have no numbers, or the same ones twice
    given = {"input_ids": text} if isinstance(text, Tensor) else dict(text)
    if not tokens:
        model(**given)
        return {"ids": given.get("input_ids")}
    generate: Callable[..., Any] = model.generate  # type: ignore[assignment]
    return {"ids": generate(**given, max_new_tokens=tokens, do_sample=False)}


def _check_runs_through_us(model: nn.Module) -> None:
    """See that the attention of a transformers model is computed here; warn of parts that compute
    theirs elsewhere.
    """
    # by config: the first module that has it, and how it computes attention
    used: dict[int, tuple[str, str]] = {}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        how = getattr(config, "_attn_implementation", None)
        if how is not None:
            used.setdefault(id(config), (name or type(model).__name__, str(how)))
    if getattr(model, "config", None) is None or not used:
        raise ArgumentTypeError(_NO_KIND.format(type(model).__name__))
    others = {name: how for name, how in used.values() if how != "regard"}
    if len(others) == len(used):
        found = " and ".join(dict.fromkeys(map(repr, others.values())))
        raise ArgumentError(
            f"{type(model).__name__} computes its attention by {found}, not by regard, so that "
            "nothing would be recorded; "
            'load it with attn_implementation="regard", or call '
            'model.set_attn_implementation("regard"), after '
            "import regard.integrations.transformers"
        )
    parts = {name: how for name, how in others.items() if name != type(model).__name__}
    if parts:
        told = ", ".join(f"{name} ({how!r})" for name, how in parts.items())
        warnings.warn(
            f"parts of {type(model).__name__} compute their attention elsewhere, and are not "
            f"recorded: {told}; "
            'model.set_attn_implementation("regard") sets all parts',
            stacklevel=4,
        )


def _read(model: Model | TextEncoder | Seq2Seq, ids: Tensor) -> dict[str, Any]:
    """Ids, and the texts of the first row's, where there is a tokenizer."""
    known = model._tokenizer
    pieces = () if known is None else tuple(known.pieces(ids[0].tolist()))
    return {"ids": ids.cpu(), "pieces": pieces}


_RUNS: dict[type, tuple[Run, tuple[str, ...]]] = {
    Model: (_model, ("positions", "tokens", "chunk", "cache", "max_context")),
    TextEncoder: (_text_encoder, ("positions",)),
    Seq2Seq: (_seq2seq, ("target", "tokens")),
    nn.Module: (_transformers, ("tokens",)),
}
