"""Training: texts, batches, the loop, and checkpoints that survive.

`fit(model, batches, settings)` trains any module that turns ids [B, T] into logits [B, T, V].
"""

from regard.train.batches import Batches, validation_rows
from regard.train.checkpoints import Checkpoint
from regard.train.corpus import Document, read, split
from regard.train.loop import NonFiniteLoss, Result, fit
from regard.train.losses import evaluate, next_token_loss
from regard.train.progress import show
from regard.train.settings import Settings

__all__ = [
    "Batches",
    "Checkpoint",
    "Document",
    "NonFiniteLoss",
    "Result",
    "Settings",
    "evaluate",
    "fit",
    "next_token_loss",
    "read",
    "show",
    "split",
    "validation_rows",
]
