"""Is the model there, does the key open it, does it take the agent's calls? Asked before money is spent."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from evalfleet.http_client import NoAnswer, ask
from evalfleet.model import Metering
from evalfleet.ports import Check

from .settings import WaaSettings

OPENAI = "https://api.openai.com/v1"
ANSWER_S = 15.0
THINK_S = 60.0
NAVI_MAX_TOKENS = 4096
"""navi always sends `max_tokens`, whatever the settings say; newer models refuse it."""
REFUSED = "take a model that knows max_tokens and temperature, such as gpt-4o"
RENAMED = f'set max_completion_tokens = true under [model], with key = "OPENAI_API_KEY", or {REFUSED}'
NAME = "model"
_KEY = re.compile(r"\bsk-[\w*-]{8,}")


class ModelAnswer(NamedTuple):
    """An answer of the model's API. `code` 0: there was none, and `text` says why."""

    code: int
    text: str = ""


async def check_model(
    settings: WaaSettings, model: str, secrets: Mapping[str, str], metering: Metering | None = None
) -> Sequence[Check]:
    """Raises nothing. A refusal of the API is bad; no answer is a warning: machines may get one."""
    if not model:
        return [Check(NAME, "bad", "no model is named", "say which, such as --model gpt-4o")]
    if settings.api == "none":
        return [Check(NAME, "warn", "api=none: nobody has checked that the agent can reach its model")]
    if settings.api == "azure":
        return [await asyncio.to_thread(_ask_azure, settings, model, secrets)]
    bound = "max_completion_tokens" if metering is not None and metering.renames_max_tokens else "max_tokens"
    return [await asyncio.to_thread(_ask_openai, settings, model, secrets, bound)]


def _ask_openai(settings: WaaSettings, model: str, secrets: Mapping[str, str], bound: str) -> Check:
    """Ask for the model by its name, and with a short question where that is not enough.

    navi's parameters are refused by some models. And a list of models need not have what can be called:
    Azure lists base models, and is called by the names of deployments.
    """
    base = (settings.base_url or OPENAI).rstrip("/")
    headers = {"Authorization": f"Bearer {secrets['OPENAI_API_KEY']}"}
    is_navi = settings.agent == "navi"
    answer = ModelAnswer(404) if is_navi else _call(f"{base}/models/{urllib.parse.quote(model)}", headers)
    if answer.code == 404:
        question = {"role": "user", "content": "Answer with one word: ready?"}
        body: dict[str, Any] = {"model": model, "messages": [question]}
        if is_navi:
            body.update({bound: NAVI_MAX_TOKENS, "temperature": settings.temperature})
        headers["Content-Type"] = "application/json"
        answer = _call(f"{base}/chat/completions", headers, json.dumps(body).encode(), THINK_S)
    return _judged(answer, model, base, "OPENAI_API_KEY")


def _ask_azure(settings: WaaSettings, model: str, secrets: Mapping[str, str]) -> Check:
    """The endpoint is a deployment's URL, and only a question tells whether that is there: one token."""
    headers = {"api-key": secrets["AZURE_API_KEY"], "Content-Type": "application/json"}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = _call(secrets["AZURE_ENDPOINT"], headers, json.dumps(body).encode())
    return _judged(answer, model, "AZURE_ENDPOINT", "AZURE_API_KEY")


def _judged(answer: ModelAnswer, model: str, where: str, key: str) -> Check:
    if answer.code in (401, 403):
        return Check(
            NAME, "bad", f"{where} refuses {key} (answer {answer.code})", f"put a valid key into {key}"
        )
    if answer.code == 404:
        return Check(NAME, "bad", f"{where} has no model {model!r} for {key}", "check --model, or base_url")
    if answer.code == 429 and "insufficient_quota" in answer.text:
        return Check(NAME, "bad", f"the account of {key} is out of quota", "add credit, or take another key")
    if answer.code in (400, 422):
        told = f"{where} refuses the agent's call to {model!r} (answer {answer.code}): {_message(answer)}"
        return Check(NAME, "bad", told, RENAMED if "max_tokens" in answer.text else REFUSED)
    if answer.code == 0 or answer.code >= 400:
        what = f"answer {answer.code}" if answer.code else answer.text
        return Check(NAME, "warn", f"the model could not be checked at {where}: {what}")
    return Check(NAME, "good", f"{model} answers at {where}")


def _message(answer: ModelAnswer) -> str:
    """What the API says is wrong, in a line."""
    try:
        told: Any = json.loads(answer.text)
        text = str(told["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = answer.text
    return _KEY.sub("sk-***", " ".join(text.split()))[:300]


def _call(
    url: str, headers: Mapping[str, str], body: bytes | None = None, patience_s: float = ANSWER_S
) -> ModelAnswer:
    try:
        answer = ask(url, body, headers, timeout_s=patience_s)
        return ModelAnswer(answer.code, answer.text)
    except NoAnswer as err:
        return ModelAnswer(0, str(err))
