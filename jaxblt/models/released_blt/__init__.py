"""The Byte Latent Transformer whose weights were released: parts that `jaxblt.models.BLT` has otherwise.

Weights are read by `jaxblt.interchange.hf_blt`. New models are better trained as a `BLTConfig`.
"""

from jaxblt.models.released_blt.hashing import PolynomialHash
from jaxblt.models.released_blt.model import ReleasedBLT, ReleasedBLTConfig
from jaxblt.models.released_blt.state import ReleasedState

__all__ = ["PolynomialHash", "ReleasedBLT", "ReleasedBLTConfig", "ReleasedState"]
