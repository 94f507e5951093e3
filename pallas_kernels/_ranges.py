"""The values that operations may be given: an op declares ranges beside its table, and checks them before it chooses.

NumPy arrays, numbers and small arrays on a CPU are checked in every call. To look at others the host would have to wait
for a device. They are checked inside `checked_ops`, where traced values are checked by `jax.experimental.checkify`.
Elsewhere no check is part of a program.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify

SMALL = 1 << 16
"""Numbers of an array on a CPU that are looked at in every call."""

# Keep this in JAX's context: with a ContextVar, jit would reuse inside the block what it traced outside.
_CHECKED = jax.make_user_context(False)


@dataclass(frozen=True)
class Range:
    """The numbers that an argument may hold. NaN is none.

    Attributes:
      least, most: ends, both allowed; None for no end.
      fix: what to do about other numbers.
      per_token: the argument is [B, T, ...], and what lies at holes and padding is not read.
      finite: infinities are no numbers either.
    """

    least: float | None = None
    most: float | None = None
    fix: str = "look for where it comes from"
    per_token: bool = False
    finite: bool = True

    def __str__(self) -> str:
        least, most = (x if x is None or isinstance(x, int) else f"{x:g}" for x in (self.least, self.most))
        if least is not None and most is not None:
            return f"lie in {least}..{most}"
        ends = [f"at least {least}"] * (least is not None) + [f"at most {most}"] * (most is not None)
        return f"be {' '.join(ends) or 'finite'}"

    def excludes(self, x: Any) -> Any:
        """Return where an array of NumPy or JAX holds other numbers."""
        wrong = x != x
        if self.least is not None:
            wrong = wrong | (x < self.least)
        if self.most is not None:
            wrong = wrong | (x > self.most)
        return wrong | (abs(x) == float("inf")) if self.finite and x.dtype.kind not in "iu" else wrong


@contextmanager
def checked_ops() -> Iterator[None]:
    """Make ops and mixers check all values inside the block; see `jaxblt.checked_ops`."""
    with _CHECKED(True):
        yield


def has_checked_ops() -> bool:
    """Return whether this is in a `checked_ops` block, where checks are traced."""
    return _CHECKED.value


def check_values(
    op: str,
    ranges: Mapping[str, Range],
    given: Mapping[str, Any],
    *,
    segment_ids: Any = None,
    alignment: int = 1,
) -> None:
    """Check the arguments of a call whose shapes fit, as far as values are looked at.

    Args:
      op: named by errors.
      ranges: of arguments, by name.
      given: these arguments; None passes.
      segment_ids: [B, T]; documents must be contiguous.
      alignment: documents must start at multiples of it.

    Raises:
      ValueError: a value is none of its range, or documents do not lie as promised. Traced values raise through the
        error that `checkify` returns.
    """
    check_documents(segment_ids, alignment, op=op)
    for name, range in ranges.items():
        if (x := given[name]) is None:
            continue
        arrays = (x,) if segment_ids is None or not range.per_token else (x, segment_ids)
        _check(f"{op}: {name} must {range}, got {{value}} at {{place}}: {range.fix}", range.excludes, *arrays)


def check_documents(segment_ids: Any, alignment: int | None = 1, *, op: str | None = None) -> None:
    """Check that each document's ids [B, T] are in one piece on the grid of `alignment`.

    With an alignment of None it begins with its row. Ids s and -s are of one document, 0 is no token. Errors are those
    of `check_values`; `op` stands before them.
    """
    if segment_ids is None:
        return
    where = "" if op is None else f"{op}: "
    _check(
        f"{where}segment_ids must be contiguous, got document {{value}} again at {{place}}: give each piece an id of "
        "its own, with padding between documents only",
        _again,
        segment_ids,
    )
    if alignment == 1:
        return
    grid = segment_ids.shape[1] if alignment is None else alignment
    promise = f"start at multiples of {grid}, as segment_alignment promises"
    _check(
        f"{where}documents must {'start with their row, as packed=False promises' if alignment is None else promise}, "
        "got document {value} from {place}: pack them so, or promise less",
        lambda ids: _starts(ids) & (np.arange(ids.shape[1])[None] % grid != 0),
        segment_ids,
    )


def _again(ids: Any) -> Any:
    """Return where a document begins whose id stands further left in its row, too."""
    starts, document = _starts(ids), abs(ids)
    if isinstance(ids, np.ndarray):
        # Sort the few beginnings only: on the host rows may have millions of tokens
        row, place = np.nonzero(starts)
        _, first = np.unique(np.stack([row, document[row, place]]), axis=1, return_index=True)
        starts[row[first], place[first]] = False
        return starts
    # Sort by id, of equal ids by place: the first of each is no repetition
    document = jnp.where(starts, document, 0)
    order = jnp.argsort(document, axis=1, stable=True)
    ordered = jnp.take_along_axis(document, order, 1)
    same = (ordered > 0) & (ordered == jnp.pad(ordered, ((0, 0), (1, 0)))[:, :-1])
    return jnp.take_along_axis(same, jnp.argsort(order, axis=1), 1)


def _starts(ids: Any) -> Any:
    """Return where a document begins."""
    xp, document = _module(ids), abs(ids)
    before = xp.concatenate([0 * document[:, :1], document[:, :-1]], 1)
    return (document != 0) & (document != before)


def _module(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else jnp


def _check(message: str, find: Callable[[Any], Any], x: Any, segment_ids: Any = None) -> None:
    """Check that `find` finds nothing in x, as far as values are looked at.

    Where there are ids it looks at tokens only.
    """
    arrays = [a for a in (x, segment_ids) if a is not None]
    traced = any(isinstance(a, Tracer) for a in arrays)
    if not _CHECKED.value and (traced or not all(map(_is_at_hand, arrays))):
        return
    if not traced and not all(getattr(a, "is_fully_addressable", True) for a in arrays):
        return  # other processes hold a part
    x, segment_ids = (a if a is None else (jnp if traced else np).asarray(a) for a in (x, segment_ids))
    wrong = find(x)
    if segment_ids is not None:
        wrong = wrong & (segment_ids > 0).reshape(segment_ids.shape + (1,) * (x.ndim - 2))
    if not (wrong.size if traced else wrong.any()):
        return
    xp = _module(wrong)
    first = xp.argmax(wrong)
    told = {"value": x.reshape(-1)[first], "place": xp.stack(xp.unravel_index(first, wrong.shape))}
    if traced:
        checkify.check(~jnp.any(wrong), message, **told)
    else:
        raise ValueError(message.format(**told))


def _is_at_hand(x: Any) -> bool:
    """Return whether looking at the values is cheap: they are on the host, or few on a CPU."""
    if not isinstance(x, jax.Array):
        return True
    return x.size <= SMALL and all(device.platform == "cpu" for device in x.devices())
