"""Run attention and linear layers of a model of transformers through this package (`accelerate`),
and find out which model classes take their attention from `AttentionInterface`.

transformers accepts any registered name, even for a class that never calls the function, or adds a
bool mask to its scores; so the source of a class is inspected before it is built or switched.
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
from typing import Any, NamedTuple, Self

import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from regard.configs import CONFIGS
from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn.weights import Linear

IMPLEMENTATION = "regard"
"""The name of the attention implementation that this package registers."""

INTERFACE_NAME = "ALL_ATTENTION_FUNCTIONS"
"""The name that a module of transformers refers to if it takes its attention from the interface."""

_MASKS = re.compile(r"create_(causal|bidirectional|sliding_window|chunked|masks_for)\w*")
_CLASS_TABLE = re.compile(r"CLASSES\[\s*(self\.)?(config\.)?_?attn_implementation\s*\]")
_AUTO = re.compile(r"AutoModel|AutoBackbone|load_backbone")
_warned: dict[str, object] = {}


class AttentionUsage(NamedTuple):
    """How the source of a model class, and of the modules that it builds, uses attention."""

    interface: bool
    """It calls the attention function of the interface."""

    masks: bool
    """It makes its masks by `transformers.masking_utils`, in the form of the implementation."""

    by_name: bool
    """It looks up its attention class in a table by the name of the implementation."""

    models: bool
    """It contains other model classes, which are checked by themselves."""


@functools.cache
def attention_usage(cls: type) -> AttentionUsage | None:
    """Inspect the source of a model class; return None if there is no source."""
    if _definitions(cls.__module__) is None:
        return None
    reached, models = _reachable_definitions(cls)
    definitions = [(_definitions(module_name) or {})[name] for module_name, name in reached]
    texts = [definition.text for definition in definitions]
    words = {word for definition in definitions for word in definition.words}
    return AttentionUsage(
        INTERFACE_NAME in words,
        any(_MASKS.fullmatch(word) for word in words),
        any(_CLASS_TABLE.search(text) for text in texts),
        models or any(_AUTO.match(word) for word in words),
    )


class _Definition(NamedTuple):
    """A class, function or table at the top level of a module: its source, and the names in it."""

    text: str
    words: frozenset[str]


@functools.cache
def _definitions(module: str) -> dict[str, _Definition] | None:
    """Return the top-level definitions of a module by name; None without its source."""
    loaded_module = sys.modules.get(module)
    if loaded_module is None:
        return None
    try:
        text = inspect.getsource(loaded_module)
    except (OSError, TypeError):
        return None
    parts = {}
    for statement in ast.parse(text).body:
        for name in _defined_names(statement):
            words = frozenset(_words(statement))
            parts[name] = _Definition(ast.get_source_segment(text, statement) or "", words)
    return parts


def _words(statement: ast.stmt) -> Iterator[str]:
    """Yield the names in a statement, except those of other model classes in attributes."""
    inside = statement.body if isinstance(statement, ast.ClassDef) else [statement]
    for part in inside:
        if not {"_init_weights", "_can_record_outputs"} & set(_defined_names(part)):
            yield from (x.id for x in ast.walk(part) if isinstance(x, ast.Name))
    for base in statement.bases if isinstance(statement, ast.ClassDef) else ():
        yield from (x.id for x in ast.walk(base) if isinstance(x, ast.Name))


def _defined_names(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement defines."""
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        yield statement.name
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _bases(cls: type) -> list[type]:
    """Return the class and those of its base classes that are models."""
    return [x for x in cls.__mro__ if issubclass(x, PreTrainedModel) and x is not PreTrainedModel]


def _reachable_definitions(cls: type) -> tuple[set[tuple[str, str]], bool]:
    """Follow the names in a model class and its bases to the definitions that they refer to."""
    reached: set[tuple[str, str]] = set()
    models, pending = False, [(x.__module__, x.__name__) for x in _bases(cls)]
    while pending:
        module_name, name = pending.pop()
        definitions = _definitions(module_name)
        if definitions is None or (module_name, name) in reached:
            continue
        if name not in definitions:  # it is imported from another module
            value = getattr(sys.modules[module_name], name, None)
            home_module = getattr(value, "__module__", None)
            if (
                isinstance(value, ModuleType)
                or not isinstance(home_module, str)
                or home_module == module_name
            ):
                continue
            if ".models." in home_module:
                pending.append((home_module, getattr(value, "__name__", name)))
            continue
        value = getattr(sys.modules[module_name], name, None)
        if (
            isinstance(value, type)
            and issubclass(value, PreTrainedModel)
            and not issubclass(cls, value)
        ):
            models = True
            continue
        reached.add((module_name, name))
        pending += [(module_name, word) for word in definitions[name].words]
    return reached, models


def require_supported(cls: type) -> None:
    """Refuse a class whose attention cannot run here; warn once of an ignored option."""
    usage = attention_usage(cls)
    if usage is None:
        return
    if usage.by_name:
        raise ArgumentError(
            _refusal_message(cls, "chooses its attention class from a table of names")
        )
    if usage.interface:
        return
    if usage.masks and not usage.models:
        raise ArgumentError(_refusal_message(cls, "computes its attention itself"))
    marker = object()  # if several threads come at once, only one of them warns
    if not usage.models and _warned.setdefault(cls.__name__, marker) is marker:
        warnings.warn(
            f"{cls.__name__} never calls the attention function of transformers' "
            "AttentionInterface: its results are those of "
            'attn_implementation="eager", and nothing in it runs through regard or can be '
            "recorded",
            stacklevel=4,
        )


def _refusal_message(cls: type, why: str) -> str:
    """Return the message that refuses a model class."""
    others = ["eager", *(["sdpa"] if getattr(cls, "_supports_sdpa", False) else [])]
    return (
        f"{cls.__name__} {why} and does not take it from transformers' AttentionInterface, so "
        'attn_implementation="regard" '
        f"would have no effect; use {' or '.join(map(repr, others))}. The architectures that can "
        "run through regard are listed "
        "by regard.integrations.transformers.architectures(), and tested in docs/transformers.md"
    )


def ways_to_record(model: nn.Module) -> str:
    """Return how the attention of a model can be recorded, as far as its classes allow.

    >>> from transformers import MptConfig, MptModel
    >>> ways_to_record(MptModel(MptConfig(d_model=8, n_heads=2, n_layers=1, vocab_size=8)))
    'load the checkpoint with regard.load'
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    classes: set[type] = set(map(type, parts))
    usages = [usage for cls in classes if (usage := attention_usage(cls)) is not None]
    ways = []
    if any(getattr(cls, "_supports_sdpa", False) for cls in classes):
        ways.append('load it with attn_implementation="sdpa"')
    if any(usage.interface and not usage.by_name for usage in usages):
        ways.append(
            'call model.set_attn_implementation("regard"), after '
            "import regard.integrations.transformers"
        )
    if getattr(getattr(model, "config", None), "model_type", None) in CONFIGS:
        ways.append("load the checkpoint with regard.load")
    return ", or ".join(ways) or (
        "its own code computes the attention whatever attn_implementation says, and cannot be "
        "recorded; record a model of another architecture, or call F.scaled_dot_product_attention "
        "in a copy of its code"
    )


@functools.cache
def architectures() -> tuple[str, ...]:
    """List the model types of the installed transformers that can run through regard.

    These are the types with a module that takes its attention from `AttentionInterface`.

    Returns:
        Their names, sorted.

    >>> "llama" in architectures(), "mpt" in architectures()
    (True, False)
    """
    names = {
        *modeling_auto.MODEL_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    root = Path(transformers.__file__).parent / "models"
    supported_folders = {
        path.parent.name
        for path in root.glob("*/modeling_*.py")
        if INTERFACE_NAME in path.read_text("utf-8")
    }
    folder = transformers.models.auto.configuration_auto.model_type_to_module_name
    return tuple(sorted(name for name in names if folder(name) in supported_folders))


def accepts_bool_masks(config: object) -> bool:
    """Whether a configuration's class accepts bool masks, as it does if it supports sdpa."""
    module = type(config).__module__.replace(".configuration_", ".modeling_")
    classes = vars(sys.modules[module]).values() if module in sys.modules else ()
    models = [
        x
        for x in classes
        if isinstance(x, type) and issubclass(x, PreTrainedModel) and x.__module__ == module
    ]
    return bool(models) and all(getattr(x, "_supports_sdpa", False) for x in models)


def _configs_switched(config: Any, implementation: object) -> Iterator[object]:
    """Yield the configurations for which `set_attn_implementation` selects "regard"."""
    by_key = implementation if isinstance(implementation, dict) else None
    if (implementation if by_key is None else by_key.get("")) == IMPLEMENTATION:
        yield config
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None:
            yield from _configs_switched(
                part, implementation if by_key is None else by_key.get(key)
            )


def wrap_model_methods() -> None:
    """Check a model class when it is built with, or switched to, "regard".

    Two methods of `PreTrainedModel` are wrapped, because transformers has no hook.
    """
    if hasattr(PreTrainedModel.set_attn_implementation, "__wrapped__"):
        return
    get_correct, set_implementation = (
        PreTrainedModel.get_correct_attn_implementation,
        PreTrainedModel.set_attn_implementation,
    )

    @functools.wraps(get_correct)
    def get_correct_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> str:
        implementation: str = get_correct(self, *args, **kwargs)
        if implementation == IMPLEMENTATION:
            require_supported(type(self))
        return implementation

    @functools.wraps(set_implementation)
    def set_attn_implementation(
        self: Any, attn_implementation: Any, *args: Any, **kwargs: Any
    ) -> None:
        selected_ids = [
            id(config) for config in _configs_switched(self.config, attn_implementation)
        ]
        for model in self.modules():
            is_model = isinstance(model, PreTrainedModel)
            if is_model and (
                attn_implementation == IMPLEMENTATION or id(model.config) in selected_ids
            ):
                require_supported(type(model))
        set_implementation(self, attn_implementation, *args, **kwargs)

    for method in (get_correct_attn_implementation, set_attn_implementation):
        setattr(PreTrainedModel, method.__name__, method)


class AcceleratedModel:
    """A model of transformers that `accelerate` has changed; `remove()`, or the end of a `with`
    block, puts everything back.

    Args:
        linears: the layers whose products of few rows run through `regard.ops.tokenwise`.
        attention: the attention implementation that the model had before.
    """

    def __init__(self, model: PreTrainedModel, linears: list[nn.Linear], attention: str) -> None:
        self.model, self.linears, self._attention = model, linears, attention

    def remove(self) -> None:
        """Give the model back its attention and its layers; a second call does nothing."""
        if self.linears or self._attention != self.model.config._attn_implementation:
            self.model.set_attn_implementation(self._attention)
        for layer in self.linears:
            if layer.__class__ is Linear:
                object.__setattr__(layer, "__class__", nn.Linear)
        self.linears = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.remove()


def accelerate(model: PreTrainedModel) -> AcceleratedModel:
    """Run the attention of a model of transformers by `regard.attend`, and its linear layers by
    `regard.nn.weights.linear`.

    A decoded token spends most of its time in linear layers. On a CPU, their products of a few rows
    read the weights at memory bandwidth in every dtype (`regard.ops.tokenwise`), and fp16 products
    of many rows are computed in fp32. Parameters, names, hooks and `state_dict` stay as they are;
    the results stay the same up to rounding.

    Only layers whose class is exactly `nn.Linear` change; quantized layers and layers of adapters
    keep theirs. For long texts pass a `PreallocatedCache` to `generate`, so that a step copies no
    old keys.

    Args:
        model: the model, which is changed in place.

    Returns:
        A handle: `handle.remove()` puts everything back, and so does the end of `with handle:`.

    Raises:
        ArgumentTypeError: the model is not a model of transformers.
        ArgumentError: the model computes its attention itself, so that it cannot be replaced.

    >>> import torch, transformers
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
    ...     num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    ... )
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> with accelerate(model) as accelerated:
    ...     ids = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False)
    ...     ids.shape, len(accelerated.linears), type(model.lm_head).__module__
    (torch.Size([1, 5]), 15, 'regard.nn.weights')
    >>> type(model.lm_head).__module__
    'torch.nn.modules.linear'
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentTypeError(
            f"model is {type(model).__name__}; it must be a model of transformers; "
            "regard.accelerate(model) serves every other module"
        )
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    linears = [x for x in model.modules() if type(x) is nn.Linear]
    for layer in linears:
        layer.__class__ = Linear  # the layer keeps its parameters, hooks and name
    return AcceleratedModel(model, linears, before)
