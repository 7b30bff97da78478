"""The part of `regard explain` that runs a module of the user's own, named by a function that
builds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.cli.options import usage_error
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from torch import nn

    from regard.inspect import Explanation, Recording


PLACE_TITLES = ("place", "heads", "queries", "keys")
"""The columns of `list_places`."""


class ModuleRun(NamedTuple):
    """A recorded run of a user's module."""

    name: str
    model: nn.Module
    recording: Recording


def run_module(name: str) -> ModuleRun:
    """Import a function, call it, and record the module that it returns with its inputs.

    The module runs in evaluation mode; its mode is restored.
    """
    from torch import nn

    from regard.audit.adapters.resolve_target import import_target
    from regard.inspect import record

    try:
        function = import_target(name)
    except ArgumentError as error:
        raise ArgumentError(str(error), argument="module") from error
    if not callable(function) or isinstance(function, (nn.Module, type)):
        text = (
            "{name} is {kind}; it must be a function that returns (model, inputs) or (model, "
            "inputs, labels)"
        )
        raise usage_error("--module", text, name=name, kind=type(function).__name__)
    try:
        returned = function()
    except Exception as error:
        text = "{name}() raised {kind}: {error}; it is called without arguments"
        kind = type(error).__name__
        raise usage_error("--module", text, name=name, kind=kind, error=error) from error
    if (
        not isinstance(returned, tuple)
        or len(returned) not in (2, 3)
        or not isinstance(returned[0], nn.Module)
    ):
        parts = (
            [type(x).__name__ for x in returned]
            if isinstance(returned, tuple)
            else type(returned).__name__
        )
        text = (
            "{name}() returned {parts}; it must return (model, inputs) or (model, inputs, "
            "labels), the model a torch.nn.Module"
        )
        raise usage_error("--module", text, name=name, parts=parts)
    model, inputs = returned[:2]
    labels = returned[2] if len(returned) == 3 else None
    training = [x for x in model.modules() if x.training]
    model.eval()
    try:
        positional = inputs if isinstance(inputs, tuple) else (inputs,)
        recording = record(model, *positional, labels=labels)
    finally:
        for x in training:
            x.training = True
    return ModuleRun(name, model, recording)


class ModuleTarget(NamedTuple):
    """A head of a recorded place, the column of its explained key if the choice of the head found
    one, and the rule by which the head was chosen.
    """

    place: str
    head: int
    key: int | None
    rule: str


def choose_module_head(
    run: ModuleRun,
    query: int | str,
    key: int | str | None,
    place: str | int | None,
    head: int | None,
    batch: int,
) -> ModuleTarget:
    """Return the place and head that were named, or where the query has the largest weight."""
    import torch

    from regard.inspect import explain
    from regard.inspect.explain.head_choice import (
        CROSS_HEAD_RULE,
        HEAD_FOR_KEY_RULE,
        NEAR_HEAD_RULE,
    )

    recording = run.recording
    if place is not None and head is not None:
        return ModuleTarget(recording[place].name, head, None, "")
    candidates: list[tuple[float, ModuleTarget]] = []
    problem: ArgumentError | None = None
    for one in [recording[place]] if place is not None else recording.places.values():
        try:
            first = explain(
                recording, place=one.name, head=head or 0, query=query, key=key, batch=batch
            )
        except ArgumentError as error:
            problem = problem or error
            continue
        for h in range(one.H) if head is None else [head]:
            row = recording.weights(one.name, h, first.query, batch=batch)[0]
            counted, rule = row, HEAD_FOR_KEY_RULE
            if key is not None:
                counted = torch.where(torch.arange(len(row)) == first.key, row, -1)
            else:
                # self-attention: as for every explanation
                others = row.clone()
                others[[0, first.query] if one.T == one.N else []] = -1
                is_near = one.T == one.N and bool((others > 0).any())
                counted, rule = (others, NEAR_HEAD_RULE) if is_near else (row, CROSS_HEAD_RULE)
            column = int(counted.argmax())
            weight = float(counted[column])
            target_key = column if key is None and weight > 0 else None
            candidates.append((weight, ModuleTarget(one.name, h, target_key, rule)))
    if not candidates:
        assert problem is not None, "a recording has at least one place"
        raise problem
    return max(candidates, key=lambda x: x[0])[1]


def explain_module(
    run: ModuleRun, target: ModuleTarget, query: int | str, key: int | str | None, batch: int
) -> Explanation:
    """Explain a row of a recorded module."""
    from dataclasses import replace

    from regard.inspect import explain

    chosen = target.key if key is None else key
    explanation = explain(
        run.recording, place=target.place, head=target.head, query=query, key=chosen, batch=batch
    )
    return replace(explanation, where=replace(explanation.where, chosen_by=target.rule))


def page_data(
    run: ModuleRun, explanation: Explanation, data: Mapping[str, Any], batch: int
) -> dict[str, Any]:
    """Return the data of the page of a recorded module, opened at the explained query."""
    from regard.inspect.report import report

    report_data = report(
        run.recording,
        choice=(explanation.place, explanation.head),
        query=explanation.query,
        key=explanation.key,
        title=run.name,
        explanation=data,
        row=batch,
    )
    report_data["meta"]["start"]["view"] = "cell"
    return report_data


def list_places(run: ModuleRun) -> list[dict[str, Any]]:
    """Return the recorded places with their sizes, for `--list`."""
    return [
        {"place": x.name, "heads": x.H, "queries": x.T, "keys": x.N}
        for x in run.recording.places.values()
    ]
