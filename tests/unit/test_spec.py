"""RunSpec: its identity, what it refuses, and how it says so."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.harness import plugins
from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import RunSpec, parse


def test_ids_have_twelve_hex_digits_and_depend_on_settings():
    spec = RunSpec()
    for name in (spec.run_id, spec.train_id, spec.cell_id, spec.network_id):
        assert len(name) == 12
        assert set(name) <= set("0123456789abcdef")
    assert parse({"seed": 1}).run_id != spec.run_id
    assert parse({"train": {"lr": 0.1}}).run_id != spec.run_id


def test_stating_a_default_changes_no_id():
    stated = parse({"model": {"preset": "tiny"}, "train": {"epochs": 12}, "network": {"delay_ms": 0}, "seed": 0})
    assert stated.run_id == RunSpec().run_id
    assert stated.canonical() == {}


def test_train_id_ignores_network_measure_and_timing_only():
    base = RunSpec()
    same = parse({"network": {"rate_mbit": 10}, "measure": "timing", "timing": {"passes": 9}})
    assert same.train_id == base.train_id
    assert same.run_id != base.run_id
    for change in ({"seed": 3}, {"compression": {"forward": "bf16"}}, {"pipeline": {"microbatches": 2}}):
        assert parse(change).train_id != base.train_id


def test_cell_id_ignores_the_seed_only():
    base = RunSpec()
    assert parse({"seed": 5}).cell_id == base.cell_id
    for change in ({"network": {"rate_mbit": 10}}, {"measure": "timing"}, {"train": {"epochs": 2}}):
        assert parse(change).cell_id != base.cell_id


def test_a_plugins_version_is_part_of_the_id(monkeypatch):
    before = RunSpec().run_id
    real = plugins.get

    def newer(kind, name):
        plugin = real(kind, name)
        return plugin if kind != "models" else plugins.Plugin(**{**plugin.__dict__, "version": plugin.version + 1})

    monkeypatch.setattr(plugins, "get", newer)
    assert RunSpec().run_id != before


def test_network_id_depends_on_hosts_and_link():
    base = RunSpec()
    assert parse({"seed": 4, "train": {"epochs": 2}}).network_id == base.network_id
    assert parse({"pipeline": {"stages": 3}}).network_id != base.network_id
    assert parse({"network": {"rate_mbit": 10}}).network_id != base.network_id


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"modle": {}}, ["unknown key 'modle'", "Did you mean 'model'?"]),
        ({"train": {"epoch": 3}}, ["unknown key 'train.epoch'", "Did you mean 'epochs'?"]),
        ({"network": {"rate_mbit": -1}}, ["network.rate_mbit", "greater than or equal to 0.1"]),
        ({"network": {"rate_mbit": float("inf")}}, ["network.rate_mbit", "finite"]),
        ({"measure": "speed"}, ["measure", "'timing'"]),
        ({"train": {"batch_size": 18}}, ["18", "microbatches 4", "multiple of 4"]),
        ({"task": {"num_sequences": 8}}, ["num_sequences 8", "batch_size 16"]),
        ({"compression": {"forward": "fixpiont:4"}}, ["fixpiont", "Did you mean 'fixpoint'?"]),
        ({"compression": {"forward": "fixpoint:9"}}, ["fixpoint", "9"]),
        (
            {"compression": {"forward": [{"boundary": 1, "use": "bf16"}]}},
            ["boundary 1", "2 stages", "0..0"],
        ),
        ({"seed": -1}, ["seed"]),
        ({"pipeline": {"stages": 0}}, ["pipeline.stages"]),
    ],
)
def test_what_is_wrong_is_refused_with_words(data, words):
    with pytest.raises(UserError) as caught:
        parse(data, where="here")
    for word in ["here", *words]:
        assert word in str(caught.value)


LATE = {"forward": [{"use": "fixpoint:4"}, {"from_epoch": 3, "use": "none"}]}


@pytest.mark.parametrize(
    ("compression", "changes", "words"),
    [
        ({"forward": "fixpoint:4", "warmup_epochs": 3}, {}, ["compression.forward", "'fixpoint:4'", "epoch 3"]),
        ({"backward": "bf16", "warmup_epochs": 9}, {}, ["compression.backward", "epoch 9", "after 3 epoch(s)"]),
        (LATE, {}, ["compression.forward", "'none'", "epoch 3"]),
        (LATE, {"measure": "full"}, ["epoch 3"]),
        ({"forward": "bf16", "warmup_epochs": 1}, {"train": {"max_steps": 16}}, ["after 1 epoch(s)", "max_steps"]),
    ],
)
def test_a_rule_that_never_comes_into_force_is_refused(compression, changes, words):
    data = {**changes, "compression": compression, "train": {"epochs": 3, **changes.get("train", {})}}
    with pytest.raises(UserError) as caught:
        parse(data)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("compression", "changes"),
    [
        ({"forward": "fixpoint:4", "warmup_epochs": 2}, {}),
        ({"forward": "fixpoint:4", "warmup_epochs": 3}, {"measure": "timing"}),
        ({"warmup_epochs": 3}, {}),
        (LATE, {"pipeline": {"stages": 1}}),
        ({"forward": "bf16", "warmup_epochs": 1}, {"train": {"max_steps": 17}}),
        ({"forward": "bf16", "warmup_epochs": 1}, {"train": {"max_steps": 5}, "task": {"num_sequences": None}}),
    ],
)
def test_rules_that_do_or_that_change_nothing_are_allowed(compression, changes):
    parse({**changes, "compression": compression, "train": {"epochs": 3, **changes.get("train", {})}})


def test_several_mistakes_are_told_at_once():
    with pytest.raises(UserError) as caught:
        parse({"train": {"epoch": 3}, "network": {"rate": 1}})
    assert "train.epoch" in str(caught.value)
    assert "network.rate" in str(caught.value)


def test_frozen():
    with pytest.raises(Exception, match="frozen"):
        RunSpec().seed = 3


def test_warmup_is_a_first_rule():
    compression = parse(
        {"compression": {"forward": "fixpoint:4", "backward": "fixpoint:8", "warmup_epochs": 2}}
    ).compression
    assert [compression.compressor("forward", 0, epoch) for epoch in range(4)] == ["none"] * 2 + ["fixpoint:4"] * 2
    assert compression.compressor("backward", 0, 1) == "none"


def test_later_rules_win_at_their_boundary_and_epoch():
    rules = [{"use": "bf16"}, {"from_epoch": 3, "boundary": 1, "use": "fixpoint:4"}]
    spec = parse({"pipeline": {"stages": 3}, "compression": {"forward": rules}})
    use = spec.compression.compressor
    assert (use("forward", 0, 5), use("forward", 1, 2), use("forward", 1, 3)) == (
        "bf16",
        "bf16",
        "fixpoint:4",
    )
    assert use("backward", 1, 3) == "none"


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rate=st.none() | st.floats(0.1, 1e4),
    pieces=st.integers(1, 8),
    each=st.integers(1, 8),
    clip=st.none() | st.floats(1e-3, 10),
)
def test_canonical_survives_json_and_keeps_the_id(seed, rate, pieces, each, clip):
    spec = parse(
        {
            "seed": seed,
            "network": {"rate_mbit": rate},
            "pipeline": {"microbatches": pieces},
            "train": {"batch_size": pieces * each, "clip_norm": clip},
        }
    )
    again = parse(json.loads(json.dumps(spec.canonical())))
    assert again == spec
    assert again.run_id == spec.run_id
