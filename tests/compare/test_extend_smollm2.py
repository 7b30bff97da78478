"""SmolLM2, trained on 8,192 tokens, at 16,384 under two extensions without finetuning: as
published, the plain model breaks down, and YaRN and dynamic NTK do not.

Source: Peng et al. 2023 (arXiv 2309.00071), figure 1 and table 4; bloc97 2023, "NTK-aware scaled
RoPE" and emozilla 2023, "Dynamically scaled RoPE".
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.healing import dense_smollm2
from regard.models import Model
from regard.models.convert import Checkpoint
from regard.models.convert.attention_maps import rebuild
from regard.models.convert.rotary_positions import extend_context
from regard.train.corpus import load_documents, split_documents
from tests.models.small import named_model

pytestmark = pytest.mark.full

TRAINED, LENGTH, COUNTED = 8192, 16384, 256
ENDS = (2048, 6144, 10240, 12288, 14336, 16384)


@functools.cache
def smollm2() -> tuple[Checkpoint, Tensor]:
    """Its dense weights in bf16, and a text that is long enough."""
    named_model("smollm2", Model)  # a skip without the package
    model, checkpoint = dense_smollm2()
    weights = {name: x.to(torch.bfloat16) for name, x in checkpoint.weights().items()}
    text = "\n\n".join(x.text for x in split_documents(load_documents())[1])
    return rebuild(checkpoint.config, weights), model.encode(text)[0][: LENGTH + 1]


def losses(method: str | None, length: int, ends: tuple[int, ...]) -> list[float]:
    """The mean loss of the tokens before each end, in one pass."""
    checkpoint, ids = smollm2()
    if method is not None:
        checkpoint, _ = extend_context(checkpoint, LENGTH, method)  # type: ignore[arg-type]
    with torch.inference_mode():
        states = checkpoint.network.hidden(ids[None, :length])
        head = checkpoint.network.require_head()
        places = [slice(end - COUNTED, end) for end in ends]
        logits = [head(states[0, place]).float() for place in places]
        return [
            float(F.cross_entropy(x, ids[1:][place]))
            for x, place in zip(logits, places, strict=True)
        ]


def test_within_the_trained_length_dynamic_is_the_model_itself() -> None:
    assert losses("dynamic", 512, (512,)) == losses(None, 512, (512,))
    assert losses("yarn", 512, (512,)) != losses(None, 512, (512,))


@pytest.mark.skipif(
    "REGARD_LONG" not in os.environ, reason="three passes of 16,384 tokens: REGARD_LONG=1 runs it"
)
def test_the_model_breaks_down_beyond_8192_tokens_and_its_extensions_do_not() -> None:
    plain, yarn, dynamic = (losses(x, LENGTH, ENDS) for x in (None, "yarn", "dynamic"))
    for extended in (yarn, dynamic):
        by_end = dict(zip(ENDS, zip(plain, extended, strict=True), strict=True))
        # within the trained length an extension costs little
        assert all(abs(a - b) < 0.2 for end, (a, b) in by_end.items() if end <= TRAINED)
        # half as far again the plain model is lost, and the extended one is not
        assert all(a - b > 1 for end, (a, b) in by_end.items() if end >= 12288)
        assert by_end[LENGTH][0] - by_end[LENGTH][1] > 3
