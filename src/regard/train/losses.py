"""Losses: next-token prediction on a stream, and those of tasks with label smoothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.errors import ArgumentError
from regard.models.decoder import Decoder
from regard.nn.module_calls import why_not_as_written
from regard.nn.weights import Linear
from regard.ops.tokenwise import check_linear_map
from regard.process_state import is_compiling, is_transformed
from regard.sequence_scope import current_scope
from regard.span import Positions
from regard.train.batches import ExampleBatch
from regard.train.tasks.task import IGNORE_INDEX, PAD, PaddedBatch

Loss = Callable[[nn.Module, Any], Tensor]
"""A function `loss(model, rows)` that returns the mean loss of a batch, a scalar."""


def next_token_loss(model: nn.Module, rows: Int[Tensor, "B row"]) -> Float[Tensor, ""]:
    """Return the mean cross entropy of the next token, in nats.

    loss = -mean(log softmax(logits)[target])

    Args:
        model: maps ids `[B, T]` to logits `[B, T, V]`.
        rows: ids `[B, T + 1]`: the inputs are all but the last, the targets all but the first.

    Returns:
        The loss, a scalar.

    >>> import math
    >>> flat = nn.Embedding.from_pretrained(torch.zeros(4, 4))
    >>> round(next_token_loss(flat, torch.tensor([[0, 1, 2]])).item() / math.log(4), 5)
    1.0
    """
    targets = rows[:, 1:].flatten()
    head = _plain_head(model)
    if head is not None:
        states = cast("Decoder", model).hidden(rows[:, :-1]).flatten(0, 1)
        return linear_cross_entropy(states, head.weight, targets, bias=head.bias)
    logits = at_least_float32(model(rows[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1), targets)


def _plain_head(model: nn.Module) -> nn.Linear | None:
    """Return a decoder's linear head if nothing observes its call; otherwise None."""
    if type(model) is not Decoder or is_compiling() or is_transformed() or model.head is None:
        return None
    head = model.head
    if type(head) not in (Linear, nn.Linear) or "weight" not in head._parameters:
        return None
    if getattr(head, "stored_weight", None) is not None or current_scope() is not None:
        return None
    observed = any(
        module._backward_hooks or module._backward_pre_hooks or why_not_as_written(module)
        for module in (model, head)
    )
    return None if observed else cast("nn.Linear", head)


CHUNK_LOGITS = 1 << 22
"""How many logits `linear_cross_entropy` holds at a time, 16 MiB in fp32; at least
`LEAST_CHUNK_ROWS` rows.
"""
LEAST_CHUNK_ROWS = 64


def linear_cross_entropy(
    x: Float[Tensor, "N M"],
    weight: Float[Tensor, "V M"],
    targets: Int[Tensor, " N"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    chunk_rows: int | None = None,
) -> Float[Tensor, ""]:
    """Return the mean cross entropy of x W^T + b, without all N V logits in memory.

    z = W x + b;  loss = mean_i (log sum_v exp z_iv - z_i,target);
    dz = (softmax(z) - onehot(target)) / N;  dx = dz W;  dW = dz^T x;  db = sum_i dz_i

    The forward pass computes the gradients of a chunk with its logits. Under autocast the products
    are in its dtype, and the rest is in fp32 or better.

    Source: Hsu et al. 2024 (arXiv 2410.10989), section 3.2.
    """
    check_linear_map(x, weight, bias)
    N, V = x.shape[0], weight.shape[0]
    if x.ndim != 2 or targets.shape != (N,) or N == 0:
        raise ArgumentError(
            f"x is {tuple(x.shape)} and targets are {tuple(targets.shape)}; they must be [N, M] "
            "and [N], with at least one row"
        )
    least, most = (int(y) for y in targets.aminmax())
    if least < 0 or most >= V:
        raise ArgumentError(f"targets are from {least} to {most}; they must be in [0, {V})")
    rows = chunk_rows or max(LEAST_CHUNK_ROWS, CHUNK_LOGITS // V)
    loss: Tensor = _LinearCrossEntropy.apply(x, weight, bias, targets, rows)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Autograd function of `linear_cross_entropy`; it saves the gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int
    ) -> Tensor:
        """Compute the loss and, where they are needed, the gradients."""
        needs = ctx.needs_input_grad[:3]
        device, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        wide = torch.promote_types(x.dtype, torch.float32)
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        losses = x.new_empty(len(x), dtype=wide)
        d_x = torch.empty_like(x) if needs[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        d_bias = None if bias is None or not needs[2] else torch.zeros_like(bias, dtype=wide)
        with torch.autocast(device, enabled=False):
            for start in range(0, len(x), rows):
                part = slice(start, start + rows)
                some, label = x[part].to(dtype), targets[part, None]
                z = F.linear(some, w, b).to(wide)  # [n, V]
                # exp(z - lse) of a rounded lse would be inaccurate for large logits
                z.sub_(z.amax(-1, keepdim=True))
                label_z = z.gather(-1, label)
                total = z.exp_().sum(-1, keepdim=True)
                losses[part] = (total.log() - label_z)[:, 0]
                if not any(needs):
                    continue
                z.div_(total)
                z.scatter_add_(-1, label, z.new_full((), -1.0).expand(label.shape))
                z.div_(len(x))
                if d_bias is not None:
                    d_bias += z.sum(0)
                d_z = z.to(dtype)
                if d_x is not None:
                    d_x[part] = d_z @ w
                if d_weight is not None and dtype == wide:
                    d_weight.addmm_(d_z.T, some)
                elif d_weight is not None:
                    d_weight += d_z.T @ some
        gradients = (d_x, d_weight, d_bias)
        likes = (x, weight, bias)
        ctx.save_for_backward(
            *(
                g if g is None or y is None else g.to(y.dtype)
                for g, y in zip(gradients, likes, strict=True)
            )
        )
        return losses.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Return the saved gradients, times that of the loss."""
        grads = (None if g is None else g * d_loss.to(g.dtype) for g in ctx.saved_tensors)
        return *grads, None, None


def at_least_float32(x: Tensor) -> Tensor:
    """Convert a tensor of a narrower dtype to fp32; fp64 stays.

    >>> at_least_float32(torch.ones(2).double()).dtype
    torch.float64
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def evaluate(
    model: nn.Module, rows: ExampleBatch, *, batch: int = 16, loss: Loss = next_token_loss
) -> float:
    """Return the mean loss over fixed examples, with the model in evaluation mode.

    Args:
        model: the model; its mode is restored afterwards.
        rows: the examples, such as ids `[N, T + 1]`.
        batch: examples per forward pass.

    Returns:
        The mean over all examples.

    >>> import math
    >>> flat = nn.Embedding.from_pretrained(torch.zeros(4, 4))
    >>> round(evaluate(flat, torch.zeros(3, 5, dtype=torch.long)) / math.log(4), 5)
    1.0
    """
    was_training = model.training
    model.eval()
    try:
        total = sum(loss(model, part).item() * len(part) for part in rows.split(batch))
    finally:
        model.train(was_training)
    return total / len(rows)


def smoothed_cross_entropy(
    logits: Float[Tensor, "*B V"],
    labels: Int[Tensor, " *B"],
    smoothing: float = 0.0,
    *,
    ignored: int = IGNORE_INDEX,
) -> Float[Tensor, ""]:
    """Return the cross entropy with label smoothing.

    p = softmax(logits)
    loss = mean over labels y != ignored of  -(1 - eps) log p_y - (eps / V) sum_k log p_k

    Source: Szegedy et al. 2015 (arXiv 1512.00567), section 7; Vaswani et al. 2017 (arXiv
    1706.03762), section 5.4.
    """
    _check_smoothing(smoothing)
    counted = labels != ignored
    # ignored positions are removed, not multiplied by 0, since their logits may be NaN
    counted_logits = logits[counted]
    log_p = (
        counted_logits if counted_logits.dtype == torch.float64 else counted_logits.float()
    ).log_softmax(-1)  # [n, V]
    label_log_p = log_p.gather(-1, labels[counted][:, None]).squeeze(-1)
    loss = -(1 - smoothing) * label_log_p - smoothing * log_p.mean(-1)
    return loss.sum() / max(1, len(loss))


@dataclass(frozen=True)
class Seq2SeqLoss:
    """The loss of a model that maps a source to a target, with teacher forcing.

    `PAD` does not count; the label smoothing eps is for training mode only.
    """

    smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check_smoothing(self.smoothing)

    def __call__(self, model: nn.Module, rows: PaddedBatch) -> Float[Tensor, ""]:
        """Return the mean loss over the tokens of the target."""
        inputs, labels = rows.target[:, :-1], rows.target[:, 1:]
        # the target needs no positions: its padding is at the end, where causal attention of the
        # tokens does not reach
        logits = model(rows.source, inputs, padded_positions(rows.source))
        eps = self.smoothing if model.training else 0.0
        return smoothed_cross_entropy(logits, labels, eps, ignored=PAD)


@dataclass(frozen=True)
class AnswerLoss:
    """The loss of a causal model on a task's answers; `smoothing` is eps, at least 0, below 1."""

    smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check_smoothing(self.smoothing)

    def __call__(self, model: nn.Module, rows: PaddedBatch) -> Float[Tensor, ""]:
        """Return the mean loss over the answers."""
        eps = self.smoothing if model.training else 0.0
        return smoothed_cross_entropy(model(rows.source), rows.target, eps)


def padded_positions(ids: Int[Tensor, "B L"]) -> Positions:
    """Return the positions of right-padded ids: 0, 1, ..., and -1 where the id is `PAD`."""
    return torch.arange(ids.shape[1], device=ids.device).masked_fill(ids == PAD, -1)


def _check_smoothing(smoothing: float) -> None:
    if not 0 <= smoothing < 1:
        raise ArgumentError(f"smoothing is {smoothing}; it must be at least 0 and less than 1")
