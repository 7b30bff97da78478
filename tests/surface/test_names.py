"""What callers rely on beside the names themselves: classes of errors, types, and the glossary."""

from __future__ import annotations

from pathlib import Path

import pytest

import regard
from regard.notation import GLOSSARY, LETTERS, WORDS

PUBLIC = {
    "EMPTY", "__version__", "accelerate", "attend", "attend_partial", "attention_weights",
    "checks", "load", "merge", "plan", "register_kernel", "Partial", "Plan", "Span", "Trace",
    "ArgumentError", "ArgumentTypeError", "FileError", "KernelRefusal", "ParallelError",
    "RegardError", "biases", "caches", "inspect", "linear", "masks", "memory", "models", "nn",
    "parallel", "positions", "scores", "tracing", "view",
}  # fmt: skip
"""What `regard` exports: a change here is one for every user, and goes into CHANGELOG.md."""


def test_the_public_names() -> None:
    assert set(regard.__all__) == PUBLIC <= {*dir(regard)}
    assert all(getattr(regard, name) is not None for name in PUBLIC)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'regard' has no attribute 'atend'"):
        regard.atend  # noqa: B018


def test_errors_are_the_built_ins_that_callers_catch() -> None:
    for name, builtin in (
        ("ArgumentError", ValueError),
        ("ArgumentTypeError", TypeError),
        ("KernelRefusal", NotImplementedError),
        ("FileError", OSError),
    ):
        assert issubclass(getattr(regard, name), (regard.RegardError, builtin))
        assert issubclass(getattr(regard, name), builtin)


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(regard.__file__).parent / "py.typed").exists()


def test_the_glossary() -> None:
    assert set("BHGTSDEM") <= set(LETTERS)
    taps = set("qkvz") | {"scores", "pattern", "out"}
    taps |= {"embed", "norm", "mlp", "residual", "logits"}
    assert set(regard.tracing.TAP_NAMES) == taps
    assert {"pattern", "z", "out", "score", "query", "key", "value"} <= set(WORDS)
    for name, entry in GLOSSARY.items():
        assert entry.meaning.endswith("."), name
        assert name not in entry.synonyms, name


def test_nobody_else_has_our_words_as_synonyms() -> None:
    """One word, one thing: a synonym of one entry is not the name of another."""
    known = {name.lower() for name in WORDS}
    clashes = {
        (name, synonym)
        for name, entry in GLOSSARY.items()
        for synonym in entry.synonyms
        if synonym.lower() in known
    }
    assert clashes == set()
