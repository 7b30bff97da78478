"""The catalogue in the order in which it is taught: groups of mechanisms that have one idea in
common, from the first attention of recurrent networks to compressive memories.

`regard describe` and docs/catalogue.md list the mechanisms so. A file of constructors belongs to
the group of its idea; within a group, mechanisms stand in the order of their definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from regard.nn.variants.registry import VARIANTS, Variant, VariantFamily


@dataclass(frozen=True)
class Group:
    """Mechanisms of one family that have an idea in common.

    Attributes:
        family: the kind of the mechanisms.
        title: what they have in common, in a few words.
        modules: the files of this folder that define them.

    >>> from regard.nn.variants.teaching_order import GROUPS
    >>> [variant.name for variant in GROUPS[0].variants()]
    ['bahdanau', 'luong']
    """

    family: VariantFamily
    title: str
    modules: tuple[str, ...]

    def variants(self) -> Iterator[Variant]:
        """Yield the mechanisms of the group in the order of their definition."""
        for entry in VARIANTS.values():
            module = entry.build.__module__.rpartition(".")[2]
            if entry.family == self.family and module in self.modules:
                yield entry


GROUPS = (
    Group("additive", "recurrent encoders and decoders", ("cross",)),
    Group("softmax", "one head, many heads, shared keys and values", ("softmax",)),
    Group("softmax", "sparse masks", ("masked",)),
    Group("softmax", "a cache of fixed size", ("bounded_memory",)),
    Group("softmax", "fewer cached values per token", ("small_memory",)),
    Group("softmax", "steps on queries, keys and values", ("head_steps",)),
    Group("softmax", "values of the first layer in every layer", ("carried_values",)),
    Group("softmax", "steps on the results of heads", ("head_finishes",)),
    Group("softmax", "biases on the scores", ("data_bias",)),
    Group("softmax", "other steps from scores to weights", ("scored",)),
    Group("softmax", "positions with several coordinates", ("multi_axis",)),
    Group("softmax", "other distances, for texts longer than in training", ("remapped",)),
    Group("cross", "two sequences", ("cross",)),
    Group("latent", "keys and values computed from latents", ("softmax", "small_memory")),
    Group("selected", "keys that each query chooses", ("selected_keys",)),
    Group("selected", "tokens that a full cache keeps", ("evicting",)),
    Group("linear", "sums in a state of fixed size", ("linear_recurrence",)),
    Group("linear", "decays and gates", ("decayed_state",)),
    Group("linear", "delta rules", ("delta_rules",)),
    Group("linear", "feature maps instead of the exponential function", ("feature_maps",)),
    Group("linear", "regression while reading, and convolution", ("regression",)),
    Group("memory", "a compressive memory", ("bounded_memory",)),
)
"""Every group, in the order in which they are taught."""


def in_teaching_order() -> list[Variant]:
    """Return every mechanism of the catalogue in the order in which it is taught.

    Returns:
        The mechanisms, group by group; those of a file that no group names come last.

    >>> [variant.name for variant in in_teaching_order()][:5]
    ['bahdanau', 'luong', 'weightless', 'single_head', 'causal']
    """
    listed = {entry.name: entry for group in GROUPS for entry in group.variants()}
    return list({**listed, **VARIANTS}.values())
