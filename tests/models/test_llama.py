"""Parity with transformers' Llama on small random configs: prefill, chunks, decode, left padding;
wrong ones must fail.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.models.model import Model
from regard.positions import Rotary
from regard.span import Span
from tests.models import small
from tests.rules import assert_close_rule

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="parity needs the transformers extra")

CONFIGS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one group": {"num_key_value_heads": 1},
    "no groups, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "usual head dim, other base": {"head_dim": 6, "rope_theta": 500.0, "rms_norm_eps": 1e-2},
    "deep and narrow": {
        "num_hidden_layers": 4,
        "hidden_size": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 2,
    },
}
LENGTH = 40


def pair(folder: Path, **change: Any) -> tuple[Model, Any]:
    """Ours, and theirs from the folder that ours wrote."""
    ours = small.model(seed=4, **change)
    small.write(folder, ours)
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return ours, theirs.eval().requires_grad_(False)


@pytest.fixture(scope="module", params=CONFIGS)
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Model, Any]:
    return pair(tmp_path_factory.mktemp("llama"), **CONFIGS[request.param])


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any]:
    return pair(tmp_path_factory.mktemp("llama"))


def ids(B: int = 2, T: int = LENGTH) -> Tensor:
    return torch.randint(0, 300, (B, T), generator=torch.Generator().manual_seed(1))


def assert_near(mine: Tensor, theirs: Tensor) -> None:
    """1e-5 of the largest logit, in fp32."""
    assert mine.shape == theirs.shape
    worst, most = float((mine - theirs).detach().abs().max()), 1e-5 * float(theirs.abs().max())
    assert worst <= most, f"logits differ by {worst:.3g}, allowed {most:.3g}"


def test_the_weights_are_all_theirs_and_all_ours(models: tuple[Model, Any]) -> None:
    ours, theirs = models
    mine = sum(p.numel() for p in ours.decoder.parameters())
    assert mine == sum(p.numel() for p in theirs.parameters())
    c = ours.config
    assert (theirs.config.head_dim, theirs.config.num_key_value_heads) == (
        c.head_dim,
        c.num_key_value_heads,
    )
    assert theirs.config.rope_parameters["rope_theta"] == c.rope_theta


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_prefill(models: tuple[Model, Any], backend: str) -> None:
    ours, theirs = models
    assert_near(ours(ids(), backend=backend), theirs(ids()).logits)


def test_chunks_and_decoding(models: tuple[Model, Any]) -> None:
    """The logits of their one pass, whose error in fp32 says how much rounding grows."""
    ours, theirs = models
    exact = copy.deepcopy(theirs).double()(ids()).logits
    for chunks in ([1] * 3 + [LENGTH - 8] + [1] * 5, [17, 20, 1, 1, 1]):
        caches = ours.new_caches()
        parts = [ours(part, caches=caches) for part in ids().split(chunks, 1)]
        assert_close_rule(torch.cat(parts, 1), lambda: theirs(ids()).logits, exact)


def test_left_padding(models: tuple[Model, Any]) -> None:
    """Rows of 40, 23 and 1 tokens: positions say what is real, and what the padding holds changes
    nothing.
    """
    ours, theirs = models
    keep = torch.arange(LENGTH) >= LENGTH - torch.tensor([LENGTH, 23, 1])[:, None]
    positions = keep.long().cumsum(1) - 1
    padded = ids(3)
    mine = ours(padded, positions)
    full = theirs(padded, attention_mask=keep.long(), position_ids=positions.clamp(min=0)).logits
    assert_near(mine[keep], full[keep])
    other = torch.where(keep, padded, 7)
    assert torch.equal(ours(other, positions)[keep], mine[keep])
    alone = ours(padded[1:2, -23:])
    assert_near(mine[1:2, -23:], alone)
    caches, half = ours.new_caches(), LENGTH // 2
    ours(padded[:, :half], positions[:, :half], caches)
    for t in range(half, LENGTH):
        step = ours(padded[:, t : t + 1], positions[:, t : t + 1], caches)
        assert_near(step[:, 0][keep[:, t]], full[:, t][keep[:, t]])


def test_generated_ids_are_theirs(grouped: tuple[Model, Any]) -> None:
    """Greedy ids; where they part, the two best logits must have been a tie."""
    ours, theirs = grouped
    prompt = ours.encode("the quick")
    generation = ours.generate("the quick", max_tokens=20)
    list(generation)
    right = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, prompt.shape[1] :].tolist()
    assert len(generation.ids) > 3
    for i, (a, b) in enumerate(zip(generation.ids, right, strict=False)):
        if a != b:
            logits = ours(torch.cat([prompt, torch.tensor([right[:i]], dtype=torch.long)], 1))[
                0, -1
            ]
            assert float((logits[a] - logits[b]).abs()) <= 1e-4 * float(logits.abs().max())
            break


def test_their_folder_is_read(tmp_path: Path) -> None:
    """The other way: what transformers saves, regard.load reads."""
    c = small.config()
    keys = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    made = transformers.LlamaConfig(
        **{k: getattr(c, k) for k in keys}, head_dim=10, rope_theta=700.0, rms_norm_eps=1e-5
    )
    theirs = transformers.LlamaForCausalLM(made).eval().requires_grad_(False)
    small.randomize(theirs, seed=9)
    theirs.save_pretrained(tmp_path)
    small.model().tokenizer.save(tmp_path)
    ours = regard.load(tmp_path)
    assert ours.config.rope_theta == 700.0
    assert_near(ours(ids()), theirs(ids()).logits)


# Negative controls: what must be told apart.


def wrong(ours: Model, change: Any) -> Tensor:
    decoder = copy.deepcopy(ours.decoder)
    for layer in decoder.layers:
        change(layer.attention)
    return Model(decoder, ours.tokenizer, ours.config)(ids())


def interleaved(attention: Any) -> None:
    rotary = Rotary(10, layout="interleaved")
    attention.project.q.steps[0] = rotary
    attention.project.k.steps[0] = rotary


def window(attention: Any) -> None:
    attention.mask = masks.Causal() & masks.Window(LENGTH - 1)


def tiled(attention: Any) -> None:
    """Query head h with key/value head h % G."""
    weight = attention.project.q.linear.weight
    weight.data = weight.data.unflatten(0, (4, 10))[[0, 2, 1, 3]].flatten(0, 1)
    weight = attention.output.weight
    weight.data = weight.data.unflatten(1, (4, 10))[:, [0, 2, 1, 3]].flatten(1, 2)


def key_one_late(attention: Any) -> None:
    right = attention.project.k.steps[0]

    class Late(torch.nn.Module):
        def forward(self, x: Tensor, positions: Span) -> Tensor:
            return right(x, Span(positions.start + 1, positions.length))

    attention.project.k.steps[0] = Late()


def unscaled(attention: Any) -> None:
    attention.scale = 24**-0.5


def plain_norm(attention: Any) -> None:
    attention.project.q.flat = regard.nn.RMSNorm(40)


@pytest.mark.parametrize("change", [interleaved, window, tiled, key_one_late, unscaled, plain_norm])
def test_a_wrong_model_is_caught(grouped: tuple[Model, Any], change: Any) -> None:
    ours, theirs = grouped
    right = theirs(ids()).logits
    assert_near(wrong(ours, lambda attention: None), right)
    with pytest.raises(AssertionError, match="logits differ"):
        assert_near(wrong(ours, change), right)


def test_norm_weights_of_one_would_hide_a_missing_norm() -> None:
    """Why weights are randomized: the control of the control."""
    made = small.model(seed=4)
    norms = [p for p in made.decoder.parameters() if p.ndim == 1]
    assert all(float((p - 1).abs().max()) > 0.1 for p in norms)
    assert len(norms) == 2 * made.config.num_hidden_layers + 1
