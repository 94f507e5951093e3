"""What is read of the collectives in a compiled program's text."""

from types import SimpleNamespace

from jaxblt.profiling.collectives import exchanges
from jaxblt.testing.collectives import collectives, spanning

PROGRAM = """
  %a = ((f32[4,2]{1,0}), f32[8,2]{1,0}) all-gather-start(%x), dimensions={0}
  %b = f32[8,2]{1,0:T(8)} all-gather-done(%a)
  %c = (bf16[3]{0}, pred[5]{0}) all-reduce(%y, %z), to_apply=%add
  %d = s32[] collective-permute(%k), source_target_pairs={{0,1}}
  %f = f8e4m3fn[6]{0} ragged-all-to-all(%m), replica_groups={{0,1}}
  ROOT %e = f32[8,2]{1,0} add(%b, %all-gather-done.1)
"""


def test_results_of_exchanges_are_counted_once() -> None:
    found = [(arrays[0].kind, [array.bytes for array in arrays]) for arrays in exchanges(PROGRAM)]
    assert found == [
        ("all-gather", [64]),
        ("all-reduce", [6, 5]),
        ("collective-permute", [4]),
        ("ragged-all-to-all", [6]),
    ]


def test_their_dtypes_and_shapes() -> None:
    found = collectives(SimpleNamespace(as_text=lambda: PROGRAM))
    assert [(array.dtype, array.shape) for array in found] == [
        ("f32", (8, 2)),
        ("bf16", (3,)),
        ("pred", (5,)),
        ("s32", ()),
        ("f8e4m3fn", (6,)),
    ]
    assert spanning(found, 4) == found[:1]
    assert spanning(found, 3, kinds=("all-reduce", "ragged-all-to-all")) == [found[1], found[4]]
