"""The name of a transfer: one for each time that a prefill server takes a request up.

Request ids come from clients and come again; a first token that was late must not be taken for that of another request.
With it go the names of the images and videos in the prompt: FastDeploy sends a decode server their content hashes and
not their shapes, and equal hashes may have different shapes (`engine/task_tokens.py`).

Both travel in `ic_req_data`, which FastDeploy hands on with a request to the decode server and to the workers, and
with the first token. It uses the field itself only for its internal adapter, with which roles are refused.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from ...errors import ConfigError
from ..engine.task_tokens import Item, has_items, multimodal_items

logger = logging.getLogger(__name__)

KEY = "kvcache_v1_transfer"
ITEMS = "kvcache_v1_items"
MAX_LENGTH = 64


def give_name(request: Any) -> None:
    """At prefill, when the request has its blocks."""
    request.ic_req_data = {KEY: uuid.uuid4().hex}
    if has_items(request):
        try:
            request.ic_req_data[ITEMS] = [tuple(item) for item in multimodal_items(request)]
        except ConfigError as error:
            logger.warning("decode servers do not cache request %s: %s", request.request_id, error)


def name_of(carrier: Any) -> str | None:
    """Of a request, a worker's task or an output; None where no prefill server with this package has named it."""
    data = carrier.ic_req_data
    name = data.get(KEY) if isinstance(data, dict) else None
    return name if isinstance(name, str) and 0 < len(name) <= MAX_LENGTH else None


def items_of(request: Any) -> list[Item] | None:
    """At decode: the images and videos of the prompt. None where prefill has not named them."""
    if not has_items(request):
        return []
    items: list[Item] | None = request.ic_req_data.get(ITEMS)
    return items
