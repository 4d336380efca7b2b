"""Log lines: one JSON object each, on stderr, without secrets."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

from lakewarden.jobs.schema import each_text
from lakewarden.jobs.secrets import without_secrets

#: Of the request that is being answered.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

#: What every record has; the rest was said with `extra`.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}  # fmt: skip


class JsonLines(logging.Formatter):
    """One JSON object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        made = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": made.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
        }
        if (number := request_id.get()) is not None:
            line["request_id"] = number
        for name, value in vars(record).items():
            if name not in _OWN:
                line[name] = each_text(value, without_secrets)
        if record.exc_info:
            line["trace"] = without_secrets(self.formatException(record.exc_info))
        return json.dumps(line, default=_in_words, ensure_ascii=False)


def _in_words(value: object) -> str:
    return without_secrets(str(value))


def lasting_stderr() -> TextIO:
    """Return stderr as it is now: while Spark starts, what goes to the other one is Spark's.

    It stays open until the process ends.
    """
    return os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1, encoding="utf-8")


def log_to_stderr(level: str) -> None:
    """Send everything that is logged in this process to stderr, in this form."""
    handler = logging.StreamHandler(lasting_stderr())
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # They log every statement and every request of theirs.
    for chatty in (
        "sqlalchemy",
        "urllib3",
        "py4j",
        "pyiceberg",
        "alembic",
        "asyncio",
        "httpx",
        "httpcore",
    ):
        logging.getLogger(chatty).setLevel(logging.WARNING)
