"""`accelerate(model)`: attention and linear layers of a model of transformers through regard."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard.nn
from regard.errors import ArgumentTypeError
from tests.integrations.families import transformers
from tests.rules import assert_close_rule

integration = pytest.importorskip("regard.integrations.transformers")
V, M = 200, 192


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Matrices large enough for the compiled product of few rows."""
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=V,
        hidden_size=M,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    made = transformers.Qwen2ForCausalLM(config)
    for parameter in made.parameters():
        if parameter.ndim == 1:
            parameter.data = 1 + 0.3 * torch.randn_like(parameter)
    made.tie_weights()
    return made.to(dtype).eval().requires_grad_(requires_grad=False)


def step(made: Any, rows: int = 2) -> Tensor:
    """Logits of a prompt, and of one token after it."""
    ids = torch.randint(1, V, (rows, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        first = made(ids[:, :8], use_cache=True)
        second = made(ids[:, 8:], past_key_values=first.past_key_values)
    return torch.cat([first.logits, second.logits], 1)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_accelerated_model_computes_the_same(dtype: torch.dtype) -> None:
    made = model(dtype)
    plain = step(made)
    exact = step(copy.deepcopy(made).double())
    calls: list[int] = []
    with integration.accelerate(made) as handle:
        for layer in handle.linears:
            layer.register_forward_hook(lambda *_: calls.append(1))
        found = step(made)
    assert len(handle.linears) == 0
    assert len(calls) == 2 * (2 * 7 + 1)
    assert_close_rule(found, plain, exact)


def test_everything_is_put_back() -> None:
    made = model()
    before = step(made)
    weights, classes = made.state_dict(), [type(x) for x in made.modules()]
    implementation = made.config._attn_implementation
    handle = integration.accelerate(made)
    assert sum(type(x) is regard.nn.weights.Linear for x in made.modules()) == 15
    assert made.config._attn_implementation == "regard" != implementation
    assert made.lm_head.weight is made.model.embed_tokens.weight or not (
        made.config.tie_word_embeddings
    )
    assert made.state_dict().keys() == weights.keys()
    handle.remove()
    handle.remove()
    assert [type(x) for x in made.modules()] == classes
    assert made.config._attn_implementation == implementation
    assert torch.equal(step(made), before)


def test_other_linear_layers_keep_their_class() -> None:
    class Adapter(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    made = model()
    made.lm_head = Adapter(M, V, bias=False)
    with integration.accelerate(made) as handle:
        assert type(made.lm_head) is Adapter
        assert len(handle.linears) == 14


def test_another_module_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="model is Linear; it must be a model of"):
        integration.accelerate(nn.Linear(2, 2))
