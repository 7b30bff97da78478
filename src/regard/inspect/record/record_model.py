"""Run a model of any supported kind, and record its attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, Unpack

import torch
from torch import Tensor, nn

from regard.argument_checks import check_keyword_names
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.record.recorder import Recorder, RecordingOptions
from regard.inspect.record.recording import Recording
from regard.models.generation.decode_session import pad_left
from regard.models.model import Model
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import TextEncoder
from regard.span import Positions, slice_positions

Text: TypeAlias = str | Sequence[str] | Tensor | Mapping[str, Any]
"""One text, several texts, token ids `[B, T]`, or the keyword arguments of a transformers model."""


_NO_KIND = (
    "model is {}; it must be a Model, a TextEncoder, a Seq2Seq or a transformers model: "
    "for any other code use `with regard.inspect.Recorder() as recorder`"
)

Run: TypeAlias = Callable[..., dict[str, Any]]
"""A function that runs a model once and returns the fields of the `Recording` about its text, such
as `ids` and `pieces`.
"""


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
    **select: Unpack[RecordingOptions],
) -> Recording:
    """Run a model on its own kernels, and record its attention.

    Stored are q, k, v, the lse, the output, positions, masks and biases; any block of any pattern
    is computed again from them. If an active `regard.Trace` edits tensors, the edited run is
    recorded (see `Recorder`).

    Args:
        model: a `Model`, a `TextEncoder`, a `Seq2Seq`, or a transformers model under
            `attn_implementation="regard"`. For other code use `Recorder`.
        text: one text; several texts, padded on the left at position -1; or token ids `[B, T]`. For
            a transformers model: ids, or a mapping of its keyword arguments.
        target: output text that a `Seq2Seq` is forced to produce; None records its own answer of at
            most `tokens` tokens (64 by default).
        positions: positions of the ids, -1 for padding; by default 0 to T - 1.
        tokens: number of tokens to generate after the prompt; each adds one step to every place.
        chunk: run the prompt in chunks of this many tokens, with caches.
        cache: kind of cache for `tokens`, such as "quantised" or "ring", as in `Model.generate`.
        max_context: number of tokens that the cache can hold, as in `Model.generate`.
        **select: which places, heads, rows and tensors are kept; see `RecordingOptions`.

    Returns:
        The recording.

    Raises:
        ArgumentError: the run called no softmax attention that was selected; a selected place or
            head does not exist; an argument does not apply to the model; or a transformers model
            does not compute its attention with regard.
        ArgumentTypeError: the model or the text has an unsupported type, or an argument is unknown.

    >>> import regard
    >>> model = regard.load("tiny")
    >>> recording = record(model, "to be or not to be", tokens=3, heads=[0, 2], keep=())
    >>> place = recording[0]
    >>> place.T == place.N == len(recording.ids[0]) - 1  # the last token is no input
    True
    >>> [step.T for step in place.steps][1:]
    [1, 1]
    """
    arguments = {
        "target": target,
        "positions": positions,
        "tokens": tokens,
        "chunk": chunk,
        "cache": cache,
        "max_context": max_context,
    }
    check_keyword_names("record", select, (*arguments, *RecordingOptions.__annotations__))
    run, allowed = _runner(model)
    for name, value in arguments.items():
        is_given = value != 0 if isinstance(value, int) else value is not None
        if is_given and name not in allowed:
            raise ArgumentError(f"{name} does not apply to a {type(model).__name__}; leave it out")
    recorder = Recorder(**select)
    recorder.missing = "ignore"  # an empty recording raises an error below
    with torch.inference_mode(), recorder:
        run_facts = run(model, text, **{name: arguments[name] for name in allowed})
    recording = replace(recorder.recording(), metadata=_metadata(model), **run_facts)
    if not recording.places:
        raise ArgumentError(
            f"no attention was recorded: the run of {type(model).__name__} called no softmax "
            "attention "
            f"that was selected ({', '.join(f'{k}={v}' for k, v in select.items()) or 'all'}); "
            + (
                recorder.missing_selection()
                if recorder.seen_places
                else "no module of it calls that of regard"
            )
        )
    if missing := recorder.missing_selection():
        raise ArgumentError(missing)
    return recording


def _runner(model: object) -> tuple[Run, tuple[str, ...]]:
    """Return the function that runs a model of this kind, and the arguments that it takes."""
    for kind, runner in _RUNS.items():
        if isinstance(model, kind):
            return runner
    raise ArgumentTypeError(_NO_KIND.format(type(model).__name__))


def _metadata(model: Any) -> dict[str, str]:
    """Return facts about the model as text: its type, dtype, device, and whether it is in
    training mode.
    """
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


def _run_decoder(
    model: Model,
    text: Text,
    positions: Positions | None,
    chunk: int | None,
    **generation_options: Any,
) -> dict[str, Any]:
    """Run a decoder on ids or texts, in one pass or in chunks; with `tokens`, generate."""
    if generation_options["tokens"]:
        return _run_generation(model, text, positions, chunk, **generation_options)
    for name in ("cache", "max_context"):
        if generation_options[name] is not None:
            raise ArgumentError(
                f"{name} is {generation_options[name]!r}, but no tokens are generated; "
                "set tokens=..."
            )
    if isinstance(text, Tensor):
        ids = text
    else:
        rows = [text] if isinstance(text, str) else list(text)
        if not rows or not all(isinstance(row, str) for row in rows):
            raise ArgumentTypeError("text must be a str, several of them, or ids [B,T]")
        if positions is not None:
            raise ArgumentError("positions can be given only with ids, not with a text")
        ids, positions = pad_left([model.encode(row)[0].tolist() for row in rows])
    # a base model without a head has attention, but no logits
    run = model.forward if model.has_head else model.hidden
    if chunk is None:
        run(ids, positions)
        return _token_facts(model, ids)
    if chunk < 1:
        raise ArgumentError(f"chunk is {chunk}; it must be at least 1")
    caches = model.new_caches()
    for i in range(0, ids.shape[1], chunk):
        chunk_slice = slice(i, min(i + chunk, ids.shape[1]))
        run(
            ids[:, chunk_slice],
            None if positions is None else slice_positions(positions, chunk_slice),
            caches,
        )
    return _token_facts(model, ids)


def _run_generation(
    model: Model,
    text: Text,
    positions: Positions | None,
    chunk: int | None,
    *,
    tokens: int,
    cache: str | None,
    max_context: int | None,
) -> dict[str, Any]:
    """Generate tokens after one text with a decoder."""
    if not isinstance(text, str) or positions is not None:
        raise ArgumentError(
            "tokens can be generated after one text only; for several texts, use `with Recorder()` "
            "around model.generate"
        )
    prompt_ids = model.encode(text)[0].tolist()
    if cache in ("fixed", "paged") and max_context is None:
        max_context = len(prompt_ids) + tokens
    generation = model.generate(
        text, max_tokens=tokens, chunk=chunk, cache=cache, max_context=max_context
    )
    for _ in generation:
        pass
    return _token_facts(model, torch.tensor([prompt_ids + generation.ids]))


def _run_text_encoder(
    model: TextEncoder, text: Text, positions: Positions | None
) -> dict[str, Any]:
    """Run a text encoder on ids or texts."""
    if isinstance(text, Tensor):
        model.hidden(text, positions)
        return _token_facts(model, text)
    assert not isinstance(text, Mapping), "mappings are for transformers models"
    encoded = model.encode(text)
    model.hidden(*encoded)
    return _token_facts(model, encoded.ids)


def _run_seq2seq(model: Seq2Seq, text: Text, target: str | None, tokens: int) -> dict[str, Any]:
    """Run an encoder-decoder on a text and a target, or on its own answer."""
    if isinstance(text, (Tensor, Mapping)):
        raise ArgumentTypeError("text must be a str, or several, for a Seq2Seq")
    source, positions = model.encode(text)
    if target is None:
        beams = model.beam_search(source, positions, max_tokens=tokens or 64)
        answers = [list(row[0].ids) for row in beams]
    else:
        answers = [model.tokenizer.encode(target)] * len(source)
        ids = torch.tensor([[model.start, *row] for row in answers], device=source.device)
        model.forward(source, ids, positions)
    facts = _token_facts(model, torch.tensor([[model.start, *answers[0]]]))
    names = tuple(model.tokenizer.pieces(source[0].tolist()))
    return facts | {"source_ids": source.cpu(), "source_pieces": names}


def _run_transformers(model: nn.Module, text: Text, tokens: int) -> dict[str, Any]:
    """Run a transformers model once, or generate with it."""
    _check_attention_implementation(model)
    config: Any = getattr(model, "config", None)
    if isinstance(text, str) or not isinstance(text, (Tensor, Mapping)):
        raise ArgumentTypeError(
            "text must be ids [B,T], or a mapping of the model's arguments, for a transformers "
            "model"
        )
    has_layer_index = any(getattr(m, "layer_idx", None) is not None for m in model.modules())
    if getattr(config, "is_encoder_decoder", False) or not has_layer_index:
        from regard.integrations.transformers import name_taps

        name_taps(model)  # the layers have no index, or two layers have the same index
    arguments = {"input_ids": text} if isinstance(text, Tensor) else dict(text)
    if not tokens:
        model(**arguments)
        return {"ids": arguments.get("input_ids")}
    generate: Callable[..., Any] = model.generate  # type: ignore[assignment]
    return {"ids": generate(**arguments, max_new_tokens=tokens, do_sample=False)}


def _check_attention_implementation(model: nn.Module) -> None:
    """Check that regard computes the attention of a transformers model, and warn of parts where
    it does not.
    """
    # for each config: the first module that has it, and its attention implementation
    used: dict[int, tuple[str, str]] = {}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        implementation = getattr(config, "_attn_implementation", None)
        if implementation is not None:
            used.setdefault(id(config), (name or type(model).__name__, str(implementation)))
    if getattr(model, "config", None) is None or not used:
        raise ArgumentTypeError(_NO_KIND.format(type(model).__name__))
    others = {
        name: implementation for name, implementation in used.values() if implementation != "regard"
    }
    if len(others) == len(used):
        implementations = " and ".join(dict.fromkeys(map(repr, others.values())))
        raise ArgumentError(
            f"{type(model).__name__} computes its attention with {implementations}, not with "
            "regard, so that nothing would be recorded; "
            'load it with attn_implementation="regard", or call '
            'model.set_attn_implementation("regard"), after '
            "import regard.integrations.transformers"
        )
    parts = {
        name: implementation
        for name, implementation in others.items()
        if name != type(model).__name__
    }
    if parts:
        descriptions = ", ".join(
            f"{name} ({implementation!r})" for name, implementation in parts.items()
        )
        warnings.warn(
            f"parts of {type(model).__name__} do not compute their attention with regard, and "
            "are not "
            f"recorded: {descriptions}; "
            'model.set_attn_implementation("regard") sets all parts',
            stacklevel=4,
        )


def _token_facts(model: Model | TextEncoder | Seq2Seq, ids: Tensor) -> dict[str, Any]:
    """Return the ids, and the texts of the first row if the model has a tokenizer."""
    known = model._tokenizer
    pieces = () if known is None else tuple(known.pieces(ids[0].tolist()))
    return {"ids": ids.cpu(), "pieces": pieces}


_RUNS: dict[type, tuple[Run, tuple[str, ...]]] = {
    Model: (_run_decoder, ("positions", "tokens", "chunk", "cache", "max_context")),
    TextEncoder: (_run_text_encoder, ("positions",)),
    Seq2Seq: (_run_seq2seq, ("target", "tokens")),
    nn.Module: (_run_transformers, ("tokens",)),
}
