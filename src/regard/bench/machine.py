"""What the numbers were measured on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

import regard

FEATURES = (
    "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "avx512_vnni",
    "amx_tile", "amx_bf16", "asimd", "asimdhp", "bf16", "sve",
)  # fmt: skip
"""Flags of a CPU that decide which kernels run."""


def machine(device: torch.device) -> dict[str, Any]:
    """The processor, its threads and features, memory, and versions.

    >>> machine(torch.device("cpu"))["torch"] == torch.__version__
    True
    """
    said = _processor()
    found: dict[str, Any] = {
        "device": device.type,
        "processor": said.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": torch.get_num_threads() if not said else _cores(said),
        "threads": torch.get_num_threads(),
        "features": [flag for flag in FEATURES if flag in said.get("flags", "").split()],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "free_memory": free(torch.device("cpu")),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "regard": regard.__version__,
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def free(device: torch.device) -> int:
    """Bytes of memory that a new allocation may have; 0 where the system does not say.

    >>> free(torch.device("cpu")) >= 0
    True
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    path = Path("/proc/meminfo")
    if not path.exists():
        return 0
    for line in path.read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _processor() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    text = path.read_text("utf-8", errors="replace")
    pairs = [line.partition(":")[::2] for line in text.partition("\n\n")[0].splitlines()]
    return {
        **{key.strip(): value.strip() for key, value in pairs},
        "count": str(text.count("processor\t")),
    }


def _cores(said: dict[str, str]) -> int:
    return int(said["count"]) or torch.get_num_threads()
