"""Operations on queries, keys and values. Each folder holds one family: softmax attention, linear
recurrences, compressive memory, key selection, and the compiled CPU kernels.
"""
