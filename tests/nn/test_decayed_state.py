"""Layers with decayed sums and kernels of the score, written out: projections, sums over pairs,
norm and gate by hand. The caches, padding and precision of all are tested in test_catalogue.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.masks import Document
from regard.nn import variants
from regard.nn.blocks.norms import HeadNorm, JoinedHeadsRMSNorm, RMSNorm
from regard.nn.recurrence import decays as rules
from regard.nn.recurrence.projections import TokenShiftQKV
from tests.nn.catalogue import DIM, example, in_chunks, randomize, tokens
from tests.oracles import decayed

T, ALL = 11, range(11)
Pair = Callable[[Any, Tensor, Tensor, Tensor, Tensor, int], Tensor]


def gated_pairs(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Gated linear attention of one head as a sum over pairs."""
    out = torch.zeros(len(q), v.shape[1], dtype=torch.float64)
    for i in range(len(q)):
        for j in range(i + 1):
            out[i] += (q[i] * k[j] * g[j + 1 : i + 1].sum(0).exp()).sum() * v[j]
    return out


def hgrn2(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, h: int) -> Tensor:
    f = m.rule.lower_bound + (1 - m.rule.lower_bound) * k.sigmoid()
    return gated_pairs(q / math.sqrt(8), 1 - f, v, f.log())


def lightnet(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, h: int) -> Tensor:
    """In each key channel a softmax over the past."""
    rows = []
    for i in ALL:
        weights = k[: i + 1].softmax(0)  # [i + 1, D]
        rows.append((q[i] * weights).sum(1) / math.sqrt(8) @ v[: i + 1])
    return torch.stack(rows)


def rwkv6(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, h: int) -> Tensor:
    rate = m.rule.decay + m.rule.up(torch.tanh(m.rule.down(x)))
    g = -rate.unflatten(-1, (4, 8))[:, h].exp()
    return decayed.rwkv6(q, k, v, g, m.rule.bonus[h], ALL)


def rwkv4(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, h: int) -> Tensor:
    return q.sigmoid() * decayed.rwkv4(k, v, -m.rule.decay[h].exp(), m.rule.bonus[h], ALL)


def mamba2(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, h: int) -> Tensor:
    step = F.softplus(m.rule.linear(x)[:, h] + m.rule.dt_bias[h])
    rate, skip = m.rule.A_log[h].exp().item(), m.rule.skip[h].item()
    return decayed.mamba2(q, k, v, step.detach(), rate, skip, ALL)


def log_linear(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, h: int) -> Tensor:
    step = F.softplus(m.rule.linear(x)[:, h] + m.rule.dt_bias[h])[:, None]
    logits = m.rule.level_scale[h] * m.rule.level_linear(x).unflatten(-1, (4, 4))[:, h]
    g, skip = -m.rule.A_log[h].exp() * step, m.rule.skip[h].item()
    scale = math.sqrt(q.shape[1])
    return decayed.log_linear(scale * q, k, step * v, g, (1 + logits.exp()).log(), ALL) + skip * v


def mlstm(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, h: int) -> Tensor:
    write, forget = (
        15 * torch.tanh(gate(x)[:, h] / 15) for gate in (m.rule.input_gate, m.rule.forget_gate)
    )
    return decayed.mlstm(q, k, v, write, forget.sigmoid().log(), ALL)


def gsa(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, h: int) -> Tensor:
    g = m.rule.linear(x).unflatten(-1, (4, 5))[:, h].sigmoid().log() / 8
    return decayed.slots(q, k, v, g, ALL)


def abc(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, h: int) -> Tensor:
    """Each slot is a mean of the keys and values so far, by a softmax of its logits."""
    z, rows = m.rule.linear(x).unflatten(-1, (4, 5))[:, h], []
    for i in ALL:
        shares = z[: i + 1].softmax(0)
        keys, values = shares.mT @ k[: i + 1], shares.mT @ v[: i + 1]
        rows.append((keys @ q[i] / math.sqrt(8)).softmax(0) @ values)
    return torch.stack(rows)


def lightning(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, h: int) -> Tensor:
    rate = 2 ** (-2 * (h + 1)) * (1 + 1e-5)
    return gated_pairs(q, k, v, torch.full((T, 1), -rate, dtype=torch.float64))


def of_kernel(f: Callable[[float, int, int], float]) -> Pair:
    return lambda m, x, q, k, v, h: decayed.kernel(q, k, v, ALL, f)


def performer(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, h: int) -> Tensor:
    """The mean of exp(w . (q + k) - (q^2 + k^2) / 2) over the directions."""
    w, (q, k) = m.rule.feature_map.directions, (y / 8**0.25 for y in (q, k))
    rows = []
    for i in ALL:
        past = k[: i + 1]
        weights = (w @ (q[i] + past).mT - (q[i] @ q[i] + past.square().sum(1)) / 2).exp().mean(0)
        rows.append(weights / weights.sum() @ v[: i + 1])
    return torch.stack(rows)


def cosformer(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, h: int) -> Tensor:
    return decayed.kernel(
        q.relu(), k.relu(), v, ALL, lambda s, i, j: s * math.cos(math.pi * (i - j) / 128)
    )


LAYERS: dict[str, Pair] = {
    "lightning": lightning,
    "hgrn2": hgrn2,
    "lightnet": lightnet,
    "mamba2": mamba2,
    "log_linear": log_linear,
    "rwkv4": rwkv4,
    "rwkv6": rwkv6,
    "mlstm": mlstm,
    "gsa": gsa,
    "abc": abc,
    "based": of_kernel(lambda s, i, j: 1 + s / 2 + s * s / 8),  # D = 4
    "rebased": of_kernel(lambda s, i, j: s * s),
    "power_attention": of_kernel(lambda s, i, j: s * s),
    "performer": performer,
    "cosformer": cosformer,
}
CONVOLVED = ("mamba2", "log_linear")
SWISH = {"lightning": "qkv", "hgrn2": "q", "lightnet": "q", "gsa": "qkv"}
SWISH |= dict.fromkeys(CONVOLVED, "qkv")


def inputs(name: str, m: Any, x: Tensor) -> list[Tensor]:
    """q, k and v [n, T, d] of one text, by hand."""
    found, before = [], F.pad(x, (0, 0, 1, 0))[:-1]
    taps = m.project.convolution if name in CONVOLVED else None
    channels = 0
    for i, letter in enumerate("qkv"):
        part, y = getattr(m.project, letter), x
        if isinstance(m.project, TokenShiftQKV):
            mix = getattr(m.project, f"mix_{'qkv'[i]}")
            y = x * mix + before * (1 - mix)
        y = y @ part.linear.weight.mT
        if taps is not None:
            own = slice(channels, channels + y.shape[1])
            channels += y.shape[1]
            y = taps.bias[own] + sum(
                taps.weight[own, 3 - n] * F.pad(y, (0, 0, n, 0))[: len(y)] for n in range(4)
            )
        if letter in SWISH.get(name, ""):
            y = y * y.sigmoid()
        y = y.unflatten(-1, (part.heads, part.head_dim)).transpose(0, 1)
        if name == "rebased" and letter in "qk":
            y = normed(part.steps[0], y)
        found.append(y)
    return found


def normed(norm: nn.Module | None, z: Tensor) -> Tensor:
    """The norm of heads [H, T, E], by hand."""
    if norm is None:
        return z
    if isinstance(norm, HeadNorm):
        y = z - z.mean(-1, keepdim=True)
        y = y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        return y * norm.weight[:, None] + norm.bias[:, None]
    assert isinstance(norm, RMSNorm)
    if isinstance(norm, JoinedHeadsRMSNorm):
        mean = z.square().mean((0, 2), keepdim=True)
        return z / (mean + norm.eps).sqrt() * norm.weight.view(len(z), 1, -1)
    return z / (z.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def written_out(name: str, m: Any, x: Tensor) -> Tensor:
    q, k, v = inputs(name, m, x)
    n = max(len(q), len(v))
    heads = [LAYERS[name](m, x, *(y[h // (n // len(y))] for y in (q, k, v)), h) for h in range(n)]
    z = torch.stack(heads)
    gate = torch.ones_like(z)
    if m.gate is not None:
        gate = (x @ m.gate.linear.weight.mT).unflatten(-1, (n, -1)).transpose(0, 1)
        gate = gate.sigmoid() * (1 if name in ("lightning", "mlstm") else gate)
    z = normed(m.norm, z * gate) if name in CONVOLVED else normed(m.norm, z) * gate
    return z.transpose(0, 1).flatten(1) @ m.output.weight.mT


def far(x: Tensor, y: Tensor) -> float:
    return float((x - y).detach().abs().max()) / float(y.detach().abs().max())


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_layer_is_its_equation(name: str) -> None:
    m, x = example(variants.VARIANTS[name]), tokens(T, B=1)
    assert far(m(x)[0], written_out(name, m, x[0])) < 1e-10
    # negative control: another token order, or another output, is another function
    assert far(m(x.flip(1))[0], written_out(name, m, x[0])) > 1e-2


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    "name", ["mamba2", "log_linear", "rwkv4", "abc", "mlstm", "lightnet", "gsa"]
)
def test_packed_documents_do_not_see_one_another(name: str) -> None:
    m, x = example(variants.VARIANTS[name]), tokens(T, B=1)
    m.documents = Document((0, 4, T))
    found, cache = m(x), m.new_cache()
    m.documents = None
    right = torch.cat([m(x[:, :4]), m(x[:, 4:])], 1)
    assert far(found, right) < 1e-10
    assert far(m(x), right) > 1e-3
    m.documents = Document((0, 4, T))
    assert far(in_chunks(m, x, [2, 5, 4], cache), right) < 1e-10


def test_a_lower_bound_of_the_forget_gates() -> None:
    m = randomize(variants.hgrn2(DIM, 4, lower_bound=0.5).double(), 0).eval()
    x = tokens(T, B=1)
    assert far(m(x)[0], written_out("hgrn2", m, x[0])) < 1e-10


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: rules.HGRN2Rule(1.0), "lower_bound"),
        (lambda: rules.RWKV6Rule(8, 2, 0), r"RWKV6Rule\(dim=8, heads=2, head_dim=0, rank=64\)"),
        (lambda: rules.RWKV4Rule(0, 2), r"RWKV4Rule\(heads=0, head_dim=2\): each must be at least"),
        (lambda: rules.Mamba2Rule(8, 0), r"Mamba2Rule\(dim=8, heads=0\): each must be at least 1"),
        (lambda: rules.LogLinearRule(8, 2, 0), "levels is 0; it must be from 1 to 24"),
        (lambda: rules.LogLinearRule(8, 2, 25), "levels is 25; it must be from 1 to 24"),
        (lambda: rules.MLSTMRule(0, 2), r"MLSTMRule\(dim=0, heads=2\): each must be at least 1"),
        (lambda: rules.MLSTMRule(8, 2, gate_cap=0.0), "gate_cap is 0.0"),
        (lambda: rules.SlotRule(8, 2, 0), r"SlotRule\(dim=8, groups=2, slots=0\): each must be at"),
        (lambda: rules.SlotRule(8, 2, 3, gates="x"), "gates is 'x'; it must be one of sigmoid"),  # type: ignore[arg-type]
        (lambda: rules.CosineRule(0), "period is 0; it must be at least 1"),
        (lambda: variants.lightning(32, 4, layer=3, layers=3), "layer must be from 0 to layers -"),
        (lambda: variants.mamba2(32, 5), "2 dim is 64; it must be divisible by heads = 5, or give"),
        (lambda: variants.mlstm(36, 4), r"dim is 36; it must be divisible by 2 \* heads = 8, or"),
        (lambda: JoinedHeadsRMSNorm(4, 2, groups=3), "groups is 3; it must be at least 1 and"),
        (lambda: JoinedHeadsRMSNorm(4, 2)(torch.zeros(1, 3, 5, 2)), r"x is \(1, 3, 5, 2\); this"),
    ],
)
def test_what_is_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        build()
