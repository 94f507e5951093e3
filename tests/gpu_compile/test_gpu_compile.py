"""The gate of `make gpu-compile`: what it reads, what it refuses, and that no kernel is left out of it."""

import importlib
import json
from pathlib import Path

import pytest

import pallas_kernels
from tests.gpu_compile.arrays import largest
from tests.gpu_compile.figures import complaints, read_report
from tests.gpu_compile.launches import Launches, read_launches
from tests.gpu_compile.schedule import Exchange, exchanges

HERE = Path(__file__).parent
PTXAS = """
ptxas info    : Compiling entry function 'one_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for one_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 110 registers, used 2 barriers, 1 bytes smem
ptxas info    : Compiling entry function 'two_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for two_mosaic_gpu_kernel
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 1 bytes smem
"""
SCHEDULE = """
%wrapped (p: bf16[8]) -> f32[8] {
  %p = bf16[8]{0} parameter(0)
  ROOT %call = f32[8]{0} custom-call(%p), custom_call_target="mosaic_gpu_v2"
}

ENTRY %main (a: bf16[8]) -> bf16[8] {
  %a = bf16[8]{0} parameter(0)
  %start = ((bf16[8]{0}), bf16[8]{0}) collective-permute-start(%a), channel_id=1
  %one = f32[8]{0} custom-call(%a), custom_call_target="__cudnn$fmhaSoftmax"
  %two = f32[8]{0} fusion(%a), kind=kCustom, calls=%wrapped
  %done = bf16[8]{0} collective-permute-done(%start)
  %start.1 = ((bf16[8]{0}), bf16[8]{0}) collective-permute-start(%done), channel_id=2
  %copy = bf16[8]{0} fusion(%a), kind=kLoop, calls=%fused_copy
  %done.1 = bf16[8]{0} collective-permute-done(%start.1)
  %at_once = bf16[8]{0} collective-permute(%done.1), channel_id=3
  ROOT %three = bf16[8]{0} custom-call(%at_once), custom_call_target="mosaic_gpu_v2"
}
"""
ARRAYS = """
%fused_add (p: f32[4,8]) -> (f32[2,8], bf16[3]) {
  %p = f32[4,8]{1,0} parameter(0)
  %wide = f32[64,8]{1,0} broadcast(%p), dimensions={0,1}
  ROOT %out = (f32[2,8]{1,0}, bf16[3]{0}) tuple(%a, %b)
}

%body (q: (f32[9,9])) -> (f32[9,9]) {
  %q = (f32[9,9]{1,0}) parameter(0)
  %inside = f32[3,8]{1,0} custom-call(%q), custom_call_target="mosaic_gpu_v2"
  ROOT %all = (f32[9,9]{1,0}) tuple(%q)
}

ENTRY %main (a: f32[4,8]) -> f32[2,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %both = (f32[2,8]{1,0}, bf16[3]{0}) fusion(%a), kind=kLoop, calls=%fused_add, metadata={op_name="f32[99]"}
  ROOT %first = f32[2,8]{1,0} get-tuple-element(%both), index=0
}
"""
LAUNCHES = """
000: kCommandBuffer [source | sink]
    001: kCustomKernel [source | next=002 (1)] add grid: [1, 1, 1]
    002: kWhile        [prev=001 (1) | sink]
condition:
        No thunks.      body:
        003: kCopy [source | sink] kCopy
004: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    No thunks.  body:
    000: kCommandBuffer [source | sink]
        005: kCustomKernel [source | sink] add grid: [1, 1, 1]
    006: kCopy         [prev=000 (1) | sink] kCopy
"""
ONE, TWO = {"registers": 110, "spilled": 0}, {"registers": 255, "spilled": 20}


def test_reads_what_ptxas_writes() -> None:
    assert read_report(PTXAS, "sm_90a") == {"one": ONE, "two": TWO}


def test_reads_of_the_others_only_what_is_named() -> None:
    other = PTXAS.replace("two_mosaic_gpu_kernel", "two").replace("one_mosaic_gpu_kernel", "fusion_1")
    assert read_report(other, "sm_90a", {"two"}) == {"two": TWO}


def test_the_largest_array_that_lies_in_memory() -> None:
    """Not those inside of a fusion, nor what names an array that is there."""
    assert (largest(ARRAYS, "f32"), largest(ARRAYS, "bf16"), largest(ARRAYS, "f16")) == (24, 3, 0)


def test_refuses_another_target() -> None:
    with pytest.raises(ValueError, match="one was compiled for sm_90a, not for sm_100a"):
        read_report(PTXAS, "sm_100a")


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"one": ONE | {"spilled": 4}}, "one spills 4 bytes a thread, accepted are 0"),
        ({"one": ONE, "two": TWO}, "two is not accepted yet"),
        ({}, "one is accepted, but was not compiled"),
    ],
)
def test_complains(now: dict[str, dict[str, int]], message: str) -> None:
    (found,) = complaints({"op/a": now}, {"op/a": {"one": ONE}})
    assert message in found


def test_accepts_the_same_and_less() -> None:
    assert not complaints({"op/a": {"two": TWO | {"spilled": 0}}}, {"op/a": {"two": TWO}})


def test_reads_what_lies_in_graphs() -> None:
    """The loop in the first graph stands behind nothing; the other one the host steps, in order."""
    assert read_launches(LAUNCHES) == Launches(graphs=2, inside=3, outside=1, loops=1, unordered=1)


def test_reads_what_runs_beside_an_exchange() -> None:
    assert exchanges(SCHEDULE) == [Exchange("start", 2), Exchange("start.1", 0), Exchange("at_once", 0)]


@pytest.mark.parametrize("lost", ["collective-permute-done(%start.1)", "collective-permute"])
def test_refuses_what_is_no_schedule(lost: str) -> None:
    with pytest.raises(ValueError, match="not a schedule"):
        exchanges(SCHEDULE.replace(lost, "negate(%a"))


@pytest.fixture(scope="module")
def names() -> list[str]:
    """Of all programs. To list them takes 2 s, which a process without these tests need not spend."""
    from tests.gpu_compile.programs import PROGRAMS

    return [program.name for program in PROGRAMS]


@pytest.mark.slow(days=28, group="costly", turn="gpu_compile/test_gpu_compile")
def test_every_kernel_is_compiled_with_its_gradient(names: list[str]) -> None:
    """An op whose tables have a Mosaic kernel is among the programs, under remat too."""
    root = Path(pallas_kernels.__file__).parent
    ops = [path.parent.name for path in root.glob("*/mosaic_gpu.py")]
    assert ops
    compiled = {name.split("/")[0] for name in names if name.endswith("/remat")}
    for op in ops:
        api = vars(importlib.import_module(f"pallas_kernels.{op}.api"))
        tables = [table for name, table in api.items() if name.endswith("TABLE")]
        assert tables, f"{op}: no table"
        for table in tables:
            assert any(entry.name.startswith("mosaic_gpu") for entry in table), f"{op}: not in its table"
        assert op in compiled, f"{op}: not among the compiled programs"


@pytest.mark.slow(days=28, group="costly", turn="gpu_compile/test_gpu_compile")
def test_accepted_figures_are_those_of_the_programs(names: list[str]) -> None:
    """After a change of either list `make gpu-compile` compares kernel by kernel."""
    accepted = json.loads((HERE / "accepted.json").read_text(encoding="utf-8"))
    assert list(accepted) == names
