"""Repositories of the Hugging Face hub, downloaded through `huggingface_hub` (extra `hub`) into the
shared cache: safetensors, JSON and tokenizer files by name, never code or pickles.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from regard.errors import ArgumentError, FileError
from regard.files.reading import check_file_name
from regard.models.checkpoint.tensors import INDEX, SINGLE, describe_other_weights, read_index
from regard.models.sentence_settings import MODEL_FILE, TRANSFORMER_FILES
from regard.units import plural
from regard.untrusted_text import short_repr

PREFIX = "hub:"
INSTALL = "python -m pip install 'regard[hub]'"
HUB_HINT = (
    'A repository of the Hugging Face hub is named as "org/name" or "hub:org/name" and downloaded '
    f"where the extra hub is installed: {INSTALL}"
)
"""A hint for error messages about a source that does not exist."""

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "modules.json",
    *TRANSFORMER_FILES,
    MODEL_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""Files to download if present: `regard` reads them, or `regard convert` copies them."""
_FILES = (".bin", ".gguf", ".json", ".pt", ".pth", ".safetensors")
"""Suffixes of names that are treated as files, not as repositories."""
_POOLING = re.compile(r"[0-9]+_(Pooling|Normalize)/config\.json")
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_ID = re.compile(rf"{_PART}/{_PART}")


def repository_of(source: str | Path) -> str | None:
    """Return the repository that a source names, or None if it is a path or another name."""
    if not isinstance(source, str):
        return None
    if source.startswith(PREFIX):
        name = source.removeprefix(PREFIX)
        if not _is_id(name):
            raise FileError(
                f"{short_repr(source)} is not the name of a repository; write hub:org/name, with "
                "letters, digits, '-', '_' and '.'"
            )
        return name
    path = Path(source)
    if not _is_id(source) or path.exists() or path.suffix in _FILES:
        return None
    if path.parent.exists():
        raise FileError(
            f"no model {short_repr(source)}: there is no such folder, and because there is a "
            f"folder {short_repr(str(path.parent))} here it is not treated as a repository of the "
            f"hub, and nothing is downloaded. If you mean the repository, write {PREFIX}{source}"
        )
    return source


def _is_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None and "--" not in name and ".." not in name


def download(
    repository: str,
    revision: str | None = None,
    check: Callable[[Path], None] | None = None,
    *,
    weights: bool = True,
) -> Path:
    """Download the files of a repository that Hugging Face's cache lacks, with a progress bar;
    HF_HUB_OFFLINE and HF_ENDPOINT hold.
    """
    if revision == "":
        raise ArgumentError(
            "revision is empty; it must be a branch, a tag or a commit", argument="revision"
        )
    source = _Repository(repository, revision)
    names = source.names()
    if names is not None:
        _check_listing(repository, names, weights=weights)
    folder = source.fetch(_small_files(names))
    if check is not None:
        check(folder)
    if weights:
        single = SINGLE in names if names is not None else not (folder / INDEX).exists()
        source.fetch([SINGLE] if single or (folder / SINGLE).exists() else _shards(folder))
    return folder


def _small_files(names: Collection[str] | None) -> list[str]:
    """Return the files to download beside the weights; all candidates if the list is not known."""
    if names is None:
        return [*SMALL_FILES, INDEX]
    index = [] if SINGLE in names else [INDEX]
    pooling = sorted(name for name in names if _POOLING.fullmatch(name))
    return [*(name for name in (*SMALL_FILES, *index) if name in names), *pooling]


def _shards(folder: Path) -> list[str]:
    """Return the shards that an index names; only safetensors inside the folder are allowed."""
    shards = sorted(set(read_index(folder).values()))
    for name in shards:
        check_file_name(folder, name)
        if not name.endswith(".safetensors"):
            raise FileError(
                f"{folder / INDEX} refers to {short_repr(name)}, which is not a safetensors file; "
                "nothing else is downloaded"
            )
    return shards


def _check_listing(repository: str, names: Collection[str], *, weights: bool) -> None:
    """Raise for a repository without a config or weights, before anything is downloaded."""
    wanted = [("config.json", {"config.json"})]
    wanted += [(SINGLE, {SINGLE, INDEX})] if weights else []
    for name, either in wanted:
        if not either & set(names):
            other = describe_other_weights(names)
            contents = f"it has {other}" if other else f"it has {plural(len(names), 'other file')}"
            raise FileError(
                f"{repository} on the hub has no {name}, and nothing was downloaded; {contents}"
            )


class _Repository:
    """One repository at one commit; errors of `huggingface_hub` become `FileError`."""

    def __init__(self, name: str, revision: str | None) -> None:
        try:
            from huggingface_hub import HfApi, errors, snapshot_download
        except ImportError as error:
            raise FileError(
                f"no model {short_repr(name)}: it is not a folder here, and it is not downloaded "
                "as a repository, because the extra hub is not installed; install it with "
                f"{INSTALL}"
            ) from error
        self._api, self._errors, self._download = HfApi(), errors, snapshot_download
        self._name, self._revision = name, revision
        self._offline = False
        self._commit: str | None = None

    def names(self) -> set[str] | None:
        """Return the names of its files, from the server; None if offline."""
        try:
            info = self._api.model_info(self._name, revision=self._revision)
        except self._errors.OfflineModeIsEnabled:
            self._offline = True
            return None
        except Exception as error:  # of the library, of its HTTP client, or of the system
            raise self._as_file_error(error) from error
        self._commit = str(info.sha)
        return {str(file.rfilename) for file in info.siblings or ()}

    def fetch(self, names: Sequence[str]) -> Path:
        """Download these files, all of one commit, and return their folder in the cache."""
        try:
            folder = Path(
                self._download(
                    self._name,
                    # by name the first time, so that the cache records its commit
                    revision=self._revision,
                    allow_patterns=[glob.escape(name) for name in names],
                    local_files_only=self._offline,
                )
            )
        except Exception as error:  # as above
            raise self._as_file_error(error) from error
        if self._commit not in (None, folder.name):
            raise FileError(
                f"{self._name} on the hub changed while it was downloaded; load it again"
            )
        self._revision = self._commit = folder.name
        return folder

    def _as_file_error(self, error: Exception) -> FileError:
        """Return an error with the cause, by its kind, and the next step."""
        known = self._errors
        version = (
            "its main branch"
            if self._revision is None
            else f"revision {short_repr(self._revision)}"
        )
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = short_repr(str(error).strip().split("\n")[0])
        if isinstance(error, known.GatedRepoError):
            message = (
                "may be read only by those who have accepted its conditions; accept them there "
                "and log in with `hf auth login`"
            )
        elif isinstance(error, known.RevisionNotFoundError):
            message = f"has no {version}; name a branch, a tag or a commit that it has"
        elif isinstance(error, known.RepositoryNotFoundError):
            message = (
                "does not exist, or is private: check the name, or log in with `hf auth login`"
            )
        elif self._offline or isinstance(error, known.OfflineModeIsEnabled):
            message = (
                f"is not complete in the cache at {version}, and HF_HUB_OFFLINE forbids the "
                "download; unset it to download"
            )
        elif isinstance(error, known.HfHubHTTPError) and status is not None:
            message = f"was not served: the server answered {status} ({reason}); try again later"
        else:
            message = (
                f"was not downloaded completely: {type(error).__name__}: {reason}. The finished "
                "part is kept; load it again. With HF_HUB_OFFLINE=1 only the cache is read"
            )
        return FileError(f"{self._name} on the hub {message}")
