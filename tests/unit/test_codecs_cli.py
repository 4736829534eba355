"""`thinpipe codecs`: what is listed and shown, the presets, and what is measured on a file's tensors."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from thinpipe import cli
from thinpipe.harness import capture, codecs, measure, metrics, plugins, views
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression_presets import PRESETS
from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import parse

CODECS = Path(__file__).resolve().parents[2] / "docs" / "codecs.md"


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THINPIPE_CACHE", str(tmp_path / "cache"))


def thinpipe(*args):
    result = CliRunner().invoke(cli.app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


# --- the list ---------------------------------------------------------------------------------------------------------


def test_every_codec_and_memory_is_listed_with_an_example_that_holds():
    rows = json.loads(thinpipe("codecs", "--json").out)
    assert {row["name"] for row in rows} == set(plugins.find("codecs")) | set(plugins.find("memories"))
    for row in rows:
        text = row["example"]
        assert grammar.parse(text).name == row["name"]
        assert grammar.canonical(text) == text
        assert row["bits_per_element"] == pytest.approx(grammar.estimate(text), abs=1e-4)
        assert row["unbiased"] == grammar.is_unbiased(text)
        assert row["state"] == grammar.state(text)
        assert row["source"]
        assert row["form"].startswith(row["name"])
    shown = thinpipe("codecs").out
    assert all(row["example"] in shown for row in rows)
    by_name = {row["name"]: row for row in rows}
    assert (by_name["delta"]["state"], by_name["delta"]["first_visit_bits"]) == ("shared", 32.0)
    assert by_name["fixpoint"]["unbiased_when"] == "rounding == 'stochastic'"
    assert by_name["none"]["exact"]
    assert not by_name["bf16"]["exact"]


def test_listing_imports_no_torch():
    code = (
        "import sys; sys.argv = ['thinpipe', 'codecs', '--json']\n"
        "from thinpipe.cli import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "print(sorted({'torch', 'numba', 'pandas', 'pyarrow'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"
    assert json.loads(done.stdout)


NEW = """
VERSION = 1
SUMMARY = "every other bit"
SOURCE = "somebody else"
FORMULA = "16 * share"
UNBIASED = "share == 1"
PARAMETERS = {"share": {"place": "argument", "type": "float", "above": 0.0, "max": 1.0}, "fast": {"type": "word",
    "choices": ["yes", "no"], "default": "no", "pins": {"yes": ["share"]}, "aliases": {"si": "yes"}}}
CONTRACT = {"halves:0.5": {"absolute": 0.5, "largest": 2.0**120}}
"""


def test_a_third_partys_codec_is_listed_and_measured_by_its_example(tmp_path, monkeypatch):
    path = tmp_path / "halves.py"
    path.write_text(NEW)
    found = {**plugins.find("codecs"), "halves": plugins.read("codecs", "halves", "elsewhere.halves", path)}
    real = plugins._find
    monkeypatch.setattr(plugins, "_find", lambda kind: MappingProxyType(found) if kind == "codecs" else real(kind))
    grammar._resolve.cache_clear()
    (row,) = [row for row in codecs.listing() if row["name"] == "halves"]
    assert row["form"] == "halves:SHARE(fast=yes|no)"
    assert (row["example"], row["bits_per_element"], row["module"]) == ("halves:0.5", 8.0, "elsewhere.halves")
    assert "halves:0.5" in measure.usual()
    shown = thinpipe("codecs", "halves")
    assert shown.code == 0
    for words in (
        "above 0.0 to 1.0",
        "yes: settles share",
        "si: the same as yes",
        "largest 2.0 ** 120",
        "somebody else",
    ):
        assert words in shown.out
    grammar._resolve.cache_clear()


def test_one_is_shown_in_full():
    data = json.loads(thinpipe("codecs", "fixpoint", "--json").out)
    bits = next(p for p in data["parameters"] if p["name"] == "bits")
    assert (bits["place"], bits["values"], bits["default"]) == ("argument", "1 to 8", None)
    assert data["contract"]["fixpoint:4"]["absolute"] == 0.126
    shown = thinpipe("codecs", "fixpoint").out
    for words in ("nearest|stochastic", "acsgd: settles rounding, clip, eps", "fixpoint:4(preset=acsgd): ", "arXiv"):
        assert words in shown
    assert thinpipe("codecs", "show", "fixpoint").out == shown
    missing = thinpipe("codecs", "fixpont")
    assert missing.code == 2
    assert "Did you mean 'fixpoint'?" in missing.err


# --- presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_sugar_for_what_it_says(name):
    preset = PRESETS[name]
    for text in (preset.forward, preset.backward):
        assert grammar.canonical(text) == text, "so that a run written out has the same id"
    assert "peer" not in grammar.uses(preset.forward)
    named = parse({"compression": {"preset": name}})
    written = parse({"compression": preset.settings()})
    assert named == written
    assert (named.run_id, named.train_id, named.cell_id) == (written.run_id, written.train_id, written.cell_id)
    assert "preset" not in named.canonical()["compression"]
    assert parse(named.canonical()) == named


def test_presets_are_the_published_settings():
    def of(name):
        preset = PRESETS[name]
        return preset.forward, preset.backward, preset.warmup_epochs

    assert of("acsgd-fw4bw8") == ("delta(fixpoint:4(preset=acsgd), cache=fp16)", "fixpoint:8(preset=acsgd)", 1)
    assert of("acsgd-fw3bw6") == ("delta(fixpoint:3(preset=acsgd), cache=fp16)", "fixpoint:6(preset=acsgd)", 1)
    assert "cache=fixpoint:8(preset=acsgd)" in of("acsgd-lowbits")[0]
    assert of("rudakov-q4-8") == ("minmax:4", "minmax:8", 0)
    assert of("rudakov-top10-shared") == ("topk:0.1(ties=drop)", "topk:0.1(mask=forward)", 0)
    shares = {name.removeprefix("rudakov-top") for name in PRESETS if name.startswith("rudakov-top")}
    assert shares == {f"{share}{how}" for share in (50, 30, 20, 10, 5, 2) for how in ("", "-shared")}
    assert {grammar.parse(PRESETS[f"rudakov-{way}-top10"].forward).name for way in ("ef", "ef21", "aqsgd")} == {
        "ef", "ef21", "delta",
    }  # fmt: skip
    shown = json.loads(thinpipe("codecs", "--presets", "--json").out)
    assert [row["name"] for row in shown] == list(PRESETS)
    assert "rudakov-q2-8" in thinpipe("codecs", "--presets").out
    assert "backward: minmax:8" in thinpipe("codecs", "rudakov-q2-8").out


def test_what_may_stand_beside_a_preset():
    beside = {"preset": "rudakov-top10", "evaluation": "off", "warmup_epochs": 2}
    made = parse({"compression": beside}).compression
    assert (made.evaluation, made.warmup_epochs, made.preset) == ("off", 2, None)
    assert parse({"compression": {"preset": "rudakov-top10"}}).compression.evaluation == "codec"
    for own in ({"forward": "none"}, {"backward": "none"}):
        with pytest.raises(UserError, match=f"'rudakov-top10' says what crosses: leave it out, or {next(iter(own))}"):
            parse({"compression": {"preset": "rudakov-top10", **own}})
    with pytest.raises(UserError, match=r"unknown preset 'rudakov-top1'\. Did you mean"):
        parse({"compression": {"preset": "rudakov-top1"}})
    with pytest.raises(UserError, match="unknown preset"):
        parse({"compression": {"preset": ["acsgd-fw4bw8"]}})


def test_codecs_md_says_what_every_family_of_presets_is():
    text = CODECS.read_text(encoding="utf-8")
    for name in PRESETS:
        family = name.rstrip("0123456789") if name.startswith("rudakov") and "-q" not in name else name
        family = "rudakov-qF-B" if "-q" in family else family.replace("-shared", "").rstrip("0123456789")
        assert f"`{family}" in text, name


# --- measuring a file -------------------------------------------------------------------------------------------------


@pytest.fixture
def values(tmp_path):
    x = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(1))
    save_file({"h": x, "g": x[:2].clone().to(torch.bfloat16)}, tmp_path / "x.safetensors")
    return x


def measured(*args, code=0):
    shown = thinpipe("codecs", "measure", *args, "--json")
    assert shown.code == code, shown.err
    return json.loads(shown.out)


def test_a_files_tensors_are_measured(values, tmp_path):
    data = measured("fixpoint:4", "fixpoint:04(rounding=stochastic)", "none", "--tensor", "x.safetensors", "--out", "o")
    rows = {(row["compressor"], row["tensor"]): row for row in data["rows"]}
    assert len(rows) == 6
    for row in data["rows"]:
        metrics.check("rate_distortion", row)
    plain = rows["fixpoint:4", "h"]
    scales = 2 * 64
    assert plain["payload_bytes"] == values.numel() // 2 + scales
    assert plain["frame_bytes"] == plain["payload_bytes"] + 64
    assert plain["bits_per_element"] == 8 * plain["frame_bytes"] / values.numel()
    assert (plain["source"], plain["kind"], plain["boundary"], plain["curve"]) == ("x", "tensor", None, "fixpoint")
    decoded = torch.empty_like(values)
    codec = grammar.build("fixpoint:4")
    from thinpipe.harness.compression.base import Context

    codec.encode_decoded(values, Context(tuple(values.shape)), torch.zeros(9999, dtype=torch.uint8), decoded)
    error = float((decoded - values).double().norm() / values.double().norm())
    assert plain["rel_error"] == pytest.approx(error)
    assert plain["error_db"] == pytest.approx(20 * math.log10(error))
    assert plain["bias"] == pytest.approx(float((decoded - values).mean() / values.abs().mean()), rel=1e-3)
    assert (plain["draws"], plain["systematic_error"]) == (1, plain["rel_error"])
    drawn = rows["fixpoint:4(rounding=stochastic)", "h"]
    assert drawn["draws"] == measure.DRAWS
    # Independent draws: the error of their mean falls with the root of their number, save where codes clip.
    assert drawn["systematic_error"] < 0.6 * drawn["rel_error"]
    exact = rows["none", "g"]
    assert (exact["rel_error"], exact["error_db"], exact["payload_bits"]) == (0.0, None, 32.0)
    assert all(row["encode_melem_s"] > 0 and row["decode_melem_s"] > 0 for row in data["rows"])
    table = pd.read_parquet(tmp_path / "o" / "rate_distortion.parquet")
    assert list(table.columns) == list(metrics.RATE_DISTORTION)
    assert len(table) == 6
    assert (tmp_path / "o" / "rate_distortion.png").read_bytes().startswith(b"\x89PNG")
    assert [Path(name).name for name in data["files"]][:2] == ["rate_distortion.parquet", "rate_distortion.csv"]


def test_npy_and_pt_files_too_and_where_results_go(values, tmp_path, monkeypatch):
    monkeypatch.setattr(measure.figures, "draw", lambda *_: ([], {}))
    np.save(tmp_path / "a.npy", values.numpy())
    torch.save({"w": values, "v": values[0]}, tmp_path / "b.pt")
    assert [row["tensor"] for row in measured("bf16", "--tensor", "a.npy")["rows"]] == ["a"]
    assert [row["tensor"] for row in measured("bf16", "--tensor", "b.pt")["rows"]] == ["v", "w"]
    assert (tmp_path / "results" / "codecs" / "b" / "rate_distortion.csv").is_file()


def test_exact_compressors_alone_have_a_table_and_no_figure(values):
    shown = thinpipe("codecs", "measure", "none", "--tensor", "x.safetensors")
    assert shown.code == 0
    assert "exact" in shown.out
    assert "no figure rate_distortion: nothing to draw" in shown.err


def test_a_codec_that_refuses_a_tensor_leaves_the_others_their_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(measure.figures, "draw", lambda *_: ([], {}))
    save_file({"big": torch.full((2, 8), 1e6), "small": torch.ones(2, 8)}, tmp_path / "y.safetensors")
    data = measured("fp16", "--tensor", "y.safetensors", code=1)
    assert [row["tensor"] for row in data["rows"]] == ["small"]
    assert "fp16 on y, big" in data["failed"][0]


def bad_files(folder):
    torch.save([1, 2], folder / "list.pt")
    (folder / "text.npy").write_text("no")
    (folder / "x.bin").write_bytes(b"")
    save_file({"n": torch.ones(3, dtype=torch.int64)}, folder / "int.safetensors")
    save_file({"n": torch.tensor([1.0, math.nan])}, folder / "nan.safetensors")
    save_file({"n": torch.zeros(0, 3)}, folder / "empty.safetensors")
    save_file({}, folder / "none.safetensors")
    save_file({"h": torch.ones(2, 4)}, folder / "x.safetensors")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["fixpoint:4"], "--model NAME"),
        (["fixpoint:4", "--model", "gpt2", "--tensor", "x.safetensors"], "--model NAME"),
        (["fixpoint:4", "--tensor", "x.safetensors", "--set", "train.lr=1"], "no effect beside --tensor"),
        (["fixpoint:4", "--tensor", "x.safetensors", "--pretrained"], "no effect beside --tensor"),
        (["fixpoint:4", "--model", "gtp2"], "Did you mean 'gpt2'?"),
        (["fixpoint:4", "--model", "gpt2", "--set", "train.lrr=1"], "Did you mean 'train.lr'?"),
        (["fixpoint:4", "--model", "gpt2", "--set", "train.lr=[1e-3, 1e-4]"], "train.lr"),
        (["fixpont:4", "--model", "gpt2"], "Did you mean 'fixpoint'?"),
        (["delta(fixpoint:4)", "--tensor", "x.safetensors"], "several visits of the same samples"),
        (["relu(fixpoint:4)", "--tensor", "x.safetensors"], "needs a model's gradients"),
        (["fixpoint:4", "--tensor", "missing.npy"], "there is no file missing.npy"),
        (["fixpoint:4", "--tensor", "x.bin"], "none of .safetensors, .npy, .pt"),
        (["fixpoint:4", "--tensor", "text.npy"], "cannot be read as .npy"),
        (["fixpoint:4", "--tensor", "list.pt"], "is list"),
        (["fixpoint:4", "--tensor", "int.safetensors"], "torch.int64"),
        (["fixpoint:4", "--tensor", "nan.safetensors"], "NaN or infinity"),
        (["fixpoint:4", "--tensor", "empty.safetensors"], "nothing to send"),
        (["fixpoint:4", "--tensor", "none.safetensors"], "holds no tensor"),
        (["fixpoint:4", "--model", "deberta", "--pretrained"], "thinpipe fetch-data minilm"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(args, words, tmp_path):
    bad_files(tmp_path)
    result = thinpipe("codecs", "measure", *args)
    assert result.code == 2, result.err
    assert words in result.err
    assert result.err.startswith("thinpipe: ")
    assert not (tmp_path / "results").exists()


def test_its_figure_is_not_one_of_an_experiment():
    shown = thinpipe("plot", "rate_distortion", "smoke")
    assert shown.code == 2
    assert "thinpipe codecs measure" in shown.err


# --- what is measured -------------------------------------------------------------------------------------------------


def test_the_usual_texts_are_of_codecs_that_exist_and_cover_each():
    assert set(measure.USUAL) <= set(plugins.find("codecs")) | set(plugins.find("memories"))
    texts = measure.usual()
    names = {name.partition("/")[2] for text in texts for name in grammar.plugins_used(text)}
    assert names >= set(plugins.find("codecs")) | set(plugins.find("memories"))
    for name, own in measure.USUAL.items():
        assert all(grammar.parse(text).name == name for text in own)


def streams(relu=True, visits=3):
    """Activations and gradients of one boundary: four samples in messages of two, in another order each visit."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(4, 16, generator=generator)
    orders = [torch.randperm(4, generator=generator) for _ in range(visits)]
    ids = [[tuple(order[:2].tolist()), tuple(order[2:].tolist())] for order in orders]
    moved = torch.stack([(base + 0.01 * visit)[order].view(2, 2, 16) for visit, order in enumerate(orders)])
    activations = moved.relu() if relu else moved
    gradients = torch.randn(activations.shape, generator=generator)
    forward = capture.Stream("m", "activation 0", "activation", activations, ids, 0, None, relu)
    return forward, dataclasses.replace(
        forward, tensor="gradient 0", kind="gradient", values=gradients, peer=activations
    )


def test_a_memory_is_measured_on_the_last_visit():
    forward, _ = streams(relu=False)
    row = measure.one(forward, "delta(fixpoint:8, cache=fp32)")
    assert row["first_visit_bits"] == 8 * (4 * 64 + 2 * 64) / 64
    assert row["payload_bits"] < 8 + 16
    # The change is a hundredth of the values, and coded in 8 bits.
    assert 0 < row["rel_error"] < 1e-3 < measure.one(forward, "fixpoint:8")["rel_error"]


def test_gradients_at_a_relu_count_where_its_output_is_not_zero():
    forward, backward = streams()
    skipped = measure.one(backward, "relu(none)")
    assert skipped["rel_error"] == 0.0
    assert skipped["payload_bits"] < 24
    plain, relu = (measure.one(backward, text)["rel_error"] for text in ("fixpoint:4", "relu(fixpoint:4)"))
    assert relu == pytest.approx(plain, rel=0.5)
    assert measure.misfit("relu(none)", forward) is not None
    assert "ReLU" in measure.misfit("relu(none)", streams(relu=False)[1])


def test_a_shared_mask_is_that_of_the_activations_as_they_crossed():
    _, backward = streams(relu=False)
    row = measure.one(backward, "topk:0.25(mask=forward)")
    kept = 0.25 * 16 * 2 * 32 / (2 * 16)
    assert row["payload_bits"] == pytest.approx(kept, abs=2)
    assert row["rel_error"] > 0.5


def test_measured_rows_are_pooled_by_compressor():
    rows, failed = measure.run(streams(), ["fixpoint:8", "fixpoint:2", "none"], lambda _: None)
    assert failed == []
    pooled = views.measured(rows)
    assert [row["compressor"] for row in pooled] == ["fixpoint:2", "fixpoint:8", "none"]
    one = next(row for row in rows if row["compressor"] == "fixpoint:2" and row["kind"] == "gradient")
    found = pooled[0]["kinds"]["gradient"]
    assert (found["bits"], found["error_db"]) == (one["bits_per_element"], one["error_db"])
    assert pooled[2]["kinds"]["activation"]["error_db"] is None
