"""Asks llama.cpp (the package xllamacpp) for the log probabilities after some ids, in a process of
its own: `python llama_cpp.py FILE VOCABULARY ID ID ...` prints them as JSON, by ids.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request


def main(path: str, vocabulary: int, ids: list[int]) -> None:
    """Start a server on a file, in fp32 and with one thread, and ask it once."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = path, 256, 1
    settings.warmup = settings.fit_params = False
    settings.verbosity = -1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(settings)
    question = {"prompt": ids, "n_predict": 1, "n_probs": vocabulary, "temperature": 0}
    request = urllib.request.Request(
        f"{server.listening_address}/completion",
        json.dumps(question).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        (first,) = json.loads(answer.read())["completion_probabilities"]
    print(json.dumps({x["id"]: x["logprob"] for x in first["top_logprobs"]}), flush=True)
    os._exit(0)  # the server's threads do not end


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), [int(x) for x in sys.argv[3:]])
