"""Runs the quick and exhaustive tests on each version of Python, Keras and TensorFlow.

nox                        # all sessions whose Python is installed
nox -s nightly -- -x -k adam    # one of them; what stands after `--` goes to pytest
"""

import nox

PACKAGE = ".[cpu,demo,docs,test]"
VERSIONS = (
    "import platform, keras, numpy, tensorflow;"
    "print('Python', platform.python_version(), 'Keras', keras.__version__,"
    " 'TensorFlow', tensorflow.__version__, 'NumPy', numpy.__version__)"
)


def run_tests(session: nox.Session) -> None:
    """Prints the versions and runs the quick and the exhaustive tests."""
    session.run("python", "-c", VERSIONS)
    # Each week: also what repeats tests of CI, as other versions may differ where one does not.
    session.run("python", "-m", "pytest", "-n", "2", "-m", "not slow", *session.posargs)


def install_keras(session: nox.Session, *arguments: str) -> None:
    """Leaves one of the packages `keras` and `keras-nightly`, which install the same folder."""
    both = ("keras", "keras-nightly")
    session.run_install("python", "-m", "pip", "uninstall", "--yes", *both)
    session.install("--no-deps", *arguments)


@nox.session(python="3.11")  # TensorFlow 2.18 supports Python 3.12 and earlier
def oldest(session: nox.Session) -> None:
    """The oldest versions that kmp supports."""
    session.install("-e", PACKAGE, "keras==3.12.0", "tensorflow-cpu==2.18.0")
    run_tests(session)


@nox.session(python=["3.11", "3.12", "3.13"])
def newest(session: nox.Session) -> None:
    """The newest release of everything."""
    session.install("-e", PACKAGE)
    run_tests(session)


@nox.session(python="3.13")
def colab(session: nox.Session) -> None:
    """The versions in Colab's image."""
    session.install("-e", PACKAGE, "keras==3.13.*", "tensorflow-cpu==2.20.*", "numpy==2.1.*")
    run_tests(session)


@nox.session
def nightly(session: nox.Session) -> None:
    """The newest TensorFlow with the latest keras-nightly."""
    session.install("-e", PACKAGE)
    install_keras(session, "--pre", "keras-nightly")
    session.run(
        "python", "-c", "import keras; assert 'dev' in keras.__version__, keras.__version__"
    )
    run_tests(session)


# Into `newest` when TensorFlow 2.22 is released: then `requires-python` gets Python 3.14. Until
# then pip would install the candidate there, and with it files of both packages of Keras.
@nox.session(python="3.14")
def candidate(session: nox.Session) -> None:
    """TensorFlow's release candidate, the first for Python 3.14."""
    session.install("--ignore-requires-python", "-e", PACKAGE, "tensorflow-cpu==2.22.0rc0")
    install_keras(session, "keras")  # the candidate requires keras-nightly
    run_tests(session)
