"""HTTP with the proxy, the certificates and the passwords that pip would use."""

from __future__ import annotations

import ast
import base64
import os
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit

TIMEOUT_S = 30.0
"""Of one connect or one read."""
PIP_TIMEOUT_S = 60.0

SCHEMES = ("http", "https")

TROUBLE = (OSError, HTTPException, ValueError)
"""What an address, a network, a proxy or a server that is not in order raises."""


class PipSettings:
    """pip's settings: `PIP_*` in the environment, else its configuration files, as `pip config list` prints them.

    Read once, when made. Without pip, only the environment counts.
    """

    def __init__(self) -> None:
        self._files = _pip_files()

    def get(self, name: str) -> str:
        """`""` when it is not set. `name` as in a configuration file: `extra-index-url`."""
        variable = os.environ.get(f"PIP_{name.upper().replace('-', '_')}")
        if variable is not None:
            return variable
        return self._files.get(f"download.{name}") or self._files.get(f"global.{name}") or ""


def _pip_files() -> dict[str, str]:
    """`section.name` -> value."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.split("=", 1) for line in done.stdout.splitlines() if "='" in line or '="' in line)
    return {name: str(ast.literal_eval(value)) for name, value in pairs}


class Web:
    """Opens http and https URLs; no others, so that no index can name a local file. Immutable."""

    def __init__(self, settings: PipSettings) -> None:
        self._proxy = settings.get("proxy")
        self._certificates = settings.get("cert")

    def open(self, url: str, headers: Mapping[str, str]) -> HTTPResponse:
        """Raises one of `TROUBLE`. A password in `url` goes to that server only, not where it redirects to."""
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            raise ValueError(f"{url} is no http or https address")
        request = urllib.request.Request(without_password(url), headers=dict(headers))
        if parts.username is not None:
            words = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(words).decode()}")
        # Without a proxy of pip's, urllib takes http_proxy, https_proxy and no_proxy from the environment.
        proxies = dict.fromkeys(SCHEMES, self._proxy) if self._proxy else None
        context = ssl.create_default_context(cafile=self._certificates or None)
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler(proxies), urllib.request.HTTPSHandler(context=context)
        )
        response: HTTPResponse = opener.open(request, timeout=TIMEOUT_S)
        return response


def why(error: Exception) -> str:
    """What `open`, or reading its answer, ran into."""
    reason = error.reason if isinstance(error, URLError) and not isinstance(error, HTTPError) else error
    return str(reason) or type(error).__name__


def without_password(url: str) -> str:
    """`url` as it may be shown and requested."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
