"""The property suite that every mixer passes."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence

import jax

from jaxblt.mixers.driver.base import MixerConfig
from jaxblt.testing import long_rows, numerics, parallel, split, streaming
from jaxblt.testing.subject import Subject


@dataclasses.dataclass(frozen=True)
class Property:
    """One thing that must hold.

    Attributes:
      name: of the property.
      check: raises AssertionError if it does not hold.
      applies: which mixers it is of.
      devices: without as many it cannot be checked.
    """

    name: str
    check: Callable[[Subject], None]
    applies: Callable[[MixerConfig], bool] = lambda config: True
    devices: int = 1


def _causal(config: MixerConfig) -> bool:
    return config.causal


def _splits(config: MixerConfig) -> bool:
    return not getattr(config, "gathers_keys", False)


PROPERTIES: tuple[Property, ...] = (
    Property("output", parallel.check_output),
    Property("causal", parallel.check_causal, _causal),
    Property("mixes", parallel.check_mixes),
    Property("packed", parallel.check_packed),
    Property("holes", parallel.check_holes),
    Property("odd_lengths", parallel.check_odd_lengths),
    Property("batch", parallel.check_batch),
    Property("positions", parallel.check_positions),
    Property("sequence", parallel.check_sequence, devices=2),
    Property("gathers", split.check_gathers, _splits, devices=split.GATHERED_OVER),
    Property("long", long_rows.check_long),
    Property("chunked", streaming.check_chunked, _causal),
    Property("continued", streaming.check_continued, _causal),
    Property("documents_streamed", streaming.check_documents_streamed, _causal),
    Property("holes_streamed", streaming.check_holes_streamed, _causal),
    Property("rows_advance_alone", streaming.check_rows_advance_alone, _causal),
    Property("keep", streaming.check_keep, _causal),
    Property("split_call", split.check_split_call, _causal, devices=split.DEVICES),
    Property("state", streaming.check_state, _causal),
    Property("gradients", numerics.check_gradients),
    Property("finite_gradients", numerics.check_finite_gradients),
    Property("every_parameter", numerics.check_every_parameter),
    Property("jit", numerics.check_jit),
    Property("bfloat16", numerics.check_bfloat16),
    Property("sharded", numerics.check_sharded, devices=2),
)
"""The properties that `check_mixer` checks, in order."""


def check_mixer(
    config: MixerConfig, *, length: int = 24, seed: int = 0, only: Sequence[str] | None = None
) -> list[str]:
    """Run the property suite on a mixer of your own, and name the properties checked.

    The config is a frozen dataclass as `jaxblt.mixers.MixerConfig` describes. Two optional fields say what it asks of
    its input: `packed=False` for one document a row, `segment_alignment` for where documents may start. One that has
    `gathers_keys` says that devices which split a row gather its keys, and "gathers" is left out. Keep it tiny
    (dim 8 to 16): the suite compares many passes. The property "long" uses rows of 300 tokens.

    Args:
      config: the mixer's frozen config.
      length: tokens a row, at least 14; raised to 3 * segment_alignment.
      seed: of parameters and inputs.
      only: names of the properties to check; None for all that apply.

    Raises:
      AssertionError: a property does not hold; names it, the size of the error and the tolerance.
      ValueError: a name in `only` is unknown or needs more devices than there are, or `length` is too small.

    Warns:
      UserWarning: properties of several devices were left out, as there are too few; virtual ones of the CPU will do.
    """
    unknown = sorted(set(only or ()) - {p.name for p in PROPERTIES})
    if unknown:
        raise ValueError(f"no property is called {unknown}, expected names of {[p.name for p in PROPERTIES]}")
    if length < 14:
        raise ValueError(f"length must be at least 14 for documents and odd lengths to fit, got {length}")
    subject = Subject(config, length=length, seed=seed)
    applying = [p for p in PROPERTIES if (only is None or p.name in only) and p.applies(config)]
    chosen = [p for p in applying if p.devices <= jax.device_count()]
    _tell_left_out([p.name for p in applying if p not in chosen], asked=only is not None)
    for prop in chosen:
        try:
            prop.check(subject)
        except AssertionError as error:
            raise AssertionError(f"{prop.name}: {error}") from error
    return [p.name for p in chosen]


def _tell_left_out(names: list[str], *, asked: bool) -> None:
    """Warn of properties left out for want of devices.

    Raises ValueError if they were asked for.
    """
    if not names:
        return
    said = (
        f"not checked, as there are too few devices ({jax.device_count()}): {', '.join(names)}; start the process with "
        "JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8"
    )
    if asked:
        raise ValueError(said)
    warnings.warn(said, stacklevel=3)
