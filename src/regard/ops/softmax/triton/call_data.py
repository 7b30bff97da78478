"""A call as data for a GPU kernel: its mask, its bias, and the stored form of its memory.

One compiled kernel serves every mask. Tiles are classified from the ends of the intervals in a
block, without the T x S mask: a tile may be called PARTIAL that is full or empty.

ALiBi becomes slopes and T5's bias weights of buckets, without a T x S tensor; any other bias is a
table. Autograd carries the gradient of a form to the tensors of the bias.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import masks
from regard.biases import ALiBi, Bias, DenseBias, T5Relative
from regard.biases.distance import t5_bucket
from regard.masks import EMPTY, FULL, PARTIAL, Mask
from regard.ops.softmax.call import Call
from regard.ops.softmax.lowering import bias_terms
from regard.ops.softmax.triton.block_sizes import MAX_HEAD_DIM
from regard.ops.stored_weights import (
    CodedMemory,
    Float8Memory,
    PagedMemory,
    coded_memory,
    float8_memory,
    paged_memory,
)
from regard.span import Positions, Span, as_tensor, follow_by_construction
from regard.units import plural

MAX_RANGES = 8
"""The largest number of key ranges of a query; a mask with more is stored as bits."""

LARGEST = 2**31 - 1
"""The largest int32: the start of a range without keys, and the stop of a range without end."""

_ROWS_TIMES_KEYS = 2**26
"""The largest number of pairs of which a mask without intervals is evaluated at a time."""


class MaskData(NamedTuple):
    """Which keys each query sees, in one of three forms.

    Args:
        q_positions, k_positions: int32 `[B or 1, T]` and `[B or 1, S]`; below 0: empty.
        starts, stops: the ends of n ranges, int32 `[B or 1, H or 1, T, n]`, or None.
        bits: bit j % 8 of byte j // 8 is for key slot j, uint8 `[B or 1, H or 1, T, ceil(S / 8)]`.
            Without ranges and bits, every query sees every token.
    """

    q_positions: Tensor
    k_positions: Tensor
    starts: Tensor | None
    stops: Tensor | None
    bits: Tensor | None

    @property
    def ranges(self) -> int:
        """The number of ranges of a query."""
        return 0 if self.starts is None else self.starts.shape[-1]


class TileLists(NamedTuple):
    """The key tiles that each block of queries reads, the full ones first.

    Args:
        counts: the number of full tiles, and of all tiles, int32 `[B or 1, H or 1, nQ, 2]`.
        tiles: their numbers, int32 `[B or 1, H or 1, nQ, nK]`, valid up to the count.
        kinds: EMPTY, PARTIAL or FULL, int8 `[B or 1, H or 1, nQ, nK]`.
    """

    counts: Tensor
    tiles: Tensor
    kinds: Tensor


def mask_data(call: Call) -> MaskData:
    """Return the mask of a call as data, kept for spans and for the layers of a step."""
    q, k, device = call.q_positions, call.k_positions, call.q.device
    if _is_constant(call):
        return _mask_data_of_spans(call.mask, q, k, device)
    if isinstance(k, Tensor) and follow_by_construction(q) and call.mask.is_static:
        return _mask_data_of_step(call.mask, q, k, device)
    return _make_mask_data(call.mask, q, k, device)


def _mask_data_of_step(mask: Mask, q: Positions, k: Tensor, device: torch.device) -> MaskData:
    """Return the same data to every layer of a step whose keys share a tensor of positions."""
    computed: dict[tuple[Mask, int], tuple[Tensor, MaskData]] | None
    computed = getattr(q, _STEP_DATA, None)
    if computed is None:
        computed = {}
        setattr(q, _STEP_DATA, computed)
    if (mask, id(k)) not in computed:
        # the tensor is stored, too, so that no other one gets its id
        computed[mask, id(k)] = k, _make_mask_data(mask, q, k, device)
    return computed[mask, id(k)][1]


_STEP_DATA = "_regard_mask_data"
"""The attribute of the positions of queries in which `_mask_data_of_step` stores its results."""


def tile_lists(
    call: Call, data: MaskData, rows: int, keys: int, *, transposed: bool = False
) -> TileLists:
    """Return for each block of `rows` queries the tiles of `keys` keys that it reads; transposed:
    for each of these tiles the blocks that read it.
    """
    if _is_constant(call):
        spans = call.q_positions, call.k_positions
        return _kept_lists(call.mask, *spans, call.q.device, rows, keys, transposed)
    kinds = tile_kinds(data, rows, keys)
    return make_lists(kinds.mT if transposed else kinds)


def _is_constant(call: Call) -> bool:
    """Return whether the data of a mask depends on numbers only, and may be kept."""
    spans = isinstance(call.q_positions, Span) and isinstance(call.k_positions, Span)
    return spans and call.mask.is_static


def _make_mask_data(mask: Mask, q: Positions, k: Positions, device: torch.device) -> MaskData:
    """Return a mask as ranges of positions, or as bits if it has none or too many."""
    q_positions, k_positions = (_to_int32(x, device) for x in (q, k))
    if isinstance(mask, masks.Full) and isinstance(q, Span) and q.all_tokens:
        return MaskData(q_positions, k_positions, None, None, None)
    ranges = mask.intervals(q, device=device)
    if ranges is None or ranges.starts.shape[-1] > MAX_RANGES:
        return MaskData(q_positions, k_positions, None, None, _mask_bits(mask, q, k, device))
    starts, stops = ranges
    empty = starts >= stops
    starts = starts.clamp(max=LARGEST).masked_fill(empty, LARGEST).to(torch.int32)
    stops = stops.clamp(max=LARGEST).masked_fill(empty, 0).to(torch.int32)
    # one compiled kernel for 1, 2, 4 and 8 ranges: the others are filled up with empty ones
    n = starts.shape[-1]
    missing = (1 << (n - 1).bit_length()) - n
    starts = F.pad(starts, (0, missing), value=LARGEST).contiguous()
    return MaskData(q_positions, k_positions, starts, F.pad(stops, (0, missing)).contiguous(), None)


_mask_data_of_spans = lru_cache(32)(_make_mask_data)


@lru_cache(128)
def _kept_lists(
    mask: Mask,
    q: Span,
    k: Span,
    device: torch.device,
    rows: int,
    keys: int,
    transposed: bool,  # noqa: FBT001  (a key of the cache)
) -> TileLists:
    """Return the tile lists of a mask without tensors over two spans."""
    kinds = tile_kinds(_mask_data_of_spans(mask, q, k, device), rows, keys)
    return make_lists(kinds.mT if transposed else kinds)


def _to_int32(positions: Positions, device: torch.device) -> Tensor:
    """Return positions as int32 `[B or 1, L]`; a larger number fails on the device."""
    x = as_tensor(positions, device).to(device)
    if x.dtype == torch.int64 and not isinstance(positions, Span) and not x.is_meta:
        torch._assert_async((x < LARGEST).all(), f"a position is above {LARGEST - 1}")
    # a query before position 0 that is a token keeps its position, which a bias reads
    return x.clamp(min=-LARGEST).to(torch.int32).contiguous()


def _mask_bits(mask: Mask, q: Positions, k: Positions, device: torch.device) -> Tensor:
    """Return one bit per pair of slots, uint8 `[B or 1, H or 1, T, ceil(S / 8)]`."""
    T, S = (len(x) if isinstance(x, Span) else x.shape[1] for x in (q, k))
    # computed there: a list of numbers would be copied, which no CUDA graph can repeat
    place = (1 << torch.arange(8, device=device)).to(torch.uint8)
    step, parts = max(1, _ROWS_TIMES_KEYS // max(S, 1)), []
    for start in range(0, T, step):
        visible = mask.block(q, k, slice(start, min(start + step, T)), device=device)
        octets = F.pad(visible, (0, -S % 8)).unflatten(-1, (-1, 8))
        parts.append((octets.to(torch.uint8) * place).sum(-1, dtype=torch.uint8))
    return torch.cat(parts, 2).contiguous()


def tile_kinds(data: MaskData, rows: int, keys: int) -> Tensor:
    """Classify the tiles of `rows` queries and `keys` keys: int8 `[B or 1, H or 1, nQ, nK]`."""
    if data.bits is not None:
        return _kinds_of_bits(data, rows, keys)
    k = F.pad(data.k_positions, (0, -data.k_positions.shape[1] % keys), value=-1)
    k = k.unflatten(-1, (-1, keys))  # [b,nK,keys]
    k_max = k.amax(-1)[:, None, None]  # [b,1,1,nK]
    k_min = k.masked_fill(k < 0, LARGEST).amin(-1)[:, None, None]
    # a tile that sticks out of the keys has empty slots, and is never full
    whole, some = (k >= 0).all(-1)[:, None, None], k_max >= 0
    if data.starts is None:
        assert data.stops is None
        blocks = -(-data.q_positions.shape[1] // rows)
        every: Tensor = some.to(torch.int8) + whole.to(torch.int8)
        return every.expand(-1, -1, blocks, -1)
    assert data.stops is not None
    missing = -data.starts.shape[2] % rows
    reached = torch.zeros((), dtype=torch.bool, device=k.device)
    covered = reached
    for n in range(data.ranges):
        starts, stops = data.starts[..., n], data.stops[..., n]
        first, last = (
            F.pad(x, (0, missing), value=value).unflatten(-1, (-1, rows))
            for x, value in ((starts, LARGEST), (stops, 0))
        )
        reached = reached | (
            (first.amin(-1)[..., None] <= k_max) & (last.amax(-1)[..., None] > k_min)
        )
        # a row behind the last query is no reason against a full tile
        first, last = (
            F.pad(x, (0, missing), value=value).unflatten(-1, (-1, rows))
            for x, value in ((starts, 0), (stops, LARGEST))
        )
        covered = covered | (
            (first.amax(-1)[..., None] <= k_min) & (last.amin(-1)[..., None] > k_max)
        )
    reached = reached & some
    kinds: Tensor = reached.to(torch.int8) + (reached & covered & whole).to(torch.int8)
    return kinds


def _kinds_of_bits(data: MaskData, rows: int, keys: int) -> Tensor:
    """Classify the tiles of a mask that is stored as bits."""
    assert data.bits is not None
    T, S = data.bits.shape[2], data.k_positions.shape[1]
    missing_rows, missing = -T % rows, -data.bits.shape[3] % (keys // 8)
    shape = (-1, rows), (-1, keys // 8)
    some = F.pad(data.bits, (0, missing, 0, missing_rows))
    some = some.unflatten(3, shape[1]).unflatten(2, shape[0]) != 0  # [b,h,nQ,rows,nK,keys/8]
    every = F.pad(F.pad(data.bits, (0, missing)), (0, 0, 0, missing_rows), value=255)
    every = every.unflatten(3, shape[1]).unflatten(2, shape[0]) == 255
    matching = some.any(5).any(3)
    # the last byte is never 255 if S is no multiple of 8, and the tile then has slots behind S
    assert data.bits.shape[3] * 8 >= S
    kinds: Tensor = matching.to(torch.int8) + (matching & every.all(5).all(3)).to(torch.int8)
    return kinds


def make_lists(kinds: Tensor) -> TileLists:
    """Return the lists of tiles that are not empty, the full ones first."""
    order = kinds.argsort(dim=-1, descending=True, stable=True)
    full = (kinds == FULL).sum(-1)
    counts = torch.stack([full, full + (kinds == PARTIAL).sum(-1)], -1).to(torch.int32)
    return TileLists(counts.contiguous(), order.to(torch.int32).contiguous(), kinds.contiguous())


def count_pairs(call: Call, lists: TileLists, rows: int, keys: int) -> int:
    """Return the pairs of the tiles in the lists, over all rows and heads."""
    shared = call.B * call.H // (lists.kinds.shape[0] * lists.kinds.shape[1])
    tiles = int((lists.kinds != EMPTY).sum())
    return min(shared * tiles * rows * keys, call.B * call.H * call.T * call.S)


def mask_bytes(data: MaskData, lists: TileLists) -> int:
    """Return the bytes of a mask as data."""
    tensors = [data.starts, data.stops, data.bits, data.q_positions, data.k_positions, *lists]
    return sum(x.nbytes for x in tensors if x is not None)


MAX_TABLE_BYTES = 2**32
"""The largest table that a bias without a closed form is written to."""

MAX_DISTANCES = 2**16
"""The largest number of distances whose bucket is stored."""


class BiasData(NamedTuple):
    """A bias in three parts, whose sum it is; a part that is None is 0.

    Args:
        slopes: m in -m (i - j), fp32 `[H]`.
        symmetric: whether the slopes multiply |i - j| instead.
        buckets: the bucket of each distance j - i from -M to M, int32 `[2 M + 1]`.
        weights: the bias of each bucket, fp32 `[H, buckets]`.
        table: the bias of each pair, `[B or 1, H or 1, T or 1, S]`.
    """

    slopes: Tensor | None = None
    symmetric: bool = False
    buckets: Tensor | None = None
    weights: Tensor | None = None
    table: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The parts that may have a gradient."""
        return self.slopes, self.weights, self.table


def why_no_bias_data(call: Call) -> list[str]:
    """Return why the bias of a call cannot be written as data, without reading a tensor."""
    others = [x for x in _split(call.bias)[2] if not isinstance(x, DenseBias)]
    size = call.B * call.H * call.T * call.S * 4
    if others and size > MAX_TABLE_BYTES:
        names = " and ".join(map(str, others))
        return [f"a table of {names} may take {size / 2**30:.3g} GiB; limit 4.00 GiB"]
    return []


def bias_data(call: Call, bias: Bias | None) -> BiasData:
    """Return a bias of the sizes and positions of a call as data on its device."""
    alibi, t5, others = _split(bias)
    device, result = call.q.device, BiasData()
    if alibi is not None:
        slopes = alibi.slopes_on(device, torch.float32)
        result = result._replace(slopes=slopes, symmetric=alibi.symmetric)
    if t5 is not None:
        weights = t5.table.to(device, torch.float32).T
        n = int(t5.table.shape[0])
        matching = _bucket_table(n, t5.max_distance, device, bidirectional=t5.bidirectional)
        result = result._replace(buckets=matching, weights=weights)
    if others:
        result = result._replace(table=sum_of_tables(call, others))
    return result


def sum_of_tables(call: Call, others: list[Bias]) -> Tensor:
    """Return the sum of biases that have no closed form, `[B or 1, H or 1, T or 1, S]`."""
    device = call.q.device
    if len(others) == 1 and isinstance(others[0], DenseBias):
        table = others[0].tensor
        return (table if table.ndim == 4 else table[None, None]).to(device)
    positions = call.q_positions, call.k_positions
    blocks = (x.block(*positions, dtype=torch.float32, device=device) for x in others)
    total = next(blocks)
    for block in blocks:
        total = total + block
    return total


def _split(bias: Bias | None) -> tuple[ALiBi | None, T5Relative | None, list[Bias]]:
    """Return one ALiBi, one T5 bias, and the other terms of a bias."""
    alibi: ALiBi | None = None
    t5: T5Relative | None = None
    others: list[Bias] = []
    for term in bias_terms(bias):
        if type(term) is ALiBi and alibi is None:
            alibi = term
        elif type(term) is T5Relative and t5 is None and term.max_distance <= MAX_DISTANCES:
            t5 = term
        else:
            others.append(term)
    return alibi, t5, others


@lru_cache(8)
def _bucket_table(
    buckets: int, max_distance: int, device: torch.device, *, bidirectional: bool
) -> Tensor:
    """Return the bucket of each distance from -max_distance to max_distance."""
    distances = torch.arange(-max_distance, max_distance + 1, device=device)
    matching = t5_bucket(
        distances, buckets=buckets, bidirectional=bidirectional, max_distance=max_distance
    )
    return matching.to(torch.int32)


StoredForm: TypeAlias = CodedMemory | Float8Memory | PagedMemory
"""Codes with the slots behind them, 8-bit floats, or the pages of keys and values."""


def stored_form(call: Call) -> StoredForm | None:
    """Return the codes, 8-bit numbers or pages of a call, or None for plain tensors."""
    coded = coded_memory(call.k, call.v)
    if coded is not None:
        fits = max(call.D, call.E) <= MAX_HEAD_DIM and coded.keys.bits == coded.values.bits
        return coded if coded.slots and fits else None
    float8 = float8_memory(call.k, call.v)
    if float8 is not None:
        return float8
    return paged_memory(call.k, call.v)


def describe_stored_form(call: Call) -> str:
    """Return how the decoding kernel reads the keys and values; "" for plain tensors."""
    stored = stored_form(call)
    if stored is None:
        return ""
    if isinstance(stored, CodedMemory):
        recent = plural(call.S - stored.slots, "recent slot")
        return (
            f"it reads {plural(stored.slots, 'slot')} of keys and values as codes of "
            f"{stored.keys.bits} bits, and {recent} in full precision"
        )
    if isinstance(stored, Float8Memory):
        return f"it reads keys and values as {stored.keys.format}, and widens them in registers"
    size = stored.keys.pages.shape[1]
    return f"it reads keys and values in pages of {plural(size, 'slot')}, and gathers none"
