"""Hooks of the build: the compiled CPU kernels in a wheel, and the description on a package index.

A wheel holds the libraries that the C++ compiler of this machine made of
`src/regard/ops/cpu/csrc` for this processor, and those for all processors if cibuildwheel makes it
to be published. Where there is no compiler, or where it fails, the wheel is one of pure
Python, for every machine, and torch computes what the kernels would have computed.

README.md links to files of the repository, and an index has no such files. A relative link becomes
its text and the path of the file, which is in the source distribution; a picture that is a file is
left out; links to addresses stay.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SOURCES = "src/regard/ops/cpu/csrc"
LIBRARIES = "regard/ops/cpu/libraries"


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg, unused-ignore]
    """Compiles the CPU kernels: into the wheel, or into the source tree of an editable install."""

    folder: Path | None = None
    """Where the libraries are compiled before they are put into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say what that makes of the wheel.

        Args:
            version: "standard" or "editable".
            build_data: what hatch knows of the wheel, which is changed.
        """
        build = _module(Path(self.root) / SOURCES / "build.py")
        published = bool(os.environ.get("CIBUILDWHEEL"))
        editable = version == "editable"
        if not editable:
            self.folder = Path(tempfile.mkdtemp())
        try:
            libraries = build.build(every=published, into=self.folder or build.LIBRARIES)
        except (build.NoCompilerError, build.CompilationError, OSError) as error:
            if published:
                raise
            self.app.display_warning(
                "regard is built without compiled CPU kernels, so that torch computes what they "
                f"would compute faster: {error}"
            )
            return
        if not editable:
            platform = self.build_config.builder.get_best_matching_tag().rpartition("-")[2]
            build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}
            build_data["force_include"] |= {str(x): f"{LIBRARIES}/{x.name}" for x in libraries}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the folder in which the libraries were compiled."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _module(path: Path) -> Any:
    """Return a Python file as a module, without the package that it is part of."""
    spec = importlib.util.spec_from_file_location(f"regard_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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

    text = re.sub(r"^<picture>.*</picture>\n\n?", "", text, flags=re.MULTILINE)
    text = re.sub(r"^!\[[^\]]*\]\((?!\w+:)[^)]+\)\n\n?", "", text, flags=re.MULTILINE)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)\s]+)\)", plain, text)
