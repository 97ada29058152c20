"""The demo: what it asks, how it ends, and the whole of it with the random model."""

import argparse
import os
import re
import signal
import subprocess
import sys
from html import unescape

import psutil
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.lab import demo
from fastdeploy_kvcache_v1.lab.demo.player import demo_server
from fastdeploy_kvcache_v1.lab.demo.scenario import (
    ASKED,
    BLOCK_SIZE,
    COMPUTED,
    HOST,
    LARGE,
    RESTARTED,
    SMALL,
    play,
    setups,
)
from fastdeploy_kvcache_v1.lab.server.client import Answer
from tests.e2e.server_process import wait_until

NAMES = (COMPUTED, SMALL, LARGE, HOST, RESTARTED)


def run(*arguments):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.run(parser.parse_args([str(argument) for argument in arguments]))


def test_a_chat_repeats_what_was_said_and_documents_stand_alone(monkeypatch):
    sent = []

    def answer(url, body):
        sent.append([*body["messages"]])
        return Answer(text=f" answer {len(sent)} ")

    monkeypatch.setattr("fastdeploy_kvcache_v1.lab.demo.scenario.ask", answer)
    assert [each.text for each in play("")] == [f"answer {number}" for number in range(1, 8)]
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


DIRECTORY = "/tmp/kvcache-demo"


def test_the_server_that_restarts_has_the_flags_of_the_one_before():
    *others, before, restarted = setups(1000, DIRECTORY)
    assert before.flags == restarted.flags
    assert DIRECTORY in before.flags
    assert not any(DIRECTORY in setup.flags for setup in others)


def test_the_small_tier_holds_one_request_and_not_two():
    blocks = {setup.name: int(flags_of(setup)["--num-gpu-blocks-override"]) for setup in setups(1000, DIRECTORY)}
    assert blocks[SMALL] == blocks[HOST] == blocks[RESTARTED]
    assert 1000 <= blocks[SMALL] * BLOCK_SIZE < 1300
    assert blocks[LARGE] >= 4 * blocks[SMALL]
    for setup in setups(1000, DIRECTORY):  # FastDeploy refuses to start otherwise
        longest = int(flags_of(setup)["--max-model-len"]) // BLOCK_SIZE
        assert longest * BLOCK_SIZE >= 1000
        assert int(flags_of(setup)["--num-gpu-blocks-override"]) >= longest + 2


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
    """Cells of the tables in an HTML page."""
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    return [[unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in rows]


@pytest.mark.process
def test_the_whole_demo_with_the_random_model(tmp_path):
    with demo_process(tmp_path) as process:
        out, _ = process.communicate()
    assert process.returncode == 0
    assert "All answers are the same in all set-ups" in out
    html = (tmp_path / "page.html").read_text()
    counted = [(row[0], [int(cell.replace(",", "")) for cell in row[2:7]]) for row in rows_of(html) if row[1] in ASKED]
    assert [name for name, _ in counted] == [name for name in NAMES for _ in ASKED]
    totals = {name: [sum(each[place] for own, each in counted if own == name) for place in range(5)] for name in NAMES}
    assert all(tokens == computed + device + host + disk for tokens, computed, device, host, disk in totals.values())
    assert len({tokens for tokens, *_ in totals.values()}) == 1
    computed = {name: each[1] for name, each in totals.items()}
    assert computed[RESTARTED] < computed[HOST] == computed[LARGE] < computed[SMALL] < computed[COMPUTED]
    assert [each[3] > 0 for each in totals.values()] == [False, False, False, True, True]
    assert [each[4] > 0 for each in totals.values()] == [False, False, False, False, True]
    documents = [sources for name, sources in counted if name == LARGE][2::2]
    assert all(1.1 * device > tokens for tokens, _, device, *_ in documents), "a known document is not computed again"
    maps = re.findall(r'<svg [^>]*aria-label="Blocks in each tier after each request, (.*?)".*?</svg>', html, re.DOTALL)
    assert maps == [SMALL, LARGE, HOST, RESTARTED]
    assert "No block is kept." in html
    assert html.count('class="paper"') > 100, "hits are marked"
    assert (tmp_path / "picture.svg").stat().st_size > 3_000
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "picture.svg"}


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
