"""Names that tables, branches and tags may have, and those that would mean something else."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakewarden.errors import ErrorKind, UsageError
from lakewarden.warehouse.names import directory, parse_name, ref_name, table_name

COMPOSED = "Müller"
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)


@pytest.mark.parametrize(
    "name",
    ["a", "A", "a_b-c", "with space", "_x", "1", "2026", "größe", "表", "a'b\"c", "%20", "x" * 255,
     "header", "nullable", "main", "é" * 127, "a+b", "#1", "~"],
)  # fmt: skip
def test_tables_may_be_called_that(name: str) -> None:
    assert table_name([name]) == (name,)
    assert table_name(["db", name]) == ("db", name)


@pytest.mark.parametrize(
    "name",
    ["", " ", "\t", " a", "a ", "\u00a0a", "a/b", "/", "a\\b", "a$b", ".", "..", "a.b", "a\x00b",
     "a\nb", "a\x1fb", "a\x7fb", "a\x85b", "a\u2028b", "a\u2029b", "__manifest", "__x", "head", "HEAD",
     "null", "None", "x" * 256, "é" * 128],
)  # fmt: skip
def test_tables_may_not_be_called_that(name: str) -> None:
    for parts in ([name], ["db", name], [name, "t"]):
        with pytest.raises(UsageError) as error:
            table_name(parts)
        assert error.value.kind is ErrorKind.BAD_NAME
        assert "\n" not in error.value.message
        assert "cannot be a name" in error.value.message


@pytest.mark.parametrize("name", ["\ud800", "a\udcffb"])
def test_bytes_that_are_no_text_are_no_name(name: str) -> None:
    with pytest.raises(UsageError):
        ref_name(name, "tag")
    with pytest.raises(UsageError):
        table_name([name])


def test_a_table_has_a_name() -> None:
    with pytest.raises(UsageError):
        table_name([])


def test_dots_separate_namespaces() -> None:
    assert parse_name("t") == ("t",)
    assert parse_name("a.b.t") == ("a", "b", "t")
    for text in ("", ".", "a.", ".a", "a..b", "a. .b"):
        with pytest.raises(UsageError):
            parse_name(text)


def test_two_spellings_of_one_name_are_one_name() -> None:
    assert COMPOSED != DECOMPOSED
    assert table_name([DECOMPOSED]) == table_name([COMPOSED]) == (COMPOSED,)
    assert parse_name(f"db.{DECOMPOSED}") == ("db", COMPOSED)
    assert ref_name(DECOMPOSED, "tag") == COMPOSED


def test_length_is_counted_in_bytes_of_the_composed_name() -> None:
    assert table_name([unicodedata.normalize("NFD", "é" * 127)]) == ("é" * 127,)


@pytest.mark.parametrize(
    "name", ["dev", "v1.0", "2026-01-01", "1.0", "1a", "größe", "a_b", "x" * 255, "Main"]
)
def test_refs_may_be_called_that(name: str) -> None:
    assert ref_name(name, "tag") == name


@pytest.mark.parametrize(
    "name",
    ["", " ", "a b", "-x", "_x", ".x", "a/b", "a\\b", "a$b", "a\nb", "a\n", "a:b", "a@b", "main", "head",
     "HEAD", "null", "none", ".", "..", "1", "007", "12345678901234567890", "٣", "x" * 256, "é" * 128],
)  # fmt: skip
def test_refs_may_not_be_called_that(name: str) -> None:
    with pytest.raises(UsageError) as error:
        ref_name(name, "branch")
    assert error.value.kind is ErrorKind.BAD_NAME
    assert "\n" not in error.value.message


@pytest.mark.parametrize("what", ["tag", "branch"])
def test_the_message_says_what_the_name_was_for(what: str) -> None:
    for name in ("a b", "main", "7"):
        with pytest.raises(UsageError, match=what):
            ref_name(name, what)


def test_the_message_shows_the_whole_name() -> None:
    with pytest.raises(UsageError, match=r"db\.a/b"):
        table_name(["db", "a/b"])


@given(st.text(max_size=300))
def test_a_name_is_refused_or_stays_as_it_is(text: str) -> None:
    checks: list[Callable[[str], str]] = [
        lambda one: table_name([one])[0],
        lambda one: ref_name(one, "tag"),
    ]
    for check in checks:
        try:
            name = check(text)
        except UsageError:
            continue
        assert check(name) == name
        assert unicodedata.is_normalized("NFC", name)
        assert "/" not in name
        assert len(name.encode()) <= 255


@given(st.lists(st.text(min_size=1, max_size=80), min_size=1, max_size=3))
def test_directories_are_plain_and_short(parts: list[str]) -> None:
    found = directory(tuple(parts), "0123456789abcdef")
    assert found.endswith("-01234567")
    assert len(found) <= 64 + 9
    assert not set(found) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


def test_directories_tell_whose_they_are() -> None:
    assert directory(("db", "events"), "0123456789") == "db-events-01234567"
    assert directory(("表",), "0123456789") == "table-01234567"
    assert directory(("a",), "0" * 32) != directory(("a",), "1" * 32)
