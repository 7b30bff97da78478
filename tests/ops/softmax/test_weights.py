"""attention_weights: any block is that block of the whole; sinks, masks, memory at length,
errors.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.ops.softmax.call import make_call
from tests.ops.softmax.plain import assert_near
from tests.oracles.plain import plain_attention

module = importlib.import_module(
    "regard.ops.softmax.attend"
)  # the package has a function of that name
CAUSAL = masks.Causal()
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"mask": CAUSAL & masks.Window(3)},
    "everything": {
        "mask": CAUSAL,
        "softcap": 2.0,
        "scale": 0.7,
        "sink": torch.tensor([0.5, -1.0, 2.0, 0.0]),
        "bias": torch.randn(4, 7, 9, generator=torch.Generator().manual_seed(1))[None],
    },
    "holes": {
        "k_positions": torch.tensor([[0, 1, -1, 2, 3, 4, 5, 6, -1]]),
        "q_positions": regard.Span(0, 7),
    },
    "blind rows": {"mask": CAUSAL, "q_positions": regard.Span(-3, 7)},
}


def qk(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, n, t, 4, generator=make).to(dtype) for n, t in ((4, 7), (2, 9)))  # type: ignore[return-value]


def meant(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """The weights by plain math: what attention does to the identity."""
    call = make_call(q, k, k, **options)
    seen = call.mask.block(call.q_positions, call.k_positions)
    eye = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:3], -1)
    keep = {name: options.get(name) for name in ("bias", "scale", "softcap", "sink")}
    return plain_attention(q, k, eye, visible=seen, **keep)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_whole(name: str, dtype: torch.dtype) -> None:
    q, k = qk(dtype)
    weights = regard.attention_weights(q, k, **OPTIONS[name])
    assert weights.dtype == dtype
    exact = meant(q.double(), k.double(), OPTIONS[name])
    assert_near(weights, exact, [meant(q.float(), k.float(), OPTIONS[name])])


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("step", [1, 2, 10**6])
@pytest.mark.parametrize("name", OPTIONS)
def test_any_block_is_that_block_of_the_whole(
    name: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = qk()
    whole = regard.attention_weights(q, k, **OPTIONS[name])
    monkeypatch.setattr(module, "BLOCK_BYTES", 2 * 4 * 7 * 8 * step)
    for rows in (None, 0, -1, 6, slice(2, 5), slice(-3, None), slice(4, 4), slice(5, 2)):
        for columns in (None, 0, -9, slice(1, 8), slice(3, 3)):
            block = regard.attention_weights(q, k, rows=rows, columns=columns, **OPTIONS[name])
            i, j = (
                slice(x, x + 1 or None) if isinstance(x, int) else x or slice(None)
                for x in (rows, columns)
            )
            right = whole[:, :, i, j]
            assert block.shape == right.shape
            assert float((block - right).abs().max() if right.numel() else 0) <= 1e-15


def test_rows_sum_to_one_or_with_a_sink_to_less() -> None:
    q, k = qk()
    sums = regard.attention_weights(q, k, mask=CAUSAL).sum(-1)
    assert float((sums - 1).abs().max()) < 1e-14
    lse = regard.attend_partial(q, k, k, mask=CAUSAL).lse
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    with_sink = regard.attention_weights(q, k, mask=CAUSAL, sink=sink).sum(-1)
    assert float((with_sink - torch.sigmoid(lse - sink[:, None])).abs().max()) < 1e-14
    assert regard.attention_weights(q, k, **OPTIONS["blind rows"])[:, :, :3].eq(0).all()


def test_they_are_the_weights_of_attend() -> None:
    q, k = qk()
    v = torch.randn(2, 2, 9, 5, dtype=torch.float64)
    for name, options in OPTIONS.items():
        weights = regard.attention_weights(q, k, **options)
        out = regard.attend(q, k, v, **options)
        assert float((weights @ v.repeat_interleave(2, 1) - out).abs().max()) < 1e-14, name


def test_values_never_enter_so_garbage_in_empty_slots_changes_nothing() -> None:
    q, k = qk()
    options = OPTIONS["holes"]
    right = regard.attention_weights(q, k, **options)
    k = k.clone()
    k[:, :, [2, 8]] = float("nan")
    assert torch.equal(regard.attention_weights(q, k, **options), right)
    k[:, :, 3] = float("nan")
    assert regard.attention_weights(q, k, **options).isnan().any(-1).all()


def test_half_weights_are_shown_in_fp32() -> None:
    q, k = qk(torch.bfloat16)
    assert regard.attention_weights(q, k).dtype == torch.float32


def test_differentiable() -> None:
    q, k = (x[:1, :, :3].clone().requires_grad_() for x in qk())

    def block(q: Tensor, k: Tensor) -> Tensor:
        return regard.attention_weights(q, k, mask=CAUSAL, rows=slice(1, 3), columns=0)

    assert torch.autograd.gradcheck(block, (q, k), fast_mode=True)


def test_memory_of_a_long_sequence_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 000 x 100 000 would be 40 GB a head; the largest block of scores is seen to be small."""
    largest = 0
    right = module.scores

    def counted(*args: Any) -> Any:
        nonlocal largest
        found = right(*args)
        largest = max(largest, found[0].nbytes)
        return found

    monkeypatch.setattr(module, "scores", counted)
    q = torch.randn(1, 1, 100_000, 2)
    shown = regard.attention_weights(
        q, q, mask=CAUSAL, rows=slice(99_990, None), columns=slice(99_995, None)
    )
    assert shown.shape == (1, 1, 10, 5)
    assert largest <= module.BLOCK_BYTES
    row = regard.attention_weights(q, q, mask=CAUSAL, rows=500, columns=slice(0, 502))
    assert float((row.sum() - 1).abs()) < 1e-5
    assert row[..., 501] == 0


def test_errors() -> None:
    q, k = qk()
    with pytest.raises(regard.ArgumentTypeError, match="does not accept dropout: it returns"):
        regard.attention_weights(q, k, dropout=0.1)
    for name, wrong, last in (
        ("rows", 7, 6),
        ("rows", slice(0, 4, 2), 6),
        ("columns", -10, 8),
        ("columns", "all", 8),
    ):
        words = rf"{name} is .*; it must be a slice of step 1, an index from {-last - 1} to {last}"
        with pytest.raises(regard.ArgumentTypeError, match=words):
            regard.attention_weights(q, k, **{name: wrong})  # type: ignore[arg-type]
    with pytest.raises(regard.ArgumentError, match="query dim 4 and key dim 3 must be equal"):
        regard.attention_weights(q, k[..., :3])
