"""The checks of an audit, grouped by what they ask."""

from __future__ import annotations
