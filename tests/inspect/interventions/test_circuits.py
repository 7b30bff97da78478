"""QK and OV circuits, copying and composition scores: against dense matrices in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard import Trace
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect import (
    FactoredMatrix,
    composition_scores,
    copying_scores,
    head_circuits,
    vocabulary_product,
)
from tests.inspect.planted import INDUCTION_HEAD, NAME_MOVER_HEAD, planted_model
from tests.inspect.small_model import model

IDS = torch.tensor([[5, 9, 2, 31, 9]])
H, G, D, M = 4, 2, 8, 32


def weights(small: Any, layer: int) -> dict[str, Tensor]:
    """The matrices of a layer of the small model with the gain of its norm, from its parameters."""
    block = small.decoder.layers[layer]
    gain = block.attention_residual.norm.weight.double()[:, None]
    project = block.attention.project
    found = {n: gain * getattr(project, n).linear.weight.double().T for n in "qkv"}
    return {**found, "o": block.attention.output.weight.double().T}


def rotation(distance: int) -> Tensor:
    """The matrix R for which q R k^T is the rotated product, of halves with base 10000."""
    angle = distance * 10000.0 ** (-torch.arange(0, D, 2).double() / D)
    c, s = torch.diag(angle.cos()), torch.diag(angle.sin())
    return torch.cat([torch.cat([c, s], 1), torch.cat([-s, c], 1)])


def dense(small: Any, layer: int, h: int, distance: int) -> tuple[Tensor, Tensor]:
    w, own, group = weights(small, layer), slice(h * D, (h + 1) * D), h * G // H
    theirs = slice(group * D, (group + 1) * D)
    qk = w["q"][:, own] @ rotation(distance) @ w["k"][:, theirs].T / D**0.5
    return qk, w["v"][:, theirs] @ w["o"][own]


def test_factors_have_the_numbers_of_the_dense_matrix() -> None:
    draw = torch.Generator().manual_seed(1)
    left, right = (torch.randn(9, 3, generator=draw).double() for _ in range(2))
    product = FactoredMatrix(left, right.T)
    whole = left @ right.T
    assert abs(product.norm() - float(whole.norm())) < 1e-12
    assert (product.singular_values() - torch.linalg.svdvals(whole)[:3]).abs().max() < 1e-12
    wanted = torch.linalg.eigvals(whole)
    wanted = wanted[wanted.abs().argsort(descending=True)][:3]
    assert (product.eigenvalues().abs() - wanted.abs()).abs().max() < 1e-12
    assert abs(product.eigenvalues().sum() - whole.trace()) < 1e-12
    with pytest.raises(ArgumentError, match="only a square one"):
        FactoredMatrix(left, right[:4].T).eigenvalues()


def test_the_circuits_of_a_head_are_the_dense_matrices() -> None:
    small = model()
    for layer, h, distance in ((0, 0, 0), (1, 3, 2), (2, 1, 5)):
        found = head_circuits(small, layer, h, distance=distance)
        qk, ov = dense(small, layer, h, distance)
        assert found.qk is not None
        assert (found.qk.matrix() - qk).abs().max() < 1e-6 * qk.abs().max()  # angles in fp32
        assert (found.ov.matrix() - ov).abs().max() < 1e-9 * ov.abs().max()
        other = dense(small, layer, h, distance + 1)[0]
        assert (found.qk.matrix() - other).abs().max() > 0.05 * qk.abs().max()
        other = dense(small, layer, (h + 2) % H, distance)[1]
        assert (found.ov.matrix() - other).abs().max() > 0.05 * ov.abs().max()


def test_circuits_give_the_scores_and_outputs_of_a_run() -> None:
    """With the scale of the norm, QK gives the scores of a run and OV what is added."""
    small = model()
    small.decoder.double()
    names = ("embed", "layers.0.scores", "layers.0.pattern", "layers.0.out")
    with Trace(*names) as trace, torch.no_grad():
        small.forward(IDS)
    x = trace["embed"][0]
    eps = small.decoder.layers[0].attention_residual.norm.eps
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    out = torch.zeros(5, M).double()
    for h in range(H):
        for i in range(5):
            for j in range(i + 1):
                qk = head_circuits(small, 0, h, distance=i - j).qk
                assert qk is not None
                score = normed[i] @ qk.left @ (qk.right @ normed[j])
                assert abs(score - trace["layers.0.scores"][0, h, i, j]) < 1e-5
        ov = head_circuits(small, 0, h).ov
        out += trace["layers.0.pattern"][0, h] @ normed @ ov.left @ ov.right
    assert (out - trace["layers.0.out"][0]).abs().max() < 1e-8


def test_copying_scores_are_those_of_the_matrix_of_the_vocabulary() -> None:
    small = model()
    small.decoder.double()
    decoder: Any = small.decoder
    E, U = decoder.embed.embedding.weight, decoder.norm.weight[:, None] * decoder.head.weight.T
    assert (vocabulary_product(small) - U @ E).abs().max() < 1e-9 * (U @ E).abs().max()
    table = copying_scores(small)
    for layer, h in ((0, 0), (2, 3)):
        values = torch.linalg.eigvals(E @ dense(small, layer, h, 0)[1] @ U)
        wanted = float(values.real.sum() / values.abs().sum())
        assert abs(table.values[layer, h] - wanted) < 1e-6
        values = torch.linalg.eigvals(E @ dense(small, layer, h, 0)[1].T @ U)
        assert abs(float(values.real.sum() / values.abs().sum()) - wanted) > 1e-3
    assert copying_scores(planted_model()).values[INDUCTION_HEAD] == pytest.approx(1)
    assert copying_scores(planted_model()).values[NAME_MOVER_HEAD] == pytest.approx(1)


def test_composition_scores_are_those_of_dense_matrices() -> None:
    small = model()
    for through in ("q", "k", "v"):
        table = composition_scores(small, through, distance=2)  # type: ignore[arg-type]
        assert table.rows[5] == table.columns[5] == "layers.1.head.1"
        assert np.isnan(table.values[4:8, 4:8]).all(), "heads of one layer do not compose"
        assert np.isnan(table.values[8:, :8]).all()
        for a, b in ((1, 6), (5, 11), (0, 8)):
            written = dense(small, a // H, a % H, 0)[1]
            qk, ov = dense(small, b // H, b % H, 2)
            read = {"q": qk, "k": qk.T, "v": ov}[through]
            wanted = float((written @ read).norm() / (written.norm() * read.norm()))
            assert abs(table.values[a, b] - wanted) < 1e-6
            other = float((written @ read.T).norm() / (written.norm() * read.norm()))
            assert abs(other - wanted) > 1e-4


def test_the_planted_induction_head_reads_the_previous_token_head_by_its_keys() -> None:
    planted = planted_model()
    by_key, by_query = (composition_scores(planted, x).values for x in ("k", "q"))  # type: ignore[arg-type]
    assert by_key[0, 4] > 0.2
    assert by_key[1, 4] == 0, "the duplicate head writes nothing"
    assert by_query[0, 4] == 0, "its queries read the token itself"


def test_what_has_no_such_matrix_is_refused() -> None:
    small = regard.load("tiny")
    with pytest.raises(ArgumentError, match="head is 8; there are 8 heads"):
        head_circuits(small, 0, 8)
    with pytest.raises(ArgumentError, match="distance is -1"):
        head_circuits(small, 0, 0, distance=-1)
    with pytest.raises(ArgumentError, match="through"):
        composition_scores(small, "z")  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="model is Linear"):
        head_circuits(torch.nn.Linear(2, 2), 0, 0)  # type: ignore[arg-type]
