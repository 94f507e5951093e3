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

    The filter for long contexts. Its cost per token does not depend on the length, and decoding has a state of constant
    size, [D, modes] in fp32. If not causal, h[-t] has modes of its own.

    Attributes:
      modes: number of exponentials per channel.
      min_timescale: tau of the fastest mode before training, in steps.
      max_timescale: tau of the slowest mode before training. The others are evenly spaced in log(tau).
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
    -ln(target)/slow to -ln(target)/fast. c gives exp(-d t/L) unit energy. L = reference_len, never the length of the
    input. If not causal, further outputs of the same network are h[-t].

    In decoding a state keeps min(filter_len, capacity) - 1 inputs per channel: with 32,768 taps and 768 channels 96 MiB
    per row and layer in fp32. Above 512 taps it also keeps partial sums of future outputs, half as many, in fp32. A
    token then costs O(log^2 filter_len) multiplications per channel on average. More than 32,768 taps cannot decode.
    Calls with a state evaluate the network each time, unless they get prepared taps (`prepared.prepare`), as in
    `generate`.

    Attributes:
      filter_len: number of taps.
      reference_len: L; None for filter_len. To extend a checkpoint to a longer filter, keep the L of its training.
      emb_dim: number of features, odd.
      width: width of the hidden layers.
      inner_layers: number of hidden layers after the first.
      sine_freq: initial frequency of the sines, learned for each unit.
      fast, slow, target: the window falls to `target` after `fast` L steps in the fastest channel, and after `slow` L
        steps in the slowest.
      shift: constant added to the decay, so that the last taps are not damped to 0.
      unit_energy: scale the window to unit energy; otherwise c = 1.
      learned_features: make the features parameters, [filter_len, emb_dim], which start at the values above.
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
    """h[t] = w_t for t < taps, where each weight is a parameter: short and medium filters (StripedHyena 2).

    If not causal, the filter has 2 taps - 1 weights, centred. In decoding a state keeps taps - 1 inputs per channel.

    Attributes:
      taps: number of weights on the causal side.
      groups: number of filters; neighbouring channels share one. None for one per channel.
      skip: add b u to the convolution, with a weight b per channel.
      columns: number of columns of an image whose rows follow each other in the sequence. Weights of near pixels then
        start larger. None starts all weights alike.
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
