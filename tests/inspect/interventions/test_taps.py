"""The taps of blocks, norms and heads: bitwise what plain forward hooks see, on every family, on
models of transformers and on any module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import Trace
from regard.configs.reader import parse
from regard.errors import ArgumentError
from regard.inspect import taps, watch
from regard.models.decoder import Decoder
from regard.models.encoder import HeadedEncoder
from regard.models.families import family
from regard.nn.blocks.blocks import Block, DecoderBlock
from regard.nn.blocks.mixer_block import MixerBlock
from tests.cost.tiny import TINY
from tests.inspect.small_model import model

IDS = torch.tensor([[5, 9, 2, 31], [7, 7, 1, 3]])


@contextmanager
def hooked(modules: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Collect the results of modules by plain forward hooks."""
    seen: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def after(_module: nn.Module, _inputs: Any, result: Any) -> None:
            seen[name] = (result[0] if isinstance(result, tuple) else result).detach().clone()

        return after

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(hook(name)).remove)
        yield seen


def parts(network: nn.Module) -> dict[str, nn.Module]:
    """The modules of one of our networks, by the names that their taps must have."""
    found: dict[str, nn.Module] = {}
    if isinstance(network, HeadedEncoder):
        network = network.encoder
    sides = {"": network}
    if not isinstance(network, Decoder) and hasattr(network, "encoder"):
        sides = {"encoder.": network.encoder, "decoder.": network}
    for prefix, side in sides.items():
        found[f"{prefix}embed"] = side.get_submodule("embed")
        if not isinstance(side.norm, nn.Identity):
            found[f"{prefix}norm"] = side.get_submodule("norm")
        layers: Any = side.layers
        for i, block in enumerate(layers):
            assert isinstance(block, (Block, DecoderBlock))
            found[f"{prefix}layers.{i}.residual"] = block
            found[f"{prefix}layers.{i}.attention.norm"] = block.attention_residual.norm
            if isinstance(block, MixerBlock):
                continue  # it has one sublayer
            found[f"{prefix}layers.{i}.mlp"] = block.feed_forward
            found[f"{prefix}layers.{i}.mlp.norm"] = block.feed_forward_residual.norm
    if isinstance(getattr(network, "head", None), nn.Module):
        found["logits"] = network.get_submodule("head")
    return found


@pytest.mark.full(keep=["llama", "gemma2", "bert", "t5", "gpt_neox"])
@pytest.mark.parametrize("name", TINY)
def test_every_block_of_every_family(name: str) -> None:
    found = family(TINY[name]["model_type"])
    torch.manual_seed(0)
    network = found.build(parse(found.config, TINY[name])).eval()
    modules = parts(network)
    arguments: tuple[Any, ...] = (IDS, IDS) if "decoder.embed" in modules else (IDS,)
    if name == "whisper":  # its source is log-mel features
        arguments = (torch.randn(len(IDS), TINY[name]["num_mel_bins"], 12), IDS)
    with torch.no_grad(), hooked(modules) as seen, Trace(*modules, missing="ignore") as trace:
        network(*arguments)
    if "encoder.embed" in modules and modules["encoder.embed"] is modules["decoder.embed"]:
        seen["encoder.embed"] = trace["encoder.embed"]  # one module, called twice
    wrong = [n for n in modules if n in seen and not torch.equal(trace[n], seen[n])]
    assert wrong == []
    assert {n for n in seen if n not in trace} == set()
    blocks = [n for n in modules if n.endswith((".residual", ".mlp"))]
    assert len(blocks) >= 2
    assert all(n in seen for n in blocks)


@pytest.mark.parametrize(
    ("name", "implementation"), [("Llama", "regard"), ("Llama", "sdpa"), ("GPT2", "sdpa")]
)
def test_models_of_transformers(name: str, implementation: str) -> None:
    pytest.importorskip("transformers")
    from tests.integrations.families import decoder

    network = decoder(name, implementation)
    if name == "Llama":
        place = "layers" if implementation == "regard" else "model.layers"
        blocks, last = network.model.layers, "model.norm"
    else:
        place, blocks, last = "transformer.h", network.transformer.h, "transformer.ln_f"
    modules = {f"{place}.{i}.residual": block for i, block in enumerate(blocks)}
    modules |= {f"{place}.{i}.mlp": block.mlp for i, block in enumerate(blocks)}
    modules |= {f"{last}.norm": network.get_submodule(last), "logits": network.lm_head}
    ids = IDS[:1]
    with torch.no_grad(), hooked(modules) as seen, watch(network), Trace(*modules) as trace:
        network(input_ids=ids)
    assert [n for n in modules if not torch.equal(trace[n], seen[n])] == []
    assert {*modules, "embed"} <= set(taps(network, ids))
    with torch.no_grad(), watch(network), Trace(edit={"mlp": torch.zeros_like}):
        changed = network(input_ids=ids).logits
    assert not torch.equal(changed, seen["logits"]), "an edit changes what the model computes"


def test_any_module_within_watch() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
    network = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 16)
    modules = {f"layers.{i}.residual": network.layers[i] for i in range(2)}
    modules |= {f"layers.{i}.mlp": network.layers[i].get_submodule("linear2") for i in range(2)}
    modules["norm.norm"] = network.get_submodule("norm")
    with torch.no_grad(), hooked(modules) as seen, watch(network), Trace(*modules) as trace:
        network(x)
    assert [n for n in modules if not torch.equal(trace[n], seen[n])] == []
    with torch.no_grad(), Trace("residual", missing="ignore") as trace:
        network(x)
    assert list(trace) == [], "without watch no hook is left"


def test_writing_a_tap_equals_a_hook_that_writes() -> None:
    small = model()
    other = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(1))

    def written(_module: nn.Module, _inputs: Any, _result: Any) -> Tensor:
        return other

    for name in ("layers.1", "layers.1.feed_forward"):
        tap = "layers.1.residual" if name == "layers.1" else "layers.1.mlp"
        with torch.no_grad(), Trace(edit={tap: lambda _: other}):
            edited = small.forward(IDS[:1])
        handle = small.decoder.get_submodule(name).register_forward_hook(written)
        with torch.no_grad():
            wanted = small.forward(IDS[:1])
        handle.remove()
        assert torch.equal(edited, wanted)
        assert not torch.equal(edited, small.forward(IDS[:1])), "negative control"


def test_patterns_of_names() -> None:
    small = model()
    with Trace("layers.*.z", "layers.2.residual", "*.norm") as trace:
        small.forward(IDS)
    assert [n for n in trace if n.endswith(".z")] == [f"layers.{i}.z" for i in range(3)]
    assert [n for n in trace if n.endswith(".residual")] == ["layers.2.residual"]
    assert len([n for n in trace if n.endswith("norm")]) == 6, "the last norm has no scope"
    with pytest.raises(ArgumentError, match=r"no tap is named 'layers\.\*\.zz'"):
        Trace("layers.*.zz")
    with (
        pytest.warns(UserWarning, match=r"'decoder\.\*\.z' was never captured"),
        Trace("decoder.*.z"),
    ):
        small.forward(IDS)
    with Trace(edit={"layers.?.z": torch.zeros_like}):
        zeroed = small.forward(IDS)
    with Trace(edit={"z": torch.zeros_like}):
        assert torch.equal(zeroed, small.forward(IDS))


def test_the_list_of_taps_is_what_a_trace_captures() -> None:
    small = model()
    names = small.taps()
    with Trace(*names) as trace:
        small.forward(IDS)
    assert tuple(trace) == names == taps(small)
    assert set(names) - set(small.taps(patterns=False)) == {
        f"layers.{i}.{name}" for i in range(3) for name in ("scores", "pattern")
    }
    assert "layers.0.cross.norm" in {name.removeprefix("decoder.") for name in seq2seq_taps()}, (
        "an encoder-decoder has a norm before each of its three sublayers"
    )


def seq2seq_taps() -> tuple[str, ...]:
    found = family("t5")
    network = found.build(parse(found.config, TINY["t5"])).eval()
    return regard.tracing.list_taps(lambda: network(IDS, IDS))


def test_gradients_through_captures() -> None:
    """Against central differences in fp64, at one number of each captured tensor."""
    small = model()
    small.decoder.double()
    names = ["embed", "layers.0.z", "layers.1.k", "layers.1.mlp", "layers.2.residual"]
    with Trace(*names, gradients=True) as trace:
        small.forward(IDS)[0, -1, 3].backward()
    step = 1e-6
    for name in names:
        gradient, x = trace.gradient(name), trace[name]
        assert gradient.shape == x.shape
        at = tuple((gradient.abs() == gradient.abs().max()).nonzero()[0].tolist())

        def moved(by: float, name: str = name, at: tuple[int, ...] = at) -> float:
            def edit(x: Tensor) -> Tensor:
                x = x.clone()
                x[at] += by
                return x

            with torch.no_grad(), Trace(edit={name: edit}):
                return float(small.forward(IDS)[0, -1, 3])

        numeric = (moved(step) - moved(-step)) / (2 * step)
        assert abs(numeric - float(gradient[at])) <= 1e-6 * max(1.0, abs(numeric)), name


def test_gradients_that_are_not_there() -> None:
    small = model()
    with Trace("z") as trace:
        small.forward(IDS)
    with pytest.raises(ArgumentError, match="open the trace with gradients=True"):
        trace.gradient("layers.0.z")
    with torch.no_grad(), Trace("z", gradients=True) as trace:
        small.forward(IDS)
    with pytest.raises(ArgumentError, match="no gradient has reached"):
        trace.gradient("layers.0.z")
