"""Stands for the model and its client library: refuses what a test wants refused.

Where the plan has `"calls": true`, the model is asked at OPENAI_BASE_URL, by HTTP, as the library does.
"""

import json
import os
import urllib.error
import urllib.request

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
        if plan.get("calls"):
            return self.ask(question)
        return f"```python\n# {question}\n```"

    def ask(self, question: str) -> str:
        body = {"model": self.model, "messages": [{"role": "user", "content": question}], "max_tokens": 4096}
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as err:
            kind = {401: AuthenticationError, 429: RateLimitError}.get(err.code, APIStatusError)
            raise kind(f"Error code: {err.code} - {err.read().decode()}") from None
        except urllib.error.URLError as err:
            raise APIConnectionError("Connection error.") from err
