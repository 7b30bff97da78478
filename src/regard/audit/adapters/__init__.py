"""Ways to call attention code that was written elsewhere."""

from __future__ import annotations
