"""Offers that refuse us: what a refusal blocks, and what a success lifts."""

from __future__ import annotations

from collections.abc import Mapping

from evalfleet import events as ev
from evalfleet.errors import Scope
from evalfleet.model import Micros, Offer, after

from .nouns import Block, MachineState, Refusal, RunState

FIRST_PAUSE_S, LONGEST_PAUSE_S = 15.0, 600.0


def scopes(offer: Offer) -> Mapping[Scope, str]:
    """The keys under which something about the offer may be blocked: the offer, and what it is part of."""
    area = f"{offer.place}/{offer.area or offer.region}/"
    family: dict[Scope, str] = {"family": f"{area}*{offer.family}"} if offer.family else {}
    return {"offer": offer.key, **family, "region": area, "place": f"{offer.place}/"}


def refuse(state: RunState, at: Micros, machine: MachineState, event: ev.MachineCondemned) -> None:
    """A machine could not be had. Those that were asked for at once are refused at once: that is one no."""
    offer = machine.offer
    key = scopes(offer).get(event.scope, offer.key)
    block = state.blocks.get(key)
    if block is None or block.at < machine.requested_at:
        failures = 1 if block is None else block.failures + 1
        until = after(at, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (failures - 1)))
        block = state.blocks[key] = Block(at, until, failures, event.permanent, event.detail)
    block.permanent |= event.permanent
    tries = state.refusals[offer.key].tries + 1 if offer.key in state.refusals else 1
    state.refusals[offer.key] = Refusal(offer, tries, event.detail, event.scope, event.permanent)


def lift(state: RunState, machine: MachineState) -> None:
    """A machine came up: what was refused before it was asked for is granted again.

    Not what was refused for good, nor what was refused since: others had the last of it.
    """
    if not state.blocks:
        return
    for key in scopes(machine.offer).values():
        block = state.blocks.get(key)
        if block is not None and not block.permanent and block.at < machine.requested_at:
            del state.blocks[key]
