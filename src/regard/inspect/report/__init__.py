"""A recording as the plain data of a page."""

from regard.inspect.report.page_data import report

__all__ = ["report"]
