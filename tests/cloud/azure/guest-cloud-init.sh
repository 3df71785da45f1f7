#!/bin/sh
# `cloud-init status [--wait]` of a virtual machine's host.
if [ "$1" != status ]; then
  echo "cloud-init: the stand-in knows status alone" >&2
  exit 2
fi
case " $* " in
  *" --wait "*) while [ ! -e /run/cloud-init/result.json ]; do sleep 0.05; done ;;
esac
if [ ! -e /run/cloud-init/result.json ]; then
  echo "status: running"
elif [ -s /run/cloud-init/errors ]; then
  echo "status: error"
  cat /run/cloud-init/errors
  exit 1
else
  echo "status: done"
fi
