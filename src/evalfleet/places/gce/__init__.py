"""The place `gce`: virtual machines of Google's Compute Engine, made for us and deleted after use.

    settings.py       what the user may say, and what the computer knows (project, zones, owner)
    place.py          all of the following as a Place, on what `places/vm` has for every cloud
    machine_types.py  machine types and zones, and what their names tell
    prices.py         what can be had, and what it costs
    price_list.py     Google's own price list, fetched
    names.py          names and labels: how we tell what is ours
    template.py       what is sent: an instance with all that belongs to it, its end, firewall rules
    answers.py        JSON as Google answers, and what its errors mean to us
    client.py         requests to the API, operations, and who we are to it
    inventory.py      what exists, by a few lists over all zones
    firewall.py       who may connect to our machines
    lifecycle.py      instances made, started, stopped and taken down; their host keys
    capture.py        a machine becomes an image of the project
    leftovers.py      what evalfleet has left anywhere, by labels alone, and how it is deleted
    preflight.py      what would be made, and what can be checked before money is spent

google-auth (the extra `gcp`) is imported when the first request is made.
"""

from .place import GcePlace
from .settings import GceSettings

__all__ = ["GcePlace", "GceSettings"]
