"""The demo: what it asks, what it says about the results, and the whole of it with the random model."""

import argparse
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from fastdeploy_kvcache_v1 import demo
from fastdeploy_kvcache_v1.demo.page import page, picture
from fastdeploy_kvcache_v1.demo.player import Outcome, play_all
from fastdeploy_kvcache_v1.demo.scenario import longest, play
from fastdeploy_kvcache_v1.demo.setups import BLOCK_SIZE, COMPUTED, HOST, LARGE, SMALL, setups
from fastdeploy_kvcache_v1.demo.verdict import differences, verdicts
from fastdeploy_kvcache_v1.errors import ConfigError, WorkerDiedError
from tests.bench_serve.conftest import start_server  # noqa: F401

LABELS = ["document 1", "chat 1", "document 2", "chat 2", "document 3", "chat 3"]


def results():
    def outcomes(seconds, device, host):
        return [Outcome(label, f"answer to {label}", seconds, 2.0, 100, device, host) for label in LABELS]

    return {
        COMPUTED: outcomes(5.0, 0, 0),
        SMALL: outcomes(2.0, 40, 0),
        LARGE: outcomes(0.25, 90, 0),
        HOST: outcomes(0.5, 40, 50),
    }


def test_a_server_that_reserves_blocks_gets_them_beside_the_longest_request():
    """As FastDeploy, which refuses to start otherwise."""
    for setup in setups(1000, reserved_blocks=2):
        flag = dict(zip(setup.flags[::2], setup.flags[1::2], strict=False))
        longest = int(flag["--max-model-len"]) // BLOCK_SIZE
        assert longest * BLOCK_SIZE >= 1000
        assert int(flag["--num-gpu-blocks-override"]) >= longest + 2


def run(*arguments):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.run(parser.parse_args([str(argument) for argument in arguments]))


def test_a_chat_repeats_what_was_said_and_documents_stand_alone():
    requests = play()
    assert [request.label for request in requests] == LABELS
    by_label = {request.label: request for request in requests}
    answers = {label: f"answer to {label}" for label in LABELS}
    assert longest(requests).label == "document 1"
    third = by_label["chat 3"].messages(by_label, answers)
    assert [message["role"] for message in third] == ["user", "assistant"] * 2 + ["user"]
    assert third[:1] == by_label["chat 1"].messages(by_label, answers)
    assert third[3]["content"] == "answer to chat 2"
    (question,) = by_label["document 2"].messages(by_label, answers)
    context, _, asked = question["content"].rpartition("\n\n")
    assert (context, asked) == (by_label["document 1"].context, by_label["document 2"].question)


def test_the_small_tier_holds_one_request_and_not_two():
    flags = {setup.name: setup.flags for setup in setups(1000)}
    blocks = {name: int(each[each.index("--num-gpu-blocks-override") + 1]) for name, each in flags.items()}
    assert blocks[SMALL] == blocks[HOST]
    assert 1000 <= blocks[SMALL] * BLOCK_SIZE < 1200
    assert blocks[LARGE] >= 4 * blocks[SMALL]


def test_the_verdict_says_how_much_sooner_and_how_much_less_is_computed():
    first, second, third = verdicts(results())
    assert "after 0.25 s from the device tier and 0.50 s from the host tier, 5.00 s without" in first
    assert "(20x and 10x sooner)" in first
    assert "360 prompt tokens were computed; with host memory behind it, 60" in second
    assert third == "All answers are the same in all set-ups"


def test_another_answer_is_named():
    found = results()
    found[HOST][3] = replace(found[HOST][3], text="other")
    expected = "small device + host, chat 2: 'other' instead of 'answer to chat 2'"
    assert differences(found) == [expected]
    assert verdicts(found)[2:] == [expected]


def test_the_page_needs_no_other_file_and_keeps_text_apart_from_markup():
    found = results()
    found[COMPUTED][0] = replace(found[COMPUTED][0], text="<script>alert(1)</script>")
    html = page(found, play(), setups(1000), ["a verdict"])
    assert html.count("<svg") == 1
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", html)
    for word in (*LABELS, *results(), "a verdict", "40 device, 50 host", "In which year"):
        assert word in html


def test_the_picture_is_one_svg_and_the_same_for_the_same_results():
    svg = picture(results())
    assert ET.fromstring(svg.encode()).tag.endswith("svg")
    assert picture(results()) == svg
    for word in ("cache off", "host tier", "Seconds to the first token"):
        assert word in svg


def test_a_server_that_refuses_ends_the_play(start_server):  # noqa: F811
    url = start_server(lambda body: None)
    with pytest.raises(WorkerDiedError, match="did not answer warm-up: HTTP 400"):
        play_all(url, play(), model="demo", caches=False, on_outcome=lambda outcome: None)


@pytest.mark.parametrize("flag", ["--page", "--picture", "--results"])
def test_a_place_that_cannot_be_written_is_said_at_once(flag, tmp_path):
    for path in (tmp_path / "missing" / "file", tmp_path):
        with pytest.raises(ConfigError, match=f"cannot write {path}: choose a file"):
            run("--model", "random", "--page", tmp_path / "page.html", flag, path)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no FastDeploy checkout"):
        run("--fastdeploy", tmp_path, "--page", tmp_path / "page.html")


@pytest.mark.process
def test_the_whole_demo_with_the_random_model(tmp_path, capsys):
    files = {name: tmp_path / name for name in ("page", "picture", "results")}
    assert run("--model", "random", *(word for name, path in files.items() for word in (f"--{name}", path))) == 0
    out = capsys.readouterr().out
    assert "All answers are the same in all set-ups" in out
    measured = json.loads(files["results"].read_text())
    assert [outcome["label"] for outcome in measured[HOST]] == LABELS
    tokens = {name: [outcome["prompt_tokens"] for outcome in each] for name, each in measured.items()}
    assert len(set(map(tuple, tokens.values()))) == 1
    cached = {name: sum(each["device_tokens"] + each["host_tokens"] for each in measured[name]) for name in measured}
    assert 0 == cached[COMPUTED] < cached[SMALL] < cached[LARGE] == cached[HOST]
    assert sum(outcome["host_tokens"] for outcome in measured[HOST]) > 0
    for label, outcome in zip(LABELS, measured[LARGE], strict=True):
        if label.startswith("document") and label != "document 1":
            assert outcome["device_tokens"] > 0.9 * outcome["prompt_tokens"]
    assert files["page"].read_text().count("<svg") == 1
    assert files["picture"].stat().st_size > 5_000
