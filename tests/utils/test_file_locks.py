import errno
import fcntl
import gc
import os

import pytest
from conftest import LOCK_FOLDER, folder_locked_by_another_process, is_locked, python_process

from kmp.utils import lock_folder


def test_folder_that_another_process_uses_raises_until_that_process_is_killed(tmp_path):
    with folder_locked_by_another_process(tmp_path) as process:
        with pytest.raises(OSError, match=r"`log_dir` is in use by another process\. Wait until") as caught:
            lock_folder("log_dir", tmp_path)
        assert (caught.value.errno, caught.value.filename) == (errno.EBUSY, str(tmp_path))
        process.kill()
        process.wait()
        assert lock_folder("log_dir", tmp_path) is not None


def test_users_of_a_folder_in_one_process_share_a_lock_until_the_last_one_ends(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    first = lock_folder("log_dir", tmp_path / "folder")
    second = lock_folder("backup_dir", tmp_path / "link")
    del first
    gc.collect()
    assert is_locked(tmp_path / "folder")
    del second
    gc.collect()
    assert not is_locked(tmp_path / "folder")


def test_child_process_that_outlives_its_parent_does_not_keep_the_lock(tmp_path):
    fork = "import os\nif os.fork(): os._exit(0)\nprint('forked', flush=True); sys.stdin.read()"
    with python_process(LOCK_FOLDER + fork, tmp_path) as process:
        assert process.stdout.readline() == "forked\n"
        process.wait()
        assert not is_locked(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_file_system_without_locks_locks_nothing(tmp_path, monkeypatch, code):
    def fail(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)
    assert lock_folder("log_dir", tmp_path) is None
