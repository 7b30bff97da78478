"""Compiling a launch for a GPU that need not be there, what the compiled kernel uses, and running
a contract in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}
"""Bytes of shared memory of a program, by compute capability."""
TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int32: "*i32", torch.uint8: "*u8", torch.int8: "*i8",
}  # fmt: skip


def run_contract(folder: str, *options: str, **environment: str) -> str:
    """Run the contract of the kernels of a folder in a process; return what pytest printed."""
    here = Path(__file__).parent
    usual = ["-n", "0", "-q", "--full", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *usual, str(here / folder / "triton" / "contract.py")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        cwd=here.parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-1000:]
    return done.stdout


class Compiled(NamedTuple):
    ptx: str
    shared: int
    spilled: int


def compile_launch(launch: Any, capability: int) -> Compiled:
    """Compile the kernel of a launch for the types and divisibilities of its arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for i, (name, arg) in enumerate(zip(names, launch.args, strict=False)):
        if isinstance(arg, Tensor):
            signature[name] = TYPES[arg.dtype]
        else:
            signature[name] = "fp32" if isinstance(arg, float) else "i32"
        looked_at = not launch.kernel.params[i].do_not_specialize
        if isinstance(arg, Tensor) or (
            looked_at and isinstance(arg, int) and arg and arg % 16 == 0
        ):
            attributes[(i,)] = [["tt.divisibility", 16]]
    constants = {name: x for name, x in launch.options.items() if name in names}
    options = {name: x for name, x in launch.options.items() if name not in names}
    signature.update(dict.fromkeys(constants, "constexpr"))
    source = ASTSource(launch.kernel, signature, constants, attributes)
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Compiled(found.asm["ptx"], found.metadata.shared, spilled_bytes(found.asm["cubin"]))


def spilled_bytes(cubin: bytes) -> int:
    """The stack of a compiled kernel, as the program of the wheel reports it."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1])
