"""Everything that can go wrong on purpose.

FleetError                  one line for the user: what is wrong and what to do
|-- RequestError            the request is wrong; nothing was spent          (exit 2)
|-- JournalError            the journal cannot be read or written            (exit 1)
|   |-- JournalForeign      the file is not ours, or is damaged              (exit 2)
|   |-- RunHeld             another controller holds the run                 (exit 2)
|   `-- LeaseLost           another controller has taken the run             (exit 130)
|-- PlaceError              the place answered no; `transient` says whether to ask again
|   |-- NoSuchMachine       the place does not have the machine
|   |-- MachineUnavailable  the machine cannot be had, or used, right now
|   `-- MachineMute         the machine runs, but cannot be reached
`-- ChannelError            the machine cannot be reached now
    |-- StaleController     the machine obeys a newer controller
    |-- MachineForged       the machine says what none of ours would say
    `-- SetupFailed         a set-up step failed on the machine
"""

from __future__ import annotations

from typing import Literal

Scope = Literal["machine", "offer", "family", "region", "place"]


class FleetError(Exception):
    """Base of all errors whose message is meant for the user."""

    exit_code = 1


class RequestError(FleetError):
    """The request is wrong; nothing was spent."""

    exit_code = 2


class JournalError(FleetError):
    """The journal cannot be read or written; what was acknowledged before is safe."""


class JournalForeign(JournalError):
    """The journal file is damaged, not ours, or made by a newer evalfleet. It is left untouched."""

    exit_code = 2


class RunHeld(JournalError):
    """Another controller holds the run; the message says who."""

    exit_code = 2


class LeaseLost(JournalError):
    """Another controller has taken the run: this one must stop, and must act no more."""

    exit_code = 130


class PlaceError(FleetError):
    """The place answered no.

    `transient` says whether asking again can help; `scope` how much of the place the answer is about.
    """

    exit_code = 4

    def __init__(
        self,
        message: str,
        *,
        transient: bool,
        scope: Scope = "offer",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.transient = transient
        self.scope: Scope = scope
        self.retry_after_s = retry_after_s


class NoSuchMachine(PlaceError):
    """The place does not have the machine: it was deleted, or never made."""

    def __init__(self, machine: str) -> None:
        super().__init__(f"there is no machine {machine}", transient=False, scope="machine")


class MachineUnavailable(PlaceError):
    """The machine cannot be had, or used, right now; the same call may succeed later."""

    def __init__(self, machine: str, why: str) -> None:
        super().__init__(f"{machine}: {why}", transient=True, scope="machine")


class MachineMute(PlaceError):
    """The machine runs, by what its place says, but cannot be reached. `step`: what it did not come past."""

    def __init__(self, message: str, step: str) -> None:
        super().__init__(message, transient=False, scope="machine")
        self.step = step


class ChannelError(FleetError):
    """The machine cannot be reached now; the same call may succeed later."""


class StaleController(ChannelError):
    """The machine obeys a controller with a newer epoch: this one must stop."""

    exit_code = 130


class MachineForged(ChannelError):
    """What answers there is no supervisor of ours, or no longer: the machine is given up, alone."""


class SetupFailed(ChannelError):
    """A set-up step failed on the machine. Asking again on this machine does not help.

    `permanent` says that it would fail on any other machine of its place, too.
    """

    def __init__(self, step: str, detail: str, *, permanent: bool = False) -> None:
        super().__init__(f"set-up step {step!r} failed: {detail}")
        self.permanent = permanent
        self.step = step
        self.detail = detail
