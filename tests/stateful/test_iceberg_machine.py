"""Any sequence of writes, refs, expiries and crashes: what is kept of an Iceberg table reads the same."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pyiceberg.table import Table
from pyspark.sql import SparkSession

import lakewarden
from lakewarden.maintenance.plan import Plan
from lakewarden.maintenance.removal import TableReceipt
from lakewarden.testing import iceberg as kit
from lakewarden.testing import iceberg_oracle as oracle

T = "iceberg://lake/db.t"
RULES = st.fixed_dictionaries(
    {},
    optional={
        "keep": st.integers(1, 4),
        "older_than": st.sampled_from(["0s", "5d", "20d", "60d"]),
        "max_ref_age": st.sampled_from(["0s", "10d"]),
        "min_snapshots_to_expire": st.integers(0, 3),
    },
)


class Lake(RuleBasedStateMachine):
    """One table, and everything that can be done to it."""

    refs = Bundle("refs")

    def __init__(self, spark: SparkSession) -> None:
        super().__init__()
        self._spark = spark
        self._directory = tempfile.TemporaryDirectory(prefix="lakewarden-machine-")
        self.root = Path(self._directory.name).resolve()
        self.catalog = kit.catalog(self.root)
        self.next_id = 0
        self.names = 0
        #: What every snapshot held when it was first seen.
        self.known: dict[int, str] = {}
        self.plan: tuple[Plan, str] | None = None
        self.changed = False

    def teardown(self) -> None:
        """Whatever was done, a thorough cleanup and a sweep must be survived."""
        try:
            if self.known:
                self.check_clean({"keep": 1, "older_than": "0s"})
                self.check_sweep()
        finally:
            self.catalog.close()
            self._directory.cleanup()

    @property
    def table(self) -> Table:
        return self.catalog.load_table("db.t")

    def ids(self, number: int = 3) -> int:
        self.next_id += number
        return self.next_id - number

    def name(self, stem: str) -> str:
        self.names += 1
        return f"{stem}{self.names}"

    def any_snapshot(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(kit.ids(self.table)))

    @initialize(
        partitioning=st.sampled_from(["", "identity", "bucket"]),
        version=st.sampled_from([1, 2, 2, 3]),
        log=st.sampled_from(["1", "100"]),
    )
    def create(self, partitioning: str, version: int, log: str) -> None:
        properties = {
            "write.metadata.previous-versions-max": log,
            "write.metadata.delete-after-commit.enabled": str(log == "1").lower(),
        }
        table = kit.create(
            self.catalog, partitioning=partitioning, version=version, properties=properties
        )
        kit.append(table, self.ids())
        kit.overwrite(table, self.ids())
        self.changed = True

    # -- what writers do -----------------------------------------------------------------------

    @rule(number=st.integers(1, 3))
    def append(self, number: int) -> None:
        for _ in range(number):
            kit.append(self.table, self.ids())
        self.changed = True

    @rule()
    def overwrite(self) -> None:
        kit.overwrite(self.table, self.ids())
        self.changed = True

    @precondition(lambda self: not kit._by_hand(self.table) and self.table.scan().to_arrow())
    @rule(back=st.integers(1, 6))
    def delete(self, back: int) -> None:
        held = sorted(self.table.scan().to_arrow()["id"].to_pylist())
        kit.delete(self.table, f"id >= {held[-min(back, len(held))]}")
        self.changed = True

    @precondition(lambda self: self.table.format_version == 2 and self.table.scan().to_arrow())
    @rule(data=st.data())
    def delete_by_position(self, data: st.DataObject) -> None:
        held = sorted(self.table.scan().to_arrow()["id"].to_pylist())
        kit.position_deletes(self.table, [data.draw(st.sampled_from(held))])
        self.changed = True

    @rule()
    def stage(self) -> None:
        kit.stage(self.table, self.ids())
        self.changed = True

    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        table = self.table
        current = table.current_snapshot()
        known, line = set(kit.ids(table)), []
        while current is not None and current.parent_snapshot_id in known:
            line.append(current.parent_snapshot_id)
            current = table.metadata.snapshot_by_id(line[-1])
        if line:
            kit.rollback(table, data.draw(st.sampled_from(line)))
            self.changed = True

    @rule(data=st.data(), shared=st.booleans())
    def statistics(self, data: st.DataObject, shared: bool) -> None:
        table = self.table
        used = [one.statistics_path for one in table.metadata.statistics]
        kit.statistics(table, self.any_snapshot(data), path=used[0] if shared and used else None)
        kit.partition_statistics(table, self.any_snapshot(data))

    @rule()
    def evolve_schema(self) -> None:
        kit.add_column(self.table, self.name("extra"))

    @precondition(lambda self: self.table.spec().is_unpartitioned())
    @rule(partitioning=st.sampled_from(["identity", "bucket", "day"]))
    def evolve_spec(self, partitioning: str) -> None:
        kit.repartition(self.table, partitioning)

    # -- refs ----------------------------------------------------------------------------------

    @rule(target=refs, data=st.data(), limit=st.sampled_from([None, 1000, 10 * kit.DAY_MS]))
    def tag(self, data: st.DataObject, limit: int | None) -> str:
        name = self.name("tag")
        kit.tag(self.table, name, self.any_snapshot(data), max_ref_age_ms=limit)
        return name

    @rule(target=refs, data=st.data(), keep=st.sampled_from([0, 1, 2]))
    def branch(self, data: st.DataObject, keep: int) -> str:
        name = self.name("branch")
        limits = {"min_snapshots_to_keep": keep} if keep else {}
        kit.branch(self.table, name, self.any_snapshot(data), **limits)
        return name

    @rule(name=refs)
    def commit_to_branch(self, name: str) -> None:
        if name.startswith("branch") and name in self.table.refs():
            kit.append(self.table, self.ids(), branch=name)
            self.changed = True

    @rule(name=consumes(refs))
    def unref(self, name: str) -> None:
        if name in self.table.refs():
            kit.unref(self.table, name)
            self.changed = True

    # -- time, crashes and others --------------------------------------------------------------

    @rule(days=st.sampled_from([3, 8, 40]))
    def backdate(self, days: int) -> None:
        kit.backdate(self.table, days)

    @rule(where=st.sampled_from(["data/x.parquet", "metadata/x-m0.avro", "metadata/_x", "y/z"]))
    def crash(self, where: str) -> None:
        kit.orphan(self.table.location(), where.replace("x", self.name("x")))

    @rule(data=st.data())
    def expire_metadata_only(self, data: st.DataObject) -> None:
        """Somebody uses PyIceberg's expiry, which leaves all files."""
        table = self.table
        held = {ref.snapshot_id for ref in table.refs().values()}
        free = [one for one in kit.ids(table) if one not in held]
        if free:
            table.maintenance.expire_snapshots().by_id(data.draw(st.sampled_from(free))).commit()

    # -- ours ----------------------------------------------------------------------------------

    @precondition(lambda self: self.changed)
    @rule(rules=RULES)
    def clean(self, rules: dict[str, Any]) -> None:
        self.check_clean(rules)

    @precondition(lambda self: self.changed)
    @rule()
    def sweep(self) -> None:
        self.check_sweep()

    @precondition(lambda self: self.changed and self.plan is None)
    @rule(rules=RULES, orphans=st.booleans())
    def save(self, rules: dict[str, Any], orphans: bool) -> None:
        """Make a plan that is executed some steps later."""
        directory = str(self.root / self.name("plan"))
        made = self.orphans() if orphans else self.expiry(rules)
        lakewarden.save_plan(made, directory)
        self.plan = made, directory
        self.changed = False

    @precondition(lambda self: self.plan is not None)
    @rule()
    def apply(self) -> None:
        assert self.plan is not None
        _, directory = self.plan
        self.plan = None
        before = self.table
        refs = before.refs()
        receipt = self.execute(lakewarden.load_plan(self._spark, directory))
        note(f"applied: {receipt}")
        after = self.table.refs()
        if receipt.error is None:
            assert refs.keys() - after.keys() <= set(receipt.expired_refs)
        else:
            assert after == refs

    def expiry(self, rules: dict[str, Any]) -> Plan:
        catalog = {"lake": self.catalog}
        return lakewarden.plan_cleanup(self._spark, T, catalog=catalog, tasks=2, **rules)

    def orphans(self) -> Plan:
        return lakewarden.plan_orphans(
            self._spark, T, catalog={"lake": self.catalog}, tasks=2, older_than="0s",
            unsafe_below_floor=True,
        )  # fmt: skip

    def execute(self, plan: Plan) -> TableReceipt:
        catalog = {"lake": self.catalog}
        return lakewarden.execute(self._spark, plan, catalog=catalog, tasks=2).tables[0]

    def check_clean(self, rules: dict[str, Any]) -> None:
        """Clean, and compare with what the plan said and with what should be gone."""
        self.changed = False
        reach, was = oracle.reachable(self.table), set(kit.ids(self.table))
        plan = self.expiry(rules)
        assert plan.tables[0].error is None, plan.tables[0].error
        kept = {row.version for row in plan.versions.filter("kept").collect()}
        receipt = self.execute(plan)
        note(f"{rules}: {receipt}")
        assert receipt.error is None, receipt.error
        table = self.table
        assert set(kit.ids(table)) == kept
        assert receipt.removed.old_versions_removed == len(was) - len(kept)
        left = {path for path in oracle.leftovers(reach, table) if Path(path).exists()}
        assert not left, f"left behind: {sorted(left)}"
        assert not list(kit.local(table.location()).glob("metadata/_lakewarden/*"))

    def check_sweep(self) -> None:
        """Remove orphans; what is left and not named is hidden."""
        self.changed = False
        receipt = self.execute(self.orphans())
        assert receipt.error is None, receipt.error
        left = {Path(path).name for path in oracle.unreferenced(self.table)}
        assert all(name.startswith(("_", ".")) for name in left), f"left behind: {sorted(left)}"

    @invariant()
    def nothing_is_lost(self) -> None:
        if not self.catalog.namespace_exists("db"):
            return
        table = self.table
        oracle.assert_intact(table, self.known)
        self.known = oracle.fingerprints(table)


def test_lake(spark: SparkSession) -> None:
    nightly = settings.get_current_profile_name() == "nightly"
    run_state_machine_as_test(
        lambda: Lake(spark),  # type: ignore[arg-type]
        settings=settings(
            max_examples=300 if nightly else 2,
            stateful_step_count=40 if nightly else 14,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=list(Phase) if nightly else [Phase.explicit, Phase.reuse, Phase.generate],
        ),
    )
