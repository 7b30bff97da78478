"""Files of unknown origin, read in bounded time and memory, and files of ours, written whole or not
at all.

`regular` opens regular files and nothing else, `strict` reads JSON, `safetensors` reads tensors,
`write` and `lock` are for what we write. Everything that reads a file for this package reads it
here, and refuses with the package's own errors.
"""
