"""`thinpipe train`: AC-SGD's runner. Arguments as data, their RunSpec, and one rank of the run."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run one rank as `argv` says, to its end. Returns the exit code: 0 done, 1 failed, 2 a mistake, explained,
    130 interrupted."""
    from thinpipe.harness.acsgd import arguments
    from thinpipe.harness.errors import UserError

    if {"-h", "--help"} & set(argv):
        print(arguments.help_text(), end="")
        return 0
    try:
        from thinpipe.harness.acsgd import launch

        return launch.run(arguments.parse(argv))
    except UserError as error:
        from thinpipe.harness.acsgd.mapping import explain

        print(f"thinpipe: {explain(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("thinpipe: interrupted", file=sys.stderr)
        return 130
