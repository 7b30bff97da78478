"""Exact attention over several processes of `torch.distributed`: one sequence or one cache.

`shards.py` says which rank holds which positions, and `plan.py` what a call sends and computes;
only `communication.py` sends messages. `attend.py` and `decode.py` have the functions
(`exchange.py` and `head_exchange.py` the methods), and `sequence.py` and `generation.py` run models
through them.
"""

from regard.parallel.attend import attend
from regard.parallel.decode import decode
from regard.parallel.generation import generation
from regard.parallel.plan import ParallelPlan, plan
from regard.parallel.sequence import sequence
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
