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
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import regard
import regard.nn as parts
from regard import linear, memory, positions, scores
from regard.caches import Cache, Cross, Memory, State
from regard.nn.variants import VARIANTS
from regard.nn.weights import linear as linear_map
from regard.ops.additive_attention import additive_attention
from regard.ops.selection import (
    NSABlocks,
    block_layout,
    block_maximum_mask,
    closed_blocks_mask,
    index_mask,
    index_scores,
    indexer_loss,
    moba_mask,
    quest_mask,
    selection_mask,
    top_k_mask,
)
from regard.ops.selection.nsa import compression_positions, compression_windows
from regard.ops.tokenwise import check_linear_map, clip, gemv, rms_norm, silu_product
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
GATES = (
    "beta",
    "log_decay",
    "decay",
    "bonus",
    "log_input",
    "log_forget",
    "level_weights",
    "c",
    "a",
    "ridge",
    "step",
)
ANY_FLOAT = (*(f"{x}:dtype" for x in (*GATES, "log_momentum", "q")), "k_positions:device")
SIZES = dict(zip("BHGTSDEMNnJ", (B, H, G, T, S, D, E, M, 5, 2, H), strict=True)) | {"J1": 1}


def drawn(name: str, letters: str) -> torch.Tensor:
    """A tensor of these sizes that the argument of this name may be."""
    sizes = [SIZES[letter] for letter in letters.split()]
    if name.endswith("positions"):
        return at(sizes[-1])
    if name in ("where", "mask"):
        return torch.ones(sizes, dtype=torch.bool)
    x = randn(*sizes)
    if name in ("beta", "step"):
        return x.sigmoid()
    if name in ("tau", "ridge"):
        return x.abs() + 1
    return -x.sigmoid() if "decay" in name or name in ("log_forget", "log_momentum") else x


def case(
    function: Callable[..., Any],
    bound: str = "",
    loose: tuple[str, ...] = LOOSE,
    free: tuple[str, ...] = (),
    **arguments: str | tuple[str, ...],
) -> Call:
    """The call of a function with tensors of these letters."""
    given: dict[str, Any] = {}
    words: dict[str, str] = {}
    for name, letters in arguments.items():
        if isinstance(letters, tuple):
            given[name] = tuple(drawn(name, x) for x in letters)
            words |= {f"{name}.{i}": x for i, x in enumerate(letters)}
        else:
            given[name], words[name] = drawn(name, letters), letters
    return Call(function, given, words, bound, free, loose)


def softmax(function: Callable[..., Any], *without: str) -> Call:
    given = {"q": Q, "k": K, "v": V, **SOFTMAX, "sink": randn(H)}
    given = {name: x for name, x in given.items() if name not in without}
    return Call(function, given, WORDS, bound="H", loose=LOOSE)


def recurrence(function: Callable[..., Any], bound: str = "H", **more: Any) -> Call:
    rows: dict[str, Any] = {"q": "B H T D", "k": "B G T D", "v": "B G T E", "k_positions": "B T"}
    return case(function, bound, ANY_FLOAT, **{**rows, "state": ("B G D E",), **more})


def chosen(function: Callable[..., Any], bound: str = "H", **more: str) -> Call:
    """A mask of the keys that a query chooses."""
    rows = {"q": "B H T D", "k": "B G S D", "q_positions": "B T", "k_positions": "B S"}
    return case(function, bound, (*LOOSE, *MIXED) if "w" in more else LOOSE, **{**rows, **more})


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


def scored(rule: Callable[..., scores.ScoreRule], **own: str) -> Call:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **own: torch.Tensor) -> torch.Tensor:
        return regard.attend(q, k, v, score=rule(**own))

    loose = tuple(f"{name}:{what}" for name in own for what in ("dtype", "device"))
    free = ("embedding:rank",)  # vectors of all heads, or of each
    return case(run, "H", loose, free, q="B H T D", k="B G S D", v="B G S E", **own)


MERGED = {f"partials.{i}.{j}": x for i in (0, 1) for j, x in enumerate(("B H T E", "B H T"))}
OPS: dict[Callable[..., Any], Call] = {
    regard.attend: softmax(regard.attend),
    regard.attend_partial: softmax(regard.attend_partial, "sink"),
    regard.attention_weights: softmax(regard.attention_weights, "v"),
    regard.plan: softmax(regard.plan),
    scores.Temperature: scored(scores.Temperature, tau="H"),
    scores.TalkingHeads: scored(scores.TalkingHeads, before="H H", after="H H"),
    scores.CoPE: scored(scores.CoPE, embedding="H N D"),
    scores.Sigmoid: scored(scores.Sigmoid, bias="H"),
    regard.merge: Call(
        regard.merge,
        {
            "partials": [regard.Partial(randn(B, H, T, E), randn(B, H, T)) for _ in "ab"],
            "sink": randn(H),
        },
        {**MERGED, "sink": "H"},
        loose=LOOSE,
    ),
    linear.linear_attention: recurrence(linear.linear_attention, state=("B G D E", "B G D")),
    linear.retention: recurrence(linear.retention, decay="G"),
    linear.gated_linear: recurrence(linear.gated_linear, log_decay="B G T D"),
    linear.rwkv6: recurrence(linear.rwkv6, log_decay="B G T D", bonus="G D"),
    linear.rwkv4: Call(
        linear.rwkv4,
        {
            "k": randn(B, G, T, D),
            "v": randn(B, G, T, D).flip(2),
            "log_decay": -randn(G, D).sigmoid(),
            "bonus": randn(G, D),
            "k_positions": at(T),
            "state": (randn(B, G, D), randn(B, G, D).exp(), randn(B, G, D)),
        },
        {"k": "B G T D", "v": "B G T D", "log_decay": "G D", "bonus": "G D", "k_positions": "B T"}
        | dict.fromkeys(("state.0", "state.1", "state.2"), "B G D"),
        loose=ANY_FLOAT,
    ),
    linear.mlstm: recurrence(
        linear.mlstm,
        log_input="B G T",
        log_forget="B G T",
        state=("B G D E", "B G D", "B G"),
    ),
    linear.gated_slots: recurrence(
        linear.gated_slots, log_decay="B G T N", state=("B G D N", "B G N E")
    ),
    linear.log_linear: recurrence(
        linear.log_linear,
        q="B G T D",
        log_decay="B G T J1",
        level_weights="B G T N",
        state=("B G N D E", "B J1"),
    ),
    linear.log_sum_exp_gates: case(
        linear.log_sum_exp_gates, logits="B G T N", k_positions="B T", state=("B G N",)
    ),
    linear.cosine_features: case(
        lambda x, positions: linear.cosine_features(x, positions, 7),
        loose=("positions:device", "x:dtype", "x:device"),
        x="B H T D",
        positions="B T",
    ),
    linear.delta_rule: recurrence(linear.delta_rule, beta="B G T"),
    linear.gated_delta_rule: recurrence(linear.gated_delta_rule, beta="B G T", log_decay="B G T"),
    linear.generalized_delta_rule: recurrence(
        linear.generalized_delta_rule, c="B G T D", log_decay="B G T", a="B G T D"
    ),
    linear.delta_product: recurrence(
        linear.delta_product, k="B G T n D", v="B G T n E", beta="B G T n", log_decay="B G T"
    ),
    linear.mesa: recurrence(
        linear.mesa,
        "",
        q="B G T D",
        beta="B G T",
        log_decay="B G T",
        ridge="G D",
        state=("B G D E", "B G D D"),
    ),
    linear.titans_memory: recurrence(
        linear.titans_memory,
        "",
        q="B G T D",
        step="B G T",
        log_decay="B G T",
        log_momentum="B G T",
        state=("B G D E", "B G D E"),
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
    memory.infini_attention: case(
        partial(memory.infini_attention, segment=4),
        loose=(*LOOSE, "gate:dtype"),
        q="B H T D",
        k="B G S D",
        v="B G S E",
        gate="H",
        q_rotated="B H T D",
        k_rotated="B G S D",
        state=("B G D E", "B G D"),
        positions="B S",
    ),
    memory.retrieve: case(
        memory.retrieve, "H", (), q="B H T D", state=("B G D E", "B G D"), where="B T"
    ),
    memory.write: case(
        memory.write, "", (), k="B G S D", v="B G S E", state=("B G D E", "B G D"), where="B S"
    ),
    additive_attention: case(
        additive_attention,
        query="B H T D",
        keys="B G S D",
        values="B G S E",
        weight="H D",
        mask="T S",
        q_positions="B T",
        k_positions="B S",
    ),
    moba_mask: chosen(partial(moba_mask, size=3, topk=2)),
    quest_mask: chosen(partial(quest_mask, size=3, topk=2)),
    block_maximum_mask: chosen(
        partial(block_maximum_mask, heads=H, size=3, topk=2), "HJ1", k="B J1 S D"
    ),
    closed_blocks_mask: case(
        partial(closed_blocks_mask, blocks=block_layout(at(15), 3), topk=2),
        "J1N",
        (*MIXED, "q_positions:device"),
        q="B J T D",
        k="B J1 N D",
        w="B T J",
        q_positions="B T",
    ),
    index_scores: case(index_scores, "J1", MIXED, q="B J T D", k="B J1 S D", w="B T J"),
    index_mask: chosen(partial(index_mask, topk=2), "J1", q="B J T D", k="B J1 S D", w="B T J"),
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
    clip: "it takes one tensor of any shape",
    silu_product: "its operands are two results of one layer, and broadcast as in torch",
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
FILES_OF_OPS = ("regard.ops.tokenwise", "regard.nn.weights")
"""They have no list of public names."""
NO_OPS = {"try_gemv", "compiled_kernel_applies", "multiplies_in_fp32"}
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


def with_positions(module: nn.Module) -> Call:
    return case(module, "M", x="B T M", positions="B T")


def rows(module: nn.Module, *loose: str) -> Call:
    """A module that takes vectors of width M."""
    given = {"x": randn(2, M)}
    return Call(module, given, {"x": "R M"}, bound="M", free=("x:rank",), loose=loose)


def any_rank(module: nn.Module) -> Call:
    return case(module, "M", (), ("x:rank",), x="B T M")


MODULES: dict[str, Call] = {
    **mixers(),
    "Block": with_positions(block()),
    "ParallelBlock": with_positions(block(parts.ParallelBlock)),
    "SharedNormBlock": with_positions(shared_norm_block()),
    "DecoderBlock": case(
        decoder_block(),
        "M",
        (*LOOSE, "memory_positions:device"),
        x="B T M",
        positions="B T",
        memory="B S M",
        memory_positions="B S",
    ),
    "Linear": rows(parts.Linear(M, 600).eval()),
    "CappedLogits": rows(parts.CappedLogits(M, 600, cap=30.0)),
    "RMSNorm": rows(parts.RMSNorm(M), "x:dtype"),
    "OffsetRMSNorm": rows(parts.OffsetRMSNorm(M), "x:dtype"),
    "HeadNorm": case(parts.HeadNorm(H, D), "H D", ("x:dtype",), x="B H T D"),
    "CausalConvolution": Call(
        parts.CausalConvolution(M, 4),
        {"x": randn(B, T, M), "state": (randn(B, 3, M),), "positions": at(T)},
        {"state.0": "B n1 M", "x": "B T M", "positions": "B T"},
        bound="n1 M",
        loose=LOOSE,
    ),
    **{
        kind.__name__: Call(kind(M, H, D), {"x": randn(B, T, M), "positions": None}, bound="M")
        for kind in (parts.HeadProjection, parts.PerHeadProjection)
    },
    **{
        kind.__name__: any_rank(path(kind))
        for kind in (parts.PreNorm, parts.PostNorm, parts.OutputNorm, parts.NormedResidual)
    },
    "SandwichNorm": any_rank(path(lambda norm: parts.SandwichNorm(norm, parts.RMSNorm(M)))),
    "ScaledPreNorm": any_rank(path(lambda norm: parts.ScaledPreNorm(norm, 0.5))),
    "MoE": any_rank(moe(parts.SoftmaxRouter)),
    "MoE, sigmoid": any_rank(moe(parts.SigmoidRouter)),
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


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("learns", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_ops(op: Callable[..., Any], learns: bool) -> None:
    if op is gemv and learns:
        learns = False  # it has no gradient
    with torch.set_grad_enabled(learns):
        assert taken(OPS[op]) == []


@pytest.mark.full(keep="each")
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
    assert {x.__name__ for x in public} <= {
        type(kind.make()).__name__ for kind in KINDS.values()
    } | {"Memory", "Compressed", "Cross", "Evicting", "CrossLayer"}


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
