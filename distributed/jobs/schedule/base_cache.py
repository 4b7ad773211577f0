"""The dispatcher's cache of base models: experiments/base_models in the working directory.

    cache = Cache(Path.cwd())
    cache.claim(digest)           "ready" (use it), "train" (train it) or "busy" (another process has locked it)
    cache.publish(digest, output, **facts)

A dispatcher holds a shared lock on each base model that it uses, and an exclusive one while it trains the base model.
So two dispatchers never train the same base model, and `cache prune` never removes a base model in use. A lock ends
when its process exits.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.files import try_lock
from distributed.training import base_model
from distributed.training.base_model import CACHE, BaseModelError, Manifest

# Seconds. Other processes hold the lock briefly while they verify a base model, and a forked child of this process
# holds the locks that it inherits until it calls exec.
LOCK_TIMEOUT = 0.5


class Cache:
    """The base models of a working directory, and this process's locks on them."""

    def __init__(self, cwd: Path) -> None:
        self.directory = str(cwd / CACHE)
        self._locks: dict[str, int] = {}
        self._training: set[str] = set()  # digests that are locked exclusively
        self._verified: dict[str, list[list[int]]] = {}  # digest -> base_model.signature()

    def path(self, digest: str) -> str:
        """The directory of a base model, whether it exists or not."""
        return os.path.join(self.directory, base_model.hash_of(digest))

    def verify(self, digest: str) -> Manifest:
        """Verify a base model; return its manifest. Files unchanged since the last time are not read again.

        Raises BaseModelError.
        """
        path = self.path(digest)
        before = base_model.signature(path)
        if before and self._verified.get(digest) == before:
            return base_model.read_manifest(path)
        self._verified.pop(digest, None)
        manifest = base_model.verify(path, digest)
        self._verified[digest] = before
        return manifest

    def digest_of(self, name: str) -> str:
        """The full digest of a valid base model in the cache. Raises BaseModelError."""
        manifest = base_model.read_manifest(self.path(name))
        base_model.refuse_other_name(self.path(name), manifest)
        return str(self.verify(manifest["digest"])["digest"])

    def claim(self, digest: str) -> str:
        """Lock a base model. Returns `ready` to use it, `train` to train it, `busy` if another process has locked it.

        Before it returns `train`, it removes a damaged base model.
        """
        if digest in self._training:
            return "train"
        for exclusive in (False, True):
            self.release(digest)
            file = base_model.lock(self.directory, digest, exclusive, LOCK_TIMEOUT)
            if file is None:
                return "busy"
            self._locks[digest] = file
            with contextlib.suppress(BaseModelError):
                self.verify(digest)
                return "ready" if try_lock(file, exclusive=False) else "busy"
        base_model.remove(self.directory, base_model.hash_of(digest))
        base_model.remove_staging(self.directory, digest)
        self._training.add(digest)
        return "train"

    def publish(self, digest: str, output: str, **facts: Any) -> None:
        """Publish a base model from the output directory of its job, and hold the shared lock from now on.

        Raises BaseModelError for a missing file, and OSError.
        """
        try:
            self.verify(digest)
        except BaseModelError:
            manifest = base_model.manifest_of(output, digest, **facts)
            base_model.publish(self.directory, digest, base_model.stage(self.directory, output, manifest))
        # flock() releases the exclusive lock before it takes the shared one. Another process may take the lock in
        # between, but soon releases it, because it finds a valid base model.
        while digest in self._locks and not try_lock(self._locks[digest], exclusive=False):
            time.sleep(0.01)
        self._training.discard(digest)

    def release(self, digest: str) -> None:
        """Release the lock on a base model, if this process holds it."""
        self._training.discard(digest)
        if (file := self._locks.pop(digest, None)) is not None:
            os.close(file)


# ---------------------------------------------------------------- list and prune


@dataclass(frozen=True)
class Cached:
    """One base model of a cache."""

    name: str
    fault: str  # why it is invalid; empty if no fault was found
    manifest: Manifest

    @property
    def size(self) -> int:
        """Bytes."""
        return base_model.size_of(self.manifest) if self.manifest else 0


def cached(cwd: Path) -> list[Cached]:
    """All base models of a cache. Their weights are not read."""
    found = []
    directory = str(cwd / CACHE)
    for name in base_model.names_in(directory):
        path, manifest, fault = os.path.join(directory, name), {}, ""
        try:
            manifest = base_model.read_manifest(path)
            base_model.refuse_other_name(path, manifest)
        except BaseModelError as error:
            fault = str(error)
        found.append(Cached(name, fault, manifest))
    return found


def prune(cwd: Path, keep: Collection[str] | None = None) -> tuple[list[str], list[str]]:
    """Remove incomplete copies, damaged base models, and valid base models whose names are not in `keep`.

    keep: None keeps all valid base models. Returns the names of removed base models, and of base models in use, which
    are not removed.
    """
    directory, removed, in_use = str(cwd / CACHE), [], []
    for name in sorted({*base_model.names_in(directory), *base_model.names_in(directory, base_model.STAGED)}):
        path = os.path.join(directory, name)
        file = None
        with contextlib.suppress(PermissionError):  # no other user can open the lock
            file = base_model.lock(directory, name, exclusive=True)
        if file is None:
            in_use.append(name)
            continue
        try:
            base_model.remove_staging(directory, name)
            if os.path.lexists(path) and ((keep is not None and name not in keep) or not valid(path)):
                base_model.remove(directory, name)
                removed.append(name)
        finally:
            os.close(file)
    return removed, in_use


def valid(path: str) -> bool:
    """Whether a base model is complete and undamaged. Reads all its files."""
    try:
        base_model.refuse_other_name(path, base_model.verify(path))
    except BaseModelError:
        return False
    return True
