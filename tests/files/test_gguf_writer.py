"""Written GGUF files: their numbers are those of the format's definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from regard.errors import ArgumentError
from regard.files.gguf_files import read_gguf_header, read_rows
from regard.files.gguf_writer import WRITTEN, TensorToWrite, write_gguf
from tests.models.checkpoint import gguf_writer as oracle


@pytest.mark.parametrize("kind", WRITTEN)
def test_numbers_are_near(kind: str, tmp_path: Path) -> None:
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    x[0, :32] = 0
    keys = {"a": 1, "b": [0.5, 2.0], "c": "text", "d": True, "e": ["x", ""], "f": [True]}
    write_gguf(tmp_path / "a.gguf", keys, [TensorToWrite("x", x, kind)])
    header = read_gguf_header(tmp_path / "a.gguf")
    assert dict(header.metadata) == keys
    ((_, rows),) = read_rows(header, header.tensors["x"])
    raw = torch.from_numpy(rows)
    if kind in oracle.BLOCK:
        values = oracle.numbers_of(kind, raw.numpy())
        groups = x.double().abs().unflatten(1, (-1, 32)).amax(-1, keepdim=True)
        step = groups / (127 if kind == "Q8_0" else 8)
        # half a step; with 4 bits the codes end at 7, so that 8 becomes 7
        allowed = step * (0.51 if kind == "Q8_0" else 1.02)
        assert ((values - x).abs().unflatten(1, (-1, 32)) <= allowed).all()
        assert (values - x).abs().max() > 1e-4
    else:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        assert torch.equal(raw.view(dtype), x.to(dtype))


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="the format of 'x' is 'Q2_K'; written are F32"):
        write_gguf(tmp_path / "a", {}, [TensorToWrite("x", torch.ones(1, 32), "Q2_K")])
    with pytest.raises(ArgumentError, match="rows of Q8_0 have whole blocks of 32"):
        write_gguf(tmp_path / "a", {}, [TensorToWrite("x", torch.ones(1, 33), "Q8_0")])
