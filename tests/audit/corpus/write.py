"""Audit the corpus, and write what was found into docs/audit.md: python -m
tests.audit.corpus.write.
"""

from __future__ import annotations

from pathlib import Path

from regard.inspect import audit
from tests.audit.corpus.table import RIGHT, WRONG, Entry

DOCUMENT = "docs/audit.md"
BEGIN, END = "<!-- corpus: begin -->", "<!-- corpus: end -->"


def rows() -> str:
    """The table, each entry under the name that it must be given."""
    lines = [
        f"{len(WRONG)} faulty implementations, each found under its name alone:",
        "",
        "| form | fault | name |",
        "|---|---|---|",
        *(f"| {entry.style} | {entry.what} | `{entry.fault}` |" for entry in WRONG),
        "",
        (
            f"{len(RIGHT)} right ones, for which every check that applies was made and nothing was "
            "found:"
        ),
        "",
        "| form | what |",
        "|---|---|",
        *(f"| {entry.style} | {entry.what} |" for entry in RIGHT),
    ]
    return "\n".join(lines)


def between(text: str) -> str:
    """What stands between the marks."""
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    """Audit every entry; write the table only if each has its name."""
    wrong: list[str] = []

    def check(entry: Entry) -> None:
        names = audit(entry.target, **entry.given).names
        if names != ((entry.fault,) if entry.fault else ()):
            wrong.append(f"{entry.style}, {entry.what}: {names} instead of {entry.fault}")

    for entry in (*WRONG, *RIGHT):
        check(entry)
    if wrong:
        raise SystemExit("\n".join(wrong))
    path = Path(DOCUMENT)
    text = path.read_text()
    before, _, after = text.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{rows()}\n\n{END}{after.partition(END)[2]}")


if __name__ == "__main__":
    main()
