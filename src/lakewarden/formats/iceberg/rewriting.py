"""PLACEHOLDER until the branch arrives."""

from typing import Any

Work = Any
Piece = Any
plan: Any = None
rewrite: Any = None
commit: Any = None
rewrite_manifests: Any = None
discard: Any = None
