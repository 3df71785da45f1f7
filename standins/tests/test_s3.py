"""The stand-in for S3, by Amazon's own client."""

from __future__ import annotations

import importlib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from botocore.config import Config

from standins.s3 import BUCKET, OWN, REGION, serving

boto3: Any = importlib.import_module("boto3")


@pytest.fixture
def url() -> Iterator[str]:
    with serving() as address:
        yield address


def client(url: str, id: str = OWN[0], secret: str = OWN[1]) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name=REGION,
        aws_access_key_id=id,
        aws_secret_access_key=secret,
        config=Config(signature_version="s3v4"),
    )


def test_the_users_key_lets_in_and_no_other(url: str) -> None:
    own = client(url)
    own.put_object(Bucket=BUCKET, Key="a", Body=b"one", IfNoneMatch="*")
    refusals: Sequence[tuple[Callable[[], Any], int]] = (
        (lambda: own.put_object(Bucket=BUCKET, Key="a", Body=b"two", IfNoneMatch="*"), 412),
        (lambda: client(url, secret="wrong").list_objects_v2(Bucket=BUCKET), 403),
        (lambda: client(url, id="AKIANOBODY").list_objects_v2(Bucket=BUCKET), 403),
    )
    for refused, code in refusals:
        with pytest.raises(own.exceptions.ClientError) as told:
            refused()
        assert told.value.response["ResponseMetadata"]["HTTPStatusCode"] == code


def test_a_signed_address_is_for_one_use_of_one_object(url: str) -> None:
    own = client(url)
    own.put_object(Bucket=BUCKET, Key="a", Body=b"one")
    address = own.generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": "a"})
    with urllib.request.urlopen(address) as answer:
        assert answer.read() == b"one"
    other = address.replace(f"/{BUCKET}/a?", f"/{BUCKET}/b?")
    for refused in (urllib.request.Request(address, method="DELETE"), urllib.request.Request(other)):
        with pytest.raises(urllib.error.HTTPError) as told:
            urllib.request.urlopen(refused)
        assert told.value.code == 403
        told.value.close()
