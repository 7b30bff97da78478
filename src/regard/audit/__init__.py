"""Audit attention code: compare any function, module or model with the definition of attention.

`run_checks.py` has `audit`, which runs the checks of `checks/`. `adapters/` finds out how the code
is called, `findings.py` names all faults, and `reference.py` is the definition of attention with
every known fault as an option.
"""

from __future__ import annotations

from regard.audit.adapters.base import NEW_CACHE, AuditClaims, CallOutput
from regard.audit.findings import FAULTS, Audit, Fault, Finding, NotTried, PassedCheck
from regard.audit.run_checks import audit

__all__ = [
    "FAULTS",
    "NEW_CACHE",
    "Audit",
    "AuditClaims",
    "CallOutput",
    "Fault",
    "Finding",
    "NotTried",
    "PassedCheck",
    "audit",
]
