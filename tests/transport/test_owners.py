"""Code on a node runs only if no other user made it in a directory where all users can create files.

The directories of a test belong to root, so other users are ids to which root gives files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distributed.files import KIT
from distributed.host.ssh_call import for_any_shell
from distributed.runs.lookup import EXITED, Launcher, Run, RunNode
from distributed.runs.query import RunQuery, python_of
from distributed.transport.commands import Messages
from distributed.transport.loop import SshCommand
from distributed.transport.owners import FOREIGN, exit_if_planted
from distributed.trust import parts_of

OTHER = 12345
SYSTEM_PYTHON = "/usr/bin/python3"  # which other users can run
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def project(shared: Path) -> Path:
    """A working directory with a Python, and a part of Muster."""
    for name in ("project/.venv/bin/python", "muster/scripts/lib/module.py"):
        (shared / name).parent.mkdir(parents=True)
        (shared / name).touch()
    return shared / "project"


def line_for(project: Path) -> str:
    command = [str(project / ".venv/bin/python"), "-I", "-S", str(project.parent / "muster/scripts/lib/module.py")]
    return exit_if_planted([*command, "launch.supervisor", "--dir", "/x"], str(project), 69)


def refusal(line: str) -> str:
    """Why a node refuses the command; "" if it runs."""
    done = subprocess.run(["bash", "-pc", f"{line}echo runs"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == ((69, "") if done.stderr else (0, "runs\n"))
    return done.stderr.rstrip("\n")


def test_own_code_runs_and_a_missing_file_is_left_to_the_command_that_needs_it(project: Path) -> None:
    line = line_for(project)
    assert refusal(line) == ""
    (project / ".venv/bin/python").unlink()
    assert refusal(line) == ""


@pytest.mark.parametrize("name", ["project", "muster"])
def test_a_directory_that_another_user_has_made_is_refused(project: Path, name: str) -> None:
    line, planted = line_for(project), project.parent / name
    os.chown(planted, OTHER, OTHER)
    reason = f"who made it in {planted.parent}, where all users can create files; it is not used"
    assert refusal(line) == f"{planted}: belongs to user id {OTHER}, {reason}"


def test_a_link_of_another_user_is_refused_although_its_target_is_not_his(project: Path) -> None:
    line, moved = line_for(project), project.with_name("moved")
    project.rename(moved)
    project.symlink_to(moved)
    assert refusal(line) == ""
    os.chown(project, OTHER, OTHER, follow_symlinks=False)
    assert f"{project}: belongs to user id {OTHER}" in refusal(line)


@pytest.mark.parametrize("target", ["moved", "{}/moved", "../{1}/moved", "line\nbreak"])
def test_a_link_of_another_user_in_the_middle_of_an_own_chain_is_refused(project: Path, target: str) -> None:
    """An own link leads to a place where all users can create files, and there to a directory of this user."""
    planted, moved = project.with_name("planted"), project.with_name(target.rpartition("/")[2])
    project.rename(moved)
    project.symlink_to("planted")
    planted.symlink_to(target.format(project.parent, project.parent.name))
    assert refusal(line_for(project)) == ""
    line = line_for(project)
    os.chown(planted, OTHER, OTHER, follow_symlinks=False)
    assert f"{planted}: belongs to user id {OTHER}" in refusal(line)


def test_a_loop_of_links_ends(project: Path) -> None:
    line = line_for(project)
    shutil.rmtree(project)
    project.symlink_to("loop")
    project.with_name("loop").symlink_to("project")
    assert refusal(line) == f"{project}: too many links"


@pytest.mark.parametrize("path", ["/a//b/./c", "/a/../b", "/x\ny/ z'\"$(echo)"])
def test_the_parts_of_a_path_are_those_of_the_kernel(path: str) -> None:
    """The function of bash and that of Python look at the same parts."""
    script = FOREIGN.replace("while read -r -d ''", "printf '%s\\0' \"${parts[@]}\"; return; while read -r -d ''", 1)
    done = subprocess.run(
        ["bash", "-pc", f'{script}; foreign strict "$1"', "bash", path], capture_output=True, text=True
    )
    assert done.stdout.split("\0")[:-1] == list(parts_of(path))


def test_the_directory_to_which_an_own_link_leads_counts_too(project: Path) -> None:
    line = line_for(project)
    project.rename(project.with_name("moved"))
    project.symlink_to("moved")
    os.chown(project.with_name("moved"), OTHER, OTHER)
    assert f"moved: belongs to user id {OTHER}" in refusal(line)


@pytest.mark.parametrize(
    ("removed", "reason"),
    [
        ("project", "bash: line 1: {}/project: No such file or directory"),
        ("muster", "can't open file '{}/muster/scripts/lib/module.py'"),
    ],
)
def test_what_another_user_could_still_make_is_refused_as_missing(project: Path, removed: str, reason: str) -> None:
    line = line_for(project)
    shutil.rmtree(project.with_name(removed))
    assert refusal(line) == reason.format(project.parent)


def test_a_script_elsewhere_counts_too(project: Path) -> None:
    script = project.with_name("my script.py")
    script.touch()
    line = exit_if_planted(["/bin/true"], str(project), 69, [str(script)])
    assert refusal(line) == ""
    os.chown(script, OTHER, OTHER)
    assert f"{script}: belongs to user id {OTHER}" in refusal(line)
    script.unlink()
    assert refusal(line) == f"{script}: not found there"


def test_an_owner_or_a_mode_that_the_launching_machine_has_too_is_accepted(project: Path) -> None:
    os.chown(project, OTHER, OTHER)
    project.parent.chmod(0o777)
    assert refusal(line_for(project)) == ""
    project.parent.chmod(0o1777)
    line = line_for(project)
    assert refusal(line) == ""
    project.parent.chmod(0o777)
    assert refusal(line) == f"{project.parent}: all users can replace {project} there"


def test_an_owner_here_does_not_count_on_a_node_where_this_user_has_another_id(project: Path) -> None:
    os.chown(project, OTHER, OTHER)
    line = line_for(project)
    as_third = ["setpriv", "--reuid", "23456", "--regid", "23456", "--clear-groups", "bash", "-pc", f"{line}echo runs"]
    done = subprocess.run(as_third, capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout) == (69, "") and f"belongs to user id {OTHER}" in done.stderr


def test_who_owns_a_recorded_python_here_now_may_not_have_made_it_on_a_node(project: Path) -> None:
    """The Python of a run may have been removed since, and made again by another user, also on this machine."""
    python = str(project / ".venv/bin/python")
    node = RunNode("n1", "n1", 1, 0)
    run = Run(project, str(project), python, "", "", (), Launcher("", 1, None, EXITED, 0), (node,))
    query = RunQuery(run, Messages("status.sh"))
    os.chown(project.parent / "muster", 23456, 23456)  # Muster is not recorded
    for owner, expected in ((0, ""), (OTHER, f"{project}: belongs to user id {OTHER}")):
        os.chown(project, owner, owner)
        command = [python, "-I", str(project.parent / "muster/scripts/lib/module.py"), "runs.node_status"]
        line = exit_if_planted(command, "", 69, recorded=query.ssh.recorded)
        assert refusal(line).startswith(expected)
        encoded = for_any_shell(line).rpartition("' ")[0].rpartition("'")[2]
        called = query.ssh.command(node, command)
        assert isinstance(called, SshCommand) and encoded in called.arguments[-1]
        in_job = replace(run, job="17")
        assert python_of(in_job, node) == (sys.executable if expected else python)
    project.rename(project.parent / "removed")  # another user could make it again
    assert python_of(in_job, node) == sys.executable


@pytest.mark.parametrize("is_open", [False, True])
def test_in_a_container_another_users_files_are_refused_where_all_users_can_create_them(
    shared: Path, is_open: bool
) -> None:
    """In a container that maps one user id, all other users are 65534, also root."""
    (shared / "top").mkdir()
    (planted := shared / "top/planted").mkdir()
    (planted / "program").touch()
    os.chown(planted, OTHER, OTHER)
    os.chown(shared, 23456, 23456)
    shared.chmod(0o755)
    (shared / "top").chmod(0o1777 if is_open else 0o755)
    bash = f'{FOREIGN}; owners="23456 0" open=; for kind in planted strict; do foreign $kind "{planted}/program"; done'
    python = (
        "import sys; sys.path[0] = sys.argv[1]; from distributed.trust import *; print(foreign_ancestor(sys.argv[2]))"
    )
    common = f'. "{KIT}/scripts/lib/common.bash"; find_foreign "{planted}"; echo "$FOREIGN"'
    for call in (["bash", "-pc", bash], [SYSTEM_PYTHON, "-Ic", python, KIT, str(planted)], ["bash", "-pc", common]):
        user = ["setpriv", "--reuid", "23456", "--regid", "23456", "--clear-groups"]
        done = subprocess.run(
            [*user, "unshare", "--user", "--map-user=23456", *call], capture_output=True, text=True, cwd="/"
        )
        if done.stderr.startswith("unshare") or "Permission denied" in done.stderr:
            pytest.skip("no user namespaces, or another user cannot read Muster")
        assert not done.stderr
        assert (str(planted) in done.stdout) == is_open, call


def test_commands_without_own_code_are_not_checked() -> None:
    assert exit_if_planted(["sh", "-c", "true"], "/tmp", 69) == exit_if_planted([], "", 69) == ""
    assert "planted" in exit_if_planted([sys.executable, "-c", "1"], "", 69)
