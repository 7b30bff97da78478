"""Looking inside a model: explain one query token, choose a head, score what heads do."""

from regard.inspect.audit import Audit, Finding, audit
from regard.inspect.choose import (
    Choice,
    check_index,
    find_query,
    strongest_head,
    strongest_keys,
)
from regard.inspect.explain import MOST_TOKENS, explain
from regard.inspect.explanation import Explanation
from regard.inspect.files import load, save
from regard.inspect.metrics import (
    Measures,
    Sampled,
    duplicate_score,
    entropy,
    head_scores,
    induction_score,
    keys_for,
    measure,
    previous_token_score,
    redundancy,
    repeated_ids,
    retrieval_score,
    sink_share,
)
from regard.inspect.parts import Step
from regard.inspect.pooled import Pooled, pooled
from regard.inspect.record import Recorder, Selection, record
from regard.inspect.recording import Place, Recording, Top
from regard.inspect.report import report
from regard.inspect.row_sums import RowSums, row_sums
from regard.inspect.tiles import Tile, walk

__all__ = [
    "MOST_TOKENS",
    "Audit",
    "Choice",
    "Explanation",
    "Finding",
    "Measures",
    "Place",
    "Pooled",
    "Recorder",
    "Recording",
    "RowSums",
    "Sampled",
    "Selection",
    "Step",
    "Tile",
    "Top",
    "audit",
    "check_index",
    "duplicate_score",
    "entropy",
    "explain",
    "find_query",
    "head_scores",
    "induction_score",
    "keys_for",
    "load",
    "measure",
    "pooled",
    "previous_token_score",
    "record",
    "redundancy",
    "repeated_ids",
    "report",
    "retrieval_score",
    "row_sums",
    "save",
    "sink_share",
    "strongest_head",
    "strongest_keys",
    "walk",
]
