"""The `router` command: one address for prefill servers and decode servers."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import math
import socket
from urllib.parse import urlsplit

from ...config import DEFAULT_PORT
from ...contract.flags import add_flags
from ...errors import ConfigError
from ...transfer.secret_file import read_secret
from ..server.disaggregation.settings import PEER_SECRET_FILE

__all__ = ["add_arguments", "run"]

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "A request goes to the decode server with the fewest open requests, which has the prompt computed by the "
        "prefill server with the fewest. Without a prefill server that answers, decode servers compute prompts "
        "themselves. GET /health shows which servers answer. After SIGTERM, open requests end first."
    )
    parser.add_argument("--prefill", nargs="+", default=[], metavar="URL", help="servers with --role prefill")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="servers with --role decode")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="port, 0 picks a free one (%(default)s)")
    add_flags(parser, [PEER_SECRET_FILE])
    parser.add_argument(
        "--silence",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time without a byte of an answer after which the router gives up a decode server's request; an answer "
        "that is not streamed has none until it is complete (%(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Route until a signal. Raises `ConfigError` before it listens."""
    if not 0 < args.silence < math.inf:
        raise ConfigError(f"--silence must be above 0, got {args.silence:g}")
    from .app import Forwarder, HttpServer

    prefills, decodes = ([_url(text) for text in texts] for texts in (args.prefill, args.decode))
    forwarder = Forwarder(prefills, decodes, read_secret(args.peer_secret_file), silence_s=args.silence)
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger(__package__).setLevel("INFO")
    try:
        family = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((args.host, args.port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {args.host}:{args.port}: {error}") from None
    with listener:
        host, port = listener.getsockname()[:2]
        if not ipaddress.ip_address(host).is_loopback:
            logger.warning(
                "listening on %s: the router has no password, every machine that reaches it can use the servers",
                args.host,
            )
        counts = f"{len(prefills)} prefill and {len(decodes)} decode servers"
        ready = f"Ready: http://{f'[{host}]' if ':' in host else host}:{port} sends requests to {counts}"
        HttpServer(forwarder, ready).run(sockets=[listener])
    return 0


def _url(text: str) -> str:
    try:
        url = urlsplit(text)
        is_good = url.scheme in ("http", "https") and bool((url.hostname or "").encode("idna")) and url.port != 0
    except ValueError:  # of the port, or the host
        is_good = False
    if not is_good:
        raise ConfigError(f"a server's URL is http://HOST:PORT, got {text!r}")
    return text.rstrip("/")
