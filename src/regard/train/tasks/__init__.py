"""Tasks that show what attention is for, on data made on the spot: no download, every split from a
seed.
"""

from regard.train.tasks.base import BOS, EOS, PAD, SPLITS, Example, Task, Vocabulary
from regard.train.tasks.table import TASKS, find_task

__all__ = ["BOS", "EOS", "PAD", "SPLITS", "TASKS", "Example", "Task", "Vocabulary", "find_task"]
