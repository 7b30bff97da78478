"""The catalogue of mechanisms as a list, without torch: their groups, names and summaries, which
stand in the text of the files of `regard.nn.variants`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

VARIANTS = Path(__file__).parents[1] / "nn" / "variants"
"""The folder whose functions with the decorator `@variant` are the mechanisms."""

VariantFamily: TypeAlias = Literal[
    "softmax", "latent", "linear", "memory", "selected", "cross", "additive"
]
"""The kind of a mechanism, by its operation and the content of its cache."""


@dataclass(frozen=True)
class Group:
    """Mechanisms of one family that have an idea in common."""

    name: str
    family: VariantFamily
    title: str

    def summaries(self) -> dict[str, str]:
        """Return the mechanism in one sentence by name, in the order of their definition."""
        return _summaries()[self.name]


GROUPS = (
    Group("translation", "additive", "recurrent encoders and decoders"),
    Group("heads", "softmax", "one head, many heads, shared keys and values"),
    Group("masks", "softmax", "sparse masks"),
    Group("streaming", "softmax", "a cache of fixed size"),
    Group("small_cache", "softmax", "fewer cached values per token"),
    Group("head_steps", "softmax", "steps on queries, keys and values"),
    Group("first_values", "softmax", "values of the first layer in every layer"),
    Group("head_results", "softmax", "steps on the results of heads"),
    Group("biases", "softmax", "biases on the scores"),
    Group("weights", "softmax", "other steps from scores to weights"),
    Group("coordinates", "softmax", "positions with several coordinates"),
    Group("distances", "softmax", "other distances, for texts longer than in training"),
    Group("cross", "cross", "two sequences"),
    Group("latents", "latent", "keys and values computed from latents"),
    Group("selection", "selected", "keys that each query chooses"),
    Group("compression", "selected", "one entry for each block of tokens"),
    Group("eviction", "selected", "tokens that a full cache keeps"),
    Group("sums", "linear", "sums in a state of fixed size"),
    Group("decays", "linear", "decays and gates"),
    Group("delta_rules", "linear", "delta rules"),
    Group("feature_maps", "linear", "feature maps instead of the exponential function"),
    Group("regression", "linear", "regression while reading, and convolution"),
    Group("memory", "memory", "a compressive memory"),
)
"""Every group, in the order in which they are taught, also by `regard describe`."""


def summary(name: str) -> str:
    """Return a mechanism of the catalogue in one sentence."""
    return next(texts[name] for texts in _summaries().values() if name in texts)


@cache
def _summaries() -> dict[str, dict[str, str]]:
    """Return the first paragraph of each constructor's docstring, by group and name."""
    texts: dict[str, dict[str, str]] = {group.name: {} for group in GROUPS}
    for path in sorted(VARIANTS.glob("*.py")):
        for entry in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(entry, ast.FunctionDef) and (group := _group_of(entry)):
                text = ast.get_docstring(entry) or ""
                texts[group][entry.name] = text.split("\n\n")[0].replace("\n", " ")
    return texts


def _group_of(entry: ast.FunctionDef) -> str | None:
    """Return the first argument of the decorator `@variant`, or None without it."""
    for decorator in entry.decorator_list:
        match decorator:
            case ast.Call(ast.Name("variant"), [ast.Constant(str(group)), *_]):
                return group
    return None
