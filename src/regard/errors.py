"""What regard raises. One root, `RegardError`; each kind is also the Python built-in that callers
expect to catch.

A message says what went wrong, where (argument, index, file), what it got, what is allowed, and the
next step.
"""


class RegardError(Exception):
    """Root of every error that regard raises on purpose."""


class ArgumentError(RegardError, ValueError):
    """An argument has a value or shape that is not allowed."""


class ArgumentTypeError(RegardError, TypeError):
    """An argument has a type or dtype that is not allowed."""


class KernelRefusal(RegardError, NotImplementedError):
    """An explicitly chosen kernel cannot run this call; the message lists its reasons."""


class FileError(RegardError, OSError):
    """A file or folder is missing, damaged, or not what it should be."""


class ParallelError(RegardError, RuntimeError):
    """A message between ranks failed: the error names this rank, the call and its step."""
