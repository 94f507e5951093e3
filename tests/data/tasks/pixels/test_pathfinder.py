"""Pathfinder: its statistics are those of the original program, and its labels are true."""

import io
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy import ndimage

from jaxblt.data import make_dataset
from jaxblt.data.draws import Draws
from jaxblt.data.task_data import TaskDataConfig
from jaxblt.data.tasks import Pathfinder
from jaxblt.data.tasks.pixels import draw_sheet, pathfinder
from jaxblt.data.vocab import OFFSET

CONNECTED = np.ones((3, 3), bool)
label_parts: Any = ndimage.label


def drawn(task, count, seed=0):
    pictures = [task.picture(Draws(seed, number)) for number in range(count)]
    return np.stack([p.pixels for p in pictures]), np.array([p.label for p in pictures])


@pytest.mark.slow(days=28, group="costly")
@pytest.mark.parametrize(
    ("task", "count", "mean", "deviation", "lit", "spread"),
    [
        (Pathfinder(), 120, 20.109, 51.009, 349.1, 39.3),
        pytest.param(
            Pathfinder.path_x(),
            6,
            7.700,
            35.142,
            2209.9,
            79.3,
            marks=pytest.mark.slow(days=28, group="costly", turn="data/tasks/pixels"),
        ),
    ],
    ids=["32", "128"],
)
def test_images_are_those_of_the_original_program(task, count, mean, deviation, lit, spread):
    """Its statistics are of 2,400 and of 24 images; bounds are four standard errors of a mean over `count`."""
    pixels, labels = drawn(task, count)
    lights = (pixels > 0).sum((1, 2))
    error = spread / lit / count**0.5 + spread / lit / 24**0.5 * (count < 24)
    assert lights.mean() == pytest.approx(lit, rel=4 * error)
    assert pixels.mean() == pytest.approx(mean, rel=6 * error)
    assert pixels.std() == pytest.approx(deviation, rel=3 * error)
    assert (pixels.max((1, 2)) == 255).all()
    assert set(labels) == {0, 1}
    if count > 100:
        assert 0.36 < labels.mean() < 0.64
        assert lights.std() == pytest.approx(spread, rel=0.25)


def test_a_label_says_whether_both_discs_lie_on_one_contour():
    """By a flood fill of images in which the two contours keep apart; a disc is where 3 x 3 pixels are bright."""
    task = Pathfinder(size=64, contours=(5,), short_contours=0, seed_distance=14, marker_radius=2.5)
    told = 0
    for pixels, label in zip(*drawn(task, 60), strict=True):
        parts, count = label_parts(ndimage.binary_dilation(pixels > 60, CONNECTED, 2), CONNECTED)
        discs, found = label_parts(ndimage.minimum_filter(pixels, 3) > 120, CONNECTED)
        if count != 2 or found != 2:
            continue
        ends = [parts[discs == number].max() for number in (1, 2)]
        assert (ends[0] == ends[1]) == label
        told += 1
    assert told > 20


def test_a_row_is_the_image_and_answers_behind_its_last_pixel():
    task = Pathfinder(contours=(3,))
    picture, example = task.picture(Draws(5)), task.draw(Draws(5))
    assert np.array_equal(example.inputs - OFFSET, picture.pixels.reshape(-1))
    assert np.array_equal(example.targets[:-1], example.inputs[1:])
    assert example.targets[-1] - OFFSET == picture.label
    assert np.flatnonzero(example.scored).tolist() == [task.length - 1]
    data = TaskDataConfig(task=task, seq_len=task.length, batch_size=4, labels="symbol")
    batch = make_dataset(data).batch(0)
    assert batch.inputs.shape == (4, 1024)
    assert set(np.asarray(batch.labels)) <= {0, 1}


def test_the_largest_images_have_their_rows():
    task = Pathfinder.path_256()
    picture = task.picture(Draws(0))
    assert picture.pixels.shape == (256, 256)
    assert task.length == 65_536
    edge = task.padding
    assert not picture.pixels[:edge].any()
    assert not picture.pixels[:, -edge:].any()


def test_a_sheet_shows_the_classes_row_by_row():
    task = Pathfinder(contours=(3,), short_contours=0)
    examples = task.open("train", seed=3)
    sheet = read_png(draw_sheet(examples, 2, columns=3, scale=2))[::2, ::2]
    assert sheet.shape == (2 * 33 + 1, 3 * 33 + 1)
    shown = [examples.example(number) for number in range(100)]
    for label in (0, 1):
        images = [e.inputs - OFFSET for e in shown if e.targets[-1] - OFFSET == label]
        for x, image in enumerate(images[:3]):
            top, left = 33 * label + 1, 33 * x + 1
            assert np.array_equal(sheet[top : top + 32, left : left + 32].reshape(-1), image)


def read_png(file):
    """Return grey levels by matplotlib's own reader."""
    return (plt.imread(io.BytesIO(file)) * 255).round().astype(np.uint8)


def test_contours_that_find_no_room_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pathfinder, "LONG_TRIES", 20)
    with pytest.raises(ValueError, match="no room for two contours of 40 segments in 20 tries at size = 32"):
        Pathfinder(contours=(40,)).picture(Draws(0, 0))
