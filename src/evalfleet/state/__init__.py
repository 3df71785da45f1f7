"""The state of a run: a fold over its events. `apply` is the only way it changes.

State is mutable and indexed, so that no step costs time proportional to the number of tasks or
machines: every question that policy asks has its answer kept current here.
"""

from .circuits import replaceable
from .fold import accepts, apply, apply_all, apply_record, fold
from .machines import scopes
from .nouns import (
    RECENT,
    AttemptState,
    Block,
    Circuit,
    Deadline,
    MachineState,
    PlaceHearing,
    Purse,
    Refusal,
    RunState,
    Spend,
    TaskState,
    is_ungradable,
    is_ungraded,
)
from .run_changes import kept_out, objection, steered_by

__all__ = [
    "RECENT",
    "AttemptState",
    "Block",
    "Circuit",
    "Deadline",
    "MachineState",
    "PlaceHearing",
    "Purse",
    "Refusal",
    "RunState",
    "Spend",
    "TaskState",
    "accepts",
    "apply",
    "apply_all",
    "apply_record",
    "fold",
    "is_ungradable",
    "is_ungraded",
    "kept_out",
    "objection",
    "replaceable",
    "scopes",
    "steered_by",
]
