"""Calls that are cancelled leave no connection behind when their client is closed."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import standins.azure
import standins.gce
from evalfleet.places.azure.arm import ArmClient, ArmEndpoint
from evalfleet.places.gce.client import ComputeClient, ComputeEndpoint
from tests.cloud.places import environment

CALLS, ROUNDS = 4, 12


C = TypeVar("C", ArmClient, ComputeClient)


async def cut(client: C, ask: Callable[[C], Coroutine[Any, Any, object]], after_s: float) -> None:
    """The first call is not cut off: what has to be made only once is there then."""
    await ask(client)
    calls = [asyncio.create_task(ask(client)) for _ in range(CALLS)]
    await asyncio.sleep(after_s)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await client.close()


def assert_all_closed(make: Callable[[], C], ask: Callable[[C], Coroutine[Any, Any, object]]) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for n in range(ROUNDS):
            asyncio.run(cut(make(), ask, 0.001 * n))
        gc.collect()
    assert [str(each.message) for each in told if "unclosed" in str(each.message)] == []


def test_of_azure() -> None:
    with standins.azure.StandIn() as azure:
        endpoint = ArmEndpoint(azure.subscription, azure.endpoint, ca=str(azure.ca))
        path = f"/subscriptions/{azure.subscription}"
        assert_all_closed(
            lambda: ArmClient(endpoint, environment(azure)), lambda client: client.get(path, "2022-12-01")
        )


def test_of_google() -> None:
    with standins.gce.StandIn() as google:
        endpoint = ComputeEndpoint(google.project, google.endpoint, str(google.ca))
        path = f"projects/{google.project}"
        assert_all_closed(
            lambda: ComputeClient(endpoint, google.environment), lambda client: client.get(path)
        )
