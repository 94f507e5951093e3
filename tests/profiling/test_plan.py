"""The arithmetic of a memory plan, with functions in place of compilers."""

from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxblt.parallel import make_mesh
from jaxblt.profiling.plan import (
    MOST_ROWS,
    Line,
    device_bytes,
    first_that_fits,
    largest_batch,
    longest_context,
    step_memory,
)
from tests.profiling.test_collectives import PROGRAM


class Counted:
    """Memory as a function of the context, and the contexts that were asked for."""

    def __init__(self, size: Callable[[int], float]) -> None:
        self.size, self.asked = size, []

    def __call__(self, context: int) -> int:
        self.asked.append(context)
        return int(self.size(context))


def test_bytes_on_a_device_are_those_of_its_shard() -> None:
    mesh = make_mesh(data=2, fsdp=4)
    split = jax.ShapeDtypeStruct((8, 6), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
    whole = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    assert device_bytes({"a": split, "b": whole}) == 2 * 6 * 2 + 4


def test_memory_of_a_program_by_part() -> None:
    sizes = {"argument": 30, "temp": 100, "output": 12, "alias": 10, "host_temp": 7}
    analysis = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
    compiled = SimpleNamespace(memory_analysis=lambda: analysis, as_text=lambda: PROGRAM)
    x = jax.ShapeDtypeStruct((6,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    found = step_memory(compiled, {"x": x})
    assert found.arguments == {"x": 24}
    assert (found.temporaries, found.results, found.total) == (100, 6 + 2, 24 + 100 + 8)
    assert found.host == 7
    assert "in host memory" in str(found)
    assert found.exchanged["all-reduce"] == (1, 11, 11)
    assert "all-gather" in str(found)
    silent = SimpleNamespace(memory_analysis=lambda: None)
    with pytest.raises(ValueError, match="does not tell"):
        step_memory(silent, {})


def test_a_line_through_two_points() -> None:
    line = Line.through((20, 70), (10, 40))
    assert (line.base, line.slope) == (10, 3)
    assert line.at(30) == 100
    assert line.context(100) == 30
    with pytest.raises(ValueError, match="does not grow"):
        Line.through((10, 40), (20, 40))


def test_proportional_memory_takes_two_compilations_and_one_check() -> None:
    measure = Counted(lambda n: 500 + 3 * n)
    found = longest_context(measure, memory=10_000, lengths=(100, 200), multiple=64)
    assert found is not None
    assert found.context == (10_000 - 500) // 3 // 64 * 64
    assert found.predicted == pytest.approx(found.memory)
    assert measure.asked == [100, 200, found.context]


@pytest.mark.parametrize("lengths", [(64, 128), (64, 640), (640, 1280)])
def test_a_length_is_only_given_if_it_was_seen_to_fit(lengths: tuple[int, int]) -> None:
    """Memory with a quadratic part: the first line reaches too far, the next ones do not."""
    measure = Counted(lambda n: 500 + n + n * n / 100)
    found = longest_context(measure, memory=10_000, lengths=lengths, multiple=64, checks=8)
    assert found is not None
    assert found.context in measure.asked
    assert found.memory == measure.size(found.context) // 1 <= 10_000
    assert max(n for n in range(64, 2000, 64) if measure.size(n) <= 10_000) - found.context <= 64


def test_lengths_that_do_not_fit_lead_down_to_one_that_does() -> None:
    measure = Counted(lambda n: 500 + 3 * n)
    found = longest_context(measure, memory=1000, lengths=(2048, 4096), multiple=16)
    assert found is not None
    assert found.context == 160
    assert longest_context(measure, memory=510, lengths=(2048, 4096), multiple=16) is None


def test_choices_are_tried_in_order_until_one_fits() -> None:
    measure = Counted(lambda n: n)
    assert first_that_fits({"none": 9, "dots": 7, "full": 5}, measure, 8) == ("dots", {"none": 9, "dots": 7})
    assert measure.asked == [9, 7]
    assert first_that_fits({"none": 9}, measure, 8) == (None, {"none": 9})


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize(
    "size",
    [
        lambda n: 7 + 3 * n,
        lambda n: 7 + 3 * n + n * n / 50,
        lambda n: 50 + 20 * n**0.5,
        lambda n: 5 * (n // 8),
    ],
    ids=["straight", "bent up", "bent down", "steps"],
)
def test_the_largest_batch_fits_and_one_step_more_does_not(
    size: Callable[[float], float], multiple: int
) -> None:
    for memory in (120, 500, 1000):
        measured = Counted(size)
        found = largest_batch(measured, memory=memory, multiple=multiple)
        assert found is not None
        rows, sizes = found
        assert list(sizes) == measured.asked
        assert len(measured.asked) <= 22
        assert measured(rows) <= memory < measured(rows + multiple)
        assert rows % multiple == 0


def test_batches_that_nothing_holds_or_everything() -> None:
    assert largest_batch(lambda rows: 8, memory=7) is None
    found = largest_batch(lambda rows: 8, memory=9, multiple=3)
    assert found is not None
    assert found[0] >= MOST_ROWS
