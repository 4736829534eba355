"""Fixtures shared by tests that run real training between namespaces."""

import signal

import pytest

from runs import Lab
from thinpipe.harness.runner import Session

# A suite started in the background inherits an ignored SIGINT, and so would every sweep that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """One session for all tests that only need runs; links are not calibrated, which their runs say."""
    with Session(calibrated=False) as session:
        yield Lab(session, tmp_path_factory.mktemp("results"))
