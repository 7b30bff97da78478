"""Counted against what runs: bytes of real caches, and products that torch's own counter sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard.caches import Ring
from regard.configs.reader import parse, read_sizes
from regard.cost.compressed import CompressedSpec
from regard.cost.latent import LatentSpec
from regard.cost.model import ModelSpec
from regard.cost.report import CostReport, KVFormat, Setting
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import CacheContents
from regard.models.decoder import Decoder
from regard.models.families import family
from regard.models.generation.cache_config import CacheConfig
from regard.models.generation.decode_session import DecodeSession
from tests.cost.tiny import ENCODER_DECODERS, ENCODERS, TINY


def running(raw: dict[str, Any]) -> Decoder:
    found = family(raw["model_type"])
    network = found.build(parse(found.config, raw))
    assert isinstance(network, Decoder)
    return network.eval()


def read(
    raw: dict[str, Any], tokens: int, room: CacheConfig | None = None, rows: int = 1
) -> DecodeSession:
    """A context that has read so many tokens, the last one by itself."""
    context = DecodeSession(running(raw), room, rows)
    ids = torch.arange(tokens)[None].expand(rows, -1) % 97
    if tokens > 1:
        context.append(ids[:, :-1])
    context.append(ids[:, -1:])
    return context


DECODERS = [
    name
    for name, raw in TINY.items()
    if raw["model_type"] not in (*ENCODERS, *ENCODER_DECODERS, "gemma3", "gemma3n")
]


@pytest.mark.full(keep=12)
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(("tokens", "rows"), [(21, 1), (3, 2)])
def test_bytes_of_real_caches(name: str, tokens: int, rows: int) -> None:
    """Three windows and more, and less than one, when a ring has room for the rest already, or for
    its first slots; fp32, as the weights are.
    """
    report = CostReport(read_sizes(TINY[name], name), Setting(tokens, rows, "fp32"))
    rings = [m for m in report.model.mixers if isinstance(m, SoftmaxSpec | CompressedSpec)]
    room = sum(
        4
        * max(0, min(m.window or 0, Ring.min_slots) - tokens)
        * sum(heads * dim for heads, dim in m.cached(1).parts)
        for m in rings
    )
    assert report.kv_bytes + rows * room == read(TINY[name], tokens, rows=rows).bytes


@pytest.mark.full(keep=6)
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "regard, latent", "gemma2", "deepseek_v2", "regard, memory"]
)
@pytest.mark.parametrize("tokens", [20, 40, 200])
def test_bytes_of_real_caches_in_8_bits(name: str, tokens: int) -> None:
    """Behind the last 128 tokens, codes and scales; layers with a window, and states, stay as they
    are.
    """
    raw = {**TINY[name], "n_positions": 256} if name == "gpt2" else TINY[name]
    report = CostReport(read_sizes(raw, name), Setting(tokens, 1, "fp32", "int8"))
    assert report.kv_bytes == read(raw, tokens, CacheConfig("quantized")).bytes


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v2", "regard, memory"])
def test_bytes_of_real_caches_in_fp8(name: str) -> None:
    """Every token has codes, and a scale for each head; windows and states stay as they are."""
    report = CostReport(read_sizes(TINY[name], name), Setting(40, 1, "fp32", "fp8"))
    assert report.kv_bytes == read(TINY[name], 40, CacheConfig("fp8")).bytes


def test_a_cache_without_scales_would_be_smaller() -> None:
    """Negative control."""
    real = read(TINY["llama"], 200, CacheConfig("quantized")).bytes
    model = read_sizes(TINY["llama"], "llama")
    codes = KVFormat("fp8", exact="fp32").total_bytes(CacheContents(((1, 8),), 1)) - 4
    assert codes == 8, "a byte for each number"
    assert CostReport(model, Setting(200, 1, "fp32", "int4")).kv_bytes < real
    assert CostReport(model, Setting(200, 1, "fp32")).kv_bytes > real


def counted(raw: dict[str, Any], tokens: int, then: int = 0) -> int:
    """FLOPs that torch's counter sees when a prompt is read; or, behind it, of one more token.

    It sees products of matrices, and attention as if every pair were computed, whether or not a
    mask spares it; neither norms nor activations.
    """
    decoder = running(raw)
    caches = decoder.new_caches()
    ids = torch.arange(tokens + then)[None] % 97
    with torch.inference_mode():
        if then:
            decoder(ids[:, :tokens], None, caches, last=1, backend="reference")
        with FlopCounterMode(display=False) as counter:
            decoder(ids[:, -then:] if then else ids, None, caches, last=1, backend="reference")
    return int(counter.get_total_flops())


def spared(model: ModelSpec, tokens: int) -> int:
    """FLOPs of the pairs that causal masks and windows hide, from the definition."""
    hidden = 0
    for mixer in model.mixers:
        if isinstance(mixer, LatentSpec):
            window, H, D, E = tokens, mixer.heads, mixer.nope_dim + mixer.rope_dim, mixer.value_dim
        else:
            assert isinstance(mixer, SoftmaxSpec)
            shape = mixer.shape
            window, H, D, E = mixer.window or tokens, shape.heads, shape.head_dim, shape.value_dim
        seen = sum(min(i + 1, window) for i in range(tokens))
        hidden += 2 * H * (tokens * tokens - seen) * (D + E)
    return hidden


COUNTED = [
    "llama",
    "gpt2",
    "gemma",
    "gemma2",
    "mistral",
    "qwen3",
    "olmo2",
    "gpt_neox",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v2, queries from x",
]


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("tokens", [17])
def test_what_the_flop_counter_sees_of_a_prompt(name: str, tokens: int) -> None:
    model = read_sizes(TINY[name], name)
    report = CostReport(model, Setting(tokens))
    assert report.prefill_flops + spared(model, tokens) == counted(TINY[name], tokens)


@pytest.mark.full(keep=8)
@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("tokens", [1, 16])
def test_what_the_flop_counter_sees_of_a_token(name: str, tokens: int) -> None:
    report = CostReport(read_sizes(TINY[name], name), Setting(tokens + 1))
    assert report.decode_flops == counted(TINY[name], tokens, 1)


def test_another_width_is_another_count() -> None:
    """Negative control."""
    model = read_sizes({**TINY["llama"], "intermediate_size": 41}, "llama")
    assert CostReport(model, Setting(17)).prefill_flops + spared(model, 17) != counted(
        TINY["llama"], 17
    )
