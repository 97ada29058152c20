"""The `attention_store`, for the registry."""

from __future__ import annotations

from ..namespace import Namespace
from ..registry import Chosen, RoundTrip, StoreKind


def _check(settings: Chosen, namespace: Namespace | None) -> None:
    from .sdk import require_installed, require_layout

    require_installed()
    if namespace is not None and not settings.flush_only:
        require_layout(namespace.layout)


def _trial(settings: Chosen) -> RoundTrip:
    from .trial import try_attention_store

    return try_attention_store()


STORE = StoreKind(
    "attention_store",
    open=None,
    check=_check,
    trial=_trial,
    measures=", from and to memory of the lab's server",
    module="attentionstore_sdk",
    has_index=True,
)
