"""Loss against time without training at every network: numbers of training runs, times of timing runs.

    convergence run (losses, bytes, epochs) ──┐
    timing runs (step time of each method     ├─▶ curves: a row an epoch, for every network that was timed
                 at each network)           ──┘   composition: a row a curve: what it is made of, or what is missing

The network changes no number of training (an invariant), so a method is trained once; the time of each of its steps is
the step time of the compressors in force in its epoch, measured at the network by a timing run of that method.

What times what is decided from the runs' specs alone:

- a timing run times the runs of the same model, data, pipeline and batch (`_shape`) in the epochs in which the
  compressors are those that it was timed with: epochs of warm-up are timed by the uncompressed arm;
- a replayed timing run (`compute = "replay"`: the compute of another model) times runs of the same model plug-in whose
  shape no real timing run has: seconds of the large model's steps beside losses of the small one; `time_of` says so;
- a training is timed by the runs of its own seed, where that seed was timed, else by the median of all seeds;
- flagged timing runs are left out where others of their cell are not flagged; where all are, they flag the curve.

A `full` run has a measured curve of its own, and is held against what is composed for it at its own network.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from thinpipe.harness import regimes
from thinpipe.harness.compression import grammar
from thinpipe.harness.spec import RunSpec

# Of data: what decides the shapes, and what the tensors hold (entropy-coded bytes depend on it).
DATA = ("name", "corpus", "tokenizer", "vocab_size", "sequence_length", "num_labels")
# Of training: what takes time in a step. Rates, schedules and decays are a few multiplications.
TRAIN = ("batch_size", "accumulate", "optimizer", "clip_scope", "autocast", "recompute")
# Shares of bytes that differ by less are those of a method without a first visit.
SAME_BYTES = 0.01
CHECKED = ("measured_s", "total_error", "max_error", "same_losses")


@dataclass(frozen=True)
class Use:
    """One use of a run by an experiment: its row of the runs table, its spec, its frames steps, transfers, evals."""

    row: Mapping[str, Any]
    spec: RunSpec
    rows: Mapping[str, pd.DataFrame]


@dataclass(frozen=True)
class Timed:
    """One method at one network, medians over the timing runs named. first_*: of first visits; *_share: frame bytes a
    raw byte."""

    step_s: float
    first_s: float
    share: float
    first_share: float
    run_ids: tuple[str, ...]
    flags: frozenset[str]


@dataclass(frozen=True)
class Timings:
    """One method at one network: by seed, and the median of all for trainings of another seed. left_out: how many
    flagged runs are in neither."""

    by_seed: Mapping[int, Timed]
    median: Timed
    left_out: int

    def of(self, seed: int) -> Timed:
        return self.by_seed.get(seed, self.median)


@dataclass(frozen=True)
class Network:
    """One network as it was timed: its columns, and the methods that were."""

    columns: Mapping[str, Any]
    methods: Mapping[Hashable, Timings]


def build(uses: Sequence[Use]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows of curves, rows of composition) of the runs of one experiment that have ended."""
    timed = _timed(uses)
    curves: list[dict[str, Any]] = []
    composition: list[dict[str, Any]] = []
    for use in uses:
        steps = None if use.spec.measure == "timing" or use.row["state"] == "failed" else _steps(use)
        if steps is None or steps.empty:
            continue
        measured = use.spec.measure == "full" and use.row["state"] != "foreign"
        if measured:
            columns = {**_network_columns(use), "timing_run_id": None, "fidelity": use.row["fidelity"]}
            curves += _points(use, steps, steps["measured_s"], {**columns, "flagged_runs": 0})
        networks = timed.get(_shape(use.spec)) or timed.get(_family(use.spec)) or []
        if timed and not networks:
            composition.append(_composition(use, _untimed(use), None, None))
        for network in networks:
            here = network.columns["network_id"] == use.spec.network_id
            own = measured and here and network.columns["time_of"] is None
            columns, seconds = _compose(use.spec, steps, network)
            composition.append(_composition(use, columns, seconds, _check(uses, use, steps, seconds) if own else None))
            if seconds is not None and not own:
                curves += _points(use, steps, seconds, columns)
    return curves, composition


# --- what was timed ---


def _timed(uses: Sequence[Use]) -> dict[Hashable, list[Network]]:
    """Networks by the shape of the runs that they time; of replays, by the family of their model."""
    groups: dict[Hashable, dict[Hashable, dict[Hashable, dict[str, Use]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(dict))
    )
    for use in uses:
        spec = use.spec
        if spec.measure != "timing" or use.row["state"] != "done" or use.row["step_time_s"] is None:
            continue
        replay = spec.compute == "replay"
        shape = _family(spec) if replay else _shape(spec)
        # Replays of several models, or cut in several ways, are networks apart.
        network = (spec.network_id, _shape(spec), spec.profile)
        method = _method(spec, regimes.final_epoch(spec), uniform=replay)
        groups[shape][network][method][use.row["run_id"]] = use
    found: dict[Hashable, list[Network]] = {}
    for shape, networks in groups.items():
        found[shape] = []
        for methods in networks.values():
            one = next(iter(next(iter(methods.values())).values()))
            timed = {method: _timings(list(runs.values())) for method, runs in methods.items() if method is not None}
            found[shape].append(Network(_network_columns(one), timed))
    return found


def _timings(uses: Sequence[Use]) -> Timings:
    clear = [use for use in uses if use.row["fidelity"] == "ok"] or uses
    seeds: dict[int, list[Use]] = defaultdict(list)
    for use in clear:
        seeds[use.spec.seed].append(use)
    return Timings({seed: _median(own) for seed, own in seeds.items()}, _median(clear), len(uses) - len(clear))


def _median(uses: Sequence[Use]) -> Timed:
    shares = [_shares(use) for use in uses]
    warm = statistics.median(float(use.row["step_time_s"]) for use in uses)
    cold = [float(value) for use in uses if (value := use.row["cold_step_time_s"]) is not None]
    flags = {flag for use in uses for flag in str(use.row["fidelity"]).split("+")}
    return Timed(
        step_s=warm,
        first_s=statistics.median(cold) if cold else warm,
        share=statistics.median(later for _, later in shares),
        first_share=statistics.median(first for first, _ in shares),
        run_ids=tuple(sorted(use.row["run_id"] for use in uses)),
        flags=frozenset(flags - {"ok"}),
    )


def _shares(use: Use) -> tuple[float, float]:
    """Frame bytes a raw byte of a timing run's first pass, and of its measured ones."""
    steps, sent = use.rows["steps"], use.rows["transfers"]
    measured = sent["step"].isin(steps.loc[steps["measured"], "step"])
    return _share(sent[~measured]), _share(sent[measured])


def _share(sent: pd.DataFrame) -> float:
    raw = int(sent["raw_bytes"].sum())
    return int(sent["frame_bytes"].sum()) / raw if raw else 0.0


@functools.lru_cache(maxsize=1024)
def _shape(spec: RunSpec) -> Hashable:
    """What a step's time depends on besides compressors and network."""
    parallel = spec.data_parallel
    kept = {
        "model": spec.model.model_dump(mode="json"),
        "task": {name: getattr(spec.task, name) for name in DATA},
        "pipeline": spec.pipeline.model_dump(mode="json"),
        "train": {name: getattr(spec.train, name) for name in TRAIN},
        "clipped": spec.train.clip_norm is not None,
        "groups": parallel.groups,
    }
    return json.dumps(kept, sort_keys=True)


def _family(spec: RunSpec) -> Hashable:
    """What a replay shares with the small model whose losses stand beside its times."""
    return "replay", spec.model.name


@functools.lru_cache(maxsize=1024)
def _method(spec: RunSpec, epoch: int, *, uniform: bool) -> Hashable | None:
    """What crosses in `epoch`. uniform: by direction alone, so that it can be told of models of other depth; None
    where boundaries differ."""
    texts = regimes.regime(spec, epoch).use
    crossing: Hashable = tuple(sorted(texts.items()))
    if uniform:
        alike = {direction: {t for (d, _), t in texts.items() if d == direction} for direction in regimes.DIRECTIONS}
        if any(len(found) > 1 for found in alike.values()):
            return None
        crossing = tuple((direction, *found) for direction, found in alike.items())
    steered = any(grammar.is_steered(text) for text in texts.values())
    budget = (spec.compression.budget_bits, spec.compression.budget_by) if steered else None
    return crossing, budget, _exchange(spec, epoch)


def _exchange(spec: RunSpec, epoch: int) -> Hashable:
    """How gradients cross between data groups in `epoch`: AC-SGD's quantised momentum comes after the warm-up."""
    parallel = spec.data_parallel
    if parallel.groups == 1 or (parallel.exchange == "quantized-adam" and epoch < spec.compression.warmup_epochs):
        return "none"
    return parallel.exchange, parallel.bits, parallel.matrix_rank


def _network_columns(use: Use) -> dict[str, Any]:
    time_of = None
    if use.spec.compute == "replay":
        pipe = use.spec.pipeline
        time_of = f"{use.spec.profile}, {pipe.stages} stages, {pipe.microbatches} micro-batches"
    names = {name: use.row[name] for name in ("rate_mbit", "rho")}
    return {"network_id": use.spec.network_id, **names, "time_of": time_of}


# --- composing ---


def _steps(use: Use) -> pd.DataFrame:
    """A row a step: epoch, train_loss, measured_s (slowest rank), frame_bytes (so far), share (frame / raw bytes)."""
    sent = use.rows["transfers"].groupby("step")[["frame_bytes", "raw_bytes"]].sum()
    steps = use.rows["steps"].groupby("step").agg(
        epoch=("epoch", "first"), train_loss=("train_loss", "first"), measured_s=("step_time_s", "max")
    )  # fmt: skip
    frame, raw = (sent[name].reindex(steps.index, fill_value=0) for name in ("frame_bytes", "raw_bytes"))
    return steps.assign(frame_bytes=frame.cumsum(), share=(frame / raw.where(raw > 0)).fillna(0.0))


def _compose(spec: RunSpec, steps: pd.DataFrame, network: Network) -> tuple[dict[str, Any], pd.Series | None]:
    """(columns that say what times the run at `network`, seconds of each step); None where a method was not timed."""
    uniform = network.columns["time_of"] is not None
    epochs = sorted({int(epoch) for epoch in steps["epoch"]})
    methods = {epoch: network.methods.get(_method(spec, epoch, uniform=uniform)) for epoch in epochs}
    missing = sorted({_describe(spec, epoch) for epoch, found in methods.items() if found is None})
    timings = {epoch: timed for epoch, timed in methods.items() if timed is not None}
    found = {epoch: timed.of(spec.seed) for epoch, timed in timings.items()}
    flags = set().union(*(timed.flags for timed in found.values()))
    last = found.get(epochs[-1])
    columns = {
        **network.columns,
        "timing_run_id": None if last is None else "+".join(last.run_ids),
        "fidelity": "+".join(sorted(flags)) or "ok",
        "flagged_runs": sum(timed.left_out for timed in {id(timed): timed for timed in timings.values()}.values()),
        "step_s": None if last is None else last.step_s,
        "missing": f"no timing run of {'; nor of '.join(missing)}" if missing else None,
    }
    if missing:
        return columns, None
    share, at, seconds = steps["share"].to_numpy(), steps["epoch"].to_numpy(), np.zeros(len(steps))
    for epoch, timed in found.items():
        seconds[at == epoch] = _seconds(share[at == epoch], timed)
    return columns, pd.Series(seconds, index=steps.index)


def _untimed(use: Use) -> dict[str, Any]:
    """The columns of a training that none of the timing runs times, at the network that it ran at."""
    columns = {**_network_columns(use), "timing_run_id": None, "fidelity": "ok", "flagged_runs": 0, "step_s": None}
    return {**columns, "missing": "no timing run of its model, data, pipeline and batch"}


def _seconds(share: np.ndarray, timed: Timed) -> np.ndarray:
    """Seconds of each step: a first visit's, a later one's, or between where a batch has some of both, as its bytes
    say."""
    apart = timed.first_share - timed.share
    if apart <= SAME_BYTES * timed.share:
        return np.full(share.shape, timed.step_s)
    first = np.clip((share - timed.share) / apart, 0.0, 1.0)
    return timed.step_s + first * (timed.first_s - timed.step_s)


def _describe(spec: RunSpec, epoch: int) -> str:
    texts = regimes.regime(spec, epoch).use
    used = {d: " and ".join(sorted({t for (way, _), t in texts.items() if way == d})) for d in regimes.DIRECTIONS}
    return f"forward {used['forward']}, backward {used['backward']}"


def _points(use: Use, steps: pd.DataFrame, seconds: pd.Series, columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of one curve, one at each epoch's end (of the last one, also where the run broke off in it)."""
    elapsed = seconds.cumsum()
    evals = dict(zip(use.rows["evals"]["step"], use.rows["evals"]["eval_loss"], strict=True))
    for epoch, own in steps.groupby("epoch"):
        last = int(own.index[-1])
        losses = own["train_loss"].to_numpy(dtype=np.float64)
        losses = losses[np.isfinite(losses)]
        yield {
            **{name: use.row[name] for name in ("experiment", "part", "arm", "cell", "seed", "state", "run_id")},
            **{name: value for name, value in columns.items() if name not in ("missing", "step_s")},
            "composed": columns["timing_run_id"] is not None,
            "step": last + 1,
            "epoch": int(str(epoch)) + 1,
            "t_s": float(elapsed[last]),
            "train_loss": float(losses.mean()) if losses.size else None,
            "eval_loss": _finite(evals.get(last + 1)),
            "frame_bytes": int(own["frame_bytes"].iloc[-1]),
        }


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None


# --- what was composed, held against what was measured ---


def _composition(
    use: Use, columns: Mapping[str, Any], seconds: pd.Series | None, check: Mapping[str, Any] | None
) -> dict[str, Any]:
    if check is not None:
        flags = {flag for text in (columns["fidelity"], use.row["fidelity"]) for flag in str(text).split("+")}
        columns = {**columns, "fidelity": "+".join(sorted(flags - {"ok"})) or "ok"}
    return {
        **{name: use.row[name] for name in ("experiment", "part", "arm", "cell", "seed", "run_id")},
        **columns,
        "composed_s": None if seconds is None else float(seconds.sum()),
        **(check or dict.fromkeys(CHECKED)),
    }


def _check(uses: Sequence[Use], use: Use, steps: pd.DataFrame, seconds: pd.Series | None) -> dict[str, Any]:
    """CHECKED of a full run: errors of the time composed for it, as shares of the time it took, and whether a run that
    trained the same elsewhere has the same losses, bit for bit (None without one)."""
    measured = float(steps["measured_s"].sum())
    found: dict[str, Any] = {"measured_s": measured, "total_error": None, "max_error": None}
    if seconds is not None:
        apart = (seconds.cumsum() - steps["measured_s"].cumsum()).abs()
        found |= {"total_error": float(apart.iloc[-1]) / measured, "max_error": float(apart.max()) / measured}
    return {**found, "same_losses": _same_losses(uses, use, steps)}


def _same_losses(uses: Sequence[Use], use: Use, steps: pd.DataFrame) -> bool | None:
    others = {
        other.row["run_id"]: other
        for other in uses
        if other.spec.measure != "timing"
        and other.row["train_id"] == use.row["train_id"]
        and other.row["run_id"] != use.row["run_id"]
        and other.row["state"] == use.row["state"]
    }
    if not others:
        return None
    return all(_steps(other)["train_loss"].equals(steps["train_loss"]) for other in others.values())
