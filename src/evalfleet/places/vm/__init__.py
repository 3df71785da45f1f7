"""What every place of VMs needs, whatever the cloud.

place.py          VmPlace: SSH to the machines, turns, the ceiling of vCPUs; snapshots of what exists
settings.py       what users may say of VMs of any cloud
answers.py        JSON as clouds answer, and faults of their APIs
ssh_access.py     keys that are made here, connections to machines, and VMs that run, until they can be used
image_cleanup.py  a machine is cleaned and sealed before its disk becomes an image
preflight.py      what is told before money is spent: room for machines, prices, clocks
price_book.py     list prices: fetched ones, and behind them those that came with evalfleet
"""
