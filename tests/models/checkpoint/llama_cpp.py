"""Asks llama.cpp (the package xllamacpp) in a process of its own, and prints its answer as JSON.

`python llama_cpp.py FILE VOCABULARY ID ID ...`: the log probabilities after some ids, by ids.
`python llama_cpp.py FILE text TOKENS PROMPT ...`: the ids of each prompt, and the most likely ones
that follow.
`python llama_cpp.py FILE encoder VOCABULARY ID ... - ID ...`: the logits of an encoder-decoder
after ids of its target, which stand behind those of its source.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any


def start(path: str) -> Any:
    """Start a server on a file, in fp32 and with one thread; flash attention, which rounds to 16
    bits, only where llama.cpp would see all blocks of keys without it.
    """
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = path, 256, 1
    settings.warmup = settings.fit_params = False
    settings.verbosity = -1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    with Path(path).open("rb") as file:
        kind = "ENABLED" if b"minimax-m3" in file.read(1024) else "DISABLED"
    kinds = xllamacpp.llama_flash_attn_type
    settings.flash_attn_type = getattr(kinds, f"LLAMA_FLASH_ATTN_TYPE_{kind}")
    return xllamacpp.Server(settings)


def ask(server: Any, place: str, question: dict[str, Any]) -> Any:
    """Return the answer of a server."""
    request = urllib.request.Request(
        f"{server.listening_address}/{place}",
        json.dumps(question).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


def probabilities(server: Any, vocabulary: int, ids: list[int]) -> dict[int, float]:
    """Return the log probability of every token after some ids."""
    question = {"prompt": ids, "n_predict": 1, "n_probs": vocabulary, "temperature": 0}
    (first,) = ask(server, "completion", question)["completion_probabilities"]
    return {x["id"]: x["logprob"] for x in first["top_logprobs"]}


def continuations(server: Any, tokens: int, prompts: list[str]) -> list[list[list[int]]]:
    """Return the ids of prompts, and those that follow."""
    found = []
    for prompt in prompts:
        asked = {"content": prompt, "add_special": True, "parse_special": True}
        ids = ask(server, "tokenize", asked)["tokens"]
        question = {"prompt": ids, "n_predict": tokens, "temperature": 0, "return_tokens": True}
        found.append([ids, ask(server, "completion", question)["tokens"]])
    return found


class Settings(ctypes.Structure):
    """Settings of llama.cpp by value, whose fields are not known here; there is room for more."""

    _fields_ = [("bytes", ctypes.c_uint8 * 1024)]


class Batch(ctypes.Structure):
    """`llama_batch`: ids, and what is derived from them where it is null."""

    _fields_ = [
        ("count", ctypes.c_int32),
        ("ids", ctypes.POINTER(ctypes.c_int32)),
        *((name, ctypes.c_void_p) for name in ("embeddings", "positions", "n", "texts", "logits")),
    ]


def encoder_decoder(
    path: str, vocabulary: int, source: list[int], target: list[int]
) -> list[float]:
    """Return the logits after a target, by the functions of the library, because its server runs no
    encoder.
    """
    import xllamacpp

    file = next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))
    library, pointer = ctypes.CDLL(str(file)), ctypes.c_void_p
    for name, result, *arguments in (
        ("llama_model_default_params", Settings),
        ("llama_context_default_params", Settings),
        ("llama_model_load_from_file", pointer, ctypes.c_char_p, Settings),
        ("llama_init_from_model", pointer, pointer, Settings),
        ("llama_encode", ctypes.c_int32, pointer, Batch),
        ("llama_decode", ctypes.c_int32, pointer, Batch),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), pointer, ctypes.c_int32),
    ):
        function: Any = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_backend_init()
    settings = library.llama_model_default_params()
    model = library.llama_model_load_from_file(path.encode(), settings)
    context = library.llama_init_from_model(model, library.llama_context_default_params())
    for run, ids in ((library.llama_encode, source), (library.llama_decode, target)):
        assert run(context, Batch(len(ids), (ctypes.c_int32 * len(ids))(*ids))) == 0
    return list(library.llama_get_logits_ith(context, -1)[:vocabulary])


if __name__ == "__main__":
    path, what, *rest = sys.argv[1:]
    if what == "text":
        answer: Any = continuations(start(path), int(rest[0]), rest[1:])
    elif what == "encoder":
        middle = rest.index("-")
        source, target = ([int(x) for x in ids] for ids in (rest[1:middle], rest[middle + 1 :]))
        answer = encoder_decoder(path, int(rest[0]), source, target)
    else:
        answer = probabilities(start(path), int(what), [int(x) for x in rest])
    print(json.dumps(answer), flush=True)
    os._exit(0)  # the server's threads do not end
