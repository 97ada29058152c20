"""The `mooncake` store, for the registry."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..namespace import Namespace
from ..registry import Chosen, RoundTrip, StoreKind
from .settings import MooncakeSettings

if TYPE_CHECKING:
    from .mooncake_backend import MooncakeBackend


def _open(settings: Chosen, namespace: Namespace) -> MooncakeBackend:
    from .mooncake_backend import MooncakeBackend

    return MooncakeBackend(MooncakeSettings.read(os.environ), namespace)


def _check(settings: Chosen, namespace: Namespace | None) -> None:
    from .client import MooncakeClient

    MooncakeClient(MooncakeSettings.read(os.environ)).close()


def _trial(settings: Chosen) -> RoundTrip:
    from ..round_trip import try_mooncake

    return try_mooncake()


def _give_memory(settings: Chosen, num_ranks: int) -> None:
    from .share import give_memory

    mooncake = MooncakeSettings.read(os.environ)
    give_memory(mooncake, num_ranks * mooncake.global_segment_size)


STORE = StoreKind(
    "mooncake",
    open=_open,
    check=_check,
    trial=_trial,
    module="mooncake",
    libraries={
        "libibverbs.so.1": "libibverbs1",
        "libnuma.so.1": "libnuma1",
        "libcurl.so.4": "libcurl4",
        "librdmacm.so.1": "librdmacm1",
        "liburing.so.2": "liburing2",
    },
    beside=_give_memory,
    load_threads=1,
)
