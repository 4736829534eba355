"""Plans: states, order, selection, predictions."""

from __future__ import annotations

import subprocess
import sys

import pytest

from thinpipe.harness import manifest, plan, predict
from thinpipe.harness.errors import UserError
from thinpipe.harness.experiment import expand, load
from thinpipe.harness.spec import RunSpec, parse
from thinpipe.harness.store import Store, write_json

DATA = {
    "name": "demo",
    "seeds": [1, 0],
    "arm": [
        {"label": "FP32"},
        {"label": "Q4", "compression.forward": "fixpoint:4"},
        {"label": "AQ2", "compression.forward": "delta(fixpoint:2, cache=fp32)"},
    ],
    "part": [
        {"name": "loss"},
        {"name": "time", "base": {"measure": "timing"}, "axes": {"network.rate_mbit": [10, 100]}},
        {"name": "again", "arm": [{"label": "base"}]},
    ],
}
ENDED = {
    "error": None,
    "detail": None,
    "started_at": "2024-01-01T00:00:00+00:00",
    "ended_at": "2024-01-01T00:00:09+00:00",
    "wall_s": 50.0,
    "machine": manifest.machine_id(),
    "fidelity": {"flags": [], "reasons": []},
    "totals": {},
    "links": {},
    "run_queue_pct": None,
}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "results")


@pytest.fixture
def demo():
    return expand(DATA)


def finish(store, spec, state="done", **changes):
    folder = store.begin(spec)
    write_json(folder / "manifest.json", {"plugins": manifest.plugin_hashes(spec)})
    store.finish(spec.run_id, {**ENDED, "state": state, **changes})
    return folder


def test_each_run_once_with_all_its_uses(demo, store):
    made = plan.make(demo, store)
    assert len(made.entries) == 2 * (3 + 6)
    assert len({entry.run_id for entry in made.entries}) == len(made.entries)
    shared = [entry for entry in made.entries if len(entry.uses) > 1]
    assert {entry.seed for entry in shared} == {0, 1}
    assert all(entry.uses == (("loss", "FP32"), ("again", "base")) for entry in shared)
    assert made.counts() == {"pending": 18}


def test_seeds_are_blocks_in_declared_order_shuffled_reproducibly(demo, store):
    entries = plan.make(demo, store).entries
    assert [entry.seed for entry in entries] == [1] * 9 + [0] * 9
    assert [e.run_id for e in plan.make(demo, store).entries] == [e.run_id for e in entries]
    blocks = [[(e.arm, e.part, e.spec.network.rate_mbit) for e in entries if e.seed == seed] for seed in (1, 0)]
    declared = [(c.arm, c.part, c.runs[0][1].network.rate_mbit) for c in demo.cells() if c.part != "again"]
    assert sorted(blocks[0], key=str) == sorted(declared, key=str)
    assert blocks[0] != declared
    assert blocks[0] != blocks[1]
    assert plan.make(demo, store).shuffle_seed == plan.SHUFFLE_SEED


def test_order_does_not_depend_on_hash_randomisation():
    code = (
        "from pathlib import Path; from thinpipe.harness import experiment, plan, store\n"
        "made = plan.make(experiment.load('smoke'), store.Store(Path('/nonexistent')))\n"
        "print([e.run_id for e in made.entries])"
    )
    orders = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(orders) == 1


def test_states(demo, store):
    specs = [entry.spec for entry in plan.make(demo, store).entries]
    finish(store, specs[0])
    finish(store, specs[1], "diverged", error="non-finite loss at step 3")
    finish(store, specs[2], "failed", error="rank 1 was killed\nmore")
    finish(store, specs[3], machine="f" * 12)
    finish(store, specs[4], "diverged", machine="f" * 12)
    finish(store, specs[5], "failed", machine="f" * 12, error="why")
    folder = finish(store, specs[6])
    hashes = manifest.plugin_hashes(specs[6])
    hashes["models/gpt2"]["source_hash"] = "0" * 16
    write_json(folder / "manifest.json", {"plugins": hashes})
    (finish(store, specs[7]) / "status.json").write_text('{"state": "do')
    store.begin(specs[8])
    entries = plan.make(demo, store).entries
    states = ["done", "diverged", "failed", "foreign", "foreign", "failed", "stale", "pending", "pending"]
    assert [entry.state for entry in entries[:9]] == states
    notes = [entry.note or "" for entry in entries[:9]]
    assert notes[0] == notes[8] == ""
    assert notes[2] == "rank 1 was killed"
    assert "f" * 12 in notes[3]
    assert "diverged" in notes[4]
    assert "models/gpt2" in notes[6]
    assert "status.json" in notes[7]
    assert "damaged" in notes[7]
    assert plan.make(demo, store).counts() == {
        "done": 1,
        "diverged": 1,
        "failed": 2,
        "pending": 11,
        "stale": 1,
        "foreign": 2,
    }


def test_a_damaged_manifest_is_stale_and_said(demo, store):
    spec = plan.make(demo, store).entries[0].spec
    (finish(store, spec) / "manifest.json").write_text("{")
    entry = plan.make(demo, store).entries[0]
    assert entry.state == "stale"
    assert "manifest.json" in entry.note


def test_todo(demo, store):
    entries = plan.make(demo, store).entries
    finish(store, entries[0].spec)
    finish(store, entries[1].spec, "failed", error="x")
    finish(store, entries[2].spec, machine="f" * 12)
    made = plan.make(demo, store)
    ids = [entry.run_id for entry in made.entries]
    assert [e.run_id for e in made.todo()] == ids[3:]
    assert [e.run_id for e in made.todo(retry_failed=True)] == [ids[1], *ids[3:]]
    assert [e.run_id for e in made.todo(force=True)] == ids
    limited = plan.make(demo, store, limit=2)
    assert [e.run_id for e in limited.todo()] == ids[3:5]
    assert len(limited.entries) == len(ids)
    with pytest.raises(UserError, match="limit"):
        plan.make(demo, store, limit=0)


def test_refreshed_reads_states_again(demo, store):
    made = plan.make(demo, store)
    finish(store, made.entries[4].spec)
    assert made.entries[4].state == "pending"
    again = made.refreshed(store)
    assert again.entries[4].state == "done"
    assert [e.run_id for e in again.entries] == [e.run_id for e in made.entries]


@pytest.mark.parametrize(
    ("only", "count"),
    [
        ("arm=FP32", 6),
        ("arm=FP32|Q4", 12),
        ("arm=*Q*", 12),
        ("arm=base", 2),
        ("part=time", 12),
        ("part=time,network.rate_mbit=10", 6),
        ("part=time, network.rate_mbit = 10.0, seed=0", 3),
        ("network.rate_mbit=10|100", 12),
        ("network.rate_mbit=none", 6),
        ("seed=1", 9),
        ("state=pending", 18),
        ("measure=timing", 12),
        ("compression.forward=delta(fixpoint:2, cache=fp32),seed=0", 3),
    ],
)
def test_only(demo, store, only, count):
    assert len(plan.make(demo, store, only=only).entries) == count


@pytest.mark.parametrize(
    ("only", "words"),
    [
        ("arm=FP16", "Arms: AQ2, FP32, Q4, base"),
        ("amr=FP32", "Did you mean 'arm'?"),
        ("network.rte_mbit=10", "Did you mean 'network.rate_mbit'?"),
        ("FP32", "key=value"),
        ("arm=[FP32]", "matches no run"),
        ("network.rate_mbit=fast", "matches no run"),
    ],
)
def test_only_that_is_wrong(demo, store, only, words):
    with pytest.raises(UserError) as caught:
        plan.make(demo, store, only=only)
    assert words in str(caught.value)


def test_only_keeps_the_order(demo, store):
    whole = [e.run_id for e in plan.make(demo, store).entries if e.part == "time"]
    assert [e.run_id for e in plan.make(demo, store, only="part=time").entries] == whole


def test_measured_time_replaces_the_prediction_within_a_cell(demo, store):
    entries = plan.make(demo, store).entries
    chosen = entries[0]
    other = next(e for e in entries if e.cell == chosen.cell and e.run_id != chosen.run_id)
    before = {e.run_id: e.predicted_s for e in entries}
    finish(store, chosen.spec, wall_s=777.0)
    after = {e.run_id: e.predicted_s for e in plan.make(demo, store).entries}
    assert after[other.run_id] == 777.0
    untouched = [run_id for run_id in before if run_id not in (chosen.run_id, other.run_id)]
    assert all(before[run_id] == after[run_id] for run_id in untouched)
    finish(store, chosen.spec, wall_s=777.0, machine="f" * 12)
    assert {e.run_id: e.predicted_s for e in plan.make(demo, store).entries} == before


def test_planning_imports_nothing_heavy_and_writes_nothing(tmp_path):
    code = (
        "import sys; from pathlib import Path; from thinpipe.harness import experiment, plan, store\n"
        "plan.make(experiment.load('bandwidth_vs_bits'), store.Store(Path('results')))\n"
        "print([m for m in ('torch', 'pandas', 'matplotlib', 'pyarrow', 'numba') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path
    )
    assert done.stdout.strip() == "[]"
    assert list(tmp_path.iterdir()) == []


# ---- predictions


def test_steps_of_a_run():
    assert predict.steps(RunSpec()) == 12 * 16
    assert predict.steps(parse({"train": {"max_steps": 5}})) == 5
    assert predict.steps(parse({"measure": "timing", "timing": {"batches": 3, "passes": 2}})) == 9
    assert predict.steps(parse({"measure": "timing", "train": {"max_steps": 6}})) == 6


def test_a_bandwidth_bound_step_is_the_bytes_over_the_rate():
    spec = parse({"network": {"rate_mbit": 1}, "model": {"preset": "micro"}})
    bits = 4 * 64 * 32 * 32
    expected = 2 * (4 + 2 - 1) * bits / 1e6
    assert predict.step_s(spec, 5, first_visit=False) == pytest.approx(expected, rel=0.1)
    half = parse(
        {
            "network": {"rate_mbit": 1},
            "model": {"preset": "micro"},
            "compression": {"forward": "bf16", "backward": "bf16"},
        }
    )
    assert predict.step_s(half, 5, first_visit=False) == pytest.approx(expected / 2, rel=0.1)


def test_a_delta_method_pays_in_full_for_the_first_visit_and_warm_up():
    data = {"network": {"rate_mbit": 1}, "compression": {"forward": "delta(fixpoint:4)", "warmup_epochs": 2}}
    spec, free = parse(data), parse({"network": {"rate_mbit": 1}})
    full = predict.step_s(free, 0, first_visit=False)
    assert predict.step_s(spec, 0, first_visit=False) == full
    assert predict.step_s(spec, 1, first_visit=False) == full
    assert predict.step_s(spec, 2, first_visit=True) == full
    assert predict.step_s(spec, 2, first_visit=False) < 0.6 * full


def test_the_first_visit_costs_what_the_memory_says():
    network = {"rate_mbit": 1}
    cheap = parse({"network": network, "compression": {"forward": "delta(fixpoint:4, first=fixpoint:8)"}})
    plain = parse({"network": network, "compression": {"forward": "fixpoint:8"}})
    assert predict.step_s(cheap, 0, first_visit=True) == predict.step_s(plain, 0, first_visit=True)
    assert predict.step_s(plain, 0, first_visit=True) == predict.step_s(plain, 0, first_visit=False)


def evaluations(**changes):
    """Predicted seconds of evaluation, in batches sent uncompressed."""
    spec = parse({"network": {"rate_mbit": 1}, **changes})
    return predict._evaluation_s(spec) / predict._phase_s(spec, 2, 32.0)


def test_evaluation_is_predicted_as_it_is_done():
    assert evaluations() == pytest.approx(12 * 4)
    assert evaluations(train={"evaluate_every": 5}) == pytest.approx(3 * 4), "after epochs 5, 10 and the last"
    assert evaluations(train={"max_steps": 20}) == pytest.approx(2 * 4), "after epoch 1 and the last step"
    assert evaluations(train={"evaluate_every": 0}) == evaluations(measure="timing") == 0
    assert evaluations(task={"num_eval_sequences": 0}) == 0
    codec = {"forward": "delta(fixpoint:4)", "evaluation": "codec"}
    assert evaluations(compression=codec) == pytest.approx(12 * 4 / 8, rel=0.1)
    assert evaluations(compression={**codec, "warmup_epochs": 12}, train={"epochs": 13}) == pytest.approx(
        12 * 4 + 4 / 8, rel=0.01
    )


def test_the_longest_silence_is_the_slowest_step_or_evaluation_batch():
    def silence(forward, **changes):
        compression = {"forward": forward, "backward": "fixpoint:4"}
        return predict.longest_silence_s(parse({"network": {"rate_mbit": 1}, "compression": compression, **changes}))

    spec = parse({"network": {"rate_mbit": 1}, "compression": {"forward": "none", "backward": "fixpoint:4"}})
    assert silence("none") == silence("delta(fixpoint:4)") == predict.step_s(spec, 0, first_visit=False)
    assert silence([{"use": "fixpoint:4"}, {"from_epoch": 5, "use": "none"}]) == silence("none")
    assert silence("fixpoint:1") == pytest.approx(predict._phase_s(spec, 2, 32.0)), "an evaluation, sent in full"
    timed = silence([{"use": "none"}, {"from_epoch": 5, "use": "fixpoint:1"}], measure="timing")
    assert timed < silence("none") / 2, "a timing run has the last compressors in force throughout"


def test_slower_links_and_more_work_never_predict_less():
    def seconds(**changes):
        return predict.predict(parse(changes))

    assert seconds(network={"rate_mbit": 1}) > seconds(network={"rate_mbit": 10}) > seconds()
    assert seconds(train={"epochs": 24}) > seconds()
    assert seconds(pipeline={"stages": 1}) < seconds(network={"rate_mbit": 10})
    assert seconds(network={"rate_mbit": 10, "delay_ms": 50}) > seconds(network={"rate_mbit": 10})
    assert predict.predict(parse({"task": {"num_sequences": None}})) > 0


def test_an_impossible_model_is_refused_while_planning(store):
    with pytest.raises(UserError, match="preset"):
        plan.make(load("smoke", ["model.preset=huge"]), store)


def test_a_corpus_whose_content_changed_is_stale(tmp_path, store):
    text = tmp_path / "mine.txt"
    text.write_text("one")
    data = {"name": "own", "base": {"task": {"corpus": str(text)}}, "part": [{"name": "p", "arm": [{"label": "FP32"}]}]}
    own = expand(data)
    spec = plan.make(own, store).entries[0].spec
    write_json(finish(store, spec) / "manifest.json", {"inputs": manifest.input_hashes(spec)})
    assert plan.make(own, store).entries[0].state == "done"
    text.write_text("two")
    entry = plan.make(own, store).entries[0]
    assert entry.state == "stale"
    assert str(text) in entry.note
