"""Text encoders: hidden states of every token, and pooled sentence vectors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ArgumentError, FileError
from regard.files.regular_files import checked_path_or_none
from regard.files.strict_json import read_json as read_list
from regard.models.checkpoint.config import read_json
from regard.models.decoder import check_ids
from regard.models.encoder import Encoder, HeadedEncoder, first_token_state
from regard.models.packed_encoder import PackedEncoder, why_not_packed_encoder
from regard.models.text_model import TextModel, as_text_list, pad_right
from regard.models.tokenizer import Tokenizer
from regard.nn.as_written import why_not_as_written
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


PACKED_TOKENS = 2048
"""About how many tokens of texts `TextEncoder.embed` reads in one packed row: enough for products
at full speed, and few enough that their results stay in the cache of the processor.
"""
PADDED_TEXTS = 32
"""How many texts `TextEncoder.embed` reads at once with padding."""


def _batches_of(
    order: Sequence[int], sizes: Sequence[int], batch_size: int | None, *, packed: bool
) -> Iterator[Sequence[int]]:
    """Yield the texts of each forward pass: parts of `order`, with at most `batch_size` texts; by
    default `PADDED_TEXTS`, or in packed rows as many as have `PACKED_TOKENS` tokens.
    """
    most = batch_size or (len(order) if packed else PADDED_TEXTS)
    part: list[int] = []
    tokens = 0
    for i in order:
        full = packed and tokens + sizes[i] > PACKED_TOKENS
        if part and (full or len(part) == most):
            yield part
            part, tokens = [], 0
        part.append(i)
        tokens += sizes[i]
    yield part


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
        self._packed_encoder: PackedEncoder | None = None

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
        rows = self._token_rows(firsts, others, truncate=truncate)
        ids, positions = pad_right([row[0] for row in rows], self.device)
        return TokenBatch(ids, positions, pad_right([row[1] for row in rows], self.device)[0])

    def _token_rows(
        self, firsts: Sequence[str], others: Sequence[str | None], *, truncate: bool
    ) -> list[tuple[list[int], list[int]]]:
        """Return the ids and the segments of each text or pair, checked against
        `max_seq_length`.
        """
        rows = self.tokenizer.encode_pairs(firsts, others)
        for i, (pair, row) in enumerate(zip(zip(firsts, others, strict=True), rows, strict=True)):
            over = 0 if self.max_seq_length is None else len(row[0]) - self.max_seq_length
            if over > 0 and truncate and pair[1] is None:
                rows[i] = self._shorter(pair[0], row, over)
            elif over > 0:
                advice = "split it, or cut off its end with truncate=True"
                raise ArgumentError(
                    f"text {i} has {plural(len(row[0]), 'token')}, and this model reads at most "
                    f"{self.max_seq_length}; {advice if pair[1] is None else 'shorten it'}"
                )
        return rows

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
        self,
        texts: str | Sequence[str],
        *,
        batch_size: int | None = None,
        truncate: bool = False,
        normalise: bool | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Float[Tensor, "N M"]:
        """Compute one vector for each text, pooled as the checkpoint says.

        Texts of similar length are read together. On a CPU, in fp32 and bf16, they stand one after
        another in rows without padding, and run through packed weights
        (`regard.models.packed_encoder`), which take as much memory again as the linear maps of the
        encoder. Where that is not possible, for example while a trace is open, they are padded, and
        run through the network as it is written. `why_not_packed` says which it is.

        Args:
            texts: one text, or N texts.
            batch_size: the largest number of texts that one forward pass reads; it changes only
                time and memory. None chooses: rows of about `PACKED_TOKENS` tokens, or 32 padded
                texts.
            truncate: as in `encode`.
            normalise: whether to divide each vector by its length; None does as the checkpoint
                says.
            progress: called after each forward pass as progress(texts that are done, N).

        Returns:
            Vectors [N, M], in the order of the texts.

        Raises:
            ArgumentError, ArgumentTypeError: as in `encode`; or batch_size is less than 1.

        >>> import regard
        >>> from regard.models.families import bert
        >>> config = bert.Config(1024, 8, 1, 2, 16, 32)
        >>> network, tokenizer = bert.build(config).eval(), regard.load("tiny").tokenizer
        >>> model = TextEncoder(network, tokenizer, config)
        >>> model.embed(["to be", "or not to be"], progress=print).shape
        2 2
        torch.Size([2, 8])

        Source: Reimers and Gurevych 2019 (arXiv 1908.10084), section 3.
        """
        if batch_size is not None and batch_size < 1:
            raise ArgumentError(f"batch_size is {batch_size}; it must be at least 1")
        firsts = as_text_list(texts)
        rows = self._token_rows(firsts, [None] * len(firsts), truncate=truncate)
        sizes = [len(ids) for ids, _ in rows]
        packed = min(sizes) > 0 and self.why_not_packed() is None
        order = sorted(range(len(rows)), key=sizes.__getitem__)
        vectors: list[Tensor] = []
        done = 0
        for part in _batches_of(order, sizes, batch_size, packed=packed):
            some = [rows[i] for i in part]
            states, positions = (self._packed_states if packed else self._padded_states)(some)
            vectors.append(self.pool(states, positions, normalise=normalise))
            done += len(part)
            if progress is not None:
                progress(done, len(rows))
        return torch.cat(vectors)[torch.tensor(order, device="cpu").argsort().to(self.device)]

    def why_not_packed(self) -> str | None:
        """Return why `embed` would run the network as it is written, with padded texts, or None if
        it would run packed rows.

        Returns:
            The reason in words, or None.

        >>> import regard
        >>> from regard.models.families import bert
        >>> network = bert.build(bert.Config(9, 8, 1, 2, 16, 32)).to("meta")
        >>> TextEncoder(network, None, None).why_not_packed()[:57]
        'block 0 has a linear map that cannot be packed: the weigh'
        """
        encoder = self.network.encoder
        if type(self.network) is not HeadedEncoder or type(encoder) is not Encoder:
            return f"the network is a {type(self.network).__name__}, not a HeadedEncoder"
        if (reason := why_not_as_written(self.network)) is not None:
            return f"the network: {reason}"
        with torch.no_grad():
            return why_not_packed_encoder(encoder)

    def _padded_states(
        self, rows: Sequence[tuple[list[int], list[int]]]
    ) -> tuple[Tensor, Positions]:
        """Return the states of texts and their positions [B, S], by the network as it is
        written.
        """
        ids, positions = pad_right([row[0] for row in rows], self.device)
        segments = pad_right([row[1] for row in rows], self.device)[0]
        return self.hidden(ids, positions, segments), positions

    def _packed_states(
        self, rows: Sequence[tuple[list[int], list[int]]]
    ) -> tuple[Tensor, Positions]:
        """Return the states of texts and their positions [B, S], by the packed encoder."""
        ids, segments = (
            torch.tensor([[x for row in rows for x in row[i]]], device="cpu") for i in (0, 1)
        )
        check_ids(ids, self.config.vocab_size)
        lengths = [len(row[0]) for row in rows]
        if self._packed_encoder is None:
            self._packed_encoder = PackedEncoder(self.network.encoder)
        states = self._packed_encoder(ids, lengths, segments)
        by_text = states[0].split(lengths)
        positions = pad_right([[0] * length for length in lengths])[1]
        return nn.utils.rnn.pad_sequence(by_text, batch_first=True), positions

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
