"""The layers of transformers' DeepSeek-V2 and V3 with the same weights: prompt, chunks, decode,
padding, YaRN.

Their norms and rotary tables round to float32 whatever the dtype, so both sides are held against
the float64 loops of the paper, each by the error rule with plain math that rounds where it does; V3
with exact norms and tables must agree to 1e-12.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.caches import Growing
from regard.nn.variants import mla
from regard.positions import Rotary, YaRN
from tests.oracles import latent as oracle
from tests.rules import assert_close_rule

transformers = pytest.importorskip("transformers", reason="needs the extra `transformers`")
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2  # noqa: E402
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3  # noqa: E402

M, H, DN, DR, DV, RANK, Q_RANK = 24, 3, 8, 6, 10, 12, 9
START = 1000
# their name -> ours
NAMES = {
    "q_proj.weight": "project.q.linear.weight",
    "q_a_proj.weight": "project.q.down.weight",
    "q_a_layernorm.weight": "project.q.norm.weight",
    "q_b_proj.weight": "project.q.up.linear.weight",
    "kv_a_proj_with_mqa.weight": "project.kv_down.weight",
    "kv_a_layernorm.weight": "project.kv_norm.weight",
    "kv_b_proj.weight": "project.kv_up.linear.weight",
    "o_proj.weight": "output.weight",
}
YARN = {"factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "as V3": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "as V2": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "two factors": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
    "neither": YARN,
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def yarn_of(scaling: dict[str, Any] | None) -> YaRN | None:
    if scaling is None:
        return None
    factors = {name: scaling[name] for name in ("mscale", "mscale_all_dim") if name in scaling}
    return YaRN(scaling["factor"], scaling["original_max_position_embeddings"], **factors)


class Pair:
    """Their layer and ours, and the loops, with the same random weights, norm weights too."""

    def __init__(
        self,
        version: int,
        scaling: str | dict[str, Any],
        q_rank: int | None = Q_RANK,
        form: str = "auto",
    ) -> None:
        given = SCALINGS[scaling] if isinstance(scaling, str) else scaling
        rope = {"rope_type": "default"} if given is None else {"rope_type": "yarn", **given}
        kind = transformers.DeepseekV2Config if version == 2 else transformers.DeepseekV3Config
        self.config = kind(
            hidden_size=M,
            num_attention_heads=H,
            num_key_value_heads=H,
            q_lora_rank=q_rank,
            kv_lora_rank=RANK,
            qk_nope_head_dim=DN,
            qk_rope_head_dim=DR,
            v_head_dim=DV,
            num_hidden_layers=1,
            max_position_embeddings=4096,
            rope_parameters={"rope_theta": 10000.0, **rope},
        )
        self.config._attn_implementation = "sdpa"
        self.version, self.where = version, v2 if version == 2 else v3
        name = f"DeepseekV{version}"
        self.theirs = getattr(self.where, f"{name}Attention")(self.config, 0).eval()
        self.rotary = getattr(self.where, f"{name}RotaryEmbedding")(self.config)
        make = torch.Generator().manual_seed(version)
        for p in self.theirs.parameters():
            p.normal_(0, p.shape[1] ** -0.5 if p.ndim == 2 else 1, generator=make)
        sizes = {"kv_rank": RANK, "nope_dim": DN, "rope_dim": DR, "value_dim": DV}
        self.ours: Any = mla(M, H, q_rank=q_rank, **sizes, scaling=yarn_of(given), form=form).eval()
        state = self.theirs.state_dict()
        self.ours.load_state_dict({NAMES[name]: x for name, x in state.items()})
        yarn = None
        if given is not None:
            all_dim = given.get("mscale_all_dim", 0.0)
            yarn = oracle.Yarn(40.0, 64, mscale=given.get("mscale", 1.0), mscale_all_dim=all_dim)
        self.sizes = oracle.Sizes(H, DN, DR, DV, yarn=yarn)
        self.weights = oracle.Weights(
            state.get("q_a_proj.weight"),
            state.get("q_a_layernorm.weight"),
            state["q_proj.weight" if q_rank is None else "q_b_proj.weight"],
            state["kv_a_proj_with_mqa.weight"],
            state["kv_a_layernorm.weight"],
            state["kv_b_proj.weight"],
            state["o_proj.weight"],
        )

    def exact(self, x: Tensor, positions: Tensor) -> Tensor:
        return oracle.latent_attention(x, self.weights, self.sizes, positions.tolist())

    def plains(self, x: Tensor, tables: torch.dtype = torch.float64) -> list[Tensor]:
        return [
            oracle.plain(self.weights, x, self.sizes, START, absorb=absorb, tables=tables)
            for absorb in (False, True)
        ]

    def their(
        self, x: Tensor, positions: Tensor, keys: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        """Their layer; keys are the positions of all slots that are cached by now."""
        keys = positions if keys is None else keys
        seen = (keys[:, None] <= positions[..., None]) & (keys[:, None] >= 0)
        mask = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)
        tables = self.rotary(x, positions.clamp(min=0))
        return self.theirs(
            x, position_embeddings=tables, attention_mask=mask[:, None], past_key_values=cache
        )[0]

    def assert_both_right(self, x: Tensor, ours: Tensor, theirs: Tensor, ref: Tensor) -> None:
        single = self.plains(x, torch.float32)
        assert_close_rule(theirs, single, ref, what="theirs")
        assert_close_rule(ours, self.plains(x), ref, what="ours")


def steps(start: int, length: int, batch: int = 1) -> Tensor:
    return torch.arange(start, start + length).expand(batch, -1)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("q_rank", [None, Q_RANK])
def test_a_prompt(version: int, scaling: str, q_rank: int | None) -> None:
    pair = Pair(version, scaling, q_rank)
    x, positions = torch.randn(1, 9, M), steps(START, 9)
    ref = pair.exact(x, positions)
    pair.assert_both_right(x, pair.ours(x, positions), pair.their(x, positions), ref)
    assert pair.ours.scale == pytest.approx(pair.theirs.scaling, rel=1e-12)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("form", ["naive", "expand", "absorb", "auto"])
def test_chunks_and_decode_with_a_cache(version: int, form: str) -> None:
    """Several tokens at a later start, then one by one; both keep the latent."""
    pair = Pair(version, "two factors", form=form)
    x, positions = torch.randn(2, 12, M), steps(START, 12, 2)
    ref = pair.exact(x, positions)
    theirs_cache, cache = transformers.DynamicCache(config=pair.config), Growing()
    ours, theirs, start = [], [], 0
    for n in (4, 3, 1, 1, 1, 2):
        new, until = slice(start, start + n), positions[:, : start + n]
        theirs.append(pair.their(x[:, new], positions[:, new], until, theirs_cache))
        ours.append(pair.ours(x[:, new], positions[:, new], cache))
        start += n
    pair.assert_both_right(x, torch.cat(ours, 1), torch.cat(theirs, 1), ref)
    held = theirs_cache.layers[0]
    kept = sum(x.shape[1] * x.shape[3] for x in (held.keys, held.values))
    numbers = H * (DN + DR + DV) if form == "naive" else kept
    assert kept == RANK + DR
    assert cache.bytes == 2 * 12 * numbers * 4
    if form != "naive":
        (memory,) = (m for name, m in cache.contents().items() if name == "memory.0")
        assert_same_memory(pair, memory, held)


def assert_same_memory(pair: Pair, memory: Tensor, held: Any) -> None:
    """The very latents are equal; V3 lays its rotated pairs out in halves, and its queries
    alike.
    """
    order = [*range(0, DR, 2), *range(1, DR, 2)] if pair.version == 3 else [*range(DR)]
    theirs = torch.cat((held.keys, held.values), -1)
    ours = torch.cat((memory[..., :RANK], memory[..., RANK:][..., order]), -1)
    # angles near 1000 rounded to float32
    most = (START + 20) * 2**-24 * float(ours.abs().max()) * 2
    assert float((ours - theirs).abs().max()) <= most


@pytest.mark.parametrize("version", [2, 3])
def test_left_padding(version: int) -> None:
    pair = Pair(version, "as V3")
    x = torch.randn(2, 8, M)
    positions = torch.stack((steps(START, 8)[0], steps(START - 3, 8)[0]))
    positions[1, :3] = -1
    real = positions >= 0
    poisoned = x.masked_fill(~real[..., None], math.nan)
    ours, theirs = pair.ours(poisoned, positions), pair.their(x, positions)
    for row, first in ((0, 0), (1, 3)):
        alone = x[row : row + 1, first:]
        ref = pair.exact(alone, steps(START, 8 - first))
        pair.assert_both_right(
            alone, ours[row : row + 1, first:], theirs[row : row + 1, first:], ref
        )


@pytest.mark.parametrize("scaling", SCALINGS)
def test_v3_to_the_last_digits(scaling: str) -> None:
    """float64, with norms that do not round to float32 and tables from exact angles."""
    pair = Pair(3, scaling)
    theirs = copy.deepcopy(pair.theirs).double()
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        rounding = getattr(theirs, name)
        exact = nn.RMSNorm(len(rounding.weight), eps=rounding.variance_epsilon).double()
        exact.weight.copy_(rounding.weight)
        setattr(theirs, name, exact)
    x, positions = torch.randn(2, 9, M, dtype=torch.float64), steps(START, 9, 2)
    frequencies = torch.tensor(oracle.frequencies(pair.sizes), dtype=torch.float64)
    angle = torch.cat((positions[..., None] * frequencies,) * 2, -1)
    factor = pair.rotary.attention_scaling
    tables = angle.cos() * factor, angle.sin() * factor
    out = theirs(x, position_embeddings=tables, attention_mask=None)[0]
    assert float((pair.ours.double()(x, positions) - out).abs().max()) <= 1e-12


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_and_factors(version: int, scaling: str) -> None:
    pair = Pair(version, scaling)
    rotary = pair.ours.project.rotary
    assert rotary.inv_freq.tolist() == pytest.approx(pair.rotary.inv_freq.tolist(), rel=1e-6)
    assert rotary.rotary_factor == pytest.approx(pair.rotary.attention_scaling, rel=1e-12)
    if scaling != "none":
        plain = Rotary(DR).inv_freq
        assert float((rotary.inv_freq / plain).min()) == pytest.approx(1 / 40), "really rewritten"


def test_mscale_alone_is_theirs_to_ignore() -> None:
    """DeepSeek's released code takes f(mscale) / f(mscale_all_dim) with defaults 1 and 0;
    transformers then takes f(1).
    """
    pair = Pair(3, {**YARN, "mscale": 0.707})
    assert pair.ours.project.rotary.rotary_factor == 0.1 * 0.707 * math.log(40) + 1
    assert pair.rotary.attention_scaling == 0.1 * math.log(40) + 1


@pytest.mark.parametrize(
    "version, m, scale",
    [
        (2, 0.707, 0.11472138679292611),
        (3, 1.0, 0.1352337788608801),
    ],
)
def test_the_scale_at_the_real_sizes(version: int, m: float, scale: float) -> None:
    kind = transformers.DeepseekV2Config if version == 2 else transformers.DeepseekV3Config
    rope = {**YARN, "original_max_position_embeddings": 4096, "mscale": m, "mscale_all_dim": m}
    config = kind(
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=8,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, **rope},
    )
    theirs = getattr(v2 if version == 2 else v3, f"DeepseekV{version}Attention")(config, 0)
    ours = mla(
        64,
        2,
        q_rank=8,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        scaling=YaRN(40.0, 4096, mscale=m, mscale_all_dim=m),
    )
    assert theirs.scaling == pytest.approx(scale, rel=1e-15)
    assert ours.scale == pytest.approx(scale, rel=1e-15)


# Negative controls: each must differ from theirs.


def swap_up(ours: Any) -> None:
    weight = ours.project.kv_up.linear.weight
    up = weight.unflatten(0, (H, -1))
    weight.copy_(torch.cat((up[:, DN:], up[:, :DN]), 1).flatten(0, 1))


def turn_halves(ours: Any) -> None:
    ours.project.rotary = Rotary(DR, scaling=ours.project.rotary.scaling, layout="half")


def forget_mscale(ours: Any) -> None:
    ours.scale = (DN + DR) ** -0.5


def keep_frequencies(ours: Any) -> None:
    ours.project.rotary = Rotary(DR, layout="interleaved")


def forget_a_norm(ours: Any) -> None:
    ours.project.kv_norm.weight.fill_(1)


def key_first(ours: Any) -> None:
    """The rotary key in front of the latent."""
    weight = ours.project.kv_down.weight
    weight.copy_(weight.roll(DR, 0))


MISTAKES = (swap_up, turn_halves, forget_mscale, keep_frequencies, forget_a_norm, key_first)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_is_caught(version: int, mistake: Callable[[Any], None]) -> None:
    pair = Pair(version, "as V3")
    mistake(pair.ours)
    x, positions = torch.randn(1, 9, M), steps(START, 9)
    theirs, ref = pair.their(x, positions), pair.exact(x, positions)
    with pytest.raises(AssertionError, match="ours error"):
        pair.assert_both_right(x, pair.ours(x, positions), theirs, ref)
