"""Entry point of `python -m kmp`, equivalent to the command `kmp`."""

import sys

from kmp_cli import main

if __name__ == "__main__":
    sys.exit(main())
