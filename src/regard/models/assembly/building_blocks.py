"""Parts that many families build alike: activations by name, tied heads, and initial weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import nn

from regard.configs.base import ACTIVATIONS, check_activation
from regard.models.decoder import Decoder
from regard.nn import Block
from regard.nn.linear import Linear


def initialize_weights(decoder: Decoder) -> Decoder:
    """Give a decoder weights to be trained from, in place.

    Norms are 1; matrices are normal with standard deviation 1/sqrt(fan-in), so that scores start at
    a spread of about 1 and heads tell keys apart from the first step; those that write to the
    residual path are 0, so that a token is not drowned by what untrained layers add to it, and
    later layers can match and copy it. The head has 0.02, and so has an embedding that is tied to
    it; one of its own has 0.5. Biases are 0.

    >>> from regard.nn import Embed
    >>> embed, head = Embed(nn.Embedding(7, 4)), nn.Linear(4, 7)
    >>> made = initialize_weights(Decoder(embed, [], nn.Identity(), head))
    >>> float(made.head.bias.detach().abs().sum())
    0.0
    """
    embedding, head = decoder.embed.embedding, decoder.head
    tied = getattr(head, "weight", None) is embedding.weight
    for module in decoder.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            own = module is embedding and not tied
            nn.init.normal_(module.weight, std=0.5 if own else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    for layer in decoder.layers:
        block = cast("Block", layer)
        writers = {id(part) for part in _writers(block)}
        for module in block.modules():
            if isinstance(module, nn.Linear):
                std = 0.0 if id(module) in writers else module.in_features**-0.5
                nn.init.normal_(module.weight, std=std)
    return decoder


def _writers(block: Block) -> list[nn.Module]:
    """The matrices that write to the residual path: of each expert, where there are several."""
    found = [
        (block.attention, "output"),
        *((part, "down") for part in block.feed_forward.modules()),
    ]
    return [getattr(part, name) for part, name in found if hasattr(part, name)]


def embedding_and_head(vocabulary: int, dim: int, *, tied: bool) -> tuple[nn.Embedding, nn.Linear]:
    """An embedding [V, M] and a head from M to V without bias; if tied, both have one matrix.

    Args:
        vocabulary: how many tokens V there are.
        dim: the model dim M.
        tied: whether the head is the embedding.

    >>> embedding, head = embedding_and_head(7, 4, tied=True)
    >>> embedding.weight is head.weight
    True

    Source: Press and Wolf 2016 (arXiv 1608.05859), section 3.
    """
    embedding, head = nn.Embedding(vocabulary, dim), Linear(dim, vocabulary, bias=False)
    if tied:
        head.weight = embedding.weight
    return embedding, head


def _gelu_tanh() -> nn.Module:
    return nn.GELU("tanh")


NONLINEARITIES: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": _gelu_tanh,
    "linear": nn.Identity,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}
"""What a name of `regard.configs.base.ACTIVATIONS` means -> its module."""


def activation(name: str, key: str = "hidden_act") -> nn.Module:
    """The nonlinearity of a name in config.json.

    Args:
        name: such as "gelu_new".
        key: where config.json has it, for the message.

    Raises:
        ArgumentError: the name is not known.

    >>> activation("gelu_new")
    GELU(approximate='tanh')

    Source: Hendrycks and Gimpel 2016 (arXiv 1606.08415), section 2, for both forms of GELU.
    """
    check_activation(name, key)
    return NONLINEARITIES[ACTIVATIONS[name]]()
