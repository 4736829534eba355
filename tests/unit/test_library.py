"""harness/library.py: the documented example runs, sends what its codecs say, and with none is torch's own stage."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thinpipe.harness import library
from thinpipe.harness.errors import UserError
from thinpipe.harness.library import CompressedPipelineStage

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "compressed_stage.py"
EPOCHS, MICROBATCHES, ROWS, WIDTH = 20, 4, 16, 256


@pytest.fixture(scope="module")
def ran():
    """What tests/library_ranks.py prints, by section."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "library_ranks.py", EXAMPLE],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^--- (.*)\n", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def losses(text):
    """Two processes print: a line may begin where another's ended."""
    return [float(loss) for loss in re.findall(r"epoch \d+ loss ([\d.]+(?:e-\d+)?)", text)]


def sent(text):
    found = re.findall(r"(forward|backward): (\d+) of (\d+) B in (\d+) messages", text)
    return {way: tuple(map(int, numbers)) for way, *numbers in found}


def test_the_example_trains_and_sends_what_its_codecs_say(ran):
    found = losses(ran["as it stands"])
    assert len(found) == EPOCHS
    assert found[-1] < 0.1 * found[0]
    elements, messages = ROWS * WIDTH, EPOCHS * MICROBATCHES
    first, changes = MICROBATCHES * 4 * elements, (messages - MICROBATCHES) * (elements // 2 + 2 * WIDTH)
    assert sent(ran["as it stands"]) == {
        "forward": (first + changes, messages * 4 * elements, messages),
        "backward": (messages * (elements + 2 * WIDTH), messages * 4 * elements, messages),
    }


def test_without_compression_it_is_torchs_stage_bit_for_bit(ran):
    assert losses(ran["none"]) == losses(ran["stock"])
    assert len(losses(ran["none"])) == EPOCHS
    assert losses(ran["none"]) != losses(ran["as it stands"])
    assert all(payload == raw for payload, raw, _ in sent(ran["none"]).values())


def test_an_evaluation_leaves_memories_alone_and_training_goes_on(ran):
    said = ran["evaluation"]
    for evaluation in ("off", "codec"):
        assert f"evaluation {evaluation}: output True" in said
        for rank in (0, 1):
            assert f"evaluation {evaluation} rank {rank}: memory kept True" in said
            assert f"evaluation {evaluation} rank {rank}: goes on True" in said


def test_ids_and_micro_batches_that_do_not_fit_are_refused(ran):
    for rank in (0, 1):
        assert f"rank {rank}: 3 ids are not 2 micro-batches of 2 samples." in ran["evaluation"]
        assert f"rank {rank}: the schedule has 4 micro-batches, the stage was made for 2." in ran["evaluation"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": torch.device("cuda")}, "device cuda: frames are sent from the CPU's memory"),
        ({"backend": "nccl"}, "backend is nccl, and frames are sent by gloo"),
        ({"stage_index": 1, "rank": 0}, "stage 1 of 2 is on rank 0 of 2"),
        ({"output_shape": None}, r"stage 0 of 2 needs output_shape=\(samples, ...\)"),
        ({"stage_index": 1, "rank": 1, "input_shape": None}, "stage 1 of 2 needs input_shape="),
        ({"forward": "fixpont:4"}, "Did you mean 'fixpoint'"),
        ({"forward": "topk:0.1(mask=forward)"}, "it is for backward="),
    ],
)
def test_what_cannot_work_is_refused_at_once(changes, words, monkeypatch):
    given = {
        "stage_index": 0,
        "device": torch.device("cpu"),
        "output_shape": (2, 4),
        "backend": "gloo",
        "rank": 0,
    } | changes
    backend, rank = given.pop("backend"), given.pop("rank")
    monkeypatch.setattr(library.dist, "get_backend", lambda group=None: backend)
    monkeypatch.setattr(library.dist, "get_rank", lambda group=None: rank)
    monkeypatch.setattr(library.dist, "get_world_size", lambda group=None: 2)
    with pytest.raises(UserError, match=words):
        CompressedPipelineStage(torch.nn.Identity(), num_stages=2, num_microbatches=2, **given)


def test_a_tensor_of_ids_is_the_numbers_in_it():
    assert library._whole_numbers(torch.tensor([3, 1])) == [3, 1]
    for wrong in (["a"], [1.5], [2**63]):
        with pytest.raises(UserError, match="ids must"):
            library._whole_numbers(wrong)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"in": [2, 7]}, r"output_shape=\[2, 8\], stage 1 input_shape=\[2, 7\]"), ({"seed": 1}, "have other seed: 0, 1")],
)
def test_stages_made_for_different_frames_are_told_before_one_is_sent(changes, words, monkeypatch):
    """gloo ends a process that receives more than it expects."""
    first = {
        "in": None, "out": [2, 8], "compressors": ["none", "none"], "seed": 0, "micro-batches": 2, "evaluation": "off",
    }  # fmt: skip
    last = {**first, "in": [2, 8], "out": None}

    def gather(into, mine, group=None):
        into[:] = [mine, last | changes]

    monkeypatch.setattr(library.dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(library.dist, "all_gather_object", gather)
    with pytest.raises(UserError, match=words):
        library._agree(first, None)


def test_the_page_shows_the_example_as_it_is():
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    shown = "".join(f"    {line}".rstrip() + "\n" for line in EXAMPLE.read_text(encoding="utf-8").splitlines())
    assert shown in page
