"""Records that are answered together close by number or by time, and each gets its own answer."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from jaxblt.inference.server.gathering import Answers, Gathered

MOST, WAIT_S = 4, 0.1


@given(st.lists(st.tuples(st.floats(0, 0.06), st.integers(0, 2)), max_size=40))
def test_no_item_waits_too_long_and_all_leave_in_order(arrivals):
    """On a simulated clock: batches close at their fourth item, or when their first has waited for 0.1 s."""
    gathered, now = Gathered(MOST, WAIT_S), 0.0
    left: dict[int, list[int]] = {0: [], 1: [], 2: []}
    came: dict[int, float] = {}

    def take(batches, at):
        for batch in batches:
            assert 1 <= len(batch) <= MOST
            assert len({key for key, _ in batch}) == 1
            assert at - came[batch[0][1]] <= WAIT_S + 1e-9
            assert len(batch) == MOST or at - came[batch[0][1]] >= WAIT_S - 1e-9
            left[batch[0][0]] += [number for _, number in batch]

    def pass_time(until):
        while (due := gathered.next_due) is not None and due <= until:
            take(gathered.take_due(due), due)

    for number, (pause, key) in enumerate(arrivals):
        now += pause
        pass_time(now)
        came[number] = now
        if closed := gathered.add(key, (key, number), now):
            assert len(closed) == MOST
            take([closed], now)
    pass_time(now + WAIT_S)
    assert gathered.next_due is None
    assert left == {key: [i for i, (_, own) in enumerate(arrivals) if own == key] for key in left}


def test_requests_share_calls_and_get_their_own_answers():
    calls = []

    def ask(records):
        calls.append(records)
        if b"broken" in records:
            raise ValueError("broken")
        return [record.upper() for record in records]

    async def work():
        answers = Answers(most=4, wait_s=0.02)
        asked = [[b"a", b"b" * 40], [b"c"], [b"d" * 40, b"e", b"f"], [b"g"], [b"broken"], [b"h" * 5]]
        return await asyncio.gather(*(answers.answer("q", ask, x) for x in asked), return_exceptions=True)

    *found, broken, last = asyncio.run(work())
    assert found == [[b"A", b"B" * 40], [b"C"], [b"D" * 40, b"E", b"F"], [b"G"]]
    # Four of one length fill a batch; one that fails is asked record by record
    assert calls[0] == [b"a", b"c", b"e", b"f"]
    assert sorted(calls[1:]) == [
        [b"b" * 40, b"d" * 40],
        [b"broken"],
        [b"broken", b"h" * 5],
        [b"g"],
        [b"h" * 5],
    ]
    assert last == [b"HHHHH"]
    assert isinstance(broken, ValueError)
    assert str(broken) == "broken"


def test_every_length_is_answered_although_no_later_request_comes():
    """Batches of other lengths begin later than the first and are due later: each closes at its own time."""

    async def work():
        answers = Answers(most=4, wait_s=0.02)
        asked = asyncio.create_task(answers.answer("q", list, [b"a", b"b" * 5, b"c" * 40]))
        await asyncio.sleep(0.01)
        late = answers.answer("q", list, [b"d" * 400])
        return await asyncio.wait_for(asyncio.gather(asked, late), timeout=5)

    assert asyncio.run(work()) == [[b"a", b"b" * 5, b"c" * 40], [b"d" * 400]]
