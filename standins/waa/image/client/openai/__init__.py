"""Stands for the model and its client library: refuses what a test wants refused."""

import stand_in


class OpenAIError(Exception): ...


class APIError(OpenAIError): ...


class APIConnectionError(APIError): ...


class APIStatusError(APIError): ...


class AuthenticationError(APIStatusError): ...


class RateLimitError(APIStatusError): ...


REFUSALS = {
    "unauthorized": AuthenticationError(
        "Error code: 401 - {'error': {'message': 'Incorrect API key provided', 'code': 'invalid_api_key'}}"
    ),
    "throttled": RateLimitError(
        "Error code: 429 - {'error': {'message': 'Rate limit reached', 'code': 'rate_limit_exceeded'}}"
    ),
    "quota": RateLimitError(
        "Error code: 429 - {'error': {'message': 'Exceeded current quota', 'code': 'insufficient_quota'}}"
    ),
    "model-down": APIConnectionError("Connection error."),
}
# as the library names them in tracebacks
for kind in (OpenAIError, APIError, APIConnectionError, APIStatusError, AuthenticationError, RateLimitError):
    kind.__module__ = "openai"


class OpenAI:
    def __init__(self, api_key: str, model: str) -> None:
        if not api_key:
            raise OpenAIError("The api_key client option must be set (OPENAI_API_KEY in the environment)")
        self.key = api_key
        self.model = model

    def create(self, question: str, wish) -> str:
        plan = stand_in.plan()
        if "key" in plan and self.key != plan["key"]:
            raise REFUSALS["unauthorized"]
        if "models" in plan and self.model not in plan["models"]:
            raise APIStatusError(f"Error code: 404 - The model `{self.model}` does not exist")
        if wish.do in REFUSALS:
            raise REFUSALS[wish.do]
        return f"```python\n# {question}\n```"
