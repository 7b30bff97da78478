"""The names that `regard.tracing` had when it was called `regard.tap`, for one release."""

from __future__ import annotations

from regard.deprecation import renamed

__getattr__ = renamed(
    __name__,
    {
        "NAMES": "regard.tracing.TAP_NAMES",
        "Missing": "regard.tracing.OnMissing",
        "Opening": "regard.tracing.ActiveTrace",
        "Trace": "regard.tracing.Trace",
        "edited": "regard.tracing.is_edited",
        "listening": "regard.tracing.is_tracing",
        "needed": "regard.tracing.requested_taps",
        "place": "regard.tracing.named_scope",
        "tap": "regard.tracing.tap",
        "watchers": "regard.tracing.call_observers",
    },
)
