"""The parts that several rooms of bridges share: a textbook's lines, and what layers with a state promise."""

STREAMED = frozenset(
    ["causal", "lengths", "batch", "state", "any_split", "pure_state", "steady_state", "gradients", "dtype"]
)
"""Promises of a causal layer whose calls may be cut anywhere, with a state of one size that no call changes."""

MATRIX_STATE = """\
    s, y = 0 * k[:, 0, ..., None] * v[:, 0, :, None], []
    for t in range(x.shape[1]):
        s = s * decay[:, t]
        new = gates["beta"][:, t, :, None] * (v[:, t] - (k[:, t, ..., None] * s).sum(-2)) if ${delta} else v[:, t]
        s = s + k[:, t, ..., None] * new[:, :, None]
        y.append((q[:, t, ..., None] * s).sum(-2) / k.shape[-1] ** 0.5)
    return np.stack(y, 1)
"""
"""The end of a reference to a head's matrix of state, token by token, with or without the delta rule."""
