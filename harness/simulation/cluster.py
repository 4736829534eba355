"""Cells that outgrow this machine: why, and what to run them with on machines of one's own."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from thinpipe.harness.spec import RunSpec
from thinpipe.netem.topology import HOSTS_MAX

if TYPE_CHECKING:
    from thinpipe.harness.simulation.cells import Setting

#: Labs of one machine were calibrated up to this rate; above it, a run measures first whether it is carried.
CARRIED_MBIT = 1000.0


def beyond(spec: RunSpec, setting: Setting) -> str | None:
    """Why a cell cannot be run, or timed truly, on this machine; None where it can."""
    cores = os.cpu_count() or 1
    ranks = setting.stages or spec.world_size
    if setting.wan is not None:
        return f"links of {setting.wan.name}"
    if ranks > HOSTS_MAX or setting.stages is not None:
        return f"{ranks} hosts"
    if spec.network.delay_ms or spec.network.jitter_ms or spec.network.loss_pct:
        return "links with delay, jitter or loss"
    if (spec.network.rate_mbit or 0.0) > CARRIED_MBIT:
        return f"links of {spec.network.rate_mbit:g} Mbit/s, unless `thinpipe run` finds that they are carried"
    if spec.compute == "real" and ranks > cores:
        return f"{ranks} hosts that compute, and {cores} cores"
    return None


def cluster(row: Mapping[str, Any], spec: RunSpec, setting: Setting) -> list[str]:
    """What to run a cell with on machines of one's own: lines for people."""
    hosts = row["stages"] if setting.stages else spec.world_size
    lines = [f"{row['part']}, {row['arm']}: {hosts} hosts, one rank each."]
    if setting.wan is None:
        rate = f" --rate-mbit {spec.network.rate_mbit:g}" if spec.network.rate_mbit else ""
        lines.append(f"  on host I of 0..{hosts - 1}: thinpipe net script ADDRESS... --host I{rate} > shape.sh")
        if spec.network.delay_ms:
            lines.append(f"  and a one-way delay of {spec.network.delay_ms:g} ms between all of them")
    else:
        regions = row["regions"]
        lines.append(f"  hosts by rank: {', '.join(f'{count} x {name}' for name, count in Counter(regions).items())}")
        for a, b in dict.fromkeys(itertools.pairwise(regions)):
            link = setting.wan.link(a, b)
            rates = ", then ".join(f"{rate * 8 / 1e6:g}" for _, rate in link.rates)
            lines.append(f"  {a} - {b}: {rates} Mbit/s, {link.delay_s * 1e3:g} ms one way")
        lines.append(
            "  each host shapes what it sends: `thinpipe net script` where one rate does for all its neighbours, "
            "thinpipe.netem.script.render with Topology.matrix where they differ"
        )
    lines.append("  sh shape.sh apply; then `thinpipe train` as docs/train.md has it, sh shape.sh revert")
    return lines
