"""The cost of one model with each of several attention mechanisms, all of the same width, layers,
feed-forward layers and vocabulary: one row a mechanism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from regard.cost.evidence import NO_COMPARISON, QUALITY_EVIDENCE, QualityEvidence
from regard.cost.mechanisms import mechanism_spec
from regard.cost.model import ModelSpec
from regard.cost.report import CostReport, Setting
from regard.cost.roofline import Machine, largest_batch, largest_context, roofline_bounds
from regard.cost.spec import Spec
from regard.cost.stored_forms import STORED_FORMS, stored_as
from regard.errors import ArgumentError


@dataclass(frozen=True)
class MechanismCost:
    """The cost of a model with one mechanism.

    Attributes:
        suggested: the sizes that were not given, with the source of each.
        prefill_seconds, decode_seconds: the least times of a prompt and of one token; None without
            a machine.
        max_batch: the largest batch at this context that fits in the memory of the machine; None
            if that is not known, and 0 if even one sequence does not fit.
        max_context: the longest context of one sequence that fits, likewise.
    """

    label: str
    report: CostReport
    evidence: QualityEvidence
    options: Mapping[str, int]
    suggested: Mapping[str, str]
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    max_batch: int | None = None
    max_context: int | None = None

    def as_json(self) -> dict[str, object]:
        """Return the row as plain values for JSON: bytes, FLOPs and seconds."""
        report = self.report
        return {
            "mechanism": self.label,
            "options": dict(self.options),
            "suggested": dict(self.suggested),
            "parameters": report.model.parameters,
            "attention_parameters": report.model.attention_parameters,
            "kv_bytes_per_token": report.kv_bytes_per_token,
            "kv_bytes": report.kv_bytes,
            "prefill_flops": report.prefill_flops,
            "prefill_bytes": report.prefill_bytes(),
            "decode_flops": report.decode_flops,
            "decode_bytes": report.decode_bytes(),
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "max_batch": self.max_batch,
            "max_context": self.max_context,
            "evidence": {"finding": self.evidence.finding, "source": self.evidence.source},
        }


def replace_attention(
    model: ModelSpec,
    attention: str,
    heads: int,
    options: Mapping[str, int],
    global_every: int | None = None,
) -> ModelSpec:
    """Return a decoder in which every layer has another attention mechanism."""
    local = mechanism_spec(attention, model.dim, heads, options)
    everywhere = {name: value for name, value in options.items() if name != "window"}
    full = (
        local if global_every is None else mechanism_spec(attention, model.dim, heads, everywhere)
    )
    return replace_mixers(model, local, full, global_every)


def replace_mixers(
    model: ModelSpec, local: Spec, full: Spec | None = None, global_every: int | None = None
) -> ModelSpec:
    """Return a decoder in which every layer mixes its tokens by the same spec."""
    if model.encoder or not model.decodes:
        raise ArgumentError(
            f"{model.name} is not a decoder; the mechanisms can be compared in a decoder only"
        )
    layers = tuple(
        replace(
            layer, mixer=full if full and global_every and (i + 1) % global_every == 0 else local
        )
        for i, layer in enumerate(model.layers)
    )
    changed = replace(model, layers=layers, stored=None)  # which was that of the old layers
    form = "" if model.stored is None else model.stored.form
    return replace(changed, stored=stored_as(changed, form)) if form in STORED_FORMS else changed


def mechanism_cost(
    label: str,
    model: ModelSpec,
    setting: Setting,
    machine: Machine | None = None,
    *,
    evidence: str,
    options: Mapping[str, int] | None = None,
    suggested: Mapping[str, str] | None = None,
) -> MechanismCost:
    """Return the row of a model that has one mechanism."""
    report = CostReport(model, setting)
    quality = QUALITY_EVIDENCE.get(evidence, NO_COMPARISON)
    row = MechanismCost(label, report, quality, options or {}, suggested or {})
    if machine is None:
        return row
    bounds = roofline_bounds(report, machine)
    return replace(
        row,
        prefill_seconds=bounds["prefill"].seconds,
        decode_seconds=bounds["decode"].seconds,
        max_batch=largest_batch(report, machine),
        max_context=largest_context(CostReport(model, replace(setting, batch=1)), machine),
    )


def as_json(rows: Sequence[MechanismCost], machine: Machine | None) -> dict[str, object]:
    """Return a table of mechanisms as plain values for JSON."""
    setting = rows[0].report.setting
    return {
        "model": rows[0].report.model.name,
        "context": setting.context,
        "batch": setting.batch,
        "dtype": setting.dtype,
        "kv_dtype": setting.format.name,
        "machine": None if machine is None else machine.name,
        "mechanisms": [row.as_json() for row in rows],
    }
