"""Hot operations, one folder each: `from pallas_kernels.attention import attention`.

Each has several implementations of one function ("reference", "xla", "cudnn", ...); the best that the device and the
shapes allow is picked. `implementation=` forces one, and `explain` says which it would be and why.
"""
