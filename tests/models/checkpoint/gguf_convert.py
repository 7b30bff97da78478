"""Tiny models of many families as GGUF files: what llama.cpp's converter does to each, with the
library's names of tensors (`TensorNameMap`) and of keys (`GGUFWriter`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.constants import MODEL_ARCH_NAMES
from torch import Tensor

from regard.configs import config_class
from regard.models.checkpoint.family import bind_names
from regard.models.families import family
from regard.positions import Llama3, rope_frequencies
from tests.cost.tiny import whole
from tests.models import small
from tests.models.checkpoint.gguf_keys import keys_of, keys_of_mamba, keys_of_t5

LAYERS, WINDOW = 4, 5
DATA = Path(__file__).parents[2] / "data" / "gguf_configs.json"
TABLE: dict[str, dict[str, dict[str, Any]]] = json.loads(DATA.read_text("utf-8"))
"""Configs with their architectures, and parts of configs.

llama.cpp has layers, ranks and widths of Gemma 3n written in its code, and stops if heads of
DeepSeek-V4 are as wide as those of its indexer.
"""
SPELLINGS = {
    "e_score_correction_bias": "e_score_correction.bias",
    ".sinks": ".sinks.weight",
    ".expert_bias": ".expert_bias.bias",
    ".router_bias": ".router_bias.bias",
    ".attention_sink_bias": ".attention_sink_bias.weight",
}
PAIRS = ("arcee", "granite", "granite_swa", "granitehybrid", "granitemoe", "llama", "mistral3")
PAIRS += ("olmo", "smollm3")
"""Architectures whose rows of queries and keys change their order."""
SAME_NAMES = {"deepseek32": "glm-dsa", "deepseek4": "deepseek2", "granite_swa": "granite"}
SAME_NAMES |= {"minimax-01": "minimax-m2", "hy_v3": "exaone-moe", "minimax-m3": "exaone-moe"}
"""Architectures that the library does not know -> those with the same names of tensors."""
PARTS = TABLE["parts"]
YARN = PARTS["yarn"]
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {}
for _name, _raw in TABLE["configs"].items():
    _keys = {k: tuple(v) if isinstance(v, list) else v for k, v in whole(_raw, PARTS).items()}
    _family = _keys.pop("family", _name)
    CASES[_name] = _keys.pop("architecture"), _family, _keys
"""Name of a case -> llama.cpp's architecture, the family, and its config.json."""


def tiny_network(model_type: str, keys: dict[str, Any]) -> tuple[Any, Any]:
    """A network with random weights, and its config."""
    cls = config_class(model_type)
    assert cls is not None
    config: Any = cls(**keys)
    torch.manual_seed(0)
    network = family(model_type).build(config)
    small.randomize(network)
    for parameter in network.parameters():
        if not parameter.is_floating_point():  # a table of experts
            parameter.data.random_(0, keys["n_routed_experts"])
        elif parameter.ndim == 2:
            parameter.data *= 0.5
    return network.eval().requires_grad_(False), config


def stored_tensors(network: Any, model_type: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint of Hugging Face, tied ones once."""
    parameters = dict(network.named_parameters(remove_duplicate=False))
    found: dict[tuple[int, ...], tuple[str, Tensor]] = {}
    for name, binding in bind_names(network, family(model_type).names).items():
        parts = [parameters[x] for x in binding.parameters]
        if any(set(map(id, parts)) <= set(key) for key in found):
            continue
        found[tuple(map(id, parts))] = (name, binding.rule.pack(parts).detach())
    return dict(found.values())


def unread_maps(stored: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Key and value maps of layers that read those of earlier ones: released files have them."""
    kinds = getattr(config, "layer_types", None) or ()
    first = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
    return {
        f"model.layers.{i}.self_attn.{part}.weight": -value
        for i in range(first, len(kinds))
        for part in ("k_proj", "v_proj", "k_norm")
        if (value := stored.get(f"model.layers.{kinds.index(kinds[i])}.self_attn.{part}.weight"))
        is not None
    }


def convert(
    path: Path,
    architecture: str,
    model_type: str,
    config: Any,
    stored: dict[str, Tensor],
    vocabulary: Callable[[Any, int], None] | None = None,
    kind: str = "F32",
    experts_kind: str | None = None,
    divided: bool = True,
    **change: Any,
) -> Path:
    """Write a file as llama.cpp's converter does; matrices, or experts, in another format if it is
    given, and the latent matrix of DeepSeek divided in two or as it was.
    """

    def add(name: str, x: Tensor) -> None:
        x = x.int() if "tid2eid" in name else x
        kind = experts_kind if experts_kind and name.endswith("_exps.weight") else its_kind
        values = x.contiguous().numpy()
        plain = (".ffn_gate_inp.", "position_embd", "conv.weight", "conv1d.weight", ".bias")
        plain += ("ssm_alpha", "ssm_beta", "attn_rel_b", "hc_", "_ape", "tid2eid")
        if kind != "F32" and x.ndim > 1 and not any(part in name for part in plain):
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(values, number), raw_dtype=number)
        else:
            writer.add_tensor(name, values)

    its_kind = kind
    known_as = SAME_NAMES.get(architecture, architecture)
    number = next(k for k, name in MODEL_ARCH_NAMES.items() if name == known_as)
    table = gguf.get_tensor_name_map(number, 32)
    writer = gguf.GGUFWriter(path, architecture)
    find_keys = keys_of_mamba if model_type.endswith(("mamba", "mamba2")) else keys_of
    find_keys = keys_of_t5 if model_type == "t5" else find_keys
    for method, value in (find_keys(config, model_type) | change).items():
        if value is not None and method.startswith("add_"):
            getattr(writer, method)(value)
        elif value is not None:
            kind = {int: "uint32", float: "float32", list: "array"}[type(value)]
            getattr(writer, f"add_{kind}")(f"{architecture}.{method}", value)
    (vocabulary or write_vocabulary)(writer, 288)
    experts: dict[str, dict[int, Tensor]] = {}
    for name, x in (stored | unread_maps(stored, config)).items():
        if ".kv_b_proj." in name and not divided:
            add(f"blk.{name.split('.')[2]}.attn_kv_b.weight", x.float())
            continue
        for file_name, value in converted(name, x.float(), architecture, config, table):
            stem, _, index = file_name.partition("#")
            if index:
                experts.setdefault(stem, {})[int(index)] = value
            else:
                add(file_name, value)
    write_further(writer, architecture, config, stored)
    for stem, parts in experts.items():
        add(stem, torch.stack([parts[i] for i in range(len(parts))]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_further(writer: Any, architecture: str, config: Any, stored: dict[str, Tensor]) -> None:
    """Write what is no stored tensor: numbers of activations, and which dims rotate."""
    if architecture == "apertus":
        for part in ("alpha_p", "alpha_n", "beta", "eps"):
            values = [float(stored[f"model.layers.{i}.mlp.act_fn.{part}"]) for i in range(LAYERS)]
            getattr(writer, f"add_xielu_{part}")(values)
    if architecture == "step35":  # as if all dims rotated
        base, D = config.rope_parameters["full_attention"]["rope_theta"], config.head_dim
        scaling = Llama3(2.0, 1.0, 32.0, 131072)
        scaled = rope_frequencies(D, base, scaling=scaling).inv_freq
        factors = rope_frequencies(D, base).inv_freq / scaled
        writer.add_tensor("rope_freqs.weight", factors.float().numpy())
    if architecture == "gemma4":
        factors = torch.ones(config.global_head_dim // 2)
        factors[config.global_head_dim // 8 :] = 1e30
        writer.add_tensor("rope_freqs.weight", factors.numpy())


def write_vocabulary(writer: Any, count: int) -> None:
    """Write a byte-level tokenizer whose first tokens are the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    tokens = [*letters, "ab", *(f"<extra{i}>" for i in range(count - 258)), "<|endoftext|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * (count - 257))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(count - 1)


def of_recurrences(name: str, x: Tensor, architecture: str, config: Any) -> Any:
    """Yield the names and values of layers with a state, before their names are looked up."""
    if name.endswith("A_log"):
        x = -x.exp()
    is_mamba2 = architecture not in ("mamba", "jamba") and ".linear_attn." not in name
    if is_mamba2 and name.endswith((".A_log", ".D")):
        x = x[:, None]
    if is_mamba2 and name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        groups = getattr(config, "n_groups", None) or config.mamba_n_groups
        x = x.unflatten(0, (groups, -1))
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        x = x.squeeze(1)
    name = name.replace(".dt_bias", ".dt_proj.bias")
    if name.endswith("in_proj_qkvz.weight"):
        G, r = config.linear_num_key_heads, config.linear_num_value_heads // 2
        D, E = config.linear_key_head_dim, config.linear_value_head_dim
        q, k, v, z = x.unflatten(0, (G, -1)).split([D, D, r * E, r * E], 1)
        yield (
            name.replace("qkvz", "qkv"),
            torch.cat([q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)]),
        )
        yield name.replace("qkvz", "z"), z.flatten(0, 1)
        return
    if architecture.startswith("qwen35") and ".linear_attn." in name:
        x = tiled(name, x, config)
    yield name, x


def tiled(name: str, x: Tensor, config: Any) -> Tensor:
    """Value heads in the order in which head i uses key head i % G."""
    G, N = config.linear_num_key_heads, config.linear_num_value_heads
    E = config.linear_value_head_dim

    def order(values: Tensor) -> Tensor:
        return values.unflatten(0, (G, N // G, -1)).transpose(0, 1).flatten(0, 2)

    if ".out_proj." in name:
        return order(x.T).T
    if ".in_proj_qkv." in name or ".conv1d." in name:
        return torch.cat([x[: -N * E], order(x[-N * E :])])
    return x if ".norm." in name else order(x)


def of_latents(name: str, x: Tensor, config: Any) -> Any:
    """Yield the two matrices of DeepSeek's joined one."""
    H, D = config.num_attention_heads, config.qk_nope_head_dim
    k, v = x.unflatten(0, (H, -1)).split([D, config.v_head_dim], 1)
    layer = name.split(".")[2]
    yield f"blk.{layer}.attn_k_b.weight", k.transpose(1, 2)
    yield f"blk.{layer}.attn_v_b.weight", v


def of_shared(name: str, x: Tensor, config: Any) -> Any:
    """Yield the matrices of Granite's network for all tokens, beside experts or alone."""
    end = "_shexp" if config.num_local_experts else ""
    parts = {"gate": x.chunk(2)[0], "up": x.chunk(2)[1]} if "input" in name else {"down": x}
    for part, value in parts.items():
        yield f"blk.{name.split('.')[2]}.ffn_{part}{end}.weight", value


def of_gpt_oss(name: str, x: Tensor) -> Any:
    """Yield the matrices of experts that gpt-oss stores with alternating columns."""
    end = "bias" if name.endswith("_bias") else "weight"
    stem = f"blk.{name.split('.')[2]}.ffn"
    x = x.mT if end == "weight" else x
    if "gate_up_proj" in name:
        yield f"{stem}_gate_exps.{end}", x[:, ::2]
        yield f"{stem}_up_exps.{end}", x[:, 1::2]
    else:
        yield f"{stem}_down_exps.{end}", x


def of_gemma(name: str, x: Tensor, table: Any) -> Any:
    """The tensors of Gemma 3n and 4 whose names the library lacks, or None."""
    if "altup_projections" in name or "altup_unembed" in name:
        file = "altup_unembd_proj" if "unembed" in name else "altup_proj"
        return [(f"{file}.weight#{name.split('.')[2]}", x)]
    if name.endswith((".router.scale", ".router.per_expert_scale")):
        part = "ffn_gate_inp" if name.endswith(".router.scale") else "ffn_down_exps"
        return [(f"blk.{name.split('.')[2]}.{part}.scale", x)]
    if name.endswith(("_scale", "layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
        return [(f"{table.get_name(name)}.weight", x)]
    return None


V4_NAMES = {
    "attn.attn_sink": "attn_sinks",
    "attn.wq_a": "attn_q_a",
    "attn.q_norm": "attn_q_a_norm",
    "attn.wq_b": "attn_q_b",
    "attn.wkv": "attn_kv",
    "attn.kv_norm": "attn_kv_a_norm",
    "attn.wo_a": "attn_output_a",
    "attn.wo_b": "attn_output_b",
    "attn.compressor.ape": "attn_compressor_ape",
    "attn.compressor.wkv": "attn_compressor_kv",
    "attn.compressor.wgate": "attn_compressor_gate",
    "attn.compressor.norm": "attn_compressor_norm",
    "attn.indexer.wq_b": "indexer.attn_q_b",
    "attn.indexer.weights_proj": "indexer.proj",
    "attn.indexer.compressor.ape": "indexer_compressor_ape",
    "attn.indexer.compressor.wkv": "indexer_compressor_kv",
    "attn.indexer.compressor.wgate": "indexer_compressor_gate",
    "attn.indexer.compressor.norm": "indexer_compressor_norm",
    "ffn.gate": "ffn_gate_inp",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid",
    "ffn.shared_experts.w1": "ffn_gate_shexp",
    "ffn.shared_experts.w2": "ffn_down_shexp",
    "ffn.shared_experts.w3": "ffn_up_shexp",
}
"""Name of a part of a layer of DeepSeek-V4 -> its name in the file."""


def of_v4(name: str, x: Tensor) -> Any:
    """The names and values of DeepSeek-V4, which the library does not know."""
    if not name.startswith("layers."):
        top = {"embed.weight": "token_embd", "norm.weight": "output_norm", "head.weight": "output"}
        return [(f"{top.get(name, name.replace('hc_head', 'output_hc'))}.weight", x)]
    _, layer, part = name.split(".", 2)
    if part.startswith("ffn.experts."):
        _, _, index, w, _ = part.split(".")
        of_w = {"w1": "gate", "w2": "down", "w3": "up"}[w]
        return [(f"blk.{layer}.ffn_{of_w}_exps.weight#{index}", x)]
    if part == "ffn.gate.bias":
        return [(f"blk.{layer}.exp_probs_b.bias", x)]
    part = part.removesuffix(".weight")
    return [(f"blk.{layer}.{V4_NAMES.get(part, part)}.weight", x)]


def of_own_layout(name: str, x: Tensor, architecture: str, config: Any, table: Any) -> Any:
    """The names and values of tensors that only one family has, or None."""
    if architecture.startswith("nemotron_h"):
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if architecture == "qwen35moe" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return ()  # the same experts once more
    if any(part in name for part in (".mixer.", ".mamba.", ".linear_attn.", ".conv.conv.")):
        found = of_recurrences(name, x, architecture, config)
        dotted = ((n if n.endswith(("weight", "bias")) else f"{n}.", value) for n, value in found)
        parts = ((n.rpartition("."), value) for n, value in dotted)
        if ".mixer.experts." in name:
            name, index = of_expert(name.replace("backbone", "model").replace("mixer", "mlp"))
            return [(table.get_name(name, try_suffixes=(".weight",)) + index, x)]
        return [
            (f"{table.get_name(stem)}.{end}".removesuffix("."), value)
            for (stem, _, end), value in parts
        ]
    if architecture == "kimi-linear" and name.endswith((".A_log", ".dt_bias", "_conv1d.weight")):
        x = -x.exp() if name.endswith(".A_log") else x
        x = x.squeeze(1)[None, :, None] if "conv1d" in name else x
        name = name.replace(".dt_bias", ".dt_proj.bias")
        return [(table.get_name(name, try_suffixes=(".weight", ".bias")), x)]
    if ".act_fn." in name:
        return ()  # in the metadata
    if "gemma" in architecture and (own := of_gemma(name, x, table)) is not None:
        return own
    if ".shared_mlp." in name and architecture != "hy_v3":
        return of_shared(name, x, config)
    if architecture == "llama4" and ".experts." in name:
        layer, x = name.split(".")[2], x.mT
        parts = (
            zip(("gate", "up"), x.chunk(2, 1), strict=True) if "gate_up" in name else [("down", x)]
        )
        return [(f"blk.{layer}.ffn_{part}_exps.weight", value) for part, value in parts]
    if ".kv_b_proj." in name:
        return of_latents(name, x, config)
    if architecture == "gpt-oss" and ".experts." in name:
        return of_gpt_oss(name, x)
    return None


def of_own_names(name: str, x: Tensor, architecture: str, config: Any, table: Any) -> Any:
    """The same, also of architectures that the library does not know."""
    if architecture == "deepseek4":
        return of_v4(name, x)
    if architecture == "minimax-m3" and (own := of_minimax_m3(name, x)):
        return own
    if architecture == "hy_v3" and name.endswith(".expert_bias"):
        return [(table.get_name(name), x)]
    if architecture == "granite_swa" and name.endswith(".sinks"):
        return [(f"blk.{name.split('.')[2]}.attn_sinks.weight", x)]
    if architecture == "minimax-01" and (part := MINIMAX.get(name.split(".")[-2])):
        return [(f"blk.{name.split('.')[2]}.{part}.weight", x)] if ".self_attn." in name else None
    return of_own_layout(name, x, architecture, config, table)


def of_minimax_m3(name: str, x: Tensor) -> Any:
    """The indexers, and the parts of the matrices of networks, as the makers' files have them."""
    layer, kind = name.split(".")[2:3], name.removesuffix(".weight").split(".")[-1]
    if ".indexer." in name:
        return [(f"blk.{layer[0]}.indexer.{kind}.weight", x + 1 if kind.endswith("norm") else x)]
    if ".mlp." not in name or kind not in ("gate_up_proj", "down_proj"):
        return None
    end = "_exps" if ".experts." in name else "_shexp" if ".shared_experts." in name else ""
    parts = zip(("gate", "up"), x.chunk(2, -2), strict=True) if "up" in kind else [("down", x)]
    return [(f"blk.{layer[0]}.ffn_{part}{end}.weight", value) for part, value in parts]


MINIMAX = {"qkv_proj": "attn_qkv", "output_gate": "attn_gate"}
MINIMAX |= {"norm": "attn_norm_2", "out_proj": "attn_output"}


def of_expert(name: str) -> tuple[str, str]:
    """The name of the matrix of all experts, and "#" with the number of the expert if it is one."""
    head, _, tail = name.partition(".experts.")
    number, _, part = tail.partition(".")
    return (f"{head}.experts.{part}", f"#{number}") if number.isdigit() else (name, "")


def converted(name: str, x: Tensor, architecture: str, config: Any, table: Any) -> Any:
    """Yield the names and values in the file of a stored tensor; "#3" is that of an expert."""
    if (own := of_own_names(name, x, architecture, config, table)) is not None:
        yield from own
        return
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "n_head", None)
    groups = getattr(config, "num_key_value_heads", heads)
    if architecture in PAIRS:
        if ".q_proj." in name:
            x = permuted(x, heads)
        elif ".k_proj." in name:
            x = permuted(x, groups)
    if ".query_key_value." in name:
        groups = getattr(config, "num_kv_heads", None) or heads
        groups = 1 if getattr(config, "multi_query", False) and groups == heads else groups
        by_group = x.unflatten(0, (groups, heads // groups + 2, -1))
        parts = (by_group[:, :-2], by_group[:, -2:-1], by_group[:, -1:])
        x = torch.cat([part.flatten(0, 2) for part in parts])
    offset = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next")
    offset += ("minimax-m3", "step35")
    if architecture in offset and name.endswith("norm.weight"):
        x = x + 1
    if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
        x = x.T
    if name.endswith("block_sparse_moe.input_linear.weight"):
        layer = name.split(".")[2]
        gate, up = x.chunk(2, 1)
        yield f"blk.{layer}.ffn_gate_exps.weight", gate
        yield f"blk.{layer}.ffn_up_exps.weight", up
        return
    if name.startswith(("bert.pooler", "cls.")):
        return
    x = x.flatten() if "e_score_correction" in name else x
    name, index = of_expert(name)
    for ours, theirs in SPELLINGS.items():
        name = name.replace(ours, theirs)
    new = table.get_name(name, try_suffixes=(".weight", ".bias"))
    for prefix in ("transformer.", "bert.", "model."):
        new = new or table.get_name(name.removeprefix(prefix), try_suffixes=(".weight", ".bias"))
    assert new is not None, name
    yield new + index, x


def permuted(x: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in the order of llama.cpp."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


if __name__ == "__main__":
    for case, (architecture, model_type, keys) in CASES.items():
        made, its_config = tiny_network(model_type, keys)
        file = Path(sys.argv[1]) / f"{case.replace(' ', '-')}.gguf"
        convert(file, architecture, model_type, its_config, stored_tensors(made, model_type))
