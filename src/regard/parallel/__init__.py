"""Exact attention over several processes of `torch.distributed`: one sequence, or one cache, on
many ranks.

`shards.py` says which rank holds which positions, `plan.py` computes what a call sends and
computes, `communication.py` is the only module that sends messages through torch.distributed,
`attend.py` and `decode.py` have the two functions (`ranked_call.py` is a checked call,
`exchange.py` and `head_exchange.py` are the methods), `sequence.py` and `generation.py` run models
through them, `split_heads.py` gives each rank some heads of a layer, and `spawn.py` starts
processes on this machine.
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
