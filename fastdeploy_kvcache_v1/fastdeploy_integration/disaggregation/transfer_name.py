"""The name of a transfer: one for each time that a prefill server takes a request up.

Request ids come from clients and come again; a first token that was late must not be taken for that of another request.
With it go the names of the images and videos in the prompt: 2.5 sends a decode server nothing of them, 2.6 their
content hashes and not their shapes, and equal hashes may have different shapes (`engine/task_tokens.py`).

Both travel in `ic_req_data`, which FastDeploy hands on with a request to the decode server and to the workers, and
with the first token. It uses the field itself only for its internal adapter, with which roles are refused.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from ..engine.task_tokens import Item, multimodal_items

logger = logging.getLogger(__name__)

KEY = "kvcache_v1_transfer"
ITEMS = "kvcache_v1_items"
MAX_LENGTH = 64


def give_name(request: Any) -> None:
    """At prefill, when the request has its blocks."""
    request.ic_req_data = {KEY: uuid.uuid4().hex}
    try:
        request.ic_req_data[ITEMS] = [tuple(item) for item in multimodal_items(request)]
    except Exception as error:  # the edge to what clients send: the request has its seat and its blocks
        logger.warning("decode servers do not cache request %s: %r", request.request_id, error)


def name_of(carrier: Any) -> str | None:
    """Of a request, a worker's task or an output; None where no prefill server with this package has named it."""
    data = carrier.ic_req_data
    name = data.get(KEY) if isinstance(data, dict) else None
    return name if isinstance(name, str) and 0 < len(name) <= MAX_LENGTH else None


def items_of(request: Any) -> list[Item] | None:
    """At decode: the images and videos of the prompt, none of text. None where prefill could not name them; what
    FastDeploy sends of them does not tell whether there are any.
    """
    items: list[Item] | None = request.ic_req_data.get(ITEMS)
    return items
