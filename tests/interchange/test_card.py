"""Cards of runs of one's own: what the run and its log say, and what the caller adds."""

import shutil

import pytest

from jaxblt.interchange.card import make_card


@pytest.mark.slow(days=28, group="costly")
def test_a_card_has_the_last_evaluation_of_the_log(files, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(files / "bytes", folder)
    assert "## Figures" not in make_card(folder)
    lines = ('{"step": 3, "validation/bits_per_byte": 2.5}', '{"step": 7, "validation/bits_per_byte": 2.25}')
    later = '{"step": 9, "validation/bits_per_byte": 1.5}'  # Of a checkpoint that is not there
    (folder / "metrics.jsonl").write_text(
        "\n".join((*lines, '{"step": 8, "bits_per_byte": 1.0}', later)) + "\n"
    )
    card = make_card(folder, licence="CC0 1.0", limits="Anything but tests.")
    assert "2.250" in card
    assert "2.500" not in card
    assert "1.500" not in card
    for line in ("- licence: CC0 1.0", "Anything but tests.", "- 7 of "):
        assert line in card
