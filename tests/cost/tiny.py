"""A small config.json for every family: all sizes differ where the family allows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "tiny_configs.json"
TABLE: dict[str, dict[str, dict[str, Any]]] = json.loads(DATA.read_text("utf-8"))
"""Configs, and parts of them: each is "like" the parts that it names, and more."""
ENCODERS = ("bert", "camembert", "distilbert", "modernbert", "roberta", "xlm-roberta")
"""The families of encoders, which decode nothing."""
ENCODER_DECODERS = ("bart", "marian", "t5", "whisper")
"""The families with a decoder that reads what an encoder made of another text, or of speech."""


def whole(raw: dict[str, Any], parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A config with the parts that it is like."""
    found: dict[str, Any] = {}
    for name in raw.get("like", "").split():
        found |= whole(parts[name], parts)
    own = {k: v for k, v in raw.items() if k != "like"}
    return found | {k: whole(v, parts) if isinstance(v, dict) else v for k, v in own.items()}


PARTS = TABLE["parts"]
LLAMA, DEEPSEEK = (whole(PARTS[name], PARTS) for name in ("llama", "deepseek"))
TINY: dict[str, dict[str, Any]] = {
    name: {"model_type": name.partition(",")[0], **whole(raw, PARTS)}
    for name, raw in TABLE["configs"].items()
}
"""Each has its name as its model_type, up to a comma, or its own."""
