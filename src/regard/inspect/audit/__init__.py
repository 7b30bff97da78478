"""`audit`: a battery for attention code that is not ours."""

from regard.inspect.audit.faults import FAULTS, Fault
from regard.inspect.audit.result import Audit, Checked, Finding, NotTried
from regard.inspect.audit.run import audit
from regard.inspect.audit.subject import NEW, Claim, Reply

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
