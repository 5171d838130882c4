"""The command line: parse, one library call, print.  With params, the only home of click.

`program` is the group and where errors end; each other module holds commands, and is imported here, so that they stand in the group.
"""

from mmcompile.cli.building import build
from mmcompile.cli.program import main, program
from mmcompile.cli.reporting import report
from mmcompile.cli.tuning import tune
from mmcompile.cli.upkeep import info, prune, verify

__all__ = ["build", "info", "main", "program", "prune", "report", "tune", "verify"]
