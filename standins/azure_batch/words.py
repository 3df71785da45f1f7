"""What is said to the stand-in for Azure Batch and what it answers: errors, durations, names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from standins.cloud.faults import Failed, FaultRules, Late, Lost
from standins.cloud.words import Answer, Json

VERSION = "2025-06-01"
CONTENT = "application/json; odata=minimalmetadata"
ACCOUNT, REGION = "standin", "eastus"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?")


class BatchError(Exception):
    """A refusal in the shape that Batch gives it."""

    def __init__(self, status: int, code: str, message: str, **values: str) -> None:
        super().__init__(f"{code}: {message}")
        self.status, self.code, self.message, self.values = status, code, message, values
        self.headers: Mapping[str, str] = {}

    def answer(self) -> Answer:
        body: Json = {
            "odata.metadata": "https://stand-in/$metadata#Microsoft.Azure.Batch.Protocol.Entities.Container.errors/@Element",
            "code": self.code,
            "message": {"lang": "en-US", "value": f"{self.message}\nRequestId:stand-in"},
        }
        if self.values:
            body["values"] = [{"key": key, "value": value} for key, value in self.values.items()]
        return Answer(self.status, body, self.headers)


def invalid(name: str, value: object, reason: str) -> BatchError:
    message = "The value provided for one of the properties in the request body is invalid."
    return BatchError(
        400, "InvalidPropertyValue", message, PropertyName=name, PropertyValue=str(value), Reason=reason
    )


def missing(name: str) -> BatchError:
    message = "A required property was not specified in the request body."
    return BatchError(400, "MissingRequiredProperty", message, PropertyName=name)


def need(body: Json, name: str) -> Any:
    if body.get(name) in (None, ""):
        raise missing(name)
    return body[name]


def checked_id(body: Json) -> str:
    """An id as Batch allows it: up to 64 letters, digits, hyphens and underscores."""
    id = str(need(body, "id"))
    if not _ID.fullmatch(id):
        raise invalid("id", id, "letters, digits, hyphens and underscores, up to 64")
    return id


def seconds(text: object) -> float | None:
    """The seconds of an ISO 8601 duration; None if there is none, or it is `for ever`."""
    if text is None:
        return None
    found = _DURATION.fullmatch(str(text))
    if found is None or str(text) in ("P", "PT"):
        raise invalid("duration", text, "no ISO 8601 duration")
    days, hours, minutes, secs = (float(each or 0) for each in found.groups())
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + secs
    return None if days > 10_000_000 else whole


# -- what goes wrong -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Throttled:
    """503 `ServerBusy`, as Batch says that one asks too often; nothing is done."""

    retry_after_s: int = 1


@dataclass(frozen=True)
class Refused:
    """A refusal of this shape, at once."""

    status: int
    code: str
    message: str = "Refused by the test."


Effect = Throttled | Failed | Refused | Late | Lost


class Faults(FaultRules[Effect]):
    """What goes wrong with Batch."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.start_tasks_fail = False
        """Do the start tasks of new nodes fail?"""
        self.start_task_code = 1
        """The exit code of those that fail."""
        self.start_task_words = "E: Unable to locate package docker.io\n"
        """What those that fail have written to their standard error."""
        self.start_tasks_hang = False
        """Do the start tasks of new nodes never end?"""
        self.nodes_unusable = False
        """Do new nodes become unusable?"""
        self.node_error = "An error occurred during node preparation."
        """What those say."""
        self.mute = ""
        """Tasks of jobs whose id ends so say that they run while their processes were never started."""


def refusal(effect: Throttled | Failed | Refused) -> Answer:
    match effect:
        case Throttled(retry_after_s):
            error = BatchError(
                503, "ServerBusy", "The server is currently unable to receive requests. Please retry."
            )
            error.headers = {"Retry-After": str(retry_after_s)}
            return error.answer()
        case Failed(status):
            return BatchError(
                status, "InternalError", "Server encountered an internal error. Please try again."
            ).answer()
        case Refused(status, code, message):
            return BatchError(status, code, message).answer()
