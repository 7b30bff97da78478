"""transformers: its attention functions, its latent attention, and a model of its own with the same
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.bench.interfaces import Peer, Way
from regard.bench.problems import AttentionProblem, LatentProblem, ModelProblem, way
from regard.models.checkpoint.names import bind
from regard.models.families import qwen2

NEEDS = ("transformers",)


class _Layer(nn.Module):
    """What transformers' functions ask of the module that calls them."""

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__()
        self.num_key_value_groups = problem.sizes.H // problem.sizes.G
        self.is_causal = True


def attention(problem: AttentionProblem, *, name: str) -> Way:
    """An attention function as a Llama there would call it; its mask as transformers makes it: none
    where it may be left out.
    """
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
    return way(problem, call, lambda found: found[0].transpose(1, 2))


def _function(name: str) -> Callable[..., Any]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama.modeling_llama import eager_attention_forward

    found: dict[str, Any] = {"sdpa": sdpa_attention_forward, "eager": eager_attention_forward}
    function: Callable[..., Any] = found[name]
    return function


def _mask(problem: AttentionProblem, name: str) -> Tensor | None:
    s = problem.sizes
    plain = s.window is None and not s.alibi and not s.padded
    if plain and (s.queries == 1 or (name == "sdpa" and s.queries == s.S)):
        return None
    seen = problem.visible()
    # a query that is none sees something there, so that no row is NaN
    seen = seen | ~seen.any(dim=-1, keepdim=True)
    if name == "sdpa" and not s.alibi:
        return seen
    bias = problem.bias() if s.alibi else torch.zeros((), dtype=problem.dtype)
    return torch.where(seen, bias.to(problem.device), torch.finfo(problem.dtype).min)


def scores_bytes(problem: AttentionProblem) -> int:
    """The scores, with the mask added, their softmax in fp32, and the weights; keys and values
    repeated.
    """
    s = problem.sizes
    scores = s.B * s.H * s.queries * s.S
    repeated = 2 * s.B * s.H * s.S * s.D * problem.dtype.itemsize
    return scores * (3 * problem.dtype.itemsize + 4) * (2 if problem.train else 1) + repeated


def latent(problem: LatentProblem, *, name: str) -> Way:
    """DeepSeek-V3's attention: keys and values of all heads expanded from the cached latents, at
    every step.
    """
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
            found: Tensor = function(module, q, k, v, None, scaling=problem.scale)[0]
            return found

    return Way(step, lambda out: {"out": out.transpose(1, 2)})


def no_expansion(_: LatentProblem) -> str | None:
    """Older versions keep the keys and values of every head."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    if hasattr(DeepseekV3Attention, "expand_kv"):
        return None
    return "this version of transformers caches no latents"


def expanded_bytes(problem: LatentProblem) -> int:
    """Keys and values of all heads, twice: as they are expanded, and put together."""
    s = problem.sizes
    return 2 * s.B * s.S * s.H * (s.nope + s.rope + s.value) * problem.dtype.itemsize


def model(problem: ModelProblem, *, name: str) -> Way:
    """A Qwen2 there with the same parameters, one token behind a cache, which is cropped to where
    it was.
    """
    network = _qwen2(problem, name)
    cache = _cache(problem, name)
    for layer in range(problem.sizes.layers):
        cache.update(*problem.memory(layer), layer)

    def step() -> Tensor:
        with torch.no_grad():
            logits: Tensor = network(problem.ids, past_key_values=cache, use_cache=True).logits
        cache.crop(-1)  # the token that was added
        return logits

    def read(logits: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            prompt = network(problem.prompt, use_cache=False, logits_to_keep=1).logits
        return {"logits": logits, "prompt": prompt}

    return Way(step, read)


def _qwen2(problem: ModelProblem, name: str) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if name == "regard":
        register()
    said = problem.foreign()
    said["rope_parameters"] = {"rope_type": "default", "rope_theta": said.pop("rope_theta")}
    for key in ("rope_scaling", "layer_types"):
        said.pop(key, None)
    said["attn_implementation"] = name
    config = Qwen2Config(**said)
    with torch.device("meta"):
        network = Qwen2ForCausalLM(config)
    network.train(False)
    ours = dict(problem.decoder.named_parameters(remove_duplicate=False))
    bindings = bind(problem.decoder, qwen2.FAMILY.names)
    given = {
        theirs: bound.rule.give([ours[n] for n in bound.ours]) for theirs, bound in bindings.items()
    }
    network.load_state_dict(given, assign=True)
    # its frequencies are no parameters, and were made on the device "meta"
    network.model.rotary_emb = type(network.model.rotary_emb)(config).to(problem.device)
    return network


def register() -> None:
    """Register the attention implementation "regard" in transformers."""
    import regard.integrations.transformers  # noqa: F401


def _cache(problem: ModelProblem, name: str) -> Any:
    from transformers import DynamicCache, Qwen2Config

    config = Qwen2Config(num_hidden_layers=problem.sizes.layers)
    if name == "regard":
        from regard.integrations.transformers import PreallocatedCache

        return PreallocatedCache(config, problem.sizes.S + 1)
    return DynamicCache(config=config)


def model_bytes(problem: ModelProblem) -> int:
    """A cache, and the copy of it that a step makes."""
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
