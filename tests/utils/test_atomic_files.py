import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest

from kmp.utils import atomic_files


def names_in(folder):
    return [path.name for path in folder.iterdir()]


@pytest.fixture
def path(tmp_path):
    """A file that only its owner reads."""
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o600)
    return path


def mode_of(stat):
    return stat.st_mode & 0o777


def test_atomic_write_replaces_the_file_on_exit_and_keeps_its_permissions(tmp_path, path):
    with atomic_files.atomic_write(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
        assert mode_of(os.fstat(file.fileno())) == 0o600  # the new content is never more readable
    assert path.read_text() == "new"
    assert names_in(tmp_path) == ["file"]
    assert mode_of(path.stat()) == 0o600


def test_interrupted_write_leaves_only_the_old_file(tmp_path, path):
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


def test_new_file_has_the_permissions_that_the_umask_gives(tmp_path):
    umask = os.umask(0o027)
    try:
        atomic_files.write_json(tmp_path / "file", {})
    finally:
        os.umask(umask)
    assert mode_of((tmp_path / "file").stat()) == 0o640


def test_content_is_on_the_disk_before_it_replaces_the_file(path, monkeypatch):
    calls, replace = [], Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(Path, "replace", lambda *paths: calls.append("replace") or replace(*paths))
    atomic_files.write_json(path, [1])
    assert calls == [path.stat().st_ino, "replace"]


def test_two_writes_at_a_time_have_their_own_temporary_files(tmp_path, path):
    with atomic_files.atomic_write(path) as first, atomic_files.atomic_write(path) as second:
        first.write(b"first")
        second.write(b"second")
        assert len(names_in(tmp_path)) == 3
    assert path.read_bytes() == b"first"
    assert names_in(tmp_path) == ["file"]


def test_write_removes_what_a_killed_process_left_an_hour_ago_and_no_other_file(tmp_path, path):
    with atomic_files.atomic_write(path):
        (leftover,) = tmp_path.glob(".file.*.partial")
        atomic_files.write_json(path, [1])
        assert leftover.exists()  # it is new
    others = [
        tmp_path / name
        for name in (".other.01234567.partial", "file.01234567.partial", ".file.partial")
    ]
    for old in (leftover, *others):
        old.touch()
        os.utime(old, (0, time.time() - 3700))
    atomic_files.write_json(path, [2])
    assert set(tmp_path.iterdir()) == {path, *others}


def cannot_replace(monkeypatch, code):
    def fail(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "replace", fail)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EBUSY])
def test_file_that_cannot_be_replaced_is_written_in_place(tmp_path, path, monkeypatch, code):
    """Such as a mount point."""
    cannot_replace(monkeypatch, code)
    atomic_files.write_json(path, [1])
    assert json.loads(path.read_text()) == [1]
    assert names_in(tmp_path) == ["file"]


def test_file_in_a_read_only_folder_is_written_in_place(tmp_path, path, monkeypatch):
    # Root may write into every folder.
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != tmp_path)
    atomic_files.write_json(path, [1])
    assert json.loads(path.read_text()) == [1]


def test_full_disk_leaves_the_old_file(tmp_path, path, monkeypatch):
    cannot_replace(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        atomic_files.write_json(path, [1])
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["file"]


def test_check_writable_creates_the_folder_and_leaves_it_empty(tmp_path):
    atomic_files.check_writable(tmp_path / "new" / "nested")
    assert names_in(tmp_path / "new" / "nested") == []


def test_file_that_cannot_be_written_is_an_error_that_names_it_and_what_it_is_for(tmp_path, path):
    atomic_files.check_file_writable(tmp_path / "new" / "report.html", "the report")
    assert names_in(tmp_path / "new") == []
    for wrong, reason in ((tmp_path, "Is a directory"), (path / "report.html", "File exists")):
        with pytest.raises(OSError, match=rf"the report cannot be written \({reason}") as raised:
            atomic_files.check_file_writable(wrong, "the report")
        assert raised.value.filename == str(wrong)
