"""Work that the service repeats for as long as it runs, and the times of day of such work."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import structlog

from kvshelf.errors import KvshelfError

log = structlog.get_logger("kvshelf.service")

_DAY_S: Final = 86_400
_SPAN: Final = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)", re.ASCII)


async def repeat(what: str, work: Callable[[], Awaitable[object]], pause: Callable[[], Awaitable[object]]) -> None:
    """Run `work`, then wait for `pause`, again and again. A failure is logged and does not end the loop, also if it is
    a bug. what: the name of the work in the log."""
    while True:
        try:
            await work()
        except KvshelfError as error:
            log.warning(f"{what} failed", code=error.code, message=error.message)
        except Exception:
            log.exception(f"{what} failed unexpectedly")
        await pause()


@dataclass(frozen=True)
class Hours:
    """Times of day in UTC. spans: minutes of the day, `[begin, end)`; one that ends before it begins goes over
    midnight. None at all: every hour."""

    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Self:
        """The hours of texts such as `07:30-18:00`. Raises `ValueError` that names the text at fault."""
        spans = []
        for text in texts:
            match = _SPAN.fullmatch(text)
            numbers = list(map(int, match.groups())) if match else []
            if not match or max(numbers[::2]) > 23 or max(numbers[1::2]) > 59:
                raise ValueError(
                    f"{text!r:.80} is no span of a day; write 07:30-18:00, in UTC, and commas between several"
                )
            begin, end = numbers[0] * 60 + numbers[1], numbers[2] * 60 + numbers[3]
            if begin == end:
                raise ValueError(f"{text!r:.80} begins when it ends; leave it out for the whole day")
            spans.append((begin, end))
        return cls(tuple(spans))

    def begin_in_s(self, now: float) -> float:
        """Seconds until the next span begins; 0 inside one. now: Unix seconds."""
        minute = now % _DAY_S / 60
        if not self.spans or any((minute - begin) % 1440 < (end - begin) % 1440 for begin, end in self.spans):
            return 0.0
        return 60 * min((begin - minute) % 1440 for begin, _ in self.spans)

    def next_look_s(self, now: float, interval_s: float) -> float:
        """Seconds until something is looked at again: the interval, or less where the next span begins before."""
        return min(self.begin_in_s(now) or interval_s, interval_s)
