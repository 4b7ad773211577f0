"""What torch.compile keeps for later runs is code: train.py keeps it where no other user can have put it before.

The other user is real. PyTorch's own directory, `torchinductor_USER` in /tmp, is a file of this user: whatever uses it
fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed import compiler_cache

KIT = Path(__file__).parents[1]
OTHER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
# Prints the directories that PyTorch uses; that of headers is in a module that only the compiler imports.
USE = """
import json, os, sys
from distributed import compiler_cache
problem = compiler_cache.use()
from torch._inductor import codecache
from torch._inductor.runtime import cache_dir_utils, runtime_utils
from torch._dynamo.package import DynamoCache
found = [cache_dir_utils.cache_dir(), runtime_utils.default_cache_dir(), os.path.dirname(codecache._HEADER_DIR),
         *(os.path.dirname(path) for path in vars(DynamoCache).values())]
print(json.dumps([problem, *found, oct(os.stat(found[0]).st_mode)]))
"""
# A sitecustomize.py: at its end, each rank of train.py writes the same to $SHOWN, and its first environment beside it.
SHOW = """
import atexit, os, sys

def show():
    if sys.argv[0].endswith("train.py"):
        from torch._inductor import codecache
        from torch._inductor.runtime import runtime_utils
        from torch._dynamo.package import DynamoCache
        found = [os.environ["TORCHINDUCTOR_CACHE_DIR"], runtime_utils.default_cache_dir(),
                 os.path.dirname(codecache._HEADER_DIR), *map(os.path.dirname, vars(DynamoCache).values())]
        with open(os.environ["SHOWN"], "w") as file:
            file.write("\\n".join(found))
        with open(os.environ["SHOWN"] + ".environment", "wb") as file:
            file.write(open("/proc/self/environ", "rb").read())

atexit.register(show)
"""


def as_other(*command: object) -> None:
    """Run a command as another user."""
    ids = ("setpriv", "--reuid", str(OTHER), "--regid", str(OTHER), "--clear-groups")
    subprocess.run([*ids, *map(str, command)], check=True, cwd="/")


def use(directory: Path, **env: str) -> tuple[str, set[str], str]:
    """Call use() in a new process; returns the problem, the directories that PyTorch uses then, and their mode."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHINDUCTOR_", "XDG_"))}
    variables |= {"PYTHONPATH": str(KIT), "LOGNAME": "alice", "TMPDIR": str(directory), **env}
    done = subprocess.run([sys.executable, "-c", USE], env=variables, capture_output=True, text=True, check=True)
    problem, *found, mode = json.loads(done.stdout)
    return problem, set(found), mode


def choose(monkeypatch: pytest.MonkeyPatch, **env: str) -> tuple[str, str | None]:
    """Call choose(); returns the problem, and the value of TORCHINDUCTOR_CACHE_DIR then."""
    kept = {name: os.environ[name] for name in os.environ if name not in ("XDG_CACHE_HOME", compiler_cache.VARIABLE)}
    monkeypatch.setattr(os, "environ", kept | env)
    return compiler_cache.choose(), os.environ.get(compiler_cache.VARIABLE)


def test_the_cache_is_a_private_directory_of_the_user(tmp_path: Path) -> None:
    expected = str(tmp_path / ".cache/muster/torchinductor")
    assert use(tmp_path, HOME=str(tmp_path)) == ("", {expected}, "0o40700")
    assert [path.name for path in tmp_path.iterdir()] == [".cache"]


def test_variables_of_the_user_choose_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = str(tmp_path / ".cache/muster/torchinductor")
    assert choose(monkeypatch, HOME=str(tmp_path), TORCHINDUCTOR_CACHE_DIR="") == ("", expected)
    expected = str(tmp_path / "named/muster/torchinductor")
    assert choose(monkeypatch, HOME="/proc", XDG_CACHE_HOME=str(tmp_path / "named")) == ("", expected)
    assert choose(monkeypatch, HOME="/proc", TORCHINDUCTOR_CACHE_DIR="mine") == ("", "mine")


@pytest.mark.parametrize("writable", [".cache/muster/torchinductor", ".cache/muster", ".cache", "."])
def test_a_directory_that_others_can_write_to_or_replace_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: str
) -> None:
    (tmp_path / "home/.cache/muster/torchinductor").mkdir(parents=True)
    (tmp_path / "home" / writable).chmod(0o777)
    problem = f"{tmp_path / 'home' / writable}: other users can write to it (mode 777)"
    assert choose(monkeypatch, HOME=str(tmp_path / "home")) == (problem, None)


@as_root
def test_a_directory_below_one_of_another_user_is_not_used(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_other("mkdir", "-p", "-m", "777", shared / "cache-alice/muster")
    problem, found = choose(monkeypatch, XDG_CACHE_HOME=str(shared / "cache-alice"))
    assert problem.startswith(f"{shared}/cache-alice") and "belongs to user id 12345" in problem
    assert found is None


def test_without_a_private_directory_one_that_nobody_can_replace_is_used_and_removed(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    problem, found, mode = use(tmp_path / "open", HOME="/proc")
    assert "/proc/.cache" in problem and {os.path.dirname(one) for one in found} == {"/tmp"}
    assert len(found) == 1 and mode == "0o40700" and not any(map(os.path.exists, found))


@as_root
@pytest.mark.parametrize(
    ("agent", "cache"),
    [("fast", "own"), ("torchrun", "own"), ("fast", "foreign"),
     *(pytest.param(*one, marks=pytest.mark.soak) for one in (("torchrun", "foreign"), ("fast", "chosen"),
                                                              ("torchrun", "chosen")))],
)  # fmt: skip
def test_no_rank_of_train_py_uses_what_another_user_has_made_first(shared: Path, agent: str, cache: str) -> None:
    home, site, work, shown = (shared / name for name in ("home", "site", "work", "shown"))
    for directory in (home, site, work):
        directory.mkdir()
    as_other("touch", shared / "torchinductor_alice")
    if cache == "foreign":
        as_other("mkdir", "-m", "777", shared / "cache")
    (site / "sitecustomize.py").write_text(SHOW)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHINDUCTOR_", "XDG_"))}
    env |= {"HOME": str(home), "LOGNAME": "alice", "USER": "alice", "TMPDIR": str(shared), "PYTHONPATH": str(site)}
    env |= {"SHOWN": str(shown)} | ({"XDG_CACHE_HOME": str(shared / "cache")} if cache == "foreign" else {})
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(home / "mine")} if cache == "chosen" else {}
    launch = [str(KIT / "scripts/ssh/launch_singlenode.sh"), "--agent", agent, str(KIT / "config/quickstart.yaml"), "1"]
    options = ["--", "train.steps=1", "checkpoint.dir=null", "model.n_layer=1", "distributed.backend=gloo"]
    done = subprocess.run([*launch, *options], cwd=work, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = set(shown.read_text().splitlines())
    expected = {"own": home / ".cache/muster/torchinductor", "chosen": home / "mine"}.get(cache)
    assert found == {str(expected)} or (not expected and {os.path.dirname(one) for one in found} == {str(shared)})
    before = (shared / "shown.environment").read_bytes().split(b"\0")
    assert [one for one in before if one.startswith(b"TORCHINDUCTOR_")] == (
        [os.fsencode(f"TORCHINDUCTOR_CACHE_DIR={home}/mine")] if cache == "chosen" else []
    )
    left = {path.name for path in shared.iterdir()} - {"home", "site", "work", "shown", "shown.environment", "cache"}
    assert left == {"torchinductor_alice"}
    assert (shared / "torchinductor_alice").stat().st_uid == OTHER
