"""`AuditClaims`: the claimed sizes, causality, window, scale and mask convention of the code."""

from __future__ import annotations

from dataclasses import dataclass

from regard.errors import ArgumentError


@dataclass(frozen=True)
class AuditClaims:
    """The properties that attention code is claimed to have. A property that is None is inferred
    from the code, or not checked.

    Args:
        dim: the model dimension M.
        heads: the number of query heads H.
        kv_heads: the number of key/value heads G.
        head_dim: the features of one head D.
        causal: True if no token may depend on a later one; None infers it from the code's results
            without a mask.
        window: the number of keys that a query sees, its own included.
        scale: the factor on the scores; None means 1/sqrt(D).
        mask: the meaning of a mask: "keep" (True = may attend), "block" (True = hidden) or
            "additive". None accepts any convention that works; for
            `nn.MultiheadAttention` and modules with its argument names it means "block".
        layout: the order of a function's arguments, "BHTD" or "BTHD".

    Raises:
        ArgumentError: a size is below 1, a convention is unknown, or kv_heads does not divide
            heads.

    >>> AuditClaims(heads=4).groups
    4
    """

    dim: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool | None = None
    window: int | None = None
    scale: float | None = None
    mask: str | None = None
    layout: str = "BHTD"

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "kv_heads", "head_dim", "window"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ArgumentError(f"{name} is {value!r}; it must be an integer of at least 1")
        for name, allowed in (
            ("mask", (None, "keep", "block", "additive")),
            ("layout", ("BHTD", "BTHD")),
        ):
            if getattr(self, name) not in allowed:
                words = ", ".join(str(a) for a in allowed)
                raise ArgumentError(f"{name} is {getattr(self, name)!r}; it must be one of {words}")
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            raise ArgumentError(
                f"heads is {self.heads} and kv_heads is {self.kv_heads}; kv_heads must divide heads"
            )

    @property
    def groups(self) -> int | None:
        """The number of key/value heads G; H if it is not claimed."""
        return self.kv_heads or self.heads
