"""The parts that convolution ops share; no op of its own, and nothing here knows an op's table.

`gates`: gates, holes, skip connection, checks of arguments. `shifted`: a few taps as shifted products. `toeplitz`:
longer filters as matrix products. `packed`: exact convolution of packed rows by halves. `reference`: the definition of
`blocked_conv` and `long_conv`. `tiles`: what Hopper kernels are made of.
"""
