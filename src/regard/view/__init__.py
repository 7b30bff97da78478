"""Pages, charts and terminal output. They take arrays and return text, HTML or SVG, without torch.

`terminal` has the parts of terminal pages, `explanation_text` the page of an explanation,
`html_page` static HTML pages, `charts` and `plotting` the figures, `palette` the colours, and
`report` the interactive page of a recording.
"""
