"""Run a model of any supported kind, or any `nn.Module`, and record its attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from regard.argument_checks import check_keyword_names
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.model_run import encode_ids, is_transformers_model
from regard.inspect.record.recorder import OPTIONAL_PARTS, Recorder, RecordingOptions
from regard.inspect.record.recording import Labels, Recording, UnrecordedCall, label_places
from regard.integrations.pytorch.module_places import COMPILED_PREFIX, ModulePlaces
from regard.integrations.pytorch.watch import watch
from regard.models.model import Model
from regard.models.prompts import Prompt, encode_prompt, is_single_prompt
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import TextEncoder
from regard.span import Positions, slice_positions
from regard.tracing import requested_taps
from regard.units import plural

NO_SUPPORTED_CALL = (
    "it made no call of F.scaled_dot_product_attention, nn.MultiheadAttention, "
    "nn.TransformerEncoderLayer, flex_attention or regard.attend"
)
WRITTEN_OUT = (
    "computed a softmax of shape {shape}, so that its attention may be written out: call "
    "F.scaled_dot_product_attention there"
)
RECORDED_IMPLEMENTATIONS = ("regard", "sdpa", "flex_attention")
"""The attention implementations of transformers that can be recorded."""


def _unrecorded_calls(places: ModulePlaces) -> tuple[UnrecordedCall, ...]:
    """Return the calls that could not be recorded, and the attention that is written out: a softmax
    of four axes, or of three in a module that is attention by its name or class.
    """
    calls = [UnrecordedCall(place, why, n) for (place, why), n in places.unrecorded.items()]
    modules = {
        path.replace(COMPILED_PREFIX, ""): type(module).__name__
        for path, module in places.model.named_modules()
    }
    for (place, shape), n in places.written_out.items():
        name = f"{place} {modules[place]}".lower()
        if len(shape) > 3 or "attn" in name or "attention" in name:
            calls.append(UnrecordedCall(place, WRITTEN_OUT.format(shape=shape), n))
    return tuple(calls)


def _why_nothing(places: ModulePlaces) -> str:
    """Say why the recording is empty, and what may be done."""
    if places.unrecorded:
        return "these calls could not be recorded: " + "; ".join(
            f"{place or 'the model itself'}: {why}" for place, why in places.unrecorded
        )
    if not places.written_out:
        return NO_SUPPORTED_CALL
    place, shape = next(iter(places.written_out))
    why = WRITTEN_OUT.format(shape=shape)
    return f"{NO_SUPPORTED_CALL}; {place or 'the model itself'} {why}"


def _run_module(
    model: nn.Module, inputs: Sequence[object], arguments: Mapping[str, object], recorder: Recorder
) -> tuple[ModulePlaces, dict[str, Any]]:
    """Run a module once, or generate with a transformers model, while a recorder is open."""
    named = dict(arguments)
    first = inputs[0] if len(inputs) == 1 else None
    if isinstance(first, Mapping) and not named.keys() - {"tokens"}:
        inputs, named = (), {**first, **named}
    run: Callable[..., object] = model
    if is_transformers_model(model):
        inputs, named, run = _transformers_run(model, inputs, named)
    # not inference mode: tables that a module computes once would be useless in training
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        places = stack.enter_context(watch(model))
        stack.enter_context(recorder)
        result = run(*inputs, **named)
    ids = named.get("input_ids")
    if run is not model:
        ids = result
    return places, {"ids": ids.cpu() if isinstance(ids, Tensor) else None}


def _transformers_run(
    model: nn.Module, inputs: Sequence[object], named: dict[str, object]
) -> tuple[Sequence[object], dict[str, object], Callable[..., object]]:
    """Return how to run a transformers model: inputs, keyword arguments and function."""
    _check_attention_implementation(model)
    config: object = getattr(model, "config", None)
    if any(not isinstance(x, Tensor) for x in inputs):
        raise ArgumentTypeError(
            "text must be ids [B,T], or a mapping of the model's arguments, for a transformers "
            "model"
        )
    has_layer_index = any(getattr(m, "layer_idx", None) is not None for m in model.modules())
    if getattr(config, "is_encoder_decoder", False) or not has_layer_index:
        from regard.integrations.transformers import name_taps

        name_taps(model)  # the layers have no index, or two layers have the same index
    if inputs:
        named = {getattr(model, "main_input_name", "input_ids"): inputs[0], **named}
        inputs = inputs[1:]
    tokens = named.pop("tokens", 0)
    if not tokens:
        return inputs, named, model
    # the types of nn.Module know no method of this name
    generate: Callable[..., object] = getattr(model, "generate")  # noqa: B009
    return inputs, {**named, "max_new_tokens": tokens, "do_sample": False}, generate


def _check_attention_implementation(model: nn.Module) -> None:
    """Refuse a transformers model that cannot be recorded, and warn of parts."""
    # for each config: the first module that has it, and its attention implementation
    used: dict[int, tuple[str, str]] = {}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        implementation = getattr(config, "_attn_implementation", None)
        if implementation is not None:
            used.setdefault(id(config), (name or type(model).__name__, str(implementation)))
    others = {name: how for name, how in used.values() if how not in RECORDED_IMPLEMENTATIONS}
    if len(others) == len(used):
        from regard.integrations.transformers.supported_models import ways_to_record

        implementations = " and ".join(dict.fromkeys(map(repr, others.values())))
        raise ArgumentError(
            f"{type(model).__name__} computes its attention with {implementations}, so that "
            f"nothing would be recorded; {ways_to_record(model)}"
        )
    others.pop(type(model).__name__, None)
    if others:
        parts = ", ".join(f"{name} ({how!r})" for name, how in others.items())
        warnings.warn(
            f"parts of {type(model).__name__} do not compute their attention with regard or sdpa, "
            f"and are not recorded: {parts}; "
            'model.set_attn_implementation("regard") sets all parts',
            stacklevel=5,
        )


Text: TypeAlias = str | Sequence[str] | Tensor
"""One text, several texts, or token ids `[B, T]`."""


Run: TypeAlias = Callable[..., dict[str, object]]
"""A function that runs a model once and returns the fields of the `Recording` about its text, such
as `ids` and `pieces`.
"""


def record(
    model: Model | TextEncoder | Seq2Seq | nn.Module,
    *inputs: object,
    labels: Labels | None = None,
    places: Collection[str | int] | None = None,
    heads: Collection[int] | Mapping[str | int, Collection[int]] | None = None,
    rows: int | None = None,
    keep: Collection[str] = OPTIONAL_PARTS,
    **arguments: object,
) -> Recording:
    """Run a model, and record its attention.

    Stored are q, k, v, the lse, the output, positions, masks and biases; any block of any pattern
    is computed again from them. If an active `regard.Trace` edits tensors, the edited run is
    recorded (see `Recorder`).

    Any `nn.Module` can be recorded whose attention is a call of `F.scaled_dot_product_attention`,
    `nn.MultiheadAttention`, `nn.TransformerEncoderLayer` or `flex_attention`: see `watch`, which
    also explains the names of its places. Calls that could not be recorded are listed in
    `Recording.unrecorded`.

    Args:
        model: a `Model`, a `TextEncoder`, a `Seq2Seq`, or any other module, such as one of
            transformers, timm or diffusers.
        *inputs: for the models of this package, `text`: one text; several texts, padded on the left
            at position -1; or token ids `[B, T]`; for a `Model` also a list of ids, or the messages
            of a conversation, as in `Model.generate`; for a `Seq2Seq` also `target`. For any other
            module: its inputs, or one mapping of its keyword arguments, which may have the names of
            the options below.
        labels: texts for the tokens of a module without a tokenizer, such as words, patches or
            frames: one sequence for the rows and columns of all places that have so many; a pair
            of sequences, for queries and keys; or a mapping from the beginning of a place's name to
            either.
        places: names ("layers.3") or indices of layers; None means all.
        heads: query heads, for every place or in a mapping by place or layer; None means all.
        rows: number of last queries of each call to keep; None means all.
        keep: "v" (values), "out" (outputs), or both.
        **arguments: for the models of this package: `target`, the output text that a `Seq2Seq` is
            forced to produce, by default its own answer of at most `tokens` tokens (64);
            `positions` of the ids, -1 for padding; `tokens`, the number of tokens to generate after
            the prompt, each of which adds one step to every place; `chunk`, to run the prompt in
            chunks of so many tokens; and `cache` and `max_context` as in `Model.generate`. A
            transformers model takes `tokens` and its own arguments; any other module takes its own.

    Returns:
        The recording.

    Raises:
        ArgumentError: the run called no softmax attention that was selected; a selected place or
            head does not exist; an argument does not apply to the model; a transformers model
            computes its attention in a way that cannot be recorded; or labels fit no place.
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
    options: RecordingOptions = {"places": places, "heads": heads, "rows": rows, "keep": keep}
    return record_with(Recorder(**options), model, *inputs, labels=labels, **arguments)


def record_with(
    recorder: Recorder,
    model: Model | TextEncoder | Seq2Seq | nn.Module,
    *inputs: object,
    labels: Labels | None = None,
    **arguments: object,
) -> Recording:
    """Run a model, and return what a recorder recorded of it, as `record` does."""
    recorder.missing = "ignore"  # an empty recording raises an error below
    runner = next((run for kind, run in _RUNS.items() if isinstance(model, kind)), None)
    if runner is None:
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError(
                f"model is {type(model).__name__}; it must be a Model, a TextEncoder, a Seq2Seq or "
                "an nn.Module: for any other code use `with regard.inspect.Recorder() as recorder`"
            )
        places, run_facts = _run_module(model, inputs, arguments, recorder)
        nothing, unrecorded = _why_nothing(places), _unrecorded_calls(places)
    else:
        run, allowed = runner
        named = _named_arguments(model, inputs, arguments, allowed)
        with torch.inference_mode(), recorder:
            run_facts = run(model, **named)
        nothing, unrecorded = "no module of it calls that of regard", ()
    recording = replace(
        recorder.recording(), metadata=describe_model(model), unrecorded=unrecorded, **run_facts
    )
    if not recording.places:
        selected = recorder.selected
        raise ArgumentError(
            f"no attention was recorded: the run of {type(model).__name__} called no softmax "
            "attention "
            f"that was selected ({', '.join(f'{k}={v}' for k, v in selected.items()) or 'all'}); "
            + (recorder.missing_selection() if recorder.seen_places else nothing),
            argument=next((x for x in ("places", "heads", "rows") if x in selected), None),
        )
    if missing := recorder.missing_selection():
        raise ArgumentError(missing)
    if labels is None:
        return recording
    return replace(recording, token_labels=label_places(recording.places, labels))


def _named_arguments(
    model: object, inputs: Sequence[object], arguments: Mapping[str, object], allowed: Sequence[str]
) -> dict[str, object]:
    """Return the arguments of a run of one of our models by name, with their defaults."""
    named = dict(zip(("text", "target"), inputs, strict=False))
    twice = named.keys() & arguments.keys()
    if len(inputs) > 2 or twice or not ("text" in named or "text" in arguments):
        raise ArgumentTypeError(
            f"record got {plural(len(inputs), 'input')} for a {type(model).__name__}"
            f"{''.join(f', and {name} twice' for name in sorted(twice))}; give its text, and for a "
            "Seq2Seq also the target"
        )
    named |= arguments
    options = (*_DEFAULTS, "labels", *RecordingOptions.__annotations__)
    check_keyword_names("record", named.keys() - {"text"}, options)
    for name, value in named.items():
        default = _DEFAULTS.get(name)
        if name != "text" and name not in allowed and value is not None and value != default:
            raise ArgumentError(f"{name} does not apply to a {type(model).__name__}; leave it out")
    return {name: named.get(name, _DEFAULTS.get(name)) for name in ("text", *allowed)}


_DEFAULTS: dict[str, object] = {
    "target": None,
    "positions": None,
    "tokens": 0,
    "chunk": None,
    "cache": None,
    "max_context": None,
}
"""The arguments of a run of the models of this package, and their defaults."""


def describe_model(model: object) -> dict[str, str]:
    """Return type, dtype, device, and training mode of the model as text."""
    inner = getattr(model, "decoder", getattr(model, "network", model))
    parameter = next(inner.parameters(), None) if isinstance(inner, nn.Module) else None
    config = getattr(model, "config", None)
    types = getattr(type(config), "model_types", (getattr(config, "model_type", None),))
    kind = type(model).__name__ if config is None else type(config).__module__.rpartition(".")[2]
    about = {"model": types[0] or kind}
    if parameter is not None:
        about |= {
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": parameter.device.type,
        }
    return about | {"training": str(inner.training)} if isinstance(inner, nn.Module) else about


def _run_decoder(
    model: Model,
    text: Prompt | Sequence[Prompt],
    positions: Positions | None,
    chunk: int | None,
    **generation_options: Any,
) -> dict[str, object]:
    """Run a decoder on ids or texts, in one pass or in chunks; with `tokens`, generate."""
    if generation_options["tokens"]:
        return _run_generation(model, text, positions, chunk, **generation_options)
    for name in ("cache", "max_context"):
        if generation_options[name] is not None:
            raise ArgumentError(
                f"{name} is {generation_options[name]!r}, but no tokens are generated; "
                "set tokens=..."
            )
    ids, own = encode_ids(model, text)
    if positions is not None and not isinstance(text, Tensor):
        raise ArgumentError("positions can be given only with a tensor of ids")
    positions = own if positions is None else positions
    # a base model without a head has attention, but no logits; and logits of all tokens, if
    # no tap reads them, would take a sixth of the run
    wanted = model.has_head and "logits" in requested_taps()
    run = model.forward if wanted else model.hidden
    if chunk is None:
        run(ids, positions)
        return token_facts(model, ids)
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
    return token_facts(model, ids)


def _run_generation(
    model: Model,
    text: Any,
    positions: Positions | None,
    chunk: int | None,
    *,
    tokens: int,
    cache: str | None,
    max_context: int | None,
) -> dict[str, object]:
    """Generate tokens after one text with a decoder."""
    if not is_single_prompt(text) or positions is not None:
        raise ArgumentError(
            "tokens can be generated after one text only; for several texts, use `with Recorder()` "
            "around model.generate"
        )
    prompt_ids = encode_prompt(model, text)
    if cache in ("fixed", "paged") and max_context is None:
        max_context = len(prompt_ids) + tokens
    generation = model.generate(
        prompt_ids, max_tokens=tokens, chunk=chunk, cache=cache, max_context=max_context
    )
    for _ in generation:
        pass
    return token_facts(model, torch.tensor([prompt_ids + generation.ids]))


def _run_text_encoder(
    model: TextEncoder, text: Text, positions: Positions | None
) -> dict[str, object]:
    """Run a text encoder on ids or texts."""
    if isinstance(text, Tensor):
        model.hidden(text, positions)
        return token_facts(model, text)
    encoded = model.encode(text)
    model.hidden(*encoded)
    return token_facts(model, encoded.ids)


def _run_seq2seq(model: Seq2Seq, text: Text, target: str | None, tokens: int) -> dict[str, object]:
    """Run an encoder-decoder on a text and a target, or on its own answer."""
    if not isinstance(text, (str, Sequence)) or not all(isinstance(row, str) for row in text):
        raise ArgumentTypeError("text must be a str, or several, for a Seq2Seq")
    source, positions = model.encode(text)
    if target is None:
        beams = model.beam_search(source, positions, max_tokens=tokens or 64)
        answers = [list(row[0].ids) for row in beams]
    else:
        answers = [model.tokenizer.encode(target)] * len(source)
        ids = torch.tensor([[model.start, *row] for row in answers], device=source.device)
        model.forward(source, ids, positions)
    facts = token_facts(model, torch.tensor([[model.start, *answers[0]]]))
    names = tuple(model.tokenizer.pieces(source[0].tolist()))
    return facts | {"source_ids": source.cpu(), "source_pieces": names}


def token_facts(model: Model | TextEncoder | Seq2Seq, ids: Tensor) -> dict[str, object]:
    """Return the ids, and the texts of the first row if the model has a tokenizer."""
    known = model._tokenizer
    pieces = () if known is None else tuple(known.pieces(ids[0].tolist()))
    return {"ids": ids.cpu(), "pieces": pieces}


_RUNS: dict[type, tuple[Run, tuple[str, ...]]] = {
    Model: (_run_decoder, ("positions", "tokens", "chunk", "cache", "max_context")),
    TextEncoder: (_run_text_encoder, ("positions",)),
    Seq2Seq: (_run_seq2seq, ("target", "tokens")),
}
