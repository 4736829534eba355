"""Curves of loss against time at every network, from table curves, and how long a target takes. Shared by figures.

The target of a seed is the final training loss of the uncompressed arm with that seed, times stats.TOLERANCE; when it
is reached says stats.time_to_target, as for claims.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from thinpipe.harness.errors import UserError
from thinpipe.harness.stats import TOLERANCE, time_to_target
from thinpipe.plots import _select as select
from thinpipe.plots import style

#: What a network is told apart by.
NETWORK = ["time_of", "rate_mbit", "rho"]
OF_RUN = ["run_id", "part", "arm", "seed", "cell", "train_id", "state", "machine"]
OF_CURVE = ["timing_run_id", "composed", "fidelity", "network_id", *NETWORK]
POINTS = ["step", "epoch", "t_s", "train_loss", "eval_loss", "frame_bytes"]


class Network(NamedTuple):
    """One network of a figure. time_of: whose steps, where another model's; rate: NaN without limit; rho: NaN where not
    known."""

    time_of: str
    rate: float
    rho: float

    def text(self) -> str:
        """For titles: `100 Mbit/s, rho 4.1, v100-gpt2-xl ...`."""
        rho = "" if np.isnan(self.rho) else f", rho {self.rho:.3g}"
        return select.rate_text(self.rate, "Mbit/s") + rho + (f", {self.time_of}" if self.time_of else "")

    def tick(self) -> str:
        """For axes whose label says Mbit/s, and rho below."""
        return select.rate_text(self.rate) + ("" if np.isnan(self.rho) else f"\n({self.rho:.3g})")


class Reached(NamedTuple):
    """When one method at one network reached the target: seconds by seed, and where it did not, the seconds it had."""

    times: Mapping[int, float]
    censored: Mapping[int, float]
    flagged: bool


def curves(tables: select.Tables, runs: pd.DataFrame) -> pd.DataFrame:
    """Rows of table curves of `runs` (part, arm and seed as there), one curve a training and network, with a column
    `network`; a measured curve goes before a composed one. UserError where networks of one rate are mixed."""
    found = tables["curves"][["run_id", *OF_CURVE, *POINTS]].drop_duplicates()
    found = select.finite(found, ["t_s"]).merge(runs[OF_RUN], on="run_id")
    keys = zip(found["time_of"].fillna(""), *(found[name].astype(float) for name in NETWORK[1:]), strict=True)
    names = [Network(*key) for key in keys]
    found = found.assign(network=names, key=[name.text() for name in names])
    select.one_setting(found, ["arm", "seed", "train_id", "key"], "network_id")
    one = ["part", "arm", "seed", "train_id", "key", "epoch"]
    return found.sort_values(["composed", "epoch"], kind="stable").drop_duplicates(one)


def timed(tables: select.Tables, runs: pd.DataFrame) -> tuple[pd.DataFrame, dict[int, float], str]:
    """(curves of a part's runs, the loss to reach by seed, the arm whose loss that is). UserError where none is."""
    found, arm = curves(tables, runs), baseline(runs)
    goal = targets(runs, arm)
    if found.empty or not goal:
        raise needed(tables)
    select.one_setting(found, ["arm", "seed", "key"], "train_id")
    return found, goal, arm


def networks(found: pd.DataFrame) -> list[tuple[Network, pd.DataFrame]]:
    """Each network with its rows: by whose steps, then slow links first."""
    by_key = {network.text(): network for network in found["network"]}
    ordered = sorted(by_key.items(), key=lambda item: (item[1].time_of, np.isnan(item[1].rate), item[1].rate))
    return [(network, found[found["key"] == key]) for key, network in ordered]


def needed(tables: select.Tables) -> UserError:
    """The error of a figure for which no curve could be composed; it says what is missing."""
    missing = sorted(set(tables["composition"]["missing"].dropna())) if "composition" in tables else []
    text = "a trained part whose methods a timing part of the same model, data and batch times at some network"
    return select.nothing(tables, text + (f" ({missing[0]})" if missing else ""))


def baseline(runs: pd.DataFrame) -> str:
    """The uncompressed arm, the first in legend order; without one, the first of all."""
    plain = runs[(runs["forward"] == "none") & (runs["backward"] == "none")]
    return style.methods((runs if plain.empty else plain)["arm"])[0].label


def targets(runs: pd.DataFrame, arm: str) -> dict[int, float]:
    """The loss to reach, by seed; a seed whose baseline did not end well has none."""
    own = select.finite(runs[(runs["arm"] == arm) & (runs["state"] != "diverged")], ["final_train_loss"])
    return {int(seed): TOLERANCE * float(loss) for seed, loss in zip(own["seed"], own["final_train_loss"], strict=True)}


def reached(found: pd.DataFrame, goal: Mapping[int, float]) -> dict[str, Reached]:
    """By arm, for the rows of one network. A run that diverged has not reached the target, whenever it was below."""
    result = {}
    for arm, rows in found[found["seed"].isin(list(goal))].groupby("arm"):
        times: dict[int, float] = {}
        censored: dict[int, float] = {}
        for seed, curve in rows.groupby("seed"):
            curve, number = curve.sort_values("epoch"), int(str(seed))
            # A loss that is no number is above any target.
            losses = list(curve["train_loss"].fillna(np.inf))
            time = time_to_target(list(curve["t_s"]), losses, goal[number])
            if time is None or (curve["state"] == "diverged").any():
                censored[number] = float(curve["t_s"].iloc[-1])
            else:
                times[number] = time
        result[str(arm)] = Reached(times, censored, bool((rows["fidelity"] != "ok").any()))
    return result


def target_text(arm: str) -> str:
    """For captions."""
    return (
        f" Target: the final training loss of {arm} with the same seed, within {TOLERANCE - 1:.0%}, by means of epochs."
    )


def composed_text(found: pd.DataFrame) -> str:
    """For captions: how many curves were measured, and how many composed."""
    each = found.drop_duplicates(["run_id", "key"])["composed"]
    made = int(each.sum())
    if not made:
        return " Times: measured."
    return " Times: composed of step times" + ("" if made == len(each) else f" ({made} of {len(each)} curves)") + "."
