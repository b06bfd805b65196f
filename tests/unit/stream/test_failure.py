"""What a reply that is no stream says, of new and old servers and of strangers."""

import json
from typing import Any

import pytest

from llama_worker.stream.failure import (
    StreamFailure,
    describe_http_error,
    refuses_tools,
    reports_malformed_output,
)
from llama_worker.types.request import RequestFailReason

LONG_AGO = b'{"error":{"code":400,"message":"too long","type":"invalid_request_error","n_ctx":64}}'


@pytest.mark.parametrize(
    ("status", "body", "detail"),
    [
        (400, LONG_AGO, "HTTP 400: too long (invalid_request_error)"),
        (500, b'{"error":{"message":"bad schema"}}', "HTTP 500: bad schema"),
        (500, b'{"error":"just a text"}', "HTTP 500: just a text"),
        (404, b"<html>Not Found</html>\n", "HTTP 404: <html>Not Found</html>"),
        (502, b"", "HTTP 502: no message"),
        (500, b"  \n", "HTTP 500: no message"),
        (500, b"[1]", "HTTP 500: [1]"),
        (500, b'{"error":7}', 'HTTP 500: {"error":7}'),
        (500, b'{"error":{"code":500}}', 'HTTP 500: {"error":{"code":500}}'),
        (500, b'{"error":{"message":null}}', 'HTTP 500: {"error":{"message":null}}'),
        (500, b"[" * 3000, "HTTP 500: " + "[" * 2000),
        (500, b'{"detail":"x"}', 'HTTP 500: {"detail":"x"}'),
        (501, b"invalid URL", "HTTP 501: invalid URL"),
        (500, b"caf\xe9", "HTTP 500: caf\ufffd"),
        (500, b'{"error":"\\ud800"}', "HTTP 500: \ufffd"),
        (500, b'{"error":{"message":"' + b"x" * 100_000 + b'"}}', "HTTP 500: " + "x" * 2000),
    ],
)
def test_the_servers_own_message_and_the_status(status: int, body: bytes, detail: str) -> None:
    reason = RequestFailReason.HTTP_ERROR
    assert describe_http_error(status, body) == StreamFailure(
        reason=reason, detail=detail, http_status=status
    )


JINJA = """------------
While executing CallExpression at line 9, column 31 in source:
...{{ raise_exception("roles must alternate") }}...
Error: Jinja Exception: roles must alternate"""


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("audio input is not supported - hint: you may need to provide the mmproj", 400),
        ("Multimodal data provided, but model does not support multimodal requests.", 400),
        ("Failed to download image", 400),
        ("Failed to load image or audio file", 400),
        ("error: cannot make GET request", 400),
        ("Invalid base64 value", 400),
        ("unsupported URL scheme: ftp", 400),
        ('Failed to parse messages: Missing tool call type: {"id": "c"}', 400),
        ("Failed to parse tools: unknown type; tools = []", 400),
        ("Failed to parse tool call arguments as JSON: unexpected end of input", 400),
        ("Cannot use both json_schema and grammar", 400),
        ("Cannot specify grammar with tools", 400),
        ("tools param requires --jinja flag", 400),
        ("tool_choice param requires --jinja flag", 400),
        ("Unknown reasoning format: qwen", 400),
        (JINJA, 400),
        ("NotImplemented: String replace with count argument not implemented", 400),
        ("JSON schema error at /properties/x: schema must be an object", 400),
        ("Compute error.", 500),
        ("got exception: bad allocation", 500),
        ("failed to process mtmd chunk", 500),
    ],
)
def test_refusal_of_sent_content_is_no_server_error(message: str, status: int) -> None:
    body = json.dumps({"error": {"code": 500, "message": message, "type": "server_error"}})
    failure = describe_http_error(500, body.encode())
    assert failure.http_status == status
    assert failure.detail.startswith(f"HTTP 500: {message.strip()[:40]}")


MESSAGE = "the request exceeds the available context size"
SIZES = {"n_prompt_tokens": 5000, "n_ctx": 4096}
OVERFLOW = {"code": 400, "message": MESSAGE, "type": "exceed_context_size_error"}


@pytest.mark.parametrize(
    ("error", "context"),
    [
        (OVERFLOW | SIZES, SIZES),
        (OVERFLOW | {"message": "request (5000 tokens) is too long"}, None),
        (OVERFLOW | {"type": "invalid_request_error"}, None),  # builds before September 2025
        (OVERFLOW | SIZES | {"n_prompt_tokens": "5000"}, None),
        (OVERFLOW | SIZES | {"n_prompt_tokens": True}, None),
        (OVERFLOW | SIZES | {"n_ctx": -1}, None),
    ],
)
def test_a_prompt_too_long_is_told_with_numbers(error: dict[str, Any], context: Any) -> None:
    failure = describe_http_error(400, json.dumps({"error": error}).encode())
    assert (failure.reason, failure.context) == (RequestFailReason.CONTEXT_EXCEEDED, context)
    assert failure.detail.startswith("HTTP 400: ")


@pytest.mark.parametrize(
    ("detail", "status", "refuses"),
    [
        ("HTTP 500: tools param requires --jinja flag", 500, True),
        ("HTTP 400: This model does not support tools", 400, True),
        ("HTTP 400: Tool calls are not supported by this template", 400, True),
        ("HTTP 500: Unsupported param: tool_choice", 500, False),
        ("HTTP 500: failed to parse tools: unknown type", 500, False),
        ("HTTP 500: out of memory", 500, False),
        ("tools are not supported", None, False),
    ],
)
def test_refusals_of_tools_are_recognised(detail: str, status: int | None, refuses: bool) -> None:
    failure = StreamFailure(reason=RequestFailReason.HTTP_ERROR, detail=detail, http_status=status)
    assert refuses_tools(failure) is refuses


@pytest.mark.parametrize(
    ("message", "malformed"),
    [
        ("The model produced output that does not match the expected peg-native format", True),
        ("Failed to parse tool call arguments as JSON", True),
        ("Failed to parse input at pos 184: <tool_call>", True),
        ("Invalid diff: now finding less tool calls!", True),
        (
            "got exception: Unexpected empty grammar stack after accepting piece: =list (40972)",
            True,
        ),
        ("got exception: bad allocation", False),
        ("Context size has been exceeded", False),
        ("the image does not match the expected format", False),
        ("expected format of the image", False),
    ],
)
def test_reports_of_malformed_calls_are_recognised(message: str, malformed: bool) -> None:
    assert reports_malformed_output(message) is malformed
