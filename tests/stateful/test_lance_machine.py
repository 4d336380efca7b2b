"""Any sequence of writes, refs, clones and cleanups: what a plan keeps reads as it did before."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lance
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pyspark.sql import SparkSession

import lakewarden
from lakewarden.testing import invariants, tables

DETACHED = 1 << 63


class Lake(RuleBasedStateMachine):
    """A directory of tables; the first is `t`, all others are its clones."""

    lines = Bundle("lines")
    tags = Bundle("tags")

    def __init__(self, spark: SparkSession) -> None:
        super().__init__()
        self._spark = spark
        self._directory = tempfile.TemporaryDirectory(prefix="lakewarden-machine-")
        self.lake = Path(self._directory.name).resolve()
        self.next_id = 0
        self.names = 0
        self.reader: tuple[Path, invariants.Place, Any] | None = None
        self.changed = False

    def teardown(self) -> None:
        """Whatever was done, one thorough cleanup must be survived."""
        try:
            if self.roots():
                self.check_clean({"keep": 1, "on_tagged": "keep"}, self.lake / "t", whole=True)
        finally:
            self._directory.cleanup()

    def __repr__(self) -> str:
        return repr({root.name: sorted(invariants.versions(root)) for root in self.roots()})

    def roots(self) -> list[Path]:
        return sorted(path for path in self.lake.iterdir() if path.is_dir())

    def ids(self, number: int = 3) -> int:
        self.next_id += number
        return self.next_id - number

    def name(self, stem: str) -> str:
        self.names += 1
        return f"{stem}{self.names}"

    @initialize(target=lines)
    def create(self) -> Path:
        root = tables.create(self.lake / "t", self.ids())
        for _ in range(2):
            tables.overwrite(root, self.ids())
        return root

    @rule(line=lines, number=st.integers(1, 3))
    def write(self, line: Path, number: int) -> None:
        for _ in range(number):
            tables.append(line, self.ids())
        self.changed = True

    @rule(line=lines)
    def overwrite(self, line: Path) -> None:
        tables.overwrite(line, self.ids())
        self.changed = True

    @rule(line=lines, part=st.integers(2, 5))
    def delete(self, line: Path, part: int) -> None:
        tables.delete(line, f"id % {part} = 0")
        self.changed = True

    @rule(line=lines)
    def index(self, line: Path) -> None:
        tables.index(line)

    @rule(line=lines, defer=st.booleans())
    def compact(self, line: Path, defer: bool) -> None:
        tables.compact(line, defer_index_remap=defer)

    @rule(line=lines, data=st.data())
    def restore(self, line: Path, data: st.DataObject) -> None:
        tables.restore(line, data.draw(st.sampled_from(self.attached(line))))
        self.changed = True

    @rule(line=lines)
    def detach(self, line: Path) -> None:
        if "/tree/" not in str(line):
            tables.detached(line, self.ids())

    @rule(line=lines)
    def leave_behind(self, line: Path) -> None:
        tables.uncommitted(line, self.ids())

    @rule(target=tags, line=lines, data=st.data())
    def tag(self, line: Path, data: st.DataObject) -> tuple[Path, str]:
        root, branch = self.table_of(line)
        version = data.draw(st.sampled_from(self.attached(line)))
        name = self.name("tag")
        tables.tag(root, name, version if branch == "main" else (branch, version))
        return root, name

    @rule(tag=consumes(tags))
    def untag(self, tag: tuple[Path, str]) -> None:
        tables.untag(*tag)

    @rule(target=lines, line=lines, data=st.data())
    def branch(self, line: Path, data: st.DataObject) -> Path:
        root, branch = self.table_of(line)
        version = data.draw(st.sampled_from(self.attached(line)))
        return tables.branch(
            root, self.name("b/"), version if branch == "main" else (branch, version)
        )

    @rule(target=lines, line=lines, data=st.data())
    def clone(self, line: Path, data: st.DataObject) -> Path:
        root, _ = self.table_of(line)
        return tables.clone(
            root, self.lake / self.name("clone"), data.draw(st.sampled_from(self.attached(root)))
        )

    @rule(line=lines, days=st.sampled_from([3, 8, 40]))
    def age(self, line: Path, days: int) -> None:
        tables.age(self.table_of(line)[0], days)

    @rule(line=lines, data=st.data())
    def reopen(self, line: Path, data: st.DataObject) -> None:
        """Somebody opens an old version and goes on reading it."""
        root, branch = self.table_of(line)
        version = data.draw(st.sampled_from(self.attached(line)))
        self.reader = (root, (branch, version), lance.dataset(str(line), version=version))

    @precondition(lambda self: self.changed)
    @rule(
        rules=st.fixed_dictionaries(
            {"on_tagged": st.sampled_from(["keep", "error"]), "expire_detached": st.booleans()},
            optional={
                "keep": st.integers(1, 3),
                "older_than": st.sampled_from(["0s", "5d", "20d"]),
                "delete_unverified": st.booleans(),
            },
        ).filter(lambda rules: "keep" in rules or "older_than" in rules),
        line=lines,
        whole=st.booleans(),
    )
    def clean(self, rules: dict[str, Any], line: Path, whole: bool) -> None:
        """Clean all tables, or one with the others protected; on the line's branch."""
        self.changed = False
        self.check_clean(rules, line, whole=whole)

    def check_clean(self, rules: dict[str, Any], line: Path, *, whole: bool) -> None:
        root, branch = self.table_of(line)
        before = {one: invariants.fingerprints(one) for one in self.roots()}
        others = [str(one) for one in before if one != root]
        where: dict[str, Any] = {"recursive": True} if whole else {"protect": others}
        plan = lakewarden.plan_cleanup(
            self._spark,
            str(self.lake if whole else root),
            **{**rules, **where, "branch": branch, "min_age": "0s", "tasks": 2},
        )
        kept = {place: set[invariants.Place]() for place in before}
        for row in plan.versions.filter("kept").collect():
            version = row.version | DETACHED if row.detached else row.version
            kept[Path(plan.roots[row.root_id].location.uri)].add((row.branch, version))
        receipt = lakewarden.execute(self._spark, plan, tasks=2)
        note(f"{rules} {branch}: {receipt.removed}")
        for table in receipt.tables:
            place = Path(table.table_key)
            if table.error is not None or table.skipped is not None:
                kept[place] = set(before[place])
            assert not table.outdated
        for place, known in before.items():
            assert set(invariants.versions(place)) == kept[place]
            left = {version: known[version] for version in kept[place]}
            invariants.assert_all_versions_read(place, left)
            invariants.assert_no_live_file_missing(place)
        if self.reader is not None and self.reader[1] in kept[self.reader[0]]:
            self.reader[2].to_table()
        self.reader = None

    def table_of(self, line: Path) -> tuple[Path, str]:
        """Return the table a line of versions belongs to, and the name of its branch."""
        root, _, branch = str(line.relative_to(self.lake)).partition("/tree/")
        return self.lake / root, branch or "main"

    def attached(self, line: Path) -> list[int]:
        return [row["version"] for row in lance.dataset(str(line)).version_refs()]


def test_lake(spark: SparkSession) -> None:
    nightly = settings.get_current_profile_name() == "nightly"
    run_state_machine_as_test(
        lambda: Lake(spark),  # type: ignore[arg-type]
        settings=settings(
            max_examples=300 if nightly else 2,
            stateful_step_count=40 if nightly else 20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=list(Phase) if nightly else [Phase.explicit, Phase.reuse, Phase.generate],
        ),
    )
