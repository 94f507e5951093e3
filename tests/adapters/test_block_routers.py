"""A router in each block, which reads the block's input: as stacks of one block behind each other."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import (
    AdapterConfig,
    AdapterLosses,
    ChunkMean,
    Draw,
    Ema,
    Neighbours,
    Prefix,
    RouterConfig,
    Side,
    attach,
    distill,
    fuse,
    join_params,
    load_peft,
    mean_codes,
    save_peft,
    split_params,
)
from jaxblt.adapters.code.fallback import count_replaced
from jaxblt.adapters.code.override import override_codes
from jaxblt.adapters.files.merge import layers_at
from jaxblt.adapters.files.serving import Telemetry, block_figures, guarded
from jaxblt.adapters.update.attach import describe_sites
from jaxblt.adapters.update.params import routers
from jaxblt.adapters.update.row_adapters import choose_adapters
from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.models.stack import Stack, init_stack_state, unstack_periods
from jaxblt.side_outputs import Sown
from jaxblt.training.stored.serialize import from_json, to_json
from tests.adapters.routing import TURNS
from tests.parameters import drawn
from tests.tolerances import assert_close

MIXERS = {"A": AttentionConfig(dim=8, num_heads=2), "W": AttentionConfig(dim=8, num_heads=2, window=5)}
BARE = StackConfig(dim=8, num_layers=3, pattern="A", mixers=MIXERS, mlp_dim=12)
ROUTER = RouterConfig(per="block", chunk=4, reads=(ChunkMean(), Side(2), Prefix(3)), hidden=4)
OF_BLOCKS = AdapterConfig(rank=2, router=ROUTER, code=(Ema(0.5),), losses=AdapterLosses(entropy=0.1))
OF_STACK = dataclasses.replace(OF_BLOCKS, router=dataclasses.replace(ROUTER, per="stack"))
STACK = dataclasses.replace(BARE, adapter=OF_BLOCKS)
ROWS, LENGTH = 2, 16
X = jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, LENGTH, 8)).astype(np.float32))
SIDE = X[..., :2]
IDS = jnp.asarray(np.array([[1] * 9 + [2] * 7, [0, 0, 3, 3, -3, 3, 3, 3, 0] + [4] * 7], np.int32))


@pytest.fixture(scope="module")
def params():
    return drawn(Stack(STACK), X, side=SIDE, seed=0)["params"]


@pytest.fixture(scope="module")
def whole(params):
    """The output of whole rows, and what was sowed."""
    apply = jax.jit(
        lambda params: Stack(STACK).apply(
            {"params": params}, X, segment_ids=IDS, side=SIDE, mutable=["losses", "metrics"]
        )
    )
    (y, _), sown = apply(params)
    return y, sown


def layer_of(params, i):
    """Parameters of a stack of one block with a router, from those of block i."""
    block = jax.tree.map(lambda leaf: leaf[i : i + 1], params["periods"]["block_0"])
    router = jax.tree.map(lambda leaf: leaf[0], block.pop("router"))
    return {"periods": {"block_0": block}, "router": router}


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_block_routers")
def test_a_block_reads_its_input(params, whole):
    """Three blocks are three stacks of one block, whose router reads the stack's input."""
    one = Stack(dataclasses.replace(BARE, num_layers=1, adapter=OF_STACK))
    apply = jax.jit(
        lambda params, x: one.apply(
            {"params": params}, x, segment_ids=IDS, side=SIDE, mutable=["losses", "metrics"]
        )
    )
    x, losses, codes = X, [], []
    for i in range(3):
        (x, _), sown = apply(layer_of(params, i), x)
        losses.append(sown["losses"]["router"]["code_entropy"][0])
        codes.append(sown["metrics"]["router"]["mean_code"][0].value)
    assert_close(whole[0], x, n=LENGTH * 8)
    routed = lambda name: whole[1][name]["periods"]["block_0"]["router"]  # noqa: E731
    np.testing.assert_allclose(routed("losses")["code_entropy"][0], losses, rtol=1e-4)
    np.testing.assert_allclose(routed("metrics")["mean_code"][0].mean(), np.mean(codes, 0), rtol=1e-4)


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_block_routers")
def test_each_block_carries_its_routers_state(params, whole):
    """Calls of 8 tokens with padding among them; in block 1 alone codes are not finite, and are counted."""
    apply = jax.jit(
        lambda params, x, ids, side, state: Stack(STACK).apply(
            {"params": params}, x, segment_ids=ids, side=side, state=state
        )
    )

    def in_calls(params):
        state, found = init_stack_state(STACK, ROWS, capacity=LENGTH), []
        assert state.router is None
        for at in range(0, LENGTH, 8):
            y, state = apply(params, *(a[:, at : at + 8] for a in (X, IDS, SIDE)), state)
            found.append(y)
        return jnp.concatenate(found, 1), state

    y, state = in_calls(params)
    assert_close(y, whole[0], n=LENGTH * 8)
    np.testing.assert_array_equal(count_replaced(state), [0, 0])
    bias = params["periods"]["block_0"]["router"]["code"]["bias"].at[1, 0].set(np.nan)
    broken = join_params(params, {"periods": {"block_0": {"router": {"code": {"bias": bias}}}}})
    y, state = in_calls(broken)
    assert np.isfinite(y).all()
    np.testing.assert_array_equal(state.periods[0].router.replaced, [[0, 0], [8, 5], [0, 0]])
    np.testing.assert_array_equal(count_replaced(state), [8, 5])


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_block_routers")
def test_a_guard_watches_every_block(params, whole):
    """In one program, through scan and remat: the base while it falls back, and a block whose code is not finite."""
    stack = dataclasses.replace(STACK, remat="full")

    @jax.jit
    def serve(params, fall_back):
        figures = []
        with guarded(fall_back, 0.0, figures):
            (y, _), side = Stack(stack).apply(
                {"params": params}, X, segment_ids=IDS, side=SIDE, mutable=["metrics"]
            )
        assert figures == []
        return y, side

    base = Stack(BARE).apply({"params": split_params({"stack": params})[0]["stack"]}, X, segment_ids=IDS)[0]  # type: ignore[index]
    y, side = serve(params, jnp.zeros((), bool))
    assert_close(y, whole[0], n=LENGTH * 8)
    found = block_figures(side)
    assert len(found) == 3
    assert len({float(each.rms) for each in found}) == 3
    y, side = serve(params, jnp.ones((), bool))
    assert_close(y, base, n=LENGTH * 8)
    assert [float(each.active) for each in block_figures(side)] == [0] * 3
    bias = params["periods"]["block_0"]["router"]["code"]["bias"].at[1, 0].set(np.nan)
    broken = join_params(params, {"periods": {"block_0": {"router": {"code": {"bias": bias}}}}})
    y, side = serve(broken, jnp.zeros((), bool))
    assert np.isfinite(y).all()
    assert [float(each.replaced) for each in block_figures(side)] == [0, 2, 0]
    assert serve._cache_size() == 1
    telemetry = Telemetry()
    telemetry.record(0.1, block_figures(side))
    assert telemetry.alarms() == ["2 rows had a code that is not finite"]


PLAIN = dataclasses.replace(
    OF_BLOCKS, router=dataclasses.replace(ROUTER, reads=(ChunkMean(), Prefix(3))), losses=AdapterLosses()
)
BASE = ByteLMConfig(stack=dataclasses.replace(BARE, pattern="AW"))
MODEL = attach(BASE, PLAIN)
TEXT = jnp.asarray(np.random.default_rng(0).integers(4, 260, (ROWS, 12)), jnp.int32)


@pytest.fixture(scope="module")
def whole_model():
    return drawn(MODEL.build(), TEXT, seed=0)["params"]


def logits_of(config, params, **more):
    return jax.jit(lambda params, more: config.build().apply({"params": params, **more}, TEXT)[0])(
        params, more
    )


@TURNS
def test_codes_from_elsewhere_go_to_all_blocks(whole_model, tmp_path):
    """Chosen, given, merged and written to files: a scanned period of two blocks, and one behind it."""
    code = jnp.ones(2)
    chosen = choose_adapters(MODEL, ["base", "static"])
    assert chosen["stack"].keys() == {"periods", "rest"}
    found = logits_of(MODEL, whole_model, chosen=chosen)
    config, merged = fuse(MODEL, whole_model, code=code)
    assert config == BASE
    base, trained = split_params(whole_model)
    expected = logits_of(BASE, merged)
    assert_close(found[0], logits_of(BASE, base)[0], n=12 * 8)
    assert_close(found[1], expected[1], n=12 * 8)
    with override_codes(jnp.ones((ROWS, 12, 2))):
        assert_close(logits_of(MODEL, whole_model), expected, n=12 * 8)
    save_peft(tmp_path / "a", MODEL, whole_model, code=code)
    plain = attach(BASE, AdapterConfig(rank=2))
    loaded = fuse(plain, join_params(base, load_peft(tmp_path / "a", plain)))[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), loaded, merged)
    assert set(routers(trained)["stack"]) == {"periods", "rest"}


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_block_routers")
@pytest.mark.parametrize("scan", [True, False])
def test_blocks_are_merged_at_their_own_codes(whole_model, tmp_path, scan):
    """A scanned period of two blocks and one behind it, each by hand; and distilled at the mean codes of a pass."""
    model, own = MODEL, whole_model
    if not scan:
        model = dataclasses.replace(MODEL, stack=dataclasses.replace(MODEL.stack, scan=False))
        own = {**own, "stack": unstack_periods(own["stack"])}
    codes = jnp.asarray([[0.5, 2.0], [-1.0, 1.5], [3.0, 0.25]])
    first = "periods" if scan else "period_0"
    parts = [(first, "block_0"), (first, "block_1"), ("rest", "block_0")]
    _, merged = fuse(model, own, code=codes)
    for code, (period, block) in zip(codes, parts, strict=True):
        found = own["stack"][period][block]["mlp"]["down"]
        v, u = (
            np.asarray(found["adapter"][name], np.float64).reshape(-1, *shape)
            for name, shape in (("v", (12, 2)), ("u", (2, 8)))
        )
        update = PLAIN.scale(2) * np.einsum("lkr,r,lrn->lkn", v, np.asarray(code), u)
        moved = merged["stack"][period][block]["mlp"]["down"]["kernel"] - found["kernel"]
        np.testing.assert_allclose(moved.reshape(update.shape), update, atol=1e-5)
    save_peft(tmp_path / "a", model, own, code=codes)
    plain = attach(
        dataclasses.replace(BASE, stack=dataclasses.replace(BASE.stack, scan=scan)), AdapterConfig(rank=2)
    )
    loaded = join_params(split_params(own)[0], load_peft(tmp_path / "a", plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), fuse(plain, loaded)[1], merged)
    static, distilled = distill(model, own, {"stack": codes})
    assert static == plain
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), fuse(static, distilled)[1], merged)


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_block_routers")
def test_mean_codes_are_those_of_each_block(whole_model):
    apply = lambda c, params: c.build().apply({"params": params}, TEXT, mutable=["metrics"])[1]  # noqa: E731
    side = jax.jit(partial(apply, MODEL))(whole_model)
    found = mean_codes(side)["stack"]
    metrics = side["metrics"]["stack"]
    places = [("periods", "block_0"), ("periods", "block_1"), ("rest", "block_0")]
    for code, (period, block) in zip(found, places, strict=True):
        np.testing.assert_array_equal(
            code, metrics[period][block]["router"]["mean_code"][0].value.reshape(-1)
        )
    assert len({tuple(code) for code in np.asarray(found)}) == 3
    values = [Sown(jnp.full(2, float(i)), 1) for i in range(5)]
    blocks = [{"router": {"mean_code": (value,)}} for value in values]
    sown = {"rest": {"block_0": blocks[4]}} | {
        f"period_{i}": {f"block_{j}": blocks[2 * i + j] for j in range(2)} for i in range(2)
    }
    np.testing.assert_array_equal(mean_codes({"metrics": {"stack": sown}})["stack"][:, 0], range(5))
    scanned = {"rest": sown["rest"]} | {
        "periods": {
            f"block_{j}": {
                "router": {"mean_code": (Sown(jnp.stack([values[j].value, values[2 + j].value]), 1),)}
            }
            for j in range(2)
        }
    }
    np.testing.assert_array_equal(mean_codes({"metrics": {"stack": scanned}})["stack"][:, 1], range(5))


def test_layers_whose_parameters_lie_at_a_path():
    unrolled = dataclasses.replace(BASE.stack, num_layers=5, scan=False)
    assert [layers_at(unrolled, (f"period_{i}", "block_1")) for i in range(2)] == [[1], [3]]
    assert layers_at(dataclasses.replace(unrolled, scan=True), ("periods", "block_1")) == [1, 3]
    assert layers_at(unrolled, ("rest", "block_0")) == [4]


def test_what_is_stored_and_said():
    ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    shapes = lambda c: nn.meta.unbox(jax.eval_shape(c.build().init, jax.random.key(0), ids))["params"]  # noqa: E731
    base, trained = split_params(shapes(MODEL))
    assert base == shapes(BASE)
    found = routers(trained)["stack"]
    assert found["periods"].keys() == {"block_0", "block_1"}
    assert found["rest"]["block_0"].keys() == {"router"}
    assert from_json(to_json(MODEL)) == MODEL
    assert (
        describe_sites(MODEL, 100, 0, 1000)[1]
        == "routers         stack: 3, each reads the input of its block"
    )


def called(stack, held, **options):
    """A call of a stack with the state of another one's config."""
    state = init_stack_state(held, 1, capacity=8)
    x = jnp.zeros((1, 4, 8))
    return jax.eval_shape(lambda: Stack(stack).init_with_output(jax.random.key(0), x, state=state, **options))


def watched():
    def call(x, params):
        with guarded(jnp.zeros((), bool), 0.0, []):
            return Stack(STACK).apply({"params": params}, x, side=x[..., :2])

    shapes = jax.eval_shape(lambda: Stack(STACK).init(jax.random.key(0), X, side=SIDE)["params"])
    return jax.eval_shape(call, X, nn.meta.unbox(shapes))


ALONE = {"stack": {"periods": {"adapter": {}}}}
SHORTER = dataclasses.replace(BARE, adapter=dataclasses.replace(PLAIN, code=()))
WITHIN = dataclasses.replace(BARE, adapter=PLAIN)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: dataclasses.replace(ROUTER, reads=(ChunkMean(), Neighbours("i"))),
            "an index holds vectors of the stack's",
        ),
        (
            lambda: AdapterConfig(rank=2, blocks=2, router=ROUTER, code=(Draw(),)),
            r"RouterConfig\.per = 'block' makes choices in each block: set per='stack'",
        ),
        (
            lambda: distill(MODEL, ALONE, jnp.ones((2, 2))),
            r"code must have shape \(2,\) or \(3, 2\), one number a block, got \(2, 2\)",
        ),
        (
            watched,
            r"guarded sows the figures of routers in blocks .* and metrics are not mutable: call apply",
        ),
        (
            lambda: called(WITHIN, dataclasses.replace(BARE, adapter=OF_STACK)),
            "holds a router with arrays of .* for the stack, and the adapter has no router there: make it by",
        ),
        (
            lambda: called(WITHIN, BARE),
            "holds no router for block 0, and the adapter has a router with arrays",
        ),
        (
            lambda: called(BARE, WITHIN),
            "holds a router with .* for block 0, and the adapter has no router there",
        ),
        (lambda: called(WITHIN, SHORTER), "init_stack_state of the same config"),
    ],
)
def test_what_is_refused(build, words):
    with pytest.raises(ValueError, match=words) as caught:
        build()
    assert "\n" not in str(caught.value)
