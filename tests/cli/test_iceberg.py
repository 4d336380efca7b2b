"""Iceberg tables on the command line: targets, catalogs, plans, consent, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table import Table

from lakewarden.testing import iceberg as kit
from lakewarden.testing import iceberg_oracle as oracle
from lakewarden.testing.s3 import S3Server
from tests.cli.small import contents, make_table
from tests.cli.terminal import Outcome, lakewarden

pytestmark = pytest.mark.spark


@pytest.fixture
def lake(tmp_path: Path, spark: object) -> Any:
    """A catalog with table db.t: eight snapshots, thirty days old, the newest of now."""
    catalog = kit.catalog(tmp_path)
    table = kit.create(catalog)
    kit.grow(table, 6)
    kit.overwrite(table, 100)
    kit.backdate(table, 30)
    return catalog


def settings(root: Path) -> list[str]:
    """The options that lead to the catalog, instead of a configuration file."""
    pairs = kit.catalog_properties(root).items()
    return [word for name, value in pairs for word in ("--catalog-property", f"{name}={value}")]


@pytest.fixture
def run(lake: Any, tmp_path: Path) -> Any:
    def command(*words: object) -> Outcome:
        return lakewarden(*words, *settings(tmp_path))

    return command


def current(lake: Any, name: str = "db.t") -> Table:
    table: Table = lake.load_table(name)
    return table


def test_preview_changes_nothing(run: Any, lake: Any, tmp_path: Path) -> None:
    before = contents(tmp_path / "warehouse")
    outcome = run("cleanup", "iceberg://lake/db.t", "--keep", 2)
    assert outcome.code == 0
    assert "keep     2 of 8 snapshots" in outcome.stdout
    assert "manifest lists 6" in outcome.stdout
    assert "preview: nothing was changed" in outcome.stdout
    assert contents(tmp_path / "warehouse") == before


def test_confirm_expires_and_deletes(run: Any, lake: Any) -> None:
    before = oracle.reachable(current(lake))
    kept = dict(list(oracle.fingerprints(current(lake)).items())[-2:])
    outcome = run("cleanup", "iceberg://lake/db.t", "--keep", 2, "--confirm", "--json")
    assert outcome.code == 0
    row = outcome.rows[0]
    assert row["table_key"] == "iceberg://lake/db.t"
    assert row["expired_snapshots_count"] == row["old_versions_removed"] == 6
    assert row["deleted_manifest_lists_count"] == 6
    assert row["deleted_data_files_count"] == row["data_files_removed"] > 0
    assert row["deleted_bytes"] == row["bytes_removed"] > 0
    after = current(lake)
    oracle.assert_intact(after, kept)
    assert not [path for path in oracle.leftovers(before, after) if kit.local(path).exists()]


def test_plan_has_the_names_of_the_procedures(run: Any) -> None:
    row = run("cleanup", "iceberg://lake/db.t", "--keep", 2, "--json").rows[0]
    assert row["would_delete_count"] > 6
    assert row["would_delete_bytes"] == row["bytes_removed"] > 0
    assert row["deleted_bytes"] == 0
    assert row["skipped_unknown_age_count"] == 0
    assert row["expired_refs"] == []


def test_properties_of_the_table_are_the_rules_where_none_are_given(run: Any, lake: Any) -> None:
    with current(lake).transaction() as change:
        change.set_properties({"history.expire.min-snapshots-to-keep": "3"})
    assert run("cleanup", "iceberg://lake/db.t", "--json").rows[0]["versions_kept"] == 3


def test_orphans_of_a_whole_catalog(run: Any, lake: Any, tmp_path: Path) -> None:
    other = kit.create(lake, "db.other")
    kit.grow(other, 2)
    places = [kit.local(current(lake, name).location()) for name in ("db.t", "db.other")]
    strays = [kit.orphan(place, "data/stray.parquet") for place in places]
    outcome = run("remove-orphans", "iceberg://lake", "--confirm", "--json")
    assert outcome.code == 0
    assert sorted(row["table_key"] for row in outcome.rows) == [
        "iceberg://lake/db.other", "iceberg://lake/db.t",
    ]  # fmt: skip
    assert not any(stray.exists() for stray in strays)
    for name in ("db.t", "db.other"):
        oracle.assert_intact(current(lake, name))


@pytest.mark.nightly
def test_both_formats_in_one_run(run: Any, lake: Any, tmp_path: Path) -> None:
    place = tmp_path / "lance" / "t.lance"
    make_table(place)
    outcome = run("cleanup", place, "iceberg://lake/db.t", "--keep", 2, "--confirm", "--json")
    assert outcome.code == 0
    assert {row["table_key"]: row["old_versions_removed"] for row in outcome.rows} == {
        str(place): 4,
        "iceberg://lake/db.t": 6,
    }
    oracle.assert_intact(current(lake))


def test_trouble_of_one_table_leaves_the_others_alone(run: Any, lake: Any) -> None:
    other = kit.create(lake, "db.other", properties={"gc.enabled": "false"})
    kit.grow(other, 2)
    outcome = run("cleanup", "iceberg://lake/db", "--keep", 2, "--confirm", "--json")
    assert outcome.code == 3
    rows = {row["table_key"]: row for row in outcome.rows}
    assert rows["iceberg://lake/db.other"]["error_kind"] == "gc_disabled"
    assert "gc.enabled" in rows["iceberg://lake/db.other"]["error"]
    assert rows["iceberg://lake/db.t"]["expired_snapshots_count"] == 6


def test_saved_plan_is_applied(run: Any, lake: Any, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    assert run("cleanup", "iceberg://lake/db.t", "--keep", 2, "--save-plan", plan).code == 0
    assert len(kit.ids(current(lake))) == 8
    applied = run("apply", plan, "--confirm", "--json")
    assert applied.code == 0
    assert applied.rows[0]["expired_snapshots_count"] == 6
    oracle.assert_intact(current(lake))
    again = run("apply", plan, "--confirm", "--json")
    assert again.code == 4
    assert again.rows[0]["error_kind"] == "plan_outdated"
    oracle.assert_intact(current(lake))


def test_versions_and_refs(run: Any, lake: Any) -> None:
    table = current(lake)
    kit.tag(table, "v1", kit.ids(table)[1])
    shown = run("versions", "iceberg://lake/db.t", "--limit", 3)
    assert shown.code == 0
    assert "head of branch main" in shown.stdout
    assert "… and 5 more" in shown.stdout
    rows = run("versions", "iceberg://lake/db.t", "--json").document["versions"]
    assert [row["version"] for row in rows] == list(reversed(kit.ids(table)))
    refs = run("refs", "iceberg://lake/db.t").stdout
    assert f"tag      v1                   {kit.ids(table)[1]}" in refs
    assert "branch   main" in refs


@pytest.mark.parametrize(
    ("target", "words", "code"),
    [
        ("iceberg://", "names no Iceberg table", 2),
        ("iceberg:///db.t", "names no Iceberg table", 2),
        ("iceberg://lake/db..t", "names no Iceberg table", 2),
        ("iceberg://lake/db/t", "names no Iceberg table", 2),
        ("iceberg://lake/db.absent", "neither a table nor a namespace", 1),
        ("iceberg://lake/absent", "neither a table nor a namespace", 1),
    ],
)
def test_bad_target(run: Any, target: str, words: str, code: int) -> None:
    outcome = run("cleanup", target, "--keep", 2)
    assert outcome.code == code
    assert words in outcome.error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--before-version", 3], "no order"),
        (["--branch", "dev"], "every branch"),
        (["--keep", 0], "--keep is 0"),
        (["--max-ref-age", "soon"], "duration"),
        (["--min-snapshots-to-expire", -1], "--min-snapshots-to-expire is -1"),
    ],
)
def test_bad_rule(run: Any, options: list[object], words: str) -> None:
    outcome = run("cleanup", "iceberg://lake/db.t", *options)
    assert outcome.code == 2
    assert words in outcome.error


def test_unknown_catalog_is_told_before_spark_starts(tmp_path: Path) -> None:
    outcome = lakewarden("cleanup", "iceberg://nowhere/db.t", "--keep", 2)
    assert outcome.code == 2
    assert "nowhere" in outcome.error
    assert ".pyiceberg.yaml" in outcome.error


def test_empty_namespace_is_told(run: Any, lake: Any) -> None:
    lake.create_namespace("bare")
    outcome = run("cleanup", "iceberg://lake/bare", "--keep", 2)
    assert outcome.code == 1
    assert "holds no table" in outcome.error


def test_lance_tables_still_need_a_rule(run: Any, tmp_path: Path) -> None:
    outcome = run("cleanup", tmp_path / "t.lance", "iceberg://lake/db.t")
    assert outcome.code == 2
    assert "no rule" in outcome.error


@pytest.mark.s3
def test_tables_on_a_store_need_consent(s3: S3Server, tmp_path: Path, spark: object) -> None:
    s3.create_bucket("iceberg-cli")
    warehouse = "s3://iceberg-cli/warehouse"
    properties = {
        **kit.catalog_properties(tmp_path),
        "warehouse": warehouse,
        **kit.s3_properties(s3),
    }
    catalog = kit.catalog(tmp_path, **{k: v for k, v in properties.items() if k != "type"})
    kit.grow(kit.create(catalog), 3)
    words = [w for k, v in properties.items() for w in ("--catalog-property", f"{k}={v}")]
    command = ("cleanup", "iceberg://lake/db.t", "--older-than", "0s", "--confirm", *words)
    refused = lakewarden(*command)
    assert refused.code == 1
    assert "add --yes" in refused.error
    assert len(kit.ids(catalog.load_table("db.t"))) == 3
    assert lakewarden(*command, "--yes").code == 0
    assert len(kit.ids(catalog.load_table("db.t"))) == 1


def test_location_outside_the_table_is_refused(run: Any, tmp_path: Path) -> None:
    outcome = run("remove-orphans", "iceberg://lake/db.t", "--location", tmp_path / "elsewhere")
    assert outcome.code == 2
    assert "not inside" in outcome.error


def test_breaker_counts_iceberg_files(run: Any, lake: Any) -> None:
    outcome = run(
        "cleanup", "iceberg://lake/db.t", "--keep", 2, "--confirm", "--max-delete-files", 3
    )
    assert outcome.code == 1
    assert "--max-delete-files" in outcome.error
    assert len(kit.ids(current(lake))) == 8


def test_plan_holds_no_credentials(run: Any, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    secret = (
        "--catalog-property",
        "s3.secret-access-key=hush",
        "--storage-option",
        "aws_secret_access_key=hush",
    )
    assert (
        run("cleanup", "iceberg://lake/db.t", "--keep", 2, "--save-plan", plan, *secret).code == 0
    )
    assert "hush" not in json.dumps(json.loads((plan / "plan.json").read_text()))
