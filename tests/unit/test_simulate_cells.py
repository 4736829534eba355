"""Cells simulated: what a spec becomes, other networks and depths, and what measured runs make of predictions."""

import itertools
import json
from types import SimpleNamespace

import pandas as pd
import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from thinpipe.harness import experiment
from thinpipe.harness.errors import UserError
from thinpipe.harness.simulation import cells, report, steps, wan
from thinpipe.harness.simulation.cells import Setting
from thinpipe.harness.simulation.cluster import cluster
from thinpipe.harness.simulation.costs import Codecs, Constants, fitted, latencies, of_runs, residue
from thinpipe.harness.simulation.model import BACKWARD, FORWARD, Overheads, Times, orders
from thinpipe.harness.spec import parse
from thinpipe.netem.link import LinkSpec

# Times of messages are given, so that no codec has to be timed.
TEXTS = ("none", "fixpoint:4", "delta(fixpoint:4)", "topk:0.1")
SHAPES = [(size, 64, 256) for size in (1, 2, 4, 8, 16)]
GIVEN = dict.fromkeys(itertools.product(TEXTS, ("forward", "backward"), SHAPES), (1e-4, 2e-4))
NOTHING = Setting(constants=Constants(Overheads(), 0.0))


def replay(**changes):
    data = {
        "compute": "replay",
        "profile": "grid-fast",
        "measure": "timing",
        "model": {"layers": 4, "width": 256, "heads": 4},
        "task": {"sequence_length": 64},
        "train": {"batch_size": 8},
        "pipeline": {"microbatches": 8},
    }
    for key, value in changes.items():
        data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) else value
    return parse(data)


def predict(spec, setting=NOTHING):
    found = cells.profile_of(spec, setting)
    return steps.simulate(cells.pipeline(spec, found, setting, Codecs(GIVEN)))


@pytest.fixture(scope="module")
def grid():
    return experiment.load("replay_grid")


# --- a spec ---


def test_a_replay_without_a_limit_takes_its_waits_and_codecs():
    found = predict(replay())
    # Stages of two blocks: 3 ms and 6 ms, 1 ms an update of a block; 0.1 ms to encode and 0.2 ms to decode.
    forward, backward = 3e-3 + 1e-4 + 2e-4 + 7 * 3.2e-3 + 3e-3, 6.3e-3 + 7 * 6.2e-3 + 6e-3
    assert found.step_time_s == pytest.approx(forward + backward + 2e-3, rel=0.01)
    assert found.codec_s == pytest.approx((8 * 3e-4,) * 2)


def test_wire_bytes_are_those_of_numbers_md():
    found = predict(replay(network={"rate_mbit": 100}))
    message = 65536 + 64 + 96
    assert [use.wire_bytes for use in found.links] == [8 * (message + 66 * -(-message // 1448))] * 2
    coded = predict(replay(compression={"forward": "delta(fixpoint:4)", "backward": "fixpoint:4"}))
    message = 64 * 256 // 2 + 2 * 256 + 64 + 96
    assert [use.wire_bytes for use in coded.links] == [8 * (message + 66 * -(-message // 1448))] * 2


def test_passes_of_a_step_follow_each_other():
    one, two = (predict(replay(train={"batch_size": 8 * n, "accumulate": n})) for n in (1, 2))
    assert two.step_time_s - 2e-3 == pytest.approx(2 * (one.step_time_s - 2e-3), rel=0.02)


def test_a_shaped_link_is_the_one_that_tc_is_told():
    made = cells.lab_link(LinkSpec(rate_mbit=100.0))
    assert made.rates == ((0.0, 12.5e6),)
    # 4 ms and 50 us of the rate (at least 1600 B), 12500 B of GSO: 8 segments.
    assert (made.bucket.burst_bytes, made.bucket.peak_bytes, made.bucket.chunk_bytes) == (50_000, 1600, 8 * 1514)
    assert made.bucket.peak == pytest.approx(1.02)
    assert cells.lab_link(LinkSpec()).bucket is None


def test_norms_are_exchanged_only_where_they_are_global():
    slow = Setting(constants=Constants(Overheads(), 0.5))
    assert predict(replay(), slow).critical_s["sync"] == 0.5
    assert predict(replay(pipeline={"stages": 4}), slow).critical_s["sync"] == 1.5
    assert predict(replay(train={"clip_norm": None}), slow).critical_s["sync"] == 0.0


def test_data_groups_average_after_the_backward_pass():
    profile = "grid-fast"
    alone = replay(compute="real", profile=None, network={"rate_mbit": 100})
    pair = replay(
        compute="real", profile=None, network={"rate_mbit": 100}, data_parallel={"groups": 2}, train={"batch_size": 16}
    )
    setting = Setting(profile=profile, constants=Constants(Overheads(), 0.0))
    exchange = predict(pair, setting).critical_s["exchange"]
    assert predict(alone, setting).critical_s["exchange"] == 0.0
    parameters = 2 * (12 * 256 * 256)
    # Of two groups each sends all it has once: 4 B an element, and headers.
    assert exchange == pytest.approx(4 * parameters * 8 / 100e6, rel=0.35)
    assert exchange > 4 * parameters * 8 / 100e6


class Recorded:
    """A stage of torch's that notes what its schedule has it do."""

    has_backward = True
    group = None

    def __init__(self, stage, stages):
        self.stage_index, self.num_stages, self.did = stage, stages, []
        self.is_first, self.is_last = stage == 0, stage == stages - 1

    def forward_one_chunk(self, i, *args, **kwargs):
        self.did.append((FORWARD, self.stage_index, i))

    def backward_one_chunk(self, i, *args, **kwargs):
        self.did.append((BACKWARD, self.stage_index, i))

    def nothing(self, *args):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = perform_reduce_grad = nothing


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_orders_are_torchs_own(schedule, rank, monkeypatch):
    stage = Recorded(rank, 4)
    made = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule](stage, 6, loss_fn=lambda a, b: a)
    for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        monkeypatch.setattr(made, name, lambda *args, **kwargs: None)
    made._step_microbatches([()] * 6, [{}] * 6, [None] * 6, [])
    assert list(orders(schedule, 4, 6)[rank]) == stage.did


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "looped-bfs", "interleaved-zb", "zbv-zb", "dualpipev"])
def test_several_stages_a_rank_do_every_microbatch_once(schedule):
    spec = parse(
        {
            "pipeline": {"stages": 4, "stages_per_rank": 2, "schedule": schedule, "microbatches": 4},
            "train": {"batch_size": 4},
            "model": {"layers": 4, "width": 256, "heads": 4},
        }
    )
    setting = Setting(profile="grid-fast", constants=Constants(Overheads(), 0.0))
    found = predict(spec, setting)
    assert found.compute_s == pytest.approx((4 * 9e-3 + 2 * 1e-3,) * 2), "two blocks a rank, four micro-batches"
    assert found.step_time_s > 38e-3
    per_boundary = {0: 4, 1: 4, 2: 4}
    if schedule in ("zbv-zb", "dualpipev"):
        del per_boundary[1]
    assert sum(use.messages for use in found.links) == 2 * sum(per_boundary.values())


def test_interleaving_shrinks_the_bubble():
    data = {"model": {"layers": 4, "width": 256, "heads": 4}, "train": {"batch_size": 4}}
    setting = Setting(profile="grid-fast", constants=Constants(Overheads(), 0.0))
    plain = predict(parse({**data, "pipeline": {"stages": 2, "microbatches": 4}}), setting)
    several = {"stages": 4, "stages_per_rank": 2, "schedule": "interleaved-1f1b", "microbatches": 4}
    assert predict(parse({**data, "pipeline": several}), setting).bubble_fraction < plain.bubble_fraction


# --- other networks, other depths ---


def test_a_deeper_pipeline_has_inner_stages_like_its_own():
    spec = replay(pipeline={"stages": 4})
    one, many = (predict(spec, Setting(stages=n, constants=NOTHING.constants)) for n in (4, 64))
    assert one.step_time_s == pytest.approx(predict(spec).step_time_s)
    # Each stage more adds its forward and backward, and both messages' codecs, once.
    assert many.step_time_s - one.step_time_s == pytest.approx(60 * (4.5e-3 + 2 * 3e-4), rel=0.01)


def test_the_ten_regions_are_whole():
    found = wan.load("ten-regions")
    assert len(found.regions) == 10
    for a, b in itertools.combinations(found.regions, 2):
        assert found.link(a, b) == found.link(b, a)
        assert 0.011 <= found.link(a, b).delay_s <= 0.265
    given = {
        ("Oregon", "Virginia"): (67, 790), ("Virginia", "Ohio"): (11, 1120), ("Oregon", "Singapore"): (163, 341),
        ("Sydney", "Frankfurt"): (265, 328),
    }  # fmt: skip
    for pair, (delay, rate) in given.items():
        link = found.link(*pair)
        assert (link.delay_s, link.rates[0][1]) == (pytest.approx(delay / 1e3), pytest.approx(rate * 1e6 / 8))


def test_the_best_order_is_found_where_every_order_can_be_tried():
    whole = wan.load("ten-regions")
    kept = range(4, 10)
    few = wan.Wan(
        "few", "", tuple(whole.regions[i] for i in kept), *(tuple(tuple(rows[i][j] for j in kept) for i in kept)
                                                            for rows in (whole.delay_s, whole.rates)),
    )  # fmt: skip

    def cost(order):
        links = [few.link(a, b) for a, b in itertools.pairwise(order)]
        times = [1e6 / link.rates[0][1] for link in links]
        return sum(times) + sum(link.delay_s for link in links) + 7 * max(times)

    best = min(cost(order) for order in itertools.permutations(few.regions))
    assert cost(wan.best_order(few, 6, 1e6, 8)) == pytest.approx(best)
    assert cost(few.regions) > 1.05 * best, "the order given is no good one, so there was something to find"


def test_stages_over_the_world_take_longer_and_longer_in_the_order_given():
    spec = replay(pipeline={"stages": 4})
    world = wan.load("ten-regions")
    rows = {}
    for order in ("given", "best"):
        setting = Setting(stages=20, wan=world, order=order)
        cell = SimpleNamespace(runs=((0, spec),), part="p", arm="a", cell_id="c")
        rows[order] = cells.row(cell, setting, Codecs(GIVEN))
        assert rows[order]["regions"][:2] == [rows[order]["regions"][0]] * 2
        assert set(rows[order]["regions"]) == set(world.regions)
    assert rows["best"]["predicted_step_time_s"] < rows["given"]["predicted_step_time_s"]
    text = "\n".join(cluster(rows["best"], spec, setting))
    assert "20 hosts" in text
    assert "Ireland - London: 1090 Mbit/s, 12 ms one way" in text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"regions": ["a", "a"]}, "different names"),
        ({"delay_ms": [[1, 2]]}, "2 rows of 2"),
        ({"rate_mbit": [[1, 0], [1, 1]]}, r"rate_mbit\[0\]\[1\] must be a number from 0.001, not 0"),
        ({"rate_mbit": [[1, [[1, 5]]], [1, 1]]}, "begin at 0 and rise"),
        ({"more": 1}, "nothing else"),
    ],
)
def test_a_matrix_that_cannot_be_is_refused(tmp_path, changed, message):
    good = {"name": "n", "source": "s", "regions": ["a", "b"], "delay_ms": [[1, 2], [2, 1]],
            "rate_mbit": [[9, [[0, 5], [2, 7.5]]], [8, 9]]}  # fmt: skip
    path = tmp_path / "n.json"
    path.write_text(json.dumps(good))
    assert wan.load(str(path)).link("a", "b").rates == ((0.0, 625_000.0), (2.0, 937_500.0))
    path.write_text(json.dumps(good | changed))
    with pytest.raises(UserError, match=message):
        wan.load(str(path))


def test_what_cannot_be_simulated_says_what_to_do():
    with pytest.raises(UserError, match=r"Did you mean 'ten-regions'"):
        wan.load("ten-region")
    real = parse({"pipeline": {"stages": 4}})
    with pytest.raises(UserError, match="thinpipe profile"):
        predict(real, Setting())
    with pytest.raises(UserError, match="does not fit the run"):
        predict(real, Setting(profile="grid-fast"))
    with pytest.raises(UserError, match=r"pipeline\.microbatches=9 or more"):
        predict(replay(pipeline={"schedule": "1f1b"}), Setting(stages=9))
    with pytest.raises(UserError, match="is not worked out"):
        predict(replay(network={"rate": "rho:2.0"}))


# --- measured runs ---


def test_the_grid_has_cells_enough_beside_those_that_constants_are_fitted_to(grid):
    assert {part.name for part in grid.parts} > {report.FITTED}
    tested = [cell for cell in grid.cells() if cell.part != report.FITTED]
    assert len(tested) >= 40
    assert len({cell.cell_id for cell in grid.cells()}) == len(list(grid.cells())), "no cell is both"
    some = [cell for cell in grid.cells() if cell.arm in ("FP32", "AQ-SGD fw4 bw4")]
    found = report._rows(some, Setting(), Codecs(GIVEN))
    assert all(row["beyond"] is None for row in found)
    by_transfer = [row["transfer_share"] for row in found if row["part"] != report.FITTED]
    assert min(by_transfer) < 0.1
    assert sum(share > 0.3 for share in by_transfer) >= 8
    assert max(row["predicted_step_time_s"] for row in found) < 2.5


def rows(*pairs, spread=0.0, **more):
    return [
        {"part": "p", "arm": "a", "rate_mbit": 10.0, "predicted_step_time_s": predicted, "fitted": False,
         "measured_step_time_s": measured, "spread": spread, "runs": 3, "flagged_runs": 0, **more}
        for predicted, measured in pairs
    ]  # fmt: skip


def test_the_verdict_is_over_unflagged_cells_that_nothing_was_fitted_to():
    good = rows(*[(1.04, 1.0)] * 30)
    flagged, missing = rows((2.0, None), flagged_runs=2, runs=0), rows((2.0, None), runs=0)
    fitted_to = rows((2.0, 1.0), fitted=True)
    found = report.verdict([*good, *flagged, *missing, *fitted_to])
    assert found == {
        "cells": 30, "fitted": 1, "flagged": 1, "missing": 1, "median_error": pytest.approx(0.04),
        "worst_error": pytest.approx(0.04), "beyond": [], "holds": True,
    }  # fmt: skip
    assert not report.verdict(good[:29])["holds"], "too few"
    assert not report.verdict(rows(*[(1.06, 1.0)] * 30))["holds"], "the median"
    one_off = report.verdict([*good, *rows((0.85, 1.0))])
    assert (one_off["holds"], one_off["beyond"]) == (False, ["p / a / 10 Mbit/s"])
    assert report.verdict([*good, *rows((0.85, 1.0), spread=0.08)])["holds"], "as far apart as its own repeats"


def span(phase, start, end, rank=0, **more):
    return {"rank": rank, "step": 3, "microbatch": 0, "phase": phase, "direction": None, "boundary": None,
            "start_s": start, "end_s": end, **more}  # fmt: skip


def test_constants_are_what_spans_leave_unnamed():
    spec = replay(train={"batch_size": 1}, pipeline={"microbatches": 1})
    over = {"direction": "forward", "boundary": 0}
    back = {"direction": "backward", "boundary": 0}
    spans = pd.DataFrame(
        [
            span("forward_compute", 0.001, 0.0045),  # 3 ms by the profile
            span("encode", 0.005, 0.006, **over),
            span("send", 0.006, 0.0061, **over),
            span("wait_receive", 0.0065, 0.0225, **back),
            span("decode", 0.0225, 0.0235, **back),
            span("backward_compute", 0.024, 0.0305),  # 6 ms
            span("wait_receive", 0.001, 0.010, rank=1, **over),
            span("decode", 0.010, 0.011, rank=1, **over),
            span("forward_compute", 0.0115, 0.0150, rank=1),
            span("backward_compute", 0.0150, 0.0210, rank=1),
            span("encode", 0.0211, 0.0212, rank=1, **back),
            span("send", 0.0212, 0.0213, rank=1, **back),
        ]
    )
    steps = pd.DataFrame({"rank": [0, 1], "step": [3, 3], "step_time_s": [0.036, 0.0345], "sync_s": [0.0007, 0.009]})
    found = residue(spec, [Times(3e-3, 6e-3, 2e-3)] * 2, steps, spans)
    # Rank 0: 29.5 ms, of which 9 by the profile, 2 codecs, 16 for frames: 2.5 ms in two actions. Rank 1: 20.2, 9, 1.1
    # and 9: 1.1 ms.
    assert found.action_s == pytest.approx((2.5e-3 / 2 + 1.1e-3 / 2) / 2)
    assert found.step_s == pytest.approx(((36 - 29.5 - 0.7 - 2) + (34.5 - 20.2 - 9 - 2)) / 2 * 1e-3)
    assert found.sync_round_s == 0.0007
    late = list(latencies(spans, {("forward", 0): 0.003, ("backward", 0): 0.001}))
    assert late == pytest.approx([0.0225 - 0.0212 - 0.001, 0.010 - 0.006 - 0.003])
    made = fitted([found], late)
    assert made.overheads.message_s == pytest.approx(0.00065)
    assert made.sync_round_s == 0.0007


def test_codecs_of_runs_are_told_apart_by_text_direction_and_shape():
    spec = replay(compression={"forward": "delta(fixpoint:4)"})
    over = {"direction": "forward", "boundary": 0}
    back = {"direction": "backward", "boundary": 0}
    spans = pd.DataFrame(
        [span("encode", 0.0, 0.1 * n, **over) for n in (1, 2, 9)]
        + [span("decode", 0.0, 0.4, rank=1, **over), span("encode", 0.0, 0.5, rank=1, **back)]
        + [span("decode", 0.0, 0.6, **back), span("forward_compute", 0.0, 1.0)]
    )
    assert of_runs([(spec, spans)]) == {
        ("delta(fixpoint:4)", "forward", (1, 64, 256)): pytest.approx((0.2, 0.4)),
        ("none", "backward", (1, 64, 256)): pytest.approx((0.5, 0.6)),
    }
