"""Every command of README and quickstart is marked, and a page that lies is found; `scripts/pages` runs all of them."""

import contextlib
import io
import os
import sys

import pytest

from tests.packaging import pages
from tests.packaging.pages import PAGES, ROOT, PageError, Run, blocks, mismatch


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_marked(page):
    found = blocks(page, (ROOT / page).read_text())
    assert sum(block.mark == "run" for block in found) >= 2


def test_python_example_of_the_readme_prints_what_it_shows():
    (example,) = [each for each in blocks("README.md", (ROOT / "README.md").read_text()) if each.language == "python"]
    assert len([line for line in example.text.splitlines() if line]) <= 12
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example.text, "README.md", "exec"), {})
    assert printed.getvalue() == f"{example.shown.text}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n```sh\nls\n```\n", "page:2: got '' behind the language of a block, expected run, "),
        ("```sh often\nls\n```\n", "page:1: got 'often' behind the language"),
        ("```sh run status=x\nls\n```\n", "page:1: got 'run status=x' behind the language"),
        ("```\nls\n```\n", "page:1: got '' behind the language"),
        ("```rust run\nls\n```\n", "page:1: got a block of 'rust' to run, expected sh or python"),
        ("text\n\n    ls\n", "page:3: an indented block cannot be marked: fence it"),
    ],
)
def test_block_without_a_mark_is_refused_with_its_line(text, said):
    with pytest.raises(PageError) as caught:
        blocks("page", text)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("shown", "printed", "first_wrong"),
    [
        ("a b", "a b", None),
        ("a ...", "a b", None),
        ("a ... c", "a b", 0),
        ("a.b", "axb", 0),
        ("a/b", "a", 1),
        ("a", "a/b", 1),
        (".../b", "b", None),
        (".../b", "x/y/b", None),
        (".../b", "x/y/b/z", 2),
        (".../b/.../d", "x/b/b/c/d", None),
        (".../b/.../d", "x/b/b/c", 3),
        ("a/...", "a", None),
        ("a/.../c", "a/b", 2),
    ],
)
def test_first_line_that_does_not_fit_is_found(shown, printed, first_wrong):
    assert mismatch(shown.split("/"), printed.split("/")) == first_wrong


def play(clone, text, **options):
    return Run("page", clone, dict(os.environ)).play(blocks("page", text), **options)


def lie(clone, text):
    with pytest.raises(PageError) as caught:
        play(clone, text)
    return str(caught.value)


SERVER = f"""```sh terminals
exec {sys.executable} server.py first
exec {sys.executable} \\
    server.py second
```
"""
PROGRAM = """
import pathlib, signal, sys
name = sys.argv[1]
signal.signal(signal.SIGINT, lambda *_: (pathlib.Path("ended").open("a").write(name + " "), end()))
def end():
    AT_END
    sys.exit(0)
print("starts as", name)
print("Ready: here", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def clone(tmp_path):
    (tmp_path / "server.py").write_text(PROGRAM.replace("AT_END", "pass"))
    return tmp_path


@pytest.mark.process
class TestRun:
    def test_true_page_is_played_to_its_end_in_the_clone(self, clone):
        text = """# A page
```sh run
echo here >file
echo to the error stream >&2
```
```text
to the ... stream
```
```sh not-run: no reason
exit 1
```
```sh run status=3
cat file
exit 3
```
```text
here
```
"""
        assert play(clone, text) == 2

    def test_wrong_output_is_an_error_with_line_expected_and_got(self, clone):
        said = lie(clone, "```sh run\necho one\necho two\n```\n```text\none\nthree\n```\n")
        assert said == "page:7: expected: three\ngot all of this:\none\ntwo"

    def test_output_that_the_page_does_not_show_is_an_error(self, clone):
        said = lie(clone, "```sh run\necho one\necho two\n```\n```text\none\n```\n")
        assert said.startswith("page:7: expected: no more lines\n")

    def test_failed_command_is_an_error_and_ends_the_page(self, clone):
        said = lie(clone, "```sh run\necho why\nfalse | cat\n```\n```sh run\ntouch later\n```\n")
        assert said == "page:2: got exit status 1, expected 0; it printed:\nwhy"
        assert not (clone / "later").exists()

    def test_terminals_stay_until_their_section_ends_and_end_newest_first(self, clone):
        text = f"## One\n{SERVER}```text\nstarts as second\nReady: ...\n```\n```sh run\ntest ! -e ended\n```\n"
        assert play(clone, f"{text}## Two\n```sh run\ncat ended\n```\n```text\nsecond first \n```\n") == 3

    def test_stop_ends_the_terminals_within_a_section(self, clone):
        assert play(clone, f"## One\n{SERVER}<!-- stop -->\n```sh run\ncat ended\n```\n") == 2

    def test_terminal_that_ends_too_soon_is_an_error(self, clone):
        said = lie(clone, "```sh terminals\necho no port\n```\n")
        assert said == "page:2: ended with status 0, expected it to stay; it printed:\nno port"

    def test_terminal_that_warns_when_it_is_stopped_is_an_error(self, clone):
        (clone / "server.py").write_text(PROGRAM.replace("AT_END", "print('killing it')"))
        said = lie(clone, SERVER)
        assert said.startswith("page:2: expected nothing more after its start; it printed:\nstarts as second\n")
        assert said.endswith("killing it")

    def test_terminal_that_ends_with_another_status_is_an_error(self, clone):
        (clone / "server.py").write_text(PROGRAM.replace("AT_END", "sys.exit(4)"))
        assert lie(clone, SERVER).startswith("page:2: got exit status 4 after SIGINT, expected 0")

    def test_left_out_command_does_not_run(self, clone):
        assert play(clone, "```sh run\nfalse\n```\n```sh run\ntrue\n```\n", without=["false"]) == 1

    def test_commands_may_write_to_a_home_that_is_not_the_users(self, clone, monkeypatch, tmp_path):
        user = tmp_path / "user"
        user.mkdir()
        (user / "kept").write_text("kept\n")
        monkeypatch.setenv("HOME", str(user))
        environment = pages.make_home(tmp_path / "home")
        found = blocks("page", "```sh run\ncat ~/kept\ntouch ~/new\n```\n```text\nkept\n```\n")
        assert Run("page", clone, environment).play(found) == 1
        assert not (user / "new").exists()
