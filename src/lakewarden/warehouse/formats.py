"""Which formats the tables of a warehouse may have, and who knows them."""

from __future__ import annotations

from lakewarden.warehouse import iceberg, lance
from lakewarden.warehouse.warehouse import Warehouse


def with_formats(warehouse: Warehouse) -> Warehouse:
    """Return the warehouse with everybody who knows one of its formats."""
    lance.tables_of(warehouse)
    iceberg.tables_of(warehouse)
    return warehouse
