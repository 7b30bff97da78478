"""Pages: arrays in, markup out. Nothing here imports torch.

`ansi` is the terminal page, `html` the self-contained one, `palette` their colours, `glyphs`
numbers as characters.
"""
