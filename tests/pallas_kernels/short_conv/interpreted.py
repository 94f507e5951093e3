"""Triton's interpreter under JAX, without torch: kernels run on the CPU, one program after another."""

from threading import Lock
from typing import Any

import jax
import numpy as np

FILL = 77
"""What an output holds before the kernel writes to it."""

_ONE_KERNEL_AT_A_TIME = Lock()


class Memory:
    """An array as the interpreter takes it: by address. What it calls storage, or the host's copy, is the array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = str(array.dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "Memory":
        return self

    def cpu(self) -> "Memory":
        return self

    def new_empty(self, *_: Any, **__: Any) -> "Memory":
        return Memory(self.array)

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def set_(self, *_: Any) -> None:
        """Already there."""

    def copy_(self, _: "Memory") -> None:
        """Already there."""


def triton_call(
    *arrays: Any, kernel: Any, out_shape: Any, grid: Any, name: str, compute_capability: int, **constants: Any
) -> Any:
    """`jax_triton.triton_call` by the interpreter; `out_shape` of one output, or of several in a sequence."""
    del name, compute_capability

    def run(*inputs: Any) -> Any:
        outputs = jax.tree.map(lambda out: np.full(out.shape, FILL, out.dtype), out_shape)
        # The interpreter keeps its place in the grid in a global; devices call from threads of their own.
        with _ONE_KERNEL_AT_A_TIME:
            memories = [Memory(np.array(z)) for z in inputs] + [Memory(z) for z in jax.tree.leaves(outputs)]
            kernel[grid](*memories, **constants)
        return outputs

    return jax.pure_callback(run, out_shape, *arrays)
