"""transformers' models under `attn_implementation="regard"`, against their own eager attention in
fp64, by the error rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.errors import ArgumentError
from tests.integrations.families import (
    CHUNK,
    DECODERS,
    ENCODERS,
    SEQ2SEQ,
    WINDOW,
    MaskRule,
    decoder,
    keep,
    name_taps,
    other,
    regard_mask,
    tokens,
    transformers,
)
from tests.rules import GRADIENT, assert_close_rule, in_orders

LENGTH = 3 * WINDOW + 1
PADDED = {"none": None, "left": [LENGTH, 7], "right": [LENGTH, 7]}
F64 = torch.float64


@functools.cache
def kept(name: str, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    make = decoder if name in DECODERS else other
    return make(name, attention, dtype).requires_grad_(requires_grad=False)


def plains(name: str) -> tuple[str, ...]:
    """Other attention of equal standing: torch's own knows no softcap and no sinks."""
    return ("eager",) if name in ("Gemma2", "GptOss") else ("eager", "sdpa")


def assert_like_eager(
    name: str, ids: Tensor, real: Tensor | None = None, ours: Any = None, **given: Any
) -> None:
    """The first output, where tokens are real; the reference reads each padded row alone, without
    its padding.
    """
    if name in DECODERS:
        given["use_cache"] = False
    padded = {} if real is None else {"attention_mask": real}
    if real is not None and name in DECODERS:
        padded["position_ids"] = (real.cumsum(1) - 1).clamp(min=0)

    def run(model: Any) -> Tensor:
        out = model(ids, **padded, **given)[0]
        return out if real is None else out[real.bool()]

    with torch.no_grad():
        exact = kept(name, "eager", F64)
        rows = (
            ids[None]
            if real is None
            else [x[None, m] for x, m in zip(ids, real.bool(), strict=True)]
        )
        ref = [exact(x, **given)[0] for x in rows]
        found = run(kept(name, "regard") if ours is None else ours)
        same = [
            found for kind in plains(name) for found in in_orders(partial(run, kept(name, kind)))
        ]
        # other shapes are other orders of the same sums
        same.append(joined([kept(name, "eager")(x, **given)[0] for x in rows], real))
    ref = joined(ref, real)
    assert ref.abs().max() > 0.3
    assert_close_rule(found, same, ref, what=name)


def joined(rows: list[Tensor], real: Tensor | None) -> Tensor:
    return rows[0] if real is None else torch.cat([x[0] for x in rows])


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_computes_what_it_computes_eagerly(name: str) -> None:
    for side, lengths in PADDED.items():
        mask = None if lengths is None else keep(lengths, LENGTH, side)
        assert_like_eager(name, tokens(2, LENGTH), real=mask)


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_sees_both_ways(name: str) -> None:
    mask = keep([LENGTH, 7], LENGTH, "right")
    assert_like_eager(name, tokens(2, LENGTH))
    assert_like_eager(name, tokens(2, LENGTH), real=mask)


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_a_decoder_attends_to_its_encoder(name: str) -> None:
    mask = keep([LENGTH, 7], LENGTH, "right")
    for more in ({}, {"attention_mask": mask}):
        assert_like_eager(name, tokens(2, LENGTH), decoder_input_ids=tokens(2, 6, seed=9), **more)


WRONG: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a window one longer": ("Mistral", lambda m: setattr(m.config, "sliding_window", WINDOW + 1)),
    "a window one shorter": ("Gemma3", lambda m: setattr(m.config, "sliding_window", WINDOW - 1)),
    "a chunk one longer": (
        "Llama4",
        lambda m: setattr(m.config, "attention_chunk_size", CHUNK + 1),
    ),
    "not causal": ("Llama", lambda m: setattr(m.config, "is_causal", False)),
    "no softcap": ("Gemma2", lambda m: each(m, "attn_logit_softcapping", None)),
    "no sinks": ("GptOss", lambda m: each(m, "sinks", torch.nn.Parameter(torch.full((4,), -1e4)))),
    "another scale": ("DeepseekV3", lambda m: each(m, "scaling", 0.2)),
    "causal": ("Bert", lambda m: setattr(m.config, "is_decoder", True)),
}


def each(model: Any, name: str, value: Any) -> None:
    for module in model.modules():
        if hasattr(module, name):
            setattr(module, name, value)


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_model_is_found(what: str) -> None:
    name, spoil = WRONG[what]
    model = (decoder if name in DECODERS else other)(name, "regard")
    assert_like_eager(name, tokens(2, LENGTH), ours=model)
    spoil(model)
    with pytest.raises(AssertionError, match=r"error .* above"):
        assert_like_eager(name, tokens(2, LENGTH), ours=model)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3", "Llama4"])
def test_packed_sequences_do_not_see_one_another(name: str) -> None:
    positions = torch.tensor([[*range(5), *range(8)], [*range(10), *range(3)]])
    ids = tokens(2, LENGTH)
    assert_like_eager(name, ids, position_ids=positions)
    model = kept(name, "regard")
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits[:1, 5:]
        alone = model(ids[:1, 5:], use_cache=False).logits
    assert (packed - alone).abs().max() < 1e-4


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3", "Llama4"])
def test_a_collated_batch_of_packed_rows_is_each_row_alone(name: str, *, use_cache: bool) -> None:
    """With a cache, transformers reads no rows from the positions, but their bounds are given."""
    rows = [tokens(n, seed=n).tolist() for n in (5, 7, 1, 3)]
    batch = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(
        [{"input_ids": row} for row in rows]
    )
    model = kept(name, "regard")
    del batch["labels"]
    with torch.no_grad():
        if name == "Llama4" and use_cache:
            with pytest.raises(ArgumentError, match="chunks"):
                model(**batch)
            return
        alone = torch.cat([model(torch.tensor([row]), use_cache=False).logits for row in rows], 1)
        packed = model(**batch, use_cache=use_cache).logits
        exact = kept(name, "eager", F64)
        same = torch.cat([exact(torch.tensor([row])).logits for row in rows], 1)
    assert_close_rule(packed, alone, same)


def test_a_mask_of_the_users_own_is_taken() -> None:
    table = torch.rand(2, 1, LENGTH, LENGTH) < 0.6
    table |= torch.eye(LENGTH, dtype=torch.bool)
    lowest = torch.finfo(torch.float32).min
    added = torch.where(table, torch.randn(2, 1, LENGTH, LENGTH), lowest)
    with torch.no_grad():
        for mask in (torch.where(table, 0.0, lowest), added):
            eager = kept("Llama", "eager")(tokens(2, LENGTH), attention_mask=mask).logits
            ref = kept("Llama", "eager", F64)(
                tokens(2, LENGTH), attention_mask=mask.double()
            ).logits
            ours = kept("Llama", "regard")(tokens(2, LENGTH), attention_mask=mask).logits
            assert_close_rule(ours, eager, ref)
        plain = kept("Llama", "regard")(tokens(2, LENGTH), attention_mask=table).logits
        again = kept("Llama", "regard")(
            tokens(2, LENGTH), attention_mask=torch.where(table, 0.0, lowest)
        ).logits
    assert (plain - again).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_half_precision(name: str) -> None:
    def run(attention: str, dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            return kept(name, attention, dtype)(tokens(2, LENGTH), use_cache=False).logits

    # the weights in fp64 are those before they were rounded: the rounding is an error of all
    same = [run(kind, torch.bfloat16) for kind in plains(name)]
    assert_close_rule(run("regard", torch.bfloat16), same, run("eager", F64))


@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "GptOss", "DeepseekV3", "T5"])
def test_gradients_of_a_training_step(name: str) -> None:
    # so little padding that every query sees a token: eager attention in fp64 gives NaN where one
    # sees none
    ids, mask = tokens(2, LENGTH), keep([LENGTH, LENGTH - 2], LENGTH, "right")
    labels = ids.masked_fill(mask == 0, -100)
    make = decoder if name in DECODERS else other

    def run(attention: str, dtype: torch.dtype, *, again: bool = False) -> list[Tensor]:
        model = make(name, attention, dtype)
        if again:
            model.train()  # no family here has dropout by default but T5
            model.activation_checkpointing_enable()
        model(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        return [x.grad for x in model.parameters() if x.grad is not None]

    ours, ref = run("regard", torch.float32), run("eager", F64)
    same = list(zip(*(run(kind, torch.float32) for kind in plains(name)), strict=True))
    assert len(ours) == len(same) == len(ref) > 10
    scale = max(float(x.abs().max()) for x in ref)
    assert scale > 1e-3
    for x, plain, exact in zip(ours, same, ref, strict=True):
        others = [y / scale for y in plain]
        assert_close_rule(x / scale, others, exact / scale, factor=GRADIENT, what=name)
    if name != "T5":  # a mask that is a rule survives being kept and run again
        for x, y in zip(run("regard", torch.float32, again=True), ours, strict=True):
            assert (x - y).abs().max() <= 1e-5 * scale


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_attention_weights_are_returned_and_traced(name: str) -> None:
    ids = tokens(2, LENGTH)
    with torch.no_grad():
        found = [
            kept(name, kind, dtype)(ids, output_attentions=True).attentions
            for kind, dtype in (("regard", torch.float32), ("eager", torch.float32), ("eager", F64))
        ]
        with regard.Trace("pattern") as trace:
            kept(name, "regard")(ids)
    assert list(trace) == [f"layers.{i}.pattern" for i in range(2)]
    for i, (x, same, exact) in enumerate(zip(*found, strict=True)):
        assert x.shape == (2, 4, LENGTH, LENGTH)
        assert_close_rule(x, same, exact, what=name)
        assert_close_rule(trace[f"layers.{i}.pattern"], same, exact, what=name)
        sums = x.sum(-1)
        assert (sums < 1).all() if name == "GptOss" else (sums - 1).abs().max() < 1e-5


def test_places_of_an_encoder_and_a_decoder() -> None:
    model = other("T5", "regard")
    name_taps(model)
    with torch.no_grad(), regard.Trace("pattern") as trace:
        model(tokens(1, 5), decoder_input_ids=tokens(1, 3))
    places = [
        f"{side}.block.{i}.layer.{j}.{kind}.pattern"
        for side, kinds in (
            ("encoder", ["SelfAttention"]),
            ("decoder", ["SelfAttention", "EncDecAttention"]),
        )
        for i in range(2)
        for j, kind in enumerate(kinds)
    ]
    assert list(trace) == places
    assert trace["decoder.block.1.layer.1.EncDecAttention.pattern"].shape == (1, 4, 3, 5)


def test_masks_travel_as_rules(monkeypatch: Any) -> None:
    seen: list[str] = []
    make = MaskRule.make.__func__

    def listen(cls: Any, rule: Any, *where: Any) -> Any:
        seen.append(str(rule))
        return make(cls, rule, *where)

    monkeypatch.setattr(MaskRule, "make", classmethod(listen))
    with torch.no_grad():
        kept("Gemma3", "regard")(
            tokens(2, LENGTH), attention_mask=keep([LENGTH, 7], LENGTH, "left")
        )
    padding = f"padding((((0, {LENGTH}),), (({LENGTH - 7}, {LENGTH}),)))"
    assert sorted(seen) == [f"causal & {padding}", f"window({WINDOW}) & causal & {padding}"]


@pytest.mark.full
def test_a_compiled_model() -> None:
    compiled = torch.compile(decoder("Mistral", "regard"), backend="eager", fullgraph=True)
    assert_like_eager(
        "Mistral", tokens(2, LENGTH), ours=compiled, real=keep([LENGTH, 7], LENGTH, "right")
    )


@pytest.mark.full
def test_a_graph_takes_a_rule_as_its_argument() -> None:
    """As `generate` gives it to a compiled model with a static cache."""
    real = keep([LENGTH, 7], LENGTH, "left")
    rule = regard_mask(2, LENGTH, LENGTH, attention_mask=real.bool())
    compiled = torch.compile(decoder("Llama", "regard"), backend="eager")

    def graph(ids: Tensor, attention_mask: Tensor, **given: Any) -> Any:
        return compiled(ids, attention_mask=rule, **given)

    assert_like_eager("Llama", tokens(2, LENGTH), ours=graph, real=real)
