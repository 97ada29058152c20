"""A FAKE FastDeploy: a small package written to disk, with classes shaped like the places we patch."""

import importlib
import json
import sys
import textwrap
from pathlib import Path

ENGINE = """
    import {package}.parts
    from {package}.parts import Part, names

    class Engine:
        def __init__(self, size: int, *, name: str = "x"):
            self.part = Part(size)

        def schedule(self):
            return ["task"], []

        @staticmethod
        def helper(flag=False):
            return flag

        async def wait(self, request_id: str, executors=None):
            return executors
"""
PARTS = """
    names = {"old": 1}

    class Part:
        def __init__(self, size, role="mixed"):
            self.size = size
"""


def write(directory: Path, package: str, *, version: str = "9.1.0", engine: str = ENGINE, init: str = "") -> Path:
    """Returns the directory of the package; its version is in version.txt, as in an installed FastDeploy."""
    root = directory / package
    root.mkdir()
    for name, text in (("__init__", init), ("engine", engine), ("parts", PARTS), ("envs", "")):
        source = textwrap.dedent(text).replace("{package}", package)
        (root / f"{name}.py").write_text(source, encoding="utf-8")
    (root / "version.txt").write_text(f"fastdeploy version: {version}\n", encoding="utf-8")
    return root


def row(package: str, qualname: str, ours: str, **fields: object) -> dict[str, object]:
    module = "parts" if qualname == "names" else "engine"
    ours = f"{__name__}:{ours}"
    made = {
        "target": f"{package}.{module}:{qualname}",
        "kind": "wrap",
        "ours": ours,
        "where": "engine",
        "why": "a test",
    }
    return {**made, **fields}


def rows(package: str) -> list[dict[str, object]]:
    return [
        row(package, "Engine.schedule", "wrap_schedule", signature="(self)"),
        row(package, "Engine.helper", "wrap_helper", signature="(flag=False)"),
        row(package, "Engine.wait", "wrap_wait", signature="(self, request_id, executors=None)"),
        row(package, "Part", "replace_part", kind="replace", signature="(self, size, role='mixed')"),
        row(package, "names", "extend_names", kind="extend", adds=["new"]),
    ]


def write_table(
    directory: Path, patches: list[dict[str, object]], *, release: str = "9.1", bodies: object = (), **about: object
) -> Path:
    """`about`: more keys of the section [fastdeploy], and sections. Returns the file, which lies in `directory`."""
    sections = {name: about.pop(name) for name in ("capabilities", "not_in_names") if name in about}
    table = {"fastdeploy": {"release": release, "commit": "abc", **about}, **sections, "patch": patches, "body": bodies}
    path = directory / f"fake-{release}.toml"
    path.write_text("".join(f"{name} = {_toml(value)}\n" for name, value in table.items()), encoding="utf-8")
    return path


def _toml(value: object) -> str:
    """Strings, numbers, booleans and lists of them look the same in TOML and in JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml(each)}" for name, each in value.items()) + "}"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list | tuple) else json.dumps(value)


def forget(package: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
    importlib.invalidate_caches()


# ---- what the fake tables name as ours


def wrap_schedule(wrapped, instance, args, kwargs):
    tasks, errors = wrapped(*args, **kwargs)
    return [*tasks, instance.part], errors


def wrap_helper(wrapped, instance, args, kwargs):
    return "wrapped", wrapped(*args, **kwargs)


async def wrap_wait(wrapped, instance, args, kwargs):
    return "wrapped", await wrapped(*args, **kwargs)


def replace_part(original):
    def make(size, role="mixed"):
        return "ours", original(size, role)

    return make


def extend_names(names):
    names["new"] = 2
