"""The case of training: the loss of the next token with the gradients of all parameters.

The architecture is Qwen2's, with the same weights in fp32 for every peer; bf16 is autocast. Losses
and two gradients are compared before anything is timed. The optimizer is left out, because it is
torch's for every peer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.hugging_face import qwen2_network
from benchmarks.interfaces import Case, MinimumWork, Outputs, Peer, PreparedCall
from benchmarks.model import ModelProblem, ModelSizes
from regard.cost import attention_flops
from regard.train.losses import next_token_loss

EMBEDDING, DOWN = "embed.embedding.weight", "layers.0.feed_forward.down.weight"
"""The parameters whose gradients are compared: the last and the first that a gradient reaches
through the whole network.
"""


class NanoGptStyle(nn.Module):
    """The model as a short training script writes it, with torch's attention if `fused`."""

    def __init__(self, problem: ModelProblem, *, fused: bool = True) -> None:
        super().__init__()
        config, weights = problem.config, dict(problem.decoder.named_parameters())
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps, self.fused = config.head_dim, config.rms_norm_eps, fused

        def copied(*names: str) -> nn.Parameter:
            return nn.Parameter(torch.cat([weights[name].detach() for name in names]).clone())

        self.wte, self.norm = copied("embed.embedding.weight"), copied("norm.weight")
        self.layers = nn.ModuleList()
        for i in range(config.num_hidden_layers):
            layer_name = f"layers.{i}."
            parts = [f"{layer_name}attention.project.{x}.linear." for x in "qkv"]
            layer = nn.ParameterDict(
                {
                    "qkv": copied(*(f"{x}weight" for x in parts)),
                    "bias": copied(*(f"{x}bias" for x in parts)),
                    "out": copied(f"{layer_name}attention.output.weight"),
                    "gate": copied(f"{layer_name}feed_forward.gate.weight"),
                    "up": copied(f"{layer_name}feed_forward.up.weight"),
                    "down": copied(f"{layer_name}feed_forward.down.weight"),
                    "norm_1": copied(f"{layer_name}attention_residual.norm.weight"),
                    "norm_2": copied(f"{layer_name}feed_forward_residual.norm.weight"),
                }
            )
            self.layers.append(layer)
        half = self.head_dim // 2
        frequencies = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(problem.sizes.S, dtype=torch.float64)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().to(problem.device, self.wte.dtype))
        self.register_buffer("sin", angles.sin().to(problem.device, self.wte.dtype))
        if not fused:  # the reference computes in fp64 with tables of fp64
            self.cos, self.sin = angles.cos().to(problem.device), angles.sin().to(problem.device)

    @property
    def compared(self) -> tuple[nn.Parameter, nn.Parameter]:
        """The parameters whose gradients are compared: the embedding, and the first map down."""
        layer = self.layers[0]
        assert isinstance(layer, nn.ParameterDict)
        return self.wte, layer["down"]

    def loss(self, rows: Tensor) -> Tensor:
        """Return the mean cross entropy of the next token of rows `[B, S + 1]`."""
        x = F.embedding(rows[:, :-1], self.wte)
        for w in self.layers:
            assert isinstance(w, nn.ParameterDict)
            q, k, v = self._heads(F.linear(self._norm(x, w["norm_1"]), w["qkv"], w["bias"]))
            z = self._attention(self._rotate(q), self._rotate(k), v)
            x = x + F.linear(z.transpose(1, 2).flatten(2), w["out"])
            y = self._norm(x, w["norm_2"])
            x = x + F.linear(F.silu(F.linear(y, w["gate"])) * F.linear(y, w["up"]), w["down"])
        logits = F.linear(self._norm(x, self.norm), self.wte)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(wide).flatten(0, 1), rows[:, 1:].flatten())

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v `[B, heads, T, D]`."""
        D = self.head_dim
        parts = x.split((self.heads * D, self.groups * D, self.groups * D), dim=-1)
        return tuple(torch.unflatten(part, -1, (-1, D)).transpose(1, 2) for part in parts)

    def _rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        v = v.to(q.dtype)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        ratio = self.heads // self.groups
        k, v = (x.repeat_interleave(ratio, dim=1) for x in (k, v))
        scores = (q @ k.mT) * self.head_dim**-0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        out: Tensor = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ v
        return out


@dataclass(frozen=True)
class TrainingSizes(ModelSizes):
    """The sizes of a model and of a batch: B rows of S tokens."""

    def problem(self, dtype: torch.dtype, device: torch.device) -> TrainingProblem:
        return TrainingProblem(self, dtype, device)

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of weights and gradients in fp32 and fp64, and of the reference."""
        del dtype
        states = self.layers * (20 * self.dim + 6 * self.inner + 3 * self.H * self.S)
        return 24 * self.weights + 8 * self.B * self.S * (states + 3 * self.vocabulary)


class TrainingProblem(ModelProblem):
    """The loss of a batch and its gradients."""

    train = True

    def __init__(self, sizes: TrainingSizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(sizes, torch.float32, device)
        self.dtype = dtype
        self.decoder.train().requires_grad_(True)
        generator = torch.Generator().manual_seed(2)
        shape = (sizes.B, sizes.S + 1)
        self.rows = torch.randint(sizes.vocabulary, shape, generator=generator).to(device)

    @property
    def work(self) -> MinimumWork:
        """The products of a step: one for the outputs and two for the gradients of each matrix."""
        s = self.sizes
        pairs = s.B * s.H * s.S * (s.S + 1) // 2
        attention = s.layers * attention_flops(pairs, s.head_dim, s.head_dim)
        return MinimumWork(3 * (2 * s.B * s.S * s.weights + attention), 0)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the loss is computed."""
        is_half = self.dtype != torch.float32
        return torch.autocast(self.device.type, torch.bfloat16, enabled=is_half)

    def reference(self) -> Outputs:
        return self._loss_and_gradients(torch.float64)

    def plain(self) -> Outputs:
        return {} if self.dtype == torch.float32 else self._loss_and_gradients(torch.float32)

    def _loss_and_gradients(self, dtype: torch.dtype) -> Outputs:
        """Compute the outputs by NanoGptStyle in a dtype, with autocast in fp32."""
        network = NanoGptStyle(self, fused=False).to(dtype)
        with self.autocast() if dtype == torch.float32 else torch.enable_grad():
            loss = network.loss(self.rows)
        loss.backward()
        wanted = torch.float64 if dtype == torch.float64 else self.dtype
        return _outputs(wanted, loss, *network.compared)


def _outputs(dtype: torch.dtype, loss: Tensor, embedding: Tensor, down: Tensor) -> Outputs:
    """Return copies of the loss and of two gradients, in the dtype by which they are judged."""
    assert embedding.grad is not None
    assert down.grad is not None
    return {
        "loss": loss.detach().to(dtype, copy=True),
        "d_embedding": embedding.grad.to(dtype, copy=True),
        "d_down": down.grad.to(dtype, copy=True),
    }


def _prepare_loss(
    problem: TrainingProblem,
    network: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    compared: tuple[Tensor, Tensor],
) -> PreparedCall:
    """Return the call that computes the loss of a network and its gradients."""

    def step() -> Tensor:
        network.zero_grad(set_to_none=True)
        with problem.autocast():
            loss = loss_of(problem.rows)
        loss.backward()
        return loss

    return PreparedCall(step, lambda loss: _outputs(problem.dtype, loss, *compared))


def regard_training(problem: TrainingProblem) -> PreparedCall:
    """Prepare the loss that `regard train` computes."""
    named = dict(problem.decoder.named_parameters())
    compared = named[EMBEDDING], named[DOWN]
    loss = partial(next_token_loss, problem.decoder)
    return _prepare_loss(problem, problem.decoder, loss, compared)


def nano_gpt_training(problem: TrainingProblem) -> PreparedCall:
    """Prepare the model of a short training script."""
    network = NanoGptStyle(problem)
    return _prepare_loss(problem, network, network.loss, network.compared)


def transformers_training(problem: TrainingProblem) -> PreparedCall:
    """Prepare the Qwen2 of transformers, which shares the parameters of our decoder."""
    network = qwen2_network(problem, "sdpa")
    network.train()

    def loss_of(rows: Tensor) -> Tensor:
        logits = network(rows[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    down = network.model.layers[0].mlp.down_proj.weight
    compared = network.model.embed_tokens.weight, down
    return _prepare_loss(problem, network, loss_of, compared)


PEERS = (
    Peer("regard", "next_token_loss of a model of regard.", regard_training),
    Peer("nanoGPT style", "The model in plain torch, fused attention.", nano_gpt_training),
    Peer(
        "transformers sdpa",
        "transformers' Qwen2ForCausalLM.",
        transformers_training,
        needs=("transformers",),
    ),
)
_DEFAULT = TrainingSizes(512, 8, layers=12, dim=256, inner=688, H=8, G=8, vocabulary=4096)

TRAINING = (
    Case(
        "model-training",
        "The loss of a whole model and the gradients of its parameters.",
        {
            "small": replace(_DEFAULT, S=64, B=2, layers=2, vocabulary=512),
            "default": _DEFAULT,
            "paper": replace(_DEFAULT, S=1024, dim=768, inner=2048, H=12, G=12, vocabulary=50_304),
        },
        (torch.float32, torch.bfloat16),
        PEERS,
    ),
)
"""The cases of training."""
