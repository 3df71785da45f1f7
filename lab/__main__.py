"""`python -m lab N`: make N hosts, log in to each, destroy them, and say what that cost."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from . import Lab, LabError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    parser.add_argument("hosts", type=int, nargs="?", default=20, metavar="N")
    parser.add_argument("--keep", action="store_true", help="wait for Enter before destroying them")
    parser.add_argument("--sweep", action="store_true", help="only remove what dead processes' labs left")
    args = parser.parse_args()
    try:
        if args.sweep:
            print(f"removed: {', '.join(Lab.sweep()) or 'nothing'}")
        else:
            show(args.hosts, args.keep)
    except LabError as err:
        print(err, file=sys.stderr)
        return err.exit_code
    return 0


def show(count: int, keep: bool) -> None:
    before, start = available_kb(), time.perf_counter()
    with Lab.create(count) as lab:
        created = time.perf_counter()
        used = before - available_kb()
        for host in lab.hosts[:20]:
            subprocess.run(lab.client.ssh(host, "true"), check=True)
        logged_in = time.perf_counter()
        print(f"{count} hosts up in {created - start:.2f} s: {(created - start) / count * 1e3:.1f} ms each")
        print(f"memory: {used / count / 1024:.1f} MB each")
        print(f"`ssh true`: {(logged_in - created) / min(count, 20) * 1e3:.0f} ms")
        if keep:
            print(f"in the lab's network: {' '.join(lab.prefix)} COMMAND")
            print(f"log in: {' '.join(lab.client.ssh(lab.hosts[0]))}")
            input("Enter destroys them. ")
        start = time.perf_counter()
    print(f"destroyed in {time.perf_counter() - start:.2f} s")


def available_kb() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))


if __name__ == "__main__":
    sys.exit(main())
