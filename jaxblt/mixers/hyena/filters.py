"""The long filters a Hyena mixer can have: modal, implicit, explicit."""

import dataclasses
import math

from jaxblt.validation import check_bounds, check_fields

MAX_HISTORY = 32_768
"""Inputs that a streaming finite filter may keep."""
MOST_INNER_LAYERS = 64


@dataclasses.dataclass(frozen=True)
class ModalFilter:
    """h[t] = sum_m r_m exp(-t / tau_m): a sum of exponentials (StripedHyena 2; Massaroli et al., 2310.18780).

    Any length costs the same a token and streams with a state of constant size, [D, modes] in fp32: the
    filter for long contexts. If not causal, h[-t] has modes of its own.

    Attributes:
      modes: exponentials a channel.
      min_timescale: tau of the fastest mode before training, in steps.
      max_timescale: tau of the slowest; those between are spaced evenly in the logarithm.
    """

    modes: int = 16
    min_timescale: float = 1.0
    max_timescale: float = 65_536.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "modes", least=1)
        check_bounds(self, "min_timescale", "max_timescale", above=0)
        if self.min_timescale > self.max_timescale:
            raise ValueError(
                f"expected 0 < min_timescale <= max_timescale, got {self.min_timescale} and {self.max_timescale}"
            )


@dataclasses.dataclass(frozen=True)
class ImplicitFilter:
    """h[t] = window(t) MLP(features(t)) for t < filter_len (Hyena, 2302.10866, sec. 3.3 and app. D.3).

    features(t) = [t/L, cos(2 pi k t/L), -sin(2 pi k t/L)] for k = 1..(emb_dim - 1)/2; layers are
    sin(frequency * (W x + b)); window(t) = c (exp(-d t/L) + shift), with d spaced linearly over channels from
    -ln(target)/slow to -ln(target)/fast, and c so that exp(-d t/L) has unit energy. L = reference_len, never the length
    of the input. If not causal, the same network gives h[-t] by further outputs.

    Streaming keeps min(filter_len, capacity) - 1 inputs a channel: 32,768 taps and 768 channels are 96 MiB a row and
    layer in fp32. Above 512 taps it also keeps half as many outputs to come, in fp32, and a token costs O(log^2
    filter_len) multiplications a channel in the mean. More than 32,768 taps do not stream. Calls with a state evaluate
    the network each time, unless they are given prepared taps (`prepared.prepare`); `generate` does so.

    Attributes:
      filter_len: taps.
      reference_len: L; None for filter_len. To extend a checkpoint to a longer filter, keep the L it was
        trained with.
      emb_dim: features, odd.
      width: of the hidden layers.
      inner_layers: hidden layers after the first.
      sine_freq: initial frequency of the sines, learned for each unit.
      fast, slow, target: the window falls to `target` after `fast` L in the fastest channel and `slow` L in
        the slowest.
      shift: added to the decay, so that the last taps reach further than the window.
      unit_energy: scale the window; otherwise c = 1.
      learned_features: the features of each lag are parameters, [filter_len, emb_dim], which begin as those above.
    """

    filter_len: int
    reference_len: int | None = None
    emb_dim: int = 3
    width: int = 64
    inner_layers: int = 2
    sine_freq: float = 10.0
    fast: float = 0.3
    slow: float = 1.5
    target: float = 1e-2
    shift: float = 0.0
    unit_energy: bool = True
    learned_features: bool = False

    prepares = True

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "filter_len", "reference_len", "width", least=1)
        check_bounds(self, "inner_layers", least=0, most=MOST_INNER_LAYERS)
        check_bounds(self, "sine_freq", "fast", "slow", above=0)
        check_bounds(self, "target", above=0, below=1)
        check_bounds(self, "shift", least=0)
        if self.emb_dim < 3 or self.emb_dim % 2 == 0:
            raise ValueError(
                f"emb_dim must be odd and at least 3 (t and pairs of sine and cosine), got {self.emb_dim}"
            )
        if self.fast > self.slow:
            raise ValueError(f"expected fast <= slow, got {self.fast} and {self.slow}")

    @property
    def taps(self) -> int:
        """Taps on the causal side."""
        return self.filter_len

    @property
    def normaliser(self) -> int:
        """L, the steps that the features and the window span."""
        return self.filter_len if self.reference_len is None else self.reference_len

    def decay_range(self) -> tuple[float, float]:
        """Return the window's decay over L steps, in the slowest and the fastest channel."""
        return -math.log(self.target) / self.slow, -math.log(self.target) / self.fast


@dataclasses.dataclass(frozen=True)
class ExplicitFilter:
    """h[t] = w_t for t < taps, learned one by one: short and medium filters (StripedHyena 2).

    If not causal, 2 taps - 1 weights, centred. Streaming keeps taps - 1 inputs a channel.

    Attributes:
      taps: weights on the causal side.
      groups: filters, each for as many neighbouring channels; None for one a channel.
      skip: add b u, with a weight b a channel, to the convolution.
      columns: of images whose rows lie one behind the other: weights start larger the nearer their pixel is, in both
        directions. None starts all alike.
    """

    taps: int = 128
    groups: int | None = None
    skip: bool = True
    columns: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "taps", "groups", "columns", least=1)


Filter = ModalFilter | ImplicitFilter | ExplicitFilter
FiniteFilter = ImplicitFilter | ExplicitFilter


def history_size(filter: FiniteFilter, capacity: int) -> int:
    """Return how many past inputs streaming keeps.

    Raises:
      ValueError: more than `MAX_HISTORY`.
    """
    taps = min(filter.taps, capacity)
    if taps > MAX_HISTORY:
        raise ValueError(
            f"streaming a filter of {filter.taps} taps at capacity {capacity} would keep {taps - 1} inputs a channel, "
            f"at most {MAX_HISTORY} are promised: lower the capacity, shorten the filter, or use ModalFilter"
        )
    return taps - 1
