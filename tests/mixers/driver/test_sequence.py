"""The sequence driver: cores whose steps must come one after another, and the mixer of the guide."""

import dataclasses
import itertools
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import pytest

from jaxblt.mixers import (
    AttentionConfig,
    ExplicitFilter,
    GatedDeltaNetConfig,
    GatedLinearAttentionConfig,
    HyenaConfig,
    MACConfig,
    MAGConfig,
    Mamba2Config,
    NeuralMemoryConfig,
    SlotMemoryConfig,
)
from jaxblt.mixers.driver.base import init_state, start_clock
from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.driver.sequence import SHORTEST, Adjoined, Joined, read, splits_call
from jaxblt.mixers.linear import gated_delta_net
from jaxblt.mixers.linear.gated_delta_net import DeltaRule
from jaxblt.mixers.linear.gated_linear_attention import LinearState
from jaxblt.models.mixer_table import STORED, WORDS
from jaxblt.parallel import make_mesh
from jaxblt.testing import Subject
from pallas_kernels.gated_delta_rule import gated_delta_rule, summary
from tests.mixers.configs import ALL, MODAL, SHORT_IMPLICIT
from tests.mixers.guide import GUIDE, blocks, written
from tests.mixers.naive import NaiveConfig, NaiveJoined, NaiveSteps
from tests.tolerances import assert_close


def test_steps_in_order_have_no_join() -> None:
    assert not isinstance(NaiveSteps(jnp.ones(1)), Joined)
    assert isinstance(NaiveJoined(jnp.ones(1)), Joined)


class Wide(NaiveSteps):
    """A core that returns a wider carry than it was given."""

    def run(self, u: jax.Array, marks: Marks, carry: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        assert carry is not None
        return super().run(u, marks, carry.astype(jnp.float32))


@pytest.mark.parametrize("ids", [None, jnp.ones((2, 3), jnp.int32)], ids=["whole", "ids"])
def test_a_carry_keeps_its_dtype(ids: jax.Array | None) -> None:
    def call(x: jax.Array, carry: jax.Array) -> Any:
        u = x.reshape(*x.shape[:2], 4, 2)
        return read(x, ids, None, start_clock(2)).run(Wide(jnp.ones((4, 2))), u, carry)

    x, carry = jax.ShapeDtypeStruct((2, 3, 8), jnp.float32), jax.ShapeDtypeStruct((2, 4, 2), jnp.bfloat16)
    assert jax.eval_shape(call, x, carry)[1].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("devices", "reverse", "told"), [(1, False, 4), (1, True, 1), (2, False, 2), (2, True, 1)]
)
def test_documents_start_at_multiples_of_what_a_core_is_told(devices: int, reverse: bool, told: int) -> None:
    """Over two devices a row of 12 tokens is cut behind its sixth; from their end documents start anywhere."""
    seen = set()

    @flax.struct.dataclass
    class Told(NaiveJoined):
        def run(self, u: jax.Array, marks: Marks, carry: jax.Array | None) -> tuple[jax.Array, Any]:
            seen.add(marks.alignment)
            return super().run(u, marks, carry)

    def call(x: jax.Array) -> jax.Array:
        rows = read(x, jnp.ones((2, 12), jnp.int32), None, None, alignment=4)
        return rows.run(Told(jnp.ones((4, 2))), rows.x.reshape(2, 12, 4, 2), reverse=reverse)[0]

    with jax.set_mesh(make_mesh(data=1, seq=devices, devices=jax.devices()[:devices])):
        jax.eval_shape(call, jax.ShapeDtypeStruct((2, 12, 8), jnp.float32))
    assert seen == {told}


@pytest.mark.slow(days=28, group="costly")
def test_a_row_without_a_token_keeps_its_carry_where_a_call_is_split() -> None:
    length, core = 2 * SHORTEST, NaiveJoined(jnp.full((4, 2), 0.5))
    x, carry = jax.random.normal(jax.random.key(0), (2, length, 8)), jnp.full((2, 4, 2), 3.0)
    ids = jnp.ones((2, length), jnp.int32).at[1].set(0)

    def call(x: jax.Array, carry: jax.Array) -> Any:
        rows = read(x, ids, None, start_clock(2))
        return rows.run(core, rows.x.reshape(2, length, 4, 2), carry)[1]

    expected = jax.jit(call)(x, carry)
    with jax.set_mesh(make_mesh(data=1, seq=2, devices=jax.devices()[:2])):
        found = jax.jit(call)(x, carry)
    assert_close(found, expected, n=length)
    assert found[1].tolist() == carry[1].tolist()


def test_documents_of_a_call_are_counted_from_the_state_s() -> None:
    x, ids = jnp.ones((1, 4, 8)), jnp.array([[7, -7, 9, 0]])
    for last, told in ((0, [[2, -2, 3, 0]]), (7, [[1, -1, 2, 0]])):
        clock = start_clock(1).replace(last_segment=jnp.full((1,), last, jnp.int32))  # type: ignore[attr-defined]
        assert jnp.array_equal(read(x, ids, None, clock).segment_ids, jnp.array(told))


def test_ops_that_are_told_of_no_documents_read_zeros_at_holes() -> None:
    x, ids = jnp.ones((1, 4, 8)), jnp.array([[7, -7, 7, 0]])
    told, alone = (read(x, ids, None, None, packed=packed) for packed in (True, False))
    z = jnp.ones((1, 8, 4))
    assert told.segment_ids is ids
    assert told.clear(z) is z
    assert alone.segment_ids is None
    assert jnp.array_equal(alone.clear(z)[0, 0], jnp.array([1.0, 0.0, 1.0, 0.0]))
    assert jnp.array_equal(told.restore(x)[0, :, 0], jnp.array([1.0, 0.0, 1.0, 0.0]))


def test_documents_alone_start_with_their_row() -> None:
    x, ids = jnp.ones((1, 4, 8)), jnp.array([[1, 1, 2, 2]])
    assert read(x, ids, None, None, alignment=2).segment_ids is ids
    with pytest.raises(ValueError, match="documents must start with their row"):
        read(x, ids, None, None, alignment=2, alone=True)


def test_calls_are_split_from_a_length_on() -> None:
    assert not splits_call(2 * SHORTEST)
    with jax.set_mesh(make_mesh(data=1, seq=2, devices=jax.devices()[:2])):
        assert [splits_call(2 * SHORTEST - 1), splits_call(2 * SHORTEST)] == [False, True]


def test_heads_that_do_not_divide_are_named_before_compiling() -> None:
    subject = Subject(NaiveConfig(joins=False), length=24)
    with jax.set_mesh(make_mesh(data=1, seq=8)), pytest.raises(ValueError, match="4 heads do not divide"):
        jax.eval_shape(subject.parallel, subject.params, jnp.asarray(subject.x), None)


def test_the_guide_s_mixer_is_short_and_stands_in_a_stack() -> None:
    """The suite checks it; here is what the page does with it besides."""
    mixer, _, stack = blocks()
    assert sum(bool(line.strip()) for line in mixer.splitlines()) <= 70
    exec(compile(stack, str(GUIDE), "exec"), dict(written()))


MEMORIES = {
    "memory": NeuralMemoryConfig(dim=8, num_heads=2, chunk_size=4),
    "mag": MAGConfig(dim=8, num_heads=2, window=8, chunk_size=4),
    "mac": MACConfig(dim=8, num_heads=2, chunk_size=4),
    "slots": SlotMemoryConfig(dim=8, num_heads=2),
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gated_delta_net", {"short_taps": 3}),
        ("hyena_short_taps", {"short_taps": 3}),
        ("hyena_explicit", {"filter": ExplicitFilter(taps=4)}),
        ("hyena_explicit", {"filter": ExplicitFilter(taps=9)}),
        ("hyena_implicit", {"filter": SHORT_IMPLICIT}),
        ("attention", {"window": 6}),
        ("attention_window", {"window": 4}),
        ("attention_window", {"window": 8}),
        ("attention_window", {"window": None}),
        ("ntm", {"slots": 7}),
        ("state_engine", {"cell": "linear"}),
        ("state_engine", {"adaptive_count": True}),
        ("state_engine_counted", {"adaptive_count": False}),
        ("state_engine_counted", {"levels": (4, 12)}),
        ("state_engine_edges", {"interval": 6}),
        ("state_engine_edges", {"cell": "linear"}),
        ("recurrence", {"cell": "minlstm"}),
        ("hyena_modal", {"filter": ExplicitFilter(taps=5)}),
        ("sparse_attention", {"block": 2}),
        *itertools.product(
            ("memory", "mag", "mac"),
            ({"chunk_size": 2, "segment_alignment": 2}, {"depth": 1}, {"head_dim": 2}),
        ),
        *(("slots", change) for change in ({"slots": 7}, {"interval": 4}, {"head_dim": 2})),
    ],
)
def test_the_state_of_another_config_is_refused(name: str, change: dict[str, Any]) -> None:
    short = HyenaConfig(dim=8, filter=MODAL, short_taps=2)
    config = (ALL | MEMORIES | {"hyena_short_taps": short})[name]
    with pytest.raises(ValueError, match="make it by init_state of the same config"):
        _call(config, dataclasses.replace(config, **change))


SAME_MATRICES = {
    "gated_delta_net": GatedDeltaNetConfig(dim=4, num_heads=2, head_dim=4, chunk_size=8),
    "gated_linear_attention": GatedLinearAttentionConfig(dim=4, num_heads=2, head_dim=4, chunk_size=8),
    "mamba2": Mamba2Config(dim=4, head_dim=4, state_dim=4, num_groups=2, chunk_size=8),
}


@pytest.mark.parametrize(("name", "other"), list(itertools.permutations(SAME_MATRICES, 2)))
def test_the_matrices_of_another_mixer_are_refused(name: str, other: str) -> None:
    """Their shapes are the same."""
    with pytest.raises(ValueError, match=r"the state is of mixer = \w+, and the config of \w+: make it by"):
        _call(SAME_MATRICES[name], SAME_MATRICES[other])


@pytest.mark.parametrize(
    ("name", "other"),
    [
        *[("gru", "lstm"), ("lstm", "gru"), ("ntm", "gru"), ("dual_decay", "ntm")],
        *[("state_engine", "dual_decay"), ("attention", "state_engine"), ("memory", "gru")],
        *[("mag", "attention"), ("mac", "mag"), ("slots", "memory")],
    ],
)
def test_the_state_of_another_mixer_is_refused(name: str, other: str) -> None:
    """An LSTM's has all that a GRU looks for."""
    known = ALL | MEMORIES
    with pytest.raises(
        ValueError, match=r"the state is a \w+State, expected a \w+State: make it by init_state"
    ):
        _call(known[name], known[other])


def _call(config: Any, other: Any) -> None:
    """Traces a call with another config's state."""
    state, module = init_state(other, 3, capacity=24), config.build()
    given = jax.ShapeDtypeStruct((3, 2, config.dim), jnp.float32)
    jax.eval_shape(lambda x: module.init_with_output(jax.random.key(0), x, state=state), given)


@pytest.mark.parametrize(
    "config", [*WORDS.values(), STORED["N"], STORED["B"]], ids=[*WORDS, "ntm", "slot_memory"]
)
def test_inputs_of_another_width_are_refused(config: Any) -> None:
    """Else the mixer would be built for their width without a word, and put out its own."""
    given, module = jax.ShapeDtypeStruct((1, 2, 48), jnp.float32), config.build()
    with pytest.raises(ValueError, match=r"dim = 64 reads x of width 64, got \(1, 2, 48\): set dim=48"):
        jax.eval_shape(module.init, jax.random.key(0), given)


def test_empty_calls_and_states_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least one row and one token, got x \(2, 0, 8\): leave empty"):
        read(jnp.zeros((2, 0, 8)), None, None, start_clock(2))
    # One row would be broadcast, and several would end in an error of their own in every mixer.
    with pytest.raises(ValueError, match="x has 3 rows and the state 1: make it by init_state"):
        read(jnp.zeros((3, 2, 8)), None, None, start_clock(1))


@pytest.mark.parametrize(
    ("shape", "fix"),
    [((2, 8), r"write x\[None\]"), ((1, 3, 2, 8), "reshape it, or map the call by jax.vmap")],
)
def test_arrays_of_another_rank_are_refused(shape: tuple[int, ...], fix: str) -> None:
    with pytest.raises(ValueError, match=f"of shape .rows, tokens, width., got .*: {fix}"):
        read(jnp.zeros(shape), None, None, None)


def gradients(core: Adjoined, streams: Any) -> Any:
    """Of a loss on the outputs, by all streams."""

    def loss(streams: Any) -> Any:
        rows = read(streams[2][:, :, 0], None, None, None)
        return jnp.sum(rows.run(core, streams)[0] ** 2)

    return jax.jit(jax.grad(loss))(streams)


def drawn(*widths: int) -> tuple[jax.Array, ...]:
    """Streams of one row with one head, and a log gate behind them."""
    keys = jax.random.split(jax.random.key(0), len(widths))
    arrays = (jax.random.normal(key, (1, 16, 1, width)) for key, width in zip(keys, widths, strict=True))
    return *arrays, -jnp.ones((1, 16, 1))


QKV = drawn(2, 2, 3)
DELTA = (*QKV[:3], jnp.full((1, 16, 1), 0.5), QKV[3])


@pytest.mark.slow(days=28, group="costly", turn="mixers/driver/test_sequence")
@pytest.mark.parametrize(("core", "streams"), [(LinearState("head", 4), QKV), (DeltaRule(4), DELTA)])
def test_gradients_go_back_over_devices_without_one_of_the_summary(
    core: Any, streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(core, streams)

    def refuse(*_: Any) -> Any:
        raise AssertionError("a gradient of the summary was taken")

    observe = jax.custom_vjp(type(core).observe, nondiff_argnums=(0,))
    observe.defvjp(refuse, refuse)
    monkeypatch.setattr(type(core), "observe", lambda *args: observe(*args))
    with jax.set_mesh(make_mesh(data=1, seq=4, devices=jax.devices()[:4])):
        found = gradients(core, streams)
    for got, want in zip(found, expected, strict=True):
        assert_close(got, want, n=32)


def test_gradients_go_back_over_devices_without_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the stretch's own run of 3 columns there is one forward with 2 more, for the summary and the adjoint."""
    widths = set()

    def recorded(q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Any:
        widths.add(v.shape[-1])
        return gated_delta_rule(q, k, v, *args, **options)

    for module in (gated_delta_net, summary):
        monkeypatch.setattr(module, "gated_delta_rule", recorded)
    with jax.set_mesh(make_mesh(data=1, seq=4, devices=jax.devices()[:4])):
        jax.eval_shape(partial(gradients, DeltaRule(4)), DELTA)
    assert widths == {3, 3 + 2}


def test_attention_refuses_a_state_that_is_a_dict():
    mixer = AttentionConfig(dim=8, num_heads=2).build()
    with pytest.raises(ValueError, match="the state is a dict, expected a AttentionState"):
        mixer.init(jax.random.key(0), jnp.ones((1, 2, 8)), state={})
