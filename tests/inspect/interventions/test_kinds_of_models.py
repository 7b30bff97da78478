"""Every task of docs/research.md on every kind of model: it gives numbers, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect import (
    ablate,
    attribute,
    compare,
    export,
    logit_lens,
    measure,
    name_mover_scores,
    patch,
    record,
    rollout,
    taps,
)
from regard.models import Seq2Seq, TextEncoder
from regard.models.families import family
from tests.inspect.small_model import model_of, shaken, tokenizer

bert = family("bert")
t5 = family("t5")

IDS, OTHER = torch.tensor([[5, 9, 2]]), torch.tensor([[5, 7, 2]])
PAGE = Path(__file__).parents[3] / "docs" / "research.md"


class Kind(NamedTuple):
    """A model, two inputs for it, and a metric."""

    model: Any
    clean: Any
    corrupt: Any
    metric: Any


def first_number(output: Tensor) -> Tensor:
    return output[0, -1, 0].float()


def _decoder(name: str) -> Kind:
    return Kind(model_of(name, num_hidden_layers=2), IDS, OTHER, (11, 40))


def _encoder() -> Kind:
    config = bert.config(tokenizer().vocab_size, 16, 2, 2, 24, 64)
    model = TextEncoder(shaken(bert.build(config)), tokenizer(), config)
    return Kind(model, "the blue forest", "the verdant forest", "a creature of the forest")


def _encoder_decoder() -> Kind:
    config = t5.config(tokenizer().vocab_size, 16, 8, 32, 1, 2)
    model = Seq2Seq(shaken(t5.build(config)), tokenizer(), config, start=0, eos_ids=[1])
    return Kind(model, (IDS, IDS[:, :2]), (OTHER, IDS[:, :2]), (11, 40))


def _transformers(name: str, implementation: str) -> Kind:
    pytest.importorskip("transformers")
    from tests.integrations import families

    if name == "Llama":
        return Kind(families.decoder(name, implementation), IDS, OTHER, (11, 40))
    network = families.other(name, implementation)
    if name == "Bert":
        return Kind(network, IDS, OTHER, first_number)
    clean, corrupt = ({"input_ids": x, "decoder_input_ids": IDS[:, :2]} for x in (IDS, OTHER))
    return Kind(network, clean, corrupt, (11, 40))


def _torch() -> Kind:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    network = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
    x = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[0, 1] *= -1
    return Kind(shaken(network), x, other, first_number)


def _accelerated(kind: Kind) -> Kind:
    return kind._replace(model=regard.accelerate(kind.model, always=True))


KINDS: dict[str, Callable[[], Kind]] = {
    "a decoder": lambda: _decoder("llama"),
    "latent attention": lambda: _decoder("deepseek_v2"),
    "a recurrence": lambda: _decoder("regard, retention"),
    "a text encoder": _encoder,
    "an encoder-decoder": _encoder_decoder,
    'transformers, "regard"': lambda: _transformers("Llama", "regard"),
    'transformers, "sdpa"': lambda: _transformers("Llama", "sdpa"),
    'transformers, "eager"': lambda: _transformers("Llama", "eager"),
    "a transformers encoder": lambda: _transformers("Bert", "sdpa"),
    "a transformers encoder-decoder": lambda: _transformers("Bart", "sdpa"),
    "transformers, accelerated": lambda: _accelerated(_transformers("Llama", "sdpa")),
    "`nn.TransformerEncoder`": _torch,
    "`nn.TransformerEncoder`, accelerated": lambda: _accelerated(_torch()),
}


def _recorded(kind: Kind) -> tuple[Any, Any]:
    """The recordings of both inputs; an encoder-decoder of this package is recorded from a text."""
    if isinstance(kind.model, Seq2Seq):
        texts = (("the blue forest", "a forest"), ("the verdant forest", "a forest"))
        first, second = (record(kind.model, source, target=target) for source, target in texts)
        return first, second
    return record(kind.model, kind.clean), record(kind.model, kind.corrupt)


def _compared(kind: Kind) -> Any:
    first, second = _recorded(kind)
    return compare(first, second)


def _measured(kind: Kind) -> Any:
    texts = [kind.clean, kind.corrupt]
    if isinstance(kind.model, Seq2Seq):
        texts = ["the blue forest", "the verdant forest"]
    return measure(kind.model, texts).table("entropy")


def _exported(kind: Kind) -> Any:
    return export(_recorded(kind)[0], "numpy")


def _attributed(kind: Kind, method: Any, **more: Any) -> Any:
    return attribute(kind.model, kind.clean, kind.metric, method=method, **more)


TASKS: dict[str, Callable[[Kind], Any]] = {
    "taps": lambda kind: taps(kind.model, kind.clean),
    "ablate": lambda kind: ablate(kind.model, kind.clean, kind.metric),
    "patch": lambda kind: patch(*kind),
    "patch heads": lambda kind: patch(*kind, what="heads"),
    "patch paths": lambda kind: patch(*kind, what="paths"),
    "attribute": lambda kind: attribute(kind.model, kind.clean, kind.metric),
    "gradient": lambda kind: _attributed(kind, "gradient", corrupt=kind.corrupt),
    "integrated gradients": lambda kind: _attributed(kind, "integrated_gradients", steps=2),
    "logit lens": lambda kind: logit_lens(kind.model, kind.clean),
    "name movers": lambda kind: name_mover_scores(kind.model, kind.clean, 9),
    "rollout": lambda kind: rollout(kind.model, kind.clean),
    "compare": _compared,
    "measure": _measured,
    "export": _exported,
}
NO_LOGITS = r"no logits|needs a token or a pair of tokens|needs a text|must be a text"
TWO_STACKS = "need one stack of blocks"
NO_WEIGHTS = "no attention was recorded|no pattern|passed no tap 'pattern'"
WRITTEN_OUT = "passed no tap|with 'eager', so that nothing would be recorded"
OTHER_TOKENS = "over the same tokens|text must be a str"
LOGIT_TASKS = ("attribute", "logit lens", "name movers")
WEIGHT_TASKS = ("integrated gradients", "name movers", "rollout", "compare", "measure", "export")
REFUSED: dict[str, dict[str, str]] = {
    "a recurrence": dict.fromkeys(WEIGHT_TASKS, NO_WEIGHTS),
    "a text encoder": dict.fromkeys(LOGIT_TASKS, NO_LOGITS),
    "an encoder-decoder": {"rollout": OTHER_TOKENS},
    'transformers, "eager"': dict.fromkeys(
        ("ablate", "patch heads", "patch paths", "gradient", *LOGIT_TASKS, *WEIGHT_TASKS),
        WRITTEN_OUT,
    ),
    "a transformers encoder": dict.fromkeys(LOGIT_TASKS, NO_LOGITS),
    "a transformers encoder-decoder": {
        **dict.fromkeys(LOGIT_TASKS, TWO_STACKS), "rollout": OTHER_TOKENS
    },
    "`nn.TransformerEncoder`": dict.fromkeys(LOGIT_TASKS, NO_LOGITS + "|no token ids"),
    "`nn.TransformerEncoder`, accelerated": dict.fromkeys(LOGIT_TASKS, NO_LOGITS + "|no token ids"),
}  # fmt: skip
"""Which tasks a kind of model refuses, and what the error says."""


@cache
def made(name: str) -> Kind:
    torch.manual_seed(0)
    return KINDS[name]()


@pytest.mark.nightly(keep=4)
@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", KINDS)
def test_every_task_on_this_kind_of_model(name: str) -> None:
    kind = made(name)
    refused = REFUSED.get(name, {})
    for task, run in TASKS.items():
        if why := refused.get(task):
            with pytest.raises((ArgumentError, ArgumentTypeError), match=why):
                run(kind)
            continue
        result = run(kind)
        if task in ("taps", "export"):
            assert len(result) >= 2, task
            continue
        assert result.values.size >= 2, task
        assert np.abs(np.nan_to_num(result.values)).max() > 0, task
        assert not np.isinf(result.values).any(), task


def test_the_table_of_the_page_is_this_one() -> None:
    page = PAGE.read_text("utf-8")
    for name, refused in REFUSED.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        tasks = row.split("|")[2].strip()
        assert tasks == ", ".join(task for task in TASKS if task in refused), name
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    shown = {name for name in KINDS if any(row.startswith(f"| {name} |") for row in rows)}
    assert shown == {*REFUSED}
