"""The benchmark cases, with their sizes and peers. A new case is an entry in this file.

In the group "models", "default" has the widths of a published model and few layers; "small" has a
few dims, so that every attention call is left to torch; "paper" has the layers of the published
model. The group `gpu` runs with `--device cuda`: each of its cases is one line of the acceptance
table of docs/gpu.md, whose keys and values are larger than the caches of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks import architectures, attention_peers, engines, hugging_face, regard_peers
from benchmarks.attention import AttentionProblem, AttentionSizes, LatentProblem, LatentSizes
from benchmarks.interfaces import BF16, FP16, FP32, SIZES, Case, Peer, ProblemSizes
from benchmarks.model import ModelProblem, ModelSizes
from benchmarks.parallel import PARALLEL
from benchmarks.programs import DRAW_PAGE, MEMORY, READ_CHECKPOINT, STARTUP
from benchmarks.public_models import PublicModelSizes, accelerated_peers
from benchmarks.sentences import SENTENCES, SentenceSizes
from benchmarks.training import TRAINING
from regard.timing import peak_bytes

ATTENTION: tuple[Peer[AttentionProblem], ...] = (
    regard_peers.ATTENTION,
    attention_peers.SDPA,
    attention_peers.FOLDED,
    attention_peers.CHUNKED,
    attention_peers.FLEX,
    *hugging_face.ATTENTION,
    attention_peers.ONNX_RUNTIME,
    attention_peers.X_TRANSFORMERS,
)
LATENT: tuple[Peer[LatentProblem], ...] = (
    regard_peers.LATENT,
    attention_peers.ABSORBED,
    *hugging_face.LATENT,
)
KERNELS: tuple[Peer[AttentionProblem], ...] = (regard_peers.ATTENTION, *regard_peers.KERNELS)
MODEL: tuple[Peer[ModelProblem], ...] = (
    regard_peers.MODEL,
    *hugging_face.MODEL,
    *engines.ENGINES,
)


def _sized(sizes: ProblemSizes, *lengths: int) -> dict[str, ProblemSizes]:
    """Return the sizes at three lengths, by name."""
    return {x: sizes.resized(length=S) for x, S in zip(SIZES, lengths, strict=True)}


def _lengths(small: int, default: int, paper: int, **options: Any) -> dict[str, ProblemSizes]:
    """Return attention with 32 query heads of 128 over 8 key/value heads, at three lengths."""
    heads: dict[str, Any] = {"B": 1, "H": 32, "G": 8, "D": 128, **options}
    return _sized(AttentionSizes(**heads, S=default), small, default, paper)


def _models(default: int, paper: int, bits: int | None = None) -> dict[str, ProblemSizes]:
    """Return a model of Qwen2-0.5B's shape at two lengths, and a small one."""
    small = ModelSizes(512, layers=2, vocabulary=1024, bits=bits)
    return {
        "small": small,
        **{x: ModelSizes(S, bits=bits) for x, S in zip(SIZES[1:], (default, paper), strict=True)},
    }


LATENTS = _sized(LatentSizes(8192), 256, 8192, 32768)
_CPU = (
    Case(
        "decode",
        "One query against a long cache, grouped heads.",
        _lengths(2048, 32768, 131_072, T=1),
        (FP32, BF16, FP16),
        ATTENTION,
    ),
    Case(
        "decode-int8",
        "One query against an 8-bit quantized cache; other peers read the dequantized numbers.",
        _lengths(2048, 32768, 131_072, T=1, bits=8),
        (BF16,),
        (ATTENTION[0], regard_peers.QUANTIZED, *ATTENTION[1:]),
    ),
    Case(
        "mla-decode",
        "One query against DeepSeek-V3's latents, with the projections of the heads.",
        LATENTS,
        (FP32, BF16),
        LATENT,
    ),
    *(
        Case(name, description, _lengths(*lengths, **options), dtypes, ATTENTION)
        for name, description, lengths, options, dtypes in (
            (
                "causal-prefill",
                "A prompt under a causal mask.",
                (256, 2048, 16384),
                {},
                (FP32, BF16),
            ),
            (
                "window-prefill",
                "A prompt under a sliding window.",
                (1024, 8192, 65536),
                {"window": 512},
                (FP32, BF16),
            ),
            (
                "window-training",
                "A prompt under a sliding window, with its gradient.",
                (1024, 8192, 65536),
                {"window": 512, "train": True},
                (FP32,),
            ),
            (
                "training-step",
                "A prompt under a causal mask, with its gradient.",
                (256, 2048, 16384),
                {"train": True},
                (FP32, BF16),
            ),
            (
                "alibi",
                "A prompt under a causal mask with ALiBi.",
                (256, 2048, 8192),
                {"alibi": True},
                (FP32, BF16),
            ),
            (
                "left-padded",
                "A batch of prompts of unequal length, padded on the left.",
                (256, 1024, 4096),
                {"B": 4, "padded": True},
                (FP32, BF16),
            ),
        )
    ),
    Case(
        "model-decode",
        "One step of a whole model of Qwen2-0.5B's shape.",
        _models(8192, 32768),
        (FP32, BF16, FP16),
        MODEL,
    ),
    *(
        Case(
            f"model-decode-int{bits}",
            f"One step of a whole model of Qwen2-0.5B's shape with weights of {bits} bits.",
            _models(1024, 8192, bits),
            (BF16,),
            (regard_peers.MODEL, *engines.ENGINES),
        )
        for bits in (8, 4)
    ),
    Case(
        "sentences",
        "Vectors of texts of unequal length, tokenizing included, with MiniLM's sizes.",
        {
            "small": SentenceSizes(8, layers=1, dim=32, inner=64, H=4, vocabulary=64),
            "default": SentenceSizes(1000),
            "paper": SentenceSizes(1000, layers=12, dim=768, inner=3072),
        },
        (FP32, BF16),
        SENTENCES,
    ),
    Case(
        "overhead",
        "The time of `attend` against a direct call of the kernel that it runs.",
        _lengths(16, 512, 2048, H=8, D=64),
        (FP32, BF16),
        (regard_peers.OVER_SDPA, attention_peers.SDPA),
    ),
    *(
        Case(
            f"kernels{suffix}",
            f"Each kernel of regard on one causal call of one head{text}.",
            _lengths(512, 8192, 32768, H=1, G=1, D=64, train=bool(suffix)),
            (FP32,),
            KERNELS,
        )
        for suffix, text in (("", ""), ("-training", ", with its gradient"))
    ),
    STARTUP,
    READ_CHECKPOINT,
    DRAW_PAGE,
)


# models of public libraries

SMALL_TOKENS = 8
"""The number of tokens of the size "small", if the model does not fix it."""

DECODERS = {
    "llama": ("Llama-3.2-1B's widths", 1, 16),
    "qwen2": ("Qwen2-0.5B's widths", 2, 24),
    "mistral": ("a quarter of Mistral-7B's widths", 1, 32),
    "gpt2": ("GPT-2's widths", 2, 12),
}
"""Decoders of transformers: whose widths they have, and the numbers of layers of the sizes
"default" and "paper".
"""
BERT, WHISPER, BASE = (
    "BERT-base's widths",
    "Whisper small's widths",
    "the base Transformer's widths",
)
HF = ("transformers",)


def _public(
    name: str,
    description: str,
    sizes: PublicModelSizes,
    published_layers: int = 12,
    needs: tuple[str, ...] = HF,
) -> Case:
    """Return a case in fp32 and bf16; `sizes` is the size "default"."""
    small = replace(sizes, layers=1, tokens=min(sizes.tokens, SMALL_TOKENS), batch=2, narrow=True)
    memory = sizes.memory * published_layers // sizes.layers
    named = {
        "small": replace(small, memory=1 << 28),
        "default": sizes,
        "paper": replace(sizes, layers=published_layers, memory=memory),
    }
    return Case(name, description, named, (FP32, BF16), accelerated_peers(*needs))


def _prefill(kind: str, description: str, tokens: int, *, batch: int = 1) -> Case:
    """Return a case of a prompt, with a decoder of transformers."""
    widths, layers, published_layers = DECODERS[kind]
    sizes = PublicModelSizes(
        partial(architectures.prefill, kind=kind), widths, layers, tokens, batch
    )
    return _public(f"{kind}-prefill", description, sizes, published_layers)


def _decodes(kind: str) -> Iterator[Case]:
    """Yield the cases of one token behind a cache, with a decoder of transformers."""
    widths, layers, published_layers = DECODERS[kind]
    for tokens, static in ((1024, False), (8192, False), (32768, False), (32768, True)):
        cache, suffix = ("StaticCache", "-static") if static else ("DynamicCache", "")
        build = partial(architectures.decode, kind=kind, static=static)
        yield _public(
            f"{kind}-decode-{tokens // 1024}k{suffix}",
            f"One token behind {tokens} cached ones, grouped heads, {cache}.",
            PublicModelSizes(build, widths, layers, tokens),
            published_layers,
        )


MODELS: tuple[Case, ...] = (
    _prefill("llama", "A prompt, grouped heads.", 2048),
    *_decodes("llama"),
    _prefill("qwen2", "A prompt, grouped heads.", 2048),
    *_decodes("qwen2"),
    _prefill("mistral", "A prompt under a sliding window of 512, as a dense mask.", 8192),
    _prefill("gpt2", "A batch of prompts.", 1024, batch=2),
    _public(
        "nanogpt",
        "A prompt through a GPT of 60 lines.",
        PublicModelSizes(architectures.nano_gpt, "GPT-2's widths", 2, 1024, batch=2),
        needs=(),
    ),
    _public(
        "bert-padded",
        "A right-padded batch of texts, half of it padding.",
        PublicModelSizes(architectures.bert, BERT, 2, 512, batch=4),
    ),
    _public(
        "t5-encoder",
        "A text through an encoder whose attention has a position bias.",
        PublicModelSizes(architectures.t5, "T5-base's widths", 2, 512, batch=2),
    ),
    *(
        _public(
            f"torch-encoder{suffix}",
            f"nn.TransformerEncoder{text}",
            PublicModelSizes(partial(architectures.encoder, **options), BERT, 2, 512, batch=4),
            needs=(),
        )
        for suffix, text, options in (
            ("", ": the fused path.", dict[str, Any]()),
            (
                "-padded",
                " with src_key_padding_mask, half of the batch padding.",
                {"padded": True},
            ),
            (
                "-nested",
                " with src_key_padding_mask, which torch makes a nested tensor.",
                {"padded": True, "nested": True},
            ),
        )
    ),
    _public(
        "torch-transformer",
        "nn.Transformer: an encoder, and a decoder with a causal mask and cross-attention.",
        PublicModelSizes(architectures.transformer, BASE, 2, 512, 4),
        6,
        (),
    ),
    _public(
        "whisper-encoder",
        "30 seconds of audio, 1500 frames.",
        PublicModelSizes(architectures.whisper_encoder, WHISPER, 2),
    ),
    _public(
        "whisper-decode",
        "One token with cross-attention to 1500 frames.",
        PublicModelSizes(architectures.whisper_decode, WHISPER, 2, 64),
    ),
    _public(
        "vit-384",
        "transformers' ViT on images of 384 x 384, 577 tokens.",
        PublicModelSizes(architectures.vit, "ViT-B/16", 2, batch=2),
    ),
    _public(
        "timm-vit",
        "timm's ViT on images of 224 x 224, 197 tokens.",
        PublicModelSizes(architectures.timm_vit, "ViT-B/16", 2, batch=4),
        needs=("timm",),
    ),
    _public(
        "timm-swin",
        "timm's Swin on images of 224 x 224, windows of 49 tokens.",
        PublicModelSizes(architectures.timm_swin, "Swin-T's first two stages", 2),
        2,
        ("timm",),
    ),
    _public(
        "diffusers-unet",
        "Latents of 64 x 64: self-attention of 4096 tokens, cross-attention to 77.",
        PublicModelSizes(architectures.diffusers_unet, "Stable Diffusion 1.5's outer levels", 1),
        2,
        ("diffusers",),
    ),
    _public(
        "diffusers-dit",
        "Latents of 64 x 64 in 1024 tokens, heads of 72.",
        PublicModelSizes(architectures.diffusers_dit, "DiT-XL/2's widths", 2),
        28,
        ("diffusers",),
    ),
)


# regard on a GPU

DENSE = (
    regard_peers.ATTENTION,
    attention_peers.FLASH,
    attention_peers.CUDNN,
    attention_peers.FLEX,
)
MASKED = (regard_peers.ATTENTION, attention_peers.EFFICIENT, attention_peers.FLEX)
DECODE = (
    regard_peers.ATTENTION,
    attention_peers.FLASH,
    attention_peers.FOLDED,
    attention_peers.FLEX,
)
CODES = (regard_peers.ATTENTION, regard_peers.QUANTIZED)
SHORT, MIDDLE, LONG = (1024, 8192, 16384), (4096, 16384, 32768), (4096, 32768, 131_072)


def _gpu(name: str, text: str, sizes: Any, peers: Iterable[Peer[Any]], dtype: Any = BF16) -> Case:
    """Return a case that runs on a GPU only."""
    return Case(f"gpu-{name}", text, sizes, (dtype,), tuple(peers), devices=("cuda",))


def _heads_4(*lengths: int, **options: Any) -> dict[str, ProblemSizes]:
    """Return attention with 32 query heads of 128 over 4 key/value heads, at three lengths."""
    return _lengths(*lengths, **{"G": 4, **options})


GPU = (
    _gpu("causal", "A prompt under a causal mask.", _heads_4(*MIDDLE), DENSE),
    *(
        _gpu(name, text, _heads_4(*LONG, **options), MASKED)
        for name, text, options in (
            ("window", "A prompt under a window of 1024 keys.", {"window": 1024}),
            (
                "window-training",
                "A prompt under a window of 1024 keys, with its gradient.",
                {"window": 1024, "train": True},
            ),
            ("documents", "8 packed texts.", {"pattern": "documents"}),
            ("prefix", "A prefix that all tokens see.", {"pattern": "prefix"}),
            ("sinks", "A window and the first 4 keys.", {"pattern": "sinks", "window": 1024}),
        )
    ),
    _gpu(
        "new-mask",
        "A call with a mask that no call has had before.",
        _heads_4(1024, 4096, 32768, window=1024),
        (regard_peers.NEW_MASKS, regard_peers.ATTENTION_AGAIN),
    ),
    _gpu(
        "everything",
        "Softcap, sink, ALiBi and explicit positions, with the gradient.",
        _heads_4(*SHORT, B=2, alibi=True, padded=True, train=True, softcap=30.0, sink=True),
        (regard_peers.ATTENTION,),
    ),
    _gpu(
        "alibi-training",
        "A prompt with ALiBi and its gradient.",
        _heads_4(*SHORT, alibi=True, train=True),
        MASKED,
    ),
    *(
        _gpu(f"decode{suffix}", text, _heads_4(*lengths, T=1, **options), peers)
        for suffix, text, lengths, options, peers in (
            ("", "One query against a long cache.", LONG, {}, DECODE),
            (
                "-batch",
                "32 queries against a long cache of each.",
                (4096, 32768, 65536),
                {"B": 32},
                DECODE,
            ),
            (
                "-pages",
                "One query against the pages of a cache.",
                LONG,
                {},
                (regard_peers.ATTENTION, regard_peers.PAGED),
            ),
            ("-int8", "One query against codes of 8 bits.", LONG, {"bits": 8}, CODES),
            ("-int4", "One query against codes of 4 bits.", LONG, {"bits": 4}, CODES),
            ("-int2", "One query against codes of 2 bits.", LONG, {"bits": 2}, CODES),
            ("-fp8", "One query against 8-bit floats.", LONG, {"bits": "fp8"}, CODES),
        )
    ),
    _gpu(
        "mla-decode",
        "One query against DeepSeek-V3's latents.",
        {**LATENTS, "small": LatentSizes(1024)},
        LATENT,
    ),
    _gpu(
        "model-decode",
        "One step of a whole model of Qwen2-0.5B's shape, as a CUDA graph and without one.",
        _models(8192, 32768),
        (
            regard_peers.CAPTURED_MODEL,
            regard_peers.STEP_BY_STEP,
            hugging_face.STATIC_MODEL,
            *(peer for peer in hugging_face.MODEL if peer.name == "transformers sdpa"),
        ),
    ),
    _gpu(
        "fp32",
        "A prompt under a causal mask in fp32.",
        _heads_4(*SHORT),
        MASKED,
        FP32,
    ),
    _gpu(
        "memory",
        "The memory that a window of 1024 keys takes.",
        _heads_4(*LONG, window=1024),
        (regard_peers.MEASURED_MEMORY,),
    ),
)
"""The cases, in the order of the table."""

CASES = {case.name: case for case in (*_CPU, *MODELS, *PARALLEL, *MEMORY, *TRAINING, *GPU)}
"""The cases by name."""

GROUPS = {
    name: tuple(case.name for case in cases)
    for name, cases in (
        ("models", MODELS),
        ("parallel", PARALLEL),
        ("memory", MEMORY),
        ("gpu", GPU),
    )
}
"""Names for several cases at once; a run without names leaves their cases out."""


def peer_peak_bytes(settings: Mapping[str, Any]) -> int | None:
    """Return the peak bytes of one solution of a problem, with its result; None if unknown."""
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
