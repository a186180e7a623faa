"""`python -m kmp`, the same as `kmp`."""

import sys

from kmp_cli import main

if __name__ == "__main__":
    sys.exit(main())
