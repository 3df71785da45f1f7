"""Attempts in containers, by the docker or podman that a machine has: how one is started, and how it ends.

What runs on the machine are two scripts for `sh`. One looks for the engine and pulls images, once, as a step
of set-up. The other runs a command in a container under the same contract as without one: the same working
directory, variables, artefacts, log, exit code and time limit, and nothing is left when it ends.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from evalfleet.errors import RequestError
from evalfleet.model import Command, SetupStep


class ContainerSettings(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The keys of `container`."""

    engine: Annotated[
        Literal["", "docker", "podman"], Meta(description="default: docker if it works there, else podman")
    ] = ""
    pull: Annotated[
        Literal["missing", "always", "never"], Meta(description="when a machine fetches the image")
    ] = "missing"
    network: Annotated[
        str, Meta(description="none, host, or a network of the engine's; default: the engine's own")
    ] = ""
    cpus: Annotated[float, Meta(description="how many it may use; 0: all")] = 0.0
    memory_gb: Annotated[float, Meta(description="how much it may use; 0: all")] = 0.0
    pids: Annotated[
        int, Meta(description="how many processes it may have; 0: 4096, or podman's own limit")
    ] = 0
    gpus: Annotated[int, Meta(description="how many GPUs it gets; -1: all")] = 0
    user: Annotated[str, Meta(description="as whom the command runs; default: the image's user")] = ""
    args: Annotated[tuple[str, ...], Meta(description="further arguments of `docker run`")] = ()


# What a registry says decides: what would be no better on another machine ends with FAILS_EVERYWHERE. All
# else (a network, a registry that is down or busy) is tried again, and ends with FAILS_FOR_NOW. The last line
# has the reason. Plain machines of clouds have no engine, and get podman, which needs no daemon and no group;
# those of people stay as they are.
PULL = """\
engine=$1 pull=$2 program=$3
shift 3
works() { command -v "$1" >/dev/null 2>&1 && "$1" version >/dev/null 2>&1; }
refuse() { echo "$1" | tr '\\n' ' '; echo; exit 78; }
fetch() {
  for pause in 2 8 30 ""; do
    { "$engine" pull "$1" 2>&1 && echo "$1 is here"; } | tee .pulled
    said=$(tail -c 4000 .pulled)
    rm .pulled
    case $said in *"$1 is here") return ;; esac
    last=$(echo "$said" | grep . | tail -n 1 | sed 's/^Error: //' | cut -c 1-400)
    case $(echo "$said" | tr '[:upper:]' '[:lower:]') in
      *toomanyrequests*|*"permission denied"*) ;;
      *unauthorized*|*unauthenticated*|*"authentication required"*|*"no basic auth"*|*"invalid username"*)
        [ -z "$token" ] || refuse "the registry does not accept the token in $token, which may have expired: \
put a new one there and resume the run; $1 was not pulled ($last)"
        refuse "the registry wants a login for $1, and there is none: $hint ($last)" ;;
      *"denied: "*|*"is denied"*|*"access denied"*|*forbidden*)
        [ -z "$token" ] || refuse "the owner of the token in $token has no right to pull $1, \
if there is such an image at all ($last)"
        refuse "the registry wants a login for $1, and there is none: $hint ($last)" ;;
      *"manifest unknown"*|*"name unknown"*|*"no such image"*|*"manifest for "*"not found"*)
        refuse "the registry has no image $1: push it, or write another name ($last)" ;;
      *"invalid reference"*) refuse "$1 cannot be the name of an image ($last)" ;;
      *"no such host"*)
        [ "$pause" = 2 ] || refuse "there is no registry of the name of $1: correct the name ($last)" ;;
    esac
    [ -n "$pause" ] || break
    echo "$1 was not pulled, and is tried again in $pause s ($last)"
    sleep "$pause"
  done
  echo "$1 could not be pulled in 4 tries: $last"
  exit 69
}
find_engine() { for engine in docker podman ""; do works "$engine" && break; done; }
install_podman() {
  [ "$(id -u)" = 0 ] || set -- sudo -n
  "$@" true 2>/dev/null && command -v apt-get >/dev/null || return
  echo "there is no container engine: apt-get installs podman"
  if command -v cloud-init >/dev/null; then timeout 600 cloud-init status --wait >/dev/null 2>&1; fi
  set -- "$@" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300
  "$@" update && "$@" install podman uidmap slirp4netns fuse-overlayfs
}
if [ -z "$engine" ]; then
  find_engine
  if [ -z "$engine" ] && [ -d /var/lib/cloud/instance ]; then install_podman; find_engine; fi
elif ! works "$engine"; then
  echo "$engine does not work here"; exit 1
fi
if [ -z "$engine" ]; then echo "neither docker nor podman works here: install one"; exit 1; fi
echo "$engine" >.container-engine
for image; do
  if [ "$pull" = always ] || ! "$engine" image inspect "$image" >/dev/null 2>&1; then
    if [ "$pull" = never ]; then echo "there is no image $image here, and it is not to be pulled"; exit 1; fi
    fetch "$image"
  fi
  if [ -n "$program" ]; then
    "$engine" run --rm "$image" "$program" --version
    case $? in
      0) ;;
      126|127) refuse "image $image has no $program that can be run, and needs one" ;;
      *) echo "a container of $image could not be started"; exit 1 ;;
    esac
  fi
done
"""
"""Arguments: the engine or nothing, when to pull, a program that images must have or nothing, images."""

# Variables are passed by their names, so that the values of secrets are on no command line. Of the machine's
# files the container sees the attempt's own folders and, read-only, the bundles that those link to. The meter
# of model calls, if there is one, is at the gateway of the container's network. The marks of the job are in
# its environment, so that the supervisor finds its processes, too. The engine's client runs in the background
# because a shell that waits for a command in the foreground hears no signal meanwhile.
RUN = """\
engine=$(cat .container-engine) || exit 126
name=evalfleet-$(printf %s "$EVALFLEET_MACHINE $EVALFLEET_JOB" | cksum | tr ' ' -)
gone() { "$engine" kill "$name" >/dev/null 2>&1; "$engine" rm -f "$name" >/dev/null 2>&1; }
trap 'gone; exit 143' HUP INT TERM
if [ "$engine" = docker ] && [ "$(id -u)" != 0 ]; then set -- --user "$(id -u):$(id -g)" "$@"; fi
if [ "$engine" = docker ]; then set -- --pids-limit 4096 "$@"; fi  # podman has a limit by itself
case "$EVALFLEET_METER $*" in " "*|*" --network=host "*) ;; *)
  network=$([ "$engine" = docker ] && echo bridge || echo podman)
  for word; do case $word in --network=*) network=${word#--network=} ;; esac; done
  entry=$([ "$engine" = docker ] && echo .IPAM.Config || echo .Subnets)
  gateway=$("$engine" network inspect "$network" --format "{{(index $entry 0).Gateway}}" 2>/dev/null)
  if [ -z "$gateway" ]; then  # docker tells none of its own bridge until its daemon is started again
    gateway=$("$engine" network inspect "$network" --format "{{(index $entry 0).Subnet}}" 2>/dev/null |
      awk -F'[./]' 'NF == 5 { print $1 "." $2 "." $3 "." $4 + 1 }')
  fi
  if [ -z "$gateway" ]; then echo "its network $network has no way to the meter of model calls"; exit 126; fi
  for key in $(awk 'BEGIN { for (key in ENVIRON)
      if (index(ENVIRON[key], ENVIRON["EVALFLEET_METER"])) print key }'); do
    export "$key=$(awk -v key="$key" -v gateway="$gateway" \
      'BEGIN { value = ENVIRON[key]; sub(/127[.]0[.]0[.]1/, gateway, value); print value }')"
  done
  export NO_PROXY="$NO_PROXY,$gateway" no_proxy="$no_proxy,$gateway"
esac
for key in $(awk 'BEGIN { for (key in ENVIRON) print key }'); do
  case $key in
    PATH|HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|TMPDIR|LANG|LC_*|AWK*|_) ;;
    *) set -- -e "$key" "$@" ;;
  esac
done
for folder in "$PWD" "$EVALFLEET_OUT"; do set -- -v "$folder:$folder" "$@"; done
for folder in "$EVALFLEET_GRADED_OUT" "$EVALFLEET_GRADED_WORK"; do
  if [ -d "$folder" ]; then set -- -v "$folder:$folder:ro" "$@"; fi
done
bundles=$(for entry in * .[!.]*; do [ -L "$entry" ] && dirname "$(readlink "$entry")"; done | sort -u)
IFS='
'
for folder in $bundles; do set -- -v "$folder:$folder:ro" "$@"; done
unset IFS
"$engine" run --rm --name "$name" -w "$PWD" "$@" &
wait $!
code=$?
if [ $code -ge 125 ]; then gone; fi
if [ $code = 125 ]; then echo "the container of $EVALFLEET_JOB could not be started"; code=126; fi
exit $code
"""
"""Arguments: options of `run`, the image, the command."""


# A registry's token is written into a file for the pull alone: nothing of it is left when an attempt begins.
WITH_TOKEN = """\
umask 077
keys=$(mktemp -d) || exit 1
trap 'rm -rf "$keys"' EXIT
trap 'exit 143' HUP INT TERM
export DOCKER_CONFIG="$keys" REGISTRY_AUTH_FILE="$keys/config.json"
secret=$(awk -v name="$1" 'BEGIN { printf "%s", ENVIRON[name] }')
auth=$(printf %s "$2:$secret" | base64 | tr -d '\\n')
printf '{"auths": {"%s": {"auth": "%s"}}}' "$3" "$auth" >"$keys/config.json"
unset "$1" secret auth
token=$1
shift 3
"""
"""Arguments, before those of PULL: the variable with the token, the registry's user, the registry."""

IMAGE_STEP = "image"
DIGEST_MARK = "image-"


def image_step(
    settings: ContainerSettings,
    images: Sequence[str],
    token: str = "",
    user: str = "",
    program: str = "",
    hint: str = "log in to it there, with docker or podman",
) -> SetupStep:
    """The step of set-up that looks for an engine and has the images there.

    `token` is the variable that holds one for the first image's registry, if it asks for that. Each image
    must have `program`, which is asked for its version. `hint` says what to do if the registry asks for a
    login and there is no token.
    """
    words = ("evalfleet-image", settings.engine, settings.pull, program, *images)
    if not token:
        script = f"token= hint={shlex.quote(hint)}\n{PULL}"
        return SetupStep(IMAGE_STEP, Command(("sh", "-c", script, *words)))
    registry = images[0].partition("/")[0]
    argv = ("sh", "-c", WITH_TOKEN + PULL, words[0], token, user, registry, *words[1:])
    return SetupStep(IMAGE_STEP, Command(argv, secrets=(token,)))


def bundle_digest(steps: Sequence[SetupStep], digested: Callable[[Sequence[SetupStep]], str]) -> str:
    """The digest of a bundle with these steps, by `digested`.

    An image's step counts by its words alone: the script that fetches images is ours, and a run goes on with
    a version of evalfleet that has another one.
    """
    if not _has_image(steps):
        return digested(steps)
    return DIGEST_MARK + digested([_without_script(step) for step in steps])


def digests_script(planned: str, steps: Sequence[SetupStep]) -> bool:
    """Whether an earlier version, which digested the script, too, has planned this: nobody can say then
    whether the files are the same."""
    return _has_image(steps) and DIGEST_MARK not in planned


def _has_image(steps: Sequence[SetupStep]) -> bool:
    return any(step.name == IMAGE_STEP for step in steps)


def _without_script(step: SetupStep) -> SetupStep:
    if step.name != IMAGE_STEP:
        return step
    words = step.command.argv[3:]  # after `sh -c SCRIPT`
    return structs.replace(step, command=structs.replace(step.command, argv=words))


def in_container(command: Command, image: str, settings: ContainerSettings) -> Command:
    """The command that runs the command in a container of the image."""
    limits = {
        "--network": settings.network,
        "--cpus": f"{settings.cpus:g}" if settings.cpus else "",
        "--memory": f"{math.ceil(settings.memory_gb * 1024)}m" if settings.memory_gb else "",
        "--pids-limit": str(settings.pids) if settings.pids else "",
        "--gpus": "all" if settings.gpus < 0 else str(settings.gpus) if settings.gpus else "",
        "--user": settings.user,
    }
    options = [f"{option}={value}" for option, value in limits.items() if value]
    argv = ("sh", "-c", RUN, "evalfleet-container", *options, *settings.args, image, *command.argv)
    return Command(argv, command.env, command.secrets)


def check_container(settings: ContainerSettings, where: str) -> None:
    for key, low in (("cpus", 0), ("memory_gb", 0), ("pids", 0), ("gpus", -1)):
        value = getattr(settings, key)
        if not low <= value <= 1_000_000:  # False for nan, too
            raise RequestError(
                f"{where}: key 'container.{key}' is {value}; write a number from {low} to 1000000"
            )


def check_image(image: str, where: str) -> None:
    if image.startswith("-") or any(not sign.isprintable() or sign.isspace() for sign in image):
        raise RequestError(
            f"{where}: key 'image' is {image[:80]!r}; write a name such as \"docker.io/library/python:3.12\""
        )
