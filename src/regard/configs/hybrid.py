"""The configs of models that mix layers with softmax attention and layers with a state of fixed
size: the base class of all of them, and the configs of Granite 4, Jamba, Falcon-H1 and Nemotron-H.

Each class names the kind of every layer, and what a layer of a kind costs. `regard cost` counts
these four families; `regard.load` does not load them.

Source of the keys: Hugging Face checkpoints, and transformers' configuration classes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

from regard.configs.base import FULL, Raw
from regard.configs.llama import GroupedQueryConfig, check_experts
from regard.cost.model import DenseSpec, FeedForwardSpec, LayerSpec, ModelSpec, MoESpec
from regard.cost.spec import ParameterCounts, Spec
from regard.cost.state_space import mamba, mamba2
from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.units import plural

LINEAR = "linear_attention"
"""The kind of a layer with a state of fixed size, as transformers names it."""
LAYER_NAMES = {"attention": FULL, "mamba": LINEAR, FULL: FULL, LINEAR: LINEAR}
"""Name of a kind in config.json -> its name here."""
Names: TypeAlias = tuple[str, ...] | None


def named_kinds(names: Sequence[str], layers: int, key: str = "layer_types") -> tuple[str, ...]:
    """Return the kind of each layer from the names in config.json.

    Args:
        names: a name for each layer.
        layers: the number of layers.
        key: the key in config.json, for messages.

    Raises:
        ArgumentError: a name is unknown, or their number is not that of the layers.

    >>> named_kinds(["mamba", "attention"], 2)
    ('linear_attention', 'full_attention')
    """
    if len(names) != layers:
        raise ArgumentError(
            f"{key} has {plural(len(names), 'entry')} and num_hidden_layers is {layers}; give one "
            "per layer"
        )
    for i, name in enumerate(names):
        if name not in LAYER_NAMES:
            raise ArgumentError(
                f"{key}[{i}] is {name!r}; supported are {', '.join(LAYER_NAMES)}"
                f"{suggest(name, LAYER_NAMES, cutoff=0.8)}"
            )
    return tuple(LAYER_NAMES[name] for name in names)


@dataclass(frozen=True)
class HybridConfig(GroupedQueryConfig):
    """A model whose layers are of two kinds, `full_attention` and `linear_attention`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kinds()

    @abstractmethod
    def kinds(self) -> tuple[str, ...]:
        """Return the kind of each layer."""

    @abstractmethod
    def recurrent(self) -> Spec:
        """Return the sizes of the mechanism of a layer with a state of fixed size."""

    def feed_forward_of(self, layer: int) -> FeedForwardSpec:
        """Return the sizes of the feed-forward part of a layer."""
        return self.feed_forward()

    def mixer(self, kind: str) -> Spec:
        """Return the sizes of the mechanism of a layer of this kind."""
        return self.attention(None) if kind == FULL else self.recurrent()

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, layer by layer."""
        norms = ParameterCounts(norms=self.norms_per_block * self.hidden_size)
        layers = tuple(
            LayerSpec(self.mixer(kind), self.feed_forward_of(i), norms)
            for i, kind in enumerate(self.kinds())
        )
        return replace(super().sizes(name), layers=layers)


@dataclass(frozen=True)
class GraniteHybridConfig(HybridConfig):
    """The keys of Granite 4.0 H: Mamba-2 in most layers, attention in the others, and dense or
    sparse feed-forward layers.
    """

    shared_intermediate_size: int = field(kw_only=True)
    layer_types: tuple[str, ...] = field(kw_only=True)
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    mamba_n_heads: int = 128
    mamba_d_head: int = 64
    mamba_n_groups: int = 1
    mamba_d_state: int = 128
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    attention_bias: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("granitemoehybrid",)

    zero: ClassVar[tuple[str, ...]] = ("num_local_experts", "num_experts_per_tok")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts("num_local_experts", self.num_local_experts, self.num_experts_per_tok)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama; a mamba_d_head of "auto" follows from mamba_expand."""
        keys = super().normalize_keys(raw)
        heads, dim, expand = (
            x if isinstance(x, int) else 1
            for x in (
                keys.get("mamba_n_heads"),
                keys.get("hidden_size"),
                keys.pop("mamba_expand", 2),
            )
        )
        if keys.get("mamba_d_head") == "auto":
            keys["mamba_d_head"] = expand * dim // heads
        return keys

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases, and whether the output map has one."""
        return self.attention_bias, self.attention_bias

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of `layer_types`."""
        return named_kinds(self.layer_types, self.num_hidden_layers)

    def recurrent(self) -> Spec:
        """Return the sizes of a layer of Mamba-2."""
        return mamba2(
            self.hidden_size,
            self.mamba_n_heads,
            self.mamba_d_head,
            self.mamba_n_groups,
            self.mamba_d_state,
            self.mamba_d_conv,
            bias=self.mamba_proj_bias,
            conv_bias=self.mamba_conv_bias,
        )

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a mixture of experts with a shared one, or of the latter alone."""
        shared = DenseSpec(self.hidden_size, self.shared_intermediate_size)
        if not self.num_local_experts:
            return shared
        expert = DenseSpec(self.hidden_size, self.intermediate_size)
        return MoESpec(expert, self.num_local_experts, self.num_experts_per_tok, shared)


@dataclass(frozen=True)
class JambaConfig(HybridConfig):
    """The keys of Jamba: Mamba in most layers, attention in every `attn_layer_period`-th, and a
    mixture of experts in every `expert_layer_period`-th.
    """

    num_experts: int = 16
    num_experts_per_tok: int = 2
    attn_layer_period: int = 8
    attn_layer_offset: int = 4
    expert_layer_period: int = 2
    expert_layer_offset: int = 1
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int = field(kw_only=True)
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("jamba",)
    ignored: ClassVar[frozenset[str]] = frozenset({"use_mamba_kernels", "num_logits_to_keep"})
    zero: ClassVar[tuple[str, ...]] = ("attn_layer_offset", "expert_layer_offset")

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama; a missing mamba_dt_rank is a sixteenth of hidden_size."""
        keys = super().normalize_keys(raw)
        size = keys.get("hidden_size")
        if keys.get("mamba_dt_rank") in (None, "auto") and isinstance(size, int):
            keys["mamba_dt_rank"] = -(-size // 16)
        return keys

    def kinds(self) -> tuple[str, ...]:
        """Return attention for the layers with the remainder `attn_layer_offset`."""
        period, offset = self.attn_layer_period, self.attn_layer_offset
        return tuple(
            FULL if i % period == offset else LINEAR for i in range(self.num_hidden_layers)
        )

    def recurrent(self) -> Spec:
        """Return the sizes of a layer of Mamba."""
        return mamba(
            self.hidden_size,
            self.mamba_expand * self.hidden_size,
            self.mamba_d_state,
            self.mamba_d_conv,
            self.mamba_dt_rank,
            bias=self.mamba_proj_bias,
            conv_bias=self.mamba_conv_bias,
            norms=True,
        )

    def feed_forward_of(self, layer: int) -> FeedForwardSpec:
        """Return the sizes of a mixture of experts, or of a dense layer."""
        dense = DenseSpec(self.hidden_size, self.intermediate_size)
        sparse = layer % self.expert_layer_period == self.expert_layer_offset
        if not sparse or self.num_experts == 1:
            return dense
        return MoESpec(dense, self.num_experts, self.num_experts_per_tok)


@dataclass(frozen=True)
class FalconH1Config(GroupedQueryConfig):
    """The keys of Falcon-H1: attention and Mamba-2 beside each other in every layer."""

    mamba_d_ssm: int = field(kw_only=True)
    mamba_n_heads: int = field(kw_only=True)
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_rms_norm: bool = False
    mamba_conv_bias: bool = True

    model_types: ClassVar[tuple[str, ...]] = ("falcon_h1",)
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "mamba_proj_bias": (False,),
        "projectors_bias": (False,),
    }

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, with both mechanisms in every layer."""
        model = super().sizes(name)
        state = mamba2(
            self.hidden_size,
            self.mamba_n_heads,
            self.mamba_d_ssm // self.mamba_n_heads,
            self.mamba_n_groups,
            self.mamba_d_state,
            self.mamba_d_conv,
            conv_bias=self.mamba_conv_bias,
            norm=self.mamba_rms_norm,
        )
        return replace(model, layers=tuple(replace(x, parallel=state) for x in model.layers))


BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letter of `hybrid_override_pattern` -> the name of a block."""


@dataclass(frozen=True)
class NemotronHConfig(GroupedQueryConfig):
    """The keys of Nemotron-H: blocks of Mamba-2, of attention, and of feed-forward layers, which
    are listed one by one.

    A feed-forward block is counted as part of the layer of the block before it.
    """

    layers_block_type: tuple[str, ...] = field(kw_only=True)
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    n_groups: int = 8
    ssm_state_size: int = 128
    conv_kernel: int = 4
    use_conv_bias: bool = True
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    n_shared_experts: int = 1
    moe_intermediate_size: int = 0
    moe_shared_expert_intermediate_size: int = 0

    model_types: ClassVar[tuple[str, ...]] = ("nemotron_h",)
    ignored: ClassVar[frozenset[str]] = frozenset({"expand", "head_dim_attention"})
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "mlp_hidden_act": ("relu2",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "mamba_proj_bias": (False,),
        "use_bias": (False,),
        "moe_latent_size": (None,),
    }
    zero: ClassVar[tuple[str, ...]] = (
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts("n_routed_experts", self.n_routed_experts, self.num_experts_per_tok)
        self._blocks()

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with the list of blocks, which older files give as one string."""
        pattern = raw.get("hybrid_override_pattern")
        keys = super().normalize_keys({k: v for k, v in raw.items() if "pattern" not in k})
        if isinstance(pattern, str) and keys.get("layers_block_type") is None:
            unknown = [letter for letter in pattern if letter not in BLOCKS]
            if unknown:
                raise ArgumentError(
                    f"hybrid_override_pattern has {unknown[0]!r}; supported are {', '.join(BLOCKS)}"
                )
            keys["layers_block_type"] = [BLOCKS[letter] for letter in pattern]
        blocks = keys.get("layers_block_type")
        if keys.get("num_hidden_layers") is None and isinstance(blocks, list):
            keys["num_hidden_layers"] = len(blocks)
        return keys

    def _blocks(self) -> list[list[str]]:
        """Return the blocks, with each feed-forward block behind the block before it."""
        if len(self.layers_block_type) != self.num_hidden_layers:
            raise ArgumentError(
                f"layers_block_type has {plural(len(self.layers_block_type), 'entry')} and "
                f"num_hidden_layers is {self.num_hidden_layers}; give one per layer"
            )
        layers: list[list[str]] = []
        for i, name in enumerate(self.layers_block_type):
            if name not in BLOCKS.values():
                raise ArgumentError(
                    f"layers_block_type[{i}] is {name!r}; supported are "
                    f"{', '.join(BLOCKS.values())}"
                )
            if name in ("mamba", "attention"):
                layers.append([name])
            elif not layers or len(layers[-1]) == 2:
                raise ArgumentError(
                    f"layers_block_type[{i}] is {name!r}, which has no mamba or attention before "
                    "it; this order cannot be counted"
                )
            else:
                layers[-1].append(name)
        return layers

    def _layer(self, blocks: list[str]) -> LayerSpec:
        M = self.hidden_size
        state = mamba2(
            M,
            self.mamba_num_heads,
            self.mamba_head_dim,
            self.n_groups,
            self.ssm_state_size,
            self.conv_kernel,
            conv_bias=self.use_conv_bias,
        )
        mixer = state if blocks[0] == "mamba" else self.attention(None)
        norms = ParameterCounts(norms=len(blocks) * M)
        if len(blocks) == 1:
            return LayerSpec(mixer, None, norms)
        if blocks[1] == "mlp":
            return LayerSpec(mixer, DenseSpec(M, self.intermediate_size, gated=False), norms)
        shared = self.moe_shared_expert_intermediate_size * self.n_shared_experts
        experts = MoESpec(
            DenseSpec(M, self.moe_intermediate_size, gated=False),
            self.n_routed_experts,
            self.num_experts_per_tok,
            DenseSpec(M, shared, gated=False),
            self.n_routed_experts,
        )
        return LayerSpec(mixer, experts, norms)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, block by block."""
        layers = tuple(self._layer(blocks) for blocks in self._blocks())
        return replace(super().sizes(name), layers=layers)
