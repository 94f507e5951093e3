"""Reads of a router: one of one's own, what is refused, and a NaN behind a prefix."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, Prefix, Read, RouterConfig
from jaxblt.adapters.code.pools import Smooth
from jaxblt.adapters.code.router import Router, init_router_state
from jaxblt.adapters.files.shared_caches import first_code
from tests.adapters.routing import DOCUMENTS, inputs, params_of, whole
from tests.adapters.routing import in_calls as codes_in_calls


@dataclasses.dataclass(frozen=True)
class Count(Read):
    """How many tokens of its document a token has before it, times a learned factor."""

    told: int = 1
    name: ClassVar[str] = "count"

    def zero(self, config, batch_size, dim):
        """Return a count of 0."""
        return jnp.zeros((batch_size, 1), jnp.float32)

    def width(self, config, dim, level):
        """Return one feature for tokens."""
        return self.told if level == "token" else 0

    def hear(self, router, call, state):
        """Return the count at each token."""
        factor = router.param("count_factor", jax.nn.initializers.ones, (1,))[None, None]
        added = call.content[..., None].astype(jnp.float32)
        total, after = call.rows.run(Smooth(), (jnp.ones_like(added), added), state)
        return {"token": (total - added) * factor}, after


OWN = RouterConfig("token", chunk=5, reads=(Count(),), hidden=4)


@pytest.mark.slow(days=28, group="costly")
def test_a_read_of_ones_own_needs_no_edit_of_the_router():
    """By hand: f of the token and of the count before it; and the same in calls."""
    config = AdapterConfig(rank=3, router=OWN)
    x, params = inputs(), params_of(config)
    code = whole(config, params, x, DOCUMENTS)
    np.testing.assert_allclose(codes_in_calls(config, params, x, DOCUMENTS), code, atol=2e-5)
    p = jax.tree.map(np.asarray, params)
    tokens = x[0, 26:]  # the row's second document
    h = tokens / np.sqrt(np.mean(tokens**2, -1, keepdims=True) + 1e-6) * p["norm"]["scale"]
    read = np.concatenate([h, np.arange(14.0)[:, None] * p["count_factor"]], -1)
    f = read @ p["hidden"]["kernel"] + p["hidden"]["bias"]
    expected = 1 + (f / (1 + np.exp(-f))) @ p["code"]["kernel"] + p["code"]["bias"]
    np.testing.assert_allclose(code[0, 26:], expected, rtol=1e-4, atol=1e-4)
    assert first_code(OWN) == 0


def test_a_read_that_hands_over_other_features_than_it_says_is_refused():
    config = AdapterConfig(rank=3, router=dataclasses.replace(OWN, reads=(Count(told=2),)))
    with pytest.raises(
        ValueError, match=r"Count\(told=2\) hands level 'token' 1 features, and its width says 2"
    ):
        jax.eval_shape(Router(config).init, jax.random.key(0), jnp.asarray(inputs()))


def test_the_state_of_other_reads_is_refused():
    config, other = (
        AdapterConfig(rank=3, router=dataclasses.replace(OWN, reads=r)) for r in ((), (Count(),))
    )
    state = init_router_state(other, 2, inputs().shape[-1])
    with pytest.raises(ValueError, match=r"the state is of reads called \['count'\], and the config of \[\]"):
        jax.eval_shape(
            lambda: Router(config).init_with_output(jax.random.key(0), jnp.asarray(inputs()), state=state)
        )


def test_nan_behind_a_prefix_stays_out_of_it():
    """In rows whose chunks are aligned tokens are summed by chunks, and a prefix ends within one."""
    router = RouterConfig("prefix", chunk=5, reads=(Prefix(3),), hidden=4, packed=False)
    config, x = AdapterConfig(rank=3, router=router), inputs()
    params, ids = params_of(config), np.ones_like(DOCUMENTS)
    x[:, 4] = np.nan
    code = np.array(whole(config, params, x, ids))
    assert np.isfinite(code).all()
