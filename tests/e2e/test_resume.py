"""A run that is killed and started again ends as if nothing had happened, bit for bit."""

import signal
from pydoc_data.topics import topics

import pytest

from runs import Lab, small
from thinpipe.harness.launch.local import LocalLauncher
from thinpipe.harness.runner import Session
from thinpipe.harness.store import CHECKPOINTS

pytestmark = [pytest.mark.lab, pytest.mark.e2e]

# Everything that has a state: memories of every cache, stochastic codecs, dropout that differs by step, momenta.
DELTA = {"forward": "delta(fixpoint:3, cache=fixpoint:8(rounding=stochastic))", "backward": "fixpoint:6"}
KINDS = {
    "delta": {"compression": {**DELTA, "warmup_epochs": 1}, "model": {"dropout": 0.1, "dropout_masks": "step"}},
    "powersgd": {"data_parallel": {"groups": 2, "exchange": "powersgd"}},
    "quantized-adam": {
        "data_parallel": {"groups": 2, "exchange": "quantized-adam", "bits": 4},
        "compression": {**DELTA, "warmup_epochs": 1},
        "model": {"dropout": 0.1, "dropout_masks": "step"},
    },
    "resnet": {
        "model": {"name": "resnet", "preset": "narrow", "layers": None, "width": None, "heads": None},
        "task": {"name": "image", "corpus": "digits", "num_sequences": 32, "num_eval_sequences": 8},
        "train": {"optimizer": "sgd", "lr": 0.01, "epochs": 4, "max_steps": 8, "batch_size": 8, "accumulate": 2},
        "pipeline": {"microbatches": 2},
        "compression": DELTA,
    },
}


class Holding(LocalLauncher):
    """A launcher that lets a test reach into the lab of the run under way."""

    def start_rank(self, lab, rank, *args):
        self.running = lab
        super().start_rank(lab, rank, *args)


def killed_at(step, launcher, rank=0):
    def progress(now, _):
        if now == step:
            launcher.running.kill(f"rank{rank}", signal.SIGKILL)

    return progress


SLOW = ("delta", "powersgd", "resnet")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in sorted(KINDS)]
)
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, kind):
    spec = small(**KINDS[kind], checkpoint={"every": 3, "keep": True})
    launcher = Holding()
    with Session(calibrated=False, launcher=launcher) as session:
        whole, broken = Lab(session, tmp_path / "whole"), Lab(session, tmp_path / "broken")
        undisturbed = whole.run(spec)
        assert undisturbed["state"] == "done", undisturbed["error"]
        steps = undisturbed["totals"]["steps"]
        for rank, at in ((0, 4), (spec.world_size - 1, steps - 1)):
            status = broken.run(spec, progress=killed_at(at, launcher, rank))
            assert status["state"] == "failed"
            assert "killed by signal 9" in status["error"]
        resumed = broken.run(spec)
        assert resumed["state"] == "done", resumed["error"]
        assert resumed["resumed_from"] >= 3
        assert resumed["parameters"] == undisturbed["parameters"]
        assert resumed["totals"]["steps"] == steps
        counted = [resumed["totals"][name] for name in ("wire_bytes", "sync_bytes", "data_bytes")]
        assert counted == [None] * 3, "what was sent before the kill is in no counter"
        assert resumed["totals"]["frame_bytes"] == undisturbed["totals"]["frame_bytes"]
        for table, columns in (("steps", ["step", "train_loss", "lr", "grad_norm"]), ("evals", ["step", "eval_loss"])):
            pair = [lab.rows(spec, table)[columns].values.tolist() for lab in (whole, broken)]
            assert str(pair[0]) == str(pair[1])


@pytest.mark.slow
def test_a_run_begun_afresh_forgets_its_checkpoints(tmp_path):
    spec = small(checkpoint={"every": 5, "keep": True})
    with Session(calibrated=False) as session:
        lab = Lab(session, tmp_path)
        assert lab.run(spec)["state"] == "done"
        assert (lab.store.run_dir(spec.run_id) / CHECKPOINTS).is_dir()
        again = lab.session.run(spec, lab.store.begin(spec, afresh=True))
        assert again["resumed_from"] == 0


def test_a_run_whose_text_has_changed_does_not_go_on(tmp_path):
    corpus = tmp_path / "text.txt"
    text = "\n".join(topics[name] for name in sorted(topics))
    corpus.write_text(text, encoding="utf-8")
    task = {"corpus": str(corpus), "vocab_size": 300, "num_eval_sequences": 0}
    spec = small(task=task, checkpoint={"every": 4, "keep": True})
    launcher = Holding()
    with Session(calibrated=False, launcher=launcher) as session:
        lab = Lab(session, tmp_path / "results")
        assert lab.run(spec, progress=killed_at(6, launcher))["state"] == "failed"
    corpus.write_text(text[1000:], encoding="utf-8")
    with Session(calibrated=False) as session:
        status = Lab(session, tmp_path / "results").run(spec)
    assert status["state"] == "failed"
    assert "other data than there are now" in status["error"]
    assert "--force" in status["error"]
