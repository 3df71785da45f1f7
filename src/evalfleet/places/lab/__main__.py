"""`python -m evalfleet.places.lab ERRAND`: the keeper of a lab. Started by the place, not by people."""

from __future__ import annotations

import logging
import sys

import msgspec

from evalfleet.model import decodable

from .keeper import main
from .protocol import KeeperOrders

if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s")
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=decodable(KeeperOrders))))
