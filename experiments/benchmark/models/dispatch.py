"""Calls of a small train step by how it is called: python -m experiments.benchmark dispatch --out FILE."""

from collections.abc import Callable
from typing import Any

TURNS = 16
"""Steps of a call of the scanned program."""


def dispatch(
    out: str, dim: int = 16, num_layers: int = 2, length: int = 16, width: int = 256, trials: int = 50
) -> dict[str, Any]:
    """Take the processor time of a train step by how it is called.

    It runs op by op, jitted, compiled ahead of time, with its state's memory donated, and several steps in one scan.
    Two models are timed. Of the small one a step computes next to nothing, so that its call is mostly dispatch: what
    a call takes longer than a step of a scan, in which the host does nothing. Only this one runs op by op. Of the wide
    one a step that keeps its state writes parameters and optimiser slots to new memory, as many bytes as `new_bytes`.

    Args:
      out: JSON file to write.
      dim: width of the small model.
      num_layers: blocks of attention of either.
      length: bytes of a row, one row a batch.
      width: of the wide model.
      trials: timed calls of each program, in turns.
    """
    from experiments.benchmark.figures.saved import save

    shape = {"num_layers": num_layers, "length": length}
    figures: dict[str, Any] = {**shape, "turns": TURNS, "models": []}
    for size in (dim, width):
        found = of_model(size, num_layers, length, trials, by_op=size == dim)
        figures["models"].append({"dim": size, **found})
        save("dispatch", out, figures)
    return figures


def of_model(dim: int, num_layers: int, length: int, trials: int, *, by_op: bool) -> dict[str, Any]:
    """Return seconds a step by program, what is above a step of the scan, and bytes that results take anew."""
    import jax

    from experiments.benchmark.figures.saved import timed
    from jaxblt.parallel import MeshConfig
    from jaxblt.profiling import Case, measure, measure_all
    from jaxblt.training.flops import count_params
    from jaxblt.training.start.timed_step import prepare

    mesh = MeshConfig(data=1).build(jax.devices()[:1])
    with jax.set_mesh(mesh):
        ready = prepare(small_recipe(dim, num_layers, length), mesh)
        called, compiled = programs(ready.step(), ready.state, ready.batch)
        cases = [Case(name, stepping(call, ready.state, ready.batch)) for name, call in called.items()]
        taken = measure_all(cases, trials=trials, method="processor")
        seconds = {name: timed(one) for name, one in zip(called, taken, strict=True)}
        if by_op:
            step = stepping(ready.step().__wrapped__, ready.state, ready.batch)
            with jax.disable_jit():
                seconds["op by op"] = timed(measure(step, warmup=1, method="processor"))
    scanned = {
        name: value / TURNS
        for name, value in seconds.pop("scanned").items()
        if name in ("median", "low", "high")
    }
    return {
        "parameters": count_params(ready.state.params)[0],
        "leaves": len(jax.tree.leaves(ready.state)),
        "seconds": seconds,
        "scanned_step_seconds": scanned,
        "above_scanned": {name: one["median"] - scanned["median"] for name, one in seconds.items()},
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(ready.state)),
        "new_bytes": {name: new_bytes(one) for name, one in compiled.items()},
    }


def small_recipe(dim: int, num_layers: int, length: int) -> Any:
    """Return a byte model of attention on one row of the embedded book."""
    from jaxblt.data import DataConfig
    from jaxblt.mixers import AttentionConfig
    from jaxblt.models import ByteLMConfig, StackConfig
    from jaxblt.training import Recipe, TrainConfig

    attention = AttentionConfig(dim=dim, num_heads=1)
    stack = StackConfig(dim=dim, num_layers=num_layers, pattern="A", mixers={"A": attention})
    data = DataConfig(sample="book", seq_len=length, batch_size=1)
    return Recipe(name="dispatch", model=ByteLMConfig(stack), data=data, train=TrainConfig(dtype="float32"))


def programs(step: Any, state: Any, batch: Any) -> tuple[dict[str, Callable[..., Any]], dict[str, Any]]:
    """Return what is called, by name, and the compiled programs that keep the state and that take its memory."""
    import jax

    plain = step.__wrapped__
    kept, donated = jax.jit(plain), jax.jit(plain, donate_argnums=0)

    def scan(state: Any, batch: Any) -> Any:
        return jax.lax.scan(lambda state, _: plain(state, batch), state, None, TURNS)

    compiled = {"kept": kept.lower(state, batch).compile(), "donated": donated.lower(state, batch).compile()}
    called = {
        "jitted": kept,
        "ahead": compiled["kept"],
        "jitted, donated": donated,
        "ahead, donated": compiled["donated"],
        "scanned": jax.jit(scan, donate_argnums=0),
    }
    return called, compiled


def stepping(call: Callable[..., Any], state: Any, batch: Any) -> Callable[[], Any]:
    """Return a function that takes the next step of a state of its own."""
    from jaxblt.training.state import copied

    held = [copied(state)]

    def advance() -> Any:
        held[0], metrics = call(held[0], batch)
        return held[0], metrics

    return advance


def new_bytes(compiled: Any) -> int:
    """Return bytes of results that do not lie in the memory of an argument."""
    planned = compiled.memory_analysis()
    return planned.output_size_in_bytes - planned.alias_size_in_bytes
