"""The rules of alerts: their names, their defaults, and what each is about."""

from __future__ import annotations

from collections.abc import Mapping

from .model import AlertRule

UNHEALTHY = "compute_node_unhealthy"
LIFELESS = "no_sign_of_life"

DEFAULTS: Mapping[str, AlertRule] = {
    "job_stuck_no_progress": AlertRule(after_s=900.0),
    LIFELESS: AlertRule("critical", after_s=600.0, share=0.05, act="auto"),
    "container_startup_timeout": AlertRule(after_s=1200.0),
    UNHEALTHY: AlertRule("critical", after_s=300.0, share=0.95, act="auto"),
    "slow_task_execution": AlertRule("info", factor=2.0),
    "high_retry_rate": AlertRule(share=0.2),
    "docker_pull_slow": AlertRule(after_s=300.0),
    "budget": AlertRule(),
    "promise_at_risk": AlertRule(count=5),
    "machines_left": AlertRule("critical", after_s=1200.0),
    "run_ended": AlertRule("info"),
}
"""Every rule as it is unless evalfleet.toml changes it."""
REMOVED: Mapping[str, str] = {
    "model_error_repeated": "`high_retry_rate` reports it with its causes",
    "queue_longer_than_planned": "`container_startup_timeout` and --deadline report late machines",
}
"""Rules that no longer exist, with what reports the same."""
AUTOMATIC = frozenset({LIFELESS, UNHEALTHY})
"""Rules that decide by themselves whether a service's node is replaced."""
ABOUT_AN_ATTEMPT = frozenset({"job_stuck_no_progress", LIFELESS, "slow_task_execution"})
ABOUT_A_MACHINE = ABOUT_AN_ATTEMPT | {"container_startup_timeout", UNHEALTHY, "docker_pull_slow"}
"""Rules that name a machine. The machine of an attempt counts."""
AFTER_THE_END = ("machines_left", "run_ended")
"""Rules that also hold for a run that is over."""
