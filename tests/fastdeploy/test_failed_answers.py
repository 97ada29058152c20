"""A client of FastDeploy's servers hears that its request failed: by their own classes, in every form of answer."""

import json

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import table_for

from .fastdeploy_trees import HERE, RELEASES, run_inside

pytestmark = pytest.mark.process

FORMS = ("chat/plain", "chat/stream", "completion/plain", "completion/stream")
TOKENS = [70, 71, 1]


@pytest.fixture(scope="module", params=RELEASES)
def answers(request, tmp_path_factory):
    lines = run_inside(request.param, tmp_path_factory.mktemp("answers"), HERE / "drive_failed_answers.py").splitlines()
    made = dict(line.split(maxsplit=2)[1:] for line in lines if line.startswith("ANSWER"))
    pooled = [line for line in lines if line.startswith("POOLED")]
    others = {"release": request.param, "control": "CONTROL no" in lines, "pooled": pooled}
    return {**others, **{k: json.loads(v) for k, v in made.items()}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scene", ["failed", "aborted", "again"])
def test_a_request_that_fails_before_its_first_token_is_answered_with_its_error(answers, scene, form):
    answer = answers[f"{scene}/{form}"]
    assert answer["tokens"] == []
    assert "its blocks did not arrive" in answer["error"]
    assert "NoneType" not in answer["error"]
    assert ("PD Error" in answer["error"]) == (scene == "again"), "the router of 2.6 tries these again"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scene", ["begun", "at-once"])
def test_one_that_fails_later_says_so_beside_the_tokens_that_it_has(answers, scene, form):
    answer = answers[f"{scene}/{form}"]
    if table_for(answers["release"]).capabilities.reschedules and form.endswith("plain"):
        assert answer == {"finish": "pd_reschedule", "tokens": [70]}, "the router goes on from there"
    else:
        assert "its blocks did not arrive" in answer["error"]


@pytest.mark.parametrize("form", FORMS)
def test_nothing_changes_for_one_that_is_well(answers, form):
    answer = answers[f"well/{form}"]
    assert "error" not in answer
    assert answer["finish"] == "stop"
    assert answer["tokens"] in (TOKENS, TOKENS[:2])


def test_the_error_of_a_control_request_is_left_to_fastdeploy(answers):
    assert answers["control"]


def test_embeddings_and_rewards_are_answered(answers):
    assert answers["pooled"] == ["POOLED embd-1 [0.5]", "POOLED reward-1 [0.5]"]
