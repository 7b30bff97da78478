"""The cases that measure regard on a GPU: the group `gpu`, which runs with `--device cuda`.

Each case is one line of the acceptance table of docs/gpu.md. The sizes "default" are those of the
table, whose keys and values are larger than the caches of a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.interfaces import Case, Peer
from benchmarks.peers import hugging_face, regard_kernels, torch_flex, torch_sdpa
from benchmarks.problems import AttentionProblem, AttentionSizes, LatentSizes, ModelSizes

BF16, FP32 = torch.bfloat16, torch.float32
ON_GPU = ("cuda",)


def _sizes(small: int, default: int, paper: int, **options: Any) -> dict[str, AttentionSizes]:
    """Return three lengths of 32 query heads of 128 over 4 key/value heads."""
    shape: dict[str, Any] = {"B": 1, "H": 32, "G": 4, "D": 128, **options}
    lengths = {"small": small, "default": default, "paper": paper}
    return {name: AttentionSizes(**shape, S=S) for name, S in lengths.items()}


DENSE: tuple[Peer[AttentionProblem], ...] = (
    regard_kernels.ATTENTION,
    torch_sdpa.FLASH,
    torch_sdpa.CUDNN,
    torch_flex.ATTENTION,
)
MASKED: tuple[Peer[AttentionProblem], ...] = (
    regard_kernels.ATTENTION,
    torch_sdpa.EFFICIENT,
    torch_flex.ATTENTION,
)
DECODE: tuple[Peer[AttentionProblem], ...] = (
    regard_kernels.ATTENTION,
    torch_sdpa.FLASH,
    torch_sdpa.FOLDED,
    torch_flex.ATTENTION,
)


def _case(name: str, description: str, sizes: Any, peers: tuple[Peer[Any], ...]) -> Case:
    """Return a case of bf16 that runs on a GPU only."""
    return Case(f"gpu-{name}", description, sizes, (BF16,), peers, devices=ON_GPU)


GPU = (
    _case("causal", "A prompt under a causal mask.", _sizes(4096, 16384, 32768), DENSE),
    *(
        _case(
            f"window{suffix}",
            f"A prompt under a window of 1024 keys{text}.",
            _sizes(4096, 32768, 131_072, window=1024, train=bool(suffix)),
            MASKED,
        )
        for suffix, text in (("", ""), ("-training", ", with its gradient"))
    ),
    *(
        _case(name, description, _sizes(4096, 32768, 131_072, **options), MASKED)
        for name, description, options in (
            ("documents", "8 packed texts.", {"pattern": "documents"}),
            ("prefix", "A prefix that all tokens see.", {"pattern": "prefix"}),
            ("sinks", "A window and the first 4 keys.", {"pattern": "sinks", "window": 1024}),
        )
    ),
    _case(
        "new-mask",
        "A call with a mask that no call has had before.",
        _sizes(1024, 4096, 32768, window=1024),
        (regard_kernels.NEW_MASKS, regard_kernels.ATTENTION_AGAIN),
    ),
    _case(
        "everything",
        "Softcap, sink, ALiBi and explicit positions, with the gradient.",
        _sizes(
            1024, 8192, 16384, B=2, alibi=True, padded=True, train=True, softcap=30.0, sink=True
        ),
        (regard_kernels.ATTENTION,),
    ),
    _case(
        "alibi-training",
        "A prompt with ALiBi and its gradient.",
        _sizes(1024, 8192, 16384, alibi=True, train=True),
        MASKED,
    ),
    _case("decode", "One query against a long cache.", _sizes(4096, 32768, 131_072, T=1), DECODE),
    _case(
        "decode-batch",
        "32 queries against a long cache of each.",
        _sizes(4096, 32768, 65536, T=1, B=32),
        DECODE,
    ),
    _case(
        "decode-pages",
        "One query against the pages of a cache.",
        _sizes(4096, 32768, 131_072, T=1),
        (regard_kernels.ATTENTION, regard_kernels.PAGED),
    ),
    *(
        _case(
            f"decode-int{bits}",
            f"One query against codes of {bits} bits.",
            _sizes(4096, 32768, 131_072, T=1, bits=bits),
            (regard_kernels.ATTENTION, regard_kernels.QUANTIZED),
        )
        for bits in (8, 4, 2)
    ),
    _case(
        "decode-fp8",
        "One query against 8-bit floats.",
        _sizes(4096, 32768, 131_072, T=1, bits="fp8"),
        (regard_kernels.ATTENTION, regard_kernels.QUANTIZED),
    ),
    _case(
        "mla-decode",
        "One query against DeepSeek-V3's latents.",
        {x: LatentSizes(S) for x, S in (("small", 1024), ("default", 8192), ("paper", 32768))},
        (regard_kernels.LATENT, torch_sdpa.ABSORBED, *hugging_face.LATENT),
    ),
    _case(
        "model-decode",
        "One step of a whole model of Qwen2-0.5B's shape, as a CUDA graph and without one.",
        {
            "small": ModelSizes(512, layers=2, vocabulary=1024),
            "default": ModelSizes(8192),
            "paper": ModelSizes(32768),
        },
        (
            regard_kernels.CAPTURED_MODEL,
            regard_kernels.STEP_BY_STEP,
            hugging_face.STATIC_MODEL,
            *(peer for peer in hugging_face.MODEL if peer.name == "transformers sdpa"),
        ),
    ),
    Case(
        "gpu-fp32",
        "A prompt under a causal mask in fp32.",
        _sizes(1024, 8192, 16384),
        (FP32,),
        (regard_kernels.ATTENTION, torch_sdpa.EFFICIENT, torch_flex.ATTENTION),
        devices=ON_GPU,
    ),
    _case(
        "memory",
        "The memory that a window of 1024 keys takes.",
        _sizes(4096, 32768, 131_072, window=1024),
        (regard_kernels.MEASURED_MEMORY,),
    ),
)
"""The cases, in the order of the table."""
