"""Text encoders: hidden states of every token, and pooled sentence vectors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.did_you_mean import suggest
from regard.errors import ArgumentError, ArgumentTypeError
from regard.models.decoder import Decoder, check_ids
from regard.models.encoder import Encoder, HeadedEncoder, first_token_state
from regard.models.packed_encoder import PackedEncoder, why_not_packed_encoder
from regard.models.prompts import is_messages, warn_about_names
from regard.models.sentence_settings import (
    DenseSettings,
    Pooling,
    PoolingMode,
    SentenceSettings,
    Similarity,
    sentence_files,
)
from regard.models.text_model import TextModel, as_text_list, pad_right
from regard.models.tokenizer import Tokenizer
from regard.nn.module_calls import why_not_as_written
from regard.span import Positions, as_tensor
from regard.units import plural
from regard.untrusted_text import short_repr


def pool(
    states: Float[Tensor, "B S M"], positions: Positions | None, pooling: Pooling
) -> Float[Tensor, "B n"]:
    """Pool the token states of each text into one vector; padding has no influence.

    mean: y = (1/n) sum_t x_t;  mean_sqrt_len: y = (1/sqrt(n)) sum_t x_t;  max: y = max_t x_t;
    cls: y = x_0;  lasttoken: y = x_(n-1);  weightedmean: y = sum_t (p_t + 1) x_t / sum_t (p_t + 1)
    with the positions p;  and then, if `normalize`, y / |y|, of which `truncate_dim` dimensions are
    kept

    The computation is in fp32 or better. A text without tokens gets zeros.

    Source: Reimers and Gurevych 2019 (arXiv 1908.10084), section 3; Muennighoff 2022 (arXiv
    2202.08904), section 3.1, the weighted mean.
    """
    x = states.to(torch.promote_types(states.dtype, torch.float32))
    places = torch.arange(x.shape[1], device=x.device)[None]
    if positions is not None:
        places = as_tensor(positions, x.device)
    places = places.expand(x.shape[:2])
    real = places >= 0
    x = x.masked_fill(~real[..., None], 0)  # selected, not multiplied: padding may hold NaN
    parts = [_pooled(x, real, places, mode) for mode in pooling.modes]
    return finish(torch.cat(parts, -1), pooling).to(states.dtype)


def _pooled(x: Tensor, real: Tensor, places: Tensor, mode: PoolingMode) -> Tensor:
    """Pool states in which padding is 0, in one mode."""
    n = real.sum(1, keepdim=True).to(x)
    if mode == "cls":
        return first_token_state(x, places)
    if mode == "max":
        largest = x.masked_fill(~real[..., None], float("-inf")).amax(1)
        return largest.masked_fill(n == 0, 0)
    if mode == "lasttoken":
        slots = torch.where(real, torch.arange(x.shape[1], device=x.device), -1).amax(1)
        return x[torch.arange(len(x), device=x.device), slots]
    if mode == "weightedmean":
        weights = (places + 1).masked_fill(~real, 0).to(x)
        return (x * weights[..., None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1)
    return x.sum(1) / (n if mode == "mean" else n.sqrt()).clamp(min=1)


def finish(vectors: Float[Tensor, "B n"], pooling: Pooling) -> Float[Tensor, "B m"]:
    """Divide vectors by their lengths, and leave out dimensions, as a pooling says."""
    vectors = F.normalize(vectors, dim=-1) if pooling.normalize else vectors
    return vectors[:, : pooling.truncate_dim]


class SentenceDense(nn.Module):
    """A linear map of vectors: y = activation(W x + b), plus x or a linear map of x.

    >>> SentenceDense(DenseSettings("2_Dense", 3, 2))(torch.ones(4, 3)).shape
    torch.Size([4, 2])
    """

    def __init__(self, settings: DenseSettings) -> None:
        super().__init__()
        inputs, outputs = settings.inputs, settings.outputs
        self.settings = settings
        self.linear = nn.Linear(inputs, outputs, bias=settings.bias)
        self.activation: nn.Module = getattr(nn, settings.activation)()
        if settings.residual and inputs != outputs:
            self.residual = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Float[Tensor, "B n"]) -> Float[Tensor, "B m"]:
        """Map vectors [B, n] to [B, m]."""
        y: Tensor = self.activation(self.linear(x))
        if not self.settings.residual:
            return y
        return y + (self.residual(x) if hasattr(self, "residual") else x)


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
        positions: positions [B, S], -1 in the padding after a shorter text.
        segments: segment ids (token_type_ids) [B, S]: 0 for a text, 1 for the second one of a pair.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor


class TextEncoder(TextModel):
    """An encoder with its tokenizer and its config, as `regard.load` returns it.

    Args:
        network: the encoder, or a decoder whose states are pooled: ids -> hidden states.
        tokenizer: converts texts to ids; with None, `encode` and `embed` raise.
        config: the frozen config of its family, with vocab_size.
        pooling: how `embed` computes one vector; None is the normalized mean over tokens.
        max_seq_length: the largest number of tokens of a text; None is no limit.
        prompts: name -> the text that `embed` puts before a text.
        default_prompt_name: the prompt of `embed` if none is named; None is no prompt.
        similarity_fn_name: how `similarity` compares vectors.
        dense: maps of the pooled vectors, before they are normalized.
        newly_initialized: names of weights that the checkpoint lacked and was allowed to lack.
        ignored: parts of the checkpoint that were not used.

    >>> import regard
    >>> from regard.models.families import family
    >>> bert = family("bert")
    >>> config = bert.config(1024, 8, 1, 2, 16, 32)
    >>> network, tokenizer = bert.build(config).eval(), regard.load("tiny").tokenizer
    >>> model = TextEncoder(network, tokenizer, config, max_seq_length=32)
    >>> tokens = model.encode(["to be", "or not to be"])
    >>> states = model.hidden(*tokens)
    >>> model.pool(states, tokens.positions, mode="max").shape
    torch.Size([2, 8])
    >>> model.embed(["to be", "or not to be"]).norm(dim=1).round(decimals=3)
    tensor([1., 1.])
    """

    def __init__(
        self,
        network: HeadedEncoder | Decoder,
        tokenizer: Tokenizer | None,
        config: object,
        *,
        pooling: Pooling | None = None,
        max_seq_length: int | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_fn_name: Similarity = "cosine",
        dense: Sequence[SentenceDense] = (),
        newly_initialized: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> None:
        super().__init__(network, tokenizer, config, newly_initialized, ignored)
        self.network = network
        self.pooling = Pooling() if pooling is None else pooling
        self.max_seq_length = max_seq_length
        self.prompts, self.default_prompt_name = dict(prompts or {}), default_prompt_name
        self.similarity_fn_name = similarity_fn_name
        self.dense = nn.Sequential(*dense)
        self._packed_encoder: PackedEncoder | None = None

    def to(self, device: torch.device | str) -> Self:
        """Move the weights to a device, and return the model itself."""
        self.dense.to(device)
        return super().to(device)

    def encode(
        self,
        texts: str | Sequence[str],
        seconds: str | Sequence[str] | None = None,
        *,
        truncate: bool = False,
        special: bool | None = None,
    ) -> TokenBatch:
        """Convert texts to ids, with the special tokens of the tokenizer, [CLS] and [SEP] in BERT.

        Args:
            texts: one text, or B texts.
            seconds: the second text of each pair, for a model that reads pairs; None is no pairs.
            truncate: whether a text that is too long is cut off, and not refused; pairs never are.
            special: whether names of special tokens in a text, such as [MASK], are these tokens;
                False reads them as ordinary text, and None does so with a warning.

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
        rows = self._token_rows(firsts, others, truncate=truncate, special=special)
        ids, positions = pad_right([row[0] for row in rows], self.device)
        return TokenBatch(ids, positions, pad_right([row[1] for row in rows], self.device)[0])

    def _token_rows(
        self,
        firsts: Sequence[str],
        others: Sequence[str | None],
        *,
        truncate: bool,
        special: bool | None,
    ) -> list[tuple[list[int], list[int]]]:
        """Return the ids and segments of texts or pairs, checked against `max_seq_length`."""
        if special is None and not self.tokenizer.has_warned:
            for text in (*firsts, *others):
                warn_about_names(self.tokenizer, text or "")
        rows = self.tokenizer.encode_pairs(firsts, others, special=bool(special))
        for i, (pair, row) in enumerate(zip(zip(firsts, others, strict=True), rows, strict=True)):
            over = 0 if self.max_seq_length is None else len(row[0]) - self.max_seq_length
            if over > 0 and truncate and pair[1] is None:
                own = self.tokenizer.encode(pair[0], special=bool(special))
                rows[i] = self._shorter(own, row, over)
            elif over > 0:
                advice = "split it, or cut off its end with truncate=True"
                raise ArgumentError(
                    f"text {i} has {plural(len(row[0]), 'token')}, and this model reads at most "
                    f"{self.max_seq_length}; {advice if pair[1] is None else 'shorten it'}"
                )
        return rows

    def _shorter(
        self, own: Sequence[int], row: tuple[list[int], list[int]], over: int
    ) -> tuple[list[int], list[int]]:
        """Remove the last `over` tokens of a text from its row; special tokens after it stay."""
        ids, segments = row
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
            positions: positions [B, S], -1 for padding; None is 0 to S - 1.
            segments: segment ids [B, S]; None is 0 everywhere.
            backend: the attention kernel, or "auto".

        Returns:
            Hidden states [B, S, M].

        Raises:
            ArgumentError: an id is outside the vocabulary, or a position is beyond the table.
        """
        check_ids(ids, self.config.vocab_size, positions)
        if isinstance(self.network, Decoder):
            return self.network.hidden(ids, positions, backend=backend)
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
        normalize: bool | None = None,
    ) -> Float[Tensor, "B n"]:
        """Pool hidden states into one vector for each text; padding has no influence.

        Args:
            states: hidden states [B, S, M], from `hidden`.
            positions: positions [B, S], from `encode`; None means that there is no padding.
            mode: a `PoolingMode`: "mean", "cls", "max", "mean_sqrt_len", "weightedmean" or
                "lasttoken"; None is the mode of the checkpoint.
            normalize: whether to divide the vector by its length; None does as the checkpoint says.

        Returns:
            Vectors [B, n]; n is M, the size of the last map of `dense`, or truncate_dim.

        Raises:
            ArgumentError: the mode is unknown.
        """
        own = self.pooling
        chosen = replace(
            own,
            mode=own.mode if mode is None else mode,
            normalize=own.normalize if normalize is None else normalize,
        )
        if len(self.dense):
            vectors = pool(states, positions, replace(chosen, normalize=False, truncate_dim=None))
            vectors = finish(self.dense(vectors), chosen)
        else:
            vectors = pool(states, positions, chosen)
        # the checkpoint divides before dimensions are left out, a caller wants length 1
        shortened = own.truncate_dim is not None and normalize
        return F.normalize(vectors, dim=-1) if shortened else vectors

    @torch.no_grad()
    def embed(
        self,
        texts: str | Sequence[str] | Sequence[Sequence[int]] | Int[Tensor, "N S"],
        *,
        batch_size: int | None = None,
        truncate: bool = False,
        special: bool | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Float[Tensor, "N M"]:
        """Compute one vector for each text, pooled as the checkpoint says.

        Texts of similar length are read together: on a CPU, in fp32 and bf16, in rows without
        padding through packed weights (`regard.models.packed_encoder`), which take the memory of
        the linear maps again; otherwise padded, through the plain network (`why_not_packed`).

        Args:
            texts: one text, or N texts; or the ids of N texts, lists or a tensor [N, S], with the
                special tokens around them.
            batch_size: the largest number of texts that one forward pass reads; None chooses rows
                of about `PACKED_TOKENS` tokens, or 32 padded texts.
            truncate, special: as in `encode`.
            normalize: whether to divide each vector by its length; None is as in the checkpoint.
            prompt_name: the prompt of `prompts` before each text; None is `default_prompt_name`.
            progress: called after each forward pass as progress(texts that are done, N).

        Returns:
            Vectors [N, M], in the order of the texts; with `truncate_dim` so many dimensions.

        Raises:
            ArgumentError, ArgumentTypeError: as in `encode`; batch_size is less than 1; no such
                prompt, or a prompt before ids; messages, which an encoder has no template for.

        >>> import regard
        >>> from regard.models.families import family
        >>> bert = family("bert")
        >>> config = bert.config(1024, 8, 1, 2, 16, 32)
        >>> network, tokenizer = bert.build(config).eval(), regard.load("tiny").tokenizer
        >>> model = TextEncoder(network, tokenizer, config)
        >>> model.embed(["to be", "or not to be"], progress=print).shape
        2 2
        torch.Size([2, 8])

        Source: Reimers and Gurevych 2019 (arXiv 1908.10084), section 3.
        """
        if batch_size is not None and batch_size < 1:
            raise ArgumentError(f"batch_size is {batch_size}; it must be at least 1")
        prompt = self._prompt(prompt_name)
        skipped = 0 if self.pooling.include_prompt else self._prompt_tokens(prompt)
        rows = self._id_rows(texts, prompt)
        if rows is None:
            firsts = [prompt + text for text in as_text_list(texts)]  # type: ignore[arg-type]
            others = [None] * len(firsts)
            rows = self._token_rows(firsts, others, truncate=truncate, special=special)
        sizes = [len(ids) for ids, _ in rows]
        packed = min(sizes) > 0 and self.why_not_packed() is None
        order = sorted(range(len(rows)), key=sizes.__getitem__)
        vectors: list[Tensor] = []
        done = 0
        for part in _batches_of(order, sizes, batch_size, packed=packed):
            some = [rows[i] for i in part]
            states, positions = (self._packed_states if packed else self._padded_states)(some)
            if skipped:
                positions[:, :skipped] = -1  # as padding has it
            vectors.append(self.pool(states, positions, normalize=normalize))
            done += len(part)
            if progress is not None:
                progress(done, len(rows))
        return torch.cat(vectors)[torch.tensor(order, device="cpu").argsort().to(self.device)]

    def similarity(
        self, vectors: Float[Tensor, "N M"], others: Float[Tensor, "K M"]
    ) -> Float[Tensor, "N K"]:
        """Compare each vector with each of the others as the checkpoint says; larger is closer.

        cosine: x y / (|x| |y|);  dot: x y;  euclidean: -|x - y|;  manhattan: -sum_i |x_i - y_i|

        Args:
            vectors: vectors [N, M], from `embed`.
            others: vectors [K, M].

        Returns:
            Similarities [N, K].

        >>> import regard
        >>> from regard.models.families import family
        >>> bert = family("bert")
        >>> network = bert.build(bert.config(9, 8, 1, 2, 16, 32))
        >>> model = TextEncoder(network, None, None, similarity_fn_name="manhattan")
        >>> model.similarity(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
        tensor([[-2., -0.]])
        """
        if self.similarity_fn_name in ("euclidean", "manhattan"):
            power = 2 if self.similarity_fn_name == "euclidean" else 1
            exact = "donot_use_mm_for_euclid_dist"
            return -torch.cdist(vectors, others, p=power, compute_mode=exact)
        if self.similarity_fn_name == "cosine":
            vectors, others = F.normalize(vectors, dim=-1), F.normalize(others, dim=-1)
        return vectors @ others.T

    def _id_rows(self, texts: object, prompt: str) -> list[tuple[list[int], list[int]]] | None:
        """Return the ids and segments of texts that were given as ids, or None for texts."""
        texts = torch.atleast_2d(texts).tolist() if isinstance(texts, Tensor) else texts
        if is_messages(texts):
            raise ArgumentTypeError(
                "a TextEncoder has no chat template for messages; give their texts",
                argument="texts",
            )
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            return None
        if not texts or not all(isinstance(row, (list, tuple)) and row for row in texts):
            return None
        if prompt:
            raise ArgumentError(
                "ids contain their prompt already; give texts, or ids without prompt_name",
                argument="prompt_name",
            )
        rows = [[int(x) for x in row] for row in texts]
        numbers = [x for row in rows for x in row]
        check_ids(torch.tensor(numbers, device="cpu"), self.config.vocab_size)
        longest = max(map(len, rows))
        if self.max_seq_length is not None and longest > self.max_seq_length:
            raise ArgumentError(
                f"a text has {plural(longest, 'id')}, and this model reads at most "
                f"{self.max_seq_length}; give fewer",
                argument="texts",
            )
        return [(row, [0] * len(row)) for row in rows]

    def _prompt(self, name: str | None) -> str:
        """Return the text of a prompt, or of the default one."""
        name = self.default_prompt_name if name is None else name
        if name is not None and name not in self.prompts:
            raise ArgumentError(
                f"prompt_name is {short_repr(name)}; "
                f"{suggest(name, self.prompts, otherwise='')} this model has the prompts "
                f"{', '.join(self.prompts) or 'none'}"
            )
        return "" if name is None else self.prompts[name]

    def _prompt_tokens(self, prompt: str) -> int:
        """Return the number of tokens of a prompt, with the special tokens before it."""
        if not prompt:
            return 0
        ids = self.tokenizer.encode(prompt, template=True)
        return len(ids) - (ids[-1] in self.tokenizer.special.values())

    def why_not_packed(self) -> str | None:
        """Return why `embed` would run the network as it is written, or None if it runs packed
        rows.

        Returns:
            The reason in words, or None.

        >>> import regard
        >>> from regard.models.families import family
        >>> bert = family("bert")
        >>> network = bert.build(bert.config(9, 8, 1, 2, 16, 32)).to("meta")
        >>> TextEncoder(network, None, None).why_not_packed()[:57]
        'block 0 has a linear map that cannot be packed: the weigh'
        """
        if type(self.network) is not HeadedEncoder or type(self.network.encoder) is not Encoder:
            return f"the network is a {type(self.network).__name__}, not a HeadedEncoder"
        encoder = self.network.encoder
        if (reason := why_not_as_written(self.network)) is not None:
            return f"the network: {reason}"
        with torch.no_grad():
            return why_not_packed_encoder(encoder)

    def _padded_states(self, rows: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
        """Return the states of texts and positions [B, S], by the network as written."""
        ids, positions = pad_right([row[0] for row in rows], self.device)
        segments = pad_right([row[1] for row in rows], self.device)[0]
        return self.hidden(ids, positions, segments), positions

    def _packed_states(self, rows: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
        """Return the states of texts and their positions [B, S], by the packed encoder."""
        ids, segments = (
            torch.tensor([[x for row in rows for x in row[i]]], device="cpu") for i in (0, 1)
        )
        check_ids(ids, self.config.vocab_size)
        lengths = [len(row[0]) for row in rows]
        assert isinstance(self.network, HeadedEncoder)
        if self._packed_encoder is None:
            self._packed_encoder = PackedEncoder(self.network.encoder)
        states = self._packed_encoder(ids, lengths, segments)
        by_text = states[0].split(lengths)
        positions = pad_right([[0] * length for length in lengths])[1]
        return nn.utils.rnn.pad_sequence(by_text, batch_first=True), positions

    def _example_run(self) -> Callable[[], object]:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        return lambda: self.hidden(ids)

    def _files(self) -> Mapping[str, object]:
        layers = [layer for layer in self.dense if isinstance(layer, SentenceDense)]
        settings = SentenceSettings(
            self.pooling,
            self.max_seq_length,
            prompts=self.prompts,
            default_prompt_name=self.default_prompt_name,
            similarity=self.similarity_fn_name,
            dense=tuple(layer.settings for layer in layers),
        )
        tensors = {
            f"{layer.settings.folder}/model.safetensors": layer.state_dict() for layer in layers
        }
        return sentence_files(settings, self.config.hidden_size) | tensors
