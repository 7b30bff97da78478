"""Convert a recording to the data of the interactive page."""

from regard.inspect.report.page_data import report

__all__ = ["report"]
