"""Ablation of every head and patching of every state of SmolLM2, beside TransformerLens and
nnsight with the same weights: processor time of one thread in one process, in turns.

    python -m benchmarks.interventions --rounds 3

The peers get as many edits in one run as a layer has: its heads, or its positions, are rows of one
batch, which their users write by hand. `--rows 1` makes one run for each edit, as the functions of
`transformer_lens.patching` do.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.healing import dense_smollm2
from regard.inspect import ablate, patch
from regard.models import Model

ABLATED = "When Mary and John went to the store, John gave a drink to"
CLEAN = "When Mary and John went to the old store, John gave a drink to"
CORRUPT = "When Mary and John went to the old store, Mary gave a drink to"
NAMES = (" Mary", " John")
LAYERS, HEADS, SIZE = 30, 9, 64


def optional(name: str, package: str) -> Any:
    """Return a module of a peer, or stop and say how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(
            f"{name} cannot be imported ({error}); python -m pip install {package}, in an "
            "environment of its own, since it brings many packages"
        ) from error


class Texts:
    """The ids of the texts and of the names, and the metric."""

    def __init__(self, model: Model, rows: int) -> None:
        self.ablated, self.clean, self.corrupt = map(model.encode, (ABLATED, CLEAN, CORRUPT))
        self.yes, self.no = model.encode("".join(NAMES))[0].tolist()
        self.rows = rows

    def measure(self, run: Callable[[int, list[int]], Tensor], cells: int) -> np.ndarray:
        """Return the metric of every edit `[layers, cells]`, of runs with last logits `[n, V]`."""
        values = np.zeros((LAYERS, cells))
        for layer in range(LAYERS):
            for begin in range(0, cells, self.rows):
                chosen = list(range(begin, min(begin + self.rows, cells)))
                last = run(layer, chosen)
                values[layer, chosen] = (last[:, self.yes] - last[:, self.no]).numpy()
        return values


def of_transformer_lens(network: Any, tokenizer: Any, texts: Texts) -> Any:
    """Return both tasks with hooks of TransformerLens."""
    module = optional("transformer_lens.model_bridge", "transformer-lens")
    model = module.TransformerBridge.boot_transformers(
        network.config.name_or_path, hf_model=network, tokenizer=tokenizer, dtype=torch.float32
    )

    def ablated(layer: int, chosen: list[int]) -> Tensor:
        def edit(z: Tensor, hook: Any) -> Tensor:  # noqa: ARG001
            z[range(len(chosen)), :, chosen] = 0
            return z

        ids = texts.ablated.repeat(len(chosen), 1)
        hooks = [(f"blocks.{layer}.attn.hook_z", edit)]
        return model.run_with_hooks(ids, fwd_hooks=hooks)[:, -1]  # type: ignore[no-any-return]

    def patched(layer: int, chosen: list[int], clean: Any) -> Tensor:
        name = f"blocks.{layer}.hook_resid_pre"

        def edit(x: Tensor, hook: Any) -> Tensor:  # noqa: ARG001
            x[range(len(chosen)), chosen] = clean[name][0, chosen]
            return x

        ids = texts.corrupt.repeat(len(chosen), 1)
        return model.run_with_hooks(ids, fwd_hooks=[(name, edit)])[:, -1]  # type: ignore[no-any-return]

    def patch_all() -> np.ndarray:
        clean = model.run_with_cache(texts.clean)[1]
        return texts.measure(lambda i, x: patched(i, x, clean), texts.clean.shape[1])

    return lambda: texts.measure(ablated, HEADS), patch_all


def of_nnsight(network: Any, texts: Texts) -> Any:
    """Return both tasks with traces of nnsight."""
    module = optional("nnsight", "nnsight")
    model = module.NNsight(network)

    def ablated(layer: int, chosen: list[int]) -> Tensor:
        with model.trace(texts.ablated.repeat(len(chosen), 1)):
            z = model.model.layers[layer].self_attn.o_proj.input.unflatten(-1, (HEADS, SIZE))
            z[range(len(chosen)), :, chosen] = 0
            last: Tensor = model.lm_head.output[:, -1].save()
        return last

    def patched(layer: int, chosen: list[int], clean: list[Tensor]) -> Tensor:
        with model.trace(texts.corrupt.repeat(len(chosen), 1)):
            x = model.model.layers[layer].input
            x[range(len(chosen)), chosen] = clean[layer][0, chosen]
            last: Tensor = model.lm_head.output[:, -1].save()
        return last

    def patch_all() -> np.ndarray:
        with model.trace(texts.clean):
            clean = module.save([layer.input.clone() for layer in model.model.layers])
        return texts.measure(lambda i, x: patched(i, x, clean), texts.clean.shape[1])

    return lambda: texts.measure(ablated, HEADS), patch_all


def of_regard(model: Model) -> Any:
    """Return both tasks with regard, which also patches the states after the last layer."""

    def patch_all() -> np.ndarray:
        table = patch(model, CLEAN, CORRUPT, NAMES)
        return (table.values + (table.baseline or 0))[:LAYERS]

    def ablate_all() -> np.ndarray:
        table = ablate(model, ABLATED, NAMES)
        return table.values + (table.baseline or 0)

    return ablate_all, patch_all


@torch.no_grad()
def main() -> None:
    """Print a line of JSON for each task: seconds, ratios to regard and largest differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=512, help="edits in one run of the peers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers = optional("transformers", "transformers")
    loaded, checkpoint = dense_smollm2()
    model = Model(checkpoint.network, loaded.tokenizer, loaded.config)
    texts = Texts(model, arguments.rows)
    with tempfile.TemporaryDirectory() as folder:
        saved = model.save(Path(folder) / "smollm2")
        eager, sdpa = (  # TransformerLens takes "eager" only
            transformers.AutoModelForCausalLM.from_pretrained(
                saved, dtype=torch.float32, attn_implementation=name
            ).eval()
            for name in ("eager", "sdpa")
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
        peers = {
            "regard": of_regard(model),
            "TransformerLens": of_transformer_lens(eager, tokenizer, texts),
            "nnsight": of_nnsight(sdpa, texts),
        }
    for number, task in enumerate(("ablate heads x layers", "patch layers x positions")):
        seconds: dict[str, list[float]] = {name: [] for name in peers}
        values = {}
        for _ in range(arguments.rounds):
            for name, tasks in peers.items():
                began = time.process_time()
                values[name] = tasks[number]()
                seconds[name].append(time.process_time() - began)
        for name, each in seconds.items():
            median, difference = statistics.median(each), abs(values[name] - values["regard"]).max()
            line = {"task": task, "rows": arguments.rows, "peer": name, "seconds": round(median, 2)}
            line["times of regard"] = round(median / statistics.median(seconds["regard"]), 2)
            print(json.dumps({**line, "difference": float(f"{difference:.2g}")}), flush=True)


if __name__ == "__main__":
    main()
