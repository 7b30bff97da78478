"""What is run: a network on its tokens, and the attentions that it consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.foreign import shown


class Tokens(NamedTuple):
    """One sequence. text: as a person wrote it, or as its tokens decode; ends: for each token,
    where it ends in the text.
    """

    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    text: str
    ends: Sequence[int]


class Site(NamedTuple):
    """One attention of a network.

    place: where its taps stand. rows, columns: the names of the sequences of its queries and of its
        keys.
    around: its residual path, or None.
    """

    place: str
    layer: int
    attention: nn.Module
    around: nn.Module | None
    rows: str
    columns: str


@dataclass(frozen=True, eq=False)
class Words:
    """Words as tokens, for a network without a tokenizer, such as `regard train --task` makes: a
    row, or a source and a target.

    network: a `Decoder` of a row; or an `EncoderDecoder` or a `RecurrentEncoderDecoder`.
    source: ids and words; target: the same of what is said, beginning with the token that starts
        every target; None of a row.
    names: ids -> words, for predictions.

    >>> from regard.inspect.readers import reading
    >>> from regard.models.rnn import recurrent
    >>> pair = Words(recurrent(9, 8, 8, attention="luong"), ((3, 4), ("one", "two")), ((1, 5), ("<bos>", "uno")))
    >>> [site.place for site in reading(pair).sites]
    ['decoder']
    """

    network: nn.Module
    source: tuple[Sequence[int], Sequence[str]]
    target: tuple[Sequence[int], Sequence[str]] | None = None
    name: str = "words"
    names: Callable[[Sequence[int]], Sequence[str]] = lambda ids: [str(i) for i in ids]


@dataclass(frozen=True, eq=False)
class Reading:
    """A network, its tokens, and how to run it.

    Attributes:
        name, text: what was asked for.
        network: the whole.
        sides: its sequences by name: "text", or "source" and "target".
        sites: its attentions, in the order of the run.
        run: runs it once; gives states or logits, for a comparison of two runs.
        embed: the module whose output is the embedded tokens, or None.
        last: the module behind whose output `predict` makes logits of a row [M], of the side
            `predicts`.
        names: ids -> what each is called.
        trained: the most tokens that it was trained on, or None. notes: what a reader should know.
    """

    name: str
    text: str
    network: nn.Module
    sides: Mapping[str, Tokens]
    sites: tuple[Site, ...]
    run: Callable[[], Tensor]
    embed: nn.Module | None
    last: nn.Module
    predict: Callable[[Tensor], Tensor] | None
    predicts: str
    names: Callable[[Sequence[int]], Sequence[str]]
    trained: int | None = None
    notes: tuple[str, ...] = ()

    def site(self, layer: int | None = None, place: str | None = None) -> Site:
        """An attention by its place, or by its layer: of an encoder-decoder the one that reads the
        source.

        Raises:
            ArgumentError: there is none such.
        """
        if place is not None:
            for site in self.sites:
                if site.place == place:
                    return site
            known = ", ".join(site.place for site in self.sites)
            raise ArgumentError(
                f"place is {shown(place)}, where no attention is; there are {known}"
            )
        sites = self.main
        if layer is None:
            return sites[0]
        from regard.inspect.choose import check_index

        return sites[check_index("layer", layer, len(sites), "layer", "layers")]

    @property
    def main(self) -> tuple[Site, ...]:
        """The attentions that `layer` counts: those to the source, if there are any, else all."""
        return tuple(s for s in self.sites if s.rows != s.columns) or self.sites


class Ends(Sequence[int]):
    """Where each token ends in the decoded text; decoded when asked for, since each costs a
    decoding of all before it.
    """

    def __init__(self, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> None:
        self._ids, self._decode = ids, decode

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: Any) -> Any:
        return len(self._decode(self._ids[: i + 1]).rstrip("�"))


def spoken(ids: Sequence[int], words: Sequence[str]) -> Tokens:
    """Words as tokens; the text has a space between them."""
    ends, at = [], -1
    for word in words:
        at += len(word) + 1
        ends.append(at)
    return Tokens(tuple(ids), tuple(words), " ".join(words), tuple(ends))
