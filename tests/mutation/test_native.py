"""The mutations of the C++ name texts that are there; `scripts/mutate-native` builds and tries them."""

from __future__ import annotations

import pytest

from tests.mutation.native_mutations import NATIVE_MUTATIONS
from tests.worker.ops.native import CUSTOM_OPS


def test_none_is_there_twice():
    assert len({mutation.name for mutation in NATIVE_MUTATIONS}) == len(NATIVE_MUTATIONS) >= 20


@pytest.mark.parametrize("mutation", NATIVE_MUTATIONS, ids=lambda mutation: mutation.name)
def test_what_it_changes_is_in_the_source_once(mutation):
    text = (CUSTOM_OPS / "cuda" / mutation.file).read_text(encoding="utf-8")
    assert mutation.applied_to(text) != text
