"""Services whose machines are jobs, reached by mailboxes: Batch and Azure ML, as tests of both see them.

Their place is `p`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

from evalfleet.model import Offer
from evalfleet.places.azure_batch import AzureBatchPlace
from evalfleet.places.azure_ml import AzureMlPlace
from evalfleet.ports import Check
from standins import azure_batch, azure_ml
from tests.cloud import batch_places, mail_desk, ml_places
from tests.desk import Desk

Service: TypeAlias = azure_ml.StandIn | azure_batch.StandIn
ServicePlace: TypeAlias = AzureMlPlace | AzureBatchPlace
HOME, STRANGER = ml_places.HOME, "ffffffffffff"
LIFE_S = 3600.0
machine_id = ml_places.machine_id
ONE = machine_id()


def desk(service: Service, folder: Path, count: int, *, sleeps: float = 0.5, **more: Any) -> Desk:
    given = {
        "endpoint": service.endpoint,
        "storage_endpoint": service.storage_endpoint,
        "ca": str(service.ca),
        "sizes": [ml_places.SIZE],
        "isolation": "none",
    }
    if isinstance(service, azure_ml.StandIn):
        given |= {"kind": "azure_ml", "workspace": service.workspace, "resource_group": service.group}
    else:
        given |= {"kind": "azure_batch", "account": f"{service.account}.{service.region}"}
        given |= {"management": service.endpoint, "reach": "mailbox"}
    environ = service.service_principal()
    return mail_desk.mail_desk(folder, "p", {**given, **more}, environ, count, sleeps=sleeps)


def place(service: Service, home: Path, **more: Any) -> ServicePlace:
    if isinstance(service, azure_ml.StandIn):
        return ml_places.place(service, home, **more)
    return batch_places.place(service, home, **{"reach": "mailbox", "ssh_from": (), **more})


def play(service: Service, home: Path, act: Callable[[ServicePlace], Awaitable[None]], **more: Any) -> None:
    mail_desk.play(lambda: place(service, home, **more), act)


def offer(service: Service, *, spot: bool = False) -> Offer:
    return (
        ml_places.offer(spot=spot) if isinstance(service, azure_ml.StandIn) else batch_places.offer(spot=spot)
    )


def examine(service: Service, home: Path, workers: int = 1, **more: Any) -> dict[str, Check]:
    """What `doctor` finds."""
    if isinstance(service, azure_ml.StandIn):
        return ml_places.examine(service, home, workers, **more)
    return batch_places.examine(service, home, workers, **more)


def in_image(service: Service, image: str) -> dict[str, Any]:
    """The settings of machines that are containers of the image."""
    return {"image" if isinstance(service, azure_ml.StandIn) else "container": image}
