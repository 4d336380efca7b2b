"""Any sequence of writes, indices, tags, restores and optimizes: rows stay what a model says."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pyspark.sql import SparkSession

from tests.optimize.tuning import Tuner, alone, rows

pytestmark = [pytest.mark.spark, pytest.mark.nightly]

NIGHTLY = settings.get_current_profile_name() == "nightly"
Rows = Counter[tuple[Any, ...]]


class Table(RuleBasedStateMachine):
    """One table; of every version it is known which rows it holds."""

    def __init__(self, spark: SparkSession) -> None:
        super().__init__()
        self._tuner = Tuner(spark)
        self._directory = tempfile.TemporaryDirectory(prefix="lakewarden-optimize-")
        self.root = Path(self._directory.name) / "t.lance"
        self.known: dict[int, Rows] = {}
        self.tags: dict[str, int] = {}
        self.next_id = 0
        self.changed = False

    def teardown(self) -> None:
        try:
            if self.known:
                self.optimize({}, execute_twice=True)
        finally:
            self._directory.cleanup()

    def __repr__(self) -> str:
        return repr({version: sum(held.values()) for version, held in self.known.items()})

    def open(self, version: int | str | None = None) -> Any:
        return lance.dataset(str(self.root), version=version)

    @property
    def now(self) -> Rows:
        return self.known[max(self.known)]

    def made(self, held: Rows) -> None:
        """Write down what the newest version must hold."""
        self.known[self.open().version] = held
        self.changed = True

    def batch(self, number: int, value: int, start: int | None = None) -> pa.Table:
        first = self.next_id if start is None else start
        self.next_id = max(self.next_id, first + number)
        ids = pa.array(range(first, first + number), pa.int64())
        return pa.table({"id": ids, "value": pa.array([value] * number, pa.int64())})

    @initialize(stable=st.booleans())
    def create(self, stable: bool) -> None:
        first = self.batch(5, 0)
        lance.write_dataset(first, str(self.root), enable_stable_row_ids=stable)
        self.made(counted(first))

    @rule(pieces=st.integers(1, 3), number=st.integers(1, 6), value=st.integers(0, 3))
    def append(self, pieces: int, number: int, value: int) -> None:
        for _ in range(pieces):
            more = self.batch(number, value)
            lance.write_dataset(more, str(self.root), mode="append")
            self.made(self.now + counted(more))

    @rule(part=st.integers(1, 5))
    def delete(self, part: int) -> None:
        self.open().delete(f"id % 5 < {part} AND id % 2 = 0")
        gone = {row for row in self.now if row[0] % 5 < part and row[0] % 2 == 0}
        self.made(Counter({row: n for row, n in self.now.items() if row not in gone}))

    @rule(part=st.integers(0, 4), value=st.integers(4, 9))
    def update(self, part: int, value: int) -> None:
        self.open().update({"value": str(value)}, where=f"id % 5 = {part}")
        held: Rows = Counter()
        for (one, old), number in self.now.items():
            held[one, value if one % 5 == part else old] += number
        self.made(held)

    @rule(back=st.integers(0, 10), number=st.integers(1, 12), value=st.integers(10, 12))
    def upsert(self, back: int, number: int, value: int) -> None:
        more = self.batch(number, value, max(0, self.next_id - back))
        merge = self.open().merge_insert("id").when_matched_update_all()
        merge.when_not_matched_insert_all().execute(more)
        new = counted(more)
        ids = {one for one, _ in new}
        kept = Counter({row: n for row, n in self.now.items() if row[0] not in ids})
        self.made(kept + new)

    @rule(number=st.integers(1, 5))
    def overwrite(self, number: int) -> None:
        more = self.batch(number, 20)
        lance.write_dataset(more, str(self.root), mode="overwrite")
        self.made(counted(more))

    @rule(column=st.sampled_from(["id", "value"]), kind=st.sampled_from(["BTREE", "BITMAP"]))
    def index(self, column: str, kind: str) -> None:
        self.open().create_scalar_index(column, kind, replace=True)
        self.made(self.now)

    @rule(data=st.data())
    def tag(self, data: st.DataObject) -> None:
        name, version = f"tag{len(self.tags)}", data.draw(st.sampled_from(sorted(self.known)))
        self.open().tags.create(name, version)
        self.tags[name] = version

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.known)))
        self.open(version).restore()
        self.made(self.known[version])

    @precondition(lambda self: self.changed)
    @rule(
        rules=st.fixed_dictionaries(
            {},
            optional={
                "target_bytes": st.sampled_from([1, 500, 5000]),
                "min_files": st.integers(2, 4),
                "deletions": st.sampled_from([0.01, 0.5, 1.0]),
                "max_bytes": st.sampled_from([1, 1500, 10000]),
            },
        ),
        execute_twice=st.booleans(),
    )
    def optimize(self, rules: dict[str, Any], execute_twice: bool) -> None:
        """A plan that is executed a second time has nothing left to spoil."""
        self.changed = False
        before = max(self.known)
        planned = self._tuner.plan(alone(self.root), **rules)
        for _ in range(1 + execute_twice):
            receipt = self._tuner.execute(planned)
            note(f"{rules}: {receipt.rows[0]}")
            assert [row.error for row in receipt.rows] == [None]
        held, head = self.now, self.open().version
        for version in range(before + 1, head + 1):
            self.known[version] = held
        for version in self.known if NIGHTLY else sorted(self.known)[-6:]:
            assert rows(self.open(version)) == self.known[version], version
        for name, version in self.tags.items():
            assert rows(self.open(name)) == self.known[version], name
        self.check_answers()

    def check_answers(self) -> None:
        """Ask by every key; a scan is a full one, without indices."""
        found = self.open()
        for number, column in enumerate(("id", "value")):
            for wanted in {row[number] for row in self.now} | {-1, 10**6}:
                answer = counted(found.to_table(filter=f"{column} = {wanted}"))
                expected = {row: n for row, n in self.now.items() if row[number] == wanted}
                assert answer == expected, (column, wanted)


def counted(found: pa.Table) -> Rows:
    return Counter(tuple(row.values()) for row in found.select(["id", "value"]).to_pylist())


def test_a_table(spark: SparkSession) -> None:
    run_state_machine_as_test(
        lambda: Table(spark),  # type: ignore[arg-type]
        settings=settings(
            max_examples=200 if NIGHTLY else 8,
            stateful_step_count=30 if NIGHTLY else 16,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=list(Phase) if NIGHTLY else [Phase.explicit, Phase.reuse, Phase.generate],
        ),
    )
