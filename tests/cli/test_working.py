"""The worker command: what it says, and which database it uses."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from lakewarden.testing.processes import lakewarden_command, running
from tests.jobs.test_worker import wait_until


def test_log_lines_are_json_without_secrets(tmp_path: Path) -> None:
    log, secret = tmp_path / "worker.log", "pa55word"
    # Nobody listens there, so it is waited for.
    environ = {
        "LAKEWARDEN__DATABASE_URL": f"postgresql://me:{secret}@127.0.0.1:1/tasks",
        # Of two, that which is ours alone counts, as it does for lakewarden serve.
        "DATABASE_URL": f"sqlite:///{tmp_path}/slip.db",
    }
    with running(lakewarden_command("worker"), log=log, environ=environ) as process:
        wait_until(lambda: "waiting for the database" in log.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    first, *lines = log.read_text().splitlines()
    assert first.startswith("worker   expire_snapshots: 2, ")
    assert {json.loads(line)["logger"] for line in lines} == {"lakewarden.jobs"}
    assert secret not in log.read_text()
