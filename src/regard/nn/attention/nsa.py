"""Native sparse attention: the gated sum of compressed, selected and recent keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_groups, check_positive_sizes
from regard.caches import Cache, Growing, Parts
from regard.cost import Quantity
from regard.cost.selected import NSASpec
from regard.cost.spec import HeadShape
from regard.errors import ArgumentError
from regard.masks import Causal, Window
from regard.nn.explainable import (
    CallWeights,
    HeadMix,
    InputSteps,
    LayerRun,
    MixTerm,
    ProjectionQuery,
    first_rotary,
)
from regard.nn.mixer import Mixer, count_weights
from regard.nn.projections.heads import HeadProjection
from regard.ops.selection.nsa import (
    NSABlocks,
    compression_positions,
    compression_windows,
    selection_mask,
)
from regard.ops.selection.position_blocks import BlockLayout, block_layout
from regard.ops.softmax import attend
from regard.span import Positions
from regard.tracing import named_scope, tap
from regard.units import plural

BRANCHES = ("compressed", "selected", "window")
"""The names of the branches, in the order of keys, values and gates, prefixes of their taps."""


class BlockCompressor(nn.Module):
    """A network that compresses the l tokens of a block into one.

    phi(x) = W2 silu(W1 [x_1 + e_1; ...; x_l + e_l] + b1) + b2

    e_i is a learned embedding of position i; x [B,G,C,l,D] -> [B,G,C,D] for C blocks, for every
    head.

    Source: Yuan et al. 2025 (arXiv 2502.11089), equation 7; the paper does not specify the network.
    """

    def __init__(self, length: int, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = dim if hidden is None else hidden
        check_positive_sizes("BlockCompressor", length=length, dim=dim, hidden=hidden)
        self.length, self.dim, self.hidden = length, dim, hidden
        self.places = nn.Parameter(0.02 * torch.randn(length, dim))
        self.up, self.down = nn.Linear(length * dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Float[Tensor, "B G C l D"]) -> Float[Tensor, "B G C D"]:
        """Compress blocks [B,G,C,l,D] to one token each [B,G,C,D]."""
        hidden = self.up((x + self.places).flatten(-2))
        compressed: Tensor = self.down(nn.functional.silu(hidden))
        return compressed

    def extra_repr(self) -> str:
        """Return the number of tokens in a block."""
        return plural(self.length, "token")


class NSA(Mixer):
    """Native sparse attention: the gated sum of three branches with separate keys and values.

    out = W_o sum_b gate_b(x) * attend(q, k_b, v_b) over the branches b:

    compressed: one key and value for each block of l tokens, of which one starts every d tokens;
    selected: the n blocks of l' tokens with the largest weights in the compressed branch; window:
    the last w tokens.

    A cache stores keys and values of all branches; the compressed ones are computed again.

    Args:
        q: a `HeadProjection` to H queries.
        keys, values: three `HeadProjection`s each to G heads, one per branch; the keys of the
            compressed branch need no rotary.
        compress_key, compress_value: modules [B,G,C,l,D] -> [B,G,C,D], such as `BlockCompressor`.
        key_transform: a module on compressed keys at the position of their block's last token, such
            as a rotary, or None; the paper does not specify it.
        gate: a module [B,T,M] -> [B,T,3 H], before the sigmoid.
        output: a module [B,T,H*E] -> [B,T,M].
        sizes: the sizes l, d, l', n and w of the blocks and of the window.

    Raises:
        ArgumentError: there are not three keys and values, or their heads do not fit one another.

    >>> sizes = NSABlocks(compress=4, stride=2, select=4, count=3, window=4)
    >>> kv = [HeadProjection(8, 1, 4) for _ in range(6)]
    >>> layer = NSA(HeadProjection(8, 2, 4), kv[:3], kv[3:],
    ...             compress_key=BlockCompressor(4, 4), compress_value=BlockCompressor(4, 4),
    ...             gate=nn.Linear(8, 6), output=nn.Linear(8, 8), sizes=sizes)
    >>> layer(torch.zeros(1, 9, 8)).shape
    torch.Size([1, 9, 8])

    Source: Yuan et al. 2025 (arXiv 2502.11089), section 3.
    """

    recording_refusal = "splits the keys into blocks, whose number depends on the length"

    def __init__(
        self,
        q: HeadProjection,
        keys: Sequence[HeadProjection],
        values: Sequence[HeadProjection],
        *,
        compress_key: nn.Module,
        compress_value: nn.Module,
        key_transform: nn.Module | None = None,
        gate: nn.Module,
        output: nn.Module,
        sizes: NSABlocks,
    ) -> None:
        super().__init__()
        if len(keys) != 3 or len(values) != 3:
            raise ArgumentError(
                f"keys has length {len(keys)} and values has length {len(values)}; each must have "
                f"one projection for each branch: {', '.join(BRANCHES)}"
            )

        shapes = {
            (k.heads, k.head_dim, v.heads, v.head_dim) for k, v in zip(keys, values, strict=True)
        }
        (G, D, G_v, _) = next(iter(shapes))
        if len(shapes) > 1 or G_v != G or q.head_dim != D:
            raise ArgumentError(
                f"q is {q.extra_repr()}, keys are {[k.extra_repr() for k in keys]}, values "
                f"{[v.extra_repr() for v in values]}: all branches must have the same heads and "
                "dims, and keys the dim of q"
            )
        check_groups(q.heads, G)
        self.q, self.keys, self.values = q, nn.ModuleList(keys), nn.ModuleList(values)
        self.compress_key, self.compress_value = compress_key, compress_value
        self.key_transform = key_transform
        self.gate, self.output, self.sizes = gate, output, sizes

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Attend from x [B,T,M] to its own tokens and to those in the cache, branch by branch."""
        q = tap("q", self.q(x, positions))
        memory: Parts = tuple(heads(x, positions) for heads in (*self.keys, *self.values))

        k_positions = positions
        if cache is not None:
            memory, k_positions = cache.update(memory, positions)
        keys, values = list(memory[:3]), list(memory[3:])
        token_order = block_layout(k_positions, self.sizes.select, x.device)
        block_ends = compression_positions(token_order, self.sizes)
        keys[0], values[0] = self.compressed(keys[0], values[0], token_order, block_ends)
        chosen = selection_mask(
            q, keys[0], token_order, self.sizes, q_positions=positions, k_positions=block_ends
        )
        masks = (Causal(), chosen, Causal() & Window(self.sizes.window))
        zs = []
        for name, k, v, mask, branch_positions in zip(
            BRANCHES, keys, values, masks, (block_ends, k_positions, k_positions), strict=True
        ):
            with named_scope(name):
                zs.append(
                    attend(
                        q,
                        tap("k", k),
                        tap("v", v),
                        mask=mask,
                        q_positions=positions,
                        k_positions=branch_positions,
                        backend=backend,
                    )
                )
        z = tap("z", self.gated(torch.stack(zs), x))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def compressed(
        self,
        k: Float[Tensor, "B G S D"],
        v: Float[Tensor, "B G S E"],
        token_order: BlockLayout,
        block_ends: Positions,
    ) -> tuple[Float[Tensor, "B G C D"], Float[Tensor, "B G C E"]]:
        """Compress keys and values to one per block.

        Args:
            k: keys [B,G,S,D] of the compressed branch.
            v: values [B,G,S,E] of the compressed branch.
            token_order: the order of the tokens by position.
            block_ends: the position of the last token of each block; -1 for an incomplete block.

        Returns:
            The keys [B,G,C,D] and values [B,G,C,E]; incomplete blocks have no meaning.
        """
        k = self.compress_key(compression_windows(k, token_order, self.sizes))
        v = self.compress_value(compression_windows(v, token_order, self.sizes))
        return (k if self.key_transform is None else self.key_transform(k, block_ends)), v

    def gated(
        self, zs: Float[Tensor, "3 B H T E"], x: Float[Tensor, "B T M"]
    ) -> Float[Tensor, "B H T E"]:
        """Sum the branches, each times its gate per head and query.

        Args:
            zs: the results of the branches [3,B,H,T,E].
            x: the hidden states [B,T,M].

        Returns:
            The heads [B,H,T,E].
        """
        gates = self.gate(x).sigmoid().unflatten(-1, (3, self.q.heads))  # [B,T,3,H]
        result: Float[Tensor, "B H T E"] = (zs * gates.permute(2, 0, 3, 1)[..., None]).sum(0)
        return result

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of the queries, and of the keys and values of the query's branch."""
        q = self.q.explain_steps(query.x, query.positions, "q")
        rotary, branch = first_rotary(self.q.steps), BRANCHES.index(query.branch)
        if query.branch == "compressed":
            return InputSteps(q, rotary=rotary, keys_are_blocks=True)
        keys, values = (cast("HeadProjection", x[branch]) for x in (self.keys, self.values))
        k = keys.explain_steps(query.memory, query.k_positions, "k")
        v = values.explain_steps(query.memory, query.k_positions, "v")
        return InputSteps(q, k, v, rotary)

    def explain_mix(
        self, run: LayerRun, calls: Sequence[CallWeights], call_index: int, head: int, row: int
    ) -> HeadMix:
        """Return the mix of the branches, each multiplied by its gate."""
        gates = self.gate(run.x[0, row]).sigmoid().unflatten(-1, (3, -1))[:, head].double()
        terms = tuple(
            MixTerm(
                call.branch,
                float(gates[BRANCHES.index(call.branch)]),
                float(call.weights[head].sum()),
                n == call_index,
            )
            for n, call in enumerate(calls)
        )
        return HeadMix(
            "the sum of three branches with separate keys and values, each times its gate; a "
            "weight is a share of its branch, not of the total",
            terms,
            None,
        )

    def new_cache(self) -> Cache:
        """Return an empty cache that stores all tokens, since any block may be selected later."""
        return Growing()

    def tokens(self, context: int) -> Quantity:
        """Count the tokens that a decoding step reads from memory, as in table 4 of the paper.

        Args:
            context: the number of tokens up to and including the decoded one.

        Returns:
            The number with its formula.
        """
        return self.spec.read_by_paper(context)

    @property
    def spec(self) -> NSASpec:
        """The cost of this layer, which compresses all blocks again for each token."""
        s, value = self.sizes, cast("HeadProjection", self.values[0])
        shape = HeadShape(self.q.heads, value.heads, self.q.head_dim, value.head_dim)
        phi = (self.compress_key, self.compress_value)
        # The hidden size of another class of network is unknown, so its FLOPs are not counted.
        widths = [network.hidden if isinstance(network, BlockCompressor) else 0 for network in phi]
        return NSASpec(
            count_weights(self, *phi),
            3 * shape.parts,
            shape,
            s.compress,
            s.stride,
            s.select,
            s.count,
            s.window,
            hidden=(widths[0], widths[1]),
            recompress=True,
        )
