"""The HTML page of a table of mechanisms, which `regard cost --mechanisms` writes."""

from __future__ import annotations

from collections.abc import Sequence

from regard.cost.mechanism_table import MechanismCost
from regard.cost.roofline import Machine
from regard.language import translate
from regard.view.charts import Chart
from regard.view.cost_text import (
    EVIDENCE,
    SUGGESTED,
    mechanism_tables,
    mechanisms_title,
    quoted_evidence,
    suggested_sizes,
    translate_title,
)
from regard.view.html_page import Section, page


def mechanisms_html(
    rows: Sequence[MechanismCost], machine: Machine | None, chart: Chart, model_sizes: str = ""
) -> str:
    """Return the page of a table of mechanisms: tables, chart, suggested sizes, evidence."""
    sections = [
        Section(title, heads=table[0], rows=table[1:], numbers=True)
        for title, table in mechanism_tables(rows, machine).items()
    ]
    sections.append(Section(translate("over the context"), pictures=[chart]))
    if sizes := suggested_sizes(rows, model_sizes):
        sections.append(
            Section(
                translate_title(SUGGESTED),
                heads=(translate_title("mechanism"), translate("sizes")),
                rows=sizes,
            )
        )
    evidence = [(row.label, quoted_evidence(row)) for row in rows]
    sections.append(
        Section(
            translate_title(EVIDENCE),
            heads=(translate_title("mechanism"), translate("finding")),
            rows=evidence,
        )
    )
    source = {} if machine is None else {translate("machine"): f"{machine.name}: {machine.source}"}
    return page(
        translate("The cost of attention mechanisms"),
        mechanisms_title(rows, machine),
        source,
        "",
        sections,
        [translate("Times are lower bounds: full bandwidth or full rate, whichever takes longer.")]
        if machine
        else [],
    )
