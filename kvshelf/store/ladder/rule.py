"""The rule of a ladder: by `none:1d,int8:7d,klt` a cache under codec `none` that nobody asks for a day goes to `int8`,
and one that nobody asks for seven days to `klt`. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from kvshelf.artifact.codecs import Codec
from kvshelf.errors import InvalidRequest

_ORDER: Final = ("none", "lossless", "int8", "int4", "int2", "klt")
"""From the largest to the smallest. Without `mixed`, which chooses by an importance that no stored cache has."""

_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_AGE: Final = re.compile(r"([0-9]{1,6})([smhd])")


@dataclass(frozen=True)
class Rung:
    """codec: of caches that nobody asked for longer than `after_s`."""

    codec: str
    after_s: float


@dataclass(frozen=True)
class Ladder:
    """The rungs from the largest codec to the smallest; none: caches stay as they were made."""

    rungs: tuple[Rung, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Ladder:
        """Read a rule. Raises `InvalidRequest` that names what is wrong."""
        rungs, after_s = list[Rung](), 0.0
        if len(items := list(_items(text))) < 2:
            raise _refused("a ladder has two rungs at least", text)
        for number, item in enumerate(items):
            codec, _, age = item.rpartition(":")
            if (match := _AGE.fullmatch(age)) is None:
                codec = item
            try:
                parsed = Codec.parse(codec)
            except InvalidRequest as error:
                raise _refused(error.message, text) from error
            if parsed.splits:
                raise _refused(f"codec {parsed} chooses by an importance that a stored cache does not have", text)
            rungs.append(Rung(str(parsed), after_s))
            last = number == len(items) - 1
            if last != (match is None):
                which = "the last rung has none" if last else "write 12h or 7d behind it"
                raise _refused(f"{item!r:.80} has {'an age' if last else 'no age'}, and {which}", text)
            if match is not None:
                age_s = int(match[1]) * _SECONDS[match[2]]
                if age_s <= after_s:
                    raise _refused(f"the age of {item!r:.80} is not above that of the rung before, or 0", text)
                after_s = age_s
        for above, below in pairwise(_ORDER.index(Codec.parse(rung.codec).name) for rung in rungs):
            if _ORDER[below] == "lossless" and above > below:
                raise _refused(f"lossless gives back nothing that {_ORDER[above]} has rounded away", text)
            if above >= below:
                raise _refused(f"codec {_ORDER[below]} is not smaller than {_ORDER[above]}, which is before it", text)
        return cls(tuple(rungs))

    def below(self, codec: str, idle_s: float) -> list[str]:
        """The codecs that a cache under `codec` may have now, the smallest first; none for a codec of no rung."""
        codecs = [rung.codec for rung in self.rungs]
        if codec not in codecs:
            return []
        later = self.rungs[codecs.index(codec) + 1 :]
        return [rung.codec for rung in reversed(later) if idle_s > rung.after_s]


def _items(text: str) -> Iterator[str]:
    """The rungs, as they are written. The parameters of a codec have commas between them, too."""
    item = ""
    for piece in (part.strip() for part in text.split(",")):
        if item and "=" in piece.partition(":")[0]:
            item += f",{piece}"
            continue
        if item:
            yield item
        item = piece
    yield item


def _refused(why: str, ladder: str) -> InvalidRequest:
    return InvalidRequest(
        f"{why}: a ladder is written as none:1d,int8:7d,klt, and this is {ladder!r:.200}", param="ladder"
    )
