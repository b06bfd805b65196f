"""Plays a situation on a real llama-server, and records it."""

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from llama_worker import llama_server_cmd
from tests.recordings.records import (
    BodyReader,
    Director,
    Recording,
    error_name,
    in_order_of_batches,
    rate,
    slots_line,
)
from tests.recordings.situations import ENDLESS, Ask, Close, Look, Situation, Step, Terminate

HOST = "127.0.0.1"
WAIT_S = 20.0  # no situation takes so long, unless the server never ends
_INTO_THE_BATCH_S = 3e-5  # per token of a batch: a quarter of what a batch takes
_ARGS = ("--threads", "1", "--no-warmup", "--ubatch-size", "128")
_COUNT = 7  # tokens
# What the log says when a slot begins a task and when it is done with it.
_LOG = {
    re.compile(r"launch_slot_: id +(\d+) .*processing task"): "slot {} begins",
    re.compile(r"release: id +(\d+) .*stop processing"): "slot {} ends",
}


def play(situation: Situation, *, executable: str, model: str, port: int, log: Path) -> Recording:
    return asyncio.run(_Play(situation, port, log).run(executable, model))


class _Play:
    def __init__(self, situation: Situation, port: int, log: Path) -> None:
        self._situation, self._port, self._log = situation, port, log
        self._director = Director(situation)
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._began_at = 0.0

    async def run(self, executable: str, model: str) -> Recording:
        async with self._running(executable, model):
            try:
                await asyncio.wait_for(self._play(), WAIT_S)
            except TimeoutError:
                self._note("server", f"not at an end after {WAIT_S:g} s")
        self._read_log()
        recording = self._director.recording
        recording.records = in_order_of_batches(
            recording.records, within_s=_INTO_THE_BATCH_S * self._situation.batch
        )
        return recording

    async def probe(self, executable: str, model: str) -> dict[str, str]:
        async with self._running(executable, model):
            short = {"prompt": "a b c", "n_predict": _COUNT, "ignore_eos": True}
            await self._asked("POST", "/completion", short)
            _, (slot,) = await self._asked("GET", "/slots")
            next_token = slot.pop("next_token")
            counted = await self._counted_while_it_reads()
            long = {"messages": [{"role": "user", "content": prompt(600)}]}
            overflow = await self._asked("POST", "/v1/chat/completions", long)
            wrong = await self._asked("POST", "/v1/chat/completions", {"messages": "none"})
        return {
            "slot": ", ".join(sorted(slot)),
            "next_token": ("a list of one: " if isinstance(next_token, list) else "")
            + ", ".join(sorted(_one(next_token))),
            "counted": "of the task before" if _COUNT in counted else "0",
            "overflow": f"{overflow[0]} {overflow[1]['error']['type']}",
            "wrong": f"{wrong[0]} {wrong[1]['error']['type']}",
        }

    async def _counted_while_it_reads(self) -> set[int]:
        """What the slot tells as generated, while it reads a prompt."""
        body = {"prompt": prompt(150), "n_predict": 1}
        reading = asyncio.create_task(self._asked("POST", "/completion", body))
        counted = set()
        while not reading.done():
            _, (slot,) = await self._asked("GET", "/slots")
            if slot["is_processing"]:
                counted.add(_one(slot["next_token"])["n_decoded"])
        await reading
        return counted

    async def _asked(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self._sent(method, path, body) as (status, reader):
            data = await reader.read()
        return status, json.loads(data)

    @contextlib.asynccontextmanager
    async def _running(self, executable: str, model: str) -> AsyncIterator[None]:
        situation = self._situation
        command = llama_server_cmd(
            model,
            host=HOST,
            port=self._port,
            slots=situation.slots,
            executable=executable,
            extra_args=(
                *("--ctx-size", str(situation.slots * situation.slot_tokens)),
                *("--batch-size", str(situation.batch)),
                *_ARGS,
                *situation.args,
            ),
        )
        env = {
            name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")
        }
        with open(self._log, "wb") as log:
            self._server = await asyncio.create_subprocess_exec(
                *command, stdout=log, stderr=log, env=env
            )
        try:
            await asyncio.wait_for(self._until_ready(), WAIT_S)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                self._server.kill()
            await self._server.wait()

    async def _until_ready(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                async with self._sent("GET", "/health") as (status, _):
                    if status == 200:
                        return
            if self._server.returncode is not None:
                raise RuntimeError(self._log.read_text(errors="replace")[-2000:])
            await asyncio.sleep(0.02)

    async def _play(self) -> None:
        self._began_at = time.monotonic()
        before = self._cpu_ticks()
        async with asyncio.TaskGroup() as self._tasks:
            self._go_on()
        took_s = time.monotonic() - self._began_at
        if self._server.returncode is None and not self._terminated:
            self._note("proc", rate((self._cpu_ticks() - before) / took_s))
            before = self._cpu_ticks()
            await asyncio.sleep(0.5)
            self._note("proc", rate((self._cpu_ticks() - before) / 0.5))

    @property
    def _terminated(self) -> bool:
        return any(isinstance(step, Terminate) for step in self._situation.steps)

    def _cpu_ticks(self) -> float:
        with open(f"/proc/{self._server.pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return float(fields[11]) + float(fields[12])

    def _note(self, who: str, what: str) -> None:
        self._director.note(who, what, time.monotonic() - self._began_at)

    def _go_on(self) -> None:
        for step in self._director.due():
            self._tasks.create_task(self._do(step))

    async def _do(self, step: Step) -> None:
        if step.after is not None and step.after.kind == "report":
            await asyncio.sleep(_INTO_THE_BATCH_S * self._situation.batch)
        match step:
            case Ask():
                await self._ask(step)
            case Close():
                self._writers[step.request].transport.abort()
                self._note(step.request, "closed")
                self._go_on()
            case Look():
                async with self._sent("GET", "/slots") as (status, reader):
                    body = await reader.read()
                shown = json.loads(body) if status == 200 else None
                self._note("slots", f"{status}" if shown is None else slots_line(shown))
                self._go_on()
            case Terminate():
                self._server.send_signal(signal.SIGTERM)
                self._note("server", "SIGTERM")
                self._go_on()
                returncode = await self._server.wait()
                self._note("server", f"exit {returncode}")

    async def _ask(self, ask: Ask) -> None:
        name = ask.request
        about = f"{ask.about or name}: "
        body = {
            "messages": [{"role": "user", "content": about + prompt(ask.items)}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,
            "max_tokens": ask.answer,
            **ENDLESS,
            **ask.body,
        }
        reader_of_body = BodyReader()
        try:
            async with self._sent("POST", "/v1/chat/completions", body, name) as (status, reader):
                self._note(name, f"headers {status}")
                self._go_on()
                if status != 200:
                    self._note(name, error_name(json.loads(await reader.read())["error"]))
                else:
                    await self._read(name, reader, reader_of_body)
            self._end(name, "end")
        except (OSError, asyncio.IncompleteReadError):
            self._end(name, "cut")
        self._director.recording.prompts[name] = [reader_of_body.total, reader_of_body.cached]

    async def _read(self, name: str, reader: asyncio.StreamReader, body: BodyReader) -> None:
        """The chunks of a body."""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            for what in body.feed(await reader.readexactly(size)):
                self._note(name, what)
            await reader.readline()
            self._go_on()

    def _end(self, name: str, how: str) -> None:
        if "closed" not in self._director.recording.of(name):
            self._note(name, how)
            self._go_on()

    @contextlib.asynccontextmanager
    async def _sent(
        self, method: str, path: str, body: Any = None, name: str = ""
    ) -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
        """The status and the reader of the body."""
        reader, writer = await asyncio.open_connection(HOST, self._port)
        if name:
            self._writers[name] = writer
        try:
            data = json.dumps(body).encode() if body is not None else b""
            head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            status_line, *_ = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
            yield int(status_line.split()[1]), reader
        finally:
            writer.close()

    def _read_log(self) -> None:
        for line in self._log.read_text(errors="replace").splitlines():
            for pattern, what in _LOG.items():
                if found := pattern.search(line):
                    self._note("log", what.format(found[1]))


def probe(executable: str, model: str, port: int) -> dict[str, str]:
    """What a build answers where no order matters: the fields of a slot, and its errors."""
    situation = Situation("probe", (), slot_tokens=2048, batch=64)
    return asyncio.run(_Play(situation, port, Path(os.devnull)).probe(executable, model))


def _one(next_token: Any) -> Any:
    return next_token[0] if isinstance(next_token, list) else next_token


def prompt(items: int) -> str:
    return " ".join(f"item {number:04d};" for number in range(items))
