"""The names that tracebacks show."""


class RequestException(OSError): ...


class ConnectionError(RequestException): ...
