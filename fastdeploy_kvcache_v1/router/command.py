"""The `router` command."""

from __future__ import annotations

import argparse
import logging
import math
import socket
from pathlib import Path

from ..config import DEFAULT_PORT
from ..embedded.disaggregation.secret_file import HELP as SECRET_HELP
from ..embedded.disaggregation.secret_file import read_secret
from ..errors import ConfigError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "A request goes to the decode server with the fewest open requests, which has the prompt computed by the "
        "prefill server with the fewest. Without a prefill server that answers, decode servers compute prompts "
        "themselves. GET /health shows which servers answer."
    )
    parser.add_argument("--prefill", nargs="+", default=[], metavar="URL", help="servers with --role prefill")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="servers with --role decode")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"port, 0 picks a free one (default: {DEFAULT_PORT})"
    )
    parser.add_argument("--peer-secret-file", type=Path, metavar="FILE", help=SECRET_HELP)
    parser.add_argument(
        "--health-interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="between two looks (default: 1)",
    )
    parser.add_argument(
        "--health-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="without an answer to /health for so long, a server gets no requests and loses its own (default: 10)",
    )
    parser.add_argument("--allowed-hosts", metavar="NAMES", help="names under which clients call it, as with serve")
    parser.add_argument(
        "--max-request-mib", type=float, default=16.0, metavar="MIB", help="largest request body (default: 16)"
    )


def run(args: argparse.Namespace) -> int:
    """Route until a signal. Raises `ConfigError` before it listens."""
    for name in ("health_interval", "health_timeout", "max_request_mib"):
        value = getattr(args, name)
        if not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    from .app import RouterSettings, serve

    settings = RouterSettings(
        prefill_urls=tuple(map(_url, args.prefill)),
        decode_urls=tuple(map(_url, args.decode)),
        secret=read_secret(args.peer_secret_file),
        interval_s=args.health_interval,
        timeout_s=args.health_timeout,
        max_request_mib=args.max_request_mib,
        host=args.host,
        allowed_hosts=tuple(filter(None, (args.allowed_hosts or "").split(","))),
    )
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        family = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((args.host, args.port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {args.host}:{args.port}: {error}") from None
    with listener:
        serve(settings, listener)
    return 0


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ConfigError(f"a server's URL begins with http://, got {text!r}")
    return text.rstrip("/")
