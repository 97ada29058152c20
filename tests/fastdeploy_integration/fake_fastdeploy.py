"""A FAKE FastDeploy: a small package written to disk, with classes shaped like the places we patch."""

import importlib
import json
import sys
import textwrap
from collections.abc import Sequence
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
    raw: dict[str, object] = {
        "target": f"{package}.{module}:{qualname}",
        "kind": "wrap",
        "ours": f"tests.fastdeploy_integration.overlay.fake_patches:{ours}",
        "where": "engine",
        "why": "a test",
    }
    raw.update(fields)
    return raw


def rows(package: str) -> list[dict[str, object]]:
    return [
        row(package, "Engine.schedule", "wrap_schedule", signature="(self)"),
        row(package, "Engine.helper", "wrap_helper", signature="(flag=False)"),
        row(package, "Engine.wait", "wrap_wait", signature="(self, request_id, executors=None)"),
        row(package, "Part", "replace_part", kind="replace", signature="(self, size, role='mixed')"),
        row(package, "names", "extend_names", kind="extend", adds=["new"]),
    ]


def write_table(
    directory: Path,
    patches: list[dict[str, object]],
    *,
    release: str = "9.1",
    capabilities: dict[str, object] | None = None,
    not_in_names: dict[str, list[str]] | None = None,
    bodies: Sequence[dict[str, object]] = (),
    **about: object,
) -> Path:
    """`about`: more keys of the section [fastdeploy]. Returns the file, which lies in `directory`."""
    section = {"release": release, "commit": "abc", **about}
    text = "[fastdeploy]\n" + _assignments(section)
    if capabilities is not None:
        text += "\n[capabilities]\n" + _assignments(capabilities)
    for place, names in (not_in_names or {}).items():
        text += f"\n[not_in_names]\n{place!r} = {names}\n"
    for section_name, sections in (("patch", patches), ("body", bodies)):
        for each in sections:
            text += f"\n[[{section_name}]]\n" + _assignments(each)
    path = directory / f"fake-{release}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def _assignments(section: dict[str, object]) -> str:
    """Strings, numbers, booleans and lists look the same in TOML and in JSON."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items())


def forget(package: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
    importlib.invalidate_caches()
