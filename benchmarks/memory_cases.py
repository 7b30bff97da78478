"""Cases of peak memory: a model is loaded, reads a prompt and decodes, in a process of its own.

The peak is what the system counts for the whole process (VmHWM): interpreter, libraries, the pages
of files that are mapped, weights, caches and what the steps need. It depends on the process alone,
so that other programs on the machine do not change it. Before that run the process computes the
logits of a short prompt, which are compared with the reference.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.interfaces import Case, Outputs, Peer, PreparedCall
from benchmarks.peers import llama_cpp
from benchmarks.problems import ModelSizes
from benchmarks.program_cases import ProgramProblem, ProgramSizes, _run, _temporary_folder
from regard.units import plural, size

_PEAK = """
def peak():
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
"""

REGARD_PROGRAM = (
    _PEAK
    + """
import json, sys
import numpy, torch, regard
task = json.loads(sys.argv[1])
torch.set_num_threads(task["threads"])
decoder = regard.load(task["file"], dtype=getattr(torch, task["dtype"])).decoder
with torch.inference_mode():
    numpy.save(task["out"], decoder(torch.tensor([task["short"]]), last=1).float().numpy().ravel())
    caches = decoder.new_caches()
    decoder(torch.tensor([task["prompt"]]), caches=caches, last=1)
    for token in task["steps"]:
        decoder(torch.tensor([[token]]), caches=caches)
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
    """The sizes of a model in a GGUF file, of a prompt, and the number of decoded tokens.

    Args:
        model: the sizes of the model; with `bits` its matrices are in the format Q8_0 or Q4_0.
        prompt: the number of tokens of the prompt.
        steps: the number of decoded tokens.

    >>> print(MemorySizes(ModelSizes(64, layers=2, vocabulary=1024)))
    2 layers M896 vocabulary 1024, prompt of 64, 16 steps
    """

    model: ModelSizes
    prompt: int = 64
    steps: int = 16

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the memory in bytes while the file is written, which is more than a peer needs."""
        return self.model.bytes(dtype)

    def problem(self, dtype: torch.dtype, device: torch.device) -> MemoryProblem:
        """Write the file into a temporary folder, and return the problem."""
        return MemoryProblem(self, dtype, device)

    def __str__(self) -> str:
        m = self.model
        form = "" if m.bits is None else f", weights of {m.bits} bits"
        return (
            f"{plural(m.layers, 'layer')} M{m.dim} vocabulary {m.vocabulary}{form}, prompt of "
            f"{self.prompt}, {plural(self.steps, 'step')}"
        )


class MemoryProblem(ProgramProblem):
    """A GGUF file with random weights, and the logits of a short prompt.

    Attributes:
        sizes: the sizes.
        folder: the folder with model.gguf, which is removed with the problem.
        short: the tokens of the short prompt.
    """

    def __init__(self, sizes: MemorySizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.sizes, self.folder = sizes, _temporary_folder(self)
        model = sizes.model.problem(dtype, torch.device("cpu"))
        llama_cpp.write_model(model, self.file)
        self.short: list[int] = model.prompt[0].tolist()
        self._reference = {"prompt": model.reference()["prompt"]}
        self._plain = {name: x for name, x in model.plain().items() if name == "prompt"}

    @property
    def file(self) -> Path:
        """The file of the model."""
        return self.folder / "model.gguf"

    def reference(self) -> Outputs:
        """Return the logits in a wider dtype."""
        return self._reference

    def plain(self) -> Outputs:
        """Return the logits of plain torch in the dtype of the problem."""
        return self._plain


def _prepare(program: str, problem: MemoryProblem, *, mapped: bool = False) -> PreparedCall:
    """Return the call that runs a program in a process of its own."""
    sizes, generator = problem.sizes, torch.Generator().manual_seed(1)
    V = sizes.model.vocabulary
    out = problem.folder / "logits.npy"
    ids: list[int] = torch.randint(V, (sizes.prompt + sizes.steps,), generator=generator).tolist()
    task = {
        "file": str(problem.file),
        "out": str(out),
        "dtype": str(problem.dtype).removeprefix("torch."),
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


def _why_not(problem: MemoryProblem) -> str | None:
    """Return why no peak can be read, or None."""
    if problem.device.type != "cpu":
        return "this adapter supports only a CPU"
    return None if Path("/proc/self/status").is_file() else "the system has no /proc/self/status"


PEERS = (
    Peer("regard", "regard.load of the file.", partial(_prepare, REGARD_PROGRAM), why_not=_why_not),
    Peer(
        "llama.cpp",
        "llama-cpp-python, the file read into memory.",
        partial(_prepare, LLAMA_CPP_PROGRAM),
        needs=llama_cpp.NEEDS,
        why_not=_why_not,
    ),
    Peer(
        "llama.cpp mmap",
        "llama-cpp-python, the file mapped into memory.",
        partial(_prepare, LLAMA_CPP_PROGRAM, mapped=True),
        needs=llama_cpp.NEEDS,
        why_not=_why_not,
    ),
)


def _case(name: str, text: str, dtype: torch.dtype, bits: int | None) -> Case:
    """Return the case of one format of weights."""
    return Case(
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
        PEERS,
    )


MEMORY = (
    _case("peak-memory", "fp16 weights", torch.float16, None),
    _case("peak-memory-int8", "weights of 8 bits", torch.bfloat16, 8),
    _case("peak-memory-int4", "weights of 4 bits", torch.bfloat16, 4),
)
"""The cases of peak memory."""
