"""A module of sentence-transformers whose vectors are those of regard.

    from regard.integrations.sentence_transformers import EncoderModule
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(modules=[EncoderModule("minilm")], device="cpu")
    model.encode(["a text", "another one"])

It stands for all modules of a checkpoint, pooling included, and computes without gradients: train
with the library's own modules. Install with: pip install sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Never

import torch

try:
    from sentence_transformers.base.modules import InputModule
except ModuleNotFoundError as error:
    raise ImportError(
        "regard.integrations.sentence_transformers needs the library sentence-transformers from "
        "version 6: pip install -U sentence-transformers",
        name="sentence_transformers",
    ) from error

import regard
from regard.errors import ArgumentError
from regard.models import TextEncoder


class EncoderModule(InputModule):  # type: ignore[misc]
    """The only module of a `SentenceTransformer`.

    Args:
        source: a loaded `TextEncoder`, or what `regard.load` takes.
        options: options of `regard.load`.

    Raises:
        ArgumentError: the model is no encoder of texts.
    """

    def __init__(self, source: str | Path | TextEncoder, **options: Any) -> None:
        super().__init__()
        loaded: Any = source if isinstance(source, TextEncoder) else regard.load(source, **options)
        if not isinstance(loaded, TextEncoder):
            raise ArgumentError(f"{source} is no encoder of texts", argument="source")
        self.encoder = loaded

    def preprocess(
        self, inputs: Sequence[str], prompt: str | None = None, **options: object
    ) -> dict[str, Any]:
        """Return the texts, each behind the prompt; `forward` makes tokens of them."""
        return {"texts": [(prompt or "") + text for text in inputs]}

    @torch.no_grad()
    def forward(self, features: dict[str, Any], **options: object) -> dict[str, Any]:
        """Add the vectors [N, M]; longer texts than the model reads are cut."""
        texts = features["texts"]
        return {**features, "sentence_embedding": self.encoder.embed(texts, truncate=True)}

    def get_embedding_dimension(self) -> int:
        """Return M, the number of dimensions of a vector."""
        return self.encoder.embed("x").shape[1]

    def save(self, output_path: str, *args: object, **options: object) -> Never:
        """Refuse: the folder of the checkpoint is what both libraries read."""
        raise NotImplementedError(
            "regard's EncoderModule is not saved; keep the checkpoint's folder"
        )
