"""Patch tables: their syntax, what one inherits from another, and the tables that we ship."""

import importlib
import importlib.util
import inspect
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import asdict

from fastdeploy_kvcache_v1.errors import OverlayError
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.release import (
    OVERRIDE,
    FastDeployTree,
    fastdeploy_at,
    installed_fastdeploy,
)
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import (
    Capabilities,
    Kind,
    known_releases,
    load_table,
    table_for,
)
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu import activation
from tests.fastdeploy_integration import fake_fastdeploy

SCHEDULE, HELPER, WAIT, *_ = fake_fastdeploy.rows("fakefd")


@pytest.fixture
def write(tmp_path):
    return partial(fake_fastdeploy.write_table, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "patch"}, r"Invalid enum value 'patch' - at `\$.kind`"),
        ({"where": "router"}, r"Invalid enum value 'router' - at `\$.where`"),
        ({"adds": "name"}, r"Expected `array`, got `str` - at `\$.adds`"),
        ({"why": 1}, r"Expected `str`, got `int` - at `\$.why`"),
        ({"target": "fakefd.engine.Engine"}, "expected package.module:Qualified.name"),
        ({"ours": "os.path"}, "expected package.module:Qualified.name"),
        ({"signature": ""}, "wrap and replace need `signature`"),
        ({"kind": "extend"}, "extend needs `adds`"),
        ({"optional": ["name"]}, "`optional` has name, which `adds` lacks"),
        ({"colour": "red"}, "unknown field `colour`"),
        *(({field: None}, f"missing required field `{field}`") for field in ("kind", "ours", "where", "why")),
    ],
)
@pytest.mark.parametrize("is_inherited", [False, True])
def test_a_bad_row_and_its_table_are_named(write, is_inherited, change, message):
    row = {field: value for field, value in {**SCHEDULE, **change}.items() if value is not None}
    path = write([row], release="9.1")
    if is_inherited:
        path = write([], release="9.2", inherits="9.1")
    with pytest.raises(OverlayError, match=rf"^patch table fake-9\.1\.toml: (fakefd\S*|os.path): .*{message}"):
        load_table(path)


def test_not_a_table(tmp_path):
    path = tmp_path / "table.toml"
    path.write_text("[fastdeploy]\n", encoding="utf-8")
    with pytest.raises(OverlayError, match=r"table.toml: .* missing required field `release`"):
        load_table(path)


def qualnames(table):
    return [row.qualname for row in table.rows]


def test_a_table_inherits_every_row_and_capability_it_does_not_mention(write):
    write([SCHEDULE, HELPER], release="9.1", capabilities={"flash_block_wise_fp8": True, "reschedules": True})
    table = load_table(write([], release="9.2", inherits="9.1", commit="def", capabilities={"reschedules": False}))
    assert (table.release, table.commit) == ("9.2", "def")
    assert qualnames(table) == ["Engine.schedule", "Engine.helper"]
    assert table.capabilities == Capabilities(flash_block_wise_fp8=True)


def test_row_with_an_inherited_target_replaces_it_and_others_are_added(write):
    write([SCHEDULE, HELPER], release="9.1")
    changed = {**SCHEDULE, "signature": "(self, budget)"}
    table = load_table(write([WAIT, changed], release="9.2", inherits="9.1"))
    assert qualnames(table) == ["Engine.schedule", "Engine.helper", "Engine.wait"]
    assert table.rows[0].signature == "(self, budget)"


def test_a_removed_row_is_gone_and_a_later_release_can_bring_it_back(write):
    write([SCHEDULE, HELPER], release="9.1")
    middle = write([], release="9.2", inherits="9.1", removes=[SCHEDULE["target"]])
    last = write([SCHEDULE], release="9.3", inherits="9.2", capabilities={"flash_block_wise_fp8": True})
    assert qualnames(load_table(middle)) == ["Engine.helper"]
    assert load_table(middle).capabilities == Capabilities()
    assert qualnames(load_table(last)) == ["Engine.helper", "Engine.schedule"]
    assert load_table(last).capabilities == Capabilities(flash_block_wise_fp8=True)


def test_what_names_leave_out_is_inherited_and_added_to(write):
    write([SCHEDULE], release="9.1", not_in_names={"fakefd:Engine": ["port"]})
    table = load_table(write([], release="9.2", inherits="9.1", not_in_names={"fakefd:Engine": ["host"]}))
    assert table.not_in_names == {"fakefd:Engine": {"port", "host"}}
    table = load_table(write([], release="9.3", inherits="9.2", removes=["fakefd:Engine.port"]))
    assert table.not_in_names == {"fakefd:Engine": {"host"}}


@pytest.mark.parametrize("names", [["port"], ["host", "host"]])
def test_what_names_leave_out_is_said_once(write, names):
    write([SCHEDULE], release="9.1", not_in_names={"fakefd:Engine": ["port"]})
    with pytest.raises(OverlayError, match=rf"fake-9.2.toml: not_in_names: fakefd:Engine has {names[0]} twice"):
        load_table(write([], release="9.2", inherits="9.1", not_in_names={"fakefd:Engine": names}))


@pytest.mark.parametrize(
    ("patches", "section", "message"),
    [
        ([], {"removes": [HELPER["target"]]}, "removes fakefd.engine:Engine.helper, which it does not inherit"),
        ([SCHEDULE], {"removes": [SCHEDULE["target"]]}, "removes fakefd.engine:Engine.schedule and has a row for it"),
        ([SCHEDULE], {}, "repeats the row of 9.1 for fakefd.engine:Engine.schedule"),
        ([], {"removes": [SCHEDULE["target"]]}, "no rows"),
        ([], {"inherits": "9.0"}, "inherits '9.0', but there is no fake-9.0.toml beside it"),
        ([], {"inherit": "9.1"}, "unknown field `inherit`"),
        ([], {"capabilities": {"flash": True}}, "unknown field `flash` - at `$.capabilities`"),
        ([], {"capabilities": {"flash_block_wise_fp8": 1}}, "Expected `bool`, got `int` - at `$.capabilities.flash"),
        ([HELPER, HELPER], {}, "two rows for fakefd.engine:Engine.helper"),
    ],
)
def test_a_table_that_contradicts_what_it_inherits_is_one_clear_error(write, patches, section, message):
    write([SCHEDULE], release="9.1")
    path = write(patches, release="9.2", **{"inherits": "9.1", **section})
    with pytest.raises(OverlayError, match=r"patch table fake-9\.2\.toml: ") as caught:
        load_table(path)
    assert message in str(caught.value)


def test_a_cycle_names_its_releases(write):
    write([SCHEDULE], release="9.1", inherits="9.3")
    write([], release="9.2", inherits="9.1")
    path = write([], release="9.3", inherits="9.2")
    with pytest.raises(OverlayError, match=r"it inherits from itself: 9\.3 -> 9\.2 -> 9\.1 -> 9\.3"):
        load_table(path)


def test_a_copied_table_that_still_says_its_old_release_is_refused(write, tmp_path):
    copied = tmp_path / "fake-9.2.toml"
    write([SCHEDULE], release="9.1").rename(copied)
    with pytest.raises(OverlayError, match=r"its release is '9\.1', so its name must end with -9\.1\.toml"):
        load_table(copied)


def test_the_page_about_ports_says_where_to_look_for_each_capability():
    page = (Path(__file__).parents[3] / "docs" / "develop" / "porting.md").read_text(encoding="utf-8")
    table = page.partition("| capability |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(asdict(Capabilities()))


@pytest.mark.parametrize(
    ("find", "message"),
    [
        (table_for, f"FastDeploy 1\\.0 is not supported .*{', '.join(known_releases())}.*unset"),
        (
            activation.table_for,
            f"got FastDeploy 1\\.0, the CPU worker expects one of {', '.join(known_releases(activation.TABLE_NAME))}",
        ),
    ],
)
def test_an_unknown_release_names_those_that_work(find, message):
    with pytest.raises(OverlayError, match=message):
        find("1.0")


INTEGRATION = "fastdeploy_kvcache_v1.fastdeploy_integration."
OURS = [(table_for, each) for each in known_releases()]
OURS += [(activation.table_for, each) for each in known_releases(activation.TABLE_NAME)]


@pytest.mark.parametrize(("find", "release"), OURS)
def test_our_tables_name_functions_that_exist(find, release):
    table = find(release)
    assert table.release == release
    for row in table.rows:
        module, _, name = row.ours.partition(":")
        assert module.startswith("fastdeploy_kvcache_v1.lab." if find is activation.table_for else INTEGRATION)
        given = list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
        expected = ["wrapped", "instance", "args", "kwargs"] if row.kind is Kind.WRAP else given[:1]
        assert given == expected != [], row.ours
        assert row.why.endswith(".")


def test_tables_of_the_cpu_worker_are_no_releases_of_the_overlay():
    assert not [release for release in known_releases() if "cpu" in release]


# ---- which FastDeploy there is, and which release it counts as


@pytest.fixture
def tree(tmp_path):
    root = fake_fastdeploy.write(tmp_path, "fastdeploy")
    (root / "version.txt").unlink()
    return tmp_path


def test_where_the_version_comes_from(tree, monkeypatch):
    with pytest.raises(OverlayError, match=f"set {OVERRIDE}"):
        fastdeploy_at(tree)
    (tree / "setup.py").write_text('V = os.environ.get("FASTDEPLOY_VERSION", "2.5.0")\n', encoding="utf-8")
    assert fastdeploy_at(tree).release == "2.5"
    (tree / "fastdeploy" / "version.txt").write_text(
        "Paddle version: 3.3\nfastdeploy version: 2.5.0\nfastdeploy version: 2.6.1\n", encoding="utf-8"
    )
    assert fastdeploy_at(tree).version == "2.6.1"
    assert fastdeploy_at(tree / "fastdeploy").release == "2.6"
    monkeypatch.setenv(OVERRIDE, "2.5.9")
    assert fastdeploy_at(tree).release == "2.5"


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.6.0", "2.6"),
        ("2.6", "2.6"),
        ("2.6.1.post2", "2.6"),
        ("2.6.0rc1", "2.6"),
        ("2.6.0-dev", "2.6-dev"),
        ("2.6.0.dev0", "2.6-dev"),
        ("2.6.0.dev20260415+cuda12", "2.6-dev"),
        ("2.10.0-dev", "2.10-dev"),
        ("2.6.0+devbox", "2.6"),
        ("develop", "develop"),
    ],
)
def test_which_release_a_version_belongs_to(version, release):
    assert FastDeployTree(Path(), version).release == release


@pytest.mark.parametrize(("places", "is_there"), [(None, False), ([], False), (["fastdeploy"], True)])
def test_a_fastdeploy_is_installed_where_import_finds_a_package(tree, monkeypatch, places, is_there):
    monkeypatch.setenv(OVERRIDE, "2.6.0")
    spec = None if places is None else SimpleNamespace(submodule_search_locations=[str(tree / each) for each in places])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert installed_fastdeploy() == (FastDeployTree(tree / "fastdeploy", "2.6.0") if is_there else None)
