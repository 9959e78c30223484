"""Serve models over HTTP: a page for browsers, and the API of OpenAI."""

import argparse
import os
import re
import threading
import webbrowser
from urllib.parse import quote

from minigpt.extras.packages import PIP_INSTALL
from minigpt.extras.playground.loaded_models import Models, find_models
from minigpt.utils.checks import integer
from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.errors import UserError, require
from minigpt.utils.scripts import ArgumentParser, usage
from minigpt.utils.terminal import log

ORIGIN = re.compile(r"[a-z][\w+.-]*://[^/\s*]+")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = ArgumentParser(prog=usage("serve"), description=__doc__)
    add = parser.add_argument
    add(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run folder, checkpoint, or folder or id of Hugging Face (default: all)",
    )
    add(
        "--host",
        default="127.0.0.1",
        metavar="HOST",
        help="address or name to bind to (default: %(default)s)",
    )
    add(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="0 takes a free one (default: %(default)s)",
    )
    add(
        "--api-key",
        metavar="KEY",
        help="that clients must send (default: MINIGPT_API_KEY, or none)",
    )
    origin_help = (
        "of a web site that may use the server, such as http://localhost:3000; can be repeated"
    )
    add("--allow-origin", action="append", default=[], metavar="ORIGIN", help=origin_help)
    add(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="cpu, cuda, cuda:1 or mps (default: auto, the fastest)",
    )
    add("--open", action="store_true", help="open the page in a browser")
    add("--quiet", action="store_true", help="print no line per request")
    return parser.parse_args()


def main() -> None:
    """Find the models, open the socket, serve until Ctrl-C."""
    args = arguments()
    require("--port", args.port, *integer(0, 65535))
    key = (os.environ.get("MINIGPT_API_KEY") or None) if args.api_key is None else args.api_key
    if key is not None:
        require(
            "--api-key",
            "this key",
            lambda _: re.fullmatch(r"[!-~]+", key),
            "printable ASCII without spaces",
        )
    for origin in args.allow_origin:
        require(
            "--allow-origin",
            origin,
            lambda text: ORIGIN.fullmatch(text),
            "an origin such as http://localhost:3000",
        )
    found = find_models(args.runs)
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"the server needs starlette and uvicorn; {PIP_INSTALL.format('serve')}"
        ) from error
    from minigpt.extras.playground.server import create_app, is_loopback, new_server, open_socket
    from minigpt.training.precision import find_device

    device = find_device(args.device)
    if key is None and not is_loopback(args.host):
        advice = "set MINIGPT_API_KEY or --api-key to serve other computers"
        raise UserError(
            f"--host must be a loopback address without a key, got {args.host}; {advice}"
        )
    opened = open_socket(args.host, args.port)
    # The address of all interfaces is not one that a browser can open
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(args.host, args.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{opened.getsockname()[1]}"

    log(f"serving {', '.join(found)}")
    log(f"{url} is the page, {url}/v1 the base URL of clients; Ctrl-C ends the server")
    if args.open:
        threading.Thread(
            target=open_browser, args=(url, key), daemon=True
        ).start()  # some browsers wait
    app = create_app(
        Models(found, device=device), host=args.host, key=key, origins=args.allow_origin
    )
    new_server(app, access_log=not args.quiet).run(sockets=[opened])


def open_browser(url: str, key: str | None) -> None:
    """Open the page, with the key in its address."""
    if not webbrowser.open(f"{url}/#key={quote(key, safe='')}" if key else url):
        log(f"found no browser; open {url} in one")


if __name__ == "__main__":
    cli_entrypoint(main)()
