"""Text for terminals: in one line, printable, without control characters; and output that fails.

First what prints a message, then output that cannot be written, then text that is made printable.
"""

import difflib
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

from minigpt.utils.ranks import is_rank_zero

_MAX_LINE_CHARS = 1000
# Unicode's control pictures (␀ …), except for line breaks and tabs; C1 controls and direction marks
# have no picture.
_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {127: "␡"}
_UNPICTURED = (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = _PICTURES | {code: f"⟨U+{code:04X}⟩" for code in _UNPICTURED}
_TYPED = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}


def warn(message: str) -> None:
    """Print a one-line warning on rank 0."""
    if is_rank_zero():
        log(f"warning: {message}")


warn_once = cache(warn)


def log(line: str) -> None:
    """Print a line to stderr."""
    print(sanitize_line(line), file=sys.stderr, flush=True)


def notebook() -> Any:
    """Return the kernel of IPython if this process runs the cells of a notebook, else None."""
    return getattr(getattr(sys.modules.get("IPython"), "get_ipython", object)(), "kernel", None)


def escape_unencodable() -> None:
    """Let stdout escape characters that its encoding lacks, as stderr always does."""
    if hasattr(sys.stdout, "reconfigure"):  # else of a notebook, which lacks no character
        sys.stdout.reconfigure(errors="backslashreplace")


def replace_dead_output(*, ends_script: bool) -> None:
    """Let the standard streams write to os.devnull once they fail or if there are none.

    They fail if a pipe or a terminal is closed, or a disk is full. Also escape what they lack.

    Args:
        ends_script: raise the error too; otherwise the script does its work to the end.
    """
    for number, name in enumerate(("stdout", "stderr"), 1):
        stream = getattr(sys, name)
        if not stream:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            stream = os.fdopen(number, "w", encoding="utf-8")
            setattr(sys, name, stream)
        for method in ("write", "flush"):  # replaced in place, because loggers hold the streams
            replaced = partial(
                _write_or_replace, getattr(stream, method), stream.fileno, ends_script
            )
            setattr(stream, method, replaced)
    escape_unencodable()


def _write_or_replace(
    method: Callable[..., int], descriptor: Callable[[], int], ends_script: bool, *args: str
) -> int:
    try:
        return method(*args)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor())
        if ends_script:
            raise
        return method(*args)


def sanitize_line(text: str) -> str:
    """Return text as one printable line of bounded length: messages quote files and user input."""
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line if len(line) <= _MAX_LINE_CHARS else f"{line[:_MAX_LINE_CHARS]} …"


def unescape(text: str) -> str:
    r"""Replace `\n`, `\t` and `\\`, which every shell passes on, by what they stand for."""
    return re.sub(r"\\[nt\\]", lambda found: _TYPED[found[0]], text)


def escape_control_chars(text: str) -> str:
    """Replace characters that would control a terminal, or hide or reorder text."""
    return text.translate(_VISIBLE)


def visible(character: str) -> str:
    """Return a character in quotes, or its code point if it would not be seen."""
    is_seen = character in " \n\t" or unicodedata.category(character)[0] not in "CMZ"
    return repr(character) if is_seen else f"U+{ord(character):04X}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean X?)` for the closest known name, or an empty string."""
    known = sorted(set(known) - {name})
    leaf = name.rpartition(".")[2]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6) or [
        key
        for key in known
        if difflib.get_close_matches(leaf, [key.rpartition(".")[2]], cutoff=0.75)
    ]
    return f" (did you mean {close[0]}?)" if close else ""
