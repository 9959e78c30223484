"""Text for terminals: one line, printable, without control characters."""

import difflib
import sys
from collections.abc import Iterable

from minigpt.utils.ranks import is_rank_zero

_LONGEST = 1000  # characters of a line
# Unicode's pictures of control characters, but for line breaks and tabs; the later controls and the marks of direction
# have none.
_SIGNS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {
    code: f"⟨U+{code:04X}⟩" for code in (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
_SIGNS[127] = "␡"


def warn(message: str) -> None:
    """Say one line that the user should know of, once however many processes train."""
    if is_rank_zero():
        print(f"warning: {sanitize_line(message)}", file=sys.stderr)


def sanitize_line(text: str) -> str:
    """Any text as one line that a terminal shows and does not obey, and a person reads to its end."""
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"


def escape_control_chars(text: str) -> str:
    """A text for a terminal, with signs for the characters that would move its cursor, or hide and turn others."""
    return text.translate(_SIGNS)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the known name closest to `name`, or nothing when none is close or it is `name`."""
    known = sorted(set(known) - {name})
    leaf = name.rpartition(".")[2]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6) or [
        key for key in known if difflib.get_close_matches(leaf, [key.rpartition(".")[2]], cutoff=0.75)
    ]
    return f" (did you mean {close[0]}?)" if close else ""
