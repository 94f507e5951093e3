"""Parts that mixers with a matrix of state per head share: its shape, their projections, and their reads."""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxblt.layers import Linear, RMSNorm, linears, named
from jaxblt.mixers.driver.base import Clock, start_clock
from jaxblt.mixers.driver.history import ShortHistory
from jaxblt.mixers.driver.sequence import Rows
from jaxblt.show import show
from jaxblt.validation import check_bounds, check_fields
from pallas_kernels.short_conv import short_conv

STEP_SIZES = (1e-3, 1e-1)
"""Between these step sizes dt starts, on average over inputs (Dao and Gu, 2405.21060)."""
NEAR = 0.1
"""Share of the even start in taps that `start_at` known ones."""


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """The numbers of heads and their widths.

    Attributes:
      heads: of values H.
      key_heads: of queries and keys J, a divisor of H; each is shared by H / J neighbouring heads of values.
      keys: width K of a query or key.
      values: width V of a value.
      taps: of the short convolutions.
    """

    heads: int
    key_heads: int
    keys: int
    values: int
    taps: int

    @property
    def streams(self) -> dict[str, tuple[int, int]]:
        """Heads and width of queries, keys and values."""
        return {
            "q": (self.key_heads, self.keys),
            "k": (self.key_heads, self.keys),
            "v": (self.heads, self.values),
        }

    def no_inputs(self, batch_size: int, dtype: Any) -> tuple[Float[Array, "B _ S"], ...]:
        """Return what convolutions of q, k and v hold before the first token: zeros."""
        sizes = [heads * width for heads, width in self.streams.values()]
        return tuple(jnp.zeros((batch_size, size, self.taps - 1), dtype) for size in sizes)

    def init_state(self, batch_size: int, dtype: Any, mixer: str) -> "MatrixState":
        """Return zero inputs in `dtype`, and S = 0 in fp32."""
        memory = jnp.zeros((batch_size, self.heads, self.keys, self.values), jnp.float32)
        return MatrixState(start_clock(batch_size), self.no_inputs(batch_size, dtype), memory, mixer)


@flax.struct.dataclass
class MatrixState:
    """State of a mixer whose heads hold matrices.

    Attributes:
      clock: where each row stands.
      short: the last taps - 1 inputs of the convolutions of q, k and v.
      memory: S after the row's last token, in fp32.
      mixer: which one writes and reads S.
    """

    clock: Clock
    short: tuple[Float[Array, "B _ S"], ...]
    memory: Float[Array, "B H K V"]
    mixer: str = flax.struct.field(pytree_node=False)

    __repr__ = show


def check_heads(config: Any) -> None:
    """Check the sizes of heads and keys, of `short_taps` and of `chunk_size`.

    Raises:
      ValueError: a value is out of range, heads do not divide, or the mixer is to be bidirectional.
    """
    check_fields(config)
    sizes = ("dim", "num_heads", "num_key_heads", "head_dim", "value_head_dim")
    check_bounds(config, *sizes, "short_taps", "chunk_size", least=1)
    check_forward(config)
    if config.head_dim is None and config.dim % config.num_heads:
        raise ValueError(
            f"dim {config.dim} does not divide among num_heads = {config.num_heads}: set head_dim"
        )
    if config.num_heads % (config.num_key_heads or config.num_heads):
        raise ValueError(
            f"num_heads {config.num_heads} is not a multiple of num_key_heads {config.num_key_heads}"
        )


def check_forward(config: Any) -> None:
    """Raise ValueError for causal=False, or for chunks that are no power of two."""
    name = type(config).__name__.removesuffix("Config")
    if not config.causal:
        raise ValueError(f"{name} runs forward only: use Hyena or attention when causal=False")
    if config.chunk_size & (config.chunk_size - 1):
        raise ValueError(f"{name}: chunk_size must be a power of two, got {config.chunk_size}")


def head_shape(config: Any) -> HeadShape:
    """Return the shape that a config's fields give; see `check_heads`."""
    keys = config.dim // config.num_heads if config.head_dim is None else config.head_dim
    values = keys if config.value_head_dim is None else config.value_head_dim
    return HeadShape(
        config.num_heads, config.num_key_heads or config.num_heads, keys, values, config.short_taps
    )


def start_even(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Float[Array, "H K N"]:
    """Draw taps that start alike for a token and those before it: N(0, 1 / N)."""
    return nn.initializers.normal(shape[-1] ** -0.5)(key, shape, dtype)


def start_at(*shares: float) -> nn.initializers.Initializer:
    """Return an initialiser of taps near the given ones, the token's own first, then near 0.

    Then keys are not blurred over tokens.
    """

    def start(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Float[Array, "H K N"]:
        known = np.zeros(shape, dtype)
        known[..., : len(shares)] = shares
        return jnp.asarray(known) + NEAR * start_even(key, shape, dtype)

    return start


class Streams(nn.Module):
    """q, k, v = silu(short_conv(x W)), each with a matrix and taps of its own (2405.21060, fig. 6).

    Attributes:
      shape: heads and widths.
      dtype: of products.
      recall: start so that pairs are learned soon (docs/notes/recall.md). W of q and of k are equal, so that a query
        finds what looks like it (Trockman et al., 2410.11135). Taps begin at the token itself, those of k as much at
        the one before, so that what follows a token is found by it, as by the shift of H3 (2212.14052).
    """

    shape: HeadShape
    dtype: Any
    recall: bool = False

    @nn.compact
    def __call__(
        self, rows: Rows, carries: tuple[Float[Array, "B _ S"], ...] | None
    ) -> tuple[list[Float[Array, "B T _ _"]], tuple[Float[Array, "B _ S"] | None, ...]]:
        """Return the three streams, zero at holes, and the convolutions' last inputs."""
        names = list(self.shape.streams)
        shared = self.make_rng("params") if self.recall and self.is_initializing() else None
        inits = [_drawn_by(shared) if name != "v" else nn.initializers.lecun_normal() for name in names]
        layers = [self._project(name, init) for name, init in zip(names, inits, strict=True)]
        projected = linears(rows.x, layers)
        found = [
            self._stream(rows, name, z, None if carries is None else carries[i])
            for i, (name, z) in enumerate(zip(names, projected, strict=True))
        ]
        return [y for y, _ in found], tuple(after for _, after in found)

    def _project(self, name: str, init: nn.initializers.Initializer) -> Linear:
        """Return a channel-major projection, as the convolution takes it."""
        heads, width = self.shape.streams[name]
        names = ("embed", _heads_axis(name), "head_dim")
        sizes = {"h": heads, "k": width}
        return Linear("btd,dhk->bhkt", sizes, names, self.dtype, kernel_init=init, name=name)

    def _stream(
        self, rows: Rows, name: str, z: Float[Array, "B H K T"], carry: Float[Array, "B E S"] | None
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B E S"] | None]:
        (heads, width), count = self.shape.streams[name], self.shape.taps
        start = start_even
        if self.recall:
            start = start_at(0.5, 0.5) if name == "k" and count > 1 else start_at(1.0)
        init = named(start, _heads_axis(name), "head_dim", "taps")
        taps = self.param(f"{name}_taps", init, (heads, width, count), jnp.float32)
        core = ShortHistory(short_conv, taps.reshape(-1, count), None, size=count - 1, count=heads)
        z = z.reshape(z.shape[0], -1, z.shape[-1])
        y, after = rows.run(core, (z, None, None), carry, time_axis=2)
        y = jax.nn.silu(y).reshape(z.shape[0], heads, width, -1)
        return jnp.moveaxis(y, 3, 1), after


def _drawn_by(shared: Array | None) -> nn.initializers.Initializer:
    """Return an initialiser that draws by the `shared` key instead of the parameter's own."""
    draw = nn.initializers.lecun_normal()
    return lambda own, shape, dtype: draw(own if shared is None else shared, shape, dtype)


def _heads_axis(name: str) -> str:
    return "heads" if name == "v" else "kv_heads"


class Decay(nn.Module):
    """log a = -A dt with dt = softplus(x W + b), per head, in fp32 (Dao and Gu, 2405.21060, sec. 7).

    A starts at 1 and dt within `step_sizes`. They are spread over the heads instead of drawn, as decays of RetNet are
    (2307.08621). By default the first head forgets over 1,000 tokens, the last over 10. Where A and dt are drawn, all
    heads of a layer may forget too soon to learn what lies further apart (docs/notes/recall.md).
    """

    heads: int
    dtype: Any
    step_sizes: tuple[float, float] = STEP_SIZES

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
        """Return log a and dt."""
        names = ("embed", "heads")
        step = Linear(
            "btd,dh->bth", {"h": self.heads}, names, self.dtype, accumulate=jnp.float32, name="step"
        )(x)
        bias = self.param("bias", named(self._init_bias, "heads"), (self.heads,))
        log_rate = self.param("log_rate", named(nn.initializers.zeros, "heads"), (self.heads,), jnp.float32)
        dt = jax.nn.softplus(step.astype(jnp.float32) + bias[None, None])
        return -jnp.exp(log_rate)[None, None] * dt, dt

    def _init_bias(self, _: Array, shape: tuple[int]) -> Float[Array, "H"]:
        dt = jnp.geomspace(*self.step_sizes, *shape, dtype=jnp.float32)
        return dt + jnp.log(-jnp.expm1(-dt))  # softplus of it is dt


class Readout(nn.Module):
    """y = (RMSNorm(o) * silu(x W_g)) W_out, the norm over a head's values."""

    dim: int
    dtype: Any

    @nn.compact
    def __call__(self, o: Float[Array, "B T H V"], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        sizes, names = {"h": o.shape[2], "v": o.shape[3]}, ("embed", "heads", "head_dim")
        gate = Linear("btd,dhv->bthv", sizes, names, self.dtype, name="gate")(x)
        o = RMSNorm(dtype=self.dtype, name="norm")(o) * jax.nn.silu(gate)
        names = ("heads", "head_dim", "embed")
        return Linear("bthv,hvd->btd", {"d": self.dim}, names, self.dtype, name="out")(o)
