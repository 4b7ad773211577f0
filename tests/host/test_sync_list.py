"""--sync lists the files that git does not ignore or, outside a checkout, all files except .venv.

Untracked files in the top-level directories logs, checkpoints and experiments are not listed. rsync copies each listed
file.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.files import KIT
from distributed.host import sync_list, system
from distributed.trust import GIT, git_environment

ODD_NAMES = ("-a", "a b", "a\nb", "é", os.fsdecode(b"\xff"), "#a", ";a", "[a]*", "\\a", '"a"')


@pytest.fixture(autouse=True)
def _without_git_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the git settings of the user and of the system."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in list(os.environ):
        if name.startswith("GIT_") and not name.startswith("GIT_CONFIG_"):
            monkeypatch.delenv(name)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A checkout without files."""
    return checkout(tmp_path / "work")


def git(directory: Path, *arguments: str) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *author, *arguments], cwd=directory, check=True, capture_output=True)


def checkout(directory: Path) -> Path:
    directory.mkdir(parents=True)
    git(directory, "init", "--quiet")
    return directory


def write(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name.encode("utf-8", "replace").decode())


def listed(directory: Path) -> set[str]:
    names = list(map(os.fsdecode, sync_list.names_of(str(directory))))
    assert len(names) == len(set(names))
    return set(names)


def copied(directory: Path, target: Path, vanishing: str = "") -> set[str]:
    """Copy as --sync does; return the names of files in the target. vanishing: a file to remove after the listing."""
    names = sync_list.file_list(sync_list.names_of(str(directory)))
    if vanishing:
        (directory / vanishing).unlink()
    options = ["--archive", "--recursive", "--from0", "--files-from=-", "--ignore-missing-args", "--exclude=.git"]
    call = ["rsync", *options, f"{directory}/", f"{target}/"]
    subprocess.run(call, input=names, check=True)
    return {str(path.relative_to(target)) for path in target.rglob("*") if path.is_symlink() or not path.is_dir()}


def test_tracked_files_and_files_that_git_does_not_ignore_are_copied(work: Path, tmp_path: Path) -> None:
    write(work, "data/a.csv", "data/keep.csv", "forced.csv", "sub/b.log", "sub/keep.log", "x.py", "global~", "excluded")
    write(work, "logs/a", "logs/.gitkeep", "checkpoints/c", "experiments/p/e", "sub/logs/mine", ".muster-abc")
    (work / ".gitignore").write_text("*.csv\n!keep.csv\n*.log\n")
    write(work, "sub/.gitignore")
    (work / "sub" / ".gitignore").write_text("!keep.log\n")
    (work / ".git" / "info" / "exclude").write_text("excluded\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".gitconfig").write_text(f"[core]\nexcludesFile = {tmp_path}/ignored\n")
    (tmp_path / "ignored").write_text("*~\n")
    (work / "empty").mkdir()
    git(work, "add", "--force", "forced.csv", "logs/.gitkeep")
    expected = {
        ".gitignore", "data/keep.csv", "forced.csv", "logs/.gitkeep", "sub/.gitignore", "sub/keep.log",
        "sub/logs/mine", "x.py",
    }  # fmt: skip
    assert listed(work) == expected
    assert copied(work, tmp_path / "copy") == expected


def test_a_subdirectory_of_a_checkout_is_copied_without_ignored_files(work: Path) -> None:
    write(work, "outside", "sub/x", "sub/y.log", "sub/logs/z")
    (work / ".gitignore").write_text("*.log\n")
    assert listed(work / "sub") == {"x"}


def test_outside_a_checkout_everything_but_results_and_venv_is_copied(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    write(plain, "a/b/c", "logs/x", "checkpoints/x", "experiments/x", ".venv/x", "a/logs/y", ".gitignore", *ODD_NAMES)
    write(checkout(plain / "nested"), "x")
    (plain / "empty").mkdir()
    (plain / ".gitignore").write_text("a\n")
    assert copied(plain, tmp_path / "copy") == {"a/b/c", "a/logs/y", "nested/x", ".gitignore", *ODD_NAMES}
    assert (tmp_path / "copy" / "empty").is_dir()


@pytest.mark.parametrize("in_git", [False, True])
def test_the_directories_into_which_rsync_writes_are_listed(tmp_path: Path, in_git: bool) -> None:
    for name in ("b/c/file", "b/.git/file", "b/new\nline/file", ".venv/file", "logs/file", "d/e/f/file"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("b")
    (tmp_path / "b/c/link").symlink_to("../../d")
    names = {b"b/c/file": True, b"b/new\nline/file": False, b"d/e/f/file": True, b"link": False, b"b/c/link": False}
    expected = [".", "./b", "./b/c", "./b/new\nline", "./d", "./d/e", "./d/e/f"]
    listed = sync_list.directory_list(str(tmp_path), names if in_git else sync_list.names_of(str(tmp_path)))
    assert listed.decode().split("\0") == [*expected, ""]


def test_files_with_any_name_and_symbolic_links_are_copied(work: Path, tmp_path: Path) -> None:
    write(work, "tracked/x", *(f"{where}/{name}" for name in ODD_NAMES for where in ("tracked", "other")), *ODD_NAMES)
    for name, target in (("to_file", "tracked/x"), ("to_directory", "tracked"), ("dangling", "nowhere")):
        (work / name).symlink_to(target)
    git(work, "add", "tracked", "to_directory")
    found = copied(work, tmp_path / "copy")
    odd = {f"{start}{name}" for name in ODD_NAMES for start in ("", "tracked/", "other/")}
    assert found == {"tracked/x", "to_file", "to_directory", "dangling", *odd}
    assert (tmp_path / "copy" / "to_directory").readlink() == Path("tracked")


def test_tracked_files_that_do_not_exist_any_more_are_left_out(work: Path, tmp_path: Path) -> None:
    write(work, "deleted", "gone/a", "becomes_link/a", "becomes_directory", "becomes_file/a", "stays", "logs/.gitkeep")
    git(work, "add", ".")
    for name in ("deleted", "gone/a", "becomes_link/a", "becomes_directory", "becomes_file/a", "logs/.gitkeep"):
        (work / name).unlink()
    for name in ("gone", "becomes_link", "becomes_file", "logs"):
        (work / name).rmdir()
    write(tmp_path, "disk/a", "disk/.gitkeep")
    write(work, "becomes_directory/b", "becomes_file")
    (work / "becomes_link").symlink_to(tmp_path / "disk")
    (work / "logs").symlink_to(tmp_path / "disk")
    expected = {"becomes_directory/b", "becomes_file", "becomes_link", "stays"}
    assert listed(work) == expected
    assert copied(work, tmp_path / "copy") == expected


def test_submodules_and_nested_checkouts_are_copied(work: Path, tmp_path: Path) -> None:
    other = checkout(tmp_path / "other")
    write(other, "f")
    git(other, "add", ".")
    git(other, "commit", "--quiet", "--message", "f")
    git(work, "submodule", "add", "--quiet", str(other), "module/sub")
    git(work, "submodule", "add", "--quiet", str(other), "unpopulated")
    git(work, "submodule", "deinit", "--quiet", "--force", "unpopulated")
    write(work / "module" / "sub", "new", "ignored.log", "logs/mine")
    (work / "module" / "sub" / ".gitignore").write_text("*.log\n")
    write(checkout(work / "nested" / "deep"), "g", "inner/h")
    write(checkout(work / "nested" / "deep" / "inner" / "most"), "i")
    write(checkout(work / "logs" / "clone"), "j")
    write(checkout(work / "hidden"), "k")
    (work / ".gitignore").write_text("hidden\n")
    checkout(work / "without_files")
    expected = {
        ".gitignore", ".gitmodules", "module/sub/f", "module/sub/new", "module/sub/.gitignore", "module/sub/logs/mine",
        "nested/deep/g", "nested/deep/inner/h", "nested/deep/inner/most/i",
    }  # fmt: skip
    assert listed(work) == expected
    assert copied(work, tmp_path / "copy") == expected


def test_a_linked_worktree_is_a_checkout_and_git_variables_do_not_matter(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(work, "a")
    git(work, "add", ".")
    git(work, "commit", "--quiet", "--message", "a")
    git(work, "worktree", "add", "--quiet", str(tmp_path / "linked"))
    write(tmp_path / "linked", "b", "c.log")
    (tmp_path / "linked" / ".gitignore").write_text("*.log\n")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"):
        monkeypatch.setenv(name, str(tmp_path))
    assert listed(tmp_path / "linked") == {".gitignore", "a", "b"}


def test_a_file_that_vanishes_after_it_was_listed_is_left_out(work: Path, tmp_path: Path) -> None:
    write(work, "stays", "sub/vanishes")
    assert copied(work, tmp_path / "copy", vanishing="sub/vanishes") == {"stays"}


def test_nothing_is_copied_from_a_checkout_in_which_git_ignores_everything(work: Path, tmp_path: Path) -> None:
    write(work, "a")
    (work / ".gitignore").write_text("*\n")
    assert copied(work, tmp_path / "copy") == set()


@pytest.mark.parametrize("nested", ["", "nested"])
def test_a_checkout_of_another_user_is_refused(work: Path, nested: str) -> None:
    if os.getuid():
        pytest.skip("needs root")
    if nested:
        checkout(work / nested)
    write(work / nested, "a")
    for path in (work / nested, work / nested / ".git"):
        os.chown(path, 12345, 12345)
    with pytest.raises(sync_list.SyncError) as refused:
        listed(work)
    assert str(refused.value).startswith(f"{work / nested}/.git: fatal: detected dubious ownership")
    assert str(refused.value).endswith(f"git config --global --add safe.directory {work / nested}")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_git_directory_that_another_user_has_planted_above_is_ignored(tmp_path: Path) -> None:
    planted = checkout(tmp_path / "shared") / ".git"
    os.chown(planted, 12345, 12345)
    write(tmp_path / "shared/mine", "a", ".env")
    (tmp_path / "shared").chmod(0o1777)
    assert listed(tmp_path / "shared/mine") == {"a", ".env"}
    assert "/.git" not in sync_list.secrets_warning(str(tmp_path / "shared/mine"), {b".env": False})
    (tmp_path / "shared").chmod(0o755)
    with pytest.raises(sync_list.SyncError):  # its owner made it where only some users can
        listed(tmp_path / "shared/mine")


def test_git_runs_no_program_to_fetch_missing_files(work: Path) -> None:
    """git would call the remote repository of a partial clone to expand a sparse index."""
    write(work, "kept/a", "left/b")
    git(work, "add", ".")
    git(work, "commit", "-q", "-m", "one")
    git(work, "sparse-checkout", "init", "--cone", "--sparse-index")
    git(work, "sparse-checkout", "set", "kept")
    tree = subprocess.check_output(["git", "-C", str(work), "rev-parse", "HEAD:left"], text=True).strip()
    (work / ".git/objects" / tree[:2] / tree[2:]).unlink()
    proof = work.parent / "proof"
    for key, value in (
        ("extensions.partialClone", "origin"), ("core.repositoryFormatVersion", "1"), ("protocol.ext.allow", "always"),
        ("remote.origin.promisor", "true"), ("remote.origin.url", f"ext::touch {proof}"),
    ):  # fmt: skip
        git(work, "config", key, value)
    subprocess.run(["git", "-C", str(work), "ls-files"], capture_output=True)
    assert proof.exists(), "git alone runs it"
    proof.unlink()
    with contextlib.suppress(sync_list.SyncError):  # whether git expands the index depends on the times of files
        assert listed(work) == {"kept/a"}
    system.run_program([*GIT, "-C", str(work), "check-ignore", "a"], 20.0, git_environment())
    assert not proof.exists()


def test_a_checkout_is_refused_if_git_is_not_installed(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(work, "sub/a")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(sync_list.SyncError, match=f"{work}/.git: this is a git checkout, but git is not installed"):
        listed(work / "sub")


@pytest.mark.parametrize("content", [None, "gitdir: /nowhere\n"])
def test_a_damaged_checkout_is_refused(tmp_path: Path, content: str | None) -> None:
    write(tmp_path, "project/a")
    if content is None:
        (tmp_path / "project" / ".git").mkdir()
    else:
        (tmp_path / "project" / ".git").write_text(content)
    with pytest.raises(sync_list.SyncError, match=r"/project/.git: fatal: not a git .* git status must work in "):
        listed(tmp_path / "project")


def test_the_program_prints_names_or_the_error(work: Path) -> None:
    write(work, "a b", "c")
    call = [sys.executable, "-I", f"{KIT}/scripts/lib/module.py", "host.sync_list", str(work)]
    printed = subprocess.run(call, capture_output=True, check=True).stdout
    assert sorted(printed.split(b"\0")) == [b"", b"./a b", b"./c"]
    done = subprocess.run([*call[:-1], str(work / "none")], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{work}/none: No such file or directory\n")


SECRETS = (
    ".env", "sub/.env.production", "id_rsa", ".ssh/id_ed25519", "tls.key", ".netrc", "credentials", ".npmrc",
    "kubeconfig", ".aws/credentials.json", ".envrc", "A.KEY",
)  # fmt: skip
NO_SECRETS = (
    ".env.example",
    ".env.sample",
    "id_rsa.pub",
    "credentials.py",
    "keys.py",
    "environment",
    "certificate.pem",
)
PRIVATE = ("wandb_env", "token.json", "node.pem")  # secrets if only their owner can read them


def write_secrets(directory: Path) -> None:
    write(directory, *SECRETS, *NO_SECRETS, *PRIVATE, "results.json", "run.sh")
    (directory / "link.key").symlink_to("/nowhere")
    for name in (*PRIVATE, "results.json"):
        (directory / name).chmod(0o600)
    (directory / "run.sh").chmod(0o700)
    directory.chmod(0o755)


def warning(directory: Path) -> str:
    return sync_list.secrets_warning(str(directory), sync_list.names_of(str(directory)))


@pytest.mark.parametrize("name", [*SECRETS, *PRIVATE])
def test_an_untracked_file_that_looks_like_a_secret_is_named(work: Path, name: str) -> None:
    write_secrets(work)
    (work / ".gitignore").write_text("".join(f"/{other}\n" for other in (*SECRETS, *PRIVATE) if other != name))
    assert warning(work) == f"{name}: may be secret and will be copied; list such files in .gitignore"


def test_what_a_link_leads_to_is_not_called_a_secret(work: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / ".env").write_text("x")
    (work / "link").symlink_to(tmp_path / "data")
    assert warning(work) == ""


def test_tracked_files_and_other_files_are_not_called_secrets(work: Path) -> None:
    write_secrets(work)
    git(work, "add", "--force", *SECRETS, *PRIVATE)
    assert warning(work) == ""
    git(work, "rm", "--cached", "-q", *PRIVATE)
    for name in PRIVATE:
        (work / name).chmod(0o644)
    assert warning(work) == ""


def test_at_most_three_secrets_are_named_without_control_characters(work: Path) -> None:
    write(work, "\x1b[31m.key", "b.key", "c.key", "d.key", "e.key")
    assert (
        warning(work)
        == ".key, b.key, c.key and 2 more: may be secret and will be copied; list such files in .gitignore"
    )


def test_outside_of_a_checkout_all_files_may_be_secrets(tmp_path: Path) -> None:
    write_secrets(tmp_path / "project")
    found = warning(tmp_path / "project")
    assert found.endswith(f"and {len(SECRETS) + len(PRIVATE) - 3} more: may be secret and will be copied; "
                          "move such files to another directory")  # fmt: skip


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="os.walk() does not call itself")
def test_directories_that_are_nested_too_deeply_are_named(tmp_path: Path) -> None:
    """As a rank or another user can make them."""
    try:
        (tmp_path / "data").mkdir()
        for _ in range(12):
            deep = tmp_path / "new" / Path(*"d" * 100)
            deep.mkdir(parents=True)
            (tmp_path / "data").rename(deep / "d")
            (tmp_path / "new").rename(tmp_path / "data")
        names = sync_list.names_of(str(tmp_path))
        for function in (sync_list.directory_list, sync_list.secrets_warning):
            with pytest.raises(sync_list.SyncError, match=r"/data: directories are nested too deeply below it; "):
                function(str(tmp_path), names)
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "data"], check=True)  # pytest cannot
