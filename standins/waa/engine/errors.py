"""What goes wrong, in docker's own words."""


class Failure(Exception):
    """Printed as it is; ends the command with this exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.code = code

    def code_for_run(self) -> int:
        return self.code if self.code in (126, 127) else 125


def daemon(message: str, code: int = 1) -> Failure:
    return Failure(f"Error response from daemon: {message}", code)


def no_container(name: str) -> Failure:
    return daemon(f"No such container: {name}")


def bad_flag(flag: str, verb: str) -> Failure:
    long = flag.startswith("--")
    shown = f"unknown flag: {flag}" if long else f"unknown shorthand flag: '{flag[1]}' in {flag}"
    return Failure(f"{shown}\nSee 'docker {verb} --help'.", 125)
