"""Experiment files: expansion, precedence, overrides, and what is refused."""

from __future__ import annotations

import copy
import json

import pytest

from thinpipe.harness import experiment
from thinpipe.harness.errors import UserError
from thinpipe.harness.experiment import expand, load
from thinpipe.harness.settings import nest, parse_override, setting_keys
from thinpipe.harness.spec import RunSpec

DATA = {
    "name": "demo",
    "title": "A demo",
    "question": "Why?",
    "seeds": [0, 1],
    "base": {"train": {"epochs": 3, "lr": 0.1}},
    "arm": [
        {"label": "FP32"},
        {"label": "Q4", "compression": {"forward": "fixpoint:4"}, "compression.backward": "fixpoint:8"},
    ],
    "part": [
        {"name": "loss", "base": {"train.epochs": 5}},
        {
            "name": "time",
            "seeds": [7],
            "base": {"measure": "timing"},
            "axes": {"network": {"rate_mbit": [10, 100]}, "pipeline.microbatches": [2, 4]},
        },
    ],
}


def changed(**changes):
    data = copy.deepcopy(DATA)
    for path, value in changes.items():
        node = path.split("__")
        target = data
        for name in node[:-1]:
            target = target[int(name[1:])] if name.startswith("i") and name[1:].isdigit() else target[name]
        target[node[-1]] = value
    return data


def test_arms_times_axes_times_seeds():
    demo = expand(DATA)
    assert (demo.name, demo.title, demo.question) == ("demo", "A demo", "Why?")
    loss, time = demo.parts
    assert [(cell.arm, [seed for seed, _ in cell.runs]) for cell in loss.cells] == [
        ("FP32", [0, 1]),
        ("Q4", [0, 1]),
    ]
    assert len(time.cells) == 2 * 2 * 2
    assert all([seed for seed, _ in cell.runs] == [7] for cell in time.cells)
    cell = time.cells[-1]
    assert cell.settings == {
        "network.rate_mbit": 100,
        "pipeline.microbatches": 4,
        "compression.forward": "fixpoint:4",
        "compression.backward": "fixpoint:8",
    }
    spec = cell.runs[0][1]
    assert (spec.network.rate_mbit, spec.pipeline.microbatches, spec.measure, spec.seed) == (
        100.0,
        4,
        "timing",
        7,
    )
    assert demo.seeds == [0, 1, 7]


def test_a_parts_base_wins_over_the_experiments():
    loss, time = expand(DATA).parts
    assert loss.cells[0].runs[0][1].train.epochs == 5
    assert time.cells[0].runs[0][1].train.epochs == 3
    assert time.cells[0].runs[0][1].train.lr == 0.1


def test_seeds_of_a_cell_share_its_id_and_cells_differ():
    demo = expand(DATA)
    for cell in demo.cells():
        assert {spec.cell_id for _, spec in cell.runs} == {cell.cell_id}
    ids = [cell.cell_id for cell in demo.cells()]
    assert len(set(ids)) == len(ids)


def test_a_parts_own_arms_replace_the_shared_ones():
    data = changed(part__i1__arm=[{"label": "only"}])
    loss, time = expand(data).parts
    assert {cell.arm for cell in loss.cells} == {"FP32", "Q4"}
    assert {cell.arm for cell in time.cells} == {"only"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"titel": "x"}, ["unknown key 'titel'", "Did you mean 'title'?"]),
        ({"part__i0__sedes": [1]}, ["unknown key 'sedes'", "Did you mean 'seeds'?"]),
        ({"base__trian": {"lr": 1}}, ["unknown key 'trian'", "train"]),
        ({"base__train__epoch": 3}, ["unknown key 'train.epoch'", "Did you mean 'train.epochs'?"]),
        ({"part__i1__axes": {"network.rte_mbit": [1]}}, ["part 'time'", "'network.rte_mbit'", "'network.rate_mbit'"]),
        ({"arm__i1__compresion.forward": "bf16"}, ["arm 'Q4'", "compresion", "'compression.forward'"]),
        ({"base__seed": 3}, ["unknown key 'seed'", "`seeds`"]),
        ({"base__network": 3}, ["network is a group"]),
        ({"base__train.epochs": 4}, ["train.epochs is set twice"]),
        ({"part__i1__axes": {"network.rate_mbit": 10}}, ["network.rate_mbit", "list"]),
        ({"part__i1__axes": {"network.rate_mbit": []}}, ["network.rate_mbit", "list"]),
        ({"part__i1__axes": {"network.rate_mbit": [1, 1]}}, ["network.rate_mbit", "given twice"]),
        ({"part__i1__axes": {"compression.forward": ["bf16"]}}, ["is an axis", "arm 'Q4'"]),
        (
            {"part__i1__axes": {"network.rate_mbit": ["fast"]}},
            ["part 'time' arm 'FP32'", "network.rate_mbit"],
        ),
        ({"seeds": []}, ["seeds"]),
        ({"seeds": [0, 0]}, ["seed 0", "twice"]),
        ({"seeds": [True]}, ["seeds"]),
        ({"seeds": [-1]}, ["seeds"]),
        ({"part": []}, ["no [[part]]"]),
        ({"part": {"name": "x"}}, ["[[part]]"]),
        ({"arm": []}, ["no arm"]),
        ({"arm": [{"label": "a"}, {"label": "a"}]}, ["arm label 'a'", "twice"]),
        ({"arm": [{"compression.forward": "bf16"}]}, ["label"]),
        ({"arm": [{"label": "a", "compression.forward": "zip"}]}, ["arm 'a'", "zip"]),
        ({"part__i1__name": "loss"}, ["part name 'loss'", "twice"]),
        ({"name": "runs"}, ["`name`"]),
        ({"name": "../up"}, ["`name`"]),
        ({"base__train__batch_size": 15}, ["batch_size 15", "microbatches"]),
    ],
)
def test_what_is_wrong_is_refused_with_words(changes, words):
    with pytest.raises(UserError) as caught:
        expand(changed(**changes), where="demo.toml")
    for word in ["demo.toml", *words]:
        assert word in str(caught.value)


def test_override_of_a_base_setting_reaches_every_part():
    demo = expand(DATA, ["train.epochs=2"])
    assert {spec.train.epochs for cell in demo.cells() for _, spec in cell.runs} == {2}


@pytest.mark.parametrize(("text", "rates"), [("30", [30]), ("[30, 40]", [30, 40])])
def test_override_of_an_axis_replaces_it_and_sets_the_other_parts(text, rates):
    if len(rates) > 1:
        with pytest.raises(UserError, match=r"part 'loss'.*network\.rate_mbit"):
            expand(DATA, [f"network.rate_mbit={text}"])
        data = {**DATA, "part": DATA["part"][1:]}
    else:
        data = DATA
    time = expand(data, [f"network.rate_mbit={text}"]).parts[-1]
    assert [cell.settings["network.rate_mbit"] for cell in time.cells[::2]] == rates * 2


def test_override_of_seeds_and_name():
    demo = expand(DATA, ["seeds=[5]", "name=other"])
    assert demo.name == "other"
    assert demo.seeds == [5]


def test_override_that_would_make_a_label_untrue_is_refused():
    with pytest.raises(UserError, match=r"arm 'Q4'.*untrue"):
        expand(DATA, ["compression.forward=bf16"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.epochs=3", ("train.epochs", 3)),
        ("train.lr = 1e-3", ("train.lr", 1e-3)),
        ("task.corpus=pydoc", ("task.corpus", "pydoc")),
        ('task.corpus="my text.txt"', ("task.corpus", "my text.txt")),
        (
            "compression.forward=delta(fixpoint:2, cache=fixpoint:8)",
            ("compression.forward", "delta(fixpoint:2, cache=fixpoint:8)"),
        ),
        ("network.rate_mbit=[10, 20]", ("network.rate_mbit", [10, 20])),
        ("task.corpus=a\nb = 3", ("task.corpus", "a\nb = 3")),
    ],
)
def test_override_values_are_toml_or_bare_words(text, expected):
    assert parse_override(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.epoch=3", "Did you mean 'train.epochs'"),
        ("epochs=3", "Did you mean 'train.epochs'"),
        ("seed=3", "seeds=[0,1]"),
        ("train.epochs", "key=value"),
        ("=3", "key=value"),
    ],
)
def test_override_with_a_wrong_key(text, words):
    with pytest.raises(UserError) as caught:
        parse_override(text)
    assert words in str(caught.value)


def test_none_empties_a_setting_that_may_be_empty():
    demo = expand(changed(base__network={"rate_mbit": 10}), ["train.clip_norm=none"])
    assert demo.parts[0].cells[0].runs[0][1].train.clip_norm is None
    free = expand(changed(part__i1__axes={"network.rate_mbit": [10, "none"]}))
    assert [cell.runs[0][1].network.rate_mbit for cell in free.parts[1].cells] == [10, None] * 2
    with pytest.raises(UserError, match=r"train\.epochs"):
        expand(DATA, ["train.epochs=none"])


def test_every_setting_has_a_key_and_nesting_inverts_it():
    flat = dict.fromkeys(setting_keys())
    assert "seed" not in flat
    assert set(nest(flat)) | {"seed"} == set(RunSpec.model_fields)
    assert setting_keys()["network.rate_mbit"] is True
    assert setting_keys()["train.epochs"] is False


def test_load_by_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[[arm]]\nlabel = "FP32"\n[[part]]\nname = "p"\n')
    assert load(path).name == "mine"
    assert load(str(path), ["name=yours"]).name == "yours"


def test_load_what_is_not_there(tmp_path):
    with pytest.raises(UserError, match="Did you mean 'quickstart'"):
        load("quickstrat")
    with pytest.raises(UserError, match=r"no experiment file.*is called 'smoke'"):
        load(tmp_path / "smoke.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("name = ")
    with pytest.raises(UserError, match="not valid TOML"):
        load(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot read"):
        load(bad)
    with pytest.raises(UserError, match="cannot read"):
        load(f"{tmp_path}/")


def test_load_a_stored_run(tmp_path):
    spec = expand(DATA).parts[1].cells[3].runs[0][1]
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"run_id": spec.run_id, "spec": spec.canonical()}))
    (cell,) = load(path).cells()
    assert cell.runs == ((7, spec),)
    path.write_text("{}")
    with pytest.raises(UserError, match="not a stored run"):
        load(path)


@pytest.mark.parametrize("name", sorted(experiment.builtin()))
def test_every_experiment_of_the_package_loads(name):
    loaded = load(name)
    assert loaded.name == (name if loaded.size is None else f"{name.replace('/', '-')}.cpu")
    assert loaded.question.endswith("?")
    # Those of the papers may be about losses alone.
    assert loaded.size or any(spec.measure == "timing" for cell in loaded.cells() for _, spec in cell.runs)


def test_quickstart_is_what_it_promises():
    loaded = load("quickstart")
    convergence, timing = loaded.parts
    arms = ["FP32", "BF16", "DirectQ fw4 bw8", "AQ-SGD fw4 bw8", "AQ-SGD fw2 bw8", "DirectQ fw2 bw8"]
    assert [cell.arm for cell in convergence.cells] == arms
    for cell in convergence.cells:
        spec = cell.runs[0][1]
        assert [seed for seed, _ in cell.runs] == [0, 1]
        assert (spec.train.epochs, spec.compression.warmup_epochs, spec.task.num_sequences) == (12, 1, 256)
        assert spec.measure == "convergence"
    assert {spec.network.rate_mbit for cell in timing.cells for _, spec in cell.runs} == {10, 30, 100}
    assert all(spec.compression.warmup_epochs == 0 for cell in timing.cells for _, spec in cell.runs)


def test_bandwidth_vs_bits_is_the_declared_grid():
    loaded = load("bandwidth_vs_bits")
    timing, convergence = loaded.parts
    assert (len(timing.cells), len(convergence.cells)) == (5 * 9, 9)
    assert all(len(cell.runs) == 3 for cell in loaded.cells())
    for cell in timing.cells:
        if cell.arm != "FP32":
            bits = cell.arm.split("fw")[1].split()[0]
            assert f"fixpoint:{bits}" in cell.settings["compression.forward"]
            assert cell.arm.startswith("AQ") == cell.settings["compression.forward"].startswith("delta(")
