"""What changes of a source are tried, and by which tests."""

from __future__ import annotations

from tests.mutants.mutations import mutations

SOURCE = '''"""Not this one: 1 < 2."""

def f(a: int | None, *, b: float = 0.5) -> bool:
    if a is None:
        raise ValueError(f"{a} == {b}")  # nor what is said
    log("x" + "y")
    for one in (a, b):
        if not one:
            continue
        a += 1
    return a < b and True

def g(device):  # untested: there is no such device
    return 1 + device
'''


def test_every_kind_of_change_is_made_once_and_texts_are_left_alone() -> None:
    found = [(one.line, one.before.strip(), one.after.strip()) for one in mutations(SOURCE)]
    assert found == [
        (3, "0.5", "1.5"),
        (4, "is", "is not"),
        (5, 'raise ValueError(f"{a} == {b}")', "pass"),
        (6, 'log("x" + "y")', "None"),
        (8, "not one", "one"),
        (9, "continue", "break"),
        (10, "a += 1", "pass"),
        (10, "1", "2"),
        (11, "a < b and True", "None"),
        (11, "<", "<="),
        (11, "and", "or"),
        (11, "True", "False"),
    ]
    for one in mutations(SOURCE):
        assert one.source != SOURCE and one.source.count("\n") == SOURCE.count("\n")
