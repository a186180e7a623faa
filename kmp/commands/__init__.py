"""The sub-commands of `kmp`. `kmp_cli` parses the arguments before it imports this package."""

from kmp.commands.subcommands import run

__all__ = ["run"]
