"""The host program of one episode, in a process of its own so that it can be stopped as a whole.

    python -m tests.reality.host EPISODE BURNERS SERVER MODEL

It plays the jobs and the hang of the episode (JSON) through a LlamaWorker, and says what came of
them: one JSON object a line on its standard output.
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import msgspec
import pykka

from llama_worker import (
    LlamaWorker,
    RequestFailReason,
    RequestResult,
    RequestState,
    RestartPolicy,
    TimeoutProfile,
    WorkerConfig,
    WorkerState,
    llama_server_cmd,
)
from llama_worker.clock import LATE_S, PAUSE_AFTER_GAP_S
from tests.ports import held_ports
from tests.reality.limits import found_within_s, tight_limits
from tests.reality.plan import SLOT_TOKENS, Episode, Job, Shape
from tests.server.conftest import ENDLESS, HOST, TOKENS_PER_WORD, forced, prompt_of
from tests.server.pace import measured
from tests.server.test_tools import ADD, FIRST_CALL_THEN_ANSWER, REPORT

UNFINISHED_S = 600.0  # a worker none of whose requests got further for so long is stuck
_ANSWER_S = 60.0
_LOOK_EVERY_S = 0.2
_TOOL_ANSWER = "Sum: Result: five"
_said = threading.Lock()


def say(fact: str, **details: Any) -> None:
    """A line for the campaign."""
    with _said:
        print(json.dumps({"fact": fact, **details}, default=str), flush=True)


class Adder:
    """Runs the tool of the jobs that call one."""

    def run_tool(
        self, *, name: str, arguments: dict[str, Any], request_id: int, job_name: str
    ) -> Any:
        return arguments["a"] + arguments["b"]


def worker_config(
    shape: Shape, limits: TimeoutProfile, *, server: str, model: str, port: int
) -> WorkerConfig:
    words = (
        *("--threads", str(shape.threads), "--batch-size", str(shape.batch_tokens)),
        *("--ctx-size", str(shape.slots * SLOT_TOKENS), "--no-warmup", "--no-ui"),
        *(() if shape.shows_slots else ("--no-slots",)),
    )
    command = llama_server_cmd(
        model, host=HOST, port=port, slots=shape.slots, executable=server, extra_args=words
    )
    tools: dict[str, Any] = {"normal_tools": [ADD], "exit_tools": [REPORT], "tool_runner": Adder()}
    return WorkerConfig(
        "reality",
        HOST,
        port,
        command,
        slots=shape.slots,
        timeouts=limits,
        restart=RestartPolicy(restart_backoff_s=0.01, max_restarts_per_window=50),
        bios_provider=lambda _: "",
        loop_detector=None,  # what a cut model says of itself may well repeat
        **(tools if shape.has_tools else {}),
    )


class Standstills:
    """Times in which this process did not run, as the library counts them. Its thread ends with the
    program."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []  # when one ended, and how much was lost
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            due_at = time.monotonic() + _LOOK_EVERY_S
            time.sleep(_LOOK_EVERY_S)
            late_s = time.monotonic() - due_at
            if late_s > LATE_S:
                self._seen.append((time.monotonic(), late_s + PAUSE_AFTER_GAP_S))

    def lost_s(self, since: float) -> float:
        """What counts for no limit, of the time since that instant."""
        return sum(lost_s for end_at, lost_s in self._seen if end_at > since)


class Host:
    """Plays one episode."""

    def __init__(self, episode: Episode, worker: LlamaWorker, limits: TimeoutProfile) -> None:
        self._episode, self._worker, self._limits = episode, worker, limits
        self._standstills = Standstills()
        self._began_at = time.monotonic()
        self._seen = threading.local()

    def run(self) -> None:
        say("ready", pid=self._status()["pid"])
        threads = [
            threading.Thread(target=self._play, args=(number, job))
            for number, job in enumerate(self._episode.jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        info = self._worker.get_debug_info().get(timeout=_ANSWER_S)
        reasons = [restart["reason"] for restart in info["recent_restarts"]]
        died = reasons.count(RequestFailReason.SERVER_DIED)
        say("jobs over", died=died, restarts=self._status()["restart_count"] - died)
        if self._episode.hang is not None:
            self._hang()
        info = self._worker.get_debug_info().get(timeout=_ANSWER_S)
        say("story", **{key: info[key] for key in ("recent_restarts", "recent_events", "evidence")})
        say("log", lines=info["recent_logs"][-40:])

    # ------------------------------------------------------------ jobs

    def _play(self, number: int, job: Job) -> None:
        time.sleep(max(0.0, self._began_at + job.at_s - time.monotonic()))
        params, expected = _reply(job)
        request_id = self._admitted(f"job {number}", job.prompt_tokens, params)
        admitted_at = time.monotonic()
        result, cancel_called = self._result(request_id, job.cancel_after_s)
        told = {"job": number, "took_s": round(time.monotonic() - admitted_at, 2)}
        if result is None:
            status = self._worker.get_status(request_id).get(timeout=_ANSWER_S)
            say("ended", how="unfinished", detail=str(status), **told)
        elif result["state"] is RequestState.COMPLETED:
            is_right = expected is None or result["text"] == expected
            how = "completed" if is_right else "wrong text"
            say("ended", how=how, detail=None if is_right else result["text"][-200:], **told)
        elif result["state"] is RequestState.CANCELED and cancel_called:
            say("ended", how="cancelled", detail=None, **told)
        else:
            reason = result.get("fail_reason")
            died = reason is RequestFailReason.SERVER_DIED
            detail = f"{reason}: {result.get('fail_detail')}"
            say("ended", how="lost with its server" if died else "given up", detail=detail, **told)

    def _admitted(self, name: str, prompt_tokens: int, params: dict[str, Any]) -> int:
        """The id, as soon as a slot is free."""
        words = max(1, prompt_tokens // TOKENS_PER_WORD)
        prompt = prompt_of(words, f"{name} of {self._episode.seed}")
        give_up_at = time.monotonic() + UNFINISHED_S
        while True:
            answer = self._worker.submit(name, "", prompt, params=params).get(timeout=_ANSWER_S)
            if answer["ok"]:
                return answer["request_id"]
            if time.monotonic() >= give_up_at:
                assert self._advances(), answer
                give_up_at = time.monotonic() + UNFINISHED_S
            time.sleep(0.05)

    def _advances(self) -> bool:
        """Whether a request of the worker got further since the last call in this thread."""
        ids = self._status()["active_request_ids"]
        statuses = [
            self._worker.get_status(request_id).get(timeout=_ANSWER_S) for request_id in ids
        ]
        before, self._seen.statuses = getattr(self._seen, "statuses", None), statuses
        return statuses != before

    def _result(
        self, request_id: int, cancel_after_s: float | None
    ) -> tuple[RequestResult | None, bool]:
        """(the result, whether it was cancelled here); None where it does not end."""
        future = self._worker.result(request_id)
        is_cancelled = False
        try:
            try:
                result = future.get(timeout=cancel_after_s or UNFINISHED_S)
            except pykka.Timeout:
                if cancel_after_s is None:
                    return self._result(request_id, None) if self._advances() else (None, False)
                is_cancelled = self._worker.cancel(request_id).get(timeout=_ANSWER_S)
                result = future.get(timeout=_ANSWER_S)
        except pykka.Timeout:
            return None, is_cancelled
        assert result["ok"], result
        return result, is_cancelled

    # ------------------------------------------------------------ hang

    def _hang(self) -> None:
        """Stops the server for good; says when it was given up, and whether the next one serves.

        The bound counts anew after a standstill of this process."""
        assert self._episode.hang is not None
        before = self._status()
        endless = {**ENDLESS, "max_tokens": 100_000}
        futures = [
            self._worker.result(self._admitted(f"hung {number}", tokens, endless))
            for number, tokens in enumerate(self._episode.hang.prompts_tokens)
        ]
        time.sleep(self._episode.hang.after_s)
        during = self._status()
        phases = [
            status.get("phase")
            for request_id in during["active_request_ids"]
            if (status := self._worker.get_status(request_id).get(timeout=_ANSWER_S))["ok"]
        ]
        early = during["restart_count"] - before["restart_count"]
        os.kill(during["pid"], signal.SIGSTOP)
        stopped_at = time.monotonic()
        bound_s = found_within_s(self._limits, in_flight=bool(phases))
        found_s = None
        lost_s = 0.0
        while found_s is None and time.monotonic() < stopped_at + bound_s + lost_s:
            lost_s = self._standstills.lost_s(stopped_at)
            if self._status()["restart_count"] > during["restart_count"]:
                found_s = time.monotonic() - stopped_at
            time.sleep(0.05)
        say(
            "hang",
            phases=phases,
            found_s=found_s,
            bound_s=bound_s + lost_s,
            early_restarts=early,
            lost_s=lost_s,
        )
        if found_s is None:
            os.kill(during["pid"], signal.SIGKILL)
        ends = [future.get(timeout=_ANSWER_S) for future in futures]
        say("hung requests", ends=[str(end.get("fail_reason")) for end in ends])
        self._wait_ready()
        job = Job(at_s=0.0, prompt_tokens=20, reply="exact", reply_tokens=4, cancel_after_s=None)
        self._play(-1, job)

    def _wait_ready(self) -> None:
        give_up_at = time.monotonic() + UNFINISHED_S
        while self._status()["state"] is not WorkerState.READY:
            assert time.monotonic() < give_up_at, self._status()
            time.sleep(0.05)

    def _status(self) -> Any:
        return self._worker.get_worker_status().get(timeout=_ANSWER_S)


def _reply(job: Job) -> tuple[dict[str, Any], str | None]:
    """Params, and the text that they force."""
    match job.reply:
        case "exact":
            text = " ".join(f"word {number}" for number in range(max(1, job.reply_tokens // 3)))
            return forced(text), text
        case "tool":
            return FIRST_CALL_THEN_ANSWER, _TOOL_ANSWER
        case "free":
            return {"max_tokens": job.reply_tokens, "ignore_eos": True, "seed": 1}, None


def main() -> None:
    told, burners, server, model = sys.argv[1:]
    episode = msgspec.json.decode(told, type=Episode)
    pace = measured(server, model, read_tokens=256, made_tokens=8)
    limits = tight_limits(episode, pace.prompt_token_s, int(burners))
    say("limits", idle_stream_timeout_s=limits.idle_stream_timeout_s, pace=str(pace))
    with held_ports() as take:
        config = worker_config(episode.shape, limits, server=server, model=model, port=take())
        with LlamaWorker(config) as worker:
            Host(episode, worker, limits).run()
    say("closed")


if __name__ == "__main__":
    main()
