"""The sub-commands of `kmp`. Their arguments are parsed in `kmp_cli.py` beside this package, before it is imported."""

from kmp.cli.commands import run

__all__ = ["run"]
