"""Labelled images: splits, views, and what is refused."""

import lzma

import numpy as np
import pytest

from jaxblt.data.tasks import Pathfinder, PixelClasses
from jaxblt.data.tasks.pixels.drawn_files import write_images
from jaxblt.data.vocab import OFFSET

SIDE = 4


@pytest.fixture
def folder(tmp_path):
    for part, count in (("train", 40), ("test", 6)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, SIDE, SIDE), np.uint8)
        np.save(tmp_path / f"{part}_y.npy", np.arange(count, dtype=np.uint8) % 3)
        with lzma.open(tmp_path / f"{part}_x.npy.xz", "wb") as file:
            np.save(file, pixels)
    return str(tmp_path)


def image(example):
    assert np.flatnonzero(example.scored).tolist() == [SIDE * SIDE - 1]
    return (example.inputs - OFFSET).reshape(SIDE, SIDE)


def test_a_tenth_of_training_images_is_for_validation(folder):
    task = PixelClasses(path=folder, side=SIDE, classes=3)
    opened = {split: task.open(split) for split in ("train", "validation", "test")}
    rows = {s: {image(e.example(i)).tobytes() for i in range(e.count)} for s, e in opened.items()}
    assert {split: len(held) for split, held in rows.items()} == {"train": 36, "validation": 4, "test": 6}
    assert not rows["train"] & rows["validation"]
    assert opened["test"].example(4).targets[-1] - OFFSET == 1
    assert opened["train"].lengths.tolist() == [SIDE * SIDE] * 36


def test_views_are_the_image_turned_mirrored_and_moved(folder):
    turned = PixelClasses(path=folder, side=SIDE, classes=3, views=64, symmetries="square").open("train")
    assert turned.count == 64 * 36
    views = [image(turned.example(36 * view)) for view in range(64)]
    ways = [np.rot90(flip, k) for flip in (views[0], views[0][:, ::-1]) for k in range(4)]
    assert {v.tobytes() for v in views} == {np.ascontiguousarray(w).tobytes() for w in ways}
    moved = PixelClasses(path=folder, side=SIDE, classes=3, views=2, shift=2).open("train")
    first, second = image(moved.example(1)), image(moved.example(37))
    wide = np.pad(first, 2)
    parts = [wide[y : y + SIDE, x : x + SIDE] for y in range(5) for x in range(5)]
    assert any(np.array_equal(second, part) for part in parts)
    assert np.array_equal(second, image(moved.example(37)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"side": 5}, r"holds train_x of uint8\[40, 4, 4\] and .*expected uint8\[40, 5, 5\]"),
        ({"classes": 2}, "train_y has class 2, expected below 2: set data.task.classes"),
    ],
)
def test_other_arrays_are_refused(folder, change, said):
    task = PixelClasses(**{"path": folder, "side": SIDE, "classes": 3, **change})
    with pytest.raises(ValueError, match=said):
        task.open("train")


def test_arrays_that_are_missing_twofold_or_none_are_refused(folder, tmp_path):
    task = PixelClasses(path=folder, side=SIDE, classes=3)
    (tmp_path / "test_x.npy").write_bytes(b"text")
    with pytest.raises(ValueError, match=r"holds test_x\.npy 2 times"):
        task.open("test")
    (tmp_path / "test_x.npy.xz").unlink()
    with pytest.raises(ValueError, match=r"test_x\.npy' is no array .*: write it with numpy\.save"):
        task.open("test")
    (tmp_path / "test_x.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"test_x\.npy"):
        task.open("test")


def test_drawn_files_keep_splits_apart_and_add_easier_images_to_training(tmp_path):
    task, easier = Pathfinder(contours=(4,)), Pathfinder(contours=(2,), short_contours=0, sets_seed=1)
    write_images(task, tmp_path, 48, easier=easier, easier_images=24, processes=1)
    source = PixelClasses(path=str(tmp_path), classes=2)
    opened = {split: source.open(split) for split in ("train", "validation", "test")}
    rows = {split: {x.tobytes() for x in images.pixels} for split, images in opened.items()}
    assert not rows["train"] & (rows["validation"] | rows["test"])
    assert not rows["validation"] & rows["test"]
    counts = {split: images.count for split, images in opened.items()}
    assert 48 < counts["train"] + counts["validation"] + counts["test"] < 72
    lit = (opened["train"].pixels > 0).sum((1, 2))
    assert lit[-10:].mean() < lit[:10].mean()
