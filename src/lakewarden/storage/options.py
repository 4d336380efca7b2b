"""Storage options and environment variables, turned into what obstore wants.

Names are those `object_store` and Lance users know.  obstore itself reads the usual `AWS_*`,
`GOOGLE_*` and `AZURE_*` variables; this module only looks at what obstore does not conclude from
them: that a plain `http://` endpoint means plain HTTP is allowed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from lakewarden.errors import ErrorKind, UsageError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

#: An endpoint that nobody serves is reported within this time; longer outages fail the task, which
#: the caller runs again.  Well below five minutes, when signatures of repeated requests expire.
RETRY_SECONDS = 60.0
RETRIES = 10
_BACKOFF_MAX_SECONDS = 10.0
_RETRIES_MAX = 10_000
_RETRY_SECONDS_MAX = 86_400

_CLIENT_FLAGS = ("allow_http", "allow_invalid_certificates", "http1_only", "http2_only")
_CLIENT_TEXTS = ("timeout", "connect_timeout", "read_timeout", "proxy_url", "user_agent")
_RETRY_NAMES = ("client_max_retries", "client_retry_timeout")
#: Options of one cloud are no mistake when another store is opened: a plan's scratch location and
#: its table may live in different places.
_FAMILIES = {"s3": ("aws_", "s3_"), "gs": ("google_", "gcs_"), "az": ("azure_",)}
_ENDPOINTS = {
    "s3": ("aws_endpoint_url_s3", "aws_endpoint", "aws_endpoint_url", "endpoint", "endpoint_url"),
    "gs": ("google_base_url", "base_url"),
    "az": ("azure_storage_endpoint", "azure_endpoint", "endpoint"),
}


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How to reach a store.  Not shown in full: most values are secrets."""

    config: Mapping[str, str] = field(repr=False)
    client: ClientConfig
    retry: RetryConfig


def client_settings(scheme: str, options: Mapping[str, str]) -> ClientSettings:
    """Sort `options` by who understands them; what nobody knows is left for the store to refuse."""
    lowered = {name.lower(): value for name, value in options.items()}
    client: dict[str, object] = {"connect_timeout": "5s", "timeout": "60s"}
    config: dict[str, str] = {}
    foreign = tuple(p for other, ps in _FAMILIES.items() if other != scheme for p in ps)
    for name, value in lowered.items():
        plain = name.removeprefix("aws_").removeprefix("google_").removeprefix("azure_")
        if plain in _CLIENT_FLAGS:
            client[plain] = parse_flag(name, value)
        elif plain in _CLIENT_TEXTS:
            client[plain] = value
        elif name not in _RETRY_NAMES and not name.startswith(foreign):
            config[name] = value
    endpoint = _endpoint(scheme, config)
    if endpoint.lower().startswith("http://"):
        client["allow_http"] = True
    return ClientSettings(config, client, _retry(lowered))  # type: ignore[arg-type]


def parse_flag(name: str, value: str) -> bool:
    """Return the truth a flag's text stands for, or refuse the text."""
    match value.strip().lower():
        case "true" | "1" | "yes" | "on":
            return True
        case "false" | "0" | "no" | "off":
            return False
        case _:
            raise UsageError(
                ErrorKind.USAGE, f"storage option {name}={value!r} is neither true nor false"
            )


def _endpoint(scheme: str, config: Mapping[str, str]) -> str:
    names = _ENDPOINTS.get(scheme, ())
    # The only look at the environment: obstore reads everything else there by itself.
    variables = os.environ  # noqa: TID251
    given = (config.get(name, "") for name in names)
    return next(filter(None, given), "") or next(
        filter(None, (variables.get(name.upper(), "") for name in names if "_" in name)), ""
    )


def _retry(options: Mapping[str, str]) -> RetryConfig:
    try:
        retries = int(options.get("client_max_retries", RETRIES))
        seconds = float(options.get("client_retry_timeout", RETRY_SECONDS))
    except ValueError as error:
        raise UsageError(
            ErrorKind.USAGE,
            f"storage options {' and '.join(_RETRY_NAMES)} must be numbers ({error})",
        ) from error
    if not (0 <= retries <= _RETRIES_MAX and 0 <= seconds <= _RETRY_SECONDS_MAX):
        raise UsageError(
            ErrorKind.USAGE,
            f"storage option client_max_retries goes from 0 to {_RETRIES_MAX:,}, "
            f"client_retry_timeout from 0 to {_RETRY_SECONDS_MAX:,} seconds",
        )
    return {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=seconds),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=_BACKOFF_MAX_SECONDS),
            "base": 3,
        },
    }
