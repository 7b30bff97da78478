"""Which model classes of transformers take their attention from `AttentionInterface`, and what
happens to the others.

A class is judged by its source before it is built or switched: transformers itself accepts any
registered name in the constructor, also for a class that would never call the function, or that
would add our bool mask to its scores.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from regard.errors import ArgumentError

NAME = "regard"
"""The attention implementation that this package registers."""

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""What a module of transformers that takes its attention from the interface refers to."""

_MASKS = re.compile(r"create_(causal|bidirectional|sliding_window|chunked|masks_for)\w*")
_BY_NAME = re.compile(r"CLASSES\[\s*(self\.)?(config\.)?_?attn_implementation\s*\]")
_AUTO = re.compile(r"AutoModel|AutoBackbone|load_backbone")
_told: dict[str, object] = {}


class Use(NamedTuple):
    """What the source of a model class does, its parts included, other model classes left out."""

    interface: bool
    """It calls the attention function of the interface."""

    masks: bool
    """It makes its masks by `transformers.masking_utils`, in the form that the implementation's
    name asks for.
    """

    by_name: bool
    """It looks up its attention class in a table by the implementation's name."""

    models: bool
    """It is made of other model classes, which are judged by themselves."""


@functools.cache
def use(cls: type) -> Use | None:
    """What the source of a model class does; None if there is no source.

    >>> from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel
    >>> use(LlamaModel).interface, use(LlamaForCausalLM).interface, use(LlamaForCausalLM).models
    (True, False, True)
    """
    if _parts(cls.__module__) is None:
        return None
    reached, models = _reached(cls)
    texts = [_parts(where)[part].text for where, part in reached]  # type: ignore[index]
    words = {word for where, part in reached for word in _parts(where)[part].words}  # type: ignore[index]
    return Use(
        INTERFACE in words,
        any(_MASKS.fullmatch(word) for word in words),
        any(_BY_NAME.search(text) for text in texts),
        models or any(_AUTO.match(word) for word in words),
    )


class _Part(NamedTuple):
    """A class, function or table at the top level of a module: its source, and the names in it."""

    text: str
    words: frozenset[str]


@functools.cache
def _parts(module: str) -> dict[str, _Part] | None:
    """The top level of a module by name; None without its source."""
    found = sys.modules.get(module)
    if found is None:
        return None
    try:
        text = inspect.getsource(found)
    except (OSError, TypeError):
        return None
    parts = {}
    for statement in ast.parse(text).body:
        for name in _bound(statement):
            words = frozenset(_words(statement))
            parts[name] = _Part(ast.get_source_segment(text, statement) or "", words)
    return parts


def _words(statement: ast.stmt) -> Iterator[str]:
    """The names in a statement, but for those that a model class mentions of classes that it need
    not contain.
    """
    inside = statement.body if isinstance(statement, ast.ClassDef) else [statement]
    for part in inside:
        if not {"_init_weights", "_can_record_outputs"} & set(_bound(part)):
            yield from (x.id for x in ast.walk(part) if isinstance(x, ast.Name))
    for base in statement.bases if isinstance(statement, ast.ClassDef) else ():
        yield from (x.id for x in ast.walk(base) if isinstance(x, ast.Name))


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        yield statement.name
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _bases(cls: type) -> list[type]:
    """The class and those that it inherits from, which are models, too."""
    return [x for x in cls.__mro__ if issubclass(x, PreTrainedModel) and x is not PreTrainedModel]


def _reached(cls: type) -> tuple[set[tuple[str, str]], bool]:
    """The parts that a model class and its bases refer to, up to other model classes; whether it
    refers to such a one.
    """
    reached: set[tuple[str, str]] = set()
    models, left = False, [(x.__module__, x.__name__) for x in _bases(cls)]
    while left:
        where, part = left.pop()
        parts = _parts(where)
        if parts is None or (where, part) in reached:
            continue
        if part not in parts:  # it comes from another module
            found = getattr(sys.modules[where], part, None)
            home = getattr(found, "__module__", None)
            if isinstance(found, ModuleType) or not isinstance(home, str) or home == where:
                continue
            if ".models." in home:
                left.append((home, getattr(found, "__name__", part)))
            continue
        found = getattr(sys.modules[where], part, None)
        if (
            isinstance(found, type)
            and issubclass(found, PreTrainedModel)
            and not issubclass(cls, found)
        ):
            models = True
            continue
        reached.add((where, part))
        left += [(where, word) for word in parts[part].words]
    return reached, models


def check(cls: type) -> None:
    """Refuse a model class whose attention cannot be regard's; warn once where the name changes
    nothing.

    Raises:
        ArgumentError: the class computes its attention itself from a mask of transformers', or
            looks it up by name.
    """
    found = use(cls)
    if found is None:
        return
    if found.by_name:
        raise ArgumentError(_refusal(cls, "chooses its attention class from a table of names"))
    if found.interface:
        return
    if found.masks and not found.models:
        raise ArgumentError(_refusal(cls, "computes its attention itself"))
    mine = object()  # of threads that come at once, one tells
    if not found.models and _told.setdefault(cls.__name__, mine) is mine:
        warnings.warn(
            f"{cls.__name__} never calls the attention function of transformers' "
            "AttentionInterface: its results are those of "
            'attn_implementation="eager", and nothing in it runs through regard or can be '
            "recorded",
            stacklevel=4,
        )


def _refusal(cls: type, why: str) -> str:
    others = ["eager", *(["sdpa"] if getattr(cls, "_supports_sdpa", False) else [])]
    return (
        f"{cls.__name__} {why} and does not take it from transformers' AttentionInterface, so "
        'attn_implementation="regard" '
        f"would not be obeyed; use {' or '.join(map(repr, others))}. The architectures that can "
        "run through regard are listed "
        "by regard.integrations.transformers.architectures(), and tested in docs/transformers.md"
    )


@functools.cache
def architectures() -> tuple[str, ...]:
    """The model types of the installed transformers with a module that takes its attention from
    `AttentionInterface`.

    >>> "llama" in architectures(), "mpt" in architectures()
    (True, False)
    """
    names = {
        *modeling_auto.MODEL_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    root = Path(transformers.__file__).parent / "models"
    with_it = {
        path.parent.name
        for path in root.glob("*/modeling_*.py")
        if INTERFACE in path.read_text("utf-8")
    }
    folder = transformers.models.auto.configuration_auto.model_type_to_module_name
    return tuple(sorted(name for name in names if folder(name) in with_it))


def takes_bool(config: object) -> bool:
    """Whether the model class of a configuration was written for bool masks, True = may attend, as
    sdpa has them.

    Every class was written for the masks of eager attention, which are added to scores; only one
    that supports sdpa also knows bool ones.
    """
    module = type(config).__module__.replace(".configuration_", ".modeling_")
    classes = vars(sys.modules[module]).values() if module in sys.modules else ()
    models = [
        x
        for x in classes
        if isinstance(x, type) and issubclass(x, PreTrainedModel) and x.__module__ == module
    ]
    return bool(models) and all(getattr(x, "_supports_sdpa", False) for x in models)


def _asked(config: Any, implementation: Any) -> Iterator[Any]:
    """The configurations for which `set_attn_implementation` is asked for "regard": a name, or
    names by sub-configuration.
    """
    by_key = implementation if isinstance(implementation, dict) else None
    if (implementation if by_key is None else by_key.get("")) == NAME:
        yield config
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None:
            yield from _asked(part, implementation if by_key is None else by_key.get(key))


def guard() -> None:
    """Judge each model class when it is built with, or switched to, `attn_implementation="regard"`.

    transformers offers no hook for it, so two methods of `PreTrainedModel` are wrapped; every other
    name passes through.
    """
    if hasattr(PreTrainedModel.set_attn_implementation, "__wrapped__"):
        return
    built, switched = (
        PreTrainedModel.get_correct_attn_implementation,
        PreTrainedModel.set_attn_implementation,
    )

    @functools.wraps(built)
    def get_correct_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> str:
        found: str = built(self, *args, **kwargs)
        if found == NAME:
            check(type(self))
        return found

    @functools.wraps(switched)
    def set_attn_implementation(
        self: Any, attn_implementation: Any, *args: Any, **kwargs: Any
    ) -> None:
        asked = [id(config) for config in _asked(self.config, attn_implementation)]
        for model in self.modules():
            inside = isinstance(model, PreTrainedModel)
            if inside and (attn_implementation == NAME or id(model.config) in asked):
                check(type(model))
        switched(self, attn_implementation, *args, **kwargs)

    for method in (get_correct_attn_implementation, set_attn_implementation):
        setattr(PreTrainedModel, method.__name__, method)
