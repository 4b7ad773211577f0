"""Save and load a state that FSDP shards, through torch.distributed.checkpoint.

All ranks plan together, on the main thread. Then a thread of each rank, which calls no collectives, writes the rank's
shards. All ranks except 0 then write a small file to the same directory, and rank 0 waits for these files. So all nodes
must share the directory.

The files have torch's own format, which its tools read; for example, to write all weights to one file:

    python -m torch.distributed.checkpoint.format_utils dcp_to_torch step_00000120 all.pt
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.futures import Future

from distributed.checkpoint.directory import CheckpointError, FileEntries, by_descriptor, checkpoint_file, open_hashed
from distributed.files import write_file
from distributed.training.collectives import Ranks, load_safely, refusal
from distributed.trust import MAX_RECORDED, SHARED, printable, read_bytes, regular_file

POLL_INTERVAL = 0.05  # seconds between two checks for a file of another rank
VISIBILITY_TIMEOUT = 10.0  # seconds within which a new directory must be visible on every node

METADATA = "torch.distributed.checkpoint.metadata"
SAFE_CLASSES = {
    *((METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((METADATA, f"{name}StorageMetadata") for name in ("Bytes", "Chunk", "Tensor")),
    (METADATA, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.storage", "WriteResult"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


# ---- saving ----


class ShardWriter:
    """Plans the shards of one checkpoint with all ranks, and writes those of this rank without collectives."""

    def __init__(self, directory: Path, state: Mapping[str, Any], ranks: Ranks) -> None:
        """Plan with all ranks. Collective. `directory` must exist; raises CheckpointError when a node cannot see it."""
        if error := next(filter(None, ranks.all_gather(_visibility_error(directory, ranks.rank))), None):
            raise CheckpointError(error)
        self._directory, self._rank = directory, ranks.rank
        self._planner = _CopyPlanner()
        self._writer = dcp.FileSystemWriter(directory, thread_count=1, per_thread_copy_ahead=0, sync_files=False)
        self._writer.fs = self._files = _HashedFiles()
        self._planner.set_up_planner(dict(state), self._writer.storage_meta(), ranks.rank == 0)
        self._writer.set_up_storage_writer(ranks.rank == 0)
        plans = ranks.gather(self._planner.create_local_plan())
        self._plan = self._planner.finish_plan(ranks.call_on_rank_0(lambda: self._plan_all(plans))[ranks.rank])

    def _plan_all(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, self._metadata = self._planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(plans)

    def write(self, copy: Mapping[str, Any]) -> None:
        """Write this rank's shards. copy: the state of __init__(), with each tensor replaced by a copy of its shard."""
        self._planner.take_from(dict(copy))
        with by_descriptor(self._directory) as self._writer.path:
            self._results = self._writer.write_data(self._plan, self._planner).wait()
            if self._rank != 0:
                content = pickle.dumps((self._files.entries, self._results))
                write_file(self._file(self._rank, "done"), content, SHARED)

    def report_failure(self, cause: BaseException) -> None:
        """Report the failure to rank 0 through a file, which stays empty on a full disk."""
        with suppress(OSError), by_descriptor(self._directory) as self._writer.path:
            file = self._file(self._rank, "failed")
            try:
                write_file(file, f"rank {self._rank}: {cause}", SHARED)
            except OSError:
                os.close(regular_file(file, os.O_WRONLY | os.O_CREAT, SHARED))

    def collect(self, size: int, must_stop: Callable[[], bool]) -> FileEntries:
        """Wait for all ranks, complete the directory, and return the manifest entries of its files. Only on rank 0.

        Raises CheckpointError when a rank failed, or must_stop() returns True before all ranks are done.
        """
        entries = self._files.entries
        with by_descriptor(self._directory) as self._writer.path:
            collected = [self._wait_for_rank(rank, must_stop) for rank in range(1, size)]
            self._writer.finish(self._metadata, [self._results, *(results for _, results in collected)])
            for rank, (rank_entries, _) in enumerate(collected, start=1):
                entries |= rank_entries
                self._file(rank, "done").unlink()
        entries[".metadata"] = entries.pop(".metadata.tmp")
        return entries

    def _wait_for_rank(self, rank: int, must_stop: Callable[[], bool]) -> tuple[FileEntries, list[Any]]:
        done, failed = self._file(rank, "done"), self._file(rank, "failed")
        while not os.path.lexists(done):
            if os.path.lexists(failed):
                reason = read_bytes(failed, most=MAX_RECORDED).decode(errors="replace")
                raise CheckpointError(printable(reason) or f"rank {rank}: could not write its shard")
            if must_stop():
                raise CheckpointError(f"rank {rank}: timed out waiting for its shard")
            time.sleep(POLL_INTERVAL)
        entries, results = _unpickle(read_bytes(done))
        return entries, results

    def _file(self, rank: int, outcome: str) -> Path:
        return Path(self._writer.path, f"rank_{rank}.{outcome}")


class _CopyPlanner(DefaultSavePlanner):
    """Plans with the tensors of the training; writes their copies."""

    def take_from(self, copy: dict[str, Any]) -> None:
        flat = DefaultSavePlanner()
        flat.set_up_planner(copy)
        self.state_dict = flat.state_dict

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn]


class _HashedFiles(FileSystem):
    """The writer's files, with their checksums."""

    def __init__(self) -> None:
        self.entries: FileEntries = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", mode
        with open_hashed(Path(path), self.entries) as stream:
            yield stream


def _visibility_error(directory: Path, rank: int) -> str | None:
    """Wait until `directory` is visible: network file systems show it with a delay. Returns an error, or None."""
    start = time.monotonic()
    while not directory.is_dir():
        if time.monotonic() - start > VISIBILITY_TIMEOUT:
            return (
                f"rank {rank} on {socket.gethostname()} does not see {directory}, which rank 0 created; "
                f"fsdp needs a checkpoint directory that all nodes share"
            )
        time.sleep(POLL_INTERVAL)
    return None


# ---- loading ----


def load(directory: Path, state: dict[str, Any], ranks: Ranks, optional: Iterable[str] = ()) -> None:
    """Load into `state` in place. The number of ranks may differ from that of the saving run. Collective.

    optional: the keys of `state` whose values the checkpoint may lack; they become empty.

    Raises CheckpointError on every rank when a rank cannot read its shards, or when tensors of the checkpoint and of
    `state` differ in name or shape.
    """
    reader = _SafeReader(directory)
    reader.ranks = ranks
    reader.fs = _RegularFiles()
    if fault := next(filter(None, ranks.all_gather(reader.fault(ranks.rank))), None):
        raise CheckpointError(fault)
    saved = reader.read_metadata().state_dict_metadata
    state |= {name: {} for name in optional if not any(key.startswith(f"{name}.") for key in saved)}
    try:
        dcp.load(state, storage_reader=reader, planner=_StrictPlanner())
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, OSError):
            raise CheckpointError(f"{directory}: cannot be read on rank {rank}: {cause}") from error
        if isinstance(cause, pickle.UnpicklingError):
            raise CheckpointError(f"{directory}: not loaded: {cause}") from error
        raise CheckpointError(f"{directory} does not fit this training: {cause}") from error


class _SafeReader(dcp.FileSystemReader):
    """Reads the metadata, which is a pickle, without running code from it."""

    ranks: Ranks

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Wait for the other ranks before torch's collective, which has a timeout."""
        try:
            return super().read_data(plan, planner)
        finally:
            self.ranks.meet()

    def fault(self, rank: int) -> str | None:
        """Read the metadata. Returns the error on this rank, or None."""
        file = Path(self.path, ".metadata")
        try:
            with open(file, "rb", opener=checkpoint_file) as stream:
                self._metadata: Metadata = _unpickle(stream.read())
            if any("/" in entry.relative_path for entry in self._metadata.storage_data.values()):
                return f"{file}: not loaded: it names a file that is not in the checkpoint"
        except OSError as error:
            return f"{file}: cannot be read on rank {rank}: {error}"
        except (pickle.UnpicklingError, AttributeError, TypeError) as error:
            return f"{file}: not loaded: {error}"
        return None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class _RegularFiles(FileSystem):
    """The reader's files. Links are not followed."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with open(path, mode, opener=checkpoint_file) as stream:
            yield stream


class _StrictPlanner(DefaultLoadPlanner):
    """Refuses pickles that could run code, and checkpoints with tensors that the state lacks."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata.items()
        tensors = {name for name, kind in saved if isinstance(kind, TensorStorageMetadata)}
        if unknown := sorted(tensors - set(self.state_dict)):
            raise ValueError(f"it has tensors that this training lacks ({len(unknown)}, such as {unknown[0]})")
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        load_safely(value)  # raises unless the value is safe for the parent class to load
        value.seek(0)
        super().load_bytes(read_item, value)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in SAFE_CLASSES or is_dtype:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(refusal(f"{module}.{name}"))


def _member(kind: object, name: str) -> Enum:
    """Return a member of an enumeration, like getattr(), which pickles of Python 3.11.0 to 3.11.3 call."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(refusal(f"{name} of {kind}"))


def _unpickle(content: bytes) -> Any:
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a damaged pickle causes
        raise pickle.UnpicklingError(f"damaged ({type(error).__name__})") from None
