"""Given rows decoded one byte at a time, beside which whole passes are checked."""

import jax
import jax.numpy as jnp

from jaxblt.inference import decode_step, init_decoder


def teacher_force(decoder, params, ids, segment_ids):
    """Return logits at every byte of given rows, and after which bytes a patch closed."""

    def body(state, column):
        logits, closed, state = decode_step(decoder, params, column[0], state, column[1])
        return state, (logits, closed)

    state = init_decoder(decoder, ids.shape[0], num_bytes=ids.shape[1])
    _, (logits, closed) = jax.lax.scan(body, state, (ids.T, segment_ids.T))
    return jnp.moveaxis(logits, 0, 1), closed.T
