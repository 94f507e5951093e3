"""A run with kernels of its products in 8 or 4 bits."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxblt.answers.protocol import TrainedRun
from jaxblt.answers.reading import answer, make_reader
from jaxblt.answers.records import Sequences, open_records
from jaxblt.answers.score import target_counts
from jaxblt.data.batch import Batch
from jaxblt.precision.weights import (
    SCHEMES,
    Chooser,
    ProductSite,
    Scheme,
    find_products,
    input_scales,
    join_inputs,
    quantize,
    quantize_factors,
    record_inputs,
    to_stored,
)
from jaxblt.random_keys import make_key
from jaxblt.training.start.setup import boxed_params, make_task
from jaxblt.training.state import ENTROPY, Frozen, content_hash
from jaxblt.training.step import Task, find_entropies, predict

Path = tuple[str, ...]
Products = Mapping[Path, ProductSite]
"""Products whose kernels may be quantised, by path."""


def quantize_run[R: TrainedRun](
    run: R,
    scheme: Scheme,
    *,
    products: Collection[Path] | None = None,
    keep: Sequence[str] = (),
    entropy: bool = False,
    adapters: bool = False,
    calibration: Sequences | None = None,
    chooser: Chooser | None = None,
) -> R:
    """Return a run whose products read their kernels in 8 or 4 bits; all else is as it was.

    Its methods, `jaxblt.inference` and the engine take it as any run. It cannot be trained.

    Args:
      run: a trained run.
      scheme: "int8", "int4", "fp8", or "w8a8" with activations in 8 bits as well.
      products: paths of those that are quantised; None for all of `products_of`.
      keep: patterns of paths of products that stay as they are, such as "stack/*/mixer/*".
      entropy: quantise the entropy model too, which moves some boundaries of patches, see `count_flips`. It is never
        calibrated: its activations have scales of each token.
      adapters: hold V and U of the quantised products' adapters in int8 too, whatever the scheme of kernels; routers
        keep their dtype.
      calibration: records that ranges of activations are chosen on ("w8a8"); None for scales of each token.
      chooser: of the ranges, "mse" by default; see `jaxblt.precision.weights.choose_range`.

    Raises:
      ValueError: the run is quantised already, a path or pattern names no product, patterns keep all of them, there
        is no adapter to quantise, or an option does not suit the scheme.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme must be one of {', '.join(map(repr, SCHEMES))}, got {scheme!r}")
    if chooser is not None and calibration is None:
        raise ValueError(f"chooser={chooser!r} needs records to choose ranges on: give calibration")
    if entropy and ENTROPY not in run.frozen:
        raise ValueError(f"run {run.recipe.name!r} has no entropy model to quantise: leave entropy out")
    found = products_of(run)
    if products is not None and (unknown := [path for path in products if path not in found]):
        raise ValueError(
            f"products name {unknown[0]!r}, which is none of the {len(found)} that can be quantised, such as "
            f"{min(found, default=())!r}"
        )
    found = without_kept(found, keep)
    asked = {path: site for path, site in found.items() if products is None or path in products}
    inputs = None if calibration is None else calibrate(run, calibration, chooser or "mse")
    params = quantize(run.params, asked, scheme, inputs=inputs)
    if adapters:
        params = quantize_factors(params, asked)
    frozen = dict(run.frozen)
    if entropy:
        frozen[ENTROPY] = _quantized_entropy(run, scheme)
    return replace(run, params=params, frozen=frozen)


def products_of(run: TrainedRun) -> dict[Path, ProductSite]:
    """Return the products of a run's model whose kernels may be quantised, by path."""
    recipe = run.recipe
    trace = partial(boxed_params, make_task(recipe), recipe)
    return find_products(recipe.train.compute_dtype, trace)[0]


def without_kept(products: Products, keep: Sequence[str]) -> dict[Path, ProductSite]:
    """Return the products whose paths match no pattern.

    Raises:
      ValueError: a pattern matches none, or the patterns match all.
    """
    names = {"/".join(path): path for path in products}
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"keep={pattern!r} names none of the {len(names)} products that can be quantised, such as "
                f"{min(names, default='none')!r}"
            )
    kept = {path for name, path in names.items() if any(fnmatchcase(name, pattern) for pattern in keep)}
    if kept and len(kept) == len(products):
        raise ValueError(f"keep={list(keep)} names all {len(kept)} products, and none is left to quantise")
    return {path: site for path, site in products.items() if path not in kept}


def _quantized_entropy(run: TrainedRun, scheme: Scheme) -> Frozen:
    """Return the entropy model with quantised kernels, and the hash of what a folder keeps of it."""
    config, dtype = run.recipe.entropy_model, run.recipe.train.compute_dtype
    assert config is not None
    ids = jax.ShapeDtypeStruct((1, 16), "int32")
    products, _ = find_products(
        dtype, lambda: jax.eval_shape(config.build(dtype=dtype).init, make_key(0), ids)
    )
    params = quantize(run.frozen[ENTROPY].params, products, scheme)
    return Frozen(params, content_hash(to_stored(params)))


def calibrate(run: TrainedRun, sequences: Sequences, chooser: Chooser) -> dict[Path, Float[Array, "*#L"]]:
    """Return scales of the activations that each product reads on these records."""
    reader = make_reader(run, window=None, batch_size=1)
    source = open_records(sequences, run.recipe.data)
    calls = answer(reader, partial(_inputs, reader.task), source, target_counts(source, run.recipe.data))
    return input_scales(join_inputs([sown for _, _, sown in calls]), chooser)


@partial(jax.jit, static_argnums=0)
def _inputs(task: Task, params: Any, frozen: Any, batch: Batch) -> Any:
    entropies = find_entropies(task, frozen, batch)
    with record_inputs():
        _, _, sown = predict(
            task, params, frozen, replace(batch, entropies=entropies), {}, collections=("intermediates",)
        )
    return sown["intermediates"]
