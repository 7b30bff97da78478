"""What the ranks of the tests of `sequence` do: functions that processes import."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import regard
from regard.errors import ArgumentError
from regard.nn.variants import build
from regard.parallel import Shards, generation, sequence, split_heads
from regard.span import Span
from tests.parallel.ranks import LENGTHS, S

DIM, HEADS = 32, 4
Tensors = dict[str, Tensor]

MECHANISMS: dict[str, dict[str, Any]] = {
    "gqa": {"groups": 2},
    "mla": {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8},
    "sliding_window": {"window": 5, "groups": 2},
    "alibi": {},
    "learned_sink": {"groups": 2},
    "differential": {},
    "linear_attention": {},
    "retention": {},
    "gated_linear": {},
    "delta_net": {},
    "gated_delta_net": {},
    "infini": {"segment": 6},
}


def mechanism(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A mechanism with the same weights on every rank."""
    torch.manual_seed(3)
    return build(name, DIM, HEADS, **MECHANISMS[name]).to(dtype)


def hidden_states(seed: int = 0) -> Tensor:
    """x of the whole sequence."""
    return torch.randn(2, S, DIM, generator=torch.Generator().manual_seed(seed))


def mechanisms_over_ranks(
    rank: int, cases: list[tuple[str, str]], recompute: bool = False
) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
    """Output, gradient of x and gradients of the parameters for each (mechanism, lengths);
    `recompute` computes activations again in the backward pass.
    """
    results = []
    for name, lengths in cases:
        shards = LENGTHS[lengths](dist.get_world_size())
        module = mechanism(name)
        x = shards.take(hidden_states(), rank, 1).requires_grad_()
        with sequence(shards):
            if recompute:
                z = checkpoint(module, x, shards.positions(rank), use_reentrant=False)
            else:
                z = module(x, shards.positions(rank))
            (z * shards.take(hidden_states(1), rank, 1)).sum().backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
        results.append((z.detach(), x.grad, gradients))
    return results


def prompt() -> Tensor:
    """Ids of a text for `tiny`, [1, S]."""
    return torch.randint(1000, (1, S), generator=torch.Generator().manual_seed(4))


def decode_tiny(rank: int, lengths: str, steps: int) -> tuple[Tensor, list[Tensor], list[int]]:
    """Logits of this rank's part of the prompt, those of the next tokens, and the number of tokens
    in the first layer's cache after each step.
    """
    shards = LENGTHS[lengths](dist.get_world_size())
    model = regard.load("tiny")
    caches = model.decoder.new_caches()
    own = shards.positions(rank)
    decoded, stored = [], []
    with torch.no_grad(), sequence(shards):
        logits = model(prompt()[:, own[0]], own, caches)
        for step in range(steps):
            ids = torch.tensor([[7 + step]])
            decoded.append(model(ids, Span(S + step, 1), caches))
            stored.append(len(caches[0]))
    return logits, decoded, stored


def llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A Llama of transformers with random weights, whose attention runs through regard."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import regard.integrations.transformers  # noqa: F401  (registers the attention)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="regard",
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def llama_over_ranks(rank: int, lengths: str) -> tuple[Tensor, list[Tensor]]:
    """Logits of this rank's tokens, and the gradients of the parameters."""
    shards = LENGTHS[lengths](dist.get_world_size())
    model, own = llama(), shards.positions(rank)
    ids = (prompt() % 64)[:, own[0]]
    with sequence(shards):
        logits = model(ids, position_ids=own, attention_mask=torch.ones_like(ids)).logits
    logits.sin().sum().backward()
    return logits.detach(), [p.grad for p in model.parameters()]


def refusals(rank: int) -> dict[str, str]:
    """What the ranks say to calls that cannot run over them."""
    shards = Shards.even(S, dist.get_world_size())
    own, x = shards.positions(rank), shards.take(hidden_states(), rank, 1)
    nsa = build("nsa", DIM, HEADS, groups=1, window=8)
    frozen = mechanism("gqa")
    dropping = mechanism("gqa").train()
    dropping.dropout = 0.5
    calls: dict[str, Callable[[], object]] = {
        "no positions": lambda: frozen(x),
        "other positions": lambda: frozen(x, own + 1),
        "no attend": lambda: nsa(x, own),
        "dropout": lambda: dropping(x, own),
        "a score rule": lambda: regard.attend(
            x[:, None],
            x[:, None],
            x[:, None],
            score=regard.scores.TopK(2),
            q_positions=own,
            k_positions=own,
        ),
        "weights": lambda: regard.attention_weights(x[:, None], x[:, None]),
        "a cache of a state": lambda: mechanism("retention")(x, own, regard.caches.State()),
        "a pattern": lambda: _traced(frozen, x, own),
        "a partial": lambda: regard.attend_partial(
            x[:, None], x[:, None], x[:, None], q_positions=own, k_positions=own
        ),
        "a gradient of a new token": lambda: frozen(x[:, :1], Span(S, 1)),
        "cross-attention": lambda: build("cross_attention", DIM, HEADS)(x, own, memory=x),
    }
    texts = {}
    with sequence(shards):
        for name, call in calls.items():
            try:
                call()
                texts[name] = "nothing"
            except (ArgumentError, TypeError) as error:
                texts[name] = f"{type(error).__name__}: {error}"
    return texts


def _traced(module: nn.Module, x: Tensor, positions: Tensor) -> None:
    with regard.Trace("pattern", missing="ignore"):
        module(x, positions)


def different_layers(rank: int) -> str:
    """What a rank says when another one runs another mechanism."""
    shards = Shards.even(S, dist.get_world_size())
    module = mechanism("retention" if rank else "delta_net")
    try:
        with sequence(shards):
            module(shards.take(hidden_states(), rank, 1), shards.positions(rank))
    except ArgumentError as error:
        return str(error)
    return "nothing"


SPLIT: dict[str, dict[str, Any]] = {
    "gqa": {"groups": 2},
    "qk_norm": {"groups": 2},
    "learned_sink": {"groups": 2},
    "alibi": {},
    "t5": {},
}
"""Mechanisms whose heads are split, with their options."""


def split_layer(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A layer with the same weights on every rank."""
    torch.manual_seed(5)
    return build(name, DIM, HEADS, **SPLIT[name]).to(dtype)


def heads_over_ranks(rank: int, repeat_keys: bool) -> list[tuple[Tensor, Tensor, Tensors]]:
    """Output, gradient of x and gradients of the parameters of each mechanism in `SPLIT`."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    results = []
    for name in SPLIT:
        layer = split_heads(split_layer(name), mesh, repeat_keys=repeat_keys)
        x = hidden_states().requires_grad_()
        z = layer(x)
        (z * hidden_states(1)).sum().backward()
        gradients = {
            key: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for key, p in layer.named_parameters()
        }
        results.append((z.detach(), x.grad, gradients))
    return results


def unsplittable(rank: int) -> list[str]:
    """What `split_heads` says to layers that cannot be split on three ranks."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    layers = {
        "mla": build("mla", DIM, HEADS, **MECHANISMS["mla"]),
        "query heads": build("gqa", DIM, 4, groups=2),
        "key heads": build("gqa", 48, 6, groups=1),
        "not a divisor": build("gqa", 48, 6, groups=2),
        "flat norm": build("qk_norm_flat", 48, 6, groups=3),
    }
    texts = []
    for name, layer in layers.items():
        try:
            split_heads(layer, mesh, repeat_keys=name == "not a divisor")
            texts.append("nothing")
        except (ArgumentError, TypeError) as error:
            texts.append(str(error))
    return texts


def sharded_weights_over_ranks(rank: int, lengths: str) -> tuple[Tensor, list[Tensor]]:
    """Output of this rank's tokens, and the gradients of weights that FSDP2 cuts among the ranks:
    it takes the mean over the ranks.
    """
    W = dist.get_world_size()
    shards, module = LENGTHS[lengths](W), mechanism("gqa")
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (W,)))
    x = shards.take(hidden_states(), rank, 1)
    with sequence(shards):
        z = module(x, shards.positions(rank))
    (z * shards.take(hidden_states(1), rank, 1)).sum().backward()
    gradients = [W * p.grad.full_tensor() for p in module.parameters()]
    return z.detach(), gradients


def train_sharded_weights(rank: int, folder: str, first: int, stop: int) -> list[Tensor]:
    """All weights after some AdamW steps in fp64 on weights that FSDP2 cuts among the ranks. The
    state is read from a torch.distributed checkpoint unless `first` is 0, and written to it.
    """
    W = dist.get_world_size()
    shards, module = Shards.zigzag(S, W), mechanism("gqa", torch.float64)
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (W,)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own functions
        if first:
            model_state, optimizer_state = get_state_dict(module, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            distributed_checkpoint.load(state, checkpoint_id=folder)
            set_state_dict(
                module,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        for step in range(first, stop):
            x = shards.take(hidden_states(step).double(), rank, 1)
            with sequence(shards):
                z = module(x, shards.positions(rank))
            (W * z.square().sum()).backward()  # FSDP2 takes the mean over the ranks
            optimizer.step()
            optimizer.zero_grad()
        model_state, optimizer_state = get_state_dict(module, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        distributed_checkpoint.save(state, checkpoint_id=folder)
    return [p.detach().full_tensor() for p in module.parameters()]


class PlainAttention(nn.Module):
    """Causal self-attention as many people write it, with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.qkv = nn.Embedding(S, DIM), nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.positions(positions)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(z.transpose(1, 2).flatten(2))


def plain_attention(dtype: torch.dtype = torch.float32) -> PlainAttention:
    """The module with the same weights on every rank."""
    torch.manual_seed(8)
    return PlainAttention().to(dtype)


def accelerated_over_ranks(rank: int, lengths: str) -> tuple[Tensor, list[Tensor], list[str]]:
    """Output and gradients of a module that calls torch's function, and what is refused."""
    shards = LENGTHS[lengths](dist.get_world_size())
    module, own = plain_attention(), shards.positions(rank)
    x = shards.take(hidden_states(), rank, 1)
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 64, batch_first=True).eval()
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    padding[:, -1] = True
    attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True).train()
    with regard.accelerate(), sequence(shards):
        z = module(x, own)
        with torch.no_grad():
            texts = [
                _error_of(lambda: layer(x)),
                _error_of(lambda: attention(x, x, x, key_padding_mask=padding, need_weights=False)),
                _error_of(lambda: attention(x, x[:, :-1], x[:, :-1], need_weights=False)),
            ]
    (z * shards.take(hidden_states(1), rank, 1)).sum().backward()
    return z.detach(), [p.grad for p in module.parameters()], texts


TEXT = "def add(a, b):\n    return a + b\n\ndef add_three(a, b, c):\n    return"


SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}]
"""The options of generated texts: the likeliest tokens, and tokens that are drawn."""


def generate_text(rank: int) -> tuple[list[str], list[int], list[str]]:
    """For each entry of `SAMPLING` the text that every rank generates, and the tokens in its first
    cache; and beams.
    """
    model, texts, stored = regard.load("tiny"), [], []
    with generation():
        for options in SAMPLING:
            pieces = model.generate(TEXT, max_tokens=12, **options)
            texts.append("".join(pieces))
            stored.append(len(pieces._session.caches[0]))
        beams = [x.text for x in model.beam_search(TEXT, beams=2, max_tokens=4)]
    return texts, stored, beams


def refused_generations(rank: int) -> list[str]:
    """What generation over ranks refuses."""
    model, texts = regard.load("tiny"), []
    calls: list[Callable[[], object]] = [
        lambda: "".join(model.generate("a", max_tokens=2)),
        lambda: list(model.generate([TEXT, TEXT + " a longer one"], max_tokens=2)),
        lambda: "".join(model.generate(TEXT, max_tokens=2, cache="ring", max_context=16)),
        lambda: model(prompt()),
    ]
    with generation():
        for call in calls:
            texts.append(_error_of(call))
        pieces = model.generate(TEXT, max_tokens=3)
        next(pieces)
    texts.append(_error_of(lambda: next(pieces)))
    return texts


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except ArgumentError as error:
        return str(error)
    return "nothing"
