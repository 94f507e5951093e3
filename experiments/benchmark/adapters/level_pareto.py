"""Accuracy and latency of routers by level, fixed and learned: python -m experiments.benchmark level_pareto."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from jaxblt.validation import check_bounds, check_fields

if TYPE_CHECKING:
    from jaxblt.models import StackConfig

FIXED = ("prefix", "chunk", "token")
"""Arms of one level."""
LEARNED = ("gate", "priced_gate")
"""Arms whose gate learns how much each level counts; in the second one finer levels cost more."""
RULES = ("length", "entropy")
"""Arms whose level follows a rule with fixed thresholds: the steps of a document, or how sure its first code is."""
ARMS = (*FIXED, *RULES, *LEARNED)
SYMBOLS = 8
"""Values of a token that is no marker, and regimes."""


@dataclass(frozen=True)
class Setting:
    """The task, the model and its training.

    Attributes:
      dim, hidden: widths of the stack and of the router's network; several networks share the width.
      chunk, length: steps of a chunk and of a row.
      rows, steps, rate: of training.
      seeds: 0, 1, ... of so many.
      test_rows: that are scored.
      prices: of prefix, chunk and token for the priced gate.
      trials: of each timing, at least 20.
      kinds: whether a document is slow or fast as a whole, or each chunk of it.
    """

    dim: int = 32
    hidden: int = 48
    chunk: int = 8
    length: int = 64
    rows: int = 32
    steps: int = 400
    rate: float = 5e-3
    seeds: int = 3
    test_rows: int = 128
    prices: tuple[float, ...] = (0.0, 0.02, 0.05)
    trials: int = 20
    kinds: Literal["documents", "chunks"] = "documents"

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "dim", "hidden", "chunk", "rows", "steps", "seeds", "test_rows", least=1)
        check_bounds(self, "rate", above=0)
        check_bounds(self, "trials", least=20)
        if self.length % self.chunk or self.length < 2 * self.chunk:
            raise ValueError(
                f"Setting.length must be two chunks of {self.chunk} or more, got {self.length}: use a multiple"
            )


def level_pareto(
    out: str = "runs/benchmark/level_pareto.json",
    arms: tuple[str, ...] = ARMS,
    setting: Setting = Setting(),
) -> dict[str, Any]:
    """Train routers on a mix of slow and fast documents, and time whole rows and single tokens.

    A token's label is its value plus the regime, modulo 8. A slow document names its regime once, at its start. A fast
    one names the regime of each chunk in the chunk before. With `--setting.kinds chunks` that changes in place: where
    the chunk before names a regime as fast it holds, and else the one that the document's start names. The stack below
    has no memory, so only a code can carry the regime. `front` has the arms that no other arm beats, in seconds for
    rows and for tokens. A call with the file of an earlier one measures what it lacks.

    Args:
      out: file for the figures as JSON.
      arms: of `ARMS`.
      setting: of all of them.

    Raises:
      ValueError: there is no such arm.
    """
    from experiments.benchmark.figures.resumed import read_back
    from experiments.benchmark.figures.saved import save

    if unknown := [name for name in arms if name not in ARMS]:
        raise ValueError(f"unknown arms {unknown}, choose of: {', '.join(ARMS)}")
    said: dict[str, Any] = {"setting": asdict(setting)}
    found = dict(read_back(out, said).get("arms", {}))
    left = tuple(name for name in arms if name not in found)
    params = {}
    for name in left:
        params[name], found[name] = train(name, setting)
    for kind, seconds in time_arms(left, params, setting).items() if left else ():
        for name in left:
            found[name][kind] = seconds[name]
    figures = said | {"arms": found, "front": {kind: on_front(found, kind) for kind in ("rows", "token")}}
    save("level_pareto", out, figures)
    return figures


def on_front(arms: Mapping[str, Mapping[str, Any]], kind: str) -> list[str]:
    """Return the arms that no other beats: more labels right and not measurably slower, or as many and faster.

    Of two times one is lower if their intervals do not overlap.
    """

    def beats(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        faster, slower = one[kind]["high"] < other[kind]["low"], one[kind]["low"] > other[kind]["high"]
        return (one["right"] > other["right"] and not slower) or (one["right"] == other["right"] and faster)

    return [name for name, arm in arms.items() if not any(beats(other, arm) for other in arms.values())]


def stack_of(name: str, setting: Setting) -> "StackConfig":
    """Return the stack of an arm."""
    from jaxblt.adapters import AdapterConfig, ChunkMean, Prefix, RouterConfig
    from jaxblt.adapters.code.experimental.mixed import Mixed
    from jaxblt.mixers import AttentionConfig
    from jaxblt.models import StackConfig

    mixed = {
        "length": Mixed(by="length", at=(float(setting.length // 4), float(setting.length // 2))),
        "entropy": Mixed(by="entropy", at=(1 / 3, 2 / 3)),
        "gate": Mixed(),
        "priced_gate": Mixed(prices=setting.prices),
    }
    level: Any = mixed.get(name, name)
    router = RouterConfig(
        level=level,
        chunk=setting.chunk,
        reads=(ChunkMean(), Prefix(setting.chunk)),
        hidden=max(1, setting.hidden // (len(FIXED) if name in mixed else 1)),
        packed=False,
    )
    adapter = AdapterConfig(sites=("mlp/*",), rank=4 * SYMBOLS, blocks=SYMBOLS, router=router)
    local = AttentionConfig(dim=setting.dim, num_heads=1, window=1, position="none", packed=False)
    return StackConfig(
        dim=setting.dim,
        num_layers=1,
        pattern="L",
        mixers={"L": local},
        mlp_dim=2 * setting.dim,
        adapter=adapter,
    )


def draw(key: Any, rows: int, setting: Setting) -> tuple[Any, Any, Any]:
    """Return tokens, labels, and which tokens have a fast regime; a label is -1 where none is asked for."""
    import jax
    import jax.numpy as jnp

    kinds, values, regimes = jax.random.split(key, 3)
    in_place, chunks = setting.kinds == "chunks", setting.length // setting.chunk
    time = jnp.arange(setting.length)[None]
    drawn = jax.random.bernoulli(kinds, 0.5, (rows, chunks if in_place else 1))
    fast = jnp.repeat(drawn, setting.length // drawn.shape[1], 1)
    value = jax.random.randint(values, (rows, setting.length), 0, SYMBOLS)
    named = jax.random.randint(regimes, (rows, chunks), 0, SYMBOLS)
    here = jnp.repeat(named, setting.chunk, 1)
    if in_place:
        # Let the start name the document's own regime; what later slow markers name holds nowhere
        fast = fast & (time >= setting.chunk)
    marks = (time % setting.chunk == 0) & (fast | (time == 0) | in_place)
    tokens = jnp.where(marks, here + SYMBOLS * (1 + fast.astype(jnp.int32)), value)
    before, holds = (jnp.pad(x, ((0, 0), (setting.chunk, 0)))[:, : setting.length] for x in (here, fast))
    regime = jnp.where(holds, before, named[:, :1])
    asked = (time >= setting.chunk) & ~marks
    return tokens, jnp.where(asked, (value + regime) % SYMBOLS, -1), holds if in_place else fast


class Model:
    """The stack of an arm between fixed vectors of tokens and a trained head."""

    def __init__(self, name: str, setting: Setting) -> None:
        import jax

        from jaxblt.models import Stack

        self.config = stack_of(name, setting)
        self.stack = Stack(self.config)
        self.table = jax.random.normal(jax.random.key(0), (3 * SYMBOLS, setting.dim))

    def start(self, key: Any) -> Any:
        """Draw the parameters."""
        import flax.linen as nn
        import jax
        import jax.numpy as jnp

        keys = jax.random.split(key)
        drawn = nn.meta.unbox(self.stack.init(keys[0], jnp.zeros((1, 2, self.config.dim))))["params"]
        return {
            "stack": drawn,
            "head": jax.random.normal(keys[1], (self.config.dim, SYMBOLS)) / self.config.dim**0.5,
        }

    def logits(self, params: Any, tokens: Any) -> tuple[Any, Any]:
        """Return logits of labels, and what the router pays for its levels."""
        import jax
        import jax.numpy as jnp

        (y, _), side = self.stack.apply({"params": params["stack"]}, self.table[tokens], mutable=["losses"])
        paid = sum((jnp.sum(leaf) for leaf in jax.tree.leaves(side)), start=jnp.float32(0))
        return y @ params["head"], paid


def train(name: str, setting: Setting) -> tuple[Any, dict[str, Any]]:
    """Train all seeds of an arm at once; return the parameters of the first one, and figures."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxblt.training.flops import count_params

    model = Model(name, setting)
    rate = optax.cosine_decay_schedule(setting.rate, setting.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    def loss(params: Any, key: Any) -> Any:
        tokens, labels, _ = draw(key, setting.rows, setting)
        logits, paid = model.logits(params, tokens)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        return jnp.mean(nats, where=labels >= 0) + paid

    def run(key: Any) -> tuple[Any, Any, Any]:
        params = model.start(key)

        def step(carried: Any, number: Any) -> tuple[Any, None]:
            params, state = carried
            update, state = optimizer.update(jax.grad(loss)(params, jax.random.fold_in(key, number)), state)
            return (optax.apply_updates(params, update), state), None

        steps = jnp.arange(setting.steps)
        with jax.numpy_dtype_promotion("standard"):
            (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), steps)
        return params, *_score(model, params, setting)

    params, slow, fast = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(1), setting.seeds))
    first = jax.tree.map(lambda leaf: leaf[0], params)
    figures = {"parameters": count_params(first)[0], "slow": slow.tolist(), "fast": fast.tolist()}
    return first, figures | {"right": float(jnp.mean((slow + fast) / 2))}


def _score(model: Model, params: Any, setting: Setting) -> tuple[Any, Any]:
    """Return the shares of labels that are right where a slow regime holds, and where a fast one does."""
    import jax
    import jax.numpy as jnp

    tokens, labels, fast = draw(jax.random.key(2), setting.test_rows, setting)
    logits, _ = model.logits(params, tokens)
    right = jnp.argmax(logits, -1) == labels

    def share(those: Any) -> Any:
        return jnp.mean(right.astype(jnp.float32), where=(labels >= 0) & those)

    return share(~fast), share(fast)


def time_arms(
    arms: tuple[str, ...], params: Mapping[str, Any], setting: Setting
) -> dict[str, dict[str, Any]]:
    """Return seconds of whole rows, and of a token behind a state, of all arms in alternating rounds."""
    import jax

    from experiments.benchmark.figures.saved import timed
    from jaxblt.models.stack import init_stack_state
    from jaxblt.profiling import Case, measure_all

    tokens, _, _ = draw(jax.random.key(3), setting.rows, setting)
    cases: dict[str, list[Case]] = {"rows": [], "token": []}
    for name in arms:
        model = Model(name, setting)
        x, own = model.table[tokens], {"params": params[name]["stack"]}
        state = init_stack_state(model.config, 1, capacity=setting.length)
        cases["rows"].append(Case(name, _first(jax.jit(model.stack.apply)), (own, x)))
        cases["token"].append(
            Case(name, _first(jax.jit(partial(_step, model.stack))), (own, x[:1, :1], state))
        )
    return {
        kind: {found.name: timed(found) for found in measure_all(each, trials=setting.trials, method="calls")}
        for kind, each in cases.items()
    }


def _step(stack: Any, params: Any, x: Any, state: Any) -> Any:
    return stack.apply(params, x, state=state)


def _first(program: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: program(*args)[0]
