"""A byte Transformer with sparse attention beside dense: python -m experiments.benchmark sparse_books --out FILE."""

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxblt.validation import whole

if TYPE_CHECKING:
    from experiments.benchmark.operations.side_by_side import Trained
    from jaxblt.mixers import MixerConfig
    from jaxblt.models import StackConfig
    from jaxblt.training.evaluate import Validation
    from pallas_kernels.attention.rules import Rule

BLOCK = 128
"""Tokens in a block of static rules."""
CHOSEN = 64
"""Tokens in a block that a token chooses."""
WINDOW = 512
"""Tokens before it that a token sees beside its chosen blocks, and in layers of a window alone."""
HEADS, KEY_HEADS = 8, 2


def sparse_books(
    out: str,
    arms: tuple[str, ...] = ("dense", "rule_50", "rule_75", "rule_90", "chosen_90"),
    recipe: str = "books_512",
    paths: tuple[str, ...] = (),
    length: int = 32_768,
    rows: int = 1,
    layers: int = 4,
    seeds: int = 3,
    steps: int = 150,
    eval_batches: int = 16,
) -> dict[str, Any]:
    """Train one byte model with several kinds of attention for equal steps, and score them on held-out text.

    Seeds of an arm share one compiled step. Arms see the same rows in the same order.

    Args:
      out: file for the figures as JSON, written anew after each arm.
      arms: the first is what others are compared with. `dense` attends to all; `rule_S` to a window and every n-th
        block, and S % of the pairs are hidden; `chosen_S` to blocks that each token chooses, pooled blocks and a
        window, together as many keys; `learned_S` is that by a predictor, and tells what pooled keys would keep beside
        it; `stack` is layers of a window, of chosen blocks (the config's defaults) and of
        Hyena in turn.
      recipe: its name; a byte model.
      paths: texts to train on, in folders train, validation and test; () is the recipe's own.
      length: bytes of a row.
      rows: of a step.
      layers: of the model.
      seeds: models of each arm, with seeds 0, 1, ... of parameters and of the order of rows.
      steps: of training, and the learning rate's horizon.
      eval_batches: of the validation split, at the most.

    Raises:
      ValueError: there is no arm, an arm is unknown, or a number is out of range.
    """
    import jax

    from experiments.benchmark.figures.over_seeds import over_seeds
    from experiments.benchmark.figures.saved import save
    from experiments.benchmark.operations.side_by_side import train_seeds
    from jaxblt import recipes
    from jaxblt.training.evaluate import Validation
    from jaxblt.training.flops import count_params

    sizes = {"length": length, "rows": rows, "layers": layers}
    sizes |= {"seeds": seeds, "steps": steps, "eval_batches": eval_batches}
    for name, value in sizes.items():
        whole(f"--{name}", value, least=1)
    if not arms:
        raise ValueError("--arms names no arm, such as dense or rule_90")
    base = recipes.get(recipe)
    if paths:
        base = replace(base, data=replace(base.data, paths=paths))
    stack = replace(base.model.stack, num_layers=layers, dropout=0.0)
    stacks = {arm: stack_of(stack, arm, length) for arm in dict.fromkeys(arms)}
    base = replace(
        base,
        data=replace(base.data, seq_len=length, batch_size=rows),
        optimizer=replace(base.optimizer, warmup_steps=max(steps // 5, 1)),
        train=replace(base.train, steps=steps, eval_every=1, eval_batches=eval_batches),
    )
    figures: dict[str, Any] = {"recipe": recipe, "dim": stack.dim, **sizes, "arms": {}}
    for arm, made in stacks.items():
        trained = train_seeds(replace(base, model=replace(base.model, stack=made)), range(seeds))
        with jax.set_mesh(trained.setup.mesh):
            validation = Validation(trained.setup)
            found = [validation(state) for state in trained.states]
        bits = [one["bits_per_byte"] for one in found]
        figures["arms"][arm] = {
            "pattern": list(made.pattern),
            "shown": {name: shown(made.mixers[name], length) for name in made.pattern},
            "parameters": count_params(trained.states[0].params)[0],
            "step_ms": 1e3 * trained.step_seconds,
            "bytes": found[0]["bytes"],
            "bits_per_byte": {"seeds": bits, **over_seeds(bits)},
            **kept_shares(trained, validation),
        }
        figures["gaps"] = gaps(figures["arms"])
        save("sparse_books", out, figures)
    return figures


def kept_shares(trained: "Trained", validation: "Validation") -> dict[str, Any]:
    """Return the share of dense attention that falls on chosen blocks and window, of each seed; {} of other attention.

    Where a predictor chooses, `kept_by_pooled` is what the same models' pooled keys would keep.
    """
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.figures.over_seeds import over_seeds
    from jaxblt.mixers import SparseAttentionConfig
    from jaxblt.training.evaluate import collect
    from jaxblt.training.metrics import sown_metrics
    from jaxblt.training.step import predict

    setup, model = trained.setup, trained.setup.eval_task.model
    stack = model.config.stack
    chosen = {name: mixer for name, mixer in stack.mixers.items() if isinstance(mixer, SparseAttentionConfig)}
    if not chosen:
        return {}
    pooled = {name: replace(mixer, predictor=None) for name, mixer in chosen.items()}
    changed = replace(stack, mixers={**stack.mixers, **pooled})
    models = {"kept": model}
    if pooled != chosen:
        models["kept_by_pooled"] = model.clone(config=replace(model.config, stack=changed))

    def step_of(task: Any) -> Any:
        def step(state: Any, batch: Any, index: Any) -> dict[str, Any]:
            side = predict(
                task, state.params, state.frozen, task.objective(jax.random.key(index), batch), {}
            )[2]
            kept = [value for name, value in sown_metrics(side).items() if name.endswith("kept")]
            return {"kept": jnp.mean(jnp.stack(kept)), "batches": jnp.ones(())}

        return jax.jit(step)

    found, most = {}, setup.recipe.train.eval_batches
    with jax.set_mesh(setup.mesh):
        for name, each in models.items():
            step = step_of(replace(setup.eval_task, model=each))
            sums = [
                collect(
                    step, state, validation.data, setup.mesh, max_batches=most, layout=setup.layout
                ).totals
                for state in trained.states
            ]
            seeds = [float(each["kept"] / each["batches"]) for each in sums]
            found[name] = {"seeds": seeds, **over_seeds(seeds)}
    return found


def stack_of(stack: "StackConfig", arm: str, length: int) -> "StackConfig":
    """Return the stack with the mixers of an arm, see `sparse_books`."""
    from jaxblt.mixers import AttentionConfig, HyenaConfig, ModalFilter, SparseAttentionConfig

    dim: Any = {"dim": stack.dim}
    heads = dim | {"num_heads": HEADS, "num_kv_heads": KEY_HEADS}
    dense, chosen = AttentionConfig(**heads), SparseAttentionConfig(**heads, block=CHOSEN, window=WINDOW)
    table: dict[str, MixerConfig] = {"attention": dense}
    if arm == "stack":
        hyena = HyenaConfig(**dim, filter=ModalFilter(max_timescale=float(length)))
        table = {"window": replace(dense, window=WINDOW), "sparse_attention": chosen, "hyena": hyena}
    elif named := re.fullmatch(r"(rule|chosen|learned)_(\d\d)", arm):
        density = 1 - int(named[2]) / 100
        table = {"attention": replace(dense, rule=rule_of(density, length))}
        if named[1] != "rule":
            pooled = length // CHOSEN / 2
            blocks = math.floor((density * length / 2 - pooled - WINDOW) / CHOSEN)
            width = chosen.predictor if named[1] == "learned" else None
            table = {"sparse_attention": replace(chosen, top_k=max(blocks, 1), predictor=width)}
    elif arm != "dense":
        raise ValueError(
            f"unknown arm {arm!r}: choose dense, stack, rule_S, chosen_S or learned_S, S of 2 digits"
        )
    return replace(stack, pattern=tuple(table), mixers=table)


def rule_of(density: float, length: int) -> "Rule":
    """Return a window and every n-th block: that share of causal pairs, four fifths of it by every n-th block."""
    from pallas_kernels.attention.rules import ByBlock, Interval, Strided

    every = math.ceil(1.25 / density)
    # The others' share that a window of W shows is 1 - (1 - W / T)^2.
    left = (density - 1 / every) / (1 - 1 / every)
    blocks = math.floor(length / BLOCK * (1 - math.sqrt(1 - left)))
    return ByBlock(Interval(max(blocks - 1, 0), 0) | Strided(every), BLOCK)


def shown(mixer: "MixerConfig", length: int) -> float | None:
    """Return the keys that tokens of a row see, as a share of those before them; None of what is no attention."""
    import numpy as np

    from experiments.benchmark.operations.sparse_attention import shares
    from jaxblt.mixers import AttentionConfig, SparseAttentionConfig
    from pallas_kernels.attention import masks

    before = np.arange(1, length + 1)
    if isinstance(mixer, SparseAttentionConfig):
        seen = np.minimum(before, mixer.top_k * mixer.block + mixer.window) + before // mixer.block
    elif not isinstance(mixer, AttentionConfig):
        return None
    elif mixer.rule is not None:
        return shares(masks.CAUSAL & mixer.rule, length)["pairs"]
    else:
        seen = np.minimum(before, mixer.window or length)
    return float(seen.sum() / before.sum())


def gaps(arms: dict[str, Any]) -> dict[str, Any]:
    """Return by how much of the first arm's bits per byte each other arm is worse, paired by seed."""
    from experiments.benchmark.figures.over_seeds import over_seeds

    first, *others = arms
    bits = {name: arms[name]["bits_per_byte"]["seeds"] for name in arms}
    pairs = {name: [a / b - 1 for a, b in zip(bits[name], bits[first], strict=True)] for name in others}
    return {name: over_seeds(more) for name, more in pairs.items()}
