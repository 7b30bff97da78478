"""Implementations in the styles of public repositories, made by small edits of `styles`: faulty
ones in `FAULTY`, each with the name of its fault, and right ones in `CORRECT`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.audit.corpus import styles


class Variant(NamedTuple):
    """An edit of the source of a style, and the fault that it makes; None if it makes none."""

    style: str
    fault: str | None
    old: str = ""
    new: str = ""

    @property
    def label(self) -> str:
        return f"{self.style}: {' '.join(self.new.split())[:50] or 'as it is'}"

    def target(self) -> Callable[..., Any]:
        """Make the class or the function from its edited source."""
        text = inspect.getsource(getattr(styles, self.style))
        if self.old:
            assert text.count(self.old) == 1, (self.style, self.old, text.count(self.old))
            text = text.replace(self.old, self.new)
        names = dict(vars(styles))
        exec(compile(text, f"<{self.style}>", "exec"), names)
        made: Callable[..., Any] = names[self.style]
        return made


SIZES = {"dim": 32, "heads": 4}
GIVEN: dict[str, dict[str, Any]] = {
    "VisionAttention": {"options": {"dim": 32, "num_heads": 4}, "causal": False},
    "MetaAttention": {"options": {"dim": 32, "n_heads": 4, "n_kv_heads": 2}, "causal": True},
    "WhisperAttention": {"options": {"n_state": 32, "n_head": 4}},
    "FlatAttention": {"options": {"embed_dim": 32, "num_heads": 4}},
    "FairseqAttention": {"options": {"embed_dim": 32, "num_heads": 4}, "causal": True},
    "SlidingAttention": {
        "options": {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "sliding_window": 5},
        "window": 5,
        "causal": True,
    },
    "KeywordAttention": {"options": {"d_model": 32, "n_heads": 4}},
    "ManyOutputs": {**SIZES, "causal": True},
    "dense_attention": {"mask": "keep"},
    "online_attention": {},
}
"""How each style is audited."""

V, M, W, O, S, L, K, N = (
    *("VisionAttention", "MetaAttention", "WhisperAttention", "FlatAttention"),
    *("FairseqAttention", "SlidingAttention", "KeywordAttention", "ManyOutputs"),
)
D, B = "dense_attention", "online_attention"

FAULTY = [
    Variant(V, "scale-missing", "q = q * self.scale", "q = q"),
    Variant(V, "scale-wrong-dim", "self.head_dim**-0.5", "dim**-0.5"),
    Variant(V, "softmax-axis", "softmax(dim=-1)", "softmax(dim=-2)"),
    Variant(V, "heads-joined", "x.transpose(1, 2).reshape(B, N, C)", "x.reshape(B, N, C)"),
    Variant(V, "dropout-in-eval", "attn = self.attn_drop(attn)", "attn = F.dropout(attn, 0.1)"),
    Variant(V, "output-missing", "self.proj_drop(self.proj(x))", "self.proj_drop(x)"),
    Variant(
        M,
        "cache-differs",
        "self.freqs_cis[start_pos : start_pos + seqlen]",
        "self.freqs_cis[:seqlen]",
    ),
    Variant(M, "rotary-one-sided", "apply_rotary_emb(xk, freqs_cis)", "xk"),
    Variant(
        M,
        "gqa-head-order",
        "keys = repeat_kv(xk, self.n_heads // self.n_kv_heads)",
        "keys = xk.repeat(1, 1, self.n_heads // self.n_kv_heads, 1)",
    ),
    Variant(M, "future-leak", "diagonal=1", "diagonal=2"),
    Variant(
        M,
        "own-key-hidden",
        "diagonal=1)",
        "diagonal=0).masked_fill(torch.eye(seqlen).bool() & (torch.arange(seqlen) == 0), 0.0)",
    ),
    Variant(
        M,
        "rotary-values",
        "        past = 0\n",
        "        past = 0\n        xv = apply_rotary_emb(xv, freqs_cis)\n",
    ),
    Variant(W, "scale-twice", "** -0.25", "** -0.5"),
    Variant(W, "mask-zeroed", "qk = qk + mask", "qk = qk.masked_fill(mask < 0, 0.0)"),
    Variant(W, "mask-ignored", "qk = qk + mask", "qk = qk + 0 * mask.clamp(min=-1)"),
    Variant(
        W,
        "weights-sum",
        "w = F.softmax(qk, dim=-1).to(q.dtype)\n",
        "w = F.softmax(qk, dim=-1).to(q.dtype)\n"
        "        return (w @ v).permute(0, 2, 1, 3).flatten(start_dim=2), 0.9 * w\n",
    ),
    Variant(
        W,
        "heads-joined",
        "permute(0, 2, 1, 3).flatten(start_dim=2)",
        "reshape(q.shape[0], q.shape[2], -1)",
    ),
    Variant(
        W,
        "heads-split",
        "v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)",
        "v = v.view(v.shape[0], self.n_head, v.shape[1], -1)",
    ),
    Variant(
        O,
        "scale-twice",
        "torch.bmm(query_states, key_states.transpose(1, 2))",
        "torch.bmm(query_states, key_states.transpose(1, 2)) * self.scaling",
    ),
    Variant(
        O,
        "heads-split",
        "return tensor.transpose(1, 2).contiguous()",
        "return tensor.reshape(bsz, self.num_heads, -1, self.head_dim)",
    ),
    Variant(
        O,
        "mask-rows",
        "tgt_len, src_len) + attention_mask\n",
        "tgt_len, src_len) + attention_mask[:1]\n",
    ),
    Variant(
        O,
        "batch-mixing",
        "        attn_output = self.out_proj(attn_output)\n",
        "        attn_output = self.out_proj(attn_output - 0.1 * attn_output.mean(0))\n",
    ),
    Variant(
        O,
        "softmax-missing",
        "nn.functional.softmax(attn_weights, dim=-1)",
        "torch.exp(attn_weights)",
    ),
    Variant(S, "cache-differs", "torch.arange(T)[:, None] + past", "torch.arange(T)[:, None]"),
    Variant(
        S,
        "cache-differs",
        'incremental_state["prev_value"] = v',
        'incremental_state["prev_value"] = v.roll(1, 2)',
    ),
    Variant(
        S,
        "cache-output-length",
        "return self.out_proj((probs @ v).transpose(1, 2).reshape(B, T, M))",
        "out = self.out_proj((probs @ v).transpose(1, 2).reshape(B, T, M))\n"
        "        return out if incremental_state is None else out[:, -1:]",
    ),
    Variant(
        L, "window-off-by-one", "distance < self.sliding_window", "distance <= self.sliding_window"
    ),
    Variant(L, "window-ignored", " & (distance < self.sliding_window)", ""),
    Variant(L, "cache-differs", "keep = self.sliding_window - 1", "keep = self.sliding_window - 2"),
    Variant(
        L,
        "rotary-not-relative",
        "cos, sin = angles.cos().to(x), angles.sin().to(x)",
        "cos, sin = angles.cos().to(x), angles.roll(1, -1).sin().to(x)",
    ),
    Variant(L, "cache-grows", "k=k[:, :, -keep:], v=v[:, :, -keep:]", "k=k, v=v"),
    Variant(
        K,
        "padding-on-queries",
        "key_padding_mask[:, None, None, :]",
        "key_padding_mask[:, None, :, None]",
    ),
    Variant(
        K,
        "mask-polarity",
        "key_padding_mask[:, None, None, :], -1e30",
        "~key_padding_mask[:, None, None, :], -1e30",
    ),
    Variant(K, "scale-inverted", "* d**-0.5", "* d**0.5"),
    Variant(N, "future-leak", "triu(1)", "triu(2)"),
    Variant(
        N,
        "weights-uniform",
        "p = scores.softmax(-1)",
        "p = (~future).to(x) / (~future).to(x).sum(-1, keepdim=True) + 0 * scores.clamp(-1, 1)",
    ),
    Variant(
        D,
        "mask-polarity",
        "torch.where(mask, logits, torch.finfo(logits.dtype).min)",
        "torch.where(mask, torch.finfo(logits.dtype).min, logits)",
    ),
    Variant(D, "bias-sign", "logits = logits + bias", "logits = logits - bias"),
    Variant(D, "softmax-overflow", "    logits = logits - logits.amax(-1, keepdim=True)\n", ""),
    Variant(
        B, "softmax-not-rescaled", "acc = acc * alpha[..., None] + p @ vj", "acc = acc + p @ vj"
    ),
    Variant(B, "keys-ignored", "range(0, S, block)", "range(0, S - S % block or S, block)"),
    Variant(B, "scale-wrong", "/ math.sqrt(d)", "/ math.sqrt(d // 2)"),
]

CORRECT = [
    *(Variant(style, None) for style in GIVEN),
    Variant(
        V,
        None,
        "q = q * self.scale\n        attn = q @ k.transpose(-2, -1)",
        "attn = (q @ k.transpose(-2, -1)) / self.head_dim**0.5",
    ),
    Variant(V, None, "qkv.unbind(0)", "qkv[0], qkv[1], qkv[2]"),
    Variant(M, None, 'float("-inf")', "-1e30"),
    Variant(
        M,
        None,
        "keys = repeat_kv(xk, self.n_heads // self.n_kv_heads)",
        "keys = xk.repeat_interleave(self.n_heads // self.n_kv_heads, 2)",
    ),
    Variant(
        W,
        None,
        "w = F.softmax(qk, dim=-1).to(q.dtype)",
        "w = torch.exp(qk - qk.logsumexp(-1, keepdim=True))",
    ),
    Variant(W, None, "return self.out(wv), qk", "return self.out(wv)"),
    Variant(
        O,
        None,
        "nn.functional.softmax(attn_weights, dim=-1)",
        "attn_weights.double().softmax(-1).to(hidden_states)",
    ),
    Variant(
        O,
        None,
        "attn_output.transpose(1, 2).reshape(bsz, tgt_len, self.embed_dim)",
        "torch.cat(attn_output.unbind(1), -1)",
    ),
    Variant(
        S,
        None,
        'scores = scores.masked_fill(cols > rows, float("-inf"))',
        "scores = torch.where(cols <= rows, scores, -1e30)",
    ),
    Variant(
        S,
        None,
        "q @ k.transpose(-2, -1) * self.head_dim**-0.5",
        'torch.einsum("bhid,bhjd->bhij", q, k) / self.head_dim**0.5',
    ),
    Variant(
        L,
        None,
        "k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)",
        "(t[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (k, v))",
    ),
    Variant(L, None, "keep = self.sliding_window - 1", "keep = self.sliding_window"),
    Variant(K, None, "-1e30", 'float("-inf")'),
    Variant(K, None, "* d**-0.5", "/ d**0.5"),
    Variant(N, None, "torch.finfo(scores.dtype).min", 'float("-inf")'),
    Variant(N, None, "p if output_attentions else None", "p"),
    Variant(D, None, "query / math.sqrt(depth), key", "query, key / math.sqrt(depth)"),
    Variant(B, None, "block=16", "block=64"),
]
