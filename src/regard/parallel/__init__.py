"""Exact attention over several processes, on `torch.distributed`: one sequence, or one cache, on
many ranks.

`shards.py` says who holds which positions, `plan.py` what a call would move and cost, `exchange.py`
sends messages and is the only module that calls torch.distributed, `attend.py` and `decode.py` are
the two functions, `spawn.py` starts processes on this machine.
"""

from regard.parallel.attend import attend
from regard.parallel.decode import decode
from regard.parallel.plan import Plan, plan
from regard.parallel.shards import Shards
from regard.parallel.spawn import spawn

__all__ = ["Plan", "Shards", "attend", "decode", "plan", "spawn"]
