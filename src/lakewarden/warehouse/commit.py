"""How a transaction becomes a version: claim the next number, and if it is taken, rebase and retry.

A claim that fails has three outcomes.  It did not land: somebody else's entry is there.  It landed:
the entry that is there is ours, only the answer was lost.  Or nobody can tell; then the very same
claim is made again, which settles it, for at most one of both can be there.

Whoever commits leaves a checkpoint from time to time, before the entry that names it.  So an entry
and its checkpoint are the whole warehouse at that version, however long its history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta

from lakewarden.errors import (
    AlreadyExists,
    Conflict,
    Damaged,
    ErrorKind,
    LakewardenError,
    NotFound,
    StorageError,
)
from lakewarden.storage.store import JotStore, Store
from lakewarden.warehouse import conflicts
from lakewarden.warehouse.backoff import SlotBackoff
from lakewarden.warehouse.codec import CHECKPOINTS, ENTRIES, TRANSACTIONS
from lakewarden.warehouse.handlers import CommitHandler
from lakewarden.warehouse.manifest import (
    CONTENT,
    EMPTY,
    MAIN,
    STAMP,
    Change,
    Entry,
    Logged,
    Manifest,
    Operation,
    Transaction,
    apply,
    replay,
)
from lakewarden.world import Chance, Clock, fresh_id

#: Versions after which a checkpoint is made.
CHECKPOINT_EVERY = 32
#: Versions that are looked for one by one, before all are listed.
_STEPS = 2
#: Times a claim whose outcome nobody can tell is made again.
_CLAIMS = 4
#: A writer that took longer than this makes sure that its version still follows the one before.
#: Cleanup leaves every entry of the log for a multiple of it.
SLOW = timedelta(minutes=1)

_TOO_LARGE = 2**63

#: Makes a change again on top of what the warehouse is now.
Rebase = Callable[[Change, Manifest], Change]


@dataclass(frozen=True, slots=True)
class Head:
    """The warehouse at one version, as somebody has read it."""

    manifest: Manifest
    #: The write of that version; empty before the first one.
    write_id: str = ""
    checkpoint: int = 0
    tail: tuple[Logged, ...] = ()
    #: When it was the newest, on the clock's steady scale.
    seen: float = 0.0
    #: The format that it was written in.
    stamp: int = STAMP

    @property
    def version(self) -> int:
        return self.manifest.version


@dataclass(frozen=True, slots=True)
class Limits:
    """How often and how long a commit is tried."""

    tries: int = 50
    seconds: float = 120.0


@dataclass(slots=True)
class Log:
    """The versions of one warehouse."""

    handler: CommitHandler
    store: Store
    #: The directory of the warehouse's own objects.
    prefix: str
    clock: Clock
    chance: Chance
    limits: Limits = field(default_factory=Limits)
    new_id: Callable[[], str] = fresh_id
    #: Of failed tries, for those who want to know.
    retries: int = 0

    # -- reading ---------------------------------------------------------------------------------

    def head(self, known: Head | None = None) -> Head:
        """Return the newest version; `known` saves reading what has not changed."""
        seen = self.clock.elapsed()
        near = None if known is None else self._near(known, seen)
        if near is not None:
            return replace(near, seen=seen)
        newest = self.handler.head()
        if newest == 0:
            return Head(EMPTY, seen=seen)
        if known is not None and known.version == newest:
            return replace(known, seen=seen)
        return replace(self._whole(self.entry(newest), known), seen=seen)

    def _near(self, known: Head, seen: float) -> Head | None:
        """Return the newest version if it is one that is known, or right after.

        A listing costs as much as there are versions where they are files in a directory; the next
        one is found by its name.  What was the newest a moment ago is followed by nothing that
        could have been taken away since.
        """
        if not known.version or seen - known.seen >= SLOW.total_seconds():
            return None
        for _ in range(_STEPS):
            number = known.version + 1
            try:
                entry = _decoded(self.handler.read(number), number)
            except NotFound:
                return known
            known = self._whole(entry, known)
        return None

    def at(self, version: int) -> Manifest:
        """Return the warehouse at a version."""
        return self._whole(self.entry(version), None).manifest

    def entry(self, version: int) -> Entry:
        """Return what is stored for a version; raise a typed error if it was reclaimed."""
        if not 0 < version < _TOO_LARGE:
            raise self._missing(version)
        try:
            data = self.handler.read(version)
        except NotFound:
            raise self._missing(version) from None
        return _decoded(data, version)

    def since(self, version: int, head: Entry) -> list[Logged]:
        """Return every version after one, up to the given entry; a gap is an error."""
        late = [*head.tail, head.logged]
        missing = range(version + 1, late[0].version)
        early = []
        for number in missing:
            try:
                early.append(_decoded(self.handler.read(number), number).logged)
            except NotFound:
                raise Conflict(
                    ErrorKind.HISTORY_GAP,
                    f"version {number} of the warehouse was reclaimed, and what it changed since "
                    f"version {version} cannot be known; nothing was committed: read again and do "
                    "it again",
                ) from None
        return [one for one in [*early, *late] if one.version > version]

    def _whole(self, entry: Entry, known: Head | None) -> Head:
        if known is not None and entry.version == known.version + 1:
            _check_parent(entry, known)
        start = known.manifest if known is not None else EMPTY
        if not entry.checkpoint <= start.version < entry.version:
            start = self._checkpoint(entry) if entry.checkpoint else EMPTY
        tail = [one for one in (*entry.tail, entry.logged) if one.version > start.version]
        manifest = replace(replay(start, tail), stamp=STAMP)
        whole = (*entry.tail, entry.logged)
        return Head(manifest, entry.write_id, entry.checkpoint, whole, stamp=entry.stamp)

    def _checkpoint(self, entry: Entry) -> Manifest:
        version = entry.checkpoint
        key = self._checkpoint_key(version)
        try:
            data = self.store.get(key)
        except NotFound as error:
            # If the entry went as well, a cleanup has been faster.
            self.entry(entry.version)
            raise Damaged(
                ErrorKind.CORRUPT_MANIFEST,
                f"checkpoint {key} does not exist, and version {entry.version} of the warehouse needs "
                "it; restore the object from a backup",
            ) from error
        manifest = CHECKPOINTS.decode(data, key)
        if manifest.version != version:
            raise Damaged(
                ErrorKind.CORRUPT_MANIFEST,
                f"checkpoint {key} is one of version {manifest.version}; restore the object from a "
                "backup",
            )
        return manifest

    def _missing(self, version: int) -> LakewardenError:
        newest = self.handler.head()
        if 0 < version <= newest:
            return NotFound(
                f"version {version} of the warehouse was reclaimed by a cleanup (the newest is "
                f"{newest}); tag versions that must stay",
                ErrorKind.RECLAIMED,
            )
        return NotFound(f"there is no version {version} of the warehouse; the newest is {newest}")

    # -- committing ------------------------------------------------------------------------------

    def commit(self, base: Head, transaction: Transaction, rebase: Rebase) -> Head:
        """Make a version of the transaction, on top of whatever has been committed meanwhile.

        `base` is what it was prepared on.  Returns the warehouse with it; raises Conflict if it
        does not get along with others, and then nothing of it was committed.
        """
        done = self._earlier(base.manifest, transaction)
        if done is not None:
            return done
        self._announce(transaction)
        backoff = SlotBackoff(self.chance)
        started = self.clock.elapsed()
        failed = 0
        while True:
            began = self.clock.elapsed()
            outdated = _outdated(base.manifest, transaction)
            if outdated is not None and self.handler.head() <= base.version:
                raise outdated
            committed = self._try(base, transaction) if outdated is None else None
            if committed is not None:
                return committed
            entry, head = self._newest(base)
            done = self._earlier(head.manifest, transaction)
            if done is not None:
                return done
            moved, transaction = self._rebased(base, transaction, entry, head, rebase)
            base = head
            self.retries += 1
            failed += moved
            now = self.clock.elapsed()
            if now - started > self.limits.seconds or failed == self.limits.tries:
                break
            # Others who were faster with other tables are just in the way for a moment.
            spent = now - began
            self.clock.sleep(backoff.after(spent) if moved else backoff.beside(spent))
        raise Conflict(
            ErrorKind.CONFLICT,
            f"{transaction} was outrun by others {self.limits.tries} times or for "
            f"{self.limits.seconds:.0f} seconds; nothing was committed: try again later",
        )

    def _earlier(self, manifest: Manifest, transaction: Transaction) -> Head | None:
        """Return the version that the same request has become before, if it has."""
        version = manifest.requests.get(transaction.request or "")
        if version is None:
            return None
        try:
            return self._whole(self.entry(version), None)
        except NotFound:
            # It was, long ago.
            return self.head()

    def _announce(self, transaction: Transaction) -> None:
        key, data = (
            f"{self.prefix}/_transactions/{transaction.id}.json",
            TRANSACTIONS.encode(transaction),
        )
        # The version holds it all; this is for people who look into what did not become one.
        write = self.store.jot if isinstance(self.store, JotStore) else self.store.put
        write(key, data)

    def _try(self, base: Head, transaction: Transaction) -> Head | None:
        """Claim the version after `base`; None if somebody else has it."""
        base = self._with_checkpoint(base)
        at_us = max(_micros(self.clock), base.manifest.at_us + 1)
        logged = Logged(base.version + 1, at_us, transaction)
        after = apply(base.manifest, logged)
        entry = Entry(logged, self.new_id(), STAMP, base.write_id, base.checkpoint, base.tail)
        # What took long may have been the claim: this version was the newest then, if ever.
        began = self.clock.elapsed()
        if not self._claim(entry):
            return None
        late = self.clock.elapsed() - base.seen > SLOW.total_seconds()
        if late and not self._follows(entry):
            return None
        return Head(after, entry.write_id, entry.checkpoint, (*entry.tail, logged), began)

    def _claim(self, entry: Entry) -> bool:
        """Tell whether the version is ours."""
        data = ENTRIES.encode(entry)
        trouble: LakewardenError | None = None
        for _ in range(_CLAIMS):
            try:
                self.handler.claim(entry.version, data)
            except AlreadyExists:
                pass
            except StorageError as error:
                if error.kind is ErrorKind.ACCESS_DENIED and trouble is None:
                    raise
                trouble = error
            else:
                return True
            try:
                there = ENTRIES.decode(self.handler.read(entry.version), str(entry.version))
            except NotFound as error:
                # It may still be on its way: the same claim again settles who has it.
                trouble = trouble or error
                continue
            except (StorageError, Damaged) as error:
                trouble = error
                continue
            return there.write_id == entry.write_id
        raise _unknown(entry, trouble)

    def _follows(self, entry: Entry) -> bool:
        """Tell whether the version that was claimed follows the one before, after a long time.

        Others may have gone on long ago, and cleanup may have taken away their version of this
        number: then ours stands where nobody looks.
        """
        try:
            if self.handler.head() <= entry.version:
                return True
            after = ENTRIES.decode(self.handler.read(entry.version + 1), str(entry.version + 1))
            if after.parent != entry.write_id:
                self.handler.forget([entry.version])
            return after.parent == entry.write_id
        except NotFound as error:
            head = self.head()
            if head.version > entry.version and entry.version in head.manifest.held():
                # Others have built on it, and it is what a tag or a branch holds.
                return self.entry(entry.version).write_id == entry.write_id
            # Wherever ours came to stand, that place has been reclaimed.
            self.handler.forget([entry.version])
            raise _unknown(entry, error) from error
        except (StorageError, Damaged) as error:
            raise _unknown(entry, error) from error

    def _newest(self, base: Head) -> tuple[Entry, Head]:
        """Return the newest version, after somebody else has taken the one after `base`."""
        seen = self.clock.elapsed()
        # The next one is there, even if the listing does not know it yet.
        entry = self.entry(max(self.handler.head(), base.version + 1))
        return entry, replace(self._whole(entry, base), seen=seen)

    def _rebased(
        self, base: Head, transaction: Transaction, entry: Entry, head: Head, rebase: Rebase
    ) -> tuple[bool, Transaction]:
        """Put the transaction on top of the newest version, or raise; tell if it had to change."""
        since = self.since(base.version, entry)
        names = {number: table.name for number, table in base.manifest.tables.items()}
        moved = conflicts.check(transaction, since, names)
        changes = [
            rebase(change, head.manifest) if change.table in moved else change
            for change in transaction.changes
        ]
        again = replace(transaction, changes=tuple(changes), read_version=head.version)
        return bool(moved), again

    def _with_checkpoint(self, base: Head) -> Head:
        """Leave a checkpoint of `base` if the way from the last one has become long.

        Also where an older release wrote it: what opens the next version is all of this format.
        """
        if len(base.tail) < CHECKPOINT_EVERY and base.stamp == STAMP:
            return base
        try:
            self.store.put(self._checkpoint_key(base.version), CHECKPOINTS.encode(base.manifest))
        except StorageError:
            # The way just gets longer.
            return base
        return replace(base, checkpoint=base.version, tail=())

    def _checkpoint_key(self, version: int) -> str:
        return f"{self.prefix}/_checkpoints/{version:020d}"


def _decoded(data: bytes, version: int) -> Entry:
    """Return what is stored under a number, after checking that it belongs there."""
    entry = ENTRIES.decode(data, str(version))
    if entry.version != version:
        raise Damaged(
            ErrorKind.CORRUPT_MANIFEST,
            f"what is stored as version {version} of the warehouse says that it is version "
            f"{entry.version}; restore the object from a backup",
        )
    return entry


def _check_parent(entry: Entry, known: Head) -> None:
    """Refuse a version that follows another one than that which is known under the same number."""
    if known.write_id and entry.parent != known.write_id:
        raise Damaged(
            ErrorKind.CORRUPT_MANIFEST,
            f"version {entry.version} of the warehouse does not follow the version {known.version} that "
            "was there before: the store has lost one that it had acknowledged; look at the log, and "
            "write again what is missing",
        )


def _outdated(manifest: Manifest, transaction: Transaction) -> Conflict | None:
    """Return what to raise if a change was prepared on another pin than the table has."""
    pins = (
        manifest.branches[transaction.branch].pins
        if transaction.branch in manifest.branches
        else {}
    )
    for change in transaction.changes:
        moves = change.operation in CONTENT or change.operation in _WHOLE
        # What a branch has not changed it has from its base, which does not move.
        known = change.table in pins or transaction.branch == MAIN
        if moves and known and pins.get(change.table) != change.before:
            table = manifest.tables.get(change.table)
            name = ".".join(table.name) if table is not None else change.table
            return Conflict(
                ErrorKind.CONFLICT,
                f"{transaction} was prepared on a version of {name} that is not the current one any "
                "more; nothing was committed: read again and do it again",
            )
    return None


_WHOLE = frozenset({Operation.CREATE, Operation.DROP, Operation.UNDROP})


def _unknown(entry: Entry, trouble: LakewardenError | None) -> StorageError:
    why = trouble.message if trouble is not None else "nothing was told"
    return StorageError(
        ErrorKind.COMMIT_UNKNOWN,
        f"whether {entry.logged.transaction} was committed as version {entry.version} cannot be told "
        f"({why}); look at the log before you try again",
    )


def _micros(clock: Clock) -> int:
    return int(clock.now().timestamp() * 1_000_000)


def stands(change: Change, _: Manifest) -> Change:
    """Leave a change as it is; for those that move no pin."""
    return change
