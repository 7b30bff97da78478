"""Text encoders: states of every token, and pooled sentence vectors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError, FileError
from regard.files.regular_files import checked_path_or_none
from regard.files.strict_json import read_json as read_list
from regard.models.checkpoint.config import read_json
from regard.models.decoder import check_ids
from regard.models.encoder import HeadedEncoder, first
from regard.models.tokenized import Tokenized, beside, several
from regard.models.tokenizer import Tokenizer
from regard.span import Positions, as_tensor
from regard.untrusted_text import escape_controls, short_repr

Mode: TypeAlias = Literal["cls", "max", "mean", "mean_sqrt_len"]
"""The first token; the largest number of each dimension; the mean; the sum divided by the square
root of the length.
"""


@dataclass(frozen=True)
class Pooling:
    """How the states of a text become one vector.

    Attributes:
        mode: a `Mode`.
        normalise: whether the vector is divided by its length, so that a product of two is their
            cosine.

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

    mean: (1/n) sum_t x_t;  mean_sqrt_len: (1/sqrt(n)) sum_t x_t;  max: max_t x_t;  cls: x_0
    then y / |y|

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
"""The modules of a sentence-transformers folder that are understood, in their order; the last may
be absent.
"""


def read_pooling(folder: Path) -> Pooling | None:
    """What modules.json of a sentence-transformers folder says; None where there is no such file.
    It is read as data.

    >>> read_pooling(Path("no/such/folder")) is None
    True

    Raises:
        FileError: it asks for something else than the mean, the maximum, or the first token,
            normalised or not.
    """
    modules = _modules(folder)
    if modules is None:
        return None
    kinds = [kind for kind, _ in modules]
    if kinds not in ([*KINDS[:2]], [*KINDS]):
        raise FileError(
            f"{folder / 'modules.json'} has the modules "
            f"{escape_controls(', '.join(kinds)[:200])}; only "
            f"{', '.join(KINDS)} are supported, the last "
            "may be absent; without the file, the model loads and its states can be pooled"
        )
    where = folder / modules[1][1]
    if where.parent != folder:
        raise FileError(
            f"{folder / 'modules.json'} leads to {short_repr(str(where))}, which is not in its "
            "folder"
        )
    said = read_json(where, "config.json")
    chosen = [key for key, value in said.items() if key.startswith("pooling_mode") and value]
    if len(chosen) != 1 or chosen[0] not in MODES:
        raise FileError(
            f"{where / 'config.json'} asks for {short_repr(chosen)}; one of {sorted(MODES)} is "
            "supported"
        )
    return Pooling(MODES[chosen[0]], normalise=len(kinds) > 2)


def read_longest(folder: Path) -> int | None:
    """The most tokens of a text that sentence_bert_config.json allows, or None.

    Raises:
        FileError: max_seq_length is no number.
    """
    name = "sentence_bert_config.json"
    if checked_path_or_none(folder, name) is None:
        return None
    found = read_json(folder, name).get("max_seq_length")
    if found is not None and (type(found) is not int or found < 1):
        raise FileError(
            f"{folder / name}: max_seq_length is {short_repr(found)}; it must be a number of tokens"
        )
    return found


def _modules(folder: Path) -> list[tuple[str, str]] | None:
    """The kinds of the modules and the folders in which they are."""
    name = "modules.json"
    path = checked_path_or_none(folder, name)
    if path is None:
        return None
    try:
        found = read_list(path, kind=list)
        return [(str(x["type"]).rpartition(".")[2], str(x["path"])) for x in found]
    except (TypeError, KeyError):
        raise FileError(f"{path} is no list of modules, each with type and path") from None


class Tokens(NamedTuple):
    """Texts beside one another.

    Attributes:
        ids: [B,S].
        positions: [B,S], -1 behind the end of a shorter text.
        segments: [B,S], 0 for a text, 1 for the second one of a pair.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor


class TextEncoder(Tokenized):
    """An encoder with its tokenizer and its config; `regard.load` makes it.

    Args:
        network: ids -> states.
        tokenizer: None: `encode` and `embed` are refused.
        config: the frozen config of its family, with vocab_size.
        pooling: how `embed` makes one vector of a text; None is the mean over its tokens,
            normalised.
        longest: the most tokens of a text.
        fresh: stored names that were missing, and allowed to be.
        ignored: what the folder holds and nobody looked at.

    Attributes:
        network, config, pooling, longest, fresh, ignored: as given.

    >>> import regard
    >>> from regard.models.families import bert
    >>> config = bert.Config(1024, 8, 1, 2, 16, 32)
    >>> network, tokenizer = bert.build(config).eval(), regard.load("tiny").tokenizer
    >>> model = TextEncoder(network, tokenizer, config, longest=32)
    >>> tokens = model.encode(["to be", "or not to be"])
    >>> states = model.hidden(*tokens)
    >>> model.pool(states, tokens.positions, mode="max").shape
    torch.Size([2, 8])
    >>> model.embed(["to be", "or not to be"]).norm(dim=1)
    tensor([1., 1.])
    """

    def __init__(
        self,
        network: HeadedEncoder,
        tokenizer: Tokenizer | None,
        config: Any,
        *,
        pooling: Pooling | None = None,
        longest: int | None = None,
        fresh: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> None:
        super().__init__(network, tokenizer, config, fresh, ignored)
        self.network = network
        self.pooling = Pooling() if pooling is None else pooling
        self.longest = longest

    def encode(
        self,
        texts: str | Sequence[str],
        seconds: str | Sequence[str] | None = None,
        *,
        truncate: bool = False,
    ) -> Tokens:
        """The ids of texts with what the tokenizer puts around them, [CLS] and [SEP] in BERT;
        shorter ones are padded behind.

        Args:
            texts: one, or several.
            seconds: the second text of each pair, if the model is to read pairs.
            truncate: whether the end of a text that is too long is left out, and not refused; not
                for pairs.

        Raises:
            ArgumentError: there is no text, seconds are not as many, or a text is longer than the
                model reads.
            ArgumentTypeError: a text is no str.
        """
        firsts = several(texts)
        others: Sequence[str | None] = [None] * len(firsts)
        if seconds is not None:
            others = several(seconds, "seconds")
            if len(others) != len(firsts):
                raise ArgumentError(
                    f"{len(firsts)} texts and {len(others)} seconds; give one second for each text"
                )
        rows = []
        for i, pair in enumerate(zip(firsts, others, strict=True)):
            row = self.tokenizer.encode_pair(*pair)
            over = 0 if self.longest is None else len(row[0]) - self.longest
            if over > 0 and truncate and pair[1] is None:
                row = self._shorter(pair[0], row, over)
            elif over > 0:
                way = "split it, or leave out its end with truncate=True"
                raise ArgumentError(
                    f"text {i} has {len(row[0])} tokens, and this model reads {self.longest}; "
                    f"{way if pair[1] is None else 'shorten it'}"
                )
            rows.append(row)
        ids, positions = beside([row[0] for row in rows], self.device)
        return Tokens(ids, positions, beside([row[1] for row in rows], self.device)[0])

    def _shorter(
        self, text: str, row: tuple[list[int], list[int]], over: int
    ) -> tuple[list[int], list[int]]:
        """A row without the last tokens of its text; what stands behind the text stays."""
        ids, segments = row
        own = self.tokenizer.encode(text)
        if over > len(own):
            raise ArgumentError(f"longest is {self.longest}, less than what stands around a text")
        end = next(e for e in range(len(ids), 0, -1) if ids[:e][-len(own) :] == own)
        return ids[: end - over] + ids[end:], segments[: end - over] + segments[end:]

    def hidden(
        self,
        ids: Int[Tensor, "B S"],
        positions: Positions | None = None,
        segments: Int[Tensor, "B S"] | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B S M"]:
        """The states of the last block, [B,S,M]: `model.hidden(*model.encode(texts))`.

        Args:
            ids, positions, segments: as `encode` gives them; a slot at position -1 is padding, and
                its state means nothing.
            backend: the attention kernel, or "auto".

        Raises:
            ArgumentError: an id lies outside of the vocabulary, or a position has no vector.
        """
        real = ids if not isinstance(positions, Tensor) else ids.masked_fill(positions < 0, 0)
        check_ids(real, self.config.vocab_size)
        states: Tensor = self.network(ids, positions, segments, backend=backend)
        return states

    def pool(
        self,
        states: Float[Tensor, "B S M"],
        positions: Positions | None = None,
        *,
        mode: Mode | None = None,
        normalise: bool | None = None,
    ) -> Float[Tensor, "B M"]:
        """One vector for each text, over its tokens only.

        Args:
            states: from `hidden`.
            positions: from `encode`.
            mode: "mean", "cls", "max" or "mean_sqrt_len"; None is the model's own.
            normalise: whether to divide it by its length; None is the model's own.

        Raises:
            ArgumentError: the mode is unknown.
        """
        own = self.pooling
        chosen = Pooling(
            own.mode if mode is None else mode, own.normalise if normalise is None else normalise
        )
        return pool(states, positions, chosen)

    @torch.no_grad()
    def embed(
        self, texts: str | Sequence[str], *, batch: int = 32, truncate: bool = False
    ) -> Float[Tensor, "N M"]:
        """A vector for each text, pooled as the model was trained to be; texts of like length are
        read together.

        Args:
            texts: one, or several.
            batch: how many are read at once; it changes nothing but the time and the memory.
            truncate: as in `encode`.

        Raises:
            ArgumentError, ArgumentTypeError: as `encode`; batch is less than 1.
        """
        if batch < 1:
            raise ArgumentError(f"batch is {batch}; it must be at least 1")
        tokens = self.encode(texts, truncate=truncate)
        sizes = (tokens.positions >= 0).sum(1)
        order = sizes.argsort(stable=True)
        parts = []
        for rows in torch.split(order, batch):
            some = Tokens(*(x[rows, : int(sizes[rows].max())] for x in tokens))
            parts.append(self.pool(self.hidden(*some), some.positions))
        return torch.cat(parts)[order.argsort()]
