"""The benchmark of patches on a genome: its arms, and the places that cuts are compared with."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np

from experiments.benchmark.boundaries import boundary_genome
from jaxblt import recipes
from jaxblt.models.positions import PositionConfig

GFF = "\n".join(
    f"one\tx\t{kind}\t{first}\t{last}\t.\t{strand}\t0\tID={name}"
    for name, kind, first, last, strand in (
        ("a", "gene", 11, 40, "+"),
        ("b", "CDS", 11, 40, "+"),
        ("c", "CDS", 51, 80, "-"),
        ("d", "CDS", 83, 95, "-"),
    )
)
OPERONS = "start,end,strand,operon\n10,40,+,b\n50,80,-,dc\n82,95,-,dc\n"


def test_arms_differ_in_patches_and_positions():
    base = replace(recipes.get("ecoli"), train=replace(recipes.get("ecoli").train, steps=1000))
    arms = {name: boundary_genome.arm_of(base, name, 3.0) for name in get_args(boundary_genome.Arm)}
    modes = {name: None if arm.patcher is None else arm.patcher.mode for name, arm in arms.items()}
    assert modes == {name: {"bytes": None}.get(name.split("_")[0], name.split("_")[0]) for name in arms}
    assert {name for name, arm in arms.items() if arm.bytes_per_patch == 3.0} == {
        "learned",
        "learned_genomic",
    }
    for name, arm in arms.items():
        if arm.patcher is not None:
            assert (arm.model.positions == PositionConfig.genomic()) == name.endswith("_genomic")
    assert "positions" in "".join(arms["bytes_genomic"].model.stack.pattern)
    assert arms["static"].model.latent.num_layers == base.model.stack.num_layers


def test_places_are_the_last_bases_before_genes_and_behind_them_on_the_other_strand(tmp_path):
    (tmp_path / "a.gff").write_text(GFF + "\n", encoding="utf-8")
    (tmp_path / "o.csv").write_text(OPERONS, encoding="utf-8")
    places = boundary_genome.read_places(str(tmp_path / "a.gff"), str(tmp_path / "o.csv"))
    np.testing.assert_array_equal(places["starts"]["one"], [9, 79, 94])
    np.testing.assert_array_equal(places["operons"]["one"], [9, 39, 49, 94])


def test_the_held_out_part_is_cut_into_rows(tmp_path):
    """Its 20 bases from the 70th on make two rows of 9, and two bases are left over."""
    (tmp_path / "g.fa").write_text(">one\n" + "ACGTA" * 20 + "\n", encoding="utf-8")
    data = replace(recipes.get("ecoli").data, seq_len=10, stride=10, fractions=(0.7, 0.2, 0.1))
    trained: Any = SimpleNamespace(setup=SimpleNamespace(recipe=SimpleNamespace(data=data)))
    rows, marks = boundary_genome.held_out(
        trained, str(tmp_path / "g.fa"), {"starts": {"one": np.array([-1, 9, 69, 70, 80, 89])}}
    )
    assert [row.tobytes() for row in rows] == [b"ACGTAACGT", b"AACGTAACG"]
    np.testing.assert_array_equal(np.argwhere(marks["starts"]), [[0, 0], [1, 1]])
