"""The exceptions that regard raises; each one is also a built-in exception that callers catch.

A message says what went wrong, where (argument, index, file), which value was passed, what is
allowed, and the next step.
"""


class RegardError(Exception):
    """Base class of all errors that regard raises on purpose."""


class ArgumentError(RegardError, ValueError):
    """An argument has a value or shape that is not allowed."""


class ArgumentTypeError(RegardError, TypeError):
    """An argument has a type or dtype that is not allowed."""


class KernelRefusal(RegardError, NotImplementedError):
    """A kernel that was chosen explicitly cannot run this call; the message lists the reasons."""


class FileError(RegardError, OSError):
    """A file or folder is missing, damaged, or not of the expected kind."""


class ParallelError(RegardError, RuntimeError):
    """A message between ranks failed; the error names this rank, the call and its step."""
