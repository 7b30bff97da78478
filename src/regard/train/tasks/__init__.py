"""Tasks that show what attention is for, on data made on the spot: no download, every split from a
seed.
"""

from __future__ import annotations

from regard.errors import ArgumentError
from regard.suggest import suggest
from regard.train.tasks.recall_tasks import COPY, INDUCTION, MQAR, PASSKEY
from regard.train.tasks.task import BOS, EOS, PAD, SPLITS, Example, Task, Vocabulary
from regard.train.tasks.translation_tasks import BACK, DATES, TRANSLATE

TASKS = {task.name: task for task in (TRANSLATE, BACK, DATES, COPY, INDUCTION, MQAR, PASSKEY)}
"""Name -> task."""


def find_task(name: str) -> Task:
    """The task of a name.

    Raises:
        ArgumentError: there is none; names the near ones.

    >>> find_task("mqar").kind
    'rows'
    """
    if name not in TASKS:
        hint = suggest(name, TASKS, most=2, otherwise=f"; choose {', '.join(TASKS)}")
        raise ArgumentError(f"there is no task {name!r}{hint}")
    return TASKS[name]


__all__ = ["BOS", "EOS", "PAD", "SPLITS", "TASKS", "Example", "Task", "Vocabulary", "find_task"]
