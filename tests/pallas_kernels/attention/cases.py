"""Calls of attention, each option in company of others (pairwise), for the tests of every implementation."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import Chosen, SoftCap, attention, masks
from pallas_kernels.attention.presets import bigbird, local_global, longformer
from pallas_kernels.attention.rules import Custom, Dilated, Global, Interval, PrefixLM, Rule, Strided
from tests.pallas_kernels.op_suite import Arrays, OpCase


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call: segments have holes and padding, positions are a decode step's, lengths are mixed."""

    name: str
    queries: int
    keys: int | None = None
    heads: int = 2
    groups: int = 2
    head_dim: int = 8
    causal: bool = True
    window: int | None = None
    segments: bool = False
    positions: bool = False
    lengths: bool = False
    alibi: bool = False
    scale: float | None = None
    dtype: Any = jnp.float32

    def __str__(self) -> str:
        return self.name

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        """q, k, v and slopes as they are, and the other arrays as a mask."""
        floats = {name: x for name, x in arrays.items() if not jnp.issubdtype(x.dtype, jnp.integer)}
        return {**floats, "mask": self.mask(arrays)}

    def mask(self, arrays: Arrays) -> masks.Mask:
        mask = masks.band(self.causal, self.window)
        mask &= masks.documents(arrays.get("q_segment_ids"), arrays.get("kv_segment_ids"))
        if "q_positions" in arrays:
            mask &= masks.positions(arrays["q_positions"], arrays["kv_positions"])
        if "lengths" in arrays:
            whole = self.keys in (None, self.queries)
            mask &= (masks.token_lengths if whole else masks.key_lengths)(arrays["lengths"])
        return mask

    def arrays(self, batch: int = 2) -> Arrays:
        rng = np.random.default_rng(len(self.name))
        queries, keys = self.queries, self.keys or self.queries

        def normal(*shape: int) -> Any:
            return jax.device_put(rng.standard_normal(shape).astype(self.dtype))

        arrays: Arrays = {
            "q": normal(batch, queries, self.heads, self.head_dim),
            "k": normal(batch, keys, self.groups, self.head_dim),
            "v": normal(batch, keys, self.groups, self.head_dim),
        }
        if self.segments:
            ids = np.stack([packed(rng, keys) for _ in range(batch)])
            arrays["kv_segment_ids"] = jax.device_put(ids.astype(np.int32))
            arrays["q_segment_ids"] = jax.device_put(ids[:, keys - queries :].astype(np.int32))
        if self.positions:
            start = rng.integers(0, keys // 2, (batch, 1))
            arrays["kv_positions"] = jax.device_put((start + np.arange(keys)).astype(np.int32))
            arrays["q_positions"] = jax.device_put((start + keys // 2 + np.arange(queries)).astype(np.int32))
        if self.lengths:
            arrays["lengths"] = jax.device_put(np.array([keys * 2 // 3, 0, keys, 1][:batch], np.int32))
        if self.alibi:
            arrays["alibi_slopes"] = jax.device_put((2.0 ** -np.arange(1, self.heads + 1)).astype(self.dtype))
        return arrays

    def unused(self, arrays: Arrays) -> Arrays:
        """Where no token is, by array."""
        queries, keys = self.queries, self.keys or self.queries
        batch = arrays["q"].shape[0]
        q_hidden, kv_hidden = np.zeros((batch, queries), bool), np.zeros((batch, keys), bool)
        if self.segments:
            q_hidden |= np.asarray(arrays["q_segment_ids"]) <= 0
            kv_hidden |= np.asarray(arrays["kv_segment_ids"]) <= 0
        if self.lengths:
            limit = np.asarray(arrays["lengths"])[:, None]
            kv_hidden |= np.arange(keys) >= limit
            if queries == keys:
                q_hidden |= np.arange(queries) >= limit
        return {"q": q_hidden, "k": kv_hidden, "v": kv_hidden}

    def case(self, implementation: str) -> OpCase:
        """The call as a case of the property suite; one object, so that its checks share what they compile."""
        return _case(self, implementation)


@cache
def _case(call: Call, implementation: Any) -> OpCase:
    arrays = call.arrays()
    return OpCase(
        name=call.name,
        run=lambda a: attention(**call.arguments(a), scale=call.scale, implementation=implementation),
        reference=lambda a: attention(**call.arguments(a), scale=call.scale, implementation="reference"),
        arrays=arrays,
        shared=frozenset({"alibi_slopes"}),
        unused=call.unused(arrays),
        silent=call.unused(arrays)["q"],
        terms=call.keys or call.queries,
    )


def packed(rng: np.random.Generator, length: int) -> np.ndarray:
    """Ids of a few documents, one of them with holes, and padding at the end."""
    cuts = np.sort(rng.choice(np.arange(1, length), size=min(3, length - 1), replace=False))
    ids = 1 + np.searchsorted(cuts, np.arange(length), side="right")
    ids[ids == len(cuts) + 1] = 0
    holes = (ids == 1) & (np.arange(length) % 3 == 1)
    return np.where(holes, -ids, ids)


CALLS = (
    Call(name="causal", queries=33),
    Call(name="causal_odd_gqa", queries=301, heads=4, groups=2),
    Call(name="bidirectional", queries=17, causal=False, heads=3, groups=1, head_dim=5, scale=0.7),
    Call(name="cross", queries=9, keys=40, causal=False, heads=4, groups=2),
    Call(name="cross_blocks", queries=270, keys=301, causal=False, lengths=True),
    Call(name="window", queries=200, window=37, head_dim=16),
    Call(name="window_both_sides", queries=150, causal=False, window=20, groups=1, alibi=True),
    Call(name="window_1", queries=70, window=1, segments=True),
    Call(name="window_beyond", queries=30, window=99, lengths=True),
    Call(name="segments", queries=300, segments=True, heads=4, groups=1),
    Call(name="segments_bidirectional", queries=41, segments=True, causal=False, head_dim=24),
    Call(name="segments_window", queries=141, segments=True, window=30, lengths=True),
    Call(name="lengths", queries=65, lengths=True, causal=False),
    Call(name="lengths_causal_gqa", queries=50, lengths=True, heads=6, groups=2),
    Call(name="alibi", queries=45, alibi=True, heads=4, groups=2),
    Call(name="alibi_blocks", queries=280, alibi=True, segments=True),
    Call(name="decode", queries=1, keys=77, positions=True, lengths=True, heads=4, groups=2),
    Call(name="decode_window", queries=1, keys=64, positions=True, window=10),
    Call(name="decode_7_alibi", queries=7, keys=50, positions=True, alibi=True, lengths=True),
    Call(name="decode_segments", queries=5, keys=300, positions=True, segments=True, window=40),
    Call(name="prefill_blocks", queries=260, keys=290, positions=True, groups=1, window=150),
    Call(name="one", queries=1),
    Call(name="bf16", queries=64, heads=4, groups=2, head_dim=16, dtype=jnp.bfloat16),
    Call(name="bf16_blocks", queries=270, window=50, segments=True, dtype=jnp.bfloat16),
)


@dataclass(frozen=True, kw_only=True)
class RuleCall:
    """A call whose mask has a rule; with `documents` positions begin anew in each, with `chosen` lists are arrays."""

    name: str
    rule: Rule | None = None
    queries: int = 75
    heads: int = 4
    groups: int = 2
    causal: bool = True
    documents: bool = False
    chosen: bool = False
    decode: int = 0
    alibi: bool = False
    score: Any = None
    dtype: Any = jnp.float32

    def __str__(self) -> str:
        return self.name

    def arrays(self) -> Arrays:
        """Return q, k, v, and what the mask reads; a decode step's queries are the last ones."""
        base = Call(name=self.name, queries=self.queries, heads=self.heads, groups=self.groups)
        base = replace(base, alibi=self.alibi, dtype=self.dtype, segments=self.documents)
        arrays, rng, length = base.arrays(), np.random.default_rng(7), self.queries
        if self.documents:
            ids = np.abs(np.asarray(arrays["kv_segment_ids"]))
            changes = np.diff(ids, prepend=-1) != 0
            index = np.broadcast_to(np.arange(length), ids.shape)
            places = index - np.maximum.accumulate(np.where(changes, index, 0), 1)
            arrays["q_positions"] = arrays["kv_positions"] = jax.device_put(places.astype(np.int32))
        if self.chosen:
            lists = rng.integers(-1, length // 8, (2, self.groups, length, 3))
            arrays["lists"] = jax.device_put(lists.astype(np.int32))
        if self.decode:
            places = np.broadcast_to(np.arange(length, dtype=np.int32), (2, length))
            arrays |= {"q_positions": places[:, -self.decode :], "kv_positions": places}
            arrays["q"] = arrays["q"][:, -self.decode :]
            arrays |= {"lists": arrays["lists"][:, :, -self.decode :]} if self.chosen else {}
        return arrays

    def mask(self, arrays: Arrays) -> masks.Mask:
        mask = masks.band(self.causal) & masks.documents(
            arrays.get("q_segment_ids"), arrays.get("kv_segment_ids")
        )
        if "q_positions" in arrays:
            mask &= masks.positions(arrays["q_positions"], arrays["kv_positions"])
        if self.chosen:
            lists = Chosen(arrays["lists"], 8)
            return mask & (lists if self.rule is None else lists | self.rule)
        assert self.rule is not None
        return mask & self.rule

    def run(self, implementation: Any) -> Any:
        def attend(arrays: Arrays) -> Any:
            floats = {name: x for name, x in arrays.items() if not jnp.issubdtype(x.dtype, jnp.integer)}
            return attention(
                **floats, mask=self.mask(arrays), score=self.score, implementation=implementation
            )

        return attend

    def case(self) -> OpCase:
        return _rule_case(self)


@cache
def _rule_case(call: RuleCall) -> OpCase:
    arrays, unused = call.arrays(), {}
    if call.documents:
        hidden = np.asarray(arrays["q_segment_ids"]) <= 0
        unused = {"q": hidden, "k": hidden, "v": hidden}
    return OpCase(
        name=call.name,
        run=call.run("xla"),
        reference=call.run("reference"),
        arrays=arrays,
        shared=frozenset({"alibi_slopes"}),
        unused=unused,
        silent=unused.get("q"),
        terms=call.queries,
    )


def _every_third(q: Any, k: Any) -> Any:
    return (q + k) % 3 > 0


def biased(s: Any, h: Any, q: Any, k: Any) -> Any:
    """Return scores bent, and less by a penalty of the head's own."""
    return 3 * jnp.tanh(s / 3) - 0.02 * ((h + 1) * abs(q - k)).astype(s.dtype)


RULE_CALLS = (
    RuleCall(name="bigbird", rule=bigbird(block=8, random=1)),
    RuleCall(name="bigbird_both", rule=bigbird(block=8, random=1), causal=False, queries=90),
    RuleCall(name="local_global", rule=local_global(before=8, after=7, every=16), causal=False, alibi=True),
    RuleCall(name="strided_gqa", rule=Strided(7) | Interval(6, 0), heads=6, groups=1, queries=101),
    RuleCall(name="custom", rule=Custom(_every_third) & Interval(40, 40), causal=False),
    RuleCall(name="documents", rule=Interval(5, 5) | Global(first=2), documents=True, score=SoftCap(2.0)),
    RuleCall(name="documents_custom", rule=Custom(_every_third), documents=True, causal=False),
    RuleCall(name="prefix_score", rule=PrefixLM(20), causal=False, score=biased),
    RuleCall(name="sees_nothing", rule=Strided(1) & Interval(before=-3), queries=40),
    RuleCall(name="chosen", chosen=True, queries=64),
    RuleCall(name="chosen_documents", chosen=True, documents=True, rule=Interval(9, 0), queries=83),
    RuleCall(name="decode", rule=Dilated(32) | Global(first=4), decode=1),
    RuleCall(name="decode_chosen", chosen=True, decode=7, rule=Interval(9, 0)),
    RuleCall(name="bf16", rule=longformer(window=16, first=3), dtype=jnp.bfloat16),
)
