"""The scheduler under arrivals, cancels and deadlines by a simulated clock; no device."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxblt.inference.engine import EngineConfig, Lane, Refused, Scheduler
from jaxblt.inference.engine.schedule import ENDS

CONFIG = EngineConfig(lanes=(Lane(2, 40), Lane(1, 200)), max_waiting=4)
SIZES = (4, 16)

NEW = st.tuples(st.just("new"), st.integers(1, 120), st.integers(1, 90), st.none() | st.integers(1, 12))
EVENTS = st.one_of(
    NEW,
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("wait"), st.integers(0, 4)),
    st.tuples(st.just("round"), st.integers(0, 3)),
)


class Simulated:
    """A scheduler, its clock, and a device whose draws of a round are known in the next one."""

    def __init__(self, draws):
        self.now, self.tickets, self.ended, self.draws = 0.0, [], set(), draws
        self.read, self.drawn, self.order = Counter(), Counter(), {0: [], 1: []}
        self.unknown = []
        self.scheduler = Scheduler(CONFIG, SIZES, draws=draws, clock=lambda: self.now)

    def new(self, length, limit, deadline):
        try:
            ticket = self.scheduler.submit(length, limit, deadline)
        except ValueError:
            assert length + limit > 200
            return
        except Refused as refused:
            self.check_refusal(refused)
            return
        assert CONFIG.lanes[ticket.lane].capacity == (40 if length + limit <= 40 else 200)
        self.tickets.append(ticket)

    def check_refusal(self, refused):
        assert refused.retry_after >= 1
        assert self.scheduler.overdue == CONFIG.max_waiting

    def cancel(self, number):
        if self.tickets:
            ticket = self.tickets[number % len(self.tickets)]
            assert self.scheduler.end(ticket, "cancelled") == (ticket not in self.ended)
            self.ended.add(ticket)

    def wait(self, seconds):
        self.now += seconds

    def round(self, finishing):
        waited_for = any(x.state == "decoding" and x.deadline > self.now for x in self.tickets)
        work, (least, most) = self.scheduler.next_round(), self.draws
        for ticket in work.expired:
            assert ticket.deadline <= self.now
            assert ticket not in self.ended
            self.ended.add(ticket)
        # Short pieces delay nobody while no row decodes
        counted = [part.size for part in work.parts if waited_for or part.size == SIZES[-1]]
        assert sum(counted) <= SIZES[-1]
        for part in work.parts:
            assert part.start == self.read[part.ticket] < part.stop <= part.start + part.size
            assert part.stop == part.ticket.length or part.stop - part.start == SIZES[-1]
            if part.start == 0:
                self.order[part.ticket.lane].append(part.ticket)
            self.read[part.ticket] = part.stop
        slots = {(part.ticket, part.slot) for part in work.parts if part.is_last}
        for lane, rows in work.decoding.items():
            assert set(rows) <= set(range(CONFIG.lanes[lane].slots))
            for slot, ticket in rows.items():
                last = ticket.state == "leaving"
                assert (None if last else slot, ticket.lane) == (ticket.slot, lane)
                assert self.read[ticket] == ticket.length
                assert last == (ticket.limit <= self.drawn[ticket] + least * ticket.sent)
                assert ticket.limit > self.drawn[ticket] + least * (ticket.sent - 1)
                slots.discard((ticket, slot))
            # Some row is not over with what is on its way
            assert any(
                ticket.limit > self.drawn[ticket] + most * (ticket.sent - 1) for ticket in rows.values()
            )
        assert not slots
        known, self.unknown = self.unknown, [t for rows in work.decoding.values() for t in rows.values()]
        self.know([ticket for ticket in known if ticket not in self.ended], finishing)

    def know(self, tickets, finishing):
        """Tell of what a round has drawn; the first of its requests end."""
        least, most = self.draws
        for i, ticket in enumerate(tickets):
            count = least + (finishing + i) % (most - least + 1)
            self.drawn[ticket] += count
            if i < finishing or self.drawn[ticket] >= ticket.limit:
                assert self.scheduler.end(ticket, "finished")
                self.ended.add(ticket)
            else:
                self.scheduler.count_drawn(ticket, count)

    def check(self):
        """Slots and places are kept apart, and nobody is lost."""
        live = list(self.scheduler.live())
        assert len(set(live)) == len(live)
        assert set(live) | self.ended == set(self.tickets)
        assert not set(live) & self.ended
        assert all((ticket.state in ENDS) == (ticket in self.ended) for ticket in self.tickets)
        held = [(ticket.lane, ticket.slot) for ticket in live if ticket.slot is not None]
        assert len(set(held)) == len(held)
        assert self.scheduler.running == len(held) + sum(ticket.state == "leaving" for ticket in live)
        assert self.scheduler.overdue <= CONFIG.max_waiting
        assert sum(self.scheduler.ended[state] for state in ENDS) == len(self.ended)


@given(st.lists(EVENTS, max_size=60), st.sampled_from([(0, 33), (1, 8), (8, 8)]))
def test_every_request_ends_once_in_its_turn_and_no_slot_is_lost(events, draws):
    simulated = Simulated(draws)
    for name, *arguments in events:
        getattr(simulated, name)(*arguments)
        simulated.check()
    for _ in range(400):
        simulated.now += 1
        simulated.round(3)
        simulated.check()
        assert all(ticket.deadline > simulated.now for ticket in simulated.scheduler.live())
    assert not list(simulated.scheduler.live())
    for lane, started in simulated.order.items():
        submitted = [ticket for ticket in simulated.tickets if ticket.lane == lane]
        assert started == [ticket for ticket in submitted if ticket in set(started)]
    # All slots are free again
    first = [simulated.scheduler.submit(1, 9) for _ in range(2)]
    simulated.scheduler.next_round()
    assert sorted(ticket.slot for ticket in first) == [0, 1]


def test_a_prompt_that_is_known_is_not_read():
    scheduler = Scheduler(CONFIG, SIZES, known=lambda ticket: ticket.length)
    ticket = scheduler.submit(30, 5)
    [part] = scheduler.next_round().parts
    assert (part.start, part.stop, part.size, part.is_last) == (30, 30, 0, True)
    assert ticket.state == "decoding"
    assert ticket.deadline == math.inf


def test_all_short_prompts_are_read_at_once_only_while_no_row_decodes():
    scheduler = Scheduler(EngineConfig(lanes=(Lane(16, 40),)), SIZES, draws=(8, 8))
    for _ in range(8):
        scheduler.submit(4, 16)
    read = [len(scheduler.next_round().parts)]
    for _ in range(8):
        scheduler.submit(4, 16)
    read += [len(scheduler.next_round().parts) for _ in range(2)]
    assert read == [8, 4, 4]


def test_a_slot_is_free_for_the_next_round_once_the_last_byte_is_sent_for():
    scheduler = Scheduler(replace(CONFIG, lanes=(Lane(1, 40),)), SIZES, draws=(8, 8))
    first, second = (scheduler.submit(3, 16) for _ in range(2))
    decoding = [scheduler.next_round().decoding[0] for _ in range(3)]
    assert decoding == [{0: first}, {0: first}, {0: second}]
    assert (first.state, scheduler.running, scheduler.waiting) == ("leaving", 2, 0)
    assert scheduler.end(first, "finished")
    assert list(scheduler.live()) == [second]


def test_no_round_is_sent_for_rows_that_may_be_over_already():
    scheduler = Scheduler(replace(CONFIG, lanes=(Lane(2, 40),)), SIZES, draws=(1, 8))
    early, late = scheduler.submit(3, 8), scheduler.submit(3, 16)
    rounds = [scheduler.next_round().decoding for _ in range(3)]
    assert rounds == [{0: {0: early, 1: late}}] * 2 + [{}]
    scheduler.count_drawn(early, 7)
    assert scheduler.next_round().decoding == {}
    scheduler.count_drawn(late, 7)
    assert scheduler.next_round().decoding == {0: {0: early, 1: late}}


def test_refusals_name_what_is_too_much():
    scheduler = Scheduler(CONFIG, SIZES)
    with pytest.raises(
        ValueError, match="a prompt of 149 bytes and 51 new ones do not fit: the largest lane holds 199"
    ):
        scheduler.submit(150, 51)
    # Two have a slot each, if the next round comes first
    for _ in range(2 + 4):
        scheduler.submit(1, 1)
    scheduler.submit(100, 1)
    with pytest.raises(Refused, match=r"4 requests wait, the most that may \(max_waiting=4\)"):
        scheduler.submit(1, 1)
    assert scheduler.ended["refused"] == 2
