"""Asks llama.cpp (the package xllamacpp) in a process of its own, and prints its answer as JSON.

`python llama_cpp.py FILE VOCABULARY ID ID ...`: the log probabilities after some ids, by ids.
`python llama_cpp.py FILE text TOKENS PROMPT ...`: the ids of each prompt, and the most likely ones
that follow.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any


def start(path: str) -> Any:
    """Start a server on a file, in fp32 and with one thread."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = path, 256, 1
    settings.warmup = settings.fit_params = False
    settings.verbosity = -1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
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


if __name__ == "__main__":
    path, what, *rest = sys.argv[1:]
    if what == "text":
        answer: Any = continuations(start(path), int(rest[0]), rest[1:])
    else:
        answer = probabilities(start(path), int(what), [int(x) for x in rest])
    print(json.dumps(answer), flush=True)
    os._exit(0)  # the server's threads do not end
