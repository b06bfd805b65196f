"""Decodes a response body's bytes to server-sent events. Sans-IO: one decoder per body, one thread
at a time.

This module decides where records end and normalises line ends; `sseclient-py` (1.8 and 1.9 behave
alike) decodes every record. Records of one `data:` line, nearly all, are passed to it together, as
many as have come. Others are passed line by line, because it drops `error:` fields and needs
quadratic time for a record of many lines.
"""

from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import cast

import sseclient
from msgspec import Struct

MAX_RECORD_BYTES = 16 * 1024 * 1024


class ErrorField(Struct, frozen=True):
    """The text in a record's `error:` fields."""

    text: str


SseRecord = str | ErrorField
"""A str is the text in a record's `data:` fields. Neither is ever empty."""


class SseDecoder:
    """Decodes bytes, split anywhere; a record is returned with the byte that ends it."""

    def __init__(self) -> None:
        self.error: str | None = None  # why the bytes are not SSE; nothing is decoded any more
        # what sseclient reads next: any iterable, which each events() iterates over anew
        self._block = [b""]
        self._sseclient = sseclient.SSEClient(cast(Iterator[bytes], self._block))
        self._after_cr = False  # the last byte was a CR: an LF that follows belongs to it
        # the record that has not ended yet, with LF as line end, without leading comments
        self._partial = bytearray()

    def feed(self, data: bytes) -> list[SseRecord]:
        """The records that these bytes complete, in order; none for comments, blanks and unknown
        fields.

        A record with both kinds of field becomes two, in the order of their first fields. A record
        above MAX_RECORD_BYTES, or bytes that are not UTF-8, end the stream: `error` says so, and
        the records before are returned.
        """
        if self.error is not None:
            return []
        if self._after_cr or b"\r" in data:
            data = self._with_lf(data)
        records: list[SseRecord] = []
        try:
            if data.endswith(b"\n\n") and not self._partial:  # nearly always
                self._read(data, records)
            else:
                self._take(data, records)
        except UnicodeDecodeError:
            self.error = "a record of the stream is not UTF-8"
        except _RecordTooLargeError:
            self.error = f"a record of the stream is larger than {MAX_RECORD_BYTES} bytes"
        return records

    def has_partial(self) -> bool:
        """Whether a record has begun and not ended; if the body ends here, it is truncated."""
        return bool(self._partial) and not self._partial.startswith(b":")

    def _with_lf(self, data: bytes) -> bytes:
        """`data` with LF line ends. A CR counts at once: the record that it ends is complete."""
        if not data:
            return data
        if self._after_cr:
            data = data.removeprefix(b"\n")
        self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _take(self, data: bytes, records: list[SseRecord]) -> None:
        end = self._end_of_records(data)
        if end:
            block = bytes(self._partial) + data[:end]
            self._partial.clear()
            self._read(block, records)
        self._partial += data[end:]
        _drop_leading_comments(self._partial)
        if len(self._partial) > MAX_RECORD_BYTES:
            raise _RecordTooLargeError

    def _end_of_records(self, data: bytes) -> int:
        """How many bytes of `data` belong to complete records."""
        last = data.rfind(b"\n\n")
        if last >= 0:
            return last + 2
        at_line_start = not self._partial or self._partial.endswith(b"\n")
        return 1 if at_line_start and data.startswith(b"\n") else 0

    def _read(self, block: bytes, records: list[SseRecord]) -> None:
        one_data_line_each = (
            block.startswith(b"data:") and block.count(b"\n") == 2 * block.count(b"\n\ndata:") + 2
        )
        if one_data_line_each and len(block) <= MAX_RECORD_BYTES:  # nearly always
            self._block[0] = block
            for event in self._sseclient.events():
                if event.data:
                    records.append(event.data)
        else:
            for record in block.split(b"\n\n"):
                self._read_by_line(record, records)

    def _read_by_line(self, record: bytes, records: list[SseRecord]) -> None:
        record = record.removeprefix(BOM_UTF8)  # that of the whole stream
        lines = [line for line in record.split(b"\n") if not line.startswith(b":")]
        if sum(len(line) + 1 for line in lines if line) > MAX_RECORD_BYTES:
            raise _RecordTooLargeError
        values: dict[bool, list[str]] = {}  # key: is it an error; in the order of first appearance
        for line in lines:
            is_error = line.startswith(b"error:")
            self._block[0] = b"data" + line.removeprefix(b"error") if is_error else line
            for event in self._sseclient.events():
                values.setdefault(is_error, []).append(event.data)
        for is_error, parts in values.items():
            if text := "\n".join(parts):
                records.append(ErrorField(text) if is_error else text)


class _RecordTooLargeError(Exception):
    pass


def _drop_leading_comments(partial: bytearray) -> None:
    """Remove comments, but keep the colon of an unfinished one, which may be endless."""
    while partial.startswith(b":"):
        if b"\n" not in partial:
            partial[:] = b":"
            return
        del partial[: partial.index(b"\n") + 1]
