"""The `golden` fixture and its update switch, in test sessions of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

TEST = """
def test_text(golden):
    golden("graph", "first line\\nsecond line\\n")

def test_without_golden():
    pass
"""
SAME = "first line\nsecond line\n"
OTHER = "first line\nanother line\n"


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("CI", raising=False)
    # Loading the installed plugins anew takes two seconds in each session.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers = golden: compares with a file")
    pytester.makepyfile(TEST)
    return pytester


def golden_file(session: pytest.Pytester) -> Path:
    return session.path / "golden" / "graph.txt"


def write_golden(session: pytest.Pytester, text: str) -> None:
    golden_file(session).parent.mkdir()
    golden_file(session).write_text(text, encoding="utf-8")


def test_same_text_passes(session: pytest.Pytester) -> None:
    write_golden(session, SAME)
    session.runpytest().assert_outcomes(passed=2)


def test_other_text_fails_and_shows_the_difference(session: pytest.Pytester) -> None:
    write_golden(session, OTHER)
    result = session.runpytest()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["golden/graph.txt differs.", " first line", "-another line", "+second line"])
    assert golden_file(session).read_text(encoding="utf-8") == OTHER


def test_missing_file_fails_and_is_not_written(session: pytest.Pytester) -> None:
    result = session.runpytest()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["golden/graph.txt does not exist.*"])
    assert not golden_file(session).exists()


@pytest.mark.parametrize("before", [None, OTHER], ids=["missing", "different"])
def test_update_writes_what_golden_tests_produce(session: pytest.Pytester, before: str | None) -> None:
    if before is not None:
        write_golden(session, before)
    session.runpytest("-m", "golden", "--update-golden").assert_outcomes(passed=1, deselected=1)
    assert golden_file(session).read_text(encoding="utf-8") == SAME


def test_update_is_refused_in_ci(session: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    result = session.runpytest("--update-golden")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert not golden_file(session).exists()
