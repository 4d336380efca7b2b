"""Lance tables on their own: rows and old versions stay, files become few, indices whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from lakewarden.errors import ErrorKind, Exit
from lakewarden.formats.lance import compacting
from lakewarden.formats.lance.rehearsal import Rehearsal, Version
from lakewarden.packing import Rules
from lakewarden.testing import tables
from tests.optimize.tuning import (
    Tuner,
    add,
    alone,
    everything,
    in_pieces,
    rows,
    some,
    unindexed,
    uses_index,
)

pytestmark = pytest.mark.spark


def test_small_files_become_one_and_old_versions_stay(tuner: Tuner, tmp_path: Path) -> None:
    table = in_pieces(tmp_path / "t.lance")
    before, versions = rows(lance.dataset(str(table))), lance.dataset(str(table)).version
    receipt = tuner.run(alone(table))
    (row,) = receipt.rows
    found = lance.dataset(str(table))
    assert rows(found) == before
    assert len(found.get_fragments()) == 1
    assert (row.fragments_removed, row.fragments_added, row.committed) == (6, 1, True)
    assert row.before is not None
    assert row.after is not None
    assert (row.before.files, row.after.files) == (6, 1)
    assert row.lance_head_version == found.version
    for version in range(1, versions + 1):
        assert lance.dataset(str(table), version=version).count_rows() == 100 * version


def test_a_second_run_makes_no_version(tuner: Tuner, tmp_path: Path) -> None:
    table = in_pieces(tmp_path / "t.lance")
    tables.index(table)
    add(table, 600)
    tuner.run(alone(table))
    there, version = everything(table), lance.dataset(str(table)).version
    receipt = tuner.run(alone(table))
    assert [row.committed for row in receipt.rows] == [False]
    assert lance.dataset(str(table)).version == version
    assert everything(table) == there


def test_deleted_rows_are_written_out_from_a_share_on(tuner: Tuner, tmp_path: Path) -> None:
    table = tables.create(tmp_path / "t.lance", number=100)
    tables.delete(table, "id < 5")
    assert not tuner.plan(alone(table)).jobs[0].pieces
    tables.delete(table, "id < 15")
    (row,) = tuner.run(alone(table)).rows
    assert row.after is not None
    assert (row.after.rows, row.after.deleted_rows, row.after.delete_files) == (85, 0, 0)


def indexed(table: Path) -> Path:
    """Index a scalar, a text and a vector column, then add rows that no index covers."""

    def batch(start: int, number: int = 300) -> pa.Table:
        vectors = np.random.default_rng(start).random(number * 8, dtype="f4")
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors), 8)
        return some(start, number).append_column("v", column)

    found = lance.write_dataset(batch(0), str(table))
    found.create_scalar_index("id", "BTREE")
    found.create_scalar_index("text", "INVERTED")
    found.create_index("v", "IVF_PQ", num_partitions=1, num_sub_vectors=2)
    for start in (300, 600):
        lance.write_dataset(batch(start), str(table), mode="append")
    return table


def test_indices_cover_everything_afterwards(tuner: Tuner, tmp_path: Path) -> None:
    table = indexed(tmp_path / "t.lance")
    found = lance.dataset(str(table))
    names = ("id_idx", "text_idx", "v_idx")
    assert [unindexed(found, name) for name in names] == [2, 2, 2]
    words = rows_of(found.to_table(full_text_query="word3", columns=["id"]))
    (row,) = tuner.run(alone(table)).rows
    assert row.reindexed
    assert row.after is not None
    assert [(one.unindexed_rows, one.rows) for one in row.after.indices] == [(0, 900)] * 3
    found = lance.dataset(str(table))
    assert [unindexed(found, name) for name in names] == [0, 0, 0]
    assert uses_index(found, "id = 750")
    assert found.to_table(filter="id = 750").column("id").to_pylist() == [750]
    assert rows_of(found.to_table(full_text_query="word3", columns=["id"])) == words
    wanted = found.to_table(filter="id = 820", columns=["v"]).column("v")[0].as_py()
    nearest = found.to_table(nearest={"column": "v", "q": wanted, "k": 5, "refine_factor": 20})
    assert 820 in nearest.column("id").to_pylist()


def test_a_table_whose_indices_are_mapped_later_still_finds_every_row(
    tuner: Tuner, tmp_path: Path
) -> None:
    """Lance's own compaction, which does not look for that, ends with an index that finds nothing."""
    table = in_pieces(tmp_path / "t.lance", 12)
    tables.index(table)
    found = lance.dataset(str(table))
    found.optimize.compact_files(target_rows_per_fragment=300, defer_index_remap=True)
    assert compacting.moves_later(lance.dataset(str(table)))
    for start in range(1200, 1800, 100):
        add(table, start)
    found = lance.dataset(str(table))
    before = rows(found)
    (row,) = tuner.run(alone(table)).rows
    assert row.fragments_removed > 6
    found = lance.dataset(str(table))
    assert rows(found) == before
    assert uses_index(found, "id = 750")
    for number in range(0, 1800, 50):
        assert found.to_table(filter=f"id = {number}").column("id").to_pylist() == [number]


def test_nothing_is_mapped_at_once_if_somebody_has_begun_to_do_it_later(tmp_path: Path) -> None:
    table = in_pieces(tmp_path / "t.lance", 12)
    tables.index(table)
    found = lance.dataset(str(table))
    version = Version(str(table), found.version)
    work = compacting.plan(found, Rules())
    results = [compacting.rewrite(version, piece.task) for piece in work.pieces]
    found.optimize.compact_files(
        target_rows_per_fragment=300, defer_index_remap=True, excluded_fragment_ids=[0, 1, 2]
    )
    head = lance.dataset(str(table))
    done = compacting.commit(
        version, lambda number: lance.dataset(str(table), version=number), results
    )
    assert done.fragments_removed == 0
    assert done.lost == tuple(results)
    assert lance.dataset(str(table)).version == head.version


def rows_of(found: pa.Table) -> list[int]:
    return sorted(found.column("id").to_pylist())


def test_indices_are_restored_when_there_is_nothing_to_compact(
    tuner: Tuner, tmp_path: Path
) -> None:
    table = in_pieces(tmp_path / "t.lance", 2)
    tables.index(table)
    add(table, 200)
    (row,) = tuner.run(alone(table), min_files=50).rows
    assert (row.fragments_removed, row.committed, row.reindexed) == (0, True, True)
    found = lance.dataset(str(table))
    assert unindexed(found, "id_idx") == 0
    assert found.read_transaction(found.version).transaction_properties == {
        "lakewarden.maintenance": "optimize"
    }


def test_what_a_worker_rehearses_is_what_is_committed(tmp_path: Path) -> None:
    table = indexed(tmp_path / "t.lance")
    version = Version(str(table), lance.dataset(str(table)).version)
    there = everything(table)
    rehearsal = Rehearsal(version)
    seen = rehearsal.open()
    seen.optimize.optimize_indices()
    assert rehearsal.made
    expected = described(seen)
    told = seen.read_transaction(seen.version)
    rehearsal.forget()
    # Nobody has seen it, and nothing is left of it but the files of the index.
    assert lance.dataset(str(table)).version == version.number
    assert {name.partition("/")[0] for name in everything(table) - there} == {"_indices"}
    lance.LanceDataset.commit(str(table), told, read_version=version.number)
    found = lance.dataset(str(table))
    assert described(found) == expected


def described(found: Any) -> list[tuple[Any, ...]]:
    """Return everything that Lance tells of a table's indices."""
    parts = ("uuid", "dataset_version_at_last_update", "size_bytes", "base_id", "index_version")
    return sorted(
        (
            index.name,
            index.type_url,
            tuple(index.fields),
            json.dumps(index.details, sort_keys=True, default=str),
            sorted(
                (*(getattr(one, part) for part in parts), *one.fragment_ids)
                for one in index.segments
            ),
        )
        for index in found.describe_indices()
    )


@pytest.mark.parametrize("kind", ["old", "blobs"])
def test_tables_of_every_kind(tuner: Tuner, tmp_path: Path, kind: str) -> None:
    if kind == "old":
        table = tables.old_naming(tmp_path / "t.lance", 4)
        tables.index(table)
        tables.append(table, 900)
    else:
        table = tables.blobs(tmp_path / "t.lance", 0)
        for start in (10, 20):
            tables.blobs(table, start, mode="append")
    before = contents(lance.dataset(str(table)))
    receipt = tuner.run(alone(table))
    assert [row.error for row in receipt.rows] == [None]
    found = lance.dataset(str(table))
    assert contents(found) == before
    assert len(found.get_fragments()) == 1
    if kind == "old":
        assert unindexed(found, "id_idx") == 0


def contents(found: Any) -> list[Any]:
    """Return all values, of blobs the bytes."""
    blobs = [
        field.name
        for field in found.schema
        if field.name != "id" and not pa.types.is_string(field.type)
    ]
    if not blobs:
        return sorted(rows(found).elements())
    count = found.count_rows()
    ids = found.to_table(columns=["id"]).column("id").to_pylist()
    bytes_of = [blob.read() for blob in found.take_blobs(blobs[0], indices=list(range(count)))]
    return sorted(zip(ids, bytes_of, strict=True))


# -- others beside it ------------------------------------------------------------------------------


def test_a_row_deleted_after_the_plan_stays_deleted(tuner: Tuner, tmp_path: Path) -> None:
    table = in_pieces(tmp_path / "t.lance")
    planned = tuner.plan(alone(table))
    tables.delete(table, "id = 250")
    receipt = tuner.execute(planned)
    found = lance.dataset(str(table))
    assert receipt.exit_code is Exit.DONE
    assert found.count_rows() == 599
    assert found.count_rows("id = 250") == 0
    assert len(found.get_fragments()) == 1


def test_a_task_that_lost_does_not_throw_away_the_others(tmp_path: Path) -> None:
    table = in_pieces(tmp_path / "t.lance", 9)
    found = lance.dataset(str(table))
    size = compacting.shape(found).bytes
    work = compacting.plan(found, Rules(target_bytes=size // 3))
    version = Version(str(table), work.version)
    results = [compacting.rewrite(version, piece.task) for piece in work.pieces]
    assert len(results) == 3
    tables.delete(table, "id = 10")
    add(table, 900)
    done = compacting.commit(
        version, lambda number: lance.dataset(str(table), version=number), results
    )
    assert list(done.lost) == results[:1]
    assert done.fragments_removed == 6
    after = lance.dataset(str(table))
    assert after.count_rows() == 999
    assert sorted(rows(after)) == sorted(rows_between(0, 1000) - {10})
    there = everything(table)
    compacting.discard(version, done.lost)
    gone = there - everything(table)
    assert len(gone) == 1
    assert after.count_rows("id >= 0") == 999


def rows_between(start: int, end: int) -> Any:
    class Rows(set[tuple[int, str]]):
        def __sub__(self, ids: Any) -> Any:
            return {row for row in self if row[0] not in ids}

    return Rows((row["id"], row["text"]) for row in some(start, end - start).to_pylist())


def test_appends_meanwhile_are_kept(tuner: Tuner, tmp_path: Path) -> None:
    table = in_pieces(tmp_path / "t.lance")
    planned = tuner.plan(alone(table))
    add(table, 600)
    tuner.execute(planned)
    assert lance.dataset(str(table)).count_rows() == 700


def test_an_overwrite_meanwhile_wins(tuner: Tuner, tmp_path: Path) -> None:
    table = in_pieces(tmp_path / "t.lance")
    planned = tuner.plan(alone(table))
    lance.write_dataset(some(5000, 10), str(table), mode="overwrite")
    there = everything(table)
    receipt = tuner.execute(planned)
    assert receipt.failed == []
    assert rows(lance.dataset(str(table))) == rows(
        lance.write_dataset(some(5000, 10), str(tmp_path / "other"))
    )
    # What was rewritten for nothing is gone.
    left = {name for name in everything(table) - there if name.startswith("data/")}
    assert left == set()


@pytest.mark.nightly
def test_rows_stay_and_can_be_written_after_cleanup_and_optimize(
    tuner: Tuner, clean: Any, tmp_path: Path
) -> None:
    """XM-9."""
    table = in_pieces(tmp_path / "t.lance")
    tables.index(table)
    before = rows(lance.dataset(str(table)))
    clean(table, keep=1)
    assert tuner.run(alone(table)).failed == []
    clean(table, keep=1)
    assert rows(lance.dataset(str(table))) == before
    add(table, 600)
    tables.delete(table, "id = 3")
    found = lance.dataset(str(table))
    assert found.count_rows() == 699
    assert found.to_table(filter="id = 605").num_rows == 1


# -- what is left alone ----------------------------------------------------------------------------


def test_a_table_that_lance_would_clean_is_left_alone(tuner: Tuner, tmp_path: Path) -> None:
    table = in_pieces(tmp_path / "t.lance")
    lance.dataset(str(table)).update_config(
        {"lance.auto_cleanup.interval": "1000", "lance.auto_cleanup.older_than": "0s"}
    )
    there = everything(table)
    (row,) = tuner.run(alone(table)).rows
    assert (row.skipped, row.committed) == ("auto_cleanup_configured", False)
    assert everything(table) == there


def test_a_table_of_a_warehouse_is_refused(tuner: Tuner, lake: Any) -> None:
    lake.fill("t")
    receipt = tuner.run(alone(lake.path("t")))
    assert receipt.rows[0].error_kind == ErrorKind.IN_WAREHOUSE.value
    assert receipt.exit_code is Exit.REFUSED


def test_trouble_with_one_table_is_that_tables(tuner: Tuner, tmp_path: Path) -> None:
    good, bad = in_pieces(tmp_path / "good.lance"), in_pieces(tmp_path / "bad.lance")
    next((bad / "data").iterdir()).unlink()
    receipt = tuner.run(alone(tmp_path, recursive=True))
    by_key = {Path(row.table_key).name: row for row in receipt.rows}
    assert by_key["good.lance"].committed
    assert by_key["bad.lance"].error is not None
    assert receipt.exit_code is Exit.PARTIAL
    assert len(lance.dataset(str(good)).get_fragments()) == 1


def test_the_budget_goes_where_it_gains_most(tuner: Tuner, tmp_path: Path) -> None:
    many, few = in_pieces(tmp_path / "many.lance", 12), in_pieces(tmp_path / "few.lance", 2)
    size = compacting.shape(lance.dataset(str(many))).bytes
    receipt = tuner.run(alone(many, few), max_bytes=size)
    assert [row.committed for row in receipt.rows] == [True, False]
    assert [row.deferred for row in receipt.rows] == [0, 1]


def test_only_tables_that_are_wanted(tuner: Tuner, tmp_path: Path) -> None:
    for name in ("a", "b", "deep/c"):
        in_pieces(tmp_path / f"{name}.lance", 3)
    place = alone(tmp_path, recursive=True, only=("a.lance", "c.*"))
    assert [Path(row.table_key).name for row in tuner.plan(place).rows] == ["a.lance", "c.lance"]
