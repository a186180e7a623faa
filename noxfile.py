"""Runs the quick tests on the versions of Keras and TensorFlow that kmp supports.

nox                        # all three sessions
nox -s nightly -- -x -k adam    # one of them; what stands after `--` goes to pytest
"""

import sys

import nox

nox.options.sessions = ["oldest", "newest", "nightly"]
PACKAGE = ".[cpu,demo,docs,test]"
VERSIONS = (
    "import platform, keras, numpy, tensorflow;"
    "print('Python', platform.python_version(), 'Keras', keras.__version__,"
    " 'TensorFlow', tensorflow.__version__, 'NumPy', numpy.__version__)"
)


def run_tests(session: nox.Session) -> None:
    """Prints the versions and runs the quick tests."""
    session.run("python", "-c", VERSIONS)
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs)


@nox.session
def oldest(session: nox.Session) -> None:
    """The oldest versions that kmp supports."""
    if sys.version_info >= (3, 13):
        session.error(
            "TensorFlow 2.18 supports Python 3.12 and earlier. Run nox with Python 3.11 or 3.12."
        )
    session.install("-e", PACKAGE, "keras==3.12.0", "tensorflow-cpu==2.18.0")
    run_tests(session)


@nox.session
def newest(session: nox.Session) -> None:
    """The newest versions that kmp supports."""
    session.install("-e", PACKAGE, "keras==3.15.1", "tensorflow-cpu==2.21.0")
    run_tests(session)


@nox.session
def nightly(session: nox.Session) -> None:
    """The newest TensorFlow with the latest keras-nightly."""
    session.install("-e", PACKAGE, "tensorflow-cpu==2.21.0")
    # Both packages install the folder `keras`, so uninstall `keras` and install the nightly last.
    session.run_install("python", "-m", "pip", "uninstall", "--yes", "keras")
    session.install("--pre", "--no-deps", "--force-reinstall", "keras-nightly")
    session.run(
        "python", "-c", "import keras; assert 'dev' in keras.__version__, keras.__version__"
    )
    run_tests(session)
