"""Checks of `doctor` about FastDeploy: its version, its patch points, and how this package is loaded."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import site
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from msgspec.structs import asdict

from ..contract.installation import Finding
from ..errors import OverlayError
from ..switch import SWITCH, is_enabled
from .overlay import bodies, release, table
from .overlay.overlay import UNKNOWN_BODIES, Overlay, overlay_for

BOOTSTRAP = "fastdeploy_kvcache_v1.pth"
PLUGIN, PLUGIN_GROUP = "kvcache_v1", "fastdeploy.tool_parser_plugins"
"""Loaded by FastDeploy where `FD_PLUGINS` names it."""


def print_bodies(source: Path, against: Path | None) -> None:
    """Print the digests of a tree, or the differences of its bodies to those of `against`."""
    new = release.fastdeploy_at(source)
    if against is None:
        known = bodies.known_digests(new.release) if bodies.digests_file(new.release).exists() else {}
        print(bodies.to_toml(new.root, table.table_for(new.release), known), end="")
        return
    old = release.fastdeploy_at(against)
    watched = bodies.watched(table.table_for(old.release))
    changed = {target: lines for target in watched if (lines := bodies.difference_in_words(old.root, new.root, target))}
    for target, difference in changed.items():
        print(f"==> {target}", *difference, sep="\n")
    if not changed:
        print(f"no difference to {against} in {len(watched)} watched bodies")


def fastdeploy(args: argparse.Namespace) -> Iterator[Finding]:
    found = release.installed_fastdeploy() if args.source is None else release.fastdeploy_at(args.source)
    if found is None:
        known = ", ".join(table.known_releases())
        yield Finding(False, "FastDeploy", f"got none, expected one of {known}: install it, or name a tree (--source)")
        return
    if found.has_own_manager:
        yield Finding(None, "FastDeploy", f"{found.version} at {found.root}: {release.OWN_MANAGER}")
        return
    yield Finding(True, "FastDeploy", f"{found.version} at {found.root}")
    try:
        checked = overlay_for(found)
    except OverlayError as error:
        yield Finding(False, "patch table", str(error))
        return
    yield from table_findings("patch table", checked)
    yield from body_findings(checked, found)
    num_left_out, lost = sum(map(len, checked.table.not_in_names.values())), checked.lost_settings()
    missing = f"FastDeploy has no {', '.join(lost)}: take them out of not_in_names, or name them in `removes`"
    known = f"from all settings except {num_left_out}"
    yield Finding(not lost, "names of stored blocks", missing if lost else known)
    for name, has_it in asdict(checked.table.capabilities).items():
        yield Finding(None, f"capability {name}", "yes" if has_it else "no")


def table_findings(name: str, checked: Overlay) -> Iterator[Finding]:
    table, problems = checked.table, checked.problems()
    yield Finding(True, name, f"{table.release}, {len(table.rows)} patches, written for {table.commit}")
    for row in table.rows:
        yield Finding(row not in problems, f"{row.kind.value} {row.target}", problems.get(row, row.where.value))


def body_findings(checked: Overlay, fastdeploy: release.FastDeployTree) -> Iterator[Finding]:
    """Bodies that our code relies on, and members of the cache manager."""
    if checked.problems():
        yield Finding(None, "bodies", "not compared until all patch points are ok")
        return
    try:
        changed = checked.changed_bodies()
    except OverlayError as error:
        yield Finding(False, "bodies", str(error))
        return
    yield Finding(not changed, "bodies", f"{len(changed)} of {len(bodies.watched(checked.table))} changed")
    for each in changed:
        yield Finding(False, f"body {each.target}", each.where)
    if must := [each for each in changed if each.must_hold]:
        how = f"{UNKNOWN_BODIES}={bodies.acceptance(must)} starts a server with these {len(must)}"
        yield Finding(None, "bodies that must hold", f"{how}: compare them first; others only warn")
    lacking = bodies.members_lacking(fastdeploy.root)
    missing = f"FastDeploy's engine uses {', '.join(lacking)}, which ours lacks: add it to the adapter"
    yield Finding(not lacking, "cache manager", missing if lacking else "has all members that FastDeploy's engine uses")


def activation(args: argparse.Namespace) -> Iterator[Finding]:
    places = site.getsitepackages()  # Python reads .pth files only there
    if site.ENABLE_USER_SITE:
        places.append(site.getusersitepackages())
    installed = [place for place in places if (Path(place) / BOOTSTRAP).is_file()]
    switch = "on" if is_enabled() else "off"
    is_ok, found = True, f"FD_PLUGINS={PLUGIN}; {SWITCH} is {switch}"
    if installed:
        found = f"{BOOTSTRAP} in {installed[0]}; {SWITCH} is {switch}"
    elif PLUGIN not in os.environ.get("FD_PLUGINS", "").split(","):
        is_ok, found = False, f"got no {BOOTSTRAP} in site-packages: reinstall, or set FD_PLUGINS={PLUGIN}"
    elif PLUGIN not in importlib.metadata.entry_points(group=PLUGIN_GROUP).names:
        is_ok, found = False, f"got FD_PLUGINS={PLUGIN} without its entry point: reinstall"
    yield Finding(is_ok, "activation", found)


def paddle(args: argparse.Namespace) -> Iterator[Finding]:
    wanted, found = "paddlepaddle-gpu", "nothing"
    for name in (wanted, "paddlepaddle"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found = f"{name} {importlib.metadata.version(name)}"
            break
    if found.startswith(wanted):
        yield Finding(True, "PaddlePaddle", found)
    else:
        todo = "install it as FastDeploy's installation guide says"
        yield Finding(False, "PaddlePaddle", f"got {found}, expected {wanted}: {todo}")
