"""The stand-in for S3 and STS, by Amazon's own client."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from botocore.config import Config

from standins.s3 import BUCKET, OWN, REGION, serving

boto3: Any = importlib.import_module("boto3")
POLICY = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": f"arn:aws:s3:::{BUCKET}/mine/*"},
        {
            "Effect": "Allow",
            "Action": ["s3:PutObject"],
            "Resource": f"arn:aws:s3:::{BUCKET}/mine/*",
            "Condition": {"Null": {"s3:if-none-match": "false"}},
        },
    ],
}


@pytest.fixture
def url() -> Iterator[str]:
    with serving() as address:
        yield address


def client(kind: str, url: str, id: str = OWN[0], secret: str = OWN[1], token: str | None = None) -> Any:
    return boto3.client(
        kind,
        endpoint_url=url,
        region_name=REGION,
        aws_access_key_id=id,
        aws_secret_access_key=secret,
        aws_session_token=token,
        config=Config(signature_version="v4" if kind == "sts" else "s3v4"),
    )


def test_a_session_may_do_what_its_policy_says_and_nothing_else(url: str) -> None:
    own = client("s3", url)
    own.put_object(Bucket=BUCKET, Key="others/a", Body=b"theirs")
    made = client("sts", url).get_federation_token(
        Name="evalfleet", DurationSeconds=900, Policy=json.dumps(POLICY)
    )
    keys = made["Credentials"]
    narrow = client("s3", url, keys["AccessKeyId"], keys["SecretAccessKey"], keys["SessionToken"])
    narrow.put_object(Bucket=BUCKET, Key="mine/a", Body=b"one", IfNoneMatch="*")
    assert narrow.get_object(Bucket=BUCKET, Key="mine/a")["Body"].read() == b"one"
    refusals: Sequence[tuple[Callable[[], Any], int]] = (
        (lambda: narrow.put_object(Bucket=BUCKET, Key="mine/a", Body=b"two", IfNoneMatch="*"), 412),
        (lambda: narrow.put_object(Bucket=BUCKET, Key="mine/a", Body=b"two"), 403),
        (lambda: narrow.get_object(Bucket=BUCKET, Key="mine/b"), 403),  # which is not there
        (lambda: narrow.get_object(Bucket=BUCKET, Key="others/a"), 403),
        (lambda: narrow.delete_object(Bucket=BUCKET, Key="mine/a"), 403),
        (lambda: narrow.list_objects_v2(Bucket=BUCKET), 403),
        (lambda: client("s3", url, secret="wrong").list_objects_v2(Bucket=BUCKET), 403),
    )
    for refused, code in refusals:
        with pytest.raises(own.exceptions.ClientError) as told:
            refused()
        assert told.value.response["ResponseMetadata"]["HTTPStatusCode"] == code
    address = client("s3", url).generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": "mine/a"})
    urls = importlib.import_module("urllib.request")
    with urls.urlopen(address) as answer:
        assert answer.read() == b"one"
