"""Cached decoding against a pass over everything, where frequencies follow the length: what each policy keeps, and loses.

Tokens are decoded one by one across the trained length. Behind each, the logits are compared with those of one pass over all
tokens so far. Under "stale" keys stay as they were rotated, which is what a plain cache does, and what regard refuses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast

import torch
from jaxtyping import Int
from torch import Tensor

from regard.compare.experiment import Numbers
from regard.compare.extension import rotary_of
from regard.errors import ArgumentError
from regard.models.decoder import Decoder
from regard.nn import Attention, Prefix
from regard.nn.policy import PreRope, Recomputed, ReRotate
from regard.nn.project import Separate
from regard.positions import Rotary

Keeping: TypeAlias = Literal["stale", "pre_rope", "re_rotate", "frozen", "recompute"]
POLICIES: tuple[Keeping, ...] = ("stale", "pre_rope", "re_rotate", "frozen", "recompute")
"""Of keys that were rotated for a shorter length: `regard.nn.policy`, and keeping them as they are."""


def under(network: Decoder, policy: Keeping, target: int) -> Decoder:
    """A decoder whose frequencies follow the length, under a policy; it shares all weights but those of queries and keys.

    Args:
        network: as a family makes it, under "recompute".
        policy: above.
        target: the length whose frequencies "frozen" has for every position.

    Raises:
        ArgumentError: a layer's frequencies do not follow the length.
    """
    made = copy.copy(network)
    made._modules = dict(network._modules)
    made.layers = copy.deepcopy(network.layers, {id(p): p for p in network.layers.parameters()})
    for layer in made.layers:
        attention = layer.attention
        project = attention.project if isinstance(attention, Attention) else None
        if not isinstance(project, Recomputed):
            raise ArgumentError(
                "the frequencies of this model do not follow the length, and any cache suits it; "
                "policies are for the method dynamic"
            )
        cast("Attention", attention).project = _project(project, policy, target)
    return made.eval()


def _project(project: Recomputed, policy: Keeping, target: int) -> Separate:
    if policy == "recompute":
        return project
    if policy in ("pre_rope", "re_rotate"):
        kind = PreRope if policy == "pre_rope" else ReRotate
        return kind(project.q, project.k, project.v, project.late)
    for heads in (project.q, project.k):
        heads.steps.append(_rotary(project.late.rotary, target if policy == "frozen" else None))
    found = Separate(project.q, project.k, project.v)
    found.stale = None  # to show what is refused otherwise
    return found


def _rotary(old: Rotary, length: int | None) -> Rotary:
    """The same, frozen at a length, or following each call."""
    return Rotary(
        old.dim, old.base, scaling=old.scaling, rotary_dim=old.rotary_dim, proportional=old.proportional,
        layout=old.layout, length="current" if length is None else length,
    )  # fmt: skip


@torch.inference_mode()
def consistency(network: Decoder, ids: Int[Tensor, "1 N"], start: int) -> Numbers:
    """How far cached decoding is from passes over everything, from token `start` on.

    Args:
        network: a decoder; one that follows the length under "recompute" is run through `regard.nn.Prefix`.
        ids: N tokens, of which `start` are read at once and the others one by one.
        start: at least 1 and less than N.

    Returns:
        steps: how many; difference: the largest of a logit, in deviations of the logits; agreement: the share of steps
        in which both think the same token likeliest; reruns: how often the prefix was read again.

    Raises:
        ArgumentError: start is out of range.

    >>> import regard
    >>> tiny = regard.load("tiny")
    >>> consistency(tiny.decoder, torch.arange(12)[None], 8)["agreement"]
    1.0
    """
    if not 1 <= start < ids.shape[1]:
        raise ArgumentError(f"start is {start}; it must be 1 to {ids.shape[1] - 1}, of {ids.shape[1]} tokens")  # fmt: skip
    step, prefix = _stepper(network)
    step(ids[:, :start])
    apart, same = 0.0, 0
    for n in range(start, ids.shape[1]):
        cached = step(ids[:, n : n + 1])[0, -1]
        whole = network(ids[:, : n + 1])[0, -1]
        apart = max(apart, float((cached - whole).abs().max() / whole.std()))
        same += int(cached.argmax() == whole.argmax())
    count = ids.shape[1] - start
    return {"steps": count, "difference": apart, "agreement": same / count, "reruns": prefix.reruns if prefix else 0}  # fmt: skip


def _stepper(network: Decoder) -> tuple[Callable[[Tensor], Any], Prefix | None]:
    if any(isinstance(module, Recomputed) for module in network.modules()):
        prefix = Prefix(network)
        return prefix, prefix
    caches = network.new_caches()
    return lambda ids: network(ids, None, caches), None


def policies(network: Decoder, ids: Int[Tensor, "1 N"], start: int, target: int) -> dict[str, Numbers]:  # fmt: skip
    """`consistency` under every policy where the frequencies follow the length; else of the model as it is.

    Args:
        network: a decoder with rotary positions.
        ids, start: as `consistency`.
        target: as `under`.
    """
    rotary = rotary_of(network)
    if not rotary.follows:
        return {"as it is": consistency(network, ids, start)}
    return {policy: consistency(under(network, policy, target), ids, start) for policy in POLICIES}
