"""What can be wrong with a claim as it is written. Pure; no pandas, so that an experiment is loaded fast."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from thinpipe.harness.claims import scope as claim_scope
from thinpipe.harness.claims.metrics import REGISTRY
from thinpipe.harness.claims.series import DIRECTIONS
from thinpipe.harness.claims.subject import REQUIRED, Metric
from thinpipe.harness.declared import Claim
from thinpipe.harness.errors import UserError, near_miss

SCALES = ("ratio", "difference")
#: Arguments that are the claim's own, whatever its metric.
OWN_ARGS = ("scale", "offset", "others")
UNTIMED = "convergence"


def check(claim: Claim, parts: claim_scope.Parts, where: str = "experiment") -> None:
    """Refuse a claim that cannot be judged as it is written. parts: those of the size it is for, by name.

    Raises UserError naming the claim, with a near miss of a name that is not there.
    """
    try:
        metric = _metric(claim)
        _compares(claim, metric)
        if metric.needs_run:
            _exists(claim, metric, parts)
    except UserError as error:
        raise UserError(f"{where} claim {claim.name!r}: {error}") from None


#: Arguments of metrics that are counts, with the least of each; and those that are factors.
LEAST_WHOLE = {"epochs": 1, "warmup": 0, "step": 0, "visit": 1, "boundary": 0}
ABOVE_0 = ("s", "tolerance")


def _metric(claim: Claim) -> Metric:
    if claim.metric not in REGISTRY:
        raise UserError(f"unknown metric {claim.metric!r}.{near_miss(claim.metric, REGISTRY)}")
    metric = REGISTRY[claim.metric]
    for key in claim.args:
        if key not in (*metric.args, *OWN_ARGS):
            raise UserError(f"metric {metric.name} has no argument {key!r}.{near_miss(key, (*metric.args, *OWN_ARGS))}")
    for key, default in metric.args.items():
        if default is REQUIRED and key not in claim.args:
            raise UserError(f"metric {metric.name} needs args.{key}.")
    if (scale := claim.args.get("scale", "ratio")) not in SCALES:
        raise UserError(f"unknown args.scale {scale!r}.{near_miss(str(scale), SCALES)}")
    if (way := claim.args.get("direction")) not in (None, *DIRECTIONS):
        raise UserError(f"unknown args.direction {way!r}.{near_miss(str(way), DIRECTIONS)}")
    _numbers(claim.args)
    return metric


def _numbers(args: Mapping[str, Any]) -> None:
    """Refuse numbers that no run can have: what was compared with them would be nothing."""
    for key, least in LEAST_WHOLE.items():
        if key in args and (type(args[key]) is not int or args[key] < least):
            raise UserError(f"args.{key} must be a whole number from {least}, got {args[key]!r}.")
    for key in ABOVE_0:
        value = args.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UserError(f"args.{key} must be a number above 0, got {value!r}.")
    if "warmup" in args and args["warmup"] > args.get("epochs", math.inf):
        raise UserError(f"args.warmup {args['warmup']} is more than args.epochs {args['epochs']}.")


def _compares(claim: Claim, metric: Metric) -> None:
    """Refuse contradictions between relation, factor, margin, bound, other, along and arms."""
    chain = claim.along is not None or bool(claim.arms)
    ratio, beside = metric.scale_in(claim) == "ratio", "others" in claim.args
    wrong = {
        "bound and other exclude each other: a number, or another arm": claim.bound is not None and claim.other,
        "bound goes with neither along nor arms: without them it is asked of every cell in scope": claim.bound
        is not None
        and chain,
        "it compares with nothing: give other, bound, along or arms": claim.bound is None
        and not (claim.other or chain),
        "along and arms exclude each other": claim.along is not None and claim.arms,
        "arms takes the place of arm: leave arm out": claim.arms and claim.arm,
        "arms needs two labels at least": len(claim.arms) == 1,
        "it needs arm, or arms": not claim.arm and not claim.arms and metric.needs_run,
        "args.others goes with arms: as many labels, and without other": beside
        and (claim.other is not None or len(claim.args["others"]) != len(claim.arms)),
        "factor goes with < <= > >= and another side": claim.factor != 1
        and (claim.relation in ("~", "==") or claim.bound is not None),
        "factor must be above 0": not claim.factor > 0,
        "~ needs a margin above 0": claim.relation == "~" and not (claim.margin or 0) > 0,
        f"exact is of what one run settles, and {metric.name} is a time": claim.exact and metric.is_time,
        "margin goes with ~ only": claim.relation != "~" and claim.margin is not None,
        'args.offset goes with args.scale = "difference" and another side': "offset" in claim.args
        and (ratio or claim.bound is not None),
        'a bound of 0 or below has no ratio: write args.scale = "difference"': claim.bound is not None
        and claim.bound <= 0
        and ratio
        and claim.relation != "==",
        f"{metric.name} is a sequence: compare it with == and another side": metric.is_sequence
        and (claim.relation != "==" or claim.bound is not None),
        "== compares values, not gains: leave along with other, and args.others, out": claim.relation == "=="
        and (beside or (chain and claim.other is not None)),
        "other_where is of the other side, and there is none": claim.other_where and not claim.other and not beside,
        f"{metric.name} is worked out from its arguments: give a bound, no arm": not metric.needs_run
        and (claim.bound is None or claim.arm),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(f"{message}.")


def _exists(claim: Claim, metric: Metric, parts: claim_scope.Parts) -> None:
    """Refuse parts, arms, settings and axes that are not there, and times of runs whose times do not count."""
    from thinpipe.harness.settings import setting_keys

    if claim.part not in parts:
        raise UserError(f"there is no part {claim.part!r}.{near_miss(claim.part, parts)}")
    labels = dict.fromkeys(cell.arm for cell in parts[claim.part].cells)
    reference = metric.reference_arm(claim)
    if metric.reference is not None and reference is None:
        raise UserError(f"metric {metric.name} needs args.{metric.reference}, the arm that it is held against.")
    for arm in (claim.arm, claim.other, *claim.arms, *claim.args.get("others", ()), reference):
        if arm is not None and arm not in labels:
            raise UserError(f"part {claim.part!r} has no arm {arm!r}.{near_miss(arm, labels)}")
    for key in (*claim.where, *(claim.other_where or ()), *([claim.along] if claim.along else [])):
        if key not in setting_keys():
            raise UserError(f"unknown setting {key!r}.{near_miss(key, setting_keys())}")
    found = claim_scope.hypotheses(claim, parts, curves=metric.of_curves)
    for unit in (unit for hypothesis in found for unit in hypothesis.units()):
        if metric.is_time and not metric.of_curves and unit.cell.runs[0][1].measure == UNTIMED:
            raise UserError(f"part {claim.part!r} measures convergence: its times do not count. Name a timing part.")
        if reference is not None:
            claim_scope.reference(unit, reference, claim, parts, curves=metric.of_curves)
