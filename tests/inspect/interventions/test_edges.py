"""Edges: against a model written as a loop over its parts, and on a circuit made by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect import EdgeRuns, find_circuit, patch
from tests.inspect.planted import planted_model
from tests.inspect.small_model import difference, model, wide_model, wide_model_of

CLEAN, CORRUPT = torch.tensor([[5, 9, 2, 31, 9]]), torch.tensor([[5, 7, 2, 31, 9]])
H, G, D, T = 4, 2, 8, 5


def norm(module: Any, x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + module.eps).rsqrt() * module.weight


def by_loops(small: Any, ids: Tensor, other: dict[str, Tensor], cut: set[tuple[str, str]]) -> Any:
    """The model as a graph: each part reads the sum of what the parts before it sent, of the other
    run where the edge is cut. Returns the logits of the last token and what was sent.
    """
    decoder = small.decoder
    sent = {"embed": decoder.embed.embedding.weight[ids[0]]}

    def read(receiver: str) -> Tensor:
        parts = [other[s] if (s, receiver) in cut else x for s, x in sent.items()]
        return torch.stack(parts).sum(0)

    for i, block in enumerate(decoder.layers):
        project, new = block.attention.project, {}
        for h in range(H):
            g = h * G // H
            x = {n: read(f"layers.{i}.{n}.{h if n == 'q' else g}") for n in "qkv"}
            heads = {}
            for n, j in (("q", h), ("k", g), ("v", g)):
                w = getattr(project, n).linear.weight[j * D : (j + 1) * D]
                heads[n] = norm(block.attention_residual.norm, x[n]) @ w.T
            (rotary,) = project.q.steps
            q, k = (rotary(heads[n][None, None], torch.arange(T)[None])[0, 0] for n in "qk")
            scores = q @ k.T / D**0.5
            scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
            out = block.attention.output.weight[:, h * D : (h + 1) * D]
            new[f"layers.{i}.head.{h}"] = scores.softmax(-1) @ heads["v"] @ out.T
        sent |= new
        x = norm(block.feed_forward_residual.norm, read(f"layers.{i}.mlp"))
        f = block.feed_forward
        gated = torch.nn.functional.silu(x @ f.gate.weight.T) * (x @ f.up.weight.T)
        sent[f"layers.{i}.mlp"] = gated @ f.down.weight.T
    return norm(decoder.norm, read("logits"))[-1] @ decoder.head.weight.T, sent


def test_any_set_of_cut_edges_equals_the_loop() -> None:
    small = wide_model()
    runs = EdgeRuns(small, CLEAN, CORRUPT)
    _, other = by_loops(small, CORRUPT, {}, set())
    draw = torch.Generator().manual_seed(3)
    kept = [torch.rand(runs.exists.shape, generator=draw) > p for p in (0.0, 0.02, 0.2, 0.6, 1.0)]
    for each in (1, 9, 20):  # only late layers, which begin with known senders
        kept.append(torch.ones_like(kept[0]))
        kept[-1][-each:] = torch.rand(each, 16, generator=draw) > 0.5
    found = runs.logits(torch.stack(kept), last_only=True)
    values = []
    for mask, logits in zip(kept, found, strict=True):
        cut = {
            (runs.senders[s], runs.receivers[r])
            for r, s in (~mask & runs.exists).nonzero().tolist()
        }
        wanted, _ = by_loops(small, CLEAN, other, cut)
        assert float((logits[0, -1] - wanted).detach().abs().max()) < 1e-12
        values.append(float(wanted.detach()[3]))
    spread = sorted(values)
    assert min(b - a for a, b in itertools.pairwise(spread)) > 1e-5, "all differ"
    with torch.no_grad():
        assert (found[0] - small.forward(CLEAN)[:, -1:]).abs().max() < 1e-12
        assert (found[4] - small.forward(CORRUPT)[:, -1:]).abs().max() < 1e-12


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", ["gpt_neox", "gpt2", "deepseek_v2", "mistral", "granite", "phi"])
def test_all_edges_are_the_clean_run_and_none_the_corrupt_one(name: str) -> None:
    small = wide_model_of(name)
    runs = EdgeRuns(small, CLEAN, CORRUPT)
    kept = torch.stack([runs.exists, runs.exists, torch.zeros_like(runs.exists)])
    kept[1, 0, 0] = False
    found = runs.logits(kept)
    with torch.no_grad():
        clean, corrupt = small.forward(CLEAN), small.forward(CORRUPT)
    assert (found[0] - clean).abs().max() < 1e-9
    assert (found[2] - corrupt).abs().max() < 1e-9
    assert (clean - corrupt).abs().max() > 1e-3


def test_patching_of_edges_equals_the_loop() -> None:
    small = wide_model()
    _, clean = by_loops(small, CLEAN, {}, set())
    plain, _ = by_loops(small, CORRUPT, {}, set())
    base = float(plain[11] - plain[40])
    for receiver, name in (
        (("layers.2", 3, "q"), "layers.2.q.3"),
        (("layers.1", 2, "k"), "layers.1.k.1"),
        (("layers.1", 0, "mlp"), "layers.1.mlp"),
        (None, "logits"),
    ):
        table = patch(small, CLEAN, CORRUPT, difference, what="edges", receiver=receiver)
        assert table.rows[:2] == ("embed", "layers.0")
        shared = "the heads 2 to 3 of layers.1 read one k, so that it changes for all of them"
        assert [str(note) for note in table.notes] == [shared] * name.startswith("layers.1.k")
        for row, column in np.argwhere(~np.isnan(table.values)).tolist():
            place, last = table.rows[row], table.columns[column]
            sender = place if last == "embed" else f"{place}.mlp"
            sender = f"{place}.head.{last}" if last.isdigit() else sender
            logits, _ = by_loops(small, CORRUPT, clean, {(sender, name)})
            wanted = float(logits[11] - logits[40]) - base
            assert abs(table.values[row, column] - wanted) < 1e-12, (sender, name)
        assert np.nanmax(np.abs(table.values)) > 1e-5, "something is patched"
    chosen = patch(small, CLEAN, CORRUPT, difference, what="edges", layers=[1], heads=[2])
    whole = patch(small, CLEAN, CORRUPT, difference, what="edges")
    assert (chosen.rows, chosen.columns) == (("layers.1",), ("2", "mlp", "embed"))
    assert np.allclose(chosen.values[0, :2], whole.values[2, [2, 4]], rtol=0, atol=1e-9)


def test_the_planted_circuit_is_the_one_that_is_found() -> None:
    planted = planted_model()
    clean, corrupt = torch.tensor([[0, 4, 5, 6, 7, 4]]), torch.tensor([[0, 9, 5, 6, 7, 4]])
    found = find_circuit(planted, clean, corrupt, (5, 6), threshold=0.02)
    assert {(edge.sender, edge.receiver) for edge in found.edges} == {
        ("embed", "layers.0.v.0"),
        ("layers.0.head.0", "layers.1.k.0"),
        ("layers.1.head.0", "logits"),
    }
    assert 0.98 <= found.faithfulness <= 1.001
    assert abs(found.without - found.corrupt) < 0.02 * abs(found.clean - found.corrupt)
    every = EdgeRuns(planted, clean, corrupt)
    for edge in found.edges:  # negative control: the circuit without one of its edges is none
        kept = torch.zeros(1, *every.exists.shape, dtype=torch.bool)
        for other in found.edges:
            if other != edge:
                at = every.receivers.index(other.receiver), every.senders.index(other.sender)
                kept[(0, *at)] = True
        ((_, output),) = every.batches(kept)
        value = float(output[0, -1, 5] - output[0, -1, 6])
        assert abs(value - found.corrupt) < 1e-3


def test_a_circuit_of_random_weights_keeps_what_it_says() -> None:
    small = wide_model()
    found = find_circuit(small, CLEAN, CORRUPT, difference, threshold=0.2)
    _, other = by_loops(small, CORRUPT, {}, set())
    edges = {(edge.sender, edge.receiver) for edge in found.edges}
    runs = EdgeRuns(small, CLEAN, CORRUPT)
    cut = {(runs.senders[s], runs.receivers[r]) for r, s in runs.exists.nonzero().tolist()} - edges
    logits, _ = by_loops(small, CLEAN, other, cut)
    assert abs(float(logits[11] - logits[40]) - found.value) < 1e-12
    assert abs(found.faithfulness - 1) <= 0.2
    assert len(edges) < int(runs.exists.sum()) // 4
    circuit = [(runs.receivers.index(r), runs.senders.index(s)) for s, r in edges]
    without = torch.zeros(len(circuit), *runs.exists.shape, dtype=torch.bool)
    for mask, one in zip(without, circuit, strict=True):
        for other_edge in circuit:
            mask[other_edge] = other_edge != one
    for _, output in runs.batches(without):
        share = (float(difference(output)) - found.corrupt) / (found.clean - found.corrupt)
        assert abs(share - 1) > 0.2, "no edge of it can be cut"
    assert "edges keep" in str(found)
    assert "counted by key and value heads, which several heads read" in str(found)
    texts = ("to be or not to", "to do or not to")
    found = find_circuit(regard.load("tiny"), *texts, " be", threshold=0.5)
    assert abs(found.faithfulness - 1) <= 0.5, "the first circuit that keeps enough keeps 154 %"


def test_what_has_no_edges_is_refused() -> None:
    small = model()
    with pytest.raises(ArgumentError, match="edges need blocks"):
        EdgeRuns(wide_model_of("gemma2"), CLEAN, CORRUPT)
    with pytest.raises(ArgumentTypeError, match="edges are those of a Model"):
        EdgeRuns(torch.nn.Linear(2, 2), CLEAN, CORRUPT)
    with pytest.raises(ArgumentError, match="same number of tokens"):
        EdgeRuns(small, CLEAN, CORRUPT[:, 1:])
    with pytest.raises(ArgumentError, match="there is no receiver"):
        patch(small, CLEAN, CORRUPT, 3, what="edges", receiver=("layers.9", 0, "q"))
    with pytest.raises(ArgumentError, match="the same"):
        find_circuit(small, CLEAN, CLEAN, 3)
    with pytest.raises(ArgumentError, match="threshold"):
        find_circuit(small, CLEAN, CORRUPT, 3, threshold=0.0)
