"""A ring whose steps are one call each, as for a kernel that merges: exact with what runs here, and that on GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.parallel.attention import plan, ring
from jaxblt.parallel.attention.context import context_attention
from jaxblt.parallel.layout import ZIGZAG
from pallas_kernels.attention import attention, masks
from tests.parallel.test_context import Case, check, dense, mesh_of, passes
from tests.tolerances import relative_error


@pytest.mark.slow(days=28, group="rings and splits")
@pytest.mark.parametrize("case", [Case(devices=4, layout=ZIGZAG), Case(devices=4, groups=1)], ids=str)
def test_equals_dense_attention(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, at_once = [], ring._at_once
    cast, attend = [], ring.attend
    monkeypatch.setattr(plan, "merges_in_kernel", lambda *args, **options: True)
    monkeypatch.setattr(ring, "_at_once", lambda *args: calls.append(args) or at_once(*args))
    monkeypatch.setattr(
        ring, "attend", lambda *args: cast.append(args[4].get("cast_output", False)) or attend(*args)
    )
    check(case)
    assert [step for _, step, *_ in calls] == [1, 2, 3]
    assert cast == [False, False, False, True]


@pytest.mark.parametrize("change", [{"window": 8}, {"mode": "all_gather"}], ids=str)
def test_other_modes_refuse_the_kernel(change: dict) -> None:
    q = jnp.zeros((2, 64, 4, 64), jnp.bfloat16)
    with jax.set_mesh(mesh_of(Case(devices=2))), pytest.raises(ValueError, match="'mosaic_gpu' runs rings"):
        context_attention(q, q, q, causal=True, implementation="mosaic_gpu", **change)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_is_as_exact_as_one_call(head_dim: int, causal: bool) -> None:
    """Over two GPUs, values: at most 1.05 times the error of cuDNN's one call, and the same bits again."""
    case = Case(devices=2, length=4096, head_dim=head_dim, causal=causal)
    arrays = case.arrays(jnp.bfloat16)
    q, k, v, _ = arrays
    want, *_ = dense(case, [x.astype(np.float32) for x in arrays])
    alone = jax.jit(lambda q, k, v: attention(q, k, v, masks.band(causal), implementation="cudnn"))(q, k, v)
    options = {"causal": causal, "mode": "ring", "implementation": "mosaic_gpu"}
    run = jax.jit(lambda q, k, v: context_attention(q, k, v, **options))
    with jax.set_mesh(mesh_of(case)):
        found, again = (np.asarray(run(q, k, v)) for _ in range(2))
    assert found.tobytes() == again.tobytes()
    assert relative_error(found, want) <= 1.05 * relative_error(alone, want)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_what_runs_by_default_is_as_exact_as_a_ring_may_be(causal: bool, packed: bool) -> None:
    """Over two GPUs, whole rows and rows with holes: at most 1.3 times the error of cuDNN's one call."""
    case = Case(devices=2, length=4096, head_dim=128, causal=causal, packed=packed)
    arrays, ids = case.arrays(jnp.bfloat16), case.segment_ids()
    exact = dense(case, [x.astype(np.float32) for x in arrays])
    mask = masks.band(causal) & masks.documents(ids)
    limits = passes(lambda q, k, v: attention(q, k, v, mask, implementation="cudnn"))(*arrays)
    run = passes(lambda q, k, v: context_attention(q, k, v, ids, causal=causal, packed=packed, mode="ring"))
    with jax.set_mesh(mesh_of(case)):
        found = run(*arrays)
    for name, got, want, limit in zip(("o", "dq", "dk", "dv"), found, exact, limits, strict=True):
        assert relative_error(got, want) <= 1.3 * relative_error(limit, want), name
