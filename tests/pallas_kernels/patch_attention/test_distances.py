"""Lookup at distances of a pattern, ahead and back: the written-out sums, gradients, time, refusals."""

from functools import partial

import jax
import numpy as np
import pytest

from pallas_kernels._dispatch import Device
from pallas_kernels.patch_attention import lookup
from pallas_kernels.patch_attention.triton_why import why_not
from tests.pallas_kernels.patch_attention.cases import lookup_arrays
from tests.tolerances import assert_close

DISTANCES = (0, 1, -2, 4)


def test_values_and_gradients_are_those_of_the_written_out_mask():
    """A dense mask of which key lies at which distance, softmax over it, and its gradient by JAX."""
    arrays = lookup_arrays(look_back=len(DISTANCES))

    def loss(implementation, arrays, marks):
        run = partial(lookup, look_back=len(DISTANCES), distances=DISTANCES, implementation=implementation)
        found = run(**arrays, **marks)
        return (found * found).sum(), found

    floats = {name: arrays[name] for name in ("q", "k", "v", "bias")}
    marks = {name: arrays[name] for name in ("latest", "valid")}
    both = [
        jax.jit(jax.grad(partial(loss, name), has_aux=True))(floats, marks) for name in ("xla", "reference")
    ]
    for one, other in zip(*map(jax.tree.leaves, both), strict=True):
        assert_close(one, other, n=arrays["latest"].size)
    found = np.asarray(both[0][1])
    q, k, v, bias = (np.asarray(floats[name], np.float64) for name in ("q", "k", "v", "bias"))
    latest, valid = np.asarray(marks["latest"]), np.asarray(marks["valid"])
    for b, n, s in ((0, 0, 3), (1, 1, 20), (0, 2, 11)):
        seen = [(i, latest[b, n, s] - d) for i, d in enumerate(DISTANCES)]
        seen = [(i, m) for i, m in seen if 0 <= m < valid.shape[-1] and valid[b, n, m]]
        scores = [(q[b, n, s] * k[b, n, m]).sum(-1) / q.shape[-1] ** 0.5 + bias[:, i] for i, m in seen]
        weights = np.exp(scores) / np.exp(scores).sum(0)
        want = sum(w[:, None] * v[b, n, m] for w, (_, m) in zip(weights, seen, strict=True))
        assert_close(found[b, n, s], want, n=4)


@pytest.mark.slow(days=28, group="properties of kernels")
def test_time_is_linear_in_bytes_and_in_distances_alone():
    """FLOPs by XLA's count: twice the bytes take twice as many, and 8 far distances no more than 8 near ones."""

    def flops(size, distances):
        arrays = lookup_arrays(look_back=8, size=size, capacity=72)
        run = jax.jit(partial(lookup, look_back=8, distances=distances, implementation="xla"))
        return run.lower(**arrays).cost_analysis()["flops"]

    far = (0, 1, 2, 4, 8, 16, 32, 64)
    assert flops(512, far) == pytest.approx(2 * flops(256, far), rel=0.05)
    assert flops(256, far) == pytest.approx(flops(256, None), rel=0.05)


def test_what_does_not_fit_is_named():
    arrays = lookup_arrays()
    with pytest.raises(ValueError, match=r"expected look_back = 2 different distances, got \(1, 1\)"):
        lookup(**arrays, look_back=2, distances=(1, 1))
    hopper = Device("gpu", (9, 0), "NVIDIA H200")
    assert why_not(hopper, look_back=2) is None
    assert "none at distances of a pattern" in (why_not(hopper, look_back=2, distances=(0, 2)) or "")
