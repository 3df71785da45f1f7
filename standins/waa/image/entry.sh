#!/bin/bash
# The container's program: boots the guest, waits for it without end, then runs the client or stays.
cd /

echo "Starting WinArena..."
prepare_image=false start_client=true
passed=()
while [ $# -gt 0 ]; do
  case $1 in
    --prepare-image) prepare_image=$2; shift 2 ;;
    --start-client) start_client=$2; shift 2 ;;
    --agent | --model | --som-origin | --a11y-backend | --clean-results | --worker-id | --num-workers | \
      --result-dir | --json-name) passed+=("$1" "$2"); shift 2 ;;
    --help) echo "Usage: $0 [options]"; exit 0 ;;
    *) sleep 1 ;;  # no shift, as in the original: an unknown flag is looked at forever
  esac
done

echo "Starting VM..."
/run/entry.sh &
address=${GUEST_ADDRESS:-20.20.20.21}
until [ "$(curl --silent --output /dev/null --write-out '%{http_code}' "$address:5000/probe")" = 200 ]; do
  echo "Waiting for a response from the windows server. This might take a while..."
  sleep "${WAIT_S:-0.5}"
done
echo "VM started, server ready"

if [ "$prepare_image" = true ]; then
  echo "Preparing Arena image by gracefully shutting down the Windows VM..."
  curl --silent --output /dev/null -X POST "$address:5000/shutdown"
  sleep "${SHUTDOWN_S:-1}"
elif [ "$start_client" = true ]; then
  echo "Starting client..."
  /start_client.sh "${passed[@]}"
else
  echo "Keeping container alive"
  while :; do sleep 60; done
fi
wait -n
exit $?
