"""Texts to train on: a UTF-8 file, a folder of text files, or the documentation of Python.

The default, "python-docs", consists of the language topics that `pydoc` prints and of the
docstrings of the standard library. The library's files are parsed, never imported. Each version of
Python has its own text.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from regard.errors import ArgumentError, FileError
from regard.files.reading import read_bytes
from regard.process_state import ignore_warnings

MAX_BYTES = 1 << 33
"""The largest text file in bytes; a text is read into memory."""
DEFAULT_SOURCE = "python-docs"
SUFFIXES = (
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".html",
    ".csv",
    ".json",
    ".tex",
    ".toml",
    ".c",
    ".h",
    ".js",
)
"""The endings of the files that are read from a folder."""

_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "__pycache__",
}


@dataclass(frozen=True)
class TextDocument:
    """A text with a name that says where it comes from.

    Args:
        name: the path of the file, or the name of a topic or module of Python.

    >>> TextDocument("note", "Attention!").name
    'note'
    """

    name: str
    text: str


def load_documents(source: str | Path = DEFAULT_SOURCE) -> list[TextDocument]:
    """Read the documents of a file or a folder, or of Python's documentation.

    Args:
        source: a text file; a folder, whose text files are sorted by path; or "python-docs".

    Returns:
        The documents that are not empty.

    Raises:
        FileError: the path does not exist, the folder has no text file, there is no text, or a file
            is not UTF-8 (with the offset of the first wrong byte).
    """
    if str(source) == DEFAULT_SOURCE:
        return list(python_documentation())
    path = Path(source)
    if path.is_dir():
        files = sorted(
            (f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file()),
            key=lambda f: f.as_posix(),
        )
        if not files:
            suffixes = " ".join(SUFFIXES)
            raise FileError(
                f"{path}: this folder has no text file; names of text files end in {suffixes}"
            )
        documents = [TextDocument(f.relative_to(path).as_posix(), _read_utf8(f)) for f in files]
    else:
        documents = [TextDocument(path.name, _read_utf8(path))]
    documents = [d for d in documents if d.text.strip()]
    if not documents:
        raise FileError(
            f"{path}: it contains no text; give a UTF-8 file or folder, or {DEFAULT_SOURCE!r}"
        )
    return documents


def python_documentation() -> Iterator[TextDocument]:
    """Yield the topics of `pydoc`, then the docstrings of each module of the standard library.

    >>> next(python_documentation()).name
    'topics/assert'
    """
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        yield TextDocument(f"topics/{topic}", text.strip())
    root = Path(sysconfig.get_path("stdlib"))
    known_texts: set[str] = set()
    for file in _library_files(root):
        texts = [text for text in dict.fromkeys(_docstrings(file)) if text not in known_texts]
        known_texts.update(texts)
        if texts:
            name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            yield TextDocument(f"library/{name}", "\n\n".join([name, *texts]))


def split_documents(
    documents: Sequence[TextDocument], share: float = 0.05
) -> tuple[list[TextDocument], list[TextDocument]]:
    """Split documents into training and validation by a hash of their text.

    With few documents one side may be empty. In that case the last `share` of every text, cut at a
    line, is the validation part.

    Args:
        documents: at least one document.
        share: the share of documents for validation, in (0, 0.5].

    Returns:
        The training documents and the validation documents.

    Raises:
        ArgumentError: `share` is out of range, or there are no documents.

    >>> training, validation = split_documents([TextDocument("note", "one\\ntwo\\nthree\\n")], 0.4)
    >>> training[0].text, validation[0].text
    ('one\\ntwo\\n', 'three\\n')
    """
    if not 0 < share <= 0.5:
        raise ArgumentError(
            f"share is {share}; the validation share must be in (0, 0.5]", argument="share"
        )
    if not documents:
        raise ArgumentError("documents is empty; there is nothing to split", argument="documents")
    is_validation = [_hash_fraction(d.text) < share for d in documents]
    if any(is_validation) and not all(is_validation):
        train = [
            d for d, validation in zip(documents, is_validation, strict=True) if not validation
        ]
        return train, [
            d for d, validation in zip(documents, is_validation, strict=True) if validation
        ]
    pairs = [_split_tail(d, share) for d in documents]
    return [head for head, _ in pairs if head.text], [tail for _, tail in pairs if tail.text]


def _hash_fraction(text: str) -> float:
    """Return a number in [0, 1) that depends on the sha256 of the text alone."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _split_tail(document: TextDocument, share: float) -> tuple[TextDocument, TextDocument]:
    """Split a document into its beginning and its last `share`, at a line where possible."""
    cut = max(1, int(len(document.text) * (1 - share)))
    line_start = document.text.rfind("\n", 0, cut) + 1
    cut = line_start if line_start > cut // 2 else cut  # one long line is cut in its middle
    name = document.name
    return TextDocument(name, document.text[:cut]), TextDocument(
        f"{name} (end)", document.text[cut:]
    )


def _library_files(root: Path) -> Iterator[Path]:
    """Yield the Python files of the standard library, sorted by path."""
    files = (f for f in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(f.relative_to(root).parts))
    return iter(sorted(files, key=lambda f: f.relative_to(root).as_posix()))


def _docstrings(file: Path) -> Iterator[str]:
    """Yield the docstrings of a Python file; nothing for a file that does not parse."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        with ignore_warnings():  # the standard library has strings with deprecated escapes
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return  # the standard library has a few files with deliberate syntax errors
    for node in ast.walk(tree):
        if isinstance(node, documented):
            text = ast.get_docstring(node)
            if text and _is_unicode(text):
                yield text


def _is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8, that is, has no surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _read_utf8(path: Path) -> str:
    """Return the text of a UTF-8 file, without a byte order mark."""
    try:
        return read_bytes(path, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path}: not UTF-8 at byte {error.start} (0x{error.object[error.start]:02X}); "
            "convert it, for example with iconv"
        ) from error
    except FileError as error:
        raise FileError(f"{error}; give a file, a folder or {DEFAULT_SOURCE!r}") from error
