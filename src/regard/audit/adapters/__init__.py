"""Find out how attention code is called, and call it: an adapter class for each kind of code."""

from __future__ import annotations
