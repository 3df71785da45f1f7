"""HAL's grader on a machine that was made for it. Python 3.8, standard library alone.

python3 grade_there.py prepare [EXTRA]    install what HAL needs, and its extra for the benchmark
python3 grade_there.py                    grade what order.json says, with HAL in a copy of its checkout
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile

ENVIRONMENT = "hal_env"


def prepare(extra: str) -> int:
    """Build HAL's own environment, with uv where there is one. Ends with pip's code."""
    python = os.path.join(ENVIRONMENT, "bin", "python")
    uv = shutil.which("uv")
    with tempfile.TemporaryDirectory() as scratch:  # a build writes into its folder, and this one is shared
        source = shutil.copytree("checkout", os.path.join(scratch, "hal"))
        wanted = [source + (f"[{extra}]" if extra else ""), "weave<0.54"]
        if uv:
            make = [uv, "venv", "--python", "3.11", ENVIRONMENT]
            install = [uv, "pip", "install", "--python", python, *wanted]
        else:
            make = [sys.executable, "-m", "venv", ENVIRONMENT]
            install = [python, "-m", "pip", "install", "--disable-pip-version-check", "-q", *wanted]
        return subprocess.call(make) or subprocess.call(install)


def grade() -> int:
    out = os.environ["EVALFLEET_OUT"]
    with open("order.json", encoding="utf-8") as file:
        order = json.load(file)
    work = os.path.abspath("work")
    shutil.copytree("checkout", work)
    for folder, _, names in os.walk(work):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode | 0o200)
    order["agent_dir"] = work
    order["results_dir"] = os.path.abspath("results")
    with open("order_here.json", "w", encoding="utf-8") as file:
        json.dump(order, file)
    python = os.environ.get("HAL_PYTHON") or os.path.join(os.path.realpath(ENVIRONMENT), "bin", "python")
    answer = os.path.join(out, "answer.json")
    words = [python, os.path.abspath("in_hal.py"), "grade", os.path.abspath("order_here.json"), answer]
    child = subprocess.Popen(words, cwd=work, stdin=subprocess.PIPE)  # it ends when its input does
    code = child.wait()
    with open(os.path.join(out, "result.json"), "w", encoding="utf-8") as file:
        json.dump({"score": 1.0 if code == 0 and os.path.exists(answer) else 0.0}, file)
    return 0


if __name__ == "__main__":
    sys.exit(prepare("".join(sys.argv[2:3])) if sys.argv[1:2] == ["prepare"] else grade())
