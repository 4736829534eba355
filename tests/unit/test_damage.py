"""Results that were damaged or edited by hand: each is named, none brings a verb down."""

import json

import pytest

from thinpipe.harness.compression import grammar
from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import RunSpec, parse
from thinpipe.harness.store import Store

STATUS = {
    "state": "done", "error": None, "detail": None, "started_at": "t", "ended_at": "t", "wall_s": 1.0, "machine": "m",
    "fidelity": {}, "totals": {}, "links": {}, "run_queue_pct": None,
}  # fmt: skip
SPEC = RunSpec()


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    store.begin(SPEC)
    store.finish(SPEC.run_id, STATUS)
    return store


def test_what_was_written_is_read(store):
    assert store.status(SPEC.run_id)["state"] == "done"
    assert store.spec(SPEC.run_id) == SPEC


@pytest.mark.parametrize(
    "change",
    [{"totals": None}, {"wall_s": "x"}, {"wall_s": True}, {"error": 5}, {"machine": None}, {"links": "x"},
     {"run_queue_pct": "x"}, {"state": "perhaps"}, {"run_id": "f" * 12}],
)  # fmt: skip
def test_a_status_of_other_shape_counts_as_not_finished(store, change):
    path = store.run_dir(SPEC.run_id) / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    status, problem = store.read_status(SPEC.run_id)
    assert status is None
    assert "not finished" in problem


@pytest.mark.parametrize("text", ['{"wall_s": NaN}', "[" * 100_000, "", "\x00\xff", "null"])
def test_a_status_that_is_no_json_of_ours_counts_as_not_finished(store, text):
    (store.run_dir(SPEC.run_id) / "status.json").write_text(text)
    assert store.read_status(SPEC.run_id)[0] is None
    assert store.read_status(SPEC.run_id)[1]


@pytest.mark.parametrize("spec", [{}, {"train": {"lr": 1.0}}])
def test_a_run_json_of_another_run_is_refused(store, spec):
    path = store.run_dir(SPEC.run_id) / "run.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"spec": spec, "run_id": "f" * 12 if not spec else stored["run_id"]}))
    with pytest.raises(UserError, match="describes another run"):
        store.spec(SPEC.run_id)


@pytest.mark.parametrize("text", ["null", "[]", '{"plugins": []}', '{"effective": 3}', "{", "[" * 100_000])
def test_a_damaged_manifest_is_named(store, text):
    (store.run_dir(SPEC.run_id) / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json"):
        store.manifest(SPEC.run_id)


@pytest.mark.parametrize("change", [{"run_id": 1}, {"run_id": "../../etc"}, {"seed": "0"}, {"arm": None}])
def test_rows_of_runs_json_are_checked(store, change):
    row = {"run_id": SPEC.run_id, "part": "p", "arm": "a", "cell": "c", "seed": 0}
    folder = store.experiment_dir("mine")
    folder.mkdir()
    (folder / "runs.json").write_text(json.dumps([row]))
    assert store.saved_runs("mine") == [row]
    (folder / "runs.json").write_text(json.dumps([row | change]))
    with pytest.raises(UserError, match="damaged"):
        store.saved_runs("mine")


def test_a_results_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="no folder"):
        Store(tmp_path / "file")


def test_deep_compressors_are_refused_with_words():
    with pytest.raises(UserError, match="nested more than"):
        grammar.check("delta(" * 3000 + "fixpoint:4" + ")" * 3000)


@pytest.mark.parametrize(
    "change",
    [{"train": {"epochs": 10**9}}, {"network": {"rate_mbit": 1e-9}}, {"network": {"congestion": "a b; rm"}},
     {"task": {"corpus": ""}}, {"timing": {"passes": 10**9}}],
)  # fmt: skip
def test_settings_no_run_can_meet_are_refused(change):
    with pytest.raises(UserError, match=next(iter(next(iter(change.values()))))):
        parse(change)
