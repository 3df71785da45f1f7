"""What models cost, a token; and what W&B knows of a run. As HAL's own, it imports W&B's library."""

from typing import Any

import weave

MODEL_PRICES_DICT = {
    "gpt-4o": {"prompt_tokens": 2.5 / 1e6, "completion_tokens": 10 / 1e6},
    "o3-mini": {"prompt_tokens": 1.1 / 1e6, "completion_tokens": 4.4 / 1e6},
}
CACHED_PRICE_OVERRIDES = {"o3-mini": 0.55 / 1e6}


def get_total_cost(client: Any) -> tuple[float, dict[str, Any]]:
    tasks = len(client.tasks())
    return 0.006 * tasks, {"gpt-4o": {"prompt_tokens": 2000 * tasks, "completion_tokens": 100 * tasks}}


def get_weave_calls(client: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    usage = {"prompt_tokens": 1000, "completion_tokens": 50}
    told = {"model": "gpt-4o", "call_metadata": [{"usage": usage}] * 2, "traced_by": weave.__name__}
    return dict.fromkeys(client.tasks(), told), {}
