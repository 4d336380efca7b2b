"""Real processes beside each other: a writer, several cleanups, and power cuts."""

from __future__ import annotations

import json
import random  # noqa: TID251  # the seed is shown when a test fails
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pytest
from hypothesis import settings

import lakewarden
from lakewarden.testing.processes import Acknowledged, copy_tree, started, writer
from lakewarden.testing.tables import DAY
from tests.cli.small import age, contents, make_table, manifest, rows, versions_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.spark]

Clean = Callable[..., tuple[Any, Any]]


def seen(table: Path, version: int) -> Acknowledged:
    """Read a version whole."""
    ids = lance.dataset(str(table), version=version).to_table()["id"].to_pylist()
    return Acknowledged(version, len(ids), sum(ids))


@pytest.mark.nightly
def test_a_writer_without_pause_loses_nothing_to_cleanup_in_a_loop(
    spark: SparkSession, clean: Clean, tmp_path: Path
) -> None:
    table = tmp_path / "t.lance"
    seed = random.randrange(10**6)
    removed, rounds = 0, 0
    with writer(table, log=tmp_path / "writes.log", seed=seed) as beside:
        until = time.monotonic() + 5
        while time.monotonic() < until or rounds < 2 or not removed:
            _, receipt = clean(table, keep=3, min_age="2s")
            for one in receipt.tables:
                assert one.error is None or one.outdated, (seed, one)
                assert one.failed_deletes == 0, (seed, one)
            removed += receipt.removed.old_versions_removed
            rounds += 1
        writes = beside.stop()
    left = versions_of(table)
    assert removed > 0, "the loop had something to do"
    assert len(writes) > 20, "the writer was at work"
    assert left[-1] == writes[-1].version, f"seed {seed}: an acknowledged write is gone"
    by_version = {write.version: write for write in writes}
    for version in left:
        assert seen(table, version) == by_version[version], f"seed {seed}"
    assert removed == writes[-1].version - len(left), "every version is counted once"
    # And the table is in order: a last run brings it down to three versions that read.
    clean(table, keep=3)
    assert versions_of(table) == left[-3:]
    assert [seen(table, version) for version in left[-3:]] == writes[-3:]


@pytest.mark.nightly
def test_cleanups_at_once_count_every_file_once(
    spark: SparkSession, clean: Clean, tmp_path: Path
) -> None:
    table = tmp_path / "t.lance"
    make_table(table, versions=150)
    before = set(contents(table))
    # Slow enough to be still deleting when the others begin.
    slow = ("cleanup", table, "--keep", 3, "--confirm", "--json", "--rate-limit", 50)
    with started(*slow) as other, ThreadPoolExecutor(2) as pool:
        assert other.stage("delete")
        here = [pool.submit(clean, table, keep=3) for _ in range(2)]
        receipts = [one.result()[1] for one in here]
        code, stdout, stderr = other.result()
    assert code == 0, stdout + stderr
    there = json.loads(stdout)["total"]
    assert [table.error for receipt in receipts for table in receipt.tables] == [None, None]
    gone = before - set(contents(table))
    assert versions_of(table) == [148, 149, 150]
    assert all(seen(table, version).rows == 5 for version in (148, 149, 150))
    for name, directory in (
        ("old_versions_removed", "_versions/"),
        ("data_files_removed", "data/"),
        ("transaction_files_removed", "_transactions/"),
    ):
        really = sum(path.startswith(directory) for path in gone)
        assert really == 147
        counted = there[name] + sum(getattr(one.removed, name) for one in receipts)
        assert counted == really, name
    assert any(receipt.removed.files_removed for receipt in receipts), "the others took part"


def rich_table(place: Path) -> Path:
    """Make a table with something of every kind to delete.

    So young that a file goes only while a manifest still names it: the order of deletion matters.
    """
    dataset = make_table(place, versions=40)
    dataset.create_scalar_index("id", "BTREE")
    for step in range(40):
        lance.write_dataset(rows(1000 + step * 5), str(place), mode="append")
    lance.dataset(str(place)).delete("id % 3 = 0")
    for step in range(40):
        lance.write_dataset(rows(5000 + step * 5), str(place), mode="overwrite")
    lance.dataset(str(place)).tags.create("release", 60)
    age(place, 2 * DAY)
    return place


def test_a_cleanup_killed_at_any_moment_is_finished_by_the_next(
    spark: SparkSession, clean: Clean, tmp_path: Path
) -> None:
    original = rich_table(tmp_path / "original.lance")
    kept = [60, 120, 121, 122]
    assert versions_of(original)[-1] == 122
    reads = [seen(original, version) for version in kept]
    undisturbed = copy_tree(original, tmp_path / "undisturbed.lance")
    clean(undisturbed, keep=3, on_tagged="keep")
    assert versions_of(undisturbed) == kept
    expected = names_and_bytes(undisturbed)
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    killed: dict[int, Path] = {}
    files = sum(1 for _ in original.rglob("*"))
    # While data files go, without its workers, while manifests go; one of these by default.
    nightly = settings.get_current_profile_name() == "nightly"
    for number in range(3) if nightly else [chance.randrange(3)]:
        table = copy_tree(original, tmp_path / f"killed-{number}.lance")
        arguments = ("cleanup", table, "--keep", 3, "--on-tagged", "keep", "--confirm")
        with started(*arguments, "--rate-limit", 60) as run:
            assert run.stage("delete")
            while number == 2 and len(list((table / "_versions").glob("*.manifest"))) == 122:
                time.sleep(0.02)  # noqa: TID251  # until manifests begin to go
            while number == 0 and sum(1 for _ in table.rglob("*")) == files:
                time.sleep(0.02)  # noqa: TID251  # until something is gone
            time.sleep(chance.uniform(0.05, 0.6))  # noqa: TID251  # at any moment
            if number == 1:
                run.kill_driver_only()
            else:
                run.kill()
        assert names_and_bytes(table) != expected, f"seed {seed}: it had finished already"
        assert [seen(table, version) for version in kept] == reads, f"seed {seed}, round {number}"
        killed[number] = table
    if 2 in killed:
        assert len(versions_of(killed[2])) < len(versions_of(original)), "manifests were going"
    if 0 in killed:
        assert len(contents(killed[0])) < len(contents(original)), "it was at work"

    targets = [str(place) for place in killed.values()]
    _, receipt = clean(targets, keep=3, on_tagged="keep")
    assert [table.error for table in receipt.tables] == [None] * len(killed)
    for table in killed.values():
        assert names_and_bytes(table) == expected, f"seed {seed}: {table.name}"
        assert [seen(table, version) for version in kept] == reads
    plan = lakewarden.plan_cleanup(spark, targets, keep=3, on_tagged="keep", min_age="0s", tasks=4)
    assert plan.removal.files_removed == 0
    assert manifest(undisturbed, 60).exists()


def names_and_bytes(place: Path) -> dict[str, str]:
    """Return what a directory holds, without times and without directories that stay empty."""
    return {
        name: print_.split()[1]
        for name, print_ in contents(place).items()
        if not print_.endswith("directory")
    }
