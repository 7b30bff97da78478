"""Extension of the context length by rotary scaling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

from regard.errors import ArgumentError
from regard.models.convert.attention_maps import Checkpoint, ConversionStep, rebuild
from regard.positions import NTK, Rotary

Extension: TypeAlias = Literal["linear", "ntk", "dynamic", "yarn", "llama3"]
"""The rotary scalings that follow from the old and the new length alone, without a search."""


def extend_context(
    checkpoint: Checkpoint, length: int, extension: Extension = "yarn"
) -> tuple[Checkpoint, ConversionStep]:
    """Set the context to `length` tokens by a rotary scaling, with s = length / the trained length.

    linear: every angle / s (position interpolation). ntk: the base b becomes b s^(d/(d-2)); only
        rope_theta is changed, since transformers has no rope_type of that name. dynamic: the same,
        but s depends on the length of the text; max_position_embeddings stays the trained one, as
        transformers expects. yarn: the angles of fast pairs are unchanged, those of slow pairs
        are divided by s, and scores are multiplied by a factor. llama3: as yarn, but interpolated
        by wavelength and without a factor on scores.

    No weight is trained. The result is better than before beyond the trained length, and usually a
    little worse within it.

    Args:
        checkpoint: a decoder with rotary positions that are not scaled.
        length: the new context in tokens, more than the trained length.
        extension: the scaling.

    Returns:
        The converted checkpoint, and a description.

    Raises:
        ArgumentError: length is not more than the trained one, the model is scaled already or has
            no such positions, or its family refuses the scaling.

    >>> import regard
    >>> tiny = regard.load("tiny")
    >>> after, _ = extend_context(Checkpoint(tiny.decoder, tiny.config), 1024)
    >>> after.config.rope_scaling
    {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 256}

    Source: linear: Chen et al. 2023 (arXiv 2306.15595); ntk, dynamic, yarn: Peng et al. 2023 (arXiv
    2309.00071); llama3: Grattafiori et al. 2024 (arXiv 2407.21783).
    """
    if extension not in get_args(Extension):
        raise ArgumentError(
            f"the scaling is {extension!r}; it must be one of {', '.join(get_args(Extension))}"
        )
    config = checkpoint.config
    rotary = next((m for m in checkpoint.network.modules() if isinstance(m, Rotary)), None)
    if rotary is None or not hasattr(config, "rope_theta") or not hasattr(config, "rope_scaling"):
        raise ArgumentError(
            f"the context of a {checkpoint.model_type} cannot be extended: its config has no "
            "rope_theta and rope_scaling for all layers"
        )
    if config.rope_scaling is not None:
        raise ArgumentError(
            f"rope_scaling is {dict(config.rope_scaling)} already; extend the checkpoint that it "
            "was derived from"
        )
    trained = config.max_position_embeddings
    if length <= trained:
        raise ArgumentError(
            f"the context is {length}, and max_position_embeddings is {trained} already; give "
            "more than that"
        )
    change = _changed_keys(extension, length, trained, config, 2 * len(rotary.inv_freq))
    after = rebuild(replace(config, **change), checkpoint.weights())
    changes = ", ".join(f"{key} {value}" for key, value in change.items())
    return after, ConversionStep(
        f"context from {trained} to {length} by {extension}: {changes}",
        notes=("no weight was trained on the new length: measure or finetune on long texts",),
    )


def _changed_keys(
    extension: Extension, length: int, trained: int, config: Any, dim: int
) -> dict[str, Any]:
    """Return the keys of the config that change, with their new values."""
    factor = length / trained
    scaling: dict[str, Any] = {"rope_type": extension, "factor": factor}
    if extension == "ntk":
        base = NTK(factor).base(config.rope_theta, dim)
        return {"rope_theta": base, "max_position_embeddings": length}
    if extension == "dynamic":
        return {"rope_scaling": scaling}
    if extension == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if extension in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = trained
    return {"rope_scaling": scaling, "max_position_embeddings": length}
