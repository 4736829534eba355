"""A session whose runs are written, not executed: for tests of what is around them."""

from thinpipe.harness import manifest, metrics, shards, store, sweep, tables
from thinpipe.harness.errors import RunError

STEPS = 4


def rows_of(spec, table, rank):
    """Rows that a rank of a tiny run could have written."""
    base = {"run_id": spec.run_id}
    if table == "steps":
        loss = 3.0 + spec.seed if rank == 1 else None
        numbers = {"compute_s": 0.05, "codec_s": 0.01, "blocked_s": 0.03, "sync_s": 0.001}
        return [
            base
            | {
                "rank": rank,
                "step": step,
                "epoch": 0,
                "measured": step > 0,
                "t_s": 0.1 * step,
                "step_time_s": 0.1,
            }
            | {"train_loss": loss, "lr": 0.001, "grad_norm": 1.0}
            | numbers
            for step in range(STEPS)
        ]
    if table == "transfers":
        moved = {
            "boundary": 0,
            "direction": "backward" if rank else "forward",
            "compressor": "none",
            "messages": 2,
        }
        moved |= {"raw_bytes": 100, "payload_bytes": 45, "frame_bytes": 50}
        sampled = dict.fromkeys(("rel_error", "mean_abs", "mean_abs_change", "clip_fraction"))
        return [base | {"rank": rank, "step": step, "epoch": 0} | moved | sampled for step in range(STEPS)]
    if table == "evals" and rank == 1 and spec.measure == "convergence":
        return [
            base
            | {"epoch": 1, "step": STEPS, "t_s": 0.4, "evaluation": "off"}
            | {"eval_loss": 3.5, "perplexity": 33.1, "sequences": 16}
            | dict.fromkeys(metrics.SCORES)
        ]
    return []


class FakeSession:
    """Writes what a run leaves behind; `fail` names arms' forward compressors whose runs fail."""

    def __init__(self, fail=(), before=lambda: None):
        self.fail, self.before, self.ran = fail, before, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def check(self, specs):
        pass

    def run(self, spec, run_dir, step):
        self.before()
        self.ran.append(spec.run_id)
        for rank in range(2):
            (run_dir / f"rank{rank}.log").write_text("".join(f"line {i} of rank {rank}\n" for i in range(30)))
            for table in tables.SHARDS:
                shards.write_shard(table, rows_of(spec, table, rank), run_dir / f"{table}.rank{rank}.parquet")
        found = manifest.collect(spec)
        settings = {
            "requested": {"threads": 1},
            "effective": {"rank0": {"threads": 1}, "rank1": {"threads": 1}},
        }
        store.write_json(run_dir / "manifest.json", found | settings)
        status = sweep.failed_status(RunError("rank 1 was killed by signal 9"), "2024-01-01T00:00:00+00:00", 2.0)
        if spec.compression.forward in self.fail:
            return status
        totals = {"steps": STEPS, "raw_bytes": 800, "payload_bytes": 360, "frame_bytes": 400}
        totals |= {"wire_bytes": 900, "sync_bytes": 50}
        return status | {"state": "done", "error": None, "totals": totals}
