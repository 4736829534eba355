"""What a launcher is: where the ranks of a run live, and how the runner reaches them.

`lab(topology)` gives a context manager with the methods of `thinpipe.netem.lab.Lab`; `check(spec)` refuses, before
anything is started, a run that cannot work (UserError); `close()` ends what the launcher keeps running.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from thinpipe.harness.spec import RunSpec
from thinpipe.netem.topology import Topology


class Launcher(Protocol):
    """See the module's text."""

    def check(self, spec: RunSpec) -> None: ...

    def lab(self, topology: Topology) -> AbstractContextManager[Any]: ...

    def start_rank(self, lab: Any, rank: int, world_size: int, args: dict[str, Any], log: Path) -> None: ...

    def close(self) -> None: ...
