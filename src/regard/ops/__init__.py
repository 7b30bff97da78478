"""Attention and the operations around it as functions of tensors, without parameters of their own.

The families are softmax attention (`softmax`), additive attention (`additive_attention`), linear
recurrences (`linear`), compressive memory (`memory`) and key selection (`selection`). A linear map
(`gemv`), an RMS norm (`rms_norm`) and parts of softmax attention use compiled CPU kernels (`jit`).
"""
