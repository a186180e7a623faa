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


def test_a_file_takes_the_old_ones_place_when_it_is_whole(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_files.whole(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names_in(tmp_path) == ["file"]


def test_what_fails_in_between_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def killed():
        with atomic_files.whole(path) as partial:
            partial.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed()
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["file"]


def test_a_link_stays_a_link_to_the_new_content(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there" / "file")
    atomic_files.write_json(link, {"a": 1})
    assert link.is_symlink()
    assert json.loads((tmp_path / "there" / "file").read_text()) == {"a": 1}


def test_a_pipe_is_written_to_as_it_is(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    atomic_files.write_json(pipe, [1])
    reader.join()
    assert json.loads(read[0]) == [1]


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_what_stands_for_the_open_output_is_written_to_in_place(tmp_path, name):
    """It leads to a regular file where the output goes into one; what is printed later lands there too."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    # The module's text alone: to import kmp would take seconds.
    code = Path(atomic_files.__file__).read_text() + f"\nwrite_json(Path({name!r}), [1]); print('later')"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, cwd=tmp_path)
    assert sorted(names_in(tmp_path)) == ["link", "out"]
    assert "later" in (tmp_path / "out").read_text()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="There is no file system under /dev here.")
def test_a_file_in_shared_memory_is_a_file(tmp_path):
    assert not atomic_files._leads_to_an_open_file(Path("/dev/shm/file"))
    assert not atomic_files._leads_to_an_open_file(tmp_path / "file")


def test_a_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o600)
    atomic_files.write_json(path, {})
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EBUSY])
def test_a_file_that_cannot_be_replaced_is_written_in_place(tmp_path, monkeypatch, reason):
    def refuse(*arguments):
        raise OSError(reason, os.strerror(reason))

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", refuse)
    atomic_files.write_json(path, [1])
    assert json.loads(path.read_text()) == [1]
    assert names_in(tmp_path) == ["file"]


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, "full")

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="full"):
        atomic_files.write_json(path, [1])
    assert path.read_text() == "old"


def test_a_folder_is_made_and_left_empty(tmp_path):
    atomic_files.check_writable(tmp_path / "new" / "inside")
    assert names_in(tmp_path / "new" / "inside") == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        atomic_files.check_writable(tmp_path / "file" / "inside")
