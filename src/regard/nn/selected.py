"""Attention to selected keys. A selector (MoBA, DeepSeek's indexer) chooses the keys that each
query reads; native sparse attention mixes compressed, selected and nearby keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.arguments import check_groups
from regard.caches import Cache, Growing, Parts
from regard.cost import Description, Quantity
from regard.cost.selected import BlockSelection, IndexSelection, KeySelection, NSASpec, SelectedSpec
from regard.cost.spec import HeadShape
from regard.errors import ArgumentError
from regard.masks import Causal, Mask, Window
from regard.nn.explain import (
    CallWeights,
    HeadMix,
    InputSteps,
    LayerRun,
    MixTerm,
    ProjectionQuery,
    first_rotary,
)
from regard.nn.mixer import Mixer, count_weights
from regard.nn.projections import Heads, Projection, adjust_query, select_form
from regard.ops.selection.blocks import Order, order
from regard.ops.selection.indexer import check_topk, index_mask, index_scores, indexer_loss
from regard.ops.selection.moba import check_moba, moba_mask
from regard.ops.selection.nsa import NSABlocks, ends, selection_mask, windows
from regard.ops.softmax import attend, attention_weights
from regard.span import Positions, Span, count
from regard.tap import place, tap


@runtime_checkable
class Selector(Protocol):
    """From queries, keys and what it remembered itself to the keys that each query reads."""

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """x [B,S,M] -> what a cache stores for it per position, beside keys and values; may be
        nothing.
        """

    def choose(
        self, q: Tensor, k: Tensor, x: Tensor, memory: Parts, positions: Positions, seen: Positions
    ) -> Mask:
        """A causal mask for this call: queries q [B,H,T,D] of x [B,T,M] at positions, keys k
        [B,G,S,D] at seen.
        """

    @property
    def spec(self) -> KeySelection:
        """What choosing costs, and how many keys it chooses."""


class MoBA(nn.Module):
    """The own block, and those past blocks whose mean key fits the query best:
    `regard.ops.selection.moba_mask`.

    Args:
        size: positions per block.
        topk: blocks per query and query head, the own one included.

    Raises:
        ArgumentError: size or topk is below 1.

    >>> MoBA(512, 3).spec.tokens(2048).value
    1536

    Source: Lu et al. 2025 (arXiv 2502.13189), section 2.2.
    """

    def __init__(self, size: int, topk: int) -> None:
        super().__init__()
        check_moba(size, topk)
        self.size, self.topk = size, topk

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Nothing: the means are of the keys."""
        return ()

    def choose(
        self, q: Tensor, k: Tensor, x: Tensor, memory: Parts, positions: Positions, seen: Positions
    ) -> Mask:
        """The mask of chosen blocks."""
        return moba_mask(
            q, k, size=self.size, topk=self.topk, q_positions=positions, k_positions=seen
        )

    @property
    def spec(self) -> BlockSelection:
        """The sizes of blocks and choice, for the cost."""
        return BlockSelection(self.size, self.topk)

    def extra_repr(self) -> str:
        """Block size and number."""
        return f"blocks of {self.size}, topk={self.topk}"


class Indexer(nn.Module):
    """The topk keys by a small score of its own: `regard.ops.selection.index_mask`.

    I_ts = sum_j w_tj relu(q_tj . k_s / sqrt(d)),  w_t = W_w x_t / sqrt(J)

    It learns from `regard.nn.selected.indexer_losses` alone: no gradient flows through the choice.

    Args:
        q: `Heads` that make J index queries of dim d.
        k: `Heads` that make one index key of dim d; a cache keeps it beside what the projection
            remembers.
        weight: a linear map [B,T,M] -> [B,T,J].
        topk: keys per query, for all heads together.

    Raises:
        ArgumentError: the heads do not fit one another, or topk is below 1.

    >>> indexer = Indexer(Heads(8, 4, 2), Heads(8, 1, 2), nn.Linear(8, 4, bias=False), topk=3)
    >>> indexer.spec.tokens(100)
    Quantity(value=3, formula='min(S, 3)')

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), section 2; the factors 1/sqrt(d) and 1/sqrt(J) are
    of its published code.
    """

    def __init__(self, q: Heads, k: Heads, weight: nn.Linear, *, topk: int) -> None:
        super().__init__()
        check_topk(topk)
        if k.heads != 1 or q.head_dim != k.head_dim or weight.out_features != q.heads:
            raise ArgumentError(
                f"index q is {q.extra_repr()}, k is {k.extra_repr()}, weights for "
                f"{weight.out_features} heads: k must be "
                f"1 heads of {q.head_dim}, and weight must give {q.heads}"
            )
        self.q, self.k, self.weight, self.topk = q, k, weight, topk

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """The index key [B,1,S,d]."""
        return (self.k(x, positions),)

    def parts(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Index queries [B,J,T,d], scaled by 1/sqrt(d), and weights [B,T,J], by 1/sqrt(J)."""
        q = self.q(x, positions) * self.q.head_dim**-0.5
        return q, self.weight(x) * self.q.heads**-0.5

    def choose(
        self, q: Tensor, k: Tensor, x: Tensor, memory: Parts, positions: Positions, seen: Positions
    ) -> Mask:
        """The mask of chosen keys."""
        with torch.no_grad():
            index_q, weight = self.parts(x, positions)
        return index_mask(
            index_q, memory[0], weight, topk=self.topk, q_positions=positions, k_positions=seen
        )

    @property
    def spec(self) -> IndexSelection:
        """The sizes of the index score and of the choice, for the cost."""
        return IndexSelection(self.q.heads, self.q.head_dim, self.topk)

    def extra_repr(self) -> str:
        """topk."""
        return f"topk={self.topk}"


class SelectedAttention(Mixer):
    """project -> remember -> recall -> choose -> attend -> output: `Attention` with a mask made
    from each call.

    mask = choose(q, k, x);  z = postprocess(attend(q, k, v, mask), x);
    out = output(z, heads joined)

    Args:
        project: a `Projection`, also one that keeps a latent.
        select: a `Selector`: `MoBA` or `Indexer`.
        output: a module [B,T,H*E] -> [B,T,M].
        scale: None is 1/sqrt(D).

    >>> from regard.nn import Heads, Separate
    >>> from regard.nn.selected import MoBA
    >>> project = Separate(Heads(8, 4, 2), Heads(8, 2, 2), Heads(8, 2, 2))
    >>> layer = SelectedAttention(project, MoBA(4, 2), nn.Linear(8, 8))
    >>> layer(torch.zeros(1, 9, 8)).shape
    torch.Size([1, 9, 8])
    """

    def __init__(
        self,
        project: Projection,
        select: Selector,
        output: nn.Module,
        *,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.project, self.select, self.output, self.scale = project, select, output, scale

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Attend from x [B,T,M] at its positions to the chosen tokens of x and of what the cache
        holds.
        """
        memory, seen = self.project.remember(x, positions), positions
        n = len(memory)
        memory = (*memory, *self.select.remember(x, positions))
        if cache is not None:
            if self.project.cache_unsafe_reason:
                raise ArgumentError(f"a cache was given, but {self.project.cache_unsafe_reason}")
            memory, seen = cache.update(memory, positions)
        project = select_form(self.project, x.shape[1], count(seen))
        q = tap("q", adjust_query(project, project.query(x, positions), positions, seen))
        k, v = project.recall(memory[:n], seen)
        k, v = tap("k", k), tap("v", v)
        mask = self.select.choose(q, k, x, memory[n:], positions, seen)
        z = attend(
            q,
            k,
            v,
            mask=mask,
            scale=self._scale,
            q_positions=positions,
            k_positions=seen,
            backend=backend,
        )
        z = tap("z", project.postprocess(z, x))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    @property
    def _scale(self) -> float:
        # by the dims of a head as defined: a form of the projection may have longer ones
        return self.project.shape.D**-0.5 if self.scale is None else self.scale

    def new_cache(self) -> Cache:
        """An empty cache that keeps everything: any token may be chosen later."""
        return Growing()

    @property
    def spec(self) -> SelectedSpec:
        """The cost of this layer: a cache holds all keys, and what the selector remembers."""
        shape, selection = self.project.shape, self.select.spec
        own = ((1, selection.values_per_token),) if selection.values_per_token else ()
        return SelectedSpec(count_weights(self), (*shape.parts, *own), shape.heads, selection)

    def describe(self, context: int = 4096) -> Description:
        """Describe the layer as every mechanism does, under the name of its selector."""
        return self.spec.describe(context, type(self.select).__name__)


def indexer_losses(
    layer: SelectedAttention,
    x: Float[Tensor, "B T M"],
    positions: Positions | None = None,
    *,
    chosen: bool = True,
) -> Float[Tensor, "B T"]:
    """The loss of each query that the indexer of a layer learns from, without a cache; its gradient
    reaches the indexer alone.

    Args:
        x, positions: as the layer takes them.
        chosen: compare over the keys that the indexer chose (the sparse stage), or over all past
            ones (the warm-up).

    Raises:
        ArgumentError: the layer's selector is no `Indexer`.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), equations 3 and 4.
    """
    select = layer.select
    if not isinstance(select, Indexer):
        raise ArgumentError(
            f"the layer selects by {type(select).__name__}; only an Indexer has a loss of its own"
        )
    positions = Span(0, x.shape[1]) if positions is None else positions
    x = x.detach()
    (key,) = select.remember(x, positions)
    with torch.no_grad():
        q = layer.project.query(x, positions)
        k, _ = layer.project.recall(layer.project.remember(x, positions), positions)
        mask = select.choose(q, k, x, (key,), positions, positions) if chosen else Causal()
        pattern = attention_weights(
            q, k, mask=mask, scale=layer._scale, q_positions=positions, k_positions=positions
        )
        visible = mask.block(positions, positions, device=x.device)[:, 0].expand(len(x), -1, -1)
    index_q, weight = select.parts(x, positions)
    return indexer_loss(index_scores(index_q, key, weight), pattern, visible)


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
        key_transform: a step on compressed keys at the position of their last token, such as a
            rotary; None is no step. The paper leaves open where positions enter; so a score depends
            on the distance only.
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
        key_transform: nn.Module | None = None,
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
        self.compress_key, self.compress_value, self.key_transform = (
            compress_key,
            compress_value,
            key_transform,
        )
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
        return (k if self.key_transform is None else self.key_transform(k, at)), v

    def gated(
        self, zs: Float[Tensor, "3 B H T E"], x: Float[Tensor, "B T M"]
    ) -> Float[Tensor, "B H T E"]:
        """The branches, each times its gate, a number per head and query."""
        gates = self.gate(x).sigmoid().unflatten(-1, (3, self.q.heads))  # [B,T,3,H]
        result: Float[Tensor, "B H T E"] = (zs * gates.permute(2, 0, 3, 1)[..., None]).sum(0)
        return result

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """The steps of the queries, and those of the branch's own keys and values; compressed keys
        are blocks and no tokens, and have none.
        """
        q = self.q.explain_steps(query.x, query.positions, "q")
        rotary, branch = first_rotary(self.q.steps), BRANCHES.index(query.branch)
        if query.branch == "compressed":
            return InputSteps(q, rotary=rotary, keys_are_blocks=True)
        keys, values = self.keys[branch], self.values[branch]
        assert isinstance(keys, Heads)
        assert isinstance(values, Heads)
        k = keys.explain_steps(query.memory, query.k_positions, "k")
        v = values.explain_steps(query.memory, query.k_positions, "v")
        return InputSteps(q, k, v, rotary)

    def explain_mix(
        self, run: LayerRun, calls: Sequence[CallWeights], here: int, head: int, row: int
    ) -> HeadMix:
        """The branches, each times its gate."""
        gates = self.gate(run.x[0, row]).sigmoid().unflatten(-1, (3, -1))[:, head].double()
        terms = tuple(
            MixTerm(
                call.branch,
                float(gates[BRANCHES.index(call.branch)]),
                float(call.weights[head].sum()),
                n == here,
            )
            for n, call in enumerate(calls)
        )
        return HeadMix(
            "three branches with keys and values of their own, each times its gate; a weight of "
            "one is no share of the whole",
            terms,
            None,
        )

    def new_cache(self) -> Cache:
        """An empty cache that keeps everything: any block may be selected later."""
        return Growing()

    def tokens(self, context: int) -> Quantity:
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
