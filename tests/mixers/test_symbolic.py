"""Programs that `jax.export` makes once for any number of rows and tokens."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxblt.mixers import (
    AttentionConfig,
    MACConfig,
    MAGConfig,
    MixerConfig,
    NeuralMemoryConfig,
    SlotMemoryConfig,
    init_state,
)
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig
from jaxblt.parallel import make_mesh
from jaxblt.patching import PatcherConfig
from pallas_kernels.linear_scan import explain
from tests.mixers.configs import ALL
from tests.parameters import drawn
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("symbolic_sizes")

LENGTHS = (3, 24)
MIXERS: dict[str, MixerConfig] = ALL | {
    "memory": NeuralMemoryConfig(dim=16, chunk_size=8),
    "mag": MAGConfig(dim=16, window=8, chunk_size=8),
    "mac": MACConfig(dim=16, chunk_size=8, segment_alignment=8),
    "slots": SlotMemoryConfig(dim=16, slots=6, interval=8),
}
LAYERS = {"A": AttentionConfig(dim=8, num_heads=2), "H": ALL["hyena_modal"], "S": ALL["hyena_explicit"]}


def exported(run: Callable[..., Any], *given: Any) -> export.Exported:
    """The program of `run(params, x, ids)`, whose rows and tokens are left open."""
    params, x, ids = given
    rows, length = export.symbolic_shape("rows, length")
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), (params, x, ids))
    return export.export(jax.jit(run))(
        shapes[0], *(jax.ShapeDtypeStruct((rows, length, *s.shape[2:]), s.dtype) for s in shapes[1:])
    )


def expect_same(module: Any, x: np.ndarray, ids: np.ndarray, terms: int) -> None:
    """Calls of several lengths give what the module gives."""
    params = drawn(module, x)

    def run(params: Any, x: Any, ids: Any) -> Any:
        return module.apply(params, x, segment_ids=ids)[0]

    program = exported(run, params, x, ids)
    for length in LENGTHS:
        given = params, x[:, :length], ids[:, :length]
        live = given[2] > 0
        assert_close(np.asarray(program.call(*given))[live], np.asarray(jax.jit(run)(*given))[live], n=terms)


CASES = [
    "attention",
    *(pytest.param(name, marks=pytest.mark.slow(days=28)) for name in MIXERS if name != "attention"),
]


@pytest.mark.parametrize("name", CASES)
def test_mixers_of_any_length(name: str) -> None:
    config, length = MIXERS[name], LENGTHS[-1]
    x = np.random.default_rng(0).standard_normal((2, length, config.dim)).astype(np.float32)
    ids = np.ones((2, length), np.int32)
    if getattr(config, "packed", True) and getattr(config, "segment_alignment", 1) <= 8:
        ids[0, 8:] = 2
    ids[1, 20:] = 0
    expect_same(config.build(), x, ids, length * config.dim)


def stack(pattern: str) -> StackConfig:
    return StackConfig(dim=8, num_layers=len(pattern), pattern=tuple(pattern), mixers=LAYERS)


@pytest.mark.slow(days=28, group="further properties of mixers")
@pytest.mark.parametrize("patches", [False, True])
def test_models_of_any_length(patches: bool) -> None:
    length, table = LENGTHS[-1], HashConfig(sizes=(3,), table_size=32)
    module: Any = ByteLMConfig(stack=stack("AH"), hash=table).build()
    if patches:
        parts = {"encoder": stack("A"), "latent": stack("H"), "decoder": stack("S"), "hash": table}
        patcher = PatcherConfig(mode="space", block_size=8, capacity=4)
        module = BLTConfig(bridge_heads=2, look_back=2, **parts).build(patcher=patcher)
    ids = np.random.default_rng(0).integers(4, 200, (2, length)).astype(np.int32)
    expect_same(
        module, ids, np.where(np.arange(length) < 8, 1, 2).astype(np.int32) * np.ones_like(ids), length * 64
    )


def test_what_is_compiled_for_one_length_says_so() -> None:
    """A named implementation, a call with a state, a row that a mesh splits."""
    config = AttentionConfig(dim=8, num_heads=2)
    (length,) = export.symbolic_shape("t")
    x = jax.ShapeDtypeStruct((2, length, 8), jnp.float32)
    params = drawn(config.build(), jnp.ones((2, 4, 8)))
    named = AttentionConfig(dim=8, num_heads=2, implementation="xla").build()
    with pytest.raises(
        ValueError, match=r"'xla' cannot run here: .* for one length, and the size t is symbolic"
    ):
        jax.eval_shape(lambda x: named.apply(params, x)[0], x)
    state = init_state(config, 2, capacity=8)
    with pytest.raises(
        ValueError, match="compiled for one number of tokens, got a symbolic one, t: export one"
    ):
        jax.eval_shape(lambda x: config.build().apply(params, x, state=state)[0], x)
    with (
        jax.set_mesh(make_mesh(data=1, seq=8)),
        pytest.raises(
            ValueError, match="symbolic length t cannot be split among the devices of mesh axis 'seq'"
        ),
    ):
        jax.eval_shape(lambda x: ALL["recurrence"].build().init(jax.random.key(0), x), x)


def test_an_operation_tells_why_its_definition_runs() -> None:
    (length,) = export.symbolic_shape("t")
    a = jax.ShapeDtypeStruct((2, length, 4), jnp.float32)
    assert explain(a, a).startswith("linear_scan: reference on cpu (")
    assert "not xla: it is compiled for one length, and the size t is symbolic" in explain(a, a)
