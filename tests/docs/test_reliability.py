"""docs/reliability.md: its tables are those that the stored figures make."""

from __future__ import annotations

import pytest

from docs import reliability_page


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_tables_are_those_of_the_figures(language: str) -> None:
    text = reliability_page.PAGES[language].read_text("utf-8")
    assert reliability_page.filled(text, chinese=language == "zh") == text
    assert len(reliability_page.PART.findall(text)) == len(reliability_page.TABLES)
    found = reliability_page.read("faults")
    assert found is not None
    assert all(row["wrong"] == row["torn"] == 0 for row in found["rows"])


def test_every_fault_was_looked_for_in_named_versions() -> None:
    facts = reliability_page.read("dependencies")
    assert facts is not None
    assert set(facts["found"]) == set(reliability_page.LEDGER)
    assert {x.package for x in reliability_page.LEDGER.values()} == set(facts["versions"])
    assert reliability_page.LEDGER["values-are-cut"].probe() == facts["found"]["values-are-cut"]


def test_what_was_not_measured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliability_page, "read", lambda _: None)
    measured = {name: make for name, make in reliability_page.TABLES.items() if name != "ledger"}
    assert {make(chinese=False) for make in measured.values()} == {"Not measured."}
    assert {make(chinese=True) for make in measured.values()} == {"未测量。"}
    assert "not looked for" in reliability_page.ledger(chinese=False)
