"""Properties of the training pass."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxblt.parallel import batch_sharding, make_mesh, replicated
from jaxblt.testing.subject import Subject, expect_close, expect_moved


def check_output(subject: Subject) -> None:
    """Check that the output has the input's shape and is finite; a hole's is zero."""
    ids = subject.with_holes(subject.documents())
    y = subject.run(ids=ids)
    if y.shape != subject.x.shape or not np.all(np.isfinite(y)):
        raise AssertionError(
            f"shape {y.shape} for inputs {subject.x.shape}, {np.sum(~np.isfinite(y))} not finite"
        )
    expect_close("outputs at holes are not zero", y[ids < 0], np.zeros_like(y[ids < 0]), 0.0)


def check_causal(subject: Subject, *, cuts: Sequence[int] = ()) -> None:
    """Check that only tokens up to its own change an output.

    What comes at a token does. For the tokens `cuts`, or all.
    """
    y = subject.run()
    cuts = cuts or range(1, subject.length)
    for i in range(0, len(cuts), subject.rows):
        x, some = subject.x.copy(), cuts[i : i + subject.rows]
        for row, cut in enumerate(some):
            x[row, cut:] += 2.0
        other = subject.run(x)
        for row, cut in enumerate(some):
            expect_close(
                f"the future from {cut} on reaches the past", other[row, :cut], y[row, :cut], subject.limit
            )
            expect_moved(
                f"token {cut} does not reach its own output", other[row, cut], y[row, cut], subject.limit
            )


def check_mixes(subject: Subject) -> None:
    """Check that a token reaches the next one's output.

    If the mixer is bidirectional it reaches the one before, too.
    """
    y, x = subject.run(), subject.x.copy()
    middle = subject.length // 2
    x[:, middle] += 2.0
    other = subject.run(x)
    expect_moved("a token does not reach the next", other[:, middle + 1], y[:, middle + 1], subject.limit)
    if not subject.config.causal:
        expect_moved(
            "a token does not reach the one before", other[:, middle - 1], y[:, middle - 1], subject.limit
        )


def check_packed(subject: Subject) -> None:
    """Check that documents packed in one row give the outputs that each gives alone."""
    ids = subject.documents()
    y, live = subject.run(ids=ids), ids > 0
    expect_close(
        "packed documents differ from each alone", y[live], subject.apart(subject.x, ids)[live], subject.limit
    )


def check_holes(subject: Subject) -> None:
    """Check that holes count as time, hold nothing, and keep documents apart.

    What is multiplied by a mask has been read: NaN there reaches outputs or gradients, in which holes weigh nothing.
    """
    ids = subject.with_holes(subject.documents())
    y, live = subject.run(ids=ids), ids > 0
    expect_close(
        "documents with holes are not kept apart", y[live], subject.apart(subject.x, ids)[live], subject.limit
    )
    dy = subject.noise(9, subject.x.shape) * live[..., None]
    gradients = subject.gradient(subject.params, subject.x, ids, dy)
    what = "the contents of holes or padding are read"
    for poison in (100.0, np.nan):
        x = np.where(live[..., None], subject.x, np.float32(poison))
        expect_close(what, subject.run(x, ids), y, subject.limit)
        found = subject.gradient(subject.params, x, ids, dy)
        pairs = zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(found), strict=True)
        for (path, leaf), got in pairs:
            expect_close(f"{what} in the gradient{jax.tree_util.keystr(path)}", got, leaf, subject.limit)
        at_holes = np.asarray(found[1])[~live]
        expect_close("holes or padding have a gradient", at_holes, np.zeros_like(at_holes), 0.0)


def check_odd_lengths(subject: Subject) -> None:
    """Check that rows of any length, without segment ids, give what they give padded."""
    for length in (1, 2, 13):
        ids = np.zeros((subject.rows, subject.length), np.int32)
        ids[:, :length] = 1
        short = subject.parallel(subject.params, subject.x[:, :length], None)
        padded = subject.run(ids=ids)[:, :length]
        expect_close(f"a row of {length} differs from itself padded", short, padded, subject.limit)


def check_batch(subject: Subject) -> None:
    """Check that a row's output does not depend on the others, nor on its place."""
    ids = subject.documents()
    y, x = subject.run(ids=ids), subject.x.copy()
    x[1:] += 2.0
    expect_close("the other rows reach row 0", subject.run(x, ids)[0], y[0], subject.limit)
    turned = subject.run(np.roll(subject.x, 1, 0), np.roll(ids, 1, 0))
    live = ids > 0
    expect_close("a row's place matters", np.roll(turned, -1, 0)[live], y[live], subject.limit)


def check_positions(subject: Subject) -> None:
    """Check that positions given as the offset in the document change nothing."""
    ids = subject.documents()
    change = ids != np.concatenate([np.zeros_like(ids[:, :1]), ids[:, :-1]], 1)
    index = np.broadcast_to(np.arange(subject.length), ids.shape)
    offset = index - np.maximum.accumulate(np.where(change, index, 0), 1)
    y = subject.parallel(subject.params, subject.x, ids, offset.astype(np.int32))
    live = ids > 0
    expect_close(
        "explicit positions differ from counted",
        np.asarray(y)[live],
        subject.run(ids=ids)[live],
        subject.limit,
    )


def check_sequence(subject: Subject, *, counts: tuple[int, ...] = (4, 2)) -> None:
    """Check that rows split along a `seq` axis give outputs and gradients of one device.

    Documents and holes are included. Uses the first of `counts` devices that are there.
    """
    count = next(n for n in counts if n <= jax.device_count())
    length = subject.length - subject.length % (2 * count)
    x, ids = (a[:, :length] for a in (subject.x, subject.with_holes(subject.documents())))
    dy, live = subject.noise(8, x.shape) * (ids > 0)[..., None], ids > 0

    def passes(params: Any, sharding: Any) -> tuple[np.ndarray, Any]:
        given = jax.device_put((x, ids, dy), sharding)
        return jax.device_get((subject.parallel(params, *given[:2]), subject.gradient(params, *given)))

    expected, expected_gradients = passes(subject.params, None)
    mesh = make_mesh(data=1, seq=count, devices=jax.devices()[:count])
    with jax.set_mesh(mesh):
        y, gradients = passes(jax.device_put(subject.params, replicated(mesh)), batch_sharding(mesh))
    what = f"{count} devices along the sequence differ from one"
    expect_close(what, y[live], expected[live], subject.limit)
    pairs = zip(jax.tree.leaves_with_path(expected_gradients), jax.tree.leaves(gradients), strict=True)
    for (path, leaf), got in pairs:
        expect_close(f"{what} in the gradient{jax.tree_util.keystr(path)}", got, leaf, subject.limit)
