"""Makes the demo ready: a browser if it can be had, an interpreter with pinned packages, a benchmark.

Everything is kept in the cache under names that contain a hash of what it was made from, and gets its name
only when it is complete: an interrupted preparation is made again, a finished one is found again in a moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evalfleet.errors import FleetError

Say = Callable[[str], None]

HERE = Path(__file__).parent
BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
    "chrome",
    "microsoft-edge",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
# fonts by name, because without recommended packages a bare machine would show empty pages
APT_PACKAGES = ("chromium", "fonts-liberation")
APT_OPTIONS = (
    "-q",
    "-o",
    "DPkg::Lock::Timeout=120",
    "-o",
    "Acquire::Retries=2",
    "-o",
    "Acquire::http::Timeout=30",
)
PIP_OPTIONS = ("-q", "--no-input", "--disable-pip-version-check")
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX")  # would lead pip elsewhere
CHECK_S = 60.0
INSTALL_S = 900.0


class DemoError(FleetError):
    """The demo cannot be made ready; the message is one line that says why and what to do."""


class TrialFailed(Exception):
    """The benchmark's own task, tried once, did not give a score."""


@dataclass(frozen=True)
class Demo:
    """A demo that is ready to run.

    benchmark: the benchmark's file, for `evalfleet run`; title: its name for people; why: a sentence that
    says what runs and why this one; python: the interpreter that its tasks use.
    """

    benchmark: Path
    title: str
    why: str
    python: Path


@dataclass(frozen=True)
class Kit:
    """A benchmark that comes with this package: its folder here, how to install and to try it."""

    name: str
    title: str
    pip: tuple[str, ...]
    trial: str  # the parameters of the task that shows that it works here


@dataclass(frozen=True)
class FoundBrowser:
    """A browser that was found, or the reason why there is none."""

    path: str | None
    why_not: str = ""


# the pages are all that is needed of MiniWoB++: its Python half would bring a WebDriver and 170 MB
MINIWOB = Kit("miniwob", "MiniWoB++", ("--no-deps",), '{"env": "click-test", "seed": 1}')
BABYAI = Kit("babyai", "BabyAI", (), '{"level": "BabyAI-GoToObj-v0", "seed": 1}')


def prepare(cache: Path, say: Say, *, browser: bool = True) -> Demo:
    """Make the demo ready in `cache`; quick when it was done before, safe to repeat after any interruption.

    MiniWoB++ where there is a browser, or where one may be installed (root, apt-get); BabyAI otherwise, and
    when `browser` is false. `say` gets a line before each thing that takes time. Raises DemoError when
    neither can be had.
    """
    if sys.platform == "win32":
        raise DemoError("the demo needs Linux or macOS: on Windows, run it inside WSL")
    cache = cache.expanduser().absolute()
    with locked(cache, say), ticking(say):
        found = get_browser(say) if browser else FoundBrowser(None, "no browser was wanted")
        if found.path is not None:
            try:
                why = f"MiniWoB++, {count(MINIWOB)} web tasks in {Path(found.path).name}, offline."
                return make(cache, MINIWOB, say, found.path, why)
            except TrialFailed as error:
                found = FoundBrowser(None, f"{found.path} did not work: {error}")
        why = f"BabyAI, {count(BABYAI)} tasks in a grid world, instead of web tasks: {found.why_not}."
        return make(cache, BABYAI, say, "", why)


def count(kit: Kit) -> int:
    """How many tasks the kit has."""
    return len((HERE / kit.name / "tasks.jsonl").read_text(encoding="utf-8").splitlines())


def make(cache: Path, kit: Kit, say: Say, browser: str, why: str) -> Demo:
    """The kit's interpreter and benchmark, found or made; raises TrialFailed when a browser does not work."""
    python = make_python(cache, kit, say)
    folder = cache / f"{kit.name}-{folder_key(kit, python, browser)}"
    if not folder.exists():
        say(f"Trying one task of {kit.title} ...")
        part = fresh(cache, kit.name)
        write_benchmark(kit, part, python, browser)
        try_once(kit, part, python, browser)
        part.rename(folder)
    return Demo(folder / "benchmark.toml", kit.title, why, python)


def get_browser(say: Say) -> FoundBrowser:
    """A browser: the one named by the environment, one on the path, or one that apt-get installs for root."""
    if path := find_browser():
        return FoundBrowser(path)
    if os.geteuid() != 0:
        return FoundBrowser(None, "there is no Chromium or Chrome here, and only root may install one")
    if shutil.which("apt-get") is None:
        return FoundBrowser(None, "there is no Chromium or Chrome here, and no apt-get to install one")
    say("No browser found: installing chromium with apt-get, about a minute ...")
    apt = ["apt-get", *APT_OPTIONS]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # no time limit: apt-get has its own for the network, and a dpkg killed half way is worse than a wait
    run([*apt, "update"], None, env=environment)
    done = run([*apt, "install", "-y", "--no-install-recommends", *APT_PACKAGES], None, env=environment)
    path = find_browser() if done.returncode == 0 else None
    return FoundBrowser(
        path, f"apt-get could not install chromium ({last_line(done.stderr)})" if path is None else ""
    )


def find_browser() -> str | None:
    """The first Chromium-like browser here; the benchmark's own `MINIWOB_CHROME_BINARY` comes first."""
    for name in (os.environ.get("MINIWOB_CHROME_BINARY", ""), *BROWSERS):
        if name and (path := shutil.which(name)):
            return path
    return None


def make_python(cache: Path, kit: Kit, say: Say) -> Path:
    """An interpreter with the kit's pinned packages, in a virtual environment of its own."""
    requirements = HERE / kit.name / "requirements.txt"
    base = f"{sys.version} {os.path.realpath(sys.executable)} {kit.pip}"
    home = cache / f"{kit.name}-python-{digest(requirements.read_bytes(), base.encode())}"
    python = home / "bin" / "python"
    if works(python):
        return python
    say(f"Installing {kit.title} from PyPI into {home} ...")
    part = fresh(cache, f"{kit.name}-python")
    command(
        [sys.executable, "-m", "venv", str(part)],
        "make a virtual environment",
        "on Debian, install python3-venv",
    )
    pip = [str(part / "bin" / "python"), "-m", "pip", "install", *PIP_OPTIONS, *kit.pip]
    hint = "PyPI, or the mirror in pip's settings, must be reachable"
    command([*pip, "-r", str(requirements)], f"install {kit.title}", hint)
    # only bin/python is used from here on, and that survives a rename
    shutil.rmtree(home, ignore_errors=True)
    part.rename(home)
    return python


TICK_S = 5.0


@contextlib.contextmanager
def ticking(say: Say, tick_s: float = TICK_S) -> Generator[None]:
    """Say every few seconds that something is still under way."""
    done, begun = threading.Event(), time.monotonic()

    def tick() -> None:
        while not done.wait(tick_s):
            say(f"  ... {time.monotonic() - begun:.0f} s")

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def works(python: Path) -> bool:
    """Whether this interpreter exists and starts: the one it was made from may be gone."""
    try:
        return run([str(python), "-E", "-c", ""], CHECK_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def write_benchmark(kit: Kit, folder: Path, python: Path, browser: str) -> None:
    """The benchmark as a folder that `evalfleet run` takes: its files, and the paths filled into its toml."""
    for source in sources(kit):
        shutil.copyfile(source, folder / source.name)
    toml = (HERE / kit.name / "benchmark.toml").read_text(encoding="utf-8")
    for name, value in (("@PYTHON@", str(python)), ("@BROWSER@", browser)):
        head, _, text = toml.partition("\n")  # the first line explains the marks
        # a JSON string is a TOML string, whatever the path has in it
        toml = f"{head}\n{text.replace(name, json.dumps(value, ensure_ascii=False))}"
    (folder / "benchmark.toml").write_text(toml, encoding="utf-8")


def try_once(kit: Kit, folder: Path, python: Path, browser: str) -> None:
    """Run one task as evalfleet would; raises TrialFailed with the reason when it gives no score."""
    with tempfile.TemporaryDirectory(prefix="evalfleet-demo-trial-") as out:
        environment = {**os.environ, "EVALFLEET_PARAMS": kit.trial, "EVALFLEET_OUT": out}
        argv = [str(python), "-E", "-B", f"{kit.name}_agent.py", *([browser] if browser else [])]
        try:
            done = run(argv, CHECK_S, cwd=folder, env=environment)
        except subprocess.TimeoutExpired:
            raise TrialFailed(f"no answer in {CHECK_S:g} s") from None
        if not Path(out, "result.json").exists():
            reason = last_line(done.stderr)
            raise TrialFailed(reason) if browser else DemoError(f"{kit.title} does not run here: {reason}")


def command(argv: Sequence[str], what: str, hint: str) -> None:
    """Run a command; a failure becomes one line with its last words and a hint."""
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    try:
        done = run(argv, INSTALL_S, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DemoError(f"could not {what}: {error}; {hint}") from error
    if done.returncode != 0:
        raise DemoError(f"could not {what}: {last_line(done.stderr or done.stdout)}; {hint}")


def run(
    argv: Sequence[str], timeout: float | None, *, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command without a keyboard and keep what it says."""
    return subprocess.run(
        argv,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )


def last_line(text: str) -> str:
    """The last line that says something, of at most 200 characters; an `ERROR:` line before any other."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR:", "E:"))]
    return (errors or lines or ["it said nothing"])[-1][:200]


def sources(kit: Kit) -> list[Path]:
    """The kit's files that are copied as they are."""
    folder = HERE / kit.name
    return [folder / "tasks.jsonl", *sorted(folder.glob("*.py"))]


def folder_key(kit: Kit, python: Path, browser: str) -> str:
    """Names a benchmark folder by what it is made of; an upgraded browser is another one, and tried again."""
    # the real file: a link's own time does not change with an upgrade
    age = str(os.stat(browser).st_mtime_ns) if browser else ""
    toml = (HERE / kit.name / "benchmark.toml").read_bytes()
    return digest(
        toml, str(python).encode(), browser.encode(), age.encode(), *(f.read_bytes() for f in sources(kit))
    )


def digest(*parts: bytes) -> str:
    """A short hash of several byte strings."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "big") + part)
    return total.hexdigest()[:12]


def fresh(cache: Path, name: str) -> Path:
    """A new empty folder to build in; what interrupted preparations of that name left is deleted."""
    for stale in cache.glob(f"{name}.part-*"):
        shutil.rmtree(stale, ignore_errors=True)
    # never the same name twice: the pip of a killed preparation may still be writing to the old one
    part = Path(tempfile.mkdtemp(prefix=f"{name}.part-", dir=cache))
    part.chmod(0o755)
    return part


@contextlib.contextmanager
def locked(cache: Path, say: Say) -> Generator[None, None, None]:
    """One preparation at a time in this cache; the lock ends with the process, however it ends."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = open(cache / ".lock", "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise DemoError(
            f"cannot write to the demo's folder {cache}: {error.strerror}; give another one"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another demo is being prepared: waiting for it ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        except OSError as error:
            raise DemoError(f"could not prepare the demo in {cache}: {error}") from error
