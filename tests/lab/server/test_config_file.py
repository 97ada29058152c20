"""`serve --config` and `--print-config`: the file fills in what the command line leaves out."""

import sys

import pytest
import yaml

from fastdeploy_kvcache_v1 import cli
from fastdeploy_kvcache_v1.lab.server import command


def printed(capsys, *words):
    assert cli.main(["serve", "--print-config", *words]) == 0
    return capsys.readouterr().out


def said(capsys, *words):
    assert cli.main(["serve", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error.removeprefix("fastdeploy-kvcache: error: ").rstrip()


@pytest.fixture
def file(tmp_path):
    def write(text):
        (tmp_path / "serve.yml").write_text(text)
        return str(tmp_path / "serve.yml")

    return write


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(capsys, file):
    path = file("port: 1234\nblock-size: 32\nenable_prefix_caching: false\nmtp: true\nswap_space: 2\n")
    shown = yaml.safe_load(printed(capsys, "--config", path, "--block-size", "16", "--enable-prefix-caching"))
    given = {"port": 1234, "block_size": 16, "enable_prefix_caching": True, "mtp": True, "swap_space": 2.0}
    assert {name: shown[name] for name in given} == given
    assert shown["host"] == "127.0.0.1"
    assert "config" not in shown


@pytest.mark.parametrize("words", [(), ("--fastdeploy-cpu",)])
def test_what_is_printed_reads_back_the_same(capsys, file, words):
    words = (*words, "--record-trace", "t.jsonl", "--write-through-threshold", "3", "--no-transfer-checksums")
    first = printed(capsys, *words, "--role", "decode")
    assert printed(capsys, "--config", file(first)) == first


def test_defaults_that_are_printed_are_no_flags_that_contradict_each_other(capsys, file):
    path = file(printed(capsys, "--model", "random", "--kvcache-storage-backend", "file"))
    assert said(capsys, "--config", path, "--port", "0") == (
        "--kvcache-storage-backend file needs --kvcache-storage-dir (directory of the file backend, created if missing)"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("swap_spaces: 1", "unknown flag swap_spaces in {}: did you mean swap_space?"),
        ("zzz: 1", "unknown flag zzz in {}"),
        ("config: x", "unknown flag config in {}"),
        ("port: high", "port in {} must be a whole number from 0 to 65535, got 'high'"),
        ("port: true", "port in {} must be a whole number from 0 to 65535, got True"),
        ("write-policy: never", "write_policy in {} must be one of auto, "),
        ("host:", "host in {} must be text, got None"),
        ("- port", "--config {} must have lines such as `port: 8000`, got ['port']"),
        ("1: 2", "--config {} must have lines such as `port: 8000`, got {{1: 2}}"),
        ("a: [", "--config {} cannot be read: "),
    ],
)
def test_a_wrong_file_is_one_line_with_file_and_key(capsys, file, text, line):
    path = file(text)
    assert said(capsys, "--config", path).startswith(line.format(path))


def test_a_file_that_is_not_there_is_one_line(capsys):
    assert "--config /nowhere/x.yml cannot be read" in said(capsys, "--config", "/nowhere/x.yml")


def test_flags_of_fastdeploy_reach_it_from_the_file(monkeypatch, file):
    commands = []

    def execute(path, words):
        commands.append(words)
        raise SystemExit(0)

    monkeypatch.setattr(command.os, "execv", execute)
    text = "fastdeploy_cpu: true\nthreads: 2\nswap_space: 2\nenable_prefix_caching: false\n"
    path = file(text + "splitwise_role: mixed\ndynamic_load_weight: true\nlimit_mm_per_prompt: {image: 1}\n")
    with pytest.raises(SystemExit):
        cli.main(["serve", "--config", path, "--port", "5", "--max-num-partial-prefills", "3"])
    assert commands[0][:3] == [sys.executable, "-m", command.CPU_SERVER]
    ours, theirs = ["--port", "5", "--swap-space", "2.0", "--no-enable-prefix-caching"], ["--splitwise-role", "mixed"]
    theirs += ["--dynamic-load-weight", "--limit-mm-per-prompt", '{"image": 1}', "--max-num-partial-prefills", "3"]
    assert commands[0][3:] == [*ours, *theirs]
