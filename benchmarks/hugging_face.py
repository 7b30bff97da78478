"""transformers: its attention functions, its latent attention, and its Qwen2 model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.attention import AttentionProblem, LatentProblem, prepared_call
from benchmarks.interfaces import Peer, PreparedCall
from benchmarks.model import ModelProblem
from regard.models.checkpoint.family import bind_names
from regard.models.families import family

NEEDS = ("transformers",)


class _Layer(nn.Module):
    """A module with the attributes that the attention functions of transformers read."""

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__()
        self.num_key_value_groups = problem.sizes.H // problem.sizes.G
        self.is_causal = True


def attention(problem: AttentionProblem, *, name: str) -> PreparedCall:
    """Prepare an attention function of transformers, called and masked as by its Llama."""
    function = _function(name)
    mask = _mask(problem, name)
    call = partial(
        function,
        _Layer(problem).eval(),
        problem.q,
        problem.k,
        problem.v,
        mask,
        scaling=problem.sizes.D**-0.5,
    )
    return prepared_call(problem, call, lambda result: result[0].transpose(1, 2))


def _function(name: str) -> Callable[..., Any]:
    """Return the attention function "sdpa" or "eager" of transformers."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama.modeling_llama import eager_attention_forward

    functions: dict[str, Any] = {"sdpa": sdpa_attention_forward, "eager": eager_attention_forward}
    function: Callable[..., object] = functions[name]
    return function


def _mask(problem: AttentionProblem, name: str) -> Tensor | None:
    """Return the mask of transformers: bool for "sdpa", float for "eager", or None."""
    s = problem.sizes
    plain = s.window is None and not s.alibi and not s.padded
    if plain and (s.queries == 1 or (name == "sdpa" and s.queries == s.S)):
        return None
    visible = problem.visible()
    # as in transformers, every key is visible to a padded query, so that no row is NaN
    visible = visible | ~visible.any(dim=-1, keepdim=True)
    if name == "sdpa" and not s.alibi:
        return visible
    bias = problem.bias() if s.alibi else torch.zeros((), dtype=problem.dtype)
    return torch.where(visible, bias.to(problem.device), torch.finfo(problem.dtype).min)


def scores_bytes(problem: AttentionProblem) -> int:
    """Return the bytes of scores, masked scores, softmax, weights, repeated keys and values."""
    s = problem.sizes
    scores = s.B * s.H * s.queries * s.S
    repeated = 2 * s.B * s.H * s.S * s.D * problem.dtype.itemsize
    return scores * (3 * problem.dtype.itemsize + 4) * (2 if problem.train else 1) + repeated


def latent(problem: LatentProblem, *, name: str) -> PreparedCall:
    """Prepare DeepSeek-V3's attention, which expands the latents to all heads at every step."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    s = problem.sizes
    config = DeepseekV3Config(
        hidden_size=8,
        num_attention_heads=s.H,
        num_key_value_heads=s.H,
        kv_lora_rank=s.rank,
        qk_rope_head_dim=s.rope,
        qk_nope_head_dim=s.nope,
        v_head_dim=s.value,
        q_lora_rank=None,
    )
    with torch.device("meta"):
        module = DeepseekV3Attention(config, 0).eval()
    module.kv_b_proj.weight = nn.Parameter(problem.weight, requires_grad=False)
    function = _function(name)

    def step() -> Tensor:
        with torch.no_grad():
            q = torch.cat((problem.q_nope, problem.q_rope), dim=-1)
            k, v = module.expand_kv(problem.latents, problem.rope)
            out: Tensor = function(module, q, k, v, None, scaling=problem.scale)[0]
            return out

    return PreparedCall(step, lambda out: {"out": out.transpose(1, 2)})


def no_expansion(_: LatentProblem) -> str | None:
    """Return why this version of transformers has no latent cache, or None if it has one."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    if hasattr(DeepseekV3Attention, "expand_kv"):
        return None
    return "this version of transformers has no cache of latents"


def expanded_bytes(problem: LatentProblem) -> int:
    """Return the memory in bytes of the keys and values of all heads, expanded and concatenated."""
    s = problem.sizes
    return 2 * s.B * s.S * s.H * (s.nope + s.rope + s.value) * problem.dtype.itemsize


def model(problem: ModelProblem, *, name: str, static: bool = False) -> PreparedCall:
    """Prepare a decoding step of the Qwen2 of transformers with the same parameters.

    With a `StaticCache` on a GPU the step is compiled with CUDA graphs.
    """
    network = qwen2_network(problem, name)
    cache = _cache(network.config, name, problem.sizes.S + 1, static=static)
    for layer in range(problem.sizes.layers):
        cache.update(*problem.memory(layer), layer)
    run = network.forward
    if static and problem.device.type == "cuda":
        run = torch.compile(run, mode="reduce-overhead", fullgraph=True)

    def step() -> Tensor:
        with torch.no_grad():
            logits: Tensor = run(problem.ids, past_key_values=cache, use_cache=True).logits
            if not static:
                cache.crop(-1)  # remove the new token
            for layer in cache.layers if static else ():
                layer.cumulative_length.sub_(1)
        return logits

    def read(logits: Tensor) -> dict[str, Tensor]:
        logits = logits.clone()  # the next run of a graph overwrites them
        with torch.no_grad():
            prompt = network(problem.prompt, use_cache=False, logits_to_keep=1).logits
        return {"logits": logits, "prompt": prompt}

    return PreparedCall(step, read)


def qwen2_network(problem: ModelProblem, name: str) -> Any:
    """Return a Qwen2 of transformers that shares the parameters of the problem's decoder."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if name == "regard":  # its import registers the attention implementation
        import regard.integrations.transformers  # noqa: F401
    options = problem.hugging_face_config()
    options["rope_parameters"] = {"rope_type": "default", "rope_theta": options.pop("rope_theta")}
    for key in ("rope_scaling", "layer_types"):
        options.pop(key, None)
    options["attn_implementation"] = name
    config = Qwen2Config(**options)
    with torch.device("meta"):
        network = Qwen2ForCausalLM(config)
    network.train(False)
    ours = dict(problem.decoder.named_parameters(remove_duplicate=False))
    bindings = bind_names(problem.decoder, family("qwen2").names)
    state = {
        stored_name: binding.rule.pack([ours[n] for n in binding.parameters])
        for stored_name, binding in bindings.items()
    }
    network.load_state_dict(state, assign=True)
    # the rotary frequencies are not parameters and were created on the device "meta"
    network.model.rotary_emb = type(network.model.rotary_emb)(config).to(problem.device)
    return network


def _cache(config: Any, name: str, length: int, *, static: bool) -> Any:
    """Return an empty cache for an attention implementation."""
    from transformers import DynamicCache, StaticCache

    if static:
        return StaticCache(config=config, max_cache_len=length)
    if name == "regard":
        from regard.integrations.transformers import PreallocatedCache

        return PreallocatedCache(config, length)
    return DynamicCache(config=config)


def model_bytes(problem: ModelProblem) -> int:
    """Return the memory in bytes of a cache, and of its copy that a step creates."""
    return 2 * problem.sizes.cached * problem.dtype.itemsize


ATTENTION = tuple(
    Peer(
        f"transformers {name}",
        f"transformers' {name} attention function.",
        partial(attention, name=name),
        needs=NEEDS,
        bytes=scores_bytes,
    )
    for name in ("sdpa", "eager")
)
LATENT = tuple(
    Peer(
        f"transformers {name}",
        f"transformers' DeepseekV3Attention, {name}, which expands all latents.",
        partial(latent, name=name),
        needs=NEEDS,
        why_not=no_expansion,
        bytes=expanded_bytes,
    )
    for name in ("sdpa", "eager")
)
MODEL = tuple(
    Peer(
        f"transformers {name}",
        f"transformers' Qwen2ForCausalLM, attn_implementation={name!r}.",
        partial(model, name=name),
        needs=NEEDS,
        bytes=model_bytes,
    )
    for name in ("regard", "sdpa", "eager")
)
STATIC_MODEL = Peer(
    "transformers compiled",
    "transformers' Qwen2ForCausalLM with a StaticCache, compiled with CUDA graphs.",
    partial(model, name="sdpa", static=True),
    needs=NEEDS,
    bytes=model_bytes,
)
