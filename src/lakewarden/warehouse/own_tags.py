"""Tags that one Lance table has of its own, as Lance keeps them.

They are no versions of the warehouse and name one of the table; `lakewarden tag` names all tables at
once.  On a branch they are those of the branch's fork.
"""

from __future__ import annotations

from typing import Any

import lance
from lance_namespace.errors import TableTagAlreadyExistsError, TableTagNotFoundError
from lance_namespace_urllib3_client.models.tag_contents import TagContents

from lakewarden.warehouse import forks


class OwnTags:
    """The tags of one table, seen from one branch."""

    def __init__(self, uri: str, fork: str, options: dict[str, str] | None) -> None:
        self._branch = forks.name(fork)
        self._tags = lance.dataset(uri, storage_options=options).tags

    def all(self) -> dict[str, Any]:
        return {
            name: TagContents.from_dict(
                {
                    "version": one["version"],
                    "manifestSize": one["manifest_size"],
                    "branch": one["branch"],
                }
            )
            for name, one in sorted(self._tags.list().items())
            if one["branch"] == self._branch
        }

    def get(self, name: str) -> Any:
        found = self.all().get(name)
        if found is None:
            raise TableTagNotFoundError(f"there is no tag {name} of this table")
        return found

    def create(self, name: str, version: int) -> None:
        if name in self._tags.list():
            raise TableTagAlreadyExistsError(f"tag {name} exists; delete it first")
        self._tags.create(name, (self._branch, version))

    def move(self, name: str, version: int) -> None:
        self.get(name)
        self._tags.update(name, (self._branch, version))

    def delete(self, name: str) -> None:
        self.get(name)
        self._tags.delete(name)
