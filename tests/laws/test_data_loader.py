"""Attention and tokens in the worker processes of torch's DataLoader, however they are started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import regard
from regard.masks import Causal

TEXTS = ("to be", "or not to be", "that is the question", "whether")
Item = tuple[list[int], Tensor, Tensor]


class Attended(Dataset[Item]):
    """The ids of a text, causal attention over vectors drawn by its number, and logits."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, i: int) -> Item:
        torch.set_num_threads(1)  # as the workers have it
        q, k, v = torch.randn(3, 1, 4, 70, 64, generator=torch.Generator().manual_seed(i))
        ids = self.model.tokenizer.encode(TEXTS[i])
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids]))
        return ids, regard.attend(q, k, v, mask=Causal()), logits.clone()


@pytest.mark.full(keep=["fork"])
@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_workers_compute_what_this_process_does(start: str) -> None:
    data = Attended(regard.load("tiny"))
    before = torch.get_num_threads()
    try:
        here = [data[i] for i in range(len(data))]
    finally:
        torch.set_num_threads(before)
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=start)
    there = list(loader)
    assert [ids for ids, *_ in there] == [ids for ids, *_ in here]
    for (_, *found), (_, *expected) in zip(there, here, strict=True):
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)
