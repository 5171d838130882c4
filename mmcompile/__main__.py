"""`python -m mmcompile` is the command `mmcompile`."""

import sys

from mmcompile.cli import main

if __name__ == "__main__":
    sys.exit(main())
