"""The plan of one call of attention: how queries reach their keys, chosen once from what is known before tracing.

`plan_call` is the only place that chooses. What runs a plan reads it and decides nothing.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jaxblt.parallel.islands import batch_axes, head_devices
from jaxblt.parallel.layout import CONTIGUOUS, ZIGZAG, SequenceLayout
from jaxblt.parallel.sequence import SeqAxis
from pallas_kernels.attention import cudnn, explain_split, masks, skips_empty_slots
from pallas_kernels.attention.cudnn import LARGEST_MASK
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.partial import merges_in_kernel
from pallas_kernels.attention.rules import Rule
from pallas_kernels.runtime import current_device, has_reference_ops

ContextParallel = Literal["ring", "all_to_all", "all_gather"]
"""How devices exchange what attention over a split sequence needs."""
Implementation = Literal["reference", "xla", "cudnn"] | None
"""Which attention runs on a device; None picks the best that the device and the shapes allow."""
Route = Literal["whole", "by_time", "all_to_all", "all_gather", "halo", "ring"]
"""How the keys of a call come to its queries; see `Plan`."""
CacheUse = Literal["none", "visited", "shared", "behind", "prefix", "apart", "filled", "joined"]
"""How the tokens of a call meet a cache; see `Plan`."""

SHORT = 8192
"""Tokens a device up to which heads are scattered where they can be. With 32 query and 8 key heads of 128 on four
H200s, forward and backward: all-to-all 1.5 ms, a ring with its swaps 2.5 ms at 2,048; 15.4 and 19.0 ms at 8,192."""

MANY_WINDOWS = 4
"""The least number of windows in a call whose tokens are put behind the cache of a window. Then the cache's slots are
queries too. If a kernel takes the mask as an array and visits all of it, a call has at most 1.25 times the scores."""

STRETCH = 512
"""Slots of a long cache that few tokens visit at a time, as far as they are filled."""

MANY_STRETCHES = 8
"""The least number of stretches of a cache that is read stretch by stretch. On a CPU one call reads a full cache of
fewer stretches faster."""

FEW = 64
"""The most tokens of a call that visits a cache by stretches: each stretch adds as many hidden keys."""


class CacheShape(NamedTuple):
    """The size of a cache, and the dtype of its keys and values.

    Attributes:
      slots: tokens that it holds.
      bounded: it holds whole documents, in equal runs of slots on the devices of a split sequence; otherwise a window,
        whole on all of them.
    """

    slots: int
    bounded: bool
    dtype: Any


@dataclass(frozen=True)
class Asked:
    """A caller's wishes, whatever the call.

    Attributes:
      heads, groups: heads of queries and of keys.
      width: of a head.
      causal, window, rule, alibi: of the mask and the scores.
      packed: rows may hold several documents.
      layout: order of the tokens where a mesh splits them, in calls without a cache.
      mode: exchange; None for the best.
      scale, implementation: of the kernels.
    """

    heads: int
    groups: int
    width: int
    causal: bool
    window: int | None
    alibi: bool
    packed: bool = True
    layout: SequenceLayout = CONTIGUOUS
    mode: ContextParallel | None = None
    scale: float | None = None
    implementation: Implementation | Literal["mosaic_gpu"] = None
    rule: Rule | None = None


@dataclass(frozen=True)
class Call:
    """The static facts of a call.

    Attributes:
      asked: by the caller.
      rows, tokens: of the arrays in hand: a device's own stretch if a `shard_map` has split the sequence.
      dtype: of queries and keys.
      has_ids: segment ids are given.
      axis: of the mesh that could split a sequence; None without one.
      split: it splits the tokens; otherwise each device has whole rows.
      cache: which the tokens meet; None without one.
    """

    asked: Asked
    rows: int
    tokens: int
    dtype: Any
    has_ids: bool
    axis: SeqAxis | None
    split: bool
    cache: CacheShape | None = None

    @property
    def length(self) -> int:
        """Tokens of a whole row."""
        return self.axis.whole(self.tokens) if self.axis and self.split else self.tokens

    @property
    def stretch(self) -> int:
        """Tokens of a row on one device."""
        return self.length // self.axis.size if self.axis and self.split else self.length

    @property
    def bounded(self) -> bool:
        """True if the tokens meet a cache that holds whole documents."""
        return self.cache is not None and self.cache.bounded

    @property
    def heads_divide(self) -> bool:
        """True if the heads that a device has divide among the devices of `axis`."""
        size = 1 if self.axis is None else self.axis.size
        devices = head_devices(self.asked.heads, self.asked.groups)
        return not any(count // devices % size for count in (self.asked.heads, self.asked.groups))

    @property
    def fills_windows(self) -> bool:
        """True if the tokens are many more than the slots of a window's cache."""
        if self.cache is None or self.cache.bounded or self.asked.rule is not None:
            return False
        return self.length >= MANY_WINDOWS * self.cache.slots

    @property
    def fills_masks(self) -> bool:
        """True if the scores are too many for a mask as an array, and lengths can replace it."""
        if self.cache is None or not self.bounded or self.asked.alibi or self.asked.rule is not None:
            return False
        return self.length > 1 and self.length * (self.cache.slots + self.length) > LARGEST_MASK

    @property
    def meets_long_cache(self) -> bool:
        """True if few tokens meet a long cache of whole documents, of which only the filled part should be read."""
        if self.cache is None or not self.bounded or self.asked.rule is not None:
            return False
        return self.length <= FEW and self.cache.slots >= MANY_STRETCHES * STRETCH

    @property
    def reads_prefix(self) -> bool:
        """True if one kernel reads a cache as far as each row has filled it.

        One token reads any cache so. cuDNN takes four launches for it, and reads all slots.
        """
        asked = self.asked
        alone = self.length == 1 and (self.bounded or self.axis is None)
        if self.cache is None or asked.rule is not None or not (alone or self.meets_long_cache):
            return False
        if not asked.causal or asked.alibi or asked.implementation is not None:
            return False
        q = jax.ShapeDtypeStruct((self.rows, self.length, asked.heads, asked.width), self.dtype)
        k = jax.ShapeDtypeStruct((self.rows, self.cache.slots, asked.groups, asked.width), self.cache.dtype)
        return skips_empty_slots(q, k)

    @property
    def visits_stretches(self) -> bool:
        """True if a loop reads a cache by stretches as far as the longest row has filled it.

        Leave GPUs out: there each condition of a loop waits for the host.
        """
        allowed = self.asked.implementation in (None, "xla") and current_device().platform != "gpu"
        return self.meets_long_cache and allowed

    @property
    def splits_rule(self) -> bool:
        """True if a kernel takes a device's queries with the keys of all under a rule."""
        asked = self.asked
        if asked.rule is None or not self.split or self.cache is not None or self.axis is None:
            return False
        by_place = asked.packed and self.has_ids and not asked.rule.is_shift_invariant
        if by_place or asked.alibi or asked.layout != CONTIGUOUS or asked.implementation is not None:
            return False
        q, k = self.on_device
        whole = jax.ShapeDtypeStruct((k.shape[0], self.length, *k.shape[2:]), k.dtype)
        mask = masks.band(asked.causal, asked.window) & asked.rule
        return explain_split(q, whole, mask, query_runs(self.axis.size, balanced=asked.causal)) is None

    def divides(self, layout: SequenceLayout) -> bool:
        """Check whether rows divide into the stretches of a layout."""
        parts = 2 if layout == ZIGZAG else 1
        return self.axis is not None and self.length % (parts * self.axis.size) == 0

    @property
    def on_device(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Queries and keys of one device of a ring."""
        mesh, devices = jax.sharding.get_abstract_mesh(), head_devices(self.asked.heads, self.asked.groups)
        lead = (self.rows // prod(mesh.shape[axis] for axis in batch_axes()), self.stretch)
        q = jax.ShapeDtypeStruct((*lead, self.asked.heads // devices, self.asked.width), self.dtype)
        return q, jax.ShapeDtypeStruct((*lead, self.asked.groups // devices, self.asked.width), self.dtype)


@dataclass(frozen=True)
class Plan:
    """The way in which one call of attention runs.

    A call projects and turns heads, sends keys by `route`, hides what a query may not see, runs kernels, and lets a
    `cache` take the tokens. A rule is part of the mask: the op leaves out blocks by it, and it reads times, the tokens'
    places in their documents, which travel with the keys.

    Attributes:
      route: how the keys of the call come to its queries.
        "whole": each device has whole rows; one call of the op.
        "all_to_all": every device gets all tokens of its share of the heads.
        "all_gather": every device gets all keys. Under a rule, if a kernel takes some queries with all keys.
        "halo": a window's keys come from the neighbours.
        "ring": keys pass all devices; partial results merge.
        "by_time": a ring pass that compares times instead of indices, for rules, and for a cache's calls with ALiBi or
          a window beyond a device's stretch. Steps at which a rule shows no key are left out (see `hops`), but not
          beside a cache. Its gradient keeps the keys of all steps taken.
      cache: how the tokens meet a cache.
        "joined": whole tokens, one call over the cache and them.
        "prefix": one whole token, or a few with a long cache, a kernel that reads it as far as each row has filled it.
        "filled": a few whole tokens, partial attention to stretches of the cache, as far as it is filled.
        "behind": tokens lie behind the cache of a window in the order of time, so that blocks out of it are skipped.
        "apart": whole tokens, partial attention to them and then to the cache, by lengths instead of a mask.
        "shared": whole tokens, each device attends to its own slots.
        "visited": split tokens attend to each other by `route`, then to the cache.
        "none": there is none.
      axis: devices that split the tokens; None if each device has whole rows.
      bounded: there is a cache and it holds whole documents, not a window.
      causal, window, rule: of the mask.
      layout: order of the tokens along `axis` while kernels run.
      swaps: tokens are in order, and change to `layout` and back.
      sort: holes go behind the tokens of each run, for kernels that know lengths ("lengths": one document a row) or
        documents as lengths ("documents"); None leaves the tokens in place.
      merges: the kernel of a ring merges into what is there itself, which saves a pass over memory.
      by_head: the mesh axis `tensor` splits heads.
      scale, implementation: of the kernels.
    """

    route: Route
    cache: CacheUse = "none"
    bounded: bool = False
    axis: SeqAxis | None = None
    causal: bool = True
    window: int | None = None
    rule: Rule | None = None
    layout: SequenceLayout = CONTIGUOUS
    swaps: bool = False
    sort: Literal["lengths", "documents"] | None = None
    merges: bool = False
    by_head: bool = True
    scale: float | None = None
    implementation: Any = None

    @property
    def devices(self) -> SeqAxis:
        """The axis of a plan that splits the tokens."""
        assert self.axis is not None
        return self.axis

    @property
    def exchanges(self) -> bool:
        """True if devices exchange something: the tokens or the slots of a cache are split among them."""
        return self.axis is not None or self.cache == "shared"

    @property
    def options(self) -> dict[str, Any]:
        """Options of every call of a kernel."""
        return {"scale": self.scale, "implementation": self.implementation}

    @property
    def band(self) -> Mask:
        """The mask of whole rows of one document."""
        band = masks.band(self.causal, self.window)
        return band if self.rule is None else band & self.rule

    @property
    def sorts_rows(self) -> bool:
        """True if whole rows are sorted before the projection, not their queries and keys in an island."""
        return self.route == "whole" and self.sort is not None

    @property
    def runs(self) -> int:
        """Runs of consecutive tokens on a device of a ring: kernels take whole ones."""
        return 2 if self.layout.kind == "zigzag" and self.causal else 1


def query_runs(devices: int, *, balanced: bool) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of each device's runs of tokens: an early and a late one if `balanced`, else one."""
    return tuple((i, 2 * devices - 1 - i) if balanced else (i,) for i in range(devices))


def plan_call(call: Call) -> Plan:
    """Return how a call runs: of each table the first row that holds.

    Raises:
      ValueError: with the fix: the length or the heads do not divide among the devices, a window is longer than a
        device's stretch, or the mode or the kernel that is named does not take this.
    """
    asked, split, cached = call.asked, call.split, call.cache is not None
    within = None if split and asked.window is not None and asked.window >= call.length else asked.window
    window = asked.window if cached else within
    mode = _mode(call, within) if split and not cached and asked.rule is None else "ring"

    routes: tuple[tuple[bool, Route], ...] = (
        (not split, "whole"),
        (call.splits_rule, "all_gather"),
        (asked.rule is not None, "by_time"),
        (cached and (asked.alibi or (within is not None and within > call.stretch)), "by_time"),
        (mode == "all_to_all", "all_to_all"),
        (mode == "all_gather", "all_gather"),
        (within is not None, "halo"),
        (True, "ring"),
    )
    caches: tuple[tuple[bool, CacheUse], ...] = (
        (not cached, "none"),
        (split, "visited"),
        (call.axis is not None and call.bounded, "shared"),
        (call.fills_windows, "behind"),
        (call.reads_prefix, "prefix"),
        (call.visits_stretches, "filled"),
        (call.fills_masks, "apart"),
        (True, "joined"),
    )
    route: Route = next(route for holds, route in routes if holds)
    cache: CacheUse = next(use for holds, use in caches if holds)
    even = not cached or call.stretch % 2 == 0
    layout = CONTIGUOUS if cached else asked.layout
    balanced = route == "ring" or (route == "all_gather" and asked.rule is not None)
    swaps = balanced and asked.causal and layout == CONTIGUOUS and even
    by_place = window is not None or asked.rule is not None or asked.alibi
    by_length = call.has_ids and not cached and not asked.packed and not by_place
    plan = Plan(
        route=route,
        cache=cache,
        bounded=call.bounded,
        axis=call.axis if split else None,
        causal=asked.causal,
        window=window,
        rule=asked.rule,
        layout=ZIGZAG if swaps else layout,
        swaps=swaps,
        sort="lengths" if by_length and route != "all_gather" else None,
        by_head=route != "all_to_all" or call.heads_divide,
        scale=asked.scale,
        implementation=asked.implementation,
    )
    if route == "ring" and call.divides(plan.layout):
        plan = _with_kernels(plan, call)
    if plan.axis is not None and not cached:
        order: SequenceLayout = plan.layout
        order.check(call.length, plan.axis.size)
    return plan


def _with_kernels(plan: Plan, call: Call) -> Plan:
    """Return the plan of a ring with what its kernels know; those of a cache's calls are told all by ids."""
    if plan.cache != "none":
        return plan
    q, k = call.on_device
    if call.has_ids:
        by_documents = call.asked.packed and can_run_on_cudnn(plan, q, k)
        return replace(plan, sort="documents") if by_documents else plan
    return replace(plan, merges=plan.causal and merges_in_kernel(q, k, k, **plan.options))


def _mode(call: Call, window: int | None) -> str:
    """Return the exchange of a call without a cache, checked; `window` is None if it covers whole rows."""
    asked = call.asked
    short = call.heads_divide and call.stretch <= SHORT and window is None and asked.layout == CONTIGUOUS
    by_head = asked.alibi or (short and asked.implementation != "mosaic_gpu")
    mode = asked.mode or ("all_to_all" if by_head else "ring")
    _check(call, mode, window)
    return mode


def can_run_on_cudnn(plan: Plan, q: Any, k: Any) -> bool:
    """Check whether cuDNN runs packed rows of a ring, unless another kernel is named; `q` and `k` are of one device.

    Raises:
      ValueError: cuDNN is asked for by name and cannot run this, and why.
    """
    if plan.implementation not in (None, "cudnn"):
        return False
    rows, length = q.shape[0] * plan.runs, q.shape[1] // plan.runs
    q_run, k_run = (jax.ShapeDtypeStruct((rows, length, *x.shape[2:]), x.dtype) for x in (q, k))
    ids: Any = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    mask = masks.CAUSAL & masks.documents(ids)
    reason = cudnn.why_not_partial(current_device(), q_run, k_run, k_run, mask)
    reason = reason if plan.causal else "queries that see later documents' keys have no such form"
    if reason is not None and plan.implementation is not None:
        raise ValueError(
            f"'cudnn' cannot run packed rows in this ring: {reason}; use implementation=None, or packed=False if each "
            "row is of one document"
        )
    return reason is None


def _check(call: Call, mode: str, window: int | None) -> None:
    """Check that an exchange takes a call without a cache, whose window is None if it covers whole rows."""
    assert call.axis is not None
    asked, size, layout = call.asked, call.axis.size, call.asked.layout
    if mode not in get_args(ContextParallel):
        raise ValueError(f"mode {mode!r} is not one of {get_args(ContextParallel)} or None")
    if layout != CONTIGUOUS and (mode != "ring" or window is not None):
        raise ValueError(
            f"the {layout.kind} layout goes with mode='ring' without a window, not with mode={mode!r}, "
            f"window={window}: leave the tokens in order"
        )
    if asked.implementation == "mosaic_gpu" and (mode != "ring" or window is not None):
        raise ValueError(
            f"implementation 'mosaic_gpu' runs rings without a window, not mode={mode!r}, window={window}: "
            "use implementation=None"
        )
    if mode == "ring" and has_reference_ops():
        raise ValueError(
            f"mode 'ring' over {size} devices has first derivatives only, and this is inside reference_ops: "
            "use mode='all_to_all' or 'all_gather' (a config's context_parallel), or a mesh without 'seq'"
        )
    if mode == "ring" and asked.alibi:
        raise ValueError("a ring knows no ALiBi distances: use mode='all_to_all', 'all_gather' or None")
    if mode == "ring" and window is not None and window > call.stretch:
        raise ValueError(
            f"a window of {window} is longer than the {call.stretch} tokens of a device (T = {call.length} over "
            f"{size}), and the halo reaches one neighbour: use mode='all_to_all' or 'all_gather', or fewer "
            "devices on the sequence"
        )
    if mode == "all_to_all" and (asked.heads % size or asked.groups % size):
        others = "'all_gather'" if asked.alibi else "'ring' or 'all_gather'"
        raise ValueError(
            f"mode 'all_to_all' splits heads among the {size} devices of {call.axis.name!r}: {asked.heads} query "
            f"heads and {asked.groups} key heads must both be multiples of it; use mode={others}"
        )
