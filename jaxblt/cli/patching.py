"""Parts of the patch script: a file's bytes, the entropies of a run's model, patches, pictures."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.data.letters import letters_of
from jaxblt.data.sources import DocumentSource, FastaSource, TextSource, read_document
from jaxblt.data.sources.files import expand
from jaxblt.data.sources.labelled import FASTA, ending
from jaxblt.data.task_data import RowsConfig
from jaxblt.data.vocab import encode
from jaxblt.models import ByteLMConfig
from jaxblt.outputs import check_output, whole_file
from jaxblt.patching import (
    PatcherConfig,
    Patches,
    calibrate_threshold,
    init_contexts,
    make_patches,
    plot_boundaries,
    plot_entropies,
    render_patches,
    stream_entropies,
    warn_overflow,
)
from jaxblt.patching.rules import MIDDLE
from jaxblt.run import Run
from jaxblt.training.start.frozen import bounded_context
from jaxblt.training.state import ENTROPY, Frozen, Step, freeze, widen


@dataclass(frozen=True)
class EntropyModel:
    """An entropy model as training runs it, and the patcher of the run that it came with, if any.

    Attributes:
      config: of the model.
      frozen: its parameters, rounded as in a run that they cut patches for.
      patcher: of the run.
      context: bytes that the model sees at the most; None without a bound (see `jaxblt.patching.contexts`).
      data: of its run, whose case a file is read in.
    """

    config: ByteLMConfig
    frozen: Frozen
    patcher: PatcherConfig | None
    context: int | None = None
    data: RowsConfig | None = None

    def entropies(self, ids: np.ndarray, *, chunk: int = 1024) -> np.ndarray:
        """Return entropies in nats of predictions at a document's ids, chunk after chunk."""
        model = self.config.build()
        start = lambda rows, capacity: model.init_state(rows, num_bytes=capacity)  # noqa: E731
        state = init_contexts(start, 1, len(ids), self.context)
        stream = partial(stream_entropies, self._apply, chunk=min(chunk, len(ids)), context=self.context)
        return np.asarray(jax.jit(stream)(widen(self.frozen.params), jnp.asarray(ids)[None], state))[0]

    def _apply(self, params: Any, ids: Any, state: Any, *, segment_ids: Any) -> Any:
        model = self.config.build()
        return model.apply({"params": params}, ids, state, segment_ids=segment_ids, method="stream")


@dataclass(frozen=True)
class RoutedModel:
    """A byte-patched model whose own router cuts patches.

    Attributes:
      run: of the model, in fp32.
      entropy: the entropy model whose entropies the router scores by; None for one that reads none.
    """

    run: Run
    entropy: EntropyModel | None

    @property
    def patcher(self) -> PatcherConfig:
        """The patcher of the run."""
        assert self.run.patcher is not None
        return self.run.patcher

    @property
    def data(self) -> RowsConfig:
        """The data of the run, whose case a file is read in."""
        return self.run.recipe.data

    def entropies(self, ids: np.ndarray) -> np.ndarray:
        """Return the router's p at a document's ids, in one pass, as the patcher reads it."""
        rated = None if self.entropy is None else jnp.asarray(self.entropy.entropies(ids))[None]
        route = jax.jit(partial(self.run.model.apply, method="route"))
        return np.asarray(route({"params": self.run.params}, jnp.asarray(ids)[None], entropies=rated)[0])[0]


def load_patching_model(run_dir: str, step: Step | None = None) -> EntropyModel | RoutedModel:
    """Read what cuts patches: a run's router or entropy model, or a byte language model's run itself.

    Raises:
      ValueError: the run has neither.
    """
    import jaxblt

    run = jaxblt.load(run_dir, step=step, dtype="float32")
    own = None
    if run.entropy_model is not None and ENTROPY in run.frozen:
        context = None if run.patcher is None else run.patcher.entropy_context
        frozen = run.frozen[ENTROPY]
        own = EntropyModel(run.recipe.entropy_model, frozen, run.patcher, context, run.recipe.data)
    if run.patcher is not None and run.patcher.mode == "learned":
        return RoutedModel(run, own)
    if own is not None:
        return own
    if not isinstance(run.recipe.model, ByteLMConfig):
        raise ValueError(f"{run_dir} has no entropy model: name a run of a byte language model")
    context = bounded_context(run.recipe.model, run.recipe.data.seq_len)
    return EntropyModel(run.recipe.model, freeze(run.params, jnp.bfloat16), None, context, run.recipe.data)


def with_context(model: EntropyModel | RoutedModel, context: int | None) -> EntropyModel | RoutedModel:
    """Return the model, whose entropy model sees so many bytes."""
    if isinstance(model, EntropyModel):
        return replace(model, context=context)
    return model if model.entropy is None else replace(model, entropy=replace(model.entropy, context=context))


def check_model(
    model: EntropyModel | RoutedModel | None, *, plot: str | None, entropies_out: str | None
) -> None:
    """Raise ValueError if a picture or entropies are asked for that no model is there for."""
    if model is None and (plot is not None or entropies_out is not None):
        raise ValueError("--plot and --entropies-out need an entropy model: name a run with --run-dir")
    if isinstance(model, RoutedModel) and entropies_out is not None:
        raise ValueError(
            "--entropies-out needs an entropy model, and the run cuts patches by a router: leave it out"
        )


def patcher_of(model: EntropyModel | RoutedModel | None, changes: Mapping[str, Any]) -> PatcherConfig:
    """Return the run's patcher with fields changed, or one of another mode that is asked for.

    A margin is of its threshold: another threshold has none.
    """
    own = None if model is None else model.patcher
    if own is None:
        return PatcherConfig(**{"mode": "space" if model is None else "entropy", **changes})
    mode = changes.get("mode", own.mode)
    if own.mode == "learned" and mode in ("entropy", "greedy", "optimal", "length_constrained"):
        raise ValueError(
            f"mode {mode!r} reads entropies, and the run cuts patches by a router: name a run with an entropy model"
        )
    if mode == own.mode:
        kept = {"margin": None} if "threshold" in changes else {}
        return replace(own, **{**kept, **changes})
    kept: dict[str, Any] = {"block_size": own.block_size}
    if mode not in ("static", "space", "byte"):
        kept["entropy_context"] = own.entropy_context
    if own.mode == "entropy" and mode in ("optimal", "length_constrained"):
        kept["threshold"] = own.threshold
    return PatcherConfig(**{**kept, **changes})


def open_file(file: str, data: RowsConfig | None = None) -> DocumentSource:
    """Open the documents of a text or FASTA file, in the case of a run's data if there are any."""
    is_fasta = (ending(Path(file)) or ending(expand(file)[0])) in FASTA
    source = FastaSource((file,)) if is_fasta else TextSource((file,))
    return source if data is None else letters_of(data, of_fasta=is_fasta).open(source)


def chosen(source: DocumentSource, record: str | None) -> list[int]:
    """Return the documents of a file: all, or the one of that name.

    Raises:
      ValueError: no document has the name.
    """
    names = list(source.names)
    if record is None:
        return list(range(len(names)))
    if record not in names:
        near = difflib.get_close_matches(record, names, n=3, cutoff=0.3) or names[:3]
        raise ValueError(f"--record {record!r} is none of the file's {len(names)}: perhaps {', '.join(near)}")
    return [names.index(record)]


def read_ids(source: DocumentSource, i: int, start: int, length: int | None) -> np.ndarray:
    """Return BOS and the ids of bytes [start, start + length) of document i.

    Without a length they are all from `start`.

    Raises:
      ValueError: the range leaves the document, or holds no byte.
    """
    size = int(source.lengths[i])
    stop = size if length is None else start + length
    if not start < stop <= size:
        raise ValueError(
            f"bytes [{start}, {stop}) leave {source.names[i]!r}, which has {size} bytes: lower --start or --length"
        )
    return encode(source.read(i, start, stop), bos=True)


def segment(config: PatcherConfig, ids: np.ndarray, entropies: np.ndarray | None) -> Patches:
    """Cut one row into patches, as where blocks have too few slots; see `warn_of_refusals`."""
    if config.needs_entropies and entropies is None:
        raise ValueError(f"mode {config.mode!r} reads entropies: name a run with --run-dir")
    if config.has_threshold and config.threshold is None:
        assert entropies is not None
        rule = config if config.mode in ("entropy", "greedy") else PatcherConfig(block_size=config.block_size)
        hint = calibrate_threshold(entropies[None], 4.5, config=rule)
        raise ValueError(
            f"mode {config.mode!r} needs --threshold; {hint:.4f} gives patches of 4.5 bytes here"
        )
    rows = None if entropies is None else jnp.asarray(entropies)[None]
    return make_patches(config, jnp.asarray(ids)[None], entropies=rows)


def warn_of_refusals(config: PatcherConfig, patches: Patches) -> None:
    """Warn, with the figures, where blocks have fewer slots than the file asks for."""
    refused = int(np.sum(patches.overflow))
    wanted = int(np.sum(np.asarray(patches.lengths) > 0)) + refused
    warn_overflow(refused, wanted, capacity=config.slots, block_size=config.block_size)


def report(
    ids: np.ndarray, patches: Patches, entropies: np.ndarray | None, show: int, *, routed: bool = False
) -> str:
    """Return the passage with its patches, and their statistics; `entropies` are p of a router if `routed`."""
    lengths = np.asarray(patches.lengths).ravel()
    lengths = lengths[lengths > 0]
    lines = [
        render_patches(ids, patches)[:show],
        "",
        f"{len(ids)} bytes (BOS included), {len(lengths)} patches, {lengths.mean():.2f} bytes a patch",
        f"patch length: median {np.median(lengths):.0f}, 99th percentile {np.percentile(lengths, 99):.0f}, "
        f"longest {lengths.max()}; boundaries refused for want of slots: {int(np.sum(patches.overflow))}",
    ]
    if entropies is not None and routed:
        lines.append(
            f"p: mean {entropies.mean():.3f}, above 1/2 at {(entropies > MIDDLE).mean():.2%} of bytes"
        )
    elif entropies is not None:
        lines.append(
            f"entropy: mean {entropies.mean():.3f} nats ({entropies.mean() / np.log(2):.3f} bits) a byte"
        )
    return "\n".join(lines)


def check_outputs(plot: str | None, entropies_out: str | None, **options: Any) -> None:
    """Check that the files of a picture and of entropies can be written.

    Options are those of `check_output`.
    """
    note = None if entropies_out is None else f"{entropies_out}.json"
    for option, path in (("--plot", plot), ("--entropies-out", entropies_out), ("--entropies-out", note)):
        if path is not None:
            check_output(option, path, **options)


def draw(
    path: str, ids: np.ndarray, entropies: np.ndarray, config: PatcherConfig, *, routed: bool = False
) -> None:
    """Draw a picture of entropies, or of a router's p if `routed`, and boundaries as PNG."""
    patches = segment(config, ids, entropies)
    if routed:
        figure = plot_boundaries(ids, entropies, patches)
    else:
        threshold = config.threshold if config.mode == "entropy" else None
        figure = plot_entropies(ids, entropies, patches, threshold)
    with whole_file(path) as partial_path:
        figure.savefig(partial_path, format="png", dpi=110)


def write_all(path: str, source: DocumentSource, model: EntropyModel) -> None:
    """Write the entropies of every document, in the form that `DataConfig.entropies` reads."""
    from jaxblt.data import write_entropies

    documents = (model.entropies(encode(read_document(source, i), bos=True)) for i in range(len(source)))
    write_entropies(path, source, documents, model=model.frozen.content_hash, context=model.context)
