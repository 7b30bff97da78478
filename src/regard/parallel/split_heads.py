"""`regard.parallel.split_heads`: each rank gets some heads of a layer (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn.attention.attention import Attention
from regard.nn.projections.heads import HeadProjection, SeparateQKV
from regard.parallel.communication import RankGroup
from regard.units import plural

A = TypeVar("A", bound=Attention)


def split_heads(attention: A, mesh: DeviceMesh, *, repeat_keys: bool = False) -> A:
    """Give each rank of a mesh some heads of an attention layer, in place.

    out = sum over ranks of W_o,r z_r,  with z_r the heads of rank r

    Every rank passes the same x and gets the same output; one sum over the ranks is made, behind
    the output map. The maps of queries, keys and values are cut by rows, the output map by columns,
    as DTensors of `torch.distributed.tensor`. Sinks, slopes and masks that differ between heads are
    cut in the same way. Gradients of parameters that all heads share, such as a norm of the
    queries, are summed over the ranks.

    Args:
        attention: a layer with separate linear maps (`SeparateQKV`) and a linear output map. It is
            changed: each rank keeps H / W query heads, and G / W key/value heads.
        mesh: a mesh of one dimension, with W ranks.
        repeat_keys: whether a key/value head may lie on several ranks, if there are fewer of them
            than ranks. Each such rank has a copy, and the gradients of the copies are summed.

    Returns:
        The layer.

    Raises:
        ArgumentError: W does not divide H; W does not divide G and `repeat_keys` is False, or G
            does not divide W; or the mesh has several dimensions.
        ArgumentTypeError: the layer is of another kind, or has a norm over all heads at once.

    Every rank runs this code; here there is one rank, and torchrun starts more.

    >>> import torch, regard
    >>> import torch.distributed as dist
    >>> from regard.nn.variants import build
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = dist.init_device_mesh("cpu", (1,))
    >>> layer, x = build("gqa", 32, 4, groups=2), torch.randn(1, 5, 32)
    >>> whole = layer(x)
    >>> torch.allclose(regard.parallel.split_heads(layer, mesh)(x), whole, atol=1e-5)
    True
    >>> dist.destroy_process_group()

    Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ArgumentError("mesh must be a DeviceMesh of one dimension; give mesh['name'] of one")
    project = _check_layer(attention)
    ranks = RankGroup(mesh.get_group())
    H, G, W = project.q.heads, project.k.heads, ranks.world
    copies = _check_heads(H, G, W, repeat_keys=repeat_keys)
    own = slice(ranks.rank * H // W, (ranks.rank + 1) * H // W)
    if copies > 1:
        for part in (project.k, project.v):
            _repeat_heads(part, copies)
    plan = {f"project.{name}.linear": ColwiseParallel() for name in ("q", "k", "v")}
    parallelize_module(attention, mesh, {**plan, "output": RowwiseParallel()})
    for part in (project.q, project.k, project.v):
        part.heads //= W
        for parameter in part.steps.parameters():
            parameter.register_hook(_sum_over(ranks))
        if copies > 1 and part is not project.q:
            for parameter in part.linear.parameters():
                parameter.register_hook(_sum_of_copies(ranks, copies))
    _cut_parts_of_heads(attention, own, ranks)
    return attention


def _check_layer(attention: Attention) -> SeparateQKV:
    """Return the projection of a layer that can be split; raise for any other layer."""
    project = getattr(attention, "project", None)
    if type(attention) is not Attention or type(project) is not SeparateQKV:
        kind = type(attention).__name__
        raise ArgumentTypeError(
            f"split_heads got {kind} with {type(project).__name__}; it splits an Attention with "
            "SeparateQKV"
        )
    parts = (project.q, project.k, project.v)
    if any(type(x) is not HeadProjection or type(x.flat) is not nn.Identity for x in parts):
        raise ArgumentTypeError(
            "the projection has a map or norm over all heads at once, which needs every head on "
            "one rank; split_heads takes HeadProjections without one"
        )
    if project.key_transform is not None:
        raise ArgumentTypeError(
            f"the projection transforms keys by {type(project.key_transform).__name__}; "
            "split_heads does not support it"
        )
    if attention.score is not None:
        raise ArgumentTypeError(
            f"the layer has the score rule {attention.score}; split_heads does not support score "
            "rules"
        )
    if not isinstance(attention.output, nn.Linear):
        raise ArgumentTypeError(
            f"the output map is {type(attention.output).__name__}; split_heads needs a Linear"
        )
    return project


def _check_heads(H: int, G: int, W: int, *, repeat_keys: bool) -> int:
    """Return on how many ranks each key/value head lies; raise if W ranks cannot share them."""
    if H % W:
        raise ArgumentError(f"{plural(W, 'rank')} cannot share {plural(H, 'query head')} evenly")
    if not G % W:
        return 1
    if not repeat_keys or W % G:
        raise ArgumentError(
            f"{plural(W, 'rank')} cannot share {plural(G, 'key/value head')} evenly; "
            + (
                "a head can be repeated only if their number divides that of the ranks"
                if W % G
                else "pass repeat_keys=True to put each head on several ranks"
            )
        )
    return W // G


def _repeat_heads(part: HeadProjection, copies: int) -> None:
    """Repeat each head of a map, so that every rank gets one."""
    for name, p in list(part.linear.named_parameters(recurse=False)):
        heads = torch.unflatten(p.detach(), 0, (part.heads, part.head_dim))
        repeated = heads.repeat_interleave(copies, 0).flatten(0, 1)
        setattr(part.linear, name, nn.Parameter(repeated, requires_grad=p.requires_grad))
    part.heads *= copies
    part.linear.out_features *= copies


def _cut_parts_of_heads(attention: Attention, own: slice, ranks: RankGroup) -> None:
    """Keep the sink, the mask and the bias of this rank's heads."""
    if attention.sink is not None:
        attention.sink = nn.Parameter(
            attention.sink.detach()[own].clone(), requires_grad=attention.sink.requires_grad
        )
    if attention.mask is not None:
        attention.mask = attention.mask.select_heads(own)
    if attention.bias is None:
        return
    whole = attention.bias.tensors()
    attention.bias = attention.bias.select_heads(own)
    if not len(attention.bias_tensors):
        return
    parameters = nn.ParameterList()
    for before, x in zip(whole, attention.bias.tensors(), strict=True):
        p = nn.Parameter(x.detach().clone(), requires_grad=before.requires_grad)
        if x.shape == before.shape and p.requires_grad:  # all heads share it
            p.register_hook(_sum_over(ranks))
        parameters.append(p)
    attention.bias_tensors = parameters


def _sum_over(ranks: RankGroup) -> Callable[[Tensor], Tensor]:
    """Return a hook that sums the gradient of a parameter over the ranks."""
    return lambda gradient: ranks.sum("parameters", gradient)


def _sum_of_copies(ranks: RankGroup, copies: int) -> Callable[[Tensor], Tensor]:
    """Return a hook that sums the gradients of the copies of a key/value head."""

    def hook(gradient: Tensor) -> Tensor:
        assert isinstance(gradient, DTensor)
        local = gradient.to_local()
        wide = local.to(torch.promote_types(local.dtype, torch.float32))
        parts = ranks.gather("parameters", wide, [wide.numel()] * ranks.world)
        first = ranks.rank // copies * copies
        total = torch.stack(parts[first : first + copies]).sum(0).view_as(local).to(local.dtype)
        return DTensor.from_local(total, gradient.device_mesh, gradient.placements)

    return hook
