"""Ablation, patching, attribution, the logit lens and rollout: each against a loop by hand, and on
a model whose circuit was made by hand.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard
from regard import Trace
from regard.configs.reader import parse
from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.inspect import (
    EffectTable,
    Receiver,
    ablate,
    attribute,
    logit_lens,
    name_mover_scores,
    patch,
    record,
    rollout,
)
from regard.inspect.interventions.residual_terms import FrozenNorm, decompose
from regard.inspect.interventions.rollout import flows
from regard.inspect.model_run import prepare_run
from regard.integrations.pytorch.watch import find_feed_forward
from regard.language import use_language
from regard.models import Model, Seq2Seq
from regard.models.encoder_decoder import transformer
from regard.models.families import family
from regard.nn import PostNorm, PreNorm
from regard.tolerance import allowed_error
from tests.cost.tiny import TINY
from tests.inspect.planted import INDUCTION_HEAD, PREVIOUS_HEAD, planted_model
from tests.inspect.small_model import PAIR, difference, model, model_of, shaken
from tests.rules import assert_close_rule, in_orders

CLEAN, CORRUPT = torch.tensor([[5, 9, 2, 31, 9]]), torch.tensor([[5, 7, 2, 31, 9]])


def measured(small: Model, ids: Tensor) -> float:
    with torch.no_grad():
        return float(difference(small.forward(ids)))


def with_head_input(
    small: Model, layer: int, head: int, change: Callable[[Tensor], Tensor], ids: Tensor
) -> float:
    """The metric if a plain hook changes the slice of one head in the input of the output map."""
    output: Any = small.decoder.layers[layer].get_submodule("attention.output")
    D = output.in_features // 4
    with hooked(output, lambda x: changed(x, slice(head * D, (head + 1) * D), change), pre=True):
        return measured(small, ids)


def changed(x: Tensor, part: slice, change: Callable[[Tensor], Tensor]) -> Tensor:
    x = x.clone()
    x[..., part] = change(x[..., part])
    return x


@contextmanager
def hooked(
    module: nn.Module, change: Callable[[Tensor], Tensor], *, pre: bool = False
) -> Iterator[None]:
    """What a module is given, or gives, goes through a function."""
    if pre:
        handle = module.register_forward_pre_hook(lambda _, inputs: (change(inputs[0]),))
    else:
        handle = module.register_forward_hook(lambda _m, _i, out: change(out))
    yield
    handle.remove()


def seen_at(small: Model, ids: Tensor, name: str = "", *, pre: bool = False) -> list[Tensor]:
    """What goes into, or comes out of, a module of every layer, from plain hooks."""
    seen: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return x

    with ExitStack() as stack:
        for layer in small.decoder.layers:
            stack.enter_context(hooked(layer.get_submodule(name), keep, pre=pre))
        measured(small, ids)
    return seen


def head_outputs(small: Model, ids: Tensor) -> list[Tensor]:
    """The input of every output map, `[B, T, H * D]`."""
    return seen_at(small, ids, "attention.output", pre=True)


def test_ablation_equals_a_loop_with_hooks() -> None:
    small = model()
    reference = torch.tensor([[1, 8, 30, 2]])
    base, D = measured(small, CLEAN), 8
    seen, others = head_outputs(small, CLEAN), head_outputs(small, reference)
    for method in ("zero", "mean", "resample"):
        table = ablate(small, CLEAN, difference, method=method, reference=reference, seed=3)  # type: ignore[arg-type]
        for layer, head in itertools.product(range(3), range(4)):
            part = others[layer][..., head * D : (head + 1) * D].flatten(0, 1)
            at = torch.randint(4, (5,), generator=torch.Generator().manual_seed(3))
            new = {
                "zero": torch.zeros(1, 5, D),
                "mean": part.double().mean(0).float().expand(1, 5, D),
                "resample": part[at][None],
            }[method]
            wanted = with_head_input(small, layer, head, lambda _, new=new: new, CLEAN) - base
            assert table.values[layer, head] == wanted, (method, layer, head)
    own = ablate(small, CLEAN, difference, method="mean", layers=["layers.1"], heads=[2])
    part = seen[1][..., 16:24].flatten(0, 1).double().mean(0).float().expand(1, 5, D)
    assert own.values[0, 0] == with_head_input(small, 1, 2, lambda _: part, CLEAN) - base
    assert (own.rows, own.columns, own.baseline) == (("layers.1",), ("2",), base)


@pytest.mark.full
def test_patching_of_states_equals_a_loop_with_hooks() -> None:
    small = model()
    clean, corrupt = seen_at(small, CLEAN), seen_at(small, CORRUPT)
    for restore, start, states in ((True, CORRUPT, clean), (False, CLEAN, corrupt)):
        table = patch(small, CLEAN, CORRUPT, difference, restore=restore)
        assert table.rows == ("embed", "layers.0", "layers.1", "layers.2")
        base = measured(small, start)
        for i, p in itertools.product(range(3), range(5)):
            at = torch.arange(5)[:, None] == p
            with hooked(small.decoder.layers[i], lambda y, x=states[i], at=at: x.where(at, y)):
                assert table.values[i + 1, p] == measured(small, start) - base
        assert table.share[-1, -1] == 1.0, "the last state of the last token is all that counts"
        assert np.abs(table.share[:-1]).max() > 0.01, "the other cells are not all 0"


@pytest.mark.full
def test_patching_of_heads_equals_a_loop_with_hooks() -> None:
    small = model()
    clean = head_outputs(small, CLEAN)
    table, base = patch(small, CLEAN, CORRUPT, difference, what="heads"), measured(small, CORRUPT)
    for layer, head in itertools.product(range(3), range(4)):
        new = clean[layer][..., head * 8 : (head + 1) * 8]
        wanted = with_head_input(small, layer, head, lambda _, new=new: new, CORRUPT) - base
        assert table.values[layer, head] == wanted
    assert np.isfinite(table.values).all()


def test_the_planted_circuit_is_found() -> None:
    planted = planted_model()
    clean, corrupt = torch.tensor([[0, 4, 5, 6, 7, 4]]), torch.tensor([[0, 9, 5, 6, 7, 4]])
    assert int(planted.forward(clean)[0, -1].argmax()) == 5, "it continues 4 by 5, as before"
    heads = patch(planted, clean, corrupt, (5, 6), what="heads").share
    wanted = np.zeros((2, 4))
    wanted[PREVIOUS_HEAD], wanted[INDUCTION_HEAD] = 1, 1
    assert np.abs(heads - wanted).max() < 1e-3
    into = {
        tap: patch(planted, clean, corrupt, (5, 6), what="paths", receiver=("layers.1", 0, tap))
        for tap in "qkv"
    }
    assert np.abs(into["k"].share - wanted[:1]).max() < 1e-3, "its keys come from there"
    for tap in "qv":
        assert np.abs(into[tap].values).max() < 1e-3, "and neither its queries nor its values"
    direct = patch(planted, clean, corrupt, (5, 6), what="paths").share
    assert abs(direct[INDUCTION_HEAD] - 1) < 1e-3, "only the induction head reaches the logits"
    assert abs(direct[PREVIOUS_HEAD]) < 1e-3
    ablated = ablate(planted, clean, (5, 6)).values
    assert sorted(zip(*np.nonzero(ablated < -1), strict=True)) == [PREVIOUS_HEAD, INDUCTION_HEAD]
    terms = attribute(planted, clean, (5, 6))
    assert terms.top(1)[0]["term"] == "layers.1.head.0"


DECODERS = (
    *("llama", "gemma2", "olmo2", "gpt_neox", "gpt2", "bloom", "mpt", "qwen3"),
    *("gemma4_text", "falcon_h1", "nemotron_h"),
)


def assert_sums(
    table: EffectTable, small: Any, forward: Callable[[], Tensor], without: float, cap: float = 0.0
) -> None:
    """The terms sum to the logit: to the bit with the row of roundings, up to the error rule
    without it; and the sum without some of them is another one.
    """
    pair = list(PAIR)
    assert table.baseline is not None
    assert abs(float(table.values.sum()) - table.baseline) < 1e-12
    plains = [plain.detach() for plain in in_orders(lambda: forward()[0, -1, pair])]
    small.double()
    exact = forward()[0, -1].detach()
    allowed = 2 * allowed_error(plains, exact[pair])
    if cap:  # the terms sum to the logit before the cap
        exact = cap * torch.atanh(exact / cap)
        allowed *= 2
    total = float(table.values[:-1].sum())
    assert abs(total - float(exact[PAIR[0]] - exact[PAIR[1]])) <= allowed
    assert abs(without - table.baseline) > allowed, "negative control: a missing term is seen"


@pytest.mark.full(keep=["llama", "gemma2", "gpt_neox", "gemma4_text", "falcon_h1"])
@pytest.mark.parametrize("name", DECODERS)
def test_direct_attribution_sums_to_the_logit(name: str) -> None:
    """Also with layer inputs (Gemma 4), parallel mechanisms and layers of one sublayer."""
    small = model_of(name)
    table = attribute(small, CLEAN, PAIR)
    assert table.rows[-1] == "rounding of the run"
    own = {"gemma4_text": "1.layer_input", "falcon_h1": "1.mixers.0.head.1", "nemotron_h": "1.mlp"}
    assert f"layers.{own.get(name, '1.head.1')}" in table.rows
    assert np.isfinite(logit_lens(small, CLEAN).values).all()
    without, cap = float(table.values[1:-1].sum()), getattr(small.decoder.head, "cap", 0.0)
    assert_sums(table, small.decoder, lambda: small.forward(CLEAN), without, cap)


def encoder_decoder(kind: str) -> Seq2Seq:
    t5 = family("t5")
    torch.manual_seed(2)
    if kind.startswith("t5"):
        network = t5.build(parse(t5.config, TINY[kind]))
    else:
        residual = {"post-norm": PostNorm, "pre-norm": PreNorm}[kind]
        network = transformer(97, 24, 3, 2, residual=residual)
    config = SimpleNamespace(vocab_size=97)
    return Seq2Seq(shaken(network), None, config, start=0, eos_ids=[1])


SOURCE, TARGET = torch.tensor([[5, 9, 2, 31]]), torch.tensor([[0, 9, 7]])


@pytest.mark.full(keep=["t5, gated", "post"])
@pytest.mark.parametrize("kind", ["t5", "t5, gated", "post-norm", "pre-norm"])
def test_direct_attribution_of_an_encoder_decoder(kind: str) -> None:
    """Heads that read the source and heads that read the target: their parts sum to the logit."""
    small = encoder_decoder(kind)
    table = attribute(small, (SOURCE, TARGET), PAIR)
    heads = [name for name in table.rows if ".head." in name]
    assert {name.split(".")[3] for name in heads} == {"attention", "cross"}
    own = [i for i, name in enumerate(table.rows) if ".cross." not in name]
    without = float(table.values[own].sum())  # the source counts
    assert_sums(table, small.network, lambda: small.forward(SOURCE, TARGET), without)


def test_attribution_by_key_of_an_encoder_decoder() -> None:
    small = encoder_decoder("t5, gated")
    whole = attribute(small, (SOURCE, TARGET), PAIR)
    split = attribute(small, (SOURCE, TARGET), PAIR, by_key=True)
    assert split.columns == (*(f"source {i}" for i in range(4)), *(f"target {i}" for i in range(3)))
    assert whole.rows == split.rows
    assert np.abs(split.values.sum(1) - whole.values[:, 0])[:-1].max() < 1e-5
    for name, row in zip(split.rows, split.values, strict=True):
        if ".head." in name:
            assert not row[slice(4, None) if ".cross." in name else slice(0, 4)].any(), name
    movers = name_mover_scores(small, (SOURCE, TARGET), 9)
    assert movers.rows[:2] == ("decoder.layers.0.attention", "decoder.layers.0.cross")
    nine = attribute(small, (SOURCE, TARGET), 9, by_key=True)
    row = dict(zip(nine.rows, nine.values, strict=True))
    for tap, column in (("cross", 1), ("attention", 4 + 1)):
        name = f"decoder.layers.0.{tap}"
        moved = movers.values[movers.rows.index(name), 2]
        assert abs(moved - row[f"{name}.head.2"][column]) < 1e-12


def test_the_logit_lens_of_an_encoder_decoder() -> None:
    small = encoder_decoder("t5")
    table = logit_lens(small, (SOURCE, TARGET))
    assert table.rows == ("decoder.embed", *(f"decoder.layers.{i}" for i in range(3)))
    with torch.no_grad():
        p = small.forward(SOURCE, TARGET)[0].double().softmax(-1)
    assert np.array_equal(table.values[-1], p.max(-1).values.numpy())
    with pytest.raises(ArgumentError, match="needs a pre-norm model"):
        logit_lens(encoder_decoder("post-norm"), (SOURCE, TARGET))


def test_the_term_of_a_head_is_what_its_removal_takes_away() -> None:
    """Without later layers and with the norm held fixed, a head's term is its whole effect."""
    small = model(num_hidden_layers=1)
    small.decoder.double()
    block: Any = small.decoder.layers[0]
    nn.init.zeros_(block.feed_forward.down.weight)
    table = attribute(small, CLEAN, PAIR)
    norm: Any = small.decoder.norm
    with Trace("residual") as trace, torch.no_grad():
        small.forward(CLEAN)
    x = trace["residual"]
    scale = (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    small.decoder.norm = _Scaled(norm.weight.detach(), scale)
    frozen = ablate(small, CLEAN, difference)
    terms = dict(zip(table.rows, table.values[:, 0], strict=True))
    for h in range(4):
        assert abs(terms[f"layers.0.head.{h}"] + frozen.values[0, h]) < 1e-10


class _Scaled(nn.Module):
    """A norm with the scale of one run."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.weight, self.scale = weight, scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.weight


def test_direct_attribution_by_key() -> None:
    small = model()
    whole, split = attribute(small, CLEAN, PAIR), attribute(small, CLEAN, PAIR, by_key=True)
    assert whole.rows == split.rows
    assert split.values.shape[1] == 5
    assert np.abs(split.values.sum(1) - whole.values[:, 0])[:-1].max() < 1e-5
    assert split.baseline is not None
    assert abs(split.values.sum() - split.baseline) < 1e-12
    heads = [i for i, name in enumerate(split.rows) if ".head." in name]
    assert np.abs(split.values[heads, :-1]).max() > 1e-3, "weights on earlier keys are told apart"


def test_attribution_patching_is_the_slope_of_patching() -> None:
    """For small changes of the activations, the estimate and patching agree; as numbers: fp64."""
    small = model(sharp=8.0)
    small.decoder.double()
    estimate = attribute(small, CLEAN, difference, method="gradient", corrupt=CORRUPT)
    with Trace("z", gradients=True) as trace:
        difference(small.forward(CORRUPT)).backward()
    with Trace("z") as clean, torch.no_grad():
        small.forward(CLEAN)
    step = 1e-4
    base = measured(small, CORRUPT)
    for layer, head in itertools.product(range(3), range(4)):
        name = f"layers.{layer}.z"
        toward = clean[name][:, head] - trace[name].detach()[:, head]

        def edit(z: Tensor, head: int = head, toward: Tensor = toward) -> Tensor:
            return z.index_add(1, torch.tensor([head]), step * toward[:, None])

        with Trace(edit={name: edit}):
            slope = (measured(small, CORRUPT) - base) / step
        assert abs(slope - estimate.values[layer, head]) < 1e-3 * np.abs(estimate.values).max()
    real = patch(small, CLEAN, CORRUPT, difference, what="heads")
    correlation = np.corrcoef(real.values.ravel(), estimate.values.ravel())[0, 1]
    assert correlation > 0.8
    assert estimate.target == real.target
    zero = attribute(small, CLEAN, difference, method="gradient")
    ablated = ablate(small, CLEAN, difference)
    assert np.corrcoef(zero.values.ravel(), ablated.values.ravel())[0, 1] > 0.8


def test_integrated_gradients_are_complete() -> None:
    """The heads of a layer sum to the metric minus that without the layer's attention."""
    small = model(sharp=8.0)
    small.decoder.double()
    table = attribute(small, CLEAN, difference, method="integrated_gradients", steps=24)
    for layer in range(3):
        with Trace(edit={f"layers.{layer}.pattern": torch.zeros_like}):
            without = measured(small, CLEAN)
        assert table.baseline is not None
        assert abs(table.values[layer].sum() - (table.baseline - without)) < 1e-6
    few = attribute(small, CLEAN, difference, method="integrated_gradients", steps=1)
    assert np.abs(few.values - table.values).max() > 1e-6, "negative control: one step is coarse"


def test_the_logit_lens_by_hand() -> None:
    small = model()
    table = logit_lens(small, CLEAN)
    x = small.decoder.embed(CLEAN)
    head: Any = small.decoder.head
    for i in range(4):
        p = head(small.decoder.norm(x))[0].double().softmax(-1)
        assert np.array_equal(table.values[i], p.max(-1).values.detach().numpy())
        assert list(table.cells[i]) == small.tokenizer.pieces(p.argmax(-1).tolist())
        x = small.decoder.layers[i](x) if i < 3 else x
    assert torch.equal(head(small.decoder.norm(x)), small.forward(CLEAN)), "the model"
    chosen = logit_lens(small, CLEAN, 11)
    assert chosen.values[-1, -1] == float(small.forward(CLEAN)[0, -1].double().softmax(-1)[11])


def test_rollout_equals_a_loop() -> None:
    small = model()
    recording = record(small, CLEAN)
    table = rollout(small, CLEAN)
    wanted = np.eye(5)
    for layer in range(3):
        mean = sum(recording.weights(layer, h).numpy() for h in range(4)) / 4
        wanted = (0.5 * mean + 0.5 * np.eye(5)) @ wanted
    wanted /= wanted.sum(1, keepdims=True)
    assert np.abs(table.values - wanted).max() < 1e-12
    assert np.array_equal(table.values, rollout(recording).values)
    assert "heuristic" in table.title
    assert table.notes
    assert np.abs(rollout(small, CLEAN, residual=0.0).values - wanted).max() > 0.01
    # a token that sees nothing, and nothing sees
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
    hidden = torch.tensor([False, False, True])
    recording = record(layer.eval(), torch.randn(1, 3, 16), hidden | hidden[:, None])
    for method, unseen in itertools.product(("rollout", "flow"), (0.0, 1.0)):
        values = rollout(recording, method=method, residual=unseen).values
        assert values[2].tolist() == [0, 0, unseen]
        assert np.isfinite(values).all()


def test_flow_equals_the_smallest_cut() -> None:
    """Maximum flow is minimum cut: all 2^n ways to cut a small graph are tried."""
    rng = np.random.default_rng(0)
    T, L = 3, 2
    layers = [np.tril(rng.random((T, T))) for _ in range(L)]
    edges = [
        ((depth + 1, i), (depth, j), x)
        for depth, layer in enumerate(layers) for (i, j), x in np.ndenumerate(layer)
    ]  # fmt: skip
    nodes = [(depth, i) for depth in range(L + 1) for i in range(T)]
    found = flows(layers)
    for i, j in itertools.product(range(T), range(T)):
        source, sink = (L, i), (0, j)
        free = [node for node in nodes if node not in (source, sink)]
        cuts = []
        for sides in itertools.product((False, True), repeat=len(free)):
            inside = {source, *(node for node, side in zip(free, sides, strict=True) if side)}
            cuts.append(sum(c for a, b, c in edges if a in inside and b not in inside))
        assert abs(found[i, j] - min(cuts)) < 1e-12
    small = model()
    row = rollout(small, CLEAN, method="flow", query=-1)
    assert np.allclose(row.values[0], rollout(small, CLEAN, method="flow").values[-1])


class Adapter(nn.Module):
    """A linear map with a term of low rank, with the names that PEFT gives them."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))

    def merged(self) -> nn.Linear:
        """One map with the sum of the weights."""
        self.base_layer.weight.data += self.lora_B.weight.data @ self.lora_A.weight.data
        return self.base_layer


ADAPTED = r"(o_proj|down_proj|lm_head)$"


@pytest.mark.full(keep=["Gemma2", "adapters"])
@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "Gemma3", "Olmo2", "adapters"])
def test_the_terms_of_a_foreign_model_are_those_of_the_same_model_here(
    kind: str, tmp_path: Path
) -> None:
    """Norms after attention, a cap of the logits, and adapters on maps that terms go through."""
    pytest.importorskip("transformers")
    from tests.integrations.families import decoder

    # sdpa knows no cap of scores
    attention = "regard" if kind == "Gemma2" else "sdpa"
    network = decoder("Llama" if kind == "adapters" else kind, attention)
    maps = [name for name, _ in network.named_modules() if re.search(ADAPTED, name)]
    if kind == "adapters":
        for name in maps:
            network.set_submodule(name, Adapter(network.get_submodule(name)))
    terms = [attribute(network, CLEAN, PAIR, by_key=by_key) for by_key in (False, True)]
    lens = logit_lens(network, CLEAN)
    if kind == "adapters":
        for name in maps:
            network.set_submodule(name, network.get_submodule(name).merged())
    network.save_pretrained(tmp_path)
    ours, wide = regard.load(tmp_path), regard.load(tmp_path)
    wide.decoder.double()

    def numbers(table: Any, stop: int | None = None) -> Tensor:
        return torch.tensor(table.values[:stop])

    for by_key in (False, True):
        found = terms[by_key]
        options: dict[str, Any] = {"by_key": by_key}
        assert_close_rule(
            numbers(found, -1).float(),
            lambda: numbers(attribute(ours, CLEAN, PAIR, **options), -1).float(),  # noqa: B023
            numbers(attribute(wide, CLEAN, PAIR, **options), -1),
        )
        assert found.quantity == attribute(ours, CLEAN, PAIR, **options).quantity
    assert_close_rule(
        numbers(lens).float(),
        lambda: numbers(logit_lens(ours, CLEAN)).float(),
        numbers(logit_lens(wide, CLEAN)),
    )


def foreign(name: str) -> Any:
    """A random model of transformers whose residual stream or logits are not plain sums."""
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    wide = {"intermediate_size": 32, "num_key_value_heads": 1}
    kinds: dict[str, dict[str, Any]] = {
        "Falcon": {},
        "Cohere": wide | {"logit_scale": 0.25},
        "Granite": wide | {"residual_multiplier": 0.5, "logits_scaling": 2.0},
        "GPTNeoX": {"intermediate_size": 32, "use_parallel_residual": True},
        "Phi": {"intermediate_size": 32},
        "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    }
    config = getattr(transformers, f"{name}Config")(**sizes, **ends, **kinds[name])
    torch.manual_seed(4)
    return shaken(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))


@pytest.mark.full(keep=["Falcon", "Granite", "OPT"])
@pytest.mark.parametrize("name", ["Falcon", "Cohere", "Granite", "GPTNeoX", "Phi", "OPT"])
def test_streams_that_scale_norm_or_add_in_place(name: str) -> None:
    """The terms sum to the last state and to the logits, and the rounding of the run is small."""
    network = foreign(name)
    table = attribute(network, CLEAN, PAIR)
    logits = network(CLEAN).logits[0, -1].double().detach()
    wanted = float(logits[PAIR[0]] - logits[PAIR[1]])
    rounding = 2**-20 * float(np.abs(table.values).max())
    assert abs(float(table.values.sum()) - wanted) < rounding
    assert table.rows[-1] == "rounding of the run"
    assert abs(table.values[-1, 0]) < rounding
    lens = logit_lens(network, CLEAN)
    assert np.isfinite(lens.values).all()
    run = prepare_run(network, CLEAN)
    found = decompose(run, -1)
    total = torch.stack([term.vector for term in found.terms.terms]).sum(0).detach()
    last = found.terms.vector_of(found.states[-1])
    assert float((total - last).abs().max()) < 2**-20 * float(last.abs().max())
    if name == "Granite":  # half of what the output map makes of the head
        attention = network.model.layers[1].self_attn
        z = found.terms.taps["model.layers.1.self_attn.z"][0, 1, -1].double()
        (head,) = (x for x in found.terms.terms if x.name.endswith("layers.1.self_attn.head.1"))
        map_of_head = attention.o_proj.weight.detach().double()[:, 8:]
        torch.testing.assert_close(
            head.vector.detach(), 0.5 * map_of_head @ z, rtol=1e-6, atol=1e-9
        )


def test_a_stream_with_another_part_is_refused() -> None:
    network = foreign("Granite")
    block = network.model.layers[0]
    plain = block.forward
    block.forward = lambda x, *args, **named: plain(x, *args, **named) + x.roll(1, -1)
    with pytest.raises(ArgumentError, match="another part adds to the residual stream"):
        attribute(network, CLEAN, PAIR)


def test_streams_that_are_no_sum_are_refused() -> None:
    with pytest.raises(ArgumentError, match="AltUpBlock, which keeps more in its residual stream"):
        attribute(model_of("gemma3n_text"), CLEAN, PAIR)
    with pytest.raises(ArgumentError, match="Tanh is not a linear map with a fixed scale"):
        FrozenNorm(nn.Tanh(), (x := torch.randn(1, 2, 4)), x.tanh())


def test_an_adapter_is_one_map() -> None:
    block = nn.ModuleDict({"attention": nn.Linear(4, 4), "out": Adapter(nn.Linear(4, 4))})
    assert find_feed_forward(block) is block["out"]


PATHS: dict[str, Any] = {"what": "paths"}
GRADIENT: dict[str, Any] = {"method": "gradient"}
STEPS: dict[str, Any] = {"method": "integrated_gradients", "steps": 0}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: ablate(m, CLEAN, method="zeros"), "did you mean 'zero'"),
        (lambda m: ablate(m, CLEAN, layers=[7]), "there is no layer 7; the layers are layers.0"),
        (lambda m: ablate(m, CLEAN, heads=[9]), "head 9 does not exist; the heads are 0 to 3"),
        (lambda m: ablate(m, CLEAN, "of the forest"), "inspect attribute --whole`, takes a"),
        (lambda m: ablate(nn.Linear(2, 2), torch.zeros(1, 2), lambda y: y.sum()), "no tap 'z'"),
        (lambda m: ablate(nn.Linear(2, 2), torch.zeros(1, 2), "x"), "has no tokenizer"),
        (lambda m: patch(m, CLEAN, CORRUPT[:, 1:]), "the same number of tokens"),
        (lambda m: patch(m, CLEAN, CORRUPT, what="head"), "did you mean 'heads'"),
        (lambda m: patch(m, CLEAN, CORRUPT, receiver=Receiver("layers.1", 0)), "receiver ends"),
        (lambda m: patch(m, CLEAN, CORRUPT, **PATHS, receiver=("x", 0, "k")), "is no receiver"),
        (lambda m: patch(m, CLEAN, CORRUPT, **PATHS, receiver=("layers.1", 9, "k")), "head 9 of"),
        (lambda m: patch(m, CLEAN, CLEAN).share, "no two runs with different metrics"),
        (lambda m: attribute(m, CLEAN, difference), "needs a token or a pair"),
        (lambda m: attribute(m, CLEAN, method="gradients"), "did you mean 'gradient'"),
        (lambda m: attribute(m, CLEAN, corrupt=CORRUPT), "corrupt does not apply"),
        (lambda m: attribute(m, CLEAN, by_key=True, **GRADIENT), "by_key does not apply"),
        (lambda m: attribute(m, CLEAN, **STEPS), "steps is 0"),
        (lambda m: attribute(m, CLEAN, lambda y: y.detach().sum(), **GRADIENT), "not depend on"),
        (lambda m: attribute(m, CLEAN, **GRADIENT, corrupt=CORRUPT[:, 1:]), "the same number of"),
        (lambda m: rollout(m, CLEAN, method="roll"), "method is 'roll'"),
        (lambda m: rollout(m, CLEAN, residual=2.0), "residual is 2.0"),
        (lambda m: rollout(m, CLEAN, query=1), "it applies to method='flow'"),
    ],
)
def test_what_is_refused(call: Callable[[Model], object], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        call(model())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: ablate("tiny", CLEAN), "model is str; it must be a Model"),  # type: ignore[arg-type]
        (lambda m: ablate(m, CLEAN, (1, 2, 3)), "the answer is"),  # type: ignore[arg-type]
        (lambda m: ablate(nn.Linear(2, 2), "a text"), "has no tokenizer of this package"),
    ],
)
def test_wrong_types_are_refused(call: Callable[[Model], object], says: str) -> None:
    with pytest.raises(ArgumentTypeError, match=says):
        call(model())


def test_tables_in_files(tmp_path: Any) -> None:
    values = np.array([[0.5, float("nan")]])
    table = EffectTable("a", "effect", values, "layer", "head", ("0",), ("0", "1"))
    assert table.to(tmp_path / "t.csv").read_text() == "layer,head,effect\n0,0,0.5\n"
    assert np.array_equal(np.load(table.to(tmp_path / "t.npy")), table.values, equal_nan=True)
    assert '"values": [[0.5, null]]' in table.to(tmp_path / "t.json").read_text()
    pytest.importorskip("matplotlib")
    assert table.to(tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"
    assert "layer 0, head 0: 0.5" in table.to(tmp_path / "t.svg").read_text()
    ablated = ablate(model(), CLEAN, 3, layers=[0])
    with use_language("zh"):
        drawn = ablated.to(tmp_path / "zh.svg").read_text()
    assert "对各头做置零消融" in drawn
    assert ">头<" in drawn
    assert "ablation" not in drawn
    with pytest.raises(FileError, match=r"the name must end in \.csv"):
        table.to(tmp_path / "t.xls")


def test_tables_in_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    table = EffectTable("<b>", "effect", np.array([[0.5]]), "layer", "head", ("<i>",), ("0",))
    monkeypatch.setitem(sys.modules, "pandas", None)
    shown = table._repr_mimebundle_()
    assert "<i>" not in shown["text/html"]
    assert "&lt;i&gt;" in shown["text/html"]
    with pytest.raises(ArgumentError, match="a data frame needs pandas"):
        table.frame()
