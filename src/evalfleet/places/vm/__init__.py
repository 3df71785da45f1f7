"""What every place of VMs needs, whatever the cloud.

place.py       VmPlace: SSH to the machines, turns, the ceiling of vCPUs
keys.py        host keys and the key to come in with, made here
ssh_access.py  connections to the machines, and orders to their supervisors
readiness.py   VMs that run, until they can be used
snapshots.py   what exists, asked once for all and not too often
price_book.py  list prices: fetched ones, and behind them those that came with evalfleet
"""
