"""Who uses each mechanism of the catalogue, when to choose it and when not, and the symbols of its
equation.

The table is data for people: `regard describe` prints it. A new mechanism gets a row here; the test
of this file asks for it, and for the meaning of every symbol of every equation.
"""

from __future__ import annotations

import re

from regard.nn.variants.usage_of_heads import HEAD_USAGE
from regard.nn.variants.usage_row import Usage

SYMBOLS: dict[str, str] = {
    "x": "hidden states, one row a token",
    "q": "queries of a head",
    "k": "keys of a head",
    "v": "values of a head",
    "z": "result of a head",
    "out": "result of the layer",
    "i": "position of the query",
    "j": "position of the key",
    "t": "position of the token",
    "h": "index of a query head",
    "g": "index of a key/value head",
    "H": "number of query heads",
    "G": "number of key/value heads",
    "D": "width of a query and key head",
    "W": "a learned matrix",
    "W_q": "learned matrix of the queries",
    "W_k": "learned matrix of the keys",
    "W_v": "learned matrix of the values",
    "W_o": "learned matrix of the output",
    "W_g": "learned matrix of the output gate",
    "b": "a learned bias",
    "b_o": "learned bias of the output",
    "S": "state of a head, a matrix with a row for each channel of a key",
    "n": "sum of the keys in the state, by which the result is divided",
    "s_ij": "score of query i and key j",
    "p_ij": "weight of query i and key j",
    "causal": "0 where j <= i, and minus infinity where j > i",
    "norm": "RMS norm of a head",
    "rotary": "rotary position embedding",
    "phi": "feature map, which makes queries and keys positive",
    "silu": "x sigmoid(x)",
    "elu": "x for x > 0, exp(x) - 1 below",
    "beta": "share of the old value that is replaced, between 0 and 1",
    "I": "the selected keys",
    "K": "keys",
    "V": "values",
    "topk": "number of selected keys or blocks",
    "m": "the second sequence, from which keys and values come",
}
"""The meaning of a symbol in the equations, unless a mechanism gives another one."""

FUNCTIONS = frozenset(
    {
        "softmax",
        "sqrt",
        "exp",
        "ln",
        "max",
        "tanh",
        "sigmoid",
        "softplus",
        "relu",
        "sum",
        "min",
        "mod",
    }
    | {"mean", "abs", "product", "cos"}
    | {"diag", "concat", "dot", "general", "T"}
)
"""Functions and words with a common meaning; T is a transpose."""

_WINDOW = {"W": "the window: how many of the last keys a token sees, itself included"}
_EIGHT = {"groups": 8}
_ENCODER = {
    "e": "score of a decoder step and an encoder step",
    "h": "states of the encoder",
    "s": "state of the decoder",
    "c": "context: the weighted sum of the encoder states",
    "v": "learned vector",
}
_DECAYED = {"g": "logarithm of the decay", "S'": "the state after its decay"}
_SUM_L = {
    "q_i": "query i",
    "k_j": "key j",
    "sum_l": "sum over the tokens after j, up to i",
}
_STRIDE = {"l": "the stride"}

USAGE: dict[str, Usage] = {
    "infini": Usage(
        "none that is released; the paper trained models of 1B and 8B parameters",
        "a stream without end must be read with memory of a fixed size",
        "exact recall of single tokens matters, or a window with global layers is enough",
        symbols={
            "sigma": "feature map elu + 1",
            "M": "memory of the earlier segments, a matrix for each head",
            "n": "sum of the keys in the memory",
            "g": "learned gate between memory and segment, one for each head",
        },
    ),
    "infini_delta": Usage(
        "none that is released; the paper trained models of 1B and 8B parameters",
        "as infini, where the same keys come again with other values",
        "as infini; a segment also costs one more read of the memory",
        symbols={
            "sigma": "feature map elu + 1",
            "M": "the memory, a matrix for each head",
            "n": "sum of the keys",
        },
    ),
    "streaming": Usage(
        "no model is trained with it; it runs Llama 2, MPT, Falcon and others without end",
        "a trained model must read a stream without end, and only the recent tokens matter",
        "the answer is further back than the recent tokens: those keys are gone",
        symbols={
            "R": "rotation to a position; alone, the number of recent tokens",
            "d": "position of a key inside the cache",
            "p": "position of the query",
            "s": "number of first tokens that stay",
            "sinks": "the first tokens, which stay in the cache",
        },
    ),
    "cross_attention": Usage(
        "the decoders of T5, BART, Marian and Whisper; image models that read a text",
        "one sequence is read while another one is written, and the first one is complete",
        "a decoder alone is enough: it reads prompt and answer as one sequence",
    ),
    "bahdanau": Usage(
        "RNNsearch, the first neural translation with attention",
        "a recurrent decoder reads a recurrent encoder of another width",
        "a transformer is possible: its dot products are faster, and as good with a scale",
        symbols={
            **_ENCODER,
            "W": "learned matrix of the decoder state",
            "U": "learned matrix of the encoder states",
            "a": "weights over the encoder steps",
        },
    ),
    "luong": Usage(
        "the recurrent translation models of 2015 to 2017",
        "a recurrent decoder reads an encoder of the same width, with one product a step",
        "a transformer is possible",
        symbols={**_ENCODER, "W": "learned matrix of the general and the concat score"},
    ),
    "linear_attention": Usage(
        "research models",
        "to learn how a state of fixed size replaces the cache",
        "quality matters: without a decay or the delta rule the state fills up",
    ),
    "retention": Usage(
        "RetNet; the lightning attention of MiniMax-01 has a fixed decay for each head too",
        "a state of fixed size, with a training as simple as that of attention",
        "tokens must be forgotten by their content: take gated_linear or gated_delta_net",
        symbols={"gamma": "decay of a head, fixed", "norm": "group norm of a head"},
    ),
    "gated_linear": Usage(
        "research models of up to 7B parameters",
        "the state must decide by content how fast each channel forgets",
        "exact recall matters: take gated_delta_net, with some layers of full attention",
        symbols={
            "norm": "layer norm of a head",
            "a": "decay of each channel",
            "W_1": "first matrix of the decay",
            "W_2": "second matrix of the decay",
            "b_g": "learned bias of the output gate",
        },
    ),
    "delta_net": Usage(
        "research models",
        "the same key gets new values: the delta rule replaces the old one",
        "long texts in which old content must fade: take gated_delta_net",
    ),
    "gated_delta_net": Usage(
        "Qwen3-Next and Qwen3.5, in three of four layers",
        "long contexts with a cache of fixed size, beside some layers of full attention",
        "as the only mechanism, where exact recall matters",
        symbols={
            "g": "logarithm of the decay",
            "A": "learned rate of the decay, one for each head",
            "S'": "the state after its decay",
        },
    ),
    "kimi_delta": Usage(
        "Kimi Linear, in three of four layers; GLM-5 Next, with a lower bound of the decay",
        "long contexts with a state of fixed size, where each channel must forget at its own speed",
        "as the only mechanism, where exact recall matters; or one decay per head is enough",
        symbols=_DECAYED
        | {
            "A": "learned rate of the decay, one for each head",
            "W_1": "first matrix of the decay",
            "W_2": "second matrix of the decay",
        },
    ),
    "gated_delta_2": Usage(
        "none that is released",
        "to study whether erasing and writing need gates of their own",
        "a released model with a known quality is wanted: take kimi_delta",
        symbols=_DECAYED
        | {
            "e": "gate of each key channel that is erased",
            "w": "gate of each value channel that is written",
            "W_e": "learned matrix of the erase gate",
            "W_w": "learned matrix of the write gate",
        },
    ),
    "comba": Usage(
        "none that is released",
        "to study a delta rule with feedback to its queries, at the cost of gated_delta_net",
        "a released model with a known quality is wanted: take gated_delta_net",
        symbols=_DECAYED
        | {
            "p": "key that is erased",
            "c": "learned share of p in the queries, one for each head",
            "d": "learned share of the key that is erased, one for each head",
        },
    ),
    "delta_product": Usage(
        "none that is released",
        "states must be tracked, as in permutations, which one correction cannot follow",
        "speed matters: two corrections cost nearly twice as much as gated_delta_net",
        symbols={
            "g": "logarithm of the decay",
            "S'": "the state after its decay and some corrections",
            "n": "number of corrections per token",
            "i": "index of a correction",
        },
    ),
    "preconditioned_delta": Usage(
        "none that is released",
        "keys are badly scaled, so that some channels learn faster than others",
        "a released model with a known quality is wanted: take kimi_delta",
        symbols=_DECAYED
        | {
            "A": "decayed sum of the squares of the keys",
            "h": "logarithm of the decay of A",
            "a": "share of a key in A",
            "mu": "factor of each written key channel",
            "r": "logarithm of A, less its centre",
            "c": "learned centre, one for each head",
        },
    ),
    "mesa": Usage(
        "none that is released; the paper trained models of 1B parameters",
        "the best linear map from past keys to values is wanted at every token",
        "speed matters: every token solves a system of D equations in every head",
        symbols={
            "A": "decayed sum of the products of keys",
            "C": "decayed sum of the products of keys and values",
            "r": "learned regularisation of each key channel",
            "y": "solution of the system",
            "g": "logarithm of the decay",
            "beta": "weight of a token in the regression",
        },
    ),
    "titans_linear": Usage(
        "none that is released",
        "to study momentum and forgetting in a memory that learns while it reads",
        "momentum is not needed: gated_delta_net has half its state",
        symbols={
            "N": "momentum of the memory",
            "e": "logarithm of what remains of the momentum",
            "g": "logarithm of the decay",
            "beta": "step size of a token",
        },
    ),
    "short_convolution": Usage(
        "LFM2 and LFM3, in most layers",
        "small models on small devices, beside layers of attention that look further back",
        "as the only mechanism: nothing beyond the last few tokens reaches the result",
        symbols={
            "c": "gate of the result",
            "e": "gate of the input",
            "u": "input of the convolution",
            "y": "result of the convolution",
            "f": "learned filters, one for each channel",
            "l": "distance to an earlier token",
        },
    ),
    "lightning": Usage(
        "MiniMax-Text-01 and MiniMax-M1, in seven of eight layers",
        "very long contexts with fixed decays, beside some layers of full attention",
        "tokens must be forgotten by their content: take gated_linear or gated_delta_net",
        symbols={
            "norm": "RMS norm of all heads together",
            "r_h": "rate at which the state of head h decays",
            "l": "index of the layer",
            "L": "number of layers",
        },
    ),
    "hgrn2": Usage(
        "research models of up to 3B parameters",
        "forget gates and keys should share their parameters",
        "exact recall matters: take gated_delta_net, with some layers of full attention",
        symbols={
            "norm": "RMS norm of all heads together",
            "f": "forget gate of each channel",
            "W_f": "learned matrix of the forget gates",
            "b": "lower bound of the forget gates",
        },
    ),
    "lightnet": Usage(
        "research models of up to 1B parameters",
        "the weights of the past should be a softmax in each key channel, with a fixed state",
        "recent tokens matter more than old ones: only larger keys make the state forget",
        symbols={"L": "running log-sum-exp of the keys", "L'": "its value before the token"},
    ),
    "mamba2": Usage(
        "Mamba-2, Codestral Mamba, Bamba, Granite 4, Nemotron-H, Zamba2, Falcon-H1",
        "long contexts at the speed of a state of fixed size, beside some layers of attention",
        "as the only mechanism, where exact recall matters",
        symbols={
            "norm": "RMS norm of all heads together",
            "s": "step size of a head and token",
            "A": "learned rate of the decay, one for each head",
            "d": "learned weight of the skip, one for each head",
            "conv": "short causal convolution",
        },
    ),
    "mamba": Usage(
        "Mamba of up to 2.8B parameters, Falcon Mamba 7B, Jamba, Zamba",
        "to load or study Mamba-1, or Jamba's layers: a small state for every channel",
        "a new model: mamba2 has one decay for a head, and larger states for the same work",
        symbols={
            "n": "index of a channel",
            "s": "step size of a channel and token",
            "A": "learned rate of the decay, one for each value of the state of a channel",
            "S": "state of a channel, a vector",
            "d": "learned weight of the skip, one for each channel",
            "k": "keys, shared by all channels",
            "q": "queries, shared by all channels",
            "v": "value of a channel",
            "W_1": "first matrix of the step sizes",
            "W_2": "second matrix of the step sizes",
        },
    ),
    "rwkv4": Usage(
        "RWKV-4 Pile and Raven, of up to 14B parameters",
        "to load or study RWKV-4: its state is the smallest of all",
        "a new model: a state with a matrix for each head, as in rwkv6, recalls far more",
        symbols={
            "a": "decayed sum of the values of a channel",
            "b": "decayed sum of the weights of a channel",
            "u": "learned bonus of the present token",
            "r": "learned rate of the decay of a channel",
            "c": "learned share of the present token",
            "x'": "hidden states of the token before",
        },
    ),
    "rwkv6": Usage(
        "RWKV-6 Finch, of up to 14B parameters",
        "the state must decide by content how fast each channel forgets",
        "exact recall matters: take gated_delta_net, with some layers of full attention",
        symbols={
            "norm": "group norm of a head",
            "u": "learned weight of the present token, one for each key channel",
            "r": "logarithm of the rate of the decay",
            "c": "learned share of the present token",
            "x'": "hidden states of the token before",
            "W_1": "first matrix of the decay",
            "W_2": "second matrix of the decay",
        },
    ),
    "rwkv7": Usage(
        "RWKV-7 Goose and G1, of up to 13.3B parameters",
        "a state of fixed size must also forget single keys, and tokens say how fast",
        "exact recall over long texts matters: take some layers of full attention beside it",
        symbols={
            "w": "decay of each key channel",
            "a": "rate, between 0 and 1, at which each key channel is removed",
            "r": "removal key, of length 1",
            "k": "written key: the projected key, made smaller where a is small",
            "k'": "projected key with a learned factor for each channel",
            "u": "learned weight of the token itself, one for each key channel",
            "g": "output gate",
            "b": "learned bias of the decays",
            "c": "learned bias of the rates",
            "y": "mix of the token and the one before, another one for each vector",
            "v1": "values of the first layer",
            "norm": "group norm of a head",
            "W_1": "first matrix of a vector that needs two",
            "W_2": "second matrix of a vector that needs two",
        },
    ),
    "mlstm": Usage(
        "xLSTM 7B",
        "single tokens must be able to overwrite the memory by a large input gate",
        "existing kernels must serve the model: the running maximum of its gates needs its own",
        symbols={
            "norm": "group norm of a head",
            "C": "memory of a head, a matrix with a row for each channel of a key",
            "n": "sum of the keys in the memory",
            "f": "forget gate",
            "i": "input gate",
            "W_i": "learned matrix of the input gate",
            "W_f": "learned matrix of the forget gate",
        },
    ),
    "gsa": Usage(
        "research models of up to 7B parameters, some converted from Mistral 7B",
        "a trained softmax model is converted to a state of fixed size",
        "many different tokens must be recalled: there are only as many slots",
        symbols={
            "K": "keys of the slots, one for each column",
            "V": "values of the slots, one for each row",
            "a": "decay of each slot",
        },
    ),
    "abc": Usage(
        "none that is released; translation and language models of the paper",
        "to see softmax attention over a memory of fixed size",
        "a new model: take gsa, whose slots forget",
        symbols={
            "K": "keys of the slots, one for each column",
            "V": "values of the slots, one for each row",
            "a": "decay of each slot",
        },
    ),
    "based": Usage(
        "Based, research models of up to 1.3B parameters",
        "recall must be traded against the size of the state, beside sliding windows",
        "heads are wide: the state grows with the square of the head dim",
    ),
    "rebased": Usage(
        "research models of up to 0.4B parameters",
        "weights must be able to reach 0, which the Taylor series of Based cannot",
        "heads are wide: the state grows with the square of the head dim",
        symbols={"norm": "group norm of a head"},
    ),
    "power_attention": Usage(
        "research models, and PowerCoder 3B",
        "the size of the state should be chosen apart from the number of parameters",
        "memory of the state is the limit: a wide head with power 4 has millions of values",
        symbols={"m": "the power, an even number"},
    ),
    "performer": Usage(
        "research models of 2020 to 2022, for proteins, images and speech",
        "a softmax model is approximated without training it again, and its scores are small",
        "scores are large, as in most language models: the variance grows exponentially with them",
        symbols={"phi": "random features of a query or key", "w": "random directions"},
    ),
    "cosformer": Usage(
        "research models of 2022",
        "near tokens should weigh more without a decay to learn, in texts of a known length",
        "texts may be longer than the period: weights become negative there",
        symbols={"pi": "3.14159", "m": "the period"},
    ),
    "sliding_window": Usage(
        "Mistral 7B v0.1",
        "the context is long, memory is short, and near tokens decide",
        "single facts from far back are asked for: take local_global",
        {"groups": 8, "window": 4096},
        _WINDOW,
    ),
    "local_global": Usage(
        "Gemma 2, Gemma 3, gpt-oss, Cohere Command A, OLMo 3; ModernBERT without a causal mask",
        "long contexts: nearly the cache of a window, nearly the quality of full attention",
        "the context is short, so that the window never ends",
        {"groups": 8, "window": 1024},
        {**_WINDOW, "n": "distance of two global layers"},
    ),
    "chunked": Usage(
        "Llama 4, in three of four layers",
        "long contexts, with masks that never cross the border of a chunk",
        "the first tokens of a chunk need those before it, and no layer is global",
        {"groups": 8, "chunk": 8192},
        {"C": "size of a chunk"},
    ),
    "prefix_lm": Usage(
        "PaliGemma, UL2",
        "a prompt is read at once, and its tokens profit from later ones",
        "prompts grow turn by turn: every new turn changes the cache of the prefix",
        {"groups": 8, "prefix": 256},
        {"n": "length of the prefix"},
    ),
    "packed": Usage(
        "the training of most language models",
        "short documents fill a row of training without padding",
        "at inference, where each sequence has its own row",
        {"groups": 8, "bounds": (0, 1024, 3072, 4096)},
        {"document": "number of the document of a token"},
    ),
    "longformer": Usage(
        "Longformer and LED",
        "an encoder reads long documents, and a few tokens collect their meaning",
        "text is generated: windows with global layers have faster kernels",
        {"window": 512},
        {"q'": "queries, keys and values (q', k', v') of the global tokens' own projections"},
    ),
    "dilated": Usage(
        "the character models of Longformer, in their upper layers",
        "the window must reach further at the same cost",
        "any neighbouring token may matter: a dilated window jumps over most of them",
        {"window": 512, "step": 2},
        {**_WINDOW, "s": "step between two keys"},
    ),
    "bigbird": Usage(
        "BigBird and BigBird-Pegasus",
        "an encoder reads long documents with a proof that every pair is connected",
        "speed on a CPU or GPU matters: random blocks are read in no order",
    ),
    "sparse_strided": Usage(
        "the Sparse Transformer, for images and music",
        "data has rows of equal length, such as images",
        "data is text: take a window",
        {"stride": 128},
        _STRIDE,
    ),
    "sparse_fixed": Usage(
        "the Sparse Transformer, for text; GPT-3 in every second layer, with another pattern",
        "every block can be summarised in its last tokens",
        "the choice is open: windows with global layers are simpler, and measured better",
        {"stride": 128},
        {**_STRIDE, "c": "number of summary tokens of a block"},
    ),
    "nsa": Usage(
        "no released model; the paper trained one of 27B parameters",
        "a model is trained from scratch for very long contexts on GPUs",
        "a trained model is at hand: take dsa; or there is only a CPU",
        {"groups": 4},
        {"g_b": "learned gate of a branch", "b": "one of the three branches"},
    ),
    "moba": Usage(
        "the long-context service of Kimi",
        "a trained model must read longer contexts, with full attention as the way back",
        "the answer is spread over many blocks",
        _EIGHT,
    ),
    "quest": Usage(
        "none is trained with it; a way to serve models that were trained without it",
        "a trained model decodes over a long context, and reading all keys is the limit",
        "the cache is the limit: it keeps all keys, and bounds too",
        _EIGHT,
        {
            "low_d": "smallest number of channel d in the keys of a page",
            "high_d": "largest number of channel d in the keys of a page",
            "q_d": "number of channel d of the query",
            "sum_d": "sum over the channels",
        },
    ),
    "msa": Usage(
        "MiniMax-M3, in most layers",
        "a model is trained for a long context, and single keys decide which blocks matter",
        "a model was trained without it: its index heads must be trained first",
        _EIGHT,
        {
            "q'": "query of the index head of a key/value head",
            "k'": "index key of a token in the block",
        },
    ),
    "dsa": Usage(
        "DeepSeek-V3.2",
        "a trained model with a long context must compute less for each token",
        "the cache is the limit: it keeps all keys, and those of the indexer too",
        _EIGHT,
        {
            "w": "learned weight of an indexer head",
            "q'": "queries of the indexer",
            "k'": "key of the indexer",
        },
    ),
    "weightless": Usage(
        "none; it is the first step of many lessons",
        "to see what attention does before anything is learned",
        "for anything else",
    ),
    "single_head": Usage(
        "none; it is the second step of many lessons",
        "to see queries, keys and values",
        "for a real model: take several heads",
    ),
    "causal": Usage(
        "none; it is the third step of many lessons",
        "to see the causal mask",
        "for a real model: take several heads",
    ),
    "mha": Usage(
        "BERT, Llama 2 7B and 13B, OPT, Pythia",
        "the model is small, or an encoder, which has no cache",
        "a decoder with long contexts: its cache is H/G times that of gqa",
    ),
    "mha_per_head": Usage(
        "none; it computes what mha computes",
        "to read the equation head by head",
        "speed matters: stacked matrices are one product",
        symbols={
            "W_h^Q": "learned matrix of the queries of head h",
            "W_h^K": "learned matrix of the keys of head h",
            "W_h^V": "learned matrix of the values of head h",
        },
    ),
    "gpt": Usage(
        "GPT-2 and GPT-3",
        "to load or study GPT-2",
        "a new model: take gqa with rotary positions",
    ),
    "gqa": Usage(
        "Llama 3, Mistral, Qwen2.5, and most open models since 2023",
        "the default of a new decoder: nearly the quality of mha, a cache of G/H of its size",
        "the cache still decides how many users fit: take mla or local_global",
        _EIGHT,
    ),
    "mqa": Usage(
        "PaLM, StarCoder, Falcon 7B, Gemma 2B",
        "the model is small, and decoding speed is everything",
        "quality matters at some billion parameters: take gqa, which costs little more",
    ),
    "qk_norm": Usage(
        "Qwen3, Gemma 3",
        "training diverges because scores grow",
        "a checkpoint without these norms is continued",
        _EIGHT,
    ),
    "qk_norm_after_rotary": Usage(
        "Hunyuan; Llama 4 without learned weights",
        "to load such a checkpoint",
        "a new model: the norm before the rotation is usual",
        _EIGHT,
    ),
    "qk_norm_flat": Usage(
        "OLMo 2, OLMoE",
        "to load such a checkpoint",
        "heads are split over devices: the norm needs all of them",
        _EIGHT,
        symbols={"norm": "RMS norm of all heads together"},
    ),
    "softcap": Usage(
        "Gemma 2, Grok-1",
        "scores must stay bounded without norms",
        "fused kernels matter: many have no tanh in the scores; take qk_norm",
        _EIGHT,
        {"c": "the cap"},
    ),
    "learned_sink": Usage(
        "gpt-oss",
        "heads need a way to attend to nothing, mostly with windows",
        "a kernel without the logit is used: the first tokens become the sink by themselves",
        _EIGHT,
        {"sink": "learned logit of a head"},
    ),
    "alibi": Usage(
        "BLOOM, MPT",
        "texts longer than those of training, without any change",
        "far tokens matter: the penalty hides them; take rotary positions and yarn",
        symbols={"m": "slope of a head"},
    ),
    "t5": Usage(
        "T5, mT5, Flan-T5",
        "encoders and encoder-decoders of moderate length",
        "fused kernels matter: a learned bias for each pair is read for each score",
        symbols={"table": "learned bias of a bucket and a head", "bucket": "bucket of a distance"},
    ),
    "gated": Usage(
        "Qwen3-Next and Qwen3.5, in their layers of full attention",
        "a new model: it removes sinks and large activations at little cost",
        "a checkpoint without the gate is continued",
        _EIGHT,
    ),
    "differential": Usage(
        "research models of up to 13B parameters",
        "noise in long contexts hurts, and two patterns for each head can be paid for",
        "fused kernels and public checkpoints matter",
        symbols={
            "l": "learned weight of the second pattern",
            "l0": "first value of that weight, by the depth of the layer",
            "q1": "queries of the first pattern",
            "q2": "queries of the second pattern",
            "k1": "keys of the first pattern",
            "k2": "keys of the second pattern",
        },
    ),
    "sigmoid_attention": Usage(
        "none that is released; the paper trained models of 1B and 7B parameters",
        "rows should not compete for weight, and results should not depend on how keys are split",
        "a public kernel or checkpoint is needed",
        _EIGHT,
        {"n": "number of keys that the query sees"},
    ),
    "relu_attention": Usage(
        "none that is released; studied in vision transformers",
        "hardware without a fast exponential function, or weights that are exactly 0",
        "language models are trained from scratch: there it is less studied than softmax",
        _EIGHT,
        {"n": "number of keys that the query sees"},
    ),
    "softpick": Usage(
        "none that is released; the paper trained models of 340M and 1.8B parameters",
        "activations must have no outliers, and heads should rest without a sink",
        "contexts are long: the paper reports weights that become small there",
        _EIGHT,
        {"s_il": "score of query i and key l"},
    ),
    "entmax": Usage(
        "none that is released; translation models of 2019",
        "weights must be exactly 0 for most keys, to be read by people",
        "speed matters: the threshold needs a sort of each row, and no fused kernel has it",
        _EIGHT,
        {
            "p": "weights of a row that sum to 1",
            "p_i": "weights of query i",
            "s_i": "scores of query i",
            "H_a": "Tsallis entropy of order alpha",
        },
    ),
    "stick_breaking": Usage(
        "none that is released; the paper trained models of 1B and 3B parameters",
        "the nearest matching key should win, and texts grow longer than those of training",
        "rows need a sum of 1, or a fused kernel other than the authors' own",
        _EIGHT,
        {
            "l": "position of a key between j and i",
            "s_il": "score of query i and key l",
            "product_l": "product over these keys",
        },
    ),
    "scalable_softmax": Usage(
        "none that is released with learned factors; Llama 4 scales queries by their position",
        "contexts become much longer than those of training",
        "a checkpoint trained without it is used as it is",
        _EIGHT,
        {"n": "number of keys that the query sees", "a_h": "learned factor of a head"},
    ),
    "talking_heads": Usage(
        "CaiT; translation and language models of the paper",
        "quality at a fixed number of heads matters more than speed",
        "fused kernels matter: all heads of a pair are needed at once",
        _EIGHT,
        {
            "A_hg": "learned mixture of weights",
            "B_gm": "learned mixture of scores",
            "s_m": "scores of head m",
            "p_h": "weights of head h",
        },
    ),
    "top_k": Usage(
        "none that is released for language; the rule is common in inference with a trained model",
        "most of a row's weight is noise, and weights must be concentrated",
        "speed is the aim: all scores are computed first; take dsa or nsa",
        _EIGHT,
    ),
    "cope": Usage(
        "none that is released; the paper trained small language models",
        "positions should count words, sentences or chosen tokens instead of all tokens",
        "speed matters: each row needs all its scores before the positions are known",
        _EIGHT,
        {
            "p_ij": "number of keys from j to i that the gates of query i choose",
            "sum_l": "sum over the keys from j to i",
            "s_il": "score of query i and key l",
            "q_i": "query i",
            "e": "learned embeddings, one for each number",
            "l": "position of a key from j to i",
        },
    ),
    **HEAD_USAGE,
    "forgetting": Usage(
        "none that is released as an assistant; the paper trained models up to 760M parameters",
        "recent text should count more, by gates that the tokens compute, and without positions",
        "old tokens must be found exactly wherever they are, or positions are needed",
        _EIGHT,
        {"f_l": "forget gate of token l", "l": "position of a token after j, up to i", **_SUM_L},
    ),
    "cable": Usage(
        "none that is released; the paper trained small language models",
        "as forgetting: ALiBi is wanted, with slopes that depend on the text",
        "as forgetting, which is the same mechanism with another sign of the gate",
        _EIGHT,
        {"f_l": "slope of token l", "l": "position of a token after j, up to i", **_SUM_L},
    ),
    "kerple": Usage(
        "none that is released; the paper trained GPT models of 162M parameters",
        "a model must run beyond its training length, and far keys must not vanish as with ALiBi",
        "the order of far tokens matters exactly: the penalty hardly changes there",
        _EIGHT,
        {
            "r1_h": "learned size of the penalty of head h",
            "r2_h": "learned growth of the penalty near the query",
        },
    ),
    "fire": Usage(
        "none that is released; the paper trained models up to 350M parameters",
        "a model must run beyond its training length with a learned function of the distance",
        "speed matters: every pair runs a small network",
        _EIGHT,
        {
            "mlp": "learned network with one hidden layer and one result per head",
            "c": "learned growth of small distances",
            "L": "learned position up to which the divisor is constant",
        },
    ),
    "shaw": Usage(
        "Music Transformer; Wav2Vec2-BERT; translation models of the paper",
        "short distances matter each for itself, and far ones only as far",
        "a text is long: all tokens beyond the table look equally far",
        _EIGHT,
        {
            "q_i": "query i",
            "k_j": "key j",
            "a": "learned vectors, one for each distance",
            "clip": "the nearest distance that has a vector",
        },
    ),
    "transformer_xl": Usage(
        "Transformer-XL, XLNet",
        "an old checkpoint needs it, or distances need no largest value",
        "speed matters: rotary positions cost nothing per pair, and this one doubles heads or more",
        _EIGHT,
        {
            "q_i": "query i",
            "k_j": "key j",
            "u": "learned vector, added to the query for content",
            "w": "learned vector, added to the query for positions",
            "W_r": "learned map of sinusoids to keys of distances",
            "r": "sinusoids of a distance",
        },
    ),
    "deberta": Usage(
        "DeBERTa, DeBERTa-v2 and v3, mDeBERTa",
        "an encoder must understand word order well, as in question answering and tagging",
        "text is generated, or fused kernels matter: each pair needs two products more",
        symbols={
            "q_i": "query i",
            "k_j": "key j",
            "K_r": "keys of the buckets of distances",
            "Q_r": "queries of the buckets of distances",
            "d": "bucket of a distance",
        },
    ),
    "relative_logits": Usage(
        "Inkling",
        "every token should choose which distances it looks at",
        "distances beyond the extent must have different biases",
        _EIGHT,
        {
            "q_i": "query i",
            "k_j": "key j",
            "r_i": "mixture of profiles that token i computes",
            "P": "learned profiles of biases by distance",
        },
    ),
    "dynamic_mask": Usage(
        "Doge",
        "tokens should say themselves how important they are for all later ones",
        "a key may become important only for some queries: its bias is the same for all",
        _EIGHT,
        {
            "e_j": "bias of key j",
            "e": "biases of the keys up to the query",
            "a_g": "learned factor of key/value head g",
            "v_j": "values of token j, of all heads",
        },
    ),
    "signed_softmax": Usage(
        "none that is released; the paper trained small language models",
        "a head should be able to subtract values as well as to add them",
        "weights must be a mean of values, or fused kernels matter",
        _EIGHT,
        {
            "sign": "1 for a positive score, -1 for a negative one",
            "sum_l": "sum over the visible keys",
            "sum_j": "sum over the visible keys",
            "s_il": "score of query i and key l",
            "v_j": "values of key j",
        },
    ),
    "path": Usage(
        "none that is released; the paper trained models of 760M parameters",
        "states must be tracked over a text, which rotary positions cannot do",
        "long texts are decoded: each token solves a system over all keys",
        _EIGHT,
        {
            "q_i": "query i",
            "k_j": "key j",
            "H_l": "reflection of token l, after j and up to i",
            "product_l": "product over the tokens after j, up to i, the last one first",
            "E": "the identity matrix",
            "b_l": "strength of the reflection, between 0 and 2",
            "w_l": "unit vector that token l computes",
        },
    ),
    "selective": Usage(
        "none that is released; the paper trained small language models",
        "tokens become useless once others have replaced them, and no parameters may be added",
        "long texts are decoded: the sums of all earlier tokens are computed again in each step",
        _EIGHT,
        {
            "sum_l": "sum over the tokens after j and before i",
            "s0_lj": "score of query l and key j in the first head",
            "l": "position of a token after j and before i",
        },
    ),
    "mla": Usage(
        "DeepSeek-V2, V3 and R1, Kimi K2, MiniCPM3",
        "the cache decides how many users fit, and the quality of mha is wanted",
        "compute is the limit, as on CPUs; or the runtime has no kernel for it",
        {"q_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128},
        {
            "c": "latent of a token",
            "norm": "RMS norm of a latent",
            "k_r": "rotary key of a token, shared by all heads",
            "q_r": "rotary part of a query",
            "W_dkv": "learned matrix from hidden states to latents",
            "W_kr": "learned matrix of the rotary key",
            "W_uk": "learned matrix from latents to keys, one for each head",
            "W_uv": "learned matrix from latents to values, one for each head",
            "R_s": "rotation to position s",
            "scale": "1 / sqrt(width of a whole query)",
        },
    ),
    "tpa": Usage(
        "T6; none that is widely used",
        "the cache must be small at many heads, and keys may be computed again at every step",
        "decoding is limited by compute, as on CPUs: every cached key is multiplied out again",
        {},
        {
            "a_rh": "first factor: the share of product r in head h",
            "b_r": "second factor of product r, a vector of the head's width",
            "sum_r": "sum over the products",
            "a": "first factors",
            "b": "second factors",
            "R": "number of products",
            "W_a": "learned matrix of the first factors",
            "W_b": "learned matrix of the second factors",
        },
    ),
    "mfa": Usage(
        "Step-3",
        "the cache must be as small as that of mqa, with the capacity of many wide heads",
        "query FLOPs are the limit: H D is larger than the model",
        {"q_rank": 2048, "head_dim": 256},
        {
            "norm": "RMS norm of a latent",
            "W_c": "learned matrix from hidden states to the latent of queries",
        },
    ),
    "gta": Usage(
        "none that is released; the paper trained models of up to 1.5B parameters",
        "a cache half as large as that of gqa is needed without latents",
        "checkpoints of gqa are to be converted: its keys are not tied to values",
        _EIGHT,
        {"W_r": "learned matrix of the rotated half of the keys"},
    ),
    "grouped_latent": Usage(
        "none that is released; the paper trained models of up to 1.5B parameters",
        "mla is to be split over devices: each device then has one latent and its heads",
        "one device holds the model; mla then caches as much and shares more",
        {"q_rank": 1536, "kv_rank": 256, "nope_dim": 128, "rope_dim": 64, "value_dim": 128},
        {
            "norm": "RMS norm of a latent",
            "c_i": "latent number i of a token",
            "k_r": "rotary key of a token, shared by all heads",
            "q_r": "rotary part of a query",
            "W_c": "learned matrix from hidden states to one latent",
            "W_kr": "learned matrix of the rotary key",
            "W_uk": "learned matrix from a latent to keys, one for each head",
            "W_uv": "learned matrix from a latent to values, one for each head",
            "scale": "1 / sqrt(width of a whole query)",
            "n": "number of latents",
            "i": "index of the latent that serves head h",
        },
    ),
    "mlra": Usage(
        "none that is widely used; the paper's checkpoints of 3B parameters",
        "mla is to be split over devices, and each head is to read all latents",
        "compute is the limit: each head attends once in every branch",
        {"q_rank": 1536, "kv_rank": 128, "nope_dim": 128, "rope_dim": 64, "value_dim": 128},
        {
            "norm": "RMS norm of a latent",
            "c_i": "latent number i of a token",
            "k_r": "rotary key of a token, shared by all heads",
            "W_c": "learned matrix from hidden states to one latent",
            "W_kr": "learned matrix of the rotary key",
            "W_uk": "learned matrix from a latent to keys, one for each head and branch",
            "W_uv": "learned matrix from a latent to values, one for each head and branch",
            "scale": "1 / sqrt(width of a whole query)",
            "sum_j": "sum over the branches",
            "j": "index of the branch",
            "m": "number of branches",
            "i": "index of the latent that serves head h in branch j",
        },
    ),
    "h2o": Usage(
        "a cache policy of serving systems, on models that were trained without it",
        "the cache must stay small on a trained model, and some tokens matter throughout the text",
        "later questions may need any token: what was evicted cannot be found again",
        {},
        {
            "n": "how many of the newest tokens stay",
            "p_tj": "weight that query t gave to key j",
            "sum_t": "sum over all queries so far",
            "t": "position of a query, the last one in j > t - n",
        },
    ),
    "tova": Usage(
        "a cache policy of serving systems, on models that were trained without it",
        "as h2o, where what matters changes along the text",
        "as h2o; one query decides alone what is lost",
        {},
        {"p_tj": "weight that the last query t gave to key j"},
    ),
    "snapkv": Usage(
        "a cache policy of serving systems, on models that were trained without it",
        "a long prompt ends with the question: its last tokens say what matters",
        "the question comes later than the eviction: its tokens cannot be known",
        {},
        {
            "w": "number of last queries, which decide",
            "mean": "mean over the neighbours of key j",
            "p_tj": "weight that query t gave to key j",
            "sum_t": "sum over the last w queries",
            "t": "position of a query, the last one in j > t - w",
        },
    ),
    "key_norm": Usage(
        "a cache policy of serving systems, on models that were trained without it",
        "no attention weights are at hand, as with fused kernels",
        "the model has QK-norm: all its keys have about the same norm",
        {},
        {"k_j": "key j"},
    ),
    "keydiff": Usage(
        "a cache policy of serving systems, on models that were trained without it",
        "no attention weights are at hand, and a prompt is read in pieces",
        "as h2o; similar keys may hold different values",
        {},
        {"k_j": "key j", "c": "mean direction of the held keys"},
    ),
    "adakv": Usage(
        "a cache policy of serving systems, on models that were trained without it",
        "as snapkv, where some heads spread their attention and others do not",
        "as snapkv; one head may take the budget of the others, down to their share",
        {},
        {
            "w": "number of last queries, which decide",
            "mean": "mean over the neighbours of key j",
            "p_tj": "weight that query t gave to key j",
            "sum_t": "sum over the last w queries",
            "t": "position of a query, the last one in j > t - w",
        },
    ),
    "expected_attention": Usage(
        "a cache policy of serving systems, on models that were trained without it",
        "later questions are not known when tokens are evicted, and heads end with rotary",
        "the queries change their kind along the text: the moments are those of the past",
        {},
        {
            "k_j": "key j, times 1 / sqrt(D)",
            "v_j": "value j",
            "m": "mean of the queries so far, rotated to the next positions",
            "C": "covariance of the queries so far, rotated to the next positions",
        },
    ),
}
"""The row of each mechanism, by its name in the catalogue."""

_INDICES = "ijthg"
"""Letters that say, below another symbol, which one of several it is."""
_SYMBOL = re.compile(r"[A-Za-z]+[0-9]?(?:_[A-Za-z0-9]+)?(?:\^[QKV]\b)?'?")
_ENGLISH = frozenset(
    {"a", "after", "all", "and", "as", "block", "blocks", "by", "compressed", "document", "each"}
    | {"earlier", "every", "for", "global", "globals", "heads", "in", "infini", "keys", "largest"}
    | {"convolution", "first", "mixed"}
    | {"layer", "memory", "of", "or", "over", "query", "random", "rotated", "same", "segment"}
    | {"selected", "split", "th", "the", "then", "token", "tokens", "way", "window", "with"}
    | {"any", "head", "page", "pages"}
    | {"are", "before", "bias", "blocks", "chunk", "floor", "half", "head", "number", "one"}
    | {"others", "pair", "pairs", "positions", "rotates", "without"}
)
"""Words of the equations that are no symbols."""


def equation_symbols(name: str, equation: str) -> dict[str, str]:
    """Return the symbols of an equation with their meanings, in the order of the equation.

    Args:
        name: the name of the mechanism.
        equation: its equation.

    Returns:
        Symbol to meaning. The index of a symbol such as q_h has a line of its own.

    Raises:
        KeyError: a symbol has no meaning.

    >>> equation_symbols("causal", "z = softmax(q k^T / sqrt(D) + causal) v")["D"]
    'width of a query and key head'
    """
    own = USAGE[name].symbols
    known = {**SYMBOLS, **own}
    meanings: dict[str, str] = {}
    for token in _SYMBOL.findall(equation.replace("'s ", " ")):
        base, _, index = token.partition("_")
        names = [x for x in (token, token.rstrip("'"), base, base.rstrip("'")) if x in known]
        if names:
            meanings.setdefault(names[0], known[names[0]])
        elif base.rstrip("'") not in FUNCTIONS | _ENGLISH:
            raise KeyError(f"{token} in the equation of {name}")
        if not names or "_" not in names[0]:
            meanings |= {x: known[x] for x in index if x in _INDICES and x not in meanings}
    return meanings
