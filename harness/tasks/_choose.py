"""Which samples of a data set are trained on and which are held out."""

from __future__ import annotations

import numpy as np

from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import TaskSpec


def split(num: int, num_test: int | None, spec: TaskSpec, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Ascending int64 indices: `num_sequences` (or all) to train on, `num_eval_sequences` held out.

    Of `num` samples the last are held out and the others picked evenly to train on; where a data set holds out
    `num_test` itself, both parts are picked evenly. what: how an error calls the samples. Raises UserError for too few.
    """
    held = spec.num_eval_sequences
    available = num - held if num_test is None else num
    wanted = available if spec.num_sequences is None else spec.num_sequences
    if not 1 <= wanted <= available or (num_test is not None and held > num_test):
        found = f"{num}" if num_test is None else f"{num} + {num_test} (test split)"
        raise UserError(
            f"task.corpus {spec.corpus!r} has {found} {what}, but {max(wanted, 1)} to train on (task.num_sequences) "
            f"and {held} held out (task.num_eval_sequences) are asked for. Lower one of them, or take a larger corpus."
        )
    test = np.arange(available, num) if num_test is None else evenly(held, num_test)
    return evenly(wanted, available), test


def evenly(wanted: int, available: int) -> np.ndarray:
    """`wanted` of `available` indices, evenly spaced, ascending."""
    return np.arange(wanted) * available // max(wanted, 1)


def shuffled(num: int) -> np.ndarray:
    """A fixed order of `num` samples: files are often sorted by what their samples are."""
    words = np.random.Philox(key=np.array([0x7E57, 0], dtype=np.uint64)).random_raw(num)
    return np.argsort(words, kind="stable")
