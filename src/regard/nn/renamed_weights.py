"""Parameter names of earlier releases: saved weights with these names still load."""

from __future__ import annotations

import re

from torch import nn

RENAMED_WEIGHTS = {
    r"\baround_attention\.": "attention_residual.",
    r"\baround_cross\.": "cross_residual.",
    r"\baround_feed_forward\.": "feed_forward_residual.",
    r"\brule\.strength\.": "rule.beta_proj.",
    r"\bdecay\.rate$": "decay.A_log",
    r"\bdecay\.shift$": "decay.dt_bias",
    r"\battention\.select\.": "attention.selector.",
    r"\battention\.local\.": "attention.local_project.",
    r"\battention\.globally\.": "attention.global_project.",
}
"""Patterns of former parameter names in a model's state dict, and what replaces each match."""

_PATTERNS = [(re.compile(old), new) for old, new in RENAMED_WEIGHTS.items()]


def current_weight_name(name: str) -> str:
    """Return the present name of a parameter that an earlier release saved.

    Args:
        name: the full name of a parameter of a model, as in its state dict.

    Returns:
        The name that the parameter has now; the same name where it has not changed.

    >>> current_weight_name("layers.0.around_attention.norm.weight")
    'layers.0.attention_residual.norm.weight'
    >>> current_weight_name("layers.0.attention.rule.decay.rate")
    'layers.0.attention.rule.decay.A_log'
    >>> current_weight_name("norm.weight")
    'norm.weight'
    """
    for pattern, new in _PATTERNS:
        name = pattern.sub(new, name)
    return name


class LoadsRenamedWeights(nn.Module):
    """A module whose `load_state_dict` also accepts former names of its parameters and children.

    Attributes:
        renamed_weights: former name to present name of the module's own parameters and children.

    >>> import torch
    >>> class Scale(LoadsRenamedWeights):
    ...     renamed_weights = {"factor": "weight"}
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = nn.Parameter(torch.zeros(1))
    >>> scale = Scale()
    >>> scale.load_state_dict({"factor": torch.ones(1)})
    <All keys matched successfully>
    >>> scale.weight.item()
    1.0
    """

    renamed_weights: dict[str, str] = {}

    def _load_from_state_dict(
        self, state_dict: dict[str, object], prefix: str, *args: object, **kwargs: object
    ) -> None:
        for old, new in self.renamed_weights.items():
            before, after = prefix + old, prefix + new
            for name in list(state_dict):
                if name == before or name.startswith(f"{before}."):
                    state_dict[after + name[len(before) :]] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
