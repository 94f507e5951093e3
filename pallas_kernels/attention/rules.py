"""Rules: which keys a query sees, told from the positions of both; joined by `&`, `|` and `~`.

    rule = Interval(before=511, after=0) | Global(first=4) | RandomBlocks(count=3, seed=0)
    attention(q, k, v, masks.CAUSAL & masks.documents(segment_ids) & rule)

A rule is frozen, hashable, and knows two things. `sees(q, k)` is its definition, elementwise over integers. It is the
same function in the reference and in a kernel, on numpy and on JAX arrays. `bounds(box)` says which pairs of blocks it
leaves empty and which it fills, by arithmetic with intervals: nothing of size T x T is made.

`choices.py` has the rule whose lists are arrays. `presets.py` has the patterns that papers name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

SPAN = 5
"""Blocks of `RandomBlocks` in a box that are looked at one by one; a longer box counts as partial."""


class Span(NamedTuple):
    """Positions of blocks: of each block the least, the most, and all of them in a last axis, or None if not listed."""

    least: Any
    most: Any
    tokens: Any


class Box(NamedTuple):
    """Blocks of queries [..., n, 1] that meet blocks of keys [..., 1, m], on numpy or on JAX arrays.

    `apart` is the least and the most distance of pairs that count, where not all pairs of positions do.
    """

    q: Span
    k: Span
    apart: tuple[Any, Any] | None = None

    @property
    def distance(self) -> tuple[Any, Any]:
        """Return the least and the most that a query's position exceeds a key's by."""
        return self.apart or (self.q.least - self.k.most, self.q.most - self.k.least)

    def over(self, size: int) -> "Box":
        """Return the box of the numbers of blocks of `size` positions."""
        q, k = (Span(*(None if x is None else x // size for x in span)) for span in (self.q, self.k))
        # Round both ways: positions 5 apart in blocks of 4 lie in blocks that are 1 or 2 apart.
        return Box(q, k, self.apart and (self.apart[0] // size, -(-self.apart[1] // size)))


class Bounds(NamedTuple):
    """What is known of each pair of blocks: `some` False if no pair of tokens is seen, `every` True if all are."""

    some: Any
    every: Any


class Rule(ABC):
    """A condition on the positions of a query and of a key."""

    @abstractmethod
    def sees(self, q: Any, k: Any) -> Any:
        """Return whether queries at positions q see keys at positions k, elementwise."""

    @abstractmethod
    def bounds(self, box: Box) -> Bounds:
        """Return `some` and `every` for pairs of blocks; either may be cautious, neither may be wrong."""

    @property
    def grain(self) -> int | None:
        """Size of the blocks that the rule is made of; None if it is not made of blocks."""
        return None

    @property
    def looks_ahead(self) -> bool:
        """True if the rule means nothing where later keys are hidden."""
        return False

    @property
    def is_shift_invariant(self) -> bool:
        """True if only the distance of query and key counts, which is the same in a document and in its row."""
        return False

    @property
    def compares_places(self) -> bool:
        """True if queries and keys are tokens of one row, whose positions the rule compares."""
        return True

    def __and__(self, other: Any) -> Any:
        return And(self, other) if isinstance(other, Rule) else NotImplemented

    def __or__(self, other: Any) -> Any:
        return Or(self, other) if isinstance(other, Rule) else NotImplemented

    def __invert__(self) -> "Not":
        return Not(self)


def is_static(rule: Rule) -> bool:
    """Return whether a rule holds no arrays, so that it is known when a program is compiled."""
    return not jax.tree.leaves(rule)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Interval(Rule):
    """An interval: position p may see the keys at positions p - before to p + after; None is no bound."""

    before: int | None = None
    after: int | None = None

    @property
    def causal(self) -> bool:
        """True if no key after the query is visible."""
        return self.after == 0

    @property
    def window(self) -> int | None:
        """Keys at a distance below it are visible: to the left if causal, else to both sides."""
        return None if self.before is None else self.before + 1

    @property
    def is_shift_invariant(self) -> bool:
        return True

    @property
    def is_plain(self) -> bool:
        """True if it is no bound, or a causal mask with or without a window: all that kernels' own masks can say."""
        causal = self.causal and (self.before is None or self.before >= 0)
        return causal or (self.before is None and self.after is None)

    def __and__(self, other: Any) -> Any:
        if isinstance(other, Interval):
            return Interval(_least(self.before, other.before), _least(self.after, other.after))
        return super().__and__(other)

    def conditions(self, distance: Int[Array, "..."]) -> list[Bool[Array, "..."]]:
        """Return what the bounds say of pairs whose query is `distance` positions after the key."""
        if self.before is not None and self.before == self.after:
            return [jnp.abs(distance) < self.before + 1]
        found = [] if self.after is None else [distance >= -self.after]
        return found if self.before is None else [*found, distance < self.before + 1]

    def reach(self, first: int, last: int, keys: int) -> tuple[int, int]:
        """Return first and end of those of `keys` positions that some query from `first` to `last` may see.

        Both are 0 if there are none.
        """
        low = 0 if self.before is None else max(0, first - self.before)
        high = keys if self.after is None else min(keys, last + self.after + 1)
        return (low, high) if low < high else (0, 0)

    def sees(self, q: Any, k: Any) -> Any:
        seen = q - k == q - k
        seen = seen if self.before is None else seen & (q - k <= self.before)
        return seen if self.after is None else seen & (k - q <= self.after)

    def bounds(self, box: Box) -> Bounds:
        low, high = box.distance
        some = every = low == low
        if self.before is not None:
            some, every = some & (low <= self.before), every & (high <= self.before)
        if self.after is not None:
            some, every = some & (high >= -self.after), every & (low >= -self.after)
        return Bounds(some, every)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Global(Rule):
    """Tokens that all see: those at positions below `first`, and those at multiples of `every`.

    With `rows` these tokens see all others, too.
    """

    first: int = 0
    every: int | None = None
    rows: bool = True

    def __post_init__(self) -> None:
        _check(self, "first", least=0)
        if self.every is not None:
            _check(self, "every", least=1)

    def _is_global(self, x: Any) -> Any:
        found = x < self.first
        return found if self.every is None else found | (x % self.every == 0)

    def sees(self, q: Any, k: Any) -> Any:
        return self._is_global(k) | self._is_global(q) if self.rows else self._is_global(k) | (q != q)

    def bounds(self, box: Box) -> Bounds:
        keys = self._bounds_of(box.k)
        if not self.rows:
            return Bounds(keys.some | (box.q.least != box.q.least), keys.every | (box.q.least != box.q.least))
        queries = self._bounds_of(box.q)
        return Bounds(keys.some | queries.some, keys.every | queries.every)

    def _bounds_of(self, span: Span) -> Bounds:
        some, every = span.least < self.first, span.most < self.first
        if self.every is None:
            return Bounds(some, every)
        beyond = _numpy_of(span.least).maximum(span.least, self.first)
        alone = (beyond == span.most) & (span.most % self.every == 0)
        return Bounds(
            some | _has_multiple(span.least, span.most, self.every), every | alone | (self.every == 1)
        )


@jax.tree_util.register_static
@dataclass(frozen=True)
class Strided(Rule):
    """Keys at a distance that is a multiple of `stride`, on either side (Child et al., 1904.10509)."""

    stride: int

    def __post_init__(self) -> None:
        _check(self, "stride", least=1)

    @property
    def is_shift_invariant(self) -> bool:
        return True

    def sees(self, q: Any, k: Any) -> Any:
        return (q - k) % self.stride == 0

    def bounds(self, box: Box) -> Bounds:
        low, high = box.distance
        some = _has_multiple(low, high, self.stride)
        return Bounds(some, some & ((low == high) | (self.stride == 1)))


@jax.tree_util.register_static
@dataclass(frozen=True)
class Dilated(Rule):
    """Keys at distances of 0 and of `base`^i up to `reach`, on either side: 2 log(reach) + 3 of them at most."""

    reach: int = 64
    base: int = 2

    def __post_init__(self) -> None:
        _check(self, "reach", least=1)
        _check(self, "base", least=2)

    @property
    def is_shift_invariant(self) -> bool:
        return True

    @property
    def distances(self) -> tuple[int, ...]:
        """All distances, of both signs, in order."""
        powers = [self.base**i for i in range(self.reach.bit_length()) if self.base**i <= self.reach]
        return (*(-power for power in reversed(powers)), 0, *powers)

    def sees(self, q: Any, k: Any) -> Any:
        return _any(q - k == distance for distance in self.distances)

    def bounds(self, box: Box) -> Bounds:
        low, high = box.distance
        found = sum(((low <= d) & (d <= high)).astype(np.int32) for d in self.distances)
        return Bounds(found > 0, found == high - low + 1)


@jax.tree_util.register_static
@dataclass(frozen=True)
class RandomBlocks(Rule):
    """Each block of `block` positions and `count` blocks drawn for it from those up to itself, seen by each other.

    The draws of block i are a function of i and of the seed, with replacement. So they depend neither on the length nor
    on later tokens, and are the same in a stream. `masks.CAUSAL` leaves the earlier half of the pairs.
    """

    count: int
    seed: int = 0
    block: int = 64

    def __post_init__(self) -> None:
        _check(self, "count", least=1)
        _check(self, "seed", least=0)
        _check(self, "block", least=1)

    @property
    def grain(self) -> int:
        return self.block

    def sees(self, q: Any, k: Any) -> Any:
        return self._meet(q // self.block, k // self.block)

    def _meet(self, a: Any, b: Any) -> Any:
        """Return whether two blocks see each other: the later one has drawn the earlier one."""
        xp = _numpy_of(a, b)
        later, earlier = (pick(a, b).astype(np.uint32) for pick in (xp.maximum, xp.minimum))
        salted = _scramble(later + np.uint32(_salt(self.seed)))
        draws = (_scramble(salted + np.uint32(c + 1)) % (later + np.uint32(1)) for c in range(self.count))
        return _any(draw == earlier for draw in draws)

    def bounds(self, box: Box) -> Bounds:
        (q, q_last, _), (k, k_last, _), _ = box.over(self.block)
        rows = q[..., None, None] + self._looked_at(q, q_last)[..., None]
        columns = k[..., None, None] + self._looked_at(k, k_last)[..., None, :]
        inside = (rows <= q_last[..., None, None]) & (columns <= k_last[..., None, None])
        met = self._meet(rows, columns)
        beyond = (q_last - q >= SPAN) | (k_last - k >= SPAN)
        return Bounds((inside & met).any((-2, -1)) | beyond, (met | ~inside).all((-2, -1)) & ~beyond)

    @staticmethod
    def _looked_at(first: Any, last: Any) -> np.ndarray:
        """Return 0, 1, ... for the blocks of a box that are looked at, behind an axis of 1 for each of its own."""
        count = min(SPAN, 1 + int((last - first).max(initial=0))) if isinstance(first, np.ndarray) else SPAN
        return np.arange(count, dtype=np.int32).reshape(*(1,) * first.ndim, -1)


@jax.tree_util.register_static
@dataclass(frozen=True)
class PrefixLM(Rule):
    """A prefix of `length` tokens that all see, and keys up to the query's own position."""

    length: int

    def __post_init__(self) -> None:
        _check(self, "length", least=1)

    @property
    def looks_ahead(self) -> bool:
        return True

    def sees(self, q: Any, k: Any) -> Any:
        return (k < self.length) | (k <= q)

    def bounds(self, box: Box) -> Bounds:
        some = (box.k.least < self.length) | (box.k.least <= box.q.most)
        return Bounds(some, (box.k.most < self.length) | (box.k.most <= box.q.least))


def evaluate_apart[T](call: Callable[[], T]) -> T:
    """Return what `call` gives outside of traces, and of the mesh in force, whose devices may be absent.

    It runs in a thread of its own, as both belong to a thread.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@jax.tree_util.register_static
@dataclass(frozen=True)
class Custom(Rule):
    """A function of your own: `fn(q, k)` of two integer arrays that broadcast gives booleans, elementwise.

    Blocks are told by trying `fn` on strips of one block of queries and all keys. Where no tokens are listed, every
    block counts as partial. Keep one function object: another one, such as a lambda written anew, compiles anew.

    Raises:
      ValueError: `fn` does not give one boolean for each pair, or what it gives depends on other pairs.
    """

    fn: Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        q, k = np.arange(5, dtype=np.int32)[:, None] * 13, np.arange(7, dtype=np.int32)[None] * 11
        pairs = ((q, k), (q[3:4], k[:, 2:3]))
        found, alone = evaluate_apart(lambda: [np.asarray(self.fn(*pair)) for pair in pairs])
        fits = _fits(found, (5, 7)) and _fits(alone, (1, 1))
        if not fits or alone.reshape(()) != np.broadcast_to(found, (5, 7))[3, 2]:
            raise ValueError(
                f"Custom takes an elementwise fn(q, k) that gives a boolean for each pair, and {self.fn!r} gave "
                f"{found.dtype}{list(found.shape)} for int32[5, 1] and int32[1, 7]: compare q and k, join by &, | and ~"
            )

    def sees(self, q: Any, k: Any) -> Any:
        return self.fn(q, k) & (q == q) & (k == k)

    def bounds(self, box: Box) -> Bounds:
        if box.q.tokens is None:
            some = box.q.least == box.q.least
            return Bounds(some, ~some)
        if isinstance(box.q.tokens, np.ndarray):
            return Bounds(*evaluate_apart(lambda: [np.asarray(x) for x in self._by_strips(box)]))
        return self._by_strips(box)

    def _by_strips(self, box: Box) -> Bounds:
        k = box.k.tokens[..., None, :, :]

        def strip(q: Any) -> tuple[Any, Any]:
            seen = self.sees(q[..., :, None, None], k)
            return jnp.any(seen, (-3, -1)), jnp.all(seen, (-3, -1))

        some, every = lax.map(strip, jnp.moveaxis(jnp.asarray(box.q.tokens), -2, 0))
        return Bounds(jnp.moveaxis(some, 0, -2), jnp.moveaxis(every, 0, -2))


@jax.tree_util.register_static
@dataclass(frozen=True)
class ByBlock(Rule):
    """A rule of block numbers: block i of `size` positions sees block j iff `rule` lets i see j."""

    rule: Rule
    size: int = 64

    def __post_init__(self) -> None:
        _check(self, "size", least=1)

    @property
    def grain(self) -> int:
        return self.size

    @property
    def looks_ahead(self) -> bool:
        return self.rule.looks_ahead

    def sees(self, q: Any, k: Any) -> Any:
        return self.rule.sees(q // self.size, k // self.size)

    def bounds(self, box: Box) -> Bounds:
        return self.rule.bounds(box.over(self.size))


@jax.tree_util.register_static
@dataclass(frozen=True)
class BlocksBefore(Rule):
    """Keys that stand for `size` queries each: key j for the j-th block, which later blocks see."""

    size: int

    def __post_init__(self) -> None:
        _check(self, "size", least=1)

    @property
    def compares_places(self) -> bool:
        return False

    def sees(self, q: Any, k: Any) -> Any:
        return k < q // self.size

    def bounds(self, box: Box) -> Bounds:
        return Bounds(box.k.least < box.q.most // self.size, box.k.most < box.q.least // self.size)


class _Joined(Rule):
    """The part that joined rules share."""

    def _parts(self) -> tuple[Rule, ...]:
        return tuple(vars(self).values())

    @property
    def grain(self) -> int | None:
        return min((part.grain for part in self._parts() if part.grain is not None), default=None)

    @property
    def looks_ahead(self) -> bool:
        return any(part.looks_ahead for part in self._parts())

    @property
    def is_shift_invariant(self) -> bool:
        return all(part.is_shift_invariant for part in self._parts())

    @property
    def compares_places(self) -> bool:
        return any(part.compares_places for part in self._parts())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class And(_Joined):
    """Both rules let the query see the key."""

    a: Rule
    b: Rule

    def sees(self, q: Any, k: Any) -> Any:
        return self.a.sees(q, k) & self.b.sees(q, k)

    def bounds(self, box: Box) -> Bounds:
        a, b = self.a.bounds(box), self.b.bounds(box)
        return Bounds(a.some & b.some, a.every & b.every)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Or(_Joined):
    """At least one of two rules lets the query see the key."""

    a: Rule
    b: Rule

    def sees(self, q: Any, k: Any) -> Any:
        return self.a.sees(q, k) | self.b.sees(q, k)

    def bounds(self, box: Box) -> Bounds:
        a, b = self.a.bounds(box), self.b.bounds(box)
        return Bounds(a.some | b.some, a.every | b.every)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Not(_Joined):
    """The rule hides the key from the query."""

    a: Rule

    def sees(self, q: Any, k: Any) -> Any:
        return ~self.a.sees(q, k)

    def bounds(self, box: Box) -> Bounds:
        a = self.a.bounds(box)
        return Bounds(~a.every, ~a.some)


def _any(found: Any) -> Any:
    """Return the `|` of at least one array."""
    first, *rest = found
    for other in rest:
        first = first | other
    return first


def _fits(found: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Return whether an array holds booleans and broadcasts to `shape`."""
    ends = zip(found.shape[::-1], shape[::-1], strict=False)
    return found.dtype == bool and found.ndim <= len(shape) and all(a in (1, b) for a, b in ends)


def _has_multiple(low: Any, high: Any, of: int) -> Any:
    """Return whether a multiple of `of` lies in low..high."""
    return high // of * of >= low


def _numpy_of(*arrays: Any) -> Any:
    """Return the module whose functions keep such arrays where they are."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def _scramble(x: Any) -> Any:
    """Return a hash of each number, uint32 (the finaliser of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def _salt(seed: int) -> int:
    """Return a multiple of the seed, uint32, so that neighbouring seeds and blocks do not meet."""
    return (seed * 0x9E3779B1 + 0x7F4A7C15) % 2**32


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def _check(rule: Any, name: str, *, least: int) -> None:
    """Raise ValueError unless a field is a whole number of at least `least`."""
    value = getattr(rule, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"{type(rule).__name__}.{name} must be a whole number of at least {least}, got {value!r}"
        )
