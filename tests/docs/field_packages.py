"""The second table of docs/field.md: what other packages have, shown by their own files.

python -m pip download --no-deps -d FOLDER x-transformers flash-linear-attention fla-core ...
python -m tests.docs.field_packages FOLDER      # checks every cell

A "yes" is a word of one file of the package; a "no" is a word that none of its files has, in any
case. The words are those of the versions below: read the package again when you change a version.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VERSIONS = {
    "x-transformers": ("x_transformers-2.31.10*",),
    "flash-linear-attention": ("flash_linear_attention-0.6.0*", "fla_core-0.6.0*"),
    "attnhut": ("attnhut-0.5.0*",),
    "attzoo": ("attzoo-0.1.0*",),
    "transformers": ("transformers-5.24.0*",),
    "llama.cpp": ("llama_cpp_python-0.3.36*",),
    "TransformerLens": ("transformer_lens-4.3.0*",),
    "bertviz": ("bertviz-1.4.1*",),
}
"""Package -> the files of its version; llama.cpp is the copy in llama-cpp-python."""
ENDINGS = (".py", ".js", ".c", ".h", ".cpp", ".cu", ".m", ".metal", ".comp")


class Feature(NamedTuple):
    """What shows the cells of a line.

    Args:
        yes: package -> "ending of a file: a word in it".
        no: the words of which no file of the other packages has any, in small letters.
    """

    yes: dict[str, str]
    no: tuple[str, ...]


FEATURES = {
    "Grouped key/value heads": Feature(
        {
            "x-transformers": "x_transformers/x_transformers.py: kv_heads",
            "flash-linear-attention": "fla/layers/attn.py: num_kv_heads",
            "attnhut": "attnhut/gqa.py: class",
            "attzoo": "attzoo/group.py: class",
            "transformers": "llama/modeling_llama.py: num_key_value_heads",
            "llama.cpp": "src/llama-hparams.h: n_head_kv",
            "TransformerLens": "generalized_components/attention.py: n_key_value_heads",
        },
        ("kv_heads", "key_value_heads"),
    ),
    "Multi-head latent attention (MLA)": Feature(
        {
            "x-transformers": "x_transformers/x_transformers.py: use_latent_kv",
            "flash-linear-attention": "fla/layers/mla.py: kv_lora_rank",
            "attnhut": "attnhut/mla.py: latent",
            "transformers": "deepseek_v3/modeling_deepseek_v3.py: kv_lora_rank",
            "llama.cpp": "src/models/deepseek2.cpp: kv_lora_rank",
            "TransformerLens": "generalized_components/mla_attention.py: kv_lora_rank",
        },
        ("kv_lora_rank", "multi-head latent"),
    ),
    "Delta rules": Feature(
        {
            "flash-linear-attention": "fla/ops/gated_delta_rule/chunk.py: def ",
            "transformers": "qwen3_next/modeling_qwen3_next.py: delta_rule",
            "llama.cpp": "src/models/delta-net-base.cpp: delta",
            "TransformerLens": "generalized_components/gated_delta_net.py: delta_rule",
        },
        ("delta_rule", "deltanet"),
    ),
    "Keys that each query chooses (NSA, MoBA, DSA)": Feature(
        {
            "flash-linear-attention": "fla/ops/nsa/parallel.py: def ",
            "attnhut": "attnhut/deepseek_sparse.py: topk",
            "transformers": "glm_moe_dsa/modeling_glm_moe_dsa.py: index_topk",
            "llama.cpp": "src/llama-kv-cache-dsa.cpp: indexer",
            "TransformerLens": "generalized_components/glm_moe_dsa_attention.py: indexer",
        },
        ("moba", "native sparse attention", "indexer"),
    ),
    "Test-time training with a network as its memory (TTT)": Feature(
        {
            "x-transformers": "x_transformers/xl_autoregressive_wrapper.py: class TTTModuleWrapper",
            "flash-linear-attention": "fla/ops/ttt/chunk.py: def ",
        },
        ("ttt_linear", "titans_mlp", "test-time training", "class ttt"),
    ),
    "A key/value cache for decoding": Feature(
        {
            "x-transformers": "x_transformers/x_transformers.py: cache",
            "flash-linear-attention": "fla/models/cache_utils.py: class FLACache",
            "transformers": "transformers/cache_utils.py: class DynamicCache",
            "llama.cpp": "src/llama-kv-cache.cpp: llama_kv_cache",
            "TransformerLens": "cache/key_value_cache.py: class",
        },
        ("kv_cache", "past_key_value"),
    ),
    "A cache of 8 or 4 bits that decoding reads as codes": Feature(
        {"llama.cpp": "common/arg.cpp: cache-type-k"},
        ("cache-type-k", "cache_type_k"),
    ),
    "Weights of GGUF files in few bits, computed on a CPU as they are": Feature(
        {"llama.cpp": "ggml/src/ggml-quants.c: q4_K"},
        ("q4_k_m",),
    ),
    "Kernels for Metal and Vulkan": Feature(
        {"llama.cpp": "ggml/src/ggml-vulkan/ggml-vulkan.cpp: vulkan"},
        ("vulkan",),
    ),
    "Kernels for GPUs in Triton or CUDA": Feature(
        {
            "flash-linear-attention": "fla/ops/gla/chunk.py: triton.jit",
            "llama.cpp": "ggml/src/ggml-cuda/fattn.cu: flash_attn",
        },
        ("triton.jit", "__global__"),
    ),
    "Edits of activations at named places while the model runs": Feature(
        {
            "llama.cpp": "include/llama.h: llama_set_adapter_cvec",
            "TransformerLens": "transformer_lens/hook_points.py: class HookPoint",
        },
        ("hookpoint", "activation_patch", "control_vector"),
    ),
    "Patterns drawn in a browser": Feature(
        {"bertviz": "bertviz/head_view.js: svg"},
        ("head_view", "attention_pattern.js"),
    ),
    "Requests of many users joined into one batch while they run": Feature(
        {
            "transformers": "continuous_batching/continuous_api.py: class",
            "llama.cpp": "tools/server/server-context.cpp: slot",
        },
        ("continuousbatching", "cont_batching"),
    ),
    "Speculative decoding": Feature(
        {
            "transformers": "generation/candidate_generator.py: class AssistedCandidateGenerator",
            "llama.cpp": "common/speculative.cpp: draft",
        },
        ("assistant_model", "draft_model"),
    ),
    "Images as input": Feature(
        {
            "x-transformers": "x_transformers/x_transformers.py: class ViTransformerWrapper",
            "transformers": "clip/modeling_clip.py: pixel_values",
            "llama.cpp": "src/llama-arch.cpp: vl",
            "TransformerLens": "model_bridge/transformer_bridge.py: pixel_values",
        },
        ("pixel_values",),
    ),
    "One sequence on several devices": Feature(
        {
            "flash-linear-attention": "fla/modules/causal_conv1d/cp.py: def ",
            "transformers": "transformers/distributed/mixin.py: tp_",
            "llama.cpp": "include/llama.h: split_mode",
            "TransformerLens": "utilities/multi_gpu.py: n_devices",
        },
        ("context_parallel", "tp_plan", "ring_attention", "n_devices"),
    ),
}
"""The first cell of a line of the table -> what shows its other cells."""


def read(folder: Path, package: str) -> Iterator[tuple[str, str]]:
    """The source files of a package, by name."""
    for pattern in VERSIONS[package]:
        (path,) = folder.glob(pattern)
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if name.endswith(ENDINGS):
                        yield name, archive.read(name).decode("utf-8", "replace")
            continue
        with tarfile.open(path) as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.name.endswith(ENDINGS) else None
                if stream is not None:
                    yield member.name, stream.read().decode("utf-8", "replace")


def faults(folder: Path) -> list[str]:
    """What a package has, and the table denies; and what the table says, and is not there."""
    found = []
    for package in VERSIONS:
        open_cells = {x: one.yes[package] for x, one in FEATURES.items() if package in one.yes}
        for name, text in read(folder, package):
            low = text.lower()
            for name_of_cell, one in FEATURES.items():
                if package in one.yes:
                    ending, _, word = one.yes[package].partition(": ")
                    if name.endswith(ending) and word in text:
                        open_cells.pop(name_of_cell, None)
                else:
                    found += [f"{package}: {name} has {w!r}" for w in one.no if w in low]
        found += [
            f"{package}: {text!r} is not shown by {cell}" for text, cell in open_cells.items()
        ]
    return found


if __name__ == "__main__":
    print(*faults(Path(sys.argv[1])), sep="\n")
