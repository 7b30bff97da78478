"""Documents to one stream of token ids, an end of text after each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.models.tokenizer import END_OF_TEXT, Tokenizer
from regard.train.corpus import Document


def stream(documents: Sequence[Document], tokenizer: Tokenizer) -> Int[Tensor, " N"]:
    """The ids of all documents in their order, int64 [N]; special tokens in a text stay literal.

    Raises:
        ArgumentError: the tokenizer has no end-of-text token.

    >>> tokenizer = Tokenizer.train(["ab"], vocab_size=257)
    >>> stream([Document("1", "a"), Document("2", "b")], tokenizer).tolist()
    [65, 0, 66, 0]
    """
    end = tokenizer.end_of_text
    if end is None:
        raise ArgumentError(
            f"tokenizer has no {END_OF_TEXT} token to stand between documents; train one with it"
        )
    rows = tokenizer.encode_batch([document.text for document in documents])
    return torch.tensor([index for row in rows for index in (*row, end)], dtype=torch.long)
