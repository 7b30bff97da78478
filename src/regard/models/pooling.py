"""One vector for a text, from the states of its tokens; and what a sentence-transformers folder says about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.errors import ArgumentError, FileError
from regard.files.regular import present
from regard.files.strict import read_json as read_list
from regard.foreign import inert, shown
from regard.models.checkpoint.config import read_json
from regard.models.encoder import first
from regard.span import Positions, as_tensor

Mode: TypeAlias = Literal["cls", "max", "mean", "mean_sqrt_len"]
"""The first token; the largest number of each dimension; the mean; the sum divided by the square root of the length."""


@dataclass(frozen=True)
class Pooling:
    """How the states of a text become one vector.

    Attributes:
        mode: a `Mode`.
        normalise: whether the vector is divided by its length, so that a product of two is their cosine.

    Raises:
        ArgumentError: the mode is unknown.

    >>> Pooling()
    Pooling(mode='mean', normalise=True)
    """

    mode: Mode = "mean"
    normalise: bool = True

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ArgumentError(f"mode is {self.mode!r}; it is one of {', '.join(get_args(Mode))}")


def pool(
    states: Float[Tensor, "B S M"], positions: Positions | None, pooling: Pooling
) -> Float[Tensor, "B M"]:
    """The vector of each text: from its tokens only, what padding holds changes nothing.

    mean: (1/n) sum_t x_t;  mean_sqrt_len: (1/sqrt(n)) sum_t x_t;  max: max_t x_t;  cls: x_0;  then y / |y|

    Computed in fp32 or better; a text without tokens has 0.

    Args:
        states: of an encoder.
        positions: where its tokens stand; -1 is padding. None: every slot holds a token.
        pooling: how.

    >>> states = torch.tensor([[[3.0, 8.0], [5.0, 0.0], [7.0, 7.0]]])
    >>> pool(states, torch.tensor([[0, 1, -1]]), Pooling("mean", normalise=False)).tolist()
    [[4.0, 4.0]]

    Source: Reimers and Gurevych 2019 (arXiv 1908.10084), section 3.
    """
    x = states.to(torch.promote_types(states.dtype, torch.float32))
    real = torch.ones(1, 1, dtype=torch.bool, device=x.device)
    if positions is not None:
        real = as_tensor(positions, x.device) >= 0
    real = real.expand(x.shape[:2])
    x = x.masked_fill(~real[..., None], 0)  # selected, not multiplied: padding may hold NaN
    n = real.sum(1, keepdim=True).to(x)
    if pooling.mode == "cls":
        found = first(x, positions)
    elif pooling.mode == "max":
        largest = x.masked_fill(~real[..., None], float("-inf")).amax(1)
        found = largest.masked_fill(n == 0, 0)
    else:
        size = n if pooling.mode == "mean" else n.sqrt()
        found = x.sum(1) / size.clamp(min=1)
    found = F.normalize(found, dim=-1) if pooling.normalise else found
    return found.to(states.dtype)


MODES: dict[str, Mode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
}
"""Key of 1_Pooling/config.json -> mode."""
KINDS = ("Transformer", "Pooling", "Normalize")
"""The modules of a sentence-transformers folder that are understood, in their order; the last may be absent."""


def read_pooling(folder: Path) -> Pooling | None:
    """What modules.json of a sentence-transformers folder says; None where there is no such file. It is read as data.

    >>> read_pooling(Path("no/such/folder")) is None
    True

    Raises:
        FileError: it asks for something else than the mean, the maximum, or the first token, normalised or not.
    """
    modules = _modules(folder)
    if modules is None:
        return None
    kinds = [kind for kind, _ in modules]
    if kinds not in ([*KINDS[:2]], [*KINDS]):
        raise FileError(
            f"{folder / 'modules.json'} has the modules {inert(', '.join(kinds)[:200])}; only {', '.join(KINDS)} are supported, the last "
            "may be absent; without the file, the model loads and its states can be pooled"
        )
    where = folder / modules[1][1]
    if where.parent != folder:
        raise FileError(
            f"{folder / 'modules.json'} leads to {shown(str(where))}, which is not in its folder"
        )
    said = read_json(where, "config.json")
    chosen = [key for key, value in said.items() if key.startswith("pooling_mode") and value]
    if len(chosen) != 1 or chosen[0] not in MODES:
        raise FileError(
            f"{where / 'config.json'} asks for {shown(chosen)}; one of {sorted(MODES)} is supported"
        )
    return Pooling(MODES[chosen[0]], normalise=len(kinds) > 2)


def read_longest(folder: Path) -> int | None:
    """The most tokens of a text that sentence_bert_config.json allows, or None.

    Raises:
        FileError: max_seq_length is no number.
    """
    name = "sentence_bert_config.json"
    if present(folder, name) is None:
        return None
    found = read_json(folder, name).get("max_seq_length")
    if found is not None and (type(found) is not int or found < 1):
        raise FileError(
            f"{folder / name}: max_seq_length is {shown(found)}; it must be a number of tokens"
        )
    return found


def _modules(folder: Path) -> list[tuple[str, str]] | None:
    """The kinds of the modules and the folders in which they are."""
    name = "modules.json"
    path = present(folder, name)
    if path is None:
        return None
    try:
        found = read_list(path, kind=list)
        return [(str(x["type"]).rpartition(".")[2], str(x["path"])) for x in found]
    except (TypeError, KeyError):
        raise FileError(f"{path} is no list of modules, each with type and path") from None
