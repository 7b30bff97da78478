"""Repositories of the Hugging Face hub: what a user names is downloaded, through `huggingface_hub`
(the extra `hub`).

Only safetensors, JSON and the files of a tokenizer are asked for, each by its name; code and
pickles never are. The files lie in the cache that all of Hugging Face's libraries share, and are
read from there as those of any other folder.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from regard.errors import ArgumentError, FileError
from regard.files.regular_files import check_file_name
from regard.models.checkpoint.store import INDEX, SINGLE, other_weights, read_index
from regard.untrusted_text import short_repr

PREFIX = "hub:"
INSTALL = "python -m pip install 'regard[hub]'"
ABOUT = (
    'A repository of the Hugging Face hub is named as "org/name" or "hub:org/name" and downloaded '
    "where the extra hub is "
    f"installed: {INSTALL}"
)
"""What the extra does, for whoever named something that is not there."""

SMALL = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""Files that are asked for where a repository has them: what is read here, and what `regard
convert` hands on.
"""
_FILES = (".bin", ".gguf", ".json", ".pt", ".pth", ".safetensors")
"""Ends of names that are meant as files, not as repositories."""
_POOLING = re.compile(r"[0-9]+_Pooling/config\.json")
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_ID = re.compile(rf"{_PART}/{_PART}")


def repository_of(source: str | Path) -> str | None:
    """The repository that a source names, or None where it is a path or a name of another kind.

    Raises:
        FileError: it may be both; or what stands behind "hub:" is no name of a repository.

    >>> sources = ("hub:org/name", "org-that-is-no-folder/name", Path("org/name"))
    >>> tuple(repository_of(source) for source in sources)
    ('org/name', 'org-that-is-no-folder/name', None)
    >>> repository_of("./org/name"), repository_of("tiny")
    (None, None)
    """
    if not isinstance(source, str):
        return None
    if source.startswith(PREFIX):
        name = source.removeprefix(PREFIX)
        if not _is_id(name):
            raise FileError(
                f"{short_repr(source)} names no repository of the hub; write hub:org/name, of "
                "letters, "
                "digits, '-', '_' and '.'"
            )
        return name
    path = Path(source)
    if not _is_id(source) or path.exists() or path.suffix in _FILES:
        return None
    if path.parent.exists():
        raise FileError(
            f"no model {short_repr(source)}: there is no such folder, and because there is a "
            "folder "
            f"{short_repr(str(path.parent))} here it "
            "is not taken for a repository of the hub; nothing is downloaded. If that is meant, "
            f"write {PREFIX}{source}"
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
    """The folder of a repository in Hugging Face's cache; what is missing there is downloaded, with
    a progress bar.

    With HF_HUB_OFFLINE=1 nobody is asked, and what the cache holds is taken. The server is that of
    HF_ENDPOINT.

    Args:
        repository: "org/name".
        revision: a branch, a tag or a commit; None is the main branch.
        check: is called with the folder when all but the weights is there; what it raises ends the
            download.
        weights: whether the safetensors are wanted.

    Raises:
        FileError: the extra is not installed; there is no such repository or revision, or it may
            not be read; it holds no safetensors; or the download does not arrive whole.
        ArgumentError: the revision is empty.
    """
    if revision == "":
        raise ArgumentError("revision is empty; it must be a branch, a tag or a commit")
    source = _Repository(repository, revision)
    names = source.names()
    if names is not None:
        _check_listing(repository, names, weights=weights)
    folder = source.fetch(_small(names))
    if check is not None:
        check(folder)
    if weights:
        single = SINGLE in names if names is not None else not (folder / INDEX).exists()
        source.fetch([SINGLE] if single or (folder / SINGLE).exists() else _shards(folder))
    return folder


def _small(names: Collection[str] | None) -> list[str]:
    """What is asked for beside the weights, of the files that there are; all of it where the list
    is not known.
    """
    if names is None:
        return [*SMALL, INDEX]
    index = [] if SINGLE in names else [INDEX]
    pooling = sorted(name for name in names if _POOLING.fullmatch(name))
    return [*(name for name in (*SMALL, *index) if name in names), *pooling]


def _shards(folder: Path) -> list[str]:
    """The shards that an index names; what leads out of the folder or is no safetensors is never
    asked for.
    """
    found = sorted(set(read_index(folder).values()))
    for name in found:
        check_file_name(folder, name)
        if not name.endswith(".safetensors"):
            raise FileError(
                f"{folder / INDEX} names {short_repr(name)}, which is no safetensors file; nothing "
                "else is downloaded"
            )
    return found


def _check_listing(repository: str, names: Collection[str], *, weights: bool) -> None:
    """Refuse a repository that has nothing to load, before anything of it is downloaded."""
    wanted = [("config.json", {"config.json"})]
    wanted += [(SINGLE, {SINGLE, INDEX})] if weights else []
    for name, either in wanted:
        if not either & set(names):
            other = other_weights(names)
            held = f"it holds {other}" if other else f"it holds {len(names)} other files"
            raise FileError(
                f"{repository} on the hub has no {name}, and nothing was downloaded; {held}"
            )


class _Repository:
    """One repository at one commit, behind `huggingface_hub`, whose errors become ours."""

    def __init__(self, name: str, revision: str | None) -> None:
        try:
            from huggingface_hub import HfApi, errors, snapshot_download
        except ImportError as error:
            raise FileError(
                f"no model {short_repr(name)}: it is no folder here, and nothing is downloaded, "
                "because the extra hub is not "
                f"installed. With it the repository of this name is: {INSTALL}"
            ) from error
        self._api, self._errors, self._download = HfApi(), errors, snapshot_download
        self._name, self._revision = name, revision
        self._offline = False
        self._commit: str | None = None

    def names(self) -> set[str] | None:
        """The names of its files, from the server; None where nobody may be asked."""
        try:
            found = self._api.model_info(self._name, revision=self._revision)
        except self._errors.OfflineModeIsEnabled:
            self._offline = True
            return None
        except Exception as error:  # of the library, of what it sends requests with, of the system
            raise self._told(error) from error
        self._commit = str(found.sha)
        return {str(file.rfilename) for file in found.siblings or ()}

    def fetch(self, names: Sequence[str]) -> Path:
        """Have these files in the cache, all of one commit; the folder that they are in."""
        try:
            found = Path(
                self._download(
                    self._name,
                    # by its name the first time, so that the cache knows which commit it was
                    revision=self._revision,
                    allow_patterns=[glob.escape(name) for name in names],
                    local_files_only=self._offline,
                )
            )
        except Exception as error:  # as above
            raise self._told(error) from error
        if self._commit not in (None, found.name):
            raise FileError(f"{self._name} on the hub was changed while it was read; load it again")
        self._revision = self._commit = found.name
        return found

    def _told(self, error: Exception) -> FileError:
        """What went wrong, by kind, and the next step."""
        known = self._errors
        at = (
            "its main branch"
            if self._revision is None
            else f"revision {short_repr(self._revision)}"
        )
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = short_repr(str(error).strip().split("\n")[0])
        if isinstance(error, known.GatedRepoError):
            said = (
                "may be read only by those who have accepted its conditions; accept them there "
                "and log in with `hf auth login`"
            )
        elif isinstance(error, known.RevisionNotFoundError):
            said = f"has no {at}; name a branch, a tag or a commit that it has"
        elif isinstance(error, known.RepositoryNotFoundError):
            said = "is not there, or is private: check the name, or log in with `hf auth login`"
        elif self._offline or isinstance(error, known.OfflineModeIsEnabled):
            said = (
                f"is not whole in the cache at {at}, and HF_HUB_OFFLINE forbids to ask for it; "
                "unset it to download"
            )
        elif isinstance(error, known.HfHubHTTPError) and status is not None:
            said = f"is not given: the server answered {status} ({reason}); try again later"
        else:
            said = (
                f"did not arrive whole: {type(error).__name__}: {reason}. What did arrive is "
                "kept: load it again; with "
                "HF_HUB_OFFLINE=1 only the cache is read"
            )
        return FileError(f"{self._name} on the hub {said}")
