"""How tests use the stand-in SDK (`sdk/attentionstore_sdk`)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SDK = Path(__file__).parent / "sdk"
"""Belongs on the module path."""


def environment(store: Path) -> dict[str, str]:
    """Of a process that finds the SDK, and keeps what it stores in `store`."""
    path = os.pathsep.join(filter(None, (str(SDK), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "STAND_IN_STORE": str(store)}


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, store: Path) -> Iterator[Path]:
    """This process finds the SDK, which keeps what it stores in `store`."""
    store.mkdir()
    monkeypatch.setenv("STAND_IN_STORE", str(store))
    monkeypatch.syspath_prepend(str(SDK))
    yield store
    for name in [name for name in sys.modules if name.startswith("attentionstore_sdk")]:
        del sys.modules[name]


def set_faults(store: Path, **faults: dict[str, object]) -> None:
    """From now on, as `sdk.py` says; none ends them all."""
    store.mkdir(exist_ok=True)
    new = store / "faults.new"
    new.write_text(json.dumps(faults))
    new.rename(store / "faults.json")


def num_stored(store: Path) -> int:
    """Blocks, of all shards."""
    return sum(1 for path in store.glob("*of*/*"))
