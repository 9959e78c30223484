"""Standard input, FIFOs and devices as a corpus: copied to a file, which every process reads."""

import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from minigpt.data.readers import STDIN
from minigpt.data.sources import free_path
from minigpt.utils.errors import UserError
from minigpt.utils.files import checksums, sha256_json
from minigpt.utils.ranks import env_number, rank_variables


def spool(path: str, setting: str, folder: Path) -> str:
    """Copy standard input, a FIFO or a device to a file in `folder` that its checksum names.

    Other paths are returned as they are. Later calls, and child processes (ranks, the runs of a
    sweep), take the copy from an environment variable.

    Raises:
        UserError: the input is a terminal, is empty, or is shared by processes.
    """
    # A child process has no such pipe, and files need no copy
    is_stdin = path in STDIN
    variable = f"MINIGPT_STDIN_{'FILE' if is_stdin else sha256_json(path)[:8]}"
    if os.environ.get(variable):
        return os.environ[variable]
    file = Path(path).expanduser()
    if not is_stdin and (file.is_file() or file.is_dir() or not file.exists()):
        return path

    read = f"{setting}={path} reads standard input, which" if is_stdin else f"{setting}={path}"
    names = rank_variables()
    if names and env_number(names[1], 1) > 1:
        raise UserError(
            f"{read} cannot be read by several processes; "
            f"save the text and set {setting} to its file"
        )
    with ExitStack() as stack:
        # Where it is read from: there is no standard input without a console.
        if is_stdin:
            stream = sys.stdin and sys.stdin.buffer
        else:
            stream = stack.enter_context(open(file, "rb"))
        if not stream or stream.isatty():
            raise UserError(
                f"{read} is closed or a terminal; pipe a text into it, or set {setting} to a file "
                f"(earlier input is in {folder / 'stdin-*.txt'})"
            )

        # Its checksum, and so its name, is known once it is copied.
        folder.mkdir(parents=True, exist_ok=True)
        copy = Path(stack.enter_context(TemporaryDirectory(dir=folder, prefix=".stdin."))) / "stdin"
        with open(copy, "wb") as target:
            shutil.copyfileobj(stream, target)
        if not copy.stat().st_size:
            raise UserError(f"{read} is empty; pipe a text into it")
        (checksum,) = checksums([copy], None)
        spooled = str(free_path(folder / f"stdin-{checksum[:16]}.txt", checksum).absolute())
        copy.replace(spooled)
    os.environ[variable] = spooled
    return spooled
