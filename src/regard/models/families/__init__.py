"""One file per family, named as `model_type` in its config.json: a config with Hugging Face's keys, a builder, a name table."""
