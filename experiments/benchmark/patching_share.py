"""What online entropies cost a train step: python -m experiments.benchmark patching_share RECIPE --out FILE."""

from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from experiments.benchmark._step import Ready, prepare

if TYPE_CHECKING:
    from jaxblt.profiling import Method


def cases(ready: Ready) -> tuple[Any, Any]:
    """The step that asks the entropy model, and the same step on the entropies that the model gave.

    Raises:
      ValueError: no entropy model cuts the recipe's patches, or its data brings entropies already.
    """
    import jax

    from jaxblt.profiling import Case
    from jaxblt.training.state import ENTROPY
    from jaxblt.training.step import find_entropies

    task, state, batch = ready.setup.task, ready.state, ready.batch
    if ENTROPY not in state.frozen or batch.entropies is not None:
        raise ValueError(
            f"recipe {ready.setup.recipe.name!r} asks no entropy model in its steps: name one with entropy_run "
            "and without data.entropies"
        )
    like = batch.inputs.sharding
    entropies = jax.jit(partial(find_entropies, task), out_shardings=like)(state.frozen, batch)
    step = ready.step()
    given = replace(batch, entropies=entropies)
    return Case("online entropies", step, (state, batch)), Case("given entropies", step, (state, given))


def share(ready: Ready, *, rounds: int = 20, method: "Method | None" = None) -> dict[str, Any]:
    """Share of the online step's time that the entropy model takes, from alternating rounds.

    share = 1 - median(given) / median(online), with its 95 % interval. The batch, and with it the patches, is the
    same in both, but for boundaries where the entropy is within rounding of the threshold: `losses` shows both.
    """
    import jax

    from jaxblt.profiling import compare

    online, given = cases(ready)
    losses = {case.name: float(jax.jit(case.fn)(*case.args)[1]["loss"]) for case in (online, given)}
    found = compare(online, given, rounds=rounds, method=method)
    return {
        "share": 1 - 1 / found.ratio,
        "share_low": 1 - 1 / found.low,
        "share_high": 1 - 1 / found.high,
        "losses": losses,
        "method": found.first.method,
        "online_seconds": asdict(found.first.summary),
        "given_seconds": asdict(found.second.summary),
    }


def patching_share(
    recipe: Annotated[str, tyro.conf.Positional],
    out: str,
    entropy_run: str | None = None,
    batch_size: int | None = None,
    rounds: int = 20,
) -> None:
    """Times a recipe's train step with entropies computed in it and with the same entropies given, and writes both.

    Runs on one device, with untrained parameters, on the first batch of the recipe's data.

    Args:
      recipe: name of a recipe with an entropy_run.
      out: file for the figures as JSON.
      entropy_run: folder of the entropy model's run; the recipe's by default.
      batch_size: rows; the recipe's by default.
      rounds: alternating rounds, at least 20.
    """
    import jax

    import configs
    from experiments.benchmark._schema import save
    from jaxblt.parallel import MeshConfig

    chosen = configs.get(recipe)
    rows = chosen.data.batch_size if batch_size is None else batch_size
    run_dir = chosen.entropy_run if entropy_run is None else entropy_run
    chosen = replace(chosen, entropy_run=run_dir, data=replace(chosen.data, batch_size=rows))
    mesh = MeshConfig(data=1).build(jax.local_devices()[:1])
    with jax.set_mesh(mesh):
        found = share(prepare(chosen, mesh), rounds=rounds)
    save(
        "patching_share", out, {"recipe": recipe, "seq_len": chosen.data.seq_len, "batch_size": rows, **found}
    )
