"""Who uses the mechanisms that differ from grouped-query attention by steps on heads, by positions
with several axes, or by other distances.
"""

from __future__ import annotations

from regard.nn.variants.usage_row import Usage

_EIGHT = {"groups": 8}
_WINDOW = {"W": "the window: how many of the last keys a token sees, itself included"}

HEAD_USAGE: dict[str, Usage] = {
    "head_gate": Usage(
        "LFM3",
        "as gated, where a gate for each channel costs too many parameters",
        "a checkpoint without the gate is continued",
        _EIGHT,
    ),
    "softplus_gate": Usage(
        "Laguna",
        "to load such a checkpoint, or where a head must be able to grow",
        "a new model: sigmoid gates are bounded and better studied; take head_gate or gated",
        _EIGHT,
    ),
    "biased_gate": Usage(
        "Beam",
        "to load such a checkpoint",
        "a new model: take gated; no published comparison shows a gain of the bias",
        _EIGHT,
        {"b_h": "learned bias of the gates of a head"},
    ),
    "differential_v2": Usage(
        "none that is released; Microsoft trained language models with it",
        "noise in long contexts hurts, and decoding must cost what gqa costs",
        "public checkpoints matter, or twice the matrix of the queries is too much",
        _EIGHT,
        {
            "q1": "queries of the first head of a pair",
            "q2": "queries of the second head of a pair",
            "l": "weight of the second head, for each token",
            "W_l": "learned matrix of that weight",
        },
    ),
    "exclusive": Usage(
        "NeoMME, with learned weights",
        "training from scratch, where heads should add what the token itself does not have",
        "a checkpoint without it is continued, or a method with a longer record is wanted",
        _EIGHT,
        {"u": "the token's own value, scaled to length 1"},
    ),
    "nope": Usage(
        "every fourth layer of SmolLM 3, Command A and Llama 4",
        "as some layers of a model, whose other layers have positions",
        "as the only layers: they learn order from the mask alone, and longer texts break it",
        _EIGHT,
    ),
    "irope": Usage(
        "Command A and Cohere 2 (with a window), SmolLM 3 (without), Llama 4 (with chunks)",
        "contexts become longer than those of training",
        "the context is short, or a checkpoint with rotary positions everywhere is continued",
        _EIGHT,
        {**_WINDOW, "n": "distance of two layers without positions"},
    ),
    "value_residual": Usage(
        "ResFormer; the record runs of modded-nanogpt; with shares by token, RWKV-7",
        "training from scratch: deep layers keep what each token was at the start",
        "layers are to run alone or on other ranks: each needs the values of the first",
        _EIGHT,
        {
            "s": "learned share of a layer's own values",
            "v1": "values of the first layer",
        },
    ),
    "position_temperature": Usage(
        "Ministral 3, Mistral Large 4, Inkling; the global layers of Llama 4 and Beam",
        "contexts far beyond the training length, where the softmax becomes flat",
        "texts stay shorter than the length from which the factor grows: it is then 1",
        _EIGHT,
        {"tau": "factor of a query, which grows with its position"},
    ),
    "mrope": Usage(
        "Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4.5V and others that read images and videos",
        "images and videos stand between text, and one rotation should serve all",
        "there is only text: it is then gqa, with one number more for each token in the cache",
        _EIGHT,
        {
            "R": "rotation to the coordinates of a token",
            "t": "coordinate in time",
            "h": "index of a query head; alone, the coordinate in height",
            "w": "coordinate in width",
        },
    ),
    "rope_2d": Usage(
        "the image encoders of Pixtral, Qwen2-VL and Kimi-VL",
        "an encoder reads images of any size and shape",
        "the tokens are text, which has one order",
        _EIGHT,
        {
            "R": "rotation to the row and column of a patch",
            "h": "index of a query head; alone, the row",
            "w": "the column",
        },
    ),
    "dual_chunk": Usage(
        "Qwen2 and Qwen2.5-1M, beyond their training length",
        "a trained model must read longer texts without training, and near order matters",
        "the model can be trained further, or yarn reaches far enough: it is one call",
        {"groups": 8, "chunk": 8192, "length": 16384},
        {
            "R_d": "rotation by the distance d",
            "d": "distance between query and key",
            "c": "size of a chunk",
            "n": "largest position of a query",
        },
    ),
    "self_extend": Usage(
        "no model is trained with it; it extends Llama 2, Mistral and Phi-2",
        "a trained model must read longer texts without training",
        "speed matters: all keys are rotated again in each step; take yarn",
        {"groups": 8, "group": 8, "window": 1024},
        {
            "R_d": "rotation by the distance d",
            "d": "distance between query and key",
            "W": "the number of nearest keys",
            "n": "the number of positions that become one",
        },
    ),
    "rerope": Usage(
        "no model is trained with it; it extends Llama 2 and Baichuan",
        "the order of far tokens does not matter, and the text is longer than those of training",
        "far order matters: all far keys seem to be at one distance; take dual_chunk",
        {"groups": 8, "window": 1024},
        {
            "R_d": "rotation by the distance d",
            "d": "distance between query and key",
            "W": "the largest distance",
        },
    ),
    "lm_infinite": Usage(
        "no model is trained with it; it runs Llama 2, MPT and GPT-J without end",
        "a trained model must read a stream without end, as with streaming",
        "the answer is further back than the window: those keys are gone",
        {"groups": 8, "sinks": 4, "window": 4096},
        {
            **_WINDOW,
            "R_d": "rotation by the distance d",
            "d": "distance between query and key",
            "s": "number of first tokens that stay",
        },
    ),
    "value_norm": Usage(
        "Gemma 3n and Gemma 4",
        "values grow in training, as queries and keys do without a norm",
        "a checkpoint without these norms is continued",
        _EIGHT,
    ),
    "keys_as_values": Usage(
        "the global layers of the larger Gemma 4 models",
        "parameters are scarce: one matrix less for each layer",
        "the cache is the limit: it is as large as that of gqa",
        _EIGHT,
    ),
    "shared_kv": Usage(
        "DeepSeek-V4, below its compressed and selected keys",
        "the cache decides how many users fit: it is half of that of mqa",
        "a head needs values that differ from its keys, and the cache fits",
        symbols={"R_j": "rotation to the position of the key", "R_i": "rotation to the query"},
    ),
    "clip_qkv": Usage(
        "OLMo, DBRX; MPT",
        "to load such a checkpoint",
        "a new model: a clipped number has no gradient; take qk_norm",
        _EIGHT,
        {"c": "the limit", "clip": "limits each number to -c .. c"},
    ),
    "l2_clip": Usage(
        "Inkling 2",
        "scores must stay bounded, and short vectors should stay short",
        "a new model without reason to differ: qk_norm is better studied",
        _EIGHT,
        {
            "c": "the limit of the length",
            "clip": "limits the length of a vector to c",
            "s_h": "learned factors of a query head, one for each channel",
        },
    ),
    "ngpt": Usage(
        "none that is released; the paper trained models of 0.5B and 1B parameters",
        "the whole model is normalised, as in the paper",
        "the other matrices are not normalised after each step: take qk_norm",
        _EIGHT,
        {
            "s_h": "learned factors of a query head, one for each channel",
            "r_g": "learned factors of a key head",
            "unit": "the vector scaled to length 1",
        },
    ),
}
"""The row of each mechanism, by its name in the catalogue."""
