"""Parts that ops with a matrix of state per head share; no op of its own, and nothing here knows an op's table.

`tokens`: holes, padding and documents. `chunks`: time cut into chunks. `decays`: products of gates over stretches of a
chunk. `products`: matrix products on narrow operands, with gradients on narrow operands. `checks`: arguments.
`jla`: the kernels of jax-linear-attention, an optional package.
"""
