"""Base models on disk: each is a directory that is complete and verified, or does not exist.

    experiments/base_models/3fa2b1c09d12/      the first characters of its digest
        best_base_model.pt  base_metrics.json  base_losses.json  base_config.json
        manifest.json                          the whole digest; size and SHA-256 of each file

A digest identifies all settings that determine the weights (see jobs/bases.py). A directory is filled under a temporary
name, verified against its manifest, and renamed: no reader sees an incomplete one. Standard library only: this module
also runs on servers.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from typing import Any

from distributed.files import read_json, try_lock, write_json
from distributed.trust import (
    PRIVATE_DIRECTORY,
    allowed_mode,
    checked,
    file_in,
    is_lock_file,
    lock_file,
    make_own_directory,
    opened,
    parse_json,
    read_bytes,
    regular_file,
    remove_made,
)

CACHE = "experiments/base_models"
TRAINING = "experiments/base_training"  # output directories of the jobs that train base models
FILES = ("best_base_model.pt", "base_metrics.json", "base_losses.json", "base_config.json")
WEIGHTS = FILES[0]
MANIFEST = "manifest.json"
HASH_LENGTH = 12  # hexadecimal digits of the digest that name a base model
HASH = re.compile(r"([0-9a-f]{12})\Z")
STAGED = re.compile(r"\.([0-9a-f]{12})\.incomplete-")  # left by interrupted copies and removals
DIGEST = re.compile(r"[0-9a-f]{64}\Z")
# All names in a base model or its staging directory; rsync and network file systems make some, too.
MADE = re.compile(rf"\.?({'|'.join(map(re.escape, (*FILES, MANIFEST)))})(\..*)?|[0-9a-f]{{12}}|\.nfs.*", re.DOTALL)
BLOCK = 1 << 20  # bytes read at once
LARGEST_LOSS = 1e300  # also excludes NaN and infinity
MAX_MANIFEST = 1 << 20  # bytes; a dispatcher sends it to each server that needs the base model
CHECKED: Any = {"digest": DIGEST, "files": {name: {"bytes": range(1 << 63), "sha256": DIGEST} for name in FILES}}

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

Manifest = dict[str, Any]


class BaseModelError(Exception):
    """A base model is missing, incomplete or damaged."""


def hash_of(digest: str) -> str:
    """Return the name of a base model: the first characters of its digest."""
    return digest[:HASH_LENGTH]


def manifest_of(directory: str, digest: str, **facts: Any) -> Manifest:
    """Return the manifest of a base model's files. Raises BaseModelError when a file is missing.

    facts: additional keys: `settings`, `server` and `seconds` of the training, and `created`.
    """
    files = {}
    for name in FILES:
        path = os.path.join(directory, name)
        try:
            file = without_outer_links(directory, name)
            files[name] = {"bytes": os.path.getsize(file), "sha256": sha256(file)}
        except OSError as error:
            raise BaseModelError(f"{path}: {error.strerror}: a job with mode base_only must write it") from None
    loss = read_json(os.path.join(directory, "base_metrics.json")).get("held_out_loss")
    is_finite = isinstance(loss, int | float) and abs(loss) < LARGEST_LOSS
    return {"digest": digest, "files": files, "held_out_loss": loss if is_finite else None, **facts}


def without_outer_links(directory: str, name: str) -> str:
    """The path of a file in an output directory. A script may write links to other files there; others are refused."""
    path = os.path.realpath(os.path.join(directory, name))
    if not path.startswith(f"{os.path.realpath(directory)}/"):
        raise OSError(errno.ELOOP, "is a symbolic link that leads out of its directory", name)
    return path


def sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", opener=file_in) as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def verify(directory: str, digest: str | None = None) -> Manifest:
    """Verify all bytes of a base model against its manifest. Returns the manifest. digest: the expected one; None: any.

    Raises BaseModelError when the base model is missing, incomplete, damaged, or has another digest.
    """
    manifest = read_manifest(directory)
    if digest not in (None, manifest["digest"]):
        raise BaseModelError(f"{directory}: holds the base model {manifest['digest']}, expected {digest}")
    check_files(directory, manifest)
    return manifest


def read_manifest(directory: str) -> Manifest:
    """Read only the manifest of a base model. Raises BaseModelError when it is missing or damaged."""
    path = os.path.join(directory, MANIFEST)
    try:
        with opened(directory) as here:
            manifest = parse_json(read_bytes(f"/proc/self/fd/{here}/{MANIFEST}", most=MAX_MANIFEST))
        checked(CHECKED, {key: manifest[key] for key in CHECKED})
        return dict(manifest)
    except FileNotFoundError:
        raise BaseModelError(f"{directory}: there is no base model") from None
    except OSError as error:
        raise BaseModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError):
        raise BaseModelError(f"{path}: damaged; remove {directory} and train the base model again") from None


def check_files(directory: str, manifest: Mapping[str, Any]) -> None:
    """Raise BaseModelError when a file differs from the manifest in size or checksum."""
    for name in FILES:
        path, expected = os.path.join(directory, name), manifest["files"][name]
        try:
            if (size := os.lstat(path).st_size) != expected["bytes"]:
                raise BaseModelError(f"{path}: damaged: it has {size:,} bytes, expected {expected['bytes']:,}")
            if sha256(path) != expected["sha256"]:
                raise BaseModelError(f"{path}: damaged: its checksum is not the one in {MANIFEST}")
        except OSError as error:
            raise BaseModelError(f"{path}: cannot be read: {error.strerror}") from None


def size_of(manifest: Mapping[str, Any]) -> int:
    """Return the size of all files in bytes."""
    return sum(each["bytes"] for each in manifest["files"].values())


# ---------------------------------------------------------------- a cache: a directory of base models


def stage(cache: str, source: str, manifest: Mapping[str, Any]) -> str:
    """Copy a base model's files and a manifest to a new staging directory, and return its path, for publish().

    Raises OSError, also if another user could replace the directories of the cache or of the files.
    """
    make_own_directory(source, workdir_of(cache))
    staging = new_staging(cache, manifest["digest"])
    mode = allowed_mode(cache) & 0o666
    try:
        with opened(staging) as directory:
            here = f"/proc/self/fd/{directory}"
            for name in FILES:
                path, new = without_outer_links(source, name), os.path.join(here, name)
                with open(path, "rb", opener=regular_file) as file, open(os.open(new, NEW_FILE, mode), "wb") as copy:
                    shutil.copyfileobj(file, copy, BLOCK)
            write_json(os.path.join(here, MANIFEST), dict(manifest), mode)
    except OSError:
        discard(staging)
        raise
    return staging


def workdir_of(cache: str) -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(cache)))  # see CACHE


def new_staging(cache: str, digest: str) -> str:
    """Make an empty staging directory in the cache. Its name is not that of a base model."""
    make_own_directory(cache, workdir_of(cache))
    path = os.path.join(cache, f"{staging_prefix(digest)}{secrets.token_hex(4)}")
    os.mkdir(path, allowed_mode(cache))
    return path


def staging_prefix(digest: str) -> str:
    return f".{hash_of(digest)}.incomplete-"


def remove_staging(cache: str, digest: str) -> None:
    """Remove the directories of interrupted copies and removals. The caller must hold the exclusive lock."""
    for name in os.listdir(cache):
        if name.startswith(staging_prefix(digest)):
            discard(os.path.join(cache, name))


def publish(cache: str, digest: str, staging: str) -> Manifest:
    """Verify a staging directory and rename it to its final name. A valid base model of that name is kept instead.

    The staging directory is removed in any case.

    Raises:
        BaseModelError: the staging directory is incomplete or damaged.
        OSError: for example on a full disk.
    """
    target = os.path.join(cache, hash_of(digest))
    try:
        manifest = verify(staging, digest)
        for name in (*FILES, MANIFEST):
            sync(file_in(os.path.join(staging, name)))
        sync(os.open(staging, os.O_DIRECTORY | os.O_NOFOLLOW))
        while True:
            try:
                os.rename(staging, target)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            with contextlib.suppress(BaseModelError):
                return verify(target, digest)
            remove(cache, hash_of(digest))
        sync(os.open(cache, os.O_DIRECTORY))
        return manifest
    finally:
        discard(staging)


def sync(file: int) -> None:
    """Sync a file, or the entries of a directory, to disk, and close it."""
    try:
        os.fsync(file)
    finally:
        os.close(file)


def remove(cache: str, name: str) -> None:
    """Remove a base model: rename it, then delete its files."""
    path = os.path.join(cache, name)
    if os.path.lexists(path):
        trash = os.path.join(cache, f"{staging_prefix(name)}{secrets.token_hex(4)}")
        os.mkdir(trash, PRIVATE_DIRECTORY)
        with contextlib.suppress(FileNotFoundError), opened(trash) as directory:  # another process has removed it
            os.rename(path, name, dst_dir_fd=directory)
        discard(trash)


def discard(path: str) -> None:
    """Remove a directory of a cache, as far as possible and as far as it holds what this module makes."""
    with contextlib.suppress(OSError), opened(f"{os.path.dirname(path)}/.") as cache:
        remove_made(os.path.basename(path), cache, MADE)


def lock(cache: str, digest: str, exclusive: bool, seconds: float = 0.0) -> int | None:
    """Lock a base model: exclusively to train, copy or remove it, otherwise to use it.

    Returns a file descriptor that holds the lock until all its copies are closed; None: another process still has the
    lock after `seconds`. Users who cannot write to the cache cannot open its locks, so they cannot block it. They may
    use its base models, and get a descriptor that locks nothing. Raises PermissionError for a private lock of others.
    """
    make_own_directory(cache, workdir_of(cache))
    path = os.path.join(cache, f".{hash_of(digest)}.lock")
    for may_replace in (True, True, False):
        try:
            file = lock_file(path, os.O_RDWR | os.O_CREAT, cache)
        except FileNotFoundError:  # another process has just replaced it
            continue
        except PermissionError:
            if os.access(cache, os.W_OK):
                raise
            return os.memfd_create("lock")
        # Of an earlier version, or a file of this user that another one has moved there.
        is_other = may_replace and os.fstat(file).st_uid == os.geteuid() and not is_lock_file(file, cache)
        is_other = is_other and try_lock(file)
        if not is_other and not try_lock(file, exclusive, seconds):
            os.close(file)
            return None
        if os.path.lexists(path) and os.path.samestat(os.fstat(file), os.lstat(path)):
            if not is_other:
                return file
            os.unlink(path)
        os.close(file)
    return None


def names_in(cache: str, pattern: re.Pattern[str] = HASH) -> list[str]:
    """Return the names of all base models in a cache, valid or not. pattern: STAGED for incomplete ones."""
    try:
        return sorted({match[1] for name in os.listdir(cache) if (match := pattern.match(name))})
    except FileNotFoundError:
        return []


def digests_in(cache: str) -> list[str]:
    """Return the digests of all base models in a cache, from their manifests alone."""
    found = []
    for name in names_in(cache):
        with contextlib.suppress(BaseModelError):
            found.append(read_manifest(os.path.join(cache, name))["digest"])
    return found


def signature(directory: str) -> list[list[int]]:
    """Return inode, size and times of all files. While they are unchanged, no verification is needed."""
    try:
        found = [os.lstat(os.path.join(directory, name)) for name in (*FILES, MANIFEST)]
    except OSError:
        return []
    return [[each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns] for each in found]
