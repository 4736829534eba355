"""A link that is off is measured again, so often and no oftener."""

from types import SimpleNamespace

import pytest

from thinpipe.netem import calibrate
from thinpipe.netem.link import LinkSpec

LINK = LinkSpec(rate_mbit=10.0)


@pytest.mark.parametrize(("goodputs", "tries", "ok"), [([9.6], 1, True), ([7.0, 9.6], 2, True), ([7.0] * 9, 3, False)])
def test_an_off_link_is_measured_again(monkeypatch, goodputs, tries, ok):
    given = iter(goodputs)
    size = calibrate.choose_message_bytes(LINK)
    expected = calibrate.expected_goodput_mbit(LINK)

    def measure(lab, source, destination, **how):
        return calibrate.judge(
            LINK, (source, destination), goodput_mbit=next(given) / 9.6 * expected, message_bytes=size,
            time_s=calibrate.wire_time_s(LINK, size), rtt_ms=0.1,
        )  # fmt: skip

    monkeypatch.setattr(calibrate, "measure", measure)
    lab = SimpleNamespace(topology=SimpleNamespace(links={(0, 1): LINK}))
    (found,) = calibrate.calibrate(lab)
    assert (found.tries, found.ok) == (tries, ok)
