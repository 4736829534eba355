"""What the ranks of a run need is compiled before they are forked: any compressor a preset or a rule may name."""

import subprocess
import sys

import pytest

from thinpipe.harness import worker
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.warm_up import warm_up
from thinpipe.harness.compression_presets import PRESETS
from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import parse


def test_every_preset_can_be_prepared():
    texts = {text for preset in PRESETS.values() for text in (preset.forward, preset.backward)}
    assert "topk:0.02(mask=forward)" in texts
    warm_up(texts)  # raises where one of them cannot take a message


def test_a_rank_prepares_all_that_its_run_may_use_before_anything_else(monkeypatch):
    """Else the first step of a process that no fork server prepared would load it, and count the time as training."""
    rank = worker.Rank.__new__(worker.Rank)
    rank.world_size = 2
    rank.spec = parse({"compression": {"forward": "delta(fixpoint:3)", "backward": "topk:0.1", "warmup_epochs": 1}})
    asked = []

    def stop(texts):
        asked.extend(texts)
        raise InterruptedError

    monkeypatch.setattr(worker, "warm_up", stop)
    with pytest.raises(InterruptedError):
        rank.build()
    assert {"none", "delta(fixpoint:3)", "topk:0.1"} <= set(asked)


def test_after_it_a_message_loads_nothing_more():
    code = """
import sys, torch
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Context
from thinpipe.harness.compression.warm_up import warm_up
text = "delta(fixpoint:4, cache=fp16)"
warm_up([text])
before = set(sys.modules)
shape, codec = (4, 64, 512), grammar.build(text)
out = torch.zeros(codec.max_bytes(shape), dtype=torch.uint8)
for step in range(3):
    codec.encode(torch.randn(shape), Context(shape, step=step, sample_ids=tuple(range(4))), out)
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "text",
    ["relu(relu(none))", "hadamard(kmeans:4)", "hadamard(topk:0.3(mask=forward))", "topk:0.1(values=kmeans:4)",
     "delta(fixpoint:4, cache=kmeans:4)", "grid:1e-300"],
)  # fmt: skip
def test_what_cannot_work_is_refused_while_planning(text):
    with pytest.raises(UserError):
        grammar.check(text)


def test_only_what_can_be_steered_counts_as_steered():
    steered = ["grid:1.0", "delta(grid:1.0)", "ef-mixed(grid:1.0)", "relu(grid:1.0)", "delta(hadamard(grid:0.5))"]
    not_steered = ["grid:2(by=rate)", "topk:0.1(values=grid:1.0)", "delta(fixpoint:4, first=grid:0.1)", "fixpoint:4"]
    assert all(grammar.is_steered(text) and grammar.build(text).steered() for text in steered)
    assert not any(grammar.is_steered(text) or grammar.build(text).steered() for text in not_steered)
    assert len(grammar.build("ef-mixed(grid:1.0)").steered()) == 2
