"""The names and layouts of TransformerLens for the taps of regard, so that notebooks written for it
read models of regard; TransformerLens itself is not needed.

>>> import regard, torch
>>> from regard.integrations.transformer_lens import run_with_cache
>>> ids = torch.tensor([[1, 2, 3]])
>>> logits, cache = run_with_cache(regard.load("tiny"), ids, ["blocks.1.attn.hook_pattern"])
>>> cache["blocks.1.attn.hook_pattern"].shape
torch.Size([1, 8, 3, 3])
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from jaxtyping import Float, Int
from torch import Tensor

from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.models import Model
from regard.tracing import Trace

HOOKS = {
    "attn.hook_rot_q": "q",
    "attn.hook_rot_k": "k",
    "attn.hook_v": "v",
    "attn.hook_pattern": "pattern",
    "attn.hook_z": "z",
    "hook_attn_out": "out",
    "hook_mlp_out": "mlp",
    "hook_resid_post": "residual",
}
"""Hook of a block -> tap of a layer. `q` and `k` are taken after the rotation, whatever the model,
so that `hook_q` and `hook_k`, which are before it, have no tap.
"""


def tap_name(hook: str) -> str:
    """Return the tap of a hook: "blocks.3.attn.hook_z" is "layers.3.z".

    Args:
        hook: "hook_embed", or a key of `HOOKS` behind "blocks.N."; "blocks.N.hook_resid_pre" is
            the result of the layer before.

    Returns:
        The name of the tap.

    Raises:
        ArgumentError: the hook has no tap.

    >>> tap_name("blocks.0.hook_resid_pre"), tap_name("blocks.3.hook_resid_pre")
    ('embed', 'layers.2.residual')
    """
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", hook)
    if hook == "hook_embed" or hook == "blocks.0.hook_resid_pre":
        return "embed"
    if block and block[2] == "hook_resid_pre":
        return f"layers.{int(block[1]) - 1}.residual"
    if block and block[2] in HOOKS:
        return f"layers.{block[1]}.{HOOKS[block[2]]}"
    known = ["hook_embed", *(f"blocks.N.{name}" for name in ("hook_resid_pre", *HOOKS))]
    hint = suggest(re.sub(r"\d+", "N", hook), known, otherwise=f"; known: {', '.join(known)}")
    raise ArgumentError(f"regard has no tap for the hook {hook!r}{hint}", argument="hook")


def run_with_cache(
    model: Model, ids: Int[Tensor, "B T"], names: Iterable[str] | None = None
) -> tuple[Float[Tensor, "B T V"], dict[str, Tensor]]:
    """Run a model and return its logits with the tensors of hooks.

    Args:
        model: the model.
        ids: token ids [B, T].
        names: hooks; None is every hook of every layer.

    Returns:
        Logits [B, T, V], and by hook its tensor in the layout of TransformerLens: q, k, v and z
        as [B, T, H, D], patterns as [B, H, T, T], all others as [B, T, M].

    Raises:
        ArgumentError: a hook has no tap.
    """
    if names is None:
        blocks = [f"blocks.{i}." for i in range(len(model.decoder.layers))]
        names = ["hook_embed", *(block + hook for block in blocks for hook in HOOKS)]
    taps = {name: tap_name(name) for name in names}
    with Trace(*dict.fromkeys(taps.values())) as trace:
        logits = model(ids)
    heads = ("q", "k", "v", "z")
    tensors = {
        name: trace[tap].transpose(1, 2) if tap.split(".")[-1] in heads else trace[tap]
        for name, tap in taps.items()
    }
    return logits, tensors
