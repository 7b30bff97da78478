"""The names and sentences of the package stay plain: see `plain_words` for the rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.surface import plain_words


@pytest.mark.full
@pytest.mark.parametrize("rule", plain_words.RULES)
def test_nothing_is_found(rule: str) -> None:
    assert plain_words.RULES[rule]() == []


@pytest.mark.full
def test_the_rules_look_at_everything() -> None:
    assert len(plain_words.sources()) > 300
    assert len(plain_words.public_functions()) > 500
    assert any(name.endswith("attend.attend") for name in plain_words.public_functions())


BAD = '''"""As the name says."""

class Window:
    """Of the keys."""

def told(found: int) -> str:
    """What somebody was told."""
    at = 3
    return f"{found} layers, {at} tokens/s"
'''


def test_each_rule_finds_an_offender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.py"
    path.write_text(BAD)
    (tmp_path / "again.py").write_text(
        '"""Window again, in another module."""\n\nclass Window:\n    pass\n'
    )
    monkeypatch.setattr(plain_words, "PACKAGE", tmp_path)
    assert [line.split(": ")[1] for line in plain_words.poor_docstrings()] == [
        "As the name says.",
        "Of the keys.",
        "What somebody was told.",
    ]
    assert [line.split(": ")[1] for line in plain_words.private_names()] == ["told", "found", "at"]
    assert [line.split(": ")[1] for line in plain_words.private_phrases()] == ["told", "somebody"]
    assert plain_words.counts_without_plural() == ["bad.py:9: {} layers"]
    assert list(plain_words.class_names_used_twice()) == ["Window"]
