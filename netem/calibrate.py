"""What a lab's links really carry: goodput, one-shot message time and round-trip time of each directed pair.

For one pair: 20 pings, `repeats` messages into the idle link, then one stream, of which the first 0.25 s are
left out (a full token bucket sends 2 % fast for 0.2 s) and the rest is cut into `repeats` windows; all are
medians. About 1 s a pair at 10 Mbit and above. Message times are one way: both ends share the machine's
monotonic clock.
"""

from __future__ import annotations

import bisect
import itertools
import socket
import statistics
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from thinpipe.netem import qdisc
from thinpipe.netem.child import Control
from thinpipe.netem.errors import NetemError
from thinpipe.netem.lab import Lab
from thinpipe.netem.link import (
    TCP_IP_BYTES,
    LinkSpec,
    bytes_per_s,
    expected_goodput_mbit,
    frame_bytes,
    gso_bytes,
    wire_time_s,
)
from thinpipe.netem.topology import Topology

GOODPUT_TOLERANCE = 0.02
MESSAGE_TOLERANCE = 0.04
TRIES = 3

DISCARD_S = 0.25
WINDOW_S = 0.15
MESSAGE_TARGET_S = 0.1
MESSAGE_BYTES_MIN = 16_000
MESSAGE_BYTES_MAX = 1_000_000
# Between messages: longer than a bucket (4 ms of rate) takes to fill.
IDLE_S = 0.02
PINGS = 20
PING_BYTES = 64
CHUNK_BYTES = 1 << 16
SOCKET_LIMIT_S = 30.0

# Keeps unsent data in the program, so that a stream ends when it is told to.
_TCP_NOTSENT_LOWAT = 25
_STAMP = struct.Struct("d")
_run = itertools.count()


@dataclass(frozen=True)
class LinkMeasurement:
    """One directed pair. Rates in Mbit (10^6 bit/s): goodput is TCP payload, measured_rate the layer 2 rate
    that carries it. expected_* None where the link is not limited. ok False: off tolerance at each of `tries`
    measurements, of which this is the last; `reason` says what."""

    source: int
    destination: int
    expected_goodput_mbit: float | None
    goodput_mbit: float
    measured_rate_mbit: float
    message_bytes: int
    message_time_s: float
    expected_message_time_s: float | None
    rtt_ms: float
    ok: bool
    reason: str
    tries: int = 1


def calibrate(
    lab: Lab,
    pairs: Collection[tuple[int, int]] | None = None,
    *,
    repeats: int = 3,
    budget_s: float | None = None,
    message_bytes: int | None = None,
) -> list[LinkMeasurement]:
    """Measure every link of the lab's topology, or those of `pairs` (source, destination), one after the other.

    A link that is off is measured again, TRIES times at most: what held the machine up for a moment is not the link's.
    budget_s: limit on the whole, default three times what it should take, all tries. message_bytes: default what takes
    0.1 s, at most 1 MB. Nothing else of the lab may be running: it would share the links, and its events
    would be taken. Raises NetemError when a measurement fails or the budget is spent; an inaccurate link is a
    result, not an error.
    """
    links = {pair: link for pair, link in lab.topology.links.items() if pairs is None or pair in pairs}
    predicted_s = sum(predict_s(link, repeats, message_bytes) for link in links.values())
    deadline = time.monotonic() + (3 * TRIES * predicted_s + 5.0 if budget_s is None else budget_s)
    return [_tried(lab, pair, repeats=repeats, deadline=deadline, message_bytes=message_bytes) for pair in links]


def _tried(lab: Lab, pair: tuple[int, int], **how: Any) -> LinkMeasurement:
    for tries in range(1, TRIES + 1):
        found = replace(measure(lab, *pair, **how), tries=tries)
        if found.ok:
            break
    return found


def predict_s(link: LinkSpec, repeats: int = 3, message_bytes: int | None = None) -> float:
    """Seconds the measurement of one link takes."""
    message = (wire_time_s(link, message_bytes or choose_message_bytes(link)) + IDLE_S) * (repeats + 1)
    return DISCARD_S + repeats * WINDOW_S + message + link.queue_ms * 1e-3 + PINGS * 2e-3 * link.delay_ms


def choose_message_bytes(link: LinkSpec) -> int:
    """A message of 0.1 s at the set rate, 16 kB to 1 MB; above 1 Gbit more, so that 4 % of it can be
    measured."""
    if not link.limited:
        return MESSAGE_BYTES_MAX
    most = max(MESSAGE_BYTES_MAX, int(bytes_per_s(link) * 8e-3))
    return max(MESSAGE_BYTES_MIN, min(int(bytes_per_s(link) * MESSAGE_TARGET_S), most))


def capacity_mbit(limit_s: float = 30.0) -> float:
    """Layer-2 Mbit/s that this machine carries between two hosts of a throw-away lab without any limit."""
    with Lab(Topology.mesh(2, LinkSpec()), limit_s=limit_s) as lab:
        deadline = time.monotonic() + limit_s
        return measure(lab, 0, 1, repeats=3, deadline=deadline).measured_rate_mbit


def measure(
    lab: Lab,
    source: int,
    destination: int,
    *,
    repeats: int,
    deadline: float,
    message_bytes: int | None = None,
) -> LinkMeasurement:
    """Measure one directed pair, see `calibrate`; deadline on time.monotonic()."""
    link = lab.topology.link(source, destination)
    size = message_bytes or choose_message_bytes(link)
    name, here = f"calibrate-{next(_run)}", "thinpipe.netem.calibrate"
    args = {"address": lab.topology.address(destination), "size": size, "repeats": repeats}
    receiver, sender = f"{name}-receiver", f"{name}-sender"
    lab.spawn(receiver, destination, f"{here}:receive", args)
    port = _message(lab, receiver, deadline)
    lab.spawn(sender, source, f"{here}:send", {**args, "port": port})
    got: dict[str, Any] = {}
    for _ in range(4):
        # Two messages and two exits, in any order.
        event = _event(lab, name, deadline)
        got |= event.data if event.kind == "message" else {}
    return judge(
        link,
        (source, destination),
        goodput_mbit=statistics.median(got["goodputs_mbit"]),
        message_bytes=size,
        time_s=statistics.median(got["times_s"]),
        rtt_ms=got["rtt_ms"],
    )


def judge(
    link: LinkSpec,
    pair: tuple[int, int],
    *,
    goodput_mbit: float,
    message_bytes: int,
    time_s: float,
    rtt_ms: float,
) -> LinkMeasurement:
    """Compare what was measured with the set rate.

    A token bucket never holds back the last chunk of a message nor the first cburst bytes after a pause: the
    time of these two is granted on the fast side, on top of the 4 %.
    """
    expected, ideal, reasons = expected_goodput_mbit(link), None, []
    if expected is not None:
        ideal, speed = wire_time_s(link, message_bytes), bytes_per_s(link)
        granted_s = (gso_bytes(link) + max(qdisc.BURST_BYTES_MIN, speed * qdisc.CBURST_S)) / speed
        if abs(goodput_mbit / expected - 1) > GOODPUT_TOLERANCE:
            ratio = goodput_mbit / expected
            reasons.append(f"goodput {goodput_mbit:.4g} Mbit is {ratio:.3f} of the expected {expected:.4g}")
        if not ideal * (1 - MESSAGE_TOLERANCE) - granted_s <= time_s <= ideal * (1 + MESSAGE_TOLERANCE):
            took, wanted = time_s * 1e3, ideal * 1e3
            reasons.append(f"a {message_bytes} B message took {took:.4g} ms, expected {wanted:.4g} ms")
    return LinkMeasurement(
        *pair,
        expected_goodput_mbit=expected,
        goodput_mbit=goodput_mbit,
        measured_rate_mbit=goodput_mbit * frame_bytes(link) / (link.mtu - TCP_IP_BYTES),
        message_bytes=message_bytes,
        message_time_s=time_s,
        expected_message_time_s=ideal,
        rtt_ms=rtt_ms,
        ok=not reasons,
        reason="; ".join(reasons),
    )


def _event(lab: Lab, name: str, deadline: float) -> Any:
    event = lab.event(max(0.0, deadline - time.monotonic()))
    if event is None:
        raise NetemError(f"{name}: the calibration of the links is over its budget of time; is the machine overloaded?")
    if not event.name.startswith(f"{name}-"):
        raise NetemError(f"process {event.name!r} runs in the lab during calibration; calibrate first")
    if event.kind == "exit" and event.status != 0:
        raise NetemError(f"{event.name} ended with status {event.status} while measuring; its error is above")
    return event


def _message(lab: Lab, name: str, deadline: float) -> Any:
    event = _event(lab, name.rpartition("-")[0], deadline)
    assert (event.kind, event.name) == ("message", name)
    return event.data


def receive(control: Control, address: str, size: int, repeats: int) -> None:
    """The far end; runs in the destination's host. Sends its port, then {times_s, goodputs_mbit}."""
    with socket.create_server((address, 0)) as listener:
        listener.settimeout(SOCKET_LIMIT_S)
        control.send(listener.getsockname()[1])
        buffer = bytearray(max(size, 1 << 20))
        connection, _ = listener.accept()
        with connection:
            _prepare(connection)
            for _ in range(PINGS):
                _read(connection, memoryview(buffer)[:PING_BYTES])
                connection.sendall(bytes(PING_BYTES))
            times = []
            for _ in range(repeats + 1):
                _read(connection, memoryview(buffer)[:size])
                times.append(time.monotonic() - _STAMP.unpack_from(buffer)[0])
                connection.sendall(b"+")
        stream, _ = listener.accept()
        with stream:
            _prepare(stream)
            curve = _arrivals(stream, buffer)
    # The first message opens the congestion window.
    control.send({"times_s": times[1:], "goodputs_mbit": goodputs(curve, repeats)})


def send(control: Control, address: str, port: int, size: int, repeats: int) -> None:
    """The near end; runs in the source's host. Sends {rtt_ms}."""
    with socket.create_connection((address, port), SOCKET_LIMIT_S) as connection:
        _prepare(connection)
        ping, rtts = bytearray(PING_BYTES), []
        for _ in range(PINGS):
            start = time.monotonic()
            connection.sendall(ping)
            _read(connection, memoryview(ping))
            rtts.append(time.monotonic() - start)
        message = bytearray(size)
        for _ in range(repeats + 1):
            time.sleep(IDLE_S)
            _STAMP.pack_into(message, 0, time.monotonic())
            connection.sendall(message)
            _read(connection, memoryview(bytearray(1)))
    with socket.create_connection((address, port), SOCKET_LIMIT_S) as stream:
        _prepare(stream)
        stream.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, 2 * CHUNK_BYTES)
        chunk, end = bytes(CHUNK_BYTES), time.monotonic() + DISCARD_S + (repeats + 0.5) * WINDOW_S
        while time.monotonic() < end:
            stream.sendall(chunk)
    control.send({"rtt_ms": statistics.median(rtts) * 1e3})


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(SOCKET_LIMIT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _read(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise NetemError("the other end of the measurement closed its connection")
        view = view[count:]


def _arrivals(stream: socket.socket, buffer: bytearray) -> list[tuple[float, int]]:
    """(time, bytes so far) after each read, until the end of the stream."""
    curve, total = [], 0
    while count := stream.recv_into(buffer):
        total += count
        curve.append((time.monotonic(), total))
    return curve


def goodputs(curve: list[tuple[float, int]], windows: int) -> list[float]:
    """Payload Mbit/s in consecutive windows after the discarded start, between the arrivals nearest to their
    edges.

    Measuring from arrival to arrival leaves no error from chunks cut by a window. Raises NetemError if the
    stream ended before the last window did.
    """
    times = [t for t, _ in curve]
    found = []
    for i in range(windows):
        begin = times[0] + DISCARD_S + i * WINDOW_S if times else 0.0
        first, last = bisect.bisect_left(times, begin), bisect.bisect_left(times, begin + WINDOW_S)
        if last >= len(times) or last == first:
            raise NetemError(f"the stream carried nothing after window {i} of {windows}; is the link up at all?")
        found.append((curve[last][1] - curve[first][1]) * 8e-6 / (times[last] - times[first]))
    return found
