"""The nonlinearities that config.json names, under all the names that it has for them."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from torch import nn

from regard.errors import ArgumentError


def _gelu_tanh() -> nn.Module:
    return nn.GELU("tanh")


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_python": nn.GELU,
    "gelu_accurate": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_python_tanh": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "linear": nn.Identity,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
}
"""Name -> module. "gelu" is x Phi(x) with the error function; five names mean its approximation with tanh."""


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
    if name not in ACTIVATIONS:
        close = difflib.get_close_matches(name[:60], ACTIVATIONS, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ArgumentError(
            f"{key} is {name!r}; supported are {', '.join(sorted(ACTIVATIONS))}{hint}"
        )
    return ACTIVATIONS[name]()
