"""The simulator against what is known by formula: GPipe and 1F1B, links, buckets, and that nothing is lost."""

import math
import random
import time

import pytest

from thinpipe.harness.simulation.model import (
    BACKWARD,
    FORWARD,
    PARTS,
    Bucket,
    Link,
    Message,
    Overheads,
    Pipeline,
    Times,
    orders,
    ring_s,
)
from thinpipe.harness.simulation.steps import simulate, steps, transfer_s


def link(rate, delay=0.0, **more):
    return Link(((0.0, rate),), delay, **more)


ONE = Times(1.0, 3.0)


def pipe(schedule="gpipe", stages=4, microbatches=8, times=ONE, **more):
    return Pipeline((times,) * stages, orders(schedule, stages, microbatches), microbatches, **more)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (4, 4), (4, 8), (3, 16)])
def test_equal_stages_without_transfers_take_gpipes_time_and_have_its_bubble(schedule, stages, microbatches):
    found = simulate(pipe(schedule, stages, microbatches))
    assert found.step_time_s == pytest.approx((microbatches + stages - 1) * 4.0)
    assert found.bubble_fraction == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert found.critical_s["compute"] == pytest.approx(found.step_time_s)


@pytest.mark.parametrize("transfer", [0.25, 2.0, 5.0])
def test_gpipe_with_transfers_is_the_closed_form(transfer):
    """A phase: t_c + (K-1)(t_c + t_m) + (M-1) max(t_c, t_m), forward and backward, the last stage's first backward
    right behind its last forward; for t_m below and above t_c."""
    forward, backward, stages, pieces = 1.0, 3.0, 4, 8
    found = simulate(pipe(forward=Message(transfer), backward=Message(transfer), link=link(1.0)))

    def phase(t):
        return t + (stages - 1) * (t + transfer) + (pieces - 1) * max(t, transfer)

    assert found.step_time_s == pytest.approx(phase(forward) + phase(backward))
    assert found.links[0].busy_s == pytest.approx(pieces * transfer)


def test_two_stages_one_microbatch_is_the_sum_of_everything():
    found = simulate(
        pipe(
            stages=2,
            microbatches=1,
            times=Times(1.0, 2.0, 0.5),
            forward=Message(10.0, 0.1, 0.2),
            backward=Message(20.0, 0.3, 0.4),
            link=link(10.0, 0.25),
            exchange_s=0.7,
            sync_s=0.6,
            overheads=Overheads(0.01, 0.02, 0.05),
        )
    )
    forth = 1.0 + 0.1 + 1.0 + 0.25 + 0.2 + 1.0
    back = 2.0 + 0.3 + 2.0 + 0.25 + 0.4 + 2.0
    own = 4 * 0.01 + 2 * 0.02 + 0.05
    assert found.step_time_s == pytest.approx(forth + back + 0.7 + 0.6 + 0.5 + own)
    expected = {"compute": 6.0, "codec": 1.0, "transfer": 3.0, "delay": 0.5, "exchange": 0.7, "sync": 0.6}
    expected |= {"optimizer": 0.5, "overhead": own}
    assert found.critical_s == pytest.approx(expected)
    assert set(expected) == set(PARTS)
    assert found.codec_s == pytest.approx((0.5, 0.5))
    assert found.compute_s == pytest.approx((3.5, 3.5))


def test_without_synchronisation_a_rank_that_is_done_does_not_wait():
    uneven = (Times(1.0, 1.0, 4.0), Times(1.0, 1.0, 0.0))
    together = Pipeline(uneven, orders("gpipe", 2, 2), 2, sync_s=0.0)
    apart = Pipeline(uneven[::-1], orders("gpipe", 2, 2), 2, sync_s=None)
    assert simulate(together).step_time_s == 6.0 + 4.0
    assert simulate(apart).step_time_s == 5.0 + 4.0, "the last stage updates while the first one still goes back"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_critical_path_adds_up_and_bytes_are_kept(schedule):
    rng = random.Random(schedule)
    for _ in range(20):
        stages, pieces = rng.randint(2, 5), rng.randint(5, 9)
        made = [[Message(*(rng.random() for _ in range(3))) for _ in range(stages - 1)] for _ in range(2)]
        pairs = [(i, j) for i in range(stages) for j in (i - 1, i + 1) if 0 <= j < stages]
        links = {pair: link(rng.uniform(0.2, 2.0), rng.random()) for pair in pairs}
        times = [Times(*(rng.random() for _ in range(3))) for _ in range(stages)]
        asked = Pipeline(
            times, orders(schedule, stages, pieces), pieces, forward=made[0], backward=made[1], links=links,
            overheads=Overheads(rng.random(), rng.random(), rng.random()),
        )  # fmt: skip
        found = simulate(asked)
        assert sum(found.critical_s.values()) == pytest.approx(found.step_time_s)
        sent = {(use.source, use.destination): (use.messages, use.wire_bytes) for use in found.links}
        assert sent == {
            pair: (pieces, pytest.approx(pieces * made[pair[1] < pair[0]][min(pair)].wire_bytes)) for pair in pairs
        }
        for rank, own in enumerate(times):
            assert found.compute_s[rank] == pytest.approx(pieces * (own.forward_s + own.backward_s) + own.optimizer_s)


def test_a_faster_link_is_never_slower_and_a_longer_one_never_sooner():
    def at(rate, delay, schedule):
        return simulate(
            pipe(schedule, forward=Message(2.0, 0.1, 0.1), backward=Message(1.0), link=link(rate, delay))
        ).step_time_s

    for schedule in ("gpipe", "1f1b"):
        by_rate = [at(2.0**k, 0.1, schedule) for k in range(-3, 8)]
        assert by_rate == sorted(by_rate, reverse=True)
        assert by_rate[0] > 2 * by_rate[-1]
        by_delay = [at(1.0, 0.2 * k, schedule) for k in range(8)]
        assert by_delay == sorted(by_delay)


def test_messages_of_one_direction_queue_and_directions_do_not_meet():
    uneven = {(0, 1): link(0.5), (1, 0): link(100.0)}
    found = simulate(pipe(stages=2, microbatches=4, forward=Message(1.0), backward=Message(1.0), links=uneven))
    # 1 s of compute, then four messages of 2 s, then four times forward and backward of the last.
    assert found.step_time_s == pytest.approx(1.0 + 4 * 2.0 + 1.0 + 3.0 + 3 * 3.0 + 0.01 + 3.0)
    assert [use.busy_s for use in found.links] == pytest.approx([8.0, 0.04])
    assert found.busiest.destination == 1


def test_the_first_message_waits_until_the_receiver_has_said_that_it_listens():
    found = simulate(pipe(stages=2, microbatches=1, times=Times(0.1, 0.1), link=link(math.inf, 1.0)))
    # 0.1 s of compute, then to the second at which the word has come, a delay, and back.
    assert found.step_time_s == pytest.approx(1.0 + 1.0 + 0.2 + 1.0 + 0.1)
    assert sum(found.critical_s.values()) == pytest.approx(found.step_time_s)


def test_a_link_that_changes_is_followed_through_its_changes_and_steps():
    changing = Link(((0.0, 1.0), (3.0, 4.0), (5.0, 0.5)))
    one = pipe(stages=2, microbatches=1, times=Times(1.0, 1.0), forward=Message(6.0), link=changing)
    found = simulate(one)
    # From second 1: 2 B until 3, then 4 B by second 4.
    assert found.step_time_s == pytest.approx(1.0 + 3.0 + 1.0 + 1.0 + 1.0)
    assert found.links[0].busy_s == pytest.approx(3.0)
    later = steps(one, 3)
    assert later[0] == found
    assert later[1].step_time_s == pytest.approx(1.0 + 12.0 + 3.0), "0.5 B a second by then"
    assert later[2].step_time_s == pytest.approx(later[1].step_time_s)


def test_a_bucket_lets_the_last_chunk_and_its_bursts_through_and_keeps_the_rate():
    bucket = Bucket(burst_bytes=400.0, peak_bytes=100.0, peak=1.02, chunk_bytes=50.0)
    shaped = link(1000.0, bucket=bucket)
    # 1000 B: 950 before the last chunk, 100 of them free, the rest at 1.02 x the rate.
    assert transfer_s(shaped, 1000.0) == pytest.approx((950 - 100) / 1020)
    assert transfer_s(shaped, 40.0) == 0.0
    # Far more than the bursts: the rate, less the larger burst and a chunk.
    assert transfer_s(shaped, 100_000.0) == pytest.approx((100_000 - 50 - 400) / 1000)
    assert transfer_s(link(1000.0, 0.2), 1000.0) == pytest.approx(1.0)


def test_many_messages_through_a_bucket_keep_to_the_rate():
    bucket = Bucket(burst_bytes=400.0, peak_bytes=100.0, peak=1.02, chunk_bytes=50.0)
    many = pipe(
        stages=2, microbatches=400, times=Times(0.0, 0.0), forward=Message(60.0), link=link(100.0, bucket=bucket)
    )
    assert simulate(many).step_time_s == pytest.approx(400 * 60 / 100, rel=0.03)


def test_orders_are_those_of_torch_and_every_pass_has_its_own():
    first = list(orders("1f1b", 3, 4)[0])
    kinds = "".join("FB"[kind == BACKWARD] + str(i) for kind, _, i in first)
    assert kinds == "F0F1F2B0F3B1B2B3"
    last = "".join("FB"[kind == BACKWARD] + str(i) for kind, _, i in orders("1f1b", 3, 4)[2])
    assert last == "F0B0F1B1F2B2F3B3"
    twice = [(kind, i) for kind, _, i in orders("gpipe", 1, 2, passes=2)[0]]
    assert twice == [(FORWARD, 0), (FORWARD, 1), (BACKWARD, 0), (BACKWARD, 1), (0, 2), (0, 3), (1, 2), (1, 3)]


def test_two_passes_take_twice_as_long():
    one, two = (
        Pipeline((Times(1.0, 2.0),) * 3, orders("gpipe", 3, 4, passes=n), 4 * n, forward=Message(0.5), link=link(1.0))
        for n in (1, 2)
    )
    assert simulate(two).step_time_s == pytest.approx(2 * simulate(one).step_time_s)


def test_orders_that_wait_for_each_other_are_told():
    crossed = [[(BACKWARD, 0, 0), (FORWARD, 0, 0)], [(FORWARD, 1, 0), (BACKWARD, 1, 0)]]
    with pytest.raises(AssertionError, match="in a circle: rank 0 at"):
        simulate(Pipeline((Times(1.0, 1.0),) * 2, crossed, 1))


def test_what_does_not_fit_is_refused():
    with pytest.raises(AssertionError, match="every micro-batch goes forward and back"):
        simulate(Pipeline((ONE,), [[(FORWARD, 0, 0)]], 1))
    with pytest.raises(AssertionError, match="a message a boundary"):
        simulate(pipe(stages=3, forward=[Message()]))
    with pytest.raises(AssertionError, match=r"begin at 0\.0"):
        Link(((1.0, 5.0),))
    with pytest.raises(AssertionError, match="a bucket has one rate"):
        Link(((0.0, 5.0), (1.0, 2.0)), bucket=Bucket(1.0, 1.0, 1.0, 1.0))


def test_rounds_of_a_ring_by_formula():
    assert ring_s(3000.0, 4, link(1000.0, 0.1), 0.05) == pytest.approx(3.0 + 6 * 0.15)


def test_thousands_of_stages_take_seconds():
    start = time.process_time()
    found = simulate(pipe("1f1b", 4096, 4, forward=Message(1.0), backward=Message(1.0), link=link(1.0, 0.01)))
    assert found.step_time_s == pytest.approx(4096 * (1 + 3) + 2 * 4095 * 1.01 + 3 * (1 + 3), rel=0.01)
    assert time.process_time() - start < 5
