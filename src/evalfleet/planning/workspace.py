"""Where commands work: the one place that reads the environment and the current folder.

Plans are loaded when they are needed: to list runs takes none.
"""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from evalfleet.clock import WallClock
from evalfleet.journal import Store
from evalfleet.journal.database import FILE, refuse_file
from evalfleet.model import Micros, Notify, Plan
from evalfleet.ports import Clock, Place, PlaceContext

from .config import Config, environment, find_config, home_of, load_config, notify_of

if TYPE_CHECKING:
    from .plan_parts import PlaceSettings


@dataclass(frozen=True)
class Workspace:
    """A folder to work in: its environment, its evalfleet.toml, its home with the store, and a clock."""

    environ: Mapping[str, str] = field(repr=False)
    """As the process has it: without what a `.env` adds."""
    cwd: Path
    home: Path
    """Where runs are kept. It need not exist yet."""
    clock: Clock = field(default_factory=WallClock)

    @classmethod
    def here(cls, home: Path | None = None) -> Workspace:
        """This process's own; with another home, if one is given."""
        environ, cwd = dict(os.environ), Path.cwd()
        return cls(environ, cwd, home or home_of(environ, cwd))

    def now(self) -> Micros:
        return self.clock.now()

    # -- the store -------------------------------------------------------------------------------

    def store(self) -> Store:
        """The home's store, to write to. It is made if there is none."""
        return Store.open(self.home)

    def records(self) -> Store:
        """The home's store, to read from. Raises RequestError when nothing was ever run here."""
        return Store.open(self.home, create=False, read_only=True)

    def records_if_any(self) -> Store | None:
        """The home's store, to read from; None when nothing was ever run here. Raises RequestError."""
        refuse_file(self.home)
        return self.records() if (self.home / FILE).exists() else None

    @property
    def home_id(self) -> str:
        """The home's id; empty when nothing was ever run here."""
        store = self.records_if_any()
        return store.home_id if store is not None else ""

    # -- configuration ---------------------------------------------------------------------------

    @functools.cached_property
    def config(self) -> Config:
        """The evalfleet.toml that $EVALFLEET_CONFIG names, or the nearest. It is read once."""
        return load_config(find_config(self.cwd, self.environ), self.cwd)

    def environment(self, env_file: str | Path | None = None) -> dict[str, str]:
        """The environment with what a `.env` beside evalfleet.toml and `--env-file` add."""
        return environment(self.environ, self.cwd, self.config, env_file)

    def notify(self, env_file: str | None = None) -> Notify:
        """Whom to tell how things went."""
        return notify_of(self.config, self.environment(env_file))

    def changed_settings(self, plan: Plan) -> PlaceSettings:
        """Place -> what evalfleet.toml says now of settings that may change while machines live."""
        from .plan_parts import changed_settings

        return changed_settings(plan, self.config)

    def secrets(self, plan: Plan, env_file: str | None = None) -> tuple[dict[str, str], dict[str, str]]:
        """The values of the plan's secrets, and the environment, for a run that is taken up again."""
        from .plan_parts import secret_names
        from .secret_values import secret_values

        merged = self.environment(env_file)
        return secret_values(secret_names(plan), merged), merged

    # -- places ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def places(
        self,
        plan: Plan,
        secrets: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
        changed: PlaceSettings | None = None,
    ) -> AsyncGenerator[dict[str, Place]]:
        """The plan's places by name; closed afterwards, whatever happens."""
        from .plan_parts import places_of

        merged = self.environment() if environ is None else environ
        context = PlaceContext(self.home, plan.home, secrets or {}, merged)
        places = places_of(plan, context, changed)
        try:
            yield places
        finally:
            for place in places.values():
                await place.close()

    @asynccontextmanager
    async def place(self, name: str, settings: Mapping[str, str] | None = None) -> AsyncGenerator[Place]:
        """One place by name, to look at it; closed afterwards. Raises RequestError."""
        from .pool_plan import PoolRequest, resolve_pool

        request = PoolRequest(name="survey", on=name, settings=settings or {})
        plan, environ = resolve_pool(request, environ=self.environ, cwd=self.cwd, home_id=self.home_id)
        async with self.places(plan, environ=environ) as places:
            yield places[name]
