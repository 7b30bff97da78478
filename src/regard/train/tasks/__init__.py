"""Tasks that show what attention is for, with examples generated from a seed."""

from __future__ import annotations

from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.train.tasks.recall_tasks import COPY, INDUCTION, MQAR, PASSKEY
from regard.train.tasks.task import BOS, EOS, PAD, SPLITS, Example, Task, Vocabulary
from regard.train.tasks.translation_tasks import DATES, TRANSLATE, TRANSLATE_BACK

TASKS = {
    task.name: task for task in (TRANSLATE, TRANSLATE_BACK, DATES, COPY, INDUCTION, MQAR, PASSKEY)
}
"""The tasks by name."""


def find_task(name: str) -> Task:
    """Return the task of a name.

    Args:
        name: a key of `TASKS`.

    Returns:
        The task.

    Raises:
        ArgumentError: there is no such task; the message suggests similar names.

    >>> find_task("mqar").kind
    'causal'
    """
    if name not in TASKS:
        hint = suggest(name, TASKS, most=2, otherwise=f"; choose {', '.join(TASKS)}")
        raise ArgumentError(f"there is no task {name!r}{hint}", argument="task", value=name)
    return TASKS[name]


__all__ = ["BOS", "EOS", "PAD", "SPLITS", "TASKS", "Example", "Task", "Vocabulary", "find_task"]
