"""A worker behind a threaded web server: Flask under waitress. Clients poll for an answer, or
get it as a stream.

    python examples/threaded_web_server.py --server llama-server --model model.gguf --port 8000

The first command gets 202 and the address to poll; the last one gets JSON lines as they come:

    curl -i localhost:8000/chat --json '{"prompt": "Name three rivers."}'
    curl localhost:8000/chat/1
    curl -N localhost:8000/chat --json '{"prompt": "Name three rivers.", "stream": true}'
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

import waitress
from flask import Flask, Response, request

from llama_worker import (
    LlamaWorker,
    RestartPolicy,
    SubmitErr,
    WorkerConfig,
    free_port,
    llama_server_cmd,
)

HOST = "127.0.0.1"
SLOTS = 2
BUSY_RETRY_S = 5  # a guess: nobody knows when a slot will be free
HEARTBEAT_S = 1.0  # a prompt may take minutes to read: an empty line shows that all is well


def create_app(worker: LlamaWorker) -> Flask:
    """The web application. Its handlers run on waitress' threads; any of them may call the
    worker."""
    app = Flask(__name__)

    @app.post("/chat")
    def submit() -> Response:
        body = request.get_json()
        if not isinstance(body, dict) or not isinstance(body.get("prompt"), str):
            return answer(
                400, {"error": 'the body must be {"prompt": "..."}, with "stream": true if wanted'}
            )
        admitted = worker.submit(
            "chat", "You are terse.", body["prompt"], params={"max_tokens": 256}
        ).get()
        if not admitted["ok"]:
            return refusal(worker, admitted)
        request_id = admitted["request_id"]
        if body.get("stream"):
            gone = request.environ.get("waitress.client_disconnected", lambda: False)
            return Response(stream(worker, request_id, gone), mimetype="application/x-ndjson")
        return answer(202, {"id": request_id}, {"Location": f"/chat/{request_id}"})

    @app.get("/chat/<int:request_id>")
    def poll(request_id: int) -> Response:
        status = worker.get_status(request_id).get()
        output = worker.read_output(
            request_id, text_offset=request.args.get("offset", 0, int)
        ).get()
        if not status["ok"] or not output["ok"]:
            return answer(404, {"error": "no such request, or not any more"})
        return answer(
            200, {"text": output["text"], "offset": output["text_offset"], "status": status}
        )

    @app.delete("/chat/<int:request_id>")
    def give_up(request_id: int) -> Response:
        worker.cancel(request_id).get()
        worker.release(request_id).get()
        return Response(status=204)

    return app


def answer(
    code: int, body: Mapping[str, object], headers: dict[str, str] | None = None
) -> Response:
    """A reply in JSON."""
    return Response(json.dumps(body) + "\n", code, headers, mimetype="application/json")


def refusal(worker: LlamaWorker, refused: SubmitErr) -> Response:
    """429 if all slots are used, 503 if the server is not ready; and when to retry, if known."""
    if refused["error"] == "NO_SLOT_AVAILABLE":
        return answer(429, refused, {"Retry-After": str(BUSY_RETRY_S)})
    if refused["error"] in ("WORKER_FAILED", "WORKER_DRAINING"):
        return answer(503, refused)  # it will not come back by itself
    restart_at = worker.get_worker_status().get().get("next_restart_at", 0.0)
    wait_s = max(BUSY_RETRY_S, int(restart_at - time.time()) + 1)
    return answer(503, refused, {"Retry-After": str(wait_s)})


def stream(worker: LlamaWorker, request_id: int, gone: Callable[[], bool]) -> Iterator[str]:
    """The output as JSON lines, with an empty line after each silence; the last line says how the
    request ended. If the client leaves, the request is cancelled."""
    done = False
    try:
        for chunk in worker.iter_output(request_id, timeout_s=HEARTBEAT_S):
            done = chunk["done"]
            if gone():
                return
            yield json.dumps({"text": chunk["text"]}) + "\n" if chunk["text"] else "\n"
        result = worker.get_result(request_id).get()
        assert result["ok"], result
        outcome = {key: result[key] for key in ("state", "finish_reason", "fail_reason")}
        yield json.dumps(outcome) + "\n"
    finally:  # also if waitress closes the generator because a write failed
        if not done:
            worker.cancel(request_id).get()
        worker.release(request_id)


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", required=True, help="the llama-server executable")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--port", type=int, default=8000, help="of this web server [%(default)s]")
    parser.add_argument(
        "--server-port", type=int, default=0, help="of the llama-server (default: one is chosen)"
    )
    options = parser.parse_args()
    server_port = options.server_port or free_port()
    command = llama_server_cmd(
        options.model,
        host=HOST,
        port=server_port,
        slots=SLOTS,
        executable=options.server,
        extra_args=("--ctx-size", "4096"),
    )
    config = WorkerConfig(
        name="web",
        host=HOST,
        port=server_port,
        server_cmd=command,
        slots=SLOTS,
        result_ttl_s=600.0,  # a result that nobody polls for is forgotten
        restart=RestartPolicy(restart_backoff_s=1.0),
    )
    with LlamaWorker(config) as worker:
        # waitress warns of a queue while its threads are still starting
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)
        # A stream holds a thread; the rest are for polling. Without the lookahead waitress does not
        # notice that a client has left.
        server = waitress.create_server(
            create_app(worker),
            host=HOST,
            port=options.port,
            threads=SLOTS + 4,
            channel_request_lookahead=1,
        )

        def end(number: int, frame: FrameType | None) -> None:
            worker.stop()  # requests end, and with them their streams; this does not wait
            raise SystemExit  # waitress stops listening and lets its threads finish

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        print(f"listening on http://{HOST}:{options.port}", flush=True)
        server.run()
    print("stopped.")


if __name__ == "__main__":
    main()
