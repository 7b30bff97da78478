"""MPT models of transformers, saved by it and loaded here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import regard
from regard.biases.alibi import alibi_slopes
from regard.errors import FileError
from regard.nn.projections.fused import FusedQKV
from tests.parity.families import changes
from tests.parity.families.harness import (
    assert_decoder,
    assert_differs,
    saved,
    theirs,
    transformers,
)
from tests.parity.families.published import assert_saved

H, CLIP = 6, 0.7
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 48,
    "n_heads": H,
    "n_layers": 2,
    "max_seq_len": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped, own scale, flatter": {
        "attn_config": {"clip_qkv": CLIP, "softmax_scale": 0.6, "alibi_bias_max": 4},
    },
    "untied, four heads": {"tie_word_embeddings": False, "n_heads": 4},
}


@pytest.fixture(autouse=True)
def steepness_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes the slopes for any alibi_bias_max, and asks for 8: here it is asked for
    the config's.
    """
    model = transformers.models.mpt.modeling_mpt.MptModel
    right = model.build_mpt_alibi_tensor

    def build(self: Any, heads: int, length: int, device: Any = None) -> Any:
        return right(self, heads, length, self.config.attn_config.alibi_bias_max, device)

    monkeypatch.setattr(model, "build_mpt_alibi_tensor", build)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", CHANGES)
def test_mpt(name: str, tmp_path: Path) -> None:
    model = theirs("Mpt", SMALL | CHANGES[name])
    mine = assert_decoder(model, tmp_path)
    assert_saved(mine, model, tmp_path)


REFUSED: dict[str, dict[str, Any]] = {
    "attn_config.alibi is False; only True is supported": {"attn_config": {"alibi": False}},
    "attn_config.attn_type is 'multiquery_attention'": {
        "attn_config": {"attn_type": "multiquery_attention"}
    },
    "attn_config.prefix_lm is True": {"attn_config": {"prefix_lm": True}},
    "attn_config.qk_ln is True": {"attn_config": {"qk_ln": True}},
    "attn_config has the unknown key 'clip_qvk'": {"attn_config": {"clip_qvk": 1.0}},
    "attn_config.clip_qkv is -1.0; it must be above 0": {"attn_config": {"clip_qkv": -1.0}},
    "attn_config.alibi_bias_max is null": {"attn_config": {"alibi_bias_max": None}},
    "attn_config is 'alibi'; it must be an object": {"attn_config": "alibi"},
    "no_bias is False": {"no_bias": False},
    "logit_scale is 'inv_sqrt_d_model'": {"logit_scale": "inv_sqrt_d_model"},
    "expansion_ratio is 8": {"expansion_ratio": 8},
    "norm_type is 'rmsnorm'": {"norm_type": "rmsnorm"},
    "dim 48 is not divisible by 5 heads": {"n_heads": 5},
    "hidden_size is 36 and d_model is 48; they mean the same": {"hidden_size": 36},
}


def test_what_is_refused(tmp_path: Path) -> None:
    path = saved(theirs("Mpt", SMALL), tmp_path) / "config.json"
    raw = json.loads(path.read_text())
    for message, change in REFUSED.items():
        path.write_text(json.dumps(raw | change))
        with pytest.raises(FileError, match=message):
            regard.load(tmp_path)


# Negative controls.


def unclipped(network: Any) -> None:
    for attention in changes.attentions(network):
        attention.project.__class__ = FusedQKV


def clipped_values_only(network: Any) -> None:
    for attention in changes.attentions(network):
        project = attention.project
        project._heads = lambda x, which, p=project: (
            type(p)._heads(p, x, which) if which == 2 else FusedQKV._heads(p, x, which)
        )


def biased_norms(network: Any) -> None:
    """As if the norms had a bias that was left where it was."""
    for module in network.modules():
        if isinstance(module, nn.LayerNorm):
            module.bias = nn.Parameter(0.1 * module.weight.data, requires_grad=False)


WRONG = [
    changes.head_by_head,
    changes.keys_for_values,
    changes.no_bias,
    biased_norms,
    changes.norms_swapped,
    changes.slopes("slopes 2^(-8h/6)", [2.0 ** (-8 * (h + 1) / H) for h in range(H)]),
    changes.slopes("slopes from 2^0", [2.0**-h for h in range(H)]),
    changes.activation(nn.SiLU()),
]
WRONG_CLIPPED = [
    unclipped,
    clipped_values_only,
    changes.each("usual scale", scale=None),
    changes.slopes("usual slopes", alibi_slopes(H)),
    changes.slopes("twice", [slope**2 for slope in alibi_slopes(H)]),
]


@pytest.mark.parametrize(
    "name, wrong",
    [("plain", WRONG), ("clipped, own scale, flatter", WRONG_CLIPPED)],
    ids=["plain", "clipped"],
)
def test_wrong_variants_are_far(name: str, wrong: list[Any], tmp_path: Path) -> None:
    model = theirs("Mpt", SMALL | CHANGES[name])
    mine = regard.load(saved(model, tmp_path))
    for change in wrong:
        assert_differs(mine, model, change)
    changes.assert_other_gelu(mine, model)
