"""The demo: what it asks, what it says about the results, how it ends, and the whole of it with the random model."""

import argparse
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from html import unescape

import psutil
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.lab import demo
from fastdeploy_kvcache_v1.lab.demo.picture import write_picture
from fastdeploy_kvcache_v1.lab.demo.scene import ASKED, BLOCK_SIZE, COMPUTED, HOST, LARGE, SMALL, Played, play, setups
from fastdeploy_kvcache_v1.lab.demo.stage import demo_server, differences, verdicts, write_page
from fastdeploy_kvcache_v1.lab.server.client import Answer
from tests.e2e.server_process import wait_until


def results():
    def played(seconds, device, host):
        answers = [Answer([], f"answer to {label}", seconds, 2.0, 100, device + host) for label in ASKED]
        return Played(answers, len(ASKED) * host)

    return {
        COMPUTED: played(5.0, 0, 0),
        SMALL: played(2.0, 40, 0),
        LARGE: played(0.25, 90, 0),
        HOST: played(0.5, 40, 50),
    }


def run(*arguments):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.run(parser.parse_args([str(argument) for argument in arguments]))


def test_a_chat_repeats_what_was_said_and_documents_stand_alone(monkeypatch):
    sent = []

    def answer(url, body):
        sent.append([*body["messages"]])
        return Answer(text=f" answer {len(sent)} ")

    monkeypatch.setattr("fastdeploy_kvcache_v1.lab.demo.scene.ask", answer)
    assert [each.text for each in play("")] == [f"answer {number}" for number in range(2, 8)]
    warm_up, document, chat, other_document, second_turn, _, third_turn = sent
    assert len(warm_up) == len(document) == len(chat) == len(other_document) == 1
    assert third_turn[: len(second_turn)] == second_turn
    assert [message["role"] for message in third_turn] == ["user", "assistant"] * 2 + ["user"]
    assert [third_turn[0], third_turn[3]["content"]] == [chat[0], "answer 5"]
    texts = [each[0]["content"].rsplit("\n\n", 1) for each in (document, other_document)]
    assert texts[0][0] == texts[1][0]
    assert [question for _, question in texts] == [ASKED["document 1"], ASKED["document 2"]]


def flags_of(setup):
    return dict(zip(setup.flags[::2], setup.flags[1::2], strict=False))


def test_the_small_tier_holds_one_request_and_not_two():
    blocks = {setup.name: int(flags_of(setup)["--num-gpu-blocks-override"]) for setup in setups(1000)}
    assert blocks[SMALL] == blocks[HOST]
    assert 1000 <= blocks[SMALL] * BLOCK_SIZE < 1300
    assert blocks[LARGE] >= 4 * blocks[SMALL]
    for setup in setups(1000):  # FastDeploy refuses to start otherwise
        longest = int(flags_of(setup)["--max-model-len"]) // BLOCK_SIZE
        assert longest * BLOCK_SIZE >= 1000
        assert int(flags_of(setup)["--num-gpu-blocks-override"]) >= longest + 2


def test_the_verdict_says_how_much_sooner_and_how_much_less_is_computed():
    found = results()
    found[LARGE].answers[0].first_token_s = found[LARGE].answers[1].first_token_s = 9.0
    first, second, third = verdicts(found)
    assert "after 0.25 s from the device tier and 0.50 s from the host tier, 5.00 s without" in first
    assert "(20x sooner and 10x sooner)" in first
    assert "360 prompt tokens were computed; with host memory behind it, 60" in second
    assert third == "All answers are the same in all set-ups"
    for answer in found[COMPUTED].answers:
        answer.first_token_s = 0.4
    assert "(2x sooner and no sooner)" in verdicts(found)[0]


def test_another_answer_is_named():
    found = results()
    found[HOST].answers[3].text = "other"
    expected = "small device + host, chat 2: 'other' instead of 'answer to chat 2'"
    assert differences(found) == [expected]
    assert verdicts(found)[2:] == [expected]


def test_the_page_needs_no_other_file_and_keeps_text_apart_from_markup(tmp_path):
    found = results()
    found[COMPUTED].answers[0].text = "[bold]<script>alert(1)</script>"
    found[COMPUTED].answers[0].first_token_s = 14.58
    write_page(tmp_path / "page.html", setups(1000), found)
    html = (tmp_path / "page.html").read_text()
    assert "<script" not in html
    assert "[bold]&lt;script&gt;alert(1)" in html
    assert not re.findall(r"""(?:src|href)=["'](?!#)|url\(""", html)
    words = (*ASKED, *ASKED.values(), *found, *verdicts(found)[0].split()[:4])
    for word in (*words, "--swap-space 0.5", "240", "300", "14.6"):
        assert word in html


def test_the_picture_is_one_svg_and_the_same_for_the_same_results(tmp_path):
    for name in ("one.svg", "other.svg"):
        write_picture(tmp_path / name, results())
    svg = (tmp_path / "one.svg").read_text()
    assert ET.fromstring(svg.encode()).tag.endswith("svg")
    assert (tmp_path / "other.svg").read_text() == svg
    for word in ("cache off", "host tier", "Seconds to the first token"):
        assert word in svg


@pytest.mark.parametrize("flag", ["--page", "--picture"])
def test_a_place_that_cannot_be_written_is_said_at_once(flag, tmp_path):
    for path in (tmp_path / "missing" / "file", tmp_path):
        with pytest.raises(ConfigError, match=f"cannot write {path}: choose a file"):
            run("--model", "random", "--page", tmp_path / "page.html", flag, path)
    assert not list(tmp_path.iterdir())


def test_the_model_that_is_served_is_the_one_that_is_named(tmp_path):
    assert demo_server(str(tmp_path), None) == (tmp_path, ("--model", str(tmp_path)), {})
    assert demo_server("random", None) == (None, (), {})
    (tmp_path / "fastdeploy").mkdir()
    (tmp_path / "fastdeploy" / "envs.py").touch()
    model, flags, environment = demo_server(str(tmp_path), tmp_path)
    assert (model, flags) == (tmp_path, ("--fastdeploy-cpu", "--model", str(tmp_path)))
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)


def test_a_directory_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no FastDeploy checkout"):
        run("--fastdeploy", tmp_path, "--page", tmp_path / "page.html")


def demo_process(tmp_path):
    command = [sys.executable, "-m", "fastdeploy_kvcache_v1.cli", "demo", "--model", "random"]
    return subprocess.Popen(
        [*command, "--page", str(tmp_path / "page.html"), "--picture", str(tmp_path / "picture.svg")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )


def rows_of(page):
    """Cells of the tables in an HTML page, by the first one of their row."""
    text = unescape(re.sub("<[^>]*>", "", page))
    rows = [[cell.strip() for cell in line.strip(" │").split("│")] for line in text.splitlines() if "│" in line]
    return {name: cells for name, *cells in reversed(rows)}


@pytest.mark.process
def test_the_whole_demo_with_the_random_model(tmp_path):
    with demo_process(tmp_path) as process:
        out, _ = process.communicate()
    assert process.returncode == 0
    assert "All answers are the same in all set-ups" in out
    rows = rows_of((tmp_path / "page.html").read_text())
    shares = [[int(cell.split()[-1].rstrip("%")) for cell in rows[label][1:]] for label in ASKED]
    off, small, large, host = zip(*shares, strict=True)
    assert 0 == sum(off) < sum(small) < sum(large)
    assert large == host
    assert min(large[2::2]) > 90, "a document that the server knows is not computed again"
    sources = {name: [int(cell.replace(",", "")) for cell in rows[name]] for name in (COMPUTED, SMALL, LARGE, HOST)}
    assert len(set(map(sum, sources.values()))) == 1
    assert sources[HOST][0] == sources[LARGE][0] < sources[SMALL][0] < sources[COMPUTED][0]
    assert [host_tokens > 0 for _, _, host_tokens in sources.values()] == [False, False, False, True]
    assert (tmp_path / "picture.svg").stat().st_size > 5_000


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_it_leaves_no_process_and_no_file(tmp_path, number):
    with demo_process(tmp_path) as process:
        itself = psutil.Process(process.pid)
        wait_until(lambda: len(itself.children(recursive=True)) > 1, "a server with a process of its own")
        started = itself.children(recursive=True)
        process.send_signal(number)
        assert process.wait() == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
        wait_until(lambda: not any(child.is_running() for child in started), "the server to end")
    assert list(tmp_path.iterdir()) == []
