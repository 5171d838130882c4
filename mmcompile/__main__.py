"""`python -m mmcompile` is the command `mmcompile`, which begins here, so that Ctrl-C while it loads ends as it does later."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """The command `mmcompile`.  Ends the process with its exit code."""
    try:
        from mmcompile import cli
    except KeyboardInterrupt:
        print("error: stopped", file=sys.stderr)
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
