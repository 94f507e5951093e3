"""Properties of the streaming pass: any split of a sequence into calls is the same function."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.mixers.driver.base import init_state
from jaxblt.mixers.driver.keep import call_keeping, keep_first
from jaxblt.testing.subject import Subject, expect_close


def _sizes(subject: Subject, size: int) -> list[int]:
    return [size] * -(-subject.length // size)


def _documents_anywhere(subject: Subject) -> np.ndarray:
    """Return documents that start at no multiple of anything: a stream promises no alignment."""
    ids, length = np.ones((subject.rows, subject.length), np.int32), subject.length
    ids[0, length // 3 :], ids[0, length // 3 + 1 :] = 2, 3
    ids[1, length - 2 :] = 5
    return ids


def check_chunked(subject: Subject) -> None:
    """Check that calls of 1, of 7 and of everything give what the training pass gives."""
    ids = np.ones((subject.rows, subject.length), np.int32)
    y = subject.run()
    for size in (1, 7, subject.length):
        fed = subject.feed(subject.x, ids, _sizes(subject, size))
        expect_close(f"calls of {size} differ from the training pass", fed, y, subject.limit)


def check_continued(subject: Subject) -> None:
    """Check that without segment ids every token continues the row's document."""
    state, half = subject.start(), subject.length // 2
    first, state = subject.step(subject.params, subject.x[:, :half], None, state)
    rest, _ = subject.step(subject.params, subject.x[:, half:], None, state)
    fed = np.concatenate([first, rest], 1)
    expect_close("calls without segment ids differ from the training pass", fed, subject.run(), subject.limit)


def check_documents_streamed(subject: Subject) -> None:
    """Check that a document that starts amid a call sees nothing of the one before."""
    for ids in (_documents_anywhere(subject), subject.documents()):
        expected, live = subject.apart(subject.x, ids), ids > 0
        for size in (1, 7, subject.length):
            fed = subject.feed(subject.x, ids, _sizes(subject, size))
            expect_close(f"documents in calls of {size} differ", fed[live], expected[live], subject.limit)


def check_holes_streamed(subject: Subject) -> None:
    """Check that holes fed to the state are those of the training pass, whatever lies there."""
    ids = subject.with_holes(_documents_anywhere(subject))
    expected = np.where((ids > 0)[..., None], subject.apart(subject.x, ids), 0)
    x = np.where((ids > 0)[..., None], subject.x, np.float32(np.nan))
    for size in (1, 7, subject.length):
        fed = subject.feed(x, ids, _sizes(subject, size))
        expect_close(f"holes in calls of {size} differ", fed, expected, subject.limit)


def check_rows_advance_alone(subject: Subject) -> None:
    """Check that rows take tokens when they like.

    A call without a token for a row leaves every bit of its state.
    """
    ids = subject.with_holes(_documents_anywhere(subject))
    expected, rng = subject.apart(subject.x, ids), np.random.default_rng([subject.seed, 3])
    at, state, y = np.zeros(subject.rows, int), subject.start(), np.zeros_like(subject.x)
    while np.any(at < subject.length):
        size = int(rng.choice([1, 7]))
        chunk, chunk_ids = (
            np.full((subject.rows, size, subject.config.dim), np.nan, np.float32),
            np.zeros((subject.rows, size)),
        )
        taken = []
        for row in range(subject.rows):
            count = rng.integers(0, min(size, subject.length - at[row]) + 1) if rng.random() < 0.7 else 0
            slots = np.sort(rng.choice(size, count, replace=False))
            span = np.arange(at[row], at[row] + count)
            chunk[row, slots], chunk_ids[row, slots] = subject.x[row, span], ids[row, span]
            taken.append((slots, span))
        out, after = subject.step(subject.params, chunk, chunk_ids.astype(np.int32), state)
        for row, (slots, span) in enumerate(taken):
            y[row, span] = np.asarray(out)[row, slots]
            at[row] += len(span)
            if not len(span):
                _expect_same_bits(state, after, row)
        state = after
    live = ids > 0
    expect_close("rows that advance on their own differ", y[live], expected[live], subject.limit)


def _expect_same_bits(
    before: object, after: object, row: int, what: str = "of a row without a token changed"
) -> None:
    pairs = zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        if np.asarray(old)[row].tobytes() != np.asarray(new)[row].tobytes():
            raise AssertionError(f"the state{jax.tree_util.keystr(path)} {what}")


def check_keep(subject: Subject) -> None:
    """Check that a call may look at more tokens than it keeps.

    Neither outputs nor the state know a bit of the tokens behind: drafted bytes are those without drafts.
    """
    size, expected = 7, subject.run()
    ids, keep = jnp.ones((subject.rows, size), jnp.int32), np.array([0, 3, size])
    call = lambda x, state, ids: subject.step(subject.params, jnp.asarray(x), ids, state)  # noqa: E731
    first, x = subject.x[:, :size], subject.x[:, size : 2 * size]
    _, before = call(first, subject.start(), ids)
    looked, kept = call_keeping(call, x, before, ids, jnp.asarray(keep))
    expect_close("outputs of a look differ", looked, expected[:, size : 2 * size], subject.limit)
    behind = (np.arange(size) >= keep[:, None])[..., None]
    other, _ = call(np.where(behind, subject.noise(4, x.shape), x), before, ids)
    alone, again = call(np.where(behind, np.float32(np.nan), x), before, keep_first(ids, jnp.asarray(keep)))
    for row, count in enumerate(keep):
        for y in (other, alone):
            if np.asarray(y)[row, :count].tobytes() != np.asarray(looked)[row, :count].tobytes():
                raise AssertionError("outputs of a call know bits of later tokens")
        _expect_same_bits(kept, again, row, "knows bits of tokens that were not kept")
    _expect_same_bits(before, kept, 0)
    _check_goes_on(subject, call, kept, size + keep, expected)


def _check_goes_on(
    subject: Subject, call: Callable, state: object, at: np.ndarray, expected: np.ndarray
) -> None:
    """Check the next call of rows that stand at `at`."""
    size = 7
    span = at[:, None] + np.arange(size)
    there, span = span < subject.length, np.minimum(span, subject.length - 1)
    rows = np.arange(subject.rows)[:, None]
    y, _ = call(subject.x[rows, span], state, jnp.asarray(there, jnp.int32))
    expect_close(
        "calls behind what was kept differ", np.asarray(y)[there], expected[rows, span][there], subject.limit
    )


def _has_capacity(state: object) -> bool:
    return getattr(state, "capacity", None) is not None


def check_state(subject: Subject) -> None:
    """Check that the state keeps shapes and dtypes; only parts with a `capacity` grow with it."""
    state = subject.start()
    ids = jnp.ones((subject.rows, 1), jnp.int32)
    _, after = jax.eval_shape(subject.step, subject.params, jnp.asarray(subject.x[:, :1]), ids, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    longer = init_state(subject.config, subject.rows, capacity=100 * subject.length)
    parts, structure = jax.tree.flatten(state, is_leaf=_has_capacity)
    for part, other in zip(parts, structure.flatten_up_to(longer), strict=True):
        if not _has_capacity(part) and part.nbytes != other.nbytes:
            raise AssertionError(
                f"a part of the state has no capacity and yet grows with it: {part.nbytes} bytes became {other.nbytes}"
            )
