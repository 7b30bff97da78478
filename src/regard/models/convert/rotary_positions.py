"""Conversions of rotary positions: to the other layout ("half" pairs dims (i, i + d/2),
"interleaved" (2i, 2i + 1)) by an exact permutation of query and key rows, and to a longer context.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.configs.deepseek import DeepseekV3Config
from regard.configs.llama import LlamaConfig
from regard.configs.mistral import MistralConfig
from regard.errors import ArgumentError
from regard.language import Phrase
from regard.models.convert.attention_maps import (
    PROJECT,
    Checkpoint,
    ConversionStep,
    LayerErrors,
    layers_of,
    rebuild,
    separate_attention,
)
from regard.models.families import model_type_of
from regard.models.families import regard as regard_family
from regard.nn import HeadProjection, LatentProjection
from regard.nn.projections.latent import LowRankProjection
from regard.positions import NTK, Rotary
from regard.positions.rotary import Layout


def to_layout(
    checkpoint: Checkpoint, layout: Layout, *, stored: Layout | None = None
) -> tuple[Checkpoint, ConversionStep]:
    """Convert to the other rotary layout; the network computes the same function.

    A Llama config.json cannot express interleaved pairs, which transformers would silently compute
    as "half". The result is written as `model_type: "regard"`, and converted back it is a `llama`
    again; DeepSeek-V3 has a key for the layout.

    Args:
        checkpoint: a llama, mistral without a window, DeepSeek-V3, or regard's gqa with rotary;
            with `stored`, any family of separate queries and keys.
        layout: the new layout.
        stored: the true layout of the weights, where config.json cannot express it: with
            `layout="half", stored="interleaved"`, Meta's weights become an ordinary Llama folder.

    Returns:
        The converted checkpoint, and a description.

    Raises:
        ArgumentError: the layout is the present one, a name is unknown, or the family cannot
            express the result.

    >>> import regard
    >>> tiny = regard.load("tiny")
    >>> after, _ = to_layout(Checkpoint(tiny.decoder, tiny.config), "interleaved")
    >>> back, _ = to_layout(after, "half")
    >>> after.model_type, back.model_type, back.config == tiny.config
    ('regard', 'llama', True)

    Source: Su et al. 2021 (arXiv 2104.09864), equation 34; the layout "half": GPT-NeoX.
    """
    for word in (layout, stored):
        if word is not None and word not in get_args(Layout):
            raise ArgumentError(f"the rotary layout is {word!r}; it must be half or interleaved")
    config_layout = _layout(checkpoint)
    if layout == (stored or config_layout):
        raise ArgumentError(
            f"the rotary layout is {layout} already; choose the other one, or give stored_layout "
            "if the weights are stored in another layout than config.json says"
        )
    if stored is None:
        config = _config_for_layout(checkpoint.config, layout)
    elif layout == config_layout:
        config = checkpoint.config
    else:
        raise ArgumentError(
            f"weights stored as {stored} cannot become {layout} where the config has "
            f"{config_layout}; convert them to {config_layout}"
        )
    weights = checkpoint.weights()
    for prefix, block in layers_of(checkpoint.network):
        weights |= _permuted_parameters(prefix, block, layout)
    errors = (LayerErrors(0.0, 0.0),) * len(checkpoint.network.layers)
    stored_note = "" if stored is None else Phrase(", as the weights were stored,")
    return rebuild(config, weights), ConversionStep(
        Phrase(
            "rotary pairs from {old}{stored_note} to {layout}: rows of queries and keys in "
            "another order",
            old=stored or config_layout,
            stored_note=stored_note,
            layout=layout,
        ),
        errors,
    )


def row_order(pairs: int, layout: Layout) -> Int[Tensor, " d"]:
    """Return, for each row of this layout, the index of its row in the other layout."""
    shape = (2, pairs) if layout == "interleaved" else (pairs, 2)
    return torch.arange(2 * pairs, device="cpu").view(shape).T.flatten()


def _layout(checkpoint: Checkpoint) -> Layout:
    """Return the layout with which the network computes."""
    rotary = next((m for m in checkpoint.network.modules() if isinstance(m, Rotary)), None)
    if rotary is None:
        raise ArgumentError("the model has no rotary positions, so it has no rotary layout")
    return rotary.layout


def _config_for_layout(config: Any, layout: Layout) -> object:
    """Return the config of a family that can express this layout."""
    if isinstance(config, DeepseekV3Config):
        return replace(config, rope_interleave=layout == "interleaved")
    if isinstance(config, regard_family.Config):
        return _as_llama(config)
    plain = isinstance(config, (LlamaConfig, MistralConfig))
    reasons = {
        f"config keys of {model_type_of(config)}": not plain,
        "other rotary frequencies": plain and config.rope_scaling is not None,
        "biases": isinstance(config, LlamaConfig) and (config.attention_bias or config.mlp_bias),
        "a window": plain and any(config.windows()),
    }
    if problems := [name for name, present in reasons.items() if present]:
        raise ArgumentError(
            f"the model has {' and '.join(problems)}, and no family here can express that with "
            f"rotary pairs that are {layout}; possible are llama and mistral without scaling, bias "
            "and window, and deepseek_v3"
        )
    return regard_family.Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        attention="gqa",
        attention_options={
            "groups": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "base": config.rope_theta,
            "layout": layout,
        },
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
    )


def _as_llama(config: regard_family.Config) -> object:
    """Return the Llama config of the same network as regard's gqa with the layout "half"."""
    options = config.attention_options
    if config.attention != "gqa" or config.position not in ("catalogue", "rope") or config.window:
        raise ArgumentError(
            f"the model is regard's {config.attention} with position {config.position!r}; only its "
            "gqa with rotary and without a window can have another layout"
        )
    H = config.num_attention_heads
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=H,
        num_key_value_heads=options["groups"],
        head_dim=options.get("head_dim") or config.hidden_size // H,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=options.get("base", 10000.0),
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
    )


def _permuted_parameters(prefix: str, block: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """Return all parameters of a block whose rows are dims of queries or keys, in the new order."""
    project = getattr(getattr(block, "attention", None), "project", None)
    name = prefix + PROJECT
    if isinstance(project, LatentProjection):
        rows = row_order(len(project.rotary.inv_freq), layout)
        up = project.q.up if isinstance(project.q, LowRankProjection) else project.q
        path = "q.up." if isinstance(project.q, LowRankProjection) else "q."
        down = dict(project.kv_down.named_parameters())
        parameters = {
            f"{name}kv_down.{n}": _permute_rows(p, 1, project.kv_rank, rows)
            for n, p in down.items()
        }
        return parameters | _permute_heads(f"{name}{path}", up, project.nope_dim, rows)
    project = separate_attention(block).project
    rotary = next(m for m in block.modules() if isinstance(m, Rotary))
    rows = row_order(len(rotary.inv_freq), layout)
    return _permute_heads(name + "q.", project.q, 0, rows) | _permute_heads(
        name + "k.", project.k, 0, rows
    )


def _permute_heads(path: str, heads: HeadProjection, start: int, rows: Tensor) -> dict[str, Tensor]:
    """Return the parameters of the map of heads, and of norms after it, with permuted rows."""
    parameters = {
        f"{path}{n}": _permute_rows(p, heads.heads, start, rows)
        for n, p in heads.named_parameters()
        if not n.startswith("steps.")
    }
    for n, p in heads.steps.named_parameters():
        parameters[f"{path}steps.{n}"] = _permute_rows(p, 1, start, rows)
    return parameters


def _permute_rows(x: Tensor, heads: int, start: int, rows: Tensor) -> Tensor:
    """Return x with the rows start to start + len(rows) of each head in the order `rows`."""
    each = torch.unflatten(x.detach(), 0, (heads, -1)).clone()
    each[:, start : start + len(rows)] = each[:, start + rows]
    stored: Tensor = each.flatten(0, 1)
    return stored


Extension: TypeAlias = Literal["linear", "ntk", "dynamic", "yarn", "llama3"]
"""The rotary scalings that follow from the old and the new length alone, without a search."""


def extend_context(
    checkpoint: Checkpoint, length: int, extension: Extension = "yarn"
) -> tuple[Checkpoint, ConversionStep]:
    """Set the context to `length` tokens by a rotary scaling, with s = length / the trained length.

    linear: every angle / s. ntk: the base b becomes b s^(d/(d-2)), so only rope_theta changes.
        dynamic: the same, but s depends on the length of the text; max_position_embeddings stays.
        yarn: fast pairs stay, slow pairs are divided by s, and scores get a factor. llama3: as
        yarn, interpolated by wavelength, without a factor.

    No weight is trained; the result is usually a little worse within the trained length.

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
    # "default" is how files write that there is none
    if config.rope_scaling is not None and config.rope_scaling.get("rope_type") != "default":
        raise ArgumentError(
            f"rope_scaling is {dict(config.rope_scaling)} already; extend the checkpoint that it "
            "was derived from"
        )
    trained = config.max_position_embeddings
    if length <= trained:
        raise ArgumentError(
            f"the context is {length}, and max_position_embeddings is {trained} already; give "
            "more than that",
            argument="length",
        )
    change = _changed_keys(extension, length, trained, config, 2 * len(rotary.inv_freq))
    after = rebuild(replace(config, **change), checkpoint.weights(), checkpoint.records())
    changes = ", ".join(f"{key} {value}" for key, value in change.items())
    return after, ConversionStep(
        Phrase(
            "context from {trained} to {length} by {extension}: {changes}",
            trained=trained,
            length=length,
            extension=extension,
            changes=changes,
        ),
        notes=("no weight was trained on the new length: measure or finetune on long texts",),
    )


def _changed_keys(
    extension: Extension, length: int, trained: int, config: Any, dim: int
) -> dict[str, object]:
    """Return the keys of the config that change, with their new values."""
    factor = length / trained
    scaling: dict[str, object] = {"rope_type": extension, "factor": factor}
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
