"""Decides, from the progress of one launch's requests and from `/slots`, which requests are
stalled. Sans-IO; not thread-safe; instants (`*_at`, `now`) are monotonic seconds.

Before it decides, every request is asked for its progress (a *round*); the others are judged at the
next round even if one has not answered. While a request is suspected, `/slots` is polled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llama_worker.clock import latest
from llama_worker.config.profiles import TimeoutProfile
from llama_worker.request.progress import Batch, Progress, newest
from llama_worker.request.table import RequestRecord
from llama_worker.server.blame import Verdict, VerdictHistory, is_busy
from llama_worker.server.messages import EvidenceSeen, GivenUp
from llama_worker.server.pace import Pace
from llama_worker.server.slot_verdicts import SlotMoves, SlotsRound
from llama_worker.server.slots import SILENT_S, SlotsLook, SlotsWatch
from llama_worker.server.timeouts import Neighbours, SlotSigns, describe, timeout_verdict
from llama_worker.types.request import RequestFailReason, RequestPhase, RequestState

ENDED_ID = 0  # stands for all ended requests; no request has this id


class RequestWatch:
    """Watches the requests of one launch. `batch_tokens`: see `ServerWatch`."""

    def __init__(self, profile: TimeoutProfile, *, batch_tokens: int | None = None) -> None:
        self.pace = Pace()  # learnt in all launches so far, which share one configuration
        self.ids: set[int] = set()  # ids of the requests in flight
        self.progress: dict[int, Progress] = {}  # by id: the latest report
        self.slots = SlotsWatch()
        # False: `/slots` may come from another server behind the same address than the one that
        # has the requests. Then it may show work, but gives up no request.
        self.slots_are_reliable = True
        self.liveness_at: float | None = None
        self.takes_media = False  # the model does, so that another client may have sent some
        # when the latest readiness probe began that was answered within `LOOK_TIMEOUT_S`
        self.probe_answered_at: float | None = None
        self._profile = profile
        self._batch_tokens = batch_tokens
        self._is_cold = True  # nothing was computed in this launch so far
        # by id: the latest data of each request in flight; under `ENDED_ID`, of all ended ones
        self._data_at: dict[int, float] = {}
        self._unanswered: set[int] = set()  # ids that have not answered in the current round
        self._answered: list[int] = []  # ids that have answered
        self._history = VerdictHistory()
        self._shortage_at: float | None = None  # when a look last failed for lack of resources
        self._reads_at: float | None = None  # when the server last read its memory from disk
        self._leftover_batch = _LeftoverWork()
        self._leftover_media = _LeftoverWork()  # images or sounds to be encoded
        self._moved_at: dict[int, float] = {}  # by id: when a slot, perhaps its own, last moved

    @property
    def data_at(self) -> float | None:
        """When any request last received data, including requests that have ended."""
        return max(self._data_at.values(), default=None)

    def data_of_others(self, request_id: int) -> float | None:
        """When any request but this one last received data."""
        return max((at for other, at in self._data_at.items() if other != request_id), default=None)

    def begin(self, request_id: int) -> bool:
        """Watch a request that is in flight; returns whether it is the only one."""
        self.ids.add(request_id)
        return len(self.ids) == 1

    def end(self, record: RequestRecord, now: float) -> list[GivenUp]:
        """A request has ended; returns the verdicts that waited only for its answer."""
        request_id = record.request_id
        self.ids.remove(request_id)
        self._unanswered.discard(request_id)
        self._moved_at.pop(request_id, None)
        self._learn(request_id, record.batches)
        self.pace.forget(request_id)
        self._note_data(request_id, record.last_data_at)
        self._note_data(ENDED_ID, self._data_at.pop(request_id, None))
        progress = self.progress.pop(request_id, None)
        self._history = self._history.ended(record)
        in_one_piece = progress is not None and progress.in_one_piece
        if in_one_piece and record.result["state"] is RequestState.COMPLETED:
            self._note_data(ENDED_ID, now)  # its data are its client's
        if record.is_broken_off:
            self._broken_off(record, progress, now)
        given_up = self._judge_if_all_answered(now)
        if not self.ids:
            self.slots.stop_looking()
        return given_up

    def _broken_off(self, record: RequestRecord, progress: Progress | None, now: float) -> None:
        """The server may compute its batch now or later. `progress` None: it never reported."""
        had_headers = record.ended_in in (RequestPhase.PREFILL, RequestPhase.GENERATING)
        # Before the headers the first batch may be in progress; in one piece, any.
        in_a_batch = (
            had_headers or progress is None or progress.is_served or progress.awaits_one_piece
        )
        if in_a_batch and self._may_leave_a_batch(now):
            self._leftover_batch.begin(now)
        if record.has_media and record.ended_in is not RequestPhase.GENERATING:
            self._leftover_media.begin(now)
        if record.ended_in is RequestPhase.WAITING:
            self._leftover_batch.queue(record.request_id, now)
            if record.has_media:
                self._leftover_media.queue(record.request_id, now)

    def _may_leave_a_batch(self, now: float) -> bool:
        """Whether one more batch may be left over: there is none, or that one has had its time. Not
        if somebody has waited ever since: a server that does nothing for it begins no batch."""
        since, limit_s = self._leftover_batch_since(), self._profile.idle_stream_timeout_s
        if since is None:
            return True
        waiting = (RequestPhase.WAITING, RequestPhase.PREFILL)
        has_waited = any(
            each.phase in waiting and each.turn_started_at <= since
            for each in self.progress.values()
        )
        return limit_s is not None and now - since >= limit_s and not has_waited

    def record_evidence(self, seen: EvidenceSeen) -> None:
        """Record what a liveness probe saw the server do."""
        if seen.alive:
            self.liveness_at = seen.at
        if seen.by_shortage:
            self._shortage_at = seen.at
        if seen.reads:
            self._reads_at = seen.at

    def drop_answers(self) -> None:
        """Drop the answers of the current round, which are outdated."""
        self._unanswered, self._answered = set(), []

    def begin_round(self, now: float) -> list[GivenUp]:
        """Begin a round, in which every request is asked; returns the verdicts of the round before
        if a request has not answered it."""
        given_up = self._judge_answered(now)
        self._unanswered = set(self.ids)
        return given_up

    def record_progress(
        self, progress: Progress, now: float, *, for_verdict: bool
    ) -> list[GivenUp]:
        """Record a request's progress; returns the verdicts if it was the last to answer."""
        request_id = progress.request_id
        if request_id not in self.ids:
            return []
        self._note_data(request_id, progress.data_at)
        self.progress[request_id] = progress
        self._learn(request_id, progress.batches)
        self._is_cold = self._is_cold and not progress.tokens
        if not for_verdict or request_id not in self._unanswered:
            return []
        self._unanswered.remove(request_id)
        self._answered.append(request_id)
        return self._judge_if_all_answered(now)

    def _note_data(self, request_id: int, at: float | None) -> None:
        if at is not None:
            self._data_at[request_id] = max(at, self._data_at.get(request_id, at))
            self._leftover_batch.served(request_id)
            self._leftover_media.served(request_id)

    def _learn(self, request_id: int, batches: tuple[Batch, ...]) -> None:
        self.pace.learn(request_id, batches, is_cold=self._is_cold)
        self._is_cold = self._is_cold and not batches

    # ------------------------------------------------------------ verdicts

    def _judge_if_all_answered(self, now: float) -> list[GivenUp]:
        return [] if self._unanswered else self._judge_answered(now)

    def _judge_answered(self, now: float) -> list[GivenUp]:
        reports = [self.progress[each] for each in self._answered if each in self.progress]
        self.drop_answers()
        if not reports:
            return []
        given_up = [
            self._give_up(progress.request_id, verdict, now)
            for progress in reports
            if (verdict := self._judge(progress, reports, now)) is not None
        ]
        if self.slots.complete:
            self.slots.end_round(now)
        if any(self._is_looked_at(progress, now) for progress in reports):
            self.slots.start_looking(now)
        else:
            self.slots.stop_looking()
        return given_up

    def _give_up(self, request_id: int, verdict: Verdict, now: float) -> GivenUp:
        others_data_at = self.data_of_others(request_id)
        self._history, restarts = self._history.judge(
            request_id,
            verdict,
            other_is_served=is_busy(others_data_at, profile=self._profile, now=now),
            newest_request_id=max(self.ids),
        )
        return GivenUp(request_id=request_id, verdict=verdict, restarts_server=restarts)

    def _judge(self, progress: Progress, reports: Sequence[Progress], now: float) -> Verdict | None:
        is_looked_at, slots = self._is_looked_at(progress, now), self.slots
        around = slots.around_gap
        if is_looked_at and around is not None:
            # A slot may move between two rounds, and looks without an answer may leave no round
            # complete: so the looks before and after are compared, too, but give up no request.
            self._judge_looks(around, around[0].asked_at, progress, reports, now)
        verdict = self._judge_by_times(progress, now)
        if verdict is not None or not is_looked_at:
            return verdict
        if slots.complete:
            verdict = self._judge_looks(slots.looks, now, progress, reports, now)
        else:
            verdict = self._judge_silent_slots(progress, now)
        is_suspect = self._is_silent(progress, self._profile.suspect_after_s, now)
        return verdict if is_suspect and self.slots_are_reliable else None

    def _judge_by_times(self, progress: Progress, now: float) -> Verdict | None:
        request_id, slots = progress.request_id, self.slots
        others = [each for each in self.progress.values() if each.request_id != request_id]
        may_encode = self._may_encode_media() or any(
            each.may_encode for each in self.progress.values()
        )
        any_awaits_slot = any(each.may_await_slot for each in self.progress.values())
        shows_prompt_progress = (
            self.slots_are_reliable and slots.answered_last_look and not slots.may_progress_unseen
        )
        return timeout_verdict(
            progress,
            # A look that failed for lack of resources counts as a sign of work.
            liveness_at=latest(self.liveness_at, self._shortage_at, self._moved_at.get(request_id)),
            neighbours=Neighbours(
                data_at=self.data_of_others(request_id),
                any_is_served=any(other.is_served for other in others),
                any_awaits_one_piece=any(other.awaits_one_piece for other in others),
                leftover_since=self._leftover_batch_since(),
            ),
            slots=SlotSigns(
                moved_at=self._moved_at.get(request_id),
                any_moved_at=slots.moved_at,
                held_up_at=slots.moved_at if any_awaits_slot else slots.held_up_at,
                shows_prompt_progress=shows_prompt_progress,
                shows_all=shows_prompt_progress and slots.complete and not may_encode,
            ),
            profile=self._profile,
            now=now,
        )

    def _judge_silent_slots(self, progress: Progress, now: float) -> Verdict | None:
        """The task queue is stuck if `/slots` answered before and no longer does, while the rest of
        HTTP still answers.

        Builds of 2025 and of spring 2026 answer it only between two batches: for them, silence
        counts only if this launch has answered during a batch. Those that answer then do while an
        image is encoded, too (b10429 to b11434).
        """
        since = self.slots.silent_since
        if since is None or not self.slots.answers_during_batches:
            return None
        since = newest(since, self.data_at, self._reads_at)
        silent_s = now - since
        answered_at = self.probe_answered_at
        if silent_s < SILENT_S or answered_at is None or answered_at <= max(since, now - SILENT_S):
            return None
        described = describe(progress, liveness_at=self.liveness_at, now=now)
        detail = f"/slots has not answered for {silent_s:.1f} s, /v1/models has; {described}"
        return Verdict(reason=RequestFailReason.STALL_TIMEOUT, detail=detail)

    def _judge_looks(
        self,
        looks: Sequence[SlotsLook],
        moved_at: float,
        progress: Progress,
        reports: Sequence[Progress],
        now: float,
    ) -> Verdict | None:
        """The verdict by looks. Movement that may be the request's is work as of `moved_at`."""
        signs = (self.data_at, self.slots.moved_at, self._reads_at)
        unchanged_since = newest(self.slots.unchanged_since, self._reads_at)
        slots_round = SlotsRound(
            looks=looks,
            suspect=progress,
            others=[other for other in reports if other.request_id != progress.request_id],
            others_data_at=self.data_of_others(progress.request_id),
            all_are_silent=all(self._is_suspect_age(at, now) for at in signs),
            all_stood_still=self._is_suspect_age(unchanged_since, now),
            unchanged_since=unchanged_since,
            pace=self.pace,
            batch_tokens=self._batch_tokens,
            may_encode=self._any_may_encode(looks[-1].busy_count, reports),
            is_cold=self._is_cold,
            silent_work_timeout_s=self._profile.silent_work_timeout_s,
            liveness_at=self.liveness_at,
            now=now,
        )
        judgement = slots_round.judge()
        if not isinstance(judgement, SlotMoves):
            return judgement
        request_id = progress.request_id
        self._moved_at[request_id] = max(moved_at, self._moved_at.get(request_id, moved_at))
        return None

    def _is_looked_at(self, progress: Progress, now: float) -> bool:
        """Whether the slots are looked at because of the request: it is suspected, or a part of a
        limit is over that a slot lifts if it is seen to move."""
        profile = self._profile
        if profile.suspect_after_s is None:
            return False
        limits = (
            profile.idle_stream_timeout_s,
            profile.prefill_liveness_timeout_s,
            profile.silent_work_timeout_s,
        )
        parts = [limit_s / 2 for limit_s in limits if limit_s is not None]
        if progress.phase is RequestPhase.WAITING:  # a batch of another's may take most of it
            parts.append(profile.headers_timeout_s / 6)
        return self._is_silent(progress, min([profile.suspect_after_s, *parts]), now)

    def _is_silent(self, progress: Progress, for_s: float | None, now: float) -> bool:
        streams = progress.phase not in (RequestPhase.TOOL, RequestPhase.DONE)
        is_old = for_s is not None and now - progress.heard_at >= for_s
        return streams and not progress.concluding and is_old

    def _is_suspect_age(self, at: float | None, now: float) -> bool:
        """Whether data or a slot's movement at `at` is so old that a request is suspected."""
        limit_s = self._profile.suspect_after_s
        return limit_s is not None and (at is None or now - at >= limit_s)

    def _leftover_batch_since(self) -> float | None:
        """Since when the server may compute a batch of broken-off requests; None: it does not."""
        return self._leftover_batch.since(self.data_at, self.slots.moved_at, self.liveness_at)

    def _may_encode_media(self) -> bool:
        """Whether the server may still encode media of a broken-off request. Its processes work
        meanwhile, so `liveness_at` does not show that it is done."""
        return self._leftover_media.since(self.data_at, self.slots.moved_at) is not None

    def _any_may_encode(self, busy_count: int, reports: Sequence[Progress]) -> bool:
        """Whether a slot may encode media, also of another client, whose request is not watched:
        more slots work than requests have their headers. During an encode no other request gets a
        slot, although one is idle (b10453 to b11434)."""
        if self._may_encode_media() or any(each.may_encode for each in reports):
            return True
        return self.takes_media and busy_count > sum(each.is_served for each in reports)


class _LeftoverWork:
    """Work that a server may still do for broken-off requests. It finishes what is in progress, and
    then begins on those that waited in its queue: it notices only between two batches that a client
    is gone (b11434)."""

    def __init__(self) -> None:
        self._began_at: float | None = None  # None: nothing is in progress
        self._queued: dict[int, float] = {}  # by the request's id: when it left

    def begin(self, now: float) -> None:
        """The work may be in progress."""
        self._began_at = now

    def queue(self, request_id: int, now: float) -> None:
        """The work may begin as soon as what is in progress is done."""
        self._queued[request_id] = now

    def served(self, request_id: int) -> None:
        """The request has received data: queued ones admitted before it have had their turn."""
        for queued_id in [each for each in self._queued if each < request_id]:
            del self._queued[queued_id]

    def since(self, *signs: float | None) -> float | None:
        """When the work in progress may have begun; None: the server has none left. A newer sign of
        work ends it, and begins the first that is queued, also one that left after the sign."""
        done_at = newest(-math.inf, *signs)
        is_done = self._began_at is not None and done_at > self._began_at
        if is_done:
            self._began_at = None
        if self._began_at is None and self._queued:
            first_id = min(self._queued)
            if is_done or done_at > self._queued[first_id]:
                self._began_at = max(done_at, self._queued.pop(first_id))
        return self._began_at
