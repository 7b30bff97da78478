"""The glossary: letters, words, their meaning, other words for the same; add a word here first."""

from __future__ import annotations

from typing import NamedTuple

from regard.language import language_of_locale, translate, use_language


class Entry(NamedTuple):
    """The meaning of a letter or word in one sentence, and other words that the field uses."""

    meaning: str
    synonyms: tuple[str, ...] = ()


LETTERS: dict[str, Entry] = {
    "B": Entry("Batch size: the number of sequences that are computed together.", ("N",)),
    "H": Entry("The number of query heads.", ("num_heads", "n_q", "n_heads")),
    "G": Entry(
        "The number of key/value heads; query head h uses head h // (H/G), and G divides H.",
        ("num_kv_heads", "kv groups", "n_kv"),
    ),
    "N": Entry(
        "The number of value heads of a recurrence, each of which has a state; value head h uses "
        "key head h // (N/G), and G divides N.",
        ("num_v_heads", "linear_num_value_heads"),
    ),
    "T": Entry("The number of queries.", ("query length", "L", "N_q")),
    "S": Entry("The number of keys.", ("key length", "kv length", "N_k")),
    "D": Entry("The width of a query or key head.", ("head_dim", "d_k", "d_qk")),
    "E": Entry("The width of a value head.", ("v_head_dim", "d_v")),
    "M": Entry("The width of the model's hidden state.", ("d_model", "hidden_size", "embed_dim")),
    "V": Entry("The number of tokens in the vocabulary.", ("vocab_size",)),
}

WORDS: dict[str, Entry] = {
    "A_log": Entry(
        "Learned logarithm of the decay rate of a recurrence: decay = exp(-exp(A_log) * dt).",
        ("log decay rate",),
    ),
    "beta": Entry(
        "The share by which the delta rule replaces the old value of a key; from `beta_proj`.",
        ("write strength", "learning rate of the fast weights"),
    ),
    "bias": Entry(
        "A number that is added to a score before the mask and the softmax.",
        ("relative position bias", "attention bias"),
    ),
    "cache": Entry(
        "The stored keys and values (or other memory) of earlier tokens, with their positions.",
        ("KV cache", "past_key_values"),
    ),
    "crop": Entry("Remove all tokens from a position on from a cache.", ("truncate", "rollback")),
    "dt_bias": Entry("Learned bias of the step size dt of a recurrence.", ("time step bias",)),
    "eos_ids": Entry("Token ids that end a generated text.", ("eos_token_id", "stop tokens")),
    "evict": Entry("Remove old tokens from a cache to make room.", ("drop", "discard")),
    "expert": Entry(
        "One of several parallel feed-forward layers, of which each token uses a few.",
        ("MoE expert",),
    ),
    "fallback": Entry("A kernel that runs in place of the requested one; it never runs silently."),
    "fork": Entry("A copy of a cache that changes independently of the original."),
    "form": Entry(
        "One of several equivalent ways to compute an operation, chosen by the call's lengths.",
        ("mode", "absorbed or naive (MLA)", "recurrent, chunked or parallel"),
    ),
    "fused_qkv": Entry(
        "One linear map that computes queries, keys and values together.",
        ("qkv_proj", "c_attn", "query_key_value"),
    ),
    "group": Entry("The query heads that share one key/value head.", ("kv group",)),
    "head": Entry(
        "One of the attention computations that run in parallel, each with its own queries.",
        ("attention head",),
    ),
    "huge page": Entry(
        "A memory page of 2 MiB instead of 4 KiB, from which a CPU reads faster.",
        ("large page", "transparent huge page"),
    ),
    "interval": Entry("A half-open range of positions, [start, stop), whose keys a query may see."),
    "kernel": Entry(
        "An implementation of softmax attention; it states its reasons if it refuses a call.",
        ("backend", "implementation"),
    ),
    "key": Entry("The vector of a token that is compared with queries, [B, G, S, D].", ("k",)),
    "latent": Entry(
        "The low-rank vector from which keys and values are computed.", ("compressed kv", "c_kv")
    ),
    "layout": Entry(
        "How rotary embedding pairs coordinates: `half` (i, i + D/2) or `interleaved` (2i, 2i+1).",
        ("rotate_half", "GPT-NeoX style", "GPT-J style"),
    ),
    "lse": Entry(
        "Log of the sum of exp(score) over visible keys, natural log, without the sink, [B, H, T].",
        ("logsumexp", "log normalizer", "L"),
    ),
    "mask": Entry(
        "A rule that says which keys a query may see; True means that the query may see the key.",
        ("attention mask", "attn_mask"),
    ),
    "memory": Entry(
        "The tensors that a projection stores for each token, such as keys and values.",
        ("cached states",),
    ),
    "merge": Entry(
        "Join partials over disjoint sets of keys into the attention over their union, exactly.",
        ("combine", "LSE reduction", "split-KV reduction"),
    ),
    "mixer": Entry(
        "A module that mixes information between the tokens of a sequence.",
        ("token mixer", "sequence mixer"),
    ),
    "out": Entry(
        "The joined heads after the output projection, added to the hidden state, [B, T, M].",
        ("attention output", "o_proj output"),
    ),
    "outlier": Entry("A value that no quantization group can represent; it is stored exactly."),
    "page": Entry(
        "A fixed number of slots of a paged cache, which rows and forks may share.",
        ("KV block", "block (vLLM)"),
    ),
    "partial": Entry(
        "Attention over some of the keys: (out, lse), from which partials are merged.",
        ("split", "chunk result"),
    ),
    "pattern": Entry(
        "The weights after the softmax: how much each query attends to each key, [B, H, T, S].",
        ("attention weights", "attention probabilities", "attn", "probs"),
    ),
    "plan": Entry(
        "The kernel that a call will use, and the reasons why the other kernels are not used."
    ),
    "position": Entry(
        "The absolute index of a token in its sequence, from 0; -1 marks a slot without a token.",
        ("position_ids", "cache_position"),
    ),
    "quantize": Entry(
        "Store values in few bits, as integer codes with a scale and a zero per group.",
        ("int8", "int4", "KIVI"),
    ),
    "query": Entry("The vector of a token that is compared with keys, [B, H, T, D].", ("q",)),
    "reach": Entry("The old keys that later queries may still see under a mask."),
    "recall": Entry("Compute keys and values from the stored memory.", ("up-projection",)),
    "remember": Entry(
        "Compute from hidden states the memory that a cache stores for later queries."
    ),
    "residual": Entry(
        "The path that adds the output of a layer to its input; in a quantized cache, the recent "
        "slots that are not quantized.",
        ("skip connection", "residual stream", "residual_length (KIVI)"),
    ),
    "rewind": Entry(
        "How many tokens a ring cache keeps beyond its window, so that a crop can remove them."
    ),
    "rotary": Entry(
        "Encoding of positions: pairs of coordinates of q and k are rotated by their position.",
        ("RoPE",),
    ),
    "router": Entry(
        "The layer that chooses the experts of a token and computes their weights.",
        ("gate", "gating network"),
    ),
    "scale": Entry("The factor on q.k, 1/sqrt(D) by default.", ("softmax_scale", "sm_scale")),
    "scope": Entry("A prefix of tap names that says where in a model a tap is.", ("module path",)),
    "score": Entry(
        "The scaled product of a query and a key, with softcap and bias, before the softmax, "
        "[B, H, T, S].",
        ("attention logit", "energy", "similarity"),
    ),
    "sink": Entry(
        "A learned logit per head that is part of the denominator only.",
        ("attention sink logit", "off-by-one softmax when it is 0", "s_aux"),
    ),
    "sinks": Entry(
        "The first positions of a sequence, if every query sees them; not the logit `sink`.",
        ("attention sinks", "sink tokens"),
    ),
    "slot": Entry("An index along the key axis; it holds a token or is empty (position -1)."),
    "softcap": Entry("cap * tanh(score / cap): keeps scores within (-cap, cap).", ("tanh cap",)),
    "span": Entry("Contiguous positions, stored as two numbers, not as a tensor."),
    "state": Entry(
        "The tensors that a recurrence passes from token to token, of a fixed size.",
        ("recurrent state", "fast weights"),
    ),
    "tap": Entry(
        "A named point in the computation at which a trace can capture or edit a tensor.",
        ("hook point", "HookPoint"),
    ),
    "tile": Entry(
        "A block of queries against a block of keys: empty, partial or full under a mask.",
        ("block",),
    ),
    "trace": Entry(
        "A context manager that captures or edits the tensors at taps.", ("hook manager",)
    ),
    "value": Entry(
        "The vector of a token that is averaged, by the weights of the query, [B, G, S, E].", ("v",)
    ),
    "window": Entry(
        "How many of the last keys a query sees, its own included.", ("sliding window", "band")
    ),
    "z": Entry(
        "The weighted sum of values, one per head, before the output projection, [B, H, T, E].",
        ("context vector", "head output", "attention output per head"),
    ),
}

GLOSSARY: dict[str, Entry] = {**LETTERS, **WORDS}


def table() -> str:
    """Return the glossary as text, one entry per line: the word, its meaning, which in Chinese
    begins with the Chinese term, and other words for it.
    """
    return "\n".join(
        f"{name:<10} {translate(entry.meaning)}"
        + (f" ({', '.join(entry.synonyms)})" * bool(entry.synonyms))
        for name, entry in GLOSSARY.items()
    )


if __name__ == "__main__":
    import sys

    from regard.standard_output import run_program

    with use_language(language_of_locale()):
        sys.exit(run_program(lambda: print(table())))
