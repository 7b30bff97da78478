"""A run's state as tensors and JSON, and back: weights, optimiser, random state, data order."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.foreign import shown
from regard.train.checkpoints import Checkpoint
from regard.train.feed import Feed
from regard.train.settings import Settings

_FREE = ("save_every",)  # settings that change no number of a run


def pack(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    batches: Feed,
    settings: Settings,
    run: dict[str, Any],
) -> Checkpoint:
    """Everything that the next step depends on. `run` is JSON-able, with its "step"."""
    tensors, groups = _pack_optimiser(optimiser)
    state = {
        "run": run,
        "settings": asdict(settings),
        "batches": batches.state_dict(),
        "optimiser": groups,
        "random": {"cpu": _text(torch.get_rng_state())},
    }
    if torch.cuda.is_available():
        state["random"]["cuda"] = [_text(s) for s in torch.cuda.get_rng_state_all()]
    return Checkpoint(run["step"], {"model": model.state_dict(), "optimizer": tensors}, state)


def unpack(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    batches: Feed,
    settings: Settings,
) -> dict[str, Any]:
    """Put a checkpoint's state into the parts of a run, all checks first; gives back `run`.

    Raises:
        ArgumentError: the settings, the weights' names or shapes, or the data differ from the saved
            run's; names which.
    """
    state = checkpoint.state
    for name, value in asdict(settings).items():
        saved = state["settings"].get(name)
        if value != saved and name not in _FREE:
            raise ArgumentError(
                f"{name} is {value}, the run to resume has {shown(saved)}; "
                "repeat its settings or start a new run"
            )
    _check_weights(model, checkpoint.tensors["model"])
    batches.load_state_dict(state["batches"])
    model.load_state_dict(checkpoint.tensors["model"])
    _unpack_optimiser(optimiser, checkpoint.tensors["optimizer"], state["optimiser"])
    torch.set_rng_state(_bytes(state["random"]["cpu"]))
    if torch.cuda.is_available() and "cuda" in state["random"]:
        torch.cuda.set_rng_state_all([_bytes(text) for text in state["random"]["cuda"]])
    return dict(state["run"])


def check_about(checkpoint: Checkpoint, about: Mapping[str, Any] | None) -> None:
    """What is said of the model is what was said of the saved one; a checkpoint that says nothing passes.

    Raises:
        ArgumentError: it differs; names the first key, and both values.
    """
    saved, now = checkpoint.state.get("about") or {}, about or {}
    if not isinstance(saved, dict):
        raise TypeError(f"about is {shown(saved)}")
    for name in sorted({*saved, *now}) if saved else ():
        if saved.get(name) != now.get(name):
            raise ArgumentError(
                f"{name} is {now.get(name)!r}, the model to resume has {shown(saved.get(name))}; "
                "repeat its options or start a new run"
            )


def _check_weights(model: nn.Module, saved: dict[str, Tensor]) -> None:
    own = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    for name in sorted(own.keys() | saved.keys()):
        theirs = tuple(saved[name].shape) if name in saved else None
        if own.get(name) != theirs:
            raise ArgumentError(
                f"weight {shown(name)} is {own.get(name)} in the model and {theirs} in the checkpoint; "
                "resume with the first run's model"
            )


def _pack_optimiser(optimiser: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    content = optimiser.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for index, entries in content["state"].items():
        for key, value in entries.items():
            (tensors if isinstance(value, Tensor) else values)[f"{index}.{key}"] = value
    return tensors, {"groups": content["param_groups"], "values": values}


def _unpack_optimiser(
    optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor], saved: dict[str, Any]
) -> None:
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *saved["values"].items()]:
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    own = optimiser.state_dict()["param_groups"]
    # JSON has no tuples: keep the kind of each setting as the optimiser has it
    groups = [
        {
            key: tuple(value) if isinstance(mine.get(key), tuple) else value
            for key, value in group.items()
        }
        for mine, group in zip(own, saved["groups"], strict=True)
    ]
    optimiser.load_state_dict({"state": state, "param_groups": groups})


def _text(tensor: Tensor) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode("ascii")


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
