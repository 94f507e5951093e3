"""The property suite finds what is wrong with mixers that are wrong on purpose."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import pytest
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jaxblt.mixers import ExplicitFilter, GatedRecurrenceConfig, HyenaConfig, MixerConfig, SlotMemoryConfig
from jaxblt.mixers.driver.choices import held
from jaxblt.parallel import seq_axis
from jaxblt.testing import PROPERTIES, check, check_mixer
from tests.mixers.configs import REST

RECURRENCE = GatedRecurrenceConfig(dim=8)
CONVOLUTION = HyenaConfig(dim=8, filter=ExplicitFilter(taps=4), short_taps=1)


@dataclasses.dataclass(frozen=True)
class Faulty:
    """A sound mixer and what is done to it."""

    inner: MixerConfig
    fault: Callable[..., tuple[Any, Any]]
    causal: bool = True
    start: Callable[[Any, int], Any] = lambda state, capacity: state

    @property
    def dim(self) -> int:
        return self.inner.dim

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> nn.Module:
        return FaultyMixer(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> Any:
        return self.start(self.inner.init_state(batch_size, capacity=capacity, dtype=dtype), capacity)


class FaultyMixer(nn.Module):
    config: Faulty
    dtype: Any

    @nn.compact
    def __call__(self, x: Any, *, segment_ids: Any = None, positions: Any = None, state: Any = None) -> Any:
        inner = self.config.inner.build(dtype=self.dtype, name="inner")

        def run(x: Any, ids: Any, state: Any) -> Any:
            return inner(x, segment_ids=ids, positions=None, state=state)

        run.hold = functools.partial(held, self)
        return self.config.fault(run, x.astype(self.dtype), segment_ids, positions, state)


def outputs(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A fault that changes outputs, given inputs."""

    def fault(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
        y, state = run(x, ids, state)
        return change(y, x), state

    return fault


def segments(change: Callable[[Any], Any], *, streaming: bool | None = None) -> Callable[..., Any]:
    """A fault that changes segment ids, in both passes or in one."""

    def fault(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
        if ids is not None and streaming in (None, state is not None):
            ids = change(ids)
        return run(x, ids, state)

    return fault


def forgets(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    y, after = run(x, ids, state)
    return y, None if state is None else after.replace(h=jnp.zeros_like(after.h))


def drifts(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    y, after = run(x, ids, state)
    return y, None if state is None else after.replace(h=after.h * jnp.float32(1 + 1e-7))


def keeps_what_it_sees(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    """Whoever gets a token takes all tokens of the call."""
    y, after = run(x, ids, state)
    if state is None:
        return y, after
    takes = jnp.any(ids > 0, 1, keepdims=True)
    return y, run(x, jnp.where(takes, jnp.maximum(ids, 1), ids), state)[1]


def knows_later_tokens(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    """Rounding as of a transform over all tokens of a call."""
    y, after = run(x, ids, state)
    if state is None or ids is None:
        return y, after
    later = jnp.sum(jnp.where((ids > 0)[..., None], x, 0), 1, keepdims=True)
    return y + jnp.where((ids > 0)[..., None], 1e-6 * later, 0), after


def restarts(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    if state is not None and ids is None:
        state = jax.tree.map(jnp.zeros_like, state)
    return run(x, ids, state)


def shifts(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    y, state = run(x, ids, state)
    return y if positions is None else y + jnp.ones_like(y), state


def widens(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    y, after = run(x, ids, state)
    return y, None if state is None else after.replace(h=jnp.concatenate([after.h, after.h], 0))


def copies(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    return (jnp.where((ids > 0)[..., None], x, 0.0) if ids is not None else x), state


def fills_holes(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    y, state = run(x, ids, state)
    return (y if ids is None else jnp.where((ids < 0)[..., None], jnp.ones_like(y), y)), state


def weighs_holes(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    y, state = run(x, ids, state)
    return (y if ids is None else y + x * (ids > 0)[..., None].astype(x.dtype)), state


def weighs_holes_in_gradients(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    y, state = run(x, ids, state)
    return (y if ids is None else y + jnp.where((ids > 0)[..., None], x * x, 0.0)), state


def drops_odd_tail(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    odd = x.shape[1] % 2 and state is None
    return run(x.at[:, -1].set(0.0) if odd else x, ids, state)


def gathers(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    if not jax.sharding.get_abstract_mesh().empty:
        x = jax.lax.with_sharding_constraint(x, PartitionSpec())
    return run(x, ids, state)


def forgets_the_stretch_before(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    axis = seq_axis()
    if axis is not None and ids is not None:
        stretch = jnp.arange(x.shape[1], dtype=ids.dtype)[None] // (x.shape[1] // axis.size)
        ids = ids + jnp.sign(ids) * 100 * stretch
    return run(x, ids, state)


def restarts_where_split(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    if seq_axis() is not None and state is not None:
        state = jax.tree.map(jnp.zeros_like, state)
    return run(x, ids, state)


def switches(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    """A sound mixer with a hard gate and a straight-through gradient."""
    y, state = run(x, ids, state)
    soft = jax.nn.sigmoid(y)
    hard = (soft > 0.5).astype(y.dtype)
    return y * (soft + run.hold("gate", jax.lax.stop_gradient(hard - soft))), state


@jax.custom_vjp
def scaled_gradient(y: Any) -> Any:
    return y


scaled_gradient.defvjp(lambda y: (y, None), lambda _, g: (g * jnp.float32(1.01),))


@flax.struct.dataclass
class Growing:
    inner: Any
    past: Any

    def replace_inner(self, inner: Any) -> "Growing":
        return Growing(inner=inner, past=self.past)


def grows(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    y, after = run(x, ids, None if state is None else state.inner)
    return y, None if state is None else state.replace_inner(after)


def traced(y: Any, x: Any) -> Any:
    return y if isinstance(y, Tracer) else y * 1.01


def from_token_128(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A fault that changes outputs of a call's tokens from its 129th on."""

    def fault(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
        y, after = run(x, ids, state)
        return jnp.where(jnp.arange(x.shape[1])[:, None] >= 128, change(y), y), after

    return fault


def forgets_128_tokens(run: Any, x: Any, ids: Any, positions: Any, state: Any) -> Any:
    if state is None and ids is not None:
        ids = ids * 8 + jnp.sign(ids) * (jnp.arange(ids.shape[1], dtype=ids.dtype)[None] // 128)
    return run(x, ids, state)


FAULTS: list[tuple[str, str, Faulty]] = [
    ("output", "holes have outputs", Faulty(RECURRENCE, fills_holes)),
    (
        "causal",
        "reads the next token",
        Faulty(RECURRENCE, outputs(lambda y, x: y + 0.1 * jnp.roll(x, -1, 1))),
    ),
    (
        "causal",
        "reads the mean",
        Faulty(RECURRENCE, outputs(lambda y, x: y + 0.01 * jnp.mean(x, 1, keepdims=True))),
    ),
    ("mixes", "mixes nothing", Faulty(RECURRENCE, copies)),
    ("mixes", "bidirectional in name alone", Faulty(RECURRENCE, outputs(lambda y, x: y), causal=False)),
    ("packed", "leaks across documents", Faulty(RECURRENCE, segments(jnp.sign))),
    ("holes", "reads holes", Faulty(RECURRENCE, segments(jnp.abs, streaming=False))),
    ("holes", "multiplies holes by 0", Faulty(RECURRENCE, weighs_holes)),
    ("holes", "multiplies gradients of holes by 0", Faulty(RECURRENCE, weighs_holes_in_gradients)),
    ("odd_lengths", "drops an odd tail", Faulty(RECURRENCE, drops_odd_tail)),
    (
        "batch",
        "reads other rows",
        Faulty(RECURRENCE, outputs(lambda y, x: y + 0.1 * jnp.mean(x, 0, keepdims=True))),
    ),
    ("positions", "another output with positions", Faulty(RECURRENCE, shifts)),
    ("sequence", "stretches on their own", Faulty(RECURRENCE, forgets_the_stretch_before)),
    (
        "long",
        "reads the next token beyond 128",
        Faulty(RECURRENCE, from_token_128(lambda y: jnp.roll(y, -1, 1))),
    ),
    ("long", "forgets what lies before the 128th token", Faulty(RECURRENCE, forgets_128_tokens)),
    (
        "long",
        "gradients 1 % too large beyond 128",
        Faulty(RECURRENCE, from_token_128(lambda y: scaled_gradient(y))),
    ),
    ("chunked", "forgets between calls", Faulty(RECURRENCE, forgets)),
    ("continued", "restarts without segment ids", Faulty(RECURRENCE, restarts)),
    ("documents_streamed", "leaks when streaming", Faulty(RECURRENCE, segments(jnp.sign, streaming=True))),
    (
        "holes_streamed",
        "holes take no time when streaming",
        Faulty(CONVOLUTION, segments(lambda ids: jnp.maximum(ids, 0), streaming=True)),
    ),
    ("holes_streamed", "multiplies holes by 0 when streaming", Faulty(RECURRENCE, weighs_holes)),
    ("rows_advance_alone", "padding moves the state", Faulty(RECURRENCE, drifts)),
    (
        "rows_advance_alone",
        "padding is a token",
        Faulty(RECURRENCE, segments(lambda i: jnp.where(i == 0, 1, i))),
    ),
    ("keep", "keeps tokens that it looks at", Faulty(RECURRENCE, keeps_what_it_sees)),
    ("keep", "rounds by later tokens", Faulty(RECURRENCE, knows_later_tokens)),
    ("state", "the state changes shape", Faulty(RECURRENCE, widens)),
    (
        "state",
        "the state grows with the capacity",
        Faulty(RECURRENCE, grows, start=lambda s, capacity: Growing(s, jnp.zeros((3, capacity)))),
    ),
    ("gradients", "gradients 1 % too large", Faulty(RECURRENCE, outputs(lambda y, x: scaled_gradient(y)))),
    (
        "gradients",
        "part of a gradient is cut",
        Faulty(RECURRENCE, outputs(lambda y, x: y + jax.lax.stop_gradient(0.3 * y))),
    ),
    (
        "finite_gradients",
        "no gradient at zero",
        Faulty(RECURRENCE, outputs(lambda y, x: y * jnp.sqrt(jnp.sum(x * x, -1, keepdims=True)))),
    ),
    (
        "every_parameter",
        "parameters without use",
        Faulty(RECURRENCE, outputs(lambda y, x: jax.lax.stop_gradient(y) + x)),
    ),
    ("jit", "another output under jit", Faulty(RECURRENCE, outputs(traced))),
    ("bfloat16", "fp32 outputs", Faulty(RECURRENCE, outputs(lambda y, x: y.astype(jnp.float32)))),
    (
        "bfloat16",
        "far off",
        Faulty(RECURRENCE, outputs(lambda y, x: y if y.dtype == jnp.float32 else y * 1.1)),
    ),
    ("sharded", "gathers the batch", Faulty(RECURRENCE, gathers)),
    ("gathers", "gathers the sequence", Faulty(RECURRENCE, gathers)),
    ("split_call", "forgets where a call is split", Faulty(RECURRENCE, restarts_where_split)),
]


@pytest.mark.slow(days=28)
@pytest.mark.parametrize(("name", "config"), [pytest.param(n, c, id=f"{n}-{what}") for n, what, c in FAULTS])
def test_a_faulty_mixer_fails(name: str, config: Faulty) -> None:
    with pytest.raises(AssertionError, match=f"^{name}: "):
        check_mixer(config, only=[name], length=14)


def test_every_property_has_a_fault_it_finds() -> None:
    assert {name for name, _, _ in FAULTS} == {p.name for p in PROPERTIES}


def test_the_failure_names_size_and_tolerance() -> None:
    with pytest.raises(
        AssertionError, match=r"calls of 1 differ .*: error \d\.\d+e[-+]\d+ is beyond the tolerance \d"
    ):
        check_mixer(Faulty(RECURRENCE, forgets), only=["chunked"], length=14)


@pytest.mark.slow(days=28, group="costly", turn="mixers/test_check_mixer")
def test_hard_choices_are_held_while_gradients_are_compared() -> None:
    assert check_mixer(Faulty(RECURRENCE, switches), only=["gradients"], length=14)


@pytest.mark.parametrize("name", ["state_engine", "slots"])
def test_init_returns_nothing_that_apply_would_hold_for_other_inputs(name: str) -> None:
    config = {**REST, "slots": SlotMemoryConfig(dim=8, slots=4, top_k=2)}[name]
    x = jax.ShapeDtypeStruct((1, 16, 8), jnp.float32)
    found = jax.eval_shape(config.build().init, jax.random.key(0), x)
    assert set(found) == {"params"}


def test_a_sound_mixer_passes_what_was_asked() -> None:
    assert check_mixer(RECURRENCE, only=["state", "output"], length=14) == ["output", "state"]


def test_what_one_device_cannot_check_is_said_and_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    left_out = "sequence, gathers, split_call, sharded"
    monkeypatch.setattr(check, "PROPERTIES", [p for p in PROPERTIES if p.devices > 1])
    with pytest.warns(UserWarning, match=rf"too few devices \(1\): {left_out}; start the process with"):
        assert check_mixer(RECURRENCE) == []
    with pytest.raises(ValueError, match="too few devices"):
        check_mixer(RECURRENCE, only=["sequence"])


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no property is called \['fast'\]"):
        check_mixer(RECURRENCE, only=["fast"])
    with pytest.raises(ValueError, match="length must be at least 14"):
        check_mixer(RECURRENCE, length=5)
