"""The mechanisms that released models use most, trained at equal parameters on the three tasks of
`regard compare`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from regard.compare.experiment import ReportProgress, Session
from regard.compare.mechanisms import Shape, candidates, configs
from regard.compare.quality import (
    EvalTask,
    TrainConfig,
    TrainingSettings,
    eval_tasks,
    training_experiments,
)
from tests.compare.catalogue_table.kept import QUALITY, LineStore

MOST_USED = {
    "gqa": "gqa:groups=2",
    "mha": "mha",
    "mqa": "mqa",
    "qk_norm": "qk_norm:groups=2",
    "mla": "mla",
    "local_global": "local_global:groups=2,window=8,every=2",
    "sliding_window": "sliding_window:groups=2,window=8",
    "chunked": "chunked:groups=2,chunk=8",
    "irope": "irope:groups=2,every=2",
    "alibi": "alibi",
    "t5": "t5",
    "softcap": "softcap:groups=2",
    "learned_sink": "learned_sink:groups=2",
    "gated": "gated:groups=2",
    "dsa": "dsa:groups=2,topk=8,index_heads=2,index_dim=16,rotary_dim=8",
    "gated_delta_net": "gated_delta_net",
    "kimi_delta": "kimi_delta",
    "mamba2": "mamba2:head_dim=16",
    "lightning": "lightning:layers=2",
    "rwkv6": "rwkv6:rank=16",
}
"""The mechanisms of the catalogue that most released decoders have, with the sizes of their parts
in these small models. `mha` is multi-head attention with rotary positions.
"""

SHAPE = Shape(dim=64, layers=2, heads=4, window=8)
LENGTH, BATCH = 128, 4
RATE = 0.003
STEPS = {"mqar": 800, "passkey": 500, "text": 300}
SEEDS = (0, 1, 2)


def tasks() -> list[EvalTask]:
    """The tasks: rows of 16 tokens of mqar, of 32 of passkey, and of 128 bytes of text."""
    return eval_tasks(list(STEPS), length=LENGTH, batch=BATCH)


def models() -> dict[str, TrainConfig]:
    """Name -> config with as many parameters as multi-head attention, within 1 %."""
    chosen = candidates(["mha", *(x for x in MOST_USED.values() if x != "mha")], SHAPE)
    # the runs that are kept have as many value heads as heads
    chosen = [replace(x, options={}) if x.name == "gated_delta_net" else x for x in chosen]
    by_option = configs(chosen, SHAPE, "parameters")
    return {name: TrainConfig(by_option[text], (RATE,)) for name, text in MOST_USED.items()}


def run(report: ReportProgress) -> None:
    """Train what is missing: all mechanisms with the first seed, then with the next."""
    torch.set_num_threads(1)
    session = Session(LineStore(QUALITY), report)
    for seed in SEEDS:
        training = TrainingSettings((seed,), (RATE,))
        seconds = {task: dict.fromkeys(MOST_USED, 1.0) for task in STEPS}
        session.run(training_experiments(models(), tasks(), training, STEPS, seconds))
