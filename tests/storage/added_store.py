"""A package that adds the store `mine`, and how one is installed."""

from fastdeploy_kvcache_v1.storage.registry import GROUP

PACKAGE = """
import os
from pathlib import Path

from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.registry import StoreKind, store_flag

checked = []

def open_it(chosen, namespace):
    with open({opened!r}, "a") as file:
        print(os.getpid(), dict(chosen.options), file=file)
    return FileBackend(Path({directory!r}), namespace, capacity_bytes=1 << 20)

def check_it(chosen, namespace):
    checked.append(namespace)
    print("checked with", dict(chosen.options))

ROOM = store_flag("kvcache_mine_room", "rooms of the store", int, 3, least=1)
KEY = store_flag("kvcache_mine_key", "its key", otherwise="none")
STORE = StoreKind("mine", open=open_it, check=check_it, flags=[ROOM, KEY])
WRONG = StoreKind("mine", open=open_it, check=print, flags=[store_flag("swap_space", "more")])
OTHER = StoreKind("other", open=open_it, check=print)
"""


def install(directory, name, **points):
    """Install the entry points of a package, for whoever has `directory` on the path: stores as MODULE:ATTRIBUTE."""
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{store} = {where}" for store, where in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))


def install_mine(directory, **points):
    """`mine="STORE"` installs the package with that entry point: an attribute of its module. Its values are below
    `kv`; the file `opened` has a line of each connection, with the process and the values of the store's flags.
    """
    places = {"opened": str(directory / "opened"), "directory": str(directory / "kv")}
    (directory / "my_store.py").write_text(PACKAGE.format(**places))
    install(directory, "my_store", **{name: f"my_store:{attribute}" for name, attribute in points.items()})
