"""Further runs of the benchmark of routed adapters: reviews with labels, an index of the mix, a base with patches."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxblt
from experiments.benchmark._adaptation import Program
from experiments.benchmark._arms import Settings, make_arm
from experiments.benchmark._bases import check_base, given_to, open_base
from experiments.benchmark._mix import natural_mix
from experiments.benchmark._paired import less_than_static
from experiments.benchmark._pieces import read_back
from experiments.benchmark._reviews import Reviews, ends, open_reviews
from experiments.benchmark._scored import Scored, figures_of
from experiments.benchmark.routed_lora import routed_lora
from jaxblt.data.vocab import OFFSET, PAD
from jaxblt.models import ByteLMConfig
from tests.answers.runs import LOCAL, NEAR, PATCHER, PATCHES, make_run

TINY = Settings(
    rank=2,
    sites=("mlp/down",),
    chunk=4,
    hidden=1,
    prefix=4,
    steps=4,
    rows=4,
    length=32,
    spans=(8, 16),
    test_rows=16,
    steps_a_call=2,
    index=16,
    dtype="float32",
)
BYTES = ByteLMConfig(stack=NEAR)
WORDS = {"neg": "bad", "pos": "it was good"}
FOUND = [(label, f"{i} {word}".encode()) for i in range(20) for label, word in WORDS.items()]
KEY = jax.random.key(0)
TEXT = b"It was a dark and stormy night; the rain fell in torrents. " * 12


def write_reviews(folder: Path) -> None:
    lines = {
        label: "".join(f"{label}\t{i}\t9\t{i} {word}\n" for i in range(20)) for label, word in WORDS.items()
    }
    (folder / "reviews").mkdir()
    (folder / "reviews" / "train.tsv").write_text("".join(lines.values()))
    (folder / "reviews" / "test_even.tsv").write_text("".join(lines.values()))


def drawn_reviews(reviews: Reviews, rows: int = 6, length: int = 12):
    return jax.tree.map(
        np.asarray, jax.jit(Reviews.draw, static_argnums=(2, 3, 4))(reviews, KEY, rows, length, (1, 1))
    )


def test_reviews_end_in_their_label() -> None:
    """Short ones are whole, of the others the end is there."""
    reviews = open_reviews(FOUND, ["neg", "pos"], 5.0)
    rows = drawn_reviews(reviews)
    assert set(rows.domain.ravel()) == {0, 1}
    for i, kept in enumerate(rows.segment_ids > 0):
        label = rows.domain[i, 0]
        said = np.concatenate([rows.inputs[i, :1], rows.targets[i][kept]]) - OFFSET
        whole = [b"%s\n%d" % (text, label) for name, text in FOUND if name == ("neg", "pos")[label]]
        assert any(text[-13:] == said.astype(np.uint8).tobytes() for text in whole)
        assert (rows.targets[i][~kept] == PAD).all()
    at_end = np.asarray(ends(rows))
    np.testing.assert_array_equal(at_end.sum(1), np.ones(6))
    np.testing.assert_array_equal(rows.targets[at_end] - OFFSET - ord("0"), rows.domain[:, 0])
    np.testing.assert_array_equal(reviews.weights(rows), rows.segment_ids * np.where(at_end, 5.0, 1.0))


def test_a_label_is_right_where_it_is_the_likeliest_label() -> None:
    """Bytes that are no labels do not matter."""
    reviews = open_reviews(FOUND, ["neg", "pos"], 5.0)
    rows = drawn_reviews(reviews)
    logits = np.zeros((6, 12, 260), np.float32)
    logits[..., OFFSET + ord("x")] = 9
    logits[..., OFFSET + ord("1")] = 1
    np.testing.assert_array_equal(reviews.right(jnp.asarray(logits), rows), rows.domain[:, 0] == 1)


def test_what_does_not_fit_together_is_refused() -> None:
    reviews = open_reviews(FOUND, ["neg", "pos"], 1.0)
    run = make_run(BYTES)
    arms = {name: make_arm(name, TINY, 2) for name in ("static", "oracle", "chunk_index")}
    with pytest.raises(
        ValueError, match="--arms oracle, chunk_index are told a byte's domain or search texts"
    ):
        check_base(open_base(run, reviews, TINY), arms, reviews)
    with pytest.raises(ValueError, match=r"labels \['pos'\], and those to train on have \['neg', 'so'\]"):
        open_reviews([("pos", b"fine")], ["neg", "so"], 1.0)
    with pytest.raises(ValueError, match=r"labels \['neg'\], expected 2 to 10"):
        open_reviews([("neg", b"bad")], ["neg"], 1.0)


def test_a_file_of_another_base_is_refused(tmp_path: Path) -> None:
    """The same recipe at the same step, with other parameters."""
    run, file = make_run(BYTES), tmp_path / "figures.json"
    base = open_base(run, natural_mix({"a": TEXT, "b": TEXT}), TINY)
    file.write_text(json.dumps({"base_run": base.says(run)}))
    assert read_back(str(file), {"base_run": base.says(run)})
    moved = replace(run, params=jax.tree.map(lambda x: x + 1, run.params))
    with pytest.raises(ValueError, match=r"has base_run = .*content_hash.* choose another --out"):
        read_back(str(file), {"base_run": base.says(moved)})


def test_fewer_errors_are_of_other_arms() -> None:
    static = np.array([1.0, 1.0, 0.0, 1.0] * 10)
    found = less_than_static({"static": static, "prefix": static * 0.5, "same": static})
    assert set(found) == {"prefix", "same"}
    assert found["prefix"]["value"] == pytest.approx(0.375)
    assert less_than_static({"prefix": static}) == {}


def test_overflow_is_a_share_of_boundaries() -> None:
    rows = jax.tree.map(np.asarray, natural_mix({"a": TEXT, "b": TEXT}).draw(KEY, 2, 32, (8, 16)))
    found = figures_of(Scored(np.ones((2, 32)), rows, cut=np.array([15, 5])), ["a", "b"])
    assert found["overflow"] == 0.25
    assert found["bytes_per_patch"] == pytest.approx(64 / 15)


def test_the_ends_of_texts_are_held_out() -> None:
    mix = natural_mix({"a": bytes(range(97, 107)) * 40, "b": bytes(range(65, 75)) * 48})
    rest, held = mix.held_out()
    np.testing.assert_array_equal(held.first, rest.first + rest.size)
    np.testing.assert_array_equal(held.first + held.size, [400, 880])
    np.testing.assert_array_equal(held.size, [50, 60])


def measured(folder: Path, run, arms: tuple[str, ...], mix: str, settings: Settings) -> dict:
    """One call that loads this run."""
    options = {"data": str(folder), "domains": 3, "seeds": 1, "settings": settings, "mix": mix}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxblt, "load", lambda folder, dtype: run)
        routed_lora("run", str(folder / "figures.json"), arms=arms, **options)
    return json.loads((folder / "figures.json").read_text())


def write_books(folder: Path) -> None:
    for split in ("train", "test"):
        (folder / "books" / split).mkdir(parents=True)
        (folder / "books" / split / "1.txt").write_bytes(TEXT)


@pytest.mark.slow(weeks=26, group="scripts leave their figures")
def test_figures_of_reviews(tmp_path: Path) -> None:
    """The label follows from the bytes before it; a second call goes on where the first stopped."""
    write_reviews(tmp_path)
    settings = replace(TINY, rank=8, sites=("mlp/*", "mixer/*"), steps=120, rate=0.02)
    first = measured(tmp_path, make_run(BYTES), ("static",), "reviews", settings)
    both = measured(tmp_path, make_run(BYTES), ("static", "prefix"), "reviews", settings)
    assert both["arms"]["static"] == first["arms"]["static"]
    assert both["errors"]["base"] == first["errors"]["base"]
    assert first["arms"]["static"]["accuracy"] > both["base"]["accuracy"]
    assert first["arms"]["static"]["accuracy"] > 0.9
    assert "fewer_errors" in both["compared"]
    assert set(both["arms"]["prefix"]["seeds"][0]["by_domain"]) == {"neg", "pos"}


@pytest.mark.slow(weeks=26, group="scripts leave their figures")
def test_figures_of_an_arm_with_an_index(tmp_path: Path) -> None:
    write_books(tmp_path)
    found = measured(tmp_path, make_run(BYTES), ("chunk", "chunk_index"), "conflict", TINY)
    counts = {name: arm["parameters"] for name, arm in found["arms"].items()}
    assert counts["chunk_index"] == counts["chunk"] + 6
    assert found["arms"]["chunk_index"]["bits_per_byte"] != found["arms"]["chunk"]["bits_per_byte"]


@pytest.mark.slow(weeks=26, group="scripts leave their figures")
def test_an_index_is_the_bases_and_of_texts_that_are_not_trained_on() -> None:
    run, mix, arm = (
        make_run(BYTES),
        natural_mix({"a": TEXT, "b": TEXT.upper()}),
        make_arm("chunk_index", TINY, 2),
    )
    base = open_base(run, mix, TINY)
    params, train = given_to(arm, run, base, mix, TINY)
    index = params["stack"]["router"]["index"]
    np.testing.assert_allclose(np.linalg.norm(index["vectors"], axis=1), np.ones(16), rtol=1e-5)
    assert (np.asarray(train.size) < np.asarray(mix.size)).all()
    start = jax.eval_shape(Program(arm, base.model, TINY)._start, params, KEY)[0]
    assert "index" not in start["stack"]["router"]


@pytest.mark.slow
def test_figures_of_a_base_with_patches(tmp_path: Path) -> None:
    """The patcher is the mix's own, and what found no slot is counted."""
    write_books(tmp_path)
    open_rule = replace(PATCHER, capacity=4)
    run = make_run(PATCHES, entropy=ByteLMConfig(stack=LOCAL), patcher=open_rule, bytes_per_patch=3.0)
    settings = replace(TINY, steps=20, rate=0.01)
    found = measured(tmp_path, run, ("chunk",), "conflict", settings)
    patcher, base = found["base_run"]["patcher"], found["base"]
    assert patcher["threshold"] != open_rule.threshold
    assert patcher["capacity"] == 16
    assert 2.5 < base["bytes_per_patch"] < 4
    assert base["overflow"] == 0
    assert found["arms"]["chunk"]["bits_per_byte"] < base["bits_per_byte"]
    with pytest.raises(ValueError, match="--arms bank pick experts byte by byte, and the base has patches"):
        measured(tmp_path, run, ("bank",), "conflict", settings)
