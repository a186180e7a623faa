import json
import os
import threading

import pytest

from kmp import _files


def names_in(folder):
    return [path.name for path in folder.iterdir()]


def test_a_file_takes_the_old_ones_place_when_it_is_whole(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with _files.whole(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names_in(tmp_path) == ["file"]


def test_what_fails_in_between_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def killed():
        with _files.whole(path) as partial:
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
    _files.write_json(link, {"a": 1})
    assert link.is_symlink()
    assert json.loads((tmp_path / "there" / "file").read_text()) == {"a": 1}


def test_a_pipe_is_written_to_as_it_is(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    _files.write_json(pipe, [1])
    reader.join()
    assert json.loads(read[0]) == [1]


def test_a_folder_is_made_and_left_empty(tmp_path):
    _files.check_writable(tmp_path / "new" / "inside")
    assert names_in(tmp_path / "new" / "inside") == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        _files.check_writable(tmp_path / "file" / "inside")
