"""Cases of whole programs: starting a command, reading a checkpoint, drawing a page, and the peak
memory of a process that loads a model and decodes.

These problems have no operations to count. The only output of a program is whether it succeeded;
of a checkpoint some tensors are compared, and of a model the logits of a short prompt.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.interfaces import (
    SIZES,
    Case,
    MinimumWork,
    Outputs,
    Peer,
    PreparedCall,
    Problem,
    ProblemSizes,
    name_of,
)
from benchmarks.model import ModelSizes, write_model
from regard.units import plural, size


class ProgramProblem(Problem):
    """A program whose only output is "done", which is 1 if it succeeded."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    @cached_property
    def folder(self) -> Path:
        """A temporary folder for files, which is removed with the problem."""
        folder = tempfile.mkdtemp(prefix="regard-benchmarks-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    def reference(self) -> Outputs:
        return {"done": torch.ones(1, dtype=torch.float64)}

    def plain(self) -> Outputs:
        return {}


class ProgramSizes(ProblemSizes):
    """Sizes without tokens and batch rows, whose memory is used by other processes."""

    def bytes(self, dtype: torch.dtype) -> int:
        return 0


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
    """The sizes of a safetensors file with random tensors; the defaults are those of Qwen2-0.5B."""

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
        return CheckpointProblem(self, dtype, device)

    def __str__(self) -> str:
        size = self.numbers() * torch.float16.itemsize
        layers = plural(self.layers, "layer")
        return f"{layers} M{self.dim} vocabulary {self.vocabulary}, {size / 1e9:.3g} GB"


class CheckpointProblem(ProgramProblem):
    """A checkpoint on disk; the outputs are its first and its last tensor by name."""

    def __init__(self, sizes: CheckpointSizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.sizes = sizes
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
    """Return the call that reads the file's bytes: a lower bound for every reader that copies."""

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
    """The sizes of a recording with random patterns."""

    layers: int = 12
    heads: int = 12
    tokens: int = 512

    def problem(self, dtype: torch.dtype, device: torch.device) -> PageProblem:
        return PageProblem(self, dtype, device)

    def __str__(self) -> str:
        return f"{plural(self.layers, 'layer')} H{self.heads} T{self.tokens}"


class PageProblem(ProgramProblem):
    """A page of `regard view` in a file, beside an empty one and the browser's profile."""

    def __init__(self, sizes: PageSizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        (self.folder / "page.html").write_text(_page(sizes), "utf-8")
        (self.folder / "empty.html").write_text("<!doctype html><title>empty</title>", "utf-8")


def _page(sizes: PageSizes) -> str:
    """Return the page of a recording with random queries, keys and values."""
    from regard.inspect import Recorder
    from regard.inspect.report import report
    from regard.masks import Causal
    from regard.ops.softmax import attend
    from regard.tracing import named_scope
    from regard.view.page import report_page

    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(), Recorder() as recorder:
        for layer in range(sizes.layers):
            shape = (1, sizes.heads, sizes.tokens, 64)
            q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
            with named_scope("layers"), named_scope(str(layer)):
                attend(q, k, v, mask=Causal())
    return report_page(
        report(recorder.recording(pieces=tuple(f"t{i}" for i in range(sizes.tokens))))
    )


def find_browser() -> str | None:
    """Return the path of a Chromium or Chrome, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def _no_browser(_: PageProblem) -> str | None:
    """Return why no page can be drawn, or None if there is a browser."""
    return None if find_browser() else f"none of {', '.join(BROWSERS)} is on the PATH"


def _open(name: str, mark: bytes, problem: PageProblem) -> PreparedCall:
    """Return the call that opens a page; it succeeds if the final document has `mark`."""
    program = find_browser()
    assert program is not None, "`_no_browser` refuses the problem without a browser"
    profile = f"--user-data-dir={problem.folder / 'profile'}"
    address = (problem.folder / name).as_uri()
    return PreparedCall(
        partial(_run, [program, *BROWSER_FLAGS, profile, address]),
        lambda process: _done_output(mark in process.stdout),
    )


DRAW_PAGE = Case(
    "draw-page",
    "A page of `regard view` in a new browser, until its overview of heads is drawn.",
    {"small": PageSizes(2, 4, 64), "default": PageSizes(), "paper": PageSizes(24, 16, 1024)},
    (torch.float32,),
    tuple(
        Peer(name, description, partial(_open, file, mark), why_not=_no_browser)
        for name, description, file, mark in (
            ("regard view", "The page of the recording.", "page.html", READY_MARK),
            ("an empty page", "The start and the end of the browser.", "empty.html", b"<html"),
        )
    ),
)


# The peak memory of a process. It is what the system counts for the whole process (VmHWM):
# interpreter, libraries, the pages of files that are mapped, weights, caches and what the steps
# need. It depends on the process alone, so that other programs on the machine do not change it.
# Before that run the process computes the logits of a short prompt, which are compared.


_PEAK = """
def peak():
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
"""

REGARD_PROGRAM = (
    _PEAK
    + """
import json, sys
import numpy, torch, regard, regard.models.compiled_step
task = json.loads(sys.argv[1])
torch.set_num_threads(task["threads"])
decoder = regard.load(task["file"], dtype=getattr(torch, task["dtype"])).decoder
with torch.inference_mode():
    numpy.save(task["out"], decoder(torch.tensor([task["short"]]), last=1).float().numpy().ravel())
    caches = decoder.new_caches()
    decoder(torch.tensor([task["prompt"]]), caches=caches, last=1)
    prepared = regard.models.compiled_step.PreparedDecoder(decoder)
    for token in task["steps"]:
        prepared(torch.tensor([[token]]), caches=caches)
print(json.dumps(peak()))
"""
)
"""What the process of regard runs."""

LLAMA_CPP_PROGRAM = (
    _PEAK
    + """
import json, sys
import llama_cpp, numpy
task = json.loads(sys.argv[1])
length = len(task["prompt"]) + len(task["steps"])
network = llama_cpp.Llama(
    task["file"], n_ctx=length, n_threads=task["threads"], n_threads_batch=task["threads"],
    use_mmap=task["mapped"], verbose=False,
)
network.eval(task["short"])
pointer = llama_cpp.llama_get_logits_ith(network.ctx, -1)
numpy.save(task["out"], numpy.ctypeslib.as_array(pointer, shape=(task["vocabulary"],)))
network.reset()
network.eval(task["prompt"])
for token in task["steps"]:
    network.eval([token])
print(json.dumps(peak()))
"""
)
"""What the process of llama.cpp runs; it imports neither torch nor regard."""


@dataclass(frozen=True)
class MemorySizes(ProgramSizes):
    """The sizes of a model in a GGUF file (Q8_0 or Q4_0 by `bits`), and of its texts."""

    model: ModelSizes
    prompt: int = 64
    steps: int = 16

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the memory in bytes while the file is written, which is more than a peer needs."""
        return self.model.bytes(dtype)

    def problem(self, dtype: torch.dtype, device: torch.device) -> MemoryProblem:
        return MemoryProblem(self, dtype, device)

    def __str__(self) -> str:
        m = self.model
        form = "" if m.bits is None else f", weights of {m.bits} bits"
        return (
            f"{plural(m.layers, 'layer')} M{m.dim} vocabulary {m.vocabulary}{form}, prompt of "
            f"{self.prompt}, {plural(self.steps, 'step')}"
        )


class MemoryProblem(ProgramProblem):
    """A GGUF file with random weights, and the logits of a short prompt."""

    def __init__(self, sizes: MemorySizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.sizes = sizes
        model = sizes.model.problem(dtype, torch.device("cpu"))
        write_model(model, self.file)
        self.short: list[int] = model.prompt[0].tolist()
        self._reference = {"prompt": model.reference()["prompt"]}
        self._plain = {name: x for name, x in model.plain().items() if name == "prompt"}

    @property
    def file(self) -> Path:
        """The file of the model."""
        return self.folder / "model.gguf"

    def reference(self) -> Outputs:
        return self._reference

    def plain(self) -> Outputs:
        return self._plain


def _prepare_peak(program: str, problem: MemoryProblem, *, mapped: bool = False) -> PreparedCall:
    """Return the call that runs a program in a process of its own."""
    sizes, generator = problem.sizes, torch.Generator().manual_seed(1)
    V = sizes.model.vocabulary
    out = problem.folder / "logits.npy"
    ids: list[int] = torch.randint(V, (sizes.prompt + sizes.steps,), generator=generator).tolist()
    task = {
        "file": str(problem.file),
        "out": str(out),
        "dtype": name_of(problem.dtype),
        "threads": torch.get_num_threads(),
        "short": problem.short,
        "prompt": ids[: sizes.prompt],
        "steps": ids[sizes.prompt :],
        "vocabulary": V,
        "mapped": mapped,
    }
    peaks: list[int] = []

    def read(process: subprocess.CompletedProcess[bytes]) -> Outputs:
        if process.returncode:
            raise RuntimeError(process.stderr.decode(errors="replace")[-300:])
        peaks.append(int(json.loads(process.stdout.splitlines()[-1])))
        logits = torch.from_numpy(np.load(out))
        return {"prompt": logits.to(problem.dtype).view(1, 1, -1)}

    def figures() -> Mapping[str, float]:
        return {"peak_bytes": float(peaks[0]), "file_bytes": float(problem.file.stat().st_size)}

    step = partial(_run, [sys.executable, "-c", program, json.dumps(task)])
    return PreparedCall(step, read, size(problem.file.stat().st_size), figures)


def _why_not_peak(_: MemoryProblem) -> str | None:
    """Return why no peak can be read, or None."""
    return None if Path("/proc/self/status").is_file() else "the system has no /proc/self/status"


PEAK_PEERS = tuple(
    Peer(name, description, prepare, needs, devices=("cpu",), why_not=_why_not_peak)
    for name, description, prepare, needs in (
        ("regard", "regard.load of the file.", partial(_prepare_peak, REGARD_PROGRAM), ()),
        (
            "llama.cpp",
            "llama-cpp-python, the file read into memory.",
            partial(_prepare_peak, LLAMA_CPP_PROGRAM),
            ("llama_cpp",),
        ),
        (
            "llama.cpp mmap",
            "llama-cpp-python, the file mapped into memory.",
            partial(_prepare_peak, LLAMA_CPP_PROGRAM, mapped=True),
            ("llama_cpp",),
        ),
    )
)

MEMORY = tuple(
    Case(
        name,
        f"The peak memory of a process that loads a model, reads a prompt and decodes, {text}.",
        {
            "small": MemorySizes(ModelSizes(64, layers=2, vocabulary=1024, bits=bits)),
            "default": MemorySizes(ModelSizes(64, bits=bits)),
            "paper": MemorySizes(
                ModelSizes(64, layers=28, dim=1536, inner=8960, H=12, G=2, bits=bits)
            ),
        },
        (dtype,),
        PEAK_PEERS,
    )
    for name, text, dtype, bits in (
        ("peak-memory", "fp16 weights", torch.float16, None),
        ("peak-memory-int8", "weights of 8 bits", torch.bfloat16, 8),
        ("peak-memory-int4", "weights of 4 bits", torch.bfloat16, 4),
    )
)
"""The cases of peak memory."""
