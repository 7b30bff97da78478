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

from benchmarks.interfaces import Case, MinimumWork, Outputs, Peer, PreparedCall
from benchmarks.peers import hugging_face
from benchmarks.problems import ModelProblem, ModelSizes
from benchmarks.public_models.nano_gpt import NanoGptStyle
from regard.cost import attention_flops
from regard.train.losses import next_token_loss

EMBEDDING, DOWN = "embed.embedding.weight", "layers.0.feed_forward.down.weight"
"""The parameters whose gradients are compared: the last and the first that a gradient reaches
through the whole network.
"""


@dataclass(frozen=True)
class TrainingSizes(ModelSizes):
    """The sizes of a model and of a batch: B rows of S tokens.

    >>> print(TrainingSizes(512, 8, layers=12, dim=256, inner=688, H=8, G=8, vocabulary=4096))
    B8 12 layers M256 H8 G8 D32 vocabulary 4096 S512
    """

    def problem(self, dtype: torch.dtype, device: torch.device) -> TrainingProblem:
        """Return a problem of these sizes, with the same random weights and tokens each time."""
        return TrainingProblem(self, dtype, device)

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the memory in bytes of weights and gradients in fp32 and fp64, and of the states
        and logits of the reference in fp64.
        """
        del dtype
        states = self.layers * (20 * self.dim + 6 * self.inner + 3 * self.H * self.S)
        return 24 * self.weights + 8 * self.B * self.S * (states + 3 * self.vocabulary)


class TrainingProblem(ModelProblem):
    """The loss of a batch and its gradients.

    Args:
        sizes, dtype, device: the sizes, float32 or bfloat16 (autocast), and the device.
    """

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
        """Return the outputs of plain torch in fp64."""
        return self._loss_and_gradients(torch.float64)

    def plain(self) -> Outputs:
        """Return the outputs of plain torch with autocast; {} in fp32, where the allowed error does
        not depend on them.
        """
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
    """Return copies of the loss and of the gradients of two parameters, in the dtype by whose
    rounding they are judged.
    """
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


def transformers_training(problem: TrainingProblem, *, name: str) -> PreparedCall:
    """Prepare the Qwen2 of transformers, which shares the parameters of our decoder."""
    network = hugging_face._qwen2(problem, name)
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
        partial(transformers_training, name="sdpa"),
        needs=hugging_face.NEEDS,
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
