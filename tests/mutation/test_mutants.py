"""What is changed, and what is left alone."""

import pytest

from tests.mutation.mutants import mutants


def changes(body):
    source = "def f(a, b):\n" + "".join(f"    {line}\n" for line in body.splitlines())
    return [(mutant.was, mutant.now) for mutant in mutants(source)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a < b", [("a < b", "(a <= b)")]),
        ("not a", [("not a", "(a)")]),
        ("a = b and a", [("b and a", "(b or a)")]),
        ("a += b", [("a += b", "a -= b")]),
        ("a = 3", [("3", "4")]),
        ("a = True", [("True", "False")]),
        ("a(b)", [("a(b)", "pass")]),
        ("return a", [("return a", "return None")]),
        ("a.b = b", [("a.b = b", "pass")]),
        ("del a", [("del a", "pass")]),
        ("a[b:a]", [("b:a", "b:")]),
        ("a[b:]", [("b:", ":")]),
        ("while a:\n    break", [("break", "continue")]),
        ("a = b if a else a", [("b if a else a", "(a if a else b)")]),
    ],
)
def test_changes(body, expected):
    assert changes(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        '"""1 + 1"""',
        "assert a < 1, 2",
        "raise ValueError(a + 1)",
        "a: list[1] = b",
        "return None",
        "import b",
        "logger.info(a)",
    ],
)
def test_left_alone(body):
    assert changes(body) == []


def test_a_mutant_differs_in_its_place_only():
    source = "def f(ä):\n    return [ä, 1]  # ü\n"
    (whole, one) = mutants(source)
    assert whole.applied_to(source) == "def f(ä):\n    return None  # ü\n"
    assert one.applied_to(source) == "def f(ä):\n    return [ä, 2]  # ü\n"


def test_a_function_inside_a_function_is_changed_once():
    source = "def f():\n    def g():\n        return 1\n"
    assert [mutant.line for mutant in mutants(source)] == [3, 3]


def test_a_constructor_keeps_its_attributes():
    assert list(mutants("class A:\n    def __init__(self, a):\n        self.a = a\n")) == []


def test_a_place_is_reached_by_who_runs_a_line_of_its_statement():
    source = "def f(a):\n    if a(\n        1,\n    ):\n        return (\n            2\n        )\n"
    found = [(mutant.was, mutant.statement) for mutant in mutants(source)]
    assert [each for each in found if each[0] in {"1", "2"}] == [("1", (2, 3)), ("2", (5, 7))]


def test_methods_have_the_names_of_their_classes():
    source = "class A:\n    class B:\n        def f(self):\n            return 1\n"
    assert {mutant.function for mutant in mutants(source)} == {"A.B.f"}
