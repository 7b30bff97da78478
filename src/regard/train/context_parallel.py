"""Training over several ranks, each with some tokens of every row: `ContextParallel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.parallel import Shards, sequence
from regard.parallel.communication import Group, RankGroup, join_torchrun
from regard.train.losses import at_least_float32


class ContextParallel:
    """The ranks of a training run in which every rank holds some tokens of each row.

    All ranks hold all weights and draw the same batches. Each computes the loss of its own tokens,
    with attention over the tokens of all ranks (`regard.parallel.sequence`); gradients are summed
    over the ranks in a fixed order, so that every rank makes the same step. The first rank writes
    files. Checkpoints are those of one process: a run may be resumed with another number of ranks.

    Args:
        group: a process group; None means the default group.

    Raises:
        ArgumentError: torch.distributed is not initialized.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> parallel = ContextParallel()
    >>> parallel.is_first, parallel.world
    (True, 1)
    >>> dist.destroy_process_group()

    Source: Liu et al. 2023 (arXiv 2310.01889).
    """

    def __init__(self, group: Group | None = None) -> None:
        self.group, self._ranks = group, RankGroup(group)
        self.rank, self.world = self._ranks.rank, self._ranks.world

    @classmethod
    def from_environment(cls) -> ContextParallel:
        """Join the process group that torchrun describes in environment variables.

        Returns:
            The ranks of the run.

        Raises:
            ArgumentError: the process was not started by torchrun.
        """
        join_torchrun("train")
        return cls()

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files."""
        return self.rank == 0

    def agree(self, facts: Mapping[str, object]) -> None:
        """Check that every rank has the same facts about the run.

        Args:
            facts: values by name; they are compared as text.

        Raises:
            ArgumentError: on every rank, with the first fact that differs.
        """
        self._ranks.agree("train", facts)

    def wait(self) -> None:
        """Wait until every rank has come to this point."""
        self.largest(0)

    def largest(self, number: int) -> int:
        """Return the largest of the numbers of all ranks.

        Args:
            number: this rank's number.

        Returns:
            The same number on every rank.
        """
        numbers = self._ranks.gather("train", torch.tensor([number]), [1] * self.world)
        return max(int(x) for x in numbers)

    def next_token_loss(self, model: nn.Module, rows: Int[Tensor, "B row"]) -> Float[Tensor, ""]:
        """Return the mean cross entropy of the next token over all tokens of all ranks, in nats.

        The value is that of one process, on every rank; the gradient is the share of this rank's
        tokens, and `sum_gradients` adds the shares.

        Args:
            model: a decoder, which maps ids `[B, T]` and positions `[1, T]` to logits `[B, T, V]`.
            rows: ids `[B, T + 1]`, the same on every rank.

        Returns:
            The loss, a scalar.
        """
        ids, targets = rows[:, :-1], rows[:, 1:]
        shards = Shards.zigzag(ids.shape[1], self.world)
        own = shards.positions(self.rank).to(rows.device)
        with sequence(shards, self.group):
            logits = model(ids[:, own[0]], own)
        labels = targets[:, own[0]].flatten()
        logits = at_least_float32(logits).flatten(0, 1)
        share = F.cross_entropy(logits, labels, reduction="sum")
        share = share / targets.numel()
        whole = self._ranks.sum("train", share.detach()[None])[0]
        return share + (whole - share.detach())

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace the gradients of parameters by their sums over the ranks, in place.

        Args:
            parameters: the parameters, in the same order on every rank.
        """
        trained = [p for p in parameters if p.requires_grad]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        if not parts:
            return
        flat = self._ranks.sum("gradients", torch.cat([x.flatten() for x in parts]))
        for p, x in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
            p.grad = x.view_as(p)
