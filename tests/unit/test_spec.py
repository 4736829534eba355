"""RunSpec: its identity, what it refuses, and how it says so."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.harness import plugins
from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import TRAIN_PRESETS, RunSpec, parse


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


@pytest.mark.parametrize(
    "change", [{"checkpoint": {"every": 5}}, {"checkpoint": {"every": 1, "keep": True}}, {"trace": True}]
)
def test_checkpoints_and_traces_change_no_id_but_stay_in_the_spec(change):
    base, changed = RunSpec(), parse(change)
    for name in ("run_id", "train_id", "cell_id", "network_id"):
        assert getattr(changed, name) == getattr(base, name), name
    assert changed.canonical() == change
    assert changed.is_run(base.run_id, base.plugin_versions())
    assert parse({**change, "seed": 1}).run_id != base.run_id


def test_train_id_ignores_how_fast_the_links_of_a_data_group_are():
    groups = {"groups": 2}
    plain = parse({"data_parallel": groups})
    fast = parse({"data_parallel": {**groups, "rate_mbit": 1000}})
    assert fast.train_id == plain.train_id
    assert fast.run_id != plain.run_id
    assert fast.network_id != plain.network_id
    assert plain.train_id != RunSpec().train_id
    for change in ({"exchange": "fp16"}, {"groups": 4}):
        assert parse({"data_parallel": {**groups, **change}}).train_id != plain.train_id


def test_fields_that_came_later_changed_no_id():
    """Ids that results made before data groups, checkpoints and traces lie under."""
    link = {"rate_mbit": 10.0}
    spec = parse({"seed": 3, "network": link})
    assert spec.run_id == digest({"seed": 3, "network": link}, spec.plugin_versions())
    assert spec.train_id == digest({"seed": 3}, spec.plugin_versions())
    assert spec.cell_id == digest({"cell": {"network": link}}, spec.plugin_versions())
    assert spec.network_id == digest({"hosts": 2, **spec.network.link()}, {})


def digest(data, versions):
    text = json.dumps({"spec": data, "plugins": versions}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


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
    one = {"stages": 4, "stages_per_rank": 2, "schedule": "looped-bfs"}
    assert parse({"pipeline": one}).network_id == base.network_id, "two hosts, as before"
    groups = parse({"data_parallel": {"groups": 2}})
    assert groups.network_id != parse({"pipeline": {"stages": 4}}).network_id, "four hosts, but other links"


def test_sizes_of_a_world_a_microbatch_and_an_epoch():
    data = {
        "pipeline": {"stages": 6, "stages_per_rank": 2, "schedule": "looped-bfs", "microbatches": 3},
        "data_parallel": {"groups": 2},
        "train": {"batch_size": 48, "accumulate": 2},
        "task": {"num_sequences": 250},
    }
    spec = parse(data)
    assert (spec.pipeline.ranks, spec.world_size, spec.microbatch_size) == (3, 6, 4)
    # 125 samples a group, in batches of 24.
    assert spec.steps_per_epoch == 5
    short = parse({**data, "train": {**data["train"], "max_steps_per_epoch": 2, "max_steps": 5}})
    assert (short.steps_per_epoch, short.planned_epochs) == (2, 3)
    assert parse({**data, "task": {"num_sequences": None}}).steps_per_epoch is None


def test_a_training_preset_fills_in_what_is_not_set():
    plain = parse({"train": {"preset": "acsgd"}})
    filled = {name: getattr(plain.train, name) for name in TRAIN_PRESETS["acsgd"]}
    assert filled == TRAIN_PRESETS["acsgd"]
    own = parse({"train": {"preset": "acsgd", "clip_norm": None, "loss_scaling": "mean"}}).train
    assert (own.clip_norm, own.loss_scaling, own.clip_scope) == (None, "mean", "stage")
    assert parse(json.loads(json.dumps(plain.canonical()))) == plain
    with pytest.raises(UserError, match=r"train\.preset.*'acsgd'"):
        parse({"train": {"preset": "acgsd"}})


QUANTIZED = {"groups": 2, "exchange": "quantized-adam"}
WARM = {"warmup_epochs": 1}
REFUSED = [
    # _whole_pieces
    ({"train": {"batch_size": 18}}, ["batch_size 18", "into pipeline.microbatches 4 equal", "multiple of 4"]),
    (
        {"train": {"batch_size": 20, "accumulate": 3}, "data_parallel": {"groups": 2}},
        ["pipeline.microbatches 4 x train.accumulate 3 x data_parallel.groups 2", "multiple of 24"],
    ),
    # _whole_stages
    (
        {"pipeline": {"stages": 3, "stages_per_rank": 2, "schedule": "looped-bfs"}},
        ["pipeline.stages 3", "stages_per_rank 2", "multiple of it"],
    ),
    ({"pipeline": {"stages": 4, "stages_per_rank": 2}}, ["'gpipe' has one stage a rank, not 2"]),
    ({"pipeline": {"stages": 4, "stages_per_rank": 4, "schedule": "1f1b"}}, ["'1f1b' has one stage a rank, not 4"]),
    *(
        (
            {"pipeline": {"stages": 4, "schedule": name}},
            [f"{name!r} needs pipeline.stages_per_rank of 2 or more, not 1"],
        )
        for name in ("interleaved-1f1b", "looped-bfs", "interleaved-zb", "zbv-zb", "dualpipev")
    ),
    *(
        ({"pipeline": {"stages": 3, "cuts": cuts}}, [f"cuts {cuts} does not give 3 stages", "takes 2 rising numbers"])
        for cuts in ([1], [1, 2, 3], [2, 1], [2, 2], [0, 1], [-1, 1])
    ),
    ({"pipeline": {"stages": 1, "cuts": [1]}}, ["does not give 1 stages", "takes 0"]),
    # _schedulable
    *(
        ({"pipeline": {"stages": 6, "stages_per_rank": 3, "schedule": name}}, [f"{name!r} has two stages a rank"])
        for name in ("zbv-zb", "dualpipev")
    ),
    ({"pipeline": {"stages": 5, "schedule": "1f1b"}}, ["'1f1b' needs a micro-batch a stage", "now 4, to 5 or more"]),
    (
        {
            "pipeline": {"stages": 4, "stages_per_rank": 2, "schedule": "interleaved-zb", "microbatches": 5},
            "train": {"batch_size": 20},
        },
        ["microbatches 5 is not 2 equal rounds", "multiple of 2"],
    ),
    # _used_settings
    (
        {"model": {"shared": "summed"}, "train": {"clip_scope": "stage"}},
        ["copies of a shared weight apart", 'train.clip_scope "global"'],
    ),
    ({"model": {"shared": "summed"}, "train": {"preset": "acsgd"}}, ["copies of a shared weight apart"]),
    ({"data_parallel": {"exchange": "fp16"}}, ["data_parallel.exchange has no effect with one group"]),
    ({"data_parallel": {"rate_mbit": 10}}, ["data_parallel.rate_mbit has no effect with one group"]),
    (
        {"data_parallel": QUANTIZED, "compression": WARM, "train": {"optimizer": "sgd"}},
        ['"quantized-adam" is a form of Adam', 'train.optimizer "adamw"'],
    ),
    ({"data_parallel": QUANTIZED}, ["frozen second moment", "compression.warmup_epochs to 1 or more"]),
    (
        {"data_parallel": QUANTIZED, "compression": WARM, "model": {"shared": "summed"}},
        ["copies of a shared weight apart", 'model.shared to "copies" or "frozen"'],
    ),
    (
        {"data_parallel": {"groups": 2, "exchange": "powersgd"}, "measure": "timing", "timing": {"batches": 1}},
        ['"powersgd" sends the first two steps in full', "timing.batches to 2"],
    ),
    ({"train": {"lr_epochs": 3, "lr_schedule": "constant"}}, ["train.lr_epochs has no effect", '"constant"']),
    ({"train": {"lr_update": "epoch", "lr_schedule": "constant"}}, ["train.lr_update has no effect", '"constant"']),
    ({"train": {"clip_scope": "stage", "clip_norm": None}}, ["train.clip_scope has no effect", "train.clip_norm"]),
    ({"task": {"variants": 8}}, ["task.variants has no effect", 'task.augment "variant"']),
    ({"task": {"variants": 8, "augment": "sample"}}, ["task.variants has no effect"]),
    ({"model": {"dropout_masks": "step"}}, ["model.dropout_masks has no effect", "model.dropout"]),
    ({"checkpoint": {"keep": True}}, ["checkpoint.keep has no effect", "checkpoint.every"]),
    # from the outside, of the fields themselves
    ({"pipeline": {"schedule": "gpip"}}, ["pipeline.schedule", "'gpipe'"]),
    ({"data_parallel": {"groups": 2, "exchange": "quantized-adam", "bits": 9}}, ["data_parallel.bits", "equal to 8"]),
    ({"model": {"dropout": 1.0}}, ["model.dropout", "less than 1"]),
    ({"checkpoint": {"every": 0}}, ["checkpoint.every"]),
    ({"train": {"accumulate": 0}}, ["train.accumulate"]),
]


@pytest.mark.parametrize(("data", "words"), REFUSED)
def test_what_cannot_be_or_would_have_no_effect_is_refused(data, words):
    with pytest.raises(UserError) as caught:
        parse(data)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        {"train": {"batch_size": 48, "accumulate": 3}, "data_parallel": {"groups": 2}},
        {"pipeline": {"stages": 4, "schedule": "1f1b"}},
        {"pipeline": {"stages": 6, "stages_per_rank": 3, "schedule": "interleaved-1f1b"}},
        {"pipeline": {"stages": 3, "cuts": [1, 2]}},
        {"pipeline": {"stages": 1, "cuts": []}},
        {"data_parallel": QUANTIZED, "compression": WARM},
        {"data_parallel": {"groups": 2, "exchange": "powersgd", "rate_mbit": 50}},
        {"data_parallel": {"groups": 2, "exchange": "powersgd"}, "measure": "timing", "timing": {"batches": 2}},
        {"train": {"lr_epochs": 3, "lr_schedule": "cosine", "lr_update": "epoch"}},
        {"task": {"variants": 8, "augment": "variant"}},
        {"model": {"dropout_masks": "step", "dropout": 0.1}},
    ],
)
def test_what_can_be_is_allowed(data):
    parse(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"modle": {}}, ["unknown key 'modle'", "Did you mean 'model'?"]),
        ({"train": {"epoch": 3}}, ["unknown key 'train.epoch'", "Did you mean 'epochs'?"]),
        ({"network": {"rate_mbit": -1}}, ["network.rate_mbit", "greater than or equal to 0.1"]),
        ({"network": {"rate_mbit": float("inf")}}, ["network.rate_mbit", "finite"]),
        ({"measure": "speed"}, ["measure", "'timing'"]),
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
