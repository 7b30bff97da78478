"""Audit attention code that was written elsewhere: `audit` holds it against the definition of
attention.

`adapters` finds a way to call the code, `checks` asks one question each, and `run` goes through all
checks, names the fault behind the findings and makes every example small.
"""

from __future__ import annotations

from regard.audit.battery import audit
from regard.audit.findings import FAULTS, Audit, Checked, Fault, Finding, NotTried
from regard.audit.subject import NEW, Claim, Reply

__all__ = [
    "FAULTS",
    "NEW",
    "Audit",
    "Checked",
    "Claim",
    "Fault",
    "Finding",
    "NotTried",
    "Reply",
    "audit",
]
