"""Runs of a decoder in which every edge between two of its parts is mask or cut: path patching by
edges, and circuits that are found by cutting all others.

A sender is the embedding, a head or a feed-forward layer; a receiver is the query of a head, a key
or value head, a feed-forward layer or the logits. A receiver reads the sum of all senders before
it, so that one sender can be replaced for one receiver alone:

    input_r = sum over senders s of  (mask: s of this run;  cut: s of the other run)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.interventions.circuits import output_map
from regard.inspect.model_run import AnyModel, Input, encode_ids, prepare_run
from regard.models.model import Model
from regard.nn.attention.attention import Attention
from regard.nn.blocks.blocks import (
    Block,
    ParallelBlock,
    PreNorm,
    SandwichNorm,
    ScaledPreNorm,
    SharedNormBlock,
)
from regard.span import Positions, Span
from regard.tracing import Trace

BATCH_NUMBERS = 1 << 24
"""How many numbers the senders of one batch of runs have, at most."""


class _Layer(NamedTuple):
    """One block: what a head adds `[H, E, M]`, the factor on its feed-forward layer, and where its
    senders and its receivers begin.
    """

    block: Any
    output: Tensor
    factor: float
    begin: int
    receivers: int
    is_parallel: bool
    heads: int
    groups: int

    @property
    def mlp(self) -> int:
        """The index of the feed-forward layer among the senders."""
        return self.begin + self.heads

    @property
    def reading_mlp(self) -> int:
        """The index of the feed-forward layer among the receivers, behind q, k and v."""
        return self.receivers + self.heads + 2 * self.groups


class _Run(NamedTuple):
    """What every sender added in a run `[S, B, T, M]`, the states that receivers read, and queries,
    keys and values of each layer.
    """

    sent: Tensor
    streams: tuple[tuple[Tensor, Tensor], ...]
    heads: tuple[dict[str, Tensor], ...]
    last: Tensor
    logits: Tensor


def _layers_of(model: AnyModel) -> list[_Layer]:
    """Return the layers of a decoder in which heads and layers add to one stream."""
    if not isinstance(model, Model):
        raise ArgumentTypeError(
            f"model is {type(model).__name__}; edges are those of a Model: regard.load reads "
            "checkpoints of transformers as one",
            argument="model",
        )
    if model.decoder.shares_between_layers:
        raise ArgumentError("layers share keys or values, which are edges that this does not cut")
    layers: list[_Layer] = []
    begin, receivers = 1, 0
    for i, module in enumerate(model.decoder.layers):
        block: Any = module
        paths = [block.attention_residual, block.feed_forward_residual]
        bad = [p for p in paths if not isinstance(p, PreNorm) or isinstance(p, SandwichNorm)]
        if bad or type(block) not in (Block, ParallelBlock, SharedNormBlock):
            name = type(bad[0] if bad else block).__name__
            raise ArgumentError(
                f"layers.{i} adds by {name}; edges need blocks that add what each head wrote as it "
                "is (pre-norm): use patch(what='paths'), which takes every block"
            )
        attention = block.attention
        if not isinstance(attention, Attention) or attention.project.adds_bias:
            raise ArgumentError(
                f"the attention of layers.{i} reads its states beside q, k and v, so that its "
                "edges are not those of its heads"
            )
        output = output_map(attention, f"layers.{i}").to(model.device)
        own, mlp = (p.scale if isinstance(p, ScaledPreNorm) else 1.0 for p in paths)
        parallel = isinstance(block, ParallelBlock)
        G = attention.project.shape.G
        layers.append(_Layer(block, own * output, mlp, begin, receivers, parallel, len(output), G))
        begin, receivers = layers[-1].mlp + 1, layers[-1].reading_mlp + 1
    return layers


class _Changes:
    """How far all senders are from the other run `[C, S, B, T, M]`, for each mask `[C, R, S]` of a
    batch of runs; 0 until it is set.
    """

    def __init__(self, mask: Tensor, other: Tensor, inputs: list[Tensor] | None) -> None:
        self.mask, self.inputs = mask, inputs
        self.senders = other.new_zeros(len(mask), *other.shape)

    def read(self, other: Tensor, rows: Tensor | list[int]) -> Tensor:
        """Return what receivers read, `[C, r, B, T, M]`, from the states of the other run."""
        mask = self.mask[:, rows]
        senders = mask.flatten(0, 1).any(0).nonzero()[:, 0]
        change = self.senders[:, senders].flatten(2)
        # [C, r, S] x [C, S, B T M] -> [C, r, B, T, M]
        moved = torch.bmm(mask[:, :, senders].to(change), change)
        x: Tensor = other + moved.unflatten(2, other.shape)
        if self.inputs is not None:
            x = x.requires_grad_() if not x.requires_grad else x
            x.retain_grad()
            self.inputs.append(x)
        return x


class EdgeRuns:
    """Runs of a model on one input in which edges are cut: their senders come from another input.

    Args:
        model: a `Model` with blocks that add what each part wrote as it is.
        start: the input of the runs.
        other: the input whose senders replace those of cut edges, with as many tokens.

    Attributes:
        run: the run of `start`, without cut edges.
        senders: names such as "embed", "layers.0.head.3" and "layers.0.mlp", in their order.
        receivers: names such as "layers.0.q.3", "layers.0.k.1" (a key head), "layers.0.v.1",
            "layers.0.mlp" and "logits".
        exists: whether a sender stands before a receiver, `[R, S]`.

    Raises:
        ArgumentError: the inputs have other numbers of tokens, or a block adds in another way.
        ArgumentTypeError: the model is another one.

    >>> import regard
    >>> runs = EdgeRuns(regard.load("tiny"), "to be or not to", "to do or not to")
    >>> len(runs.senders), len(runs.receivers), tuple(runs.logits(runs.exists[None]).shape[:3])
    (37, 69, (1, 1, 5))

    Source: Goldowsky-Dill et al. 2023 (arXiv 2304.05969); Conmy et al. 2023 (arXiv 2304.14997),
    section 3.
    """

    def __init__(self, model: AnyModel, start: Input, other: Input) -> None:
        self.layers = _layers_of(model)
        assert isinstance(model, Model)
        self.model, self.decoder = model, model.decoder
        self.run = prepare_run(model, start)
        (ids, positions), (other_ids, _) = encode_ids(model, start), encode_ids(model, other)
        if ids.shape != other_ids.shape:
            raise ArgumentError(
                f"the inputs are {tuple(ids.shape)} and {tuple(other_ids.shape)}; both must "
                "have the same number of tokens, so that positions correspond",
                argument="corrupt",
            )
        self.positions: Positions = Span(0, ids.shape[1]) if positions is None else positions
        self.senders = ["embed"]
        self.receivers: list[str] = []
        reads: list[int] = []
        for i, layer in enumerate(self.layers):
            place, before = f"layers.{i}", layer.begin
            self.senders += [*(f"{place}.head.{h}" for h in range(layer.heads)), f"{place}.mlp"]
            heads = (("q", layer.heads), ("k", layer.groups), ("v", layer.groups))
            names = [f"{place}.{tap}.{h}" for tap, count in heads for h in range(count)]
            self.receivers += [*names, f"{place}.mlp"]
            reads += [*[before] * len(names), before if layer.is_parallel else layer.mlp]
        self.receivers.append("logits")
        reads.append(len(self.senders))
        self.exists = torch.arange(len(self.senders)) < torch.tensor(reads)[:, None]
        self.start, self.other = self._whole(ids), self._whole(other_ids)

    def __repr__(self) -> str:
        sizes = f"senders={len(self.senders)}, receivers={len(self.receivers)}"
        return f"EdgeRuns({sizes}, tokens={self.start.sent.shape[2]})"

    @torch.no_grad()
    def _whole(self, ids: Tensor) -> _Run:
        """Run an input, and keep what every sender added and every receiver read."""
        names = ("embed", "q", "k", "v", "z", "out", "mlp", "residual")
        with Trace(*names, missing="ignore") as trace:
            logits = self.decoder(ids, self.positions)
        x = trace["embed"]
        sent, streams, heads = [x[None]], [], []
        for i, layer in enumerate(self.layers):
            place, path = f"layers.{i}", layer.block.attention_residual
            sent.append(_written(trace[f"{place}.z"], layer.output))
            sent.append(layer.factor * trace[f"{place}.mlp"][None])
            own = path.scale if isinstance(path, ScaledPreNorm) else 1.0
            streams.append((x, x if layer.is_parallel else x + own * trace[f"{place}.out"]))
            heads.append({tap: trace[f"{place}.{tap}"] for tap in "qkv"})
            x = trace[f"{place}.residual"]
        return _Run(torch.cat(sent), tuple(streams), tuple(heads), x, logits)

    def batches(self, mask: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Generate the number and the last logits `[B, 1, V]` of the run of each mask `[C, R, S]`.

        Args:
            mask: masks as for `logits`.

        Returns:
            An iterator, in the order of the masks.
        """
        size = max(1, BATCH_NUMBERS // self.start.sent.numel())
        for begin in range(0, len(mask), size):
            part = mask[begin : begin + size]
            with torch.no_grad():
                outputs = self.logits(part, last_only=True)
            yield from enumerate(outputs, begin)

    def logits(
        self,
        mask: Bool[Tensor, "C R S"],
        *,
        last_only: bool = False,
        embedded: float = 1.0,
        inputs: list[Tensor] | None = None,
    ) -> Float[Tensor, "C B n V"]:
        """Run the input once for each mask.

        Layers in which no edge is cut, and none before, are not computed again, and what no kept
        edge reaches is that of the other run.

        Args:
            mask: whether each edge is kept, `[C, R, S]`; where no edge exists, it means nothing.
            last_only: whether the logits of the last position suffice.
            embedded: how far the embedding goes from the other input (0) to that of the run (1).
            inputs: a list that gets the inputs of the receivers `[C, r, B, T, M]`, for autograd.

        Returns:
            The logits `[C, B, n, V]`.
        """
        C, (S, B) = len(mask), self.start.sent.shape[:2]
        change = self.start.sent - self.other.sent
        cut = (~mask & self.exists).any(0).any(1)  # [R]
        mask = mask & self.exists
        reads = mask.any(0).any(1)  # [R]
        first = len(self.layers) if embedded == 1 and inputs is None else 0
        for i, layer in enumerate(self.layers[:first]):
            if bool(cut[layer.receivers : layer.reading_mlp + 1].any()):
                first = i
                break
        known = self.layers[first].begin if first < len(self.layers) else S
        changes = _Changes(mask, self.other.sent, inputs)
        changes.senders[:, :known] = embedded * change[:known]
        for i, layer in enumerate(self.layers[first:], first):
            begin, mlp = layer.receivers, layer.reading_mlp
            stream, middle = self.other.streams[i]
            rows = begin + reads[begin:mlp].nonzero()[:, 0]
            if len(rows):
                x = changes.read(stream, rows)
                z = self._attend(layer, x, rows - begin, self.other.heads[i])
                written = _written(z, layer.output).unflatten(1, (C, B)).transpose(0, 1)
                own = slice(layer.begin, layer.mlp)
                changes.senders[:, own] = written - self.other.sent[own]
            if reads[mlp]:
                x = changes.read(middle, [mlp])
                y = self._feed_forward(layer, x[:, 0].flatten(0, 1)).unflatten(0, (C, B))
                changes.senders[:, layer.mlp] = layer.factor * y - self.other.sent[layer.mlp]
        x = changes.read(self.other.last, [len(mask[0]) - 1])[:, 0]
        return self._predict(x[:, :, -1:] if last_only else x)

    def _predict(self, x: Tensor) -> Tensor:
        """Return the logits `[C, B, n, V]` of states before the last norm."""
        logits = self.decoder.require_head()(self.decoder.norm(x.flatten(0, 1)))
        result: Tensor = logits.unflatten(0, x.shape[:2])
        return result

    def _attend(self, layer: _Layer, x: Tensor, rows: Tensor, other: dict[str, Tensor]) -> Tensor:
        """Return z `[C B, H, T, E]` of heads; the receivers `rows` read the states
        `[C, r, B, T, M]`, and all others have the queries, keys and values of the other run.
        """
        C, B = len(x), x.shape[2]
        normed = layer.block.attention_residual.norm(x.flatten(0, 2)).unflatten(0, (C, -1, B))
        edits: dict[str, Any] = {}
        for tap, begin in (("q", 0), ("k", layer.heads), ("v", layer.heads + layer.groups)):
            y = other[tap].repeat(C, 1, 1, 1)
            own = (rows >= begin) & (rows < begin + y.shape[1])
            if bool(own.any()):
                heads = rows[own] - begin
                new = self._project(layer, normed[:, own].flatten(0, 2), tap)
                # [C r B, n, T, D] -> [r, C, B, T, D], head heads[i] of row i -> [C B, r, T, D]
                new = new.unflatten(0, (C, -1, B))[:, range(len(heads)), :, heads]
                y = y.index_copy(1, heads, new.movedim(0, 2).flatten(0, 1))
            edits[tap] = lambda _, y=y: y
        with Trace("z", edit=edits, gradients=x.requires_grad) as trace:
            layer.block.attention(normed[:, 0].flatten(0, 1), self._positions(C * B), None)
        return trace["z"]

    def _project(self, layer: _Layer, normed: Tensor, tap: str) -> Tensor:
        """Return queries, keys or values `[N, n, T, D]` of normed states `[N, T, M]`."""
        project = layer.block.attention.project.select_form(normed.shape[1], normed.shape[1])
        positions = self._positions(len(normed))
        if tap == "q":
            query = project.query(normed, positions)
            q: Tensor = project.adjust_query(query, positions, positions)
            return q
        k, v = project.recall(project.remember(normed, positions), positions)
        chosen: Tensor = k if tap == "k" else v
        return chosen

    @torch.no_grad()
    def received(self, layer: int, head: int, tap: str) -> Tensor:
        """Return what a receiver computes if the edge from one sender is cut, for each sender.

        Args:
            layer: index of the layer.
            head: query head; it is not used for "mlp".
            tap: "q", "k" or "v" of the head or its group, or "mlp".

        Returns:
            The head's `[S, B, T, D]`, or the output of the feed-forward layer `[S, B, T, M]`, for
            the senders before it.
        """
        own, is_mlp = self.layers[layer], tap == "mlp"
        count = own.mlp if is_mlp and not own.is_parallel else own.begin
        change = (self.other.sent - self.start.sent)[:count]
        x = (self.start.streams[layer][is_mlp] + change).flatten(0, 1)
        received: Tensor
        if is_mlp:
            received = self._feed_forward(own, x)
        else:
            heads = self._project(own, own.block.attention_residual.norm(x), tap)
            received = heads[:, head * heads.shape[1] // own.heads]
        # [S B, T, D] -> [S, B, T, D]
        each_sender: Tensor = received.unflatten(0, change.shape[:2])
        return each_sender

    @torch.no_grad()
    def received_logits(self) -> Tensor:
        """Return the last logits `[S, B, 1, V]` if the edge from one sender to them is cut.

        Returns:
            The logits, for each sender.
        """
        return self._predict((self.start.last + self.other.sent - self.start.sent)[:, :, -1:])

    def _feed_forward(self, layer: _Layer, x: Tensor) -> Tensor:
        """Return the output `[C B, T, M]` of the feed-forward layer for states before its norm."""
        block = layer.block
        shared = isinstance(block, SharedNormBlock)
        norm = (block.attention_residual if shared else block.feed_forward_residual).norm
        y: Tensor = block.feed_forward(norm(x))
        return y

    def _positions(self, rows: int) -> Positions:
        """Return the positions of so many rows, a multiple of the rows of the input."""
        if isinstance(self.positions, Span):
            return self.positions
        return self.positions.repeat(rows // len(self.positions), 1)


def _written(z: Tensor, output: Tensor) -> Tensor:
    """Return what each head adds, `[H, B, T, M]`, for its output z `[B, H, T, E]`."""
    return torch.einsum("bhte,hem->hbtm", z, output.to(z))
