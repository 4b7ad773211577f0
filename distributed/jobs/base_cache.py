"""The cache of base models on the dispatcher's side: experiments/base_models in the working directory.

    cache = Cache(Path.cwd())
    cache.claim(digest)           "ready": it is there; "train": this process is to train it; "busy": another one does
    cache.publish(digest, output, facts)

A base model that is used is locked by its users together, one that is trained by its trainer alone. So two dispatchers
train it once, and `cache prune` removes none that is in use. Locks end with their process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.files import try_lock
from distributed.training import base_model
from distributed.training.base_model import CACHE, BaseModelError, Manifest

MOMENT = 0.5  # seconds


class Cache:
    """The base models here, and the locks on those that this process trains or uses."""

    def __init__(self, cwd: Path) -> None:
        self.directory = str(cwd / CACHE)
        self._locks: dict[str, int] = {}
        self._training: set[str] = set()  # digests that are locked exclusively
        self._verified: dict[str, list[list[int]]] = {}  # digest -> signature

    def path(self, digest: str) -> str:
        """Where a base model is, or would be."""
        return os.path.join(self.directory, base_model.hash_of(digest))

    def verify(self, digest: str) -> Manifest:
        """Raises BaseModelError. What has not been written since the last time is not read again."""
        path = self.path(digest)
        before = base_model.signature(path)
        if before and self._verified.get(digest) == before:
            return base_model.read_manifest(path)
        self._verified.pop(digest, None)
        manifest = base_model.verify(path, digest)
        self._verified[digest] = before
        return manifest

    def digest_of(self, name: str) -> str:
        """The whole digest of a base model that is here and valid. Raises BaseModelError."""
        manifest = base_model.read_manifest(self.path(name))
        refuse_other_name(self.path(name), manifest)
        return str(self.verify(manifest["digest"])["digest"])

    def claim(self, digest: str) -> str:
        """Lock a base model: `ready` to use it, `train` to train it, `busy` where another process has it.

        What is there and damaged is removed by the one who is to train it.
        """
        if digest in self._training:
            return "train"
        for exclusive in (False, True):
            self.release(digest)
            file = lock_soon(self.directory, digest, exclusive)
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

    def publish(self, digest: str, output: str, **facts: Any) -> Manifest:
        """Take the files of a base model from the output directory of its job, and use it from now on.

        Raises:
            BaseModelError: a file is missing.
            OSError: as on a full disk.
        """
        try:
            manifest = self.verify(digest)
        except BaseModelError:
            manifest = base_model.manifest_of(output, digest, **facts)
            staging = base_model.stage(self.directory, output, manifest)
            manifest = base_model.publish(self.directory, digest, staging)
        # For a moment the lock is free: a process that takes it then finds the base model valid, and shares the lock.
        while digest in self._locks and not try_lock(self._locks[digest], exclusive=False):
            time.sleep(0.01)
        self._training.discard(digest)
        return manifest

    def release(self, digest: str) -> None:
        """Give the lock up."""
        self._training.discard(digest)
        if (file := self._locks.pop(digest, None)) is not None:
            os.close(file)


def lock_soon(directory: str, digest: str, exclusive: bool) -> int | None:
    """As base_model.lock(); a lock that is held for a moment only is waited for.

    Others hold it while they look at a base model, and a child of this process that is just forked holds each of its
    locks until it runs another program.
    """
    end = time.monotonic() + MOMENT
    while (file := base_model.lock(directory, digest, exclusive)) is None and time.monotonic() < end:
        time.sleep(0.02)
    return file


# ---------------------------------------------------------------- what is in it


@dataclass(frozen=True)
class Cached:
    """One base model of a cache."""

    name: str
    fault: str  # why it is not valid; empty: it is, or was not verified
    manifest: Manifest

    @property
    def size(self) -> int:
        """Bytes."""
        return base_model.size_of(self.manifest) if self.manifest else 0


def cached(cwd: Path, verify: bool) -> list[Cached]:
    """All base models of a cache. verify: read every byte."""
    found = []
    directory = str(cwd / CACHE)
    for name in base_model.names_in(directory):
        path, manifest, fault = os.path.join(directory, name), {}, ""
        try:
            manifest = base_model.read_manifest(path)
            refuse_other_name(path, manifest)
            if verify:
                base_model.refuse_other_files(path, manifest)
        except BaseModelError as error:
            fault = str(error)
        found.append(Cached(name, fault, manifest))
    return found


def refuse_other_name(path: str, manifest: Manifest) -> None:
    """Raises BaseModelError where the digest in a manifest is not that of its directory."""
    if (held := base_model.hash_of(manifest["digest"])) != os.path.basename(path):
        raise BaseModelError(f"{path}: holds the base model {held}; remove it")


def prune(cwd: Path, keep: Iterable[str] | None = None) -> tuple[list[str], list[str]]:
    """Remove what is damaged and what cut-off copies have left, and all base models but those to keep.

    Args:
        keep: names; None: all that are valid.

    Returns the names of base models that were removed, and of those that are in use and therefore stay.
    """
    directory, kept = str(cwd / CACHE), None if keep is None else set(keep)
    removed, used = [], []
    for name in sorted({*base_model.names_in(directory), *base_model.names_of_staging(directory)}):
        path = os.path.join(directory, name)
        file = base_model.lock(directory, name, exclusive=True)
        if file is None:
            used.append(name)
            continue
        try:
            base_model.remove_staging(directory, name)
            if os.path.lexists(path) and ((kept is not None and name not in kept) or not valid(path)):
                base_model.remove(directory, name)
                removed.append(name)
        finally:
            os.close(file)
    return removed, used


def valid(path: str) -> bool:
    """Whether a base model is complete and undamaged; reads every byte."""
    try:
        refuse_other_name(path, base_model.verify(path))
    except BaseModelError:
        return False
    return True
