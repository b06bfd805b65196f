"""Who waits for output that is not there yet. Sans-IO; not thread-safe."""

from __future__ import annotations

import weakref

from llama_worker.messages import ReadOutput, Reply
from llama_worker.types import NotFound, OutputChunk

_SWEEP_MIN = 16


def is_answered_by(question: ReadOutput, text_chars: int, reasoning_chars: int) -> bool:
    """Whether output of this length answers the question, while the request still runs."""
    behind = question.text_offset < text_chars or question.reasoning_offset < reasoning_chars
    return behind or not question.wait


class WaitingReads:
    """Questions that wait. Their replies are held weakly: a host may wait with a timeout, again and
    again."""

    def __init__(self) -> None:
        self._reads: list[tuple[weakref.ref[Reply[OutputChunk | NotFound]], int, int, int]] = []
        self._sweep_at = _SWEEP_MIN

    def __len__(self) -> int:
        return len(self._reads)

    def add(self, question: ReadOutput) -> None:
        """Keep it; now and then those that nobody waits for any more are forgotten."""
        self._reads.append(
            (
                weakref.ref(question.reply),
                question.request_id,
                question.text_offset,
                question.reasoning_offset,
            )
        )
        if len(self._reads) >= self._sweep_at:
            self._reads = [read for read in self._reads if _waits(read[0]())]
            self._sweep_at = max(_SWEEP_MIN, 2 * len(self._reads))

    def take(self, text_chars: int | None = None, reasoning_chars: int = 0) -> list[ReadOutput]:
        """Those that output of this length answers, or all of them; they wait no more."""
        taken: list[ReadOutput] = []
        left = []
        for read in self._reads:
            ref, request_id, text_offset, reasoning_offset = read
            reply = ref()
            if reply is None or reply.done():
                continue
            question = ReadOutput(
                request_id=request_id,
                text_offset=text_offset,
                reasoning_offset=reasoning_offset,
                wait=True,
                reply=reply,
            )
            if text_chars is None or is_answered_by(question, text_chars, reasoning_chars):
                taken.append(question)
            else:
                left.append(read)
        self._reads = left
        return taken


def _waits(reply: Reply[OutputChunk | NotFound] | None) -> bool:
    return reply is not None and not reply.done()
