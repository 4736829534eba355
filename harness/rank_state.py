"""What a rank's training checkpoint holds, and going on from it (on disk: state.py)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from thinpipe.harness import manifest, state
from thinpipe.harness.compression.base import Stateful
from thinpipe.harness.errors import UserError

if TYPE_CHECKING:
    from thinpipe.harness.worker import Rank


def save(rank: Rank, step: int) -> None:
    """Save everything after `step` steps where it is due. It counts once every rank has written its part."""
    every = rank.spec.checkpoint.every
    if not every or (step % every and step != len(rank.plan)):
        return
    kept = {
        "inputs": _inputs(rank),
        state.STAGES: rank.trainer.modules_state(),
        "trainer": rank.trainer.state_dict(),
        "memories": {key: memory.state_dict() for key, memory in _memories(rank)},
        "rows": rank.recorder.rows,
        "torch_rng": torch.get_rng_state(),
        "numpy_rng": np.random.get_state(),
        "python_rng": random.getstate(),
    }
    state.save(rank.run_dir, step, rank.rank, rank.world_size, kept)
    if rank.links:
        rank.links.barrier()
    if rank.rank == 0:
        state.commit(rank.run_dir, step, rank.world_size)
        state.prune(rank.run_dir)
    if rank.links:
        # Nobody goes on, and may be killed, in between: either all ranks resume from this one or all from the last.
        rank.links.barrier()


def resume(rank: Rank) -> int:
    """Take up the newest complete checkpoint; returns the step to go on with, 0 without one.

    Rank 0 chooses, and reads all files for it; the others read their own.
    """
    # What is passed over is said in rank 0's log.
    chosen = [state.latest(rank.run_dir, print) if rank.rank == 0 else None]
    if rank.links:
        dist.broadcast_object_list(chosen, src=0, group=rank.links.world)
    step = chosen[0]
    if step is None:
        rank.recorder.restore({})  # what an earlier attempt wrote
        return 0
    kept = state.load(rank.run_dir, step, rank.rank)
    if changed := [key for key, now in _inputs(rank).items() if kept["inputs"].get(key) != now]:
        raise UserError(
            f"the checkpoint of step {step} was made with other {', '.join(changed)} than there are now, and going on "
            "would mix the two: begin the run again with --force"
        )
    rank.trainer.load_modules_state(kept[state.STAGES])
    rank.trainer.load_state_dict(kept["trainer"])
    for key, memory in _memories(rank):
        memory.load_state_dict(kept["memories"][key])
    rank.recorder.restore(kept["rows"])
    torch.set_rng_state(kept["torch_rng"])
    np.random.set_state(kept["numpy_rng"])
    random.setstate(kept["python_rng"])
    return step


def _inputs(rank: Rank) -> dict[str, Any]:
    """What a run is made from beside its spec, as plain data: it must not have changed since the checkpoint."""
    sources = {key: value["source_hash"] for key, value in manifest.plugin_hashes(rank.spec).items()}
    return {"data": json.loads(json.dumps(rank.data.dataset.provenance)), "plug-in sources": sources}


def _memories(rank: Rank) -> Iterator[tuple[str, Stateful]]:
    """Every memory of a rank, and codec that keeps something, by channel end and text."""
    for channel in rank.channels:
        for text, compressor in channel.compressors.items():
            if isinstance(compressor, Stateful):
                side = "out" if channel.sends else "in"
                yield f"{channel.direction}/{channel.boundary}/{side} {text}", compressor
