"""Contract suites: what every place and every channel promises, as tests to subclass.

    class TestMyPlace(PlaceContract, ChannelContract):
        def harness(self) -> Harness:
            return MyHarness()

Plain asserts and asyncio; nothing here needs pytest, although it finds the tests by their names.
"""

from .channel_contract import ChannelContract
from .contracts import PlaceContract
from .harness import Harness, ShellHarness

__all__ = ["ChannelContract", "Harness", "PlaceContract", "ShellHarness"]
