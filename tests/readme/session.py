"""A Python session that blocks are typed into: reads {"line", "code"} as JSON lines, answers {"said", "fault"}; names stay from block to block."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints past Python is no answer
    space = vars(sys.modules["__main__"])
    for line in sys.stdin:
        block, said, fault = json.loads(line), io.StringIO(), None
        try:
            with contextlib.redirect_stdout(said):
                exec(compile("\n" * (block["line"] - 1) + block["code"], "README.md", "exec"), space)
        except BaseException:
            fault = traceback.format_exc()
        print(json.dumps({"said": said.getvalue(), "fault": fault}), file=answers, flush=True)


if __name__ == "__main__":
    main()
