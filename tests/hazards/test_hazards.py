"""The thirteen ways in which cleanup of Lance tables is known to lose data or to strand files.

Each hazard H1 to H13 was reproduced with Lance's own `cleanup_old_versions`.  The tests show that
ours does the right thing; where Lance is cheap to run, `native_*` helpers assert that it still
does not, so that a release which fixes it is noticed.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pytest

import lakewarden
from lakewarden.testing import invariants, tables

Clean = Callable[..., tuple[Any, Any]]
EVERYTHING_OLD = {"error_if_tagged_old_versions": False, "older_than": timedelta(0)}
SPELLINGS: dict[str, Callable[[Path], str]] = {
    "trailing": lambda path: f"{path}/",
    "file": lambda path: f"file://{path}",
    "object-store": lambda path: f"file-object-store://{path}",
    "relative": lambda path: path.name,
    "dots": lambda path: f"{path.parent}/x/../{path.name}",
    "link": lambda path: f"{path.parent}-link/{path.name}",
}


def native_cleanup(uri: Path | str, **options: Any) -> Any:
    return lance.dataset(str(uri)).cleanup_old_versions(**{**EVERYTHING_OLD, **options})


def reads(root: Path, place: invariants.Place) -> bool:
    try:
        invariants.fingerprint(root, place)
    except (OSError, ValueError):
        return False
    return True


def reasons(plan: Any) -> dict[tuple[str, int], str]:
    return {(row.branch, row.version): row.reasons for row in plan.versions.collect()}


def removed_versions(receipt: Any) -> dict[str, int]:
    return {Path(one.table_key).name: one.removed.old_versions_removed for one in receipt.tables}


def table_with_branch(root: Path, uri: str | None = None) -> Path:
    """Three overwrites; a branch from the first, whose two versions need its data file."""
    tables.overwritten(root, 3)
    lance.dataset(uri or str(root)).create_branch("dev", 1)
    tables.append(root / "tree/dev", 70)
    return root


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that can be reached in all spellings."""
    place = tmp_path / "lake"
    place.mkdir()
    (place / "x").mkdir()
    (tmp_path / "lake-link").symlink_to(place)
    monkeypatch.chdir(place)
    return place


def test_h1_branch_survives_whatever_the_spelling(here: Path, clean: Clean) -> None:
    """Lance compares base paths as strings; any other spelling of the same place lost the branch.

    Half of the tables are created with the odd spelling and cleaned with the plain one.
    """
    targets, before = [], {}
    for name, spell in SPELLINGS.items():
        cleaned = table_with_branch(here / f"cleaned-{name}")
        targets.append(spell(cleaned))
        written = here / f"written-{name}"
        table_with_branch(written, spell(written))
        targets.append(str(written))
        for root in (cleaned, written):
            tables.age(root, 30)
            before[root] = invariants.fingerprints(root)
    # Without its first version the branch holds no version of main, only files.
    for branch, versions in (("dev", 1), ("main", 2)):
        _, receipt = clean(targets, keep=1, branch=branch)
        assert not receipt.failed
        assert receipt.removed.old_versions_removed == versions * len(targets)
    for root, known in before.items():
        kept = {("main", 3), ("dev", 2)}
        assert set(invariants.versions(root)) == kept, root
        invariants.assert_all_versions_read(root, {place: known[place] for place in kept})
        invariants.assert_nothing_deletable_left(root)


@pytest.mark.parametrize("spelling", ["trailing", "file", "relative", "dots", "link"])
def test_h1_native_cleanup_loses_the_branch(here: Path, spelling: str) -> None:
    root = table_with_branch(here / "t")
    native_cleanup(SPELLINGS[spelling](root))
    assert not reads(root, ("dev", 1))


def test_h1_branches_of_a_moved_table_survive(tmp_path: Path, clean: Clean) -> None:
    """A branch names the place where its table used to be; moved back, it must read again."""
    old, new = tmp_path / "old", tmp_path / "new"
    leaf = tables.branch(tables.branch(tables.overwritten(old, 3), "dev", 1), "leaf", ("dev", 1))
    tables.append(leaf, 70)
    tables.age(old, 30)
    before = invariants.fingerprints(old)
    old.rename(new)
    _, receipt = clean(new, keep=1)
    assert receipt.removed.old_versions_removed == 1
    new.rename(old)
    kept = {place: known for place, known in before.items() if place != ("main", 2)}
    invariants.assert_all_versions_read(old, kept)


def test_h2_h3_versions_a_writer_may_build_on_stay_by_default(
    tmp_path: Path, spark: Any, clean: Clean
) -> None:
    """Without the versions between its own and the latest, Lance lets a stale writer undo deletes.

    The default margin keeps them, so the writer is refused as it should be.
    """
    root = tables.create(tmp_path / "t", number=10)
    tables.overwritten(tmp_path / "old", 3)
    tables.age(tmp_path / "old", 0.05)
    stale = lance.dataset(str(root))
    staged = tables.uncommitted(root, 100)
    tables.delete(root, "id < 3")
    tables.overwrite(root, 50)
    naive = Path(shutil.copytree(root, tmp_path / "native"))
    plan = lakewarden.plan_cleanup(spark, [str(root), str(tmp_path / "old")], keep=1, tasks=2)
    receipt = lakewarden.execute(spark, plan, tasks=2)
    assert removed_versions(receipt) == {"t": 0, "old": 2}
    why = "younger than 1 hour: a writer may still build on it"
    young = {row.version: row.reasons for row in plan.versions.filter("root_id = 0").collect()}
    assert young == {1: why, 2: why, 3: f"head; last 1; {why}"}
    with pytest.raises(OSError, match="conflict"):
        tables.commit(root, staged, read_version=1)
    with pytest.raises(OSError, match="conflict"):
        stale.delete("id < 5")
    assert lance.dataset(str(root)).count_rows() == 3
    native_lets_a_stale_writer_in(naive)


def native_lets_a_stale_writer_in(root: Path) -> None:
    stale = lance.dataset(str(root), version=1)
    staged = tables.uncommitted(root, 100)
    native_cleanup(root, versions=[3, 2])
    # Version 3 is the latest and stays; with it alone the overwrite is still seen.
    with pytest.raises(OSError, match="conflict"):
        lance.LanceDataset.commit(stale, staged, read_version=1)
    tables.append(root, 200)
    native_cleanup(root, versions=[3])
    lance.LanceDataset.commit(stale, staged, read_version=1)


def test_h4_tag_protects_a_reader(tmp_path: Path, clean: Clean) -> None:
    """A reader of an old version has only a tag to hold on to; without one it loses its files."""
    root = tables.overwritten(tmp_path / "t", 4)
    tables.tag(root, "reading", 2)
    tables.age(root, 30)
    reader, unprotected = lance.dataset(str(root), version=2), lance.dataset(str(root), version=1)
    plan, _ = clean(root, keep=1, on_tagged="keep")
    assert reader.to_table().num_rows == 3
    with pytest.raises(ValueError, match=r"Not found|not found"):
        unprotected.to_table()
    assert reasons(plan) == {
        ("main", 1): "", ("main", 2): "tag reading", ("main", 3): "", ("main", 4): "head; last 1",
    }  # fmt: skip
    invariants.assert_nothing_deletable_left(root)


def test_h5_detached_versions_read_after_cleaning(tmp_path: Path, clean: Clean) -> None:
    """Lance takes the files of a detached version with the attached ones, even if it is tagged.

    With `expire_detached` an untagged one goes by age, a tagged one stays.
    """
    for name in ("kept", "expired", "native"):
        root = tables.overwritten(tmp_path / name, 2)
        numbers = [tables.detached(root, 50), tables.detached(root, 60)]
        tables.tag(root, "pinned", numbers[1])
        tables.overwrite(root, 70)
        tables.age(root, 30)
    kept, expired, native = tmp_path / "kept", tmp_path / "expired", tmp_path / "native"
    before = invariants.fingerprints(kept)
    plan, _ = clean(kept, older_than="1d")
    assert {place for place in before if place[1] > 3} <= set(invariants.versions(kept))
    left = {place: known for place, known in before.items() if place[1] > 2}
    invariants.assert_all_versions_read(kept, left)
    invariants.assert_nothing_deletable_left(kept)
    assert sorted(set(reasons(plan).values())) == [
        "", "detached version", "detached version; tag pinned", "head",
    ]  # fmt: skip

    before = invariants.fingerprints(expired)
    clean(expired, older_than="1d", expire_detached=True, on_tagged="keep")
    tagged = lance.dataset(str(expired)).tags.list()["pinned"]["version"]
    left = {place: before[place] for place in [("main", 3), ("main", tagged)]}
    assert set(invariants.versions(expired)) == set(left)
    invariants.assert_all_versions_read(expired, left)
    invariants.assert_nothing_deletable_left(expired)

    native_cleanup(native)
    assert not any(reads(native, place) for place in invariants.versions(native) if place[1] > 3)


@pytest.mark.nightly
def test_h6_shallow_clone_survives_cleaning_its_source(tmp_path: Path, clean: Clean) -> None:
    """LN-23: nothing in the source tells of a clone; it must be read along, in a fleet or named."""
    for lake in ("fleet", "named"):
        source = tables.overwritten(tmp_path / lake / "source", 3)
        tables.index(source)
        tables.delete(source, "id = 20")
        tables.clone(source, tmp_path / lake / "clone", 4)
        second = tables.clone(source, tmp_path / lake / "second", 1)
        tables.append(second, 80)
        tables.clone(second, tmp_path / lake / "third", 2)
        tables.overwrite(source, 70)
        tables.age(tmp_path / lake, 30)
    clones = ("clone", "second", "third")
    before = {
        (lake, name): invariants.fingerprints(tmp_path / lake / name)
        for lake in ("fleet", "named")
        for name in clones
    }
    _, receipt = clean(tmp_path / "fleet", recursive=True, keep=1)
    assert removed_versions(receipt) == {"clone": 0, "second": 1, "source": 5, "third": 0}
    _, receipt = clean(
        tmp_path / "named" / "source",
        keep=1,
        protect=[str(tmp_path / "named" / name) for name in clones],
    )
    assert receipt.removed.old_versions_removed == 5
    for (lake, name), known in before.items():
        left = {place: known[place] for place in invariants.versions(tmp_path / lake / name)}
        assert left
        invariants.assert_all_versions_read(tmp_path / lake / name, left)
        invariants.assert_no_live_file_missing(tmp_path / lake / name)
    native_cleanup(tmp_path / "fleet" / "source")
    assert not reads(tmp_path / "fleet" / "clone", ("main", 4))


def test_refs_and_clones_made_after_the_plan_hold(tmp_path: Path, spark: Any) -> None:
    """Between plan and execution somebody tags, moves a tag, branches, restores or clones."""
    names = ("tagged", "moved", "branched", "restored", "cloned", "untouched")
    for name in names:
        root = tables.overwritten(tmp_path / name, 4)
        tables.tag(root, "here", 4)
        tables.age(root, 30)
    plan = lakewarden.plan_cleanup(
        spark, str(tmp_path), recursive=True, keep=1, min_age="0s", tasks=2
    )
    assert plan.removal.old_versions_removed == 3 * len(names)
    tables.tag(tmp_path / "tagged", "late", 1)
    lance.dataset(str(tmp_path / "moved")).tags.update("here", 1)
    tables.branch(tmp_path / "branched", "late", 1)
    tables.restore(tmp_path / "restored", 1)
    tables.clone(tmp_path / "cloned", tmp_path / "new", 1)
    before = {name: invariants.fingerprints(tmp_path / name) for name in (*names, "new")}
    receipt = lakewarden.execute(spark, plan, tasks=2)
    assert {Path(one.table_key).name for one in receipt.outdated} == set(names) - {"untouched"}
    assert removed_versions(receipt)["untouched"] == 3
    del before["untouched"]
    for name, known in before.items():
        invariants.assert_all_versions_read(tmp_path / name, known)


def test_h7_files_in_extra_bases_go_with_their_version(tmp_path: Path, clean: Clean) -> None:
    """Lance never looks into extra bases, so their files leak; other people's files there stay."""
    plain, rooted = tmp_path / "plain", tmp_path / "rooted"
    root = tables.multi_base(tmp_path / "t", plain, rooted)
    tables.append(root, 20)
    tables.tag(root, "first", 1)
    tables.overwrite(root, 40, target_bases=["plain"])
    tables.overwrite(root, 50, target_bases=["rooted"])
    foreign = {
        tables.orphan(plain, "somebody-elses.lance"),
        tables.orphan(plain, "notes.txt"),
        tables.orphan(rooted, "data/somebody-elses.lance"),
        tables.orphan(rooted, "elsewhere/x.lance"),
    }
    tables.age(tmp_path, 30)
    before = invariants.fingerprints(root)
    assert len(invariants.files(plain) | invariants.files(rooted)) == 8
    _, receipt = clean(root, keep=1, on_tagged="keep")
    assert not receipt.failed
    left = {("main", 1), ("main", 5)}
    assert set(invariants.versions(root)) == left
    invariants.assert_all_versions_read(root, {place: before[place] for place in left})
    invariants.assert_nothing_deletable_left(root, extra=[plain, rooted], allowed=foreign)
    assert all(file.exists() for file in foreign)


def test_h7_clone_cleans_nothing_in_the_extra_bases_of_its_source(
    tmp_path: Path, clean: Clean
) -> None:
    """A clone's going version names files in its source's extra bases, which the source needs."""
    source = tables.multi_base(tmp_path / "source", tmp_path / "plain", tmp_path / "rooted")
    clone = tables.clone(source, tmp_path / "clone", 2)
    tables.overwrite(clone, 90)
    tables.age(tmp_path, 30)
    before = invariants.fingerprints(source)
    _, receipt = clean(clone, keep=1)
    assert receipt.removed.old_versions_removed == 1
    invariants.assert_all_versions_read(source, before)


def test_h8_copying_a_table_strands_no_files(tmp_path: Path, clean: Clean) -> None:
    """Lance stops listing at the age of the oldest kept version; after a copy all ages are equal."""
    original = tables.overwritten(tmp_path / "original", 4)
    tables.index(original)
    tables.delete(original, "id = 30")
    tables.overwrite(original, 70)
    tables.age(original, 30)
    root = Path(shutil.copytree(original, tmp_path / "t", copy_function=shutil.copyfile))
    young = tables.orphan(root, "data/just-written.lance", days=0)
    old = [
        tables.orphan(root, path)
        for path in ("_versions/.tmp_1", "data/.tmp0", "_deletions/9-9-9.arrow",
                     "_transactions/9-x.txn", "_indices/0-0/part.lance", "data/old.lance")
    ]  # fmt: skip
    native = Path(shutil.copytree(root, tmp_path / "native"))
    _, receipt = clean(root, keep=1)
    assert receipt.removed.old_versions_removed == 6
    assert receipt.removed.temporary_files_removed == 2
    assert young.exists()
    assert not any(file.exists() for file in old)
    invariants.assert_nothing_deletable_left(root, allowed=[young])
    native_cleanup(native)
    assert invariants.leftovers(native) - {native / "data/just-written.lance"}


def test_h9_commit_between_plan_and_execution_keeps_its_files(
    tmp_path: Path, spark: Any, clean: Clean
) -> None:
    """With `delete_unverified` Lance deletes the files of a write in progress, then accepts the
    commit that names them.  A commit after our plan is seen before anything is deleted."""
    root = tables.overwritten(tmp_path / "t", 3)
    other = tables.overwritten(tmp_path / "other", 3)
    tables.age(tmp_path, 30)
    native = Path(shutil.copytree(root, tmp_path / "native"))
    staged = tables.uncommitted(root, 100)
    plan = lakewarden.plan_cleanup(
        spark, [str(root), str(other)], keep=1, min_age="0s", delete_unverified=True, tasks=2
    )
    assert plan.tables[0].removal.data_files_removed == 3
    tables.commit(root, staged, read_version=3)
    before = invariants.fingerprints(root)
    receipt = lakewarden.execute(spark, plan, tasks=2)
    assert [one.table_key for one in receipt.outdated] == [str(root)]
    assert removed_versions(receipt) == {"t": 0, "other": 2}
    invariants.assert_all_versions_read(root, before)
    # Nothing changed since this plan, so it is carried out.
    _, receipt = clean(root, keep=1, delete_unverified=True)
    assert receipt.removed.data_files_removed == 2
    native_accepts_a_commit_of_deleted_files(native)


def native_accepts_a_commit_of_deleted_files(root: Path) -> None:
    staged = tables.uncommitted(root, 100)
    native_cleanup(root, delete_unverified=True)
    tables.commit(root, staged, read_version=3)
    assert not reads(root, ("main", 4))


@pytest.mark.nightly
def test_h10_tagged_versions_never_stall_cleaning(tmp_path: Path, clean: Clean) -> None:
    """Lance's hook gives up for ever at the first tagged version; `on_tagged` decides here."""
    root = tables.overwritten(tmp_path / "t", 3)
    tables.tag(root, "release", 1)
    tables.age(root, 30)
    plan, receipt = clean(root, keep=1)
    assert plan.tables[0].error_kind == "tagged_version"
    assert "tag release" in str(plan.tables[0].error)
    assert receipt.removed.files_removed == 0
    for number in (4, 5):
        tables.overwrite(root, number * 10)
        tables.age(root, 30)
        _, receipt = clean(root, keep=1, on_tagged="keep")
        assert set(invariants.versions(root)) == {("main", 1), ("main", number)}
    with pytest.raises(OSError, match="tagged"):
        native_cleanup(root, error_if_tagged_old_versions=True)


def test_h11_version_where_a_branch_starts_stays_whole(tmp_path: Path, clean: Clean) -> None:
    """Lance keeps the manifest but only the files the branch still needs, so reading it can fail."""
    for name in ("t", "native"):
        root = tables.create(tmp_path / name)
        tables.append(root, 10)
        leaf = tables.branch(root, "dev", 2)
        tables.overwrite(leaf, 20)
        tables.index(leaf)
        tables.overwrite(root, 30)
        tables.age(root, 30)
    root, native = tmp_path / "t", tmp_path / "native"
    before = invariants.fingerprints(root)
    transaction = next(root.glob("_transactions/1-*.txn"))
    plan, _ = clean(root, keep=1)
    left = {place: known for place, known in before.items() if place != ("main", 1)}
    assert set(invariants.versions(root)) == set(left)
    invariants.assert_all_versions_read(root, left)
    assert reasons(plan)["main", 2] == "branch dev starts here"
    assert transaction.exists()
    # Once the branch itself lets go of its start, the parent's version goes as well.
    clean(root, keep=1, branch="dev")
    clean(root, keep=1)
    assert ("main", 2) not in set(invariants.versions(root))
    invariants.assert_all_versions_read(
        root, {place: before[place] for place in [("main", 3), ("dev", 4)]}
    )
    invariants.assert_nothing_deletable_left(root)
    lance.dataset(str(native)).checkout_version(("dev", None)).cleanup_old_versions(
        **EVERYTHING_OLD
    )
    native_cleanup(native)


def test_h12_files_are_counted_once_however_often_a_plan_is_executed(
    tmp_path: Path, spark: Any, clean: Clean
) -> None:
    """Lance counts a file that another cleaner took as its own; the sum then exceeds the table."""
    root = tables.overwritten(tmp_path / "t", 5)
    tables.age(root, 30)
    files, size = invariants.files(root), _size(root)
    plan, first = clean(root, keep=1)
    second = lakewarden.execute(spark, plan, tasks=2)
    assert first.removed == plan.removal
    assert first.removed.files_removed == len(files - invariants.files(root))
    assert first.removed.bytes_removed == size - _size(root)
    assert second.removed.files_removed == 0
    assert not second.failed


def _size(root: Path) -> int:
    return sum(file.stat().st_size for file in root.rglob("*") if file.is_file())


@pytest.mark.nightly
@pytest.mark.parametrize("defer", [False, True])
def test_h13_compaction_that_remapped_indices_is_cleaned(
    tmp_path: Path, clean: Clean, defer: bool
) -> None:
    """pylance cannot show the transaction of such a compaction; we do not need to see it."""
    root = tables.appended(tmp_path / "t", 4)
    tables.index(root)
    tables.compact(root, defer_index_remap=defer)
    tables.append(root, 90)
    tables.age(root, 30)
    before = invariants.fingerprints(root)
    if not defer:
        with pytest.raises(TypeError):
            lance.dataset(str(root)).get_transactions(5)
    clean(root, keep=2)
    left = set(invariants.versions(root))
    assert len(left) == 2
    invariants.assert_all_versions_read(root, {place: before[place] for place in left})
    invariants.assert_no_live_file_missing(root)
    invariants.assert_nothing_deletable_left(root)


@pytest.mark.parametrize("trouble", ["tag on a missing version", "tagged version", "branch rule"])
def test_clone_that_cannot_be_decided_still_protects_its_source(
    tmp_path: Path, clean: Clean, trouble: str
) -> None:
    """Whatever stops a table from being cleaned, its versions still need the files they name."""
    source = tables.overwritten(tmp_path / "source", 3)
    clone = tables.clone(source, tmp_path / "clone", 1)
    rules: dict[str, Any] = {"keep": 1}
    if trouble == "tag on a missing version":
        tables.tag(clone, "x", 1)
        tag = clone / "_refs/tags/x.json"
        tag.write_text(tag.read_text().replace('"version": 1', '"version": 7'))
    elif trouble == "tagged version":
        tables.tag(clone, "x", 1)
        tables.overwrite(clone, 80)
    else:
        tables.append(tables.branch(source, "dev", 3), 90)
        rules["branch"] = "dev"
        tables.append(source, 95)
        tables.restore(source, 2)
    tables.age(tmp_path, 30)
    before = {root: invariants.fingerprints(root) for root in (source, clone)}
    plan, _ = clean(tmp_path, recursive=True, **rules)
    assert plan.tables[0].error is not None
    invariants.assert_all_versions_read(clone, before[clone])
    left = {place: before[source][place] for place in invariants.versions(source)}
    invariants.assert_all_versions_read(source, left)


def test_clone_of_a_newer_lance_still_protects_its_source(tmp_path: Path, clean: Clean) -> None:
    """We cannot read its manifest, but a newer Lance can: what it needs of its source must stay."""
    source = tables.overwritten(tmp_path / "source", 3)
    clone = tables.clone(source, tmp_path / "clone", 1)
    manifest = next(clone.glob("_versions/*.manifest"))
    data, flag = manifest.read_bytes(), b"\x48\x80\x80\x80\x80\x01"  # field 9, bit 28
    (start,) = struct.unpack_from("<q", data, len(data) - 16)
    (length,) = struct.unpack_from("<I", data, start)
    longer = struct.pack("<I", length + len(flag))
    manifest.write_bytes(data[:start] + longer + data[start + 4 : -16] + flag + data[-16:])
    tables.age(tmp_path, 30)
    before = invariants.files(source)
    plan, receipt = clean(tmp_path, recursive=True, keep=1)
    assert plan.tables[0].error_kind == "unsupported_feature"
    assert invariants.files(source) == before
    assert receipt.tables[1].error is not None
