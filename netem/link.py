"""LinkSpec: what one direction between two hosts shall be like, and what follows from it by arithmetic.

Rates are layer 2: a queueing discipline charges the 14 bytes of Ethernet header for every segment (also with
segmentation offload), and nothing for preamble, checksum and gap. 1 Mbit = 10^6 bits.

>>> round(expected_goodput_mbit(LinkSpec(rate_mbit=100.0)), 2)
95.64
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from thinpipe.netem.errors import NetemError

ETHERNET_BYTES = 14
# IPv4 20, TCP 20, timestamps option 12: on by default in Linux, and in every segment.
TCP_IP_BYTES = 52
#: What a segment takes at layer 2 beside its payload.
SEGMENT_HEADER_BYTES = ETHERNET_BYTES + TCP_IP_BYTES

RATE_MBIT_MIN = 0.1
RATE_MBIT_MAX = 40_000.0
GSO_BYTES_USUAL = 16_384
GSO_BYTES_MAX = 65_536


@dataclass(frozen=True)
class LinkSpec:
    """One direction of a link.

    rate_mbit: layer 2, None = not limited. delay_ms: one way. jitter_ms: +- around delay_ms. loss_pct: of
    segments. queue_ms: room of the queue before the link, in time at full rate; more is dropped. mtu: bytes
    of an IP packet. congestion: TCP congestion control of senders on this link (a name the kernel has).
    Raises NetemError for values no link can have.
    """

    rate_mbit: float | None = None
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss_pct: float = 0.0
    queue_ms: float = 100.0
    mtu: int = 1500
    congestion: str = "cubic"

    def __post_init__(self) -> None:
        _in_range("mtu", self.mtu, 576, 9000)
        _in_range("delay_ms", self.delay_ms, 0, 10_000)
        _in_range("jitter_ms", self.jitter_ms, 0, self.delay_ms)
        _in_range("loss_pct", self.loss_pct, 0, 99.9)
        _in_range("queue_ms", self.queue_ms, 0, 60_000)
        if not re.fullmatch(r"[a-z][a-z0-9_]{1,14}", self.congestion):
            raise NetemError(f"congestion {self.congestion!r} is not a name; say e.g. 'cubic', 'bbr' or 'reno'")
        if self.rate_mbit is None:
            return
        _in_range("rate_mbit", self.rate_mbit, RATE_MBIT_MIN, RATE_MBIT_MAX)
        least = 2 * gso_bytes(self)
        if queue_bytes(self) < least:
            raise NetemError(
                f"queue_ms {self.queue_ms:g} at {self.rate_mbit:g} Mbit holds {queue_bytes(self)} bytes, "
                f"less than two chunks ({least} bytes): everything would be dropped; "
                f"set queue_ms to {math.ceil(least / bytes_per_s(self) * 1e3)} or more"
            )

    @property
    def limited(self) -> bool:
        """Whether a rate is set."""
        return self.rate_mbit is not None

    @property
    def impaired(self) -> bool:
        """Whether delay, jitter or loss is asked for: more than a rate limiter can do."""
        return bool(self.delay_ms or self.jitter_ms or self.loss_pct)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise NetemError(f"{name} {value!r} is out of range; it must lie in {low:g}..{high:g}")


def bytes_per_s(link: LinkSpec) -> float:
    """Layer-2 bytes a second of a limited link."""
    assert link.rate_mbit is not None
    return link.rate_mbit * 1e6 / 8


def frame_bytes(link: LinkSpec) -> int:
    """A full Ethernet frame as a queueing discipline counts it."""
    return link.mtu + ETHERNET_BYTES


def gso_bytes(link: LinkSpec) -> int:
    """Largest chunk the sender's TCP may hand over at once: 1 ms of line rate, two frames to 64 KiB.

    A token bucket never delays the last chunk of a message, so chunks have to be small against messages: no
    more than 16 KiB (1.6 % of 1 MB). Above 500 Mbit 0.25 ms of line rate: a busy processor needs them larger.
    """
    most = max(GSO_BYTES_USUAL, bytes_per_s(link) * 0.25e-3)
    return int(max(2 * frame_bytes(link), min(bytes_per_s(link) * 1e-3, most, GSO_BYTES_MAX)))


def queue_bytes(link: LinkSpec) -> int:
    """Room of the queue of a limited link, in layer-2 bytes."""
    return int(bytes_per_s(link) * link.queue_ms * 1e-3)


def expected_goodput_mbit(link: LinkSpec) -> float | None:
    """TCP payload rate of a saturated link: rate x (mtu - 52)/(mtu + 14), 0.9564 at MTU 1500. None = not
    limited."""
    if link.rate_mbit is None:
        return None
    return link.rate_mbit * (link.mtu - TCP_IP_BYTES) / frame_bytes(link)


def wire_bytes(link: LinkSpec, payload_bytes: int) -> int:
    """Layer-2 bytes that TCP payload takes on a link, see `segmented_bytes`."""
    return int(segmented_bytes(payload_bytes, link.mtu))


def segmented_bytes(payload_bytes: float, mtu: int) -> float:
    """Layer-2 bytes that TCP payload takes in full segments, ACKs of the other direction not counted.

    >>> segmented_bytes(1449, 1500)
    1581
    """
    return payload_bytes + SEGMENT_HEADER_BYTES * -(-payload_bytes // (mtu - TCP_IP_BYTES))


def wire_time_s(link: LinkSpec, payload_bytes: int) -> float:
    """Seconds from sending a message into an idle link to its arrival: serialisation at the set rate plus
    delay."""
    serialisation = wire_bytes(link, payload_bytes) / bytes_per_s(link) if link.limited else 0.0
    return serialisation + link.delay_ms * 1e-3


PRESETS: dict[str, LinkSpec] = {
    "unlimited": LinkSpec(),
    "10mbit": LinkSpec(rate_mbit=10.0),
    "30mbit": LinkSpec(rate_mbit=30.0),
    "100mbit": LinkSpec(rate_mbit=100.0),
    "300mbit": LinkSpec(rate_mbit=300.0),
    "1gbit": LinkSpec(rate_mbit=1000.0),
    "wan-100mbit-20ms": LinkSpec(rate_mbit=100.0, delay_ms=10.0),
    "wan-300mbit-50ms": LinkSpec(rate_mbit=300.0, delay_ms=25.0),
    "wan-1gbit-100ms": LinkSpec(rate_mbit=1000.0, delay_ms=50.0, congestion="bbr"),
}
"""Links by name. A wan preset names its round-trip time; delay_ms is one way, so half of it."""
