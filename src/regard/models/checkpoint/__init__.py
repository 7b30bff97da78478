"""Checkpoint folders: config.json, safetensors and tokenizer.json, with Hugging Face's names. Files
are hostile data.

`config` reads config.json, `store` the headers and the tensors, `quantized` block formats; `family`
and `names` are what a family says, and `weights` fills a model by it.
"""
