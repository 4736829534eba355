"""Links are true: goodput within 2 %, one 1 MB message within 4 %, medians of 5; wrong ones are found."""

import time

import pytest

from thinpipe.netem.calibrate import calibrate, measure, predict_s
from thinpipe.netem.errors import NetemError
from thinpipe.netem.lab import Lab
from thinpipe.netem.link import LinkSpec
from thinpipe.netem.topology import Topology

pytestmark = [pytest.mark.lab, pytest.mark.alone]

MESSAGE_BYTES = 1_000_000
ATTEMPTS = 6


def measured(lab):
    return measure(lab, 0, 1, repeats=5, deadline=time.monotonic() + 30, message_bytes=MESSAGE_BYTES)


def off(made):
    """How far goodput and message time are from the set rate, as fractions."""
    goodput = made.goodput_mbit / made.expected_goodput_mbit - 1
    return goodput, made.message_time_s / made.expected_message_time_s - 1


@pytest.mark.parametrize("rate", [10.0, 100.0, 300.0, 1000.0])
def test_a_link_has_its_rate(rate):
    # Other work of the machine can make an attempt slow, never fast; a wrong shaper is wrong in all of them.
    seen = []
    with Lab(Topology.mesh(2, LinkSpec(rate_mbit=rate))) as lab:
        for _ in range(ATTEMPTS):
            goodput, message = off(measured(lab))
            seen.append((goodput, message))
            assert goodput <= 0.02, seen
            assert message >= -0.04, seen
            if max(g for g, _ in seen) >= -0.02 and min(m for _, m in seen) <= 0.04:
                return
    pytest.fail(f"slow in every attempt (goodput, message time): {seen}")


@pytest.mark.parametrize("rate", [96.0, 104.5])
def test_a_wrong_link_is_found(rate):
    with Lab(Topology.mesh(2, LinkSpec(rate_mbit=rate))) as lab:
        lab.topology = Topology.mesh(2, LinkSpec(rate_mbit=100.0))
        made = measured(lab)
    assert not made.ok
    assert "goodput" in made.reason


def test_every_link_of_a_topology_is_measured():
    rates = [[None, 50.0, None], [100.0, None, 200.0], [None, None, None]]
    topology = Topology.matrix(rates, LinkSpec())
    with Lab(topology) as lab:
        start = time.monotonic()
        found = calibrate(lab)
        took = time.monotonic() - start
    # On a busy machine a link may have to be measured again.
    predicted = sum(predict_s(topology.links[m.source, m.destination]) * m.tries for m in found)
    assert [(m.source, m.destination) for m in found] == list(topology.links)
    for made in found:
        asked = rates[made.source][made.destination]
        if asked is None:
            assert made.expected_goodput_mbit is None
            assert made.goodput_mbit > 300
        else:
            assert made.measured_rate_mbit == pytest.approx(asked, rel=0.05)
    assert took == pytest.approx(predicted, rel=0.5)


def test_a_budget_that_is_spent_is_an_error():
    with Lab(Topology.mesh(2, LinkSpec(rate_mbit=10.0))) as lab, pytest.raises(NetemError, match="budget"):
        calibrate(lab, budget_s=0.2)
