import json
import os
import sys
from pathlib import Path

from inspect_ai import eval
from inspect_ai.scorer import value_to_float
from inspect_evals.agent_bench import agent_bench_os

out, agent = os.environ["EVALFLEET_OUT"], json.loads(os.environ.get("EVALFLEET_AGENT", "{}"))
task = agent_bench_os(split="dev", sandbox_type=agent.get("sandbox", "docker"))
(log,) = eval(task, os.environ["EVALFLEET_MODEL"], sample_id=int(sys.argv[1]), log_dir=out, display="plain")
sample = log.samples[0] if log.samples else None
if log.error or sample is None or not sample.scores:
    error = log.error or (sample and sample.error)
    result = {"broken": "internal", "error": error.message if error else "Inspect gave no score"}
else:
    (score,) = sample.scores.values()
    steps = sum(message.role == "assistant" for message in sample.messages)
    tokens = sum(usage.total_tokens for usage in sample.model_usage.values())
    result = {"score": value_to_float()(score.value), "num_steps": steps, "metrics": {"tokens": tokens}}
Path(out, "result.json").write_text(json.dumps(result))
