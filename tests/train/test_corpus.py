"""Texts: files, folders, the default corpus, and the split."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from regard.errors import ArgumentError, FileError
from regard.train import TextDocument, load_documents, split_documents


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, text in {"b/1.md": "one", "a.txt": "zwei", "b.py": "x = 3", "c.bin": "no"}.items():
        (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "empty.txt").write_text(" \n", "utf-8")
    assert [(d.name, d.text) for d in load_documents(tmp_path)] == [
        ("a.txt", "zwei"),
        ("b.py", "x = 3"),
        ("b/1.md", "one"),
    ]


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "x.weird"
    file.write_bytes(b"\xef\xbb\xbfh\xc3\xa9")
    assert load_documents(str(file)) == [TextDocument("x.weird", "hé")]


def test_bad_bytes_are_told_with_path_and_offset(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"fine \xe9t\xe9")
    with pytest.raises(FileError, match=r"bad.txt: not UTF-8 at byte 5 \(0xE9\); convert it"):
        load_documents(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "none is missing; give a file, a folder or 'python"),
        ("folder", "folder: this folder has no text file; names of text files end in .txt .md"),
        ("blank.txt", "blank.txt: it contains no text; give a UTF-8 file"),
    ],
)
def test_nothing_to_read(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "blank.txt").write_text("\n\n", "utf-8")
    with pytest.raises(FileError, match=message):
        load_documents(tmp_path / name)


@pytest.mark.full
def test_the_default_corpus_is_large_english_and_imports_nothing() -> None:
    before = set(sys.modules)
    documents = load_documents()
    new = {name.split(".")[0] for name in set(sys.modules) - before}
    assert new <= {"pydoc_data", "encodings"}  # the codecs that old files name
    names = [d.name for d in documents]
    assert len(set(names)) == len(names)
    by_name = {d.name: d.text for d in documents}
    assert "assert" in by_name["topics/assert"]
    assert by_name["library/json"].startswith("json\n\nJSON (JavaScript Object Notation)")
    assert not any("test" in name.split(".") for name in names)
    assert sum(len(d.text) for d in documents) > 1_000_000
    docstrings = [p for d in documents for p in [d.text] if d.name.startswith("library/")]
    assert len(docstrings) > 300
    _, held = split_documents(documents)
    share = sum(len(d.text) for d in held) / sum(len(d.text) for d in documents)
    assert 0.02 < share < 0.10


words = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1)


@given(words, st.randoms(use_true_random=False))
def test_the_split_is_a_partition_that_order_does_not_change(
    texts: list[str], draw: object
) -> None:
    documents = [TextDocument(str(i), t) for i, t in enumerate(dict.fromkeys(texts))]
    train, held = split_documents(documents, 0.3)
    assume(not any(d.name.endswith("(end)") for d in held))  # cut inside the texts: the next test
    assert sorted(d.name for d in train + held) == sorted(d.name for d in documents)
    shuffled = list(documents)
    draw.shuffle(shuffled)  # type: ignore[attr-defined]
    again_train, again_held = split_documents(shuffled, 0.3)
    assert set(again_train) == set(train)
    assert set(again_held) == set(held)


def test_one_document_is_cut_at_a_line() -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    train, held = split_documents([TextDocument("one", text)])
    assert train[0].text + held[0].text == text
    assert train[0].text.endswith("\n")
    assert 0.03 < len(held[0].text) / len(text) < 0.08
    one_line = split_documents([TextDocument("one", "x" * 100)])
    assert [len(part[0].text) for part in one_line] == [95, 5]


def test_bad_splits() -> None:
    for share in (0, 0.6, float("nan")):
        with pytest.raises(ArgumentError, match=r"must be in \(0, 0.5\]"):
            split_documents([TextDocument("a", "b")], share)
    with pytest.raises(ArgumentError, match="documents is empty"):
        split_documents([])
