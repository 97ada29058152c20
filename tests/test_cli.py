"""The command line: which module answers, and one line for what the user got wrong."""

import importlib
import os
import subprocess
import sys

import pytest

from fastdeploy_kvcache_v1 import cli
from fastdeploy_kvcache_v1.lab.server import command

RANDOM = ("serve", "--model", "random")


def run(capsys, *argv):
    status = cli.main(argv)
    return status, capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*RANDOM, "--write-policy", "never"], "--write-policy must be one of auto, "),
        ([*RANDOM, "--swap-space", "1e9"], "--swap-space 1e+09 GiB is more than"),
        (["serve", "--model", "/does/not/exist"], "model directory /does/not/exist does not exist"),
        ([*RANDOM, "--data-parallel-size", "2"], "unrecognized arguments: --data-parallel-size 2"),
        ([*RANDOM, "--host", "256.1.1.1", "--port", "0"], "cannot listen on 256.1.1.1:0"),
    ],
)
def test_wrong_settings_end_with_one_line(capsys, argv, message):
    status, stderr = run(capsys, *argv)
    assert status == 2
    assert stderr.startswith("fastdeploy-kvcache: error: ")
    assert message in stderr
    assert stderr.count("\n") == 1


def test_model_directory_without_tokenizer_is_one_line(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    status, stderr = run(capsys, "serve", "--model", str(tmp_path))
    assert status == 2
    assert str(tmp_path) in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["unknown"], ["bench", "serve"], ["serve", "--port", "x"]])
def test_usage_mistakes_exit_with_2(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: fastdeploy-kvcache" in capsys.readouterr().err


def test_fastdeploy_cpu_server_gets_every_given_flag_except_our_own(monkeypatch):
    commands = []

    def execute(path, words):
        commands.append(words)
        raise SystemExit(0)

    monkeypatch.setattr(command.os, "execv", execute)
    given = ["--model", "/m", "--swap-space", "2.0", "--no-enable-prefix-caching", "--tp", "2"]
    with pytest.raises(SystemExit):
        cli.main(["serve", "--fastdeploy-cpu", "--threads", "2", *given])
    assert commands == [[sys.executable, "-m", command.CPU_SERVER, *given]]


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_without_the_lab_its_commands_are_one_line_and_the_others_work(monkeypatch, capsys, command):
    find_spec = cli.importlib.util.find_spec
    without_lab = lambda name, package=None: None if "lab" in name else find_spec(name, package)  # noqa: E731
    monkeypatch.setattr(cli.importlib.util, "find_spec", without_lab)
    if not command.module.startswith(".lab."):
        with pytest.raises(SystemExit, match="0"):
            cli.main([command.name, "--help"])
        return
    assert cli.main([command.name, "--help"]) == 2
    todo = "pip install --force-reinstall fastdeploy-kvcache-v1"
    line = f"{command.name} needs the lab, which is not installed: {todo}\n"
    assert capsys.readouterr().err == f"fastdeploy-kvcache: error: {line}"


@pytest.mark.parametrize("missing", ["fastdeploy_kvcache_v1.lab.replay.nothing", "uvicorn.nothing", "nothing"])
def test_an_import_that_is_a_bug_of_ours_keeps_its_traceback(monkeypatch, missing):
    monkeypatch.setattr("fastdeploy_kvcache_v1.lab.replay.run", lambda args: importlib.import_module(missing))
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        cli.main(["replay", "trace"])


@pytest.mark.process
def test_report_whose_reader_has_ended_ends_as_by_sigpipe_without_a_word():
    """As `doctor | head -1`. Status 0 would say that all is well."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "fastdeploy_kvcache_v1.cli", "doctor"], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
