"""Where a package index keeps a file: the simple API, as JSON (PEP 691) or HTML (PEP 503)."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from http.client import HTTPResponse
from urllib.parse import unquote, urljoin, urlsplit

from ..errors import ModelFetchError
from .web import SCHEMES, TROUBLE, PipSettings, Web, why, without_password

DEFAULT_INDEX = "https://pypi.org/simple"
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"

MAX_PAGE_BYTES = 1 << 24
"""A page longer than that lists no small package."""


def find_file(web: Web, settings: PipSettings, package: str, filename: str) -> str:
    """URL of `filename` at the first of pip's indexes that has it.

    Raises `ModelFetchError` that says what the last one answered. Which index it is needs no trust: the caller
    knows the file's checksum.
    """
    trouble = "pip's settings name no index on the web"
    for index in index_urls(settings):
        page_url = f"{index.rstrip('/')}/{package}/"
        try:
            with web.open(page_url, {"Accept": ACCEPT}) as response:
                found = _links(response).get(filename)
                base = response.geturl()
        except TROUBLE as error:
            trouble = f"{without_password(page_url)}: {why(error)}"
            continue
        if found is not None:
            # The answer's own address lacks the password, which belongs to the index's server alone.
            return urljoin(page_url if base == without_password(page_url) else base, found)
        trouble = f"{without_password(page_url)} does not list {filename}"
    raise ModelFetchError(trouble)


def index_urls(settings: PipSettings) -> list[str]:
    """pip's `index-url`, then its `extra-index-url`s; local ones are left out."""
    urls = [settings.get("index-url") or DEFAULT_INDEX, *settings.get("extra-index-url").split()]
    return [url for url in urls if urlsplit(url).scheme in SCHEMES]


def _links(response: HTTPResponse) -> dict[str, str]:
    """File name -> its address, relative to the page."""
    page = response.read(MAX_PAGE_BYTES).decode("utf-8")
    if response.headers.get_content_type().endswith("json"):
        return {file["filename"]: file["url"] for file in json.loads(page).get("files", [])}
    anchors = _Anchors()
    anchors.feed(page)
    return {unquote(urlsplit(url).path.rpartition("/")[2]): url for url in anchors.urls}


class _Anchors(HTMLParser):
    """Collects where a page links to."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        url = dict(attrs).get("href")
        if tag == "a" and url:
            self.urls.append(url)
