"""A call of many more tokens than a window's ring has slots: what they see, and how many scores that takes."""

from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import AttentionConfig, init_state
from jaxblt.parallel import make_mesh
from pallas_kernels.attention import blocks, xla
from tests.tolerances import assert_close

WINDOW = 5
FIRST, MANY, LAST = 7, 21, 6
LENGTH = FIRST + MANY + LAST


def ids(seed: int) -> np.ndarray:
    """Documents with holes inside and non-tokens anywhere, in two rows over the end of the first call.

    There the last row has a hole, whose slot holds what is out of the window.
    """
    rng = np.random.default_rng(seed)
    documents = np.cumsum(rng.random((4, LENGTH)) < 0.15, 1) + 1
    documents[1, FIRST - 3 : FIRST + 4] = documents[1, FIRST]
    kind = rng.choice([1, -1, 0], (4, LENGTH), p=(0.7, 0.15, 0.15))
    documents[2, : FIRST + 4], kind[2, : FIRST + 4] = documents[2, 0], [1, 1, 1, 1, 1, -1, 1, 1, 0, 1, -1]
    return (documents * kind).astype(np.int32)


@pytest.mark.parametrize(
    ("position", "dtype", "split"),
    [("rope", jnp.float32, False), ("alibi", jnp.float32, False), ("rope", jnp.bfloat16, True)],
)
def test_many_tokens_see_what_they_would_one_by_one(position: Any, dtype: Any, split: bool) -> None:
    """Also where a mesh splits rows, and would split longer calls along the sequence."""
    config = AttentionConfig(dim=8, num_heads=2, num_kv_heads=1, window=WINDOW, position=position)
    module = config.build(dtype=dtype)
    x = np.random.default_rng(0).standard_normal((4, LENGTH, 8)).astype(np.float32)
    params = jax.jit(module.init)(jax.random.key(0), x)
    call = jax.jit(module.apply)

    def fed(seed: int, ends: list[int]) -> np.ndarray:
        state, outputs = init_state(module.config, 4, capacity=64, dtype=dtype), []
        for begin, end in zip([0, *ends], ends, strict=False):
            here = slice(begin, end)
            y, state = call(params, x[:, here], segment_ids=ids(seed)[:, here], state=state)
            outputs.append(y)
        return np.concatenate(outputs, 1)

    one_by_one = list(range(FIRST + 1, LENGTH + 1))
    mesh = make_mesh(data=2, seq=2, devices=jax.devices()[:4])
    for seed in range(4):
        expected = fed(seed, [WINDOW, FIRST, *one_by_one])
        with jax.set_mesh(mesh) if split else nullcontext():
            y = fed(seed, [WINDOW, FIRST, FIRST + MANY, *one_by_one[MANY:]])
        assert_close(y, expected, dtype, n=LENGTH)


def test_scores_grow_with_the_call_and_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[blocks.Blocks] = []
    plain = blocks.choose_blocks

    def choose(*args: Any, **options: Any) -> blocks.Blocks:
        chosen.append(plain(*args, **options))
        return chosen[-1]

    monkeypatch.setattr(xla.cut, "choose_blocks", choose)
    module = AttentionConfig(dim=8, num_heads=1, window=128).build()
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)  # noqa: E731
    params = jax.eval_shape(module.init, jax.random.key(0), shape(1, 1, 8))
    state = jax.eval_shape(lambda: init_state(module.config, 1, capacity=1 << 20))
    scores = []
    for tokens in (1024, 4096):
        chosen.clear()
        jax.eval_shape(lambda p, x, s: module.apply(p, x, state=s), params, shape(1, tokens, 8), state)
        scores.append(sum(b.count() * b.block_q * b.block_k for b in chosen))
    assert 0 < scores[1] < 5 * scores[0]
    assert scores[1] < 4096 * 128 * 3
