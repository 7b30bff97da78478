"""Reading of untrusted files in bounded time and memory, and atomic writing of files.

`regular_files` opens regular files only, `strict_json` parses JSON, `safetensors_header` and
`safetensors_reader` read tensors. `atomic_write` and `folder_lock` are used for writing. All code
of this package that reads a file uses these modules, which raise the package's own errors.
"""
