"""Bad arguments and arrays of public functions, each met with one line that shows the value and the fix."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.data import BytesSource, DataConfig, make_dataset, vocab
from jaxblt.data.kmers import KmerVocab
from jaxblt.inference import generate
from jaxblt.mixers import AttentionConfig, GatedRecurrenceConfig, HyenaConfig, init_state
from jaxblt.models import StackConfig
from jaxblt.models.embeddings import ByteEmbedding, EmbeddingConfig
from jaxblt.models.stack import Stack
from jaxblt.parallel import MeshConfig, make_mesh
from jaxblt.parallel.layout import ZIGZAG
from jaxblt.patching import (
    PatcherConfig,
    byte_entropies,
    calibrate_capacity,
    calibrate_threshold,
    make_patches,
    stream_entropies,
)
from jaxblt.training.evaluate import evaluate
from jaxblt.training.start.setup import open_data
from tests.training.tiny import Letters, tiny_recipe

IDS = jnp.full((1, 16), 70, jnp.int32)
FLAT = jnp.ones((1, 16), jnp.float32)
ENTROPY = PatcherConfig(mode="entropy", threshold=0.5, block_size=16)
patches = partial(make_patches, ENTROPY, entropies=FLAT)


def embedded(ids: Any, **options: Any) -> Any:
    return ByteEmbedding(EmbeddingConfig(dim=4)).apply(
        {"params": {"bytes": jnp.ones((260, 4))}}, ids, **options
    )


def widths(x: Any, **options: Any) -> Any:
    return Stack(StackConfig(dim=8, num_layers=1, pattern=("recurrence",))).apply(
        {"params": {}}, x, **options
    )


def mixed(shape: tuple[int, ...], config: Any = GatedRecurrenceConfig(dim=8), **options: Any) -> Any:
    return config.build().apply({"params": {}}, jnp.ones(shape), **options)


ATTENTION = AttentionConfig(dim=8, num_heads=2)


def rows(**mesh: int) -> Any:
    recipe = tiny_recipe(data={"sample": "book"})
    devices = MeshConfig(**({"data": 1} | mesh)).build(jax.devices()[: max(mesh.values())])
    return open_data(recipe, devices, source=Letters())


def cut(**options: Any) -> Any:
    return make_dataset(DataConfig(sample="book", **options))


def no_logits(*_: Any, **__: Any) -> Any:
    raise AssertionError("the model runs before its ids are checked")


Cases = dict[str, tuple[Callable[[], Any], str]]
"""By name what is called, and what its error says."""
PATCHES: Cases = {
    "an id below 0": (lambda: patches(IDS.at[0, 3].set(-1)), r"ids must lie in 0\.\.259, got -1\.\.70"),
    "an id too high": (lambda: patches(IDS.at[0, 3].set(300)), r"0\.\.259, got 70\.\.300"),
    "ids that are floats": (lambda: patches(FLAT), "ids must be an integer array, got float32"),
    "ids that are a list": (lambda: patches([[70] * 16]), "ids must be an integer array, got list"),
    "ids of one axis": (
        lambda: patches(IDS[0]),
        r"axes \[rows, bytes\], got shape \(16,\): write ids\[None\]",
    ),
    "ids of three axes": (lambda: patches(IDS[None]), r"got shape \(1, 1, 16\)"),
    "an entropy of NaN": (
        lambda: make_patches(ENTROPY, IDS, entropies=FLAT.at[0, 5].set(jnp.nan)),
        "entropies must be finite, got nan in row 0 at byte 5",
    ),
    "an infinite entropy": (
        lambda: make_patches(ENTROPY, IDS, entropies=FLAT.at[0, 0].set(jnp.inf)),
        "entropies must be finite, got inf in row 0 at byte 0",
    ),
    "entropies that are whole": (
        lambda: make_patches(ENTROPY, IDS, entropies=IDS),
        "entropies must be floats in nats, got dtype int32",
    ),
    "entropies of another shape": (
        lambda: make_patches(ENTROPY, IDS, entropies=FLAT[:, :8]),
        r"entropies must have the shape of ids, \(1, 16\), got \(1, 8\)",
    ),
    "no entropies": (lambda: make_patches(ENTROPY, IDS), "mode='entropy' needs entropies: see"),
    "no threshold": (
        lambda: make_patches(PatcherConfig(block_size=16), IDS, entropies=FLAT),
        "has no threshold.*calibrate_threshold",
    ),
    "segments below 0": (
        lambda: patches(IDS, segment_ids=jnp.full((1, 16), -1, jnp.int32)),
        "1, 2, ... for documents and 0 for padding, got -1",
    ),
    "segments that are floats": (
        lambda: patches(IDS, segment_ids=FLAT),
        "segment_ids must be an integer array, got float32",
    ),
    "segments of another shape": (
        lambda: patches(IDS, segment_ids=jnp.ones((1, 8), jnp.int32)),
        r"segment_ids must have the shape of ids, \(1, 16\), got \(1, 8\)",
    ),
}
LAYERS: Cases = {
    "embedding an id below 0": (lambda: embedded(IDS - 71), r"ids must lie in 0\.\.259, got -1\.\.-1"),
    "embedding an id too high": (lambda: embedded(IDS + 230), r"0\.\.259, got 300\.\.300"),
    "embedding floats": (lambda: embedded(FLAT), "ids must be an integer array, got float32"),
    "embedding one axis": (lambda: embedded(IDS[0]), r"got shape \(16,\): write ids\[None\] for one row"),
    "embedding with holes": (lambda: embedded(IDS, segment_ids=-IDS), "0 for padding, got -70"),
    "embedding with segments of floats": (
        lambda: embedded(IDS, segment_ids=FLAT),
        "integer array, got float32",
    ),
    "a stack of another width": (
        lambda: widths(jnp.ones((1, 4, 6))),
        r"Stack takes x of shape \[rows, positions, 8\], got \(1, 4, 6\)",
    ),
    "a stack of one row": (lambda: widths(jnp.ones((4, 8))), r"\[rows, positions, 8\], got \(4, 8\)"),
    "a stack's segments of another length": (
        lambda: widths(jnp.ones((1, 16, 8)), segment_ids=IDS[:, :8]),
        r"segment_ids must have shape \(1, 16\), one for each token of x, got \(1, 8\)",
    ),
    "attention to no token": (
        lambda: mixed((1, 0, 8), ATTENTION),
        r"at least one row and one token, got x \(1, 0, 8\)",
    ),
    "attention of one row": (lambda: mixed((4, 8), ATTENTION), r"got \(4, 8\): write x\[None\] for one row"),
    "a recurrence of one row": (lambda: mixed((4, 8)), r"got \(4, 8\): write x\[None\] for one row"),
    "a mixer's segments of another length": (
        lambda: mixed((1, 16, 8), segment_ids=IDS[:, :8]),
        r"segment_ids must have shape \(1, 16\), one for each token of x, got \(1, 8\)",
    ),
    "a mixer's segments that are floats": (
        lambda: mixed((1, 16, 8), segment_ids=FLAT),
        "segment_ids must be an integer array, got float32",
    ),
    "attention's segments that are floats": (
        lambda: mixed((1, 16, 8), ATTENTION, segment_ids=FLAT),
        "segment_ids must be an integer array, got float32",
    ),
    "a mixer's positions of another length": (
        lambda: mixed((1, 16, 8), positions=IDS[:, :3]),
        r"positions must have shape \(1, 16\), one for each token of x, got \(1, 3\)",
    ),
}
ENTROPIES: Cases = {
    "entropies of an id too high": (lambda: byte_entropies(no_logits, {}, IDS + 230), r"got 300\.\.300"),
    "entropies of one axis": (lambda: byte_entropies(no_logits, {}, IDS[0]), r"got shape \(16,\)"),
    "entropies with holes": (lambda: byte_entropies(no_logits, {}, IDS, segment_ids=-IDS), "got -70"),
    "a stream of an id below 0": (lambda: stream_entropies(no_logits, {}, IDS - 71, None), r"got -1\.\.-1"),
    "a stream in chunks of 0": (
        lambda: stream_entropies(no_logits, {}, IDS, None, chunk=0),
        "at least 1, got 0",
    ),
    "a stream in half chunks": (
        lambda: stream_entropies(no_logits, {}, IDS, None, chunk=2.5),
        "chunk must be a whole number, got 2.5",
    ),
    "a mean length of 0": (lambda: calibrate_threshold(FLAT, 0.0, config=ENTROPY), "must be > 0, got 0.0"),
    "a mean length of NaN": (
        lambda: calibrate_threshold(FLAT, float("nan"), config=ENTROPY),
        "target_bytes_per_patch must be a finite number, got nan",
    ),
    "calibrating on NaN": (
        lambda: calibrate_threshold(FLAT * jnp.nan, 2.0, config=ENTROPY),
        "entropies must be finite",
    ),
    "calibrating another mode": (
        lambda: calibrate_threshold(FLAT, 2.0, config=PatcherConfig(mode="space")),
        "for mode='entropy' or 'greedy', got 'space'",
    ),
    "a quantile above 1": (
        lambda: calibrate_capacity(np.ones(4), block_size=16, quantile=1.5),
        r"quantile must lie in 0\.\.1, got 1.5",
    ),
    "a quantile of NaN": (
        lambda: calibrate_capacity(np.ones(4), block_size=16, quantile=float("nan")),
        "quantile must be a finite number, got nan",
    ),
    "a capacity in multiples of 0": (
        lambda: calibrate_capacity(np.ones(4), block_size=16, multiple=0),
        "multiple must be at least 1, got 0",
    ),
    "no block to calibrate on": (
        lambda: calibrate_capacity(np.zeros(4), block_size=16),
        "at least one full block",
    ),
}
DECODING: Cases = {
    "bytes from ids that are floats": (
        lambda: vocab.decode(np.array([70.5])),
        "ids must be whole numbers, got dtype float64",
    ),
    "bytes from an id too high": (
        lambda: vocab.decode(np.array([300])),
        r"ids must lie in 0\.\.259, got 300\.\.300",
    ),
    "letters from ids that are floats": (
        lambda: KmerVocab().decode(np.array([70.5])),
        "ids must be whole numbers, got dtype float64",
    ),
    "a state that looks ahead": (
        lambda: init_state(HyenaConfig(dim=4, causal=False), 1, capacity=8),
        "set causal=True",
    ),
    "no batch to score": (
        lambda: evaluate(no_logits, None, None, None, max_batches=0),
        "max_batches must be at least 1, got 0: None takes all",
    ),
    "half a batch to score": (
        lambda: evaluate(no_logits, None, None, None, max_batches=1.5),
        "max_batches must be a whole number, got 1.5",
    ),
}
ROWS: Cases = {
    "a mesh of 3 of 8": (lambda: make_mesh(data=3), "multiply to 3, there are 8 devices; use"),
    "a mesh that is free twice": (lambda: make_mesh(data=-1, seq=-1), "only one of data and seq can be -1"),
    "rows that do not divide along seq": (lambda: rows(seq=3), "T = 32 tokens does not divide.*pad it to 33"),
    "a batch that does not divide": (lambda: rows(data=3), "batch|rows"),
    "zig-zag rows that do not divide": (
        lambda: ZIGZAG.check(1001, 8),
        "T = 1001 .* pad it to 1008, or choose",
    ),
    "a row beyond every document": (
        lambda: cut(seq_len=200_000),
        "longer than every document .* lower seq_len, or",
    ),
    "a stride beyond the row": (lambda: cut(stride=5000), r"1..seq_len = 1..4096 to skip no byte, got 5000"),
    "an alignment that does not divide": (
        lambda: cut(packing="first_fit", alignment=100, eos=False),
        "multiple of alignment, got 4096 and 100",
    ),
    "a bucket beyond the row": (lambda: cut(packing="buckets", buckets=(5000,)), r"1..4096, got \(5000,\)"),
    "a document named twice": (
        lambda: BytesSource([b"a", b"b"], ["x"]),
        "2 documents need as many names, got 1",
    ),
}


GROUPS = {"patches": PATCHES, "layers": LAYERS, "entropies": ENTROPIES, "decoding": DECODING, "rows": ROWS}


@pytest.mark.parametrize("group", GROUPS)
def test_bad_arguments_are_told_in_one_line(group: str) -> None:
    wrong = []
    for name, (call, says) in GROUPS[group].items():
        try:
            with pytest.raises(ValueError) as error:
                call()
        except BaseException as unlike:  # of another kind, or pytest's own where nothing is raised
            wrong.append(f"{name}: {type(unlike).__name__} {unlike}")
            continue
        said = str(error.value)
        if not re.search(says, said) or "\n" in said or len(said) >= 400:
            wrong.append(f"{name}: {said!r} does not say {says!r} in one line")
    assert not wrong, "\n".join(wrong)


def test_text_is_no_bytes() -> None:
    for call in (vocab.encode, lambda text: generate(None, {}, [text], max_new_bytes=4)):
        with pytest.raises((TypeError, ValueError), match=r"bytes.*'abc'.*encode"):
            call("abc")


def test_of_a_traced_array_the_shape_alone_is_checked() -> None:
    traced = jax.eval_shape(lambda ids: patches(ids), IDS)
    assert traced.lengths.shape == (1, 1, 16)
    with pytest.raises(ValueError, match="got shape"):
        jax.eval_shape(lambda ids: patches(ids), IDS[0])
