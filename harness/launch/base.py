"""What a launcher is: where the ranks of a run live, and how the runner reaches them.

`lab(topology)` gives a context manager with the methods of `thinpipe.netem.lab.Lab`; `check(spec)` refuses, before
anything is started, a run that cannot work (UserError); `close()` ends what the launcher keeps running.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from thinpipe.harness.spec import RunSpec
from thinpipe.netem.link import LinkSpec
from thinpipe.netem.topology import Topology


class Launcher(Protocol):
    """See the module's text."""

    def check(self, spec: RunSpec) -> None: ...

    def lab(self, topology: Topology) -> AbstractContextManager[Any]: ...

    def start_rank(self, lab: Any, rank: int, world_size: int, args: dict[str, Any], log: Path) -> None: ...

    def close(self) -> None: ...


def topology_to_json(topology: Topology) -> dict[str, Any]:
    """A topology as plain data: for the pipe to a server, and for manifests."""
    links = [[source, destination, asdict(link)] for (source, destination), link in topology.links.items()]
    return {"hosts": list(topology.hosts), "links": links}


def topology_from_json(data: dict[str, Any]) -> Topology:
    """What `topology_to_json` gave, back."""
    return Topology(tuple(data["hosts"]), {(i, j): LinkSpec(**link) for i, j, link in data["links"]})
