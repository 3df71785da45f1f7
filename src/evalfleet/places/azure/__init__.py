"""The place `azure_vm`: virtual machines of Azure, made for us and deleted after use.

    settings.py   what the user may say, and what the computer knows (subscription, owner)
    sizes.py      sizes, and what they have
    listed.py     the prices that come with evalfleet
    prices.py     what things cost: the list that was fetched last, or the one that came with us
    retail.py     fetching Azure's public price list
    pricelist.py  both, for `evalfleet prices`
    offers.py     what can be had, at what price
    names.py      names and tags: how we tell what is ours
    expiry.py     the daily time at which Azure itself stops a machine
    template.py   what is deployed in one call for one machine, and for a region's network
    keys.py       host keys and the key to come in with, made here
    arm.py        requests to Azure's Resource Manager
    refusals.py   what its errors mean to us
    views.py      what exists, of a few lists
    ground.py     the group and the network that machines need
    builds.py     what is asked of Azure, and waiting until it is so
    reaching.py   SSH to the machines
    place.py      all of that as a Place
    galleries.py  images of machines: names, tags, what is sent and read
    cleaning.py   what is done on a machine before it becomes an image
    capturing.py  a machine becomes an image
    sweeping.py   what evalfleet has made anywhere, by tags alone
    lasting.py    for how long we stay logged in
    login.py      that, asked of Azure
    outline.py    what would be made, in words
    checks.py     what can be found out before money is spent

Microsoft's libraries (`pip install 'evalfleet[azure]'`) are imported when the first request is made.
"""

from .place import AzurePlace
from .settings import AzureSettings

__all__ = ["AzurePlace", "AzureSettings"]
