"""The keys of a quantization_config: each one is read, is known to change nothing that is computed
here, or is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from regard.did_you_mean import suggest
from regard.errors import FileError
from regard.untrusted_text import short_repr

Settings: TypeAlias = Mapping[str, Any]
Values: TypeAlias = tuple[object, ...] | None
"""The supported values of a key; None where its reader checks them."""

_LARGEST_BLOCK = 1 << 14  # published files have 128
_FLAG = (True, False, None)
_EMPTY: tuple[object, ...] = (None, False, "", {}, [])

UNREAD: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "the tensors say which matrices are quantized": (
            *("ignore", "ignored_layers", "lm_head", "modules_to_not_convert"),
            *("modules_to_convert", "llm_int8_skip_modules", "block_name_to_quantize", "targets"),
            *("modules_in_block_to_quantize", "module_name_preceding_first_block"),
            *("quant_block_list", "to_quant_block_names"),
        ),
        "it says how the codes were found": (
            *("tokenizer", "dataset", "damp_percent", "damp_auto_increment", "true_sequential"),
            *("static_groups", "act_group_aware", "mse", "model_seqlen", "batch_size", "fallback"),
            *("pad_token_id", "cache_block_outputs", "observer", "observer_kwargs", "zp_dtype"),
            *("scale_dtype", "iters", "lr", "minmax_lr", "nsamples", "seqlen", "hessian", "gptaq"),
            *("enable_minmax_tuning", "enable_quanted_input", "gradient_accumulate_steps"),
            *("low_gpu_mem_usage", "offload_to_disk", "offload_to_disk_path", "pack_impl"),
            *("activation_scale_ub", "failsafe", "vram_strategy", "gc_mode", "moe", "amp"),
            *("wait_for_submodule_finalizers", "compute_device_filter", "train_bs"),
            *("auto_forward_data_parallel", "enable_norm_bias_tuning"),
        ),
        "it chooses a kernel, and all of them have the same numbers": (
            *("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "do_fuse"),
            *("max_input_length", "fuse_max_seq_len", "modules_to_fuse", "run_compressed"),
            *("dequantize", "use_optimized_inference", "bnb_4bit_compute_dtype"),
            *("bnb_4bit_quant_storage", "llm_int8_enable_fp32_cpu_offload"),
            *("llm_int8_threshold", "llm_int8_has_fp16_weight", "device"),
        ),
        "activations, keys and values are not rounded here": (
            *("activation_scheme", "input_activations", "output_activations", "kv_cache_scheme"),
        ),
        "it describes the file, whose scales say the same": (
            *("meta", "version", "quantization_status", "global_compression_ratio", "scale_fmt"),
            *("model_name_or_path", "model_file_base_name", "autoround_version"),
        ),
    }
)
"""Why keys are not read -> these keys."""

GROUP = "config_groups"
WEIGHTS = f"{GROUP}.weights"
_GPTQ: Mapping[str, Values] = {
    **dict.fromkeys(("bits", "group_size", "format", "checkpoint_format")),
    "sym": _FLAG,
    "desc_act": _FLAG,
    "dynamic": _EMPTY,
    "adapter": _EMPTY,
    "rotation": _EMPTY,
    "is_marlin_format": (False, None),
    "data_type": ("int", None),
    "super_bits": (None,),
    "super_group_size": (None,),
    "pack_dtype": ("int32", "torch.int32", None),
}
_FP8: Mapping[str, Values] = {
    "weight_block_size": None,
    "fmt": ("e4m3", None),
    "expert_dtype": ("fp8", "fp4", None),
}
READ: Mapping[str, Mapping[str, Values]] = MappingProxyType(
    {
        "mxfp4": {},
        "fp8": _FP8,
        "fbgemm_fp8": _FP8,
        "gptq": _GPTQ,
        "awq": {
            **dict.fromkeys(("bits", "w_bit", "group_size", "q_group_size", "version", "format")),
            **dict.fromkeys(("sym", "desc_act"), _FLAG),  # transformers writes them, as for GPTQ
            "zero_point": (True, None),
            "dynamic": _EMPTY,
            "adapter": _EMPTY,
            "pack_dtype": _GPTQ["pack_dtype"],
            "backend": None,
        },
        "compressed-tensors": {
            **dict.fromkeys((GROUP, "format")),
            "transform_config": (*_EMPTY, {"config_groups": {}}),
            "sparsity_config": None,
            "moe_sparsity_config": _EMPTY,
        },
        GROUP: dict.fromkeys(("weights", "format")),
        WEIGHTS: {
            **dict.fromkeys(("num_bits", "group_size", "block_structure")),
            "type": ("int", "float", None),
            "symmetric": _FLAG,
            "strategy": ("tensor", "channel", "group", "block", "tensor_group", None),
            "dynamic": (False, None),
            "actorder": ("weight", "static", "group", "dynamic", False, None),
        },
        "bitsandbytes": {
            **dict.fromkeys(("load_in_4bit", "load_in_8bit"), _FLAG),
            **dict.fromkeys(("_load_in_4bit", "_load_in_8bit"), _FLAG),
            "bnb_4bit_quant_type": ("nf4", "fp4", None),
            "bnb_4bit_use_double_quant": _FLAG,
        },
    }
)
"""`quant_method`, or an inner object of compressed-tensors -> the keys that are read, with their
values.
"""


def check_keys(folder: Path, method: str, settings: Settings) -> None:
    """Raise for an unknown key, and for a value that is not supported."""
    read = READ[method]
    unread = {key for keys in UNREAD.values() for key in keys}
    # GPTQ and AWQ name their kernels; only AWQ has one with another layout
    unread |= {"backend"} if method == "gptq" else set()
    for key, value in settings.items():
        if key == "quant_method":
            continue
        if key not in read and key not in unread:
            hint = suggest(key, sorted(unread | read.keys()), otherwise=";")
            raise config_error(
                folder,
                f"the unknown key {short_repr(key)}{hint} its effect on the weights is not known. "
                "Remove it from config.json if it has none",
            )
        allowed = read.get(key)
        if allowed is not None:
            check_setting(folder, key, value, allowed)


def check_setting(folder: Path, name: str, value: Any, allowed: tuple[object, ...]) -> None:
    """Raise unless a setting has one of the supported values."""
    if not any(type(value) is type(x) and value == x for x in allowed):
        names = ", ".join(map(repr, allowed))
        raise config_error(folder, f"the {name} {short_repr(value)}; supported: {names}")


def check_method(folder: Path, method: Any) -> None:
    """Raise unless a `quant_method` is read."""
    methods = [name for name in READ if name not in (GROUP, WEIGHTS)]
    if type(method) is not str or method not in methods:
        raise config_error(
            folder,
            f"the quant_method {short_repr(method)}; supported: {', '.join(methods)}. Get the "
            "model in one of these, in a GGUF file, or without quantization",
        )


def either(folder: Path, settings: Settings, *names: str, default: Any = None) -> Any:
    """Return the value of a setting that has several names, which must not contradict."""
    stated = {name: settings[name] for name in names if settings.get(name) is not None}
    values = list(stated.values())
    if any(str(x).lower() != str(values[0]).lower() for x in values):
        raise config_error(folder, f"{short_repr(stated)}, two values of one setting; keep one")
    return values[0] if values else default


def is_count(value: object) -> bool:
    """Return whether a setting is a whole number above 0; -1 is one group for all inputs."""
    return type(value) is int and value > 0


def block_size(folder: Path, sides: Any) -> tuple[int, int] | None:
    """Return the sizes of a block that a setting names."""
    if sides is None:
        return None
    known = isinstance(sides, list) and len(sides) == 2
    if not known or not all(type(x) is int and 1 <= x <= _LARGEST_BLOCK for x in sides):
        raise config_error(
            folder, f"the size of blocks {short_repr(sides)}; it must be two numbers above 0"
        )
    return sides[0], sides[1]


_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
"""The formats of compressed-tensors that are read."""


def compressed_weights(folder: Path, settings: Settings) -> list[Settings]:
    """Return how the groups of matrices of compressed-tensors are stored, one for each group."""
    sparsity = settings.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        raise config_error(
            folder, f"the sparsity_config {short_repr(sparsity)}; supported: the format 'dense'"
        )
    groups = settings.get(GROUP)
    inner = list(groups.values()) if isinstance(groups, Mapping) else []
    inner = [x if isinstance(x, Mapping) else {} for x in inner]
    formats = [x["format"] for x in inner if x.get("format")]
    layout = settings.get("format")
    for name in formats if layout == "mixed-precision" and formats else (layout, *formats):
        check_setting(folder, "format", name, _FORMATS)
    weights = [x["weights"] if isinstance(x.get("weights"), Mapping) else {} for x in inner]
    for group, own in zip(inner, weights, strict=True):
        check_keys(folder, GROUP, group)
        check_keys(folder, WEIGHTS, own)
    bits = {x.get("num_bits") for x in weights if x.get("type", "int") == "int"}
    if not weights or len(bits) > 1 or not bits <= {4, 8}:
        raise config_error(
            folder, f"{GROUP} {short_repr(groups)}; integers of 4 or of 8 bits are supported"
        )
    return weights


def config_error(folder: Path, problem: str) -> FileError:
    """Return the error for a quantization_config that has a problem."""
    return FileError(f"{folder / 'config.json'}: quantization_config has {problem}")
