"""Code that starts threads (datasets, pyarrow, transformers), run in a process of its own: `call` runs a job there.

The process that prepares a run's data is forked into its ranks, which a process with threads may not be. A job takes
and gives plain data and npz files; what it refuses comes back as the same UserError.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from thinpipe.harness.errors import UserError

# Longest time of a job that loads nothing from outside: tokenising a large text.
LIMIT_S = 1800.0
MARK = "thinpipe-child "


class NotThereError(UserError):
    """The job's source is not where it was looked for."""


def call(module: str, job: Mapping[str, Any], *, offline: bool = True, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Run `module`.run(**job) in a fresh interpreter and return its result. Everything is plain JSON data.

    offline: the hub's libraries look in their cache only (they read that once, when imported). Raises UserError as
    the job does, or where it ended without an answer or took longer than `limit_s`.
    """
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUTF8": "1"}
    if offline:
        environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    # -P: a file of the current folder that happens to be called like a library is not imported.
    command = [sys.executable, "-P", "-m", __name__, module]
    try:
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, timeout=limit_s, check=False,
            env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(f"loading {_what(job)} was ended after {limit_s:.0f} s. Take a smaller one.") from None
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode != 0 or not answers:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise UserError(f"loading {_what(job)} failed: {last}")
    answer = json.loads(answers[-1].removeprefix(MARK))
    if "missing" in answer:
        raise NotThereError(f"loading {_what(job)} failed: {answer['missing']}")
    if "refused" in answer:
        raise UserError(answer["refused"])
    return answer["result"]


def _what(job: Mapping[str, Any]) -> str:
    return repr(job.get("source", "data"))


def main() -> None:
    import importlib

    module = importlib.import_module(sys.argv[1])
    try:
        answer = {"result": module.run(**json.load(sys.stdin))}
    except UserError as error:
        answer = {"refused": str(error)}
    except OSError as error:  # as the hub's libraries say that they find nothing
        answer = {"missing": str(error)}
    print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
