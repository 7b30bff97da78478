"""How well a text fits a language model: whether it was made for such text at all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from regard.errors import ArgumentError
from regard.language import translate, translate_count
from regard.models.model import Model
from regard.models.text_encoder import TextEncoder
from regard.models.tokenizer import Tokenizer
from regard.nn.weights import count_parameters

MAX_SHARE_OF_BYTES = 0.25
"""A text is strange if a larger share of its tokens are parts of characters, or unknown."""
NEAR_UNIFORM = 0.9
"""A text is strange if its loss is above this share of that of a uniform guess."""
CHEAP_PARAMETERS = 50_000_000
"""`warn_about_text` runs models with at most so many parameters."""


@dataclass(frozen=True)
class TextFit:
    """How a tokenizer divides a text, and how well a model predicts it.

    Args:
        partial_tokens: the number of tokens that are a part of a character, not characters.
        loss: the mean loss of the tokens after the first one, in nats; None if it was not measured,
            if the model predicts no tokens, or if there is only one token.
        uniform_loss: the loss of a guess that gives every token the same probability, ln V.
        unknown_tokens: the number of tokens that stand for what the tokenizer does not know.

    >>> TextFit(3, 0, 6.0, 7.6).warning is None, TextFit(3, 3, None, 7.6).is_strange
    (True, True)
    """

    tokens: int
    partial_tokens: int
    loss: float | None
    uniform_loss: float
    unknown_tokens: int = 0

    @property
    def is_strange(self) -> bool:
        """Whether more than a quarter of the tokens are parts of characters or unknown, or the
        model predicts the text hardly better than a uniform guess does, or worse.
        """
        lost = max(self.partial_tokens, self.unknown_tokens)
        improbable = self.loss is not None and self.loss > NEAR_UNIFORM * self.uniform_loss
        return lost > MAX_SHARE_OF_BYTES * self.tokens or improbable

    @property
    def warning(self) -> str | None:
        """What is strange, as a sentence in the language of printed texts; None if nothing is."""
        if not self.is_strange:
            return None
        tokens = translate_count(self.tokens, "token")
        if self.unknown_tokens > MAX_SHARE_OF_BYTES * self.tokens:
            return translate(
                "the tokenizer does not know {unknown} of {tokens}: the model sees the same "
                "unknown token in their place, so what it does with them says little",
                unknown=self.unknown_tokens,
                tokens=tokens,
            )
        if self.partial_tokens > MAX_SHARE_OF_BYTES * self.tokens:
            return translate(
                "{parts} of {tokens} are bytes of characters that the model has no token for; what "
                "it does with them says little",
                parts=self.partial_tokens,
                tokens=tokens,
            )
        return translate(
            "the model predicts this text with a loss of {loss} nats per token, and a uniform "
            "guess has {uniform}: it knows next to nothing of such text, so what it does with it "
            "says little",
            loss=f"{self.loss:.1f}",
            uniform=f"{self.uniform_loss:.1f}",
        )


def measure_text_fit(model: Model | TextEncoder, text: str, *, run: bool = True) -> TextFit:
    """Return how well a text fits a model and its tokenizer.

    Args:
        model: a decoder or a text encoder with a tokenizer.
        text: the text, at least one token.
        run: whether to run the model, which measures the loss.

    Returns:
        The numbers of tokens, and the loss in nats per token.

    Raises:
        ArgumentError: the model has no tokenizer.

    >>> import regard
    >>> tiny = regard.load("tiny")
    >>> measure_text_fit(tiny, "我打他").is_strange, measure_text_fit(tiny, "как дела").is_strange
    (False, True)
    """
    if model.tokenizer is None:
        raise ArgumentError(
            "the model has no tokenizer, which divides the text; load its tokenizer.json too"
        )
    tokenizer = model.tokenizer
    if isinstance(model, TextEncoder):
        row = tokenizer.encode(text)
        ids = torch.tensor([row])
    else:
        ids = model.encode(text)
        row = ids[0].tolist()
    partial = sum(_is_partial(tokenizer, i) for i in row)
    loss = None
    if run and len(row) > 1 and isinstance(model, Model) and model.has_head:
        with torch.no_grad():
            scores = model(ids)[0, :-1].float().log_softmax(-1)
        loss = -float(scores.gather(1, ids[0, 1:, None].to(scores.device)).mean())
    unknown = sum(i == tokenizer.unknown for i in row)
    return TextFit(len(row), partial, loss, math.log(tokenizer.vocab_size), unknown)


def warn_about_text(model: object, text: str) -> str | None:
    """Return a warning if a text is strange to a model, for commands that explain what it does.

    The loss is measured for small models only, because a large one takes time.

    Args:
        model: any model; only a decoder or a text encoder with a tokenizer is judged.

    Returns:
        A sentence, or None.

    >>> import regard
    >>> warn_about_text(regard.load("tiny"), "Привет")
    '12 of 12 tokens are bytes of characters that the model has no token for; ...'
    """
    if not isinstance(model, (Model, TextEncoder)) or model.tokenizer is None:
        return None
    parameters = count_parameters(model.decoder) if isinstance(model, Model) else 0
    return measure_text_fit(model, text, run=parameters <= CHEAP_PARAMETERS).warning


def _is_partial(tokenizer: Tokenizer, index: int) -> bool:
    """Return whether a token is a part of a character."""
    raw = tokenizer.token_bytes(index)
    if raw is None:
        return False
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return True
    return False
