"""The arguments of `thinpipe train`: all of AC-SGD's under their names, parsed strictly, shown in help and docs alike.

`python tests/unit/test_acsgd_arguments.py` writes tests/golden/train_help.txt and the tables of docs/train.md anew.
"""

import re
from pathlib import Path

import pytest

from thinpipe.harness import acsgd
from thinpipe.harness.acsgd import arguments
from thinpipe.harness.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "train_help.txt"
DOCS = ROOT / "docs" / "train.md"
START, END = "<!-- arguments: start -->\n", "<!-- arguments: end -->"
ROWS = {row.name: row for row in arguments.rows()}
# Every argument of AC-SGD's two runners with its default, as their parser has it.
PUBLISHED = {
    "--use-cuda": "true", "--cuda-id": "0", "--cuda-num": "1", "--debug-mem": "true", "--dist-backend": "cupy_nccl",
    "--dist-url": "tcp://127.0.0.1:9000", "--world-size": "4", "--pipeline-group-size": "4", "--data-group-size": "1",
    "--rank": "0", "--seq-length": "1024", "--embedding-dim": "768", "--num-layers": "4", "--num-heads": "12",
    "--batch-size": "32", "--micro-batch-size": "8", "--lr": "0.01", "--num-iters": "10", "--fp16": "off",
    "--loss-scale": "64", "--initial-loss-scale": "2^32", "--min-loss-scale": "1", "--loss-scale-window": "1000",
    "--hysteresis": "2", "--pp-mode": "gpipe", "--dp-mode": "allreduce", "--gradient-accumulate-step": "1",
    "--forward-compress-method": "none", "--forward-bits": "4", "--forward-bits-act": "4",
    "--forward-scale-method": "max", "--forward-scale-dims": "(0,1)", "--max-activation-cache-size": "20000",
    "--backward-compress-method": "none", "--backward-bits": "8", "--backward-scale-method": "max",
    "--backward-scale-dims": "(0,1)", "--dp-bits": "8", "--task-type": "language_model", "--n-epochs": "10",
    "--warmup-epochs": "1", "--warmup-steps": "None", "--load-pretrained-model": "true", "--seed": "1",
    "--profiling": "tidy_profiling", "--trace-postfix": "default", "--do-evaluation": "true",
    "--train-data": None, "--valid-data": None, "--tokenizer-type": "BertWordPieceLowerCase", "--vocab-file": None,
    "--vocab-extra-ids": "0", "--make-vocab-size-divisible-by": "128", "--model-name": "gpt2; deberta-v3-base",
    "--tokenizer-name": "gpt2; deberta-v3-base", "--task-name": "wikitext; sst2",
}  # fmt: skip
# Defaults that are not theirs; the table says why.
OTHERS = {"--use-cuda", "--dist-backend", "--embedding-dim", "--num-layers", "--num-heads", "--task-type",
          "--tokenizer-name", "--warmup-steps", "--fp16", "--model-name", "--task-name", "--forward-scale-dims",
          "--backward-scale-dims"}  # fmt: skip


def documented() -> str:
    text = DOCS.read_text(encoding="utf-8")
    return text[text.index(START) + len(START) : text.index(END)]


def test_every_published_argument_is_there_and_no_other_claims_to_be_theirs():
    theirs = {name: row.theirs for name, row in ROWS.items() if row.theirs}
    assert set(theirs) == set(PUBLISHED)
    assert {name: text for name, text in theirs.items() if PUBLISHED[name] is not None} == {
        name: text for name, text in PUBLISHED.items() if text is not None
    }


def test_a_default_is_theirs_or_its_row_says_what_differs():
    for name, row in ROWS.items():
        if row.theirs and not row.dead and name not in OTHERS:
            assert row.default_text == row.theirs, name
        if name in OTHERS or row.dead:
            assert row.difference or row.default_text.startswith(("0 1", "one epoch", "gpt2", "wikitext")), name


def test_no_name_is_there_twice_and_every_row_is_whole():
    rows = arguments.rows()
    assert len(ROWS) == len(rows)
    for row in rows:
        assert re.fullmatch(r"--[a-z0-9]+(-[a-z0-9]+)*", row.name)
        assert row.effect, row.name
        assert row.default is not None or row.shown, row.name
        assert not row.choices or row.default is None or row.default in row.choices, row.name


def test_defaults_parse_to_themselves():
    parsed = arguments.parse([])
    assert parsed.given == frozenset()
    assert parsed.repeated == ()
    assert (parsed.world_size, parsed.batch_size, parsed.lr, parsed.profiling) == (4, 32, 0.01, "tidy_profiling")
    assert parsed.load_pretrained_model is True
    assert parsed.warmup_steps is None


def test_the_published_example_parses():
    example = (
        "--cuda-id 0 --rank 3 --model-name checkpoints/gpt2-xl --tokenizer-name gpt2-xl --load-pretrained-model true "
        "--task-name wikitext --n-epochs 10 --warmup-epochs 1 --num-layers 6 --num-heads 25 --embedding-dim 1600 "
        "--num-iters 10000000 --lr 5e-5 --seq-length 1024 --batch-size 32 --micro-batch-size 1 "
        "--forward-compress-method delta --forward-bits 4 --backward-compress-method fixpoint --backward-bits 8 "
        "--dist-url tcp://10.0.0.1:9000 --world-size 8 --pipeline-group-size 8 --pp-mode gpipe "
        "--profiling no-profiling --do-evaluation true"
    )
    words = example.split()
    parsed = arguments.parse(words)
    assert parsed.given == {word for word in words if word.startswith("--")}
    assert (parsed.num_iters, parsed.lr, parsed.rank, parsed.num_heads) == (10_000_000, 5e-5, 3, 25)


@pytest.mark.parametrize("words", [["0", "1"], ["0,1"], ["(0,1)"], ["(0,", "1)"], ["1", "0"]])
def test_scale_dims_may_be_written_as_a_tuple(words):
    assert arguments.parse(["--forward-scale-dims", *words]).forward_scale_dims == (0, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--forward-bit", "3"], "Did you mean --forward-bits?"),
        (["--forward-bit=3"], "unknown argument --forward-bit."),
        (["--lr", "1e-3", "wait"], "unexpected word 'wait'"),
        (["--lr", "fast"], "--lr must be a number"),
        (["--lr", "nan"], "--lr must be a number"),
        (["--lr", "0"], "--lr must be a number from 1e-12"),
        (["--rank"], "--rank"),
        (["--rank", "1.5"], "--rank must be a whole number"),
        (["--forward-bits", "9"], "--forward-bits must be a whole number from 1 to 8, not 9"),
        (["--forward-bits", "0"], "from 1 to 8"),
        (["--dp-bits", "1"], "from 2 to 8"),
        (["--profiling", "tidy-profiling"], "Did you mean 'tidy_profiling'?"),
        (["--do-evaluation", "yes"], "--do-evaluation must be true or false, not 'yes'"),
        (["--forward-scale-dims", "a"], "--forward-scale-dims must be whole numbers"),
        (["--forward-scale-dims", "0", "1", "wait"], "--forward-scale-dims must be whole numbers"),
        (["--model-name", ""], "--model-name is empty"),
        (["--world", "4"], "unknown argument --world."),
    ],
)
def test_what_is_wrong_is_refused_by_name(words, message):
    with pytest.raises(UserError) as error:
        arguments.parse(words)
    assert message in str(error.value)


def test_true_and_false_in_any_case():
    assert arguments.parse(["--do-evaluation", "False"]).do_evaluation is False
    assert arguments.parse(["--do-evaluation=TRUE"]).do_evaluation is True


def test_what_is_given_twice_is_known():
    parsed = arguments.parse(["--lr", "1", "--lr=2", "--seed", "3"])
    assert (parsed.lr, parsed.repeated) == (2.0, ("--lr",))


def test_help_is_frozen(capsys):
    assert acsgd.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown == GOLDEN.read_text(encoding="utf-8"), (
        "the help of `thinpipe train` has changed: `python tests/unit/test_acsgd_arguments.py` writes it anew"
    )
    assert max(map(len, shown.splitlines())) <= 120


def test_the_tables_of_train_md_are_those_of_the_arguments():
    assert documented() == arguments.docs(), (
        "docs/train.md is out of date: `python tests/unit/test_acsgd_arguments.py` writes its tables anew"
    )


def test_every_argument_is_in_the_docs_once_with_as_many_cells_as_its_heading():
    names = re.findall(r"^\| `(--[a-z0-9-]+)` \|", documented(), flags=re.MULTILINE)
    assert sorted(names) == sorted(ROWS)
    for line in documented().splitlines():
        if line.startswith("| "):
            cells = line.replace("\\|", "").count("|") - 1
            assert cells in (4, 6), line


if __name__ == "__main__":
    GOLDEN.write_text(arguments.help_text(), encoding="utf-8")
    text = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(
        text.partition(START)[0] + START + arguments.docs() + END + text.partition(END)[2], encoding="utf-8"
    )
    print(f"wrote {GOLDEN} and the tables of {DOCS}")
