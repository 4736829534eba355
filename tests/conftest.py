"""What tests share: a session for real training between namespaces, and which of several workers runs what.

`make test` has two workers. Tests that train between namespaces load the machine by themselves and share a session: one
worker runs all of them, first, so that shorter files fill what is left. Tests marked alone measure the machine: no
other test runs meanwhile.
"""

import contextlib
import fcntl
import os
import signal
from pathlib import Path

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


# Whose tests load the machine by themselves.
MACHINE = ("e2e", "golden", "lab")


def uses_machine(nodeid):
    return nodeid.startswith(tuple(f"tests/{folder}/" for folder in MACHINE))


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not uses_machine(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """What uses the machine to one worker, each other file as a whole to whichever is free."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "machine" if uses_machine(nodeid) else nodeid.partition("::")[0]

    return Scheduler(config, log)


# Files that are there anyway: one is held while waiting for the other, so that who waits to be alone is not passed by.
HERE = Path(__file__)
TURN, ROOM = (os.open(path, os.O_RDONLY) for path in (HERE, HERE.parent))


@contextlib.contextmanager
def locked(handle, kind):
    fcntl.flock(handle, kind)
    try:
        yield
    finally:
        # Said aloud, since a child may hold a copy of the descriptor.
        fcntl.flock(handle, fcntl.LOCK_UN)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with contextlib.ExitStack() as room:
        with locked(TURN, fcntl.LOCK_EX):
            room.enter_context(locked(ROOM, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH))
        return (yield)
