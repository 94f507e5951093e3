"""A run read back from its folder: everything that is needed to patch, score, generate or go on with the model."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxblt import answers
from jaxblt.adapters import join_params, retrievals, split_params, without_index
from jaxblt.adapters.update.row_adapters import Adapter
from jaxblt.answers.quantized import quantize_run
from jaxblt.data import vocab
from jaxblt.data.labelled import LabelledDataConfig, check_labels
from jaxblt.data.pipeline import make_dataset
from jaxblt.data.sources import DocumentSource
from jaxblt.data.splits import SplitName
from jaxblt.data.task_data import RowsConfig
from jaxblt.data.trust import check_trusted
from jaxblt.inference.decode import Decoder
from jaxblt.inference.drafts import DraftCounts, Drafts
from jaxblt.inference.sampling import SamplingConfig
from jaxblt.models.products import products_in
from jaxblt.parallel.layout import layout_of
from jaxblt.parallel.mesh import MeshConfig, built_mesh
from jaxblt.patching import PatcherConfig
from jaxblt.precision.weights import (
    from_stored,
    is_stored,
    refuse_quantized,
    shapes_as_stored,
)
from jaxblt.training.evaluate import evaluate, make_eval_step, target_ids
from jaxblt.training.recipe import Recipe, router_of
from jaxblt.training.start.base import rounded, trained_part, whole
from jaxblt.training.start.boundaries import with_target_length
from jaxblt.training.start.frozen import SUBTREE, calibrate, load_frozen, with_mean_slots
from jaxblt.training.start.placement import find_mesh, on_mesh, place_params
from jaxblt.training.start.setup import blank_inputs, boxed_params, init_params, make_task, open_data
from jaxblt.training.state import (
    BASE,
    ENTROPY,
    REFERENCE,
    Frozen,
    TrainState,
    Weights,
    content_hash,
    widen,
)
from jaxblt.training.step import Task
from jaxblt.training.stored.checkpoint import restore
from jaxblt.training.stored.fitting import check_recipe, fitting_shapes
from jaxblt.training.stored.links import check_stored
from jaxblt.training.stored.remote_run import readable
from jaxblt.training.stored.resolved import Resolved, checkpoint_dir, read_resolved


@dataclass(frozen=True)
class Run:
    """A trained model and what belongs to it.

    Attributes:
      recipe: with nothing left open; `recipe.model` and `recipe.entropy_model` are the models' configs.
      step: training steps that the parameters have seen.
      task: model, entropy model, objective and patcher, built for the rows of the recipe's data.
      params: of the model, fp32; trained parameters are laid over those of a frozen base.
      weights: which they are: "raw" as the last step left them, or "ema", their average.
      frozen: other trees that were not trained, by name: the entropy model is `frozen["entropy"]`.
      stored_base: content hash of the frozen base that the run's folder stores; None without `base_run`.
      vocabulary: the module that turns bytes into ids and back.
    """

    recipe: Recipe
    step: int
    task: Task
    params: Any
    frozen: dict[str, Frozen]
    weights: Weights = "raw"
    stored_base: str | None = None
    # Keep the module out of the fields: a run could not be pickled or copied with it
    vocabulary: ClassVar[ModuleType] = vocab

    def __repr__(self) -> str:
        """Write what a notebook shows: no parameters, which alone would fill pages."""
        recipe, patcher = self.recipe, self.patcher
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params, is_leaf=is_stored))
        lines = [f"Run {recipe.name!r} at step {self.step:,} of {recipe.train.steps:,}"]
        which = "" if self.weights == "raw" else f", their average over steps (ema {recipe.train.ema})"
        lines.append(f"  model      {type(recipe.model).__name__}, {count:,} parameters{which}")
        lines.append(f"  data       {recipe.data.batch_size} x {recipe.data.seq_len:,} bytes a batch")
        lines.append(f"  objective  {type(recipe.objective).__name__}, computed in {recipe.train.dtype}")
        if patcher is not None:
            told = "" if patcher.threshold is None else f", threshold {patcher.threshold:.4g} nats"
            lines.append(
                f"  patcher    {patcher.mode}, {patcher.slots} slots of {patcher.block_size} bytes{told}"
            )
        if self.frozen:
            lines.append(f"  frozen     {', '.join(self.frozen)}")
        return "\n".join(lines)

    @property
    def model(self) -> nn.Module:
        """The model, a Linen module: `logits, patches = run.model.apply({"params": run.params}, ids, ...)`.

        It takes any segment ids. The one of `task` may rely on rows in which documents lie as in the recipe's data.
        """
        return self.recipe.model.build(dtype=self.recipe.train.compute_dtype, patcher=self.patcher)

    @property
    def patcher(self) -> PatcherConfig | None:
        """The rule that groups bytes, threshold and capacity included; None for a model without patches."""
        return self.task.patcher

    @property
    def threshold(self) -> float | None:
        """Entropy in nats above which a patch ends; None for a model without."""
        return None if self.patcher is None else self.patcher.threshold

    @property
    def base_hash(self) -> str:
        """Content hash of the base: the frozen one, or of this run as one, which `save_peft` and `load_peft` take.

        A base and the runs over it in the same `train.dtype` give the same hash, if both or neither scan their stacks.
        """
        if self.stored_base is not None and not retrievals(self.recipe.model):
            return self.stored_base
        refuse_quantized(self.params, "a base's hash")
        dtype = self.recipe.train.compute_dtype
        products, boxed = products_in(dtype, lambda: boxed_params(self.task, self.recipe))
        # Leave out a router's index, which is stored with the base and is no part of its model
        base, shapes = (without_index(split_params(tree)[0]) for tree in (self.params, boxed))
        return content_hash(rounded(base, shapes, dtype, products))

    @property
    def entropy_model(self) -> nn.Module | None:
        """The model whose entropies cut the patches; it takes any segment ids."""
        config = self.recipe.entropy_model
        return None if config is None else config.build(dtype=self.recipe.train.compute_dtype)

    @property
    def entropy_params(self) -> Any:
        """Its parameters, fp32 with the values of bfloat16, as in training."""
        return widen(self.frozen[ENTROPY].params) if ENTROPY in self.frozen else None

    @property
    def state(self) -> TrainState:
        """Parameters and frozen trees as an evaluation step reads them; there is no optimiser."""
        zero = jnp.zeros((), jnp.int32)
        return TrainState(zero, self.params, (), zero, zero, self.frozen)

    @property
    def decoder(self) -> Decoder:
        """Model, entropy model and patcher for `jaxblt.inference.generate`.

        Raises:
          ValueError: the model or its patcher sees the future.
        """
        recipe = self.recipe
        return Decoder(recipe.model, self.patcher, recipe.entropy_model, recipe.train.compute_dtype)

    @property
    def decoder_params(self) -> dict[str, Any]:
        """The parameters that `decoder` reads: {"model": ..., "entropy": ...}."""
        return {"model": self.params, "entropy": self.entropy_params}

    def evaluate(
        self,
        split: SplitName = "test",
        *,
        data: RowsConfig | None = None,
        source: DocumentSource | None = None,
        targets: str | None = None,
        max_batches: int | None = None,
        mesh: MeshConfig | Mesh = MeshConfig(),
        trust_sources: bool = False,
    ) -> dict[str, float]:
        """Return the loss over a split: Σ nats / Σ bytes, and the same over chosen targets; log-loss over all ids.

        Args:
          split: of the data.
          data: other data than the recipe's, packed in another way or not, or the same in longer rows.
          source: documents to use instead of those that the config names.
          targets: characters such as "ACGT" for the figures that begin with "target_".
          max_batches: score so many, evenly spread over the split; all by default.
          mesh: how the devices share rows and, along `seq`, the bytes of a row.
          trust_sources: fetch URLs that the run's config names.

        Raises:
          TypeError: the mesh is none.
          ValueError: the mesh has other axes, or not as many devices as there are, or the batch or the rows do not
            divide among them.
          ValueError: packed documents cannot start where the patcher's blocks do.
          ValueError: labels are others than the run learned, or no byte is scored.
          ValueError: the data are at a URL that is not trusted.

        Warns:
          PatchOverflowWarning: blocks have fewer slots than this data asks for; see `recalibrate`.
        """
        own = self.recipe.data
        check_trusted(own, own if data is None else data, trust_sources=trust_sources or source is not None)
        devices = built_mesh(mesh)
        if isinstance(own, LabelledDataConfig) and isinstance(data, LabelledDataConfig):
            check_labels(own, data)
        recipe = self.recipe if data is None else replace(self.recipe, data=data)
        dataset = open_data(recipe, devices, split=split, mode="eval", source=source)
        task = replace(make_task(recipe), packed=True).cut_by(self.patcher)
        with jax.set_mesh(devices):
            step = make_eval_step(task, targets=target_ids(targets), seed=self.recipe.train.seed)
            params, frozen = place_params(self.recipe, self.params, self.frozen, devices)
            state = replace(self.state, params=params, frozen=frozen)
            options = {
                "layout": layout_of(recipe.model),
                "patcher": self.patcher,
                "objective": task.objective,
            }
            return evaluate(step, state, dataset, devices, max_batches=max_batches, **options)

    score = answers.score
    """Log-likelihoods of records in nats; see `jaxblt.answers.score`."""
    rank_bytes = answers.rank_bytes
    """The likeliest ids at each place of records; see `jaxblt.answers.rank_bytes`."""
    embed = answers.embed
    """Hidden states of records, by layer and pool; see `jaxblt.answers.embed`."""
    classify = answers.classify
    """Labels of records, by a run that was fine-tuned on labels; see `jaxblt.answers.classify`."""
    variants = answers.variants
    """Log-likelihood ratios of the variants of a VCF file, both strands; see `jaxblt.answers.variants`."""
    mutagenesis = answers.mutagenesis
    """The effect of every single substitution of each record; see `jaxblt.answers.mutagenesis`."""
    attributions = answers.attributions
    """What each byte adds to its record's answer; see `jaxblt.answers.attributions`."""
    quantize = quantize_run
    """The run with kernels of products in 8 or 4 bits; see `jaxblt.answers.quantized.quantize_run`."""

    def generate(
        self,
        prompts: Sequence[bytes],
        *,
        max_new_bytes: int | Sequence[int],
        sampling: SamplingConfig | Sequence[SamplingConfig] = SamplingConfig(),
        seed: int | Sequence[int] = 0,
        alphabet: bytes | Sequence[bytes | None] | None = None,
        adapters: Adapter | Sequence[Adapter] = None,
        drafts: Drafts | None = None,
        report: Callable[[DraftCounts], None] | None = None,
        as_trained: bool = True,
        mesh: MeshConfig | Mesh | None = None,
    ) -> list[bytes]:
        """Return the bytes that follow each prompt; see `jaxblt.inference.generate`.

        Args:
          prompts: may be empty; a BOS comes before each.
          max_new_bytes: bytes to draw at the most, for all prompts or for each.
          sampling: how a byte is drawn, for all prompts or for each.
          seed: for all prompts or for each.
          alphabet: bytes that may be drawn, such as b"ACGT"; None for all.
          adapters: of a run with a router.
          drafts: bytes to guess and to check in one call, such as `Drafts(count=8)`; None draws byte by byte.
          report: called with what the drafts were good for, when all bytes are drawn.
          as_trained: prompts have the case of the run's data; False takes every byte as it is.
          mesh: of the devices that decode; None for the one in force, or one device.

        Raises:
          ValueError: as of `jaxblt.inference.generate`, or the mesh does not suit the devices.
        """
        options = {"max_new_bytes": max_new_bytes, "sampling": sampling, "seed": seed}
        options |= {"alphabet": alphabet, "adapters": adapters, "as_trained": as_trained, "mesh": mesh}
        options |= {"drafts": drafts, "report": report}
        return [
            b"".join(parts) for parts in zip(*answers.continuations(self, prompts, **options), strict=True)
        ]

    def recalibrate(
        self,
        data: RowsConfig | None = None,
        *,
        split: SplitName = "train",
        source: DocumentSource | None = None,
        bytes_per_patch: float | None = None,
        trust_sources: bool = False,
    ) -> "Run":
        """Return the run with the capacity, and on request the threshold, that other data ask for.

        The parameters are the same. Another capacity changes how many unused slots end a block, which are time to
        convolutions over patches; another threshold changes which bytes a patch holds. The threshold of learned patches
        is the router's theta, and they get slots for their mean length and a quarter more.

        Args:
          data: to sample, up to 256 KB; the recipe's by default.
          split: of the data.
          source: documents to use instead of those that the config names.
          bytes_per_patch: mean length to find a threshold for. None keeps the threshold; of learned patches it is the
            recipe's length.
          trust_sources: fetch URLs that the run's config names.

        Raises:
          ValueError: the run has no patcher, its mode reads no threshold, or the length is out of reach.
          ValueError: the data are at a URL that is not trusted.
        """
        if self.patcher is None:
            raise ValueError(f"run {self.recipe.name!r} has no patcher to calibrate: its model reads bytes")
        learned = self.patcher.mode == "learned"
        if learned and router_of(self.recipe.model).plain:
            raise ValueError(
                "a plain router cuts where its score is above 1/2: it has no threshold to calibrate"
            )
        if bytes_per_patch is not None and self.patcher.mode not in ("entropy", "greedy", "learned"):
            raise ValueError(
                f"bytes_per_patch={bytes_per_patch} needs a threshold to calibrate, and mode={self.patcher.mode!r} "
                "has none: leave it None for the capacity alone"
            )
        own = self.recipe.data
        check_trusted(own, own if data is None else data, trust_sources=trust_sources or source is not None)
        patcher = replace(self.patcher, capacity=None)
        if bytes_per_patch is not None:
            patcher = replace(patcher, threshold=None, margin=None)
        config = self.recipe.data if data is None else data
        length = self.recipe.bytes_per_patch if learned and bytes_per_patch is None else bytes_per_patch
        recipe = replace(self.recipe, data=config, patcher=patcher, bytes_per_patch=length)
        mesh = MeshConfig(data=1).build(jax.local_devices()[:1])
        rows = make_dataset(config, split=split, mode="eval", source=source)
        params, kept = self.params, self.recipe
        with jax.set_mesh(mesh):
            if learned:
                params = with_target_length(recipe, params, self.frozen, rows, mesh)
                patcher, kept = with_mean_slots(recipe), replace(kept, bytes_per_patch=length)
            else:
                patcher = calibrate(recipe, rows, mesh, self.frozen)
        recipe = replace(kept, patcher=patcher)
        return replace(self, recipe=recipe, task=self.task.cut_by(patcher), params=params)


def load(
    run_dir: str | os.PathLike[str],
    *,
    step: int | Literal["best"] | None = None,
    dtype: str | None = None,
    weights: Weights | None = None,
    mesh: MeshConfig | Mesh | None = None,
) -> Run:
    """Read a run's model, parameters, patcher, threshold and vocabulary.

    Args:
      run_dir: the folder that was given to `fit`, here or elsewhere (`s3://`, `gs://`, `hf://`).
      step: of the checkpoint; None for the newest that can be read, "best" for that of the best evaluation.
      dtype: to compute in, "bfloat16" or "float32"; None for the recipe's.
      weights: "ema" for the average of the parameters, "raw" for those of the step itself; None for the average if the
        run has one.
      mesh: each device reads its own part of the parameters, as `fsdp` and `tensor` split them; None for one device.
        Give the same mesh to what the run answers. What a run is trained over, its base, is read whole.

    The folder need not be trusted: no code of it runs, nothing outside it is read, and nothing larger than its files
    is built. Its checkpoints may be a link, see `jaxblt.training.stored.links.check_stored`.

    Raises:
      FileNotFoundError: the folder holds no run, or no checkpoint of that step.
      ValueError: the run was made by another version of the configs, or its config does not fit its checkpoints.
      ValueError: its checkpoints lead to another run's, or it has no average.
      CheckpointCorrupt: no checkpoint can be read.
    """
    asked = "newest" if step is None else "all" if step == "best" else step
    with readable(run_dir, asked) as folder:
        return _load(folder, step, dtype, weights, None if mesh is None else find_mesh(mesh))


def _load(
    run_dir: Path,
    step: int | Literal["best"] | None,
    dtype: str | None,
    weights: Weights | None,
    mesh: Mesh | None,
) -> Run:
    resolved = read_resolved(run_dir)
    recipe = resolved.recipe
    check_recipe(recipe, frozen=ENTROPY in resolved.frozen)
    check_stored(run_dir)  # before Orbax looks for steps, which opens files
    if dtype is not None:
        recipe = replace(recipe, train=replace(recipe.train, dtype=dtype))
    task = make_task(recipe)
    base = load_frozen(run_dir, resolved._replace(frozen=_base_alone(resolved)))
    shapes = partial(_param_shapes, task, recipe, base, mesh)
    weights = _weights(recipe, run_dir, weights)
    read = partial(restore, checkpoint_dir(run_dir), shapes, subtree=SUBTREE[weights])
    restored = read(step=None if step == "best" else step)
    if step == "best":
        restored = read(step=_best_step(restored.meta, run_dir))
    others = {name: tree for name, tree in resolved.frozen.items() if name not in (*base, REFERENCE)}
    frozen = load_frozen(run_dir, resolved._replace(frozen=others), step=restored.step)
    stored_base = None if recipe.base_run is None else resolved.frozen[BASE]
    params = whole(from_stored(restored.state), base)
    return Run(recipe, restored.step, task, params, frozen, weights, stored_base)


def _weights(recipe: Recipe, run_dir: str | os.PathLike[str], asked: Weights | None) -> Weights:
    """Choose what to read: the weights asked for, or those that the run is judged by."""
    if asked not in (None, *SUBTREE):
        raise ValueError(f"weights must be 'ema', 'raw' or None, got {asked!r}")
    if asked == "ema" and recipe.train.ema is None:
        raise ValueError(f"{run_dir} has no average of its parameters (train.ema is None): use weights='raw'")
    return recipe.train.weights if asked is None else asked


def _base_alone(resolved: Resolved) -> dict[str, str]:
    """Return the content hash of the base that the run's recipe asks for, by its name; nothing without one."""
    if resolved.recipe.base_run is None and not resolved.recipe.freeze:
        return {}
    if BASE not in resolved.frozen:
        raise ValueError(
            "the run's recipe has a base_run, or freezes parameters, and its config.json names no frozen 'base'"
        )
    return {BASE: resolved.frozen[BASE]}


def _best_step(meta: dict[str, Any], run_dir: str | os.PathLike[str]) -> int:
    """Return the step of the best evaluation, of which the newest checkpoint tells."""
    best = meta.get("best")
    if not best:
        raise ValueError(
            f"{run_dir} has no best step: it was trained without evaluations; name a step, or None"
        )
    return int(best[0][1])


def _param_shapes(task: Task, recipe: Recipe, base: dict[str, Frozen], mesh: Mesh | None, stored: Any) -> Any:
    """Return shapes of the parameters that were trained, if those stored fit the model over its base.

    With a mesh they have shardings.
    """
    data = recipe.data
    below = jax.eval_shape(lambda: base[BASE].params) if BASE in base else {}
    held = from_stored(stored)
    found = fitting_shapes(
        lambda: trained_part(recipe, init_params(task, data, recipe.train.seed)),
        lambda both: task.model.apply({"params": join_params(*both)}, **blank_inputs(task, data)),
        (below, held),
    )
    shapes = shapes_as_stored(found, held)
    return shapes if mesh is None else on_mesh(recipe, shapes, mesh)
