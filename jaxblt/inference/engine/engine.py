"""Many requests at once over one model: a thread that sends round after round, and a stream for each request."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import batched, product
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jaxblt.data.letters import letters_of
from jaxblt.data.vocab import OFFSET, encode
from jaxblt.inference.beams import BEAMS, Beam, beam_search, check_search
from jaxblt.inference.decode import Decoder
from jaxblt.inference.drafts import Drafts
from jaxblt.inference.engine.config import ARRAYS, EngineConfig, Finish, Lane, Piece, Request, Sampling
from jaxblt.inference.engine.drafted_lane import DraftedLane
from jaxblt.inference.engine.draws import Drawn, Table, unpack_draws
from jaxblt.inference.engine.prefixes import PrefixCache
from jaxblt.inference.engine.programs import NO_IDS, LanePrograms, OnePrompt, copy_prompt, piece_sizes
from jaxblt.inference.engine.row_codes import choose_codes_of_rows, list_adapters
from jaxblt.inference.engine.schedule import Part, Scheduler, Ticket
from jaxblt.inference.engine.searches import LaneSearch
from jaxblt.inference.engine.stream import StopStrings, Stream
from jaxblt.inference.prompts import Prefix
from jaxblt.models.finite import explain_nonfinite
from jaxblt.parallel.mesh import MeshConfig, built_mesh
from jaxblt.validation import check_kind


@runtime_checkable
class DecodableRun(Protocol):
    """The members of `jaxblt.run.Run` that an engine reads."""

    @property
    def recipe(self) -> Any: ...

    @property
    def decoder(self) -> Decoder: ...

    @property
    def decoder_params(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Stats:
    """Numbers of an engine so far.

    Attributes:
      waiting, running: requests that wait for a slot, and those that have or had one.
      ended: requests by the state in which they ended, "refused" among them.
      prompt_bytes: bytes of prompts that were read, BOS included.
      known_bytes: bytes of prompts that needed no reading.
      drawn_bytes: bytes that were drawn.
      drafted_bytes, accepted_bytes: bytes that were guessed, and those that were right; 0 without drafts.
      rounds: rounds of work.
    """

    waiting: int
    running: int
    ended: dict[str, int]
    prompt_bytes: int
    known_bytes: int
    drawn_bytes: int
    drafted_bytes: int
    accepted_bytes: int
    rounds: int


@dataclass(eq=False)
class _Job:
    """A request, with its ids, its reader, what was known of its prompt, and what was read."""

    ticket: Ticket
    ids: np.ndarray
    stream: Stream
    stops: StopStrings
    drawn: int = 0
    known: OnePrompt | None = None
    prompt: OnePrompt | None = None


_Reading = tuple[Part, _Job]
"""A piece of a prompt, and whose it is."""


class Engine:
    """Requests over one model, decoded together.

    A round draws up to 8 bytes for every request that has a slot, and reads `piece_bytes` of prompts at the most while
    rows decode. The bytes of a request depend on its prompt, its sampling, its adapter, its lane and the model only,
    never on other requests. The results of a round are read while the device works on the next one.

        with Engine(run, EngineConfig(lanes=(Lane(slots=8, capacity=8192),))) as engine:
            for piece in engine.submit(Request(b"Once", max_new_bytes=64)):
                print(piece.data)
    """

    def __init__(
        self,
        run: DecodableRun,
        config: EngineConfig = EngineConfig(),
        *,
        as_trained: bool = True,
        mesh: Mesh | MeshConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare lanes; programs are compiled by `warm`, or by the first requests that need them.

        Args:
          run: a causal one.
          config: lanes and limits.
          as_trained: prompts have the case of the run's data; False takes every byte as it is.
          mesh: of devices that split the weights along `tensor`, with which the run was loaded; None for one device.
          clock: seconds.

        Raises:
          TypeError: run, config or mesh are of another kind.
          ValueError: the model or its patcher sees the future, or the mesh splits other axes.
        """
        check_kind("run", run, DecodableRun, fix="load one by jaxblt.load(run_dir)")
        check_kind(
            "config", config, EngineConfig, fix="make one, such as EngineConfig(lanes=(Lane(slots=8),))"
        )
        self._mesh = _check_mesh(None if mesh is None else built_mesh(mesh))
        self.config, self._decoder, self._model = config, run.decoder, run.decoder.model
        decoder, self._params = run.decoder, nn.meta.unbox(run.decoder_params)
        self._letters = letters_of(run.recipe.data) if as_trained else None
        self._sizes = piece_sizes(decoder, config.piece_bytes)
        make = partial(_make_lane, decoder, self._params, config.drafts, self._sizes[-1])
        with self._in_force():
            self._lanes = [make(lane) for lane in config.lanes]
        lanes = sorted((self._lanes[i] for i in config.search_lanes), key=lambda lane: lane.lane.capacity)
        self._searches = [LaneSearch(lane, config.beams, self._sizes) for lane in lanes]
        # Read prompts whose states are kept beside the rows, and long pieces too: their program has all layers in a row
        self._into_rows = () if config.prefix_bytes else self._sizes[:-1]
        self._prefixes = PrefixCache(config.prefix_bytes, self._sizes[-1])
        least, most = zip(*(lane.draws for lane in self._lanes), strict=True)
        given = {"draws": (min(least), max(most)), "known": self._find_prefix, "clock": clock}
        self._scheduler = Scheduler(config, self._sizes, **given)
        self._jobs: dict[Ticket, _Job] = {}
        # Read results beside the thread that sends rounds: a program that looks at conditions is sent step by step
        self._results = ThreadPoolExecutor(1, "engine-results")
        self._in_flight: deque[Future[None]] = deque()
        self._next_begins = threading.Event()
        self._changed = threading.Condition()
        self._closing = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._read = self._known = self._drawn = self._drafted = self._accepted = self._rounds = 0

    def __enter__(self) -> "Engine":
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(within_s=None if raised[0] is None else 0.0)

    @property
    def stats(self) -> Stats:
        """Numbers so far."""
        with self._changed:
            scheduler = self._scheduler
            drafts = (self._drafted, self._accepted)
            counts = (self._read, self._known, self._drawn, *drafts, self._rounds)
            return Stats(scheduler.waiting, scheduler.running, dict(scheduler.ended), *counts)

    @property
    def as_trained(self) -> bool:
        """True if prompts get the case of the run's data."""
        return self._letters is not None

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes as they are: with fewer rows than `config` asks for where memory was short."""
        return tuple(lane.lane for lane in self._lanes)

    @property
    def adapters(self) -> tuple[int | str, ...]:
        """Adapters that a request may have in the place of the router's code; none without a router."""
        return list_adapters(self._model)

    @property
    def failure(self) -> Exception | None:
        """The error that ended the engine's thread."""
        return self._error

    def submit(self, request: Request) -> Stream:
        """Queue a request, and return the stream of its pieces.

        Nothing comes before the engine is entered.

        Raises:
          ValueError: no lane holds the request, or there is no such adapter.
          Refused: as many wait as may.
          RuntimeError: the engine is closed or has failed.
        """
        choose_codes_of_rows(self._model, [request.adapter])
        prompt = self._read_letters(request.prompt)
        with self._changed:
            if self._closing or self._error is not None:
                raise RuntimeError(
                    "the engine is closed" if self._error is None else f"the engine failed: {self._error}"
                )
            ids = np.asarray(encode(prompt, bos=True), np.int32)
            to_read = self._lanes[0].count_to_read(len(ids))
            asked = (request.length, request.max_new_bytes, request.deadline_s)
            ticket = self._scheduler.submit(*asked, to_read=to_read)
            stream = Stream(request, lambda _: self._cancel(ticket))
            self._jobs[ticket] = _Job(ticket, ids, stream, StopStrings(request.sampling.stop))
            self._changed.notify_all()
        return stream

    def generate(
        self, prompts: Sequence[bytes], *, max_new_bytes: int = 256, sampling: Sampling = Sampling()
    ) -> list[bytes]:
        """Return the bytes that follow each prompt; those of a prompt do not depend on the others.

        It waits while the engine is full.

        Raises:
          ValueError: no lane holds a prompt, or its logits are not finite.
        """
        requests = [Request(prompt, max_new_bytes, sampling) for prompt in prompts]
        streams: list[Stream] = []
        for request in requests:
            with self._changed:
                self._changed.wait_for(self._has_room)
            streams.append(self.submit(request))
        return [stream.read().data for stream in streams]

    def search(
        self,
        prompt: bytes,
        *,
        max_new_bytes: int,
        beams: int = BEAMS,
        length_exponent: float = 0.0,
        **options: Any,
    ) -> list[Beam]:
        """Return what `jaxblt.inference.beam_search` finds, in rows of its own beside the lanes; see there for options.

        It works in the thread that calls it. It compiles nothing if `config.beams` are as many and a lane holds it.
        """
        asked = Request(self._read_letters(prompt), max_new_bytes)
        check_search(beams, length_exponent)
        ready = (search.search for search in self._searches if search.holds(asked, beams))
        search = next(ready, partial(beam_search, self._decoder, self._params))
        options |= {"max_new_bytes": max_new_bytes, "beams": beams, "length_exponent": length_exponent}
        return self._on_mesh(partial(search, asked.prompt, **options))

    def _read_letters(self, prompt: bytes) -> bytes:
        return prompt if self._letters is None else self._letters.read(prompt)

    def _has_room(self) -> bool:
        return self._scheduler.overdue < self.config.max_waiting or self._error is not None

    def warm(self) -> None:
        """Compile the programs of all lanes, side by side, before the first request; nothing may run yet.

        Lanes for which the device has not the memory get fewer rows; see `lanes`.

        Warns:
          LaneShrunkWarning: a lane has fewer rows than were asked for.
        """

        def begin[T](call: Callable[..., T], *given: Any) -> Future[T]:
            # Threads of a pool are in no mesh
            return pool.submit(self._on_mesh, call, *given)

        with ThreadPoolExecutor() as pool:
            # Lower first, and do not run: what reads into rows uses them up, as `fit` does
            lowered = [
                self._on_mesh(lane.lower_reading, size)
                for lane, size in product(self._lanes, self._into_rows)
            ]
            compiling = [pool.submit(one.compile) for one in lowered]
            decoding = [begin(lane.fit) for lane in self._lanes]
            reading = [
                [begin(_read_prompts, lane, size) for size in self._sizes_beside(lane)]
                for lane in self._lanes
            ]
            # Take no results: where a program did not compile, its first call says so, and may find memory then
            wait(compiling)
            for i, (lane, fitted, prompts) in enumerate(zip(self._lanes, decoding, reading, strict=True)):
                fitted.result()
                found = None if lane.lane != self.config.lanes[i] else self._await_prompts(lane, prompts)
                while found is None:
                    self._scheduler.shrink(i, lane.lane.slots)
                    # Free the prompts first: fewer rows read fewer prompts at once
                    prompts.clear()
                    prompts += [begin(_read_prompts, lane, size) for size in self._sizes_beside(lane)]
                    found = self._await_prompts(lane, prompts)
                self._on_mesh(self._warm_rows, lane, found)

    def _await_prompts(
        self, lane: LanePrograms, prompts: list[Future[list[Prefix]]]
    ) -> list[list[Prefix]] | None:
        """Return prompts that were read; or None if memory was short, and the lane has fewer rows now."""
        try:
            found = [one.result() for one in prompts]
            self._on_mesh(_read_into_rows, lane, self._into_rows, found[-1][0])
            return found
        except jax.errors.JaxRuntimeError as error:
            self._on_mesh(lane.shrink, error)
            self._on_mesh(lane.fit)
            return None

    def _warm_rows(self, lane: LanePrograms, by_size: list[list[Prefix]]) -> None:
        """Compile what comes behind prompts that were read, by the size of their pieces."""
        *shorter, whole = by_size
        for size, prompts in zip(self._sizes, shorter, strict=False):
            if lane.count_prompts(size) > 1:
                prompts.append(_read_one(lane, whole[0], size))
        prompts = [prompt for some in by_size for prompt in some]
        copies = [copy_prompt(prompt) for prompt in prompts] if self.config.prefix_bytes else []
        for search in self._searches:
            if search.lane is lane:
                search.warm(prompts)
        for prompt in (*(whole if self._into_rows else prompts), *copies):
            lane.enter(prompt, [0], [Request(b"", 1)], [np.ones(1, np.int32)])
            jax.block_until_ready([lane.decode({0}) for _ in range(2)])

    def _sizes_beside(self, lane: LanePrograms) -> tuple[int, ...]:
        """Return the sizes of pieces that are read beside the rows of a lane."""
        is_searched = any(search.lane is lane for search in self._searches)
        return tuple(size for size in self._sizes if is_searched or size not in self._into_rows)

    def _on_mesh[T](self, call: Callable[..., T], *given: Any) -> T:
        with self._in_force():
            return call(*given)

    def _in_force(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def close(self, *, within_s: float | None = None) -> None:
        """Take no more requests, and stop once all have ended.

        Args:
          within_s: seconds after which those that are left are cancelled; None waits for all.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is None:
            return
        self._thread.join(within_s)
        with self._changed:
            for ticket in tuple(self._jobs):
                self._end(ticket, "cancelled")
            self._changed.notify_all()
        self._thread.join()

    def _cancel(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket in self._jobs:
                self._end(ticket, "cancelled")

    def _end(self, ticket: Ticket, finish: Finish) -> None:
        """End a request with what its stop strings held back."""
        job = self._jobs.pop(ticket)
        self._scheduler.end(ticket, "finished" if finish in ("stop", "length") else finish)
        job.stream.put(job.stops.flush(finish))
        self._changed.notify_all()

    def _work(self) -> None:
        """Work until the engine is closed and all requests have ended."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._jobs or self._in_flight or self._closing)
                    if not self._jobs and not self._in_flight:
                        return
                self._on_mesh(self._round)
        except Exception as error:
            self._fail(error)
        finally:
            self._next_begins.set()
            self._results.shutdown()

    def _fail(self, error: Exception) -> None:
        """End all requests with an error that is not theirs."""
        with self._changed:
            self._error = error
            for ticket, job in self._jobs.items():
                self._scheduler.end(ticket, "failed")
                job.stream.fail(RuntimeError(f"the engine failed: {error}"))
            self._jobs.clear()
            self._changed.notify_all()

    def _round(self) -> None:
        """Send a round to the device, while the results of the one before are handed out."""
        with self._changed:
            work = self._scheduler.next_round()
            for ticket in work.expired:
                job = self._jobs.pop(ticket)
                job.stream.put(job.stops.flush("expired"))
            parts = [(part, self._jobs[part.ticket]) for part in work.parts]
            self._rounds += 1
            self._changed.notify_all()
        # Hand out from here on: before, that would keep this thread from sending, and the device would wait
        self._next_begins.set()
        read = [self._read_parts(*given) for given in self._group(parts)]
        decoding = work.decoding.items()
        drawn = [(tickets, self._lanes[lane].decode(tickets)) for lane, tickets in decoding]
        if read or drawn:
            self._next_begins = threading.Event()
            given = (read, drawn, self._next_begins)
            self._in_flight.append(self._results.submit(self._await_round, *given))
        while len(self._in_flight) > bool(read or drawn):
            self._in_flight.popleft().result()

    def _await_round(
        self,
        read: list[Array | None],
        drawn: list[tuple[dict[int, Ticket], Table]],
        next_begins: threading.Event,
    ) -> None:
        """Wait for a round, and hand out what each lane has drawn while the next one is sent."""
        # Wait for prompts too: without it all pieces of a long one would lie before whatever comes next
        jax.block_until_ready(read)
        tables = [(tickets, np.asarray(table)) for tickets, table in drawn]
        next_begins.wait()
        for tickets, table in tables:
            self._hand_out(tickets, unpack_draws(table))

    def _group(self, parts: list[_Reading]) -> Iterator[tuple[LanePrograms, int, list[_Reading]]]:
        """Yield the pieces of prompts that one call reads, with its lane and the size of its rows."""
        groups: dict[tuple[int, int, bool], list[_Reading]] = {}
        for part, job in parts:
            is_whole = part.size in self._into_rows and not part.start
            groups.setdefault((part.ticket.lane, part.size, is_whole), []).append((part, job))
        # Read the longest pieces first: a round may read the end of such a prompt too
        for (number, size, is_whole), group in sorted(groups.items(), key=lambda each: -each[0][1]):
            lane = self._lanes[number]
            # Read the end of a longer prompt alone: what was read of it is one argument of the program
            most = lane.lane.slots if is_whole else lane.count_prompts(size)
            for some in batched(group, 1 if size in self._into_rows and not is_whole else most):
                yield lane, size, list(some)

    def _read_parts(self, lane: LanePrograms, size: int, parts: list[_Reading]) -> Array | None:
        """Read pieces of prompts in rows of `size`; prompts that are whole enter their rows.

        Returns an array to wait for, or None if nothing is read.
        """
        slots, jobs = [part.slot for part, _ in parts], [job for _, job in parts]
        requests, ids = [job.stream.request for job in jobs], [job.ids for job in jobs]
        begun, done = [self._take_prompt(job) for job in jobs], None
        self._read += sum(part.stop - part.start for part, _ in parts)
        first = parts[0][0]
        if size in self._into_rows:
            return lane.read_into_rows(slots, requests, ids, size, begun[0], first.start)
        if size:
            pieces = [own[part.start : part.stop] for own, (part, _) in zip(ids, parts, strict=True)]
            prompts, done = lane.read(begun, pieces, size, [request.adapter for request in requests])
            self._keep_prefixes(parts, prompts)
        else:
            prompts = lane.begin() if begun[0] is None else begun[0]
        if first.is_last:
            lane.enter(prompts, slots, requests, ids)
        else:
            # A piece that is followed by others fills its rows, and is read alone
            jobs[0].prompt = prompts
        return done

    def _keep_prefixes(self, parts: list[_Reading], prompts: Prefix) -> None:
        for row, (part, job) in enumerate(parts):
            known, adapter = job.ids[: part.ticket.to_read], job.stream.request.adapter
            self._prefixes.put(part.ticket.lane, adapter, known, part.stop, prompts, row)

    def _take_prompt(self, job: _Job) -> OnePrompt | None:
        """Take what was read of a prompt, or is known of it; None at its beginning."""
        # Copy here, not where the lock is held: the device may be busy
        prompt = job.prompt if job.known is None else copy_prompt(job.known)
        job.known = job.prompt = None
        return prompt

    def _find_prefix(self, ticket: Ticket) -> int:
        """Return how much of a prompt is known, and note its state."""
        job = self._jobs[ticket]
        ids = job.ids[: ticket.to_read]
        count, job.known = self._prefixes.take(ticket.lane, job.stream.request.adapter, ids)
        self._known += count
        return count

    def _hand_out(self, tickets: dict[int, Ticket], drawn: Drawn) -> None:
        """Give the draws of a round to the requests that have not ended."""
        sound, counts = drawn.finite.all(1).tolist(), drawn.kept.sum(1).tolist()
        data = (drawn.ids - OFFSET).astype(np.uint8)
        drafted, accepted, ended = (x.tolist() for x in (drawn.drafted, drawn.accepted, drawn.ended))
        with self._changed:
            for slot, ticket in tickets.items():
                if ticket not in self._jobs:
                    continue
                job, count = self._jobs[ticket], counts[slot]
                if not sound[slot]:
                    self._refuse_nonfinite(job, int(np.argmin(drawn.finite[slot])))
                    continue
                self._scheduler.count_drawn(ticket, count)
                self._drawn += count
                self._drafted += drafted[slot]
                self._accepted += accepted[slot]
                arrays = {name: getattr(drawn, name)[slot, :count] for name in ARRAYS}
                self._pass_on(job, Piece(data[slot, :count].tobytes(), **arrays), ended[slot])

    def _refuse_nonfinite(self, job: _Job, step: int) -> None:
        """End a request whose logits are not finite at this byte of the round."""
        del self._jobs[job.ticket]
        self._scheduler.end(job.ticket, "failed")
        job.stream.fail(
            ValueError(
                f"logits are not finite: byte {job.drawn + step} after a prompt of "
                f"{len(job.stream.request.prompt)} bytes; {explain_nonfinite(self._params)}"
            )
        )

    def _pass_on(self, job: _Job, piece: Piece, ended: bool) -> None:
        """Give a request its next bytes, and end it where they are its last."""
        request = job.stream.request
        job.drawn += len(piece.data)
        whole = job.drawn >= request.max_new_bytes
        finish = "length" if whole else "stop" if ended else None
        piece = job.stops.pass_on(piece if finish is None else replace(piece, finish=finish))
        if piece.finish is None and request.max_unread is not None:
            slow = job.stream.unread + len(piece.data) > request.max_unread
            if slow:
                return self._end(job.ticket, "cancelled")
        if piece.finish is not None:
            del self._jobs[job.ticket]
            self._scheduler.end(job.ticket, "finished")
        if piece.data or piece.finish:
            job.stream.put(piece)


def _check_mesh(mesh: Mesh | None) -> Mesh | None:
    """Return a mesh that splits weights only.

    Raises:
      ValueError: it splits rows or sequences, which lanes do not.
    """
    if mesh is not None and mesh.shape.get("tensor") != mesh.size:
        raise ValueError(
            f"mesh {dict(mesh.shape)}: an engine splits weights only, use tensor={mesh.size} alone"
        )
    return mesh


def _make_lane(
    decoder: Decoder, params: dict[str, Any], drafts: Drafts | None, piece_bytes: int, lane: Lane
) -> LanePrograms:
    if drafts is None:
        return LanePrograms(decoder, params, lane, piece_bytes)
    return DraftedLane(decoder, params, lane, piece_bytes, drafts)


def _read_prompts(lane: LanePrograms, size: int) -> list[Prefix]:
    """Read prompts of one piece, and one of two where it is read alone.

    Over devices, programs see what they return themselves as laid out anew.
    """
    begun = _read_one(lane, None, size)
    if lane.count_prompts(size) > 1:
        return [begun]
    return [begun, _read_one(lane, _read_one(lane, None, size), size)]


def _read_into_rows(lane: LanePrograms, sizes: Sequence[int], held: OnePrompt) -> None:
    """Read a prompt of each size into a row, once from its beginning and once behind `held`."""
    for size, before in product(sizes, (None, held)):
        jax.block_until_ready(lane.read_into_rows([0], [Request(b"", 1)], [NO_IDS], size, before))


def _read_one(lane: LanePrograms, before: OnePrompt | None, size: int) -> Prefix:
    return lane.read([before], [np.ones(1, np.int32)], size)[0]
