"""Damage: bytes, JSON values and files changed at random, each change drawn from a generator with a
seed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import struct
from pathlib import Path
from typing import Any

NUMBERS: tuple[Any, ...] = (
    -1,
    0,
    1,
    2,
    3,
    300,
    65_537,
    10**6,
    2**31 - 1,
    2**31,
    2**32,
    300_000_000,
    2**53,
    2**61,
    2**62,
    2**63 - 1,
    2**63,
    10**19,
    -(2**31),
    -(2**63),
    0.5,
    -0.5,
    1e-320,
    1e308,
    3e38,
)
TEXTS = (
    "",
    "x",
    "\x1b[2J\x1b]0;title\x07",
    "\u202eevil\u2066",
    "a\nb\rc",
    "\x00",
    "../../etc/passwd",
    "/dev/zero",
    "é" * 70000,
    "a" * 5000,
    "\ud800",
    "__class__",
    "cl100k",
    "0",
    "nan",
    "-1",
    "{0.__class__}",
    "%s%n",
    "[[[[",
    "~" * 3000,
)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [None],
    [[]],
    [1],
    {"a": 1},
    ["\x1b[31m"],
    {"\x1b[2J\u202e": {}},
    [0] * 3000,
)
TOKENS = (
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"-1e999",
    b"9" * 30,
    b"9" * 9000,
    b"0.1e-999",
    b"[" * 100_000,
    b'{"a":' * 50_000,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON value; of long lists and tables the first, the last and a few
    between.
    """
    found = [path]
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    else:
        return found
    if len(keys) > 12:
        keys = [*keys[:4], *keys[len(keys) // 2 : len(keys) // 2 + 3], *keys[-4:]]
    for key in keys:
        found += places(value[key], (*path, key))
    return found


def in_json(content: bytes, draw: random.Random) -> bytes:
    """A JSON text with one or two of its values changed, taken out, doubled, moved or nested."""
    try:
        value = json.loads(content)
    except ValueError:
        return in_bytes(content, draw)
    if draw.random() < 0.12:
        return _token(content, draw)
    for _ in range(draw.choice((1, 1, 1, 2))):
        value = _changed(value, draw)
    try:
        text = json.dumps(value)
    except RecursionError:  # nested twice over
        return content
    if draw.random() < 0.05 and isinstance(value, dict) and value:
        key = draw.choice(list(value))
        text = text[:-1] + f", {json.dumps(key)}: {json.dumps(draw.choice(NUMBERS))}}}"
    return text.encode()


def _changed(value: Any, draw: random.Random) -> Any:
    found = copy.deepcopy(value)
    *before, last = draw.choice(places(found)[1:] or [(None,)])
    if last is None:
        return copy.deepcopy(draw.choice(OTHERS))
    parent = found
    for key in before:
        parent = parent[key]
    if draw.random() < 0.12:
        if isinstance(parent, dict) and draw.random() < 0.4:
            parent[draw.choice(TEXTS)] = parent.pop(last)
        else:
            del parent[last]
    else:
        parent[last] = _other(parent[last], found, draw)
    return found


def _other(old: Any, among: Any, draw: random.Random) -> Any:
    """What stands instead of a value: a number, a text, another kind, itself nested or repeated,
    another of the file.
    """
    how = draw.random()
    if how < 0.45 and isinstance(old, (int, float)):
        return draw.choice(NUMBERS)
    if how < 0.6:
        return copy.deepcopy(draw.choice((*NUMBERS, *TEXTS, *OTHERS)))
    if how < 0.7:
        return draw.choice(TEXTS)
    if how < 0.78:
        for _ in range(draw.choice((3, 60, 300))):
            old = [old] if draw.random() < 0.5 else {"a": old}
        return old
    if how < 0.86:
        found = copy.deepcopy(among)
        for key in draw.choice(places(among)[1:]):
            found = found[key]
        return found
    if isinstance(old, list) and old:
        return old * draw.choice((2, 3, 500)) if len(old) < 50 else old[::-1]
    return copy.deepcopy(draw.choice(OTHERS))


def _token(content: bytes, draw: random.Random) -> bytes:
    """A number of the text is replaced with what JSON does not know, or with what nobody can
    read.
    """
    marks = [i for i, byte in enumerate(content) if byte in b"0123456789"][:4000]
    if not marks:
        return in_bytes(content, draw)
    at = draw.choice(marks)
    end = at
    while end < len(content) and content[end] in b"0123456789.":
        end += 1
    return content[:at] + draw.choice(TOKENS) + content[end:]


def in_bytes(content: bytes, draw: random.Random) -> bytes:
    """Bytes cut, flipped, doubled, or written over."""
    data = bytearray(content)
    how = draw.randrange(8)
    at = draw.randrange(len(data) + 1)
    if how == 0:
        return bytes(data[:at])
    if how == 1 and data:
        for _ in range(draw.choice((1, 1, 4))):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif how == 2:
        data[at:at] = draw.randbytes(draw.choice((1, 8, 64)))
    elif how == 3:
        data = data[:at] + data[max(0, at - 40) :]
    elif how == 4:
        data[at : at + 16] = bytes(16)
    elif how == 5:
        return draw.choice(
            (b"", b"{", b"[]", b"null", b"\xef\xbb\xbf" + content, b"\xff\xfe" + content, b"0")
        )
    elif how == 6:
        data += draw.choice((b"\x00", b"}", b" " * 100, content[:200]))
    else:
        data[:8] = struct.pack(
            "<Q", draw.choice((0, 1, 2**31, 2**63, 99_999_999, len(data), len(data) - 8))
        )
    return bytes(data)


def in_safetensors(content: bytes, draw: random.Random) -> bytes:
    """The header changed as JSON, or the text that it carries; its length is right afterwards. Or
    the bytes.
    """
    size = int.from_bytes(content[:8], "little")
    raw, data = content[8 : 8 + size], content[8 + size :]
    if draw.random() < 0.25 or size > len(content):
        return in_bytes(content, draw)
    header = json.loads(raw)
    carried = header.get("__metadata__") or {}
    inner = next((k for k, x in carried.items() if x.startswith("{")), None)
    if inner is not None and draw.random() < 0.8:
        carried[inner] = in_json(carried[inner].encode(), draw).decode("utf-8", "replace")
        raw = json.dumps(header).encode()
    else:
        raw = in_json(raw, draw)
    return struct.pack("<Q", len(raw)) + raw + data


def in_gguf(file: Path, draw: random.Random) -> bytes:
    """The header with another value of a key, or another name, shape or format of a tensor; or the
    bytes.
    """
    from regard.files.gguf_files import block_formats, read_gguf_header
    from tests.models.checkpoint import gguf_writer

    content = file.read_bytes()
    if draw.random() < 0.25:
        return in_bytes(content, draw)
    whole = read_gguf_header(file)
    numbers = {x.name: number for number, x in block_formats().items()}
    begin = min(x.start for x in whole.tensors.values())
    keys: dict[str, Any] = dict(whole.metadata)
    infos = [
        [x.name, list(x.shape), numbers[x.format.name], x.start - begin]
        for x in whole.tensors.values()
    ]
    info = draw.choice(infos)
    if draw.random() < 0.7:
        key = draw.choice([*(k for k in keys if not k.startswith("tokenizer")), *keys])
        old = keys.pop(key)
        texts = [x for x in TEXTS if x.isprintable()]
        new = draw.choice([*NUMBERS, *texts, [1, 2], [0.5], ["x"], True, None, old])
        if isinstance(old, list) and draw.random() < 0.5:
            new = old[: draw.randrange(len(old)) + 1] * draw.choice((1, 2))
        if new is not None and not (isinstance(new, int) and not -(2**63) <= new < 2**63):
            keys[key] = new if not isinstance(new, float) or abs(new) < 3e38 else 3e38
    elif draw.random() < 0.5:
        info[1][draw.randrange(len(info[1]))] = draw.choice((0, 1, 2, 32, 65_537, 2**31, 2**62))
    elif draw.random() < 0.5:
        info[2] = draw.choice([*numbers.values(), 99])
    else:
        info[0] = draw.choice(
            [x[0] for x in infos]
            + [info[0].replace("blk.0", "blk.999"), "a" * 70, "rope_freqs.weight"]
        )
    header = gguf_writer.header(keys, [tuple(x) for x in infos])
    return gguf_writer.pad(header) + content[begin:]


def change(file: Path, draw: random.Random) -> str:
    """Damage a file in place, by what its name says it is; gives what was done, in a word."""
    if draw.random() < 0.06:
        return _replaced(file, draw)
    content = file.read_bytes()
    if file.suffix == ".safetensors" or content[8:9] == b"{":
        made = in_safetensors(content, draw)
    elif file.suffix == ".gguf":
        made = in_gguf(file, draw)
    elif content[:1] in (b"{", b"[") and draw.random() < 0.85:
        made = in_json(content, draw)
    else:
        made = in_bytes(content, draw)
    file.write_bytes(made)
    return "content"


def _replaced(file: Path, draw: random.Random) -> str:
    """Something that is no regular file, or is far too long, under the file's name."""
    kind = draw.choice(
        ("pipe", "folder", "loop", "device", "dangling", "missing", "sparse", "full")
    )
    content = file.read_bytes()
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "dangling":
        file.symlink_to("\x1b[2J\u202e no such")
    elif kind == "sparse":
        file.write_bytes(content)
        os.truncate(file, 10 << 30)
    elif kind == "full":
        file.write_bytes(b"[" * (1 << 22))
    return kind


def seal(folder: Path) -> None:
    """The sums of a training checkpoint's manifest, made right again: a forger does so."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        for name, told in manifest["files"].items():
            content = (folder / name).read_bytes()
            told.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        path.write_text(json.dumps(manifest))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
