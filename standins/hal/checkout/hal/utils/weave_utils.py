"""What models cost, a token. HAL's own module imports W&B's library, which this one would miss."""

MODEL_PRICES_DICT = {
    "gpt-4o": {"prompt_tokens": 2.5 / 1e6, "completion_tokens": 10 / 1e6},
    "o3-mini": {"prompt_tokens": 1.1 / 1e6, "completion_tokens": 4.4 / 1e6},
}
CACHED_PRICE_OVERRIDES = {"o3-mini": 0.55 / 1e6}
