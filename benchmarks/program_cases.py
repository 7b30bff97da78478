"""Cases of whole programs: starting a command, reading a checkpoint, drawing a page.

These problems have no operations to count, and the only output is whether the program succeeded.
For reading a checkpoint the bytes are counted and some of the tensors are compared.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.interfaces import (
    Case,
    MinimumWork,
    Outputs,
    Peer,
    PreparedCall,
    Problem,
    ProblemSizes,
)
from regard.units import plural

SIZES = ("small", "default", "paper")


class ProgramProblem(Problem):
    """A program whose only output is "done", which is 1 if it succeeded."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    @property
    def work(self) -> MinimumWork:
        """No work is counted for a program."""
        return MinimumWork(0, 0)

    def reference(self) -> Outputs:
        """Return that the program succeeded."""
        return {"done": torch.ones(1, dtype=torch.float64)}

    def plain(self) -> Outputs:
        """Return no outputs: the reference suffices."""
        return {}


class ProgramSizes(ProblemSizes):
    """Sizes without tokens and batch rows."""

    def resized(self, *, length: int | None = None, batch: int | None = None) -> ProblemSizes:
        """Return the same sizes: other numbers of tokens or rows change nothing."""
        return self

    def bytes(self, dtype: torch.dtype) -> int:
        """Return 0: the memory is used by other processes."""
        return 0

    @abstractmethod
    def __str__(self) -> str:
        """Return the sizes as text for tables."""


def _temporary_folder(owner: object) -> Path:
    """Create a temporary folder that is removed with its owner."""
    folder = tempfile.mkdtemp(prefix="regard-bench-")
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, check=False)  # noqa: S603 (no shell, our own arguments)


def _done_output(good: bool) -> Outputs:  # noqa: FBT001
    """Return the output of a program."""
    return {"done": torch.tensor([float(good)])}


# The time to start a command


@dataclass(frozen=True)
class StartSizes(ProgramSizes):
    """The start of a command in a new process."""

    def problem(self, dtype: torch.dtype, device: torch.device) -> ProgramProblem:
        """Return the problem: the exit code must be 0."""
        return ProgramProblem(dtype, device)

    def __str__(self) -> str:
        return "a new process"


def _start(arguments: tuple[str, ...], _: ProgramProblem) -> PreparedCall:
    """Return the call that runs Python with arguments."""
    step = partial(_run, [sys.executable, *arguments])
    return PreparedCall(step, lambda process: _done_output(process.returncode == 0))


def _start_peer(name: str, *arguments: str) -> Peer[ProgramProblem]:
    """Return a peer that runs Python with arguments."""
    return Peer(name, f"python {' '.join(arguments)}", partial(_start, arguments))


STARTUP = Case(
    "startup",
    "The time from start to end of a command in a new process.",
    dict.fromkeys(SIZES, StartSizes()),
    (torch.float32,),
    (
        _start_peer("regard --help", "-m", "regard", "--help"),
        _start_peer("regard cost gpt3", "-m", "regard", "cost", "gpt3", "--json"),
        _start_peer("import regard", "-c", "import regard"),
        _start_peer("import torch", "-c", "import torch"),
        _start_peer("python", "-c", "pass"),
    ),
)
"""The start-up case; `tests/surface/test_start.py` checks that `regard --help` and `regard cost` do
not import torch.
"""


# The time to read a checkpoint


@dataclass(frozen=True)
class CheckpointSizes(ProgramSizes):
    """The sizes of a safetensors file with random tensors; the defaults are those of Qwen2-0.5B.

    >>> print(CheckpointSizes())
    24 layers M896 vocabulary 151936, 0.988 GB
    """

    layers: int = 24
    dim: int = 896
    inner: int = 4864
    keys: int = 128
    vocabulary: int = 151_936

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of every tensor."""
        dim, inner = self.dim, self.inner
        yield "embed_tokens.weight", (self.vocabulary, dim)
        for i in range(self.layers):
            layer = f"layers.{i}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"{layer}.{norm}.weight", (dim,)
            for name, rows in (("q", dim), ("k", self.keys), ("v", self.keys)):
                yield f"{layer}.attention.{name}_proj.weight", (rows, dim)
                yield f"{layer}.attention.{name}_proj.bias", (rows,)
            yield f"{layer}.attention.o_proj.weight", (dim, dim)
            yield f"{layer}.mlp.gate_proj.weight", (inner, dim)
            yield f"{layer}.mlp.up_proj.weight", (inner, dim)
            yield f"{layer}.mlp.down_proj.weight", (dim, inner)
        yield "norm.weight", (dim,)

    def numbers(self) -> int:
        """Return the total number of elements of the tensors."""
        return sum(torch.Size(shape).numel() for _, shape in self.shapes())

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the memory for the tensors three times: written, read, and copied."""
        return 3 * self.numbers() * dtype.itemsize

    def problem(self, dtype: torch.dtype, device: torch.device) -> CheckpointProblem:
        """Write the file into a temporary folder, and return the problem."""
        return CheckpointProblem(self, dtype, device)

    def __str__(self) -> str:
        size = self.numbers() * torch.float16.itemsize
        layers = plural(self.layers, "layer")
        return f"{layers} M{self.dim} vocabulary {self.vocabulary}, {size / 1e9:.3g} GB"


class CheckpointProblem(ProgramProblem):
    """A checkpoint on disk; the outputs are its first and its last tensor by name.

    Attributes:
        sizes: the sizes.
        folder: the folder with model.safetensors, which is removed with the problem.
    """

    def __init__(self, sizes: CheckpointSizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.sizes = sizes
        self.folder = _temporary_folder(self)
        generator = torch.Generator().manual_seed(0)
        tensors = {
            name: torch.randn(shape, generator=generator).to(dtype)
            for name, shape in sizes.shapes()
        }
        save_file(tensors, self.file)
        self._answer = {name: tensors[name].clone() for name in self.compared(tensors)}

    @property
    def file(self) -> Path:
        """The only file of the checkpoint."""
        return self.folder / "model.safetensors"

    @staticmethod
    def compared(tensors: dict[str, Tensor]) -> Outputs:
        """Return the tensors that are compared: the first and the last by name."""
        return {name: tensors[name] for name in (min(tensors), max(tensors))}

    @property
    def work(self) -> MinimumWork:
        """The bytes of the tensors, which are read once."""
        return MinimumWork(0, self.sizes.numbers() * self.dtype.itemsize)

    def reference(self) -> Outputs:
        """Return the tensors that were written to the file."""
        return self._answer


def _read_with_regard(problem: CheckpointProblem) -> PreparedCall:
    """Return the call that reads the file with regard."""
    from regard.models.checkpoint.tensors import CheckpointTensors

    return PreparedCall(
        lambda: dict(CheckpointTensors.open(problem.folder).read()), problem.compared
    )


def _read_and_copy(problem: CheckpointProblem) -> PreparedCall:
    """Return the call that maps the file with safetensors and copies the tensors."""

    def step() -> dict[str, Tensor]:
        return {name: x.clone() for name, x in load_file(problem.file).items()}

    return PreparedCall(step, problem.compared)


def _read_bytes(problem: CheckpointProblem) -> PreparedCall:
    """Return the call that reads the bytes of the file into memory: a lower bound for the time of
    every reader that copies the tensors.
    """

    def step() -> Tensor:
        content = torch.empty(problem.file.stat().st_size, dtype=torch.uint8)
        place, end = content.numpy().data, 0
        with problem.file.open("rb", buffering=0) as file:
            while count := file.readinto(place[end:]):
                end += count
        return content

    def read(content: Tensor) -> Outputs:
        start = 8 + int.from_bytes(bytes(content[:8].tolist()), "little")
        header = json.loads(bytes(content[8:start].tolist()))
        header.pop("__metadata__", None)
        tensors = {}
        for name in (min(header), max(header)):
            begin, end = (start + offset for offset in header[name]["data_offsets"])
            # a copy, since a tensor of the file may be at an address without alignment
            tensors[name] = content[begin:end].clone().view(problem.dtype)
            tensors[name] = tensors[name].view(header[name]["shape"])
        return tensors

    return PreparedCall(step, read)


READ_CHECKPOINT = Case(
    "read-checkpoint",
    "A safetensors file, read from the page cache into memory of the process.",
    {
        "small": CheckpointSizes(layers=2, vocabulary=1024),
        "default": CheckpointSizes(),
        "paper": CheckpointSizes(layers=28, dim=1536, inner=8960, keys=256),
    },
    (torch.float16,),
    (
        Peer("regard", "CheckpointTensors.read, which regard.load uses.", _read_with_regard),
        Peer("safetensors", "load_file, which maps the file, and a copy.", _read_and_copy),
        Peer("bytes in one piece", "One read of the file's bytes.", _read_bytes),
    ),
)


# The time to draw a page

BROWSER_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=20000",  # wait for the page's scripts, however long they take
    "--dump-dom",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
READY_MARK = b'data-ready="yes"'
"""The attribute of a page's root element when the page is drawn."""


@dataclass(frozen=True)
class PageSizes(ProgramSizes):
    """The sizes of a recording with random patterns.

    >>> print(PageSizes())
    12 layers H12 T512
    """

    layers: int = 12
    heads: int = 12
    tokens: int = 512

    def problem(self, dtype: torch.dtype, device: torch.device) -> PageProblem:
        """Write the page into a temporary folder, and return the problem."""
        return PageProblem(self, dtype, device)

    def __str__(self) -> str:
        return f"{plural(self.layers, 'layer')} H{self.heads} T{self.tokens}"


class PageProblem(ProgramProblem):
    """A page of `regard view` in a file.

    Attributes:
        folder: the folder with page.html, empty.html and the browser's profile, which is removed
            with the problem.
    """

    def __init__(self, sizes: PageSizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.folder = _temporary_folder(self)
        (self.folder / "page.html").write_text(_page(sizes), "utf-8")
        (self.folder / "empty.html").write_text("<!doctype html><title>empty</title>", "utf-8")


def _page(sizes: PageSizes) -> str:
    """Return the page of a recording with random queries, keys and values."""
    from regard.inspect import Recorder
    from regard.inspect.report import report
    from regard.masks import Causal
    from regard.ops.softmax import attend
    from regard.tracing import named_scope
    from regard.view.report import page

    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(), Recorder() as recorder:
        for layer in range(sizes.layers):
            shape = (1, sizes.heads, sizes.tokens, 64)
            q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
            with named_scope("layers"), named_scope(str(layer)):
                attend(q, k, v, mask=Causal())
    return page(report(recorder.recording(pieces=tuple(f"t{i}" for i in range(sizes.tokens)))))


def find_browser() -> str | None:
    """Return the path of a Chromium or Chrome, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def _no_browser(_: PageProblem) -> str | None:
    """Return why no page can be drawn, or None if there is a browser."""
    return None if find_browser() else f"none of {', '.join(BROWSERS)} is on the PATH"


def _open(name: str, mark: bytes, problem: PageProblem) -> PreparedCall:
    """Return the call that opens a page in a browser; it succeeds if the final document contains
    `mark`.
    """
    program = find_browser()
    assert program is not None, "`_no_browser` refuses the problem without a browser"
    profile = f"--user-data-dir={problem.folder / 'profile'}"
    address = (problem.folder / name).as_uri()
    return PreparedCall(
        partial(_run, [program, *BROWSER_FLAGS, profile, address]),
        lambda process: _done_output(mark in process.stdout),
    )


def _page_peer(
    name: str, description: str, prepare: Callable[[PageProblem], PreparedCall]
) -> Peer[PageProblem]:
    return Peer(name, description, prepare, why_not=_no_browser)


DRAW_PAGE = Case(
    "draw-page",
    "A page of `regard view` in a new browser, until its overview of heads is drawn.",
    {"small": PageSizes(2, 4, 64), "default": PageSizes(), "paper": PageSizes(24, 16, 1024)},
    (torch.float32,),
    (
        _page_peer(
            "regard view", "The page of the recording.", partial(_open, "page.html", READY_MARK)
        ),
        _page_peer(
            "an empty page",
            "The start and the end of the browser.",
            partial(_open, "empty.html", b"<html"),
        ),
    ),
)
