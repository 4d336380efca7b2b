"""Which changes get along, and that Lance's own rules say the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance import LanceOperation
from lance.commit import CommitConflictError
from lance.fragment import write_fragments
from lance.schema import LanceSchema

from lakewarden.errors import Conflict, ErrorKind
from lakewarden.warehouse.conflicts import RULES, Rule, check, clashes
from lakewarden.warehouse.manifest import CONTENT, MAIN, Change, Operation, Pin
from tests.warehouse.small import append, content, create, logged, pin, ref, transaction

TABLE = [*sorted(CONTENT), Operation.CREATE, Operation.DROP, Operation.UNDROP, Operation.RENAME,
         Operation.PROPERTIES]  # fmt: skip
NAMES = {"a": ("db", "events"), "b": ("users",)}


def change(operation: Operation, number: str = "a") -> Change:
    """Return a change of a table; a name or a property is its own if it needs one."""
    match operation:
        case Operation.CREATE:
            return create(number)
        case Operation.UNDROP | Operation.RENAME:
            return Change(operation, number, name=(f"{number} by {operation}",))
        case Operation.PROPERTIES:
            return Change(operation, number, properties={number: "1"})
        case _:
            return Change(operation, number, pin(1), pin(2))


def rule(ours: Change, theirs: Change, our_branch: str = MAIN, their_branch: str = MAIN) -> Rule:
    """Return what becomes of ours after theirs."""
    found = [
        clash.rule
        for clash in clashes(
            transaction(ours, branch=our_branch), [logged(8, theirs, branch=their_branch)]
        )
    ]
    return found[0] if found else Rule.STANDS


# -- the table -----------------------------------------------------------------------------------


def test_there_is_a_rule_for_every_pair_and_no_other() -> None:
    assert set(RULES) == {(ours, theirs) for ours in TABLE for theirs in TABLE}
    assert len(RULES) == 15 * 15


@pytest.mark.parametrize(
    ("ours", "theirs", "wanted"),
    [
        ("append", "append", "rebases"),
        ("append", "overwrite", "never"),
        ("append", "drop", "never"),
        ("append", "rename", "stands"),
        ("overwrite", "append", "rebases"),
        ("overwrite", "overwrite", "again"),
        ("delete", "delete", "rebases if apart"),
        ("update", "rewrite", "rebases if apart"),
        ("merge", "append", "again"),
        ("merge", "schema", "never"),
        ("index", "append", "rebases"),
        ("index", "index", "again"),
        ("rewrite", "append", "rebases"),
        ("rewrite", "index", "rebases if apart"),
        ("schema", "delete", "rebases"),
        ("restore", "overwrite", "rebases"),
        ("create", "create", "never"),
        ("drop", "append", "again"),
        ("drop", "drop", "never"),
        ("undrop", "undrop", "never"),
        ("rename", "append", "stands"),
        ("rename", "rename", "again"),
        ("properties", "overwrite", "stands"),
    ],
)
def test_some_rules_to_be_read_aloud(ours: str, theirs: str, wanted: str) -> None:
    assert RULES[Operation(ours), Operation(theirs)] is Rule(wanted)


def test_names_and_properties_do_not_disturb_content() -> None:
    for operation in CONTENT:
        for quiet in (Operation.RENAME, Operation.PROPERTIES):
            assert RULES[operation, quiet] is RULES[quiet, operation] is Rule.STANDS


def test_nothing_stands_beside_a_drop_but_by_doing_it_again() -> None:
    for operation in TABLE:
        assert RULES[operation, Operation.DROP] is Rule.NEVER
        if operation in CONTENT:
            assert RULES[Operation.DROP, operation] is Rule.AGAIN


def test_content_never_just_stands_beside_content() -> None:
    """Lance makes a version on top of another, so at least that must be made again."""
    for ours in CONTENT:
        for theirs in CONTENT:
            assert RULES[ours, theirs] is not Rule.STANDS


def test_fragments_matter_the_same_on_either_side() -> None:
    apart = {pair for pair, found in RULES.items() if found is Rule.APART}
    assert apart == {(theirs, ours) for ours, theirs in apart}


# -- tables, branches, fragments -----------------------------------------------------------------


def test_changes_of_different_tables_always_stand() -> None:
    for ours in TABLE:
        for theirs in TABLE:
            assert rule(change(ours, "a"), change(theirs, "b")) is Rule.STANDS


def test_content_on_different_branches_stands() -> None:
    for ours in CONTENT:
        for theirs in TABLE:
            assert rule(change(ours), change(theirs), MAIN, "dev") is Rule.STANDS
            assert rule(change(theirs), change(ours), "dev", MAIN) is Rule.STANDS


def test_a_rename_holds_on_every_branch() -> None:
    ours, theirs = change(Operation.RENAME), change(Operation.RENAME)
    assert rule(ours, theirs, MAIN, "dev") is Rule.AGAIN


@pytest.mark.parametrize(
    ("ours", "theirs", "wanted"),
    [
        ({1}, {2}, Rule.REBASES),
        ({1, 2}, {2, 3}, Rule.AGAIN),
        (set(), {2}, Rule.REBASES),
        (set(), set(), Rule.REBASES),
        (None, {2}, Rule.AGAIN),
        ({1}, None, Rule.AGAIN),
        (None, None, Rule.AGAIN),
        (None, set(), Rule.AGAIN),
    ],
)
def test_those_that_touch_different_fragments_are_apart(
    ours: set[int] | None, theirs: set[int] | None, wanted: Rule
) -> None:
    def touching(operation: Operation, fragments: set[int] | None) -> Change:
        return content(operation, touches=None if fragments is None else frozenset(fragments))

    for (one, other), found in RULES.items():
        if found is Rule.APART:
            assert rule(touching(one, ours), touching(other, theirs)) is wanted


# -- names ---------------------------------------------------------------------------------------

NAMING = (Operation.CREATE, Operation.UNDROP, Operation.RENAME)


def naming(operation: Operation, number: str, name: str) -> Change:
    made = create(number, name)
    return made if operation is Operation.CREATE else Change(operation, number, name=(name,))


@pytest.mark.parametrize("ours", NAMING)
@pytest.mark.parametrize("theirs", NAMING)
def test_one_name_is_for_one_table(ours: Operation, theirs: Operation) -> None:
    assert rule(naming(ours, "x", "n"), naming(theirs, "y", "n")) is Rule.NEVER
    assert rule(naming(ours, "x", "n"), naming(theirs, "y", "m")) is Rule.STANDS


def test_two_branches_may_each_make_a_table_of_one_name() -> None:
    ours, theirs = create("x", "n"), create("y", "n")
    assert rule(ours, theirs, "dev", MAIN) is rule(ours, theirs, "dev", "other") is Rule.STANDS


def test_a_rename_takes_the_name_on_every_branch() -> None:
    """Otherwise two tables of one branch have the same name, and one of them is not found."""
    assert rule(naming(Operation.RENAME, "x", "n"), create("y", "n"), MAIN, "dev") is Rule.NEVER
    assert rule(create("y", "n"), naming(Operation.RENAME, "x", "n"), "dev", MAIN) is Rule.NEVER


def test_namespaces_are_part_of_a_name() -> None:
    ours = Change(Operation.RENAME, "x", name=("db", "n"))
    assert rule(ours, create("y", "n")) is Rule.STANDS
    assert rule(ours, Change(Operation.UNDROP, "y", name=("db", "n"))) is Rule.NEVER


def test_a_name_that_was_given_up_can_be_taken() -> None:
    ours = create("y", "n")
    assert rule(ours, Change(Operation.DROP, "x")) is Rule.STANDS
    assert rule(ours, Change(Operation.RENAME, "x", name=("m",))) is Rule.STANDS


# -- properties and settings ---------------------------------------------------------------------


@pytest.mark.parametrize("operation", [Operation.PROPERTIES, Operation.SETTINGS])
@pytest.mark.parametrize(
    ("ours", "theirs", "wanted"),
    [
        ({"x": "1"}, {"y": "2"}, Rule.STANDS),
        ({"x": "1"}, {"x": "1", "y": "2"}, Rule.STANDS),
        ({"x": "1"}, {"x": "2"}, Rule.NEVER),
        ({"x": "1"}, {"x": None}, Rule.NEVER),
        ({"x": None}, {"x": "1"}, Rule.NEVER),
        ({"x": None}, {"x": None}, Rule.STANDS),
        ({}, {"x": "1"}, Rule.STANDS),
    ],
)
def test_one_property_has_one_value(
    operation: Operation, ours: dict[str, str | None], theirs: dict[str, str | None], wanted: Rule
) -> None:
    number = "a" if operation is Operation.PROPERTIES else ""
    one, other = (Change(operation, number, properties=some) for some in (ours, theirs))
    assert rule(one, other) is wanted
    assert rule(other, one) is wanted


def test_a_property_has_one_value_on_all_branches() -> None:
    one, other = (Change(Operation.PROPERTIES, "a", properties={"x": value}) for value in "12")
    assert rule(one, other, MAIN, "dev") is Rule.NEVER


def test_settings_have_one_value_on_all_branches() -> None:
    one, other = (Change(Operation.SETTINGS, properties={"x": value}) for value in "12")
    assert rule(one, other, MAIN, "dev") is Rule.NEVER


# -- tags and branches ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [(Operation.TAG, Operation.UNTAG), (Operation.BRANCH, Operation.UNBRANCH)]
)
def test_of_one_ref_there_is_one_change(kind: tuple[Operation, ...]) -> None:
    for ours in kind:
        for theirs in kind:
            assert rule(ref(ours, "x"), ref(theirs, "x")) is Rule.NEVER
            assert rule(ref(ours, "x"), ref(theirs, "y")) is Rule.STANDS


def test_a_tag_and_a_branch_may_share_a_name() -> None:
    for tag in (Operation.TAG, Operation.UNTAG):
        for branch in (Operation.BRANCH, Operation.UNBRANCH):
            assert rule(ref(tag, "x"), ref(branch, "x")) is Rule.STANDS
            assert rule(ref(branch, "x"), ref(tag, "x")) is Rule.STANDS


def test_refs_and_settings_stand_beside_everything_of_tables() -> None:
    whole = [
        ref(Operation.TAG, "x"),
        ref(Operation.UNTAG, "x"),
        ref(Operation.BRANCH, "x"),
        ref(Operation.UNBRANCH, "x"),
        Change(Operation.SETTINGS, properties={"x": "1"}),
    ]
    for one in whole:
        for operation in TABLE:
            assert rule(one, change(operation)) is Rule.STANDS
            assert rule(change(operation), one) is Rule.STANDS


def test_nothing_can_be_done_on_a_branch_that_is_gone() -> None:
    gone = ref(Operation.UNBRANCH, "dev")
    for operation in TABLE:
        assert rule(change(operation), gone, "dev", MAIN) is Rule.NEVER
        assert rule(change(operation), gone, "other", MAIN) is Rule.STANDS
    assert rule(ref(Operation.BRANCH, "leaf", source="dev"), gone) is Rule.NEVER


def test_a_branch_that_somebody_works_on_is_not_deleted_unseen() -> None:
    gone = ref(Operation.UNBRANCH, "dev")
    for operation in TABLE:
        assert rule(gone, change(operation), MAIN, "dev") is Rule.AGAIN
        assert rule(gone, change(operation), MAIN, "other") is Rule.STANDS
    assert rule(gone, ref(Operation.BRANCH, "leaf", source="dev")) is Rule.AGAIN


def test_branches_of_one_source_stand() -> None:
    ours = ref(Operation.BRANCH, "x", source="dev")
    assert rule(ours, ref(Operation.BRANCH, "y", source="dev")) is Rule.STANDS


# -- what is said --------------------------------------------------------------------------------


def test_tables_that_must_be_rebased_are_returned() -> None:
    ours = transaction(append("a"), append("b"), append("c"))
    since = [logged(4, append("a")), logged(5, append("c"), append("d")), logged(6, append("a"))]
    assert check(ours, since, NAMES) == {"a", "c"}
    assert check(ours, [logged(4, append("d"))], NAMES) == frozenset()
    assert check(ours, [], NAMES) == frozenset()


def test_one_that_is_in_the_way_is_enough() -> None:
    ours = transaction(append("a"), append("b"))
    since = [logged(4, append("a")), logged(5, content(Operation.OVERWRITE, "b"))]
    with pytest.raises(Conflict):
        check(ours, since, NAMES)


def test_clashes_come_in_the_order_of_versions() -> None:
    ours = transaction(append("a"), append("b"))
    since = [logged(4, append("b")), logged(5, append("a"), append("b"))]
    found = [(one.logged.version, one.ours.table) for one in clashes(ours, since)]
    assert found == [(4, "b"), (5, "a"), (5, "b")]


@pytest.mark.parametrize(
    ("ours", "theirs", "kind", "advice"),
    [
        (Operation.MERGE, Operation.APPEND, ErrorKind.CONFLICT, True),
        (Operation.APPEND, Operation.DROP, ErrorKind.INCOMPATIBLE, False),
    ],
)
def test_a_conflict_names_both_sides(
    ours: Operation, theirs: Operation, kind: ErrorKind, advice: bool
) -> None:
    mine = transaction(change(ours), id="1234567890", actor="ada", message="nightly load")
    since = [logged(8, change(theirs), id="abcdefghij", actor="bob", message="clear out")]
    with pytest.raises(Conflict) as error:
        check(mine, since, NAMES)
    assert error.value.kind is kind
    for told in ("12345678", "abcdefgh", "ada", "bob", "nightly load", "clear out", "db.events",
                 f"wants {ours} of", f"committed {theirs} of", "version 8", "nothing was committed"):  # fmt: skip
        assert told in error.value.message
    assert ("do it again" in error.value.message) is advice
    assert "\n" not in error.value.message


def test_both_tables_of_one_name_are_named() -> None:
    mine = transaction(create("x", "n"), actor="ada")
    since = [logged(8, Change(Operation.RENAME, "b", name=("n",)), actor="bob")]
    with pytest.raises(Conflict, match=r"ada wants create of n, and .* bob .* rename of n "):
        check(mine, since, NAMES)


def test_a_table_without_a_known_name_is_told_by_its_id() -> None:
    mine = transaction(content(Operation.MERGE, "0b3d"))
    with pytest.raises(Conflict, match="merge of 0b3d"):
        check(mine, [logged(8, append("0b3d"))], NAMES)


def test_settings_that_exclude_each_other_are_the_warehouse() -> None:
    one, other = (Change(Operation.SETTINGS, properties={"x": value}) for value in "12")
    with pytest.raises(Conflict, match="settings of the warehouse"):
        check(transaction(one), [logged(8, other)], NAMES)


# -- what was read -------------------------------------------------------------------------------

READ: dict[str, Pin | None] = {"b": pin(1)}


@pytest.mark.parametrize("operation", [one for one in TABLE if one in CONTENT or "dr" in one])
def test_what_was_read_must_stay_as_it_was(operation: Operation) -> None:
    mine = transaction(append("a"), expects=READ, actor="ada")
    theirs = change(operation, "b")
    with pytest.raises(Conflict) as error:
        check(mine, [logged(8, theirs, actor="bob")], NAMES)
    assert error.value.kind is ErrorKind.CONFLICT
    name = theirs.name[0] if theirs.name else "users"
    for told in ("ada", "bob", name, str(operation), "version 8", "nothing was committed"):
        assert told in error.value.message


def test_a_table_that_was_not_there_must_not_appear() -> None:
    mine = transaction(append("a"), expects={"x": None})
    with pytest.raises(Conflict):
        check(mine, [logged(8, create("x"))], NAMES)


def test_names_and_properties_may_change_after_reading() -> None:
    mine = transaction(append("a"), expects=READ)
    for operation in (Operation.RENAME, Operation.PROPERTIES):
        assert check(mine, [logged(8, change(operation, "b"))], NAMES) == frozenset()


def test_other_tables_and_branches_may_change_after_reading() -> None:
    mine = transaction(append("a"), expects=READ)
    assert check(mine, [logged(8, append("c"))], NAMES) == frozenset()
    assert check(mine, [logged(8, append("b"), branch="dev")], NAMES) == frozenset()


# -- Lance's own rules ---------------------------------------------------------------------------


def rows(start: int, number: int = 4) -> pa.Table:
    ids = pa.array(range(start, start + number), pa.int64())
    return pa.table({"id": ids, "name": ids.cast(pa.string()), "extra": ids})


@dataclass(frozen=True)
class Work:
    """A change that is prepared at a version: of the front fragments, or of those at the back."""

    path: str
    version: int
    back: bool = False

    @property
    def dataset(self) -> Any:
        return lance.dataset(self.path, version=self.version)

    @property
    def fragments(self) -> list[int]:
        return [2, 3] if self.back else [0, 1]

    @property
    def first(self) -> int:
        """The first id in these fragments."""
        return self.fragments[0] * 10

    def without(self, number: int) -> Any:
        """Return the first fragment without one row."""
        return self.dataset.get_fragment(self.fragments[0]).delete(f"id = {number}")

    def new(self, *, mode: str = "append") -> Any:
        data = rows(900 + self.first)
        return write_fragments(data, self.dataset, return_transaction=True, mode=mode)


def delete(work: Work) -> Any:
    return LanceOperation.Delete([work.without(work.first)], [], f"id = {work.first}")


def update(work: Work) -> Any:
    moved = work.first + 1
    return LanceOperation.Update(
        updated_fragments=[work.without(moved)],
        new_fragments=write_fragments(rows(moved, 1), work.path),
        update_mode="rewrite_rows",
    )


def upsert(work: Work) -> Any:
    insert = work.dataset.merge_insert("id").when_matched_update_all()
    made, _ = insert.when_not_matched_insert_all().execute_uncommitted(rows(work.first + 2, 1))
    return made


def merge(work: Work, *, nullable: bool = False) -> Any:
    def column(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({f"more{work.back}": batch["id"]})

    made = [one.merge_columns(column, columns=["id"]) for one in work.dataset.get_fragments()]
    return LanceOperation.Merge([one for one, _ in made], made[0][1], nullable)


def index(work: Work, *, name: str = "") -> Any:
    made = work.dataset.create_index_uncommitted(
        "id", "BTREE", name=name or f"by id {work.back}", fragment_ids=work.fragments
    )
    return LanceOperation.CreateIndex([made], [])


def rewrite(work: Work) -> Any:
    old = [work.dataset.get_fragment(number) for number in work.fragments]
    data = pa.concat_tables(one.to_table() for one in old)
    group = LanceOperation.RewriteGroup(
        [one.metadata for one in old], write_fragments(data, work.path)
    )
    return LanceOperation.Rewrite([group], [])


def drop_column(work: Work, *, nullable: bool = False) -> Any:
    left = LanceSchema.from_pyarrow(work.dataset.schema.remove(2))
    return LanceOperation.Project(left, nullable)


Prepare = Callable[[Work], Any]

#: Changes as Lance's interface for distributed writers makes them.
PLAIN: dict[Operation, Prepare] = {
    Operation.APPEND: Work.new,
    Operation.OVERWRITE: lambda work: work.new(mode="overwrite"),
    Operation.DELETE: delete,
    Operation.UPDATE: update,
    Operation.MERGE: merge,
    Operation.INDEX: index,
    Operation.REWRITE: rewrite,
    Operation.SCHEMA: drop_column,
    Operation.RESTORE: lambda work: LanceOperation.Restore(3 if work.back else 2),
}
#: The same, as other ways make them, and what else we call by those names.
OTHERWISE: dict[str, tuple[Operation, Prepare]] = {
    "upsert": (Operation.UPDATE, upsert),
    "nullable merge": (Operation.MERGE, lambda work: merge(work, nullable=True)),
    "nullable schema": (Operation.SCHEMA, lambda work: drop_column(work, nullable=True)),
    "named index": (Operation.INDEX, lambda work: index(work, name="same")),
    "config": (
        Operation.SCHEMA,
        lambda work: LanceOperation.UpdateConfig(
            config_updates=LanceOperation.UpdateMap({f"key{work.back}": "x"})
        ),
    ),
    "schema metadata": (
        Operation.SCHEMA,
        lambda work: LanceOperation.UpdateConfig(
            schema_metadata_updates=LanceOperation.UpdateMap({f"key{work.back}": "x"})
        ),
    ),
}
ALL: dict[str, tuple[Operation, Prepare]] = {
    **{str(operation): (operation, prepare) for operation, prepare in PLAIN.items()},
    **OTHERWISE,
}
#: What touches certain fragments only.
TOUCHING = {Operation.DELETE, Operation.UPDATE, Operation.REWRITE, Operation.INDEX}

COMMITTED, AGAIN, NEVER = "committed", "again", "never"


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of four fragments, each a version."""
    path = tmp_path_factory.mktemp("conflicts") / "table"
    for number in range(4):
        lance.write_dataset(rows(number * 10), str(path), mode="append" if number else "create")
    return path


def copied(original: Path, parent: Path) -> Path:
    """Return a copy of the table; an earlier one is gone."""
    path = parent / "table"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(original, path)
    return path


def tried(path: Path, prepared: Any, version: int) -> str:
    """Commit what was prepared at a version; tell what became of it."""
    known = {} if isinstance(prepared, lance.Transaction) else {"read_version": version}
    try:
        lance.LanceDataset.commit(str(path), prepared, max_retries=3, **known)
    except CommitConflictError as error:
        return AGAIN if error.retryable else NEVER
    return COMMITTED


def lance_says(path: Path, ours: Prepare, theirs: Prepare, *, apart: bool) -> str:
    """Prepare both changes, commit theirs, then ours."""
    version = lance.dataset(str(path)).version
    mine = ours(Work(str(path), version))
    assert tried(path, theirs(Work(str(path), version, back=apart)), version) == COMMITTED
    return tried(path, mine, version)


def we_say(ours: Operation, theirs: Operation, *, apart: bool) -> str:
    def touching(operation: Operation, *, back: bool) -> Change:
        fragments = frozenset({2, 3} if back else {0, 1}) if operation in TOUCHING else None
        return content(operation, touches=fragments)

    since = [logged(8, touching(theirs, back=apart))]
    try:
        check(transaction(touching(ours, back=False)), since, NAMES)
    except Conflict as error:
        return NEVER if error.kind is ErrorKind.INCOMPATIBLE else AGAIN
    return COMMITTED


#: Cells where we let nobody through whom Lance would: work is done again without need, nothing else.
CAUTIOUS: dict[tuple[str, str, str], str] = {
    ("index", "index", "apart"): "our log does not know the names of indices",
    ("update", "append", "same"): "whether an update inserts by key is not known to our log",
    ("update", "append", "apart"): "whether an update inserts by key is not known to our log",
}


@pytest.mark.parametrize("where", ["same", "apart"])
@pytest.mark.parametrize("theirs", PLAIN, ids=str)
@pytest.mark.parametrize("ours", PLAIN, ids=str)
def test_lance_says_the_same(
    original: Path, tmp_path: Path, ours: Operation, theirs: Operation, where: str
) -> None:
    path = copied(original, tmp_path)
    apart = where == "apart"
    said = lance_says(path, PLAIN[ours], PLAIN[theirs], apart=apart)
    if (ours, theirs, where) in CAUTIOUS:
        assert (said, we_say(ours, theirs, apart=apart)) == (COMMITTED, AGAIN)
    else:
        assert we_say(ours, theirs, apart=apart) == said
    if said == COMMITTED:
        assert lance.dataset(str(path)).version == 6, "both are there"


ASSERTED = "that it leaves nullability alone is said in Lance's transaction and not in ours"
NAMELESS = "our log does not know the names of indices"
#: The same for changes that Lance tells from others, and we do not.
CAUTIOUS_OTHERWISE: dict[tuple[str, str], str] = {
    ("append", "nullable merge"): ASSERTED,
    ("append", "nullable schema"): ASSERTED,
    ("update", "nullable schema"): ASSERTED,
    ("upsert", "nullable schema"): ASSERTED,
    ("nullable schema", "append"): ASSERTED,
    ("nullable schema", "update"): ASSERTED,
    ("nullable schema", "upsert"): ASSERTED,
    ("upsert", "append"): "whether it inserts by key is not known to our log",
    ("index", "named index"): NAMELESS,
    ("named index", "index"): NAMELESS,
}
#: Our log calls these a change of the schema, which they are not; so all of these are cautious.
CONFIGURATION = {"config", "schema metadata"}
#: Cells where Lance lets nobody through whom we would.  Harmless only as far as ours is made again
#: with Lance itself, which then refuses it.
BOLD = {("restore", "schema metadata")}


@pytest.mark.parametrize("ours", ALL)
def test_what_lance_refuses_we_do_not_let_through(
    original: Path, tmp_path: Path, ours: str
) -> None:
    does, prepare = ALL[ours]
    for theirs, (done, prepared) in ALL.items():
        if ours not in OTHERWISE and theirs not in OTHERWISE:
            continue
        for apart in (False, True):
            said = lance_says(copied(original, tmp_path), prepare, prepared, apart=apart)
            we = we_say(does, done, apart=apart)
            if (ours, theirs) in BOLD:
                assert (said, we) == (NEVER, COMMITTED)
            elif (ours, theirs) in CAUTIOUS_OTHERWISE:
                assert (said, we) == (COMMITTED, AGAIN)
            elif {ours, theirs} & CONFIGURATION:
                assert said == COMMITTED or we != COMMITTED, (ours, theirs)
            else:
                assert said == we, (ours, theirs)


def test_lance_says_the_same_after_its_own_compaction(original: Path, tmp_path: Path) -> None:
    """Compaction makes two versions; whoever comes after it meets the second one too."""
    for ours, prepare in PLAIN.items():
        path = copied(original, tmp_path)
        version = lance.dataset(str(path)).version
        prepared = prepare(Work(str(path), version))
        lance.dataset(str(path)).optimize.compact_files()
        assert tried(path, prepared, version) == we_say(ours, Operation.REWRITE, apart=False)


def test_an_upsert_by_primary_key_does_not_pass_an_append(tmp_path: Path) -> None:
    """Made again from its transaction file it has lost its keys, and the table gets a row twice."""
    fields = list(rows(0).schema)
    marked = {"lance-schema:unenforced-primary-key": "true"}
    fields[0] = pa.field("id", pa.int64(), nullable=False, metadata=marked)
    schema = pa.schema(fields)
    path = str(tmp_path / "table")
    stale = lance.write_dataset(rows(0).cast(schema), path)
    upserting = stale.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    lance.write_dataset(rows(900, 1).cast(schema), path, mode="append")
    with pytest.raises(OSError, match="Too many concurrent writers"):
        upserting.conflict_retries(0).execute(rows(900, 1).cast(schema))
    assert we_say(Operation.UPDATE, Operation.APPEND, apart=True) == AGAIN
