"""Initial weights, tied embedding and head, and activations by name, for many families."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import nn

from regard.configs.base import ACTIVATIONS, check_activation
from regard.models.decoder import Decoder
from regard.nn import Block
from regard.nn.linear import Linear


def initialize_weights(decoder: Decoder) -> Decoder:
    """Give a decoder initial weights for training, in place.

    Norms are 1. Matrices are normal with standard deviation 1/sqrt(fan-in), so that scores start
    with a standard deviation of about 1 and heads distinguish keys from the first step. Matrices
    that write to the residual stream are 0, so that untrained layers do not add noise to the token
    vectors, and later layers can match and copy them. The head has standard deviation 0.02, and so
    has an embedding that is tied to it; an untied embedding has 0.5. Biases are 0.

    >>> from regard.nn import InputEmbedding
    >>> embed, head = InputEmbedding(nn.Embedding(7, 4)), nn.Linear(4, 7)
    >>> decoder = initialize_weights(Decoder(embed, [], nn.Identity(), head))
    >>> float(decoder.head.bias.detach().abs().sum())
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
    """Return the linear maps that write to the residual stream: the output map of the attention,
    and the down projection of the feed-forward layer or of each expert.
    """
    attributes = [
        (block.attention, "output"),
        *((part, "down") for part in block.feed_forward.modules()),
    ]
    return [getattr(part, name) for part, name in attributes if hasattr(part, name)]


def embedding_and_head(vocabulary: int, dim: int, *, tied: bool) -> tuple[nn.Embedding, nn.Linear]:
    """Build an embedding [V, M] and a head from M to V without bias; tied ones share the matrix.

    Args:
        vocabulary: the number of tokens V.
        dim: the model dim M.
        tied: whether the head uses the embedding's matrix.

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
"""Value of `regard.configs.base.ACTIVATIONS` -> its module."""


def activation(name: str, key: str = "hidden_act") -> nn.Module:
    """Return the module of an activation in config.json.

    Args:
        name: such as "gelu_new".
        key: the key in config.json, for the message.

    Raises:
        ArgumentError: the name is not known.

    >>> activation("gelu_new")
    GELU(approximate='tanh')

    Source: Hendrycks and Gimpel 2016 (arXiv 1606.08415), section 2, for both forms of GELU.
    """
    check_activation(name, key)
    return NONLINEARITIES[ACTIVATIONS[name]]()
