"""What the outline of attention (the fifth note) gets wrong, done right.

docs/seeds.md lists each error.
"""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import regard
from regard import masks, positions
from regard.memory import infini_attention
from regard.nn import RMSNorm
from regard.nn.variants import VARIANTS, mha
from regard.ops import infini_attention as compressive_memory
from regard.positions import NTK, DynamicNTK, YaRN, rope_frequencies

# --- whose method, which paper

PAPERS = [
    (positions.YaRN, "2309.00071"),
    (positions.NTK, "2309.00071"),
    (positions.rotate, "2104.09864"),
    (positions.critical_dimension, "2310.05209"),
    (infini_attention, "2404.07143"),
    (masks.Strided, "1904.10509"),
    (masks.BigBird, "2007.14062"),
    (masks.Global, "2004.05150"),
]


@pytest.mark.parametrize(("what", "paper"), PAPERS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_method_names_its_own_paper(what: object, paper: str) -> None:
    cited = set(re.findall(r"arXiv (\d{4}\.\d{5})", inspect.getdoc(what) or ""))
    assert paper in cited
    assert not cited & ({number for _, number in PAPERS} - {paper})


def test_the_catalogue_names_the_papers_too() -> None:
    for name, paper in (
        ("infini", "2404.07143"),
        ("bigbird", "2007.14062"),
        ("longformer", "2004.05150"),
        ("sparse_strided", "1904.10509"),
        ("alibi", "2108.12409"),
    ):
        assert paper in VARIANTS[name].source


# --- four scalings that are four methods


def test_yarn_interpolates_by_parts_and_warms_the_softmax() -> None:
    D, base, trained, s = 128, 10000.0, 4096, 16.0
    plain = [base ** (-2 * i / D) for i in range(D // 2)]
    found = rope_frequencies(D, base=base, scaling=YaRN(s, trained))
    ratio = [float(x) / p for x, p in zip(found.inv_freq, plain, strict=True)]
    turns = [trained * p / (2 * math.pi) for p in plain]
    for r, t in zip(ratio, turns, strict=True):
        if t > 40:
            assert r == pytest.approx(1, rel=1e-12), "fast pairs stay"
        if t < 0.8:
            assert r == pytest.approx(1 / s, rel=1e-12), "slow pairs are interpolated"
    assert any(1.1 / s < r < 0.9 for r in ratio), "and some in between"
    assert found.rotary_factor == pytest.approx(0.1 * math.log(s) + 1, rel=1e-15)
    ntk = rope_frequencies(D, base=base, scaling=NTK(s))
    assert ntk.rotary_factor == 1
    assert float(ntk.inv_freq[0]) == 1
    assert float(ntk.inv_freq[-1]) == pytest.approx(plain[-1] / s, rel=1e-12)
    assert abs(float(ntk.inv_freq[32]) / plain[32] - ratio[32]) > 0.05


def test_ntk_and_dynamic_ntk_are_two_methods() -> None:
    D, base, trained = 128, 10000.0, 2048
    plain = rope_frequencies(D, base=base).inv_freq
    static, dynamic = NTK(4.0), DynamicNTK(4.0, trained)
    short = rope_frequencies(D, base=base, scaling=dynamic, length=trained).inv_freq
    assert torch.equal(short, plain), "dynamic: nothing changes within the trained length"
    assert float(
        (rope_frequencies(D, base=base, scaling=static).inv_freq / plain)[-1]
    ) == pytest.approx(0.25)
    lengths = [
        rope_frequencies(D, base=base, scaling=dynamic, length=n).inv_freq[-1] for n in (4096, 8192)
    ]
    assert float(lengths[1]) < float(lengths[0]) < float(plain[-1])


# --- the width of the model is no product


@pytest.mark.parametrize(
    ("M", "H", "D"),
    [(3072, 16, 256), (1024, 16, 128), (5120, 32, 128)],
    ids=["Gemma 7B", "Qwen3 0.6B", "Mistral Nemo"],
)
def test_heads_need_not_multiply_to_the_width(M: int, H: int, D: int) -> None:
    assert H * D != M
    m, d = M // 64, D // 64  # the same shape, 64 times narrower
    layer = mha(m, H, head_dim=d)
    assert layer.project.q.linear.weight.shape == (H * d, m)
    assert layer.output.weight.shape == (m, H * d)
    assert layer.project.shape[:3] == (H, H, d)
    assert layer(torch.randn(1, 3, m)).shape == (1, 3, m)


# --- norms and softmax as torch has them


def test_layer_norm_and_softmax_need_what_the_note_leaves_out() -> None:
    with pytest.raises(TypeError, match="normalized_shape"):
        nn.LayerNorm(bias=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        torch.softmax()  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        torch.softmax(torch.zeros(3))  # type: ignore[call-overload]
    assert [name for name, _ in RMSNorm(8).named_parameters()] == ["weight"], "no bias"
    assert [name for name, _ in nn.LayerNorm(8, bias=True).named_parameters()] == ["weight", "bias"]


# --- what a compressive memory loses


def test_random_keys_recall_close_to_the_mean_of_all_values() -> None:
    n, D, E = 512, 64, 32
    k = torch.randn(1, 1, n, D, dtype=torch.float64)
    v = torch.randn(1, 1, n, E, dtype=torch.float64)
    state = compressive_memory.write(k, v, compressive_memory.empty_state(k, v))
    read = compressive_memory.retrieve(k, state).values[0, 0]
    mean, own = v[0, 0].mean(0), v[0, 0]
    to_mean, to_own = (read - mean).norm(dim=-1), (read - own).norm(dim=-1)
    assert bool((10 * to_mean < to_own).all()), "every one of 512 stored values"
    # attention over the same keys finds each of them
    exact = regard.attend(k, k, v, scale=10.0)[0, 0]
    assert bool(((exact - own).norm(dim=-1) < 1e-6).all())


def test_an_open_gate_is_no_free_addition() -> None:
    """A gate that was not trained with the memory replaces a part of attention by the mean of the
    past.
    """
    q, k, v = torch.randn(3, 1, 2, 64, 16, dtype=torch.float64).unbind()
    local = [
        infini_attention(
            q, k, v, gate=torch.full((2,), gate, dtype=torch.float64), segment=16, empty="skip"
        )[0]
        for gate in (-1e4, 0.0)
    ]
    first, later = (local[0] - local[1]).abs().split([16, 48], 2)
    assert not first.any(), "nothing to read yet"
    assert float(later.max()) > 0.5
    # what it mixes in is far from what softmax over the same past would find
    past = regard.attend(q[:, :, 48:], k[:, :, :48], v[:, :, :48], scale=4.0)
    read = 2 * local[1][:, :, 48:] - local[0][:, :, 48:]  # sigmoid(0) is one half
    mean = v[:, :, :48].mean(2, keepdim=True)
    assert float((read - mean).norm()) < 0.5 * float((past - mean).norm())


# --- names


def test_the_names_are_spelt_right(root: Path) -> None:
    wrong = re.compile(r"\b(Attition|Normalzation|Postion|AliBi)\b")
    assert wrong.search("AliBi and Postion")
    pages = [root / "README.md", *(root / "src").rglob("*.py"), *(root / "docs").glob("*.md")]
    found = [
        p.name
        for p in pages
        if not p.name.startswith("seeds.") and wrong.search(p.read_text("utf-8"))
    ]
    assert found == []
