"""A decoder whose heads are made by hand, so that it is known what each of them does.

The hidden state has four parts: the token, the position, the previous token, and the answer. Layer
0 has a previous-token head (0) and a duplicate-token head (1); layer 1 has an induction head (0),
which reads what the previous-token head wrote, and a name-mover head (1), which copies a name to
the end. The other heads attend evenly and write nothing.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from regard.masks import Causal
from regard.models import Model
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, InputEmbedding, PreNorm
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.positions import LearnedPositions

V, P = 12, 16
TOKEN, POSITION, PREVIOUS, ANSWER = (
    slice(0, V), slice(V, V + P), slice(V + P, 2 * V + P), slice(2 * V + P, 3 * V + P)
)  # fmt: skip
M, D, H = 3 * V + P, V + P, 4
NAMES, END = (1, 2, 3), V - 1
SHARP = 8.0
PREVIOUS_HEAD, DUPLICATE_HEAD = (0, 0), (0, 1)
INDUCTION_HEAD, NAME_MOVER_HEAD = (1, 0), (1, 1)


class _Nothing(nn.Module):
    """A feed-forward layer that adds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def _attention(
    heads: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]], *, answers: float
) -> Attention:
    """Attention with these maps (q, k, v `[D, M]`, out `[M, D]`) of its heads."""
    project, output = separate_qkv(M, H, H, D), output_projection(M, H, D)
    for parameter in (*project.parameters(), *output.parameters()):
        nn.init.zeros_(parameter)
    for h, (q, k, v, out) in heads.items():
        rows = slice(h * D, (h + 1) * D)
        project.q.linear.weight[rows] = q
        project.k.linear.weight[rows] = k
        project.v.linear.weight[rows] = v
        output.weight[:, rows] = answers * out
    return Attention(project, output, mask=Causal())


def _maps(*pairs: tuple[slice, slice, float]) -> Tensor:
    """A matrix with factors of the identity from parts of the columns to parts of the rows."""
    x = torch.zeros(*(M, M))
    for rows, columns, factor in pairs:
        x[rows, columns] = factor * torch.eye(columns.stop - columns.start)
    return x


@torch.no_grad()
def planted_model() -> Model:
    token_in, token_rows = slice(0, V), slice(0, V)
    previous_q = torch.zeros(D, M)
    for i in range(1, P):  # a query at position i looks for the key at position i - 1
        previous_q[i - 1, V + i] = SHARP
    previous_k = _maps((slice(0, P), POSITION, SHARP))[:D]
    read_token = _maps((token_rows, TOKEN, 1.0))[:D]
    write_previous = _maps((PREVIOUS, token_in, 1.0))[:, :D]
    write_answer = _maps((ANSWER, token_in, 1.0))[:, :D]
    nothing = torch.zeros(M, D)
    same = _maps((token_rows, TOKEN, SHARP), (slice(V, D), POSITION, SHARP))[:D]
    not_itself = _maps((token_rows, TOKEN, SHARP), (slice(V, D), POSITION, -SHARP))[:D]
    looks_for = _maps((token_rows, TOKEN, SHARP))[:D]
    after = _maps((token_rows, PREVIOUS, SHARP))[:D]
    end_q, names_k = torch.zeros(D, M), torch.zeros(D, M)
    end_q[0, END], names_k[0, list(NAMES)] = SHARP, SHARP
    layers = [
        _attention(
            {
                PREVIOUS_HEAD[1]: (previous_q, previous_k, read_token, write_previous),
                DUPLICATE_HEAD[1]: (same, not_itself, read_token, nothing),
            },
            answers=1.0,
        ),
        _attention(
            {
                INDUCTION_HEAD[1]: (looks_for, after, read_token, write_answer),
                NAME_MOVER_HEAD[1]: (end_q, names_k, read_token, write_answer),
            },
            answers=4.0,
        ),
    ]
    embedding, positions = nn.Embedding(V, M), LearnedPositions(P, M)
    embedding.weight.copy_(_maps((TOKEN, TOKEN, 1.0))[:V])
    positions.weight.copy_(torch.zeros(P, M))
    positions.weight[:, POSITION] = torch.eye(P)
    head = nn.Linear(M, V, bias=False)
    head.weight.copy_(_maps((slice(0, V), ANSWER, 1.0))[:V])
    blocks = [
        Block(attention, _Nothing(), PreNorm(nn.Identity()), PreNorm(nn.Identity()))
        for attention in layers
    ]
    decoder = Decoder(InputEmbedding(embedding, positions), blocks, nn.Identity(), head).eval()
    return Model(decoder, None, SimpleNamespace(vocab_size=V))
