"""torch's fused kernel: one call where it knows the mask, otherwise the parts of the mask joined by
their lse.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from regard import masks
from regard.ops.softmax.call import SMALL_SCORES, Call, Partial, Result, Work
from regard.ops.softmax.merge import merge, with_sink
from regard.ops.softmax.pieces import LEAST_KEYS, ROWS, USUAL, Grain, Piece, Rows, lower
from regard.process_state import is_compiling
from regard.span import Span


def last_contiguous(x: Tensor) -> Tensor:
    """x, copied if its last dimension is strided: torch would leave its fused kernel."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def same_dim(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero columns until D and E are equal: they change neither a score nor a value."""
    missing = v.shape[-1] - q.shape[-1]
    if missing > 0:
        q, k = F.pad(q, (0, missing)), F.pad(k, (0, missing))
    elif missing < 0:
        v = k if _begins(v, k) else F.pad(v, (0, -missing))
    return q, k, v


def _begins(v: Tensor, k: Tensor) -> bool:
    """Whether values are the first numbers of their keys, in the same memory, as those of absorbed
    MLA: no copy is needed.
    """
    learns = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    return (
        not learns
        and type(k) is type(v) is Tensor
        and not is_compiling()
        and v.data_ptr() == k.data_ptr()
        and v.shape[:3] == k.shape[:3]
        and v.stride() == k.stride()
    )


FOLD_ROWS = 32
"""Up to so many queries, the heads of a group become rows of one product: one read of the keys
instead of H/G.
"""

_SCHEMA = (
    "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, "
    "float dropout_p=0., "
    "bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, "
    "Tensor logsumexp)"
)


class Sdpa:
    """torch.nn.functional.scaled_dot_product_attention, and on CPU the op below it that returns the
    lse.
    """

    name = "sdpa"
    selects = False

    def __init__(self, grain: Grain = USUAL) -> None:
        self.grain = grain

    def why_not(self, call: Call) -> list[str]:
        """Softcap, dropout, learned bias, taps, short or non-finite inputs, gradients of large
        scores; without the private op: lse and sinks.
        """
        reasons = [
            *(["no softcap"] if call.softcap is not None else []),
            *(["no dropout on the weights in its fused kernel"] if call.dropout else []),
            *([f"does not expose {sorted(call.needs)}"] if call.needs else []),
        ]
        if call.bias is not None and any(x.requires_grad for x in call.bias.tensors()):
            reasons.append("no gradient for a bias")
        if call.S < LEAST_KEYS or 0 in (call.B, call.T, call.E):
            reasons.append(f"fewer than {LEAST_KEYS} keys, or nothing to do ({_sizes(call)})")
        if reasons:
            return reasons
        if not call.all_finite(*must_be_finite(call)):
            return ["a NaN or infinity behind a mask would leak through 0 x NaN"]
        if call.has_gradient and (too_large := _too_large(call)):
            return too_large
        if call.wants_lse or call.sink is not None:
            return why_no_lse(call.q.device)
        return []

    def priority(self, call: Call) -> float | None:
        """The usual choice."""
        return 80

    def run(self, call: Call) -> Result:
        """Lower the mask, then run the pieces."""
        q, k, v = same_dim(*(last_contiguous(x) for x in (call.q, call.k, call.v)))
        # torch puts -inf above the diagonal before it scales: a negative scale would make it +inf
        q, scale = (q, call.scale) if call.scale > 0 else (-q, -call.scale)
        work = lower(call, self.grain)
        whole = len(work) == 1 and len(work[0].pieces) == 1 and _covers(work[0].rows, call.T)
        if whole and not call.wants_lse and call.sink is None:
            out = one_call(q, k, v, work[0].pieces[0], scale)
            return Result(out if call.E >= call.D else out[..., : call.E], None)
        run = Pieces.apply if call.has_gradient else run_pieces
        out, lse = run(q, k, v, scale, work)
        out = out if call.E >= call.D else out[..., : call.E]
        return Result(out if call.sink is None else with_sink(out, lse, call.sink), lse)

    def work(self, call: Call) -> Work:
        """Pairs of the pieces; bytes of their masks."""
        pieces = [(rows, piece) for rows, pieces in lower(call, self.grain) for piece in pieces]
        pairs = sum(_pairs(rows, piece) for rows, piece in pieces)
        masked = [(rows, piece) for rows, piece in pieces if piece.mask is not None]
        if not masked:
            return Work(call.B * call.H * pairs, 0)
        _, largest = max(masked, key=lambda x: (x[0].stop - x[0].start) * x[1].size)
        mask = make_mask(largest)
        return Work(call.B * call.H * pairs, 0 if mask is None else mask.nbytes)


def must_be_finite(call: Call) -> str:
    """The inputs in which a NaN could reach a row that may not see it; reading one costs a pass
    over it.
    """
    if call.sees_everything:
        return ""
    if not isinstance(call.mask, masks.Causal):
        return "kvq"
    # the triangle by the flag selects scores, but multiplies values; its gradient multiplies keys
    # as well
    square = isinstance(call.q_positions, Span) and call.q_positions == call.k_positions
    return "v" if square and not call.has_gradient else "kv"


def _too_large(call: Call) -> list[str]:
    """Whether torch's backward pass may be wrong on a CPU: its weights are exp(s - lse), and a
    large lse is rounded coarsely.

    The lse of a row is near its largest score: at most the bound on |scale q k|, and the largest
    bias of the row.
    """
    if not call.q.is_cpu:
        return []
    if call.compiling:
        return ["its gradient is right for small scores only, and a graph cannot look at them"]
    bound = call.score_bound
    if call.bias is not None and bound <= SMALL_SCORES:
        bound += _largest_bias(call)
    if bound <= SMALL_SCORES:
        return []
    return [
        (
            f"its gradient is right for scores up to {SMALL_SCORES:.0f}; here they may reach "
            f"{bound:.3g}"
        )
    ]


def _largest_bias(call: Call) -> float:
    """The largest size of a row's largest visible bias."""
    assert call.bias is not None
    most, where = 0.0, (call.q_positions, call.k_positions)
    for start in range(0, call.T, ROWS):
        rows = slice(start, min(start + ROWS, call.T))
        bias = call.bias.block(*where, rows, dtype=call.score_dtype, device=call.q.device)
        seen = call.mask.block(*where, rows, device=call.q.device)
        largest = bias.detach().masked_fill(~seen, -math.inf).amax(-1)
        most = max(most, largest.masked_fill(largest.isneginf(), 0).abs().amax().item())
    return most


def why_no_lse(device: torch.device) -> list[str]:
    """Reasons why the lse is not to be had."""
    if device.type != "cpu":
        return [f"gives no lse on {device.type}"]
    found = str(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._schema)
    return [] if found == _SCHEMA else ["this torch has another private CPU op, so no lse"]


def one_call(q: Tensor, k: Tensor, v: Tensor, piece: Piece, scale: float) -> Tensor:
    """The public function, on one piece."""
    k, v, mask = of_piece(k, piece), of_piece(v, piece), make_mask(piece)
    (B, H, T, _), G = q.shape, k.shape[1]
    folds = _folds(q, k, piece, mask)
    if folds:
        q = q.reshape(B, G, H // G * T, -1)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=piece.causal, scale=scale, enable_gqa=q.shape[1] != G
    )
    return out.reshape(B, H, T, -1) if folds else out


def of_piece(x: Tensor, piece: Piece) -> Tensor:
    """The keys or values of a piece."""
    return x if piece.size == x.shape[2] else x[:, :, piece.columns]


def run_pieces(
    q: Tensor, k: Tensor, v: Tensor, scale: float, work: list[Rows]
) -> tuple[Tensor, Tensor]:
    """q [B,H,T,D], k and v [B,G,S,D] -> out [B,H,T,D], lse [B,H,T]."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.full(q.shape[:3], -math.inf, dtype=kind, device=q.device)
    for rows, pieces in work:
        parts = [fused(q[:, :, rows], k, v, piece, scale) for piece in pieces]
        if parts:
            out[:, :, rows], lse[:, :, rows] = _join(parts)
    return out, lse


class Pieces(torch.autograd.Function):
    """(out, lse) of all pieces; each backward call is given the whole row's out and lse, so nothing
    is merged twice.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, work: list[Rows]
    ) -> tuple[Tensor, Tensor]:
        """Run the pieces, and save what the backward pass needs."""
        out, lse = run_pieces(q, k, v, scale, work)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.work = scale, work
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        """Gradients of q, k and v, summed in the precision of the lse."""
        q, k, v, out, lse = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_q, d_k, d_v = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        lse = lse.masked_fill(
            lse.isneginf(), 0
        )  # of a blind row: exp(-inf - 0) is 0, as it must be
        for rows, pieces in ctx.work:
            row = tuple(None if x is None else x[:, :, rows] for x in (q, out, lse, d_out, d_lse))
            for piece in pieces:
                g_q, g_k, g_v = fused_backward(row, k, v, piece, ctx.scale)
                d_q[:, :, rows] += g_q
                d_k[:, :, piece.columns] += g_k
                d_v[:, :, piece.columns] += g_v
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, None


def fused(q: Tensor, k: Tensor, v: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries over one piece, -inf for a row without a visible key (torch says 0
    there).
    """
    k, v, mask = of_piece(k, piece), of_piece(v, piece), make_mask(piece)
    (B, H, T, _), G = q.shape, k.shape[1]
    if _folds(q, k, piece, mask):
        q = q.reshape(B, G, H // G * T, -1)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, piece.causal, attn_mask=mask, scale=scale)
    out, lse = out.reshape(B, H, T, -1), lse.reshape(B, H, T)
    return out, lse if mask is None else lse.masked_fill(_blind(mask, piece), -math.inf)


def fused_backward(
    row: tuple[Tensor | None, ...], k: Tensor, v: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, ...]:
    """Gradients of one piece, from the out and lse of the whole row.

    d score = p (dO . v - dO . O + d lse): the last term rides along as one more value column of
    ones.
    """
    q, out, lse, d_out, d_lse = row
    assert q is not None
    assert out is not None
    assert lse is not None
    assert d_out is not None
    k, v, mask = of_piece(k, piece), of_piece(v, piece), make_mask(piece)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    if d_lse is None:
        gradients: tuple[Tensor, ...] = op(
            d_out, q, k, v, out, lse, 0.0, piece.causal, attn_mask=mask, scale=scale
        )
        return gradients
    d_out = torch.cat([d_out, d_lse.unsqueeze(-1).to(d_out.dtype)], -1)
    q, k, out = (F.pad(x, (0, 1)) for x in (q, k, out))
    v = F.pad(v, (0, 1), value=1.0)
    grads = op(d_out, q, k, v, out, lse, 0.0, piece.causal, attn_mask=mask, scale=scale)
    return tuple(g[..., :-1] for g in grads)


def _join(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return merge([Partial(*part) for part in parts])


def make_mask(piece: Piece) -> Tensor | None:
    """The float mask of a piece, if it has one."""
    return None if piece.mask is None else piece.mask()


def _blind(mask: Tensor, piece: Piece) -> Tensor:
    """The rows [B|1,H|1,t|1] that see no key; under the triangle row i sees none if the first i + 1
    are masked.
    """
    hidden = mask.isneginf()
    return hidden[:, :, 0].cumprod(-1).bool() if piece.causal else hidden.all(-1)


def _folds(q: Tensor, k: Tensor, piece: Piece, mask: Tensor | None) -> bool:
    """The heads of a group may be rows of one product: no triangle, and a mask that does not tell
    rows or heads apart.
    """
    one_mask = mask is None or (mask.shape[1] == 1 and mask.shape[2] == 1)
    return q.shape[1] != k.shape[1] and q.shape[2] <= FOLD_ROWS and not piece.causal and one_mask


def _sizes(call: Call) -> str:
    if call.compiling:  # a number in a message would tie the graph to it
        return "in a graph"
    return f"B {call.B}, T {call.T}, S {call.S}, E {call.E}"


def _covers(rows: slice, length: int) -> bool:
    return (rows.start, rows.stop) == (0, length)


def _pairs(rows: slice, piece: Piece) -> int:
    n = int(rows.stop - rows.start)
    return n * (n + 1) // 2 if piece.causal else n * piece.size
