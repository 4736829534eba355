"""What tests share: a session for real training between namespaces, and which of several workers runs what.

`make test` has two workers. Tests marked lab or e2e load the machine by themselves and share sessions: one worker runs
all of them, first, so that the other's shorter files fill what is left. Tests marked alone measure the machine: no
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Groups for `--dist loadgroup`, which xdist reads next: what uses the machine, then each other file."""
    if not hasattr(config, "workerinput"):
        return
    machine = {item for item in items if any(item.get_closest_marker(name) for name in ("lab", "e2e"))}
    for item in items:
        item.add_marker(pytest.mark.xdist_group("machine" if item in machine else item.path.stem))
    items.sort(key=lambda item: item not in machine)


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
