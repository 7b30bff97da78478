"""How `regard audit` shows findings in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from regard.inspect import Audit


def show(found: Audit, console: Console) -> None:
    """The findings as a table, then what was not tried."""
    from rich.table import Table

    console.print(f"{found.target}, called {found.called}", highlight=False, markup=False)
    for f in found.findings:
        table = Table(show_header=False, box=None, padding=(0, 1))
        example = ", ".join(f"{name} {value}" for name, value in f.example.items())
        rows = {
            "smallest": example,
            "expected": _say(f.expected),
            "got": _say(f.got),
            "look at": f.look,
        }
        for name, value in rows.items():
            table.add_row(f"  {name}", _plain(value))
        style = "bold red" if f.severity == "error" else "bold yellow"
        console.print()
        console.print(f"{f.severity} {f.name}", style=style, highlight=False, markup=False)
        console.print(f"  {f.sentence}", highlight=False, markup=False)
        console.print(table, highlight=False)
    console.print()
    for known in found.accepted:
        console.print(f"accepted: {known.name}", highlight=False, markup=False)
    kinds = (("could not be made", True, "yellow"), ("does not apply", False, "dim"))
    for title, applies, style in kinds:
        skipped = [check for check in found.not_tried if check.applies == applies]
        if skipped:
            table = Table(title, "why", box=None, padding=(0, 1), header_style=style)
            for check in skipped:
                table.add_row(check.name, _plain(check.why), style=style)
            console.print(table, highlight=False)
    n, open_ = len(found.findings), len(found.untried)
    console.print(
        f"{n} fault{'s' * (n != 1)}, {len(found.held)} checks held, {open_} could not be made, "
        f"{len(found.not_tried) - open_} do not apply"
    )
    if not n and open_:
        console.print("Not a pass: exit code 3, or 0 with --allow-untried.", highlight=False)


def table(console: Console) -> None:
    """Every fault that can be named."""
    from rich.table import Table

    from regard.inspect.audit import FAULTS

    faults = Table("fault", "what it is", "look at", box=None, padding=(0, 1))
    for name, fault in FAULTS.items():
        faults.add_row(name, _plain(fault.what), _plain(fault.look))
    console.print(faults, highlight=False)


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _say(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:.6g}"
