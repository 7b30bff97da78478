"""Exact attention over several processes of `torch.distributed`: one sequence or one cache.

`shards.py` says which rank holds which positions, and `plan.py` what a call sends and computes;
only `communication.py` sends messages. `attend.py` has the functions, `exchange.py` the methods of
attention, and `sequence.py` runs models through them.
"""

from regard.parallel.attend import attend, decode
from regard.parallel.plan import ParallelPlan, plan
from regard.parallel.sequence import generation, sequence
from regard.parallel.shards import Shards
from regard.parallel.spawn import spawn
from regard.parallel.split_heads import split_heads

__all__ = [
    "ParallelPlan",
    "Shards",
    "attend",
    "decode",
    "generation",
    "plan",
    "sequence",
    "spawn",
    "split_heads",
]
