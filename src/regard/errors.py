"""The exceptions that regard raises; each is also a built-in one, and carries what its message says
(argument, file, allowed values) as fields.
"""


class RegardError(Exception):
    """Base class of all errors that regard raises on purpose.

    Args:
        message: a complete English sentence; without it, it is made of the fields.
        argument: the name of the wrong argument.
        value: what was passed.
        allowed: what is allowed, in words.
        next_step: what to do, in words.

    >>> error = ArgumentError(argument="rank", value=9, allowed="at most 2")
    >>> str(error), error.argument
    ('rank is 9; it must be at most 2', 'rank')
    """

    argument: str | None
    value: object
    allowed: str | None
    next_step: str | None

    def __init__(
        self,
        message: str | None = None,
        /,
        *,
        argument: str | None = None,
        value: object = None,
        allowed: str | None = None,
        next_step: str | None = None,
    ) -> None:
        if message is None:
            message = f"{argument} is {value!r}"
            message += f"; it must be {allowed}" if allowed else ""
            message += f": {next_step}" if next_step else ""
        self.args = (message,)  # as `super().__init__(message)`, which torch.compile cannot trace
        self.argument, self.value = argument, value
        self.allowed, self.next_step = allowed, next_step


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


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the system refused memory to Python, numpy or torch (CPU or GPU)."""
    message = str(error)
    torch_says = "can't allocate memory" in message or "out of memory" in message
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and torch_says)
