"""Summaries and claims as LaTeX, Markdown and CSV."""

import csv
import io
from dataclasses import replace

import pytest
from made_sets import CLAIM, HOSTILE, hostile, made, run

from thinpipe.harness import export, resultset
from thinpipe.harness.errors import UserError


def two_rates():
    """Two arms at two rates, three seeds: one run flagged, one diverged."""
    rows = [
        run(
            100 * arm + 10 * rate + seed,
            arm=f"{'AB'[arm]} 4_bits",
            seed=seed,
            rate_mbit=(10.0, 100.0)[rate],
            step_time_s=0.5 + 0.01 * seed + arm,
            measure="full",
            state="diverged" if (arm, rate, seed) == (1, 1, 2) else "done",
            fidelity="link-off" if (arm, rate, seed) == (0, 0, 1) else "ok",
            final_train_loss=None if (arm, rate, seed) == (1, 1, 2) else 3.0,
        )
        for arm in range(2)
        for rate in range(2)
        for seed in range(3)
    ]
    return made(rows, lambda row: {"network.rate_mbit": row["rate_mbit"]}, claims=[CLAIM])


def test_a_setting_that_a_run_leaves_at_its_default_is_shown_with_its_value():
    rows = [run(10 * stages + seed, arm="A", seed=seed) for stages in (0, 1) for seed in range(2)]
    found = made(rows, lambda row: {"pipeline.stages": 8} if int(row["run_id"], 16) >= 10 else {})
    text = export.summary(found, "markdown")
    assert ("| stages 2 |" in text, "| stages 8 |" in text) == (True, True), text


def test_a_markdown_summary_has_a_row_a_cell():
    lines = export.summary(two_rates(), "markdown").splitlines()
    assert lines[2] == "| part | arm | setting | step\\_time\\_s (s) | final\\_train\\_loss (nat) | seeds |"
    assert lines[4] == "| timing | A 4\\_bits | rate\\_mbit 10 | 0.510 ± 0.025\\* | 3 ± 0 | 3 |"
    assert lines[7] == "| timing | B 4\\_bits | rate\\_mbit 100 | 1.505 ± 0.064 | 3 ± 0 | 2, 1 diverged |"
    assert "a flagged run" in lines[0]


def test_a_latex_summary_compiles_as_booktabs():
    text = export.summary(two_rates(), "latex")
    assert r"timing & A 4\_bits & rate\_mbit 10 & 0.510 $\pm$ 0.025* & 3 $\pm$ 0 & 3 \\" in text
    for part in (
        r"\begin{tabular}{lllrrr}",
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
        "% needs \\usepackage{booktabs}",
    ):
        assert part in text, part


def test_a_csv_summary_keeps_every_digit():
    rows = list(csv.DictReader(io.StringIO(export.summary(two_rates(), "csv", ["step_time_s", "codec_s"]))))
    assert [row["setting"] for row in rows[:2]] == ["rate_mbit 10", "rate_mbit 100"]
    assert float(rows[0]["step_time_s"]) == pytest.approx(0.51, rel=1e-12)
    assert rows[0]["step_time_s_n"] == "3"
    assert rows[0]["step_time_s_flagged"] == "True"
    assert rows[3]["diverged"] == "1"
    assert rows[0]["codec_s"] == ""


def test_times_of_convergence_runs_are_not_exported():
    found = made([run(1, measure="convergence", step_time_s=0.1, final_eval_loss=2.0)])
    text = export.summary(found, "markdown", ["step_time_s", "final_eval_loss"])
    assert text.splitlines()[4] == "| timing | A |  | 2 | 1 |"


def test_hostile_texts_stay_in_their_cells():
    text = export.summary(hostile(), "markdown")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    assert "<" not in text
    assert all(line.count("$") % 2 == 0 for line in export.summary(hostile(), "latex").replace(r"\$", "").splitlines())


@pytest.mark.parametrize("fmt", export.FORMATS)
def test_claims_are_exported(fmt, tmp_path):
    folder = saved(two_rates(), tmp_path)
    text = export.export(folder, fmt, claims=True)
    assert "A is faster than B." in text
    assert "holds" in text
    assert "0.5" in text


def test_a_wrong_format_or_column_is_named(tmp_path):
    folder = saved(two_rates(), tmp_path)
    with pytest.raises(UserError, match="Did you mean 'latex'"):
        export.export(folder, "latx")
    with pytest.raises(UserError, match="Did you mean 'step_time_s'"):
        export.export(folder, "csv", ["step_time"])
    with pytest.raises(UserError, match="no number 'arm'"):
        export.export(folder, "csv", ["arm"])


def test_several_sets_follow_one_another(tmp_path):
    saved(two_rates(), tmp_path / "one")
    saved(replace(two_rates(), name="other"), tmp_path / "two")
    assert export.export(tmp_path, "markdown").count("| part | arm |") == 2


def saved(found, folder):
    for name, text in resultset.contents(found).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_every_special_character_of_latex_is_set_as_itself():
    assert export.latex(r"a\b{c}~^#$%&_<>") == (
        r"a\textbackslash{}b\{c\}\textasciitilde{}\textasciicircum{}\#\$\%\&\_$<$$>$"
    )
    assert "\n" not in export.latex(HOSTILE)
