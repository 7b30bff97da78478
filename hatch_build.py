"""Hook of the build: the project's description on a package index, made from README.md.

README.md links to files of the repository, and an index has no such files. A relative link becomes
its text and the path of the file, which is in the source distribution; a picture that is a file is
left out; links to addresses stay.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class DescriptionHook(MetadataHookInterface):
    """Sets `readme` of the project's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` to README.md without relative links.

        Args:
            metadata: the `[project]` table of pyproject.toml, which is changed.
        """
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_relative_links(text)}


def without_relative_links(text: str) -> str:
    """Replace every relative link of a Markdown text by its text and its path.

    Args:
        text: the page.

    Returns:
        The page without pictures of files; `[results](docs/benchmarks.md)` becomes
        "results (`docs/benchmarks.md`)", and a link whose text is its path becomes the path.
    """

    def plain(match: re.Match[str]) -> str:
        label, target = match.groups()
        return f"`{target}`" if label == target else f"{label} (`{target}`)"

    text = re.sub(r"^!\[[^\]]*\]\((?!\w+:)[^)]+\)\n\n?", "", text, flags=re.MULTILINE)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)\s]+)\)", plain, text)
