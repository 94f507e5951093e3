"""What is recalled over gaps that no window spans: python -m experiments.benchmark gap_recall --out FILE."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jaxblt.validation import check_bounds, check_fields

if TYPE_CHECKING:
    from jaxblt.evaluation.tasks import GapRecall
    from jaxblt.models import ByteLMConfig

STEPS_A_CALL = 50
"""Steps between two looks at the accuracy."""
MODELS = ("mac", "mag", "mal", "slots", "window", "hyena", "delta", "engine", "levels", "attention")
MEMORIES = ("mac", "mag", "mal", "slots")


class Stage(NamedTuple):
    """A stage of training: its longest gap in multiples of the reach, its shortest in fillers, tokens of a chunk."""

    multiple: int
    least_gap: int
    chunk: int


@dataclass(frozen=True)
class Settings:
    """What all models of a measurement have in common.

    Gaps are in multiples of what a stack of windows reaches, layers * (window - 1).

    Attributes:
      symbols: keys, and as many values.
      fillers: different symbols of a gap.
      pairs: of key and value in a row.
      dim, layers, heads: of the models.
      window: steps that attention sees; MAG's sees at least a chunk.
      chunk: tokens from one update of a memory to the next.
      shortest: fillers of the shortest gap of training; None for one that windows do not reach over: models that may
        answer short gaps by attention learn that, and leave their memory alone. A memory holds nothing of a chunk that
        has not ended, so chunks of different lengths compare at gaps beyond the longest of them.
      trained: longest gap of each stage of training; all stages have as many steps.
      warm: that of stages before these, which have chunks of `warm_chunk` tokens and every gap that windows do not
        reach over. Of rows with gaps beyond long chunks a batch holds few.
      warm_chunk: see there.
      tested: gaps that are tested.
      tokens: of a batch.
      steps: of training.
      learning_rate: the peak, after a tenth of the steps.
      attention_learning_rate: that of full attention, which does not come to recall at the rate of the others.
      test_rows: rows for each tested gap.
      dtype: of the computation.
    """

    symbols: int = 32
    fillers: int = 16
    pairs: int = 8
    dim: int = 64
    layers: int = 2
    heads: int = 1
    window: int = 16
    chunk: int = 16
    shortest: int | None = None
    trained: tuple[int, ...] = (4, 16)
    warm: tuple[int, ...] = ()
    warm_chunk: int = 16
    tested: tuple[int, ...] = (4, 16, 64)
    tokens: int = 16_384
    steps: int = 1600
    learning_rate: float = 5e-3
    attention_learning_rate: float = 2e-3
    test_rows: int = 256
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "symbols", "fillers", "window", least=2)
        sizes = ("pairs", "dim", "layers", "heads", "chunk", "warm_chunk", "tokens", "test_rows")
        check_bounds(self, *sizes, least=1)
        check_bounds(self, "shortest", least=1)
        check_bounds(self, "learning_rate", "attention_learning_rate", above=0)
        if not self.trained or not self.tested or min(self.trained + self.warm + self.tested) < 1:
            raise ValueError(
                "trained, warm and tested must be multiples of the reach from 1, got "
                f"{self.trained}, {self.warm} and {self.tested}"
            )
        if self.least_gap > min(self.trained) * self.reach:
            raise ValueError(
                f"shortest must be at most {min(self.trained)} x {self.reach}, the longest gap of a stage, got "
                f"{self.least_gap}"
            )
        count = len(self.stages)
        calls, rest = divmod(self.steps, STEPS_A_CALL * count)
        if rest or not calls:
            raise ValueError(
                f"steps must be a multiple of {STEPS_A_CALL} for each of {count} stages, got {self.steps}"
            )

    @property
    def reach(self) -> int:
        """Positions that a stack of windows sees back."""
        return self.layers * (self.window - 1)

    def rate_of(self, name: str) -> float:
        """The learning rate of that model."""
        return self.attention_learning_rate if name == "attention" else self.learning_rate

    @property
    def least_gap(self) -> int:
        """Fillers of the shortest gap of training."""
        return self.reach + 1 if self.shortest is None else self.shortest

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Of training, in order."""
        warm = (Stage(multiple, self.reach + 1, self.warm_chunk) for multiple in self.warm)
        return *warm, *(Stage(multiple, self.least_gap, self.chunk) for multiple in self.trained)

    @property
    def task(self) -> "GapRecall":
        """The symbols and the pairs, at the longest gap of training."""
        from jaxblt.evaluation.tasks import GapRecall

        gap = max(self.trained + self.warm) * self.reach
        return GapRecall(symbols=self.symbols, fillers=self.fillers, pairs=self.pairs, gap=gap)

    def length(self, multiple: int, chunk: int | None = None) -> int:
        """Positions of a row with room for that gap, in whole chunks (None for those of `chunk`)."""
        whole = chunk or self.chunk
        return -(-(3 * self.pairs + multiple * self.reach) // whole) * whole


def gap_recall(
    out: str,
    models: tuple[str, ...] = MODELS,
    off: bool = True,
    chunks: tuple[int, ...] = (),
    seeds: int = 3,
    time_limit_s: float | None = None,
    settings: Settings = Settings(),
) -> dict[str, Any]:
    """Trains small models to recall values over gaps beyond their windows, and tests them on longer ones.

    All seeds of a model, with and without reads, are one program and are trained side by side.

    Memories by length of their chunks, at gaps that are longer than all of them:
    --models mal --chunks 16 64 512 2048 --settings.shortest 2100 --settings.warm 4 16 --settings.trained 80
    --settings.steps 2400 --settings.tested 80 512

    Args:
      out: file for the figures as JSON, written anew after each model.
      models: columns, of mac, mag, mal (Titans), slots, window, hyena, delta, engine and levels (a state engine of 56
        slots, and of levels of 32, 16 and 8), attention; each is as large as the largest of all of these.
      off: train models with a memory a second time, with its reads held at zero.
      chunks: chunk lengths of the memories, one model each; none for that of the settings.
      seeds: models of each kind, with seeds 0, 1, ...
      time_limit_s: seconds of training of a model, compilation left out, after which it is tested as it is; None sets
        none.
      settings: of all of them.

    Raises:
      ValueError: there is no model to train, or an unknown one; or a gap is too short to ask a memory for anything.
    """
    from experiments.benchmark._gap_models import check_gaps, equal_models
    from experiments.benchmark._schema import save
    from jaxblt.validation import number

    if not models:
        raise ValueError(f"--models names no model, choose of {MODELS}")
    if unknown := sorted(set(models) - set(MODELS)):
        raise ValueError(f"--models names {unknown}, choose of {MODELS}")
    if seeds < 1:
        raise ValueError(
            f"--seeds must be at least 1, got {seeds}: it is how many models of each kind are trained"
        )
    chunks = chunks or (settings.chunk,)
    if time_limit_s is not None:
        number("--time-limit-s", time_limit_s, above=0)
    for chunk in chunks:
        check_gaps(models, replace(settings, chunk=chunk))
    told: dict[str, Any] = {"settings": asdict(settings), "reach": settings.reach}
    figures: dict[str, Any] = {**told, "chance": 1 / settings.symbols, "runs": [], "mean": []}
    for chunk in chunks:
        changed = replace(settings, chunk=chunk)
        sized, warm = (
            equal_models(MODELS, replace(settings, chunk=c), settings.task.vocab_size)
            for c in (chunk, settings.warm_chunk)
        )
        for name in models:
            withouts = (False, True) if off and name in MEMORIES else (False,)
            kinds = [(without, seed) for without in withouts for seed in range(seeds)]
            own = replace(changed, learning_rate=changed.rate_of(name))
            programs = compile_model(sized[name], own, len(kinds), warm[name])
            found = train(name, programs, own, kinds, time_limit_s)
            for place, without in enumerate(withouts):
                model = {"model": name + "_off" * without, "chunk": chunk}
                runs = found[place * seeds : (place + 1) * seeds]
                figures["runs"] += [{**model, **run} for run in runs]
                figures["mean"].append({**model, **over_seeds(runs)})
            print(*figures["runs"][-len(kinds) :], sep="\n", flush=True)
            save("gap_recall", out, figures)
    return figures


@dataclass(frozen=True)
class Programs:
    """What is compiled for a model, once for all that are trained side by side.

    Attributes:
      shapes: of one model's parameters.
      start: (keys, held) -> parameters, and the optimiser's state.
      stages: by stage of training, (carried, held, keys, first step) -> (carried, accuracy of each model and step).
      score: (parameters, gaps [B], keys) -> mean nats of an answer and right answers, of each model.
      rows: that `score` takes at once.
      parameters: of one model.
      seconds: that compiling took.
    """

    shapes: Any
    start: Callable[..., Any]
    stages: tuple[Callable[..., Any], ...]
    score: Callable[..., Any]
    rows: int
    parameters: int
    seconds: float


def compile_model(
    model: "ByteLMConfig", settings: Settings, count: int, warm: "ByteLMConfig | None" = None
) -> Programs:
    """Compiles the stages of training of `count` models, and their test on rows with room for the longest gap.

    `warm` is the model with chunks of `warm_chunk`, for settings that ask for such stages.
    """
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from experiments.benchmark._gap_rows import draw_gaps, draw_rows
    from jaxblt.training.flops import count_params
    from jaxblt.training.optimizer import AdamWConfig, make_optimizer

    begun, task = time.perf_counter(), settings.task
    build = lambda model: model.build(dtype=jnp.dtype(settings.dtype))  # noqa: E731
    module = build(model)
    init = lambda key: {"params": module.init(key, jnp.zeros((1, 2 * settings.chunk), jnp.int32))["params"]}  # noqa: E731
    boxed = jax.eval_shape(init, jax.random.key(0))
    adamw = AdamWConfig(learning_rate=settings.learning_rate, warmup_steps=settings.steps // 10)
    optimizer = make_optimizer(adamw, settings.steps, boxed)

    def start(key: Any, held: Any) -> Any:
        params = jax.tree.map(jnp.multiply, nn.meta.unbox(init(key)), held)
        return params, optimizer.init(params)

    def loss(params: Any, batch: Any, module: Any = module) -> tuple[Any, Any]:
        logits, _ = module.apply(params, batch.inputs)  # pyright: ignore[reportGeneralTypeIssues]
        chosen = jnp.take_along_axis(logits, batch.targets[..., None], 2)[..., 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - chosen
        right = (jnp.argmax(logits, -1) == batch.targets) & batch.scored
        asked = batch.inputs.shape[0] * task.pairs
        return jnp.sum(jnp.where(batch.scored, losses, 0)) / asked, jnp.sum(right)

    def stage(at: Stage, module: Any) -> Any:
        length = settings.length(at.multiple, at.chunk)
        batch_rows = max(settings.tokens // length, 1)

        def step(held: Any, key: Any, carried: Any, number: Any) -> tuple[Any, Any]:
            params, state = carried
            drawn, gaps = jax.random.split(jax.random.fold_in(key, number))
            gaps = draw_gaps(gaps, batch_rows, at.least_gap, at.multiple * settings.reach)
            batch = draw_rows(task, drawn, gaps, length)
            (_, right), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch, module)
            gradients = jax.tree.map(jnp.multiply, gradients, held)
            updates, state = optimizer.update(gradients, state, params)
            with jax.numpy_dtype_promotion("standard"):
                params = jax.tree.map(lambda p, u: p + u, params, updates)
            return (params, state), right / (batch_rows * task.pairs)

        def steps(carried: Any, held: Any, key: Any, first: Any) -> Any:
            numbers = first + jnp.arange(STEPS_A_CALL)
            return jax.lax.scan(lambda c, n: step(held, key, c, n), carried, numbers)

        together = jax.jit(jax.vmap(steps, in_axes=(0, 0, 0, None)), donate_argnums=0)
        return together.lower(*given, keys, jax.ShapeDtypeStruct((), jnp.int32)).compile()

    def score(params: Any, gaps: Any, key: Any) -> Any:
        return loss(params, draw_rows(task, key, gaps, longest))

    params = nn.meta.unbox(boxed)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), count))
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), params)
    begin = jax.jit(jax.vmap(start))
    given = (jax.eval_shape(begin, keys, stacked), stacked)
    longest = settings.length(max(settings.tested))
    rows = min(max(2 * settings.tokens // longest, 1), settings.test_rows)
    gaps = jax.ShapeDtypeStruct((rows,), jnp.int32)
    scored = jax.jit(jax.vmap(score, in_axes=(0, None, 0))).lower(stacked, gaps, keys).compile()
    modules = [build(warm)] * len(settings.warm) if warm is not None else []
    modules += [module] * len(settings.trained)
    stages = tuple(stage(*one) for one in zip(settings.stages, modules, strict=True))
    counted = count_params(params)[0]
    return Programs(params, begin, stages, scored, rows, counted, time.perf_counter() - begun)


def train(
    name: str,
    programs: Programs,
    settings: Settings,
    kinds: Sequence[tuple[bool, int]],
    time_limit_s: float | None,
) -> list[dict[str, Any]]:
    """Accuracy at each gap after training, and what it was on rows of training; of (without reads or not, seed).

    Seconds and tokens are of all together. Stages that the limit left no time for have none.
    """
    import jax
    import jax.numpy as jnp

    from experiments.benchmark._gap_models import held

    keys = jnp.stack([jax.random.split(jax.random.key(seed), 3) for _, seed in kinds])
    init, data, test = keys[:, 0], keys[:, 1], keys[:, 2]
    masks = [held(name, programs.shapes, off=off) for off, _ in kinds]
    mask = jax.tree.map(lambda *leaves: jnp.stack(leaves), *masks)
    carried, curve = programs.start(init, mask), []
    count = len(settings.stages)
    each, seconds, done = settings.steps // count, [0.0] * count, [0] * count
    for first in range(0, settings.steps, STEPS_A_CALL):
        if time_limit_s is not None and sum(seconds) > time_limit_s:
            break
        begun, place = time.perf_counter(), first // each
        program = programs.stages[place]
        carried, accuracies = program(carried, mask, data, jnp.asarray(first, jnp.int32))
        curve.append(np.mean(np.asarray(accuracies), axis=1))
        seconds[place] += time.perf_counter() - begun
        done[place] += STEPS_A_CALL
    lengths = [settings.length(stage.multiple, stage.chunk) for stage in settings.stages]
    tokens = [n * max(settings.tokens // length, 1) * length for n, length in zip(done, lengths, strict=True)]
    gaps = [test_gap(programs, settings, carried[0], multiple, test) for multiple in settings.tested]
    shared = {
        "parameters": programs.parameters,
        "side_by_side": len(kinds),
        "steps": sum(done),
        "seconds": seconds,
        "tokens_per_second": [
            len(kinds) * count / taken if taken else None
            for count, taken in zip(tokens, seconds, strict=True)
        ],
        "compile_seconds": programs.seconds,
    }
    return [
        {
            "seed": seed,
            **shared,
            "gaps": [gap[place] for gap in gaps],
            "accuracy_by_call": [round(float(accuracies[place]), 4) for accuracies in curve],
        }
        for place, (_, seed) in enumerate(kinds)
    ]


def test_gap(
    programs: Programs, settings: Settings, params: Any, multiple: int, keys: Any
) -> list[dict[str, Any]]:
    """Accuracy of each model at one gap, with the Wilson interval of its answers, and bits of an answer."""
    import jax
    import jax.numpy as jnp

    from experiments.benchmark._gap_rows import wilson

    batches = -(-settings.test_rows // programs.rows)
    gaps = jnp.full((programs.rows,), multiple * settings.reach, jnp.int32)
    split = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, multiple), batches))(keys)
    scores = [jax.device_get(programs.score(params, gaps, split[:, batch])) for batch in range(batches)]
    nats, right = (np.sum(column, axis=0) for column in zip(*scores, strict=True))
    asked = batches * programs.rows * settings.pairs
    found = []
    for bits, count in zip((nats / batches / math.log(2)).tolist(), right.tolist(), strict=True):
        low, high = wilson(count, asked)
        told = {"accuracy": count / asked, "low": low, "high": high, "right": count, "asked": asked}
        found.append({"multiple": multiple, "gap": multiple * settings.reach, "bits": bits, **told})
    return found


def over_seeds(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of all seeds together: answers are counted, and the worst and best seed are named beside them."""
    from experiments.benchmark._gap_rows import wilson

    found = []
    for gaps in zip(*(run["gaps"] for run in runs), strict=True):
        right, asked = (sum(gap[name] for gap in gaps) for name in ("right", "asked"))
        low, high = wilson(right, asked)
        each = [gap["accuracy"] for gap in gaps]
        named = {"multiple": gaps[0]["multiple"], "gap": gaps[0]["gap"], "accuracy": right / asked}
        found.append({**named, "low": low, "high": high, "worst": min(each), "best": max(each)})
    return {"parameters": runs[0]["parameters"], "gaps": found}
