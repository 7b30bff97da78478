"""Text encoders: hidden states of every token, and pooled sentence vectors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.deprecation import renamed_attribute, renamed_parameters
from regard.errors import ArgumentError, FileError
from regard.files.regular_files import checked_path_or_none
from regard.files.strict_json import read_json as read_list
from regard.models.checkpoint.config import read_json
from regard.models.decoder import check_ids
from regard.models.encoder import HeadedEncoder, first_token_state
from regard.models.text_model import TextModel, as_text_list, pad_right
from regard.models.tokenizer import Tokenizer
from regard.span import Positions, as_tensor
from regard.units import plural
from regard.untrusted_text import escape_controls, short_repr

PoolingMode: TypeAlias = Literal["cls", "max", "mean", "mean_sqrt_len"]
"""How the token states become one vector: "cls" takes the state of the first token, "max" the
maximum of each dimension, "mean" the mean, and "mean_sqrt_len" the sum divided by the square root
of the number of tokens.
"""


@dataclass(frozen=True)
class Pooling:
    """How the token states of a text become one vector.

    Args:
        mode: a `PoolingMode`.
        normalise: whether the vector is divided by its length, so that the dot product of two
            vectors is their cosine similarity.

    Raises:
        ArgumentError: the mode is unknown.

    >>> Pooling()
    Pooling(mode='mean', normalise=True)
    """

    mode: PoolingMode = "mean"
    normalise: bool = True

    def __post_init__(self) -> None:
        if self.mode not in get_args(PoolingMode):
            raise ArgumentError(
                f"mode is {self.mode!r}; it is one of {', '.join(get_args(PoolingMode))}"
            )


def pool(
    states: Float[Tensor, "B S M"], positions: Positions | None, pooling: Pooling
) -> Float[Tensor, "B M"]:
    """Pool the token states of each text into one vector; padding has no influence.

    mean: y = (1/n) sum_t x_t;  mean_sqrt_len: y = (1/sqrt(n)) sum_t x_t;  max: y = max_t x_t;
    cls: y = x_0;  and then, if `normalise`, y / |y|

    The computation is in fp32 or better. A text without tokens gets zeros.

    Args:
        states: hidden states [B, S, M] of an encoder.
        positions: positions [B, S], -1 for padding; None means that there is no padding.
        pooling: the mode, and whether to normalise.

    Returns:
        One vector per text, [B, M], in the dtype of the states.

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
        pooled = first_token_state(x, positions)
    elif pooling.mode == "max":
        largest = x.masked_fill(~real[..., None], float("-inf")).amax(1)
        pooled = largest.masked_fill(n == 0, 0)
    else:
        size = n if pooling.mode == "mean" else n.sqrt()
        pooled = x.sum(1) / size.clamp(min=1)
    pooled = F.normalize(pooled, dim=-1) if pooling.normalise else pooled
    return pooled.to(states.dtype)


POOLING_MODE_OF_KEY: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
}
"""Key of 1_Pooling/config.json -> pooling mode."""
SENTENCE_TRANSFORMERS_MODULES = ("Transformer", "Pooling", "Normalize")
"""The supported modules of a sentence-transformers folder in their order; the last is optional."""


def read_pooling(folder: Path) -> Pooling | None:
    """Read the pooling from modules.json of a sentence-transformers folder; None without that file.

    The file is read as data; no code that it names is imported.

    Raises:
        FileError: the pooling is not a `PoolingMode`, or there are other modules.

    >>> read_pooling(Path("no/such/folder")) is None
    True
    """
    modules = _modules(folder)
    if modules is None:
        return None
    kinds = [kind for kind, _ in modules]
    if kinds not in ([*SENTENCE_TRANSFORMERS_MODULES[:2]], [*SENTENCE_TRANSFORMERS_MODULES]):
        raise FileError(
            f"{folder / 'modules.json'} has the modules "
            f"{escape_controls(', '.join(kinds)[:200])}; only "
            f"{', '.join(SENTENCE_TRANSFORMERS_MODULES)} are supported, and the "
            "last one may be missing; without it, the model loads, and you can pool its states"
        )
    where = folder / modules[1][1]
    if where.parent != folder:
        raise FileError(
            f"{folder / 'modules.json'} leads to {short_repr(str(where))}, which is not in its "
            "folder"
        )
    keys = read_json(where, "config.json")
    chosen = [key for key, value in keys.items() if key.startswith("pooling_mode") and value]
    if len(chosen) != 1 or chosen[0] not in POOLING_MODE_OF_KEY:
        raise FileError(
            f"{where / 'config.json'} asks for {short_repr(chosen)}; one of "
            f"{sorted(POOLING_MODE_OF_KEY)} is supported"
        )
    return Pooling(POOLING_MODE_OF_KEY[chosen[0]], normalise=len(kinds) > 2)


def read_max_seq_length(folder: Path) -> int | None:
    """Read max_seq_length, in tokens, from sentence_bert_config.json; None without that file.

    Raises:
        FileError: max_seq_length is not a whole number above 0.
    """
    name = "sentence_bert_config.json"
    if checked_path_or_none(folder, name) is None:
        return None
    limit = read_json(folder, name).get("max_seq_length")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise FileError(
            f"{folder / name}: max_seq_length is {short_repr(limit)}; it must be a number of tokens"
        )
    return limit


def _modules(folder: Path) -> list[tuple[str, str]] | None:
    """Return the class name and the folder of each module in modules.json; None without that
    file.
    """
    name = "modules.json"
    path = checked_path_or_none(folder, name)
    if path is None:
        return None
    try:
        modules = read_list(path, kind=list)
        return [(str(x["type"]).rpartition(".")[2], str(x["path"])) for x in modules]
    except (TypeError, KeyError):
        raise FileError(f"{path} is not a list of modules, each with type and path") from None


class TokenBatch(NamedTuple):
    """The tokens of a batch of texts, padded to one length.

    Attributes:
        ids: token ids [B, S].
        positions: positions [B, S], -1 in the padding after a shorter text.
        segments: segment ids (token_type_ids) [B, S]: 0 for a text, 1 for the second one of a pair.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor


class TextEncoder(TextModel):
    """An encoder with its tokenizer and its config, as `regard.load` returns it.

    Args:
        network: the encoder: ids -> hidden states.
        tokenizer: converts texts to ids; with None, `encode` and `embed` raise.
        config: the frozen config of its family, with vocab_size.
        pooling: how `embed` computes one vector for a text; None is the normalised mean over
            tokens.
        max_seq_length: the largest number of tokens of a text; None is no limit.
        newly_initialized: names of weights that the checkpoint lacked and was allowed to lack.
        ignored: parts of the checkpoint that were not used.

    Attributes:
        network, config, pooling, max_seq_length, newly_initialized, ignored: the arguments.

    >>> import regard
    >>> from regard.models.families import bert
    >>> config = bert.Config(1024, 8, 1, 2, 16, 32)
    >>> network, tokenizer = bert.build(config).eval(), regard.load("tiny").tokenizer
    >>> model = TextEncoder(network, tokenizer, config, max_seq_length=32)
    >>> tokens = model.encode(["to be", "or not to be"])
    >>> states = model.hidden(*tokens)
    >>> model.pool(states, tokens.positions, mode="max").shape
    torch.Size([2, 8])
    >>> model.embed(["to be", "or not to be"]).norm(dim=1)
    tensor([1., 1.])
    """

    longest = renamed_attribute("max_seq_length")

    @renamed_parameters(longest="max_seq_length", fresh="newly_initialized")
    def __init__(
        self,
        network: HeadedEncoder,
        tokenizer: Tokenizer | None,
        config: object,
        *,
        pooling: Pooling | None = None,
        max_seq_length: int | None = None,
        newly_initialized: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> None:
        super().__init__(network, tokenizer, config, newly_initialized, ignored)
        self.network = network
        self.pooling = Pooling() if pooling is None else pooling
        self.max_seq_length = max_seq_length

    def encode(
        self,
        texts: str | Sequence[str],
        seconds: str | Sequence[str] | None = None,
        *,
        truncate: bool = False,
    ) -> TokenBatch:
        """Convert texts to ids, with the special tokens of the tokenizer, [CLS] and [SEP] in BERT.

        Args:
            texts: one text, or B texts.
            seconds: the second text of each pair, for a model that reads pairs; None is no pairs.
            truncate: whether the end of a text that is too long is cut off; otherwise such a text
                raises. Pairs are never truncated.

        Returns:
            The ids, positions and segments, each [B, S]; shorter texts are padded at the end.

        Raises:
            ArgumentError: there is no text, `seconds` has another number of texts, or a text has
                more than `max_seq_length` tokens.
            ArgumentTypeError: a text is not a str.
            FileError: the model has no tokenizer.
        """
        firsts = as_text_list(texts)
        others: Sequence[str | None] = [None] * len(firsts)
        if seconds is not None:
            others = as_text_list(seconds, "seconds")
            if len(others) != len(firsts):
                raise ArgumentError(
                    f"{plural(len(firsts), 'text')} and {plural(len(others), 'second text')} were "
                    "given; give one second text for each text"
                )
        rows = []
        for i, pair in enumerate(zip(firsts, others, strict=True)):
            row = self.tokenizer.encode_pair(*pair)
            over = 0 if self.max_seq_length is None else len(row[0]) - self.max_seq_length
            if over > 0 and truncate and pair[1] is None:
                row = self._shorter(pair[0], row, over)
            elif over > 0:
                advice = "split it, or cut off its end with truncate=True"
                raise ArgumentError(
                    f"text {i} has {plural(len(row[0]), 'token')}, and this model reads at most "
                    f"{self.max_seq_length}; {advice if pair[1] is None else 'shorten it'}"
                )
            rows.append(row)
        ids, positions = pad_right([row[0] for row in rows], self.device)
        return TokenBatch(ids, positions, pad_right([row[1] for row in rows], self.device)[0])

    def _shorter(
        self, text: str, row: tuple[list[int], list[int]], over: int
    ) -> tuple[list[int], list[int]]:
        """Remove the last `over` tokens of a text from its row; special tokens after it stay."""
        ids, segments = row
        own = self.tokenizer.encode(text)
        if over > len(own):
            raise ArgumentError(
                f"max_seq_length is {self.max_seq_length}, less than the number of special tokens "
                "around a text; raise it"
            )
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
        """Compute the hidden states of the last block: `model.hidden(*model.encode(texts))`.

        Args:
            ids: token ids [B, S], as `encode` returns them.
            positions: positions [B, S], -1 for padding, whose states have no meaning; None is 0 to
                S - 1.
            segments: segment ids [B, S]; None is 0 everywhere.
            backend: the attention kernel, or "auto".

        Returns:
            Hidden states [B, S, M].

        Raises:
            ArgumentError: an id is outside the vocabulary, or a position is beyond the learned
                positions.
        """
        real = ids if not isinstance(positions, Tensor) else ids.masked_fill(positions < 0, 0)
        check_ids(real, self.config.vocab_size)
        states: Tensor = self.network(ids, positions, segments, backend=backend)
        return states

    def forward(
        self,
        ids: Int[Tensor, "B S"],
        positions: Positions | None = None,
        segments: Int[Tensor, "B S"] | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B S M"]:
        """Compute the hidden states, as `hidden` does. `model(...)` does the same.

        Args:
            ids, positions, segments, backend: as in `hidden`.

        Returns:
            Hidden states [B, S, M].

        Raises:
            ArgumentError: as in `hidden`.
        """
        return self.hidden(ids, positions, segments, backend=backend)

    __call__ = forward

    def pool(
        self,
        states: Float[Tensor, "B S M"],
        positions: Positions | None = None,
        *,
        mode: PoolingMode | None = None,
        normalise: bool | None = None,
    ) -> Float[Tensor, "B M"]:
        """Pool hidden states into one vector for each text; padding has no influence.

        Args:
            states: hidden states [B, S, M], from `hidden`.
            positions: positions [B, S], from `encode`; None means that there is no padding.
            mode: "mean", "cls", "max" or "mean_sqrt_len"; None is the mode of the checkpoint.
            normalise: whether to divide the vector by its length; None does as the checkpoint says.

        Returns:
            Vectors [B, M].

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
        """Compute one vector for each text, pooled as the checkpoint says.

        Args:
            texts: one text, or N texts.
            batch: how many texts one forward pass reads; it changes only time and memory. Texts of
                similar length are read together.
            truncate: as in `encode`.

        Returns:
            Vectors [N, M].

        Raises:
            ArgumentError, ArgumentTypeError: as in `encode`; or batch is less than 1.
        """
        if batch < 1:
            raise ArgumentError(f"batch is {batch}; it must be at least 1")
        tokens = self.encode(texts, truncate=truncate)
        sizes = (tokens.positions >= 0).sum(1)
        order = sizes.argsort(stable=True)
        parts = []
        for rows in torch.split(order, batch):
            some = TokenBatch(*(x[rows, : int(sizes[rows].max())] for x in tokens))
            parts.append(self.pool(self.hidden(*some), some.positions))
        return torch.cat(parts)[order.argsort()]

    def _example_run(self) -> Callable[[], object]:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        return lambda: self.hidden(ids)

    def _json_files(self) -> Mapping[str, object]:
        mode_keys = {key: mode == self.pooling.mode for key, mode in POOLING_MODE_OF_KEY.items()}
        kinds = SENTENCE_TRANSFORMERS_MODULES[: 3 if self.pooling.normalise else 2]
        folders = ("", "1_Pooling", "2_Normalize")
        files: dict[str, object] = {
            "modules.json": [
                {
                    "idx": i,
                    "name": str(i),
                    "path": path,
                    "type": f"sentence_transformers.models.{x}",
                }
                for i, (x, path) in enumerate(zip(kinds, folders, strict=False))
            ],
            "1_Pooling/config.json": {
                "word_embedding_dimension": self.config.hidden_size,
                **mode_keys,
            },
        }
        if self.max_seq_length is not None:
            files["sentence_bert_config.json"] = {"max_seq_length": self.max_seq_length}
        return files
