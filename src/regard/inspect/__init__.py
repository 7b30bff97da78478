"""Look inside a model, and change what it computes: record, explain, measure, patch."""

from regard.audit import Audit, Finding, audit
from regard.inspect.explain.explain import explain
from regard.inspect.explain.explanation import ComputationStep, Explanation
from regard.inspect.explain.explanation_parts import MAX_PATTERN_TOKENS
from regard.inspect.explain.head_choice import Choice, find_query, strongest_head, strongest_keys
from regard.inspect.explain.random_model import random_model
from regard.inspect.interventions.answer_attribution import attribute_answer
from regard.inspect.interventions.attribution import attribute, logit_lens, name_mover_scores
from regard.inspect.interventions.circuits import (
    FactoredMatrix,
    HeadCircuits,
    composition_scores,
    copying_scores,
    head_circuits,
    vocabulary_product,
)
from regard.inspect.interventions.edges import EdgeRuns
from regard.inspect.interventions.effect_table import EffectTable
from regard.inspect.interventions.features import (
    Probe,
    SparseAutoencoder,
    ablate_features,
    edit_features,
    probe,
)
from regard.inspect.interventions.find_circuit import Circuit, Edge, find_circuit
from regard.inspect.interventions.knockout import cut_attention, knockout
from regard.inspect.interventions.patching import Receiver, ablate, patch
from regard.inspect.interventions.rollout import rollout
from regard.inspect.metrics.head_metrics import (
    duplicate_score,
    entropy,
    induction_score,
    previous_token_score,
    repeated_ids,
    sink_share,
)
from regard.inspect.metrics.measure import (
    CorpusMeasures,
    Measures,
    Sampled,
    compare,
    head_scores,
    keys_for,
    measure,
    redundancy,
    retrieval_score,
)
from regard.inspect.model_run import PretokenizedInput, taps
from regard.inspect.record.export import export, widget
from regard.inspect.record.record_model import record
from regard.inspect.record.recorded_place import Place
from regard.inspect.record.recorder import Recorder, RecordingOptions
from regard.inspect.record.recording import Recording, TopKeys
from regard.inspect.record.recording_file import load, save
from regard.inspect.record.row_sums import RowSums, row_sums
from regard.inspect.record.tiles import Pooled, Tile, iterate_tiles, pool_pattern
from regard.inspect.report.page_data import report
from regard.inspect.tile_server.head_overviews import OverviewRecorder
from regard.inspect.tile_server.serve import view
from regard.integrations.pytorch.watch import watch

__all__ = [
    "MAX_PATTERN_TOKENS",
    "Audit",
    "Choice",
    "Circuit",
    "ComputationStep",
    "CorpusMeasures",
    "Edge",
    "EdgeRuns",
    "EffectTable",
    "Explanation",
    "FactoredMatrix",
    "Finding",
    "HeadCircuits",
    "Measures",
    "OverviewRecorder",
    "Place",
    "Pooled",
    "PretokenizedInput",
    "Probe",
    "Receiver",
    "Recorder",
    "Recording",
    "RecordingOptions",
    "RowSums",
    "Sampled",
    "SparseAutoencoder",
    "Tile",
    "TopKeys",
    "ablate",
    "ablate_features",
    "attribute",
    "attribute_answer",
    "audit",
    "compare",
    "composition_scores",
    "copying_scores",
    "cut_attention",
    "duplicate_score",
    "edit_features",
    "entropy",
    "explain",
    "export",
    "find_circuit",
    "find_query",
    "head_circuits",
    "head_scores",
    "induction_score",
    "iterate_tiles",
    "keys_for",
    "knockout",
    "load",
    "logit_lens",
    "measure",
    "name_mover_scores",
    "patch",
    "pool_pattern",
    "previous_token_score",
    "probe",
    "random_model",
    "record",
    "redundancy",
    "repeated_ids",
    "report",
    "retrieval_score",
    "rollout",
    "row_sums",
    "save",
    "sink_share",
    "strongest_head",
    "strongest_keys",
    "taps",
    "view",
    "vocabulary_product",
    "watch",
    "widget",
]
