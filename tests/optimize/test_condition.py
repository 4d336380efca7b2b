"""A table that cannot be opened: gone, damaged, or out of reach for a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakewarden.errors import Damaged, NotFound, StorageError
from lakewarden.formats.lance.condition import condition
from lakewarden.testing import tables

NOBODY_LISTENS = {
    "aws_endpoint": "http://127.0.0.1:9",
    "allow_http": "true",
    "aws_access_key_id": "a",
    "aws_secret_access_key": "b",
    "region": "here",
    "client_max_retries": "0",
}


def test_a_store_that_is_away_is_no_damage() -> None:
    """Whoever takes it for damage does not try again."""
    with pytest.raises(StorageError, match="cannot be reached"):
        condition("s3://bucket/t.lance", None, NOBODY_LISTENS)


def test_a_manifest_that_was_cut_is_damage(tmp_path: Path) -> None:
    table = tables.create(tmp_path / "t.lance")
    (manifest,) = (table / "_versions").glob("*.manifest")
    manifest.write_bytes(manifest.read_bytes()[:10])
    with pytest.raises(Damaged, match="cannot be opened"):
        condition(str(table), None, {})


def test_a_table_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        condition(str(tmp_path / "none.lance"), None, {})
