"""Native sparse attention: three branches, compressed, selected and window, each with its own keys
and values, and a gate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.arguments import check_groups
from regard.caches import Cache, Growing, Parts
from regard.cost import Figure
from regard.cost.selected import NSASpec
from regard.cost.spec import HeadShape
from regard.errors import ArgumentError
from regard.masks import Causal, Window
from regard.nn.mixer import Mixer, count_weights
from regard.nn.projections import Heads
from regard.ops.selection.blocks import Order, order
from regard.ops.selection.nsa import NSABlocks, ends, selection_mask, windows
from regard.ops.softmax import attend
from regard.span import Positions
from regard.tap import place, tap

BRANCHES = ("compressed", "selected", "window")
"""The places of the taps, and the order of keys, values and gates."""


class Compress(nn.Module):
    """The l tokens of a block as one: phi(x) = W2 silu(W1 [x_1 + e_1; ...; x_l + e_l] + b1) + b2, e
    by place in the block.

    x [B,G,C,l,D] -> [B,G,C,D], the same map for every head.

    Args:
        length: the tokens l.
        dim: the head dim D.
        hidden: the width between the two maps; None is D.

    Raises:
        ArgumentError: a size is below 1.

    >>> Compress(4, 8)(torch.zeros(1, 2, 5, 4, 8)).shape
    torch.Size([1, 2, 5, 8])

    Source: Yuan et al. 2025 (arXiv 2502.11089), equation 7; the paper leaves the shape of the
    network open.
    """

    def __init__(self, length: int, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = dim if hidden is None else hidden
        if min(length, dim, hidden) < 1:
            raise ArgumentError(
                f"Compress(length={length}, dim={dim}, hidden={hidden}): each must be at least 1"
            )
        self.length, self.dim, self.hidden = length, dim, hidden
        self.places = nn.Parameter(0.02 * torch.randn(length, dim))
        self.up, self.down = nn.Linear(length * dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Float[Tensor, "B G C l D"]) -> Float[Tensor, "B G C D"]:
        """One token per block."""
        hidden = self.up((x + self.places).flatten(-2))
        compressed: Tensor = self.down(nn.functional.silu(hidden))
        return compressed

    def extra_repr(self) -> str:
        """The tokens of a block."""
        return f"{self.length} tokens"


class NSA(Mixer):
    """out = W_o sum_b gate_b(x) * attend(q, k_b, v_b) over the branches b: compressed, selected,
    window.

    compressed: one key and value per block of l tokens, every d tokens, seen once the block is
        complete;
    selected: the blocks of l' tokens that got most of the compressed branch's attention, k <= q
        within;
    window: the last w tokens

    A cache keeps the keys and values of all three branches; compressed ones are computed again in
    each call.

    Args:
        q: `Heads` that make H queries.
        keys, values: `Heads` that make G keys and values, one per branch. Keys of the compressed
            branch are remembered as their heads make them: give those no rotary.
        compress_key, compress_value: modules [B,G,C,l,D] -> [B,G,C,D], such as `Compress`.
        late: a step on compressed keys at the position of their last token, such as a rotary; None
            is no step. The paper leaves open where positions enter; so a score depends on the
            distance only.
        gate: a module [B,T,M] -> [B,T,3 H], before the sigmoid.
        output: a module [B,T,H*E] -> [B,T,M].
        sizes: of blocks and window.

    Raises:
        ArgumentError: not three keys and values, or their heads do not fit one another.

    >>> sizes = NSABlocks(compress=4, stride=2, select=4, count=3, window=4)
    >>> kv, phi = [Heads(8, 1, 4) for _ in range(6)], [Compress(4, 4) for _ in range(2)]
    >>> layer = NSA(Heads(8, 2, 4), kv[:3], kv[3:], compress_key=phi[0], compress_value=phi[1],
    ...             gate=nn.Linear(8, 6), output=nn.Linear(8, 8), sizes=sizes)
    >>> layer(torch.zeros(1, 9, 8)).shape
    torch.Size([1, 9, 8])

    Source: Yuan et al. 2025 (arXiv 2502.11089), section 3.
    """

    def __init__(
        self,
        q: Heads,
        keys: Sequence[Heads],
        values: Sequence[Heads],
        *,
        compress_key: nn.Module,
        compress_value: nn.Module,
        late: nn.Module | None = None,
        gate: nn.Module,
        output: nn.Module,
        sizes: NSABlocks,
    ) -> None:
        super().__init__()
        if len(keys) != 3 or len(values) != 3:
            raise ArgumentError(
                f"{len(keys)} keys and {len(values)} values; give one each for "
                f"{', '.join(BRANCHES)}"
            )
        made = {
            (k.heads, k.head_dim, v.heads, v.head_dim) for k, v in zip(keys, values, strict=True)
        }
        (G, D, G_v, _) = next(iter(made))
        if len(made) > 1 or G_v != G or q.head_dim != D:
            raise ArgumentError(
                f"q is {q.extra_repr()}, keys are {[k.extra_repr() for k in keys]}, values "
                f"{[v.extra_repr() for v in values]}: every branch needs the same heads and dims, "
                "keys the dim of q"
            )
        check_groups(q.heads, G)
        self.q, self.keys, self.values = q, nn.ModuleList(keys), nn.ModuleList(values)
        self.compress_key, self.compress_value, self.late = compress_key, compress_value, late
        self.gate, self.output, self.sizes = gate, output, sizes

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Attend from x [B,T,M] at its positions to itself and to what the cache holds, branch by
        branch.
        """
        q = tap("q", self.q(x, positions))
        memory: Parts = tuple(heads(x, positions) for heads in (*self.keys, *self.values))
        seen = positions
        if cache is not None:
            memory, seen = cache.update(memory, positions)
        keys, values = list(memory[:3]), list(memory[3:])
        laid = order(seen, self.sizes.select, x.device)
        at = ends(laid, self.sizes)
        keys[0], values[0] = self.compressed(keys[0], values[0], laid, at)
        chosen = selection_mask(q, keys[0], laid, self.sizes, q_positions=positions, k_positions=at)
        masks = (Causal(), chosen, Causal() & Window(self.sizes.window))
        zs = []
        for name, k, v, mask, where in zip(
            BRANCHES, keys, values, masks, (at, seen, seen), strict=True
        ):
            with place(name):
                zs.append(
                    attend(
                        q,
                        tap("k", k),
                        tap("v", v),
                        mask=mask,
                        q_positions=positions,
                        k_positions=where,
                        backend=backend,
                    )
                )
        z = tap("z", self.gated(torch.stack(zs), x))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def compressed(
        self,
        k: Float[Tensor, "B G S D"],
        v: Float[Tensor, "B G S E"],
        laid: Order,
        at: Positions,
    ) -> tuple[Float[Tensor, "B G C D"], Float[Tensor, "B G C E"]]:
        """Compressed keys and values; those of blocks that are not complete stand at position -1,
        and mean nothing.
        """
        k = self.compress_key(windows(k, laid, self.sizes))
        v = self.compress_value(windows(v, laid, self.sizes))
        return (k if self.late is None else self.late(k, at)), v

    def gated(
        self, zs: Float[Tensor, "3 B H T E"], x: Float[Tensor, "B T M"]
    ) -> Float[Tensor, "B H T E"]:
        """The branches, each times its gate, a number per head and query."""
        gates = torch.unflatten(self.gate(x).sigmoid(), -1, (3, self.q.heads))  # [B,T,3,H]
        return (zs * gates.permute(2, 0, 3, 1)[..., None]).sum(0)

    def new_cache(self) -> Cache:
        """An empty cache that keeps everything: any block may be selected later."""
        return Growing()

    def tokens(self, context: int) -> Figure:
        """Tokens that decoding the token at position context - 1 reads, as table 4 of the paper
        counts them.
        """
        return self.spec.read_by_paper(context)

    @property
    def spec(self) -> NSASpec:
        """The cost of this layer, which compresses all blocks anew for each token."""
        s, value = self.sizes, self.values[0]
        assert isinstance(value, Heads)
        shape = HeadShape(self.q.heads, value.heads, self.q.head_dim, value.head_dim)
        phi = (self.compress_key, self.compress_value)
        # a network of another class says no width, and is not counted
        widths = [network.hidden if isinstance(network, Compress) else 0 for network in phi]
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
