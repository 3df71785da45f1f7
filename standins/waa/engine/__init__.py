"""A `docker` for hosts that have none: enough of it for a fleet runner, with its messages and exit codes.

Made into one executable file (a zip application, Python 3.8 and later, nothing but the standard library). A
container is a process tree in namespaces of its own (users, mounts, processes, network), over the host's
/usr. There is no daemon: a monitor process a container outlives the command that started it, as containers
do. Needs root, but none of root's rights over the machine, so it runs on hosts of a lab.

Differences from the original, on purpose: an image is a folder (its files over the host's), a registry is a
folder of those; log lines of standard error come out on standard output.
"""
