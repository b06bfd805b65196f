"""The process: startup, endpoints, signals."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NoReturn

from .steps import ErrorData, HttpError, Text, last_prompt, message_text, plain_reply
from .stream import ClientGone, EndReply, ReplyStream, work
from .wire import JSON_TYPE, JournalWriter, Json, error_body, head, hung_up, read_request, write_all

USUAL_ANSWER = {
    "status": 200,
    "body": None,
    "text": None,
    "hang": False,
    "reset": False,
    "times": None,
}
FLOOD_LINE = b"srv  fake: a line of log output that nobody asked for"
# a signal that comes in the instant before the main thread waits is heard behind that wait
_HEEDED_S = 0.5
ROUTES = ("/v1/models", "/health", "/props", "/slots", "/apply-template", "/tokenize")


class Server:
    """The process: startup, endpoints, signals. `open_chats` and `stopping` decide when SIGTERM is
    obeyed."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.journal = JournalWriter(options.get("--journal", os.devnull))
        given = options["--script"]
        self._script_path = given[1:] if given.startswith("@") else None
        self.script = self._read_script() if self._script_path else json.loads(given)
        self._launch = ""  # which this is, of a script that has some
        if launches := self.script["launches"]:
            number = self.journal.count("launched")
            self.script = launches[min(number, len(launches) - 1)]
            self._launch = f"launch {number}, "
        self.host = options.get("--host", "127.0.0.1")
        self.port = int(options.get("--port", "8080"))
        self.parallel = int(options.get("--parallel", "4"))
        self.api_key = options.get("--api-key") or os.environ.pop("LLAMA_API_KEY", None)
        self.slots = threading.Semaphore(self.parallel if self.script["limit_slots"] else 1 << 30)
        self.loading = True
        self.frozen = False
        self.stopping = False
        self.open_chats: dict[int, socket.socket] = {}
        self.chats_seen = 0
        self._uses: dict[str, int] = {}
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None

    # -- life --

    def run(self) -> NoReturn:
        script, startup = self.script, self.script["startup"]
        signal.alarm(math.ceil(script["lifetime_s"]))
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        env = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("LLAMA", "GGML", "AIP_"))
        }
        ids = {"pid": os.getpid(), "ppid": os.getppid(), "pgid": os.getpgid(0), "sid": os.getsid(0)}
        self.journal.note("launched", env=env, **ids)
        for child in script["children"]:
            self._spawn_child(**child)
        self.log("build: 0 (fake)", *startup["log"])
        for flood in script["floods"]:
            threading.Thread(target=self._flood, kwargs=flood, daemon=True).start()
        for leave in script["exits"]:
            if leave["when"] == "after_s":
                threading.Timer(leave["after_s"], self.end, (leave["code"], leave["log"])).start()
        self._leave_if("before_bind")
        while startup["never_bind"]:
            time.sleep(_HEEDED_S)
        time.sleep(startup["bind_delay_s"])
        self._listener = self._bind()
        self.journal.note("bound")
        self._leave_if("after_bind")
        threading.Thread(target=self._load, args=(startup,), daemon=True).start()
        self._listener.settimeout(_HEEDED_S)
        while not self.stopping:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                break
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
        while True:
            time.sleep(_HEEDED_S)

    def _bind(self) -> socket.socket:
        try:
            return socket.create_server((self.host, self.port), backlog=512)
        except OSError:
            where = f"hostname: {self.host}, port: {self.port}"
            self.end(1, [f"start: couldn't bind HTTP server socket, {where}"])

    def _load(self, startup: Json) -> None:
        work(startup["load_s"], time.sleep, startup["load_ticks_per_s"])
        self.loading = False
        self.log(f"main: server is listening on http://{self.host}:{self.port}")
        self.journal.note("ready")

    def log(self, *lines: str) -> None:
        if lines:
            write_all(2, "".join(line + "\n" for line in lines).encode())

    def end(self, code: int, log: Sequence[str] = ()) -> NoReturn:
        """Ends the process at once, with `code` or, where negative, by that signal."""
        self.log(*log)
        self.journal.note("exit", code=code)
        if code < 0:
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if (
                -code in (signal.SIGTERM, signal.SIGINT)
                and threading.current_thread() is threading.main_thread()
            ):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
            time.sleep(5)  # the signal may be taken by another thread
        os._exit(code & 0xFF)

    def _leave_if(self, when: str, count: int = 0) -> None:
        for leave in self.script["exits"]:
            if leave["when"] == when and (not count or leave["request"] == count):
                self.end(leave["code"], leave["log"])

    def _on_signal(self, number: int, _frame: object) -> None:
        connected = sum(not hung_up(sock) for sock in list(self.open_chats.values()))
        self.journal.note("signal", signal=signal.Signals(number).name, connected=connected)
        if self.script["ignore_term"]:
            return
        if self.loading:
            self.end(-number)
        if self.stopping:
            self.end(1)
        self.stopping = True
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self.stopping and (not self.open_chats or not self.script["term_waits"]):
            time.sleep(self.script["term_delay_s"])
            self.end(0)

    def _spawn_child(self, kind: str, keep_output: bool) -> None:
        if pid := os.fork():
            if kind == "daemon":
                os.waitpid(pid, 0)
            return
        if kind != "group":
            os.setsid()
        if kind == "daemon" and os.fork():
            os._exit(0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if not keep_output:
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(1, 2)
        signal.alarm(120)
        self.journal.note("child", kind=kind, pid=os.getpid(), pgid=os.getpgid(0), sid=os.getsid(0))
        while True:
            signal.pause()

    def _flood(self, lines_per_s: float | None, newline: bool) -> None:
        line = FLOOD_LINE + b"\n" * newline
        while True:
            write_all(2, line if lines_per_s else line * (65536 // len(line)))
            if lines_per_s:
                time.sleep(1 / lines_per_s)

    # -- requests --

    def _serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with sock, sock.makefile("rb") as file:
                while (request := read_request(file)) is not None:
                    if not self._answer_request(sock, *request):
                        break
        except (OSError, ValueError):
            pass

    def _answer_request(
        self, sock: socket.socket, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> bool:
        """True where the connection may carry another request."""
        path = target.partition("?")[0]
        is_chat = method == "POST" and path == "/v1/chat/completions"
        with self._lock:
            self.chats_seen += is_chat
            number = self.chats_seen if is_chat else None
        shown = {
            name: "***" if name == "authorization" else value for name, value in headers.items()
        }
        try:
            parsed = json.loads(body or b"null")
        except ValueError:
            parsed = body.decode("latin-1")
        self.journal.note(
            "request", n=number, method=method, path=target, headers=shown, body=parsed
        )
        answer = self._refusal(path, is_chat, headers)
        if answer is None and number is not None:
            self._chat(sock, number, parsed)
            return False
        answer = answer or self._endpoint(path.rpartition("/")[2].replace("-", "_"), parsed)
        if answer["hang"]:
            hung_up(sock, None)
            self.journal.note("client_closed", n=None, path=path, phase="before_headers")
            return False
        if answer["reset"]:
            return self._reset(sock)
        text, kind = answer["text"], "text/plain"
        if text is None:
            text, kind = json.dumps(answer["body"]), JSON_TYPE
        content = text.encode()
        sock.sendall(
            head(answer["status"], Content_Type=kind, Content_Length=len(content)) + content
        )
        return headers.get("connection", "").lower() != "close"

    def _refusal(self, path: str, is_chat: bool, headers: Mapping[str, str]) -> Json | None:
        if self.loading:
            status, said = 503, ("Loading model", "unavailable_error")
        elif (
            self.api_key
            and path != "/health"
            and headers.get("authorization") != f"Bearer {self.api_key}"
        ):
            status, said = 401, ("Invalid API Key", "authentication_error")
        elif path not in ROUTES and not is_chat:
            status, said = 404, ("File Not Found", "not_found_error")
        else:
            return None
        return {**USUAL_ANSWER, "status": status, "body": error_body(status, *said)}

    def _read_script(self) -> Json:
        """A file may change while the server runs; what it says of replies then counts."""
        assert self._script_path is not None
        with open(self._script_path, encoding="utf-8") as file:
            return json.load(file)

    def _pick(self, key: str, specs: Sequence[Json]) -> Json:
        """The spec for this use of `key`: each serves `times` uses (None: for ever), the last all
        others. Of a script in a file, uses by earlier launches count, too."""
        with self._lock:
            for number, spec in enumerate(specs, start=1):
                fact = f"use of {key}, {number}"
                if fact not in self._uses:
                    self._uses[fact] = self.journal.count(fact) if self._script_path else 0
                if spec["times"] is None or self._uses[fact] < spec["times"]:
                    break
            self._uses[fact] += 1
            if self._script_path:
                self.journal.note(fact)
            return spec

    def _endpoint(self, route: str, body: Json) -> Json:
        answer = dict(self._pick(self._launch + route, self.script.get(route) or [USUAL_ANSWER]))
        answer["hang"] |= self.frozen
        if answer["body"] is None:
            answer["body"] = (
                self._default_body(route, body)
                if answer["status"] < 300
                else error_body(answer["status"])
            )
        return answer

    def _default_body(self, route: str, body: Json) -> Json:
        if route == "models":
            model = {
                "id": "fake",
                "object": "model",
                "created": int(time.time()),
                "owned_by": "llamacpp",
            }
            return {"object": "list", "data": [model]}
        if route == "health":
            return {"status": "ok"}
        if route == "slots":
            busy = min(len(self.open_chats), self.parallel)
            return [
                {"id": i, "n_ctx": 4096, "is_processing": i < busy} for i in range(self.parallel)
            ]
        if route == "tokenize":
            content = body.get("content", "") if isinstance(body, dict) else ""
            return {"tokens": list(range(len(str(content).split())))}
        if route == "apply_template":
            messages = body.get("messages", []) if isinstance(body, dict) else []
            turns = [
                f"<|im_start|>{m.get('role')}\n{message_text(m)}<|im_end|>\n" for m in messages
            ]
            return {"prompt": "".join(turns) + "<|im_start|>assistant\n"}
        caps = ("system_role", "tool_calls", "tools", "typed_content")
        return {
            "total_slots": self.parallel,
            "model_path": "fake.gguf",
            "chat_template": "{# fake #}",
            "chat_template_caps": {f"supports_{name}": True for name in caps},
            "default_generation_settings": {"n_ctx": 4096},
            "build_info": "b0-fake",
        }

    def _reset(self, sock: socket.socket) -> bool:
        """Makes the close that follows a reset."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return False

    def _chat(self, sock: socket.socket, number: int, body: Json) -> None:
        with self._lock:
            self.open_chats[number] = sock
        self._leave_if("request", number)
        stream = ReplyStream(self, sock, number, body)
        how = "client_closed"
        try:
            while not (gone := hung_up(sock)) and not self.slots.acquire(timeout=0.05):
                pass
            if gone:
                stream.gone()
                return
            try:
                self.journal.note("started", n=number)
                how = self._reply(stream, body)
            finally:
                self.slots.release()
        finally:
            if how == "reset":
                self._reset(sock)
            self.journal.note("reply_ended", n=number, how=how)
            with self._lock:
                del self.open_chats[number]
            self._end_if_idle()

    def _reply(self, stream: ReplyStream, body: Json) -> str:
        try:
            stream.run(self._steps_for(body))
            stream.finish()
        except EndReply as end:
            return str(end)
        except ClientGone:
            return "client_closed"
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            # A mistake in the script: loud on every channel, so that no test passes by accident.
            said = f"fake script error: {error!r}"
            self.log(said)
            self.journal.note("script_error", n=stream.number, error=repr(error))
            with suppress(EndReply, ClientGone):
                stream.run([(ErrorData if stream.headers_sent else HttpError)(599, said)])
                stream.finish()
            return "script_error"
        return "complete"

    def _steps_for(self, body: Json) -> Sequence[Json]:
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            return [HttpError(400, "key 'messages' not found")]
        if "scripted_reply" in body:
            return list(body["scripted_reply"])
        last = last_prompt(body["messages"])
        replies, launch = self.script["replies"], self._launch
        if self._script_path and not (launch and replies):
            replies, launch = self._read_script()["replies"], ""
        marker = next(
            (reply["marker"] for reply in replies if reply["marker"] and reply["marker"] in last),
            None,
        )
        fitting = [reply for reply in replies if reply["marker"] == marker]
        return (
            list(self._pick(f"{launch}reply {marker}", fitting)["steps"])
            if fitting
            else plain_reply(Text("Hello"))
        )


def main(words: Sequence[str]) -> None:
    """Run the server of this command; ends the process."""
    Server(dict(pairwise(words))).run()
