"""Ways to lose data that only show in odd situations; each is refused or held back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pytest
from pyspark.sql import SparkSession

import lakewarden
from lakewarden.errors import ErrorKind, LakewardenError, Refused
from lakewarden.testing.tables import age, append, clone, create, overwritten, staged_copy, tag

pytestmark = pytest.mark.spark
Clean = Callable[..., Any]


def plan_of(spark: SparkSession, *places: Path, **rules: Any) -> Any:
    rules = {"keep": 1, "min_age": "0s", "tasks": 2, **rules}
    return lakewarden.plan_cleanup(spark, [str(place) for place in places], **rules)


def files(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}


def test_a_table_made_again_under_the_same_name_is_not_cleaned_by_the_old_plan(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Manifests are named by number alone, so the new table's look like the old one's."""
    root = age(overwritten(tmp_path / "t", 6), 30)
    plan = plan_of(spark, root)
    shutil.rmtree(root)
    overwritten(root, 2)
    before = files(root)
    receipt = lakewarden.execute(spark, plan, tasks=2)
    assert receipt.outdated
    assert files(root) == before
    assert lance.dataset(str(root)).count_rows() == 3


def test_a_table_to_protect_that_is_not_there_stops_everything(
    spark: SparkSession, tmp_path: Path
) -> None:
    root = overwritten(tmp_path / "t", 3)
    with pytest.raises(Refused) as caught:
        plan_of(spark, root, protect=[str(tmp_path / "cloen")])
    assert caught.value.kind is ErrorKind.NOT_FOUND


def test_refs_that_are_not_understood_stop_the_table(clean: Clean, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet"
    lease, linked, strange = (
        age(overwritten(fleet / name, 3), 30) for name in ("lease", "linked", "strange")
    )
    (lease / "_refs/leases").mkdir(parents=True)
    (lease / "_refs/leases/reader.json").write_text("{}")
    tag(linked, "keep-me", 1)
    (linked / "_refs").rename(tmp_path / "elsewhere")
    (linked / "_refs").symlink_to(tmp_path / "elsewhere")
    (strange / "_versions/v3-of-a-new-naming.manifest").write_bytes(b"LANC")
    before = files(fleet)
    plan, receipt = clean(fleet, recursive=True, keep=1)
    kinds = {Path(table.table_key).name: table.error_kind for table in plan.tables}
    assert kinds == dict.fromkeys(("lease", "linked", "strange"), "unsupported_feature")
    assert receipt.removed.files_removed == 0
    assert files(fleet) == before


def test_two_staged_manifests_of_one_version_are_both_protected(
    clean: Clean, tmp_path: Path
) -> None:
    """In the race for a version each may turn out to be the commit; their times can be equal."""
    root = overwritten(tmp_path / "t", 3)
    copies = [staged_copy(root, 3, suffix) for suffix in ("0b3d", "1c4e")]
    head = root / "_versions" / f"{2**64 - 1 - 3:020d}.manifest"
    head.unlink()
    age(root, 30)
    _, receipt = clean(root, keep=1)
    assert receipt.removed.old_versions_removed == 1
    assert all(copy.exists() for copy in copies)
    shutil.copy(copies[1], head)
    assert lance.dataset(str(root), version=3).count_rows() == 3


def test_a_clone_in_a_table_that_lies_inside_another_still_protects_its_source(
    clean: Clean, tmp_path: Path
) -> None:
    fleet = tmp_path / "fleet"
    source = overwritten(fleet / "source", 2)
    outer = create(fleet / "outer")
    inner = clone(source, outer / "inner", 1)
    age(fleet, 30)
    plan, _ = clean(fleet, recursive=True, keep=1)
    kinds = {Path(table.table_key).name: table.error_kind for table in plan.tables}
    assert kinds == {"outer": "location_overlap", "source": None}
    assert lance.dataset(str(inner)).to_table().num_rows == 3


def test_a_floor_stands_between_a_short_margin_and_writes_in_progress(
    spark: SparkSession, tmp_path: Path
) -> None:
    root = overwritten(tmp_path / "t", 2)
    with pytest.raises(LakewardenError) as caught:
        plan_of(spark, root, unverified_after="10m")
    assert caught.value.kind is ErrorKind.RETENTION_TOO_SHORT


def test_young_writers_are_judged_by_the_stores_clock(spark: SparkSession, tmp_path: Path) -> None:
    """A commit time is the writer's word; whether somebody may still build on it is not."""
    root = create(tmp_path / "t")
    append(root, 10)
    plan = plan_of(spark, root, older_than="0s", min_age="1h", age_from_commit=True, keep=None)
    assert plan.removal.old_versions_removed == 0
