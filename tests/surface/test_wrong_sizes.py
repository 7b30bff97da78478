"""Every public op refuses a call with one size, dtype or device wrong, with the package's own error
and before computing.

The ops are discovered: one without a case fails. What may differ is read off the annotation: a
letter that stands in one argument only is free.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import regard
import regard.nn as parts
from regard import linear, memory, positions, scores
from regard.caches import Cache, Cross, Memory, State
from regard.nn.linear import linear as linear_map
from regard.nn.variants import VARIANTS
from regard.ops.additive_attention import additive_attention
from regard.ops.gemv import check_linear_map, gemv
from regard.ops.rms_norm import rms_norm
from regard.ops.selection import (
    NSABlocks,
    block_layout,
    block_maximum_mask,
    index_mask,
    index_scores,
    indexer_loss,
    moba_mask,
    quest_mask,
    selection_mask,
    top_k_mask,
)
from regard.ops.selection.nsa import compression_positions, compression_windows
from tests.caches.kinds import KINDS
from tests.surface.wrong_sizes import Call, Wrong, wrongs

B, H, G, T, S, D, E, M = 3, 4, 2, 6, 9, 8, 10, 32


def randn(*sizes: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(len(sizes))
    return torch.randn(*sizes, generator=draw, dtype=torch.float32, device="cpu")


def at(length: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + length, device="cpu").repeat(B, 1)


Q, K, V = randn(B, H, T, D), randn(B, G, S, D), randn(B, G, S, E)
SOFTMAX: dict[str, Any] = {
    "mask": torch.ones(T, S, dtype=torch.bool),
    "bias": randn(T, S),
    "q_positions": at(T, S - T),
    "k_positions": at(S),
}
WORDS = {"mask": "T S", "bias": "T S", "q_positions": "B T", "k_positions": "B S", "sink": "H"}
LOOSE = (
    "bias:dtype",
    "sink:dtype",
    "q_positions:device",
    "k_positions:device",
    "positions:device",
    "mask:device",
    "bias:device",
)
"""Positions, masks and biases are brought to where the queries are."""
MIXED = ("q:dtype", "k:dtype", "w:dtype")
ROWS = {"q": randn(B, H, T, D), "k": randn(B, G, T, D), "v": randn(B, G, T, E)}
ROW_WORDS = {"k_positions": "B T", "q": "B H T D", "k": "B G T D", "v": "B G T E"}
BETA, DECAY = randn(B, G, T).sigmoid(), -randn(B, G, T).sigmoid()
STATE = randn(B, G, D, E)
ANY_FLOAT = ("beta:dtype", "log_decay:dtype", "decay:dtype", "k_positions:device")


def softmax(function: Callable[..., Any], *without: str, **more: Any) -> Call:
    given = {"q": Q, "k": K, "v": V, **SOFTMAX, "sink": randn(H), **more}
    given = {name: x for name, x in given.items() if name not in without}
    return Call(function, given, WORDS, bound="H", loose=LOOSE)


def recurrence(function: Callable[..., Any], **gates: Any) -> Call:
    given = {**ROWS, "k_positions": at(T), "state": (STATE,), **gates}
    return Call(
        function,
        given,
        ROW_WORDS | {"state.0": "B G D E"},
        bound="H",
        loose=(*ANY_FLOAT, "q:dtype"),
    )


def with_letters(call: Call, letters: dict[str, str], *loose: str) -> Call:
    return replace(call, letters=call.letters | letters, loose=(*call.loose, *loose))


def laid_out() -> Call:
    sizes = NSABlocks(compress=4, stride=2, select=4, count=3, window=4)
    laid = block_layout(at(S), sizes.select)
    return Call(
        lambda q, k, k_positions: selection_mask(
            q, k, laid, sizes, q_positions=regard.Span(S - T, T), k_positions=k_positions
        ),
        {
            "q": Q,
            "k": compression_windows(K, laid, sizes).mean(3),
            "k_positions": compression_positions(laid, sizes).expand(B, -1),
        },
        {"q": "B H T D", "k": "B G C D", "k_positions": "B C"},
        bound="H T",
        loose=LOOSE,
    )


def scored(
    rule: Callable[..., scores.ScoreRule], letters: dict[str, str], **tensors: torch.Tensor
) -> Call:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **own: torch.Tensor) -> torch.Tensor:
        return regard.attend(q, k, v, score=rule(**own))

    sizes = {"q": "B H T D", "k": "B G S D", "v": "B G S E"}
    loose = tuple(f"{name}:{what}" for name in tensors for what in ("dtype", "device"))
    given = {"q": Q, "k": K, "v": V, **tensors}
    free = ("embedding:rank",)  # vectors of all heads, or of each
    return Call(run, given, sizes | letters, bound="H", free=free, loose=loose)


OPS: dict[Callable[..., Any], Call] = {
    regard.attend: softmax(regard.attend),
    regard.attend_partial: softmax(regard.attend_partial, "sink"),
    regard.attention_weights: softmax(regard.attention_weights, "v"),
    regard.plan: softmax(regard.plan),
    scores.Temperature: scored(scores.Temperature, {"tau": "H"}, tau=randn(H).abs() + 1),
    scores.TalkingHeads: scored(
        scores.TalkingHeads,
        {"before": "H H", "after": "H H"},
        before=randn(H, H),
        after=randn(H, H),
    ),
    scores.CoPE: scored(scores.CoPE, {"embedding": "H N D"}, embedding=randn(H, 5, D)),
    scores.Sigmoid: scored(scores.Sigmoid, {"bias": "H"}, bias=randn(H)),
    regard.merge: Call(
        regard.merge,
        {
            "partials": [regard.Partial(randn(B, H, T, E), randn(B, H, T)) for _ in "ab"],
            "sink": randn(H),
        },
        {
            "partials.0.0": "B H T E",
            "partials.1.0": "B H T E",
            "partials.0.1": "B H T",
            "partials.1.1": "B H T",
            "sink": "H",
        },
        loose=LOOSE,
    ),
    linear.linear_attention: Call(
        linear.linear_attention,
        {**ROWS, "k_positions": at(T), "state": (STATE, randn(B, G, D))},
        ROW_WORDS | {"state.0": "B G D E", "state.1": "B G D"},
        bound="H",
        loose=(*ANY_FLOAT, "q:dtype"),
    ),
    linear.retention: recurrence(linear.retention, decay=-randn(G).sigmoid()),
    linear.gated_linear: recurrence(linear.gated_linear, log_decay=-randn(B, G, T, D).sigmoid()),
    linear.rwkv6: with_letters(
        recurrence(linear.rwkv6, log_decay=-randn(B, G, T, D).sigmoid(), bonus=randn(G, D)),
        {"log_decay": "B G T D", "bonus": "G D"},
        "bonus:dtype",
    ),
    linear.rwkv4: Call(
        linear.rwkv4,
        {
            "k": ROWS["k"],
            "v": ROWS["k"].flip(2),
            "log_decay": -randn(G, D).sigmoid(),
            "bonus": randn(G, D),
            "k_positions": at(T),
            "state": (randn(B, G, D), randn(B, G, D).exp(), randn(B, G, D)),
        },
        {"k": "B G T D", "v": "B G T D", "log_decay": "G D", "bonus": "G D", "k_positions": "B T"}
        | dict.fromkeys(("state.0", "state.1", "state.2"), "B G D"),
        loose=(*ANY_FLOAT, "bonus:dtype"),
    ),
    linear.mlstm: with_letters(
        recurrence(
            linear.mlstm,
            log_input=randn(B, G, T),
            log_forget=-randn(B, G, T).sigmoid(),
            state=(STATE, randn(B, G, D), randn(B, G)),
        ),
        {"log_input": "B G T", "log_forget": "B G T", "state.1": "B G D", "state.2": "B G"},
        "log_input:dtype",
        "log_forget:dtype",
    ),
    linear.gated_slots: with_letters(
        recurrence(
            linear.gated_slots,
            log_decay=-randn(B, G, T, 5).sigmoid(),
            state=(randn(B, G, D, 5), randn(B, G, 5, E)),
        ),
        {"log_decay": "B G T N", "state.0": "B G D N", "state.1": "B G N E"},
    ),
    linear.log_sum_exp_gates: Call(
        linear.log_sum_exp_gates,
        {"logits": randn(B, G, T, 5), "k_positions": at(T), "state": (randn(B, G, 5),)},
        {"logits": "B G T N", "k_positions": "B T", "state.0": "B G N"},
        loose=("k_positions:device",),
    ),
    linear.cosine_features: Call(
        lambda x, positions: linear.cosine_features(x, positions, 7),
        {"x": Q, "positions": at(T)},
        {"x": "B H T D", "positions": "B T"},
        loose=("positions:device", "x:dtype", "x:device"),
    ),
    linear.delta_rule: recurrence(linear.delta_rule, beta=BETA),
    linear.gated_delta_rule: recurrence(linear.gated_delta_rule, beta=BETA, log_decay=DECAY),
    linear.generalised_delta_rule: Call(
        linear.generalised_delta_rule,
        {
            **ROWS,
            "c": randn(B, G, T, D),
            "log_decay": DECAY,
            "a": randn(B, G, T, D),
            "k_positions": at(T),
            "state": (STATE,),
        },
        ROW_WORDS | {"state.0": "B G D E", "c": "B G T D", "a": "B G T D", "log_decay": "B G T"},
        bound="H",
        loose=(*ANY_FLOAT, "c:dtype", "a:dtype", "q:dtype"),
    ),
    linear.delta_product: Call(
        linear.delta_product,
        {
            "q": ROWS["q"],
            "k": randn(B, G, T, 2, D),
            "v": randn(B, G, T, 2, E),
            "beta": randn(B, G, T, 2),
            "log_decay": DECAY,
            "k_positions": at(T),
            "state": (STATE,),
        },
        {
            "q": "B H T D",
            "k": "B G T n D",
            "v": "B G T n E",
            "beta": "B G T n",
            "log_decay": "B G T",
            "k_positions": "B T",
            "state.0": "B G D E",
        },
        bound="H",
        loose=(*ANY_FLOAT, "q:dtype"),
    ),
    linear.mesa: Call(
        linear.mesa,
        {
            "q": randn(B, G, T, D),
            "k": ROWS["k"],
            "v": ROWS["v"],
            "beta": BETA,
            "log_decay": DECAY,
            "ridge": randn(G, D).abs() + 1,
            "k_positions": at(T),
            "state": (STATE, randn(B, G, D, D)),
        },
        ROW_WORDS | {"q": "B G T D", "ridge": "G D", "state.0": "B G D E", "state.1": "B G D D"},
        loose=(*ANY_FLOAT, "ridge:dtype", "q:dtype"),
    ),
    linear.titans_memory: Call(
        linear.titans_memory,
        {
            "q": randn(B, G, T, D),
            "k": ROWS["k"],
            "v": ROWS["v"],
            "step": BETA,
            "log_decay": DECAY,
            "log_momentum": DECAY,
            "k_positions": at(T),
            "state": (STATE, STATE),
        },
        ROW_WORDS | {"q": "B G T D", "state.0": "B G D E", "state.1": "B G D E"},
        loose=(*ANY_FLOAT, "step:dtype", "log_momentum:dtype", "q:dtype"),
    ),
    linear.short_convolution: Call(
        linear.short_convolution,
        {
            "x": randn(B, T, M),
            "weight": randn(M, 4),
            "bias": randn(M),
            "state": (randn(B, 3, M),),
            "positions": at(T),
        },
        {"state.0": "B n1 c", "positions": "B T"},
        bound="n1",
        loose=("positions:device",),
    ),
    memory.infini_attention: Call(
        lambda **given: memory.infini_attention(**given, segment=4),
        {
            "q": Q,
            "k": K,
            "v": V,
            "gate": randn(H),
            "q_rotated": Q,
            "k_rotated": K,
            "state": (STATE, randn(B, G, D)),
            "positions": at(S),
        },
        {
            "q": "B H T D",
            "k": "B G S D",
            "v": "B G S E",
            "gate": "H",
            "q_rotated": "B H T D",
            "k_rotated": "B G S D",
            "state.0": "B G D E",
            "state.1": "B G D",
            "positions": "B S",
        },
        loose=(*LOOSE, "gate:dtype"),
    ),
    memory.retrieve: Call(
        memory.retrieve,
        {"q": Q, "state": (STATE, randn(B, G, D)), "where": torch.ones(B, T, dtype=torch.bool)},
        {"q": "B H T D", "state.0": "B G D E", "state.1": "B G D", "where": "B T"},
        bound="H",
    ),
    memory.write: Call(
        memory.write,
        {
            "k": K,
            "v": V,
            "state": (STATE, randn(B, G, D)),
            "where": torch.ones(B, S, dtype=torch.bool),
        },
        {"k": "B G S D", "v": "B G S E", "state.0": "B G D E", "state.1": "B G D", "where": "B S"},
    ),
    additive_attention: Call(
        additive_attention,
        {
            "query": Q,
            "keys": K,
            "values": V,
            "weight": randn(H, D),
            "mask": SOFTMAX["mask"],
            "q_positions": at(T),
            "k_positions": at(S),
        },
        WORDS | {"query": "B H T D", "keys": "B G S D", "values": "B G S E", "weight": "H D"},
        loose=LOOSE,
    ),
    moba_mask: Call(
        lambda **given: moba_mask(**given, size=3, topk=2),
        {"q": Q, "k": K, "q_positions": at(T), "k_positions": at(S)},
        WORDS | {"q": "B H T D", "k": "B G S D"},
        bound="H",
        loose=LOOSE,
    ),
    quest_mask: Call(
        lambda **given: quest_mask(**given, size=3, topk=2),
        {"q": Q, "k": K, "q_positions": at(T), "k_positions": at(S)},
        WORDS | {"q": "B H T D", "k": "B G S D"},
        bound="H",
        loose=LOOSE,
    ),
    block_maximum_mask: Call(
        lambda **given: block_maximum_mask(**given, heads=H, size=3, topk=2),
        {"q": Q, "k": randn(B, 1, S, D), "q_positions": at(T), "k_positions": at(S)},
        WORDS | {"q": "B H T D", "k": "B J1 S D"},
        bound="HJ1",
        loose=LOOSE,
    ),
    index_scores: Call(
        index_scores,
        {"q": Q, "k": randn(B, 1, S, D), "w": randn(B, T, H)},
        {"k": "B J1 S D"},
        bound="J1",
        loose=MIXED,
    ),
    index_mask: Call(
        lambda **given: index_mask(**given, topk=2),
        {
            "q": Q,
            "k": randn(B, 1, S, D),
            "w": randn(B, T, H),
            "q_positions": at(T),
            "k_positions": at(S),
        },
        WORDS | {"q": "B J T D", "k": "B J1 S D", "w": "B T J"},
        bound="J1",
        loose=(*LOOSE, *MIXED),
    ),
    indexer_loss: Call(
        indexer_loss,
        {
            "scores": randn(B, T, S),
            "pattern": randn(B, H, T, S).softmax(-1),
            "visible": torch.ones(B, T, S, dtype=torch.bool),
        },
        loose=("pattern:dtype", "scores:dtype"),
    ),
    selection_mask: laid_out(),
    positions.rotate: Call(
        positions.rotate,
        {"x": randn(B, H, T, D), "positions": at(T), "inv_freq": randn(D // 2)},
        {"positions": "B T", "x": "B H T D"},
        loose=("inv_freq:dtype", "inv_freq:device", "x:dtype", "x:device", "positions:device"),
    ),
    gemv: Call(
        gemv,
        {"x": randn(2, 16), "weight": randn(24, 16), "bias": randn(24)},
        {"x": "R M"},
        free=("x:rank",),
    ),
    linear_map: Call(
        linear_map,
        {"x": randn(2, 256), "weight": randn(256, 256), "bias": randn(256)},
        {"x": "R M", "weight": "N M", "bias": "N"},
        free=("x:rank",),
    ),
    rms_norm: Call(
        lambda x, weight: rms_norm(x, weight, 1e-6),
        {"x": randn(2, 16), "weight": randn(16)},
        {"x": "R M", "weight": "M"},
        free=("x:rank",),
        loose=("weight:dtype", "x:dtype"),
    ),
}

EXEMPT: dict[Callable[..., Any], str] = {
    memory.elu_plus_one: "it takes any shape",
    top_k_mask: "it takes any shape",
    check_linear_map: "it is the check",
    positions.long_term_decay: "it takes one tensor, of any length",
    positions.next_text_positions: "it takes one tensor, of any sizes, and checks its rank",
}
MODULES_OF_OPS = (
    "regard",
    "regard.linear",
    "regard.memory",
    "regard.positions",
    "regard.ops.softmax",
    "regard.ops.additive_attention",
    "regard.ops.selection",
)
FILES_OF_OPS = ("regard.ops.gemv", "regard.ops.rms_norm", "regard.nn.linear")
"""They have no list of public names."""
NO_OPS = {"try_gemv", "compiled_kernel_applies"}
"""They answer None and False for what does not fit (tests/ops/test_gemv.py)."""


def example(name: str) -> nn.Module:
    return VARIANTS[name].example().eval()


def mixers() -> dict[str, Call]:
    made = {}
    for name, entry in VARIANTS.items():
        module, given = example(name), {"x": randn(B, T, M), "positions": at(T)}
        words = {"positions": "B T"}
        if entry.family in ("cross", "additive"):
            given |= {"memory": randn(B, S, M), "memory_positions": at(S)}
            words |= {"memory": "B S M", "memory_positions": "B S"}
        free = ("x:dtype", "x:device") if name == "weightless" else ()
        made[name] = Call(
            module, given, words, bound="M", loose=(*LOOSE, *free, "memory_positions:device")
        )
    return made


def block(kind: type[nn.Module] = parts.Block) -> nn.Module:
    norms = [parts.PreNorm(parts.RMSNorm(M)) for _ in range(2)]
    return kind(example("gqa"), parts.SwiGLU(M, 48), *norms).eval()


def shared_norm_block() -> nn.Module:
    norm = parts.PreNorm(parts.RMSNorm(M))
    return parts.SharedNormBlock(example("gqa"), parts.SwiGLU(M, 48), norm).eval()


def decoder_block() -> nn.Module:
    norms = [parts.PostNorm(parts.RMSNorm(M)) for _ in range(3)]
    return parts.DecoderBlock(
        example("mha"), example("cross_attention"), parts.FeedForward(M, 48), *norms
    ).eval()


def path(kind: Callable[..., nn.Module]) -> nn.Module:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.path = kind(parts.RMSNorm(M))
            self.inner = parts.GatedFeedForward(M, 48, nn.SiLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.path(x, self.inner)

    return Around().eval()


def moe(router: type[parts.Router]) -> nn.Module:
    experts = [parts.ClippedSwiGLU(M, 16) for _ in range(4)]
    return parts.MoE(router(M, 4, 2), experts).eval()


X = {"x": randn(B, T, M)}
FREE = {"x": "B T M"}
MODULES: dict[str, Call] = {
    **mixers(),
    "Block": Call(block(), X | {"positions": at(T)}, {"positions": "B T"}, bound="M", loose=LOOSE),
    "ParallelBlock": Call(
        block(parts.ParallelBlock),
        X | {"positions": at(T)},
        {"positions": "B T"},
        bound="M",
        loose=LOOSE,
    ),
    "SharedNormBlock": Call(
        shared_norm_block(),
        X | {"positions": at(T)},
        {"positions": "B T"},
        bound="M",
        loose=LOOSE,
    ),
    "DecoderBlock": Call(
        decoder_block(),
        X | {"positions": at(T), "memory": randn(B, S, M), "memory_positions": at(S)},
        {"positions": "B T", "memory": "B S M", "memory_positions": "B S"},
        bound="M",
        loose=(*LOOSE, "memory_positions:device"),
    ),
    "Linear": Call(
        parts.Linear(M, 600).eval(), {"x": randn(2, M)}, {"x": "R M"}, bound="M", free=("x:rank",)
    ),
    "CappedLogits": Call(
        parts.CappedLogits(M, 600, cap=30.0),
        {"x": randn(2, M)},
        {"x": "R M"},
        bound="M",
        free=("x:rank",),
    ),
    "RMSNorm": Call(
        parts.RMSNorm(M),
        {"x": randn(2, M)},
        {"x": "R M"},
        bound="M",
        free=("x:rank",),
        loose=("x:dtype",),
    ),
    "OffsetRMSNorm": Call(
        parts.OffsetRMSNorm(M),
        {"x": randn(2, M)},
        {"x": "R M"},
        bound="M",
        free=("x:rank",),
        loose=("x:dtype",),
    ),
    "HeadNorm": Call(
        parts.HeadNorm(H, D),
        {"x": randn(B, H, T, D)},
        {"x": "B H T D"},
        bound="H D",
        loose=("x:dtype",),
    ),
    "CausalConvolution": Call(
        parts.CausalConvolution(M, 4),
        X | {"state": (randn(B, 3, M),), "positions": at(T)},
        {"state.0": "B n1 M", "x": "B T M", "positions": "B T"},
        bound="n1 M",
        loose=LOOSE,
    ),
    "HeadProjection": Call(parts.HeadProjection(M, H, D), X | {"positions": None}, bound="M"),
    "PerHeadProjection": Call(parts.PerHeadProjection(M, H, D), X | {"positions": None}, bound="M"),
    **{
        kind.__name__: Call(path(kind), X, FREE, bound="M", free=("x:rank",))
        for kind in (parts.PreNorm, parts.PostNorm, parts.OutputNorm, parts.NormedResidual)
    },
    "SandwichNorm": Call(
        path(lambda norm: parts.SandwichNorm(norm, parts.RMSNorm(M))),
        X,
        FREE,
        bound="M",
        free=("x:rank",),
    ),
    "ScaledPreNorm": Call(
        path(lambda norm: parts.ScaledPreNorm(norm, 0.5)),
        X,
        FREE,
        bound="M",
        free=("x:rank",),
    ),
    "MoE": Call(moe(parts.SoftmaxRouter), X, FREE, bound="M", free=("x:rank",)),
    "MoE, sigmoid": Call(moe(parts.SigmoidRouter), X, FREE, bound="M", free=("x:rank",)),
    "InputEmbedding": Call(
        parts.InputEmbedding(
            nn.Embedding(11, M), parts.SinusoidalPositions(M), segments=nn.Embedding(2, M)
        ).eval(),
        {"ids": at(T), "positions": at(T), "segments": at(T) % 2},
        {"positions": "B T", "segments": "B T"},
        loose=("positions:device",),
    ),
}
NO_MODULES = {"Projection", "Residual", "Router"}
"""They are what the others have in common."""


def stored_twice(make: Callable[[], Cache]) -> Callable[..., Any]:
    """An update of a cache that holds something already."""

    def update(memory: tuple[torch.Tensor, ...], positions: torch.Tensor) -> object:
        cache = make()
        right = tuple(randn(B, *x.shape[1:2], 4, *x.shape[3:]) for x in EXAMPLES[make])
        cache.update(right, at(4))
        before, held = len(cache), {name: str(x) for name, x in cache.contents().items()}
        try:
            return cache.update(memory, positions)
        except Exception:
            assert len(cache) == before
            assert {name: str(x) for name, x in cache.contents().items()} == held, (
                "a refused update changes no cache"
            )
            raise

    return update


EXAMPLES: dict[Any, tuple[torch.Tensor, ...]] = {}


def caches() -> dict[str, Call]:
    kinds = {name: (kind.make, kind.shapes) for name, kind in KINDS.items()}
    kinds["memory"] = (lambda: Memory(50), ((2, 4), (2, 4)))
    made = {}
    for name, (make, shapes) in kinds.items():
        new = tuple(randn(B, n, 3, d) for n, d in shapes)
        EXAMPLES[make] = new
        words = {f"memory.{i}": f"B n{i} T d{i}" for i in range(len(shapes))}
        bound = " ".join(f"n{i} d{i}" for i in range(len(shapes)))
        made[name] = Call(
            stored_twice(make),
            {"memory": new, "positions": at(3, 4)},
            words | {"positions": "B T"},
            bound=f"B T {bound}",
            loose=LOOSE,
        )
    made["cross"] = Call(
        lambda memory, positions: Cross().store(memory, positions),
        {"memory": (K, V), "positions": at(S)},
        {"memory.0": "B G S D", "memory.1": "B G S E", "positions": "B S"},
        free=("memory.0:G", "memory.1:G"),
        loose=(
            *LOOSE,
            *(f"memory.{i}:{what}" for i in (0, 1) for what in ("dtype", "device", "integers")),
        ),
    )
    return made


def taken(call: Call) -> list[str]:
    """What was wrong and was not refused by the package's own error."""
    call.run(**call.given)  # which is right
    found = []
    for what, given in wrongs(call):
        try:
            call.run(**given)
        except regard.RegardError:
            continue
        except Exception as problem:
            found.append(f"{what}: {type(problem).__name__}: {str(problem)[:120]}")
        else:
            found.append(f"{what}: taken")
    return found


@pytest.mark.parametrize("learns", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_ops(op: Callable[..., Any], learns: bool) -> None:
    if op is gemv and learns:
        learns = False  # it has no gradient
    with torch.set_grad_enabled(learns):
        assert taken(OPS[op]) == []


@pytest.mark.parametrize("learns", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, learns: bool) -> None:
    with torch.set_grad_enabled(learns):
        assert taken(MODULES[name]) == []


@pytest.mark.parametrize("name", CACHES := caches())
def test_caches(name: str) -> None:
    with torch.no_grad():
        assert taken(CACHES[name]) == []


def test_every_op_has_a_case() -> None:
    found = []
    for name in MODULES_OF_OPS:
        module = importlib.import_module(name)
        found += [getattr(module, x) for x in module.__all__]
    for name in FILES_OF_OPS:
        own = vars(importlib.import_module(name)).items()
        found += [x for key, x in own if key[0] != "_" and getattr(x, "__module__", "") == name]
    ops = {x for x in found if inspect.isfunction(x) and _takes_tensors(x)}
    ops = {x for x in ops if x.__name__ not in NO_OPS}
    missing = {f"{x.__module__}.{x.__name__}" for x in ops - set(OPS) - set(EXEMPT)}
    assert not missing, "give each of these a case in OPS"


def _takes_tensors(function: Callable[..., Any]) -> bool:
    return any(
        re.search(r"Tensor|Partial", str(p.annotation))
        for p in inspect.signature(function).parameters.values()
    )


def test_every_module_has_a_case() -> None:
    public = {
        x
        for n in parts.__all__
        if inspect.isclass(x := getattr(parts, n)) and issubclass(x, nn.Module)
    }
    used = {type(part) for call in MODULES.values() for part in call.run.modules()}
    takes = {x for x in public if x.forward is not nn.Module.forward}
    assert {x.__name__ for x in takes - used} <= NO_MODULES, "give each of these a case in MODULES"


def test_every_cache_has_a_case() -> None:
    kinds = {getattr(regard.caches, name) for name in regard.caches.__all__}
    public = {x for x in kinds if inspect.isclass(x) and issubclass(x, Cache)} - {Cache, State}
    assert {x.__name__ for x in public} == {
        type(kind.make()).__name__ for kind in KINDS.values()
    } | {"Memory", "Cross", "Evicting", "CrossLayer"}


def test_an_op_that_checks_nothing_is_caught() -> None:
    """The negative control: torch's own functions broadcast, or raise an error of their own."""
    call = OPS[regard.attend]
    plain = Call(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        {name: call.given[name] for name in "qkv"},
        {"q": "B H T D", "k": "B G S D", "v": "B G S E"},
    )
    assert any("RuntimeError" in x for x in taken(plain))
    norm = OPS[rms_norm]
    unchecked = Call(lambda x, weight: x / x.norm() * weight[0], norm.given, norm.letters)
    assert "x: M 16 + 1: taken" in taken(unchecked)


def test_wrongs_are_wrong() -> None:
    call = Call(regard.attend, {"q": Q, "k": K})
    every: list[Wrong] = list(wrongs(call))
    assert {x.what for x in every} >= {
        "q: B 3 + 1",
        "q: B 3 - 1",
        "k: D 8 - 1",
        "q: one dimension less",
        "k: integers",
        "q: another dtype",
        "k: another device",
    }
    assert not any(x.what.startswith("q: T") for x in every)  # any number of queries
