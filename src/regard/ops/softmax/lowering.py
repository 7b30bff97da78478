"""What kernels make of a call's mask, bias and score rules.

A fused kernel supports no mask and the square causal triangle. Every other mask becomes ranges of
keys for blocks of queries, with one of these or an additive mask, whose results are merged by their
lse. The gradient of a bias is summed over blocks, never `[B, H, T, S]` in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from regard import masks
from regard.biases import Bias, DenseBias, Sum
from regard.masks import EMPTY, FULL, PARTIAL, Mask
from regard.ops.softmax.call import Call
from regard.process_state import is_exporting, is_exporting_onnx
from regard.scores import ScoreBlock, ScoreRule, SoftClamp, Temperature
from regard.scores.base import change_scores
from regard.span import Positions, Span, as_tensor, slice_positions

BLOCK_QUERIES = 256
"""The default number of queries in a block."""


class BlockSizes(NamedTuple):
    """The sizes of the blocks and tiles into which a call is split.

    Args:
        rows, keys: the queries in a block, and the keys in a tile.
        long: the fewest adjacent fully visible tiles that form a range without a mask.
        small: the most rows of a causal triangle that joins the earlier keys in a masked range.
    """

    rows: int = BLOCK_QUERIES
    keys: int = 128
    long: int = 4
    small: int = 32


DEFAULT_BLOCK_SIZES = BlockSizes()
"""The block sizes that the kernel "sdpa" uses."""

MIN_KEYS = 16
"""The fewest keys for torch's fused kernel, which loses a row of NaN scores (pytorch #141128)."""


ALL = slice(None)


class KeyRange(NamedTuple):
    """The keys `start` to `stop` - 1, and how they are masked.

    Args:
        start, stop: numbers, because torch.compile would specialize a graph on a slice.
        causal: whether row i of the block sees the first i + 1 keys of the range only.
        mask: returns the float mask `[B or 1, H or 1, t or 1, s]`, or None; computed when used, so
            that never all are in memory.
    """

    start: int
    stop: int
    causal: bool = False
    mask: Callable[[], Tensor] | None = None

    @property
    def columns(self) -> slice:
        """The keys of the range as a slice."""
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        """The number of keys in the range."""
        return self.stop - self.start


class QueryBlock(NamedTuple):
    """A range of queries, and the disjoint ranges of keys that they see, if any."""

    rows: slice
    ranges: list[KeyRange]


def lower_mask(call: Call, sizes: BlockSizes = DEFAULT_BLOCK_SIZES) -> list[QueryBlock]:
    """Split a call into blocks of queries with their key ranges; others see nothing."""
    if is_exporting_onnx() and (key_range := _onnx_key_range(call)) is not None:
        return [QueryBlock(ALL, [key_range])]
    if call.bias is None and not is_exporting():
        known = _lower_without_reading(call, sizes)
        # only on a CPU does torch return the lse by which the results of ranges are merged
        one = known is not None and sum(len(block.ranges) for block in known) == 1
        if known is not None and (one or call.q.device.type in ("cpu", "meta")):
            return known
    if not (call.readable and call.q.device.type == "cpu"):
        # Finding the visible tiles reads tensors, which a compiled graph cannot do, and for which
        # another device would have to synchronize.
        everything = KeyRange(0, call.S, False, partial(additive_mask, call, ALL, ALL))
        return [QueryBlock(ALL, [everything])]
    blocks = [slice(i, min(i + sizes.rows, call.T)) for i in range(0, call.T, sizes.rows)]
    return [_lower_by_tiles(call, rows, sizes) for rows in blocks]


def _onnx_key_range(call: Call) -> KeyRange | None:
    """Return one range with all keys if ONNX's Attention needs no mask tensor for it."""
    if call.bias is not None:
        return None
    if call.sees_everything:
        return KeyRange(0, call.S)
    # a comparison of lengths would limit the file to some of them, the comparison of objects cannot
    same_tokens = isinstance(call.q_positions, Span) and call.q_positions is call.k_positions
    if same_tokens and isinstance(call.mask, masks.Causal):
        return KeyRange(0, call.S, causal=True)
    return None


def _lower_without_reading(call: Call, sizes: BlockSizes) -> list[QueryBlock] | None:
    """Lower a full or causal mask over contiguous positions without reading a tensor, or None."""
    q, k = call.q_positions, call.k_positions
    if not (isinstance(q, Span) and isinstance(k, Span) and k.start >= 0):
        return None
    if call.sees_everything:
        if call.compiling and call.S < MIN_KEYS:  # outside of a graph this call was refused
            return None
        return [QueryBlock(_all_queries(call), [KeyRange(0, call.S)])]
    if isinstance(call.mask, masks.Causal):
        if call.compiling:
            return _lower_causal_in_graph(call, q, k)
        return _lower_causal(call, q, k, sizes)
    padding = _padding_beside_causal(call.mask)
    if padding is not None and q == k:
        # the causal flag covers the triangle; the padding is a mask of one row for all queries
        if call.compiling and call.S < MIN_KEYS:
            return None
        mask = partial(_additive_mask_of_range, replace(call, mask=padding), 0, 1, 0, call.S)
        return [QueryBlock(_all_queries(call), [KeyRange(0, call.S, True, mask)])]
    return None


def _all_queries(call: Call) -> slice:
    """Return the slice of all queries; in a graph without its length, which would specialize."""
    return ALL if call.compiling else slice(0, call.T)


def _padding_beside_causal(mask: Mask) -> Mask | None:
    """Return the padding mask of `causal & padding`, or None for any other mask."""
    terms = mask.terms()
    others = [term for term in terms if not isinstance(term, masks.Causal)]
    is_causal_and_padding = (
        len(terms) == 2 and len(others) == 1 and isinstance(others[0], masks.Padding)
    )
    return others[0] if is_causal_and_padding else None


def _lower_causal(call: Call, q: Span, k: Span, sizes: BlockSizes) -> list[QueryBlock]:
    """Lower a causal mask over contiguous positions; queries before all keys are in no block."""
    first_row = min(max(k.start - q.start, 0), call.T)
    earlier_keys = max(q.start + first_row - k.start, 0)
    triangle_rows = max(0, min(call.T - first_row, call.S - earlier_keys))  # rows of the triangle
    blocks = []
    if triangle_rows:
        rows = slice(first_row, first_row + triangle_rows)
        too_few_keys = earlier_keys + triangle_rows < MIN_KEYS  # with a mask torch keeps NaN scores
        if triangle_rows == 1 and not too_few_keys:
            ranges = [KeyRange(0, earlier_keys + 1)]
        elif too_few_keys or (earlier_keys and triangle_rows <= sizes.small):
            ranges = [_masked_range(call, rows, slice(0, earlier_keys + triangle_rows))]
        else:
            ranges = [
                *([KeyRange(0, earlier_keys)] if earlier_keys else []),
                KeyRange(earlier_keys, earlier_keys + triangle_rows, causal=True),
            ]
        blocks.append(QueryBlock(rows, ranges))
    if first_row + triangle_rows < call.T and call.S:
        blocks.append(QueryBlock(slice(first_row + triangle_rows, call.T), [KeyRange(0, call.S)]))
    return blocks


def _lower_causal_in_graph(call: Call, q: Span, k: Span) -> list[QueryBlock] | None:
    """Lower a causal mask in a graph of many lengths, or return None; comparisons specialize it."""
    if call.S < MIN_KEYS:
        return None
    if call.T == 1 and q.start + 1 == k.stop:
        return [QueryBlock(ALL, [KeyRange(0, call.S)])]
    if q == k:
        return [QueryBlock(ALL, [KeyRange(0, call.S, causal=True)])]
    return None


def _lower_by_tiles(call: Call, rows: slice, sizes: BlockSizes) -> QueryBlock:
    """Return the key ranges of one block of queries, long runs of full tiles without a mask."""
    ranges = visible_key_ranges(call, rows, sizes.keys, sizes.long)
    no_bias = call.bias is None
    return QueryBlock(
        rows,
        [
            KeyRange(keys.start, keys.stop) if full and no_bias else _masked_range(call, rows, keys)
            for keys, full in ranges
        ],
    )


def visible_key_ranges(call: Call, rows: slice, size: int, long: int) -> list[tuple[slice, bool]]:
    """Return the ranges of keys that some query of a block sees, and whether all queries do."""
    tiles = call.mask.tile_row(call.q_positions, call.k_positions, rows, size)
    largest, smallest = tiles.amax((0, 1)).tolist(), tiles.amin((0, 1)).tolist()
    state = [
        hi and (lo if lo == FULL else PARTIAL) for hi, lo in zip(largest, smallest, strict=True)
    ]
    return [
        (slice(start * size, min(stop * size, call.S)), full)
        for start, stop, full in merge_tiles(state, long)
    ]


def merge_tiles(state: list[int], long: int) -> list[tuple[int, int, bool]]:
    """Merge tiles that are not empty into runs (start, stop, full), full ones from `long` on."""
    merged: list[tuple[int, int, bool]] = []
    for kind, group in groupby(range(len(state)), key=state.__getitem__):
        tiles = list(group)
        start, stop = tiles[0], tiles[-1] + 1
        has_partial_neighbour = PARTIAL in (
            *state[max(start - 1, 0) : start],
            *state[stop : stop + 1],
        )
        full = kind == FULL and (len(tiles) >= long or not has_partial_neighbour)
        if kind == EMPTY:
            continue
        if merged and merged[-1][1] == start and not full and not merged[-1][2]:
            start = merged.pop()[0]
        merged.append((start, stop, full))
    return merged


def _masked_range(call: Call, rows: slice, columns: slice) -> KeyRange:
    """Return a key range with an additive mask."""
    limits = rows.start, rows.stop, columns.start, columns.stop
    return KeyRange(
        columns.start, columns.stop, False, partial(_additive_mask_of_range, call, *limits)
    )


def _additive_mask_of_range(
    call: Call, first_query: int, stop_query: int, start: int, stop: int
) -> Tensor:
    """Compute the additive mask for a range of queries and one of keys."""
    return additive_mask(call, slice(first_query, stop_query), slice(start, stop))


def additive_mask(call: Call, rows: slice, columns: slice) -> Tensor:
    """Return the bias (or 0) of visible keys, else -inf: `[B or 1, H or 1, t, s]`."""
    block_of = (call.q_positions, call.k_positions, rows, columns)
    visible = call.mask.block(*block_of, device=call.q.device)
    if call.bias is None:
        base = torch.zeros((), dtype=call.score_dtype, device=visible.device)
    else:
        base = call.bias.block(*block_of, dtype=call.score_dtype, device=visible.device)
    return torch.where(visible, base, -math.inf)


EVERY_ROW = slice(None)


class TrainableTerm(NamedTuple):
    """A bias with a tensor that requires a gradient, as one term of a sum, and its tensors."""

    term: Bias
    first: int
    stop: int


class BiasGradient:
    """Accumulates the gradients of the tensors of a bias over blocks of the scores."""

    def __init__(
        self, bias: Bias | None, requires_grad: tuple[bool, ...], dtype: torch.dtype
    ) -> None:
        tensors = () if bias is None else bias.tensors()
        self.requires_grad = requires_grad
        self.dtypes = [x.dtype for x in tensors]
        self.sums = {
            i: torch.zeros(x.shape, dtype=dtype, device=x.device)
            for i, x in enumerate(tensors)
            if requires_grad[i]
        }
        self.trainable: list[TrainableTerm] = []
        first = 0
        for term in bias_terms(bias):
            stop = first + len(term.tensors())
            if any(requires_grad[first:stop]):
                self.trainable.append(TrainableTerm(term, first, stop))
            first = stop

    def add(self, call: Call, d_s: Tensor, rows: slice, columns: slice) -> None:
        """Add the contribution of one block of the scores."""
        d_s = d_s.view(call.B, call.H, -1, d_s.shape[-1])
        for trainable in self.trainable:
            if isinstance(trainable.term, DenseBias):
                # added in place: autograd would return a gradient of the full size for each block
                total = self.sums[trainable.first]
                total = total[None, None] if total.ndim == 2 else total
                block_sum = total[:, :, rows if total.shape[2] > 1 else EVERY_ROW, columns]
                block_sum += d_s.sum_to_size(block_sum.shape)
            else:
                self._differentiate(trainable, call, d_s, rows, columns)

    def _differentiate(
        self, trainable: TrainableTerm, call: Call, d_s: Tensor, rows: slice, columns: slice
    ) -> None:
        """Add the block's contribution of one trainable bias, by autograd, to the sums."""
        requires_grad = self.requires_grad[trainable.first : trainable.stop]
        with torch.enable_grad():
            tensors = [
                x.detach().to(d_s.dtype).requires_grad_(required)
                for x, required in zip(trainable.term.tensors(), requires_grad, strict=True)
            ]
            block_arguments = (call.q_positions, call.k_positions, rows, columns)
            block = trainable.term.with_tensors(tensors).block(
                *block_arguments, dtype=d_s.dtype, device=d_s.device
            )
        if not block.requires_grad:
            return
        inputs = {i: x for i, x in enumerate(tensors, trainable.first) if x.requires_grad}
        gradients = torch.autograd.grad(
            block, [*inputs.values()], d_s.sum_to_size(block.shape), allow_unused=True
        )
        for i, g in zip(inputs, gradients, strict=True):
            if g is not None:
                self.sums[i] += g

    def total(self) -> list[Tensor | None]:
        """Return the summed gradients in the dtypes of the tensors; None where not required."""
        return [
            self.sums[i].to(dtype) if i in self.sums else None
            for i, dtype in enumerate(self.dtypes)
        ]


def bias_terms(bias: Bias | None) -> tuple[Bias, ...]:
    """Return the biases whose sum is `bias`: terms, the bias itself, or nothing for None."""
    if bias is None:
        return ()
    return bias.terms if isinstance(bias, Sum) else (bias,)


def score_block(
    call: Call, rows: slice, columns: slice, visible: Tensor, key_count: Tensor | None = None
) -> ScoreBlock:
    """Return what a score rule may read about a block of a call."""
    device = visible.device  # a call that a backward pass saved has no data

    def along(positions: Positions, part: slice, dim: int) -> Tensor:
        return as_tensor(slice_positions(positions, part), device)[:, None].unsqueeze(dim)

    if key_count is None and call.score is not None and call.score.needs_count:
        key_count = visible.expand(*visible.shape[:3], call.S).sum(-1, keepdim=True)
    return ScoreBlock(
        call.q[:, :, rows],
        visible,
        torch.arange(call.B, device=device)[:, None, None, None],
        torch.arange(call.H, device=device)[None, :, None, None],
        along(call.q_positions, rows, 3),
        along(call.k_positions, columns, 2),
        torch.arange(call.T, device=device)[rows][None, None, :, None],
        torch.arange(call.S, device=device)[columns][None, None, None, :],
        key_count,
    )


def change_pattern(rule: ScoreRule, p: Tensor, block: ScoreBlock) -> Tensor:
    """Return the weights after all steps of a rule that change weights; 0 where a key is hidden."""
    for step in rule.steps():
        p = step.change_pattern(p.masked_fill(~block.visible, 0), block)
    return p.masked_fill(~block.visible, 0)


def without_rule(call: Call) -> Call | None:
    """Return a call without a score rule that means the same, such as by a softcap, or None."""
    if call.score is None or call.bias is not None or call.softcap is not None:
        return None
    q, scale, softcap = call.q, call.scale, call.softcap
    for step in call.score.steps():
        if softcap is not None or not isinstance(step, (Temperature, SoftClamp)):
            return None
        if isinstance(step, SoftClamp):
            softcap = float(step.cap)
        elif isinstance(step.tau, Tensor):
            h = torch.arange(call.H, device=q.device)[None, :, None]
            positions = as_tensor(call.q_positions, q.device)[:, None]
            divisor = step.divisor(h, positions, call.score_dtype)
            assert isinstance(divisor, Tensor), "the temperature is a tensor"
            q = (q.to(call.score_dtype) / divisor[..., None]).to(call.q.dtype)
        else:
            scale = scale / step.tau
    if not 0 < abs(scale) < math.inf:  # a graph cannot ask isfinite
        return None
    return replace(call, q=q, scale=scale, softcap=softcap, score=None, original=call)


class RuleOfTile:
    """A score rule on one tile, with the way back of its gradient."""

    def __init__(
        self,
        call: Call,
        device: torch.device,
        tensors: Sequence[Tensor] = (),
        needs_gradient: Sequence[bool] = (),
    ) -> None:
        assert call.score is not None, "only made for a call with a rule"
        self.rule, self.needs_gradient = call.score, tuple(needs_gradient)
        self.replaces_softmax = call.score.normalizer is not None
        self.sums = [
            torch.zeros(x.shape, dtype=call.score_dtype, device=x.device) if needed else None
            for x, needed in zip(tensors, self.needs_gradient, strict=True)
        ]
        self.dtypes = [x.dtype for x in tensors]
        self._key_count = (
            call.mask.visible(call.q_positions, call.k_positions, device=device)[..., None]
            if call.score.needs_count
            else None
        )
        self._call = call

    def block(self, rows: slice, columns: slice, visible: Tensor) -> ScoreBlock:
        """Return what the rule may read about a tile; see `score_block`."""
        count = None if self._key_count is None else self._key_count[:, :, rows]
        return score_block(self._call, rows, columns, visible, count)

    def apply(self, s: Tensor, block: ScoreBlock, *, hides: bool) -> Tensor:
        """Return the scores of a tile after the rule, -inf where masked, or the rule's weights."""
        return self._apply(self.rule, s, block, hides=hides)

    def _apply(self, rule: ScoreRule, s: Tensor, block: ScoreBlock, *, hides: bool) -> Tensor:
        s = change_scores(rule, s, block, hides=hides)
        s = s.masked_fill(~block.visible, -math.inf) if hides else s
        if not self.replaces_softmax:
            return s
        weights = rule.normalizer.normalize(s, block)  # type: ignore[union-attr]
        return weights.masked_fill(~block.visible, 0) if hides else weights

    def apply_with_gradient(self, s: Tensor, block: ScoreBlock, *, hides: bool) -> TileGradient:
        """Return the result of `apply`, with what its gradient needs."""
        with torch.enable_grad():
            before = s.detach().requires_grad_()
            tensors = [
                x.detach().to(s.dtype).requires_grad_(needed)
                for x, needed in zip(self.rule.tensors(), self.needs_gradient, strict=True)
            ]
            after = self._apply(self.rule.with_tensors(tensors), before, block, hides=hides)
        return TileGradient(self, before, tensors, after)

    def add(self, i: int, gradient: Tensor) -> None:
        """Add the gradient of the i-th tensor on one tile."""
        total = self.sums[i]
        assert total is not None, "only tensors that require a gradient get one"
        total += gradient

    def total(self) -> list[Tensor | None]:
        """Return the summed gradients in the dtypes of the tensors; None where not required."""
        return [
            None if x is None else x.to(dtype)
            for x, dtype in zip(self.sums, self.dtypes, strict=True)
        ]


class TileGradient:
    """One tile to which a rule was applied, and the derivative of the rule there."""

    def __init__(
        self, owner: RuleOfTile, before: Tensor, tensors: list[Tensor], after: Tensor
    ) -> None:
        self._owner, self._before, self._tensors, self._after = owner, before, tensors, after

    @property
    def values(self) -> Tensor:
        """A copy of the scores, or the weights, after the rule."""
        return self._after.detach().clone()

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the scores before the rule, and add those of its tensors."""
        if not self._after.requires_grad:  # the rule returned constants
            return torch.zeros_like(gradient)
        wanted = [i for i, x in enumerate(self._tensors) if x.requires_grad]
        d_scores, *others = torch.autograd.grad(
            self._after,
            [self._before, *(self._tensors[i] for i in wanted)],
            gradient.view(self._after.shape),
            materialize_grads=True,
        )
        for i, d in zip(wanted, others, strict=True):
            self._owner.add(i, d)
        result: Tensor = d_scores.reshape(gradient.shape)
        return result


def why_not_pairs(call: Call) -> list[str]:
    """Return why a kernel that computes scores tile by tile cannot serve the rule of a call."""
    rule = call.score
    if rule is None:
        return []
    if rule.scope == "pair":
        changes = [str(x) for x in rule.steps() if "pattern" in x.stages]
        return [f"{' and '.join(changes)} changes weights after the normalizer"] if changes else []
    needs = "all keys of a row" if rule.scope == "row" else "the scores of all heads"
    steps = " and ".join(str(x) for x in rule.steps() if x.scope == rule.scope)
    return [f"the score rule {steps} needs {needs} at once"]
