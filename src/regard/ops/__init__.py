"""Attention and the operations around it as functions of tensors, without parameters of their own.

The families are softmax attention (`softmax`), additive attention, linear recurrences (`linear`),
compressive memory (`infini_attention`) and key selection (`selection`); `jit` has CPU loops.
"""
