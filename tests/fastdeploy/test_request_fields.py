"""The embedded server knows every request field of FastDeploy."""

import ast

import pytest

from fastdeploy_kvcache_v1.lab.server.field_names import IGNORED
from fastdeploy_kvcache_v1.lab.server.request_fields import REFUSED, ChatBody, CompletionBody, StreamOptions

from .fastdeploy_trees import tree


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("CompletionRequest", CompletionBody), ("ChatCompletionRequest", ChatBody), ("StreamOptions", StreamOptions)],
)
def test_every_field_is_implemented_refused_or_ignored(release, theirs, ours):
    source = tree(release) / "fastdeploy" / "entrypoints" / "openai" / "protocol.py"
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    fields = {
        statement.target.id
        for node in classes
        if node.name == theirs
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    assert fields, f"{source} has no class {theirs}"
    assert fields - {*ours.model_fields, *REFUSED, *IGNORED} == set()
