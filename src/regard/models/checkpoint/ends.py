"""Which tokens end a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from regard.errors import FileError
from regard.files.regular import present
from regard.foreign import shown
from regard.models.checkpoint.config import read_json
from regard.models.checkpoint.family import Raw

if TYPE_CHECKING:
    from regard.models.tokenizer import Tokenizer


def read_ends(folder: Path, raw: Raw, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The ids at which generation stops: eos_token_id of generation_config.json, else of
    config.json, else `<|endoftext|>`.

    Raises:
        FileError: eos_token_id is neither an id nor a list of ids.
    """
    name = "generation_config.json"
    given = raw if present(folder, name) is None else read_json(folder, name)
    found = given.get("eos_token_id", raw.get("eos_token_id"))
    ids = found if isinstance(found, list) else [found] if found is not None else []
    if not all(type(i) is int and i >= 0 for i in ids):
        raise FileError(
            f"{folder}: eos_token_id is {shown(found)}; it must be a token id or a list of token "
            "ids"
        )
    if not ids and tokenizer is not None and tokenizer.end_of_text is not None:
        ids = [tokenizer.end_of_text]
    return frozenset(ids)
