"""Runs that earlier commits wrote load today, with the figures that those commits found.

Each archive holds a run of two steps on `Letters`, without TensorBoard's events, and `figures.json`: the commit that
wrote it, its loss of a batch, and the bytes that it generated greedily.

The threshold of `byte_patched` is one rounding away from the entropy of a byte, so its loss depends on the processor:
7.68685 or 7.68666 at the commit that wrote it, with 168 or 167 patches. Its figures are that commit's for a threshold
in a gap between entropies, 7e-6 nats from both.
"""

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import jaxblt
from jaxblt.inference import SamplingConfig, generate
from jaxblt.run import Run
from tests.training.tiny import Letters

ARCHIVES = sorted((Path(__file__).parent / "earlier").glob("*.zip"))


@pytest.mark.slow(days=7, group="runs of earlier commits")
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.stem)
def test_loss_and_generated_bytes_are_those_of_the_commit_that_wrote_it(
    archive: Path, tmp_path: Path
) -> None:
    zipfile.ZipFile(archive).extractall(tmp_path)
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    run = jaxblt.load(tmp_path)
    if "threshold" in figures:
        assert run.threshold == figures["threshold"]
        run = _cut_at(run, figures["threshold_in_a_gap"])
    found = run.evaluate("validation", source=Letters(), max_batches=1)
    assert found["bits_per_byte"] == pytest.approx(figures["bits_per_byte"], rel=1e-5)
    greedy = SamplingConfig(temperature=0.0)
    (text,) = generate(run.decoder, run.decoder_params, [b"ACGTAC"], max_new_bytes=8, sampling=greedy)
    assert text.hex() == figures["generated"]


def _cut_at(run: Run, threshold: float) -> Run:
    patcher = replace(run.patcher, threshold=threshold)
    recipe = replace(run.recipe, patcher=patcher)
    return replace(run, recipe=recipe, task=run.task.cut_by(patcher))


def test_runs_of_three_commits_are_there() -> None:
    assert [path.stem for path in ARCHIVES] == ["adapter_over_a_base", "byte_lm", "byte_patched"]
