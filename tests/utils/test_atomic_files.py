import errno
import json
import os
import secrets
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import UTILS_ONLY, python_process

from kmp.utils import atomic_files, file_locks

IMPORTS = "from pathlib import Path; from kmp.utils import atomic_files"


def names_in(folder):
    return [path.name for path in folder.iterdir()]


def test_atomic_write_replaces_the_file_on_exit(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_files.atomic_write(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names_in(tmp_path) == ["file"]


def test_interrupted_write_leaves_only_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def interrupted_write():
        with atomic_files.atomic_write(path) as file:
            file.write(b"ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_write()
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["file"]


def test_symlink_is_followed_and_its_target_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "folder" / "file")
    atomic_files.write_json(link, {"a": 1})
    assert link.is_symlink()
    assert json.loads((tmp_path / "folder" / "file").read_text()) == {"a": 1}


def test_pipe_is_written_in_place(tmp_path):
    pipe, contents = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: contents.append(pipe.read_text()))
    reader.start()
    atomic_files.write_json(pipe, [1])
    reader.join()
    assert json.loads(contents[0]) == [1]


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_path_to_open_stdout_is_written_in_place(tmp_path, name):
    """Even if stdout is redirected to a regular file, so that later output goes to the same file."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    write = f"atomic_files.write_json(Path({name!r}), [1]); print('later')"
    with (tmp_path / "out").open("w") as out:
        subprocess.run(
            [sys.executable, "-c", f"{UTILS_ONLY}\n{IMPORTS}\n{write}"], stdout=out, check=True, cwd=tmp_path
        )
    assert sorted(names_in(tmp_path)) == ["link", "out"]
    assert "later" in (tmp_path / "out").read_text()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="This machine has no /dev/shm.")
def test_regular_files_are_not_open_files(tmp_path):
    assert not atomic_files._points_to_open_file(Path("/dev/shm/file"))
    assert not atomic_files._points_to_open_file(tmp_path / "file")


def test_replaced_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o600)
    atomic_files.write_json(path, {})
    assert path.stat().st_mode & 0o777 == 0o600


def test_new_file_has_the_permissions_that_the_umask_gives(tmp_path):
    umask = os.umask(0o027)
    try:
        atomic_files.write_json(tmp_path / "file", {})
    finally:
        os.umask(umask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_new_content_is_never_more_readable_than_the_file_it_replaces(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o600)
    with atomic_files.atomic_write(path) as file:
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600


def test_content_and_folder_are_on_the_disk_before_the_write_returns(tmp_path, monkeypatch):
    calls, replace = [], Path.replace

    def record_replace(partial, path):
        calls.append("replace")
        replace(partial, path)

    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(Path, "replace", record_replace)
    atomic_files.write_json(tmp_path / "file", [1])
    assert calls == [(tmp_path / "file").stat().st_ino, "replace", tmp_path.stat().st_ino]


def test_temporary_files_have_different_names_and_an_existing_one_is_not_followed(tmp_path, monkeypatch):
    path, victim = tmp_path / "file", tmp_path / "victim"
    with atomic_files.atomic_write(path), atomic_files.atomic_write(path):
        assert len(names_in(tmp_path)) == 2
    victim.write_text("unchanged")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "0" * 2 * size)
    (tmp_path / f".file.{'0' * 8}.partial").symlink_to(victim)
    with pytest.raises(FileExistsError):
        atomic_files.write_json(path, [1])
    assert victim.read_text() == "unchanged"


def leftover_of_killed_process(folder):
    """Kills a process while it writes to `file`, and returns its temporary file."""
    code = "with atomic_files.atomic_write(Path('file')) as file: print(flush=True); sys.stdin.read()"
    with python_process(f"{IMPORTS}; import os; os.chdir(sys.argv[1])\n{code}", folder):
        atomic_files.write_json(folder / "file", [1])
        (alive,) = folder.glob(".file.*.partial")  # it is not removed: the process is alive
    return alive


def test_next_write_removes_what_a_killed_process_left(tmp_path):
    leftover = leftover_of_killed_process(tmp_path)
    assert leftover.exists()
    atomic_files.write_json(tmp_path / "file", [2])
    assert names_in(tmp_path) == ["file"]


def test_write_removes_no_file_but_its_own_leftovers(tmp_path):
    of_others = [
        "partial-file",
        ".file.0123456789abcdeg.partial",
        ".file.012345670.partial",
        ".other.01234567.partial",
        "file.01234567.partial",
        ".file.01234567.partial.txt",
    ]
    for name in of_others:
        (tmp_path / name).write_text("")
    (tmp_path / ".file.0000000000000001.partial").symlink_to(tmp_path / of_others[0])
    os.mkfifo(tmp_path / ".file.0000000000000002.partial")
    (tmp_path / ".file.0000000000000003.partial").mkdir()
    before = set(names_in(tmp_path))
    atomic_files.write_json(tmp_path / "file", [1])
    assert set(names_in(tmp_path)) == before | {"file"}


def test_leftover_stays_where_files_cannot_be_locked(tmp_path, monkeypatch):
    leftover = tmp_path / ".file.01234567.partial"
    leftover.write_text("")
    monkeypatch.setattr(file_locks, "fcntl", None)
    atomic_files.write_json(tmp_path / "file", [1])
    assert sorted(names_in(tmp_path)) == [leftover.name, "file"]


def test_temporary_file_that_is_removed_before_it_is_locked_is_created_again(tmp_path, monkeypatch):
    try_lock = file_locks.try_lock
    removed = []

    def remove_first(descriptor, shared=False):
        if not removed:
            (partial,) = tmp_path.iterdir()
            partial.unlink()
            removed.append(partial)
        return try_lock(descriptor, shared)

    monkeypatch.setattr(file_locks, "try_lock", remove_first)
    atomic_files.write_json(tmp_path / "file", [1])
    assert removed
    assert names_in(tmp_path) == ["file"]


def test_temporary_file_that_another_process_always_locks_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(file_locks, "try_lock", lambda *arguments, **options: False)
    with pytest.raises(OSError, match=r"removed all temporary files.*path.txt"):
        atomic_files.write_json(tmp_path / "path.txt", [1])
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EBUSY])
def test_file_that_cannot_be_replaced_is_written_in_place(tmp_path, monkeypatch, code):
    def fail(*arguments):
        raise OSError(code, os.strerror(code))

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", fail)
    atomic_files.write_json(path, [1])
    assert json.loads(path.read_text()) == [1]
    assert names_in(tmp_path) == ["file"]


def test_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, "full")

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="full"):
        atomic_files.write_json(path, [1])
    assert path.read_text() == "old"


def test_check_writable_creates_the_folder_and_leaves_it_empty(tmp_path):
    atomic_files.check_writable(tmp_path / "new" / "nested")
    assert names_in(tmp_path / "new" / "nested") == []


def test_folder_that_cannot_be_created_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        atomic_files.check_writable(tmp_path / "file" / "nested")


def test_file_that_cannot_be_renamed_while_it_is_open_is_closed_first(tmp_path, monkeypatch):
    replace, errors = Path.replace, [OSError(errno.ETXTBSY, os.strerror(errno.ETXTBSY))]

    def replace_unless_busy(path, target):
        if errors:
            raise errors.pop()
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_unless_busy)
    with atomic_files.atomic_write(tmp_path / "file") as file:
        file.write(b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"new")]


@pytest.mark.parametrize("has_links", [True, False])
def test_copy_replaces_atomically_and_keeps_its_content_if_the_source_is_replaced(tmp_path, monkeypatch, has_links):
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(b"first")
    copy.write_bytes(b"older")
    if not has_links:
        monkeypatch.setattr(os, "link", raise_not_supported)
    for _ in range(2):
        atomic_files.atomic_copy(source, copy)
    with atomic_files.atomic_write(source) as file:
        file.write(b"second")
    assert copy.read_bytes() == b"first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "source"]


def raise_not_supported(*arguments, **options):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))
