"""Lakewarden looks after versioned tables, Lance and Iceberg, one at a time or a fleet in one job.

    plan = lakewarden.plan_cleanup(spark, "s3://lake/events.lance", keep=10, older_than="14d")
    receipt = lakewarden.execute(spark, plan)

The names below are loaded when they are first used, so `import lakewarden` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lakewarden.maintenance.operations import (
        execute,
        keep_clean,
        load_plan,
        plan_cleanup,
        plan_optimize,
        plan_orphans,
        plan_warehouse_cleanup,
        save_plan,
    )
    from lakewarden.maintenance.plan import Plan
    from lakewarden.maintenance.removal import Receipt
    from lakewarden.maintenance.safety import Breakers

__version__ = "0.1.0"
__all__ = [
    "Breakers",
    "Plan",
    "Receipt",
    "execute",
    "keep_clean",
    "load_plan",
    "plan_cleanup",
    "plan_optimize",
    "plan_orphans",
    "plan_warehouse_cleanup",
    "save_plan",
]
_HOMES = {"Breakers": "safety", "Plan": "plan", "Receipt": "removal"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'lakewarden' has no attribute {name!r}")
    home = import_module(f"lakewarden.maintenance.{_HOMES.get(name, 'operations')}")
    return getattr(home, name)
