"""What a file that is no safetensors file seems to be instead, and the next step."""

from __future__ import annotations

from pathlib import Path

from regard.errors import FileError

PICKLE = "which is never opened; convert it to safetensors elsewhere"
_BEGINNINGS = {
    b"version https://git-lfs": "a Git LFS pointer; fetch the file itself with `git lfs pull`",
    b"<": "a web page, not the file; download it again",
    b"PK": f"a zip or a PyTorch pickle, {PICKLE}",
    b"\x80": f"a pickle, {PICKLE}",
    b"\x1f\x8b": "a gzip archive; unpack it with `gunzip`",
    b"BZh": "a bzip2 archive; unpack it with `bunzip2`",
    b"\x28\xb5\x2f\xfd": "a zstandard archive; unpack it with `unzstd`",
    b"\xfd7zXZ": "an xz archive; unpack it with `unxz`",
    b"GGUF": "a GGUF file of llama.cpp; get the safetensors of the model, before its quantisation",
    b"\x89HDF": "an HDF5 file of Keras; convert it to safetensors elsewhere",
    b"\x93NUMPY": "a NumPy array; convert it to safetensors elsewhere",
    b"{": "JSON text, not the file: an error message of a server, or an index; download it again",
}
"""First bytes of a file -> what it is. A safetensors file begins with the length of its header, and
then {.
"""

AGAIN = "download it again, or write it again with safetensors"
"""The next step where a file is damaged."""


def instead(head: bytes) -> str:
    """What the first bytes of a file say it is, with the next step; "" where they say nothing.

    >>> instead(b"PK and so on")
    'it is a zip or a PyTorch pickle, which is never opened; convert it to safetensors elsewhere'
    """
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return next(
        (f"it is {kind}" for sign, kind in _BEGINNINGS.items() if start.startswith(sign)), ""
    )


def refused(path: Path, reason: str, step: str = f"it is damaged; {AGAIN}") -> FileError:
    """The error of a file that is no safetensors file: what is wrong with it, and what to do.

    >>> print(refused(Path("a"), "its header is no JSON", "write it again"))
    a is not a whole safetensors file (its header is no JSON): write it again
    """
    return FileError(f"{path} is not a whole safetensors file ({reason}): {step}")
