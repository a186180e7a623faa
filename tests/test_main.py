import subprocess
import sys
from pathlib import Path

import pytest

from kmp.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["demo", "--steps", "0"], "an integer of at least 1, not '0'"),
        (["demo", "--steps", "many"], "an integer of at least 1, not 'many'"),
        (["demo", "--policy", "half"], "mixed_float16"),
        (["demo", "--dataset", "mnist"], "digits"),
    ],
    ids=str,
)
def test_bad_command_line_is_one_message_and_status_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_folder_that_cannot_be_written_is_one_line_and_status_1(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--steps", "1", "--out", str(tmp_path / "file" / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kmp: ")
    assert error.count("\n") == 1
    assert "file/out" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [[str(Path(sys.executable).with_name("kmp"))], [sys.executable, "-m", "kmp"]],
    ids=["kmp", "python -m kmp"],
)
def test_console_script_and_module_are_the_same_command(command):
    shown = subprocess.run([*command, "demo", "--help"], capture_output=True, text=True, check=True).stdout
    assert "usage: kmp demo" in shown
    assert all(option in shown for option in ("--dataset", "--policy", "--steps", "--out"))
