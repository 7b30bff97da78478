"""MiniMax-M3 of transformers, saved by it and loaded here: attention to blocks
that index heads choose, and clipped experts; wrong variants must be far; the makers' files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.configs.minimax import MiniMaxM3Config
from regard.configs.reader import parse, read_sizes
from regard.errors import ArgumentError
from regard.models.model import Model
from tests.parity.families import changes
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import put, zeros
from tests.parity.families.harness import ids_of, saved
from tests.parity.families.published import count, published
from tests.parity.families.test_llama_relatives import HEAD_DIM, SIZES, other_weights_of_experts

FULL, SPARSE = "full_attention", "minimax_m3_sparse"
SMALL: dict[str, Any] = {
    **SIZES,
    **HEAD_DIM,
    "num_hidden_layers": 3,
    "dense_intermediate_size": 40,
    "shared_intermediate_size": 10,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "layer_types": [FULL, SPARSE, SPARSE],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "index_n_heads": 2,
    "index_head_dim": 12,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "swiglu_limit": 0.7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def without_the_one_of_norms(network: Any) -> None:
    for block in network.layers[1:]:
        block.attention.selector.k.steps[0].weight.data -= 1


SELECTOR = "layers.[12].attention.selector"
CASES = {
    "minimax_m3": Case(
        "MiniMaxM3VL",
        SMALL,
        (
            changes.interleave,
            put(SELECTOR, topk=2),
            put(SELECTOR, size=8),
            put(SELECTOR, topk=100),
            without_the_one_of_norms,
            put("layers.[12].feed_forward.experts.*", limit=1e9),
            put("layers.[12].feed_forward.shared", alpha=1.0),
            put("layers.0.feed_forward", offset=0.0),
            zeros("layers.[12].feed_forward.router.correction"),
            put("layers.[12].feed_forward.router", scale=1.0),
            other_weights_of_experts,
        ),
        kind="TextConfig",
    ),
    "minimax_m3, two local blocks, an index head for all, tied": Case(
        "MiniMaxM3VL",
        SMALL | {"index_local_blocks": 2, "index_n_heads": 1, "tie_word_embeddings": True},
        (put(SELECTOR, local=1),),
        kind="TextConfig",
    ),
    "minimax_m3, all blocks": Case(
        "MiniMaxM3VL", SMALL | {"index_topk_blocks": 20}, kind="TextConfig"
    ),
}
test_every_family, test_wrong_variants_are_far = parity_tests(CASES, keep=1, keep_wrong=1)

MAKERS = published("minimax-m3")


def test_the_config_of_the_makers() -> None:
    """426 billion parameters, as transformers' own network has."""
    import transformers

    with torch.device("meta"):
        text = transformers.MiniMaxM3VLTextConfig(**MAKERS["text_config"])
        theirs = transformers.MiniMaxM3VLForCausalLM(text)
    corrections = sum(x.numel() for n, x in theirs.named_buffers() if n.endswith("correction_bias"))
    assert count(theirs) + corrections == read_sizes(MAKERS, "").parameters == 426_174_572_928
    config = parse(MiniMaxM3Config, MAKERS)
    assert config.kinds() == (FULL,) * 3 + (SPARSE,) * 57
    assert [config.has_experts(i) for i in range(60)] == [False] * 3 + [True] * 57
    assert (config.rope.head_dim * config.rope.partial, config.index_topk_blocks) == (64, 16)


def test_the_names_of_the_makers(tmp_path: Path) -> None:
    """Each expert by itself, no fused maps, index heads beside the attention, a prefix."""
    theirs, ours = tmp_path / "transformers", tmp_path / "makers"
    model = CASES["minimax_m3"].model()
    stored = {}
    for name, x in load_file(saved(model, theirs) / "model.safetensors").items():
        name = f"language_model.{name}".replace("indexer.", "index_")
        if "shared" in name or ".gate." in name or "experts." in name:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        name = name.replace("gate.e_score", "e_score")
        parts = x.chunk(2, x.ndim - 2) if "gate_up_proj" in name else (x,)
        words = ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",)
        for word, part in zip(words, parts, strict=True):
            if x.ndim == 3:
                w = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[word]
                stem = name.rpartition(".")[0]
                stored |= {f"{stem}.{i}.{w}.weight": y.contiguous() for i, y in enumerate(part)}
            else:
                stored[name.replace("gate_up_proj", word)] = part.contiguous()
    ours.mkdir()
    save_file(stored | {"vision_tower.x": torch.zeros(2)}, ours / "model.safetensors")
    text = json.loads((theirs / "config.json").read_text())
    whole = {"model_type": "minimax_m3_vl", "text_config": text, "vision_config": {}}
    (ours / "config.json").write_text(json.dumps(whole))
    ids = ids_of(model)
    assert torch.equal(regard.load(ours, kind=Model)(ids), regard.load(theirs, kind=Model)(ids))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention", "sparse", FULL]}, "layer_types.1. is 'sparse'"),
        ({"index_local_blocks": 4}, "index_local_blocks is 4; it must be at most"),
        ({"attention_output_gate": True}, "attention_output_gate is True; only"),
        (
            {"sparse_attention_config": {"sparse_score_type": "lse"}},
            "sparse_attention_config.sparse_score_type is lse; only max",
        ),
        (
            {"sparse_attention_config": {"sparse_attention_freq": [0, 1, 1]}}
            | {"sparse_attention_config": {"sparse_disable_index_value": [0, 0, 0]}},
            "sparse_disable_index_value is",
        ),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse(MiniMaxM3Config, SMALL | {"model_type": "minimax_m3_vl_text"} | change)
