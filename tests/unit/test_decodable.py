"""Types that several threads begin to decode into at the same time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import evalfleet

THREADS = """\
import sys, threading
import msgspec
from evalfleet.model import decodable
sys.setswitchinterval(1e-6)

def decode(kind, together):
    together.wait()
    msgspec.convert({"a1": {"b1": 1}}, GUARDED)

for _ in range(200):
    inner = msgspec.defstruct("Inner", [(f"b{n}", "int | None", None) for n in range(20)])
    outer = msgspec.defstruct("Outer", [(f"a{n}", inner | None, None) for n in range(5)])
    together = threading.Barrier(4)
    threads = [threading.Thread(target=decode, args=(outer, together)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("all decoded")
"""
BARE = re.compile(r"(?:json\.decode\(.*type=|msgspec\.convert\([^,\n]*, |json\.Decoder\()(_?[A-Z]\w*)\b")


def test_threads_that_decode_into_one_type_for_the_first_time_at_once() -> None:
    """Without the guard the process ends by a segmentation fault, which ended the dashboard."""
    script = THREADS.replace("GUARDED", "decodable(kind)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "all decoded\n"), done


def test_no_struct_is_decoded_into_unguarded() -> None:
    """But for commands that do so once, before there are other threads."""
    root = Path(evalfleet.__file__).parent
    found = {
        f"{path.relative_to(root).as_posix()}: {match[1]}"
        for path in root.rglob("*.py")
        for match in BARE.finditer(path.read_text("utf-8"))
    }
    assert found == {"cli/developer.py: ControllerInput", "cli/hal_eval.py: HalSettings"}
