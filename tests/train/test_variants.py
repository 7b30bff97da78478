"""Every causal mechanism of the catalogue as a decoder: trained, saved, loaded, and continued with
a cache.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError
from regard.models.assembly.catalogue_mixer import (
    build_mixer,
    check_position,
    decoder_variants,
    find_decoder_variant,
    supported_schemes,
    with_positions,
    with_window,
)
from regard.models.families import model_type_of
from regard.models.families.regard import Config, build
from regard.models.save import save
from regard.nn.variants import VARIANTS, gqa, infini, t5
from regard.nn.variants.registry import check_options
from regard.span import Span
from regard.train import Batches, Settings, fit, next_token_loss
from regard.train.pretraining import make_config, make_model, parameters_without_gradient
from tests.nn.catalogue import randomize, tokens

V, LENGTH = 19, 23
"""Longer than three windows, segments and chunks of the small examples."""


def config(name: str, **more: Any) -> Config:
    options = {
        k: list(v) if isinstance(v, tuple) else v for k, v in VARIANTS[name].example_options.items()
    }
    more.setdefault("attention_options", options)
    return Config(V, 32, 48, 2, 4, name, max_position_embeddings=LENGTH, **more)


def drawn(made: Config, seed: int = 0) -> nn.Module:
    """Weights with which every layer matters: as they are to be trained from, layers add nothing
    yet.
    """
    return randomize(build(made).double(), seed).float().eval()


def ids(length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (2, length), generator=torch.Generator().manual_seed(seed))


def assert_close(x: Tensor, y: Tensor) -> None:
    """Equal but for the order of sums in fp64."""
    assert float((x - y).abs().max()) <= 1e-10 * max(1.0, float(y.abs().max()))


@pytest.mark.full(keep=6)
@pytest.mark.parametrize("name", decoder_variants())
def test_trained_saved_and_loaded(name: str, tmp_path: Path) -> None:
    made = config(name)
    model = drawn(made)
    before = {key: p.clone() for key, p in model.named_parameters()}
    stream = torch.randint(0, V, (300,), generator=torch.Generator().manual_seed(1))
    settings = Settings(steps=2, lr=0.01, warmup=0)
    assert math.isfinite(fit(model, Batches(stream, batch=2, context=LENGTH - 1), settings).loss)
    unmoved = {key for key, p in model.named_parameters() if torch.equal(p, before[key])}
    if name == "fire":  # b1 of units that are always on, and b2, add one number to a row of scores:
        # their gradients are 0 but for rounding
        unmoved -= {f"layers.{i}.attention.bias_tensors.{n}" for i in (0, 1) for n in (3, 5)}
    assert unmoved == set(parameters_without_gradient(model, V, LENGTH - 1))
    # a choice has no gradient: the paper of dsa trains its indexer by another loss
    assert bool(unmoved) == (name in ("dsa", "msa", "csa", "qsa", "dsa_pools"))
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    save(model, made, first)
    loaded = regard.load(first)
    assert loaded.config == json_twin(made)
    model.eval().requires_grad_(False)
    assert torch.equal(loaded(ids()), model(ids()))
    save(loaded.decoder, loaded.config, second)
    for file in ("config.json", "model.safetensors"):
        assert (first / file).read_bytes() == (second / file).read_bytes()


def json_twin(made: Config) -> Config:
    """The same config behind a file: what is optional was written out."""
    return Config(**json.loads(json.dumps(vars(made))))


@pytest.mark.full(keep=12)
@pytest.mark.parametrize("name", decoder_variants())
def test_a_cache_continues_it_and_nothing_looks_ahead(name: str) -> None:
    model = drawn(config(name)).double()
    with torch.no_grad():
        caches, text = model.new_caches(), ids(LENGTH - 3)
        found = [model(part, None, caches) for part in text.split([5, 1, 14], 1)]
        for _ in range(3):
            text = torch.cat([text, found[-1][:, -1:].argmax(-1)], 1)
            found.append(model(text[:, -1:], None, caches))
        whole = model(
            text
        )  # without a cache: it says the same, so that it would have chosen the same
        assert_close(torch.cat(found, 1), whole)
        other = torch.cat([text[:, :12], (text[:, 12:] + 1) % V], 1)
        changed = model(other)
        assert_close(changed[:, :12], whole[:, :12])
        assert (changed - whole)[:, 12:].abs().amax() > 1e-3


@pytest.mark.full(keep=12)
@pytest.mark.parametrize("name", decoder_variants())
def test_bf16_autocast_takes_every_mechanism(name: str) -> None:
    model, rows = drawn(config(name)), ids()
    full = next_token_loss(model, rows).item()
    with torch.autocast("cpu", torch.bfloat16):
        half = next_token_loss(model, rows)
    half.backward()
    assert half.item() == pytest.approx(full, rel=0.05)
    assert half.item() != full
    for key, p in model.named_parameters():
        assert p.grad is None or (p.grad.dtype == torch.float32 and p.grad.isfinite().all()), key


def test_which_mechanisms_a_decoder_can_have() -> None:
    assert sorted(set(VARIANTS) - set(decoder_variants())) == [
        "bahdanau",
        "cross_attention",
        "deberta",
        "luong",
        "mha_per_head",
        "prefix_lm",
        "rope_2d",
        "single_head",
        "weightless",
    ]
    with pytest.raises(ArgumentError, match=r"^bahdanau attends to a second sequence, .* and"):
        find_decoder_variant("bahdanau")
    with pytest.raises(ArgumentError, match=r"^prefix_lm attends to later tokens, so it"):
        config("prefix_lm")
    with pytest.raises(ArgumentError, match="no mechanism is named 'gqua'; did you mean 'gqa'"):
        Config(V, 32, 48, 2, 4, "gqua")


def attention_loop(
    layer: nn.Module, x: Tensor, kind: str, window: int | None, start: int
) -> Tensor:
    """Grouped-query attention of 4 heads on 2, one number at a time, from the definition."""
    Wq, Wk, Wv = (getattr(layer.project, n).linear.weight.detach() for n in "qkv")
    out = torch.zeros_like(x)
    T, D = x.shape[1], 8
    for b in range(len(x)):
        heads = torch.zeros(T, 4, D, dtype=x.dtype)
        for h in range(4):
            g = h // 2
            for i in range(T):
                scores, seen = [], []
                for j in range(i + 1):
                    if window is not None and i - j >= window:
                        continue
                    q, k = Wq[h * D : (h + 1) * D] @ x[b, i], Wk[g * D : (g + 1) * D] @ x[b, j]
                    if kind == "rope":
                        q, k = turned(q, start + i), turned(k, start + j)
                    s = float(q @ k) / math.sqrt(D)
                    scores.append(s - 2.0 ** (-2 * (h + 1)) * (i - j) if kind == "alibi" else s)
                    seen.append(j)
                top = max(scores)
                weights = [math.exp(s - top) for s in scores]
                for w, j in zip(weights, seen, strict=True):
                    heads[i, h] += w / sum(weights) * (Wv[g * D : (g + 1) * D] @ x[b, j])
        out[b] = heads.flatten(1) @ layer.output.weight.detach().T
    return out


def turned(x: Tensor, position: int) -> Tensor:
    out, half = x.clone(), len(x) // 2
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / len(x))
        c, s = math.cos(angle), math.sin(angle)
        out[i], out[i + half] = c * x[i] - s * x[i + half], s * x[i] + c * x[i + half]
    return out


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("position", ["catalogue", "rope", "alibi", "none", "learned"])
def test_positions_and_windows_are_what_they_say(position: str, window: int | None) -> None:
    kind = {"catalogue": "rope", "learned": "none"}.get(position, position)
    layer = build_mixer("gqa", 32, 4, {"groups": 2}, position=position, window=window)
    randomize(layer.double(), 3)
    x = tokens(7, B=1)
    found = layer(x, Span(1000, 7)).detach()
    exact = attention_loop(layer, x, kind, window, 1000).detach()
    bound = 1e-11 * float(exact.abs().max())
    assert float((found - exact).abs().max()) <= bound
    for other, size in ((k, window) for k in ("rope", "alibi", "none") if k != kind):
        wrong = attention_loop(layer, x, other, size, 1000).detach()
        assert float((found - wrong).abs().max()) > 1e-3
    wrong = attention_loop(layer, x, kind, 4 if window else 3, 1000).detach()
    assert float((found - wrong).abs().max()) > 1e-3


TAKES = {
    **dict.fromkeys(
        ("gqa", "mha", "gpt", "qk_norm", "gated", "softcap", "alibi", "dilated"), "ran"
    ),
    **dict.fromkeys(("differential", "differential_v2"), "rn"),
    **dict.fromkeys(("head_gate", "nope"), "ran"),
    **dict.fromkeys(("linear_attention", "delta_net", "longformer"), "n"),
    **dict.fromkeys(("shared_kv", "keys_as_values", "mrope", "rerope", "mla", "t5"), ""),
    **dict.fromkeys(("retention", "streaming", "infini", "nsa", "moba", "dsa", "quest"), ""),
    **dict.fromkeys(("msa", "qsa", "dsa_pools", "hca", "csa"), ""),
}
"""First letters of the schemes that a mechanism takes."""


@pytest.mark.full(keep=7)
@pytest.mark.parametrize("name", TAKES)
def test_which_positions_a_mechanism_takes(name: str) -> None:
    layer = build_mixer(name, 32, 4, VARIANTS[name].example_options)
    assert "".join(s[0] for s in supported_schemes(layer)) == TAKES[name]
    takes = {"rope": ["rope"], "alibi": ["alibi"], "none": ["learned", "sinusoidal", "none"]}
    allowed = {p for s in supported_schemes(layer) for p in takes[s]}
    for position in ("rope", "alibi", "learned", "sinusoidal", "none"):
        if position in allowed and name in ("gqa", "gpt", "gated", "differential", "delta_net"):
            model = drawn(config(name, position=position)).double()
            with torch.no_grad():
                caches = model.new_caches()
                parts = [model(x, None, caches) for x in ids().split([9, 1, 13], 1)]
                assert_close(torch.cat(parts, 1), model(ids()))
        elif position not in allowed:
            with pytest.raises(
                ArgumentError,
                match=f"^{name} does not support position '{position}': .*; it supports catalogue",
            ):
                config(name, position=position)


def test_why_positions_are_refused() -> None:
    with pytest.raises(ArgumentError, match="the two patterns of differential attention need one"):
        config("differential", position="alibi")
    with pytest.raises(ArgumentError, match=r"^this Attention gets its positions from the bias"):
        with_positions(t5(32, 4), "none")
    with pytest.raises(ArgumentError, match="rotary positions are part of this InfiniAttention"):
        with_positions(infini(32, 4, segment=4), "none")
    with pytest.raises(ArgumentError, match="queries and keys of this Recurrent are not plain"):
        config("linear_attention", position="rope")
    with pytest.raises(ArgumentError, match="scheme is 'learned'; it is one of rope, alibi, none"):
        with_positions(gqa(32, 4, groups=2), "learned")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"position is 'alibbi'; .*; did you mean 'alibi'"):
        check_position("alibbi")


def test_positions_of_the_embedding() -> None:
    model = drawn(config("gqa", position="learned"))
    table = model.embed.positional.weight
    x = model.embed(torch.tensor([[3, 4]]), Span(5, 2))
    torch.testing.assert_close(x[0], model.embed.embedding.weight[3:5] + table[5:7])
    with pytest.raises(ArgumentError, match=f"position {LENGTH} has no vector"):
        model(ids(LENGTH + 1))
    loose, tied = (
        build(config("gqa", position="sinusoidal", tie_word_embeddings=tie))
        for tie in (False, True)
    )
    assert (loose.embed.scale, tied.embed.scale) == (1.0, 32**0.5)
    angles = [t / 10000 ** (2 * (i // 2) / 32) for t in (5,) for i in range(32)]
    exact = torch.tensor([math.sin(a) if i % 2 == 0 else math.cos(a) for i, a in enumerate(angles)])
    found = loose.embed(torch.tensor([[3]]), Span(5, 1))[0, 0] - loose.embed.embedding.weight[3]
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["gqa", "mla", "qk_norm_flat", "differential", "t5", "sparse_strided"]
)
def test_a_window_over_any_softmax_attention(name: str) -> None:
    wide, narrow = (drawn(config(name, window=w)).double() for w in (None, 4))
    with torch.no_grad():
        whole, caches = narrow(ids()), narrow.new_caches()
        parts = [narrow(x, None, caches) for x in ids().split([9, 1, 1, 12], 1)]
        assert_close(torch.cat(parts, 1), whole)
        # two layers of 4 reach 6 tokens back
        other = torch.cat([(ids()[:, :1] + 1) % V, ids()[:, 1:]], 1)
        assert_close(narrow(other)[:, 7:], whole[:, 7:])
        assert (narrow(other) - whole)[:, :7].abs().amax() > 1e-6
        assert (wide(other) - wide(ids()))[:, 7:].abs().amax() > 1e-6
        assert len(caches[0]) <= 4 + 12


def test_windows_that_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^retention does not support window 4: Recurrent"):
        config("retention", window=4)
    with pytest.raises(ArgumentError, match=r"streaming does not support window 4: .* sinks"):
        config("streaming", window=4)
    with pytest.raises(ArgumentError, match=r"^NSA does not support an additional window"):
        with_window(build_mixer("nsa", 32, 4, VARIANTS["nsa"].example_options), 4)
    with pytest.raises(ArgumentError, match="nsa has a window of its own: give it the option"):
        config("nsa", window=4)
    with pytest.raises(ArgumentError, match="0"):
        config("gqa", window=0)
    assert str(with_window(build_mixer("mha", 32, 4, {}), 3).mask) == "causal & window(3)"


def test_layers_have_their_own_numbers() -> None:
    made = Config(V, 32, 48, 3, 4, "local_global", {"groups": 2, "window": 5, "every": 3})
    assert [str(b.attention.mask) for b in build(made).layers] == ["causal & window(5)"] * 2 + [
        "causal"
    ]
    starts = [block.attention.project.lambda_init for block in build(config("differential")).layers]
    assert starts == [0.8 - 0.6 * math.exp(-0.3 * depth) for depth in (0, 1)]
    with pytest.raises(ArgumentError, match="depth of differential is 3; the decoder sets it for"):
        config("differential", attention_options={"depth": 3})
    with pytest.raises(ArgumentError, match="is_causal of mha is False; the decoder sets it"):
        config("mha", attention_options={"is_causal": False})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gqa", {"groups": 2, "bass": 1.0}, "gqa has no option 'bass'; did you mean 'base'? Its"),
        ("gqa", {}, "gqa needs a value for groups"),
        ("gqa", {"groups": 2.0}, "groups of gqa is 2.0; it must be int"),
        ("gqa", {"groups": True}, "groups of gqa is True; it must be int"),
        ("gqa", {"groups": 3}, "4 query heads are not divisible by 3 key/value heads"),
        ("gqa", {"groups": 2, "head_dim": "8"}, "head_dim of gqa is '8'; it must be int | None"),
        ("retention", {"decay": ["a"]}, "decay of retention is ['a']; it must be"),
        ("retention", {"decay": 0.5}, "decay of retention is 0.5; it must be"),
        ("infini", {"empty": "none"}, "empty of infini is 'none'; it must be"),
        ("linear_attention", {"feature_map": "x"}, "x"),
        ("causal", {"head_dim": 8}, "causal returns vectors of 8, and the model has dim 32; leave"),
    ],
)
def test_options_that_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        config(name, attention_options=options)


def test_options_may_be_integers_for_floats_and_lists_for_tuples() -> None:
    entry = VARIANTS["retention"]
    assert check_options(entry, {"decay": [0.5, 1], "base": None}) == {
        "decay": (0.5, 1),
        "base": None,
    }
    with pytest.raises(ArgumentError, match="hidden_size is 0; it must be at least 1"):
        Config(V, 0, 48, 2, 4, "mqa")


OPTIONS = {"dim": 32, "layers": 2, "heads": 4, "hidden": None, "context": 16, "tie": False}


def of(**more: Any) -> Any:
    return make_config({**OPTIONS, **more}, V)


def test_flags_become_a_config() -> None:
    assert model_type_of(of()) == "llama"
    assert of(kv_heads=1).num_key_value_heads == 1
    full = of(attention="gqa", kv_heads=1, position="rope", window=8, set=["base=500"])
    assert model_type_of(full) == "regard"
    assert (full.attention_options, full.position, full.window) == (
        {"groups": 1, "base": 500},
        "rope",
        8,
    )
    assert of(attention="gqa").attention_options == {"groups": 2}
    assert of(attention="gpt").attention_options == {}
    own = of(attention="sliding_window", window=8)
    assert (own.attention_options, own.window) == ({"groups": 2, "window": 8}, None)
    assert of(attention="gqa", kv_heads=2, set=["groups=2"]).attention_options == {"groups": 2}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"position": "rope"}, "--position needs a mechanism of the catalogue; give one, such as"),
        ({"window": 3}, "--window needs a mechanism"),
        ({"set": ["base=3"]}, "--set needs a mechanism"),
        ({"attention": "mha", "kv_heads": 2}, "--kv-heads is not an option of mha, whose number"),
        ({"attention": "gqa", "kv_heads": 2, "set": ["groups=1"]}, "--kv-heads is 2 and --set"),
        ({"attention": "packed"}, "packed needs bounds: give --set bounds=..."),
        ({"attention": "gqa", "set": ["bass=3"]}, "--set bass=3: gqa has no option bass; did you"),
        ({"attention": "gqa", "set": ["base"]}, None),
        ({"attention": "gqa", "position": "rotary"}, "position is 'rotary'; it is one of"),
        ({"attention": "delta_net", "window": 4}, "Recurrent does not support an additional"),
    ],
)
def test_flags_that_do_not_go_together(more: dict[str, Any], message: str | None) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message or "--set base: give name=value")):
        of(**more)


def test_what_the_loss_does_not_reach_is_named() -> None:
    made = config("dsa")
    missed = parameters_without_gradient(make_model(made, 0), V, 8)
    assert {name.split(".")[3] for name in missed} == {"selector"}
    assert parameters_without_gradient(make_model(config("nsa"), 0), V, LENGTH) == ()
    before = torch.random.get_rng_state()
    parameters_without_gradient(
        make_model(config("causal", attention_options={"dropout": 0.5}), 0), V, 8
    )
    torch.manual_seed(0)
    model = build(config("causal", attention_options={"dropout": 0.5}))
    state = torch.random.get_rng_state()
    parameters_without_gradient(model, V, 8)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(before, state)
    assert all(p.grad is None for p in model.parameters())


FIRST = {
    "embed.embedding.weight": -0.327734,
    "layers.0.attention.project.q.linear.weight": -0.473636,
    "layers.0.attention.project.v.linear.weight": 0.074892,
    "layers.0.attention.output.weight": 0.0,
    "layers.0.feed_forward.up.weight": 0.410088,
    "layers.1.attention.project.k.linear.weight": 0.146640,
    "layers.1.feed_forward.gate.weight": -0.109411,
    "head.weight": -0.003022,
}
"""The last number of some parameters of a Llama from seed 0, as the embedded model was begun
with.
"""


def test_a_llama_begins_as_it_always_did() -> None:
    options = {"dim": 16, "layers": 2, "heads": 4, "hidden": 32, "context": 16, "tie": False}
    model = dict(make_model(make_config(options, 300), 0).named_parameters())
    assert {n: model[n].flatten()[-1].item() for n in FIRST} == pytest.approx(FIRST, abs=2e-6)


def test_the_family_stores_what_it_holds(tmp_path: Path) -> None:
    made = config("gqa", tie_word_embeddings=True)
    model = build(made)
    save(model, made, tmp_path)
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == {name for name, _ in model.named_parameters()}
    assert "head.weight" not in stored
    loaded = regard.load(tmp_path)
    assert loaded.decoder.head.weight is loaded.decoder.embed.embedding.weight
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "windw": 3}))
    with pytest.raises(regard.errors.FileError, match="unknown key 'windw'; did you mean 'window'"):
        regard.load(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({**raw, "attention": "mha", "attention_options": {}})
    )
    with pytest.raises(regard.errors.FileError, match=r"attention\.project\.k.linear.weight is"):
        regard.load(tmp_path)
