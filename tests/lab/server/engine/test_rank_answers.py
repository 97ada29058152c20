"""Answers of several ranks become those of one worker."""

import pytest

from fastdeploy_kvcache_v1.contract.messages import WorkerReport
from fastdeploy_kvcache_v1.errors import RanksDisagreeError
from fastdeploy_kvcache_v1.lab.model.step import StepResult
from fastdeploy_kvcache_v1.lab.server.engine.rank_answers import RankAnswers


def test_a_step_ends_with_the_answer_of_the_last_rank():
    answers = RankAnswers(2)
    tokens = {"a": (1,), "b": (2,)}
    assert answers.take(1, StepResult(tokens, report=WorkerReport((), 0.5))) is None
    answers.check()
    merged = answers.take(0, StepResult(tokens, report=WorkerReport((), 0.25)))
    assert merged == StepResult(tokens, report=WorkerReport((), 0.5))
    answers.check()


def test_what_one_rank_could_not_compute_counts_for_none():
    answers = RankAnswers(2)
    answers.take(0, StepResult({"a": (1,)}, retry={"b": "copy"}))
    merged = answers.take(1, StepResult({"a": (1,)}, errors={"c": "bug"}))
    assert (merged.retry, merged.errors) == ({"b": "copy"}, {"c": "bug"})


@pytest.mark.parametrize(
    "other",
    [
        StepResult({"a": (2,)}),
        StepResult({}),
        StepResult({"a": (1, 3)}),
        StepResult({"a": (1,)}, drafts={"a": (3,)}),
    ],
)
def test_other_tokens_on_another_rank_are_never_served(other):
    answers = RankAnswers(2)
    answers.take(0, StepResult({"a": (1,)}))
    with pytest.raises(RanksDisagreeError):
        answers.take(1, other)
