"""What happened past the warehouse: told from the table's own versions, and never guessed."""

from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa
import pytest

from lakewarden.errors import ErrorKind
from lakewarden.formats.lance.manifest import Contents, contents
from lakewarden.formats.lance.transaction import operation, properties
from lakewarden.storage.local import LocalStore
from lakewarden.warehouse.drift import (
    Action,
    Classification,
    Line,
    Step,
    action_on,
    classify,
    examine,
    step_between,
)
from lakewarden.warehouse.lance import Namespace
from tests.repair.mending import append, compact, transaction_of
from tests.warehouse.cleaning import Lake
from tests.warehouse.lakes import Tampered, dataset, reopen, write

NO_DRIFT, VERIFIED, SUSPICIOUS, UNVERIFIABLE = Classification
CELLS = {
    # confirm, force: what becomes of no drift, verified, suspicious, unverifiable.
    (False, False): (Action.NO_OP, Action.PREVIEW, Action.PREVIEW, Action.PREVIEW),
    (False, True): (Action.NO_OP, Action.PREVIEW, Action.PREVIEW, Action.PREVIEW),
    (True, False): (Action.NO_OP, Action.HEALED, Action.REFUSED, Action.REFUSED),
    (True, True): (Action.NO_OP, Action.HEALED, Action.FORCED, Action.FORCED),
}
SOUND, DOUBTED = Step("rewrite"), Step("append", "append may change rows")
ROWS = (b"first", b"second")
ID = (b"id",)


def looked_at(lake: Lake, name: str = "t") -> Line:
    """Look at a table on main as repair does."""
    view = reopen(lake.root).read()
    table = view.table(("db", name))
    pin = view.pins[table.id]
    return examine(Line(table, "main", pin, pin), LocalStore())


def operations(line: Line) -> list[str]:
    return [step.operation for step in line.steps]


def told(does: int, **noted: str) -> bytes:
    """Return a transaction that says nothing but its operation and what was noted beside it."""
    found = bytearray()
    for name, value in noted.items():
        pair = b"\n" + bytes([len(name)]) + name.encode() + b"\x12" + bytes([len(value)])
        pair += value.encode()
        found += b"\x22" + bytes([len(pair)]) + pair
    number = does << 3 | 2
    return bytes(found) + bytes([number & 0x7F | 0x80, number >> 7]) + b"\x00"


def holding(
    fragments: tuple[bytes, ...] = ROWS, rows: int | None = 9, columns: tuple[bytes, ...] = ID
) -> Contents:
    return Contents(1, fragments, columns, rows, "")


# -- deciding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("confirm", "force"), list(CELLS))
def test_every_cell_of_the_table_of_actions(confirm: bool, force: bool) -> None:
    done = tuple(action_on(one, confirm=confirm, force=force) for one in Classification)
    assert done == CELLS[confirm, force]


def test_one_doubt_makes_it_suspicious_and_one_unread_version_unverifiable() -> None:
    assert classify([]) is NO_DRIFT
    assert classify([SOUND, SOUND]) is VERIFIED
    assert classify([SOUND, DOUBTED, SOUND]) is SUSPICIOUS
    assert classify([SOUND], "gone") is UNVERIFIABLE
    assert classify([DOUBTED], "gone") is UNVERIFIABLE


def test_a_rewrite_is_believed_if_it_leaves_as_many_rows() -> None:
    rewrite = told(104)
    before = holding()
    assert step_between(before, holding((b"third",)), rewrite) == Step("rewrite")
    fewer = step_between(before, holding((b"third",), 8), rewrite)
    assert fewer == Step("rewrite", "rewrite has made 8 rows of 9")
    others = step_between(before, holding((b"third",), columns=(b"x",)), rewrite)
    assert others.doubt == "rewrite has changed columns"
    # Rows that nobody has counted prove nothing.
    for one, other in ((9, None), (None, 9), (None, None)):
        uncounted = step_between(holding(rows=one), holding((b"third",), other), rewrite)
        assert uncounted.doubt == "rewrite does not tell how many rows there are"


def test_a_reservation_leaves_everything_alone() -> None:
    reserve = told(107)
    assert step_between(holding(), holding(), reserve) == Step("reserve_fragments")
    assert step_between(holding(), holding((b"third",)), reserve).doubt


def test_an_index_is_believed_if_we_made_it_and_nothing_else_changed() -> None:
    ours = told(103, **{"lakewarden.maintenance": "optimize"})
    assert properties(ours) == {"lakewarden.maintenance": "optimize"}
    assert step_between(holding(), holding(), ours) == Step("create_index")
    assert step_between(holding(), holding((b"third",)), ours).doubt
    for other in (
        told(103),
        told(103, **{"lakewarden.maintenance": "yes"}),
        told(103, x="optimize"),
    ):
        assert step_between(holding(), holding(), other).doubt


@pytest.mark.parametrize("does", [100, 101, 102, 105, 106, 108, 109, 110, 111, 112, 113, 114, 199])
def test_nothing_else_is_maintenance_even_if_nothing_seems_to_change(does: int) -> None:
    said = told(does, **{"lakewarden.maintenance": "optimize"})
    step = step_between(holding(), holding(), said)
    assert step.operation == operation(said)
    assert step.doubt


# -- finding ---------------------------------------------------------------------------------------


def test_a_table_at_its_pin_has_not_drifted(lake: Lake) -> None:
    found = looked_at(lake)
    assert (found.classification, found.error) == (NO_DRIFT, None)
    assert found.head is not None
    assert found.head.version == found.pin.version == 3


def test_compaction_is_seen_for_what_it_is(lake: Lake) -> None:
    lake.at("t").delete("id = 2")
    compact(lake.place("t"))
    found = looked_at(lake)
    assert found.classification is VERIFIED
    assert operations(found) == ["reserve_fragments", "rewrite"]
    assert (found.rows_at_pin, found.rows_at_head) == (2, 2)
    assert found.head is not None
    assert (found.pin.version, found.head.version) == (4, 6)


def test_compaction_that_rewrites_an_index_is_seen_for_what_it_is(lake: Lake) -> None:
    """Lance's own reader of transactions does not read this one."""
    lake.at("t").create_scalar_index("id", "BTREE")
    compact(lake.place("t"))
    assert looked_at(lake).classification is VERIFIED


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda one: one.insert(pa.table({"id": [66]})), "append"),
        (lambda one: one.delete("id = 1"), "delete"),
        (lambda one: one.update({"id": "7"}), "update"),
        (lambda one: one.add_columns({"more": "id + 1"}), "merge"),
        (lambda one: one.create_scalar_index("id", "BTREE"), "create_index"),
        (lambda one: one.update_config({"a": "b"}), "update_config"),
        (lambda one: lance.dataset(one.uri, version=1).restore(), "restore"),
        (lambda one: lance.write_dataset(pa.table({"x": [1]}), one.uri, mode="overwrite"),
         "overwrite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_whatever_else_is_written_is_suspicious(lake: Lake, change: object, expected: str) -> None:
    assert callable(change)
    change(lance.dataset(str(lake.place("t"))))
    found = looked_at(lake)
    assert (found.classification, operations(found)) == (SUSPICIOUS, [expected])
    assert len(found.doubts) == 1


def test_one_append_between_compactions_is_suspicious(lake: Lake) -> None:
    place = lake.place("t")
    compact(place)
    append(place, 66)
    compact(place)
    found = looked_at(lake)
    assert found.classification is SUSPICIOUS
    assert operations(found).count("append") == 1
    assert (found.rows_at_pin, found.rows_at_head) == (3, 4)


def test_a_rewrite_that_loses_rows_is_suspicious(lake: Lake) -> None:
    """Lance takes it: that the rows are the same is the writer's word."""
    place = str(lake.place("t"))
    found = lance.dataset(place)
    old = [one.metadata for one in found.get_fragments()]
    new = lance.fragment.write_fragments(pa.table({"id": pa.array([1, 2], pa.int64())}), place)
    group = lance.LanceOperation.RewriteGroup(old_fragments=old, new_fragments=new)
    rewrite = lance.LanceOperation.Rewrite(groups=[group], rewritten_indices=[])
    lance.LanceDataset.commit(place, rewrite, read_version=found.version)
    seen = looked_at(lake)
    assert operations(seen) == ["rewrite"]
    assert seen.classification is SUSPICIOUS
    assert seen.doubts == ["rewrite has made 2 rows of 3"]


def test_an_index_of_optimize_is_verified_and_its_name_alone_is_not(lake: Lake) -> None:
    place = lake.place("t")
    lance.dataset(str(place)).create_scalar_index("id", "BTREE")
    said = transaction_of(place, 4)
    said.write_bytes(told(103, **{"lakewarden.maintenance": "optimize"})[:-3] + said.read_bytes())
    assert looked_at(lake).classification is VERIFIED
    lance.dataset(str(place)).delete("id = 1")
    assert looked_at(lake).classification is SUSPICIOUS


# -- what cannot be read ---------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "garbage", "empty"])
def test_without_its_transaction_a_version_is_unverifiable(lake: Lake, damage: str) -> None:
    place = lake.place("t")
    compact(place)
    said = transaction_of(place, 5)
    if damage == "missing":
        said.unlink()
    else:
        said.write_bytes(b"" if damage == "empty" else b"\xff\xff nonsense")
    found = looked_at(lake)
    assert found.classification is UNVERIFIABLE
    assert operations(found) == ["reserve_fragments"]
    assert found.error is not None
    assert said.name in found.error
    assert "what happened from version 5 on cannot be told" in found.error
    assert found.error_kind is None


def test_what_cannot_be_read_beats_what_is_suspicious(lake: Lake) -> None:
    place = lake.place("t")
    append(place, 66)
    compact(place)
    transaction_of(place, 6).unlink()
    found = looked_at(lake)
    assert (found.classification, operations(found)[0]) == (UNVERIFIABLE, "append")


@pytest.mark.parametrize("damage", ["missing", "cut", "another"])
def test_a_version_that_is_missing_or_damaged_in_between_is_unverifiable(
    lake: Lake, damage: str
) -> None:
    place = lake.place("t")
    compact(place)
    manifest = place / "_versions" / f"{2**64 - 1 - 4:020d}.manifest"
    whole = manifest.read_bytes()
    manifest.unlink()
    if damage == "cut":
        manifest.write_bytes(whole[:-20])
    elif damage == "another":
        manifest.write_bytes((place / "_versions" / f"{2**64 - 1 - 2:020d}.manifest").read_bytes())
    found = looked_at(lake)
    assert found.classification is UNVERIFIABLE
    assert found.error is not None
    assert "from version 4 on" in found.error


def test_a_head_below_the_pin_is_an_error_that_says_what_it_means(lake: Lake) -> None:
    place = lake.place("t")
    (place / "_versions" / f"{2**64 - 1 - 3:020d}.manifest").unlink()
    found = looked_at(lake)
    assert (found.classification, found.error_kind) == (NO_DRIFT, ErrorKind.DAMAGED_VERSION)
    assert found.error is not None
    assert "its newest is 2" in found.error
    assert "lakewarden restore" in found.error
    for one in (place / "_versions").glob("*.manifest"):
        one.unlink()
    gone = looked_at(lake)
    assert gone.error is not None
    assert "there is none" in gone.error


# -- what is not public yet ------------------------------------------------------------------------


def test_what_is_committed_and_not_public_is_no_drift(lake: Lake) -> None:
    tampered = Tampered()
    namespace = Namespace(reopen(lake.root, opener=tampered))
    # Nothing is published: the version waits where it was staged.
    tampered.failing("put_if_absent", "/tables/")
    write(namespace, "append", 4)
    found = looked_at(lake)
    assert found.pin.version == 4
    assert not (lake.place("t") / "_versions" / f"{2**64 - 1 - 4:020d}.manifest").exists()
    assert (found.classification, found.error) == (NO_DRIFT, None)
    # Whoever reads publishes it.
    assert dataset(Namespace(reopen(lake.root))).count_rows() == 4


def test_a_public_name_that_somebody_else_has_taken_is_told_as_such(lake: Lake) -> None:
    place = lake.place("t")
    by_path = lance.dataset(str(place))
    tampered = Tampered()
    namespace = Namespace(reopen(lake.root, opener=tampered))
    tampered.once("put_if_absent", "__manifest/_versions", lambda: by_path.insert(_rows(66)))
    with pytest.raises(Exception, match=r"past the warehouse|cannot be told"), namespace.told():
        write(namespace, "append", 4)
    found = looked_at(lake)
    assert found.error_kind is ErrorKind.DRIFT
    assert found.error is not None
    assert found.pin.path in found.error
    assert Path(place / found.pin.path).exists()


def _rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


def test_equal_contents_are_equal_rows(lake: Lake) -> None:
    """Contents of a version that was only indexed are those of the one before."""
    place = lake.place("t")
    lance.dataset(str(place)).create_scalar_index("id", "BTREE")
    lance.dataset(str(place)).delete("id = 1")
    names = [place / "_versions" / f"{2**64 - 1 - one:020d}.manifest" for one in (3, 4, 5)]
    pinned, indexed, deleted = (contents(one.read_bytes()) for one in names)
    assert (pinned.fragments, pinned.columns) == (indexed.fragments, indexed.columns)
    assert indexed.fragments != deleted.fragments
    assert [pinned.rows, indexed.rows, deleted.rows] == [3, 3, 2]
