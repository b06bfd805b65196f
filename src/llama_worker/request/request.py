"""Runs one request from prompt to record: takes messages, returns effects. Sans-IO.

A `Request` is driven by one actor, which carries out the effects that `begin` and `step` return, in
order, and calls `step` with a Tick at `deadline`. The states and the transitions between them are
in `states`.

How things end, one verb for each:

    finish   the model is done with its turn; the server gives the reason
    cancel   the host does not want the answer any more
    abandon  the worker gives up the request, for a reason
    fail     `step` raised or is stuck: the request ends without it
    drop     nobody waits for a tool call any more
    close    a connection is closed
    end      the request is terminal: RequestEnded, the last effect, hands over its record
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_worker.clock import ToUnix
from llama_worker.config.settings import WorkerConfig
from llama_worker.errors import masked
from llama_worker.mailbox import Tick
from llama_worker.request import ending, messages, states
from llama_worker.request.output import Output, read_output
from llama_worker.request.params import needs_specific_slots, runaway_tokens
from llama_worker.request.progress import Progress
from llama_worker.request.prompt import Prompts
from llama_worker.request.report import RequestTotals, build_progress, build_record, build_status
from llama_worker.request.turn import ToolBatch, ToolUse, Turn
from llama_worker.stream.calls import ParsedCall
from llama_worker.stream.events import encodable
from llama_worker.stream.failure import StreamFailure, refuses_tools
from llama_worker.stream.turn_end import Finished, TurnEndEvent, TurnOutcome
from llama_worker.types.request import (
    OutputChunk,
    RequestFailReason,
    RequestPhase,
    RequestState,
    RequestStatus,
)

Effects = list[messages.RequestOutput]


class Request:
    """One request's state machine. Not thread-safe: one actor at a time."""

    def __init__(
        self, order: messages.Begin, *, config: WorkerConfig, unix: ToUnix, now: float
    ) -> None:
        self.request_id = order.request_id
        self.state: states.State  # set by `begin`
        self._config = config
        self._prompts = Prompts(config, order.submission, prompted=order.prompted)
        self._opens_thinking = order.opens_thinking and self._prompts.keep_template_end
        self._totals = RequestTotals(
            request_id=self.request_id,
            job_name=order.submission.job_name,
            created_at=now,
            unix=unix,
            output=Output(config.loop_detector),
            iterations_left=config.max_tool_iterations,
            job_key=order.submission.job_key,
            has_media=bool(order.submission.part_kinds - {"text"}),
            links_media=order.submission.links_media,
            needs_specific_slots=needs_specific_slots(self._prompts.params),
        )
        self._tools = ToolUse(config, self._totals, order.submission.messages)
        self._turns_count = 0
        self._turn = self._new_turn({}, now)

    # ------------------------------------------------------------ entries

    def begin(self, now: float) -> Effects:
        return self._write_bios(None, now)

    def step(self, message: messages.RequestInput, now: float) -> Effects:
        """The effects of a message; none if it is for an earlier turn or another request."""
        effects = self._step(message, now)
        return [*self._tools.take_new_signals(), *effects]

    def _step(self, message: messages.RequestInput, now: float) -> Effects:
        match self.state, message:
            case (
                states.Streaming() | states.Settling() | states.ReadingRest(),
                messages.StreamEvents(turn_id=self._turn_id),
            ):
                return self._take_events(message)  # nearly always
            case (
                states.Streaming() | states.Settling() | states.ReadingRest(),
                messages.StreamOpened(turn_id=self._turn_id),
            ):
                self._turn.headers_at = message.at
            case states.Streaming() | states.Settling(), messages.StreamClosed(is_aborted=True):
                pass  # not by this request: the WorkerActor will send the reason
            case states.Streaming() | states.Settling(), messages.StreamClosed(
                turn_id=self._turn_id
            ):
                return self._turn_ended(self._turn.end.closed(message.failure), message.at)
            case states.ReadingRest(outcome=outcome), messages.StreamClosed(turn_id=self._turn_id):
                return self._give_up(outcome, message.at)
            case states.Streaming() | states.Settling(), messages.Abandon(
                request_id=None | self.request_id, reason=RequestFailReason.SERVER_DIED
            ):
                outcome = ending.failed(message.reason, message.detail)
                self.state = states.ReadingRest(since=now, outcome=outcome)
            case states.Prompting(batch=batch), messages.BiosWritten(turn_id=self._next_turn_id):
                return self._bios_written(message, batch, now)
            case states.RunningTools(batch=batch), messages.CallEnded(turn_id=self._turn_id) if (
                message.call_id == batch.call.id
            ):
                return self._call_ended(batch, message)
            case states.Disconnected(failure=failure, is_asked=True), messages.ServerChecked(
                request_id=self.request_id
            ):
                if not message.is_gone:
                    return self._end(ending.failed_by(failure), now)
                self.state = states.Disconnected.asked(ending.SERVER_GONE, now)
            case states.ReadingRest(outcome=outcome), messages.Abandon(
                request_id=None | self.request_id
            ):
                return self._give_up(outcome, now)
            case _, messages.Abandon(request_id=None | self.request_id):
                return self._give_up(ending.failed(message.reason, message.detail), now)
            case _, messages.CancelRequest(request_id=self.request_id):
                return self._end(ending.CANCELED, now)
            case _, Tick():
                return self._tick(now)
        return []

    def _tick(self, now: float) -> Effects:
        if not isinstance(self.state, states.Timed) or now < self.state.until:
            return []
        match self.state:
            case states.Prompting(limit_s=limit_s):
                detail = f"the BIOS provider did not return within bios_timeout_s {limit_s:g} s"
                return self._end(ending.failed(RequestFailReason.PROMPT_ERROR, detail), now)
            case states.Settling():
                return self._turn_finished(now)
            case states.Disconnected(failure=failure, is_asked=False):
                self.state = states.Disconnected.asked(failure, now)
                return [messages.AskIfServerDied(request_id=self.request_id)]
            case states.Disconnected(failure=failure):
                return self._end(ending.failed_by(failure), now)
            case states.ReadingRest(outcome=outcome):
                return self._give_up(outcome, now)
            case states.RunningTools(batch=batch, limit_s=limit_s):
                name = batch.call.name
                text = f"tool {name!r} did not return within tool_timeout_s {limit_s:g} s"
                return self._call_failed(batch, text, now, drop=True)

    @property
    def deadline(self) -> float | None:
        """When the next Tick is due, or None."""
        return self.state.until if isinstance(self.state, states.Timed) else None

    def fail(self, reason: RequestFailReason, detail: str, now: float) -> Effects:
        """End although `step` raised or is stuck: keep what was shown, lose what was held back."""
        ended = self._finish(ending.failed(reason, detail), now)
        return [*self._tools.take_new_signals(), *ended]

    def saw_liveness(self, at: float | None) -> None:
        """Note the newest evidence that the server works; for the status."""
        self._totals.liveness_at = at

    # ------------------------------------------------------------ questions

    @property
    def phase(self) -> RequestPhase:
        return states.PHASES.get(type(self.state)) or self._turn.phase

    def progress(self) -> Progress:
        concluding = not isinstance(
            self.state, states.Streaming | states.RunningTools | states.Ended
        )
        return build_progress(self._totals, self._turn, self.phase, concluding=concluding)

    def status(self) -> RequestStatus:
        running = (
            self.state.batch.call.name if isinstance(self.state, states.RunningTools) else None
        )
        return build_status(self._totals, self._turn, self.progress(), running)

    @property
    def output_chars(self) -> tuple[int, int]:
        """Characters of text and of reasoning so far."""
        return self._totals.output.text.chars, self._totals.output.reasoning.chars

    def read_output(self, text_offset: int, reasoning_offset: int) -> OutputChunk:
        """The output after the offsets."""
        output, done = self._totals.output, isinstance(self.state, states.Ended)
        text, reasoning = output.text.read(), output.reasoning.read()
        return read_output(text, reasoning, text_offset, reasoning_offset, done=done)

    # ------------------------------------------------------------ a turn begins

    @property
    def _turn_id(self) -> messages.TurnId:
        return self.request_id, self._turns_count

    @property
    def _next_turn_id(self) -> messages.TurnId:
        return self.request_id, self._turns_count + 1

    def _write_bios(self, batch: ToolBatch | None, now: float) -> Effects:
        """Begin the next turn, which continues after `batch`, with its BIOS."""
        limit_s = self._config.timeouts.bios_timeout_s
        self.state = states.Prompting(since=now, limit_s=limit_s, batch=batch)
        return [
            messages.WriteBios(
                turn_id=self._next_turn_id,
                iterations_left=self._totals.iterations_left,
                prompted=self._prompts.prompted,
            )
        ]

    def _bios_written(
        self, written: messages.BiosWritten, batch: ToolBatch | None, now: float
    ) -> Effects:
        if written.error is not None:
            return self._end(ending.failed(RequestFailReason.PROMPT_ERROR, written.error), now)
        after = (self._turn, batch) if batch is not None else None
        body = self._prompts.next_body(written.bios, after)
        self._turns_count += 1
        self._opens_thinking = self._opens_thinking and not self._turn.had_reasoning_deltas
        self._turn = self._new_turn(body, now)
        self._totals.output.begin_turn()
        self.state = states.Streaming()
        hold_s = self._prompts.max_hold_s
        return [messages.PostChat(turn_id=self._turn_id, body=body, max_hold_s=hold_s)]

    def _new_turn(self, body: Mapping[str, Any], now: float) -> Turn:
        may_call = self._prompts.params.get("tool_choice") != "none"
        return Turn(
            started_at=now,
            prompted=self._prompts.prompted,
            tool_names=self._tools.names if may_call else (),
            opens_thinking=self._opens_thinking,
            loop_detector=self._config.loop_detector,
            runaway_tokens=runaway_tokens(body),
        )

    # ------------------------------------------------------------ a turn goes on, and ends

    def _take_events(self, batch: messages.StreamEvents) -> Effects:
        at, turn, output = batch.at, self._turn, self._totals.output
        turn.last_stream_byte_at = at
        for event in batch.events:
            if isinstance(event, TurnEndEvent):
                turn.record(event, at)
                ended = turn.end.feed(event)
                if ended is not None:
                    return self._turn_ended(ended, at)
                if isinstance(self.state, states.Streaming):
                    self.state = states.Settling(since=at)
                continue
            output.add(*turn.take(event, at))
            if self._tools.exit_names:
                self._tools.record_exits(turn, at)
            loop = output.loop or turn.hidden_loop
            if loop is not None:
                return self._end(ending.after_loop(loop), at)
            if turn.is_runaway:
                return self._end(ending.TOKEN_LIMIT, at)
        return []

    def _turn_ended(self, ended: TurnOutcome, at: float) -> Effects:
        match ended:
            case Finished():
                rest = self.state.outcome if isinstance(self.state, states.ReadingRest) else None
                return self._turn_finished(at, otherwise=rest)
            case StreamFailure() if ended.is_disconnect:
                self.state = states.Disconnected(since=at, failure=ended)
                return []
            case StreamFailure() if self._may_ask_without_tools and refuses_tools(ended):
                self._prompts.prompted = True
                detail = masked(ended.detail, self._config.api_key)
                return [messages.ToolsRefused(detail=detail), *self._write_bios(None, at)]
            case _:
                return self._end(ending.failed_by(ended, offers_tools=self._tools.offered), at)

    @property
    def _may_ask_without_tools(self) -> bool:
        """Whether to ask once more, with the tools described in the prompt."""
        is_first = self._turns_count == 1 and not self._prompts.prompted
        return is_first and self._config.tool_call_mode == "auto" and self._tools.offered

    def _give_up(self, outcome: ending.Outcome, now: float) -> Effects:
        """End with `outcome`, unless the model has finished a turn without calls to run."""
        if self._turn.is_over or self._turn.end.finish_reason is None:
            return self._end(outcome, now)
        return self._turn_finished(now, otherwise=outcome)

    def _turn_finished(self, now: float, otherwise: ending.Outcome | None = None) -> Effects:
        """End the request or run the turn's calls; `otherwise`: the outcome in place of calls."""
        following = self._turn_result(now)
        if isinstance(following, ending.Outcome):
            return self._end(following, now)
        if otherwise is not None:
            return self._end(otherwise, now)
        return [self._close_turn(), *self._run_call(self._tools.begin(following, now))]

    def _turn_result(self, now: float) -> ending.Outcome | tuple[ParsedCall, ...]:
        """What follows a turn that the model finished: the request's outcome, or calls to run."""
        turn, output, reason = self._turn, self._totals.output, self._turn.end.finish_reason
        cut_off = reason == "length"
        output.add(*turn.finish(cut_off=cut_off))
        if output.loop is not None:
            return ending.after_loop(output.loop)
        calls = self._tools.take_calls(turn, now, cut_off=cut_off)
        return ending.after_turn(reason, calls, self._totals.iterations_left) or calls.normal

    def _close_turn(self) -> messages.CloseStream:
        """Close the turn's stream, and add the turn to the totals."""
        self._totals.add_turn(self._turn)
        return messages.CloseStream(turn_id=self._turn_id)

    # ------------------------------------------------------------ tools

    def _run_call(self, batch: ToolBatch) -> Effects:
        """Order the batch's next call, not earlier: none may begin once the request has ended."""
        timeout_s = self._config.tool_timeout_s
        self.state = states.RunningTools(since=batch.started_at, limit_s=timeout_s, batch=batch)
        job_name = self._totals.job_name
        return [messages.CallTool(turn_id=self._turn_id, job_name=job_name, call=batch.call)]

    def _call_ended(self, batch: ToolBatch, ended: messages.CallEnded) -> Effects:
        if not ended.ok:
            return self._call_failed(batch, ended.text, ended.at)
        return self._continue_batch(
            self._tools.record_result(batch, ended.text, ended.at), ended.at
        )

    def _call_failed(
        self, batch: ToolBatch, error: str, at: float, *, drop: bool = False
    ) -> Effects:
        """Fail the request, or tell the model, as `tool_errors` says."""
        error = encodable(masked(error, self._config.api_key))[: ending.MAX_DETAIL_CHARS]
        if self._config.tool_errors == "fail":
            return self._end(ending.failed(RequestFailReason.TOOL_EXECUTION_ERROR, error), at)
        following = self._continue_batch(
            self._tools.record_result(batch, error, at, error=error), at
        )
        return [messages.DropTool(turn_id=self._turn_id), *following] if drop else following

    def _continue_batch(self, batch: ToolBatch, at: float) -> Effects:
        return self._write_bios(batch, at) if batch.is_done else self._run_call(batch)

    # ------------------------------------------------------------ the end

    def _end(self, outcome: ending.Outcome, now: float) -> Effects:
        """End, and keep all that the turn under way has brought."""
        if not isinstance(self.state, states.Ended):
            # what was held back is output, too
            self._totals.output.add_held_back(*self._turn.finish())
            if not self._turn.calls_taken:
                cut_off = self._turn.end.finish_reason in (None, "length")
                self._tools.take_calls(self._turn, now, cut_off=cut_off)
        return self._finish(outcome, now)

    def _finish(self, outcome: ending.Outcome, now: float) -> Effects:
        """End as recorded so far. If it has ended, hand the record over again: it may be unsent."""
        effects: Effects = []
        match self.state:
            case states.Ended(record=record):
                return [messages.RequestEnded(record=record)]
            case states.RunningTools(batch=batch):
                effects.append(messages.DropTool(turn_id=self._turn_id))
                error = f"the request ended while the tool was running: {outcome.fail_reason}"
                if outcome.fail_reason is RequestFailReason.TOOL_EXECUTION_ERROR:
                    error = outcome.fail_detail or error
                self._tools.record_failure(batch, error, now)
            case _ if self._turns_count and not self._turn.is_over:
                effects.append(self._close_turn())
        self._tools.record_not_run(outcome.fail_reason or outcome.finish_reason, now)
        has_answered = outcome.state is RequestState.COMPLETED
        reasoning, text = self._totals.output.cut_as_shown(self._turn.reasoning, self._turn.text)
        conversation = self._prompts.since_prompt(
            text=text, reasoning=reasoning, has_answered=has_answered
        )
        outcome, progress = outcome.for_host(self._config.api_key), self.progress()
        was_sent = not isinstance(self.state, states.Prompting)
        record = build_record(
            self._totals, self._turn, progress, outcome, conversation, now, was_sent=was_sent
        )
        self.state = states.Ended(record)
        return [*effects, messages.RequestEnded(record=record)]
