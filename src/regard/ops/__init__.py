"""Operations: what turns q, k, v into an output. One folder per equation."""
