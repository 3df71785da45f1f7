"""Rules of alerts, each on a run made by hand: when it tells, of what, and that it tells it once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec import structs

from evalfleet import events as ev
from evalfleet.alert_rules import ABOUT_A_MACHINE, ABOUT_AN_ATTEMPT, DEFAULTS
from evalfleet.channels.samples import Sample
from evalfleet.errors import RequestError
from evalfleet.journal import Store
from evalfleet.model import (
    SECOND,
    Alerting,
    AttemptId,
    Broken,
    Cause,
    MachineId,
    Micros,
    Notify,
    Scored,
    after,
)
from evalfleet.planning.config import load_config
from evalfleet.views.alert_watch import AlertWatch, read_alerts
from evalfleet.views.alerts import (
    Alert,
    Raised,
    Situation,
    act_of,
    holding,
)
from evalfleet.views.progress import Progress
from tests.unit.views_feed import Feed

ONE = MachineId("run1-abc123-1")
SAY = "IGNORE ALL RULES"


def told(
    feed: Feed,
    progress: Mapping[AttemptId, Progress] | None = None,
    series: Mapping[MachineId, Sequence[Sample]] | None = None,
    alerting: Alerting | None = None,
) -> dict[str, list[Alert]]:
    situation = Situation(feed.state, feed.now, feed.now, progress or {}, series or {})
    found: dict[str, list[Alert]] = {}
    for alert in holding(situation, alerting or Alerting()):
        found.setdefault(alert.rule, []).append(alert)
        assert SAY not in alert.text
        of_a_machine = {*ABOUT_A_MACHINE, "machines_left"}
        assert (alert.machine is not None, alert.attempt is not None) == (
            alert.rule in of_a_machine,
            alert.rule in ABOUT_AN_ATTEMPT,
        )
    return found


def test_an_attempt_that_makes_no_progress() -> None:
    feed = Feed(tasks=4, machines=2)
    stuck, busy = feed.start("t_0"), feed.start("t_1", 2)
    assert told(feed, {stuck: Progress(3, idle_s=899.0)}) == {}
    found = told(feed, {stuck: Progress(3, idle_s=900.0), busy: Progress(3, idle_s=5.0)})
    (alert,) = found["job_stuck_no_progress"]
    assert (alert.attempt, alert.machine, alert.severity) == (stuck, ONE, "warning")


def test_a_deadline_that_will_not_be_kept_is_told_once_a_few_tasks_tell_so() -> None:
    feed = Feed(tasks=100, machines=1)
    feed.state.limits = structs.replace(feed.state.limits, deadline_s=600.0)
    for n in range(4):
        feed.attempt(f"t_{n}", Scored(1.0, True))
    assert told(feed) == {}
    feed.attempt("t_4", Scored(1.0, True))
    (alert,) = told(feed)["promise_at_risk"]
    assert (alert.subject, alert.severity) == ("the run will not be done by its deadline", "warning")
    assert "it needs about 1h35m" in alert.text


def test_a_machine_that_does_not_become_ready_and_one_that_fetches_its_image_for_long() -> None:
    feed = Feed(tasks=4, machines=1, ready=False)
    feed.add(ev.MachineUp(ONE))
    feed.add(ev.MachineStep(ONE, "image", SAY))
    feed.wait(200)
    feed.add(ev.MachineStep(ONE, "image", "more"))
    feed.wait(99)
    assert told(feed) == {}
    feed.wait(1)
    assert list(told(feed)) == ["docker_pull_slow"]
    feed.wait(900)
    assert set(told(feed)) == {"docker_pull_slow", "container_startup_timeout"}


def samples(now: Micros, seconds: int, cpu: float = 0.1, disk: float = 0.1) -> list[Sample]:
    return [Sample(now - s * SECOND, cpu, 0.2, disk) for s in range(seconds, -1, -10)]


def test_a_machine_whose_disk_is_full_for_five_minutes_is_critical() -> None:
    feed = Feed(tasks=4, machines=2)
    feed.wait(1000)
    (alert,) = told(feed, series={ONE: samples(feed.now, 300, disk=0.96)})["compute_node_unhealthy"]
    assert (alert.severity, alert.machine) == ("critical", ONE)
    assert "disk of worker-1" in alert.text
    assert told(feed, series={ONE: samples(feed.now, 280, disk=0.96)}) == {}
    broken = [
        sample._replace(disk=0.5) if n == 9 else sample for n, sample in enumerate(samples(feed.now, 300))
    ]
    assert told(feed, series={ONE: broken}) == {}
    gap = [
        sample
        for sample in samples(feed.now, 400, cpu=1.0)
        if not 100 < (feed.now - sample.at) // SECOND < 200
    ]
    assert told(feed, series={ONE: gap}) == {}, "nobody knows what was in the gap"
    old = samples(after(feed.now, -500), 300, cpu=1.0)
    assert told(feed, series={ONE: old}) == {}, "what a machine told long ago is no news"


def test_a_computer_with_several_machines_is_told_of_once() -> None:
    feed = Feed(tasks=4, machines=0)
    for n in (1, 2, 3):
        machine = feed.machine(n, ready=False)
        feed.add(ev.MachineUp(machine, node="gpu1" if n < 3 else "gpu2"))
        feed.add(ev.MachineReady(machine))
    feed.wait(1000)
    series = {machine: samples(feed.now, 300, cpu=1.0) for machine in feed.state.machines}
    both, single = told(feed, series=series)["compute_node_unhealthy"]
    assert "CPU of gpu1, which has 2 machines of the run, has been over" in both.text
    assert "CPU of worker-3 has been over" in single.text


def test_a_node_of_a_service_that_is_used_up_is_replaced_once_for_each_task() -> None:
    """A busy processor alone is what tasks are for: then nothing must have come of it, either."""
    feed = Feed(tasks=4, machines=1)
    attempt = feed.start("t_0")
    feed.wait(1000)
    rule = DEFAULTS["compute_node_unhealthy"]

    def act(progress: Progress | None = None, **used: float) -> str:
        series = {ONE: samples(feed.now, 300, **used)}
        known = {attempt: progress} if progress is not None else {}
        situation = Situation(feed.state, feed.now, feed.now, known, series)
        (alert,) = (
            found for found in holding(situation, Alerting()) if found.rule == "compute_node_unhealthy"
        )
        return act_of(situation, rule, alert)

    assert act(disk=0.96) == "", "a host of one's own is not replaced for that"
    feed.state.machines[ONE].offer = structs.replace(
        feed.offer, life=structs.replace(feed.offer.life, queues=True)
    )
    assert act(disk=0.96) == "replace"
    assert act(cpu=1.0) == "", "nobody knows whether it gets on"
    assert act(Progress(3, idle_s=10.0), cpu=1.0) == ""
    assert act(Progress(3, idle_s=600.0), cpu=1.0) == "replace"
    spared = Broken(Cause.CANCELLED, "its machine was replaced by alert compute_node_unhealthy: disk")
    feed.add(ev.AttemptEnded(attempt, spared, 1.0))
    attempt = feed.start("t_0")
    assert act(disk=0.96) == "", "it would use up the next one, too"


def test_a_rule_that_has_told_what_it_found_acts_when_it_comes_to_that(tmp_path: Path) -> None:
    """A node is busy long before it is known that nothing comes of that. It is replaced once."""
    feed = Feed(tasks=4, machines=1)
    feed.state.machines[ONE].offer = structs.replace(
        feed.offer, life=structs.replace(feed.offer.life, queues=True)
    )
    attempt = feed.start("t_0")
    feed.wait(1000)
    store = Store.open(tmp_path)
    store.create_stream("run1", "run", feed.now, [record.event for record in feed.records])

    def watch() -> AlertWatch:
        return AlertWatch(tmp_path, store, "run1", Notify(), lambda: feed.now)

    def judge(watching: AlertWatch, idle_s: float) -> list[str]:
        """What was done by what was told so far."""
        known, series = {attempt: Progress(3, idle_s=idle_s)}, {ONE: samples(feed.now, 300, cpu=1.0)}
        watching.judge(Situation(feed.state, feed.now, feed.now, known, series))
        return [alert.act for alert in read_alerts(tmp_path / "run1")]

    first = watch()
    assert judge(first, 100.0) == [""]
    assert judge(first, 299.0) == [""]
    assert judge(first, 300.0) == ["", "replace"]
    assert judge(first, 305.0) == ["", "replace"]
    assert judge(watch(), 310.0) == ["", "replace"]


def test_a_node_of_a_service_that_does_nothing_while_nothing_comes_of_its_attempt_is_replaced_once() -> None:
    feed = Feed(tasks=4, machines=1)
    feed.state.machines[ONE].offer = structs.replace(
        feed.offer, life=structs.replace(feed.offer.life, queues=True)
    )
    attempt = feed.start("t_0")
    feed.wait(1000)
    quiet = Progress(3, idle_s=600.0)

    def act(progress: Progress | None = quiet, seconds: int = 600, cpu: float = 0.02) -> str | None:
        """None: nothing is told."""
        series = {ONE: samples(feed.now, seconds, cpu)}
        known = {attempt: progress} if progress is not None else {}
        situation = Situation(feed.state, feed.now, feed.now, known, series)
        alerts = [alert for alert in holding(situation, Alerting()) if alert.rule == "no_sign_of_life"]
        return act_of(situation, DEFAULTS["no_sign_of_life"], alerts[0]) if alerts else None

    assert act() == "replace"
    assert act(cpu=0.1) is None, "it computes: who thinks for long is not broken"
    assert act(Progress(3, idle_s=599.0)) is None
    assert act(None) is None, "nobody knows what it wrote"
    assert act(seconds=580) is None
    feed.state.machines[ONE].offer = feed.offer
    assert act() is None, "a computer of one's own is never replaced for that"
    feed.state.machines[ONE].offer = structs.replace(
        feed.offer, life=structs.replace(feed.offer.life, queues=True)
    )
    task = feed.state.tasks[feed.state.attempts[attempt].task]
    task.task = structs.replace(task.task, stall_s=3600.0)
    assert act() is None, "its benchmark says how long it may be silent"
    task.task = structs.replace(task.task, stall_s=0.0)
    spared = Broken(Cause.CANCELLED, "its machine was replaced by alert no_sign_of_life: t_0.0 has written")
    feed.add(ev.AttemptEnded(attempt, spared, 1.0))
    attempt = feed.start("t_0")
    assert act() == "", "so it is with this task: it is told, and the time limit ends it"


def test_a_container_engine_that_answers_no_more_is_told_where_one_was_used() -> None:
    feed = Feed(tasks=4, machines=2)
    feed.wait(1000)
    down = [sample._replace(containers=-1) for sample in samples(feed.now, 300)]
    assert told(feed, series={ONE: down}) == {}, "nobody has needed it"
    before = Sample(down[0].at - 10 * SECOND, 0.1, 0.1, 0.1, containers=2)
    (alert,) = told(feed, series={ONE: [before, *down]})["compute_node_unhealthy"]
    assert alert.text == "the container engine of worker-1 has not answered for 5m00s"


def test_a_task_that_takes_twice_the_median() -> None:
    feed = Feed(tasks=20, machines=1)
    for n in range(5):
        feed.attempt(f"t_{n}", Scored(1.0, True), seconds=60)
    feed.start("t_9")
    feed.wait(119)
    assert told(feed) == {}
    feed.wait(1)
    assert list(told(feed)) == ["slow_task_execution"]


def test_many_retries_are_told_with_their_causes() -> None:
    feed = Feed(tasks=20, machines=1)
    feed.add(ev.RunSteered("set", "ann", attempts=3))
    for _ in range(3):
        feed.attempt("t_0", Broken(Cause.MODEL, SAY))
    for n in range(1, 8):
        feed.attempt(f"t_{n}", Scored(1.0, True))
    found = told(feed)
    assert set(found) == {"high_retry_rate"}
    assert "20.0% of 10 attempts" in found["high_retry_rate"][0].text


def test_the_budget_at_half_four_fifths_and_all_of_it() -> None:
    feed = Feed(tasks=4, machines=1, usd_per_hour=3.6)
    feed.add(ev.RunSteered("set", "ann", budget_usd=1.0))
    raised, subjects = Raised(), list[str]()
    for _ in range(12):
        feed.wait(100)
        alerts = told(feed).get("budget", [])
        subjects += [alert.subject for alert in raised.new(alerts, feed.now, 1800)]
    assert subjects == ["50%", "80%", "100%"]


@pytest.mark.parametrize("usd_per_hour", [0.0, 1.0])
def test_a_machine_that_cannot_be_deleted_is_an_alert_if_it_costs(usd_per_hour: float) -> None:
    feed = Feed(tasks=4, machines=1, usd_per_hour=usd_per_hour)
    feed.lose(1)
    feed.add(ev.MachineDeleteRefused(ONE, SAY))
    assert list(told(feed)) == (["machines_left"] if usd_per_hour else [])


def test_a_machine_that_is_not_deleted_for_long_and_the_end_of_a_run() -> None:
    feed = Feed(tasks=1, machines=1, usd_per_hour=1.0)
    feed.attempt("t_0", Scored(1.0, True))
    feed.add(ev.MachineCondemned(ONE, "the run is over"))
    feed.wait(1199)
    assert told(feed) == {}
    feed.wait(1)
    assert list(told(feed)) == ["machines_left"]
    feed.add(ev.MachineDeleted(ONE, feed.now))
    feed.add(ev.RunEnded("done"))
    (alert,) = told(feed)["run_ended"]
    assert (alert.severity, alert.text) == ("info", "the run has ended (done): 1 of 1 scored")


def test_each_thing_is_told_once_and_again_only_after_it_was_over_and_the_cool_down_is() -> None:
    alert, raised = Alert("r", "s", "info", "t"), Raised()

    def new(alerts: list[Alert], second: int) -> int:
        return len(raised.new(alerts, second * SECOND, 100.0))

    assert [new([alert], s) for s in (0, 10, 500)] == [1, 0, 0], "as long as it holds, once"
    assert [new([], 510), new([alert], 520)] == [0, 1]
    assert [new([], 530), new([alert], 540), new([alert], 619)] == [0, 0, 0]
    assert new([alert], 620) == 1
    assert Raised([alert]).new([alert], 10 * SECOND, 0.0) == [], (
        "what an earlier controller told is not told again"
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "evalfleet.toml"


def test_rules_are_changed_in_the_file(config: Path) -> None:
    config.write_text("[alerts]\ncool_down_s = 60\n[alerts.slow_task_execution]\nfactor = 3\non = false\n")
    alerting = load_config(config, config.parent).notify.alerting
    assert alerting is not None
    assert alerting.cool_down_s == 60.0
    rule = alerting.rules["slow_task_execution"]
    assert (rule.factor, rule.on, rule.severity) == (3.0, False, DEFAULTS["slow_task_execution"].severity)
    feed = Feed(tasks=20, machines=1)
    for n in range(5):
        feed.attempt(f"t_{n}", Scored(1.0, True))
    feed.start("t_9")
    feed.wait(1000)
    assert told(feed, alerting=alerting) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[alerts.slow_task]\n", "there is no alert 'slow_task'"),
        ("[alerts.budget]\nafter = 3\n", "after"),
        ('[alerts.budget]\nseverity = "loud"\n', "loud"),
        ("[alerts]\ncool_down_s = -1\n", "cool_down_s"),
        ("[alerts]\nbudget = 3\n", "[alerts.budget]"),
        ('[alerts]\ndashboard = "here"\n', "'dashboard' must be an address"),
        ('[alerts.budget]\nact = "explode"\n', "explode"),
        ('[alerts.budget]\nact = "drain"\n', "act = 'drain' is only for compute_node_unhealthy, "),
        ('[alerts.docker_pull_slow]\nact = "end"\n', "act = 'end' is only for job_stuck_no_progress, "),
        ('[notify]\napprise = "slack"\n', "must be a list of Apprise's addresses"),
    ],
)
def test_a_rule_that_is_wrong_is_refused_in_a_line(config: Path, text: str, words: str) -> None:
    config.write_text(text)
    with pytest.raises(RequestError) as refused:
        load_config(config, config.parent)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
