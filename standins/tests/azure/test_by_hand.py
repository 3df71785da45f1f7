"""`python -m standins.azure` serves until it is told to end, and says what a client needs."""

from __future__ import annotations

import re
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]


def test_it_answers_as_azure_does_and_ends_when_told() -> None:
    argv = [sys.executable, "-m", "standins.azure"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = ""
            while "Ctrl-C" not in said:
                line = process.stdout.readline()
                assert line, said
                said += line
            values = dict(re.findall(r"^export (\w+)=(.*)$", said, re.MULTILINE))
            context = ssl.create_default_context(cafile=values["REQUESTS_CA_BUNDLE"])
            url = f"{values['AZURE_AUTHORITY_HOST']}/subscriptions?api-version=2022-12-01"
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(url, context=context, timeout=PATIENCE_S)
            assert refused.value.code == 401, "without a token, as Azure"
            refused.value.close()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
