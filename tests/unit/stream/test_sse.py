"""Bytes to SSE records: any line end, any split, any rubbish between the records."""

import itertools
from collections.abc import Iterable
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sseclient import SSEClient

from llama_worker.stream import sse
from llama_worker.stream.sse import ErrorField, SseDecoder, SseRecord
from tests.tables import cases
from tests.timing import is_linear

data, error = str, ErrorField


def decode(pieces: Iterable[bytes], decoder: SseDecoder | None = None) -> list[SseRecord]:
    decoder = decoder or SseDecoder()
    return [record for piece in pieces for record in decoder.feed(piece)]


def single_bytes(body: bytes) -> list[bytes]:
    return [body[i : i + 1] for i in range(len(body))]


BODIES = [
    ("data: x\n\ndata: y\n\n", [data("x"), data("y")]),
    ("data:x\n\n", [data("x")]),
    ("data:  x\n\n", [data(" x")]),
    ("data: a\ndata: b\n\n", [data("a\nb")]),
    ("data: a\ndata\ndata:\ndata: b\n\n", [data("a\n\n\nb")]),
    (": keepalive\n\n", []),
    ("\n\n\ndata: x\n\n\n\n\ndata: y\n\n\n", [data("x"), data("y")]),
    (": hi\ndata: x\n: hi\ndata: y\n: hi\n\n", [data("x\ny")]),
    (":error: x\n: \udcff\udce2\n\ndata: x\n\n", [data("x")]),
    ("event: e\nid: 7\nretry: 3\nfoo: bar\nfoo\ndata: x\n\n", [data("x")]),
    ("database: x\n\n", []),
    ("data:\n\n", []),
    ("error:\n\n", []),
    ("error: e\n\ndata: [DONE]\n\n", [error("e"), data("[DONE]")]),
    ("error: e\ndata: [DONE]\n\n", [error("e"), data("[DONE]")]),
    ("data: x\nerror: e\ndata: y\nerror: f\n\n", [data("x\ny"), error("e\nf")]),
    ("errors: e\n\n", []),
    ('data: "error: x"\n\n', [data('"error: x"')]),
    (
        "data: grün 日本 🙂 \u2028 \x0b \x0c \x85 \x1c\n\n",
        [data("grün 日本 🙂 \u2028 \x0b \x0c \x85 \x1c")],
    ),
    ("data: \ufeffx\n\n", [data("\ufeffx")]),
    ("\ufeffdata: x\n\ndata: y\n\n", [data("x"), data("y")]),
    ("\ufefferror: x\n\n", [error("x")]),
    ("\ufeff: hi\n\ndata: x\n\n", [data("x")]),
    ("\ufeff\n\ndata: x\n\n", [data("x")]),
]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize(("body", "records"), BODIES)
def test_same_records_when_split_nowhere_once_and_everywhere(
    body: str, records: list[SseRecord], newline: str
) -> None:
    raw = body.replace("\n", newline).encode(errors="surrogateescape")
    assert decode([raw]) == records
    assert decode(single_bytes(raw)) == records
    for i in range(len(raw)):
        assert decode([raw[:i], b"", raw[i:]]) == records


@pytest.mark.parametrize(
    "end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\r\n\n", b"\n\r", b"\r\n\r"]
)
def test_a_record_is_out_with_its_last_byte(end: bytes) -> None:
    decoder = SseDecoder()
    early = end[: -2 if end.endswith(b"\r\n") else -1]  # the CR of a last CRLF ends the record
    assert decoder.feed(b"data: x" + early[:-1]) == []
    first = decoder.feed(early[-1:])
    assert first + decoder.feed(end[len(early) :]) == [data("x")]
    assert decoder.feed(b"data: y\r\r") == [data("y")]
    assert (decoder.feed(b"\n"), decoder.has_partial()) == ([], False)
    assert decoder.feed(b"data: z\n\n") == [data("z")]


CUT_OFF = [b"d", b"data: x\n", b"data: x\r\n", b": keepalive\ndata: x"]
COMPLETE = [
    b"data: x\n\n",
    b"data: x\r\r",
    b"data: x\n\n\n",
    b"data: x\n\n: keep",
    b"data: x\n\n: keepalive\n",
]
NOTHING = [b"", b"\n"]


@pytest.mark.parametrize("body", [*CUT_OFF, *COMPLETE, *NOTHING])
def test_tells_a_truncated_record_at_the_end(body: bytes) -> None:
    for pieces in ([body], single_bytes(body)):
        decoder = SseDecoder()
        decode(pieces, decoder)
        assert decoder.has_partial() is (body in CUT_OFF)


@pytest.mark.parametrize(
    "bad", [b"data: \xff\n\n", b"error: \xe2\x82\n\n", b"\xff\xfe\n\n", b"data: a\ndata: \xff\n\n"]
)
def test_bytes_that_are_not_utf8_are_an_error(bad: bytes) -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: x\n\ndata: y\n\n" + bad + b"data: z\n\n") == [data("x"), data("y")]
    assert decoder.error == "a record of the stream is not UTF-8"
    assert decoder.feed(b"data: z\n\n") == []


@pytest.mark.parametrize("end", [b"", b"\n\n"])
@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
@pytest.mark.parametrize("lines", [1, 3])
@pytest.mark.parametrize(
    ("total", "error"), [(900, None), (901, "a record of the stream is larger than 900 bytes")]
)
def test_a_record_has_a_largest_size(
    total: int,
    error: str | None,
    lines: int,
    size: int,
    end: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "MAX_RECORD_BYTES", 900)
    first = b"data: x\n" * (lines - 1)
    record = first + b"data: " + b"y" * (total - len(first) - 7) + b"\n"
    assert len(record) == total
    small = [data("a")] * 200  # in one piece, too, they are no large record
    body = b"data: a\n\n" * len(small) + record + end
    decoder = SseDecoder()
    records = [
        found for at in range(0, len(body), size) for found in decoder.feed(body[at : at + size])
    ]
    assert records[: len(small)] == small
    assert len(records) == len(small) + (error is None and bool(end))
    assert decoder.error == error


@pytest.mark.parametrize(
    "rubbish", [b": ping\n", b": ping\n\n", b"\n", b"\r", b"\r\n", b"x" * 50, b":" + b"x" * 50]
)
def test_endless_comments_and_blanks_need_no_memory(
    rubbish: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "MAX_RECORD_BYTES", 100)
    decoder = SseDecoder()
    assert decoder.feed(b":") == []
    for _ in range(100):
        assert decoder.feed(rubbish) == []
    assert decoder.feed(b"\n\ndata: x\n\n") == [data("x")]


@cases(
    "step, line, size",
    {
        "by single bytes": (1, 1 << 20, 1 << 14),
        "one long line": (64, 1 << 24, 1 << 18),
        "many lines": (1 << 16, 64, 1 << 18),
    },
)
def test_a_long_record_takes_linear_time(step: int, line: int, size: int) -> None:
    def read(size: int) -> None:
        body = (b"data: " + b"x" * min(line, size) + b"\n") * -(-size // line) + b"\n"
        (record,) = decode(body[i : i + step] for i in range(0, len(body), step))
        assert len(str(record).replace("\n", "")) == size

    assert is_linear(read, size)


def test_plain_records_are_read_together() -> None:
    with patch.object(SSEClient, "events", autospec=True, side_effect=SSEClient.events) as events:
        assert decode([b"data: x\n\n" * 100]) == [data("x")] * 100
    events.assert_called_once()


class LineByLine(SseDecoder):
    """Leaves every record to sseclient-py."""

    def _read(self, block: bytes, records: list[SseRecord]) -> None:
        for record in block.split(b"\n\n"):
            self._read_by_line(record, records)


FIELDS = [
    b"data:",
    b"data: ",
    b"data",
    b"error: ",
    b": ping",
    b"event: x",
    b"id",
    b"{}",
    b" ",
    "日: 本".encode(),
]
LINE_ENDS = [b"\n", b"\n\n", b"\r\n\r\n", b"\r"]
PIECES = st.sampled_from([*FIELDS, *LINE_ENDS]) | st.binary(max_size=4)


@given(st.lists(PIECES, max_size=30), st.lists(st.integers(0, 60), max_size=6))
def test_records_are_those_of_sseclient(pieces: list[bytes], cuts: list[int]) -> None:
    body = b"".join(pieces)
    at = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    short, long, bytewise, read = SseDecoder(), LineByLine(), SseDecoder(), list[SseRecord]()
    for start, end in itertools.pairwise(at):
        read += (records := short.feed(body[start:end]))
        assert records == long.feed(body[start:end])
        assert (short.error, short.has_partial()) == (long.error, long.has_partial())
    assert [record for byte in single_bytes(body) for record in bytewise.feed(byte)] == read
    assert bytewise.error == short.error
