"""What our memories keep: rows by identity, their digest, their formats, and their place in RAM or on disk."""

import math
import os
import random
import resource
import threading

import pytest
import torch
from toy_codecs import Fitted, Masked, Sparse

from thinpipe.harness.compression import disk, grammar, keys
from thinpipe.harness.compression.base import Context
from thinpipe.harness.compression.codecs.fixpoint import FixedPoint
from thinpipe.harness.compression.disk import WINDOW, Disk, Ram
from thinpipe.harness.compression.rows import CastRows, CodeRows
from thinpipe.harness.errors import CodecError, UserError

ROW = (5, 16)


def data(count, row=ROW, seed=0):
    return torch.randn((count, *row), generator=torch.Generator().manual_seed(seed))


def context(ids, row=ROW, **more):
    return Context((len(ids), *row), sample_ids=tuple(ids), **more)


def put(rows, ids, values, **more):
    ctx = context(ids, tuple(values.shape[1:]), **more)
    rows.put(ids, rows.prepare(values, ids, ctx), ctx)


def load(rows, ids, row=ROW):
    return rows.load(ids, context(ids, row), torch.full((len(ids), *row), 9.0))


def codec():
    made = FixedPoint(bits=8, rounding="stochastic")
    made.name = "fixpoint:8(rounding=stochastic)"
    return made


@pytest.fixture(params=["bf16", "fp32", "codes"])
def make(request, tmp_path):
    def build(capacity=None, store=None):
        store = store or Ram()
        if request.param == "codes":
            return CodeRows(capacity, codec(), store)
        return CastRows(capacity, request.param, store)

    return build


def test_rows_come_back_and_what_was_never_put_is_zero(make):
    rows, x = make(), data(4)
    put(rows, [7, 3, 7], x[:3])
    assert len(rows) == 2
    found = load(rows, [3, 7, 7, 5])
    assert torch.allclose(found[:3], x[[1, 2, 2]], atol=0.02), "of two rows for one identity the later one"
    assert torch.equal(found[3], torch.zeros(ROW))
    put(rows, [3], x[3:])
    assert torch.allclose(load(rows, [3])[0], x[3], atol=0.02)


def test_the_digest_sees_every_row_and_not_the_order(make):
    one, two, x = make(), make(), data(4)
    empty = one.digest()
    for rows, order in ((one, (0, 1, 2, 3)), (two, (3, 1, 0, 2))):
        for i in order:
            put(rows, [i], x[i : i + 1])
            if rows is one:
                rows.digest()
    assert one.digest() == two.digest() != empty
    for i in range(4):
        row = one.data[one.slots[i]].view(torch.uint8)
        row[-1] ^= 1
        one.touched([i])
        assert one.digest() != two.digest()
        row[-1] ^= 1
        one.touched([i])
        assert one.digest() == two.digest()
    swapped = make()
    put(swapped, [1, 0, 2, 3], x)
    assert swapped.digest() != one.digest()


def test_rows_are_allocated_once_where_their_number_is_known(make):
    rows = make(capacity=10)
    put(rows, [0, 1], data(2))
    assert rows.data.numel() * rows.data.itemsize == 10 * rows.row_bytes(ROW)
    address = rows.data.data_ptr()
    for first in (2, 4, 6, 8):
        put(rows, [first, first + 1], data(2))
    assert rows.data.data_ptr() == address
    with pytest.raises(CodecError, match="made for 10 samples"):
        put(rows, [9, 10], data(2))
    assert len(rows) == 10
    soon = make()
    soon.expected = 6
    for first in (0, 2, 4):
        put(soon, [first, first + 1], data(2))
    assert len(soon.data) == 6


def test_rows_of_another_shape_are_refused(make):
    rows = make()
    put(rows, [0], data(1))
    with pytest.raises(CodecError, match="shape"):
        rows.require_room([0], (3, 16))
    other = make()
    put(other, [0], data(1, (4, 16)))
    with pytest.raises(CodecError, match="shape"):
        put(other, [1], data(1))
    with pytest.raises(CodecError, match="saved memory holds"):
        rows.load_state_dict({**other.state_dict(), "shape": ROW})


def test_rows_by_a_codec_know_their_message(make):
    """What a codec draws must be drawn again to decode a row, long after, and after a restart."""

    class Keyed(FixedPoint):
        """Adds a number drawn from the message's key."""

        def _shift(self, ctx):
            return ctx.key("shift") % 1000 / 10.0

        def encode(self, x, ctx, out):
            return super().encode(x + self._shift(ctx), ctx, out)

        def decode(self, payload, ctx, out):
            return super().decode(payload, ctx, out).sub_(self._shift(ctx))

    def build():
        made = Keyed(bits=8)
        made.name = "keyed"
        return CodeRows(None, made)

    rows, x = build(), data(3)
    for step in range(3):
        put(rows, [step, 5], x[[step, 0]], step=step, seed=4, microbatch=step + 1)
    assert torch.allclose(load(rows, [0, 1, 2, 5]), x[[0, 1, 2, 0]], atol=1.0)
    again = build()
    again.load_state_dict(rows.state_dict())
    assert torch.equal(load(again, [0, 1, 2, 5]), load(rows, [0, 1, 2, 5]))
    assert again.digest() == rows.digest()


@pytest.mark.parametrize(("inner", "why"), [(Sparse(), "fixed length"), (Fitted(), "other"), (Masked(), "other")])
def test_codecs_that_no_row_can_be_kept_by(inner, why):
    with pytest.raises(UserError, match=why):
        CodeRows(None, inner)


def test_values_that_cannot_be_kept():
    rows, ctx, big = CastRows(None, "fp16"), context([0]), torch.full((1, *ROW), 9e4)
    with pytest.raises(CodecError, match="use cache=bf16"):
        rows.prepare(big, [0], ctx)
    CastRows(None, "bf16").prepare(big, [0], ctx)
    for rows in (CastRows(None, "fp32"), CodeRows(None, codec())):
        with pytest.raises(CodecError, match="not finite"):
            rows.prepare(big * math.inf, [0], ctx)
        assert len(rows) == 0


def test_the_largest_magnitude_is_known_after_a_restart():
    rows = CastRows(None, "bf16")
    put(rows, [0, 1], torch.stack([torch.full(ROW, -6.0), torch.full(ROW, 2.0)]))
    again = CastRows(None, "bf16")
    again.load_state_dict(rows.state_dict())
    assert again.largest == rows.largest == 6.0


# --- keys ---


def test_whose_row_a_row_goes_by():
    ctx = context([9, 9, 4], microbatch=2)
    assert keys.identities("sample", ctx, "m") == (9, 9, 4)
    assert keys.identities("slot", ctx, "m") == (6, 7, 8)
    assert keys.identities("batch", ctx, "m") == (0, 0, 0)
    with pytest.raises(CodecError, match="m needs one sample id a row: 0 for 3 rows"):
        keys.identities("sample", Context((3, *ROW)), "m")
    assert [keys.most(key, 100, 4, 8) for key in ("sample", "slot", "batch")] == [100, 32, 1]


def test_the_mean_of_huge_values_is_finite():
    x = data(6)
    assert torch.allclose(keys.mean(x), x.mean(0, keepdim=True), atol=1e-6)
    assert torch.equal(keys.mean(torch.full((7, 2), 3e38)) > 2.99e38, torch.ones(1, 2, dtype=torch.bool))
    assert torch.equal(keys.mean(x[:1]), x[:1])


def test_rows_of_one_identity_are_summed():
    x = data(4)
    ids, sums = keys.folded([3, 1, 3, 3], x)
    assert list(ids) == [3, 1]
    assert torch.equal(sums, torch.stack([x[0] + x[2] + x[3], x[1]]))
    same = keys.folded((1, 2, 3, 4), x)
    assert same[0] == (1, 2, 3, 4)
    assert same[1] is x


# --- disk ---

LARGE = (64, 2048)  # 256 KB a row, in bf16


def resident(tensor):
    """Bytes of a mapping that are in RAM for this process."""
    address, inside = tensor.data_ptr(), False
    with open("/proc/self/smaps", encoding="utf-8") as file:
        for line in file:
            first = line.split()[0]
            if not first.endswith(":"):
                low, high = (int(word, 16) for word in first.split("-"))
                inside = low <= address < high
            elif inside and first == "Rss:":
                return 1024 * int(line.split()[1])
    raise AssertionError("not mapped")


@pytest.mark.parametrize("announced", [True, False])
def test_a_few_messages_rows_are_in_ram_at_once(announced, tmp_path):
    """64 MB of rows, visited in another order each epoch."""
    memory = grammar.build("delta(fixpoint:4, store=disk)", 256, tmp_path)
    x, pick, out = data(8, LARGE), random.Random(1), torch.zeros(4 * 8 * 2**17 + 4096, dtype=torch.uint8)
    most = []
    for steps in (8, 3):
        order = pick.sample(range(256), 256)
        for step in range(steps):
            ids = [order[32 * step + 8 * i : 32 * step + 8 * i + 8] for i in range(4)]
            contexts = [context(mine, LARGE, step=step, microbatch=i) for i, mine in enumerate(ids)]
            if announced:
                memory.prefetch(contexts)
            for ctx in contexts:
                memory.encode(x, ctx, out)
                most.append(resident(memory.rows.data))
                assert most[-1] <= memory.state_bytes(256, (8, *LARGE), 4) == WINDOW * 8 * 2**18
    assert memory.rows.data.numel() * 2 == 2**26
    assert not announced or max(most) > 0
    # Saved and taken up again as frugally.
    again = grammar.build("delta(fixpoint:4, store=disk)", 256, tmp_path)
    again.load_state_dict(memory.state_dict())
    assert resident(again.rows.data) <= WINDOW * 8 * 2**18
    assert again.digest() == memory.digest()
    memory.encode(x, contexts[0], out)
    for event in memory.rows.store._behind:
        event.wait(10)
    assert resident(memory.rows.data) == 0, "what was read to be saved is let go of"
    memory.digest()
    assert resident(memory.rows.data) == 0, "nothing is read again to be hashed"
    assert list(tmp_path.iterdir()) == [], "the file has no name while it is in use, so none is left by a kill"


def test_rows_on_disk_stay_when_the_file_grows(tmp_path):
    rows, x = CastRows(None, "fp32", Disk(tmp_path)), data(40)
    for i in range(40):
        put(rows, [i], x[i : i + 1])
    assert torch.equal(load(rows, list(range(40))), x)
    other = CastRows(None, "fp32")
    put(other, list(range(40)), x)
    assert rows.digest() == other.digest()
    assert torch.equal(rows.state_dict()["rows"], other.state_dict()["rows"])


def test_a_full_disk_is_said_before_anything_is_written(tmp_path):
    memory = grammar.build("ef(fixpoint:4, store=disk, key=sample)", 10**6, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(UserError, match=r"need 0\.30 GiB in .* store=ram"):
            memory.encode(data(2), context([0, 1]), torch.zeros(4096, dtype=torch.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(memory.rows) == 0
    memory.encode(data(2), context([0, 1]), torch.zeros(4096, dtype=torch.uint8))
    assert len(memory.rows) == 2


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"no file for a memory's rows can be made in .*gone"):
        put(CastRows(4, "bf16", Disk(tmp_path / "gone")), [0], data(1))


def test_the_helper_begins_with_the_first_message_and_outlives_a_mistake(capfd):
    def broken():
        raise ValueError("mistaken")

    Disk(None)
    assert disk._ask(broken).wait(10)
    assert disk._ask(lambda: None).wait(10)
    assert "mistaken" in capfd.readouterr().err
    (helper,) = [thread for thread in threading.enumerate() if thread.name == "rows on disk"]
    assert helper.daemon


def test_a_forked_process_has_a_helper_of_its_own(tmp_path):
    assert disk._ask(lambda: None).wait(10)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            memory = grammar.build("ef(fixpoint:4, store=disk)", None, tmp_path)
            for _ in range(6):
                memory.encode(data(2), context([0, 1]), torch.zeros(4096, dtype=torch.uint8))
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_a_disk_that_stands_still_is_told(monkeypatch, tmp_path):
    """Rows that are not written back would fill the RAM, so they are waited for; not for ever."""
    monkeypatch.setattr(disk, "LIMIT_S", 0.05)
    monkeypatch.setattr(disk, "_ask", lambda task: threading.Event())
    store = disk.Disk(tmp_path)
    store.grow(torch.empty((0, 4096), dtype=torch.uint8), 0, (8, 4096), torch.device("cpu"))
    for place in range(WINDOW - 2):
        store.end([place])
    with pytest.raises(CodecError, match="took no rows of a memory"):
        store.end([WINDOW - 2])
