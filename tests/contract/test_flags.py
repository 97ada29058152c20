"""The table of flags: every row keeps its own rules, and says what it expects."""

import argparse
import math
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.contract.flags import Flag, add_flags
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.lab.server.settings import FLAGS

WRONG = {
    int: [0.5, True, "1", -(10**400)],
    float: [math.nan, math.inf, True, "1"],
    bool: [1, "true"],
    str: [1],
    Path: [1],
}


def wrong_values(flag):
    yield from ["none of them"] if flag.choices else WRONG[flag.type]
    yield from (bound for bound in (flag.least - 1, flag.most + 1, flag.above) if math.isfinite(bound))


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_a_flag_takes_its_default_and_refuses_the_rest_in_one_line(flag):
    if flag.default is not None:
        assert flag.checked(flag.default) == flag.default
    for value in wrong_values(flag):
        with pytest.raises(ConfigError) as caught:
            flag.checked(value)
        said = str(caught.value)
        assert said.startswith(f"{flag.option} must be ")
        assert said.endswith(f", got {value!r}")
        assert "\n" not in said
        assert all(choice in said for choice in flag.choices)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (Flag("x_y", "", int, group="", least=2), "--x-y must be a whole number of at least 2, got 'a'"),
        (Flag("x_y", "", int, group="", least=0, most=9), "--x-y must be a whole number from 0 to 9, got 'a'"),
        (Flag("x_y", "", float, group="", above=0), "--x-y must be a number above 0, got 'a'"),
        (Flag("x_y", "", bool, group=""), "--x-y must be true or false, got 'a'"),
        (Flag("x_y", "", group="", choices=("b", "c")), "--x-y must be one of b, c, got 'a'"),
    ],
)
def test_refusal_of_a_flag_says_expected_and_got(flag, said):
    with pytest.raises(ConfigError) as caught:
        flag.checked("a")
    assert str(caught.value) == said


def test_names_are_unique_and_every_flag_is_in_the_help_of_its_group():
    parser = argparse.ArgumentParser()
    add_flags(parser, FLAGS)
    titles = {action.dest: group.title for group in parser._action_groups for action in group._group_actions}
    assert {flag.name: titles[flag.name] for flag in FLAGS} == {flag.name: flag.group for flag in FLAGS}
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)
    assert vars(parser.parse_args([])) == dict.fromkeys(flag.name for flag in FLAGS), "None: not given"
    with_defaults = argparse.ArgumentParser()
    add_flags(with_defaults, FLAGS, with_defaults=True)
    assert vars(with_defaults.parse_args([])) == {flag.name: flag.default for flag in FLAGS}


def test_flag_added_to_fastdeploy_has_a_default_or_says_what_follows():
    added = [flag for flag in FLAGS if flag.fastdeploy == "added"]
    assert [flag.name for flag in added if flag.default is None and not flag.otherwise] == ["kvcache_storage_dir"]
