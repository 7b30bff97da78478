"""Who asks and who answers between an image and a text: cross-attention gives a row for each query,
and none for a key.

z_i = sum_j p_ij v_j for every query i: what is made must be the queries
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from regard.compare.claims.base import Check, Claim
from regard.compare.experiment import Numbers
from regard.nn.variants import cross_attention
from regard.view.charts import Line, Picture

TEXT, IMAGE, DIM, HEADS = 7, 64, 32, 4
"""Seven tokens of a text, and an image of 8 x 8 places."""


@torch.no_grad()
def _measure(_budget: float, seed: int) -> Numbers:
    torch.manual_seed(seed)
    layer = cross_attention(DIM, HEADS).eval()
    text, image = torch.randn(1, TEXT, DIM), torch.randn(1, IMAGE, DIM)
    rows = {"text": layer(text, memory=image).shape[1], "image": layer(image, memory=text).shape[1]}
    return {"text": TEXT, "image": IMAGE, "rows": rows}


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    rows = numbers["rows"]["text"]  # as it is said: queries from the text
    return [
        Check(
            "captioning: rows that come out, by the tokens of the text that is made",
            rows / numbers["text"],
            1.0,
            1.0,
        ),
        Check(
            "text to image: rows that come out, by the places of the image that is made",
            rows / numbers["image"],
            1.0,
            1.0,
            role="limit",
        ),
        Check(
            "... with queries from the image and keys and values from the text",
            numbers["rows"]["image"] / numbers["image"],
            role="told",
        ),
    ]


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(f"queries from the {name}", ((0.0, float(rows)), (1.0, float(rows))))
        for name, rows in numbers["rows"].items()
    )
    return Picture(
        "Rows that cross-attention gives: 7 tokens of text, 64 places of an image",
        "",
        "rows",
        lines,
    )


CLAIM = Claim(
    id="image-text",
    seeds=("S4.18", "S2.14"),
    says="Between image and text, the image gives keys and values and the text gives the queries.",
    predicts="A row comes out for everything that is made: tokens of a caption, places of a "
    "picture.",
    scale="Exact: a matter of shapes. Which models do which: Flamingo (2204.14198) asks an image "
    "from the text, Stable Diffusion (2112.10752, section 3.3) a text from the image.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    lesson="What is made asks, and what it is made from answers: right for captioning, reversed "
    "for text to image.",
)
"""S4.18."""
