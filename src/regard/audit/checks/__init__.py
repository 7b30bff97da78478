"""The checks of an audit, grouped by what they test."""

from __future__ import annotations
