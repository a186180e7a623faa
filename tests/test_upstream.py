"""The scripts of docs/upstream.md print what the page says, with the version that it names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "upstream.md").read_text(encoding="utf-8")
VERSION = re.search(r"Keras (\d+\.\d+\.\d+)", PAGE)[1]


def scripts():
    """The title, the script and its output in each section.

    Without those of several processes and of keras-hub.
    """
    for section in re.split(r"(?m)^### ", PAGE)[1:]:
        title, _, text = section.partition("\n")
        script = re.search(
            r"(?s)(<!-- no-test[^\n]*\n+)?```python\n(.*?)```.*?```text\n(.*?)```", text
        )
        if script and not script[1]:
            yield pytest.param(script[2], script[3], id=title)


@pytest.mark.slow
@pytest.mark.skipif(
    keras.__version__ != VERSION, reason=f"the outputs are those of Keras {VERSION}"
)
@pytest.mark.parametrize(("script", "output"), list(scripts()))
def test_script_prints_the_output_of_the_page(script, output, tmp_path):
    variables = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "script.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.rstrip() == output.rstrip(), done.stderr[-2000:]
