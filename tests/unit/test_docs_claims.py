"""docs/claims.md against the metrics that there are. `python tests/unit/test_docs_claims.py` writes its table anew."""

from __future__ import annotations

from pathlib import Path

from thinpipe.harness import metrics
from thinpipe.harness.claims import metrics as claim_metrics
from thinpipe.harness.claims.subject import REQUIRED

DOCS = Path(__file__).resolve().parents[2] / "docs" / "claims.md"
START, END = "<!-- metrics: start -->", "<!-- metrics: end -->"


def rendered():
    lines = [START, "| metric | unit | better | meaning | arguments |", "|---|---|---|---|---|"]
    for metric in claim_metrics.REGISTRY.values():
        if metric.name not in metrics.RUNS:
            way = ", ".join(filter(None, [metric.better, "time" if metric.is_time else ""])) or "neither"
            given = ", ".join(
                f"`{k}`" if v is REQUIRED else f"`{k}` {v}" for k, v in metric.args.items() if v is not None
            )
            free = ", ".join(f"`{k}`" for k, v in metric.args.items() if v is None)
            args = "; ".join(filter(None, [given, f"may be given: {free}" if free else ""]))
            meaning = metric.meaning.replace("|", "\\|")
            scale = "" if metric.scale == "ratio" else " (by difference)"
            lines.append(f"| `{metric.name}` | {metric.unit} | {way} | {meaning}{scale} | {args} |")
    return "\n".join([*lines, END, ""])


def test_the_metrics_of_claims_md_are_those_there_are():
    text = DOCS.read_text(encoding="utf-8")
    assert text[text.index(START) :] == rendered(), f"write it with: python {Path(__file__).name}"


if __name__ == "__main__":
    DOCS.write_text(DOCS.read_text(encoding="utf-8").partition(START)[0] + rendered(), encoding="utf-8")
    print(f"wrote the metrics of {DOCS}")
