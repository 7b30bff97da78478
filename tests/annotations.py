"""Under pytest, what every public function of regard accepts and returns is held against its
annotations.

The rule: *what a function accepts must fit its annotation*. The check runs after the function has
returned, so a bad argument still meets regard's own error, and a call that succeeds with something
the annotation does not say is a test failure. Names of dimensions bind over all arguments and the
result of one call, as jaxtyping defines.

It works by an import hook: after a module has been executed, its public functions and methods are
replaced by checking wrappers. A compiled graph sees the plain function.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import threading
import types
import typing
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from enum import EnumMeta
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any, NamedTuple

import torch
from beartype import BeartypeConf
from beartype.door import is_bearable
from beartype.roar import BeartypeDecorHintPep3119Exception
from jaxtyping import AbstractArray, jaxtyped

# an int is accepted where a float is annotated, as type checkers do
CONF = BeartypeConf(is_pep484_tower=True)
# typer reads the signatures of commands itself, and the errors are not functions
LEFT_OUT = ("regard.cli", "regard.errors", "regard.__main__")
sampled = False
"""Whether only some calls are looked at; `tests/conftest.py` sets it where not all tests run."""
unresolved: dict[str, str] = {}
"""Functions whose annotations cannot be resolved, with the reason: `tests/surface` wants this
empty.
"""


class AnnotationMismatch(AssertionError):
    """A call succeeded with an argument, or gave a result, that the annotation does not allow."""


def install(package: str) -> None:
    """Check the annotations of every module of the package that is imported from now on."""
    early = [name for name in sys.modules if name.startswith(f"{package}.")]
    if early:
        raise RuntimeError(f"imported before the hook: {early}")
    sys.meta_path.insert(0, _Finder(package))


class _Finder(MetaPathFinder):
    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{self.package}.") or name.startswith(LEFT_OUT):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        for owner, name, function in list(_functions(module)):
            setattr(owner, name, _rewrap(function, module))


def _functions(module: types.ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """The public functions and methods that the module defines, with their owner and name."""
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, types.FunctionType) and not name.startswith("_"):
            yield module, name, value
        elif isinstance(value, type) and not getattr(value, "_is_protocol", False):
            for key, member in vars(value).items():
                if _is_public(key) and _plain(member) is not None:
                    yield value, key, member


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__init__", "__call__")


def _plain(member: Any) -> types.FunctionType | None:
    """The function inside a method, or None where it is something else."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    elif isinstance(member, property):
        member = member.fget
    return member if isinstance(member, types.FunctionType) else None


def _rewrap(member: Any, module: types.ModuleType) -> Any:
    if isinstance(member, (staticmethod, classmethod)):
        return type(member)(checked(member.__func__, module))
    if isinstance(member, property):
        return property(checked(member.fget, module), member.fset, member.fdel, member.__doc__)
    return checked(member, module)


_modules: dict[Any, types.ModuleType] = {}  # a function that is checked -> where it was defined


def checked(function: Callable[..., Any], module: types.ModuleType) -> Callable[..., Any]:
    """The function, with its arguments and result held against its annotations when it returns."""
    if hasattr(function, "__wrapped__") and not hasattr(function, "__signature__"):
        return function  # decorated: the annotations speak of something else
    _modules[function] = module

    # It closes over the function alone: the compiler must be able to trace whatever stands in a
    # closure.
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # a compiled graph, a trace of torch.jit or of torch.fx: sizes are tensors, or proxies
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        if not sampled or _is_due(function):
            _hold(function, args, kwargs, result)
        return result

    # it stands for the function, also where somebody asks in which file a method was written
    wrapper.__code__ = wrapper.__code__.replace(co_filename=function.__code__.co_filename)
    return wrapper


def _hold(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    # a finalizer may run in the middle of a check, whose locks it must not ask for again
    if getattr(_checking, "now", False):
        return
    _checking.now = True
    try:
        _hold_call(function, args, kwargs, result)
    finally:
        _checking.now = False


_checking = threading.local()
"""Whether this thread checks a call now."""


def _hold_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    plan = _plans.get(function) or _plan(function)
    kinds = (type(result), *map(type, args)), tuple(kwargs), tuple(map(type, kwargs.values()))
    if kinds not in plan.fitting:
        if any(issubclass(kind, torch.fx.Proxy) for kind in kinds[0]):
            return  # torch.fx traces the call
        _hold_all(function, plan, args, kwargs, result)
        plan.fitting.add(kinds)
    elif plan.deep:
        values = dict(zip(plan.names, args, strict=False)) | kwargs | {"return": result}
        pairs = [(name, hint, values[name]) for name, hint in plan.deep if name in values]
        _compare(function, pairs, shapes=plan.shapes)


_times: dict[Callable[..., Any], int] = {}
"""How often each function was called, where calls are sampled."""


def _is_due(function: Callable[..., Any]) -> bool:
    """Whether one more call is looked at where calls are sampled: the first ones of each function
    are, and then one in sixteen.
    """
    n = _times[function] = _times.get(function, 0) + 1
    return n <= 64 or n % 16 == 0


class _Plan(NamedTuple):
    """How to check the calls of one function.

    names: its positional parameters. deep: the annotations that the type of a value alone does not
    decide; shapes: whether dimensions stand in them. fitting: types of arguments and results that
    were found to fit all other annotations, so that a call with the same types has to meet the deep
    ones only.
    """

    signature: inspect.Signature
    hints: dict[str, Any]
    names: tuple[str, ...]
    deep: tuple[tuple[str, Any], ...]
    shapes: bool
    fitting: set[Any]


_plans: dict[Any, _Plan] = {}


def _plan(function: Callable[..., Any]) -> _Plan:
    signature, hints = inspect.signature(function), resolve(function, _modules[function])
    kinds = {name: p.kind for name, p in signature.parameters.items()}
    for options in [x for name, x in hints.items() if isinstance(x, dict) and name not in kinds]:
        hints = {**hints, **options}  # the signature shows them one by one
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    deep = [(name, hint) for name, hint in hints.items() if not _by_type(hint)]
    plan = _Plan(
        signature,
        hints,
        tuple(n for n, k in kinds.items() if k is not k.KEYWORD_ONLY and k not in several),
        tuple(deep),
        any(_has_shape(hint) for _, hint in deep),
        set(),
    )
    if any(kinds.get(name) in several for name, _ in deep):
        plan = plan._replace(fitting=_Nothing())  # bound anew at each call
    _plans[function] = plan
    return plan


class _Nothing(set[Any]):
    """The set that stays empty."""

    def add(self, element: Any) -> None:
        """Forget it."""


def _by_type(hint: Any) -> bool:
    """Whether the type of a value decides if it fits: a plain class, or a union of them."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return all(map(_by_type, typing.get_args(hint)))
    if origin is Callable or hint in (None, Any, object):
        return True
    return isinstance(hint, type) and type(hint) in (type, ABCMeta, EnumMeta, type(torch.Tensor))


def _has_shape(hint: Any) -> bool:
    if isinstance(hint, dict):
        return any(map(_has_shape, hint.values()))
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(map(_has_shape, typing.get_args(hint)))


def _hold_all(
    function: Callable[..., Any], plan: _Plan, args: Any, kwargs: Any, result: Any
) -> None:
    if plan.hints:
        values = {**plan.signature.bind(*args, **kwargs).arguments, "return": result}
        _compare(function, _pairs(plan.signature, plan.hints, values), shapes=True)


def _compare(
    function: Callable[..., Any], pairs: Iterable[tuple[str, Any, Any]], *, shapes: bool
) -> None:
    with jaxtyped("context") if shapes else nullcontext():
        for name, hint, x in pairs:
            if not is_bearable(x, hint, conf=CONF):
                where = f"{function.__module__}.{function.__qualname__}"
                raise AnnotationMismatch(f"{where}: {name} is {_say(x)}, not {hint}")


def _pairs(
    signature: inspect.Signature, hints: dict[str, Any], values: dict[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Name, annotation and value of every argument and of the result, where it has an
    annotation.
    """
    for name, value in values.items():
        if name not in hints:
            continue
        hint = hints[name]
        kind = signature.parameters[name].kind if name != "return" else None
        if isinstance(hint, dict):  # **options: Unpack[Options]
            yield from ((key, hint[key], value[key]) for key in value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((name, hint, x) for x in value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            yield from ((key, hint, x) for key, x in value.items())
        else:
            yield name, hint, value


def _say(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"{x.dtype} {tuple(x.shape)}"
    return f"{type(x).__name__} {x!r}"[:200]


def resolve(function: Callable[..., Any], module: types.ModuleType) -> dict[str, Any]:
    """The annotations as types; {} where they cannot be resolved, which `unresolved` records."""
    function = inspect.unwrap(function, stop=lambda each: hasattr(each, "__signature__"))
    # a function that is already checked has the names of this module as its globals
    known = {**_names_for_types(module), **function.__globals__, **vars(module)}
    names = {**_names_of_bases(function, module), **known, "Positions": _positions()}
    owner = getattr(module, function.__qualname__.partition(".")[0], None)
    if isinstance(owner, type):
        names["Self"] = owner
    try:
        hints = typing.get_type_hints(function, names, include_extras=True)
        return {
            name: kept for name, hint in hints.items() if (kept := _checkable(hint)) is not None
        }
    except Exception as problem:  # any reason at all is recorded, and a test wants none
        unresolved[f"{function.__module__}.{function.__qualname__}"] = repr(problem)
        return {}


def _names_of_bases(function: Callable[..., Any], module: types.ModuleType) -> dict[str, Any]:
    """What the fields that a dataclass inherits are annotated with, where its bases were
    written.
    """
    owner = getattr(module, function.__qualname__.partition(".")[0], None)
    if function.__name__ != "__init__" or not dataclasses.is_dataclass(owner):
        return {}
    bases = [base for base in reversed(owner.__mro__) if dataclasses.is_dataclass(base)]
    return {name: x for b in bases for name, x in vars(sys.modules[b.__module__]).items()}


def _checkable(hint: Any) -> Any:
    """The annotation, or None where a value cannot be held against it: a protocol of plain
    methods.
    """
    if typing.get_origin(hint) is typing.Unpack:
        return _fields(typing.get_args(hint)[0])
    try:
        is_bearable(None, hint, conf=CONF)
    except BeartypeDecorHintPep3119Exception:
        return None
    return hint


def _fields(options: Any) -> dict[str, Any]:
    """The annotations of a TypedDict that a function unpacks."""
    module = sys.modules[options.__module__]
    names = {**_names_for_types(module), **vars(module), "Positions": _positions()}
    return typing.get_type_hints(options, names, names)  # its references know their module


@functools.cache
def _names_for_types(module: types.ModuleType) -> dict[str, Any]:
    """The names that the module imports for type checkers only."""
    names: dict[str, Any] = {"Tensor": torch.Tensor, "torch": torch}
    source = inspect.getsource(module)
    # few modules have such a block, and to parse all of them takes a tenth of the collection
    for node in ast.parse(source).body if "TYPE_CHECKING" in source else ():
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            block = ast.Module(body=node.body, type_ignores=[])
            exec(compile(block, module.__name__, "exec"), names)
    return names


@functools.cache
def _positions() -> Any:
    from regard.span import Span  # the alias is a string at run time, because span imports no torch

    return Span | torch.Tensor
