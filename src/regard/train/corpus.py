"""Texts to train on: a UTF-8 file, a folder, or English that every Python has on its disk.

The default, "python-docs", is what `pydoc` prints for the language's topics, and the docstrings of
the standard library. The library's files are parsed, never imported. Each version of Python has its
own text.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from regard.errors import ArgumentError, FileError
from regard.files.regular_files import read_bytes
from regard.process_state import ignore_warnings

LONGEST = 1 << 33
"""Bytes of a text file, at most: a text is read into memory."""
DEFAULT = "python-docs"
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
"""What a folder is searched for."""

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """One text and where it comes from.

    >>> Document("note", "Attention!").name
    'note'
    """

    name: str
    text: str


def read(source: str | Path = DEFAULT) -> list[Document]:
    """The documents of a file, of a folder (its text files, sorted by path), or of "python-docs".

    Raises:
        FileError: nothing there, no text file in the folder, no text at all, or bytes that are not
            UTF-8 (with the offset).
    """
    if str(source) == DEFAULT:
        return list(python_docs())
    path = Path(source)
    if path.is_dir():
        files = sorted(
            (f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file()),
            key=lambda f: f.as_posix(),
        )
        if not files:
            kinds = " ".join(SUFFIXES)
            raise FileError(f"{path}: no text file in this folder; looked for {kinds}")
        documents = [Document(f.relative_to(path).as_posix(), _read_utf8(f)) for f in files]
    else:
        documents = [Document(path.name, _read_utf8(path))]
    documents = [d for d in documents if d.text.strip()]
    if not documents:
        raise FileError(
            f"{path}: there is no text in it; give a UTF-8 file or folder, or {DEFAULT!r}"
        )
    return documents


def python_docs() -> Iterator[Document]:
    """The topics of `pydoc`, then the standard library's docstrings, a document per module.

    >>> next(python_docs()).name
    'topics/assert'
    """
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        yield Document(f"topics/{topic}", text.strip())
    root = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    for file in _library(root):
        texts = [text for text in dict.fromkeys(_docstrings(file)) if text not in seen]
        seen.update(texts)
        if texts:
            name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            yield Document(f"library/{name}", "\n\n".join([name, *texts]))


def split(
    documents: Sequence[Document], share: float = 0.05
) -> tuple[list[Document], list[Document]]:
    """Documents for training, and about `share` of them for validation, by a hash of the text.

    Few documents may leave one side empty; then the last `share` of every text, cut at a line, is
    the validation.

    Raises:
        ArgumentError: `share` is not in (0, 0.5], or there are no documents.
    """
    if not 0 < share <= 0.5:
        raise ArgumentError(f"share is {share}; the part kept for validation must be in (0, 0.5]")
    if not documents:
        raise ArgumentError("documents is empty; there is nothing to split")
    held = [_fraction(d.text) < share for d in documents]
    if any(held) and not all(held):
        train = [d for d, h in zip(documents, held, strict=True) if not h]
        return train, [d for d, h in zip(documents, held, strict=True) if h]
    pairs = [_cut_tail(d, share) for d in documents]
    return [head for head, _ in pairs if head.text], [tail for _, tail in pairs if tail.text]


def _fraction(text: str) -> float:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _cut_tail(document: Document, share: float) -> tuple[Document, Document]:
    at = max(1, int(len(document.text) * (1 - share)))
    line = document.text.rfind("\n", 0, at) + 1
    at = line if line > at // 2 else at  # a text of one long line is cut inside it
    name = document.name
    return Document(name, document.text[:at]), Document(f"{name} (end)", document.text[at:])


def _library(root: Path) -> Iterator[Path]:
    files = (f for f in root.rglob("*.py") if not _SKIPPED & set(f.relative_to(root).parts))
    return iter(sorted(files, key=lambda f: f.relative_to(root).as_posix()))


def _docstrings(file: Path) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        with ignore_warnings():  # old escapes in the library's own strings are not our concern
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return  # the library holds a few files that are bad on purpose
    for node in ast.walk(tree):
        if isinstance(node, documented):
            text = ast.get_docstring(node)
            if text and _is_unicode(text):
                yield text


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _read_utf8(path: Path) -> str:
    try:
        return read_bytes(path, LONGEST).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path}: not UTF-8 at byte {error.start} (0x{error.object[error.start]:02X}); "
            "convert it, e.g. with iconv"
        ) from error
    except FileError as error:
        raise FileError(f"{error}; give a file, a folder or {DEFAULT!r}") from error
