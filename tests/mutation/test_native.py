"""The mistakes in C++ name texts that are there; `scripts/mutate-native` builds and tries them."""

from __future__ import annotations

import pytest

from tests.mutation.native import MISTAKES
from tests.worker.ops.native import CUSTOM_OPS


def test_none_is_there_twice():
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 35


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_what_it_changes_is_in_the_source_once(mistake):
    text = (CUSTOM_OPS / "cuda" / mistake.file).read_text(encoding="utf-8")
    assert mistake.applied_to(text) != text
