"""A run for continuous integration: JUnit's XML, and annotations of GitHub's workflows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .format import clean
from .tasks import in_order, outcome_word

if TYPE_CHECKING:
    from xml.etree import ElementTree as ET

    from .documents import Results, TaskResult

ANNOTATIONS = 10
"""GitHub shows so many of a step."""


def junit(results: Results) -> str:
    """One suite a domain, one case a task: a failed task is a failure, a broken one an error, and a task
    without an outcome is skipped."""
    from xml.etree import ElementTree as ET  # here, because it takes a while

    domains: dict[str, list[TaskResult]] = {}
    for task in results["tasks"]:
        domains.setdefault(task["domain"], []).append(task)
    root = ET.Element("testsuites", {"name": _text(results["run"]), **_counts(results["tasks"])})
    for domain, tasks in sorted(domains.items()):
        name = _text(domain or results["benchmark"])
        suite = ET.SubElement(root, "testsuite", {"name": name, **_counts(tasks)})
        for task in tasks:
            _case(suite, results["benchmark"], task)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True)


def _case(suite: ET.Element, benchmark: str, task: TaskResult) -> None:
    from xml.etree import ElementTree as ET

    seconds = f"{task['duration_seconds'] or 0.0:.3f}"
    name = f"{benchmark}.{task['domain']}" if task["domain"] else benchmark
    case = ET.SubElement(suite, "testcase", name=_text(task["task_id"]), classname=_text(name), time=seconds)
    word, why = outcome_word(task), _text(task["error"] or "")
    if word == "fail":
        ET.SubElement(case, "failure", message=f"score {task['score']:g}", type="fail").text = why
    elif word == "broken":
        ET.SubElement(case, "error", message=_text(clean(why)), type=_text(task["cause"] or "")).text = why
    elif word != "pass":
        ET.SubElement(case, "skipped", message=word)


def _counts(tasks: list[TaskResult]) -> dict[str, str]:
    words = [outcome_word(task) for task in tasks]
    failures, errors = words.count("fail"), words.count("broken")
    skipped = len(words) - failures - errors - words.count("pass")
    seconds = sum(task["duration_seconds"] or 0.0 for task in tasks)
    counts = {"tests": len(words), "failures": failures, "errors": errors, "skipped": skipped}
    return {**{name: str(n) for name, n in counts.items()}, "time": f"{seconds:.3f}"}


def _text(text: str) -> str:
    """Without characters that XML cannot hold: what agents write may have any."""
    return "".join(c if c in "\t\n\r" or (c >= " " and c.isprintable()) else "?" for c in text)


def github_annotations(results: Results) -> str:
    """A line for each failed or broken task, and one with all in a few words, as GitHub's workflows read."""
    troubled = [task for task in in_order(results["tasks"]) if outcome_word(task) in ("fail", "broken")]
    lines = [_annotation(task) for task in troubled[: ANNOTATIONS - 1]]
    counts = f"{results['succeeded']:,} of {results['scored']:,} passed, {results['broken']:,} broken"
    left = len(troubled) - len(lines)
    more = f"; {left:,} more failed or broke" if left else ""
    return "\n".join([*lines, f"::notice title={_escaped(results['run'], True)}::{counts}{more}"])


def _annotation(task: TaskResult) -> str:
    broken = task["status"] == "broken"
    title = f"{task['task_id']}: " + (f"broken: {task['cause']}" if broken else f"fail ({task['score']:g})")
    why = clean(task["error"] or "", 500) or "no reason was given"
    return f"::warning title={_escaped(title, True)}::{_escaped(why)}"


def _escaped(text: str, is_property: bool = False) -> str:
    """Nothing that an agent wrote begins another command: control characters are gone, signs are escaped."""
    plain = clean(text, 500).replace("%", "%25")
    return plain.replace(":", "%3A").replace(",", "%2C") if is_property else plain
