"""The second table of docs/field.md: what other packages have, shown by their own files.

python -m pip download --no-deps -d FOLDER x-transformers flash-linear-attention fla-core ...
python -m tests.docs.field_packages FOLDER      # checks every cell, and prints the table

A "yes" is a word of one file of the package; a "no" is a word that none of its files has, in any
case. The words are those of the versions below: read the package again when you change a version.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = "../tests/docs/field_packages.py"
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


@dataclass(frozen=True)
class Feature:
    """A line of the table.

    Args:
        ours: our test, as "file::name"; None if we lack it.
        yes: package -> "ending of a file: a word in it".
        no: the words of which no file of the other packages has any, in small letters.
    """

    text: str
    chinese: str
    ours: str | None
    yes: dict[str, str]
    no: tuple[str, ...]


FEATURES = (
    Feature(
        "Grouped key/value heads",
        "分组的键值头",
        "nn/test_catalogue.py",
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
    Feature(
        "Multi-head latent attention (MLA)",
        "多头潜向量注意力（MLA）",
        "nn/test_catalogue.py",
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
    Feature(
        "Delta rules",
        "增量规则",
        "ops/linear/test_delta_rules.py",
        {
            "flash-linear-attention": "fla/ops/gated_delta_rule/chunk.py: def ",
            "transformers": "qwen3_next/modeling_qwen3_next.py: delta_rule",
            "llama.cpp": "src/models/delta-net-base.cpp: delta",
            "TransformerLens": "generalized_components/gated_delta_net.py: delta_rule",
        },
        ("delta_rule", "deltanet"),
    ),
    Feature(
        "Keys that each query chooses (NSA, MoBA, DSA)",
        "每个查询自己选键（NSA、MoBA、DSA）",
        "nn/test_catalogue.py",
        {
            "flash-linear-attention": "fla/ops/nsa/parallel.py: def ",
            "attnhut": "attnhut/deepseek_sparse.py: topk",
            "transformers": "glm_moe_dsa/modeling_glm_moe_dsa.py: index_topk",
            "llama.cpp": "src/llama-kv-cache-dsa.cpp: indexer",
            "TransformerLens": "generalized_components/glm_moe_dsa_attention.py: indexer",
        },
        ("moba", "native sparse attention", "indexer"),
    ),
    Feature(
        "Test-time training with a network as its memory (TTT)",
        "以网络为记忆的测试时训练（TTT）",
        None,
        {
            "x-transformers": "x_transformers/xl_autoregressive_wrapper.py: class TTTModuleWrapper",
            "flash-linear-attention": "fla/ops/ttt/chunk.py: def ",
        },
        ("ttt_linear", "titans_mlp", "test-time training", "class ttt"),
    ),
    Feature(
        "A key/value cache for decoding",
        "解码用的键/值缓存",
        "caches/test_contract.py",
        {
            "x-transformers": "x_transformers/x_transformers.py: cache",
            "flash-linear-attention": "fla/models/cache_utils.py: class FLACache",
            "transformers": "transformers/cache_utils.py: class DynamicCache",
            "llama.cpp": "src/llama-kv-cache.cpp: llama_kv_cache",
            "TransformerLens": "cache/key_value_cache.py: class",
        },
        ("kv_cache", "past_key_value"),
    ),
    Feature(
        "A cache of 8 or 4 bits that decoding reads as codes",
        "解码时直接读编码的 8 位或 4 位缓存",
        "ops/softmax/test_cpu_quantized.py",
        {"llama.cpp": "common/arg.cpp: cache-type-k"},
        ("cache-type-k", "cache_type_k"),
    ),
    Feature(
        "Weights of GGUF files in few bits, computed on a CPU as they are",
        "GGUF 文件中的低比特权重，在 CPU 上原样计算",
        "parity/test_smollm2.py",
        {"llama.cpp": "ggml/src/ggml-quants.c: q4_K"},
        ("q4_k_m",),
    ),
    Feature(
        "Kernels for Metal and Vulkan",
        "Metal 和 Vulkan 内核",
        None,
        {"llama.cpp": "ggml/src/ggml-vulkan/ggml-vulkan.cpp: vulkan"},
        ("vulkan",),
    ),
    Feature(
        "Kernels for GPUs in Triton or CUDA",
        "用 Triton 或 CUDA 写的 GPU 内核",
        "ops/softmax/triton/test_compile.py",
        {
            "flash-linear-attention": "fla/ops/gla/chunk.py: triton.jit",
            "llama.cpp": "ggml/src/ggml-cuda/fattn.cu: flash_attn",
        },
        ("triton.jit", "__global__"),
    ),
    Feature(
        "Edits of activations at named places while the model runs",
        "模型运行时在有名称的位置修改激活值",
        "inspect/interventions/test_interventions.py",
        {
            "llama.cpp": "include/llama.h: llama_set_adapter_cvec",
            "TransformerLens": "transformer_lens/hook_points.py: class HookPoint",
        },
        ("hookpoint", "activation_patch", "control_vector"),
    ),
    Feature(
        "Patterns drawn in a browser",
        "在浏览器里画出注意力图",
        "view/test_tile_page_browser.py",
        {"bertviz": "bertviz/head_view.js: svg"},
        ("head_view", "attention_pattern.js"),
    ),
    Feature(
        "Requests of many users joined into one batch while they run",
        "运行中把许多用户的请求合成一批",
        None,
        {
            "transformers": "continuous_batching/continuous_api.py: class",
            "llama.cpp": "tools/server/server-context.cpp: slot",
        },
        ("continuousbatching", "cont_batching"),
    ),
    Feature(
        "Speculative decoding",
        "推测解码",
        "models/generation/test_speculation.py",
        {
            "transformers": "generation/candidate_generator.py: class AssistedCandidateGenerator",
            "llama.cpp": "common/speculative.cpp: draft",
        },
        ("assistant_model", "draft_model"),
    ),
    Feature(
        "Images as input",
        "以图像为输入",
        None,
        {
            "x-transformers": "x_transformers/x_transformers.py: class ViTransformerWrapper",
            "transformers": "clip/modeling_clip.py: pixel_values",
            "llama.cpp": "src/llama-arch.cpp: vl",
            "TransformerLens": "model_bridge/transformer_bridge.py: pixel_values",
        },
        ("pixel_values",),
    ),
    Feature(
        "One sequence on several devices",
        "一个序列分布在多个设备上",
        "parallel/test_plan.py",
        {
            "flash-linear-attention": "fla/modules/causal_conv1d/cp.py: def ",
            "transformers": "transformers/distributed/mixin.py: tp_",
            "llama.cpp": "include/llama.h: split_mode",
            "TransformerLens": "utilities/multi_gpu.py: n_devices",
        },
        ("context_parallel", "tp_plan", "ring_attention", "n_devices"),
    ),
)


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
        open_cells = {x.text: x.yes[package] for x in FEATURES if package in x.yes}
        for name, text in read(folder, package):
            low = text.lower()
            for one in FEATURES:
                if package in one.yes:
                    ending, _, word = one.yes[package].partition(": ")
                    if name.endswith(ending) and word in text:
                        open_cells.pop(one.text, None)
                else:
                    found += [f"{package}: {name} has {w!r}" for w in one.no if w in low]
        found += [
            f"{package}: {text!r} is not shown by {cell}" for text, cell in open_cells.items()
        ]
    return found


def table(language: str) -> str:
    """The table of the page in a language."""
    yes, no = ("yes", "no") if language == "en" else ("有", "无")
    lines = [f"| | regard | {' | '.join(VERSIONS)} |", "|---" * (2 + len(VERSIONS)) + "|"]
    for one in FEATURES:
        own = f"**[{yes}](../tests/{one.ours})**" if one.ours else no
        cells = [f"[{yes if package in one.yes else no}]({HERE})" for package in VERSIONS]
        text = one.text if language == "en" else one.chinese
        lines.append(f"| {text} | {' | '.join([own, *cells])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table("en"), table("zh"), *faults(Path(sys.argv[1])), sep="\n")
