"""Measure all mechanisms of the catalogue and write the page that compares them.

python -m tests.compare.catalogue_table quality    # train the most used, for hours
python -m tests.compare.catalogue_table speed      # time one layer of each, for minutes
    python -m tests.compare.catalogue_table speed gqa  # time some anew, beside those kept
python -m tests.compare.catalogue_table page       # write the tables of docs/mechanisms.md
"""

from __future__ import annotations

import sys

from tests.compare.catalogue_table import page, quality, speed


def report(line: str) -> None:
    """Print a line of progress."""
    print(line, flush=True)


def main(words: list[str]) -> None:
    """The command."""
    if words == ["quality"]:
        quality.run(report)
    elif words[:1] == ["speed"]:
        speed.run(words[1:], report)
    elif words == ["page"]:
        page.write()
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
