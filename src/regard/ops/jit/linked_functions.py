"""Functions that only other compiled functions call: Numba types and translates them, and LLVM
optimizes them as parts of the code that calls them.

An ordinary function of Numba gets machine code of its own, with two wrappers for calls from Python
and C, and is optimized in full, although its callers contain it and are optimized in full again.
For the functions of this package that was half of the time of a compilation: 24.2 instead of 11 s
for a decoding step.

A linked function can still be called from Python, in a test for example; it is then compiled as an
ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.dispatcher import _FunctionCompiler  # type: ignore[attr-defined, unused-ignore]
from numba.core.registry import CPUDispatcher


class _LinkedLibrary(JITCodeLibrary):  # type: ignore[misc, unused-ignore]
    """The translated code of a function, without optimization and machine code."""

    def _optimize_final_module(self) -> None:
        """Leave the code to the functions that contain it."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _LinkedPipeline(CompilerBase):  # type: ignore[misc, unused-ignore]
    """Numba's compiler, which writes to a `_LinkedLibrary`."""

    def define_pipelines(self) -> list[Any]:
        """Return the passes of Numba, which compile into a library of our own."""
        state = self.state
        state.library = _LinkedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return [DefaultPassBuilder.define_nopython_pipeline(state)]


class _LinkedCompiler(_FunctionCompiler):  # type: ignore[misc, unused-ignore]
    """Compiles a function for its callers alone."""

    def _customize_flags(self, flags: Any) -> Any:
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        return flags

    def _compile_core(self, args: Any, return_type: Any) -> Any:
        result = super()._compile_core(args, return_type)
        # what Numba takes for the address of the code is only the key by which callers find it
        result = result._replace(entry_point=object())
        context = self.targetdescr.target_context
        context.insert_user_function(result.entry_point, result.fndesc, [result.library])
        return result


class LinkedFunction(CPUDispatcher):  # type: ignore[misc, unused-ignore]
    """A function that is compiled as a part of its callers.

    Args:
        function: the Python function.
        options: the options of `numba.njit`.
        from_python: returns the ordinary compiled function, for calls from Python.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: dict[str, Any],
        from_python: Callable[[], Callable[..., Any]],
    ) -> None:
        options = {"nopython": True, **options}
        super().__init__(function, targetoptions=options, pipeline_class=_LinkedPipeline)
        self._compiler = _LinkedCompiler(
            function, self.targetdescr, options, self.locals, _LinkedPipeline
        )
        self._from_python = from_python

    @cached_property
    def ordinary(self) -> Callable[..., Any]:
        """The compiled function with machine code of its own, for calls from Python."""
        return self._from_python()

    def add_overload(self, result: Any) -> None:
        """Remember a result for callers that are compiled; calls from Python do not find it."""
        self.overloads[tuple(result.signature.args)] = result

    def _compile_for_args(self, *args: Any, **kws: Any) -> Callable[..., Any]:
        """Return what a call from Python runs."""
        return self.ordinary
