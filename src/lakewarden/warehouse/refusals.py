"""What Lance's namespace interface offers and a warehouse does not do, and what to do instead.

Rows are read and written by the clients, which know how; the warehouse keeps versions.
"""

from __future__ import annotations

from collections.abc import Callable

import lance_namespace as api
from lance_namespace.errors import UnsupportedOperationError

_CLIENT = "a warehouse keeps versions and touches no rows: open the table with lance.dataset"
_COLUMNS = f"{_CLIENT} and change its columns there"
_INDICES = f"{_CLIENT} and look after its indices there"
_BRANCHES = "branches of the warehouse span all its tables: lakewarden branch"
_LOG = "versions of the warehouse are its transactions: lakewarden log"
_VIEWS = "a warehouse holds no views: write the rows of a view to a table"
ADVICE = {
    "alter_table_add_columns": _COLUMNS,
    "alter_table_alter_columns": _COLUMNS,
    "alter_table_backfill_columns": _COLUMNS,
    "alter_table_drop_columns": _COLUMNS,
    "alter_transaction": _LOG,
    "analyze_table_query_plan": f"{_CLIENT} and ask its scanner",
    "batch_delete_table_versions": "versions may be needed by tags and branches of the warehouse; "
    "cleanup knows: lakewarden cleanup",
    "count_table_rows": f"{_CLIENT} and use count_rows",
    "create_empty_table": "use declare_table",
    "create_materialized_view": _VIEWS,
    "create_table": "use lance.write_dataset, which declares the table and writes it",
    "create_table_branch": _BRANCHES,
    "create_table_index": _INDICES,
    "create_table_scalar_index": _INDICES,
    "delete_from_table": f"{_CLIENT} and use delete",
    "delete_table_branch": _BRANCHES,
    "describe_table_index_stats": _INDICES,
    "describe_transaction": _LOG,
    "drop_table_index": _INDICES,
    "explain_table_query_plan": f"{_CLIENT} and ask its scanner",
    "get_table_stats": f"{_CLIENT} and ask its statistics",
    "insert_into_table": f"{_CLIENT} and use insert",
    "list_table_indices": _INDICES,
    "merge_insert_into_table": f"{_CLIENT} and use merge_insert",
    "query_table": f"{_CLIENT} and scan it",
    "refresh_materialized_view": _VIEWS,
    "restore_table": f"{_CLIENT} and use restore, or go back with lakewarden restore",
    "update_field_metadata": _COLUMNS,
    "update_table": f"{_CLIENT} and use update",
    "update_table_schema_metadata": f"{_CLIENT} and use update_schema_metadata",
}


class Refusing(api.LanceNamespace):
    """A namespace that says of every operation in `ADVICE` what to do instead."""


def _refusal(advice: str) -> Callable[..., None]:
    def refuse(self: Refusing, *request: object) -> None:  # noqa: ARG001
        raise UnsupportedOperationError(advice)

    return refuse


for _operation, _advice in ADVICE.items():
    setattr(Refusing, _operation, _refusal(_advice))
