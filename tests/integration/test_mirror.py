"""A journal and its copy in a store: a folder, and S3 as moto's server speaks it."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.store import RUN, opened, planned, race, start_s3
from bench.workspace import Workspace
from evalfleet.api.resumption import fetch_run
from evalfleet.errors import JournalForeign, LeaseLost, RequestError
from evalfleet.events import AttemptCollected, GradingFailed, Record, StopRequested
from evalfleet.journal import Store
from evalfleet.mirror import MirroredJournal, StoreAway, StoreRefused, open_objects
from evalfleet.mirror import journal as mirroring
from evalfleet.mirror.mirror import DROPPED
from evalfleet.mirror.objects import FolderObjects, ObjectExists
from evalfleet.mirror.sequence import SEGMENT
from evalfleet.model import AttemptId
from evalfleet.planning import workspace as planning
from standins import s3 as s3_standin
from standins.gcs import CloudStorage
from tests.azurite import azurite
from tests.waiting import until_seen


@dataclass(frozen=True)
class Bucket:
    """A store: its URL, and how it is reached."""

    url: str
    environ: Mapping[str, str]


@pytest.fixture(scope="module")
def s3() -> Iterator[Mapping[str, str]]:
    with Workspace() as space:
        yield start_s3(space)


@pytest.fixture(scope="module")
def gs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    with CloudStorage("bucket", "read-only") as storage:
        storage.read_only.add("read-only")
        yield storage.environ(tmp_path_factory.mktemp("google"))


@pytest.fixture(scope="module")
def az(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    with azurite(tmp_path_factory.mktemp("azurite")) as environ:
        yield environ


@pytest.fixture(params=["folder", "s3", "gs", pytest.param("az", marks=pytest.mark.nightly)])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    if request.param != "folder":
        return Bucket(f"{request.param}://bucket/{tmp_path.name}", request.getfixturevalue(request.param))
    (tmp_path / "bucket").mkdir()
    return Bucket((tmp_path / "bucket").as_uri(), {})


@pytest.fixture
def folder(tmp_path: Path) -> Bucket:
    (tmp_path / "bucket").mkdir()
    return Bucket((tmp_path / "bucket").as_uri(), {})


def told(home: Path) -> list[str]:
    """What a home's journal holds of what these tests write."""
    records: list[Record] = list(Store.open(home).read(RUN))
    return [record.event.detail for record in records if isinstance(record.event, GradingFailed)]


async def write(journal: MirroredJournal, *details: str) -> bool:
    return await journal.append(1, [GradingFailed(detail) for detail in details])


def test_objects_are_created_once_and_read_back(bucket: Bucket, tmp_path: Path) -> None:
    async def use() -> None:
        objects = open_objects(bucket.url, bucket.environ)
        await objects.create("r/journal/1", b"one")
        with pytest.raises(ObjectExists):
            await objects.create("r/journal/1", b"two")
        assert await objects.read("r/journal/1") == b"one"
        assert await objects.read("r/journal/2") is None
        await objects.replace("r/results.json", b"old")
        (tmp_path / "file").write_bytes(b"new" * 100_000)
        await objects.replace("r/results.json", tmp_path / "file")
        await objects.fetch("r/results.json", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == b"new" * 100_000
        await objects.create("q/x", b"")
        assert await objects.names("r/") == ["r/journal/1", "r/results.json"]
        assert await objects.names("r/", after="r/journal/1") == ["r/results.json"]
        assert await objects.folders() == ["q", "r"]
        racers = (objects.create("q/race", b"%d" % n) for n in range(20))
        outcomes = await asyncio.gather(*racers, return_exceptions=True)
        assert sorted(str(type(each).__name__) for each in outcomes) == ["NoneType"] + ["ObjectExists"] * 19

    asyncio.run(use())


@pytest.mark.parametrize("kind", ["s3", "gs", pytest.param("az", marks=pytest.mark.nightly)])
def test_an_absent_bucket_and_a_mute_one_are_told_apart(request: pytest.FixtureRequest, kind: str) -> None:
    environ = request.getfixturevalue(kind)

    async def use() -> None:
        absent = open_objects(f"{kind}://absent/x", environ)
        for call in (absent.create("a", b""), absent.read("a"), absent.names("a"), absent.folders()):
            with pytest.raises(StoreRefused, match="there is no such bucket"):
                await call
        variables = ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_ENDPOINT")
        nowhere = dict.fromkeys(variables, "http://127.0.0.1:9/x")
        mute = open_objects(f"{kind}://bucket/x", {**environ, **nowhere})
        with pytest.raises(StoreAway, match="cannot be reached"):
            await mute.names("a")

    asyncio.run(use())


def test_a_bucket_that_may_only_be_read_and_credentials_of_nobody_are_refused(
    gs: Mapping[str, str], tmp_path: Path
) -> None:
    async def use() -> None:
        objects = open_objects("gs://read-only/x", gs)
        assert await objects.names("a") == []
        with pytest.raises(StoreRefused, match="may not use it"):
            await objects.create("a", b"")
        key = json.loads(Path(gs["GOOGLE_APPLICATION_CREDENTIALS"]).read_text())
        (tmp_path / "other.json").write_text(json.dumps({**key, "client_email": "nobody@example.org"}))
        nobody = {**gs, "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "other.json")}
        with pytest.raises(StoreRefused, match="invalid_grant"):
            await open_objects("gs://bucket/x", nobody).names("a")

    asyncio.run(use())


class Hesitant(set[str]):
    """Buckets that may only be read. Who wants to write there is refused later than the first one who did."""

    def __init__(self, *buckets: str) -> None:
        super().__init__(buckets)
        self.asked: list[object] = []
        self.answered: list[object] = []

    def __contains__(self, bucket: object) -> bool:
        self.asked.append(bucket)
        if len(self.asked) > 1:
            time.sleep(0.3)
        refused = super().__contains__(bucket)
        self.answered.append(bucket)
        return refused


def test_who_may_only_read_takes_nothing_over_and_the_run_goes_on(tmp_path: Path) -> None:
    """Several objects are written to take it: none of them may be on its way when this has failed."""

    async def use(storage: CloudStorage) -> None:
        url, environ = "gs://bucket/x", storage.environ(tmp_path)
        planned(tmp_path / "first", url)
        journal = await opened(tmp_path / "first", url, environ)
        assert await write(journal, "a")
        storage.read_only = hesitant = Hesitant("bucket")
        before = dict(storage.buckets["bucket"])
        with pytest.raises(StoreRefused, match="may not use it"):
            await opened(tmp_path / "second", url, environ, claims=True)
        assert storage.buckets["bucket"] == before
        hesitant.clear()
        await until_seen(lambda: len(hesitant.asked) == len(hesitant.answered), "all have been answered")
        assert await write(journal, "b")
        second = await opened(tmp_path / "second", url, environ, claims=True)
        await asyncio.gather(journal.close(), second.close())
        assert told(tmp_path / "second") == ["a", "b"]

    with CloudStorage("bucket") as storage:
        asyncio.run(use(storage))


def test_of_two_computers_one_writes(bucket: Bucket, tmp_path: Path) -> None:
    for n in range(1 if bucket.url.startswith("gs:") else 2):
        if bucket.url.startswith("file:"):
            (tmp_path / "bucket" / str(n)).mkdir()
        double, _ = asyncio.run(race(tmp_path / f"race-{n}", f"{bucket.url}/{n}", bucket.environ))
        assert double == 0


def test_of_three_who_take_a_run_at_the_same_time_one_has_it(folder: Bucket, tmp_path: Path) -> None:
    async def use() -> None:
        planned(tmp_path / "first", folder.url)
        await (await opened(tmp_path / "first", folder.url, {})).close()
        takers = (opened(tmp_path / f"taker-{n}", folder.url, {}, claims=True) for n in range(3))
        taken = await asyncio.gather(*takers, return_exceptions=True)
        assert all(isinstance(each, MirroredJournal | LeaseLost) for each in taken), taken
        journals = [each for each in taken if isinstance(each, MirroredJournal)]
        wrote = await asyncio.gather(*(write(each, "mine") for each in journals), return_exceptions=True)
        assert [each for each in wrote if each is not True and not isinstance(each, LeaseLost)] == []
        assert sum(each is True for each in wrote) == 1
        assert len({each.epoch for each in journals}) == len(journals)
        await asyncio.gather(*(each.close() for each in journals))

    for _ in range(2):
        asyncio.run(use())
        shutil.rmtree(tmp_path / "bucket" / RUN)
        for home in ("first", "taker-0", "taker-1", "taker-2"):
            shutil.rmtree(tmp_path / home)


def test_a_number_that_a_killed_controller_left_free_is_not_written_by_the_one_before_it(
    folder: Bucket, tmp_path: Path
) -> None:
    async def use() -> None:
        planned(tmp_path / "first", folder.url)
        journal = await opened(tmp_path / "first", folder.url, {})
        await write(journal, "a")
        second = await opened(tmp_path / "second", folder.url, {}, claims=True)
        await second.close()
        # as if it had been killed before it wrote the first of the numbers that it tried at once
        (tmp_path / "bucket" / RUN / "journal" / "000000003.jsonl").unlink()
        third = await opened(tmp_path / "third", folder.url, {}, claims=True)
        with pytest.raises(LeaseLost):
            await write(journal, "b")
        assert await write(third, "c")
        await asyncio.gather(journal.close(), third.close())

    asyncio.run(use())


def test_a_run_goes_to_another_home_and_back_and_what_never_got_there_is_kept(
    folder: Bucket, tmp_path: Path
) -> None:
    async def use() -> None:
        first, second = tmp_path / "first", tmp_path / "second"
        planned(first, folder.url)
        journal = await opened(first, folder.url, {})
        assert await write(journal, "a")
        other = await opened(second, folder.url, {}, claims=True)
        assert other.epoch > journal.epoch
        assert await write(other, "b")
        with pytest.raises(LeaseLost, match="took over 'r' through"):
            await write(journal, "never put")
        await journal.close()
        await other.close()
        assert told(first) == ["a", "never put"]
        assert told(second) == ["a", "b"]
        with pytest.raises(RequestError, match="takes it back"):
            await opened(first, folder.url, {})
        back = await opened(first, folder.url, {}, claims=True)
        assert await write(back, "c")
        await back.close()
        assert told(first) == ["a", "b", "c"]
        assert "never put" in (first / RUN / DROPPED).read_text()
        with pytest.raises(RequestError, match="took 'r' over"):
            await opened(second, folder.url, {})

    asyncio.run(use())


def test_nothing_is_taken_over_in_a_store_that_overwrites_what_it_is_asked_to_create(
    folder: Bucket, tmp_path: Path
) -> None:
    """A run that is there from before, or was copied there."""

    async def use(environ: Mapping[str, str]) -> None:
        planned(tmp_path / "first", folder.url)
        await (await opened(tmp_path / "first", folder.url, {})).close()
        objects, url = FolderObjects(tmp_path / "bucket"), f"s3://{s3_standin.BUCKET}/x"
        copy = open_objects(url, environ)
        for name in await objects.names(""):
            await copy.replace(name, await objects.read(name) or b"")
        before = {name: await copy.read(name) for name in await copy.names("")}
        with pytest.raises(StoreRefused, match="overwrites objects that it is asked to create"):
            await opened(tmp_path / "second", url, environ, claims=True)
        assert {name: await copy.read(name) for name in await copy.names("")} == before

    with s3_standin.serving(conditional=False) as address:
        asyncio.run(use(s3_standin.environ_of(address)))


@pytest.mark.parametrize("hours", [24, -24])
def test_clocks_that_are_apart_change_nothing_about_whose_a_run_is(
    folder: Bucket, tmp_path: Path, hours: int
) -> None:
    """As if the first computer's clock were a day ahead, or behind: numbers and epochs decide."""

    async def use() -> None:
        first, second = tmp_path / "first", tmp_path / "second"
        planned(first, folder.url)
        journal = await opened(first, folder.url, {})
        assert await write(journal, "a")
        for path in (tmp_path / "bucket" / RUN / "journal").iterdir():
            header, _, rest = path.read_text().partition("\n")
            wrong = {**json.loads(header), "wrote_at": json.loads(header)["wrote_at"] + hours * 3600 * 10**6}
            path.write_text(json.dumps(wrong) + "\n" + rest)
        said: list[str] = []
        second.mkdir()
        await fetch_run(planning.Workspace({}, second, second), folder.url, None, said.append)
        assert ("clock is 1440 minutes or more behind" in "".join(said)) == (hours > 0), said
        other = await opened(second, folder.url, {}, claims=True)
        assert await write(other, "b")
        with pytest.raises(LeaseLost):
            await write(journal, "never put")
        await asyncio.gather(journal.close(), other.close())
        assert told(second) == ["a", "b"]

    asyncio.run(use())


def test_what_is_written_here_alone_is_put_when_the_run_is_opened_again(
    folder: Bucket, tmp_path: Path
) -> None:
    async def use() -> None:
        home = tmp_path / "first"
        planned(home, folder.url)
        journal = await opened(home, folder.url, {})
        await write(journal, "a")
        (home / RUN / "t_0" / "t_0.0").mkdir(parents=True)
        (home / RUN / "t_0" / "t_0.0" / "result.json").write_text("{}")
        # as a controller that is killed after its own journal, before the store
        await journal._local.append(2, [AttemptCollected(AttemptId("t_0.0")), GradingFailed("b")])
        await journal.close()
        again = await opened(home, folder.url, {}, claims=True)  # by its own home: nothing is dropped
        await again.close()
        assert told(home) == ["a", "b"]
        assert (tmp_path / "bucket/r/artefacts/t_0/t_0.0/result.json").read_text() == "{}"
        second = await opened(tmp_path / "second", folder.url, {}, claims=True)
        await second.close()
        assert told(tmp_path / "second") == ["a", "b"]

    asyncio.run(use())


def test_away_for_longer_than_half_a_machines_life_it_asks_to_drain_and_goes_on_alone(
    folder: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirroring, "FIRST_PAUSE_S", 0.05)

    async def use() -> None:
        home = tmp_path / "first"
        planned(home, folder.url)
        journal = await opened(home, folder.url, {})
        journal._life_s = lambda: 0.4
        (tmp_path / "bucket").rename(tmp_path / "unmounted")
        waiting = asyncio.create_task(write(journal, "a"))
        await until_seen(lambda: "waits for it" in caplog.text)
        while not (asked := await journal.requests()):
            await asyncio.sleep(0.02)
        assert [each.event for each in asked] == [
            StopRequested("store", f"{folder.url}/{RUN} has been away for 0 minutes", drain=True)
        ]
        assert await waiting is False, "it is durable here alone"
        assert await write(journal, "b") is False
        (tmp_path / "unmounted").rename(tmp_path / "bucket")
        await until_seen(lambda: "is back after" in caplog.text)
        assert await write(journal, "c") is True
        await journal.close()
        second = await opened(tmp_path / "second", folder.url, {}, claims=True)
        await second.close()
        assert told(tmp_path / "second") == ["a", "b", "c"]

    asyncio.run(use())


def test_a_store_that_takes_an_object_and_does_not_answer_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirroring, "ANSWER_S", 0.3)
    answers = threading.Event()

    async def use(storage: CloudStorage) -> None:
        planned(tmp_path / "first", "gs://bucket/x")
        journal = await opened(tmp_path / "first", "gs://bucket/x", storage.environ(tmp_path))
        storage.refuses = lambda name, content: not answers.wait(60)
        waiting = asyncio.create_task(write(journal, "a"))
        await until_seen(lambda: "has not answered for 0.3 s: run r waits for it" in caplog.text)
        assert not waiting.done()
        store = Store.open(tmp_path / "first")
        store.ask(RUN, StopRequested("user", "cancelled"), 1)
        assert [request.event for request in await journal.requests()] == [StopRequested("user", "cancelled")]
        assert await waiting is False, "a run that is to be stopped goes on alone"
        answers.set()
        await until_seen(lambda: "is back after" in caplog.text)
        assert await write(journal, "b") is True
        await journal.close()

    with CloudStorage("bucket") as storage:
        asyncio.run(use(storage))


def test_a_controller_with_nothing_to_write_finds_out_too(
    folder: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirroring, "LOOK_S", 0.05)

    async def use() -> None:
        planned(tmp_path / "first", folder.url)
        journal = await opened(tmp_path / "first", folder.url, {})
        second = await opened(tmp_path / "second", folder.url, {}, claims=True)
        with pytest.raises(LeaseLost):  # noqa: PT012
            while True:
                await journal.requests()
                await asyncio.sleep(0.01)
        await journal.close()
        await second.close()

    asyncio.run(use())


def test_another_run_of_the_same_name_in_this_home_is_not_touched(folder: Bucket, tmp_path: Path) -> None:
    async def use() -> None:
        planned(tmp_path / "first", folder.url)
        await (await opened(tmp_path / "first", folder.url, {})).close()
        planned(tmp_path / "second", "", tasks=2)
        before = list(Store.open(tmp_path / "second").read(RUN))
        with pytest.raises(RequestError, match="another run called 'r'"):
            await opened(tmp_path / "second", folder.url, {}, claims=True)
        assert list(Store.open(tmp_path / "second").read(RUN)) == before
        shutil.rmtree(tmp_path / "second")

    asyncio.run(use())


def test_many_events_are_read_from_segments_and_from_the_objects_where_one_is_damaged(
    folder: Bucket, tmp_path: Path
) -> None:
    bucket = tmp_path / "bucket" / RUN
    wrote = [str(n) for n in range(2 * SEGMENT)]

    async def taken(home: str) -> list[str]:
        journal = await opened(tmp_path / home, folder.url, {}, claims=True)
        await journal.close()
        return told(tmp_path / home)

    async def use() -> None:
        planned(tmp_path / "first", folder.url)
        journal = await opened(tmp_path / "first", folder.url, {})
        for text in wrote:
            assert await write(journal, text)
        await journal.close()
        segments = sorted((bucket / "segments").iterdir())
        assert [int(path.stem) for path in segments] == [SEGMENT, 2 * SEGMENT]
        assert await taken("second") == wrote
        single = bucket / "journal" / f"{SEGMENT // 2:09}.jsonl"
        kept, whole = single.read_bytes(), segments[0].read_bytes()
        single.write_bytes(b"damaged")
        assert await taken("third") == wrote
        single.write_bytes(kept)
        for damage in (whole[:-20], whole.replace(b'"7"', b'"8"', 1), whole[whole.index(b"\n") + 1 :], b""):
            segments[0].write_bytes(damage)
            assert await taken(f"of-{len(damage)}") == wrote
        single.write_bytes(b"damaged")
        with pytest.raises(JournalForeign, match=f"is damaged: object {SEGMENT // 2} of the journal"):
            await taken("last")

    asyncio.run(use())


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-9000])])
def test_a_segment_that_is_gone_or_cut_with_its_objects_is_told_before_anything_is_taken(
    folder: Bucket, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    """Somebody has tidied the store up: the run stays whose it is, who has its journal, and can go on."""
    bucket = tmp_path / "bucket" / RUN

    async def use() -> None:
        planned(tmp_path / "first", folder.url)
        journal = await opened(tmp_path / "first", folder.url, {})
        for n in range(SEGMENT + 4):
            assert await write(journal, str(n))
        await journal._mirror.sequence.seal()
        segment = bucket / "segments" / f"{SEGMENT:09}.jsonl"
        damage(segment)
        for path in sorted((bucket / "journal").iterdir())[2:SEGMENT]:
            path.unlink()
        before = sorted(bucket.rglob("*"))
        (tmp_path / "second").mkdir()
        elsewhere = planning.Workspace({}, tmp_path / "second", tmp_path / "second")
        with pytest.raises(JournalForeign, match=r"is damaged: object \d+ of the journal") as told:
            await fetch_run(elsewhere, folder.url, None, lambda note: None)
        assert "\n" not in str(told.value)
        assert sorted(bucket.rglob("*")) == before
        assert await write(journal, "and on")
        await journal.close()
        again = await opened(tmp_path / "first", folder.url, {})
        assert await write(again, "and on again")
        await again.close()

    asyncio.run(use())


def test_what_is_written_while_an_object_is_under_way_goes_together(tmp_path: Path) -> None:
    async def use(storage: CloudStorage) -> None:
        planned(tmp_path / "first", "gs://bucket/x")
        journal = await opened(tmp_path / "first", "gs://bucket/x", storage.environ(tmp_path))
        before = len(storage.buckets["bucket"])
        assert all(await asyncio.gather(*(write(journal, str(n)) for n in range(60))))
        assert len(storage.buckets["bucket"]) - before < 20
        await journal.close()
        assert sorted(map(int, told(tmp_path / "first"))) == list(range(60))

    with CloudStorage("bucket") as storage:
        asyncio.run(use(storage))


def test_a_segment_holds_what_several_controllers_wrote(folder: Bucket, tmp_path: Path) -> None:
    async def use() -> None:
        planned(tmp_path / "first", folder.url)
        first = await opened(tmp_path / "first", folder.url, {})
        for n in range(SEGMENT // 2):
            assert await write(first, f"first {n}")
        await first.close()
        second = await opened(tmp_path / "second", folder.url, {}, claims=True)
        for n in range(SEGMENT // 2):
            assert await write(second, f"second {n}")
        await second.close()
        (segment,) = (tmp_path / "bucket" / RUN / "segments").iterdir()
        objects = sorted((tmp_path / "bucket" / RUN / "journal").iterdir())[:SEGMENT]
        assert segment.read_bytes() == b"".join(path.read_bytes() for path in objects)

    asyncio.run(use())


@pytest.mark.parametrize(("url", "prefix"), [("s3://bucket/x", "AWS_"), ("az://bucket/x", "AZURE_")])
def test_variables_about_proxies_and_clients_are_no_trouble(url: str, prefix: str) -> None:
    keys = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "eu-central-1",
        "AZURE_STORAGE_ACCOUNT_NAME": "a",
        "AZURE_STORAGE_ACCOUNT_KEY": "YQ==",
    }
    others = {f"{prefix}ALLOW_HTTP": "true", f"{prefix}TIMEOUT": "5s", f"{prefix}MAX_ATTEMPTS": "3"}

    async def asked_of(proxy: socket.socket) -> bytes:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        reading = asyncio.create_task(
            open_objects(url, {**keys, **others, f"{prefix}PROXY_URL": address}).read("a")
        )
        connection, _ = await asyncio.to_thread(proxy.accept)
        with connection:
            asked = await asyncio.to_thread(connection.recv, 100)
        reading.cancel()
        return asked

    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(30)
        assert asyncio.run(asked_of(proxy)).startswith(b"CONNECT ")
