"""Slot memories: the property suite, a reference token by token, metrics, upkeep, states and errors."""

import dataclasses
import functools
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit as sigmoid
from scipy.special import softmax

from jaxblt.mixers import (
    MAGConfig,
    MixerConfig,
    NeuralMemoryConfig,
    SlotMemoryConfig,
    init_state,
    memory_stats,
    reduce_slots,
)
from jaxblt.mixers.slots.experimental.slot_bank import SlotBank
from jaxblt.mixers.slots.experimental.slot_memory import SlotMemoryState
from jaxblt.models import titan
from jaxblt.side_outputs import SIDE_OUTPUTS
from jaxblt.testing import PROPERTIES, Property, Subject
from jaxblt.training.stored.serialize import from_json, to_json
from tests.mixers.linear.test_matrix_state import read_out, stream
from tests.parameters import drawn
from tests.tolerances import assert_close

SLOTS = SlotMemoryConfig(dim=8, num_heads=4, head_dim=4, slots=4, interval=4, novelty=0.3, top_k=2, rate=0.5)
CONFIGS: dict[str, MixerConfig] = {
    "slots": SLOTS,
    "slots_by_token": dataclasses.replace(SLOTS, interval=1),
    "slots_aligned": dataclasses.replace(SLOTS, interval=8, ratio=0.25, segment_alignment=8),
    "slots_alone": dataclasses.replace(SLOTS, interval=3, ratio=0.4, packed=False),
    "slots_adaptive": dataclasses.replace(SLOTS, ratio=1.0, adaptive_error=0.2, top_k=3),
    "slots_pruned": dataclasses.replace(SLOTS, interval=2, prune_below=0.5, prune_after=2, usage_decay=0.5),
}
"""Every one has several intervals a row."""

TURNS = pytest.mark.slow(days=28, group="properties of memories")
"""One config a day: its properties share programs."""
BEYOND = {
    ("slots_by_token", "every_parameter"): (
        pytest.mark.xfail(strict=True, reason="of one token latents have nothing to choose from"),
    ),
    ("slots_adaptive", "long"): (
        pytest.mark.xfail(
            strict=True, reason="too curved for differences in fp32, which converge with smaller steps"
        ),
    ),
    ("slots_adaptive", "bfloat16"): (
        pytest.mark.xfail(strict=True, reason="bf16 writes another number of candidates than fp32"),
    ),
}
"""Cases that fail, see docs/known-limits.md."""


@functools.lru_cache(maxsize=2)
def subject_of(name: str) -> Subject:
    return Subject(CONFIGS[name])


def cases() -> list[Any]:
    found = []
    for name, config in CONFIGS.items():
        for prop in PROPERTIES:
            if prop.applies(config):
                marks = (TURNS, pytest.mark.slow(turn=name), *BEYOND.get((name, prop.name), ()))
                found.append(pytest.param(name, prop, id=f"{name}-{prop.name}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "prop"), cases())
def test_property(name: str, prop: Property) -> None:
    prop.check(subject_of(name))


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(x @ y / np.sqrt((x @ x + 1e-6) * (y @ y + 1e-6)))


class Bank:
    """A head's bank as the rules say it, in lists: slots that hold something, by number."""

    def __init__(self, config: SlotMemoryConfig) -> None:
        self.config, self.slots = config, {}
        self.usage, self.age = np.zeros(config.slots), np.zeros(config.slots, int)

    def read(self, q: np.ndarray, sink: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        keys, values = [sink[0], *self.slots.values()], [sink[1], *self.slots.values()]
        p = softmax(np.stack(keys) @ q / np.sqrt(len(q)))
        weights = np.zeros(self.config.slots)
        weights[list(self.slots)] = p[1:]
        return p @ np.stack(values), weights

    def write(self, s: np.ndarray, w: np.ndarray) -> set[int]:
        config = self.config
        if max((cosine(s, m) for m in self.slots.values()), default=-2) < config.novelty:
            unused = [i for i in range(config.slots) if i not in self.slots]
            chosen = [unused[0] if unused else int(np.argmin(self.usage))]
        else:
            chosen = sorted(self.slots, key=lambda i: -self._logit(i, w))[: config.addressed]
        a = softmax(np.array([self._logit(i, w) if i in self.slots else 0.0 for i in chosen]))
        for i, share in zip(chosen, a, strict=True):
            old = self.slots.get(i)
            self.slots[i] = s if old is None else old + (1 - config.rate) * share * (s - old)
            self.usage[i] += share
        self.slots = dict(sorted(self.slots.items()))
        return set(chosen)

    def _logit(self, i: int, w: np.ndarray) -> float:
        return self.slots[i] @ w / np.sqrt(len(w)) + self.config.balance * (1 - self.usage[i])


def by_the_rules(config: SlotMemoryConfig, w: dict[str, Any], x: np.ndarray) -> tuple[np.ndarray, list[Bank]]:
    """One document through a slot memory, token by token."""
    q, k, v = (stream(w, name, x) for name in "qkv")
    gate = sigmoid(np.einsum("td,dhm->thm", x, w["gate"]["kernel"]) + w["gate"]["bias"])
    raw = np.einsum("thm,hmn->thn", v, w["project"])
    u = gate * raw / np.sqrt(np.sum(raw**2, -1, keepdims=True) + 1e-6) * np.sqrt(raw.shape[-1])
    o = np.zeros_like(q)
    banks = [Bank(config) for _ in range(config.num_heads)]
    for head, bank in enumerate(banks):
        reads = []
        for t in range(len(x)):
            o[t, head], weights = bank.read(q[t, head], w["sink"][head])
            reads.append(weights)
            if (t + 1) % config.interval:
                continue
            span = slice(t + 1 - config.interval, t + 1)
            bank.usage = config.usage_decay * bank.usage + np.mean(reads, 0)
            reads, written = [], set()
            for latent, place in zip(w["latents"][head], w["places"][head], strict=True):
                p = softmax(k[span, head] @ latent / np.sqrt(len(latent)) + place)
                s = p @ u[span, head]
                written |= bank.write(s, s @ w["address"][head])
            held = [i for i in bank.slots if i not in written]
            bank.age[held] += 1
            bank.age[sorted(written)] = 0
    return read_out(w, o, x), banks


@functools.cache
def followed() -> tuple[np.ndarray, list[list[Bank]], SlotMemoryState]:
    """The subject's rows by the rules: outputs, banks behind them, and the state that the mixer leaves."""
    subject = subject_of("slots")
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), subject.params["params"])
    y, banks = zip(*(by_the_rules(SLOTS, w, row) for row in subject.x.astype(np.float64)), strict=True)
    ids = jnp.ones(subject.x.shape[:2], jnp.int32)
    _, state = subject.step(subject.params, jnp.asarray(subject.x), ids, subject.start())
    return np.stack(y), list(banks), jax.device_get(state)


@pytest.mark.slow(days=28, group="costly", turn="mixers/slots/experimental/test_slot_memory")
def test_outputs_follow_the_rules() -> None:
    subject = subject_of("slots")
    assert_close(subject.run(), followed()[0], n=subject.length * 8)


@pytest.mark.slow(days=28, group="costly", turn="mixers/slots/experimental/test_slot_memory")
def test_the_state_holds_slots_usage_and_age_by_the_rules() -> None:
    _, banks, state = followed()
    for row, heads in enumerate(banks):
        for head, bank in enumerate(heads):
            held = list(bank.slots)
            assert np.flatnonzero(state.bank.valid[row, head]).tolist() == held
            assert_close(state.bank.slots[row, head, held], np.stack(list(bank.slots.values())), n=24 * 8)
            assert_close(state.bank.usage[row, head], bank.usage, n=24 * 8)
            assert state.bank.age[row, head].tolist() == bank.age.tolist()
    assert {len(bank.slots) for heads in banks for bank in heads} > {SLOTS.slots}  # some are full, not all


@pytest.mark.slow(days=28, group="costly")
def test_a_stored_state_goes_on_as_the_same_program() -> None:
    subject, (_, _, state) = subject_of("slots"), followed()
    stored = flax.serialization.from_bytes(subject.start(), flax.serialization.to_bytes(state))
    stored = jax.tree.map(jnp.asarray, stored)
    x, ids = jnp.asarray(subject.x), jnp.ones(subject.x.shape[:2], jnp.int32)
    found, expected = (subject.step(subject.params, x, ids, s) for s in (stored, state))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.slow(days=28, group="costly")
def test_metrics_tell_of_slots() -> None:
    subject = subject_of("slots")
    ids = jnp.asarray(subject.documents())
    y, side = jax.jit(lambda p, x: subject.module.apply(p, x, segment_ids=ids, mutable=SIDE_OUTPUTS))(
        subject.params, jnp.asarray(subject.x)
    )
    found = {name: float(metric.value) for name, (metric,) in side["metrics"].items()}
    assert set(found) == {"slot_utilisation", "slot_latents", "slot_error"}
    assert 1 / SLOTS.slots <= found["slot_utilisation"] <= 1
    assert found["slot_latents"] == SLOTS.latents == 2
    assert 0 < found["slot_error"] < 1
    assert_close(y[0], subject.run(ids=np.asarray(ids)), n=subject.length * 8)


def small_state() -> SlotMemoryState:
    """A row and head with four slots, of which the last is free."""
    config = SlotMemoryConfig(dim=2, num_heads=1, slots=4)
    state = init_state(config, 1, capacity=8)
    slots = jnp.asarray([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0], [0.0, 0.0]])[None, None]
    usage, age = jnp.asarray([[[0.25, 1.5, 0.5, 0.0]]]), jnp.asarray([[[4, 0, 2, 0]]], jnp.int32)
    bank = SlotBank(slots, usage, age, jnp.asarray([[[True, True, True, False]]]))
    return dataclasses.replace(state, carry=state.carry.replace(bank=bank))


@pytest.mark.slow(days=28, group="costly")
def test_statistics() -> None:
    stats = jax.tree.map(lambda x: x.item(), memory_stats(small_state()))
    assert (stats.utilisation, stats.usage, stats.age, stats.oldest) == (0.75, 0.75, 2.0, 4)
    empty = jax.tree.map(lambda x: x.item(), memory_stats(init_state(SlotMemoryConfig(2, 1), 1, capacity=8)))
    assert (empty.utilisation, empty.usage, empty.age, empty.oldest) == (0.0, 0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("options", "stay"),
    [
        ({"keep": 0}, []),
        ({"keep": 2}, [1, 2]),
        ({"keep": 4}, [0, 1, 2]),
        ({"below": 0.5}, [1, 2]),
        ({"below": 0.0}, [0, 1, 2]),
    ],
)
def test_reduced_slots_are_free_and_the_others_keep_every_bit(options: Any, stay: list[int]) -> None:
    before, after = small_state().bank, reduce_slots(small_state(), **options).bank
    assert np.flatnonzero(after.valid).tolist() == stay
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.asarray(new)[0, 0, stay].tobytes() == np.asarray(old)[0, 0, stay].tobytes()
        assert not np.any(np.delete(np.asarray(new)[0, 0], stay, 0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "takes either keep or below, got keep=None and below=None: give one of them"),
        ({"keep": 1, "below": 0.1}, "takes either keep or below, got keep=1 and below=0.1"),
        ({"keep": 5}, "keep must lie in 0..4, got 5: a bank has no more slots"),
        ({"below": -1.0}, "below must be at least 0, got -1.0"),
    ],
)
def test_bad_reductions_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reduce_slots(small_state(), **options)


@pytest.mark.parametrize("kind", ["titan", "memory", "mag"])
def test_upkeep_of_another_state_says_which_is_wanted(kind: str) -> None:
    configs = {"memory": NeuralMemoryConfig(dim=8, num_heads=2), "mag": MAGConfig(dim=8, num_heads=2)}
    if kind == "titan":
        model = titan("slots", dim=16, num_layers=4, num_heads=2).build()
        state: Any = jax.jit(lambda: model.init_state(1, num_bytes=16))()
        assert memory_stats(state.stack.periods[0]).utilisation.shape == (2, 1, 2)  # periods, rows, heads
    else:
        state = jax.jit(lambda: init_state(configs[kind], 1, capacity=8))()
    wanted = rf"takes a SlotMemoryState, got a {type(state).__name__}: .* state\.stack\.periods\[0\]"
    with pytest.raises(ValueError, match=f"memory_stats {wanted}"):
        memory_stats(state)
    with pytest.raises(ValueError, match=f"reduce_slots {wanted}"):
        reduce_slots(state, keep=1)


@pytest.mark.parametrize(("slots", "addressed"), [(1, 1), (3, 3), (4, 4), (64, 4)])
def test_a_candidate_is_written_to_four_slots_or_to_all(slots: int, addressed: int) -> None:
    assert SlotMemoryConfig(dim=8, slots=slots).addressed == addressed
    assert dataclasses.replace(SLOTS, slots=slots, top_k=1).addressed == 1


def test_a_config_stored_when_four_was_the_default_loads() -> None:
    today = SlotMemoryConfig(dim=8)
    assert from_json(to_json(today)) == today
    stored = from_json(to_json(today).replace('"top_k": null', '"top_k": 4'))
    assert stored == dataclasses.replace(today, top_k=4)
    assert stored.addressed == today.addressed


@pytest.mark.slow(days=28, group="costly", turn="mixers/slots/experimental/test_slot_memory")
def test_the_error_of_compression_falls_with_the_ratio() -> None:
    """Of layers that share their weights: one has the first of another's latents."""
    found, x = [], jnp.asarray(np.random.default_rng(0).standard_normal((2, 32, 8)), jnp.float32)
    whole = dataclasses.replace(SLOTS, interval=8, ratio=0.5, packed=False, num_heads=1, head_dim=8)
    params = drawn(whole.build(), x)["params"]
    for ratio in (0.125, 0.25, 0.5):
        config = dataclasses.replace(whole, ratio=ratio)
        some = {name: params[name][:, : config.latents] for name in ("latents", "places")}
        apply = jax.jit(functools.partial(config.build().apply, mutable=SIDE_OUTPUTS))
        metrics = apply({"params": params | some}, x)[1]["metrics"]
        assert float(metrics["slot_latents"][0].value) == config.latents
        found.append(float(metrics["slot_error"][0].value))
    assert 1 > found[0] > found[1] + 0.05 > found[2] + 0.1 > 0.1


@pytest.mark.slow(days=28, group="memories and states")
def test_a_titan_with_slots() -> None:
    config = titan("slots", dim=128, num_layers=4, window=32)
    assert config.stack.pattern == "BW"
    slots, window = (config.stack.mixer(name) for name in "BW")
    assert (slots.interval, slots.num_heads, window.window) == (8, 2, 32)  # type: ignore[attr-defined]
    longer = titan("slots", dim=128, window=32, chunk_size=16).stack.mixer("B")
    assert longer.interval == 16  # type: ignore[attr-defined]
