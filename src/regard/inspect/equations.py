"""The equations of the walk, one per step. `_i` is the query, `_j` a key; pages draw what follows
`_` as a subscript.
"""

EQUATIONS: dict[str, str] = {
    "tokens": "text → token ids, and their positions",
    "hidden": "x_i = norm(h_i),  h_i = embedding + what the layers before have added",
    "project": "q_i = W_Q x_i,  k_j = W_K x_j,  v_j = W_V x_j",
    "rotate": "(a, b) → (a cos φ - b sin φ, b cos φ + a sin φ),  φ = position × θ",
    "dot": "q_i · k_j = Σ q_i[d] k_j[d]  over dims d",
    "scaled": "s_ij = scale × q_i · k_j,  scale = 1/√D unless the model says otherwise",
    "capped": "s_ij ← c tanh(s_ij / c)",
    "biased": "s_ij ← s_ij + b_ij",
    "masked": "s_ij ← -∞ where the mask says no",
    "additive": "s_ij = w · tanh(q_i + k_j) = Σ w[d] tanh(q_i[d] + k_j[d])  over dims d",
    "effective": "z_i = Σ a_ij v_j,  a_ij: what the recurrence has left of v_j when q_i reads it",
    "softmax": "p_ij = exp(s_ij - m_i) / Σ exp(s_ij - m_i) = exp(s_ij - lse_i),  m_i = max s_ij",
    "online": "m' = max(m, s), r = e^(m-m'), l' = r l + Σ e^(s-m'), o' = r o + Σ e^(s-m') v",
    "mix": "z_i = Σ p_ij v_j  over keys j",
    "output": "out_i = W_O [z¹ … zᴴ] = Σ W_Oʰ zʰ over heads h,  h_i ← h_i + out_i",
    "pattern": "row i = query, column j = key, cell = p_ij; a row sums to 1",
    "predict": "softmax(W_vocabulary norm(h_i)) after the last layer",
    "cost": "one query: 2 n D + 2 n E FLOPs over n keys; a cache keeps S tokens",
    "elsewhere": "p'_ij, z'_i from the same q_i, k_j, v_j under another rule",
}
