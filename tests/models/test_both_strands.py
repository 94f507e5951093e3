"""Both strands have one answer, whatever the parameters: of rows, and of a base and its partner."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.answers import Predictions
from jaxblt.data import LabelledDataConfig
from jaxblt.data.sources import reverse_complement
from jaxblt.data.vocab import BOS, PAD, encode
from jaxblt.models import LabelHeadConfig, LabellerConfig, WordsConfig
from jaxblt.models.both_strands import find_partners, mean_of_strands, read_both
from jaxblt.models.task_heads import TaskHead, TaskHeadsConfig
from jaxblt.parallel import MeshConfig
from jaxblt.run import Run
from jaxblt.training.objectives.objectives import Classify
from jaxblt.training.recipe import Recipe, TrainConfig
from jaxblt.training.start.setup import make_task
from tests.answers.runs import BYTES, PATCHER, PATCHES
from tests.parameters import drawn
from tests.tolerances import assert_close

RECORDS = [b"GATTACA", b"acgNTRY", b"T", b"CCGTAAGCTTGCA"]
LENGTH = 16


def rows_of(records):
    ids = np.full((len(records), LENGTH), PAD, np.int32)
    segments = np.zeros(ids.shape, np.int32)
    for row, segment, record in zip(ids, segments, records, strict=True):
        row[0], row[1 : len(record) + 1] = BOS, encode(record)
        segment[: len(record) + 1] = 1
    return ids, segments


OTHERS = [reverse_complement(record) for record in RECORDS]


def test_the_other_strand_is_that_of_the_bytes_also_around_a_hole():
    ids, segments = rows_of(RECORDS)
    both = jax.jit(lambda *of: read_both(of[0], find_partners(*of)))(ids, segments)
    np.testing.assert_array_equal(both[0::2], ids)
    np.testing.assert_array_equal(both[1::2], rows_of(OTHERS)[0])
    segments[:, 3] *= -1
    found = np.asarray(jax.jit(find_partners)(ids, segments))[0]
    np.testing.assert_array_equal(found[:9], [0, 7, 6, 3, 5, 4, 2, 1, 8])


def test_a_run_calls_both_strands_the_same():
    head = LabelHeadConfig(outputs=3, pool="cls", words=WordsConfig(longest=2))
    recipe = Recipe(
        name="tiny",
        model=LabellerConfig(BYTES, head, "both"),
        data=LabelledDataConfig(paths=("none.csv",), seq_len=LENGTH, batch_size=8, classes=("a", "b", "c")),
        objective=Classify(),
        train=TrainConfig(dtype="float32"),
    )
    run = Run(recipe, 0, make_task(recipe), drawn(recipe.model.build(), rows_of(RECORDS)[0])["params"], {})
    answers = run.classify([*RECORDS, *OTHERS])
    assert isinstance(answers, Predictions)
    found = answers.probabilities
    assert found is not None
    assert_close(found[4:], found[:4])
    assert np.abs(found[0] - found[3]).max() > 1e-3
    with pytest.raises(ValueError, match="an attribution is of one reading: use mutagenesis"):
        run.attributions(RECORDS)
    with pytest.raises(ValueError, match=r"reads whole rows from both ends, and mesh.seq is 2"):
        replace(recipe, mesh=MeshConfig(seq=2))


@pytest.mark.slow(days=28, group="costly")
def test_a_base_and_its_partner_have_one_class():
    model = LabellerConfig(BYTES, LabelHeadConfig(target="positions", outputs=4), "both").build()
    ids, segments = rows_of(RECORDS + OTHERS)
    params = drawn(model, ids)
    found = np.asarray(jax.jit(model.apply)(params, ids, segment_ids=segments)[0])
    for i, record in enumerate(RECORDS):
        own, other = (found[j, 1 : len(record) + 1] for j in (i, i + len(RECORDS)))
        assert_close(other[::-1], own)


def test_each_task_has_the_mean_of_its_strands():
    said = jnp.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(
        mean_of_strands(said, jnp.zeros((2, 5), jnp.int32)), [[1.5, 2.5, 3.5], [7.5, 8.5, 9.5]]
    )
    heads = TaskHeadsConfig((TaskHead("a"), TaskHead("b", LabelHeadConfig("number", 1))))
    model = LabellerConfig(BYTES, heads, "both").build()
    ids, segments = rows_of(RECORDS)
    answers, _ = jax.eval_shape(model.apply, drawn(model, ids), ids, segment_ids=segments)
    assert {name: x.shape for name, x in answers.outputs.items()} == {"a": (4, 2), "b": (4, 1)}


def test_what_is_of_one_strand_is_refused():
    with pytest.raises(ValueError, match="patches of mode 'entropy' are of one strand"):
        LabellerConfig(PATCHES, strands="both").build(patcher=PATCHER)
