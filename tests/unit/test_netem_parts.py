"""The small parts: tools, wire, refusals, targets, calibration's arithmetic, scripts."""

import errno
import os
import socket
import subprocess
import threading

import pytest

from thinpipe.netem import calibrate, script, tools
from thinpipe.netem.child import resolve
from thinpipe.netem.errors import NetemError
from thinpipe.netem.link import LinkSpec, gso_bytes, wire_time_s
from thinpipe.netem.namespaces import explain_refusal
from thinpipe.netem.network import parse_loopback
from thinpipe.netem.topology import Topology
from thinpipe.netem.wire import Connection


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    with one, other:
        yield Connection(one), Connection(other)


@pytest.mark.parametrize("message", [None, 0, "é", {"a": [1, None]}, "x" * 3_000_000])
def test_messages_arrive_whole(pair, message):
    sender = threading.Thread(target=pair[0].send, args=(message, 10.0))
    sender.start()
    assert pair[1].receive(10.0) == message
    sender.join()
    assert pair[1].pop() is None


def test_several_messages_keep_their_order(pair):
    for i in range(50):
        pair[0].queue(i)
    pair[0].flush()
    assert [pair[1].receive(1.0) for _ in range(50)] == list(range(50))


def test_a_gone_peer_and_a_slow_peer_are_told_apart(pair):
    with pytest.raises(TimeoutError):
        pair[1].receive(0.01)
    with pytest.raises(TimeoutError):
        pair[0].send("x" * 3_000_000, 0.05)
    pair[1].shut()
    with pytest.raises(EOFError):
        pair[0].receive(1.0)
    with pytest.raises(EOFError):
        pair[0].send(1, 1.0)


def test_what_was_sent_before_the_end_is_still_received(pair):
    pair[0].send("last", 1.0)
    pair[0].shut()
    assert pair[1].receive(1.0) == "last"
    with pytest.raises(EOFError):
        pair[1].receive(1.0)


def test_oversized_and_odd_messages_are_refused(pair):
    with pytest.raises(ValueError, match="use a file"):
        pair[0].queue("x" * (65 << 20))
    with pytest.raises(TypeError):
        pair[0].queue({1, 2})


def test_missing_tools_name_the_package(monkeypatch):
    monkeypatch.setattr(tools, "SYSTEM_PATH", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NetemError, match="iproute2"):
        tools.run(["tc", "-V"])


def test_a_failing_batch_names_its_line(monkeypatch, tmp_path):
    fake = tmp_path / "tc"
    fake.write_text("#!/bin/sh\necho 'Error: Exclusivity flag on.' >&2\necho 'Command failed -:2' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(NetemError) as error:
        tools.run(["tc", "-batch", "-"], "first\nsecond\n")
    assert "Exclusivity flag on" in str(error.value)
    assert "(line 2: second)" in str(error.value)


def test_a_hanging_tool_is_ended(monkeypatch, tmp_path):
    fake = tmp_path / "tc"
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(tools, "COMMAND_LIMIT_S", 0.2)
    with pytest.raises(NetemError, match=r"did not end within 0\.2 s"):
        tools.run(["tc", "-V"])


@pytest.mark.parametrize(
    ("settings", "root", "said"),
    [
        ({"kernel.unprivileged_userns_clone": "0"}, False, "sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            {"kernel.apparmor_restrict_unprivileged_userns": "1"},
            False,
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ({"user.max_user_namespaces": "0"}, False, "sysctl -w user.max_user_namespaces=10000"),
        ({}, False, "seccomp=unconfined"),
        ({"kernel.unprivileged_userns_clone": "0"}, True, "--privileged"),
    ],
)
def test_refusals_name_the_setting(settings, root, said):
    text = explain_refusal(OSError(errno.EPERM, "Operation not permitted"), root, settings.get)
    assert said in text
    assert "Operation not permitted" in text


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("os.getpid", "must read"),
        ("no_such_module_here:f", "cannot be imported"),
        ("os:no_such", "no function 'no_such'"),
        ("os:sep", "no function 'sep'"),
    ],
)
def test_bad_targets_say_which_part(target, said):
    with pytest.raises(NetemError) as error:
        resolve(target)
    assert said in str(error.value)


def test_loopback_is_read_from_proc():
    header = "Inter-|   Receive    |  Transmit\n face |bytes    packets\n"
    text = header + "    lo:  84 1 0 0 0 0 0 0  90 2 0 0 0 0 0 0\n  eth0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"
    assert parse_loopback(text) == {"bytes": 90, "packets": 2}


LINK = LinkSpec(rate_mbit=100.0)
IDEAL_S = wire_time_s(LINK, 10**6)


@pytest.mark.parametrize(
    ("goodput", "time_s", "ok", "said"),
    [
        (95.64, IDEAL_S, True, ""),
        (95.64 * 0.981, IDEAL_S * 1.039, True, ""),
        (95.64 * 1.019, IDEAL_S * 0.961, True, ""),
        (95.64 * 0.979, IDEAL_S, False, "goodput"),
        (95.64 * 1.021, IDEAL_S, False, "goodput"),
        (95.64, IDEAL_S * 1.041, False, "message took"),
        (95.64, IDEAL_S * 0.94, False, "message took"),
    ],
)
def test_a_link_off_its_rate_is_flagged(goodput, time_s, ok, said):
    made = calibrate.judge(LINK, (0, 1), goodput_mbit=goodput, message_bytes=10**6, time_s=time_s, rtt_ms=0.1)
    assert made.ok == ok
    assert said in made.reason
    assert bool(made.reason) != ok
    assert made.measured_rate_mbit == pytest.approx(goodput * 1514 / 1448)


def test_the_fast_side_grants_one_chunk_and_no_more():
    link, size = LinkSpec(rate_mbit=10.0), 125_000
    ideal, granted = wire_time_s(link, size), (gso_bytes(link) + 1600) / 1.25e6
    for factor, ok in ((0.99, True), (1.01, False)):
        time_s = ideal * 0.96 - granted * factor
        made = calibrate.judge(link, (0, 1), goodput_mbit=9.564, message_bytes=size, time_s=time_s, rtt_ms=0.1)
        assert made.ok == ok


def test_unlimited_links_are_measured_without_a_verdict():
    made = calibrate.judge(LinkSpec(), (0, 1), goodput_mbit=7000.0, message_bytes=1, time_s=1.0, rtt_ms=0.1)
    assert made.ok
    assert made.expected_goodput_mbit is None
    assert made.expected_message_time_s is None


def test_windows_start_after_the_discarded_part():
    fast = [(t / 1000, t * 2000) for t in range(251)]
    slow = [(t / 1000, 500_000 + (t - 250) * 1000) for t in range(251, 800)]
    assert calibrate.goodputs(fast + slow, 3) == pytest.approx([8.0] * 3, rel=0.01)


@pytest.mark.parametrize("curve", [[], [(0.0, 1)], [(t / 100, t) for t in range(40)]])
def test_a_stream_that_ends_early_is_an_error(curve):
    with pytest.raises(NetemError, match="carried nothing"):
        calibrate.goodputs(curve, 3)


@pytest.mark.parametrize(
    ("rate", "size"),
    [(None, 1_000_000), (0.1, 16_000), (10.0, 125_000), (1000.0, 1_000_000), (8e3, 8_000_000)],
)
def test_messages_fit_the_rate(rate, size):
    assert calibrate.choose_message_bytes(LinkSpec(rate_mbit=rate, queue_ms=500.0)) == size


TWO = ["192.0.2.1", "192.0.2.2"]


@pytest.mark.parametrize(
    "topology", [Topology.mesh(2, LINK), Topology.mesh(2, LinkSpec())], ids=["limited", "unlimited"]
)
def test_scripts_are_valid_shell_with_the_same_text(topology, tmp_path):
    from thinpipe.netem.qdisc import tc_commands

    text = script.render(topology, 0, interface="ens3", addresses=TWO)
    assert tc_commands(topology, 0, interface="ens3", addresses=TWO) in text
    path = tmp_path / "h0.sh"
    path.write_text(text)
    subprocess.run(["sh", "-n", path], check=True, timeout=10)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"addresses": TWO[:1]}, "2 different addresses"),
        ({"addresses": [TWO[0], TWO[0]]}, "2 different addresses"),
        ({"addresses": [TWO[0], "host1"]}, "not IPv4"),
        ({"addresses": [TWO[0], "::1"]}, "not IPv4"),
        ({"interface": "eth0; reboot"}, "not a name"),
        ({"host": 2}, "host 2"),
        ({"topology": Topology.mesh(2, LinkSpec(delay_ms=5.0))}, "delay, jitter or loss"),
    ],
)
def test_scripts_refuse_what_they_cannot_do(change, said):
    values = {"topology": Topology.mesh(2, LINK), "host": 0, "interface": "eth0", "addresses": TWO} | change
    with pytest.raises(NetemError) as error:
        script.render(values.pop("topology"), values.pop("host"), **values)
    assert said in str(error.value)
