"""A small trace, and a server that answers as it is told."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Reply = Callable[[dict[str, Any]], list[int] | None]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * number, "input_length": 900 + number, "output_length": 40, "hash_ids": [0, 1 + number % 3]}
        for number in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def start_server():
    """`start_server(reply)` -> URL; `reply(body)` gives the output tokens, None an HTTP 400."""
    servers = []

    def start(reply: Reply) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler(reply))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def handler(reply: Reply) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            tokens = reply(body)
            self.send_response(400 if tokens is None else 200)
            self.end_headers()
            if tokens is None:
                self.wfile.write(b'{"error": {"message": "no"}}')
                return
            for token in tokens:
                self.event({"choices": [{"token_ids": [token]}]})
            usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 64}}
            self.event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, chunk: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    return Handler
