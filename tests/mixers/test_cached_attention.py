"""A call of more tokens than a window's ring has slots: what its tokens see, and how many scores that takes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import AttentionConfig, init_state
from pallas_kernels.attention import blocks, xla
from tests.tolerances import assert_close

WINDOW = 5
FIRST, MANY, LAST = 7, 19, 6
LENGTH = FIRST + MANY + LAST


def ids(seed: int) -> np.ndarray:
    """Documents with holes inside and non-tokens anywhere, in two rows over the end of the first call.

    There the last row has a hole, whose slot holds what is out of the window.
    """
    rng = np.random.default_rng(seed)
    documents = np.cumsum(rng.random((3, LENGTH)) < 0.15, 1) + 1
    documents[1, FIRST - 3 : FIRST + 4] = documents[1, FIRST]
    kind = rng.choice([1, -1, 0], (3, LENGTH), p=(0.7, 0.15, 0.15))
    documents[2, : FIRST + 4], kind[2, : FIRST + 4] = documents[2, 0], [1, 1, 1, 1, 1, -1, 1, 1, 0, 1, -1]
    return (documents * kind).astype(np.int32)


@pytest.mark.parametrize("position", ["rope", "alibi"])
def test_many_tokens_see_what_they_would_one_by_one(position: str) -> None:
    module = AttentionConfig(dim=8, num_heads=2, num_kv_heads=1, window=WINDOW, position=position).build()
    x = np.random.default_rng(0).standard_normal((3, LENGTH, 8)).astype(np.float32)
    params = jax.jit(module.init)(jax.random.key(0), x)
    call = jax.jit(module.apply)

    def fed(seed: int, ends: list[int]) -> np.ndarray:
        state, outputs = init_state(module.config, 3, capacity=64), []
        for begin, end in zip([0, *ends], ends, strict=False):
            here = slice(begin, end)
            y, state = call(params, x[:, here], segment_ids=ids(seed)[:, here], state=state)
            outputs.append(y)
        return np.concatenate(outputs, 1)

    one_by_one = list(range(FIRST + 1, LENGTH + 1))
    for seed in range(4):
        y = fed(seed, [WINDOW, FIRST, FIRST + MANY, *one_by_one[MANY:]])
        assert_close(y, fed(seed, [WINDOW, FIRST, *one_by_one]), n=LENGTH)


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
