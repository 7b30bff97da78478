"""A `SentenceTransformer` whose vectors regard computes, against the library's own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard.errors import ArgumentError
from regard.files.named_packages import packaged_source
from regard.models import TextEncoder
from tests.models.small import named_model

pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS = ["A cat sleeps on the sofa.", "stocks fell", "word " * 400, "x"]


def module() -> Any:
    pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
    name = "regard.integrations.sentence_transformers"
    return pytest.importorskip(name, reason="sentence-transformers is older than 6")


@pytest.mark.full
def test_vectors_are_those_of_the_library() -> None:
    ours_of, encoder = module(), named_model("minilm", TextEncoder)
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(packaged_source("minilm")), device="cpu")
    ours = SentenceTransformer(modules=[ours_of.EncoderModule(encoder)], device="cpu")
    assert ours.get_embedding_dimension() == theirs.get_embedding_dimension() == 384
    for options in ({}, {"prompt": "query: "}, {"truncate_dim": 64}):
        found, expected = (x.encode(TEXTS, batch_size=2, **options) for x in (ours, theirs))
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-5), options
        assert abs(found[0] @ expected[1]) < 0.9, "another text has another vector"


def test_what_is_refused() -> None:
    encoder = module().EncoderModule
    with pytest.raises(ArgumentError, match="encoder of texts"):
        encoder("tiny")
