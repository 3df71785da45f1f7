"""`python -m evalfleet.providers.lab ERRAND`: the keeper of a lab. Started by the place, not by people."""

from __future__ import annotations

import logging
import sys

import msgspec

from .keeper import main
from .words import Errand

if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s")
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Errand)))
