"""Shards to tables: every computed column by hand, and every way a shard can be wrong."""

import json
import statistics

import pandas as pd
import pyarrow.parquet as pq
import pytest
import synthetic

from thinpipe.harness import metrics, profile, shards, summary, tables
from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import parse
from thinpipe.harness.store import Store

EVAL = {
    "run_id": "a" * 12,
    "epoch": 1,
    "step": 8,
    "t_s": 2,
    "evaluation": "off",
    "eval_loss": 1.5,
    "perplexity": 4.4817,
    "accuracy": None,
    "matthews": None,
    "f1": None,
    "sequences": 64,
}

# --- shards ---


@pytest.mark.parametrize("table", metrics.TABLES)
def test_a_shard_has_its_schema_also_without_rows(tmp_path, table):
    path = tmp_path / "shard.parquet"
    shards.write_shard(table, [], path)
    found = pq.read_table(path)
    assert found.num_rows == 0
    assert found.schema.names == list(metrics.TABLES[table])
    assert found.schema.types == shards.schema(table).types


def test_a_row_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "evals.rank1.parquet"
    shards.write_shard("evals", [EVAL], path)
    assert tables.read_shard("evals", path, "a" * 12).to_pylist() == [EVAL]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "error"),
    [({"loss": 1.0}, KeyError), ({"eval_loss": "low"}, TypeError), ({"epoch": None}, TypeError)],
)
def test_a_row_that_is_not_of_the_table_is_refused_and_nothing_is_written(tmp_path, change, error):
    with pytest.raises(error):
        shards.write_shard("evals", [EVAL | change], tmp_path / "x.parquet")
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "evals.rank0.parquet"
    shards.write_shard("evals", [EVAL], path)
    before = path.read_bytes()

    def full(content, part):
        part.write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tables.pq, "write_table", full)
    with pytest.raises(OSError, match="No space"):
        shards.write_shard("evals", [], path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


# --- computed columns, by hand ---


def step(rank, number, step_time_s, compute_s, codec_s=0.0, *, measured=True, loss=None, epoch=0):
    return {
        "run_id": "r",
        "rank": rank,
        "step": number,
        "epoch": epoch,
        "measured": measured,
        "t_s": 0.0,
        "step_time_s": step_time_s,
        "train_loss": loss,
        "lr": 1e-3,
        "grad_norm": None,
        "compute_s": compute_s,
        "codec_s": codec_s,
        "blocked_s": 0.0,
        "sync_s": 0.0,
    }


def span(rank, number, phase, between, *key):
    microbatch, direction, boundary = (*key, *(0, "forward", 0)[len(key) :])
    return {
        "run_id": "r",
        "rank": rank,
        "step": number,
        "microbatch": microbatch,
        "phase": phase,
        "direction": direction,
        "boundary": boundary,
        "stage": None,
        "start_s": between[0],
        "end_s": between[-1],
    }


STEPS = [
    step(0, 0, 1.0, 0.1, 0.01, measured=False),
    step(1, 0, 0.9, 0.1, 0.01, measured=False, loss=9.0),
    step(0, 1, 0.80, 0.20, 0.03),
    step(1, 1, 0.90, 0.30, 0.01, loss=5.0),
    step(0, 2, 0.70, 0.10, 0.01, epoch=1),
    step(1, 2, 0.60, 0.50, 0.03, loss=4.0, epoch=1),
    step(0, 3, 0.40, 0.30, 0.02, epoch=1),
    step(1, 3, 0.50, 0.30, 0.02, loss=3.0, epoch=1),
]
# Step 1 has three waits of rank 1 (sent in the middle of it, before it, after it by the clock's grain),
# one of rank 0 for a gradient, and a wait for a send. Steps 2 and 3 have one wait each.
SPANS = [
    span(0, 1, "send", (10.3, 10.3), 0),
    span(1, 1, "wait_receive", (10.0, 10.4), 0),
    span(0, 1, "send", (10.2, 10.2), 1),
    span(1, 1, "wait_receive", (10.5, 10.55), 1),
    span(0, 1, "send", (10.71, 10.71), 2),
    span(1, 1, "wait_receive", (10.6, 10.7), 2),
    span(1, 1, "send", (11.1, 11.1), 0, "backward"),
    span(0, 1, "wait_receive", (11.0, 11.3), 0, "backward"),
    span(0, 1, "wait_send", (12.0, 12.05), -1),
    span(0, 2, "send", (20.0, 20.0)),
    span(1, 2, "wait_receive", (20.0, 20.02)),
    span(0, 3, "send", (30.0, 30.0)),
    span(1, 3, "wait_receive", (29.9, 30.1)),
]


def transfer(rank, number, frame_bytes, raw_bytes=1000):
    row = dict.fromkeys(metrics.TRANSFERS)
    row |= {"run_id": "r", "rank": rank, "step": number, "epoch": 0, "boundary": 0, "messages": 1}
    row |= {"direction": ("forward", "backward")[rank], "compressor": "none"}
    return row | {"raw_bytes": raw_bytes, "payload_bytes": frame_bytes, "frame_bytes": frame_bytes}


def frames(steps=STEPS, spans=SPANS, evals=(), transfers=()):
    return [
        tables.to_frame(name, shards.to_arrow(name, rows))
        for name, rows in (
            ("steps", steps),
            ("spans", spans),
            ("evals", list(evals)),
            ("transfers", list(transfers)),
        )
    ]


def summarised(spec=None, **changes):
    return summary.summarise(parse(spec or {"measure": "full"}), *frames(**changes))


def test_step_time_is_the_median_of_the_slowest_rank():
    found = summarised()
    assert found["step_time_s"] == pytest.approx(0.70)  # of 0.90, 0.70, 0.50
    assert found["samples_per_s"] == pytest.approx(16 / 0.70)
    assert found["tokens_per_s"] == pytest.approx(64 * 16 / 0.70)


def test_compute_and_codec_are_means_over_ranks_of_medians():
    found = summarised()
    assert found["compute_s"] == pytest.approx((0.20 + 0.30) / 2)
    assert found["codec_s"] == pytest.approx((0.02 + 0.02) / 2)


def test_waiting_for_a_frame_counts_from_when_it_was_sent():
    waits = summary.wait_by_step(frames()[1], 2)
    assert waits[1, 1] == pytest.approx(0.1 + 0.05 + 0.0)
    assert waits[0, 1] == pytest.approx(0.2 + 0.05)
    assert waits[1, 2] == pytest.approx(0.02)
    assert waits[1, 3] == pytest.approx(0.1)
    assert waits[0, 2] == waits[0, 3] == 0.0


def test_frames_of_other_boundaries_and_of_other_data_groups_are_not_taken_for_ones_own():
    """Three stages, two pipelines: each frame is waited for by the next rank of its own pipeline."""
    spans = []
    for first, late in ((0, 0.0), (3, 0.5)):
        spans += [
            span(first, 1, "send", (10.1 + late, 10.1 + late), 0, "forward", 0),
            span(first + 1, 1, "wait_receive", (10.0, 10.9), 0, "forward", 0),
            span(first + 1, 1, "send", (11.2 + late, 11.2 + late), 0, "forward", 1),
            span(first + 2, 1, "wait_receive", (11.0, 11.9), 0, "forward", 1),
        ]
    waits = summary.wait_by_step(frames(spans=spans)[1], 3)
    assert {rank: round(waits[rank, 1], 9) for rank in range(6)} == {0: 0, 1: 0.8, 2: 0.7, 3: 0, 4: 0.3, 5: 0.2}
    alone = [row for row in spans if row["rank"] != 3]
    with pytest.raises(
        UserError, match="rank 4 waited for the frame of step 1, micro-batch 0, forward over boundary 0"
    ):
        summary.wait_by_step(frames(spans=alone)[1], 3)


def test_a_frame_sent_twice_is_an_error():
    with pytest.raises(UserError, match="micro-batch 0, forward over boundary 0 was sent twice"):
        summarised(spans=[*SPANS, SPANS[0]])


def test_wait_and_idle_by_hand():
    found = summarised()
    # Rank 0 waits 0.25, 0, 0, rank 1 waits 0.15, 0.02, 0.1.
    assert found["wait_s"] == pytest.approx((0.0 + 0.1) / 2)
    # Rank 0: 0.80-0.20-0.03-0.25, 0.70-0.10-0.01, 0.40-0.30-0.02; rank 1: 0.44, 0.05, 0.08.
    assert found["idle_s"] == pytest.approx((0.32 + 0.08) / 2)


def test_spans_of_some_steps_are_enough_and_none_leave_wait_empty():
    some = summarised(spans=[s for s in SPANS if s["step"] != 3])
    assert some["wait_s"] == pytest.approx((0.125 + 0.085) / 2)
    none = summarised(spans=[])
    assert none["wait_s"] is None
    assert none["idle_s"] is None
    assert none["compute_s"] == pytest.approx(0.25)


@pytest.mark.parametrize("lost", [0, 6])
def test_a_frame_that_nobody_sent_is_an_error(lost):
    with pytest.raises(UserError, match=r"step 1, micro-batch 0, (forward|backward)"):
        summarised(spans=[s for i, s in enumerate(SPANS) if i != lost])


def test_losses_of_the_last_epoch_and_evaluation():
    evals = [EVAL, EVAL | {"step": 16, "eval_loss": 1.25}]
    found = summarised(evals=evals[::-1])
    assert found["initial_train_loss"] == 9.0
    assert found["final_train_loss"] == pytest.approx(3.5)
    assert found["final_eval_loss"] == 1.25
    assert found["cold_step_time_s"] is None
    assert [found[f"final_{name}"] for name in metrics.SCORES] == [None] * 3


def test_scores_of_the_last_evaluation():
    scores = {"perplexity": None, "accuracy": 0.75, "matthews": 0.5, "f1": 0.8}
    evals = [EVAL | scores, EVAL | scores | {"step": 16, "accuracy": 0.875, "f1": None}]
    found = summarised(evals=evals)
    assert (found["final_accuracy"], found["final_matthews"], found["final_f1"]) == (0.875, 0.5, None)


def test_pictures_have_no_tokens():
    pictures = {"task": {"name": "image", "corpus": "fashion-mnist"}, "model": {"name": "resnet", "preset": "narrow"}}
    found = summarised({"measure": "full", **pictures})
    assert found["samples_per_s"] == pytest.approx(16 / 0.70)
    assert found["tokens_per_s"] is None


def test_a_timing_run_has_a_cold_step_and_no_losses():
    found = summarised({"measure": "timing"}, evals=[EVAL | {"accuracy": 0.5}])
    assert found["cold_step_time_s"] == 1.0
    assert found["step_time_s"] == pytest.approx(0.70)
    assert found["initial_train_loss"] is None
    assert found["final_train_loss"] is None
    assert found["final_eval_loss"] is None
    assert found["final_accuracy"] is None


def test_the_measured_ratio_leaves_out_the_steps_that_are_not_measured():
    sent = [transfer(0, 0, 1010), transfer(1, 0, 1010)]
    sent += [transfer(rank, number, size) for number in (1, 2, 3) for rank, size in ((0, 100), (1, 300))]
    found = summarised(transfers=sent)
    assert found["measured_compression_ratio"] == pytest.approx(6000 / 1200)
    cold = [row | {"measured": False} for row in STEPS]
    assert summarised(steps=cold, transfers=sent)["measured_compression_ratio"] is None


def test_without_steps_everything_is_empty():
    assert set(summarised(steps=[], spans=[]).values()) == {None}
    assert set(summary.COLUMNS) == set(summarised(steps=[], spans=[]))


# --- a whole experiment ---


def one(part, arm, rate, seed):
    runs = synthetic.results()[1]["runs"]
    run_id = synthetic.spec_of(part, arm, rate, seed).run_id
    found = runs[runs["run_id"] == run_id]
    assert len(found) == 1, (part, arm, rate, seed)
    return found.iloc[0]


def test_tables_have_exactly_their_columns_and_types():
    store, built = synthetic.results()
    folder = store.experiment_dir("synthetic") / "tables"
    assert sorted(built) == sorted(tables.TABLES)
    for name, frame in built.items():
        assert list(frame.columns) == list(metrics.TABLES[name])
        assert len(frame), name
        assert pq.read_table(folder / f"{name}.parquet").schema.types == shards.schema(name).types
        text = pd.read_csv(folder / f"{name}.csv", dtype={"run_id": str, "machine": str})
        assert list(text.columns) == list(frame.columns)
        assert len(text) == len(frame)
    assert not list(folder.glob(".*"))


def test_no_run_is_lost_or_doubled():
    _, built = synthetic.results()
    runs = built["runs"]
    declared = 3 * len(synthetic.ARMS) * (2 + len(synthetic.RATES))
    assert len(runs) == declared - 1
    assert runs["run_id"].is_unique
    assert runs["state"].value_counts().to_dict() == {
        "done": declared - 4,
        "failed": 1,
        "diverged": 1,
        "foreign": 1,
    }
    steps = built["steps"]
    assert not steps.duplicated(["run_id", "rank", "step"]).any()
    assert set(steps["run_id"]) == set(runs["run_id"])


def test_a_done_run_equals_its_rows():
    key = ("timing", "AQ-SGD fw4 bw8", 10, 1)
    row, spec = one(*key), synthetic.spec_of(*key)
    raw = synthetic.run_rows(spec, key)
    assert (row["arm"], row["seed"], row["rate_mbit"], row["part"]) == ("AQ-SGD fw4 bw8", 1, 10, "timing")
    assert (row["forward"], row["backward"]) == ("delta(fixpoint:4)", "fixpoint:8")
    assert (row["forward_bits"], row["backward_bits"]) == (4, 8)
    assert (row["train_id"], row["cell"]) == (spec.train_id, spec.cell_id)
    assert (row["model"], row["task"], row["batch_size"]) == ("gpt2:tiny", "lm:pydoc", 16)
    assert (row["stages"], row["groups"]) == (2, 1)
    slowest = [max(r["step_time_s"] for r in raw["steps"] if r["step"] == n) for n in range(6)]
    assert row["step_time_s"] == pytest.approx(statistics.median(slowest[2:]))
    assert row["cold_step_time_s"] == pytest.approx(statistics.median(slowest[:2]))
    assert row["raw_bytes"] == 2 * 6 * 4 * synthetic.RAW_BYTES
    assert row["frame_bytes"] == sum(r["frame_bytes"] for r in raw["transfers"])
    assert row["compression_ratio"] == pytest.approx(row["raw_bytes"] / row["frame_bytes"])
    # The first two steps are cold: there delta sends all in full.
    warm = [r for r in raw["transfers"] if r["step"] >= 2]
    expected = sum(r["raw_bytes"] for r in warm) / sum(r["frame_bytes"] for r in warm)
    assert row["measured_compression_ratio"] == pytest.approx(expected)
    assert row["measured_compression_ratio"] > 1.2 * row["compression_ratio"]
    assert row["wire_bytes"] == int(1.05 * row["frame_bytes"])
    assert (row["sync_bytes"], row["data_bytes"]) == (synthetic.SYNC_BYTES, 0)
    assert {name: row[name] for name in synthetic.MEMORY_MIB} == synthetic.MEMORY_MIB
    assert row["measured_rate_mbit"] == pytest.approx(9.98)
    assert row["steps"] == 6
    parts = row[["compute_s", "codec_s", "wait_s", "idle_s"]].sum()
    assert parts == pytest.approx(row["step_time_s"], rel=0.02)
    assert row["fidelity"] == "ok"
    assert pd.isna(row["fidelity_reason"])


def test_fp32_is_32_bits_and_has_losses():
    row = one("convergence", "FP32", 100, 0)
    assert (row["forward"], row["forward_bits"], row["backward_bits"]) == ("none", 32, 32)
    key = ("convergence", "FP32", 100, 0)
    raw = synthetic.run_rows(synthetic.spec_of(*key), key)
    last = [r["train_loss"] for r in raw["steps"] if r["epoch"] == synthetic.EPOCHS - 1 and r["train_loss"] is not None]
    assert row["final_train_loss"] == pytest.approx(sum(last) / synthetic.STEPS_PER_EPOCH)
    assert row["final_eval_loss"] == pytest.approx(raw["evals"][-1]["eval_loss"])


def test_a_classification_is_scored_and_a_language_model_is_not():
    key = ("classification", "AQ-SGD fw4 bw8", 100, 1)
    row, lm = one(*key), one("convergence", *key[1:])
    last = synthetic.run_rows(synthetic.spec_of(*key), key)["evals"][-1]
    assert [row[f"final_{name}"] for name in metrics.SCORES] == [last[name] for name in metrics.SCORES]
    assert row["task"] == "classify:movie-reviews"
    assert lm[[f"final_{name}" for name in metrics.SCORES]].isna().all()


@pytest.mark.parametrize("key", [synthetic.FAILED, synthetic.DIVERGED])
def test_a_run_that_did_not_finish_keeps_its_rows_and_computes_nothing(key):
    _, built = synthetic.results()
    row = one(*key)
    assert row[list(summary.COLUMNS)].isna().all()
    assert row["error"] in ("rank 1 was killed by signal 9 at step 3", "loss became nan")
    raw = synthetic.run_rows(synthetic.spec_of(*key), key)
    kept = built["steps"][built["steps"]["run_id"] == row["run_id"]]
    assert len(kept) == len(raw["steps"])
    assert row["frame_bytes"] == sum(r["frame_bytes"] for r in raw["transfers"])


def test_flagged_and_foreign_runs_say_so():
    flagged, foreign = one(*synthetic.FLAGGED), one(*synthetic.FOREIGN)
    assert (flagged["fidelity"], flagged["state"]) == ("cpu-bound", "done")
    assert flagged["fidelity_reason"] == "rank 0 waited 7.1 % for a core"
    assert (foreign["state"], foreign["machine"]) == ("foreign", "f" * 12)


def test_a_replay_of_a_profile_that_has_changed_since_says_so(tmp_path):
    key = ("timing", "FP32", 100, 0)
    spec = synthetic.spec_of(*key).model_copy(update={"compute": "replay", "profile": "v100-gpt2-xl"})
    kept = Store(tmp_path)
    synthetic.write_run(kept, spec, key)
    path = kept.run_dir(spec.run_id) / "manifest.json"
    for then, flags in (
        (profile.digest("v100-gpt2-xl"), "ok"),
        ("0" * 16, "other-profile"),
        (None, "ok"),
    ):
        path.write_text(json.dumps({"inputs": {"profile v100-gpt2-xl": then} if then else {}}))
        (row,) = tables.of_run(kept, spec.run_id)["runs"].to_dict("records")
        assert row["fidelity"] == flags
    gone = tables._other_profile("no-such-one", {"inputs": {"profile no-such-one": "0" * 16}})
    assert "is gone" in gone


# --- what can be wrong ---

KEY = ("timing", "FP32", 30, 0)


@pytest.fixture
def single(tmp_path):
    """A store with one finished run: (store, its spec, its folder)."""
    store, spec = Store(tmp_path), synthetic.spec_of(*KEY)
    synthetic.write_run(store, spec, KEY)
    row = {"run_id": spec.run_id, "part": "timing", "arm": "FP32", "cell": spec.cell_id, "seed": 0}
    store.experiment_dir("e").mkdir()
    (store.experiment_dir("e") / "runs.json").write_text(json.dumps([row]))
    return store, spec, store.run_dir(spec.run_id)


def test_the_single_run_builds(single):
    assert len(tables.build(single[0], "e")["runs"]) == 1


@pytest.mark.parametrize("table", tables.SHARDS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_shard_is_named(single, table, rank):
    store, spec, folder = single
    (folder / f"{table}.rank{rank}.parquet").unlink()
    with pytest.raises(UserError, match=rf"{spec.run_id}.*{table}\.rank{rank}\.parquet is missing"):
        tables.build(store, "e")


@pytest.mark.parametrize("damage", [b"", b"PAR1 nothing of the kind PAR1", "cut"])
def test_a_corrupt_shard_is_named(single, damage):
    store, spec, folder = single
    path = folder / "steps.rank1.parquet"
    path.write_bytes(path.read_bytes()[:-40] if damage == "cut" else damage)
    with pytest.raises(UserError, match=rf"{spec.run_id}.*steps\.rank1\.parquet cannot be read"):
        tables.build(store, "e")


def test_a_shard_of_another_run_is_refused(single):
    store, spec, folder = single
    shards.write_shard("evals", [EVAL], folder / "evals.rank1.parquet")
    with pytest.raises(UserError, match=f"{spec.run_id}.*holds rows of run {'a' * 12}"):
        tables.build(store, "e")


def test_a_shard_of_another_version_is_refused(single):
    store, _, folder = single
    path = folder / "evals.rank1.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["perplexity"]), path)
    with pytest.raises(UserError, match=r"other columns.*perplexity"):
        tables.build(store, "e")


def test_bytes_that_disagree_with_the_status_are_refused(single):
    store, spec, folder = single
    status = json.loads((folder / "status.json").read_text())
    status["totals"]["frame_bytes"] += 1
    (folder / "status.json").write_text(json.dumps(status))
    with pytest.raises(UserError, match=f"{spec.run_id}.*frame_bytes"):
        tables.build(store, "e")


def test_a_line_cut_short_by_a_kill_is_left_out_and_a_damaged_one_is_named(single):
    store, _, folder = single
    status = json.loads((folder / "status.json").read_text()) | {"state": "failed", "error": "killed"}
    (folder / "status.json").write_text(json.dumps(status))
    for shard in folder.glob("*.parquet"):
        shard.unlink()
    lines = folder / "rank1.jsonl"
    whole = lines.read_text()
    lines.write_text(whole + whole.splitlines()[0][:30])
    assert len(tables.build(store, "e")["steps"]) == 12
    lines.write_text("{broken\n" + whole)
    with pytest.raises(UserError, match=r"rank1\.jsonl, line 1"):
        tables.build(store, "e")


def test_an_unfinished_run_leaves_no_row_and_an_unknown_experiment_is_an_error(single):
    store, _, folder = single
    (folder / "status.json").unlink()
    built = tables.build(store, "e")
    assert {len(frame) for frame in built.values()} == {0}
    assert list(built["runs"].columns) == list(metrics.RUNS)
    with pytest.raises(UserError, match="no run of an experiment 'other'"):
        tables.build(store, "other")


def test_a_run_by_itself_has_its_spans_too(single):
    store, spec, folder = single
    built = tables.of_run(store, spec.run_id)
    assert sorted(built) == sorted(["runs", *metrics.OF_RANKS])
    for name, frame in built.items():
        assert list(frame.columns) == list(metrics.TABLES[name]), name
    (row,) = built["runs"].to_dict("records")
    assert (row["run_id"], row["experiment"], row["cell"]) == (spec.run_id, "run", spec.cell_id)
    assert len(built["spans"]) == len(synthetic.run_rows(spec, KEY)["spans"])
    (folder / "status.json").unlink()
    with pytest.raises(UserError, match=f"run {spec.run_id} has not ended"):
        tables.of_run(store, spec.run_id)


def test_a_run_shared_by_two_parts_has_two_rows_and_its_steps_once(single):
    store, _, _ = single
    path = store.experiment_dir("e") / "runs.json"
    rows = json.loads(path.read_text())
    path.write_text(json.dumps([*rows, rows[0] | {"part": "again", "arm": "baseline"}]))
    built = tables.build(store, "e")
    assert list(built["runs"]["part"]) == ["timing", "again"]
    assert not built["steps"].duplicated(["rank", "step"]).any()
