"""Traces and fractions of pipelines whose numbers are known."""

import json
import statistics

import drawing
import pandas as pd
import pytest
from pipelines import gpipe

from thinpipe.harness import timeline, trace
from thinpipe.harness.errors import UserError
from thinpipe.harness.shards import to_arrow
from thinpipe.harness.tables import to_frame
from thinpipe.plots import trace as chart


def bars(made, row, rank):
    found = [e for e in made["traceEvents"] if e["ph"] == "X" and e["pid"] == rank]
    return sorted((e for e in found if trace.ROWS[e["tid"] - 1] == row), key=lambda e: e["ts"])


# --- fractions ---


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (4, 4), (3, 8)])
def test_free_transfers_between_equal_stages_leave_the_ideal_bubble(ranks, microbatches):
    (found,) = timeline.fractions(gpipe(ranks, microbatches), ranks)
    assert found.bubble == pytest.approx(timeline.ideal_bubble(ranks, microbatches))


def test_data_groups_are_pipelines_of_their_own():
    found = timeline.fractions(gpipe(2, 4, groups=2, steps=2), 2)
    assert [one.bubble for one in found] == pytest.approx([timeline.ideal_bubble(2, 4)] * 2)


def test_the_optimizer_and_what_follows_are_no_bubble():
    one, other = (timeline.fractions(gpipe(2, 4, optimizer=seconds), 2)[0].bubble for seconds in (0.0, 50.0))
    assert one == other


def test_bubble_and_overlap_by_hand():
    """Two stages, one micro-batch: 1 s forward each, 2 s backward, 3 s a transfer, 0.5 s to encode and decode."""
    (found,) = timeline.fractions(gpipe(2, 1, transfer=3.0, codec=0.5), 2)
    busy, makespan = 2 * (1 + 2) + 2 * 2 * 0.5, 1 + 0.5 + 3 + 0.5 + 1 + 2 + 0.5 + 3 + 0.5 + 2
    assert found.bubble == pytest.approx(1 - busy / (2 * makespan))
    assert found.overlap == 0


def test_transfers_behind_compute_are_overlapped():
    """Forward: the sender computes on while each frame but the last is on its way, the receiver from the second on."""
    spans = [row for row in gpipe(2, 4, forward=2.0, transfer=1.0) if row["direction"] != "backward"]
    (found,) = timeline.fractions(spans, 2)
    # Sender: 3 of 4 s hidden. Receiver: it computes for 2 s from the arrival of each, so 3 of 4 s too.
    assert found.overlap == pytest.approx(6 / 8)


def test_frames_that_no_one_waited_for_are_estimated_by_those_that_were_seen():
    """A slow second stage waits for the first frame only; the others took as long, one after the other."""
    spans = gpipe(2, 4, forward=(0.1, 5.0), transfer=1.0)
    found = [f for f in timeline.frames(next(timeline.by_step(spans))[1], 2) if f.direction == "forward"]
    assert [f.seen for f in found] == [True, False, False, False]
    assert [f.arrived_s - f.start_s for f in found] == pytest.approx([1.0] * 4)
    assert [f.start_s for f in found[1:]] == pytest.approx([f.arrived_s for f in found[:-1]])


def test_a_pace_is_kept_for_steps_in_which_nothing_was_seen_and_never_passes_what_was_taken():
    seen, unseen = gpipe(2, 1, transfer=1.0), gpipe(2, 1)
    for row in unseen:
        row["step"] = 1
        if row["phase"] == "wait_receive":
            # It came at some time in the 0.25 s that the receiver was busy with something else.
            row["start_s"] = row["end_s"] = row["end_s"] + 0.25
    pace = {}
    steps = dict(timeline.by_step(seen + unseen))
    timeline.frames(steps[0], 2, pace)
    taken = [f.arrived_s - f.sent_s for f in timeline.frames(steps[1], 2, pace)]
    assert len(pace) == len(taken) == 2
    assert taken == pytest.approx([0.25] * 2)
    assert [f.arrived_s - f.sent_s for f in timeline.frames(steps[1], 2)] == [0, 0]


def test_a_frame_sent_twice_is_a_fault_of_the_program():
    spans = gpipe(2, 2)
    twice = [row for row in spans if row["phase"] == "send"][:1]
    with pytest.raises(AssertionError, match="two spans send"):
        timeline.fractions(spans + twice, 2)


def test_medians_are_those_of_the_measured_steps():
    found = [timeline.Fractions(step, bubble, overlap) for step, bubble, overlap in ((0, 0.9, 0.0), (1, 0.2, 0.4))]
    found += [timeline.Fractions(2, 0.4, 0.6), timeline.Fractions(3, 0.3, None)]
    assert timeline.medians(found, (1, 2, 3)) == {
        "bubble_fraction": 0.3,
        "overlap_fraction": statistics.median([0.4, 0.6]),
    }
    assert timeline.medians(found, ()) == {"bubble_fraction": None, "overlap_fraction": None}


@pytest.mark.parametrize("make", [pd.DataFrame, lambda rows: to_frame("spans", to_arrow("spans", rows))])
def test_a_table_and_rows_say_the_same(make):
    spans = gpipe(3, 2, transfer=0.5, steps=2)
    table = make(spans).sample(frac=1.0, random_state=0)
    assert timeline.fractions(table, 3) == timeline.fractions(spans, 3)
    key = json.dumps
    one, other = (trace.chrome_trace(s, 3)["traceEvents"] for s in (table, spans))
    assert sorted(map(key, one)) == sorted(map(key, other))


# --- the trace ---


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transfer", [0.0, 0.3, 4.0])
def test_a_written_trace_is_whole_and_reads_back(tmp_path, transfer, groups):
    spans = gpipe(3, 4, transfer=transfer, codec=0.01, steps=3, groups=groups)
    count = trace.write(tmp_path / "trace.json", spans, 3)
    made = json.loads((tmp_path / "trace.json").read_text())
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    assert len(made["traceEvents"]) == count
    assert made == json.loads(json.dumps(trace.chrome_trace(spans, 3)))
    assert trace.faults(made) == []
    arrows = [e for e in made["traceEvents"] if e["ph"] == "s"]
    assert len(arrows) == groups * 3 * 2 * 4 * 2  # steps, boundaries, micro-batches, directions


def test_rows_are_named_ordered_and_hold_their_phases():
    made = trace.chrome_trace(gpipe(2, 2, transfer=1.0, codec=0.1), 2)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in made["traceEvents"] if e["name"] == "thread_name"}
    assert [names[1, tid] for tid in range(1, 9)] == [f"{tid} {row}" for tid, row in enumerate(trace.ROWS, 1)]
    assert [e["args"]["name"] for e in made["traceEvents"] if e["name"] == "process_name"] == [
        "rank 0 (stage 0)",
        "rank 1 (stage 1)",
    ]
    assert [len(bars(made, row, 0)) for row in trace.ROWS] == [0, 2, 2, 2, 2, 0, 4, 1]
    assert [len(bars(made, row, 1)) for row in trace.ROWS] == [2, 2, 0, 0, 2, 2, 4, 1]


def test_times_are_microseconds_from_the_first_span():
    made = trace.chrome_trace(gpipe(2, 2, forward=1.0, transfer=0.25), 2)
    first, second = bars(made, "forward compute", 0)
    assert (first["ts"], first["dur"], second["ts"]) == (0.0, 1e6, 1e6)
    assert first["args"] == {"step": 0, "microbatch": 0, "stage": 0}
    sent = bars(made, "forward send", 0)[0]
    assert (sent["ts"], sent["dur"], sent["args"]["boundary"]) == (1e6, 0.25e6, 0)
    assert min(e["ts"] for e in made["traceEvents"] if "ts" in e) == 0


def test_frames_that_queue_are_drawn_one_after_the_other_and_say_so():
    made = trace.chrome_trace(gpipe(2, 3, transfer=4.0), 2)
    sent = bars(made, "forward send", 0)
    assert [(e["ts"] / 1e6, e["dur"] / 1e6) for e in sent] == [(1, 4), (5, 4), (9, 4)]
    assert [e["args"]["queued_us"] / 1e6 for e in sent] == [0, 3, 6]
    assert {e["args"]["arrival"] for e in sent} == {"seen"}


def test_arrows_go_from_the_send_to_the_receive_of_the_same_micro_batch():
    made = trace.chrome_trace(gpipe(3, 2, transfer=0.7), 3)
    ends = {}
    for event in made["traceEvents"]:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], {})[event["ph"]] = event
    for both in ends.values():
        assert abs(both["s"]["pid"] - both["f"]["pid"]) == 1
        numbers = []
        for event in both.values():
            (bar,) = [
                e
                for e in made["traceEvents"]
                if e["ph"] == "X"
                and (e["pid"], e["tid"]) == (event["pid"], event["tid"])
                and e["ts"] <= event["ts"] <= e["ts"] + e["dur"]
                and e["name"].endswith(f" {numbers[0] if numbers else e['args']['microbatch']}")
            ][:1]
            numbers.append(bar["args"]["microbatch"])
        assert len(set(numbers)) == 1


def test_one_rank_alone_makes_a_trace_without_arrows():
    spans = [row for row in gpipe(3, 2, transfer=1.0, codec=0.1, steps=2) if row["rank"] == 1]
    made = trace.chrome_trace(spans, 3)
    assert trace.faults(made) == []
    assert not [e for e in made["traceEvents"] if e["ph"] in "sf"]
    assert len(bars(made, "forward send", 1)) == 4
    assert [e["pid"] for e in made["traceEvents"] if e["name"] == "process_name"] == [1]


def test_steps_can_be_chosen_and_the_clock_starts_with_them():
    made = trace.chrome_trace(gpipe(2, 2, steps=5), 2, steps=range(2, 4))
    drawn = [e for e in made["traceEvents"] if e["ph"] == "X"]
    assert {e["args"]["step"] for e in drawn} == {2, 3}
    assert min(e["ts"] for e in drawn) == 0


def test_clocks_of_several_machines_are_aligned():
    spans = gpipe(2, 2, transfer=1.0)
    ahead = [{**r, "start_s": r["start_s"] + 7 * r["rank"], "end_s": r["end_s"] + 7 * r["rank"]} for r in spans]
    aligned, plain = trace.chrome_trace(ahead, 2, offsets={1: 7.0}), trace.chrome_trace(spans, 2)
    assert aligned == plain
    assert trace.chrome_trace(ahead, 2) != plain


def test_the_end_of_a_wait_to_send_never_overlaps_a_frame_on_the_link():
    spans = gpipe(2, 2, transfer=1.0)
    last = max(row["start_s"] for row in spans if row["phase"] == "send" and row["rank"] == 1)
    wait = {**spans[0], "rank": 1, "phase": "wait_send", "direction": "backward", "microbatch": -1}
    made = trace.chrome_trace([*spans, {**wait, "start_s": last, "end_s": last + 1.5}], 2)
    assert trace.faults(made) == []
    (bar,) = [e for e in bars(made, "backward send", 1) if e["cat"] == "wait_send"]
    assert bar["dur"] == pytest.approx(0.5e6)


def test_several_stages_of_a_rank_are_named():
    spans = gpipe(2, 2)
    more = [{**row, "stage": 2 + row["stage"]} for row in spans if row["stage"] is not None]
    made = trace.chrome_trace(spans + more, 2)
    assert [e["args"]["name"] for e in made["traceEvents"] if e["name"] == "process_name"] == [
        "rank 0 (stages 0, 2)",
        "rank 1 (stages 1, 3)",
    ]


def test_no_spans_make_no_events_and_a_failed_write_leaves_nothing(tmp_path):
    assert trace.chrome_trace([], 2)["traceEvents"] == []
    spans = gpipe(2, 2)
    del spans[-1]["phase"]
    with pytest.raises(KeyError):
        trace.write(tmp_path / "trace.json", spans, 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda events: events.remove(next(e for e in events if e["ph"] == "f")), "one end only"),
        (lambda events: next(e for e in events if e["ph"] == "f").update(ts=-5.0), "back in time"),
        (lambda events: next(e for e in events if e["ph"] == "s").update(tid=2, ts=1e12), "outside a bar"),
        (lambda events: next(e for e in events if e["ph"] == "X").update(dur=-1.0), "no length"),
        (lambda events: next(e for e in events if e["ph"] == "X").update(dur=1e9), "overlap"),
    ],
)
def test_faults_finds_what_is_wrong(damage, message):
    made = trace.chrome_trace(gpipe(2, 2, transfer=1.0), 2)
    damage(made["traceEvents"])
    assert any(message in fault for fault in trace.faults(made))


# --- the figure ---


def tables(spans, *, microbatches, groups=1, fidelity="ok"):
    table = pd.DataFrame(spans)
    ends = table.groupby(["rank", "step"]).agg(start=("start_s", "min"), end=("end_s", "max")).reset_index()
    steps = ends.assign(run_id=table["run_id"][0], measured=ends["step"] > 0, step_time_s=ends["end"] - ends["start"])
    run = {"run_id": table["run_id"][0], "experiment": "made-up", "part": "timing", "arm": "AQ-SGD fw4 bw8"}
    runs = pd.DataFrame([run | {"groups": groups, "microbatches": microbatches, "fidelity": fidelity}])
    return {"runs": runs, "steps": steps, "spans": table}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_chart_shows_every_micro_batch_and_says_both_fractions(ranks):
    spans = gpipe(ranks, 4, transfer=0.5, codec=0.05, steps=4)
    fig = drawing.drawn(chart.figures(tables(spans, microbatches=4)))
    drawing.check_layout(fig)
    assert len([t for t in fig.axes[0].texts if t.get_text() == "3"]) == 2 * 2 * ranks  # steps, directions
    caption = drawing.caption_of(fig)
    want = timeline.medians(timeline.fractions(spans, ranks), (1, 2, 3))
    assert f"bubble {want['bubble_fraction']:.0%}" in caption
    if ranks > 1:
        assert f"work {want['overlap_fraction']:.0%}" in caption
        assert f"{timeline.ideal_bubble(ranks, 4):.0%})" in caption
    assert "flagged" not in caption


def test_the_chart_of_two_groups_and_of_a_flagged_run():
    spans = gpipe(2, 2, groups=2, steps=3, transfer=0.2)
    fig = drawing.drawn(chart.figures(tables(spans, microbatches=2, groups=2, fidelity="cpu-bound")))
    drawing.check_layout(fig)
    labels = [t.get_text().replace("\n", " ") for t in fig.axes[0].get_yticklabels()]
    assert labels == ["rank 0 stage 0", "rank 1 stage 1", "rank 2 stage 0", "rank 3 stage 1"]
    assert "flagged: cpu-bound" in drawing.caption_of(fig)


def test_several_stages_of_a_rank_have_their_own_shades():
    spans = gpipe(2, 2, steps=2)
    late = [
        {**r, "stage": r["stage"] + 2, "start_s": r["start_s"] + 20, "end_s": r["end_s"] + 20}
        for r in spans
        if r["stage"] is not None
    ]
    fig = drawing.drawn(chart.figures(tables([*spans, *late], microbatches=2)))
    assert {"forward, first stage", "forward, second stage"} <= set(drawing.legend_of(fig))


def test_the_chart_is_of_one_run():
    one = tables(gpipe(2, 2), microbatches=2)
    two = {**one, "spans": pd.concat([one["spans"], one["spans"].assign(run_id="1" * 12)])}
    with pytest.raises(UserError, match="of one run, not of 2"):
        chart.figures(two)
    with pytest.raises(UserError, match="nothing to draw"):
        chart.figures({**one, "spans": one["spans"].head(0)})


@pytest.mark.parametrize(
    ("times", "measured", "wanted"),
    [
        ([9.0, 1.0, 5.0, 2.0, 1.0], range(1, 5), range(1, 3)),
        ([9.0, 3.0, 1.0, 1.0, 1.0, 3.0], range(1, 6), range(2, 4)),
        ([9.0], (), range(1)),
        ([9.0, 2.0], (1,), range(1, 2)),
    ],
)
def test_typical_steps_are_measured_ones_near_the_median(times, measured, wanted):
    steps = pd.DataFrame([{"step": i, "step_time_s": t, "measured": i in measured} for i, t in enumerate(times)])
    assert chart.typical(steps) == wanted
