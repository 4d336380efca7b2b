"""Runs the command line inside the test process, so that Spark starts only once."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from lakewarden.cli.main import run

#: What may stand on stderr besides an error: the echo, stages, warnings.
_ASIDES = ("target ", "stage ", "warning ")


@dataclass(frozen=True)
class Outcome:
    """What a user sees of one command."""

    code: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """Every line on stderr that is not an aside."""
        return [line for line in self.stderr.splitlines() if not line.startswith(_ASIDES)]

    @property
    def error(self) -> str:
        """The error, after checking that it is one line and no traceback."""
        assert "Traceback" not in self.stderr + self.stdout
        assert len(self.errors) == 1, self.stderr
        assert self.errors[0].startswith("error    "), self.stderr
        return self.errors[0].removeprefix("error    ")

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document; fails if stdout holds anything else."""
        found = json.loads(self.stdout)
        assert isinstance(found, dict)
        return found

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows = self.document["tables"]
        assert isinstance(rows, list)
        return rows


class _Input(io.StringIO):
    def __init__(self, text: str, *, terminal: bool) -> None:
        super().__init__(text)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def lakewarden(*arguments: object, typed: str | None = None) -> Outcome:
    """Run `lakewarden ARGUMENTS`; `typed` is what a person answers at a terminal."""
    stdout, stderr = io.StringIO(), io.StringIO()
    before = sys.argv, sys.stdin
    sys.argv = ["lakewarden", *(str(one) for one in arguments)]
    sys.stdin = _Input(typed or "", terminal=typed is not None)
    code: object = 0
    try:
        with redirect_stdout(stdout), redirect_stderr(stderr):
            run()
    except SystemExit as leaving:
        code = leaving.code
    finally:
        sys.argv, sys.stdin = before
    assert code is None or isinstance(code, int)
    return Outcome(int(code or 0), stdout.getvalue(), stderr.getvalue())
