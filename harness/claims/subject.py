"""What a claim's metric is, and the run it is asked of. No pandas here: an experiment is loaded without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pandas as pd

    from thinpipe.harness.claims.scope import Network
    from thinpipe.harness.declared import Claim
    from thinpipe.harness.spec import RunSpec

#: Stands in `Metric.args` for an argument without a default.
REQUIRED: Any = ...
Value = float | tuple[float, ...]


class NoValue(Exception):
    """A run has no such number; the text says why, for the claim's `why`."""


class Flagged(NoValue):
    """It has one, which must not enter a claim about time: its links or this machine were off."""


@dataclass(frozen=True)
class Subject:
    """One run as a metric sees it.

    row: its row of the runs table; frame(table): its rows of another table, None where there is no such table;
    args: the claim's; network: of the curve meant; reference: the run of the same seed of the arm that
    `Metric.reference` names.
    """

    spec: RunSpec
    row: Mapping[str, Any]
    frame: Callable[[str], pd.DataFrame | None]
    args: Mapping[str, Any] = field(default_factory=dict)
    network: Network | None = None
    reference: Subject | None = None

    def column(self, name: str) -> float:
        """A number of the runs table. Raises NoValue where it is empty."""
        value = number(self.row.get(name))
        if value is None:
            raise NoValue(f"{name} is empty")
        return value

    def rows(self, table: str) -> pd.DataFrame:
        """The run's rows of a table. Raises NoValue where there are none."""
        found = self.frame(table)
        if found is None or found.empty:
            raise NoValue(f"no rows of {table}")
        return found


def number(value: Any) -> float | None:
    """A cell of a frame as a number; None where it is empty, however that is written."""
    import pandas as pd

    return None if value is None or pd.isna(value) else float(value)


@dataclass(frozen=True)
class Metric:
    """One number of one run, or, where `is_sequence`, a tuple of them that only `==` can compare.

    better: which way is better: a run that diverged is worse than any number then; where None it has no value.
    is_time: runs that are flagged, foreign or of measure convergence have no part in it. scale: how two are compared
    unless the claim says: by their ratio, or by their difference where values may be 0 or below. args: name -> default.
    reference: the argument that names another arm, whose run of the same seed is the subject's `reference`; left out,
    it is the claim's `other`. of_start: worked out from what precedes a divergence. needs_run False: of args alone.
    """

    name: str
    meaning: str
    unit: str
    better: Literal["lower", "higher"] | None
    function: Callable[[Subject], Value]
    tables: tuple[str, ...] = ("runs",)
    is_time: bool = False
    scale: Literal["ratio", "difference"] = "ratio"
    args: Mapping[str, Any] = field(default_factory=dict)
    reference: str | None = None
    of_start: bool = False
    is_sequence: bool = False
    needs_run: bool = True

    @property
    def of_curves(self) -> bool:
        """Whether its value depends on a network that the run itself did not cross."""
        return "curves" in self.tables

    def scale_in(self, claim: Claim) -> str:
        """How a claim compares it."""
        return str(claim.args.get("scale", self.scale))

    def reference_arm(self, claim: Claim) -> str | None:
        """The arm that a claim has it worked out against."""
        return None if self.reference is None else claim.args.get(self.reference) or claim.other
