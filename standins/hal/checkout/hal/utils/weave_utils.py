"""What models cost, a token; and what W&B knows of a run. As HAL's own, it imports W&B's library."""

from typing import Any

import weave

MODEL_PRICES_DICT = {
    "gpt-4o": {"prompt_tokens": 2.5 / 1e6, "completion_tokens": 10 / 1e6},
    "o3-mini": {"prompt_tokens": 1.1 / 1e6, "completion_tokens": 4.4 / 1e6},
}
CACHED_PRICE_OVERRIDES = {"o3-mini": 0.55 / 1e6}


def get_total_cost(client: Any) -> tuple[float, dict[str, Any]]:
    return 1.5, {"gpt-4o": {"prompt_tokens": 3, "completion_tokens": 4}}


def get_weave_calls(client: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {task: [{"traced_by": weave.__name__}] for task in client.tasks()}, {}
