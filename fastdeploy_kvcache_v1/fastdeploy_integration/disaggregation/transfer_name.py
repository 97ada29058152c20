"""The name of a transfer: one for each time that a prefill server takes a request up.

Request ids come from clients and come again; a first token that was late must not be taken for that of another request.
With it goes what names the images and videos in the prompt (`engine/prompt_inputs.py`): FastDeploy sends a decode
server the rotary positions of the prompt's tokens, and no pixels.

Both travel in `ic_req_data`, which FastDeploy hands on with a request to the decode server and to the workers, and
with every token. So names of items leave it when the request has its blocks at decode. FastDeploy uses the field itself
only for its internal adapter, with which roles are refused.
"""

from __future__ import annotations

import uuid
from typing import Any

from ..engine.prompt_inputs import PromptInputs, inputs_of, received_inputs

KEY = "kvcache_v1_transfer"
INPUTS = "kvcache_v1_inputs"
MAX_LENGTH = 64


def give_name(request: Any) -> None:
    """At prefill, when the request has its blocks."""
    request.ic_req_data = {KEY: uuid.uuid4().hex}
    inputs = inputs_of(request)
    if inputs.refusal is None:
        request.ic_req_data[INPUTS] = inputs.to_send()


def drop_inputs(request: Any) -> None:
    """When decode has given the request its blocks: its outputs need nothing but the name."""
    request.ic_req_data = {KEY: name_of(request)}


def name_of(carrier: Any) -> str | None:
    """Of a request, a worker's task or an output; None where no prefill server with this package has named it."""
    data = carrier.ic_req_data
    name = data.get(KEY) if isinstance(data, dict) else None
    return name if isinstance(name, str) and 0 < len(name) <= MAX_LENGTH else None


def sent_inputs(request: Any) -> PromptInputs | None:
    """At decode: what names its prompt beside token ids. None where prefill could not name it. May raise anything."""
    sent = request.ic_req_data.get(INPUTS)
    return None if sent is None else received_inputs(sent, request)
