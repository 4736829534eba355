"""Fixtures shared by tests that run real training between namespaces."""

import pytest

from runs import Lab
from thinpipe.harness.runner import Session


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """One session for all tests that only need runs; links are not calibrated, which their runs say."""
    with Session(calibrated=False) as session:
        yield Lab(session, tmp_path_factory.mktemp("results"))
