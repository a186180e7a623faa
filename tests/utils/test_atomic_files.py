import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kmp.utils import atomic_files


def names_in(folder):
    return [path.name for path in folder.iterdir()]


def test_atomic_write_replaces_the_file_on_exit(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_files.atomic_write(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names_in(tmp_path) == ["file"]


def test_interrupted_write_leaves_only_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def interrupted_write():
        with atomic_files.atomic_write(path) as partial:
            partial.write_text("ne")
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
    # Runs the module's source, because importing kmp takes seconds.
    code = Path(atomic_files.__file__).read_text() + f"\nwrite_json(Path({name!r}), [1]); print('later')"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, cwd=tmp_path)
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
