"""Learned patches beside entropy and static ones: python -m experiments.benchmark boundary_books DIR --out FILE."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro

from jaxblt.validation import number, whole

if TYPE_CHECKING:
    from experiments.benchmark.boundaries.side_by_side import Trained
    from jaxblt.training.recipe import Recipe
    from jaxblt.training.state import TrainState

Arm = Literal["learned", "learned_levels", "learned_attention", "entropy", "static"]
"""How patches are cut; `learned_levels` groups them again, `learned_attention` lets a byte read several of them."""
WARMUP = 400
"""Steps over which the learning rate rises, as in `books_learned`; a fifth of all at the most."""
SHOWN = 400
"""Bytes of held-out text that are drawn with their patches."""


def boundary_books(
    run_dir: Annotated[str, tyro.conf.Positional],
    out: str,
    arms: tuple[Arm, ...] = ("learned", "entropy", "static"),
    recipe: str = "books",
    paths: tuple[str, ...] = (),
    bytes_per_patch: float = 5.0,
    seeds: int = 3,
    steps: int = 2000,
    seconds: float = 120.0,
    every: int = 50,
    eval_batches: int = 32,
) -> dict[str, Any]:
    """Train one recipe under several ways to cut patches of one mean length, and score them on held-out text.

    Seeds of an arm share one compiled step and are trained in turn, on one device. Arms have equal steps; `seconds`
    ends those that would take longer. Patches by entropy and static ones leave the rest of the recipe as it is.

    Args:
      run_dir: folder of the entropy model's run, which is trained by the recipe NAME_entropy unless it is finished.
      out: file for the figures as JSON, written anew after each arm.
      arms: ways to cut; others are compared with the first.
      recipe: its name; a byte-patched model.
      paths: texts to train on, in folders train, validation and test; () is the recipe's own.
      bytes_per_patch: mean length that all are led to.
      seeds: models of each arm, with seeds 0, 1, ... of parameters and of the order of rows.
      steps: of training, and the learning rate's horizon.
      seconds: of training of each model, at the most.
      every: steps between entries of the curves.
      eval_batches: of the validation split, at the most.

    Raises:
      ValueError: there is no arm, or a number is out of range.
    """
    from experiments.benchmark.boundaries.side_by_side import train_seeds
    from experiments.benchmark.figures.saved import save
    from jaxblt import recipes
    from jaxblt.training.loop import fit

    if not arms:
        raise ValueError(f"--arms names no arm, choose of {', '.join(get_args(Arm))}")
    for option, value in {
        "seeds": seeds,
        "steps": steps,
        "every": every,
        "eval_batches": eval_batches,
    }.items():
        whole(f"--{option}", value, least=1)
    number("--seconds", seconds, above=0)
    base, entropy = (on_texts(recipes.get(name), paths) for name in (recipe, f"{recipe}_entropy"))
    train = replace(base.train, steps=steps, eval_every=1, eval_batches=eval_batches)
    base = replace(base, train=train, bytes_per_patch=bytes_per_patch, entropy_run=run_dir)
    figures: dict[str, Any] = {
        "recipe": recipe,
        "target": bytes_per_patch,
        "step_bytes": base.data.batch_size * base.data.seq_len,
        "arms": {},
    }
    for arm in dict.fromkeys(arms):
        if arm == "entropy":
            fit(entropy, run_dir)
        trained = train_seeds(arm_of(base, arm), range(seeds), every=every, seconds=seconds)
        figures["arms"][arm] = {**figures_of(trained), **scored(trained)}
        figures["gaps"] = gaps(figures["arms"])
        save("boundary_books", out, figures)
    return figures


def on_texts(recipe: "Recipe", paths: tuple[str, ...]) -> "Recipe":
    """Return the recipe on other texts, if there are any."""
    return replace(recipe, data=replace(recipe.data, paths=paths)) if paths else recipe


def arm_of(base: "Recipe", arm: Arm) -> "Recipe":
    """Return the recipe with patches cut this way. Encoder, head and warm-up are those that learned patches need."""
    from jaxblt.patching import PatcherConfig
    from jaxblt.patching.learned import BoundaryConfig
    from jaxblt.recipes.books import with_level

    assert base.patcher is not None
    block, target = base.patcher.block_size, base.bytes_per_patch
    alike = replace(base.model, encoder=replace(base.model.encoder, dropout=0.0), tie_head=False)
    warmup = min(WARMUP, base.train.steps // 5)
    base = replace(base, model=alike, optimizer=replace(base.optimizer, warmup_steps=warmup))
    if arm == "entropy":
        return base
    if arm == "static":
        assert target is not None
        patcher = PatcherConfig(mode="static", patch_size=round(target), block_size=block)
        return replace(base, patcher=patcher, entropy_run=None, bytes_per_patch=None)
    router = BoundaryConfig(unmerge="attention" if arm == "learned_attention" else "gather")
    model = replace(alike, router=router, features_enter="output")
    patcher = PatcherConfig(mode="learned", block_size=block)
    return replace(
        base,
        model=with_level(model) if arm == "learned_levels" else model,
        patcher=patcher,
        entropy_run=None,
    )


def figures_of(trained: "Trained") -> dict[str, Any]:
    """Return time, size and curve of an arm."""
    from jaxblt.training.flops import count_params

    return {
        "steps": trained.steps,
        "step_ms": 1e3 * trained.step_seconds,
        "start_seconds": trained.start_seconds,
        "parameters": count_params(trained.states[0].params)[0],
        "skipped": [int(state.skipped) for state in trained.states],
        "curve": trained.curve,
    }


def scored(trained: "Trained") -> dict[str, Any]:
    """Return what held-out text says: bits, lengths, cuts at words, and a passage with its patches.

    Learned patches are scored at the mean length that is asked for, and beside it `as_trained`.
    """
    import jax

    from experiments.benchmark.boundaries.word_cuts import cut_passages, shares_at_words
    from jaxblt.training.evaluate import Validation

    setup, more = trained.setup, {}
    with jax.set_mesh(setup.mesh):
        validation = Validation(setup)
        states = trained.states
        if setup.recipe.patcher is not None and setup.recipe.patcher.mode == "learned":
            more = {"as_trained": by_seed([validation(state) for state in states])}
            states = at_target(trained)
        found = [validation(state) for state in states]
        passages = cut_passages(setup, validation.data, states)
    words = [shares_at_words(passage) for passage in passages]
    return {
        "bytes": found[0]["bytes"],
        **by_seed(found),
        **more,
        "words": {name: {"seeds": [one[name] for one in words]} for name in words[0]},
        "passage": passages[0].text(SHOWN),
    }


def by_seed(found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return bits and lengths of each seed, with their mean and its interval."""
    from experiments.benchmark.figures.over_seeds import over_seeds

    names = [name for name in ("bits_per_byte", "bytes_per_patch", "overflow") if name in found[0]]
    each = {name: [one[name] for one in found] for name in names}
    return {name: {"seeds": values, **over_seeds(values)} for name, values in each.items()}


def at_target(trained: "Trained") -> list["TrainState"]:
    """Return the models with learned patches of the mean length that the recipe asks for, as `fit` leaves them."""
    from jaxblt.training.start.boundaries import with_target_length
    from jaxblt.training.start.setup import open_data

    recipe, mesh = trained.setup.recipe, trained.setup.mesh
    data = open_data(recipe, mesh)
    return [
        replace(state, params=with_target_length(recipe, state.params, state.frozen, data, mesh))
        for state in trained.states
    ]


def gaps(arms: dict[str, Any]) -> dict[str, Any]:
    """Return bits per byte of each arm less those of the first, paired by seed."""
    from experiments.benchmark.figures.over_seeds import over_seeds

    first, *others = arms
    bits = {name: arms[name]["bits_per_byte"]["seeds"] for name in arms}
    pairs = {name: [a - b for a, b in zip(bits[name], bits[first], strict=True)] for name in others}
    return {f"{name} - {first}": over_seeds(less) for name, less in pairs.items()}
