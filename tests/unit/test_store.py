"""The store: when a run counts as finished, what survives a power cut, what a full disk says."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os

import pytest

from thinpipe.harness import store as stores
from thinpipe.harness.errors import UserError
from thinpipe.harness.experiment import expand
from thinpipe.harness.spec import parse
from thinpipe.harness.store import DiskFullError, Store, read_spec, rows, write_json

SPEC = parse({"seed": 3, "network": {"rate_mbit": 10}})
STATUS = {
    "state": "done",
    "error": None,
    "detail": None,
    "started_at": "2024-01-01T00:00:00+00:00",
    "ended_at": "2024-01-01T00:00:09+00:00",
    "wall_s": 9.0,
    "machine": "0" * 12,
    "fidelity": {"flags": [], "reasons": []},
    "totals": {},
    "links": {},
    "run_queue_pct": None,
}
DATA = {"name": "demo", "seeds": [0, 1], "arm": [{"label": "FP32"}], "part": [{"name": "a"}, {"name": "b"}]}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "results")


def test_begin_then_finish(store):
    folder = store.begin(SPEC)
    assert folder == store.run_dir(SPEC.run_id)
    assert store.begun(SPEC.run_id)
    assert store.status(SPEC.run_id) is None
    assert store.spec(SPEC.run_id) == read_spec(folder) == SPEC
    store.finish(SPEC.run_id, STATUS)
    assert store.status(SPEC.run_id) == {**STATUS, "run_id": SPEC.run_id}
    assert store.run_ids() == [SPEC.run_id]
    assert sorted(path.name for path in folder.iterdir()) == ["run.json", "status.json"]


def test_reading_creates_nothing(store):
    assert store.status("0" * 12) is None
    assert not store.begun("0" * 12)
    assert store.run_ids() == store.experiments() == store.saved_runs("demo") == []
    assert not store.root.exists()


def test_begin_removes_an_earlier_attempt(store):
    folder = store.begin(SPEC)
    (folder / "rank0.jsonl").write_text("old")
    store.finish(SPEC.run_id, STATUS)
    store.begin(SPEC)
    assert [path.name for path in folder.iterdir()] == ["run.json"]
    assert store.status(SPEC.run_id) is None


def with_checkpoint(store):
    """The folder of a run that was cut short after it had saved its training."""
    folder = store.begin(SPEC)
    for name in ("rank0.jsonl", "rank0.log", "steps.rank0.parquet", "manifest.json", "trace.json"):
        (folder / name).write_text("old")
    saved = folder / stores.CHECKPOINTS / "step-00000040"
    saved.mkdir(parents=True)
    (saved / "complete.json").write_text("saved")
    return folder


@pytest.mark.parametrize("ended", [False, True])
def test_begin_keeps_checkpoints_and_what_the_ranks_wrote_to_go_on_from(store, ended):
    folder = with_checkpoint(store)
    if ended:
        store.finish(SPEC.run_id, {**STATUS, "state": "failed"})
    assert store.begin(SPEC) == folder
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoints", "rank0.jsonl", "rank0.log", "run.json"]
    assert (folder / "checkpoints" / "step-00000040" / "complete.json").read_text() == "saved"
    assert (folder / "rank0.jsonl").read_text() == "old"
    assert store.status(SPEC.run_id) is None


def test_begin_afresh_keeps_nothing(store):
    folder = with_checkpoint(store)
    store.begin(SPEC, afresh=True)
    assert [path.name for path in folder.iterdir()] == ["run.json"]


def test_begin_writes_the_settings_it_was_given_beside_the_checkpoints(store):
    """Those that change no id may have changed since."""
    folder = with_checkpoint(store)
    other = parse({**SPEC.canonical(), "checkpoint": {"every": 7}, "trace": True})
    assert store.begin(other) == folder
    assert store.spec(SPEC.run_id) == other


def test_a_removal_cut_short_leaves_no_finished_run(store, monkeypatch):
    store.begin(SPEC)
    store.finish(SPEC.run_id, STATUS)

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(stores.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        store.begin(SPEC)
    assert store.status(SPEC.run_id) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"state": "do',
        "[]",
        "null",
        '{"state": "odd", "run_id": "ID"}',
        '{"state": "done", "run_id": "other"}',
        "\x00" * 40,
    ],
)
def test_a_damaged_status_is_not_finished_and_said(store, content):
    folder = store.begin(SPEC)
    (folder / "status.json").write_text(content.replace("ID", SPEC.run_id))
    status, problem = store.read_status(SPEC.run_id)
    assert status is None
    assert str(folder / "status.json") in problem
    assert "not finished" in problem
    assert store.status(SPEC.run_id) is None


def test_finish_wants_every_field(store):
    store.begin(SPEC)
    with pytest.raises(AssertionError, match="wall_s"):
        store.finish(SPEC.run_id, {key: value for key, value in STATUS.items() if key != "wall_s"})
    with pytest.raises(AssertionError, match="odd"):
        store.finish(SPEC.run_id, {**STATUS, "state": "odd"})
    assert store.status(SPEC.run_id) is None


def test_write_json_is_all_or_nothing(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError):
        write_json(path, {"a": float("nan")})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_written_files_are_readable_by_others(tmp_path):
    mask = os.umask(0o022)
    try:
        write_json(tmp_path / "x.json", 1)
    finally:
        os.umask(mask)
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o644


def full(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_names_the_folder_and_keeps_what_was_finished(store, monkeypatch):
    store.begin(SPEC)
    store.finish(SPEC.run_id, STATUS)
    other = parse({"seed": 4})
    store.begin(other)
    monkeypatch.setattr(stores.os, "fsync", full)
    with pytest.raises(DiskFullError) as caught:
        store.finish(other.run_id, STATUS)
    assert str(store.run_dir(other.run_id)) in str(caught.value)
    assert "--results" in str(caught.value)
    assert store.status(SPEC.run_id)["state"] == "done"
    assert store.status(other.run_id) is None
    assert [path.name for path in store.run_dir(other.run_id).iterdir()] == ["run.json"]
    with pytest.raises(DiskFullError):
        store.check_space()
    monkeypatch.undo()
    store.check_space()
    store.finish(other.run_id, STATUS)


def test_other_os_errors_stay_what_they_are(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(stores.os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output") as caught:
        write_json(tmp_path / "x.json", 1)
    assert not isinstance(caught.value, UserError)


def test_results_that_are_a_file(tmp_path):
    (tmp_path / "results").write_text("")
    with pytest.raises(UserError, match="--results"):
        Store(tmp_path / "results").begin(SPEC)
    with pytest.raises(UserError, match="--results"):
        Store(tmp_path / "results").save_runs(expand(DATA))


def test_runs_json_lists_every_use_and_merging_is_idempotent(store):
    demo = expand(DATA)
    assert store.save_runs(demo) == 0
    saved = store.saved_runs("demo")
    assert saved == rows(demo)
    assert [(row["part"], row["seed"]) for row in saved] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert saved[0]["run_id"] == saved[2]["run_id"]
    assert all(set(row) == {"run_id", "part", "arm", "cell", "seed"} for row in saved)
    before = (store.experiment_dir("demo") / "runs.json").stat().st_mtime_ns
    assert store.save_runs(demo) == 0
    assert (store.experiment_dir("demo") / "runs.json").stat().st_mtime_ns == before
    assert store.experiments() == ["demo"]


def test_rows_of_other_settings_are_kept_and_counted(store):
    store.save_runs(expand(DATA))
    assert store.save_runs(expand(DATA, ["train.epochs=2"])) == 4
    assert len(store.saved_runs("demo")) == 8


def _save(root, seed):
    Store(root).save_runs(expand(DATA, [f"seeds=[{seed}]"]))


def test_concurrent_saves_lose_nothing(store):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_save, args=(store.root, seed)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert sorted({row["seed"] for row in store.saved_runs("demo")}) == list(range(8))
    assert len(store.saved_runs("demo")) == 16


@pytest.mark.parametrize("content", ["", "{}", '[{"run_id": "x"}]', "[1]"])
def test_a_damaged_runs_json_says_what_to_do(store, content):
    store.save_runs(expand(DATA))
    path = store.experiment_dir("demo") / "runs.json"
    path.write_text(content)
    with pytest.raises(UserError, match=str(path)):
        store.saved_runs("demo")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"spec": 3}'])
def test_a_damaged_run_json_says_which(store, content):
    folder = store.begin(SPEC)
    (folder / "run.json").write_text(content)
    with pytest.raises(UserError, match=r"run\.json"):
        store.spec(SPEC.run_id)


def test_manifest(store):
    folder = store.begin(SPEC)
    assert store.manifest(SPEC.run_id) == {}
    write_json(folder / "manifest.json", {"machine_id": "x"})
    assert store.manifest(SPEC.run_id) == {"machine_id": "x"}
    (folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        store.manifest(SPEC.run_id)
