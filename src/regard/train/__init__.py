"""Training: texts, batches, the training loop, and checkpoints from which a run resumes.

`fit(model, batches, settings)` trains any module that maps token ids `[B, T]` to logits
`[B, T, V]`. `regard train` is the command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.registry import import_when_used

if TYPE_CHECKING:
    from regard.train.batches import Batches, validation_rows
    from regard.train.checkpoints import TrainingCheckpoint
    from regard.train.context_parallel import ContextParallel
    from regard.train.corpus import TextDocument, load_documents, split_documents
    from regard.train.loop import NonFiniteLoss, TrainResult, fit
    from regard.train.losses import evaluate, next_token_loss
    from regard.train.progress import make_progress
    from regard.train.settings import Settings

__all__ = [
    "Batches",
    "ContextParallel",
    "NonFiniteLoss",
    "Settings",
    "TextDocument",
    "TrainResult",
    "TrainingCheckpoint",
    "evaluate",
    "fit",
    "load_documents",
    "make_progress",
    "next_token_loss",
    "split_documents",
    "validation_rows",
]

__getattr__ = import_when_used(
    __name__,
    {
        "regard.train.batches": "Batches validation_rows",
        "regard.train.checkpoints": "TrainingCheckpoint",
        "regard.train.context_parallel": "ContextParallel",
        "regard.train.corpus": "TextDocument load_documents split_documents",
        "regard.train.loop": "NonFiniteLoss TrainResult fit",
        "regard.train.losses": "evaluate next_token_loss",
        "regard.train.progress": "make_progress",
        "regard.train.settings": "Settings",
    },
)
