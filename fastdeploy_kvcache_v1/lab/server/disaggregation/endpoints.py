"""Endpoints of a server with a role. A prefill server computes prompts, and sends heartbeats while its worker works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from ....contract.messages import CacheAccess
from ....scheduler.block_hashing import BlockHasher
from ....transfer.role_info import PATH as ROLE_PATH
from ....transfer.role_info import RankInfo, RoleInfo
from ....transfer.settings import PeerPort
from ..api_error import ApiError
from ..app import RequestStream
from ..engine.engine import Engine
from ..engine.generation import Generation, GenerationRequest
from ..prefill_job import PATH, PROOF_HEADER, PrefillAnswer, PrefillJob, PrefillLine, proves
from ..settings import ServerConfig
from ..text import Tokenizer
from .settings import Role, RoleSettings

__all__ = ["add_role_routes"]

SIGN_S = 1.0
"""Seconds between two heartbeats."""


def add_role_routes(
    app: FastAPI,
    config: ServerConfig,
    role: RoleSettings,
    engine: Engine,
    tokenizer: Tokenizer,
    ranks: list[RankInfo],
) -> None:
    """For a server with a role and these worker `ranks`. The tokenizer is for the generation; no text is sent."""
    info = RoleInfo(role.role.value, role.plane, role.address.host, ranks)

    @app.get(ROLE_PATH)
    async def tell_role() -> Response:
        """The role of this server, and where its ranks listen."""
        return Response(msgspec.json.encode(info), media_type="application/json")

    if role.role is not Role.PREFILL:
        return

    @app.post(PATH)
    async def prefill(request: Request) -> Response:
        """Compute a prompt for a decode server that knows the secret."""
        job = _read(await request.body(), request.headers.get(PROOF_HEADER, ""), role.transfer.secret, config)
        _require_moving(engine)
        stream = RequestStream(engine, job.request_id)
        engine.submit(_generation(job, config, tokenizer, stream))
        return StreamingResponse(_lines(stream, engine), media_type="application/x-ndjson")


def _read(raw: bytes, given: str, secret: bytes, config: ServerConfig) -> PrefillJob:
    """Raises `ApiError` for a sender without the secret, or a job that this server cannot do."""
    if not proves(secret, "job", raw, given):
        raise ApiError(403, "this endpoint is for decode servers with the same secret: give all --peer-secret-file")
    try:
        job = msgspec.json.decode(raw, type=PrefillJob)
    except msgspec.MsgspecError as error:
        raise ApiError(400, f"the job of the decode server cannot be read: {error}") from None
    if len(job.prompt_ids) >= config.max_model_len:
        raise ApiError(
            400, f"the prompt has {len(job.prompt_ids)} tokens, this server's --max-model-len is {config.max_model_len}"
        )
    if max(job.prompt_ids) >= config.model.vocab_size:
        raise ApiError(
            400, f"token {max(job.prompt_ids)} is not in this server's vocabulary: give both servers one --model"
        )
    num_blocks = -(-len(job.prompt_ids) // config.cache.block_size)
    if num_blocks > config.cache.num_device_blocks:
        raise ApiError(
            400, f"the prompt needs {num_blocks} device blocks, this server has {config.cache.num_device_blocks}"
        )
    return job


def _generation(job: PrefillJob, config: ServerConfig, tokenizer: Tokenizer, stream: RequestStream) -> Generation:
    request = GenerationRequest(
        request_id=job.request_id,
        prompt_ids=tuple(job.prompt_ids),
        max_tokens=1,
        sampling=job.sampling,
        offered_to=tuple(PeerPort(job.decode_host, port) for port in job.decode_ports),
    )
    access = CacheAccess(job.reads_cache, job.writes_cache)
    hasher = BlockHasher(config.cache.block_size, salt=job.cache_salt.encode(), access=access, session=job.session)
    hasher.extend(job.prompt_ids)
    return Generation(request, hasher, tokenizer.stream(), stream.sink)


def _require_moving(engine: Engine) -> None:
    """Raises `ApiError` if the decode server had better compute its prompt itself."""
    if (reason := engine.standstill) is not None:
        raise ApiError(503, reason)


async def _lines(stream: RequestStream, engine: Engine) -> AsyncIterator[bytes]:
    ended = asyncio.ensure_future(anext(stream.deltas()))
    try:
        yield _line(PrefillLine())
        while not (await asyncio.wait({ended}, timeout=SIGN_S))[0]:
            _require_moving(engine)
            yield _line(PrefillLine())
        delta = ended.result()
        assert delta.usage is not None, "the only delta is the last one"
        yield _line(PrefillLine(PrefillAnswer(delta.token_ids[0], delta.usage.cached_tokens)))
    except ApiError as error:
        yield _line(PrefillLine(error=str(error)))
    finally:
        stream.close()
        ended.cancel()


def _line(line: PrefillLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"
