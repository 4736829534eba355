"""Classification of sentences: files, labels, rows of tokens, scores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics

from thinpipe.harness import fetch
from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import TaskSpec
from thinpipe.harness.tasks import _rows, _sentences, classify

SMALL = {"vocab_size": 300, "sequence_length": 12, "num_sequences": 40, "num_eval_sequences": 10, "num_labels": 2}
ROWS = [(f"sentence number {i}, said {'twice ' * (i % 5)}so", f"and {i} again", i % 2) for i in range(80)]


def prepare(corpus: Path | str, cache: Path, **changes):
    return classify.prepare(TaskSpec(name="classify", corpus=str(corpus), **(SMALL | changes)), cache)


@pytest.fixture
def table(tmp_path) -> Path:
    path = tmp_path / "own.csv"
    path.write_text("id,sentence,label\n" + "".join(f'{i},"{a}",{c}\n' for i, (a, _, c) in enumerate(ROWS)))
    return path


def words(path: Path) -> list[str]:
    return _sentences.read_sentences(str(path), 2, path.parent).texts


# --- files ----------------------------------------


def test_csv_tsv_and_jsonl_say_the_same(table, tmp_path):
    tsv, jsonl = tmp_path / "own.tsv", tmp_path / "own.jsonl"
    tsv.write_text("label\tsentence\r\n" + "".join(f"{c}\t{a}\r\n" for a, _, c in ROWS), encoding="utf-8-sig")
    jsonl.write_text("".join(json.dumps({"sentence": a, "label": c}) + "\n\n" for a, _, c in ROWS))
    assert words(table) == words(tsv) == words(jsonl) == [a for a, _, _ in ROWS]
    one, two, three = (prepare(path, tmp_path) for path in (table, tsv, jsonl))
    assert torch.equal(one.train.ids, two.train.ids)
    assert torch.equal(one.train.labels, three.train.labels)


def test_a_quote_in_a_tsv_is_a_character_and_a_line_separator_no_line(tmp_path):
    path = tmp_path / "own.tsv"
    path.write_text('sentence\tlabel\nsaid "so\u2028 and\x85 then\t0\nfine"\t1\n', encoding="utf-8")
    assert words(path) == ['said "so\u2028 and\x85 then', 'fine"']


def test_labels_are_mapped_in_sorted_order(tmp_path):
    for values, classes in ((("no", "yes"), ["no", "yes"]), ((10, 9), ["9", "10"]), (("-1", "1"), ["-1", "1"])):
        path = tmp_path / "own.csv"
        path.write_text("sentence,label\n" + "".join(f"text {i},{values[i % 2]}\n" for i in range(60)))
        found = _sentences.read_sentences(str(path), 2, tmp_path)
        assert found.classes == classes
        assert [found.classes[number] for number in found.labels[:2]] == [str(value) for value in values]
        assert prepare(path, tmp_path).provenance["classes"] == classes


@pytest.mark.parametrize(
    ("suffix", "text", "message"),
    [
        (".csv", "text,label\na,1\n", "no column 'sentence'.*reads: text,label"),
        (".csv", "sentence,label\na,0\nb, c,1\n", "sample 2 has more columns"),
        (".csv", "sentence,label\na,0\nb\n", "sample 2: 'label' is None, not an integer or a string"),
        (".csv", 'sentence,label\n"a,0\nb,1\n', "unexpected end of data"),
        (".csv", "sentence,label\na,0\n ,1\n", "sample 2: the sentence is empty"),
        (".csv", "sentence,label\n", "has no sentences"),
        (".csv", "", "no column 'sentence'"),
        (".csv", "sentence,label\na,0\nb,1\nc,2\n", r"has 3 different labels \(0, 1, 2\), not 2"),
        (".jsonl", '{"sentence": "a", "label": 0}\n{', "line 2 is no JSON"),
        (".jsonl", '{"sentence": "a", "label": 0}\n[]', "line 2 is no JSON object"),
        (".jsonl", '{"sentence": "a", "label": 0.5}', "sample 1: 'label' is 0.5, not an integer"),
        (".jsonl", '{"sentence": "a", "label": true}', "'label' is True"),
        (".jsonl", '{"sentence": "a", "label": 0}\n{"sentence": "b", "label": "1"}', "some labels are integers"),
        (".jsonl", '{"sentence": 3, "label": 0}', "'sentence' is 3, not a string"),
        (".tsv", "sentence\tsentence2\tlabel\na\tb\t0\nc\t \t1\n", "sample 2: the sentence is empty"),
    ],
)
def test_damaged_files_are_refused(tmp_path, suffix, text, message):
    path = tmp_path / f"own{suffix}"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        prepare(path, tmp_path)


def test_a_file_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "own.csv"
    path.write_bytes("sentence,label\nnaïve,1\n".encode("latin-1"))
    with pytest.raises(UserError, match="no UTF-8 text: byte 17 is 0xef"):
        prepare(path, tmp_path)


def test_another_suffix_and_a_near_miss_are_answered(tmp_path):
    (tmp_path / "own.xlsx").write_text("x")
    for name in (str(tmp_path / "own.xlsx"), "movie-review"):
        with pytest.raises(UserError, match=r"\.csv, \.tsv, \.jsonl"):
            prepare(name, tmp_path)
    with pytest.raises(UserError, match="Did you mean 'movie-reviews'"):
        prepare("movie-review", tmp_path)


# --- movie reviews ----------------------------------------


@pytest.fixture
def reviews(tmp_path) -> Path:
    """A cache with a fetched file of the real one's form."""
    folder = tmp_path / "data" / "movie-reviews"
    folder.mkdir(parents=True)
    ratings = [(-1) ** i * (0.25 + i % 4 * 0.75) for i in range(120)]
    lines = [f"{i + 1}\t{rating:.11g}\tA ''caf\xe9'' of a film\x85 number {i}\n" for i, rating in enumerate(ratings)]
    (folder / fetch.REVIEWS).write_bytes("".join(lines).replace("\x85", "\u2026").encode("cp1252"))
    return tmp_path


def test_reviews_near_zero_are_left_out_and_the_sign_is_the_label(reviews):
    found = _sentences.read_sentences("movie-reviews", 2, reviews)
    assert len(found.texts) == 90, "a quarter is rated 0.25"
    assert found.texts[0] == "A ''café'' of a film… number 1"
    assert found.classes == ["negative", "positive"]
    assert found.labels[:4] == [0, 1, 0, 0], "of films 1, 2, 3, 5"
    dataset = prepare("movie-reviews", reviews, num_labels=None, num_sequences=None)
    assert len(dataset.train) == 80
    assert dataset.provenance["sentences"] == 90
    counts = dataset.provenance["train_labels"]
    assert counts == {"negative": int((dataset.train.labels == 0).sum()), "positive": int(dataset.train.labels.sum())}


# --- rows ----------------------------------------


def test_samples_are_held_out_from_a_fixed_shuffle(table, tmp_path):
    everything = prepare(table, tmp_path, num_sequences=None)
    some = prepare(table, tmp_path)
    assert torch.equal(some.held_out.ids, everything.held_out.ids)
    rows = {tuple(row) for row in everything.train.ids.tolist()}
    assert {tuple(row) for row in some.train.ids.tolist()} < rows
    assert len(everything.train) == 70
    in_file = _rows.trained(
        words(table), None, num_train=80, name="x", vocab_size=300, length=12, cache_dir=tmp_path
    ).ids.tolist()
    places = [in_file.index(row) for row in everything.held_out.ids.tolist()]
    assert places != sorted(places), "shuffled"
    assert min(places) < 40, "not the file's end"


def test_rows_are_marked_padded_and_cut(table, tmp_path):
    dataset = prepare(table, tmp_path)
    batch = classify.batch(dataset.train, range(40))
    mask = batch.side["attention_mask"]
    assert batch.inputs[:, 0].tolist() == [1] * 40
    assert torch.equal(batch.inputs == 0, mask == 0), "[PAD] is 0 and nothing else is"
    ends = batch.inputs[torch.arange(40), mask.sum(dim=1) - 1]
    assert ends.tolist() == [2] * 40, "[SEP] is kept where a sentence is cut"
    wide = prepare(table, tmp_path, sequence_length=64)
    assert wide.provenance["truncated_share"] == 0
    share = (wide.train.lengths > 12).sum() + (wide.held_out.lengths > 12).sum()
    assert dataset.provenance["truncated_share"] > 0
    assert share > 0


def test_pairs_are_joined_and_the_longer_is_cut(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("sentence,sentence2,label\n" + "".join(f'"{a}","{b}",{c}\n' for a, b, c in ROWS))
    dataset = prepare(path, tmp_path)
    assert ((dataset.train.ids == 2).sum(dim=1) == 2).all()
    assert ((dataset.train.ids == 1).sum(dim=1) == 1).all()
    first = (dataset.train.ids == 2).int().argmax(dim=1) - 1
    second = dataset.train.lengths - first - 3
    assert set(dataset.train.lengths.tolist()) == {12}
    assert set(zip(first.tolist(), second.tolist(), strict=True)) <= {(5, 4), (6, 3)}, "3: all that the pair has"


def test_the_vocabulary_is_learnt_from_the_training_split_only(tmp_path):
    texts = ["aaaa bbbb cccc dddd"] * 30 + ["zzzz yyyy"] * 30
    sizes = {"name": "x", "vocab_size": 265, "length": 30, "cache_dir": tmp_path}
    apart = _rows.trained(texts, None, num_train=30, **sizes)
    assert apart.lengths[-1] == 2 + 9, "letter by letter"
    assert apart.lengths[0] <= 12, "of 19 letters"


def test_case_is_no_difference(tmp_path):
    texts = ["Good Film", "good film"] * 20
    rows = _rows.trained(texts, None, num_train=40, name="x", vocab_size=265, length=9, cache_dir=tmp_path)
    assert np.array_equal(rows.ids[0], rows.ids[1])


def test_a_corpus_too_small_for_the_vocabulary_is_refused(table, tmp_path):
    with pytest.raises(UserError, match=r"\(80 sentences\) is too small for task.vocab_size 5000: it gives \d+ tokens"):
        prepare(table, tmp_path, vocab_size=5000)


def test_tokens_come_from_the_cache(table, tmp_path, monkeypatch):
    first = prepare(table, tmp_path)
    monkeypatch.setattr(_rows._bpe, "train_on", lambda *_, **__: pytest.fail("trained again"))
    again = prepare(table, tmp_path, num_sequences=20)
    assert again.provenance["tokenizer_sha256"] == first.provenance["tokenizer_sha256"]


def test_a_tokenizer_without_effect_or_augmentation_is_refused(table, tmp_path):
    with pytest.raises(UserError, match=r"task\.augment 'variant' has no effect"):
        prepare(table, tmp_path, augment="variant")


# --- scores ----------------------------------------


@settings(max_examples=50, deadline=None)
@pytest.mark.filterwarnings("ignore:A single label")
@given(st.integers(2, 4), st.data())
def test_scores_are_scikit_learns(labels, data):
    truth = data.draw(st.lists(st.integers(0, labels - 1), min_size=1, max_size=40))
    guess = data.draw(st.lists(st.integers(0, labels - 1), min_size=len(truth), max_size=len(truth)))
    found = classify.score(torch.tensor(guess), torch.tensor(truth))
    assert found["accuracy"] == pytest.approx(np.mean(np.array(truth) == guess))
    assert found["matthews"] == pytest.approx(metrics.matthews_corrcoef(truth, guess))
    if max(truth + guess) <= 1:
        hits = sum(a == b == 1 for a, b in zip(truth, guess, strict=True))
        assert found["f1"] == pytest.approx(2 * hits / max(1, sum(truth) + sum(guess)))
    else:
        assert found["f1"] == pytest.approx(metrics.f1_score(truth, guess, average="macro", zero_division=0))
