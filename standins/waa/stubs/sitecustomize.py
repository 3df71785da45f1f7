"""Stands for the libraries that WAA's own client imports, so that it runs unchanged where none is installed.

`requests`, `openai`, `tenacity`, `PIL` and `playwright` do what the client needs of them, with the originals'
names in tracebacks and logs; every other library that is missing is a hollow one, which takes anything.
Sleeps are shortened. What the guest does to a task depends on its trial (`--trial_id`), told in a header.
"""

import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
import time
import types
import urllib.error
import urllib.parse
import urllib.request

ARGV = sys.orig_argv[1:]
TRIAL = ARGV[ARGV.index("--trial_id") + 1] if "--trial_id" in ARGV else ""
SCALE = float(os.environ.get("STAND_IN_SCALE", "0.004"))
GUEST = (":5000/", ":9222/")
sleep = time.sleep


def exception(module, name, base=Exception):
    return type(name, (base,), {"__module__": module})


# -- hollow libraries ----------------------------------------------------------------------------


class HollowType(type):
    """A class that has any attribute, and whose objects have, too."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith(("Error", "Exception", "Timeout")):
            return exception("hollow", name)
        return HollowType(name, (Hollow,), {})

    def __getitem__(cls, _):
        return cls

    def __or__(cls, _):
        return cls

    __ror__ = __or__


class Hollow(metaclass=HollowType):
    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Hollow()

    def __call__(self, *given, **_):
        return given[0] if len(given) == 1 and callable(given[0]) else Hollow()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0

    def __getitem__(self, _):
        return Hollow()


class HollowModule(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(Hollow, name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a hollow module for any name; those named in MODULES are ours."""

    def find_spec(self, name, path=None, target=None):
        own = name.partition(".")[0] in ("desktop_env", "mm_agents", "usercustomize", "lib_run_single")
        return None if own else importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MODULES.get(spec.name) or HollowModule(spec.name)

    def exec_module(self, module):
        pass


class OurFinder(Finder):
    """Finds what we stand for, and nothing else: also where the original happens to be installed."""

    def find_spec(self, name, path=None, target=None):
        return super().find_spec(name) if name.partition(".")[0] in OURS else None


# -- requests ------------------------------------------------------------------------------------

EXCEPTIONS = types.ModuleType("requests.exceptions")
RequestException = EXCEPTIONS.RequestException = exception("requests.exceptions", "RequestException", OSError)
for _name in ("ConnectionError", "Timeout", "HTTPError"):
    setattr(EXCEPTIONS, _name, exception("requests.exceptions", _name, RequestException))


class Response:
    def __init__(self, status, content):
        self.status_code = status
        self.content = content
        self.ok = status < 400

    @property
    def text(self):
        return self.content.decode("utf-8", "replace")

    def json(self):
        return json.loads(self.content)

    def raise_for_status(self):
        if not self.ok:
            raise EXCEPTIONS.HTTPError(f"{self.status_code} Client Error")

    def iter_content(self, chunk_size=1):
        yield self.content


def ask(method, url, headers=None, data=None, json=None, timeout=None, **_):
    """Only the guest is really asked: what tasks download from the internet is a few bytes."""
    if not any(port in url for port in GUEST):
        return Response(200, b"stand-in")
    body = data
    if json is not None:
        body = _dumps(json).encode()
    elif isinstance(data, dict):
        body = urllib.parse.urlencode(data).encode()
    elif isinstance(data, str):
        body = data.encode()
    elif isinstance(data, Hollow):
        body = b"a file"
    request = urllib.request.Request(url, body, {"X-Trial": TRIAL}, method=method)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=timeout or 60) as answer:
            return Response(answer.status, answer.read())
    except urllib.error.HTTPError as err:
        return Response(err.code, err.read())
    except OSError as err:
        parts = urllib.parse.urlsplit(url)
        pool = f"HTTPConnectionPool(host={parts.hostname!r}, port={parts.port})"
        told = f"{pool}: Max retries exceeded with url: {parts.path} (Caused by {err!r})"
        raise EXCEPTIONS.ConnectionError(told) from err


_dumps = json.dumps
REQUESTS = types.ModuleType("requests")
REQUESTS.__path__ = []
REQUESTS.exceptions = EXCEPTIONS
REQUESTS.Response = Response
REQUESTS.get = lambda url, **more: ask("GET", url, **more)
REQUESTS.post = lambda url, **more: ask("POST", url, **{"data": b"", **more})
for _name in ("RequestException", "ConnectionError", "Timeout", "HTTPError"):
    setattr(REQUESTS, _name, getattr(EXCEPTIONS, _name))

# -- the model's client --------------------------------------------------------------------------

OPENAI = types.ModuleType("openai")
OPENAI.APIStatusError = exception("openai", "APIStatusError")
STATUSES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
}
for _name in STATUSES.values():
    setattr(OPENAI, _name, exception("openai", _name, OPENAI.APIStatusError))


class Completions:
    def create(self, **body):
        url = os.environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions"
        answer = ask("POST", url, json=body)
        phrase = {200: "OK", 400: "Bad Request"}.get(answer.status_code, "Error")
        line = 'HTTP Request: %s %s "%s %d %s"'
        logging.getLogger("httpx").info(line, "POST", url, "HTTP/1.1", answer.status_code, phrase)
        if answer.status_code != 200:
            name = STATUSES.get(answer.status_code, "APIStatusError")
            raise getattr(OPENAI, name)(f"Error code: {answer.status_code} - {answer.text}")
        text = answer.json()["choices"][0]["message"]["content"]
        return types.SimpleNamespace(
            choices=[types.SimpleNamespace(message=types.SimpleNamespace(content=text))]
        )


class OpenAI:
    def __init__(self, api_key=None):
        self.chat = types.SimpleNamespace(completions=Completions())


OPENAI.OpenAI = OpenAI

TENACITY = types.ModuleType("tenacity")
TENACITY.RetryError = exception("tenacity", "RetryError")
TENACITY.wait_random_exponential = lambda **given: given.get("max", 60)
TENACITY.stop_after_attempt = lambda count: count


def retry(wait, stop):
    """As often as the original, and as long, in this clock."""

    def decorate(function):
        def wrapper(*args, **kwargs):
            for number in range(1, stop + 1):
                try:
                    return function(*args, **kwargs)
                except Exception as err:
                    if number == stop:
                        future = f"<Future at 0x7f state=finished raised {type(err).__name__}>"
                        raise TENACITY.RetryError(f"RetryError[{future}]") from err
                    time.sleep(min(2**number, wait) / 2)

        return wrapper

    return decorate


TENACITY.retry = retry

# -- pictures and browsers -----------------------------------------------------------------------

PIL = types.ModuleType("PIL")
PIL.__path__ = []
PIL.UnidentifiedImageError = exception("PIL", "UnidentifiedImageError", OSError)


class Image:
    width, height = size = (1920, 1200)
    mode = "RGB"

    @staticmethod
    def open(source):
        if not (source.read() if hasattr(source, "read") else source):
            raise PIL.UnidentifiedImageError("cannot identify image file")
        return Image()

    def save(self, target, format=None):
        if hasattr(target, "write"):
            target.write(b"\x89PNG\r\n\x1a\n")
        else:
            with open(target, "wb") as file:
                file.write(b"\x89PNG\r\n\x1a\n")

    def resize(self, _):
        return self

    def convert(self, _):
        return self

    def copy(self):
        return self


Image.__module__ = "PIL.Image"
IMAGE = types.ModuleType("PIL.Image")
IMAGE.Image, IMAGE.open, IMAGE.fromarray = Image, Image.open, lambda *_: Image()
PIL.Image = IMAGE
for _name in ("ImageDraw", "ImageFont", "ImageGrab"):
    setattr(PIL, _name, HollowModule(f"PIL.{_name}"))

PLAYWRIGHT = types.ModuleType("playwright")
PLAYWRIGHT.__path__ = []
SYNC = types.ModuleType("playwright.sync_api")
PLAYWRIGHT.sync_api = SYNC
SYNC.Error = exception("playwright._impl._errors", "Error")
SYNC.TimeoutError = exception("playwright._impl._errors", "TimeoutError", SYNC.Error)
SYNC.expect = Hollow()


class Page:
    url = "chrome://newtab/"

    def title(self):
        return "New Tab"

    def content(self):
        return "<html></html>"

    def __getattr__(self, name):
        return lambda *_, **__: None


class Browser:
    def __init__(self):
        context = types.SimpleNamespace(pages=[Page()], new_page=Page, cookies=list)
        self.contexts = [context]
        self.new_page, self.new_context, self.close = Page, lambda: context, lambda: None


class Playwright:
    def __init__(self):
        self.chromium = types.SimpleNamespace(connect_over_cdp=self.connect, launch=Browser)

    def connect(self, url):
        port = urllib.parse.urlsplit(url).port
        if REQUESTS.get(url.replace(f":{port}", ":5000") + f"/stand-in/{port}").status_code != 200:
            address = url.partition("//")[2]
            raise SYNC.Error(f"BrowserType.connect_over_cdp: connect ECONNREFUSED {address}")
        return Browser()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


SYNC.sync_playwright = Playwright

CV2 = HollowModule("cv2")


class VideoCapture(Hollow):
    """Of a video that was never made: it has no picture."""

    def __init__(self, path):
        self.path = path

    def read(self):
        return self.path is not None, None


CV2.VideoCapture = VideoCapture

NUMPY = HollowModule("numpy")
NUMPY.ndarray = type("ndarray", (), {})
TQDM = types.ModuleType("tqdm")
TQDM.tqdm = lambda things, **_: things
MULTIPART = types.ModuleType("requests_toolbelt.multipart.encoder")
MULTIPART.MultipartEncoder = lambda *_, **__: type(
    "Form", (Hollow,), {"content_type": "multipart/form-data"}
)()

MODULES = {
    "requests": REQUESTS,
    "requests.exceptions": EXCEPTIONS,
    "openai": OPENAI,
    "tenacity": TENACITY,
    "PIL": PIL,
    "PIL.Image": IMAGE,
    "playwright": PLAYWRIGHT,
    "playwright.sync_api": SYNC,
    "cv2": CV2,
    "numpy": NUMPY,
    "tqdm": TQDM,
    "requests_toolbelt.multipart.encoder": MULTIPART,
}

OURS = {name.partition(".")[0] for name in MODULES}

if "run.py" in ARGV[:1]:
    # the client's own package of this name would load what parses screenshots, which no test needs
    hollow = HollowModule("mm_agents.navi.screenparsing_oss")
    hollow.__path__ = [os.path.join(os.getcwd(), "mm_agents/navi/screenparsing_oss")]
    sys.modules["mm_agents.navi.screenparsing_oss"] = hollow
    sys.meta_path.insert(0, OurFinder())
    sys.meta_path.append(Finder())  # asked last: what is installed, or the client's own, is found by others
    time.sleep = lambda seconds: sleep(seconds * SCALE)
