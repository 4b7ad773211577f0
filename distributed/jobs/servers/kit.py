"""The files of Muster that servers of a job list need."""

from __future__ import annotations

import functools
import hashlib
import io
import tarfile
from pathlib import Path

from distributed.files import KIT

# The files that jobs.host.service and its supervisors need on a server. The list leaves out distributed/runs/, because
# usage_sampler.py imports it only to take samples, and supervisors of jobs take none.
KIT_FILES = (
    "distributed/__init__.py", "distributed/exit_codes.py", "distributed/files.py", "distributed/metrics.py",
    "distributed/trust.py",
    "distributed/host/__init__.py", "distributed/host/clock.py", "distributed/host/collectives.py",
    "distributed/host/gpus.py", "distributed/host/process_scan.py", "distributed/host/signals.py",
    "distributed/host/system.py",
    "distributed/jobs/__init__.py", "distributed/jobs/host/__init__.py", "distributed/jobs/host/checks.py",
    "distributed/jobs/host/host_attempt.py", "distributed/jobs/host/outputs.py", "distributed/jobs/host/panes.py",
    "distributed/jobs/host/service.py",
    "distributed/launch/__init__.py", "distributed/launch/output_lines.py", "distributed/launch/node_reports.py",
    "distributed/launch/output_metrics.py", "distributed/launch/shown_ranks.py",
    "distributed/launch/supervisor.py", "distributed/launch/usage_sampler.py",
    "distributed/training/__init__.py", "distributed/training/base_model.py",
    "scripts/lib/module.py", "scripts/lib/in_node_env.sh", "scripts/lib/environment.bash",
    "scripts/lib/common.bash", "scripts/lib/node_env.bash",
)  # fmt: skip


@functools.cache
def kit_archive() -> tuple[str, bytes]:
    """(name, tar archive) of KIT_FILES; the name is a hash of the contents."""
    buffer = io.BytesIO()
    digest = hashlib.sha256()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in KIT_FILES:
            path = Path(KIT, name)
            digest.update(name.encode() + b"\0" + path.read_bytes())
            archive.add(path, name)
    return digest.hexdigest()[:12], buffer.getvalue()
