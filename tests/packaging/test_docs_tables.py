"""Tables of the docs say what the tables of the package say."""

import re

import pytest

from fastdeploy_kvcache_v1.lab.server.field_names import IGNORED
from fastdeploy_kvcache_v1.lab.server.request_fields import REFUSED, ChatBody, CompletionBody
from fastdeploy_kvcache_v1.lab.server.settings import FLAGS

from .docs_tables import COMMAND, DOCS, GROUPS_OF_FLAGS, pages, written


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
