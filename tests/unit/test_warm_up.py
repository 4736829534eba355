"""What the ranks of a run need is compiled before they are forked: any compressor a preset or a rule may name."""

import pytest

from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.warm_up import warm_up
from thinpipe.harness.compression_presets import PRESETS
from thinpipe.harness.errors import UserError


def test_every_preset_can_be_prepared():
    texts = {text for preset in PRESETS.values() for text in (preset.forward, preset.backward)}
    assert "topk:0.02(mask=forward)" in texts
    warm_up(texts)  # raises where one of them cannot take a message


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
