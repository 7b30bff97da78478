"""The attention function itself: each argument that transformers' modules pass, against loops in
fp64.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import ArgumentError, ArgumentTypeError, masks
from regard.masks import Causal, Window
from regard.span import Span
from tests.integrations.families import (
    MaskRule,
    architectures,
    name_taps,
    regard_attention,
    transformers,
)
from tests.integrations.matrix.cells import class_of
from tests.integrations.matrix.tiny import tiny
from tests.oracles.oracle import softmax_attention
from tests.oracles.plain import plain_attention
from tests.rules import GRADIENT, assert_close_rule

attention = importlib.import_module("regard.integrations.transformers.attention")
NEUTRAL, READ, REFUSED = (
    attention.IGNORED_KEYWORDS,
    attention.USED_KEYWORDS,
    attention.REFUSED_KEYWORDS,
)
B, H, G, T, S, D, E = 2, 4, 2, 5, 7, 6, 3
LOWEST = torch.finfo(torch.float32).min


class Module(nn.Module):
    """What a caller is asked for."""

    def __init__(self, *, is_causal: bool = False, layer_idx: int | None = None) -> None:
        super().__init__()
        self.is_causal, self.layer_idx = is_causal, layer_idx


def inputs(spread: float = 1.0, T: int = T, S: int = S) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    return (
        spread * torch.randn(B, H, T, D),
        spread * torch.randn(B, G, S, D),
        torch.randn(B, G, S, E),
    )


def loops(
    q: Tensor, k: Tensor, v: Tensor, sees: Any, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """z [B,T,H,E] in fp64, number by number: sees(b, h, i, j), bias [B,H,T,S]."""
    added = torch.zeros(B, H, T, S) if bias is None else bias
    found = softmax_attention(
        q, k, v, visible=sees, bias=lambda *at: added[at].double().item(), **options
    )
    return found.out.transpose(1, 2)


def plain(q: Tensor, k: Tensor, v: Tensor, shown: Tensor, **options: Any) -> Tensor:
    """The same in the dtype of q, by plain torch."""
    return plain_attention(q, k, v, visible=shown, **options)[0].transpose(1, 2)


def table(rule: Any, T: int = T, S: int = S) -> Tensor:
    return torch.tensor(
        [
            [[[rule(b, h, i, j) for j in range(S)] for i in range(T)] for h in range(H)]
            for b in range(B)
        ]
    )


def window(b: int, h: int, i: int, j: int) -> bool:
    return i + S - T - 3 < j <= i + S - T


def ragged(b: int, h: int, i: int, j: int) -> bool:
    return (b + h + i * j) % 3 != 0


def everything(b: int, h: int, i: int, j: int) -> bool:
    return True


bias_values = torch.randn(B, H, T, S, generator=torch.Generator().manual_seed(2))
sinks = torch.tensor([0.5, -3.0, 2.0, 0.0])
BY_RULE = MaskRule.make(Causal() & Window(3), Span(S - T, T), Span(0, S), batch=B)
ADDED = torch.where(table(ragged), bias_values, LOWEST)
# what is passed -> what it means: (sees, cap, bias, sink)
CASES: dict[str, tuple[dict[str, Any], tuple[Any, float | None, Tensor | None, Tensor | None]]] = {
    "rule": ({"attention_mask": BY_RULE}, (window, None, None, None)),
    "dense": ({"attention_mask": table(ragged)}, (ragged, None, None, None)),
    "float mask": ({"attention_mask": ADDED}, (ragged, None, bias_values, None)),
    "softcap": ({"attention_mask": BY_RULE, "softcap": 0.7}, (window, 0.7, None, None)),
    "sinks": ({"attention_mask": BY_RULE, "s_aux": sinks}, (window, None, None, sinks)),
    "position bias": (
        {"position_bias": bias_values, "is_causal": False},
        (everything, None, bias_values, None),
    ),
    "bias and float mask": (
        {"attention_mask": ADDED, "position_bias": 2 * bias_values},
        (ragged, None, 3 * bias_values, None),
    ),
    "all": (
        {"attention_mask": BY_RULE, "softcap": 0.7, "s_aux": sinks, "position_bias": bias_values},
        (window, 0.7, bias_values, sinks),
    ),
}


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("spread", [1.0, 6.0])
@pytest.mark.parametrize("scaling", [None, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_each_argument_means_what_the_loops_say(
    name: str, scaling: float | None, spread: float
) -> None:
    passed, (sees, cap, bias, sink) = CASES[name]
    q, k, v = inputs(spread)
    scale = D**-0.5 if scaling is None else scaling
    z, weights = regard_attention(
        Module(), q, k, v, **({"attention_mask": None} | passed), scaling=scaling
    )
    assert weights is None
    assert z.is_contiguous()
    added = torch.zeros(1, 1, 1, 1) if bias is None else bias
    options = {"scale": scale, "softcap": cap, "sink": sink}
    ref = loops(q, k, v, sees, added.expand(B, H, T, S), **options)
    # other orders of the same sums are of equal standing: one alone may be right by luck
    orders = [list(range(D)), [5, 4, 3, 2, 1, 0], [2, 0, 1, 5, 3, 4], [4, 1, 5, 2, 0, 3]]
    same = [plain(q[..., x], k[..., x], v, table(sees), bias=added, **options) for x in orders]
    assert_close_rule(z, same, ref, what=name)
    wrong, _ = regard_attention(Module(), q, k, v, attention_mask=table(everything))
    assert (wrong - ref).abs().max() > 1e-3


def test_without_a_mask_nothing_is_hidden_unless_the_caller_says_so() -> None:
    """Aligned at the first key, and one query sees everything."""
    q, k, v = inputs()

    def first(b: int, h: int, i: int, j: int) -> bool:
        return j <= i

    for module, said, length, sees in (
        (Module(), None, T, everything),
        (nn.Module(), None, T, everything),
        (Module(), True, T, first),
        (Module(is_causal=True), False, T, everything),
        (Module(is_causal=True), None, 1, everything),
    ):
        z, _ = regard_attention(module, q[:, :, :length], k, v, None, is_causal=said)
        ref = loops(q[:, :, :length], k, v, sees)
        same = plain(q[:, :, :length], k, v, table(sees, T=length, S=S))
        assert_close_rule(z, same, ref)
    with pytest.raises(ArgumentError, match=r"Module passes no mask, .*is_causal is True"):
        regard_attention(Module(is_causal=True), q, k, v, None)


CROSS = re.compile("cross|encoder_attn|EncDec", re.IGNORECASE)
"""What the path, or the class, of a module that attends to another sequence is named after."""


source = functools.cache(inspect.getsource)


def cross_attention_modules() -> dict[str, nn.Module]:
    """One module of each class of the installed transformers that attends to another sequence and
    takes its attention from the interface, on the device "meta".
    """
    found: dict[str, nn.Module] = {}
    for name in architectures():
        kind, options = transformers.CONFIG_MAPPING[name], ("is_decoder", "add_cross_attention")
        try:
            given = dict.fromkeys(options, True) if hasattr(kind(), options[1]) else {}
            with torch.device("meta"):
                model = class_of(name)[1](tiny(kind, name, **given))
        except Exception:  # the matrix of docs/transformers.md says why it cannot be built
            continue
        for path, module in model.named_modules():
            cls = type(module)
            if cls.__name__ in found or not CROSS.search(f"{path} {cls.__name__}"):
                continue
            if "ALL_ATTENTION_FUNCTIONS" in source(cls):
                found[cls.__name__] = module
    return found


@pytest.mark.nightly  # it imports all models of transformers
@pytest.mark.filterwarnings("ignore")
def test_no_cross_attention_of_transformers_becomes_causal() -> None:
    """Eager attention reads nothing but the mask: without one every query sees every key."""
    q, k, v = inputs()
    ref = loops(q, k, v, everything)
    same = plain(q, k, v, table(everything))
    modules = cross_attention_modules()
    assert len(modules) > 50
    assert not hasattr(modules["MllamaTextCrossAttention"], "is_causal")
    for name, module in modules.items():
        if getattr(module, "is_causal", False):  # which eager attention ignores, and sdpa obeys
            with pytest.raises(ArgumentError, match=f"{name} passes no mask"):
                regard_attention(module, q, k, v, None)
        else:
            assert_close_rule(regard_attention(module, q, k, v, None)[0], same, ref, what=name)


def test_learned_queries_serve_every_row() -> None:
    q, k, v = inputs()
    z, _ = regard_attention(Module(), q[:1], k, v, None)
    again, _ = regard_attention(Module(), q[:1].repeat(B, 1, 1, 1), k, v, None)
    assert z.shape == (B, T, H, E)
    assert torch.equal(z, again)


def test_the_gradient_reaches_queries_keys_values_bias_and_sinks() -> None:
    given = [x.requires_grad_() for x in (*inputs(), bias_values.clone(), sinks.clone())]
    toward = torch.randn(B, T, H, E)

    def run(kind: torch.dtype, *, ours: bool) -> list[Tensor]:
        q, k, v, bias, sink = leaves = [x.detach().to(kind).requires_grad_() for x in given]
        if ours:
            z, _ = regard_attention(
                Module(), q, k, v, BY_RULE, position_bias=bias, s_aux=sink, softcap=0.7
            )
        else:
            z = plain(q, k, v, table(window), softcap=0.7, bias=bias, sink=sink)
        return list(torch.autograd.grad((z * toward.to(kind)).sum(), leaves))

    found = run(torch.float32, ours=True)
    plains, refs = run(torch.float32, ours=False), run(torch.float64, ours=False)
    for name, x, same, ref in zip(
        ("q", "k", "v", "bias", "sink"), found, plains, refs, strict=True
    ):
        assert_close_rule(x, same, ref, factor=GRADIENT, what=name)
        assert ref.abs().max() > 1e-3


def test_dropout_drops_weights_and_scales_the_rest() -> None:
    q, k, _ = inputs()
    v = torch.eye(S).expand(B, G, S, S)  # the output is the weights
    whole, _ = regard_attention(Module(), q, k, v, None)
    dropped, _ = regard_attention(Module(), q, k, v, None, dropout=0.5)
    gone = dropped == 0
    assert 0.3 < gone.double().mean() < 0.7
    assert torch.allclose(dropped[~gone], 2 * whole[~gone], rtol=1e-5)


def test_weights_are_returned_to_who_asks() -> None:
    q, k, v = inputs()
    z, weights = regard_attention(Module(), q, k, v, BY_RULE, output_attentions=True)
    assert weights is not None
    assert weights.shape == (B, H, T, S)
    assert torch.equal(weights != 0, table(window))
    again = (weights.double() @ v.repeat_interleave(H // G, 1).double()).transpose(1, 2)
    assert (z - again).abs().max() < 1e-6


def test_taps_have_the_place_of_the_module() -> None:
    q, k, v = inputs()
    tree = nn.ModuleDict({"encoder": Module(is_causal=False, layer_idx=1)})
    for module, place in (
        (Module(layer_idx=3), "layers.3."),
        (Module(), ""),
        (tree["encoder"], "layers.1."),
    ):
        with regard.Trace("q", "k", "v", "pattern", "z") as trace:
            z, _ = regard_attention(module, q, k, v, BY_RULE)
        assert list(trace) == [place + name for name in ("q", "k", "v", "pattern", "z")]
        assert torch.equal(trace["z"].transpose(1, 2), z)
        assert torch.equal(trace["pattern"] != 0, table(window))
    name_taps(tree)
    with regard.Trace("pattern") as trace:
        regard_attention(tree["encoder"], q, k, v, BY_RULE)
    assert list(trace) == ["encoder.pattern"]


def test_an_edit_changes_what_the_model_computes() -> None:
    q, k, v = inputs()
    with regard.Trace(edit={"layers.0.v": torch.zeros_like}):
        z, _ = regard_attention(Module(layer_idx=0), q, k, v, None)
        other, _ = regard_attention(Module(layer_idx=1), q, k, v, None)
    assert not z.any()
    assert other.any()


def test_a_keyword_that_is_not_known_to_be_harmless_is_refused() -> None:
    q, k, v = inputs()
    for name in ("sinks", "cache", "head_mask", "anything"):
        with pytest.raises(ArgumentTypeError, match=rf"Module passes {name}, .*no such option"):
            regard_attention(Module(), q, k, v, None, **{name: torch.zeros(1)})
        with pytest.raises(ArgumentTypeError, match=f"Module passes {name}, "):
            regard_attention(Module(), q, k, v, None, **{name: False})
        regard_attention(Module(), q, k, v, None, **{name: None})
    plain, _ = regard_attention(Module(), q, k, v, None)
    for name in NEUTRAL:
        given, _ = regard_attention(Module(), q, k, v, None, **{name: 3})
        assert torch.equal(given, plain), name


BOUND = re.compile(r"^ *(\w+)(?:: \w+)? = \(?\s*ALL_ATTENTION_FUNCTIONS\b", re.MULTILINE)
"""The name to which a module of transformers gives the attention function."""


def calls_of_the_interface() -> dict[str, set[str]]:
    """The keywords of every `attention_interface(...)` in the installed transformers, and the
    modules that pass them.
    """
    found: dict[str, set[str]] = {}
    calls = 0
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        text = path.read_text("utf-8")
        for name in {*BOUND.findall(text)}:
            for match in re.finditer(rf"\b{name}\(", text):
                call = parsed(text, match.start(), match.end())
                calls += 1
                assert len(call.args) <= 8, f"{path}: more arguments than regard_attention names"
                for keyword in call.keywords:
                    if keyword.arg is not None:
                        found.setdefault(keyword.arg, set()).add(path.parent.name)
    assert calls > 300
    return found


def parsed(text: str, start: int, inside: int) -> ast.Call:
    """The call that starts there: parsing each file whole would take minutes."""
    depth, end = 1, inside
    while depth:
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    found = ast.parse(text[start:end], mode="eval").body
    assert isinstance(found, ast.Call)
    return found


@pytest.mark.full
def test_every_keyword_that_transformers_passes_is_known() -> None:
    """A keyword that a new version of transformers passes fails here: read what eager attention
    does with it.
    """
    named = set(inspect.signature(regard_attention).parameters) - {"kwargs"}
    passed = calls_of_the_interface()
    unknown = {
        x: sorted(passed[x]) for x in passed.keys() - named - NEUTRAL - READ - REFUSED.keys()
    }
    assert not unknown, f"passed by transformers {transformers.__version__}: {unknown}"
    assert {"indices", "block_indices", "softcap", "s_aux", "position_bias"} <= passed.keys()
    assert not NEUTRAL & REFUSED.keys()
    assert not READ & REFUSED.keys()


def chosen(name: str) -> tuple[dict[str, Any], Any]:
    """A selection as a module passes it, and what it means."""
    draw = torch.Generator().manual_seed(8)
    if name == "indices":
        at = torch.rand(B, T, S, generator=draw).argsort(-1)[..., :3].int()
        at[0, 0, 0] = at[1, 1, 2] = -1
        return {"indices": at}, lambda b, h, i, j: j in at[b, i].tolist()
    blocks = torch.rand(B, G, T, 3, generator=draw).argsort(-1)[..., :2]
    blocks[0, 0, 2, 1] = blocks[1, 1, 3] = -1
    return {"block_indices": blocks}, lambda b, h, i, j: j // 3 in blocks[b, h * G // H, i].tolist()


@pytest.mark.parametrize("masked", ["rule", "later rule", "dense", "float", "none"])
@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_a_selection_is_obeyed(name: str, masked: str) -> None:
    passed, selects = chosen(name)
    module = Module()
    module.indexer = torch.nn.Module()
    module.indexer.block_size = 3
    mask, sees = {
        "rule": (BY_RULE, window),
        "later rule": (
            MaskRule.make(Causal() & Window(3), Span(S - T + 4, T), Span(4, S), batch=B),
            window,
        ),
        "dense": (table(ragged), ragged),
        "float": (ADDED, ragged),
        "none": (None, everything),
    }[masked]

    def both(b: int, h: int, i: int, j: int) -> bool:
        return sees(b, h, i, j) and selects(b, h, i, j)

    q, k, v = inputs()
    z, weights = regard_attention(module, q, k, v, mask, output_attentions=True, **passed)
    added = bias_values if masked == "float" else torch.zeros(B, H, T, S)
    ref = loops(q, k, v, both, added)
    orders = [list(range(D)), [5, 4, 3, 2, 1, 0], [2, 0, 1, 5, 3, 4]]
    same = [plain(q[..., x], k[..., x], v, table(both), bias=added) for x in orders]
    assert_close_rule(z, same, ref, what=name)
    assert not weights[~table(both)].any()
    without, _ = regard_attention(module, q, k, v, mask)
    assert (without - ref).abs().max() > 1e-3


def test_bounds_of_packed_rows_that_do_not_fit_are_refused() -> None:
    q, k, v = (x[:1] for x in inputs(S=T))
    for bounds in ([0, 2, 4], [1, T], [0, T, 4], []):
        given = {"cu_seq_lens_q": torch.tensor(bounds), "cu_seq_lens_k": torch.tensor([0, 4])}
        with pytest.raises(ArgumentError, match=r"cu_seq_lens_q \["):
            regard_attention(Module(), q, k, v, None, **given)
    chunks = MaskRule.make(masks.Chunk(3), Span(0, T), Span(0, T), 1, "cpu")
    given = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 2, T]))
    with pytest.raises(ArgumentError, match="chunks that begin at the first token of the batch"):
        regard_attention(Module(), q, k, v, chunks, **given)


def test_a_selection_that_does_not_fit_is_refused() -> None:
    q, k, v = inputs()
    at = torch.zeros(B, T, 2, dtype=torch.int64)
    with pytest.raises(
        ArgumentError, match=r"Module passes indices \(2, 4, 2\); it must be \[2, 5, n\]"
    ):
        regard_attention(Module(), q, k, v, None, indices=at[:, 1:])
    with pytest.raises(ArgumentTypeError, match=r"block_indices, but has no indexer\.block_size"):
        regard_attention(Module(), q, k, v, None, block_indices=at[:, None])
    module = Module()
    module.indexer = torch.nn.Module()
    module.indexer.block_size = 3
    with pytest.raises(
        ArgumentError,
        match=r"block_indices \(2, 3, 5, 2\); it must be \[2, groups that divide 4 heads, 5, n\]",
    ):
        regard_attention(module, q, k, v, None, block_indices=at[:, None].expand(B, 3, T, 2))


def test_a_mask_for_other_keys_is_refused() -> None:
    q, k, v = inputs()
    with pytest.raises(
        ArgumentError, match=r"attention_mask is \(2, 1, 5, 7\) for 5 queries and 6 keys"
    ):
        regard_attention(Module(), q, k[:, :, 1:], v[:, :, 1:], BY_RULE)
    with pytest.raises(
        ArgumentError, match=r"attention_mask is \(2, 1, 5, 7\) for 4 queries and 7 keys"
    ):
        regard_attention(Module(), q[:, :, 1:], k, v, BY_RULE)
