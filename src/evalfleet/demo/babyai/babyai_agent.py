"""One BabyAI task: make the level, play one episode by the rules of `babyai_policy`, write the result.

Run by evalfleet as `PYTHON babyai_agent.py` in a task's own directory. The levels, their sentences and their
rewards are those of PyPI `minigrid`, pinned by the demo.
"""

from __future__ import annotations

import json
import os
import random
import struct
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any

from babyai_policy import decide

MAX_STEPS = 300  # the largest levels allow thousands; whoever wanders that long is lost


def save_png(path: Path, pixels: Any) -> None:
    """Write an array of height by width by 3 bytes as a PNG file."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + pixels[y].tobytes() for y in range(height))

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + parts)


def run(level: str, seed: int, out: Path) -> dict[str, Any]:
    """The whole task; its result. Leaves a picture of the beginning and one of the end in `out`."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    gymnasium = import_module("gymnasium")
    import_module("minigrid")  # registers the levels

    env = gymnasium.make(level, render_mode="rgb_array", tile_size=16)
    seen, _ = env.reset(seed=seed)
    print(f"{level}, seed {seed}: {seen['mission']}", flush=True)
    save_png(out / "step_0.png", env.render())
    chance = random.Random(seed)
    steps, reward, ended = 0, 0.0, False
    while not ended and steps < MAX_STEPS:
        move = decide(seen["mission"], seen["image"], chance)
        seen, reward, terminated, truncated, _ = env.step(move)
        steps, ended = steps + 1, terminated or truncated
    last = f"step_{steps}.png"
    save_png(out / last, env.render())
    env.close()
    success = float(reward) > 0
    print(f"{'solved' if success else 'not solved'} in {steps} moves", flush=True)
    # BabyAI's reward shrinks with the moves taken; its literature counts successes, and so does this score
    return {
        "score": 1.0 if success else 0.0,
        "success": success,
        "num_steps": steps,
        "screenshots": ["step_0.png", last],
        "instruction": seen["mission"],
        "gave_up": not ended,
        "reward": float(reward),
    }


def main() -> None:
    """Read the task from the environment, play it, write `result.json` in one step."""
    params = json.loads(os.environ["EVALFLEET_PARAMS"])
    out = Path(os.environ["EVALFLEET_OUT"])
    result = run(params["level"], int(params["seed"]), out)
    part = out / "result.json.part"
    part.write_text(json.dumps(result), encoding="utf-8")
    part.replace(out / "result.json")


if __name__ == "__main__":
    main()
