#!/bin/sh
# A session of a loopback host: at home in the host's directory, and marked, so that its processes can be found.
#   session.sh HOST-DIRECTORY MARK
HOME=$1
EVALFLEET_LAB_HOST=$2
export HOME EVALFLEET_LAB_HOST
cd "$HOME" || exit 1
if [ -n "${SSH_ORIGINAL_COMMAND-}" ]; then
  exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"
fi
exec /bin/sh -l
