"""Pages name only what is there: relative links, and paths of the repository in backticks."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS_OF_PAGES = ["docs", ".github", "tests"]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS_OF_PAGES for page in (ROOT / folder).rglob("*.md"))])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\s]+)`")
OF_A_RUN = {"build", "dist", "log"}
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[:5] != ".venv"} - OF_A_RUN


def ids(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_relative_links_lead_somewhere(page):
    targets = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_anchors_are_headings_of_their_page(page):
    for link in LINK.findall(page.read_text()):
        target, _, anchor = link.partition("#")
        if "://" in link or not anchor:
            continue
        text = (page.parent / target if target else page).read_text()
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in slugs, link


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=ids)
def test_paths_in_backticks_exist(page):
    """A path starts with a folder of the repository's top; a name with wildcards must match something. A page may name
    results of benchmarks that no machine has written yet."""
    missing = []
    for code in CODE.findall(page.read_text()):
        name = code.removeprefix("./").rstrip("/")
        is_path = "/" in name and name.split("/")[0] in FOLDERS and not re.search(r"[{}<>$|:]", name)
        if is_path and not name.startswith("benchmarks/results/") and not list(ROOT.glob(name)):
            missing.append(code)
    assert missing == []


NAMED_FILE = re.compile(r"`((?:\.\./)?[\w./-]+\.(?:py|cc|h|toml|md))`")
MAPS = [ROOT / "docs" / "develop" / "architecture.md", ROOT / "docs" / "develop" / "recipes.md"]


@pytest.mark.parametrize("page", MAPS, ids=ids)
def test_the_map_names_files_that_exist(page):
    """A path begins in the package or at the top; a name without a folder is that of some file."""
    tracked = {
        path
        for folder in ("fastdeploy_kvcache_v1", "tests", "docs", "patches")
        for path in (ROOT / folder).rglob("*.*")
    }
    names = {path.name for path in tracked} | {path.name for path in ROOT.glob("*.md")}
    places = [ROOT, ROOT / "docs", ROOT / "fastdeploy_kvcache_v1"]
    named = NAMED_FILE.findall(page.read_text())
    assert len(named) > 30
    lost = [name for name in named if name not in names and not any((place / name).exists() for place in places)]
    assert lost == []
