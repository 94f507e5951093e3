"""What is read of the collectives in a compiled program's text."""

from types import SimpleNamespace

import jax

from jaxblt.parallel import make_mesh
from jaxblt.profiling.collectives import crossed_axes, exchanges
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


GROUPS = """
  %s = ((f32[2]{0}), f32[4]{0}) all-gather-start(%x), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}
  %a = f32[4]{0} all-gather-done(%s)
  %b = f32[4]{0} all-reduce(%x), replica_groups=[4,2]<=[2,2,2]T(1,2,0), to_apply=%add
  %c = f32[4]{0} all-reduce(%x), replica_groups={{0,2},{1,3},{4,6},{5,7}}, to_apply=%add
  %d = f32[4]{0} collective-permute(%x), source_target_pairs={{0,2},{2,0}}
  %e = f32[4]{0} all-gather(%x), replica_groups=mesh['data'=2,'fsdp'=2,'seq'=2,'tensor'=1] {'seq','data'}
  %f = f32[4]{0} all-reduce(%x), replica_groups={}, to_apply=%add
"""


def test_along_which_axes_devices_exchange() -> None:
    mesh = make_mesh(data=2, fsdp=2, seq=2, devices=jax.devices()[:8])
    found = [crossed_axes(arrays[0], mesh) for arrays in exchanges(GROUPS)]
    assert found == [{"seq"}, {"data"}, {"fsdp"}, {"fsdp"}, {"data", "seq"}, {"data", "fsdp", "seq"}]


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
