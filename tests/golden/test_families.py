"""DeBERTa and ResNet18 against plain loops with Hugging Face's own models: losses bit for bit, and scores."""

import pytest

import reference
from runs import small

pytestmark = [pytest.mark.lab, pytest.mark.e2e]

REVIEWS = [
    ("a {} film with {} acting and a {} end", "good"),
    ("what a {} story , {} and {} told", "bad"),
]
GOOD, BAD = ["fine", "great", "warm", "moving", "clever", "bright"], ["dull", "weak", "cold", "tired", "empty", "loud"]


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """A data set of one's own: 144 sentences of different lengths, half of them kind."""
    path = tmp_path_factory.mktemp("data") / "sentences.tsv"
    rows = ["sentence\tlabel"]
    for i in range(144):
        words = (GOOD, BAD)[i % 2]
        text = REVIEWS[i % 3 == 0][0].format(words[i % 6], words[i // 2 % 6], words[i // 12 % 6])
        rows.append(f"{'really ' * (i % 5)}{text}\t{'good' if i % 2 == 0 else 'bad'}")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return str(path)


def deberta(sentences, **changes):
    data = {
        "model": {"name": "deberta", "preset": "micro", "layers": 3, "width": None, "heads": None},
        "task": {
            "name": "classify", "corpus": sentences, "num_labels": 2, "vocab_size": 300, "sequence_length": 24,
            "num_sequences": 64, "num_eval_sequences": 22,
        },
        "train": {"epochs": 5, "max_steps": 20, "lr": 5e-3},
    }  # fmt: skip
    return small(**{key: {**data.get(key, {}), **changes.get(key, {})} for key in {*data, *changes}})


def resnet(**changes):
    data = {
        "model": {"name": "resnet", "preset": "narrow", "layers": None, "width": None, "heads": None},
        "task": {"name": "image", "corpus": "digits", "num_sequences": 48, "num_eval_sequences": 22},
        "train": {"epochs": 2, "max_steps": 6, "optimizer": "sgd", "lr": 0.02, "weight_decay": 5e-4},
    }
    return small(**{key: {**data.get(key, {}), **changes.get(key, {})} for key in {*data, *changes}})


def compare(trained, make, stages, names, **changes):
    expected, evaluations = reference.classify_loop(make(pipeline={"stages": 1}))
    assert sum(expected[-4:]) < sum(expected[:4]) - 0.2, (
        "it must have learnt something for the comparison to mean anything"
    )
    for count in stages:
        spec = make(pipeline={"stages": count}, **changes)
        assert trained.losses(spec) == expected
        found = trained.rows(spec, "evals").sort_values("step")
        assert len(found) == len(evaluations)
        for name in names:
            assert found[name].tolist() == [row[name] for row in evaluations]
        assert found["eval_loss"].tolist() == pytest.approx([row["eval_loss"] for row in evaluations], rel=1e-5)
        assert found["perplexity"].isna().all()


def test_deberta_equals_a_plain_loop_at_any_cut(trained, sentences):
    compare(trained, lambda **changes: deberta(sentences, **changes), [1, 2, 3], ("accuracy", "matthews"))


def test_resnet_equals_a_plain_loop_at_any_cut(trained):
    compare(trained, resnet, [1, 2, 4], ("accuracy",))


@pytest.mark.slow
def test_relative_embeddings_train_alike_at_any_cut(trained, sentences):
    one, three = (
        trained.losses(deberta(sentences, model={"shared": "summed"}, pipeline={"stages": stages})) for stages in (1, 3)
    )
    assert three == pytest.approx(one, rel=2e-5), "their gradients are added in another order"
    assert one != trained.losses(deberta(sentences, pipeline={"stages": 1}))


@pytest.mark.parametrize("family", ["deberta", "resnet"])
def test_every_family_trains_compressed(trained, sentences, family):
    methods = {"compression": {"forward": "delta(fixpoint:4)", "backward": "fixpoint:8", "warmup_epochs": 1}}
    spec = deberta(sentences, **methods) if family == "deberta" else resnet(**methods)
    losses = trained.losses(spec)
    plain = trained.losses(deberta(sentences) if family == "deberta" else resnet())
    warm = sum(trained.rows(spec, "steps").query("rank == 0")["epoch"] == 0)
    assert losses[:warm] == plain[:warm]
    assert losses != plain
    assert losses[-1] == pytest.approx(plain[-1], rel=0.15)


@pytest.mark.slow
def test_augmented_variants_have_rows_of_their_own(trained):
    methods = {"forward": "delta(fixpoint:4)", "backward": "fixpoint:8"}
    task = {"augment": "variant", "variants": 2}
    spec = resnet(task=task, train={"epochs": 4, "max_steps": 12}, compression=methods)
    trained.status(spec)
    errors = trained.rows(spec, "transfers").query("direction == 'forward'").dropna(subset=["rel_error"])
    assert errors["rel_error"].iloc[0] == 0, "a variant's first visit is in full"
    assert errors["rel_error"].iloc[-1] > 0, "its second is a change"
