"""A ring whose steps are one call each, as for a kernel that merges: exact with what runs on this machine."""

import pytest

from jaxblt.parallel import ring
from jaxblt.parallel.layout import ZIGZAG
from tests.parallel.test_context import Case, check


@pytest.mark.parametrize("case", [Case(devices=4, layout=ZIGZAG), Case(devices=4, groups=1)], ids=str)
def test_equals_dense_attention(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, at_once = [], ring._at_once
    monkeypatch.setattr(ring, "MERGING", (None,))
    monkeypatch.setattr(ring, "_at_once", lambda *args: calls.append(args) or at_once(*args))
    check(case)
    assert [step for _, step, _ in calls] == [1, 2, 3]
