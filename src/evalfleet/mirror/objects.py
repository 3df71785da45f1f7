"""Named objects below a URL: a bucket of one of the clouds, or a folder.

What a run needs of a store is little: to write an object only if there is none of its name, to write one
anyway, to read, and to list names. Buckets are reached by obstore, which knows three clouds; a folder needs
nothing but the standard library, and is flushed to disk, as the journal is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.util
import os
import re
import shutil
import stat
import uuid
from collections.abc import AsyncIterable, Awaitable, Callable, Generator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

from evalfleet.errors import FleetError, RequestError
from evalfleet.ports import Objects
from evalfleet.version import install_command

BUCKETS = {"s3": "AWS_", "gs": "GOOGLE_", "az": ""}
"""The schemes of URLs of buckets, and how variables begin that say how to reach one (empty: by its kind)."""
CALL_S, CONNECT_S = 60, 10
TRIES_S = 10
"""For so long a single call is tried again where it is made. Whoever makes it knows how long to wait."""
TOKEN_S = 300.0
NO_TOKEN = "nobody answers who gives tokens"
"""How an error begins that says nothing about what we may do."""
SCRATCH = ".evalfleet-"
MOST_BYTES = 1 << 30
"""An object that is read at once is smaller. A file without content may say that it holds terabytes."""
GOOD_STORES = "Amazon S3, Cloudflare R2, MinIO, Google Cloud Storage, Azure Blob Storage or a folder"
PROXY = ("proxy_url", "proxy_ca_certificate", "proxy_excludes")
OF_CLIENTS = frozenset(
    (
        *PROXY,
        *(
            "allow_http",
            "allow_invalid_certificates",
            "connect_timeout",
            "default_content_type",
            "http1_only",
        ),
        *("http2_keep_alive_interval", "http2_keep_alive_timeout", "http2_keep_alive_while_idle"),
        *("http2_max_frame_size", "http2_only", "pool_idle_timeout", "pool_max_idle_per_host"),
        *("randomize_addresses", "read_timeout", "timeout", "user_agent"),
    )
)
"""Options of HTTP clients, which a variable such as AWS_PROXY_URL may hold: obstore panics if it gets
them among those of a store."""
P = ParamSpec("P")
T = TypeVar("T")


class StoreAway(FleetError):
    """The store does not answer, or refuses us now; the same call may succeed later."""


class StoreRefused(RequestError):
    """The store says no: it has no such bucket, or we may not write there."""


class ObjectExists(FileExistsError):
    """There is an object of this name already: nothing was written."""


def store_url(given: str, cwd: Path) -> str:
    """The URL of a store as it is written down: a folder's path is absolute. Raises RequestError."""
    scheme = urlsplit(given).scheme.lower()
    if scheme in BUCKETS:
        if not urlsplit(given).netloc:
            raise RequestError(f"store {given!r} names no bucket: write {scheme}://BUCKET/PREFIX")
        if "@" in urlsplit(given).netloc or urlsplit(given).query:
            raise RequestError("a store's URL holds no keys: give them by the cloud's own variables")
        return given.rstrip("/")
    if scheme == "file":
        given = unquote(urlsplit(given).path)
    elif "://" in given:
        known = ", ".join(f"{name}://BUCKET/PREFIX" for name in BUCKETS)
        raise RequestError(f"store {given!r} is of no kind that evalfleet knows: write {known}, or a folder")
    if not given.strip():
        raise RequestError("a store must be named: a bucket's URL, or a folder")
    return (cwd / Path(given).expanduser()).resolve().as_uri()


def open_objects(url: str, environ: Mapping[str, str]) -> Objects:
    """The objects below a URL that `store_url` made. Raises RequestError."""
    if urlsplit(url).scheme == "file":
        return FolderObjects(Path(unquote(urlsplit(url).path)))
    return open_bucket(url, environ)


def open_bucket(
    url: str,
    environ: Mapping[str, str],
    token: Callable[[], Awaitable[str]] | None = None,
    ca: str = "",
) -> BucketObjects:
    """Return the objects below a bucket's URL. Raises RequestError."""
    if importlib.util.find_spec("obstore") is None:
        raise RequestError(f"{url} needs obstore: {install_command('store')}")
    obstore = _obstore()
    try:
        return BucketObjects(url, _bucket(url, environ, token, ca))
    except (obstore.exceptions.BaseError, ValueError) as err:
        raise RequestError(f"{url} cannot be used: {_line_of(err)}") from None


async def check_creates_once(objects: Objects, name: str, content: bytes) -> None:
    """Create an object that is there already, with the content that it has. Raises StoreRefused if that
    succeeds: then two computers could take one run. Servers that ignore If-None-Match let them."""
    with contextlib.suppress(ObjectExists):
        await objects.create(name, content)
        raise StoreRefused(
            f"{objects.url} overwrites objects that it is asked to create (it ignores If-None-Match), so two "
            f"computers could take one run: use {GOOD_STORES}"
        )


async def try_out(objects: Objects) -> None:
    """Write an object as runs do, and remove it. Raises StoreAway or StoreRefused."""
    name = f"{SCRATCH}doctor-{uuid.uuid4().hex}"
    await objects.create(name, b"")
    try:
        await check_creates_once(objects, name, b"")
    finally:
        await objects.remove([name])


# -- folders -----------------------------------------------------------------------------------------


class FolderObjects:
    """A folder, perhaps one that several computers share. An object is a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = folder.as_uri()

    async def create(self, name: str, content: bytes | Path) -> None:
        await self._in_thread(self._put, name, content, True)

    async def replace(self, name: str, content: bytes | Path) -> None:
        await self._in_thread(self._put, name, content, False)

    async def read(self, name: str, most: int | None = None) -> bytes | None:
        return await self._in_thread(self._read, name, most)

    async def remove(self, names: Sequence[str]) -> None:
        await self._in_thread(self._remove, names)

    async def fetch(self, name: str, path: Path) -> None:
        await self._in_thread(self._fetch, name, path)

    async def names(self, below: str, after: str = "") -> list[str]:
        return [name for name in await self._in_thread(self._names, below) if name > after]

    async def folders(self) -> list[str]:
        return await self._in_thread(self._folders)

    async def _in_thread(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        try:
            return await asyncio.to_thread(call, *args, **options)
        except FileExistsError:
            raise ObjectExists from None
        except (PermissionError, NotADirectoryError) as err:
            raise StoreRefused(f"{self.url} cannot be used: {err.strerror} ({err.filename})") from err
        except OSError as err:
            raise StoreAway(f"{self.url} cannot be used now: {err.strerror or err}") from err

    def _put(self, name: str, content: bytes | Path, only_new: bool) -> None:
        # A folder that is gone was unmounted, perhaps: it must not be made anew, on another disk.
        if not self._folder.is_dir():
            raise FileNotFoundError(2, f"there is no folder {self._folder}")
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{SCRATCH}{uuid.uuid4().hex}")
        try:
            with scratch.open("xb") as file:
                if isinstance(content, Path):
                    with content.open("rb") as source:
                        shutil.copyfileobj(source, file)
                else:
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if only_new:
                os.link(scratch, path)
            else:
                os.replace(scratch, path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink()

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    def _read(self, name: str, most: int | None) -> bytes | None:
        try:
            with self._opened(name) as file:
                if most is None:
                    _check_size(self.url, name, os.fstat(file.fileno()).st_size)
                return file.read(-1 if most is None else most)
        except FileNotFoundError:
            if not self._folder.is_dir():
                raise
            return None

    def _fetch(self, name: str, path: Path) -> None:
        with self._opened(name) as source, path.open("xb") as target:
            _check_room(self.url, name, os.fstat(source.fileno()).st_size, path)
            shutil.copyfileobj(source, target)

    def _opened(self, name: str) -> BinaryIO:
        """A named pipe would be waited for, for ever."""
        file = open(self._folder / name, "rb", opener=_at_once)  # noqa: SIM115
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise StoreRefused(f"{self.url}/{name} is no file: remove it")
        return file

    def _names(self, below: str) -> list[str]:
        if not self._folder.is_dir():
            raise FileNotFoundError(2, f"there is no folder {self._folder}")
        found: list[str] = []
        for folder, _, files in os.walk(self._folder / below):
            for file in files:
                path = Path(folder, file)
                if not file.startswith(SCRATCH) and path.is_file():
                    found.append(path.relative_to(self._folder).as_posix())
        return sorted(found)

    def _folders(self) -> list[str]:
        return sorted(entry.name for entry in os.scandir(self._folder) if entry.is_dir())


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


# -- buckets -----------------------------------------------------------------------------------------


class BucketObjects:
    """The objects of a bucket below a prefix."""

    def __init__(self, url: str, bucket: Any) -> None:
        self.url = url
        self._bucket = bucket

    async def create(self, name: str, content: bytes | Path) -> None:
        await self._call("put_async", name, content, mode="create")

    async def replace(self, name: str, content: bytes | Path | AsyncIterable[bytes]) -> None:
        await self._call("put_async", name, content)

    async def read(self, name: str, most: int | None = None) -> bytes | None:
        if most is not None:
            with contextlib.suppress(StoreAway):  # nothing is in it: it has no such range
                found = await self._call("get_range_async", name, start=0, end=most, absent_is_fine=True)
                return None if found is None else bytes(found)
        result = await self._call("get_async", name, absent_is_fine=True)
        if result is None:
            return None
        _check_size(self.url, name, result.meta["size"])
        with self._explaining():
            return bytes(await result.bytes_async())

    async def fetch(self, name: str, path: Path) -> None:
        result = await self._call("get_async", name, absent_is_fine=True)
        if result is None:  # somebody has deleted it since it was listed
            raise StoreAway(f"{self.url} holds no {name} any more")
        _check_room(self.url, name, result.meta["size"], path)
        with self._explaining(), path.open("xb") as file:
            async for chunk in result.stream():
                file.write(chunk)

    async def remove(self, names: Sequence[str]) -> None:
        try:
            with self._explaining(but=(FileNotFoundError,)):
                await _obstore().delete_async(self._bucket, list(names))
        except FileNotFoundError:  # one of them: the others may be there
            for name in names:
                await self._call("delete_async", name, absent_is_fine=True)

    async def names(self, below: str, after: str = "") -> list[str]:
        found: list[str] = []
        with self._explaining():
            async for page in _obstore().list(self._bucket, below, offset=after or None):
                found += [str(entry["path"]) for entry in page]
        return sorted(found)

    async def sign(self, method: str, names: Sequence[str], seconds: float) -> list[str]:
        with self._explaining():
            signed = await _obstore().sign_async(
                self._bucket, method, list(names), timedelta(seconds=int(seconds))
            )
        return list(signed)

    async def folders(self) -> list[str]:
        listed = await self._call("list_with_delimiter_async")
        return sorted(listed["common_prefixes"])

    async def _call(self, what: str, *args: Any, absent_is_fine: bool = False, **options: Any) -> Any:
        with self._explaining():
            try:
                return await getattr(_obstore(), what)(self._bucket, *args, **options)
            except FileNotFoundError as err:
                if absent_is_fine and not re.search("NoSuchBucket|ContainerNotFound", str(err)):
                    return None
                raise

    @contextlib.contextmanager
    def _explaining(self, but: tuple[type[Exception], ...] = ()) -> Generator[None]:
        """Say what obstore's errors mean, and the disk's, except those that the caller knows better (`but`).

        Anything else is a defect of ours, and nothing that another try could mend.
        """
        try:
            yield
        except but:
            raise
        except (_obstore().exceptions.BaseError, OSError) as err:
            raise self._explained(err) from err

    def _explained(self, err: Exception) -> Exception:
        exceptions = _obstore().exceptions
        if isinstance(err, ObjectExists | StoreAway | StoreRefused):
            return err
        if isinstance(err, exceptions.AlreadyExistsError | exceptions.PreconditionError):
            return ObjectExists()
        said = str(err)
        if isinstance(err, FileNotFoundError) or "404 Not Found" in said:
            return StoreRefused(f"{self.url}: there is no such bucket: make it first, or name another")
        if away := re.search(f"{NO_TOKEN}.*", said):  # obstore takes that for a refusal
            return StoreAway(f"{self.url} cannot be reached: {away[0]}")
        denied = isinstance(err, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
        if denied or "403 Forbidden" in said or "401 Unauthorized" in said:
            return StoreRefused(f"{self.url}: we may not use it with these credentials: {_line_of(err)}")
        return StoreAway(f"{self.url} cannot be reached: {_line_of(err)}")


def _check_size(url: str, name: str, size: int) -> None:
    """Raises StoreRefused."""
    if size > MOST_BYTES:
        raise StoreRefused(f"{url}/{name} holds {size} bytes, which no object of a run does: remove it")


def _check_room(url: str, name: str, size: int, path: Path) -> None:
    """Raises RequestError if the object does not fit on the disk of its copy here."""
    if size > (free := shutil.disk_usage(path.parent).free):
        raise RequestError(f"{url}/{name} holds {size} bytes, and {path.parent} has {free} bytes left")


@functools.cache
def _obstore() -> Any:
    """Loaded when it is needed: not everybody has it."""
    return importlib.import_module("obstore")


def _line_of(err: BaseException) -> str:
    """What obstore says, without its sources, and without what a URL may hold of keys."""
    lines = str(err).strip().splitlines() or [type(err).__name__]
    return re.sub(r"\?\S+| in [\d.]+.?s\b.*", "", lines[0])[:300]


def _bucket(url: str, environ: Mapping[str, str], token: Callable[[], Awaitable[str]] | None, ca: str) -> Any:
    obstore = _obstore()
    from_url, scheme = obstore.store.from_url, urlsplit(url).scheme
    options: dict[str, Any] = {
        "client_options": {"connect_timeout": f"{CONNECT_S}s", "timeout": f"{CALL_S}s", "allow_http": True},
        "retry_config": {"max_retries": 3, "retry_timeout": timedelta(seconds=TRIES_S)},
    }
    if ca:
        options["client_options"]["root_certificate"] = Path(ca).read_bytes()
    if token is not None:
        options["credential_provider"] = _LoginTokens(token)
    if scheme == "gs":
        base = environ.get("GOOGLE_BASE_URL") or environ.get("STORAGE_EMULATOR_HOST", "")
        config = {"base_url": base} if base else {}
        return from_url(url, config=config, credential_provider=GoogleTokens(environ), **options)
    prefix = BUCKETS[scheme] or f"{obstore.parse_scheme(url).upper()}_"
    told = {name: value for name, value in environ.items() if name.startswith(prefix) and value}
    config = {name: value for name, value in told.items() if name[len(prefix) :].lower() not in OF_CLIENTS}
    for option in PROXY:
        if value := told.get(prefix + option.upper()):
            options["client_options"][option] = value
    if scheme == "s3" and "AWS_ACCESS_KEY_ID" not in config and (signed_in := _boto_credentials(environ)):
        options["credential_provider"] = signed_in
    while True:
        try:
            return from_url(url, config=config, **options)
        except obstore.exceptions.UnknownConfigurationKeyError as err:
            unknown = [name for name in config if f"'{name.lower()}'" in str(err)]
            if not unknown:
                raise
            for name in unknown:  # it says something to other programs
                del config[name]


def _boto_credentials(environ: Mapping[str, str]) -> Any:
    """What boto3 knows of profiles and roles, where that is installed and has credentials."""
    if importlib.util.find_spec("boto3") is None:
        return None
    boto, auth = importlib.import_module("boto3.session"), importlib.import_module("obstore.auth.boto3")
    faults = importlib.import_module("botocore.exceptions")
    try:
        session = boto.Session(profile_name=environ.get("AWS_PROFILE") or None)
        return None if session.get_credentials() is None else auth.Boto3CredentialProvider(session)
    except (faults.BotoCoreError, faults.ClientError) as err:
        raise RequestError(f"boto3 has no credentials for the store: {err}") from None


class _LoginTokens:
    """Tokens for obstore of whoever is logged in."""

    def __init__(self, token: Callable[[], Awaitable[str]]) -> None:
        self._token = token

    async def __call__(self) -> dict[str, Any]:
        try:
            token = await self._token()
        except RequestError as err:
            raise StoreRefused(f"401 Unauthorized: {err}") from err
        except FleetError as err:
            raise StoreAway(f"{NO_TOKEN}: {err}") from err
        return {"token": token, "expires_at": datetime.now(UTC) + timedelta(seconds=TOKEN_S)}


class GoogleTokens:
    """Tokens for obstore, from all kinds of credentials that google-auth knows."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        if importlib.util.find_spec("google.auth") is None:
            raise RequestError(f"gs:// needs google-auth: {install_command('gcp')}")
        from evalfleet.places.gce.client import GoogleLogin

        self._login = GoogleLogin(environ)

    async def __call__(self) -> dict[str, Any]:
        from evalfleet.places.gce.answers import GoogleFault

        try:
            headers = await self._login.headers()
        except GoogleFault as fault:
            if fault.status == 0:
                raise StoreAway(f"{NO_TOKEN}: {fault.told}") from fault
            raise
        token = headers.get("authorization", "").removeprefix("Bearer ")
        return {"token": token, "expires_at": datetime.now(UTC) + timedelta(seconds=TOKEN_S)}
