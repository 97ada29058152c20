"""Try servers of both roles: whether they answer, know the secret, and have caches that fit."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import msgspec

from ..contract.installation import Finding
from ..errors import KVCacheError, PeerRefusedError
from .authentication import prove_to_peer
from .channel import connect
from .geometry import require_compatible
from .role_info import PATH, RoleInfo
from .secret_file import read_secret
from .socket_plane import SocketPlane

__all__ = ["servers", "try_servers"]

TIMEOUT_S = 10.0


def servers(args: argparse.Namespace) -> Iterator[Finding]:
    """Check of `doctor`. Raises `ConfigError` for the secret."""
    return try_servers(args.prefill, args.decode, read_secret(args.peer_secret_file))


def try_servers(prefill_urls: Sequence[str], decode_urls: Sequence[str], secret: bytes) -> Iterator[Finding]:
    """Try each server alone, then each pair. FastDeploy's servers are named by their file `kvcache_role.json`."""
    infos: dict[str, dict[str, RoleInfo]] = {"prefill": {}, "decode": {}}
    for role, urls in (("prefill", prefill_urls), ("decode", decode_urls)):
        for url in urls:
            try:
                infos[role][url] = info = _ask(url, role)
                yield _reach(url, info, secret)
            except (KVCacheError, HTTPException, ValueError, msgspec.MsgspecError, OSError, EOFError) as error:
                detail = " ".join(str(error).split()) or type(error).__name__
                yield Finding(False, f"{role} server {url}", detail)
    for prefill, source in infos["prefill"].items():
        for decode, target in infos["decode"].items():
            name = f"{prefill} for {decode}"
            try:
                _require_fit(source, target)
            except KVCacheError as error:
                yield Finding(False, name, str(error))
            else:
                yield Finding(True, name, "the caches fit")


def _ask(url: str, role: str) -> RoleInfo:
    content = _get(url, role) if "://" in url else Path(url).read_bytes()
    info = msgspec.json.decode(content, type=RoleInfo)
    if info.role != role:
        raise PeerRefusedError(f"got role {info.role}, expected {role}: start it with --role {role}")
    return info


def _get(url: str, role: str) -> bytes:
    try:
        with build_opener(ProxyHandler({})).open(f"{url.rstrip('/')}{PATH}", timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read()
            return content
    except HTTPError as error:
        if error.code == 404:
            raise PeerRefusedError(f"got no role, expected {role}: start it with --role {role}") from None
        raise


def _reach(url: str, info: RoleInfo, secret: bytes) -> Finding:
    deadline = time.monotonic() + TIMEOUT_S
    name = f"{info.role} server {url}"
    ports = [rank.port for rank in info.ranks if rank.port is not None]
    if ports:
        for port in ports:
            channel = connect(info.host, port, deadline)
            try:
                prove_to_peer(channel, secret, b"control", deadline)
            finally:
                channel.close()
        where = ", ".join(f"{info.host}:{port}" for port in ports)
        return Finding(True, name, f"listens for prefill workers at {where} and knows the secret")
    if info.plane != "socket":
        return Finding(None, name, f"answers; its plane {info.plane} was not tried")
    plane = SocketPlane("127.0.0.1", secret)
    try:
        for rank in info.ranks:
            plane.open(rank.plane_address, deadline).close()
    finally:
        plane.close()
    return Finding(True, name, "its blocks can be read, and it knows the secret")


def _require_fit(source: RoleInfo, target: RoleInfo) -> None:
    if source.plane != target.plane:
        raise PeerRefusedError(f"got --transfer-plane {source.plane} and {target.plane}: give both the same")
    for theirs in target.ranks:
        for ours in source.ranks:
            require_compatible(ours.geometry, theirs.geometry)
