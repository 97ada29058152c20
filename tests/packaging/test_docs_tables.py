"""Tables of the docs say what the tables of the package say."""

import ast
import re

import pytest

from fastdeploy_kvcache_v1.lab.server.field_names import IGNORED
from fastdeploy_kvcache_v1.lab.server.request_fields import REFUSED, ChatBody, CompletionBody
from fastdeploy_kvcache_v1.lab.server.settings import FLAGS
from tests.telemetry.metrics_page import metrics

from .docs_tables import COMMAND, DOCS, GROUPS_OF_FLAGS, pages, written
from .house import sources


@pytest.mark.parametrize("page", pages())
def test_generated_tables_of_a_page_are_up_to_date(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text == written(page, text), f"write them anew: {COMMAND}"


def test_every_flag_is_in_a_page():
    assert {flag.group for flag in FLAGS} == set(GROUPS_OF_FLAGS)


def test_every_request_field_is_in_a_page_once():
    page = (DOCS / "reference" / "request-fields.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page, re.M)
    ignored = page.split("## Ignored")[1].split("\n\n")[2]
    # Chats read `metadata`, completions ignore it.
    names = [*rows, *(set(re.findall(r"`(\w+)`", ignored)) - {"metadata"})]
    assert sorted(names) == sorted({*CompletionBody.model_fields, *ChatBody.model_fields, *REFUSED, *IGNORED})


def test_a_page_that_lost_its_marks_is_named():
    with pytest.raises(ValueError, match="has 0 parts between"):
        written(pages()[0], "")


def texts():
    """Every string of the package as it is written, with `*` for each part that is put in later."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)


def quoted():
    """Log lines in the troubleshooting table: one pattern per line, with `...`, N and M for what differs."""
    table = (DOCS / "operate/fastdeploy.md").read_text(encoding="utf-8").partition("## When something is wrong")[2]
    for symptom in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        for span in re.findall("`(.*?)`", symptom):
            yield span, ".*".join(map(re.escape, re.split(r"\.\.\.|\b[NM]\b", span)))


def test_log_lines_of_the_troubleshooting_table_are_those_of_the_package():
    known = [*texts(), *metrics()]
    assert [span for span, pattern in quoted() if not any(re.search(pattern, text) for text in known)] == []
