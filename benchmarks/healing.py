"""The way back after a conversion: perplexity of SmolLM2 with fewer key/value heads against the
tokens of its finetuning.

    python -m benchmarks.healing svd --steps 96 >> docs/healing.jsonl

The text is the documentation of Python; the perplexity is that of documents that are not trained
on. "none" finetunes the model as it is: what it gains, the conversion has nothing to do with.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from pathlib import Path
from typing import Literal

import torch

import regard
from regard.models.convert import Checkpoint, to_groups
from regard.models.convert.attention_maps import rebuild
from regard.train.batches import Batches, token_stream, validation_rows
from regard.train.corpus import load_documents, split_documents
from regard.train.loop import fit
from regard.train.losses import evaluate
from regard.train.settings import Settings

CONTEXT, BATCH, LR = 256, 2, 1e-4
"""Tokens of a row, rows of a step, and the peak learning rate of `regard convert --heal`."""
HELD_ROWS = 12
"""Rows on which the perplexity is measured."""


def dense_smollm2() -> tuple[regard.models.Model, Checkpoint]:
    """Return SmolLM2 and its network with the weights of its 4-bit file in fp32."""
    model = regard.load("smollm2", kind=regard.models.Model)
    checkpoint = Checkpoint(model.decoder, model.config)
    records = {name: x.dequantize(torch.float32) for name, x in checkpoint.records().items()}
    return model, rebuild(model.config, {**checkpoint.weights(), **records})


def finetuned_perplexity(
    pooling: Literal["none", "mean", "svd"],
    groups: int,
    steps: int,
    log: Path,
    *,
    lr: float = LR,
    bf16: bool,
) -> dict[str, object]:
    """Convert and finetune; return the perplexity after each evaluation, and the time."""
    model, checkpoint = dense_smollm2()
    training, validation = split_documents(load_documents())
    stream = token_stream(training, model.tokenizer)
    held_rows = validation_rows(token_stream(validation, model.tokenizer), CONTEXT, HELD_ROWS)
    before = math.exp(evaluate(checkpoint.network, held_rows, batch=BATCH))
    if pooling != "none":
        calibration = validation_rows(stream, CONTEXT, 8)
        checkpoint, _ = to_groups(checkpoint, groups, pooling=pooling, ids=calibration)
    network = checkpoint.network.requires_grad_(True)
    warmup = min(50, math.ceil(steps / 10))
    settings = Settings(
        steps, lr, warmup, log_every=steps, validate_every=max(1, steps // 8), bf16=bf16
    )
    start = math.exp(evaluate(network, held_rows, batch=BATCH))
    began = time.process_time()
    batches = Batches(stream, batch=BATCH, context=CONTEXT, seed=0)
    fit(network, batches, settings, validation=held_rows, log=log)
    with log.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["validation"]]
    curve = [[0, start], *([int(x["tokens"]), math.exp(float(x["validation"]))] for x in rows)]
    return {
        "pooling": pooling,
        "kv_heads": groups,
        "before": round(before, 3),
        "curve": [[tokens, round(perplexity, 2)] for tokens, perplexity in curve],
        "processor_minutes": round((time.process_time() - began) / 60, 1),
        "settings": {"batch": BATCH, "length": CONTEXT, "lr": lr, "steps": steps, "bf16": bf16},
    }


def main() -> None:
    """Run one curve and print it as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pooling", choices=["none", "mean", "svd"])
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--lr", type=float, default=LR, help="peak learning rate")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--log", type=Path, default=Path("healing.csv"))
    options = parser.parse_args()
    result = finetuned_perplexity(
        options.pooling,
        options.kv_heads,
        options.steps,
        options.log,
        lr=options.lr,
        bf16=options.bf16,
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
