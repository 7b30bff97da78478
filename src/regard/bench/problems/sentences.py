"""Sentence vectors: texts of unequal length through a BERT with random weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import tokenizers
import torch
from torch import Tensor

from regard.bench.interfaces import MinimumWork, Outputs, Problem, ProblemSizes
from regard.configs.bert import BertConfig
from regard.models.encoder import HeadedEncoder
from regard.models.families import family
from regard.models.text_encoder import TextEncoder
from regard.models.tokenizer import Tokenizer
from regard.process_state import seeded
from regard.units import plural

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
CHECKED_TEXTS = 32
"""How many texts are compared with the reference, which reads each of them alone."""


@dataclass(frozen=True)
class SentenceSizes(ProblemSizes):
    """The sizes of an encoder and of its texts; the defaults are those of all-MiniLM-L6-v2.

    The lengths of the texts follow a log-normal distribution with a median of 18 words.

    Args:
        texts: the number of texts.
        layers, dim, inner, H, vocabulary: the sizes of the model.

    >>> print(SentenceSizes(texts=1000))
    1,000 texts, 6 layers M384 H12
    """

    texts: int
    layers: int = 6
    dim: int = 384
    inner: int = 1536
    H: int = 12
    vocabulary: int = 30_522

    def resized(self, *, length: int | None = None, batch: int | None = None) -> SentenceSizes:
        """Return the sizes with another number of texts, which `batch` gives."""
        return replace(self, texts=batch or self.texts)

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the memory of the weights, four times, and of a batch of states in fp64."""
        layer = 4 * self.dim**2 + 2 * self.dim * self.inner
        return 16 * (self.layers * layer + self.vocabulary * self.dim) + (64 << 20)

    def config(self) -> BertConfig:
        """Return the config of a BERT of these sizes."""
        return BertConfig(self.vocabulary, self.dim, self.layers, self.H, self.inner, 512)

    def problem(self, dtype: torch.dtype, device: torch.device) -> SentenceProblem:
        """Return a problem of these sizes, with the same weights and texts each time."""
        return SentenceProblem(self, dtype, device)

    def __str__(self) -> str:
        return f"{plural(self.texts, 'text')}, {plural(self.layers, 'layer')} M{self.dim} H{self.H}"


class SentenceProblem(Problem):
    """Texts whose normalised mean vectors are computed, "vectors" `[N, M]`.

    The texts are tokenised by every peer with the same tokenizer, as part of the measured time.

    Attributes:
        model: the encoder with its tokenizer.
        texts: the texts, in random order of their lengths.

    >>> sizes = SentenceSizes(3, layers=1, dim=8, inner=8, H=2, vocabulary=20)
    >>> sizes.problem(torch.float32, torch.device("cpu")).reference()["vectors"].shape
    torch.Size([3, 8])
    """

    def __init__(self, sizes: SentenceSizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        with seeded(0):
            network = family("bert").build(sizes.config()).eval().requires_grad_(False)
            assert isinstance(network, HeadedEncoder)
            for parameter in network.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
            words = (18 * torch.randn(sizes.texts).mul(0.5).exp()).long().clamp(1, 400)
            self.texts = [
                " ".join(f"w{i}" for i in torch.randint(len(SPECIAL), sizes.vocabulary, (int(n),)))
                for n in words
            ]
        self.model = TextEncoder(
            network.to(device, dtype), _tokenizer(sizes.vocabulary), sizes.config()
        )
        self.tokens = int(words.sum()) + 2 * sizes.texts

    @property
    def work(self) -> MinimumWork:
        """The products with the weights, once for each token, and the bytes of the weights."""
        s = self.sizes
        weights = s.layers * (4 * s.dim**2 + 2 * s.dim * s.inner)
        return MinimumWork(2 * self.tokens * weights, weights * self.dtype.itemsize)

    def reference(self) -> Outputs:
        """Return the vectors of the first texts, each alone through the network in fp64."""
        return self._alone(torch.float64)

    def plain(self) -> Outputs:
        """Return the same in the problem's dtype."""
        return self._alone(self.dtype)

    def checked(self, outputs: Outputs) -> Outputs:
        """Return the vectors of the texts that the reference has."""
        return {"vectors": outputs["vectors"][:CHECKED_TEXTS]}

    @torch.no_grad()
    def _alone(self, dtype: torch.dtype) -> Outputs:
        with seeded(0):
            network = family("bert").build(self.sizes.config()).eval()
        network.load_state_dict(self.model.network.state_dict())
        network.to(dtype)
        vectors = []
        for text in self.texts[:CHECKED_TEXTS]:
            ids, positions, segments = self.model.encode(text)
            vectors.append(self.model.pool(network(ids, positions, segments), positions))
        return {"vectors": torch.cat(vectors)}


def _tokenizer(vocabulary: int) -> Tokenizer:
    """Return a tokenizer for which every word w<id> is one token, with [CLS] and [SEP] around a
    text.
    """
    names = {name: i for i, name in enumerate(SPECIAL)}
    names |= {f"w{i}": i for i in range(len(SPECIAL), vocabulary)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, "[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend)


def sorted_batches(rows: list[list[int]], size: int) -> list[tuple[list[int], Tensor, Tensor]]:
    """Return padded batches of texts of similar length, for peers that read padded batches.

    Args:
        rows: the token ids of each text.
        size: how many texts are in a batch.

    Returns:
        For each batch the numbers of its texts, the ids [B, S] and the attention mask [B, S], which
        is 1 for tokens and 0 for padding.

    >>> sorted_batches([[5, 6], [7]], 2)[0]
    ([1, 0], tensor([[7, 0],
            [5, 6]]), tensor([[1, 0],
            [1, 1]]))
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    batches = []
    for start in range(0, len(order), size):
        part = order[start : start + size]
        ids = torch.zeros(len(part), len(rows[part[-1]]), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for j, i in enumerate(part):
            ids[j, : len(rows[i])] = torch.tensor(rows[i])
            mask[j, : len(rows[i])] = 1
        batches.append((part, ids, mask))
    return batches
