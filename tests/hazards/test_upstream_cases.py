"""The cases of Lance's own cleanup tests (`rust/lance/src/dataset/cleanup.rs`) that apply here.

Each case is a table; tables that need the same rules are cleaned in one fleet run, as users do.
Left out: the hook after commits, external manifest stores, and scans of managed blobs (`_blobs/`
is always kept instead).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import pytest
from pyspark.sql import SparkSession

import lakewarden
from lakewarden.testing import invariants, tables

Build = Callable[[Path], None]


@dataclass
class Case:
    """One table before and after its fleet was cleaned."""

    root: Path
    files: set[str]
    sizes: dict[str, int]
    versions: dict[invariants.Place, str]
    receipt: Any = None
    planned: Any = None
    gone: set[str] = field(default_factory=set)

    def gone_from(self, directory: str) -> int:
        return sum(file.startswith(f"{directory}/") for file in self.gone)


@dataclass
class Fleet:
    """All cases of one run."""

    cases: dict[str, Case]
    plan: Any
    receipt: Any

    def __getitem__(self, name: str) -> Case:
        return self.cases[name]


def run(spark: SparkSession, lake: Path, cases: dict[str, Build], **rules: Any) -> Fleet:
    built = {}
    for name, build in cases.items():
        root = lake / name
        build(root)
        files = invariants.files(root)
        sizes = {file: (root / file).stat().st_size for file in files}
        built[name] = Case(root, files, sizes, _readable(root))
    rules = {"recursive": True, "min_age": "0s", "on_tagged": "keep", "tasks": 4, **rules}
    plan = lakewarden.plan_cleanup(spark, str(lake), **rules)
    for case in built.values():
        assert invariants.files(case.root) == case.files, "a plan changes nothing"
    receipt = lakewarden.execute(spark, plan, tasks=4)
    for planned, done in zip(plan.tables, receipt.tables, strict=True):
        case = built[Path(done.table_key).name]
        case.planned, case.receipt = planned, done
        case.gone = case.files - invariants.files(case.root)
    return Fleet(built, plan, receipt)


def _readable(root: Path) -> dict[invariants.Place, str]:
    """Fingerprint what can be read; damaged tables are cases, too."""
    known = {}
    with suppress(OSError, ValueError):
        for place in invariants.versions(root):
            with suppress(OSError, ValueError):
                known[place] = invariants.fingerprint(root, place)
    return known


def check(case: Case, *, left: set[invariants.Place] | None = None) -> None:
    """What must hold for every case: what is left reads, counts are exact, a plan is kept to."""
    remaining = set(invariants.versions(case.root))
    if left is not None:
        assert remaining == left
    kept = {place: known for place, known in case.versions.items() if place in remaining}
    invariants.assert_all_versions_read(case.root, kept)
    removed = case.receipt.removed
    assert removed == case.planned.removal
    assert removed.files_removed == len(case.gone)
    assert removed.bytes_removed == sum(case.sizes[file] for file in case.gone)


MAIN_1, MAIN_2, MAIN_3, MAIN_4 = (("main", number) for number in range(1, 5))


# Versions older than ten days go.


def _unreferenced(root: Path) -> None:
    tables.create(root)
    tables.age(root, 30)
    tables.overwrite(root, 10)


def _shared(root: Path) -> None:
    tables.create(root)
    tables.age(root, 30)
    tables.append(root, 10)


def _sparse(root: Path) -> None:
    tables.overwritten(root, 3)
    tables.tag(root, "first", 1)
    tables.age(root, 30)
    tables.overwrite(root, 90)


def _index_replaced(root: Path) -> None:
    tables.create(root)
    tables.index(root)
    tables.append(root, 10)
    tables.index(root)
    tables.age(root, 30)
    tables.append(root, 20)


def _index_segments(root: Path) -> None:
    """A delta segment is added, then another; a merge of one leaves the other in use."""
    tables.create(root)
    tables.index(root)
    for start in (10, 20):
        tables.append(root, start)
        lance.dataset(str(root)).optimize.optimize_indices(num_indices_to_merge=0)
    tables.append(root, 30)
    lance.dataset(str(root)).optimize.optimize_indices(num_indices_to_merge=1)
    tables.age(root, 30)
    tables.append(root, 40)


def _deletions(root: Path) -> None:
    tables.create(root, number=20)
    tables.delete(root, "id = 1")
    tables.delete(root, "id = 2")
    tables.age(root, 30)
    tables.delete(root, "id = 3")


def _failed_commits(root: Path) -> None:
    """Writes that were never committed: data, an index segment, temporary files; old and young."""
    tables.create(root)
    tables.uncommitted(root, 10)
    lance.dataset(str(root)).create_index_uncommitted("id", "BTREE", name="x", fragment_ids=[0])
    for path in ("data/.tmp1", "data/sub/.tmp2", "_versions/.tmp3", "_deletions/1-1-1.bin"):
        tables.orphan(root, path)
    tables.age(root, 30)
    tables.append(root, 20)
    tables.uncommitted(root, 30)
    tables.orphan(root, "data/.tmp4", days=1)
    tables.orphan(root, "_indices/1-1/part.lance", days=6.9)
    tables.orphan(root, "data/nearly.lance", days=6.9)
    tables.orphan(root, "data/just.lance", days=7.01)


def _foreign(root: Path) -> None:
    """What Lance did not write, or writes but never collects, stays whatever its age."""
    tables.overwritten(root, 2)
    for path in (
        "images/cat.png", "misc/data/x.lance", "tree/readme.txt", "_blobs/1.blob", "_fri/1/p.lance",
        "_mem_wal/1/x.lance", "data/readme.txt", "_versions/x.manifest.bak", "_deletions/x.txt",
        "_indices/stray", "data/a/b/c.lance",
    ):  # fmt: skip
        tables.orphan(root, path)
    (root / "_indices/link").symlink_to(root / "images")
    for file in root.glob("_transactions/*"):
        file.unlink()
    (root / "_transactions").rmdir()
    tables.age(root, 30)


def _sidecars(root: Path) -> None:
    tables.blobs(root, 1)
    tables.blobs(root, 2, "overwrite")
    tables.age(root, 30)
    tables.blobs(root, 3, "append")


def _branches(root: Path) -> None:
    """Main, a branch, a branch of the branch; each has moved on."""
    tables.create(root)
    tables.append(root, 10)
    dev = tables.branch(root, "dev/one", 2)
    tables.append(dev, 20)
    leaf = tables.branch(dev, "leaf", ("dev/one", 3))
    tables.overwrite(leaf, 30)
    tables.overwrite(dev, 40)
    tables.overwrite(root, 50)
    tables.age(root, 30)
    tables.overwrite(root, 60)


def _parent_gone(root: Path) -> None:
    """The version a branch started from was lost: its manifest is gone, the branch still reads."""
    tables.overwritten(root, 2)
    tables.branch(root, "dev", 1)
    (root / f"_versions/{2**64 - 2:020}.manifest").unlink()
    tables.age(root, 30)
    tables.overwrite(root, 60)


def _tree_without_ref(root: Path) -> None:
    """A crash between a branch's tree and its ref: the tree cannot be judged, so it protects."""
    tables.overwritten(root, 2)
    tables.branch(root, "dev", 1)
    (root / "_refs/branches/dev.json").unlink()
    tables.age(root, 30)
    tables.overwrite(root, 60)


def _corrupt(root: Path, version: int) -> None:
    tables.overwritten(root, 3)
    manifest = root / f"_versions/{2**64 - 1 - version:020}.manifest"
    manifest.write_bytes(manifest.read_bytes()[:-30])
    tables.age(root, 30)


def _lost_file(root: Path) -> None:
    tables.overwritten(root, 2)
    tables.append(root, 20)
    file = lance.dataset(str(root)).get_fragments()[0].metadata.files[0].path
    (root / "data" / file).unlink()
    tables.age(root, 30)


def _old_naming(root: Path) -> None:
    tables.old_naming(root, 3)
    tables.age(root, 30)


def _staged(root: Path) -> None:
    """Staged copies of published versions are left over; one that was never published stays."""
    tables.overwritten(root, 3)
    tables.staged_copy(root, 1)
    tables.staged_copy(root, 3)
    copy = tables.staged_copy(root, 2, "only")
    (root / f"_versions/{2**64 - 1 - 2:020}.manifest").unlink()
    tables.age(root, 30)
    assert copy.exists()


def _restored(root: Path) -> None:
    tables.overwritten(root, 3)
    tables.restore(root, 1)
    tables.age(root, 30)


def _future(root: Path) -> None:
    """Ages in the future or at zero say nothing."""
    tables.overwritten(root, 2)
    tables.age(root, 30)
    tables.orphan(root, "data/future.lance", days=-2)
    tables.orphan(root, "data/zero.lance", days=365.25 * 300)


OLD: dict[str, Build] = {
    "unreferenced": _unreferenced,
    "shared": _shared,
    "sparse": _sparse,
    "index-replaced": _index_replaced,
    "index-segments": _index_segments,
    "deletions": _deletions,
    "failed-commits": _failed_commits,
    "foreign": _foreign,
    "sidecars": _sidecars,
    "branches": _branches,
    "parent-gone": _parent_gone,
    "tree-without-ref": _tree_without_ref,
    "corrupt-old": lambda root: _corrupt(root, 1),
    "corrupt-head": lambda root: _corrupt(root, 3),
    "lost-file": _lost_file,
    "old-naming": _old_naming,
    "staged": _staged,
    "restored": _restored,
    "future": _future,
}


@pytest.fixture(scope="module")
def old(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return run(spark, tmp_path_factory.mktemp("old"), OLD, older_than="10d")


@pytest.mark.parametrize("name", sorted(set(OLD) - {"corrupt-head", "corrupt-old", "lost-file"}))
def test_what_is_left_reads_and_counts_are_exact(old: Fleet, name: str) -> None:
    assert old[name].receipt.error is None
    check(old[name])
    if name != "foreign":  # there the case itself removed transaction files
        invariants.assert_no_live_file_missing(old[name].root)


def test_overwritten_data_goes_with_its_version(old: Fleet) -> None:
    case = old["unreferenced"]
    check(case, left={MAIN_2})
    assert [case.gone_from(place) for place in ("data", "_transactions", "_versions")] == [1, 1, 1]


def test_data_shared_with_a_newer_version_stays(old: Fleet) -> None:
    case = old["shared"]
    check(case, left={MAIN_2})
    assert [case.gone_from(place) for place in ("data", "_transactions", "_versions")] == [0, 1, 1]


def test_data_newer_than_a_tagged_version_goes(old: Fleet) -> None:
    case = old["sparse"]
    check(case, left={MAIN_1, MAIN_4})
    assert case.gone_from("data") == 2
    invariants.assert_nothing_deletable_left(case.root)


def test_replaced_index_goes_with_its_directory(old: Fleet) -> None:
    case = old["index-replaced"]
    assert case.receipt.removed.index_files_removed == 2
    assert len(list((case.root / "_indices").iterdir())) == 1


def test_index_segments_still_in_use_stay(old: Fleet) -> None:
    case = old["index-segments"]
    assert case.gone_from("_indices")
    assert lance.dataset(str(case.root)).describe_indices()[0].num_rows_indexed >= 9
    invariants.assert_nothing_deletable_left(case.root)


def test_old_deletion_files_go(old: Fleet) -> None:
    case = old["deletions"]
    check(case, left={MAIN_4})
    assert case.receipt.removed.deletion_files_removed == 2


def test_files_of_failed_commits_go_after_seven_days(old: Fleet) -> None:
    case = old["failed-commits"]
    gone = {file for file in case.gone if not file.startswith(("_versions/1", "_transactions"))}
    young = {"data/.tmp4", "_indices/1-1/part.lance", "data/nearly.lance"}
    assert {"data/.tmp1", "data/sub/.tmp2", "_versions/.tmp3", "_deletions/1-1-1.bin"} <= gone
    assert "data/just.lance" in gone
    # And the uncommitted data file (one) and index segment (two files).
    assert len(gone) == 8
    assert not young & gone
    # Besides those three, the write in progress.
    assert case.receipt.kept_unverified == 4


def test_what_lance_did_not_write_stays(old: Fleet) -> None:
    case = old["foreign"]
    check(case, left={MAIN_2})
    assert {Path(file).parts[0] for file in case.gone} == {"data", "_versions"}
    assert len(case.gone) == 2
    assert case.planned.kept_unknown_kind >= 12
    assert (case.root / "_indices/link").is_symlink()


def test_sidecars_go_with_their_data_file_and_leave_no_directory(old: Fleet) -> None:
    case = old["sidecars"]
    check(case, left={MAIN_3})
    assert case.gone_from("data") == 3
    assert sum(path.is_dir() for path in (case.root / "data").iterdir()) == 2
    invariants.assert_nothing_deletable_left(case.root)


def test_cleaning_main_leaves_branches_whole(old: Fleet) -> None:
    case = old["branches"]
    check(
        case,
        left={
            MAIN_2,
            MAIN_4,
            ("dev/one", 2),
            ("dev/one", 3),
            ("dev/one", 4),
            ("leaf", 3),
            ("leaf", 4),
        },
    )
    assert not any(file.startswith("tree/") for file in case.gone)


def test_branch_whose_parent_version_is_lost_still_reads(old: Fleet) -> None:
    check(old["parent-gone"], left={("main", 3), ("dev", 1)})


def test_tree_without_a_ref_protects_what_it_names(old: Fleet) -> None:
    case = old["tree-without-ref"]
    assert not any(file.startswith("tree/") for file in case.gone)
    assert lance.dataset(str(case.root / "tree/dev")).to_table().num_rows == 3


def test_corrupt_manifest_of_a_going_version_holds_nothing_up(old: Fleet) -> None:
    case = old["corrupt-old"]
    assert case.receipt.error is None
    check(case, left={MAIN_3})
    invariants.assert_nothing_deletable_left(case.root)


@pytest.mark.parametrize(
    ("name", "kind"), [("corrupt-head", "corrupt_manifest"), ("lost-file", "damaged_version")]
)
def test_damaged_kept_version_holds_its_table_back_and_no_other(
    old: Fleet, name: str, kind: str
) -> None:
    assert old[name].receipt.error_kind == kind
    assert not old[name].gone


def test_old_manifest_names_are_understood(old: Fleet) -> None:
    case = old["old-naming"]
    check(case, left={MAIN_3})
    assert case.gone_from("_versions") == 2
    invariants.assert_nothing_deletable_left(case.root)


def test_staged_manifest_stays_only_if_it_may_be_the_only_copy(old: Fleet) -> None:
    case = old["staged"]
    staged = {file.name.rpartition("-")[2] for file in case.root.glob("_versions/*.manifest-*")}
    assert staged == {"only"}
    # What the staged version names stays as well: it may yet be published.
    assert case.gone_from("data") == 1


def test_restored_files_belong_to_the_new_version(old: Fleet) -> None:
    case = old["restored"]
    check(case, left={MAIN_4})
    assert case.gone_from("data") == 2


def test_unknown_ages_keep(old: Fleet) -> None:
    case = old["future"]
    assert case.receipt.kept_unknown_age == 2
    assert case.gone_from("data") == 1


def test_requests_do_not_grow_with_what_goes(old: Fleet) -> None:
    """LN-24: one bulk request for all tables' files, one for all manifests."""
    assert old.receipt.requests["DELETE"] == 2


# Everything is fresh; only the last version stays.


def _fresh(root: Path) -> None:
    tables.overwritten(root, 4)
    tables.index(root)
    tables.delete(root, "id = 30")
    tables.blobs(root, 5, "overwrite")
    tables.blobs(root, 6, "overwrite")
    tables.uncommitted(root, 99)
    tables.orphan(root, "_indices/0-0/part.lance", days=0)
    tables.orphan(root, "data/.tmp9", days=0)
    tables.orphan(root, "_blobs/9.blob", days=30)


def _aged(root: Path) -> None:
    tables.appended(root, 12)
    tables.age(root, 30)


@pytest.mark.parametrize("delete_unverified", [False, True])
def test_fresh_files_of_removed_versions_go_at_once(
    spark: SparkSession, tmp_path: Path, delete_unverified: bool
) -> None:
    """Named by a version means verified: no writer is at work.  The rest goes only when asked."""
    cases: dict[str, Build] = {"fresh": _fresh, "aged": _aged}
    fleet = run(spark, tmp_path, cases, keep=1, delete_unverified=delete_unverified)
    case = fleet["fresh"]
    check(case, left={("main", 8)})
    unverified = {"_indices/0-0/part.lance", "data/.tmp9"}
    left = {str(file.relative_to(case.root)) for file in invariants.leftovers(case.root)}
    if delete_unverified:
        assert not left
        assert case.receipt.kept_unverified == 0
    else:
        assert unverified < left
        assert len(left) == case.receipt.kept_unverified == 3
    assert (case.root / "_blobs/9.blob").exists()
    # LN-20: of twelve old versions only the one that stays is opened; the fresh ones all are.
    assert fleet.plan.requests["GET"] == 1 + 8


def test_rules_are_anded_and_versions_can_be_named(spark: SparkSession, tmp_path: Path) -> None:
    """Before a time, beyond the last n, among given numbers: a version goes if all agree."""

    def build(root: Path) -> None:
        tables.overwritten(root, 6)
        tables.age(root, 30)
        for version in (4, 5, 6):
            tables.age_files([root / f"_versions/{2**64 - 1 - version:020}.manifest"], 1)

    fleet = run(spark, tmp_path / "and", {"t": build}, older_than="10d", keep=4)
    check(fleet["t"], left={("main", number) for number in (3, 4, 5, 6)})
    fleet = run(spark, tmp_path / "named", {"t": build}, versions=[2, 4, 6, 77])
    check(fleet["t"], left={("main", number) for number in (1, 3, 5, 6)})
    invariants.assert_nothing_deletable_left(fleet["t"].root)


def test_cascade_cleans_branches_by_their_own_rules(spark: SparkSession, tmp_path: Path) -> None:
    """`clean_referenced_branches`: leaves first, then their parents let go of what they held."""

    def build(root: Path) -> None:
        tables.create(root)
        dev = tables.branch(root, "dev", 1)
        lance.dataset(str(dev)).update_config(
            {"lance.auto_cleanup.interval": "1", "lance.auto_cleanup.retain_versions": "1"}
        )
        tables.overwrite(dev, 10)
        plain = tables.branch(root, "plain", 1)
        tables.overwrite(plain, 20)
        tables.overwrite(root, 30)
        tables.age(root, 30)

    def alone(root: Path) -> None:
        build(root)
        lance.dataset(str(root)).branches.delete("plain")

    fleet = run(
        spark, tmp_path, {"two": build, "one": alone}, keep=1, clean_referenced_branches=True
    )
    check(fleet["two"], left={MAIN_1, MAIN_2, ("plain", 1), ("plain", 2), ("dev", 3)})
    check(fleet["one"], left={MAIN_2, ("dev", 3)})
    for case in fleet.cases.values():
        invariants.assert_nothing_deletable_left(case.root)
