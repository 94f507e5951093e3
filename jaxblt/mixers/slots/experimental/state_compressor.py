"""Stored states as codes: an autoencoder with vector quantisation (van den Oord et al., 1711.00937, sec. 3)."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.array_checks import check_whole, on_host
from jaxblt.layers import dense, named
from jaxblt.side_outputs import sow_loss, sow_metric
from jaxblt.validation import number, whole


class StateCompressor(nn.Module):
    """A vector-quantised autoencoder of states: decode(e_i), where e_i is the codebook entry nearest to encode(state).

    Gradients pass the choice of i straight through. The loss is |state - decoded|^2 + |sg(z) - e|^2 + commitment |z -
    sg(e)|^2 as means over entries, with z = encode(state) and sg = `stop_gradient`. It is sown as "state_compressor".
    The metric of the same name is the number of entries in use: exp of the entropy of their shares. Use it for stored
    states, such as `state.slots.values` between turns of a conversation.

    Attributes:
      dim: width of a state.
      code_dim: width of a codebook entry.
      codes: number of codebook entries.
      commitment: weight of the third term of the loss.
      dtype: dtype of the autoencoder's products; distances are fp32.
    """

    dim: int
    code_dim: int = 16
    codes: int = 256
    commitment: float = 0.25
    dtype: Any = jnp.float32

    def setup(self) -> None:
        for name in ("dim", "code_dim", "codes"):
            whole(f"StateCompressor.{name}", getattr(self, name), least=1)
        number("StateCompressor.commitment", self.commitment, least=0)
        self.encoder = dense(self.code_dim, axes=("embed", "features"), dtype=self.dtype, name="encoder")
        self.decoder = dense(self.dim, axes=("features", "embed"), dtype=self.dtype, name="decoder")
        init = named(nn.initializers.normal(self.code_dim**-0.5), None, "features")
        self.book = self.param("book", init, (self.codes, self.code_dim), jnp.float32)

    def __call__(self, states: Float[Array, "*B D"]) -> tuple[Float[Array, "*B D"], Int[Array, "*B"]]:
        """Return the states as they come back, and their codes.

        Raises:
          ValueError: the states have another width.
        """
        z, codes = self._encoded(states)
        chosen = jnp.take(self.book, codes, axis=0)
        decoded = self.decoder(z + jax.lax.stop_gradient(chosen - z)).astype(states.dtype)
        self._report(states, decoded, z, chosen, codes)
        return decoded, codes

    def encode(self, states: Float[Array, "*B D"]) -> Int[Array, "*B"]:
        """Return the code of each state."""
        return self._encoded(states)[1]

    def decode(self, codes: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Return the state that each code stands for.

        Raises:
          ValueError: codes that are no whole numbers in 0..codes-1.
        """
        check_whole("codes", codes)
        values = on_host(codes)
        if values is not None and values.size and not 0 <= values.min() <= values.max() < self.codes:
            raise ValueError(
                f"codes must lie in 0..{self.codes - 1}, got {int(values.min())}..{int(values.max())}: `encode` makes "
                "them"
            )
        return self.decoder(jnp.take(self.book, codes, axis=0))

    def _encoded(self, states: Float[Array, "*B D"]) -> tuple[Float[Array, "*B E"], Int[Array, "*B"]]:
        if states.shape[-1] != self.dim:
            raise ValueError(
                f"StateCompressor(dim={self.dim}) got states of shape {states.shape}: set dim={states.shape[-1]}"
            )
        z = self.encoder(states).astype(jnp.float32)
        book = jax.lax.stop_gradient(self.book)
        near = jnp.einsum("...e,ce->...c", z, book, precision=jax.lax.Precision.HIGHEST)
        length = jnp.sum(book * book, -1).reshape((1,) * (near.ndim - 1) + (-1,))
        return z, jnp.argmin(length - 2 * near, -1).astype(jnp.int32)

    def _report(self, states: Array, decoded: Array, z: Array, chosen: Array, codes: Array) -> None:
        still = jax.lax.stop_gradient
        error = jnp.mean(jnp.square((states - decoded).astype(jnp.float32)))
        book, commit = jnp.mean(jnp.square(still(z) - chosen)), jnp.mean(jnp.square(z - still(chosen)))
        sow_loss(self, "state_compressor", error + book + self.commitment * commit)
        share = jnp.mean(jax.nn.one_hot(codes.reshape(-1), self.codes), 0)
        sow_metric(self, "state_compressor", jnp.exp(jnp.sum(jax.scipy.special.entr(share))))
