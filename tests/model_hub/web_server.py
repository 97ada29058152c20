"""A web server on this machine that serves given answers, remembers requests, and can break off."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """`pages` by path: content type and content."""

    url: str = ""
    pages: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    """Path, Range and Authorization of each request, in order."""
    knows_ranges: bool = True
    bytes_per_connection: list[int] = field(default_factory=list)
    """Each of the next answers with a Range breaks off after so many bytes."""

    def ranges(self) -> list[str]:
        return [given for _, given, _ in self.requests if given is not None]


class Handler(BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        site, given = self.site, self.headers["Range"]
        site.requests.append((self.path, given, self.headers["Authorization"]))
        if self.path not in site.pages:
            self.send_error(404)
            return
        kind, content = site.pages[self.path]
        start = 0
        if given is not None and site.knows_ranges:
            start = int(re.fullmatch(r"bytes=(\d+)-", given)[1])
            self.send_response(206)
        else:
            self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = len(content)
        if given is not None and site.bytes_per_connection:
            end = start + site.bytes_per_connection.pop(0)
        self.wfile.write(content[start:end])

    def log_message(self, *arguments: object) -> None:
        """Nothing: tests look at `requests`."""


@contextmanager
def serving() -> Iterator[Site]:
    site = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("SiteHandler", (Handler,), {"site": site}))
    site.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
