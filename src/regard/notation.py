"""The glossary: every letter and word that regard uses, what it means, and what else the field
calls it.

A word that is not here is a question for review. `python -m regard.notation` prints the table.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """What a letter or word means, in one sentence, and the field's other words for it.

    >>> GLOSSARY["lse"].synonyms
    ('logsumexp', 'log normaliser', 'L')
    """

    meaning: str
    synonyms: tuple[str, ...] = ()


LETTERS: dict[str, Entry] = {
    "B": Entry("Batch: how many sequences are computed together.", ("batch size", "N")),
    "H": Entry("How many query heads there are.", ("num_heads", "n_q", "n_heads")),
    "G": Entry(
        "How many key/value heads there are; query head h uses head h // (H/G), and G divides H.",
        ("num_kv_heads", "kv groups", "n_kv"),
    ),
    "T": Entry("How many queries there are.", ("query length", "L", "N_q")),
    "S": Entry("How many keys there are.", ("key length", "kv length", "N_k")),
    "D": Entry("Width of a query or key head.", ("head_dim", "d_k", "d_qk")),
    "E": Entry("Width of a value head.", ("v_head_dim", "d_v")),
    "M": Entry("Width of the model's hidden state.", ("d_model", "hidden_size", "embed_dim")),
    "V": Entry("How many tokens the vocabulary has.", ("vocab_size",)),
}

WORDS: dict[str, Entry] = {
    "bias": Entry(
        "A number added to a score that depends on who looks at whom, before the mask.",
        ("relative position bias", "attention bias"),
    ),
    "cache": Entry(
        "What a projection remembered of earlier tokens, stored together with its positions.",
        ("KV cache", "past_key_values"),
    ),
    "expert": Entry(
        "One of several feed-forward layers side by side, of which a token uses a few.",
        ("MoE expert",),
    ),
    "fallback": Entry("Another kernel than the one asked for; it never happens silently."),
    "group": Entry("The query heads that share one key/value head.", ("kv group",)),
    "head": Entry("One of the attentions that run side by side on slices of the width."),
    "interval": Entry("A half-open range of key positions that a query may see."),
    "kernel": Entry(
        "One way to compute the softmax operation; it says which calls it refuses, and why.",
        ("backend", "implementation"),
    ),
    "key": Entry("What a token offers to be matched against a query, [B, G, S, D].", ("k",)),
    "latent": Entry(
        "The low-rank vector from which keys and values are recalled.", ("compressed kv", "c_kv")
    ),
    "layout": Entry(
        "Which coordinates rotary embedding pairs: `half` (i, i + D/2) or `interleaved` (2i, "
        "2i+1).",
        ("rotate_half", "GPT-NeoX style", "GPT-J style"),
    ),
    "lse": Entry(
        "Log of the sum of exp(score) over visible keys, natural log, without the sink, [B, H, T].",
        ("logsumexp", "log normaliser", "L"),
    ),
    "mask": Entry(
        "A rule on positions that says which key a query may see; True means it may.",
        ("attention mask", "attn_mask"),
    ),
    "memory": Entry("What `remember` makes of a token, opaque to the cache that stores it."),
    "merge": Entry(
        "Join partials over disjoint sets of keys into the attention over their union, exactly.",
        ("combine", "LSE reduction", "split-KV reduction"),
    ),
    "mixer": Entry(
        "A module that lets the tokens of a sequence see one another: any mechanism.",
        ("token mixer", "sequence mixer"),
    ),
    "out": Entry(
        "The heads joined and projected: what attention adds to the hidden state, [B, T, M].",
        ("attention output", "o_proj output"),
    ),
    "partial": Entry(
        "Attention over a part of the keys with what is needed to join it to the rest: (out, lse).",
        ("split", "chunk result"),
    ),
    "pattern": Entry(
        "The softmax weights: what share of each query's attention every key gets, [B, H, T, S].",
        ("attention weights", "attention probabilities", "attn", "probs"),
    ),
    "place": Entry("Where in a model a tap stands; it goes in front of the tap's name."),
    "plan": Entry("Which kernel a call will use, and every other kernel's reasons against it."),
    "position": Entry(
        "A token's absolute index in its sequence; -1 is a slot that holds nothing.",
        ("position_ids", "cache_position"),
    ),
    "query": Entry("What a token looks for in the others, [B, H, T, D].", ("q",)),
    "recall": Entry("Turn remembered memory into keys and values.", ("up-projection",)),
    "remember": Entry("Make of hidden states what is worth keeping for later queries."),
    "rotary": Entry(
        "Position by rotating pairs of coordinates, so that a score depends on the distance.",
        ("RoPE",),
    ),
    "router": Entry(
        "What chooses a token's experts, and says what each of them counts.",
        ("gate", "gating network"),
    ),
    "scale": Entry("The factor on q.k, 1/sqrt(D) by default.", ("softmax_scale", "sm_scale")),
    "score": Entry(
        "How well a query matches a key, before the softmax, [B, H, T, S].",
        ("attention logit", "energy", "similarity"),
    ),
    "sink": Entry(
        "A learnt logit per head that takes part in the denominator only.",
        ("attention sink logit", "off-by-one softmax when it is 0", "s_aux"),
    ),
    "slot": Entry("One place along the key axis, whether it holds a token or not."),
    "softcap": Entry("cap * tanh(score / cap): keeps scores within (-cap, cap).", ("tanh cap",)),
    "span": Entry("A contiguous run of positions, carried as two numbers, not as a tensor."),
    "state": Entry(
        "What a recurrence carries from one token to the next: of a fixed size, whatever the "
        "length.",
        ("recurrent state", "fast weights"),
    ),
    "tap": Entry("An identity call at a named place, where a trace can listen or edit.", ("hook",)),
    "tile": Entry(
        "A block of queries against a block of keys: empty, partial or full under a mask.",
        ("block",),
    ),
    "trace": Entry("What captures or edits the tensors that pass the taps.", ("hook manager",)),
    "value": Entry("What a token gives to a query that attends to it, [B, G, S, E].", ("v",)),
    "window": Entry(
        "How many keys a query sees looking back, its own included.", ("sliding window", "band")
    ),
    "z": Entry(
        "The weighted sum of values, one per head, before the output projection, [B, H, T, E].",
        ("context vector", "head output", "attention output per head"),
    ),
}

GLOSSARY: dict[str, Entry] = {**LETTERS, **WORDS}


def table() -> str:
    """The glossary as text, one entry a line.

    >>> print(table().splitlines()[0])
    B          Batch: how many sequences are computed together. (batch size, N)
    """
    return "\n".join(
        f"{name:<10} {entry.meaning}" + (f" ({', '.join(entry.synonyms)})" * bool(entry.synonyms))
        for name, entry in GLOSSARY.items()
    )


if __name__ == "__main__":
    print(table())
