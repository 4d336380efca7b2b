"""Tasks that have nothing to do: they end, and nobody takes them for a look at the table."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lakewarden.jobs.commits import Commits
from lakewarden.jobs.queues import REMOVE_ORPHAN_FILES
from lakewarden.jobs.tasks import TaskStatus
from tests.jobs.lab import ON, lance_table
from tests.jobs.small import active

if TYPE_CHECKING:
    from tests.jobs.lab import Lab


@pytest.mark.parametrize("why", ["unwanted", "gone"])
def test_a_task_that_was_skipped_is_no_look(bare_lab: Lab, tmp_path: Path, why: str) -> None:
    place = lance_table(tmp_path / "lake" / "t.lance", 1)
    warehouse = bare_lab.lance(tmp_path / "lake")
    (task,) = warehouse.ask(REMOVE_ORPHAN_FILES)
    if why == "gone":
        warehouse.configure(REMOVE_ORPHAN_FILES)
        shutil.move(place, tmp_path / "away.lance")
    assert bare_lab.run(REMOVE_ORPHAN_FILES) == 1
    assert warehouse.details(task).info.status is TaskStatus.SUCCESS
    assert warehouse.result(task)["skipped"]
    if why == "gone":
        shutil.move(tmp_path / "away.lance", place)
        bare_lab.discovery.detect(warehouse.info.id)
    else:
        on = {ON[REMOVE_ORPHAN_FILES]: True}
        Commits(bare_lab.queue).configure(warehouse.scope, REMOVE_ORPHAN_FILES, on)
    (row,) = active(bare_lab.database)
    assert row.reason == "nobody has looked for orphans yet"
    assert row.scheduled_for <= bare_lab.database.clock.now()
