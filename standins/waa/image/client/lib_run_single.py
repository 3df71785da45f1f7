"""One task: reset, think and act step by step, evaluate, write the result."""

import datetime
import logging
import os
import signal
import sys
import time

from trajectory_recorder import TrajectoryRecorder

logger = logging.getLogger("desktopenv.experiment")


def run_single_example(agent, env, example, args, folder, scores, wish) -> None:
    agent.reset()
    obs = env.reset(task_config=example)
    started = datetime.datetime.now()
    recorder = TrajectoryRecorder(folder)
    recorder.record_init(None if wish.do == "recorder" else obs, example, started.strftime("%Y%m%d@%H%M%S"))
    steps = min(wish.steps, args.max_steps)
    done, step = False, 0
    while not done and (wish.do == "slow" or step < args.max_steps):
        if obs is None:
            logger.error("Observation is None. Waiting a little to do next step.")
            step += 1
            continue
        logger.info("Agent: Thinking...")
        actions, logs = agent.predict(example["instruction"], obs)
        env.controller.update_computer()
        for action in actions:
            at = datetime.datetime.now().strftime("%Y%m%d@%H%M%S")
            logger.info("Step %d: %s", step + 1, action)
            obs, done = env.step(action, wish.seconds / max(steps, 1))
            recorder.record_step(
                obs or {}, logs, step, at, str(datetime.datetime.now() - started), action, done
            )
        step += 1
        misbehave(wish.do, step, env)
    logger.info("Running evaluator(s)...")
    result = env.evaluate()
    scores.append(float(result))
    with open(os.path.join(folder, "result.txt"), "w", encoding="utf-8") as f:
        f.write("see the log\n" if wish.do == "bad-result" else f"{result}\n")
    recorder.record_end(result, started)
    if wish.do == "bad-exit":
        sys.exit(1)


def misbehave(what: str, step: int, env) -> None:
    """After the first step."""
    if step > 1:
        return
    if what == "no-result":
        sys.exit(0)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    commands = {"hang-guest": "HANG", "corrupt": "CORRUPT", "guest-dies": "DIE"}
    if what in commands:
        env.controller.execute_python_windows_command(commands[what])
        env.controller.update_computer()
    while what == "hang":
        time.sleep(3600)
