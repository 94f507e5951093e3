"""The property suite of adapters: what `check_mixer` asks of a mixer, and what an adapter promises of its base.

An adapted stack maps [B, T, D] to [B, T, D] as a mixer does. So most properties are those of mixers: causality, packed
documents, holes, any split of a sequence into calls, rows split over devices.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxblt.adapters.code.config import RouterConfig
from jaxblt.adapters.code.draw import Draw
from jaxblt.adapters.code.prefix import Prefix
from jaxblt.adapters.code.router import ROUTER
from jaxblt.adapters.code.sticky import Sticky
from jaxblt.adapters.code.transforms import TopK
from jaxblt.adapters.files.drift import describe_drift, merge_drift
from jaxblt.adapters.files.merge import merge_stack
from jaxblt.adapters.retrieval.neighbours import INDEX
from jaxblt.adapters.update.forms import FORM
from jaxblt.adapters.update.params import join_params, routers, split_params, without_routers
from jaxblt.adapters.update.row_adapters import choose_codes
from jaxblt.adapters.update.site import ADAPTER, ZERO
from jaxblt.models.adapter import CHOSEN
from jaxblt.models.stack import Stack, StackConfig, StackState, init_stack_state, unstack_periods
from jaxblt.parallel import batch_sharding, make_mesh
from jaxblt.parallel.rules import param_shardings
from jaxblt.random_keys import make_key
from jaxblt.testing.adapter_learning import (
    Learned,
    check_memory,
    check_overfits,
    check_recovers,
    fresh,
    learn,
)
from jaxblt.testing.check import PROPERTIES, Property
from jaxblt.testing.numerics import expect_derivative
from jaxblt.testing.subject import Subject, expect_close, expect_moved

logger = logging.getLogger(__name__)

OF_MIXERS = (
    "output",
    "causal",
    "packed",
    "holes",
    "odd_lengths",
    "batch",
    "sequence",
    "chunked",
    "continued",
    "documents_streamed",
    "holes_streamed",
    "rows_advance_alone",
    "split_call",
    "state",
    "finite_gradients",
    "jit",
    "bfloat16",
    "sharded",
)
STILL = {"tau", INDEX}
"""Parameters without a gradient."""
STEP = 0.5
"""The size of the gradient step after which a router has a gradient."""


@dataclasses.dataclass(frozen=True)
class AdaptedStack:
    """A stack as a mixer's config; the state has the batch as leading axis.

    Attributes:
      stack: with an adapter.
    """

    stack: StackConfig

    @property
    def dim(self) -> int:
        """Width."""
        return self.stack.dim

    @property
    def causal(self) -> bool:
        """True if a token sees nothing behind it."""
        return self.stack.causal

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "AdaptedMixer":
        """Build the module."""
        return AdaptedMixer(self.stack, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> StackState:
        """Return the stack's state."""
        return _turned(init_stack_state(self.stack, batch_size, capacity=capacity, dtype=dtype))


class AdaptedMixer(nn.Module):
    """A stack in the form of a mixer."""

    stack: StackConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: StackState | None = None,
    ) -> tuple[Float[Array, "B T D"], StackState | None]:
        """Mix as a mixer does."""
        inner = Stack(self.stack, self.dtype, name="stack")
        given = None if state is None else _turned(state)
        side = _side(self.stack, x)
        y, after = inner(x, segment_ids=segment_ids, positions=positions, state=given, side=side)
        return y, None if after is None else _turned(after)


def _turned(state: StackState) -> StackState:
    """Exchange axes of layers and batch in what is scanned of a state."""
    return dataclasses.replace(state, periods=jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), state.periods))


class AdaptedSubject(Subject):
    """An adapted stack under test, every parameter drawn: what starts at zero would hide what it does."""

    def __init__(self, config: AdaptedStack, *, length: int, seed: int) -> None:
        x = jnp.zeros((1, length, config.dim), jnp.float32)
        shapes = nn.meta.unbox(jax.eval_shape(config.build().init, make_key(seed), x)["params"])
        draw = functools.partial(_draw, np.random.default_rng(seed), config.stack.adapter)
        params = {"params": jax.tree_util.tree_map_with_path(draw, shapes)}
        super().__init__(config, length=length, seed=seed, params=params)

    @property
    def stack(self) -> StackConfig:
        """The stack's config."""
        return self.config.stack  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def own(self) -> Any:
        """The stack's parameters."""
        return self.params["params"]["stack"]

    @functools.cached_property
    def learned(self) -> Learned:
        """The results of training new adapters on the batch."""
        return learn(self)

    @functools.cached_property
    def base(self) -> "Callable[..., jax.Array]":
        """(params, x) -> y of the stack without an adapter."""
        return _forward(dataclasses.replace(self.stack, adapter=None))


def _draw(
    rng: np.random.Generator, adapter: Any, path: tuple[Any, ...], shape: jax.ShapeDtypeStruct
) -> jax.Array:
    """Draw vectors about 1, and matrices that keep an input's size.

    U is smaller by the scale, so that an update is, too.
    """
    z = rng.standard_normal(shape.shape)
    numbers = z / shape.shape[-2] ** 0.5 if len(shape.shape) > 1 else 1 + 0.3 * z
    if path[-1].key == "norms":  # a spread near 0 would make much of rounding
        numbers = np.stack([np.zeros(shape.shape[1]), np.ones(shape.shape[1])])
    if path[-1].key == "u":
        numbers = z / (adapter.rank**0.5 * adapter.scale(adapter.rank))
    # Avoid jnp.asarray, which would compile a program for each shape
    return jax.device_put(numbers.astype(np.float32))


def _forward(stack: StackConfig) -> Callable[..., jax.Array]:
    apply = Stack(stack).apply
    return jax.jit(lambda params, x: apply({"params": params}, x, side=_side(stack, x))[0])  # type: ignore[index]


def _side(stack: StackConfig, x: Float[Array, "B T D"]) -> Float[Array, "B T S"] | None:
    """Return side features, as many as the router reads: the first numbers of each token."""
    router = None if stack.adapter is None else stack.adapter.router
    return None if router is None or not router.side else x[..., : router.side]


def with_constant_code(stack: StackConfig, fallback: float) -> StackConfig:
    """Return the stack whose router never comes to its first code.

    Without a router it is the stack itself.
    """
    adapter = stack.adapter
    if adapter.router is None:
        return stack
    still = RouterConfig(
        per=adapter.router.per, level="prefix", reads=(Prefix(1 << 20),), hidden=1, fallback=fallback
    )
    return dataclasses.replace(stack, adapter=dataclasses.replace(adapter, router=still, levels=(), code=()))


def _constant_params(subject: AdaptedSubject, fallback: float) -> tuple[StackConfig, Any]:
    """Return the stack with a constant code, and the subject's parameters for it."""
    stack = with_constant_code(subject.stack, fallback)
    x = jnp.zeros((1, 4, stack.dim), jnp.float32)
    made = nn.meta.unbox(jax.eval_shape(Stack(stack).init, make_key(0), x)["params"])
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), routers(made))
    return stack, join_params(without_routers(subject.own), zeros)


def check_start(subject: Any) -> None:
    """Check that a new adapter's output is the base's: U = 0, or the scale of a gate or form."""
    base, trained = split_params(subject.own)
    still = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.zeros_like(x) if path[-1].key in ZERO else x, trained
    )
    x = jnp.asarray(subject.x)
    y = subject.parallel({"params": {"stack": join_params(base, still)}}, x, None)
    expect_close("a new adapter changes the output", y, subject.base(base, x), subject.limit)
    moved = subject.parallel(subject.params, x, None)
    expect_moved("a drawn adapter changes nothing", moved, y, subject.limit)


def check_silent(subject: Any) -> None:
    """Check that with c = 0 the output is the base's."""
    stack, params = _constant_params(subject, 0.0)
    x = jnp.asarray(subject.x)
    y, base = _forward(stack)(params, x), subject.base(split_params(subject.own)[0], x)
    expect_close("a code of zero changes the output", y, base, subject.limit)


def check_dense(subject: Any) -> None:
    """Check that a constant code gives the output of W + (alpha/r) V diag(c) U, merged in fp32."""
    stack, params = _constant_params(subject, 1.0)
    x, adapter = jnp.asarray(subject.x), subject.stack.adapter
    code = None if adapter.router is None else jnp.full((adapter.width,), adapter.start, jnp.float32)
    y, merged = _forward(stack)(params, x), merge_stack(subject.own, subject.stack, code)
    expect_close("an adapter differs from its weight update", y, subject.base(merged, x), subject.limit)


def check_merged(subject: Any) -> None:
    """Check that at any one code, with numbers that differ, the merged weights agree in fp32.

    Logs how far off the updates are where the merged weights are rounded to bfloat16.
    """
    adapter, stack, x = subject.stack.adapter, subject.stack, jnp.asarray(subject.x)
    scores = jnp.asarray(subject.noise(12, (len(adapter.level_names), adapter.numbers)))
    code = (1 + scores if adapter.blocks is None else jax.nn.softmax(scores)).reshape(-1)
    chosen = choose_codes(stack, jnp.tile(code[None], (len(x), 1)), jnp.ones(len(x), bool))
    apply = jax.jit(lambda variables, x: Stack(stack).apply(variables, x, side=_side(stack, x))[0])
    y = apply({"params": subject.own, CHOSEN: chosen}, x)
    merged = merge_stack(subject.own, subject.stack, code)
    expect_close("a merged adapter differs", y, subject.base(merged, x), subject.limit)
    logger.info("%s", describe_drift(merge_drift(subject.own, merged)))


def check_all_experts(subject: Any) -> None:
    """Check that the largest E of E numbers are all of them."""
    adapter, x = subject.stack.adapter, jnp.asarray(subject.x)
    found = []
    for code in ((), (TopK(adapter.numbers),)):
        stack = dataclasses.replace(subject.stack, adapter=dataclasses.replace(adapter, code=code))
        found.append(_forward(stack)(subject.own, x))
    expect_close("TopK of all numbers changes the output", found[1], found[0], subject.limit)


def check_learns(subject: Any) -> None:
    """Check that a new router has a gradient after one step.

    A start at which neither it nor U has one would never end.
    """
    base, new = fresh(subject.own)
    dy, ids = jnp.asarray(subject.noise(11, subject.x.shape)), jnp.ones(subject.x.shape[:2], jnp.int32)

    def gradient(trained: Any) -> Any:
        params = {"params": {"stack": join_params(base, trained)}}
        found = subject.gradient(params, jnp.asarray(subject.x), ids, dy)[0]["params"]["stack"]
        return split_params(found)[1]

    @jax.jit
    def step(new: Any, gradient: Any) -> Any:
        return jax.tree.map(lambda p, g: p + STEP * g / jnp.maximum(jnp.abs(g).max(), 1), new, gradient)

    learned = _learned(routers(gradient(step(new, gradient(new)))))
    if not learned or not all(learned.values()):
        still = [name for name, moved in learned.items() if not moved]
        raise AssertionError(f"routers {still} of {list(learned)} have no gradient after one step")


def _learned(gradient: Any) -> dict[str, bool]:
    """Return which layers' last kernels of each router have a gradient, by the router's path."""
    moved: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        *router, part, kind = (entry.key for entry in path)
        if part.startswith("code") and kind == "kernel":
            name = "/".join(router)
            moved[name] = moved.get(name, False) | np.any(np.asarray(leaf), axis=(-2, -1))
    return {name: bool(np.all(found)) for name, found in moved.items()}


def check_gradients(subject: Any) -> None:
    """Check gradients by inputs and by all parameters of adapters against central differences.

    A governor's bound and an index have no gradient, and are left alone.
    """
    paths = [{entry.key for entry in path} for path, _ in jax.tree_util.tree_leaves_with_path(subject.params)]
    for leaf in (i for i, names in enumerate(paths) if names & {ADAPTER, FORM, ROUTER} and not names & STILL):
        expect_derivative(subject, [leaf])
    expect_derivative(subject, [len(paths)])


def check_unrolled(subject: Any) -> None:
    """Check that scanned and unrolled stacks agree, with parameters stacked and apart."""
    other = dataclasses.replace(subject.stack, scan=False)
    x = jnp.asarray(subject.x)
    y = _forward(other)(unstack_periods(subject.own), x)
    expected = subject.parallel(subject.params, x, None)
    expect_close("the unrolled stack differs from the scanned one", y, expected, subject.limit)


def check_tensor(subject: Any) -> None:
    """Check that a split over devices gives what one device gives.

    Parameters are split over fsdp and tensor, rows over data and tokens over seq.
    """
    ids, rows = subject.documents(), 4
    x, ids = np.resize(subject.x, (rows, *subject.x.shape[1:])), np.resize(ids, (rows, ids.shape[1]))
    expected = jax.jit(subject.module.apply)(subject.params, jnp.asarray(x), segment_ids=jnp.asarray(ids))[0]
    mesh = make_mesh(data=1, fsdp=2, seq=2, tensor=2)
    boxed = jax.eval_shape(subject.module.init, make_key(0), jnp.asarray(x))["params"]
    with jax.set_mesh(mesh):
        params = {"params": jax.device_put(subject.params["params"], param_shardings(boxed, mesh))}
        given = jax.device_put((x, ids), batch_sharding(mesh))
        y = jax.jit(subject.module.apply)(params, given[0], segment_ids=given[1])[0]
    live = ids > 0
    what = "parameters split over devices change the output"
    expect_close(what, np.asarray(y)[live], np.asarray(expected)[live], subject.limit)


def _is_routed(config: Any) -> bool:
    return config.stack.adapter.router is not None


def _is_smooth(config: Any) -> bool:
    """Return whether gradients are derivatives.

    Those of chosen experts go straight through the choice.
    """
    return not any(isinstance(transform, Sticky | Draw) for transform in config.stack.adapter.code)


def _is_scanned(config: Any) -> bool:
    return config.stack.scan and config.stack.repeats > 0


ADAPTER_PROPERTIES: tuple[Property, ...] = (
    Property("start", check_start),
    Property("silent", check_silent, _is_routed),
    Property("dense", check_dense),
    Property("merged", check_merged, _is_routed),
    Property("all_experts", check_all_experts, _is_routed),
    Property("learns", check_learns, _is_routed),
    Property("gradients", check_gradients, _is_smooth),
    Property("overfits", check_overfits),
    Property("memory", check_memory),
    Property("recovers", check_recovers, _is_routed),
    Property("unrolled", check_unrolled, _is_scanned),
    Property("tensor", check_tensor, devices=8),
    *(prop for prop in PROPERTIES if prop.name in OF_MIXERS),
)


def check_adapter(
    stack: StackConfig, *, length: int = 24, seed: int = 0, only: Sequence[str] | None = None
) -> list[str]:
    """Run the property suite on a stack with an adapter, and name the properties checked.

    Keep the stack tiny (dim 8 to 16, one or two blocks) and the router's chunk and prefix below `length`: the suite
    compares many passes. Parameters are drawn, U and the router's last kernel too.

    Args:
      stack: with an adapter, as `jaxblt.adapters.attach` makes it.
      length: tokens a row, at least 14.
      seed: of parameters and inputs.
      only: names of the properties to check; None for all that apply and have enough devices.

    Raises:
      AssertionError: a property does not hold; names it, the size of the error and the tolerance.
      ValueError: the stack has no adapter, or a name in `only` is unknown or needs more devices than there are.
    """
    known = [p.name for p in ADAPTER_PROPERTIES]
    if stack.adapter is None:
        raise ValueError("the stack has no adapter to check: attach one (jaxblt.adapters.update.attach)")
    if unknown := sorted(set(only or ()) - set(known)):
        raise ValueError(f"no property is called {unknown}, expected names of {known}")
    subject = AdaptedSubject(AdaptedStack(stack), length=length, seed=seed)
    chosen = [p for p in ADAPTER_PROPERTIES if (only is None or p.name in only) and p.applies(subject.config)]
    many = [p.name for p in chosen if p.devices > jax.device_count()]
    if many and only is not None:
        raise ValueError(f"{many} need more than the {jax.device_count()} devices that there are")
    for prop in chosen:
        if prop.name in many:
            continue
        try:
            prop.check(subject)
        except AssertionError as error:
            raise AssertionError(f"{prop.name}: {error}") from error
    return [p.name for p in chosen if p.name not in many]
