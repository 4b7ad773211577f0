"""What the servers of a list share: its settings and its cache of base models."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed.jobs.lists.bases import script_name
from distributed.jobs.schedule.backend import NotStarted
from distributed.jobs.schedule.base_cache import Cache
from distributed.training.base_model import BaseModelError, hash_of


@dataclass(frozen=True)
class ListContext:
    """The settings that all servers of a list share."""

    list_id: str
    cwd: Path
    script: str
    grace: float = 30.0  # seconds between SIGTERM and SIGKILL
    panes: bool = True
    sync: bool = False
    forwarded: Mapping[str, str] = field(default_factory=dict)  # the dispatcher's variables that jobs over ssh inherit
    machines: dict[tuple[str, str], str] = field(default_factory=dict)  # (host name, boot id) -> server
    cache: Cache = field(default_factory=lambda: Cache(Path()))

    @property
    def script_name(self) -> str:
        """The path of the script as Muster writes it to the file .muster_job in an output directory."""
        return script_name(self.script)


async def cached_manifest(cache: Cache, digest: str) -> dict[str, Any]:
    """The manifest of a base model in the dispatcher's cache, verified. Raises NotStarted."""
    try:
        return await asyncio.to_thread(cache.verify, digest)
    except BaseModelError as error:
        raise NotStarted(f"base {hash_of(digest)}: {error}", "base") from None
