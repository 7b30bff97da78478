"""The benchmark cases, with their sizes and peers. A new case is an entry in this file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu_cases import GPU
from benchmarks.interfaces import Case, Peer
from benchmarks.memory_cases import MEMORY
from benchmarks.model_cases import MODELS
from benchmarks.parallel_cases import PARALLEL
from benchmarks.peers import (
    engines,
    hugging_face,
    llama_cpp,
    onnx_runtime,
    regard_kernels,
    sentence_encoders,
    torch_flex,
    torch_sdpa,
    x_transformers,
)
from benchmarks.problems import (
    AttentionProblem,
    AttentionSizes,
    LatentProblem,
    LatentSizes,
    ModelProblem,
    ModelSizes,
)
from benchmarks.problems.sentences import SentenceSizes
from benchmarks.program_cases import DRAW_PAGE, READ_CHECKPOINT, STARTUP
from benchmarks.training_cases import TRAINING
from regard.timing.measurement import peak_bytes

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SIZES = ("small", "default", "paper")
"""The names of the sizes: "small" takes about a second, "default" is measured in
docs/benchmarks.md, and "paper" is the largest size that papers report.
"""

ATTENTION: tuple[Peer[AttentionProblem], ...] = (
    regard_kernels.ATTENTION,
    torch_sdpa.ATTENTION,
    torch_sdpa.FOLDED,
    torch_sdpa.CHUNKED,
    torch_flex.ATTENTION,
    *hugging_face.ATTENTION,
    onnx_runtime.ATTENTION,
    x_transformers.ATTENTION,
)
LATENT: tuple[Peer[LatentProblem], ...] = (
    regard_kernels.LATENT,
    torch_sdpa.ABSORBED,
    *hugging_face.LATENT,
)
SDPA_OVERHEAD: tuple[Peer[AttentionProblem], ...] = (
    regard_kernels.OVER_SDPA,
    torch_sdpa.ATTENTION,
)
KERNELS: tuple[Peer[AttentionProblem], ...] = (
    regard_kernels.ATTENTION,
    *regard_kernels.KERNELS,
)
MODEL: tuple[Peer[ModelProblem], ...] = (
    regard_kernels.MODEL,
    *hugging_face.MODEL,
    llama_cpp.MODEL,
    *engines.MODEL,
)
FEW_BITS: tuple[Peer[ModelProblem], ...] = (regard_kernels.MODEL, llama_cpp.MODEL, *engines.MODEL)


def _lengths(small: int, default: int, paper: int, **options: object) -> dict[str, AttentionSizes]:
    """Return the sizes of attention with 32 query heads of 128 over 8 key/value heads, at three
    lengths.
    """
    heads: dict[str, Any] = {"B": 1, "H": 32, "G": 8, "D": 128, **options}
    lengths = zip(SIZES, (small, default, paper), strict=True)
    return {size: AttentionSizes(**heads, S=S) for size, S in lengths}


_CASES = (
    Case(
        "decode",
        "One query against a long cache, grouped heads.",
        _lengths(2048, 32768, 131_072, T=1),
        (FP32, BF16, FP16),
        ATTENTION,
    ),
    Case(
        "decode-int8",
        "One query against an 8-bit quantised cache; other peers read the dequantised numbers.",
        _lengths(2048, 32768, 131_072, T=1, bits=8),
        (BF16,),
        (ATTENTION[0], regard_kernels.QUANTIZED, *ATTENTION[1:]),
    ),
    Case(
        "mla-decode",
        "One query against DeepSeek-V3's latents, with the projections of the heads.",
        {size: LatentSizes(S) for size, S in zip(SIZES, (256, 8192, 32768), strict=True)},
        (FP32, BF16),
        LATENT,
    ),
    Case(
        "causal-prefill",
        "A prompt under a causal mask.",
        _lengths(256, 2048, 16384),
        (FP32, BF16),
        ATTENTION,
    ),
    Case(
        "window-prefill",
        "A prompt under a sliding window.",
        _lengths(1024, 8192, 65536, window=512),
        (FP32, BF16),
        ATTENTION,
    ),
    Case(
        "window-training",
        "A prompt under a sliding window, with its gradient.",
        _lengths(1024, 8192, 65536, window=512, train=True),
        (FP32,),
        ATTENTION,
    ),
    Case(
        "training-step",
        "A prompt under a causal mask, with its gradient.",
        _lengths(256, 2048, 16384, train=True),
        (FP32, BF16),
        ATTENTION,
    ),
    Case(
        "alibi",
        "A prompt under a causal mask with ALiBi.",
        _lengths(256, 2048, 8192, alibi=True),
        (FP32, BF16),
        ATTENTION,
    ),
    Case(
        "left-padded",
        "A batch of prompts of unequal length, padded on the left.",
        _lengths(256, 1024, 4096, B=4, padded=True),
        (FP32, BF16),
        ATTENTION,
    ),
    Case(
        "model-decode",
        "One step of a whole model of Qwen2-0.5B's shape.",
        {
            "small": ModelSizes(512, layers=2, vocabulary=1024),
            "default": ModelSizes(8192),
            "paper": ModelSizes(32768),
        },
        (FP32, BF16, FP16),
        MODEL,
    ),
    *(
        Case(
            f"model-decode-int{bits}",
            f"One step of a whole model of Qwen2-0.5B's shape with weights of {bits} bits.",
            {
                "small": ModelSizes(512, layers=2, vocabulary=1024, bits=bits),
                "default": ModelSizes(1024, bits=bits),
                "paper": ModelSizes(8192, bits=bits),
            },
            (BF16,),
            FEW_BITS,
        )
        for bits in (8, 4)
    ),
    Case(
        "sentences",
        "Vectors of texts of unequal length, tokenising included, with MiniLM's sizes.",
        {
            "small": SentenceSizes(8, layers=1, dim=32, inner=64, H=4, vocabulary=64),
            "default": SentenceSizes(1000),
            "paper": SentenceSizes(1000, layers=12, dim=768, inner=3072),
        },
        (FP32, BF16),
        sentence_encoders.SENTENCES,
    ),
    Case(
        "overhead",
        "The time of `attend` against a direct call of the kernel that it runs.",
        _lengths(16, 512, 2048, H=8, D=64),
        (FP32, BF16),
        SDPA_OVERHEAD,
    ),
    Case(
        "kernels",
        "Each kernel of regard on one causal call of one head.",
        _lengths(512, 8192, 32768, H=1, G=1, D=64),
        (FP32,),
        KERNELS,
    ),
    Case(
        "kernels-training",
        "Each kernel of regard on one causal call of one head, with its gradient.",
        _lengths(512, 8192, 32768, H=1, G=1, D=64, train=True),
        (FP32,),
        KERNELS,
    ),
    STARTUP,
    READ_CHECKPOINT,
    DRAW_PAGE,
    *MODELS,
    *PARALLEL,
    *MEMORY,
    *TRAINING,
    *GPU,
)
CASES = {case.name: case for case in _CASES}
"""The cases by name."""

GROUPS = {
    "models": tuple(case.name for case in MODELS),
    "parallel": tuple(case.name for case in PARALLEL),
    "memory": tuple(case.name for case in MEMORY),
    "gpu": tuple(case.name for case in GPU),
}
"""Names for several cases at once; a run without names leaves their cases out."""


def peer_peak_bytes(settings: Mapping[str, Any]) -> int | None:
    """Return the peak memory of one solution of a problem, with its result.

    Args:
        settings: case, size, length, batch, dtype, threads and peer, as in `python -m benchmarks`.

    Returns:
        The bytes, or None if the system does not report them, or if other processes do the work.
    """
    case = CASES[settings["case"]]
    torch.set_num_threads(settings["threads"])
    sizes = case.sizes[settings["size"]]
    sizes = sizes.resized(length=settings["length"], batch=settings["batch"])
    problem = sizes.problem(getattr(torch, settings["dtype"]), torch.device("cpu"))
    if not any(problem.work):
        return None
    (peer,) = (candidate for candidate in case.peers if candidate.name == settings["peer"])
    call = peer.prepare(problem)
    call.step()
    return peak_bytes(call.step)
